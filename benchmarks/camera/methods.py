"""The methods of the camera tables.

Each takes training data, test frames and its parameters, and returns rotations.
"""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from . import video as camera

Estimator = Literal["pairs", "importance"]
RANK = 300
KALMAN = "Kalman filter, nine entries"
CHUNK = 100


class Track(NamedTuple):
    """Estimated rotations, milliseconds per frame, and for filters the belief weights and what they
    stand on.
    """

    estimates: np.ndarray
    milliseconds: float
    weights: np.ndarray | None = None
    support: np.ndarray | None = None


def run_filter(
    filt: kbr.filtering.AbstractFilter,
    frames: np.ndarray,
    prior=None,
    tick: Callable[[int], Any] | None = None,
) -> Track:
    """Filter the frames in chunks, timing each; the median chunk leaves the compilation out."""
    state, weights, times = kbr.init_filter(filt, prior), [], []
    for start in range(0, len(frames), CHUNK):
        begin = time.perf_counter()
        run = kbr.run_filter(filt, frames[start : start + CHUNK], state=state)
        state = run.state
        weights.append(np.asarray(jax.block_until_ready(run.weights)))
        times.append((time.perf_counter() - begin) / len(weights[-1]))
        if tick:
            tick(len(weights[-1]))
    stacked = np.concatenate(weights)
    beliefs = filt.embed(jnp.asarray(stacked))
    estimates = np.asarray(kbr.decode_rotation(beliefs))
    return Track(estimates, 1e3 * float(np.median(times)), stacked, np.asarray(beliefs.points))


def frame_kernel(frames: np.ndarray, scale: float) -> kbr.Gaussian:
    """Gaussian kernel on frames, bandwidth in medians of the distance between every third training
    frame.
    """
    return kbr.Gaussian(scale * kbr.median_heuristic(jnp.asarray(frames[::3])))


def kernel_bayes(
    rotations,
    frames,
    *,
    h,
    c,
    epsilon,
    delta,
    estimator: Estimator = "pairs",
    truncation=0.02,
    clip=True,
):
    """The kernel Bayes filter.

    `h` is the chordal bandwidth, None for the trace kernel, `c` that of frames in medians.
    """
    return kbr.fit_filter(
        kbr.Linear() if h is None else kbr.Gaussian(h),
        frame_kernel(frames, c),
        rotations,
        frames,
        regularizer=epsilon,
        posterior_regularizer=delta,
        landmarks_states=9 if h is None else RANK,
        landmarks_observations=RANK,
        estimator=estimator,
        clipping=kbr.Clipping(clip, truncation if clip else 0.0, clip),
        max_active=800 if clip else None,
    )


def approximate(rotations, frames, *, h, c, epsilon):
    """The filter of 2009."""
    return kbr.fit_conditional_embedding_filter(
        kbr.Gaussian(h),
        frame_kernel(frames, c),
        rotations,
        frames,
        regularizer=epsilon,
        landmarks_states=RANK,
        landmarks_observations=RANK,
    )


def ridge(rotations, frames, tests, *, c, epsilon, window=1) -> np.ndarray:
    """Kernel ridge regression of the nine entries on the last `window` frames (Gaussian kernel),
    projected onto SO(3).
    """
    train, query = camera.windows(frames, window), camera.windows(tests, window)
    model = kbr.fit_conditional(
        frame_kernel(train, c), kbr.Linear(), train, rotations, regularizer=epsilon, landmarks_y=9
    )
    return np.asarray(
        kbr.embedding.nearest_rotation(kbr.conditional_expectation(model, query, lambda r: r))
    )


FILTERS: dict[str, Callable[..., kbr.filtering.AbstractFilter]] = {
    "kernel Bayes filter (b), clipped, truncated": kernel_bayes,
    "importance-weighted, truncated": lambda r, f, **p: kernel_bayes(
        r, f, estimator="importance", **p
    ),
    "as in the papers, Gaussian kernel": lambda r, f, **p: kernel_bayes(r, f, clip=False, **p),
    "as in the papers, trace kernel": lambda r, f, **p: kernel_bayes(r, f, h=None, clip=False, **p),
    "2009 filter": approximate,
}

REGRESSIONS: dict[str, Callable[..., np.ndarray]] = {
    "ridge regression per frame": ridge,
    "ridge regression on a window": ridge,
}


def run(
    name: str, rotations, frames, tests, parameters: dict[str, Any], prior=None, tick=None
) -> Track:
    """One method by its name in the table."""
    if name in FILTERS:
        return run_filter(FILTERS[name](rotations, frames, **parameters), tests, prior, tick)
    start = time.perf_counter()
    if name in REGRESSIONS:
        estimates = REGRESSIONS[name](rotations, frames, tests, **parameters)
    elif name == KALMAN:
        estimates = camera.kalman(rotations, frames, tests, **parameters)
    else:
        estimates = camera.random_rotations(len(tests))
    if tick:
        tick(len(tests))
    return Track(estimates, 1e3 * (time.perf_counter() - start) / len(tests))


METHODS = [*FILTERS, KALMAN, *REGRESSIONS, "random guess"]
