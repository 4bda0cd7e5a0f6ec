r"""A test of independence given a third variable, by regressions on it that choose themselves."""

import functools
import itertools
import math
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
    check_same_size,
    in_one_precision,
    is_concrete,
    is_float,
    size,
    take,
)
from .._numerics import matmul, safe_divide, safe_sqrt
from .._typing import Array, Bool, Float, Int, Points, PRNGKeyArray
from .._warnings import warn
from ..features import Landmarks, fit_features
from ..kernels import AbstractKernel, KernelLike, as_kernel, default_kernel, warn_of_scale
from ..kernels._base import flat
from ..kernels._defaults import warn_of_amounts
from ._collections import of_difference
from ._regressions import (
    Regression,
    Smoother,
    heavy,
    learned_smoothers,
    regress,
    scores,
    smoother,
    standardized,
)
from ._results import MOST_BIAS, TestResult, from_null, simulate

#: Landmarks of z by default, features of x and of y, and features of z that weight their products.
#: Level, and power for post-nonlinear, sign-changing and ring-shaped dependence, n = 120, 200 data
#: sets: .045, .66, .90, .71; with 50 landmarks .045, .64, .91, .70; with 5 features of x and y no
#: difference; with 1 feature of z .035, .53, .66, .53.
_RANK, _FEATURES, _WEIGHTS = 200, 20, 5


def conditional_independence_test(
    kernel_x: KernelLike,
    kernel_y: KernelLike,
    kernel_z: KernelLike,
    x: Points,
    y: Points,
    z: Points,
    *,
    key: PRNGKeyArray,
    num_draws: int = 1000,
    landmarks: int | None = None,
    mesh: Mesh | None = None,
) -> TestResult:
    r"""Test whether X and Y are independent given Z, from n triples.

    Real x and y are replaced by their residuals $x_i - \hat m_{-i}(z_i)$, each left out of its own
    fit. Let $\phi_i$ and $\psi_i$ be features of these residuals, without what z still predicts of
    them, and let $\omega_i$ be 1 and features of z. The statistic is

    $$ T = \frac1n \Big| \sum_i \phi_i \otimes \psi_i \otimes \omega_i \Big|^2. $$

    It is compared with its values for random signs of the terms. These are multiplied by
    $\operatorname{tr}(R_x^2 R_y^2) / \sum_i (R_x^2)_{ii} (R_y^2)_{ii}$, where the matrices R take
    the fits away: signs do not know that residuals depend on each other. All regressions choose
    their ridge by leave-one-out. Without a kernel of z they choose that too: a linear one, a sum
    of functions of single columns, or linear and Gaussian in a metric that the gradients of the
    regressions give. Where a column of z has heavy tails they may also take its normal scores.

    No test holds its level for every distribution (Shah and Peters 2020, theorem 2). This one needs
    regressions whose errors have a product far below $1 / \sqrt n$. `bias` of the result estimates
    $\sqrt n$ times that product, and the test warns above 2.

    **Arguments:**

    - `kernel_x`, `kernel_y`: None chooses. Kernels of the difference of two points, their
      sums and products, and those chosen, are evaluated at residuals. Others are evaluated at the
      points.
    - `kernel_z`: of the regressions, or None. `x`, `y`, `z`: n triples; tuples and labels too.
    - `key`, `num_draws` B (static): of the signs.
    - `landmarks`: r, random points of z that carry the regressions; min(n, 200) by default.
    - `mesh`: devices to divide the draws over.

    **Returns:** a `TestResult`. Its `effect` is the correlation of the residual features, from 0 to
    1. Cost O(n r^2 + r^3 + 2400 n B), memory (8 r + 2400) n numbers, (16 r + 2400) n where z has
    heavy tails.

    **Raises:** `ValueError` for unpaired samples, fewer than 4 triples or fewer than 2 landmarks.

    The form of T is that of Zhang et al. (2011) in features (Strobl et al. 2019). The metric is
    that of Trivedi et al. (2014).

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> z, a, b = jax.random.normal(jax.random.key(0), (3, 200))
    >>> x, y = z + 0.3 * a, z + 0.3 * b
    >>> test = kbr.hypotheses.conditional_independence_test
    >>> bool(test(None, None, None, x, y, z, key=jax.random.key(1)).p_value > 0.05)
    True
    """
    kernels, samples = [], []
    given = zip((kernel_x, kernel_y, kernel_z), (x, y, z), "xyz", strict=True)
    for kernel, points, name in given:
        points = check_finite(as_points(points, name), name)
        kernels.append(None if kernel is None else as_kernel(kernel))
        if kernels[-1] is not None:
            kernels[-1].check(points, name)
        samples.append(points)
    if kernels[2] is not None:
        warn_of_scale(kernels[2], samples[2], "z")
    for kernel, points in zip(kernels, samples, strict=True):
        if kernel is None:
            warn_of_amounts(points)
    samples = in_one_precision(*samples)
    check_same_size(samples[1], "y", samples[0], "x")
    check_same_size(samples[2], "z", samples[0], "x")
    n = size(samples[0])
    if n < 4:
        raise ValueError("A conditional independence test needs at least 4 triples.")
    rank = min(n, _RANK) if landmarks is None else as_count(landmarks, "landmarks", samples[2], "z")
    if rank < 2:
        raise ValueError("`landmarks` must be at least 2: a bandwidth needs a distance.")
    draws = as_count(num_draws, "num_draws")
    found = _run(tuple(kernels), samples, key, (rank, draws), mesh)
    if is_concrete(found.bias) and found.bias.ndim == 0 and found.bias > MOST_BIAS:
        warn(
            "The regressions on `z` improve much from half of the triples to all. What they leave "
            "of z may decide the test: do not trust a small p-value. Give more triples, or fewer "
            "variables in `z`."
        )
    return found


