r"""Are two samples of one distribution? Tests with the maximum mean discrepancy (Gretton et al.

2012).
"""

import math
from collections.abc import Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import betainc, ndtr
from jax.sharding import Mesh

from .._checks import (
    as_count,
    as_points,
    check_alike,
    check_finite,
    check_memory,
    check_same_size,
    in_one_precision,
    is_float,
    size,
    take,
)
from .._numerics import matmul, root_mean_square
from .._typing import Array, Float, Points, PRNGKeyArray
from ..features import FeatureChoice, RandomFourier
from ..kernels import AbstractKernel, KernelLike, checked_kernel
from ._collections import (
    energy_kernel,
    feature_matrices,
    for_each,
    fused,
    kernels_of,
    without_origin,
)
from ._results import TestResult, from_null, rounding, simulate, warn_if_hopeless
from ._series import block_length
from ._splits import Found, by_features, by_gram

#: Bandwidths of a default family. On a geometric grid, power on three alternatives of MMD-FUSE with
#: 500 points was .50, .55 and .47 (150 data sets each); on the even grid of its authors .49, .49,
#: .46.
_BANDWIDTHS = 10
#: Units of the energy kernel in root mean squares of its centered matrix. Its own is 1.3 in one
#: dimension and 2.8 in ten. Power without the kernel, with its own unit, with this one and with 1
#: (100 data sets): a shift of .4, n = 100: .37, .64, .63, .72; of .5 in one of ten columns: .41,
#: .43, .57, .60; a sine density: .57, .55, .55, .47; a product of sines: .34, .33, .33, .28.
_WITHOUT_ORIGIN = math.sqrt(2)


def _checked(x: Points, y: Points) -> tuple[Points, Points, Points]:
    """Two samples, and both in one with the smaller first."""
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_alike(y, "y", x, "x")
    kinds = [[_kind(leaf) for leaf in jax.tree.leaves(part)] for part in (x, y)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "`x` and `y` must be of one kind: real numbers, integers or booleans, in each part."
        )
    if min(size(x), size(y)) < 2:
        raise ValueError("A two-sample test needs at least 2 points in each sample.")
    x, y = in_one_precision(x, y)
    ordered = (x, y) if size(x) <= size(y) else (y, x)
    return x, y, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *ordered)


def _kind(leaf: Array) -> str:
    if is_float(leaf):
        return "real"
    return "boolean" if leaf.dtype == bool else "integer"


