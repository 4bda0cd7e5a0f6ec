r"""A test of independence given a third variable (Zhang et al. 2011)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .._checks import (
    as_count,
    as_points,
    as_regularizer,
    check_finite,
    check_same_size,
    size,
)
from .._numerics import matmul
from .._solves import psd_factor
from .._typing import Array, ArrayLike, Float, Points, PRNGKeyArray
from ..kernels import AbstractKernel, KernelLike, kernel_for, warn_of_scale
from ._results import TestResult, centered, from_null, of_residuals, simulate


def conditional_independence_test(
    kernel_x: KernelLike,
    kernel_y: KernelLike,
    kernel_z: KernelLike,
    x: Points,
    y: Points,
    z: Points,
    *,
    regularizer: ArrayLike,
    key: PRNGKeyArray,
    num_draws: int = 1000,
    mesh: Mesh | None = None,
) -> TestResult:
    r"""Test whether X and Y are independent given Z, from n triples.

    What Z tells about the features of (X, Z) and of Y is taken away by kernel ridge regression,

    $$ R = n \lambda (H K_Z H + n \lambda I)^{-1}, \qquad A = R H (K_X \circ K_Z) H R, \quad B =
       R H K_Y H R, \qquad
       T = \tfrac1n \operatorname{tr}(A B), $$

    and under the hypothesis T is distributed like $\frac1n \epsilon^\top (A \circ B) \epsilon$ with
    independent normal $\epsilon_i$: a weighted sum of chi-squares, simulated here without its
    eigenvalues.

    **Arguments:**

    - `kernel_x`, `kernel_y`, `kernel_z` and `x`, `y`, `z`: n triples. With standardized data,
      bandwidths of about the median.
    - `regularizer`: lambda of the regressions on Z: `K + n regularizer I`. It must follow Z well
      enough: too large a value leaves some of its influence in both residuals, and the test then
      rejects too often. 1e-3 or less for n in the hundreds.
    - `key`, `num_draws` B (static): of the null distribution. `mesh`: devices to divide the draws
      over; the matrices are formed on each.

    **Returns:** a `TestResult`. Cost O(n^3 + B n^2). The level holds for large n, not exactly.

    **Raises:** `ValueError` for unpaired samples, fewer than 4 triples, or a regularizer that is
    not positive.
    """
    samples, kernels = [], []
    given = zip((kernel_x, kernel_y, kernel_z), (x, y, z), ("x", "y", "z"), strict=True)
    for kernel, points, name in given:
        points = check_finite(as_points(points, name), name)
        kernel = kernel_for(kernel, points)
        kernel.check(points, name)
        warn_of_scale(kernel, points, name)
        samples.append(points)
        kernels.append(kernel)
    check_same_size(samples[1], "y", samples[0], "x")
    check_same_size(samples[2], "z", samples[0], "x")
    if size(samples[0]) < 4:
        raise ValueError("A conditional independence test needs at least 4 triples.")
    dtype = jax.eval_shape(kernels[0].diagonal, samples[0]).dtype
    ridge = as_regularizer(regularizer, "regularizer", dtype)
    draws = as_count(num_draws, "num_draws")
    return from_null(
        *_run(tuple(kernels), tuple(samples), ridge, key, draws, mesh),
        hypothesis="x and y are independent given z",
        valid="regressions on z that leave nothing of it",
    )


@eqx.filter_jit
def _run(
    kernels: tuple[AbstractKernel, ...],
    samples: tuple[Points, ...],
    ridge: Float[Array, ""],
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
):
    grams = [
        kernel.gram(points, points).astype(ridge.dtype)
        for kernel, points in zip(kernels, samples, strict=True)
    ]
    n = size(samples[0])
    factor = psd_factor(centered(grams[2]), n * ridge)

    def residual(gram):
        once = n * ridge * factor.solve(centered(gram))
        return n * ridge * factor.solve(once.T)

    wholes = grams[0] * grams[2], grams[1]
    parts = [residual(gram) for gram in wholes]
    product = parts[0] * parts[1]

    def statistics(product, normals: Float[Array, "b n"]) -> Float[Array, " b"]:
        return jnp.sum(matmul(normals, product) * normals, axis=-1) / n

    def draw(product, one: PRNGKeyArray) -> Float[Array, " n"]:
        return jax.random.normal(one, (n,), product.dtype)

    null = simulate(key, draws, draw, statistics, product, mesh)
    return jnp.sum(product) / n, null, of_residuals(parts, wholes)
