r"""Quantiles and distribution functions, from weights of any sign."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_points, is_concrete, is_real, known
from .._numerics import one_program
from .._typing import Array, ArrayLike, Bool, Float, Int, Point, PointFunction
from ._embedding import Embedding, check_points, normalized

#: Sum of the weights below which a belief says nothing: its nearest training points would decide.
LEAST_MASS = 0.01


def _itself(point: Point) -> Point:
    return point


def quantile(
    embedding: Embedding, probabilities: ArrayLike, function: PointFunction = _itself
) -> Float[Array, "..."]:
    r"""Quantiles of real functions of the variable, from weights of any sign.

    Each coordinate is read on its own:

    $$ q(u) = f_{(1)} + \sum_{j < n} (f_{(j+1)} - f_{(j)}) \, 1[F(f_{(j)}) < u], \qquad
       F(t) = \sum_i w_i 1[f_i \le t] \Big/ \sum_i w_i, $$

    with the values $f_i = f(x_i)$ in increasing order. For non-negative weights it is
    $\inf \{t : F(t) \ge u\}$, and exactly one of the values. Signed weights make F go up and down;
    then q is the quantile function of its monotone rearrangement, which is never further from the
    true distribution function than F itself, in any $L^p$ norm (Chernozhukov, Fernandez-Val and
    Galichon 2009).

    **Arguments:** `embedding`, its weights `[..., n]`; `probabilities`, u in [0, 1], a number or
    `[q]`; `function` from one point to a real array, by default the point itself.

    **Returns:** `[..., *shape]`, with a leading axis `[q]` if u is a vector. Between the least and
    the largest value; piecewise constant in the weights, so that gradients reach the values only.
    NaN where the weights cannot be a distribution: where their sum is NaN, infinite, below .01, or
    positive by rounding alone (`normalize`). A belief of such a mass is far from all training
    points: see its `mass`. Normalize weights on another scale first. The indicator of a set is not
    in the RKHS of a smooth kernel: expect the error of F at a scale below the kernel's bandwidth.
    Cost O(b s n (log n + q)) for b embeddings and s coordinates.

    **Raises:** `ValueError` for probabilities outside [0, 1] or of two axes, and for values that
    are not one real array.
    """
    check_points(embedding)
    dtype = embedding.weights.dtype
    with known(probabilities):
        levels = jnp.asarray(probabilities, dtype)
    if levels.ndim > 1 or (
        is_concrete(levels) and not np.all((np.asarray(levels) >= 0) & (np.asarray(levels) <= 1))
    ):
        raise ValueError(
            f"`probabilities` must be a number in [0, 1], or a vector of them; got {probabilities}."
        )
    values, weights = real_values(embedding, function), embedding.weights
    return _each_column(_rearranged, values, weights, levels)


def real_values(embedding: Embedding, function: PointFunction) -> Float[Array, "n *s"]:
    """Values of a function at the points, one real array for each."""
    check_points(embedding)
    values = jax.vmap(function)(as_points(embedding.points, "embedding.points"))
    if not is_real(values):
        raise ValueError(
            "Quantiles need real values, one array for each point: give a `function` that returns "
            "such."
        )
    return values.astype(embedding.weights.dtype)


@one_program
def unknown(weights: Float[Array, "*b n"]) -> Bool[Array, "*b"]:
    """Which weights cannot be a distribution, see `quantile`.

    Comparisons with NaN, or with shares of nothing, would find an end of the sample. Shares add up
    to 1 unless guarded.
    """
    total = jnp.sum(normalized(weights), axis=-1)
    return ~((jnp.sum(weights, axis=-1) >= LEAST_MASS) & (total > 0.5))


def flat(
    values: Float[Array, "n *s"], weights: Float[Array, "*b n"]
) -> tuple[Float[Array, "n c"], Float[Array, "k n"]]:
    """Values as rows, and weights of sum 1 as rows."""
    return values.reshape(values.shape[0], -1), normalized(weights.reshape(-1, values.shape[0]))


@functools.partial(jax.jit, static_argnames="read")
def _each_column(
    read: Callable[..., Array],
    values: Float[Array, "n *s"],
    weights: Float[Array, "*b n"],
    wanted: Float[Array, "*q"],
) -> Float[Array, "..."]:
    """`read` one coordinate of the values after the other, for all weights."""
    rows, shares = flat(values, weights)
    found = jax.vmap(lambda column: read(shares, column, wanted.reshape(-1)), 1, 2)(rows)
    found = jnp.where(unknown(weights).reshape(-1)[:, None], jnp.nan, found)
    return found.reshape(*wanted.shape, *weights.shape[:-1], *values.shape[1:])


def _distributions(
    weights: Float[Array, "b n"], values: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, "b m"]]:
    """Values in order, and the sums of weights up to each but the last."""
    order = jnp.argsort(values)
    return values[order], jnp.cumsum(weights[:, order], axis=1)[:, :-1]


def _rearranged(
    weights: Float[Array, "b n"], values: Float[Array, " n"], levels: Float[Array, " q"]
) -> Float[Array, "q b"]:
    ordered, distribution = _distributions(weights, values)
    # Weights that sum to u only up to rounding have reached it.
    slack = 8 * jnp.finfo(weights.dtype).eps
    below = jax.vmap(lambda u: distribution < u - slack)(levels)
    gaps = jnp.diff(ordered)
    # Where F crosses u once, q is one of the values. A sum of gaps would miss it by rounding, and
    # `q <= f_i` would be wrong for values that repeat.
    place = jnp.arange(1, values.shape[0])
    last = jnp.max(jnp.where(below & (gaps > 0), place, 0), axis=-1, initial=0)
    again = jnp.any(~below & (gaps > 0) & (place <= last[..., None]), axis=-1)
    return jnp.where(again, ordered[0] + jnp.sum(jnp.where(below, gaps, 0), axis=-1), ordered[last])


def credible_interval(
    embedding: Embedding, level: ArrayLike = 0.95, function: PointFunction = _itself
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    r"""The central interval that holds a share `level` of the probability.

    For each coordinate of f its ends are the `quantile`s at $(1 - \text{level}) / 2$ and
    $(1 + \text{level}) / 2$.

    **Returns:** lower and upper ends, each `[..., *shape]`. Arguments, cost and errors: `quantile`.
    """
    with known(level):
        share = jnp.asarray(level, embedding.weights.dtype)
    if share.ndim or (is_concrete(share) and not 0 < float(share) < 1):
        raise ValueError(f"`level` must be one number between 0 and 1, got {level}.")
    lower, upper = quantile(embedding, jnp.stack([(1 - share) / 2, (1 + share) / 2]), function)
    return lower, upper


def cdf(
    embedding: Embedding, values: ArrayLike, function: PointFunction = _itself
) -> Float[Array, "..."]:
    r"""Distribution function of real functions of the variable, the inverse of `quantile`.

    $$ F^*(t) = \sup \{ u \in [0, 1] : q(u) \le t \} $$

    with $q$ of `quantile`. For non-negative weights it is $\sum_{f_i \le t} w_i / \sum_i w_i$. For
    weights of any sign it is its monotone rearrangement: it goes from 0 to 1 and never down.

    **Arguments:** `embedding`, its weights `[..., n]`; `values` t, a number or `[m]`; `function`
    from one point to a real array, by default the point itself. Each coordinate of it is read on
    its own.

    **Returns:** `[..., *shape]`, with a leading axis `[m]` if t is a vector. NaN where t is NaN,
    and as `quantile`; errors as there. Cost O(b s (n log n + m log n)) for b embeddings and s
    coordinates.
    """
    dtype = embedding.weights.dtype
    wanted = jnp.asarray(values, dtype)
    if wanted.ndim > 1:
        raise ValueError(f"`values` must be a number or a vector, got shape {wanted.shape}.")
    found, weights = real_values(embedding, function), embedding.weights
    return _each_column(_distribution, found, weights, wanted)


def _distribution(
    weights: Float[Array, "b n"], values: Float[Array, " n"], wanted: Float[Array, " m"]
) -> Float[Array, "m b"]:
    ordered, found = _distributions(weights, values)
    levels, gaps = jnp.clip(found, 0, 1), jnp.diff(ordered)

    def one(level):
        climb, reached = _climb(level, ordered, gaps)
        # Sums of gaps agree with the values up to rounding. Where F has not gone down before, they
        # are the values.
        slack = 8 * jnp.finfo(values.dtype).eps * (jnp.abs(ordered[0]) + jnp.abs(ordered[-1]))
        in_turn = lax.cummax(climb) == jnp.arange(len(climb))
        reached = lax.cummax(jnp.where(in_turn, ordered[1:], reached - slack))
        place = jnp.searchsorted(reached, wanted, side="right")
        steps = jnp.concatenate([level[climb], jnp.ones(1, level.dtype)])
        found = steps[place]
        found = jnp.where(wanted < ordered[0], 0, jnp.where(wanted >= ordered[-1], 1, found))
        return jnp.where(jnp.isnan(wanted), jnp.nan, found)

    return jax.vmap(one, out_axes=1)(levels)


def _climb(
    level: Float[Array, " m"], ordered: Float[Array, " n"], gaps: Float[Array, " m"]
) -> tuple[Int[Array, " m"], Float[Array, " m"]]:
    """In which order the quantile function climbs by the gaps, and what it reaches."""
    climb = jnp.argsort(level)
    return climb, ordered[0] + jnp.cumsum(gaps[climb])


def rearranged_variance(
    weights: Float[Array, "b n"], values: Float[Array, " n"]
) -> Float[Array, " b"]:
    """Variances of the distributions that `quantile` reads, from weights of sum 1."""
    ordered, found = _distributions(weights, values)
    levels = jnp.clip(found, 0, 1)
    gaps, zero = jnp.diff(ordered), jnp.zeros(1, levels.dtype)

    def one(level):
        climb, reached = _climb(level, ordered, gaps)
        atoms = jnp.concatenate([ordered[:1], reached])
        masses = jnp.diff(level[climb], prepend=zero, append=zero + 1)
        return jnp.sum(masses * (atoms - jnp.sum(masses * atoms)) ** 2)

    return jax.vmap(one)(levels)