def _run(
    kernels: tuple[AbstractKernel | None, ...],
    samples: tuple[Points, ...],
    key: PRNGKeyArray,
    counts: tuple[int, int],
    mesh: Mesh | None,
) -> TestResult:
    # Three programs: those of x and of y are one, where x and y are of one kind.
    n, (rank, draws) = size(samples[0]), counts
    row_key, half_key, sign_key = jax.random.split(key, 3)
    rows = jax.random.permutation(row_key, n)[:rank]
    leaves = jax.tree.leaves(samples)
    dtype = next((leaf.dtype for leaf in leaves if is_float(leaf)), jnp.result_type(float))
    count = _components(samples[2], rank)
    parts = _tails(samples[2]) if kernels[2] is None else []
    tails = any(not is_concrete(part) or bool(part) for part in parts)
    numbers, candidates = _candidates(kernels, samples, rows, dtype, count, tails)
    parts = [
        _residuals(kernel, points, candidates, rows, half_key)
        for kernel, points in zip(kernels[:2], samples[:2], strict=True)
    ]
    values, fields = _compared(parts, numbers, rows, sign_key, draws, mesh)
    return from_null(
        *values,
        **fields,
        hypothesis="x and y are independent given z",
        valid="samples large enough for the regressions on z",
    )


class _Part(eqx.Module):
    """The regressions of the parts of a variable, and features without what z predicts.

    `whole` is the mean square of these features, and `grown` how much larger errors are where half
    of the sample predicts the other, in the part where they grow most.
    """

    first: list[Regression]
    left: Float[Array, "n s"]
    whole: Float[Array, ""]
    grown: Float[Array, ""]


