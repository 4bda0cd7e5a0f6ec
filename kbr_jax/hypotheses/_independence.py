r"""Tests of independence with the Hilbert-Schmidt independence criterion."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .._checks import (
    as_count,
    as_points,
    check_finite,
    check_memory,
    check_same_size,
    in_one_precision,
    size,
    take,
)
from .._numerics import matmul, safe_sqrt
from .._typing import Array, Float, Points, PRNGKeyArray
from ..features import FeatureChoice
from ..kernels import AbstractKernel, KernelLike
from ._collections import feature_matrices, for_each, fused, kernels_of
from ._results import (
    TestResult,
    centered,
    from_null,
    interval_of,
    is_constant,
    relevant,
    simulate,
    warn_if_hopeless,
)

#: Bandwidths of a default family. Power at n = 200 with 5 and with 10 (200 data sets each): weak
#: line .69, .65; sine of frequency 2 .87, .92, of 4 .26, .26; heavy tails .62, .64. With Laplace
#: kernels beside 5 Gaussian ones .62, .86, .27, .72. Uncentered spread: .19, .95, .48, .21.
_BANDWIDTHS = 5
#: Of the columns of a Gram matrix, of which only the lower triangle is permuted.
_BLOCKS = 8


def independence_test(
    kernel_x: KernelLike | Sequence[KernelLike],
    kernel_y: KernelLike | Sequence[KernelLike],
    x: Points,
    y: Points,
    *,
    key: PRNGKeyArray,
    num_permutations: int = 1000,
    dependent: bool = False,
    landmarks: FeatureChoice = None,
    mesh: Mesh | None = None,
) -> TestResult:
    r"""Test whether X and Y are independent, from n pairs.

    With one kernel each the statistic is $\mathrm{HSIC} = \operatorname{tr}(K H L H) / n^2$
    (Gretton et al. 2008, eq 4). With several it is the maximum over all pairs of kernels, as in
    `two_sample_test`, of HSIC without its mean over permutations, in units of its spread under
    them: for the centered $\tilde K = H K H$ and $\tilde L = H L H$,

    $$ \max_{kl} w_{kl}, \quad
       w_{kl} = \frac{\mathrm{HSIC}_{kl} - \operatorname{tr} \tilde K \operatorname{tr} \tilde L /
       n^2 (n - 1)}{\big( \sum_{i \ne j} \tilde K_{ij}^2 \sum_{i \ne j} \tilde L_{ij}^2
       \big)^{1/2} / n (n - 1)}. $$

    The effect is w of the deciding pair, a squared correlation of features: 0 for independence, at
    most 1 in large samples (centered kernel alignment: Cortes, Mohri and Rostamizadeh 2012, def 4).
    Where few points carry a feature, as those of a rare label, it may exceed 1.

    **Arguments:**

    - `kernel_x`, `kernel_y`: for each variable None, one kernel, or a list. None stands for ten:
      Gaussian and Laplace, with five bandwidths each as in `two_sample_test`; `Delta` for
      labels. `x`, `y`: n pairs. `key`: of the permutations.
    - `num_permutations`: B, permutations of y (static); the smallest p-value is 1 / (B + 1).
    - `dependent`: x and y are two stationary series in order of time. Then y is shifted in time, by
      steps drawn from 0 to n - 1, and its end comes first. The level holds for series that are
      long beside their autocorrelation, not exactly.
    - `landmarks`: the rank r of greedy landmarks, or random Fourier features, for features of each
      variable: HSIC is $|\Phi^\top H \Psi|^2 / n^2$. The level stays exact.
    - `mesh`: devices to divide the permutations over; each gets all points.

    **Returns:** a `TestResult`; its `kernels` are pairs. One compiled program. For a and b kernels
    the cost is O((a + b) n^2 d + a b n^2 B) and the memory O((a + b) n^2), with landmarks
    O(a b n r^2 B) and O((a + b) n r).

    **Raises:** `ValueError` for unpaired samples, fewer than two pairs, an empty list, or more
    pairs than the memory holds Gram matrices of.

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> x, noise = jax.random.normal(jax.random.key(0), (2, 200))
    >>> found = kbr.hypotheses.independence_test(None, None, x, x**2 + noise, key=jax.random.key(1))
    >>> bool(found.p_value < 0.01)
    True
    """
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_same_size(x, "x", y, "y")
    x, y = in_one_precision(x, y)
    n = size(x)
    if n < 2:
        raise ValueError("An independence test needs at least 2 pairs.")
    if not isinstance(dependent, (bool, np.bool_)):
        raise ValueError(f"`dependent` must be True or False, got {dependent!r}.")
    if not dependent:
        warn_if_hopeless(math.factorial(min(n, 9)), f"{n} pairs")
    draw_key, *keys = jax.random.split(key, 3)
    sides = (kernel_x, x, "x", keys[0]), (kernel_y, y, "y", keys[1])
    kernels = tuple(kernels_of(k, points, name, _BANDWIDTHS, key) for k, points, name, key in sides)
    draws = as_count(num_permutations, "num_permutations")
    if landmarks is None:
        dtype = jax.eval_shape(kernels[0][0].diagonal, x).dtype
        count = sum(map(len, kernels))
        check_memory(count * n, n, dtype, "the pairs", "give `landmarks`, for example 50")
        *found, effects = _exact(kernels, x, y, bool(dependent), draw_key, draws, mesh)
    else:
        maps = tuple(
            feature_matrices(own, points, landmarks, key)
            for own, (_, points, _, key) in zip(kernels, sides, strict=True)
        )
        *found, effects = _low_rank(maps, bool(dependent), draw_key, draws, mesh)
    *values, fields = fused(tuple(found), effects, theory=not dependent)
    return from_null(
        *values,
        kernels=tuple(itertools.product(*kernels)),
        **fields,
        hypothesis="x and y are independent",
        valid="long stationary series" if dependent else "samples of any size",
    )


class _Side(eqx.Module):
    """Sums of the centered Gram matrices of one variable, for each of k kernels.

    - `size`: the root mean square of their entries, and of their rounding.
    - `trace`; `squares`: the sum of the squares of their entries, without the diagonal.
    - `diagonal`, and `rows`: the mean square of each row, without the diagonal.
    """

    size: Float[Array, " k"]
    trace: Float[Array, " k"]
    squares: Float[Array, " k"]
    diagonal: Float[Array, "k n"]
    rows: Float[Array, "k n"]


def _side(size, constant, diagonal, rows) -> _Side:
    """From the row sums of squares, diagonal included. A constant variable leaves rounding."""
    n = rows.shape[1]
    rows = jnp.maximum(rows - diagonal**2, 0)
    squares = jnp.where(constant, 0, jnp.sum(rows, axis=1))
    return _Side(size, jnp.sum(diagonal, axis=1), squares, diagonal, rows / (n - 1))


@eqx.filter_jit
def _exact(
    kernels: tuple[tuple[AbstractKernel, ...], ...],
    x: Points,
    y: Points,
    dependent: bool,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
):
    n = size(x)
    grams = [
        for_each(lambda kernel, points=points: kernel.gram(points, points), own)
        for own, points in zip(kernels, (x, y), strict=True)
    ]
    dtype = grams[0].dtype
    # Centering one of the two is enough, but for rounding.
    centers = [jax.vmap(centered)(gram.astype(dtype)) for gram in grams]
    sides = [_of_matrices(*pair) for pair in zip(centers, grams, strict=True)]
    k, l = centers  # noqa: E741 (the papers' letter)
    rows = jnp.stack([jnp.sum(one * l, axis=2) for one in k])
    step = -(-n // _BLOCKS)
    lower = 2 * jnp.tril(k) - k * jnp.eye(n, dtype=dtype)
    blocks = [(i, lower[:, i:, i : i + step]) for i in range(0, n, step)]

    def statistic(data, order):
        """All matrices are symmetric.

        In blocks of columns, from their first diagonal entry down. Rows are gathered, never
        columns.
        """
        blocks, l = data  # noqa: E741
        order = order.astype(jnp.int32)
        columns = jnp.take(l, order, axis=1, mode="clip").transpose(0, 2, 1)
        parts = [
            _products(block, jnp.take(columns[:, :, i : i + step], order[i:], axis=1, mode="clip"))
            for i, block in blocks
        ]
        return sum(parts[1:], parts[0]) / n / n

    data = blocks, l
    null = _permuted(key, draws, n, statistic, data, dependent, mesh)
    return _normalized(statistic(data, jnp.arange(n)), null, rows, sides)


def _of_matrices(center: Float[Array, "k n n"], whole: Float[Array, "k n n"]) -> _Side:
    wholes = jnp.mean(whole.astype(center.dtype) ** 2, axis=(1, 2))
    magnitude = relevant(jnp.mean(center**2, axis=(1, 2)), wholes)
    diagonal = jnp.diagonal(center, axis1=1, axis2=2)
    constant = jax.vmap(is_constant)(whole)
    return _side(magnitude, constant, diagonal, jnp.sum(center**2, axis=2))


def _products(k: Float[Array, "a n m"], l: Float[Array, "b n m"]) -> Float[Array, "a b"]:  # noqa: E741
    """Sums of the products of all pairs of matrices."""
    if k.shape[0] == l.shape[0] == 1:
        return jnp.sum(k * l)[None, None]  # without a copy of what was gathered
    return matmul(k.reshape(k.shape[0], -1), l.reshape(l.shape[0], -1).T)


def _permuted(
    key, draws: int, n: int, statistic: Callable, data: Any, dependent: bool, mesh: Mesh | None
) -> Array:
    """The statistic of `draws` orders of n points, one after the other."""

    def draw(_, one: PRNGKeyArray):
        if dependent:
            return jnp.roll(jnp.arange(n), jax.random.randint(one, (), 0, n))
        return jax.random.permutation(one, n)

    def statistics(data, orders):
        return lax.map(lambda order: statistic(data, order), orders)

    return simulate(key, draws, draw, statistics, data, mesh)


def _normalized(
    own: Float[Array, "a b"],
    null: Float[Array, "draws a b"],
    rows: Float[Array, "a b n"],
    sides: Sequence[_Side],
):
    """What `fused` takes, flat over pairs of kernels, and the effects with their intervals.

    `rows` are the row sums of the products of two centered matrices. The interval is that of the
    delta method: the influence of a point on a mean of products of two centered matrices is twice
    its row mean.
    """
    n = rows.shape[-1]
    x, y = sides
    pairs = float(n * (n - 1))  # beyond the integers of 32 bits
    expected = x.trace[:, None] * y.trace / pairs / n
    spread = safe_sqrt(x.squares[:, None] / pairs * (y.squares / pairs))
    some = ~(spread <= 0)  # NaN stays
    spread = jnp.where(some, spread, 1)
    effect = jnp.where(some, (own - expected) / spread, 0)
    rows = (rows - x.diagonal[:, None] * y.diagonal) / (n - 1)
    ratio = safe_sqrt(jnp.where(some, y.squares / jnp.where(some, x.squares[:, None], 1), 0))
    parts = ratio[..., None] * x.rows[:, None]
    parts += jnp.where(some, 1 / jnp.where(ratio > 0, ratio, 1), 0)[..., None] * y.rows
    influence = (2 * rows - effect[..., None] * parts) / spread[..., None]
    interval = interval_of(effect, [jnp.where(some[..., None], influence, 0)])
    magnitude = x.size[:, None] * y.size
    if own.size > 1:
        own, null = (jnp.where(some, values - expected, 0) for values in (own, null))
    effects = jnp.concatenate([effect[..., None], interval], axis=-1).reshape(-1, 3)
    flat = own.reshape(-1), null.reshape(null.shape[0], -1), magnitude.reshape(-1)
    return *flat, spread.reshape(-1), effects


@eqx.filter_jit
def _low_rank(
    maps: tuple[tuple[Float[Array, "n _"], ...], ...],
    dependent: bool,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
):
    n = maps[0][0].shape[0]
    centers = [[part - jnp.mean(part, axis=0) for part in side] for side in maps]
    sides = [_of_features(*pair) for pair in zip(centers, maps, strict=True)]
    rows = jnp.stack(
        [
            jnp.stack([jnp.sum(matmul(a, matmul(a.T, b)) * b, axis=1) for b in centers[1]])
            for a in centers[0]
        ]
    )

    ends = [np.cumsum([part.shape[1] for part in side])[:-1] for side in centers]

    def statistic(data, order):
        """One product for all pairs of kernels. The squares of its blocks are summed."""
        phi, psi = data
        found = matmul(phi.T, take(psi, order)) ** 2
        for axis, cuts in enumerate(ends):
            parts = [jnp.sum(part, axis=axis) for part in jnp.split(found, cuts, axis=axis)]
            found = jnp.stack(parts, axis=axis)
        return found / n / n

    data = tuple(jnp.concatenate(side, axis=1) for side in centers)
    null = _permuted(key, draws, n, statistic, data, dependent, mesh)
    return _normalized(statistic(data, jnp.arange(n)), null, rows, sides)


def _of_features(
    centers: list[Float[Array, "n _"]], wholes: tuple[Float[Array, "n _"], ...]
) -> _Side:
    def one(center, whole):
        squares = jnp.mean(whole**2)
        magnitude = relevant(jnp.mean(center**2), squares) ** 2 * center.shape[1]
        rows = jnp.sum(matmul(center, matmul(center.T, center)) * center, axis=1)
        return magnitude, is_constant(whole), jnp.sum(center**2, axis=1), rows

    found = [one(*pair) for pair in zip(centers, wholes, strict=True)]
    return _side(*(jnp.stack(parts) for parts in zip(*found, strict=True)))
