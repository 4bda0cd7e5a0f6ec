r"""Are two samples of one distribution? Tests with the maximum mean discrepancy (Gretton et al.

2012).
"""

from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.sharding import Mesh

from .._checks import (
    as_count,
    as_points,
    check_alike,
    check_finite,
    check_memory,
    check_same_size,
    size,
)
from .._numerics import matmul, safe_sqrt
from .._typing import Array, Float, Points, PRNGKeyArray
from ..kernels import AbstractKernel, KernelLike, kernel_for, warn_of_scale
from ._results import TestResult, centered, from_null, relevant, rounding, simulate


def _checked(
    kernels: Any, x: Points, y: Points
) -> tuple[tuple[AbstractKernel, ...], Points, Points]:
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_alike(y, "y", x, "x")
    pooled = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), x, y)
    kernels = tuple(
        kernel_for(kernel, pooled)
        for kernel in (kernels if isinstance(kernels, (list, tuple)) else [kernels])
    )
    if not kernels:
        raise ValueError("`kernel` is an empty list; give at least one kernel.")
    for kernel in kernels:
        kernel.check(x, "x")
        kernel.check(y, "y")
    if min(size(x), size(y)) < 2:
        raise ValueError("A two-sample test needs at least 2 points in each sample.")
    if len(kernels) == 1:
        warn_of_scale(kernels[0], pooled, "x and y")
    return kernels, x, y


def two_sample_test(
    kernel: Any | Sequence[Any],
    x: Points,
    y: Points,
    *,
    key: PRNGKeyArray,
    num_permutations: int = 1000,
    null: Literal["permutation", "signs"] = "permutation",
    mesh: Mesh | None = None,
) -> TestResult:
    r"""Test whether x and y are samples of one distribution.

    The statistic is the unbiased squared MMD (Gretton et al. 2012, eq 3),

    $$ \frac{1}{n (n - 1)} \sum_{i \ne j} k(x_i, x_j) + \frac{1}{m (m - 1)} \sum_{i \ne j} k(y_i,
       y_j)
       - \frac{2}{n m} \sum_{ij} k(x_i, y_j). $$

    **Arguments:**

    - `kernel`: of the points, or a list of them (several bandwidths): the test then takes the
      kernel that tells the samples apart best, at the price that the permutations may choose too
      (as MMDAgg, Schrab et al. 2023), and needs no split of the data. To choose one by `mmd_power`,
      do it on other points than those tested.
    - `x`, `y`: samples of n and m points. `key`: of the permutations.
    - `num_permutations`: B, draws of the null distribution (static); the smallest p-value is 1 / (B
      + 1).
    - `null`: "permutation" of the pooled sample, exact at any size; "signs": independent random
      signs $\epsilon_i$ on the pairs
      $h_{ij} = k(x_i, x_j) + k(y_i, y_j) - k(x_i, y_j) - k(x_j, y_i)$, for n = m; then $x_i$ and
      $y_i$ may depend on each other.
    - `mesh`: devices to divide the permutations over; each gets all points.

    **Returns:** a `TestResult`. One compiled program; cost O((n + m)^2 (d + B)) for each kernel,
    all permutations in a few matrix products; memory O((n + m)^2).

    **Raises:** `ValueError` for fewer than 2 points, samples of different kinds, and, with "wild
    bootstrap", of different sizes.

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> x = jax.random.normal(jax.random.key(0), (100, 2))
    >>> found = kbr.hypotheses.two_sample_test(kbr.Gaussian(1.0), x, x + 1, key=jax.random.key(1))
    >>> bool(found.p_value < 0.01)
    True
    """
    kernels, x, y = _checked(kernel, x, y)
    total = size(x) + size(y)
    dtype = jax.eval_shape(kernels[0].diagonal, x).dtype
    check_memory(total, total, dtype, "the pooled sample", "take `block_two_sample_test`")
    if null == "signs":
        check_same_size(y, "y", x, "x")
        run = _signs
    elif null == "permutation":
        run = _permutations
    else:
        raise ValueError(f'`null` must be "permutation" or "signs", got {null!r}.')
    found = run(kernels, x, y, key, as_count(num_permutations, "num_permutations"), mesh)
    return from_null(
        *(found if isinstance(kernel, (list, tuple)) else (part[..., 0] for part in found))
    )


