r"""Moments in the look-alike room: plain, and with soft cells, which can clip and truncate.

    python -m benchmarks.camera.moments

Parameters are those that `camera_selection` found on the training half for the weights forms at
noise variance 1e-3; the moments share features, bandwidths and regularizers with them. The training
half repeated with fresh noise makes it larger, to show what the step's cost depends on.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from ..models import moment_filter
from . import methods as camera_methods
from . import selection as camera_selection
from . import video as camera

NAME, VARIANCE, SEEDS, CENTRES, ACTIVE, COPIES = "camera_lookalike", 1e-3, (0,), (100, 200), 64, 4
CLIPPED, PAPERS = "kernel Bayes filter (b), clipped, truncated", "as in the papers, Gaussian kernel"


def moments(rotations, frames, *, h, c, epsilon, delta, centers=None, copies=1, seed=0):
    """The moment form of `camera_methods.kernel_bayes`, on `copies` of the training half with noise
    of their own.
    """
    kernel, kernel_frames = kbr.Gaussian(h), camera_methods.frame_kernel(frames, c)
    states, successors, seen = rotations[:-1], rotations[1:], frames[:-1]
    landmarks = kbr.greedy_landmarks(kernel, states, rank=camera_methods.RANK)
    cells = (
        None
        if centers is None
        else kbr.soft_partition(kernel, kbr.greedy_landmarks(kernel, states, rank=centers))
    )
    maps = kbr.moments.moment_maps(
        kernel,
        kernel_frames,
        landmarks,
        kbr.greedy_landmarks(kernel_frames, seen, rank=camera_methods.RANK),
        cells=cells,
        embedding=False,
        shift=True,
    )
    chunks = (
        (states, camera.load(NAME, VARIANCE, seed + 100 * i).frames[: len(states)], successors)
        for i in range(1, copies)
    )
    clips = centers is not None
    return moment_filter(
        maps,
        [(states, seen, successors), *chunks],
        epsilon=epsilon,
        delta=delta,
        clipping=kbr.Clipping(clips, 0.02 if clips else 0.0, clips),
        max_active=min(ACTIVE, centers) if clips else None,
    )


def track(filt: kbr.KernelBayesFilter, frames: np.ndarray) -> tuple[np.ndarray, float]:
    """Rotations, and milliseconds per frame (median over chunks)."""
    state, means, times = kbr.init_filter(filt), [], []
    expectation = jax.jit(lambda f, r: f.mean(r))
    for start in range(0, len(frames), camera_methods.CHUNK):
        begin = time.perf_counter()
        run = kbr.run_filter(filt, frames[start : start + camera_methods.CHUNK], state=state)
        state = run.state
        means.append(np.asarray(expectation(filt, run.weights)))
        times.append((time.perf_counter() - begin) / len(means[-1]))
    matrices = jnp.asarray(np.concatenate(means).reshape(-1, 3, 3))
    return np.asarray(kbr.embedding.nearest_rotation(matrices)), 1e3 * float(np.median(times))


def main() -> None:
    chosen = camera_selection.selected(NAME, VARIANCE)
    clipped, papers = chosen[CLIPPED], chosen[PAPERS]
    methods = {
        "weights, clipped and truncated": lambda r, f, s: camera_methods.kernel_bayes(
            r, f, **clipped
        ),
        **{
            f"moments, {k} soft cells": lambda r, f, s, k=k: moments(
                r, f, **clipped, centers=k, seed=s
            )
            for k in CENTRES
        },
        f"moments, {CENTRES[1]} soft cells, {COPIES} times the sample": lambda r, f, s: moments(
            r, f, **clipped, centers=CENTRES[1], copies=COPIES, seed=s
        ),
        "weights, as in the papers": lambda r, f, s: camera_methods.kernel_bayes(
            r, f, **papers, clip=False
        ),
        "moments, plain": lambda r, f, s: moments(r, f, **papers, seed=s),
    }
    results = {}
    with tqdm(total=len(methods) * len(SEEDS)) as bar:
        for name, make in methods.items():
            errors, times = [], []
            for seed in SEEDS:
                data = camera.load(NAME, VARIANCE, seed)
                filt = make(*data.part(0, camera.SPLIT), seed)
                rotations, frames = data.part(camera.SPLIT, len(data.frames))
                if isinstance(filt.emission, kbr.moments.MomentModel):
                    estimates, milliseconds = track(filt, frames)
                else:
                    estimates, milliseconds = camera_methods.run_filter(filt, frames)[:2]
                errors.append(float(camera.frobenius(estimates, rotations).mean()))
                times.append(milliseconds)
                bar.update()
            results[name] = {
                "mean error": float(np.mean(errors)),
                "per seed": errors,
                "ms per frame": min(times),
            }
    rows = [[n, f"{r['mean error']:.4f}", f"{r['ms per frame']:.1f}"] for n, r in results.items()]
    print(
        experiment.table(
            ["look-alike room, noise variance 1e-3", "mean error", "ms per frame"], rows
        )
    )
    print(experiment.save("moments_camera", results))


if __name__ == "__main__":
    experiment.start(main, double=False)
