r"""Extrapolation on real drifts: digits that turn, shrink and move; patches of a window that pans
over photographs.

    python -m benchmarks.lampert.drift

Lampert's experiment 2 on data that scikit-learn bundles: the last of T sample sets is predicted
from those before, distances are RKHS distances to its embedding, under both histogram kernels.
Baselines: the last observed set, all observed sets together. A two-sided Wilcoxon signed-rank test
for each kind of drift, kernel and baseline, corrected for their number (Holm); wins and losses
alike.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.ndimage
import scipy.stats
from sklearn.datasets import load_digits, load_sample_images
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment

STEPS, SMALLEST, LARGEST, REPETITIONS, PATCHES = 9, 20, 60, 4, 60
KERNELS = {
    "histogram intersection": kbr.kernels.HistogramIntersection(),
    "RBF chi-squared": kbr.kernels.ChiSquared(1.0),
}
METHODS = ("EDD", "EDD, stacked", "last set", "all sets")


def normalized(histograms: np.ndarray) -> np.ndarray:
    """Non-negative features whose coordinates average to 1: both kernels are of order one."""
    return histograms / histograms.mean(axis=1, keepdims=True)


def moved(image: np.ndarray, kind: str, amount: float) -> np.ndarray:
    """One 8 x 8 digit on a 12 x 12 canvas, turned by degrees, shrunk by a factor, or moved by
    pixels.
    """
    canvas = np.pad(image, 2)
    if kind == "rotation":
        return scipy.ndimage.rotate(canvas, amount, reshape=False, order=1)
    center = np.full(2, 5.5)
    matrix = np.eye(2) * (1 / amount if kind == "zoom" else 1)
    offset = center - matrix @ center + (np.array([0.0, -amount]) if kind == "shift" else 0)
    return scipy.ndimage.affine_transform(canvas, matrix, tuple(offset), order=1)  # pyright: ignore[reportArgumentType]


AMOUNTS = {
    "rotation": lambda t: 10.0 * t,
    "zoom": lambda t: 1.15 - 0.06 * t,
    "shift": lambda t: 0.4 * (t - 4),
}


def digits(kind: str) -> list[list[np.ndarray]]:
    """For each digit, direction and repetition.

    Sets of different images of it at each step. Features: masses of cells 2 x 2.
    """
    images, labels = load_digits(return_X_y=True)
    sequences = []
    for digit in range(10):
        own = images[labels == digit].reshape(-1, 8, 8)
        for direction in (1, -1):
            for repetition in range(REPETITIONS):
                rng = np.random.default_rng([digit, direction == 1, repetition])
                sets = []
                for t in range(STEPS)[::direction]:
                    chosen = rng.choice(
                        len(own), rng.integers(SMALLEST, LARGEST + 1), replace=False
                    )
                    turned = np.stack([moved(own[i], kind, AMOUNTS[kind](t)) for i in chosen])
                    cells = turned.reshape(-1, 6, 2, 6, 2).sum((2, 4)).reshape(len(chosen), -1)
                    sets.append(normalized(np.maximum(cells, 0)))
                sequences.append(sets)
    return sequences


def photograph(index: int) -> list[list[np.ndarray]]:
    """A window of 120 x 120 pixels pans over a photograph.

    Features: color histograms of patches of 12 x 12, 4 bins a channel.
    """
    image = load_sample_images().images[index]
    bins = (image // 64).astype(int) @ np.array([16, 4, 1])
    height, width = bins.shape
    sequences = []
    for repetition in range(PATCHES):
        rng = np.random.default_rng([index, repetition])
        speed = rng.uniform(15, 36, 2) * rng.choice([-1, 1], 2)
        room = np.array([height, width]) - 120
        start = rng.uniform(
            np.maximum(0, -speed * (STEPS - 1)), np.minimum(room, room - speed * (STEPS - 1))
        )
        sets = []
        for t in range(STEPS):
            corner = start + t * speed
            places = (
                corner + rng.uniform(0, 108, (rng.integers(SMALLEST, LARGEST + 1), 2))
            ).astype(int)
            patches = [bins[a : a + 12, b : b + 12].reshape(-1) for a, b in places]
            sets.append(
                normalized(
                    np.stack([np.bincount(patch, minlength=64) for patch in patches]).astype(float)
                )
            )
        sequences.append(sets)
    return sequences


SOURCES = {
    "digits, rotation": lambda: digits("rotation"),
    "digits, zoom": lambda: digits("zoom"),
    "digits, shift": lambda: digits("shift"),
    "photograph 1": lambda: photograph(0),
    "photograph 2": lambda: photograph(1),
}


@jax.jit
def distances(kernel: kbr.kernels.AbstractKernel, points: jax.Array, mask: jax.Array) -> jax.Array:
    """RKHS distances of all methods to the last set, in the order of METHODS."""
    sets = kbr.dynamics.sample_sequence(points, mask=mask)
    gram = kbr.dynamics.embedding_gram(kernel, sets)
    observed = jax.tree.map(lambda leaf: leaf[:-1], sets)
    model = kbr.dynamics.fit_dynamics(kernel, observed)
    coefficients = [
        kbr.dynamics.forecast_coefficients(model)[0],
        kbr.dynamics.stacked_forecast(model).coefficients,
        jnp.zeros(STEPS - 1).at[-1].set(1),
        observed.sizes / jnp.sum(observed.sizes),
    ]
    residuals = jnp.stack([jnp.append(c, -1) for c in coefficients])
    return jnp.sqrt(jnp.maximum(jnp.sum(residuals @ gram * residuals, axis=1), 0))


def stacked(sets: list[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    padded = np.ones((len(sets), LARGEST, sets[0].shape[1]))
    mask = np.zeros((len(sets), LARGEST), bool)
    for t, points in enumerate(sets):
        padded[t, : len(points)], mask[t, : len(points)] = points, True
    return jnp.asarray(padded), jnp.asarray(mask)


def holm(p: list[float]) -> list[float]:
    """Holm's correction of p-values."""
    order = np.argsort(p)
    raised = np.maximum.accumulate(np.asarray(p)[order] * (len(p) - np.arange(len(p))))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(raised, 1)
    return corrected.tolist()


