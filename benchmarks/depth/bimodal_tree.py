r"""Beliefs on a tree of bimodal variables against exact sum-product on a fine grid, for growing
samples.

    python -m benchmarks.depth.bimodal_tree

Six hidden variables: $x_0 \sim \frac12 N(-1, .4^2) + \frac12 N(1, .4^2)$ and
$x_s \mid x_t \sim N(1.2 \sin(2 x_t), .5^2)$ along the edges (0, 1), (1, 2), (1, 3), (0, 4), (4, 5).
Nodes 2, 3 and 5 are seen through $y \sim N(|x|, .4^2)$: the sign must come from the neighbors.
Total variation between the estimated and the exact marginals, mean over hidden nodes and test
cases. Messages in feature form; bandwidths and regularizer follow the sample size by fixed rules.
"""

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # its threads wait for each other on busy machines

import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment

EDGES = [(0, 1), (1, 2), (1, 3), (0, 4), (4, 5)]
SEEN = [2, 3, 5]
GRID = np.linspace(-3.5, 3.5, 281)
SIZES = (100, 1_000, 10_000, 100_000)
CASES, REPETITIONS = 20, 3


def normal(x, mean, deviation):
    return np.exp(-((x - mean) ** 2) / (2 * deviation**2)) / (deviation * np.sqrt(2 * np.pi))


def draw(count: int, rng: np.random.Generator) -> np.ndarray:
    """Joint draws `[9, count]`.

    The six hidden variables, then the observations of nodes 2, 3 and 5.
    """
    x = np.zeros((9, count))
    x[0] = rng.choice([-1.0, 1.0], count) + 0.4 * rng.normal(size=count)
    for parent, child in EDGES:
        x[child] = 1.2 * np.sin(2 * x[parent]) + 0.5 * rng.normal(size=count)
    for place, node in enumerate(SEEN):
        x[6 + place] = np.abs(x[node]) + 0.4 * rng.normal(size=count)
    return x


def exact(observed: np.ndarray) -> np.ndarray:
    """Marginals on the grid `[6, grid]` given the three observations, by sum-product in both
    directions.
    """
    prior = 0.5 * normal(GRID, -1, 0.4) + 0.5 * normal(GRID, 1, 0.4)
    step = normal(GRID[None, :], 1.2 * np.sin(2 * GRID)[:, None], 0.5)
    local = [np.ones_like(GRID) for _ in range(6)]
    local[0] = prior
    for node, y in zip(SEEN, observed, strict=True):
        local[node] = normal(y, np.abs(GRID), 0.4)
    up = {}
    for parent, child in reversed(EDGES):
        below = np.prod([up[child, c] for p, c in EDGES if p == child], axis=0)
        up[parent, child] = step @ (local[child] * below)
    down = {0: np.ones_like(GRID)}
    for parent, child in EDGES:
        beside = np.prod([up[parent, c] for p, c in EDGES if p == parent and c != child], axis=0)
        down[child] = (local[parent] * down[parent] * beside) @ step
    below = [np.prod([up[s, c] for p, c in EDGES if p == s], axis=0) for s in range(6)]
    values = np.stack([local[s] * down[s] * below[s] for s in range(6)])
    return values / values.sum(1, keepdims=True)


def graph() -> kbr.propagation.PairwiseGraph:
    return kbr.propagation.pairwise_graph(
        [*EDGES, *((node, 6 + place) for place, node in enumerate(SEEN))], observed_nodes=[6, 7, 8]
    )


def beliefs(sample: jax.Array, observed: jax.Array, rank: int = 60) -> jax.Array:
    """Marginals on the grid `[cases, 6, grid]` learned from joint draws `[9, m]`."""
    width = sample.shape[1] ** -0.2
    kernels = [kbr.Gaussian(1.2 * width)] * 6 + [kbr.Gaussian(0.8 * width)] * 3
    centers = kbr.Landmarks(jnp.linspace(-3, 3, rank, dtype=sample.dtype))
    model = kbr.propagation.fit_belief_propagation(
        graph(),
        kernels,
        points=list(sample),
        regularizer=0.1 / sample.shape[1],
        landmarks=centers,
        landmarks_observed=centers,
    )
    grid = jnp.asarray(GRID, sample.dtype)

    def one(values):
        messages = kbr.propagation.belief_propagation(model, values)
        return kbr.propagation.beliefs(
            model, messages, grid, marginal=kbr.Gaussian(0.6 * width)
        ).probabilities

    return jax.lax.map(one, observed)


def variation(sample: np.ndarray, cases: np.ndarray) -> float:
    """Mean total variation over nodes and cases `[cases, 3]`."""
    estimated = np.asarray(jax.jit(beliefs)(jnp.asarray(sample), jnp.asarray(cases)))
    truth = np.stack([exact(case) for case in cases])
    return float(np.mean(0.5 * np.abs(estimated - truth).sum(-1)))


def main() -> None:
    results: dict = {}
    cases = draw(CASES, np.random.default_rng(99))[6:].T
    for size in tqdm(SIZES):
        start = time.perf_counter()
        values = [
            variation(draw(size, np.random.default_rng(seed)), cases) for seed in range(REPETITIONS)
        ]
        seconds = (time.perf_counter() - start) / REPETITIONS
        results[str(size)] = {"total variation": values, "seconds": seconds}
    rows = [
        [
            m,
            f"{np.mean(r['total variation']):.4f}",
            " ".join(f"{v:.4f}" for v in r["total variation"]),
            f"{r['seconds']:.1f}",
        ]
        for m, r in results.items()
    ]
    print(experiment.table(["m", "total variation", "each sample", "seconds"], rows))
    print(experiment.save("bimodal_tree", results))


if __name__ == "__main__":
    experiment.start(main)