@eqx.filter_jit
def _permutations(
    kernels: tuple[AbstractKernel, ...],
    x: Points,
    y: Points,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
):
    n, m = size(x), size(y)
    pooled = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), x, y)
    grams = [kernel.gram(pooled, pooled) for kernel in kernels]
    dtype = jnp.result_type(*grams)
    # Terms of a row or a column alone drop out of the statistic, but not of its rounding.
    centers = jnp.stack([centered(gram.astype(dtype)) for gram in grams]) * (
        1 - jnp.eye(n + m, dtype=dtype)
    )
    sizes = jnp.stack(
        [relevant(center, gram.astype(dtype)) for center, gram in zip(centers, grams, strict=True)]
    )
    magnitude, grams = sizes * (3 + (n + m) ** 2 / (m * (m - 1))), centers
    rows = jnp.sum(grams, axis=-1)
    first = (jnp.arange(n + m) < n).astype(dtype)

    def statistics(data, chosen: Float[Array, "b N"]) -> Float[Array, "b kernels"]:
        """Of the samples that 0/1 vectors choose from the pool.

        One matrix product gives all three sums.
        """
        grams, rows, _ = data
        within = jnp.sum(matmul(chosen, grams) * chosen, axis=-1)
        across = matmul(rows, chosen.T) - within
        other = jnp.sum(rows, axis=-1)[:, None] - 2 * across - within
        return (within / n / (n - 1) + other / m / (m - 1) - 2 * across / n / m).T

    def draw(data, one: PRNGKeyArray) -> Float[Array, " N"]:
        return jax.random.permutation(one, data[2])

    data = grams, rows, first
    null = simulate(key, draws, draw, statistics, data, mesh)
    return statistics(data, first[None])[0], null, magnitude


@eqx.filter_jit
def _signs(
    kernels: tuple[AbstractKernel, ...],
    x: Points,
    y: Points,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
):
    n = size(x)
    h = jnp.stack([_pairs(kernel, x, y) for kernel in kernels])
    scale = float(n * (n - 1))

    def statistics(h, signs: Float[Array, "b n"]) -> Float[Array, "b kernels"]:
        return jnp.sum(matmul(signs, h) * signs, axis=-1).T / scale

    def draw(h, one: PRNGKeyArray) -> Float[Array, " n"]:
        return jax.random.rademacher(one, (n,), h.dtype)

    null = simulate(key, draws, draw, statistics, h, mesh)
    return jnp.sum(h, axis=(1, 2)) / scale, null, jnp.sum(jnp.abs(h), axis=(1, 2)) / scale


def _pairs(kernel: AbstractKernel, x: Points, y: Points) -> Float[Array, "n n"]:
    """The matrix h of the U-statistic, with a zero diagonal.

    In this order of terms it is 0 where x and y agree in a point.
    """
    cross = kernel.gram(x, y)
    h = (kernel.gram(x, x) - cross) + (kernel.gram(y, y) - cross.T)
    return h * (1 - jnp.eye(h.shape[0], dtype=h.dtype))


def block_two_sample_test(
    kernel: KernelLike, x: Points, y: Points, *, block_size: int = 2
) -> TestResult:
    r"""Test in linear time: the mean of the unbiased MMD of blocks of points, which is normal for
    many blocks (B-test: Zaremba, Gretton and Blaschko 2013; blocks of 2: the linear-time statistic
    of Gretton et al. 2012, section 6).

    **Arguments:** `kernel`; `x`, `y`, samples of one size n, in random order; `block_size`: points
    of each sample in a block (static), 2 to n / 2; the root of n is a good choice. Points beyond
    the last whole block are not used.

    **Returns:** a `TestResult` with the one-sided p-value
    $1 - \Phi(\sqrt{n / b}\, \bar\eta / \hat\sigma)$; where all blocks agree to the last digit, 0,
    1/2 or 1 by the sign of the statistic. Cost O(n b d).

    **Raises:** `ValueError` for samples of different sizes, or fewer than two blocks.
    """
    (kernel,), x, y = _checked(kernel, x, y)
    check_same_size(y, "y", x, "x")
    block = as_count(block_size, "block_size")
    count = size(x) // block
    if block < 2 or count < 2:
        raise ValueError(
            f"`block_size` = {block} must be at least 2 and leave at least two blocks of {size(x)} "
            f"points."
        )
    return _blocks(kernel, x, y, block, count)


@eqx.filter_jit
def _blocks(kernel: AbstractKernel, x: Points, y: Points, block: int, count: int) -> TestResult:
    def split(points):
        return jax.tree.map(
            lambda leaf: leaf[: count * block].reshape(count, block, *leaf.shape[1:]), points
        )

    def one(pair):
        h = _pairs(kernel, *pair) / (block * (block - 1))
        total = jnp.sum(h)
        return jnp.where(jnp.abs(total) <= rounding(jnp.sum(jnp.abs(h))), 0, total)

    values = jax.lax.map(one, (split(x), split(y)), batch_size=min(count, 256))
    statistic = jnp.mean(values)
    spread = safe_sqrt(jnp.sum((values - statistic) ** 2) / (count - 1) / count)
    certain = jnp.where(statistic == 0, 0, jnp.inf * jnp.sign(statistic))
    score = jnp.where(spread > 0, statistic / jnp.where(spread > 0, spread, 1), certain)
    return TestResult(norm.sf(score), statistic, jnp.zeros(0, values.dtype))
