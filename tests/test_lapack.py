"""Factorizations and solves: against NumPy, differentiated, in batches, and never waiting."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cores import all_cores
from helpers import check_gradient, closeness

from kbr_jax import _lapack as lapack
from kbr_jax._solves import psd_factor, symmetric_resolvent, weighted_moment

ROOT = pathlib.Path(__file__).parents[1]
N = 6
RNG = np.random.default_rng(0)
close = closeness(1e-9, 1e-9)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape))


def positive(*batch):
    a = normal(*batch, N, N)
    return a @ jnp.swapaxes(a, -1, -2) + jnp.eye(N)


def projector(a):
    """What the signs of eigenvectors do not change."""
    values, vectors = lapack.eigh(a)
    return values[:2], vectors[:, :2] @ vectors[:, :2].T


def numpy_projector(a):
    values, vectors = np.linalg.eigh(np.asarray(a))
    return values[:2], vectors[:, :2] @ vectors[:, :2].T


def singular(a):
    left, values, right = lapack.svd(a)
    return values, left * values @ right


def lower_part(a):
    return jnp.tril(a) + 3 * jnp.eye(N)


CASES = {
    "cholesky": (lapack.cholesky, np.linalg.cholesky, False),
    "forward": (
        lambda a, b: lapack.triangular_solve(lower_part(a), b),
        lambda a, b: np.linalg.solve(np.tril(a) + 3 * np.eye(N), b),
        True,
    ),
    "backward": (
        lambda a, b: lapack.triangular_solve(lower_part(a), b, transpose=True),
        lambda a, b: np.linalg.solve((np.tril(a) + 3 * np.eye(N)).T, b),
        True,
    ),
    "solve": (lapack.solve, np.linalg.solve, True),
    "eigh": (projector, numpy_projector, False),
    "pseudo-inverse": (
        lambda a: lapack.pseudo_inverse(a, 0.0),
        lambda a: np.linalg.pinv(a, rcond=1e-12),
        False,
    ),
    "svd": (singular, lambda a: (np.linalg.svd(a)[1], np.asarray(a)), False),
    "determinant": (lapack.determinant, np.linalg.det, False),
}


@pytest.mark.parametrize(
    "name, batched",
    [
        (name, batched)
        for name, (_, _, two) in CASES.items()
        for batched in ([(), (0,), (1,), (0, 1)] if two else [(), (0,)])
    ],
)
def test_one_matrix_and_nested_batches(name, batched):
    """Any argument with a batch, or two nested ones."""
    ours, formula, two = CASES[name]
    lengths = (3, 2) if batched else ()
    arguments = [positive(*lengths * (0 in batched))]
    if two:
        arguments.append(normal(*lengths * (1 in batched), N, 2))
    run = ours
    for _ in lengths:
        run = jax.vmap(run, [0 if i in batched else None for i in range(len(arguments))])
    result = jax.jit(run)(*arguments)
    for index in np.ndindex(*lengths):
        parts = [a[index] if i in batched else a for i, a in enumerate(arguments)]
        expected = formula(*(np.asarray(a) for a in parts))
        for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            close(np.asarray(got)[index], want)


@pytest.mark.parametrize("name", ["cholesky", "forward", "backward", "solve", "eigh"])
def test_derivatives(name):
    ours, _, two = CASES[name]
    arguments = (positive(), normal(N, 2)) if two else (positive(),)

    def loss(arguments):
        first, *rest = arguments
        symmetric = first if two else (first + first.T) / 2
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(ours(symmetric, *rest)))

    check_gradient(loss, arguments, rtol=1e-5, atol=1e-6)
    batch = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), arguments)
    mapped = jax.jit(jax.vmap(jax.grad(loss)))(batch)
    single = jax.grad(loss)(jax.tree.map(lambda a: a[1], batch))
    for got, want in zip(jax.tree.leaves(mapped), jax.tree.leaves(single), strict=True):
        close(got[1], want)


def test_the_pseudo_inverse_of_a_singular_matrix_has_its_derivative():
    factor = normal(N, 3)

    def loss(factor):
        return jnp.sum(jnp.sin(lapack.pseudo_inverse(factor @ factor.T, 0.0)))

    check_gradient(loss, factor, rtol=1e-5, atol=1e-6)
    close(
        lapack.pseudo_inverse(factor @ factor.T, 0.0),
        np.linalg.pinv(np.asarray(factor @ factor.T), rcond=1e-10),
    )


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("shared", ["none", "rows", "weights"])
def test_weighted_moments(count, shared):
    """Forty weights on shared rows are summed by products of columns; r is no multiple of them."""
    weights, rows = normal(count, 7), normal(count, 7, 23)
    axes = (None if shared == "weights" else 0, None if shared == "rows" else 0)
    arguments = [a if axis == 0 else a[0] for a, axis in zip((weights, rows), axes, strict=True)]
    result = jax.jit(jax.vmap(weighted_moment, axes))(*arguments)
    for i in range(count):
        w = weights[0 if shared == "weights" else i]
        p = rows[0 if shared == "rows" else i]
        close(result[i], np.asarray(p).T @ np.diag(w) @ np.asarray(p))
    check_gradient(
        lambda pair: jnp.sum(jnp.sin(weighted_moment(*pair))),
        (weights[0], rows[0]),
        rtol=1e-5,
        atol=1e-6,
        entries=range(0, 168, 13),
    )


@pytest.mark.parametrize("batch", [False, True])
def test_a_factorization_that_breaks_down_is_tried_with_more_jitter(batch):
    good = positive()
    values, vectors = np.linalg.eigh(np.asarray(good))
    bad = jnp.asarray(vectors * np.append(-1e-13 * values[-1], values[1:]) @ vectors.T)
    factors = [psd_factor(m, 0.0) for m in (good, bad)]
    if batch:
        factors = jax.vmap(psd_factor)(jnp.stack([good, bad]))
        factors = [jax.tree.map(lambda a, i=i: a[i], factors) for i in range(2)]
    close(factors[0].upper.T @ factors[0].upper, good, 1e-9, 1e-8)
    close(factors[1].upper.T @ factors[1].upper, bad, 1e-7, 1e-7)
    assert np.all(np.isnan(psd_factor(-good).upper.diagonal()))


def test_only_one_module_calls_lapack():
    """Or a batch of it would run at once again."""
    for path in (ROOT / "kbr_jax").rglob("*.py"):
        if path.name == "_lapack.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            known = re.match(r"(jnp|jax\.numpy|lax|jax\.lax|jax\.scipy)\.linalg\.(?!norm$)", name)
            assert not known, f"{path.name} calls {name}: add it to _lapack.py"


def test_no_batch_waits_for_ever():
    """Two regressions in a `vmap`, without any environment variable, in a process of their own."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PJRT_NPROC", "OPENBLAS_NUM_THREADS", "XLA_FLAGS")
    }
    program = [sys.executable, "-m", "benchmarks.scale.stress", "200", "two_fits"]
    with all_cores():
        result = subprocess.run(
            program, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True
        )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("delta", [1e-2, 1e-10, 1e-15])
def test_the_symmetric_resolvent_keeps_its_digits_or_says_so(delta):
    """Of a matrix of rank 3 and norm 1."""
    basis = jnp.linalg.qr(normal(N, N))[0]
    matrix = basis[:, :3] * jnp.asarray([1.0, 0.1, 1e-5]) @ basis[:, :3].T
    b = normal(N)
    values, vectors = np.linalg.eigh(np.asarray(matrix))
    exact = vectors @ (values / (values**2 + delta) * (vectors.T @ np.asarray(b)))
    result = symmetric_resolvent(matrix, jnp.asarray(delta), b)
    error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
    assert error < 1e-13 / delta**0.5 + 1e-9
