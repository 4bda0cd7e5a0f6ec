r"""Exact conditional embeddings at sample sizes whose Gram matrix does not fit: conjugate
gradients, with and without landmarks.

    python -m benchmarks.scale.conjugate_gradient [n]

Kernel ridge regression of a smooth function of 3 coordinates in noise, float64. The weights
$(K + n \lambda I)^{-1} k(X, x)$ of a batch of queries: against a Cholesky factor at a size where
that is possible, then at n = 100 000 by default, where K alone would take 80 GB.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment

DENSE, LARGE, QUERIES, DIMENSIONS = 4000, 100_000, 10, 3
BANDWIDTH, REGULARIZER, RANKS, LIMIT, TOLERANCE = 1.0, 1e-6, (0, 500), 400, 1e-6
#: At n = 100 000 an iteration is 10^10 values of the kernel: plain conjugate gradients only show
#: where they stand.
LARGE_LIMITS = {0: 4, 500: 60}


def data(n):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n + QUERIES, DIMENSIONS))
    truth = np.sin(2 * x[:, :1]) * np.cos(x[:, 1:2]) + x[:, 2:]
    y = truth + 0.3 * rng.normal(size=truth.shape)
    return jnp.asarray(x[:n]), jnp.asarray(y[:n]), jnp.asarray(x[n:]), truth[n:]


def solve(n: int, rank: int, limit: int) -> tuple[dict[str, Any], Any]:
    x, y, queries, truth = data(n)
    kernel = kbr.Gaussian(BANDWIDTH)
    settings = kbr.ConjugateGradient(
        rank=rank, max_iterations=limit, tolerance=TOLERANCE, throw=False
    )
    start = time.perf_counter()
    model = kbr.fit_conditional(kernel, kernel, x, y, regularizer=REGULARIZER, solver=settings)
    jax.block_until_ready(model)
    fitted = time.perf_counter()
    factor = model.factor
    assert isinstance(factor, kbr.features.ConjugateGradientFactor)
    weights, report = jax.block_until_ready(
        factor.diagnose(model.features_x.coordinates(queries).T)
    )
    done = time.perf_counter()
    estimate = np.asarray(weights.T @ y)
    return {
        "fit, seconds": fitted - start,
        "solve, seconds, compilation included": done - fitted,
        "iterations": int(report.iterations.max()),
        "relative residual": float(report.residual.max()),
        "mean squared error": float(np.mean((estimate - truth) ** 2)),
    }, np.asarray(weights.T)


def dense(n: int) -> tuple[dict[str, Any], Any]:
    x, y, queries, _ = data(n)
    kernel = kbr.Gaussian(BANDWIDTH)
    start = time.perf_counter()
    model = kbr.fit_conditional(kernel, kernel, x, y, regularizer=REGULARIZER)
    weights = jax.block_until_ready(kbr.condition(model, queries).weights)
    return {
        "fit and solve, seconds, compilation included": time.perf_counter() - start
    }, np.asarray(weights)


def main(large: int = LARGE) -> None:
    results: dict[str, Any] = {
        "settings": {"regularizer": REGULARIZER, "tolerance": TOLERANCE, "queries": QUERIES}
    }
    results[f"n = {DENSE}, Cholesky"], reference = dense(DENSE)
    for rank in RANKS:
        result, weights = solve(DENSE, rank, LIMIT)
        result["largest difference of weights, relative"] = float(
            np.abs(weights - reference).max() / np.abs(reference).max()
        )
        results[f"n = {DENSE}, rank {rank}"] = result
    for rank in reversed(RANKS):
        results[f"n = {large}, rank {rank}"], _ = solve(large, rank, LARGE_LIMITS[rank])
    for name, result in results.items():
        print(name, {key: float(f"{value:.3g}") for key, value in result.items()})
    print(experiment.save("conjugate_gradient", results))


if __name__ == "__main__":
    experiment.start(main)