def main() -> None:
    results: dict[str, Any] = {}
    tests: list[tuple[dict[str, Any], float]] = []
    rank_test: Any = scipy.stats.wilcoxon
    for source, make in SOURCES.items():
        sequences = [stacked(sets) for sets in make()]
        for name, kernel in KERNELS.items():
            found = np.stack(
                [
                    distances(kernel, *sets)
                    for sets in tqdm(sequences, desc=f"{source}, {name}", leave=False)
                ]
            )
            count = np.sqrt(len(found))
            row: dict[str, Any] = {
                method: {"mean": float(values.mean()), "se": float(values.std(ddof=1) / count)}
                for method, values in zip(METHODS, found.T, strict=True)
            }
            row["sequences"] = len(found)
            results[f"{source}, {name}"] = row
            for method in (0, 1):
                for baseline in (2, 3):
                    difference = found[:, method] - found[:, baseline]
                    test = {"wins": float(np.mean(difference < 0))}
                    row[f"{METHODS[method]} against {METHODS[baseline]}"] = test
                    tests.append((test, float(rank_test(difference).pvalue)))
    for (test, _), corrected in zip(tests, holm([p for _, p in tests]), strict=True):
        test["p"] = corrected
    header = [
        "drift, kernel",
        *METHODS,
        "EDD: wins (p) against last",
        "stacked: wins (p) against last",
    ]
    rows = []
    for name, row in results.items():
        cells = [f"{row[method]['mean']:.3f} ± {row[method]['se']:.3f}" for method in METHODS]
        for method in METHODS[:2]:
            test = row[f"{method} against last set"]
            cells.append(f"{test['wins']:.0%} ({test['p']:.1g})")
        rows.append([name, *cells])
    print(experiment.table(header, rows))
    experiment.save("drift", results)


if __name__ == "__main__":
    experiment.start(main)
