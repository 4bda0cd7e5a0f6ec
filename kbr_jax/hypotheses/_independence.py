r"""Tests of independence, and of independence given a third variable."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from .._checks import (
    as_count,
    as_points,
    as_regularizer,
    check_finite,
    check_memory,
    check_same_size,
    size,
    take,
)
from .._numerics import matmul
from .._solves import psd_factor
from .._typing import Array, ArrayLike, Float, Points, PRNGKeyArray
from ..embedding import embed_joint
from ..features import FeatureChoice, fit_features
from ..kernels import AbstractKernel, KernelLike, kernel_for, warn_of_scale
from ._results import TestResult, centered, from_null, of_residuals, relevant, simulate

#: Of the columns of a Gram matrix, of which only the lower triangle is permuted.
_BLOCKS = 8


def independence_test(
    kernel_x: KernelLike,
    kernel_y: KernelLike,
    x: Points,
    y: Points,
    *,
    key: PRNGKeyArray,
    num_permutations: int = 1000,
    landmarks: FeatureChoice = None,
    mesh: Mesh | None = None,
) -> TestResult:
    r"""Test whether X and Y are independent, from n pairs:
    $\mathrm{HSIC} = \operatorname{tr}(K H L H) / n^2$ under permutations of y.

    **Arguments:**

    - `kernel_x`, `kernel_y`: of any two domains. `x`, `y`: n pairs. `key`: of the permutations.
    - `num_permutations`: B, permutations (static); the smallest p-value is 1 / (B + 1).
    - `landmarks`: the rank r of greedy landmarks for features of each variable: the criterion of
      the low-rank kernels, $|\Phi^\top H \Psi|^2 / n^2$. Then a permutation costs O(n r^2) instead
      of n^2 memory accesses; the level stays exact.
    - `mesh`: devices to divide the permutations over; each gets all points.

    **Returns:** a `TestResult`. One compiled program; cost O(n^2 (d + B)), or O(n r^2 B).

    **Raises:** `ValueError` for unpaired samples, or fewer than two pairs.
    """
    joint = embed_joint(kernel_x, kernel_y, check_finite(x, "x"), check_finite(y, "y"))
    if size(joint.x) < 2:
        raise ValueError("An independence test needs at least 2 pairs.")
    kernels = joint.kernel_x, joint.kernel_y
    warn_of_scale(kernels[0], joint.x, "x")
    warn_of_scale(kernels[1], joint.y, "y")
    draws = as_count(num_permutations, "num_permutations")
    if landmarks is None:
        dtype = jax.eval_shape(kernels[0].diagonal, joint.x).dtype
        check_memory(
            size(joint.x), size(joint.x), dtype, "the pairs", "give `landmarks`, for example 50"
        )
        return from_null(*_exact(kernels, joint.x, joint.y, key, draws, mesh))
    phi, psi = (
        fit_features(k, p, landmarks) for k, p in zip(kernels, (joint.x, joint.y), strict=True)
    )
    return from_null(*_low_rank(phi.matrix, psi.matrix, key, draws, mesh))


@eqx.filter_jit
def _exact(
    kernels: tuple[AbstractKernel, AbstractKernel],
    x: Points,
    y: Points,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
):
    grams = kernels[0].gram(x, x), kernels[1].gram(y, y)
    # Centering one of the two is enough, but for rounding.
    k, l = (centered(gram.astype(grams[0].dtype)) for gram in grams)  # noqa: E741 (the papers' letter)
    # At least that of any permutation.
    magnitude = _size(k, grams[0]) * _size(l, grams[1].astype(k.dtype))
    n = size(x)
    step = -(-n // _BLOCKS)
    k = 2 * jnp.tril(k) - jnp.diag(jnp.diagonal(k))
    blocks = [(i, k[i:, i : i + step]) for i in range(0, n, step)]

    def statistic(data, order):
        """Both matrices are symmetric.

        In blocks of columns, from their first diagonal entry down. Rows are gathered, never
        columns.
        """
        blocks, l = data  # noqa: E741
        order = order.astype(jnp.int32)
        columns = jnp.take(l, order, axis=0, mode="clip").T
        parts = [
            jnp.sum(block * jnp.take(columns[:, i : i + step], order[i:], axis=0, mode="clip"))
            for i, block in blocks
        ]
        return sum(parts, jnp.zeros((), l.dtype)) / n / n

    data = blocks, l
    null = _permuted(key, draws, n, statistic, data, mesh)
    return statistic(data, jnp.arange(n)), null, magnitude


def _size(center: Float[Array, "n m"], whole: Float[Array, "n m"]) -> Float[Array, ""]:
    return relevant(jnp.mean(center**2), jnp.mean(whole**2))


def _permuted(key, draws: int, n: int, statistic: Callable, data: Any, mesh: Mesh | None) -> Array:
    """The statistic of `draws` orders of n points, one after the other."""

    def draw(_, one: PRNGKeyArray):
        return jax.random.permutation(one, n)

    def statistics(data, orders):
        return lax.map(lambda order: statistic(data, order), orders)

    return simulate(key, draws, draw, statistics, data, mesh)


@eqx.filter_jit
def _low_rank(
    phi: Float[Array, "n r"], psi: Float[Array, "n s"], key, draws: int, mesh: Mesh | None
):
    n = phi.shape[0]
    centers = [coordinates - jnp.mean(coordinates, axis=0) for coordinates in (phi, psi)]
    sizes = [
        _size(center, coordinates) ** 2 * coordinates.shape[1]
        for center, coordinates in zip(centers, (phi, psi), strict=True)
    ]
    phi, psi = centers[0].T, centers[1]

    def statistic(data, order):
        phi, psi = data
        return jnp.sum(matmul(phi, take(psi, order)) ** 2) / n / n

    data = phi, psi
    null = _permuted(key, draws, n, statistic, data, mesh)
    return statistic(data, jnp.arange(n)), null, sizes[0] * sizes[1]


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
    return from_null(*_run(tuple(kernels), tuple(samples), ridge, key, draws, mesh))


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
