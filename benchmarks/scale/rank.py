r"""Accuracy and time of a filter step against rank and choice of features: one figure.

    python -m benchmarks.scale.rank

The kernel Bayes filter (b), clipped and truncated, with the same rank for states and observations:
on the rotation dynamics (b) (T = 800, 16 test sequences of 200 steps, mean squared error) and in
the look-alike room (noise variance 1e-3, parameters of `camera_selection`, mean Frobenius error on
the test half). Choices that draw use one key.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from ..camera import methods as camera_methods
from ..camera import selection as camera_selection
from ..camera import video as camera
from ..rotation.references import simulate
from .filter_speed import DELTA, EPSILON, OBSERVATION_BANDWIDTH, STATE_BANDWIDTH, TRUNCATION

RANKS = {"rotation dynamics": (10, 20, 40, 80, 160), "look-alike room": (50, 100, 200, 300)}
LENGTH, STEPS, SEQUENCES = 800, 200, 16
CLIPPED = "kernel Bayes filter (b), clipped, truncated"


def choices(kernel, points, rank: int) -> dict:
    """Ways to choose features of a sample, by name."""
    key = jax.random.key(0)
    ways: dict[str, Callable[[], Any]] = {
        "greedy": lambda: kbr.greedy_landmarks(kernel, points, rank=rank),
        "random by residual": lambda: kbr.rpcholesky_landmarks(kernel, points, rank=rank, key=key),
        "k-means++": lambda: kbr.kmeanspp_landmarks(None, points, rank=rank, key=key),
        "uniform": lambda: kbr.uniform_landmarks(points, rank=rank, key=key),
    }
    if isinstance(kernel, kbr.Gaussian) and points.shape[1] < 10:
        ways["random Fourier"] = lambda: kbr.random_fourier(
            kernel, points, rank=rank, key=key, orthogonal=True
        )
    return ways


def rotation(rank: int, choice: str) -> tuple[float, float]:
    """Mean squared error, and milliseconds per step of one sequence."""
    states, observations = map(jnp.asarray, simulate("b", LENGTH, np.random.default_rng(0)))
    tests = [simulate("b", STEPS, np.random.default_rng(1 + b)) for b in range(SEQUENCES)]
    truth, seen = np.stack([t[0] for t in tests]), jnp.asarray(np.stack([t[1] for t in tests]))
    kernels = kbr.Gaussian(STATE_BANDWIDTH), kbr.Gaussian(OBSERVATION_BANDWIDTH)
    features = [
        choices(k, x[:-1], rank)[choice]()
        for k, x in zip(kernels, (states, observations), strict=True)
    ]
    filt = kbr.fit_filter(
        *kernels,
        states,
        observations,
        regularizer=EPSILON,
        posterior_regularizer=DELTA,
        clipping=kbr.Clipping(truncation=TRUNCATION),
        landmarks_states=features[0],
        landmarks_observations=features[1],
    )
    run = jax.jit(lambda f, o: kbr.state_mean(f, kbr.run_filter(f, o)))
    estimates = np.asarray(jax.jit(jax.vmap(functools.partial(run, filt)))(seen))
    error = float(np.mean(np.sum((estimates - truth) ** 2, -1)))
    return error, experiment.milliseconds(lambda: run(filt, seen[0])) / STEPS


def room(rank: int, choice: str) -> tuple[float, float]:
    """Mean Frobenius error on the test half, and milliseconds per frame."""
    data = camera.load("camera_lookalike", 1e-3)
    rotations, frames = data.part(0, camera.SPLIT)
    p = camera_selection.selected("camera_lookalike", 1e-3)[CLIPPED]
    kernels = kbr.Gaussian(p["h"]), camera_methods.frame_kernel(frames, p["c"])
    samples = jnp.asarray(rotations[:-1]), jnp.asarray(frames[:-1])
    features = [choices(k, x, rank)[choice]() for k, x in zip(kernels, samples, strict=True)]
    filt = kbr.fit_filter(
        *kernels,
        rotations,
        frames,
        regularizer=p["epsilon"],
        posterior_regularizer=p["delta"],
        landmarks_states=features[0],
        landmarks_observations=features[1],
        max_active=800,
    )
    truth, tests = data.part(camera.SPLIT, len(data.frames))
    track = camera_methods.run_filter(filt, tests)
    return float(camera.frobenius(track.estimates, truth).mean()), track.milliseconds


def draw(results: dict) -> None:
    """Error against time, a line for each choice, a point for each rank.

    Errors above twice the least are left out.
    """
    figure, axes = plt.subplots(1, len(results), figsize=(11, 4.2), constrained_layout=True)
    for axis, (name, lines) in zip(axes, results.items(), strict=True):
        for choice, points in lines.items():
            times, errors = ([p[key] for p in points.values()] for key in ("ms", "error"))
            axis.plot(times, errors, "o-", label=choice, markersize=4)
            if choice == "greedy":
                for rank, time, error in zip(points, times, errors, strict=True):
                    axis.annotate(
                        rank, (time, error), textcoords="offset points", xytext=(5, 5), fontsize=8
                    )
        best = min(p["error"] for points in lines.values() for p in points.values())
        axis.set(
            xscale="log", title=name, xlabel="milliseconds per step", ylim=(0.9 * best, 2.1 * best)
        )
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean squared error")
    axes[1].set_ylabel("mean Frobenius error")
    axes[0].legend(frameon=False, title="features (rank at the points)")
    figure.savefig(experiment.FIGURES / "rank.png", dpi=150)


def main() -> None:
    runs = {"rotation dynamics": rotation, "look-alike room": room}
    names = {
        "rotation dynamics": list(choices(kbr.Gaussian(1.0), jnp.zeros((2, 2)), 2)),
        "look-alike room": ["greedy", "random by residual", "k-means++", "uniform"],
    }
    results: dict = {}
    with tqdm(total=sum(len(names[n]) * len(RANKS[n]) for n in runs)) as bar:
        for name, run in runs.items():
            results[name] = {}
            for choice in names[name]:
                results[name][choice] = {}
                for rank in RANKS[name]:
                    error, milliseconds = run(rank, choice)
                    results[name][choice][str(rank)] = {"error": error, "ms": milliseconds}
                    bar.update()
    draw(results)
    print(experiment.save("rank", results))


if __name__ == "__main__":
    experiment.start(main)
