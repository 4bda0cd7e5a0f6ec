r"""Quantiles of an embedding whose weights may be negative."""

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import as_points, is_concrete
from .._typing import Array, ArrayLike, Float, Point, PointFunction
from ._embedding import Embedding, normalized


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
    $\inf \{t : F(t) \ge u\}$. Signed weights make F go up and down; then q is the quantile function
    of its monotone rearrangement, which is never further from the true distribution function than F
    itself, in any $L^p$ norm (Chernozhukov, Fernandez-Val and Galichon 2009).

    **Arguments:** `embedding`, its weights `[..., n]`; `probabilities`, u in [0, 1], a number or
    `[q]`; `function` from one point to a real array, by default the point itself.

    **Returns:** `[..., *shape]`, with a leading axis `[q]` if u is a vector. Between the least and
    the largest value; piecewise constant in the weights, so that gradients reach the values only.
    NaN where the weights are no distribution: where their sum is NaN, infinite, not positive, or
    positive by rounding alone (`normalize`). The indicator of a set is not in the RKHS of a smooth
    kernel: expect the error of F at a scale below the kernel's bandwidth. Cost O(b s n (log n + q))
    for b embeddings and s coordinates.

    **Raises:** `ValueError` for probabilities outside [0, 1] or of two axes, and for values that
    are not one real array.
    """
    dtype = embedding.weights.dtype
    levels = jnp.asarray(probabilities, dtype)
    if levels.ndim > 1 or (
        is_concrete(levels) and not np.all((np.asarray(levels) >= 0) & (np.asarray(levels) <= 1))
    ):
        raise ValueError(
            f"`probabilities` must be a number in [0, 1], or a vector of them; got {probabilities}."
        )
    values = jax.vmap(function)(as_points(embedding.points, "embedding.points"))
    if not isinstance(values, jax.Array) or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            "Quantiles need real values, one array for each point: give a `function` that returns "
            "such."
        )
    rows = values.reshape(values.shape[0], -1).astype(dtype)
    weights = embedding.weights.reshape(-1, values.shape[0])
    shares = normalized(weights)
    found = jax.vmap(lambda column: _rearranged(shares, column, levels.reshape(-1)), 1, 2)(rows)
    # Comparisons with NaN, or with shares of nothing, would find an end of the sample. Shares add
    # up to 1 unless guarded.
    known = (jnp.sum(weights, axis=1) > 0) & (jnp.sum(shares, axis=1) > 0.5)
    found = jnp.where(known[:, None], found, jnp.nan)
    return found.reshape(*levels.shape, *embedding.weights.shape[:-1], *values.shape[1:])


def _rearranged(
    weights: Float[Array, "b n"], values: Float[Array, " n"], levels: Float[Array, " q"]
) -> Float[Array, "q b"]:
    order = jnp.argsort(values)
    ordered = values[order]
    distribution = jnp.cumsum(weights[:, order], axis=1)[:, :-1]
    # Weights that sum to u only up to rounding have reached it.
    slack = 8 * jnp.finfo(weights.dtype).eps
    below = jax.vmap(lambda u: distribution < u - slack)(levels)
    return ordered[0] + jnp.sum(jnp.where(below, jnp.diff(ordered), 0), axis=-1)


def credible_interval(
    embedding: Embedding, level: ArrayLike = 0.95, function: PointFunction = _itself
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    r"""The central interval that holds a share `level` of the probability.

    For each coordinate of f its ends are the `quantile`s at $(1 - \text{level}) / 2$ and
    $(1 + \text{level}) / 2$.

    **Returns:** lower and upper ends, each `[..., *shape]`. Arguments, cost and errors: `quantile`.
    """
    share = jnp.asarray(level, embedding.weights.dtype)
    if share.ndim or (is_concrete(share) and not 0 < float(share) < 1):
        raise ValueError(f"`level` must be one number between 0 and 1, got {level}.")
    lower, upper = quantile(embedding, jnp.stack([(1 - share) / 2, (1 + share) / 2]), function)
    return lower, upper
