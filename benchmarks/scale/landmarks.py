r"""Time to choose 500 landmarks of 10^5 points, and the trace of what their Nystroem approximation
leaves, in one run.

    python -m benchmarks.scale.landmarks

The peer is greedy pivoted Cholesky as one writes it in NumPy: the largest residual is the next
pivot, and its column costs a product with the whole factor. Where scikit-learn is installed, its
`Nystroem` (uniform landmarks and their eigenvectors; features of the sample not included in the
time) is there for reference.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr
from kbr_jax.features import landmark_features

from .. import experiment

POINTS, DIMENSION, RANK, BANDWIDTH, CHUNK, REPEATS = 100_000, 10, 500, 3.0, 10_000, 1


def numpy_greedy(x: np.ndarray) -> np.ndarray:
    """The unblocked peer; returns the pivots."""
    factor, residual, pivots = np.zeros((RANK, len(x))), np.ones(len(x)), []
    norms = (x**2).sum(1)
    for row in range(RANK):
        pivot = int(np.argmax(residual))
        squares = np.maximum(norms + norms[pivot] - 2 * x @ x[pivot], 0)
        column = np.exp(-squares / (2 * BANDWIDTH**2)) - factor[:row, pivot] @ factor[:row]
        factor[row] = column / np.sqrt(residual[pivot])
        residual = np.maximum(residual - factor[row] ** 2, 0)
        pivots.append(pivot)
    return np.asarray(pivots)


def sklearn_nystroem(x: np.ndarray):
    """A function that fits scikit-learn's `Nystroem`, or None where that is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        return None
    from sklearn.kernel_approximation import Nystroem

    return lambda: Nystroem(gamma=1 / (2 * BANDWIDTH**2), n_components=RANK, random_state=0).fit(x)


def methods(x: np.ndarray) -> dict:
    """Ways to choose landmarks, by name."""
    kernel, points, key = kbr.Gaussian(BANDWIDTH), jnp.asarray(x), jax.random.key(0)
    return {
        "NumPy, greedy": lambda: kbr.Landmarks(points[numpy_greedy(x)]),
        "kbr_jax, greedy": lambda: kbr.greedy_landmarks(kernel, points, rank=RANK, block_size=1),
        "kbr_jax, greedy in blocks": lambda: kbr.greedy_landmarks(kernel, points, rank=RANK),
        "kbr_jax, random by rejection": lambda: kbr.rpcholesky_landmarks(
            kernel, points, rank=RANK, key=key
        ),
        "kbr_jax, k-means++": lambda: kbr.kmeanspp_landmarks(None, points, rank=RANK, key=key),
        "kbr_jax, stream": lambda: kbr.features.streaming_landmarks(
            kernel,
            (points[start : start + CHUNK] for start in range(0, POINTS, CHUNK)),
            rank=RANK,
            key=key,
        ),
        "kbr_jax, uniform": lambda: kbr.uniform_landmarks(points, rank=RANK, key=key),
    }


def main() -> None:
    x = np.random.default_rng(0).normal(size=(POINTS, DIMENSION))

    @jax.jit
    def trace(landmarks):
        return POINTS - jnp.sum(
            landmark_features(kbr.Gaussian(BANDWIDTH), jnp.asarray(x), landmarks).matrix ** 2
        )

    milliseconds, traces = {}, {}
    for name, choose in methods(x).items():
        milliseconds[name] = experiment.milliseconds(choose, REPEATS)
        traces[name] = float(trace(choose())) / POINTS
    nystroem = sklearn_nystroem(x)
    if nystroem is not None:
        name = "scikit-learn, Nystroem (fit)"
        milliseconds[name] = experiment.milliseconds(nystroem, REPEATS)
        traces[name] = float(trace(kbr.Landmarks(jnp.asarray(nystroem().components_)))) / POINTS

    peers = ("NumPy, greedy", "kbr_jax, greedy")
    ratios = {
        peer: {name: milliseconds[peer] / value for name, value in milliseconds.items()}
        for peer in peers
    }
    rows = [
        [
            name,
            f"{value:.0f}",
            *(f"{ratios[peer][name]:.1f}" for peer in peers),
            f"{traces[name]:.4f}",
        ]
        for name, value in milliseconds.items()
    ]
    header = [
        f"{RANK} of {POINTS} points, float64",
        "ms",
        *(f"times faster than {peer}" for peer in peers),
    ]
    print(experiment.table([*header, "residual trace / n"], rows))
    results = {
        "points": POINTS,
        "dimension": DIMENSION,
        "rank": RANK,
        "bandwidth": BANDWIDTH,
        "milliseconds": milliseconds,
        "times faster than": ratios,
        "residual trace over n": traces,
    }
    print(experiment.save("landmark_selection", results))


if __name__ == "__main__":
    experiment.start(main)