def two_sample_test(
    kernel: KernelLike | Sequence[KernelLike],
    x: Points,
    y: Points,
    *,
    key: PRNGKeyArray,
    num_permutations: int = 1000,
    null: Literal["permutation", "signs"] = "permutation",
    dependent: bool | int = False,
    landmarks: FeatureChoice = None,
    mesh: Mesh | None = None,
) -> TestResult:
    r"""Test whether x and y are samples of one distribution.

    With one kernel the statistic is the unbiased squared MMD (Gretton et al. 2012, eq 3),

    $$ \mathrm{MMD}^2 = \frac{1}{n (n - 1)} \sum_{i \ne j} k(x_i, x_j)
       + \frac{1}{m (m - 1)} \sum_{i \ne j} k(y_i, y_j) - \frac{2}{n m} \sum_{ij} k(x_i, y_j). $$

    With K kernels it is the largest of the normalized ones: for the N pooled points $z_i$,

    $$ \max_k \mathrm{MMD}_k^2 / s_k, \qquad
       s_k^2 = \frac{1}{N (N - 1)} \sum_{i \ne j} k(z_i, z_j)^2. $$

    This is the statistic of MMD-FUSE (Biggs, Schrab and Gretton 2023, eq 8), a soft maximum, at the
    temperature of the authors' program, where it equals the maximum up to rounding. The milder
    temperature of their text has less power. `Energy` measures from an arbitrary point: its
    $s_k^2$ is twice the mean square of the centered Gram matrix. With `null="signs"` $s_k$ is the
    root mean square of the terms off the diagonal.

    The permutations choose among the kernels as the data does, so the level stays exact. The effect
    is the energy coefficient of the deciding kernel (Székely and Rizzo 2013),
    $\mathrm{MMD}^2 / E|\phi(x) - \phi(y)|^2$: 0 for one distribution, at most 1.

    **Arguments:**

    - `kernel`: None, one kernel, or a list of kernels. None stands for 21 of them: Gaussian and
      Laplace with ten bandwidths each, from half the 5 % to twice the 95 % quantile of the
      distances, and `Energy`, which finds shifts (not with random Fourier features). Labels have
      `Delta`, tuples the products of the kernels of their parts, and the sum for `Energy`. In
      every second product other labels count half: what the numbers tell without them is seen.
    - `x`, `y`: samples of n and m points, independent of each other. `key`: of the permutations.
    - `num_permutations`: B, draws of the null distribution (static). The smallest p-value is
      1 / (B + 1).
    - `null`: "permutation" of the pooled sample, exact at any size. "signs": independent random
      signs $\epsilon_i$ on the pairs
      $h_{ij} = k(x_i, x_j) + k(y_i, y_j) - k(x_i, y_j) - k(x_j, y_i)$, for n = m. Then $x_i$ and
      $y_i$ may depend on each other; pairs i and j may not. The level is exact where $(x_i, y_i)$
      and $(y_i, x_i)$ have one distribution, and else holds for large n
      ([results](../results/tests.md#where-single-tests-err)). The effect is NaN.
    - `dependent`: x and y are two series in order of time, independent of each other. Blocks of
      points are permuted (or get one sign) instead of points: blocks of 8 autocorrelation times of
      the features (of the default kernel where none is given) or of the slowest column, or of as
      many points as an integer says (static). The points beyond the last whole block are left out.
      The level holds for series of many blocks, not exactly.
    - `landmarks`: the rank r of greedy landmarks, or random Fourier features, in place of the
      Gram matrix. The level stays exact. Narrow kernels need many landmarks.
    - `mesh`: devices to divide the permutations over; each gets all points.

    **Returns:** a `TestResult`. One compiled program. Each of K kernels costs O(N^2 (d + B)), or
    O(N r (r + B)) with landmarks. Memory is O(N B), or O(N (B + r)): the Gram matrix is formed in
    tiles, and forgotten. "signs" holds one matrix of n^2 numbers.

    **Raises:** `ValueError` for fewer than 2 points, samples of different kinds, an empty list,
    more points than the machine could hold a Gram matrix of, blocks longer than a quarter of a
    sample, and, with "signs", for different sizes or landmarks.

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> x = jax.random.normal(jax.random.key(0), (100, 2))
    >>> found = kbr.hypotheses.two_sample_test(None, x, x + 1, key=jax.random.key(1))
    >>> bool(found.p_value < 0.01)
    True
    """
    x, y, pooled = _checked(x, y)
    draw_key, kernel_key = jax.random.split(key)
    kernels = None
    if kernel is not None:
        kernels = kernels_of(kernel, pooled, "x and y", _BANDWIDTHS, kernel_key)
    length = block_length(dependent, kernels, x, y)
    x, y = (take(points, slice(size(points) // length * length)) for points in (x, y))
    x, y, pooled = _checked(x, y)
    if null == "permutation" and length == 1:
        few = min(size(x), size(y), 9), min(max(size(x), size(y)), 20)
        warn_if_hopeless(math.comb(sum(few), few[0]), f"{size(x)} and {size(y)} points")
    if kernels is None:
        kernels = _default_kernels(pooled, landmarks, kernel_key)
    draws = as_count(num_permutations, "num_permutations")
    options = min(size(x), size(y)), length, draw_key, draws, mesh
    dtype = jax.eval_shape(kernels[0].diagonal, pooled).dtype
    effects = jnp.full((len(kernels), 3), jnp.nan, dtype)
    if null == "signs":
        check_same_size(y, "y", x, "x")
        if landmarks is not None:
            raise ValueError('`landmarks` need `null="permutation"`.')
        check_memory(size(x), size(x), dtype, "the pairs", 'take `null="permutation"`')
        found = _signs(kernels, x, y, length, draw_key, draws, mesh)
    elif null != "permutation":
        raise ValueError(f'`null` must be "permutation" or "signs", got {null!r}.')
    elif landmarks is None:
        # The matrix is never held, but a larger one is hours of work.
        total = size(pooled)
        check_memory(total, total, dtype, "the pooled sample", "give `landmarks`, for example 100")
        *found, effects = _in_units(kernels, by_gram(kernels, pooled, *options))
    else:
        maps = feature_matrices(kernels, pooled, landmarks, kernel_key)
        *found, effects = _in_units(kernels, by_features(maps, *options))
    valid = "samples of any size"
    if length > 1:
        valid = f"series of many blocks of {length} points"
    elif null == "signs":
        valid = "large samples, and of any size where pairs can be swapped"
    # Theory has an interval for independent points.
    *values, fields = fused(tuple(found), effects, theory=length == 1)
    return from_null(
        *values,
        kernels=kernels,
        **fields,
        hypothesis="x and y have one distribution",
        valid=valid,
    )


def _default_kernels(
    pooled: Points, landmarks: FeatureChoice, key: PRNGKeyArray
) -> tuple[AbstractKernel, ...]:
    kernels = kernels_of(None, pooled, "x and y", _BANDWIDTHS, key)
    real = any(map(is_float, jax.tree.leaves(pooled)))
    # The energy kernel has no random Fourier features.
    if not real or isinstance(landmarks, RandomFourier):
        return kernels
    return *kernels, energy_kernel(pooled)


def _in_units(kernels: tuple[AbstractKernel, ...], found: Found) -> tuple[Array, ...]:
    """With the unit of each kernel's statistic in place of both root mean squares."""
    *values, (wholes, centers), effects = found
    own = jnp.asarray([without_origin(one) for one in kernels])
    return *values, jnp.where(own, _WITHOUT_ORIGIN * centers, wholes), effects


@eqx.filter_jit
def _signs(
    kernels: tuple[AbstractKernel, ...],
    x: Points,
    y: Points,
    length: int,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
):
    """As `by_gram`, under random signs of the pairs, or of blocks of them."""
    n = size(x)
    scale = float(n * (n - 1))
    dtype = jnp.result_type(*(jax.eval_shape(kernel.diagonal, x).dtype for kernel in kernels))

    def signs(_, one: PRNGKeyArray) -> Float[Array, " n"]:
        return jnp.repeat(jax.random.rademacher(one, (n // length,), dtype), length)

    drawn = simulate(key, draws, signs, lambda _, drawn: drawn, (), mesh)

    def of(kernel: AbstractKernel):
        h = _pairs(kernel, x, y).astype(dtype)
        null = jnp.sum(matmul(drawn, h) * drawn, axis=-1) / scale
        unit = root_mean_square(h) * (n / math.sqrt(scale))
        return jnp.sum(h) / scale, null, jnp.sum(jnp.abs(h)) / scale, unit

    statistics, null, magnitude, units = for_each(of, kernels)
    return statistics, null.T, magnitude, units


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
    r"""Test in linear time: the mean of the unbiased MMD of blocks of points, compared with
    Student's t (B-test: Zaremba, Gretton and Blaschko 2013; blocks of 2: the linear-time statistic
    of Gretton et al. 2012, section 6).

    **Arguments:** `kernel`; `x`, `y`, samples of one size n, in random order; `block_size`: points
    of each sample in a block (static), 2 to n / 2; the root of n is a good choice. Points beyond
    the last whole block are not used.

    **Returns:** a `TestResult` with the one-sided p-value $P(T \ge \sqrt{B}\, \bar\eta /
    \hat\sigma)$ of Student's distribution with B - 1 degrees of freedom, for B blocks. The level
    holds for large blocks or many. Where all blocks have one positive value, the p-value is the
    bound $(1 - 2 / \binom{2b}{b})^B$: the splits of a block have mean 0, so one pair of them is not
    positive. Cost O(n b d).

    **Raises:** `ValueError` for samples of different sizes, or fewer than two blocks.
    """
    x, y, pooled = _checked(x, y)
    kernel = checked_kernel(kernel, pooled, "x and y")
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
    spread = root_mean_square(values - statistic) / math.sqrt(count - 1)
    varied = spread > rounding(jnp.mean(jnp.abs(values)))
    score = jnp.where(varied, statistic / jnp.where(varied, spread, 1), 0)
    all_agree = (1 - 2 / math.comb(2 * block, block)) ** count
    certain = jnp.where(statistic > 0, all_agree, jnp.where(statistic < 0, 1, 0.5))
    p_value = jnp.where(varied, student(score, count - 1), certain)
    p_value = jnp.where(jnp.isnan(statistic), jnp.nan, p_value)
    return TestResult(
        p_value.astype(values.dtype),
        statistic,
        jnp.zeros(0, values.dtype),
        hypothesis="x and y have one distribution",
        valid="large blocks or many",
    )


def student(score: Float[Array, ""], degrees: int) -> Float[Array, ""]:
    """The probability that Student's t exceeds a score."""
    if degrees > 1000:
        # Abramowitz and Stegun 26.7.8. In float32 the incomplete beta function gives probabilities
        # above 1 for 5e6 degrees.
        normal = score * (1 - 1 / (4 * degrees)) / jnp.sqrt(1 + score**2 / (2 * degrees))
        return ndtr(-normal)
    half = jnp.asarray(0.5, score.dtype)
    beyond = betainc(degrees * half, half, degrees / (degrees + score**2)) / 2
    return jnp.where(score > 0, beyond, 1 - beyond)
