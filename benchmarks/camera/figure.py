"""The figure of the demo: frames, the belief over time, and the error."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from . import video as camera
from .methods import Track

SHOWN = 600
BINS = 120


def yaw(rotations: np.ndarray) -> np.ndarray:
    """Direction of view in the plane, degrees in (-180, 180]."""
    return np.degrees(np.arctan2(rotations[:, 0, 2], rotations[:, 2, 2]))


def belief_over_yaw(track: Track, shown: int) -> np.ndarray:
    """Share of the (clipped) belief in each direction bin, `[BINS, time]`."""
    assert track.weights is not None and track.support is not None
    index = np.clip(((yaw(track.support) + 180) / 360 * BINS).astype(int), 0, BINS - 1)
    weights = np.maximum(track.weights[:shown], 0)
    shares = np.stack(
        [np.bincount(index, row, BINS) for row in weights / weights.sum(1, keepdims=True)], axis=1
    )
    return shares


def draw(data: camera.Camera, filtered: Track, ridge: Track, path: pathlib.Path) -> None:
    """Write the figure."""
    truth, frames = data.part(camera.SPLIT, camera.SPLIT + SHOWN)
    figure = plt.figure(figsize=(9, 6.6), layout="constrained")
    grid = figure.add_gridspec(3, 8, height_ratios=[1.05, 2.6, 1.5])
    for k, moment in enumerate(np.linspace(0, SHOWN - 1, 8).astype(int)):
        axis = figure.add_subplot(grid[0, k])
        axis.imshow(np.clip(frames[moment].reshape(20, 20, 3), 0, 1))
        axis.set_title(f"frame {moment}", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])

    time = np.arange(SHOWN)
    axis = figure.add_subplot(grid[1, :])
    axis.imshow(
        np.sqrt(belief_over_yaw(filtered, SHOWN)),
        aspect="auto",
        origin="lower",
        cmap="Blues",
        extent=(0, SHOWN, -180, 180),
    )
    axis.plot(
        time,
        yaw(ridge.estimates[:SHOWN]),
        ".",
        ms=2.5,
        color="#d1772e",
        label="ridge regression per frame",
    )
    axis.plot(time, yaw(truth), ".", ms=3.5, color="black", label="truth")
    axis.plot(
        time[::6],
        yaw(filtered.estimates[:SHOWN])[::6],
        "o",
        ms=4.5,
        mfc="none",
        mec="#c4123f",
        label="kernel Bayes filter",
    )
    axis.set(ylabel="direction of view (degrees)", yticks=[-180, -90, 0, 90, 180], xlim=(0, SHOWN))
    axis.set_title("belief of the filter in blue", fontsize=10, loc="left")
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=3,
        fontsize=9,
        frameon=False,
        markerscale=1.5,
    )

    axis = figure.add_subplot(grid[2, :])
    axis.semilogy(
        time,
        camera.frobenius(ridge.estimates[:SHOWN], truth),
        color="#d1772e",
        lw=1,
        label="ridge regression per frame",
    )
    axis.semilogy(
        time,
        camera.frobenius(filtered.estimates[:SHOWN], truth),
        color="#c4123f",
        lw=1.2,
        label="kernel Bayes filter",
    )
    axis.axhline(2 * np.sqrt(2), color="gray", lw=0.8, ls=":")
    axis.text(4, 2.95, "half a turn", fontsize=8, color="gray", va="bottom")
    axis.set(
        xlabel="frame of the test half", ylabel="error (Frobenius)", xlim=(0, SHOWN), ylim=(8e-3, 6)
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
