"""`learn_filter` in the look-alike room, with nothing set by hand.

    python -m benchmarks.camera.defaults [seeds [variance ...]]

Trained on the first or the second half of `camera_lookalike`, forward or reversed in time, and
tested on the other half from the marginal of the training states, at each variance of the pixels
and each seed of the noise; cells that are not run keep their last results. Estimates are decoded by
`decode_rotation`. "without readout" is the mean error of the decoded beliefs. Half a turn is an
error of 2.83; a frame counts as half a turn wrong above 1.5, after the first 40 frames. "back in
time" is of the 20 wrong starts of `benchmarks.camera.recovery`.
"""

import itertools
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from . import video as camera
from .recovery import STARTS, recover, sightings

VARIANCES, SEEDS, CHUNK, FIRST, WRONG = (3e-4, 1e-3, 3e-3, 1e-2), 3, 100, 40, 1.5
SIDES = list(itertools.product(("first half", "second half"), ("forward", "reversed")))


def sides(data: camera.Camera, half: str, time: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rotations and frames to train on, and to test on."""
    parts = data.part(0, camera.SPLIT), data.part(camera.SPLIT, 2 * camera.SPLIT)
    rotations, frames = zip(*parts, strict=True)
    both = turned(list(rotations), half, time), turned(list(frames), half, time)
    return list(zip(*both, strict=True))


def turned(parts: list[Any], half: str, time: str) -> list[Any]:
    """What belongs to the training half and to the test half, in the order of time."""
    step = -1 if time == "reversed" else 1
    return [part[::step] for part in (parts[::-1] if half == "second half" else parts)]


def estimates(
    filt: kbr.filtering.AbstractFilter, frames: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates of a filter, and its decoded beliefs."""
    state, found = kbr.init_filter(filt), []
    for start in range(0, len(frames), CHUNK):
        run = kbr.run_filter(filt, jnp.asarray(frames[start : start + CHUNK]), state=state)
        state = run.state
        pair = kbr.state_mean(filt, run), kbr.decode_rotation(kbr.belief(filt, run))
        found.append([np.asarray(part) for part in pair])
    first, second = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return first, second


def repetition(half: str, time: str, variance: float, seed: int) -> dict[str, int | float | str]:
    data = camera.load("camera_lookalike", variance, seed, np.float64)
    data = data._replace(frames=data.frames.reshape(-1, 20, 20, 3))
    training, (truth, tests) = sides(data, half, time)
    filt, report = kbr.learn_filter(
        *map(jnp.asarray, training), decode=kbr.decode_rotation, progress=False
    )
    errors, plain = (camera.frobenius(found, truth) for found in estimates(filt, tests))
    clear = turned(np.split(sightings(), 2), half, time)[1]
    runs = [recover(filt, training[0], (truth, tests), start, clear) for start in STARTS]
    return {
        "seed": seed,
        "mean": float(errors.mean()),
        "median": float(np.median(errors)),
        "without readout": float(plain.mean()),
        "half a turn wrong": int(np.sum(errors[FIRST:] > WRONG)),
        "back in time": sum(run["in time"] for run in runs),
        "test": str(report.chosen["test of the belief"]),
    }


def main(count: int = SEEDS, *variances: float) -> None:
    warnings.simplefilter("ignore")
    results = experiment.previous("camera_defaults")
    for variance in variances or VARIANCES:
        for half, time in SIDES:
            rows = experiment.repeat(
                f"camera defaults {half} {time} {variance}",
                lambda s, h=half, t=time, v=variance: repetition(h, t, v, s),
                count,
            )
            results.setdefault(f"{half}, {time}", {})[str(variance)] = rows
            experiment.save("camera_defaults", results)
            print(half, time, variance, rows, flush=True)


if __name__ == "__main__":
    experiment.start(main)
