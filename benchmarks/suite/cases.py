"""What the suite times: a call of ours, and the same (or a simple one of that size) in NumPy.

A case is a function that prepares both, and returns them as calls without arguments. Sizes are
small, so that the suite takes two minutes on two cores.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

import kbr_jax as kbr

from ..models import moment_filter
from ..rotation.references import simulate
from ..scale.filter_speed import (
    DELTA,
    EPSILON,
    OBSERVATION_BANDWIDTH,
    STATE_BANDWIDTH,
    fit,
    scipy_filter,
)

Calls = tuple[Callable[[], Any], Callable[[], Any]]
RNG = np.random.default_rng(0)


def numpy_gram(x: np.ndarray, y: np.ndarray, bandwidth: float) -> np.ndarray:
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    return np.exp(-np.maximum(squares, 0) / (2 * bandwidth**2))


def gram() -> Calls:
    x = RNG.normal(size=(2000, 10))
    kernel, points, run = kbr.Gaussian(3.0), jnp.asarray(x), jax.jit(kbr.gram)
    return lambda: run(kernel, points), lambda: numpy_gram(x, x, 3.0)


def product() -> Calls:
    x, v = RNG.normal(size=(4000, 10)), RNG.normal(size=(4000, 1))
    kernel, points, vector = kbr.Gaussian(3.0), jnp.asarray(x), jnp.asarray(v)
    run = jax.jit(kbr.kernels.gram_matvec)

    def yardstick():
        return np.concatenate([numpy_gram(x[i : i + 500], x, 3.0) @ v for i in range(0, 4000, 500)])

    return lambda: run(kernel, points, points, vector), yardstick


def landmarks() -> Calls:
    x = RNG.normal(size=(4000, 10))
    kernel, points = kbr.Gaussian(3.0), jnp.asarray(x)
    run = jax.jit(lambda k, p: kbr.greedy_landmarks(k, p, rank=100).points)

    def yardstick():
        factor, residual, norms = np.zeros((100, 4000)), np.ones(4000), (x**2).sum(1)
        for row in range(100):
            pivot = int(np.argmax(residual))
            squares = np.maximum(norms + norms[pivot] - 2 * x @ x[pivot], 0)
            column = np.exp(-squares / 18.0) - factor[:row, pivot] @ factor[:row]
            factor[row] = column / np.sqrt(residual[pivot])
            residual = np.maximum(residual - factor[row] ** 2, 0)
        return factor

    return lambda: run(kernel, points), yardstick


def _pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.normal(size=(n, 3))
    return x, np.sin(x[:, :1]) + 0.1 * RNG.normal(size=(n, 1))


def _ridge(x: np.ndarray) -> Any:
    return scipy.linalg.cho_factor(numpy_gram(x, x, 1.0) + len(x) * 1e-3 * np.eye(len(x)))


def fit_exact() -> Calls:
    x, y = _pairs(800)
    a, b, kernel = jnp.asarray(x), jnp.asarray(y), kbr.Gaussian(1.0)
    run = jax.jit(lambda k, a, b: kbr.fit_conditional(k, k, a, b, regularizer=1e-3))
    return lambda: run(kernel, a, b), lambda: (_ridge(x), numpy_gram(y, y, 1.0))


def fit_rank() -> Calls:
    x, y = _pairs(4000)
    a, b, kernel = jnp.asarray(x), jnp.asarray(y), kbr.Gaussian(1.0)
    pivots = x[:100], y[:100]
    given = [kbr.Landmarks(jnp.asarray(p)) for p in pivots]

    def ours(k, a, b):
        return kbr.fit_conditional(
            k, k, a, b, regularizer=1e-3, landmarks_x=given[0], landmarks_y=given[1]
        )

    def features(points, pivot):
        lower = np.linalg.cholesky(numpy_gram(pivot, pivot, 1.0) + 1e-9 * np.eye(100))
        return scipy.linalg.solve_triangular(lower, numpy_gram(pivot, points, 1.0), lower=True)

    def yardstick():
        phi, psi = features(x, pivots[0]), features(y, pivots[1])
        return scipy.linalg.cho_factor(phi @ phi.T + 4.0 * np.eye(100)), psi

    run = jax.jit(ours)
    return lambda: run(kernel, a, b), yardstick


def leave_out_gradient() -> Calls:
    """The yardstick is the value alone."""
    x, y = _pairs(500)
    a, b = jnp.asarray(x), jnp.asarray(y)

    def loss(h):
        model = kbr.fit_conditional(kbr.Gaussian(h), kbr.Linear(), a, b, regularizer=1e-3)
        return kbr.leave_out_loss(model, kernel=model.kernel_y)

    def yardstick():
        inverse = np.linalg.inv(numpy_gram(x, x, 1.0) + 500 * 1e-3 * np.eye(500))
        return np.mean((inverse @ y / np.diag(inverse)[:, None]) ** 2)

    run = jax.jit(jax.grad(loss))
    return lambda: run(1.0), yardstick


def _filtering(rank: int | None, steps: int, batch: int = 0) -> Calls:
    """The yardstick is the dense filter in SciPy on 300 pairs and ten steps."""
    states, observations = simulate("b", 301 if rank is None else 1001, np.random.default_rng(0))
    few, seen = simulate("b", 301, np.random.default_rng(0))
    tests = simulate("b", steps, np.random.default_rng(1))[1]
    filt = fit(states, observations, rank)

    def means(filt, o):
        return kbr.state_mean(filt, kbr.run_filter(filt, o))

    queries = jnp.asarray(tests)
    if batch:
        means, queries = jax.vmap(means, in_axes=(None, 0)), jnp.stack([queries] * batch)
    run = jax.jit(means)
    return lambda: run(filt, queries), lambda: scipy_filter(few, seen, tests[:10])


def filter_exact() -> Calls:
    return _filtering(None, 10)


def filter_rank() -> Calls:
    return _filtering(100, 200)


def filter_batch() -> Calls:
    return _filtering(100, 20, batch=16)


def filter_moments() -> Calls:
    states, observations = simulate("b", 1001, np.random.default_rng(0))
    few, seen = simulate("b", 301, np.random.default_rng(0))
    tests = simulate("b", 200, np.random.default_rng(1))[1]
    kernels = kbr.Gaussian(STATE_BANDWIDTH), kbr.Gaussian(OBSERVATION_BANDWIDTH)
    of_states, of_observations = (
        kbr.greedy_landmarks(k, jnp.asarray(p[:1000]), rank=100)
        for k, p in zip(kernels, (states, observations), strict=True)
    )
    maps = kbr.moments.moment_maps(*kernels, of_states, of_observations, shift=True)
    triple = tuple(map(jnp.asarray, (states[:-1], observations[:1000], states[1:])))
    filt = moment_filter(maps, [triple], epsilon=EPSILON, delta=DELTA)
    run, queries = jax.jit(lambda f, o: kbr.run_filter(f, o).predictive_value), jnp.asarray(tests)
    return lambda: run(filt, queries), lambda: scipy_filter(few, seen, tests[:10])


def herding() -> Calls:
    x = RNG.normal(size=(2000, 3))
    kernel, points = kbr.Gaussian(1.0), jnp.asarray(x)
    run = jax.jit(lambda k, p: kbr.herd(kbr.embed(k, p), num_points=100).embedding.points)

    def yardstick():
        matrix = numpy_gram(x, x, 1.0)
        mean, total = matrix.mean(1), np.zeros(2000)
        for count in range(100):
            total += matrix[np.argmax(mean - total / (count + 1))]
        return total

    return lambda: run(kernel, points), yardstick


def permutations() -> Calls:
    x, y = RNG.normal(size=(2, 200, 3))
    kernel, key = kbr.Gaussian(1.5), jax.random.key(0)
    a, b = jnp.asarray(x), jnp.asarray(y)
    run = jax.jit(
        lambda k, a, b: kbr.hypotheses.two_sample_test(k, a, b, key=key, num_permutations=200)
    )

    def yardstick():
        both = np.concatenate([x, y])
        matrix = numpy_gram(both, both, 1.5) - np.eye(400)
        found = []
        for _ in range(200):
            sign = np.where(RNG.permutation(400) < 200, 1.0, -1.0)
            found.append(sign @ matrix @ sign)
        return found

    return lambda: run(kernel, a, b).p_value, yardstick


def propagation() -> Calls:
    """Ten sweeps on 10 x 10; the yardstick sends as many messages of 24 numbers one by one."""
    rows, n, nodes = 10, 60, 100
    graph = kbr.propagation.grid_graph(rows, rows)
    depth = RNG.uniform(size=(2 * rows, n))
    near = [(d, d + 0.05 * RNG.normal(size=n)) for d in (*depth[:rows], *depth[1:rows])]
    leaves = [(d, d[:, None] + 0.1 * RNG.normal(size=(n, 1))) for d in depth[rows:]]
    model = kbr.propagation.fit_belief_propagation(
        graph,
        [kbr.Gaussian(0.2)] * rows + [kbr.Gaussian(0.5)] * rows,
        pairs=[tuple(map(jnp.asarray, pair)) for pair in (*near, *leaves)],
        regularizer=1e-3,
        landmarks=30,
        pivots=24,
    )
    seen, edge = jnp.asarray(RNG.uniform(size=(nodes, 1))), RNG.normal(size=(24, 24))
    messages = RNG.uniform(size=(4 * nodes, 24))
    run = jax.jit(
        lambda model, seen: (
            kbr.propagation.belief_propagation(model, seen, schedule="loopy", num_sweeps=10).values
        )
    )

    def yardstick():
        out = messages
        for _ in range(10):
            out = np.stack([edge @ (out[m] * out[m - 1] * out[m - 2]) for m in range(4 * nodes)])
            out = out / np.abs(out).max(axis=1, keepdims=True)
        return out

    return lambda: run(model, seen), yardstick


CASES: dict[str, Callable[[], Calls]] = {
    "Gram matrix, n = 2000": gram,
    "product with a Gram matrix, n = 4000": product,
    "100 landmarks of 4000": landmarks,
    "fit, exact, n = 800": fit_exact,
    "fit, rank 100, n = 4000": fit_rank,
    "gradient of leave-one-out, n = 500": leave_out_gradient,
    "filter, exact, n = 300, 10 steps": filter_exact,
    "filter, rank 100, n = 1000, 200 steps": filter_rank,
    "filter, rank 100, batch of 16, 20 steps": filter_batch,
    "filter, moments, rank 100, 200 steps": filter_moments,
    "herding, 100 of 2000": herding,
    "200 permutations, n = 200": permutations,
    "belief propagation, 10 x 10, 10 sweeps": propagation,
}