@eqx.filter_jit
def _compared(
    parts: list[_Part],
    numbers: Float[Array, "n d"],
    rows: Int[Array, " r"],
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
) -> tuple[tuple[Array, Array, Array], dict[str, Array]]:
    """The statistic, its null and its magnitude, and fields of the result."""
    left, n = [part.left for part in parts], numbers.shape[0]
    factors = [*left, _weights(numbers, rows)]
    few = n < math.prod(factor.shape[1] for factor in factors)
    if few:  # the products of the features' Gram matrices are smaller than those of the features
        terms = functools.reduce(jnp.multiply, (matmul(part, part.T) for part in factors))
    else:
        terms = functools.reduce(_products, factors)

    def draw(terms, one: PRNGKeyArray) -> Float[Array, " n"]:
        return jax.random.rademacher(one, (n,), terms.dtype)

    def statistics(terms, signs: Float[Array, "b n"]) -> Float[Array, " b"]:
        found = matmul(signs, terms)
        return jnp.sum(found * (signs if few else found), axis=1) / n

    null = simulate(key, draws, draw, statistics, terms, mesh)
    first, second = parts
    sizes = [jnp.mean(jnp.sum(part**2, axis=1)) for part in left]
    magnitude = 2 * (sizes[0] * second.whole + first.whole * sizes[1])
    losses, totals = (
        [jnp.sum(jnp.stack([getattr(one, name) for one in part.first])) for part in parts]
        for name in ("loss", "total")
    )
    shares = [jnp.clip(1 - safe_divide(*pair), 0, 1) for pair in zip(losses, totals, strict=True)]
    pairs = itertools.product(first.first, second.first)
    freedom = functools.reduce(jnp.maximum, (_freedom(*pair) for pair in pairs))
    grown = jnp.maximum(first.grown, 0) * jnp.maximum(second.grown, 0)
    fields = {
        "effect": _correlation(*left),
        "explained": jnp.stack(shares),
        "bias": safe_sqrt(n * grown),
    }
    statistic = statistics(terms, jnp.ones((1, n), terms.dtype))[0]
    return (statistic, null * freedom, magnitude), fields


def _products(a: Float[Array, "n a"], b: Float[Array, "n b"]) -> Float[Array, "n ab"]:
    """All products of a column of each."""
    return (a[:, :, None] * b[:, None]).reshape(len(a), -1)


@eqx.filter_jit
def _candidates(
    kernels: tuple[AbstractKernel | None, ...],
    samples: tuple[Points, ...],
    rows: Int[Array, " r"],
    dtype: Any,
    count: int,
    tails: bool,
) -> tuple[Float[Array, "n d"], Smoother]:
    """Numbers of z, and smoothers to choose from, along a leading axis.

    Where columns may have heavy tails, also those of their normal scores.
    """
    *variables, z = samples
    kernel, numbers = kernels[2], _numbers(z, rows, dtype, count)
    if kernel is None:
        targets = [
            _targets(own, points, rows).astype(numbers.dtype)
            for own, points in zip(kernels, variables, strict=False)
        ]
        aims = jnp.concatenate(targets, axis=1)
        found = learned_smoothers(numbers, rows, aims)
        if tails:
            scored = jax.tree.map(lambda leaf: scores(flat(leaf)) if is_float(leaf) else leaf, z)
            more = lax.cond(
                functools.reduce(jnp.logical_or, _tails(z)),
                lambda: learned_smoothers(_numbers(scored, rows, dtype, count), rows, aims),
                lambda: found,
            )
            found = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), found, more)
        return numbers, found
    chosen = Landmarks(take(z, rows), jnp.ones(rows.size, bool))
    found = smoother(fit_features(kernel, z, chosen).matrix.astype(numbers.dtype))
    return numbers, jax.tree.map(lambda leaf: leaf[None], found)


def _tails(z: Points) -> list[Bool[Array, ""]]:
    """For each real part whether a column has heavy tails."""
    return [jnp.any(heavy(flat(leaf))) for leaf in jax.tree.leaves(z) if is_float(leaf)]


def _components(z: Points, rank: int) -> int:
    """How many components of labels are enough for all of their values."""
    labels = [leaf for leaf in jax.tree.leaves(z) if not is_float(leaf)]
    if not all(map(is_concrete, labels)):
        return rank
    values = [len(np.unique(np.asarray(leaf), axis=0)) for leaf in labels]
    return min(rank, max([_FEATURES, *values]))


def _numbers(z: Points, rows: Int[Array, " r"], dtype: Any, count: int) -> Float[Array, "n d"]:
    """Real columns, and for labels the principal components of their indicators."""
    columns = []
    for leaf in jax.tree.leaves(z):
        if is_float(leaf):
            columns.append(flat(leaf))
            continue
        found = _features(None, leaf, rows, count).astype(dtype)
        # The components behind the last category are rounding.
        columns.append(jnp.where(jnp.mean(found**2, axis=0) > 1e-6, found, 0))
    return jnp.concatenate(columns, axis=1)


def _features(
    kernel: AbstractKernel | None, points: Points, rows: Int[Array, " r"], count: int
) -> Float[Array, "n s"]:
    """The leading principal components of the features that r points span."""
    chosen = take(points, rows)
    kernel = default_kernel(chosen) if kernel is None else kernel
    features = fit_features(kernel, points, Landmarks(chosen, jnp.ones(rows.size, bool)))
    return smoother(features.matrix).basis[:, -count:]


def _weights(numbers: Float[Array, "n d"], rows: Int[Array, " r"]) -> Float[Array, "n s"]:
    """1, and features of z of mean 0 and total variance 1."""
    found = _features(None, numbers, rows, _WEIGHTS)
    found = safe_divide(found, safe_sqrt(jnp.sum(found**2) / found.shape[0]))
    return jnp.concatenate([jnp.ones_like(found[:, :1]), found], axis=1)


def _targets(
    kernel: AbstractKernel | None, x: Points, rows: Int[Array, " r"]
) -> Float[Array, "n t"]:
    """What the metric of z is learned from: columns of mean 0 and total variance 1."""
    real = [standardized(flat(leaf))[0] for leaf in jax.tree.leaves(x) if is_float(leaf)]
    found = jnp.concatenate(real, axis=1) if real else _features(kernel, x, rows, _FEATURES)
    return safe_divide(found, safe_sqrt(jnp.sum(found**2) / found.shape[0]))


@eqx.filter_jit
def _residuals(
    kernel: AbstractKernel | None,
    points: Points,
    candidates: Smoother,
    rows: Int[Array, " r"],
    key: PRNGKeyArray,
) -> _Part:
    dtype, firsts = candidates.basis.dtype, []

    def replaced(leaf):
        if not is_float(leaf):
            return leaf
        columns, spread = standardized(flat(leaf))
        firsts.append(regress(candidates, columns.astype(dtype)))
        own = firsts[-1].left_out()
        # What z determines up to rounding has no residual.
        own = jnp.where(jnp.mean(own**2) <= 1e4 * jnp.finfo(dtype).eps ** 2, 0, own)  # NaN stays
        if kernel is None:
            return own
        return (own * spread).reshape(leaf.shape)

    if kernel is None or of_difference(kernel, points):
        points = jax.tree.map(replaced, points)
    features = _features(kernel, points, rows, _FEATURES).astype(dtype)
    second = regress(candidates, features)
    firsts = firsts or [second]
    grown = [safe_divide(first.halved(key), first.loss) - 1 for first in firsts]
    grown = functools.reduce(jnp.maximum, grown)
    return _Part(firsts, second.residual(), jnp.mean(jnp.sum(features**2, axis=1)), grown)


def _freedom(*parts: Regression) -> Float[Array, ""]:
    """How much more the sum of products of residuals varies than random signs know."""
    n = parts[0].targets.shape[0]
    taken, own, total = [], [], jnp.asarray(n - 1, parts[0].loss.dtype)
    for part in parts:
        values, basis = part.smoother.values, part.smoother.basis
        once = 1 / (values + part.ridge)
        taken.append(2 * once - values * once**2)  # R^2 = H - W diag(taken) W^T
        own.append(1 - 1 / n - matmul(basis**2, taken[-1]))
        total = total - jnp.sum(taken[-1] * values)
    cross = matmul(parts[0].smoother.basis.T, parts[1].smoother.basis)
    total = total + jnp.sum(taken[0][:, None] * cross**2 * taken[1])
    return jnp.maximum(safe_divide(total, jnp.sum(own[0] * own[1])), 1)


def _correlation(phi: Float[Array, "n r"], psi: Float[Array, "n s"]) -> Float[Array, ""]:
    """HSIC of residual features as a share of its bound."""

    def square(a, b):
        return jnp.sum(matmul(a.T, b) ** 2)

    return safe_divide(square(phi, psi), safe_sqrt(square(phi, phi) * square(psi, psi)))
