"""Regions and intervals that hold what they say, and bandwidths, by held-out data."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_fraction, as_points, as_positive, check_alike, size
from .._numerics import nan_unless_finite, one_program
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding, credible_interval, credible_level, log_score

#: Masses of the regions whose coverage is matched.
LEVELS = (0.5, 0.8, 0.95)
#: Temperatures are searched between 1 / LIMIT and LIMIT, at COUNT values with equal ratios.
LIMIT, COUNT = 16.0, 33
#: Bandwidths of densities are searched between these multiples of Scott's rule.
WIDTHS, NUM_WIDTHS = (0.05, 4.0), 32


def calibrate(beliefs: Embedding, points: Points) -> Float[Array, ""]:
    r"""Choose the temperature of credible regions on held-out data.

    It is the $\tau$ for which the shares of true points inside the regions
    $\{s : a_\tau(s) \le u\}$ of `credible_level` differ least from u = .5, .8 and .95, summed over
    squares, among 33 values between 1/16 and 16.

    **Arguments:** `beliefs`, weights `[b, n]`; `points` `[b, ...]`, the true ones, from data that
    the model has not seen. Beliefs without positive weights are left out.

    **Returns:** a scalar, for `credible_level(..., temperature=)`. Cost 33 times that of
    `credible_level`. **Raises:** `ValueError` as `credible_level`.
    """
    return _temperature(beliefs, _one_each(beliefs, points, "beliefs"))


@eqx.filter_jit
def _temperature(beliefs: Embedding, points: Points) -> Float[Array, ""]:
    temperatures = LIMIT ** jnp.linspace(-1, 1, COUNT)

    def error(tau):
        found = coverage(credible_level(beliefs, points, temperature=tau))
        return jnp.sum((found - jnp.asarray(LEVELS)) ** 2)

    errors = lax.map(error, temperatures)
    errors = jnp.where(jnp.isnan(errors), jnp.inf, errors)
    # Of equally good ones the nearest to 1.
    eps = float(jnp.finfo(errors.dtype).eps)
    best = errors <= jnp.min(errors) * (1 + 4 * eps) + 4 * eps
    return temperatures[jnp.argmin(jnp.where(best, jnp.abs(jnp.log(temperatures)), jnp.inf))]


@jax.jit
def coverage(levels: Float[Array, " b"]) -> Float[Array, " u"]:
    """Shares of `credible_level`s inside the regions of 50, 80 and 95 %, leaving NaN out.

    **Arguments:** `levels` `[b]`, in [0, 1] or NaN. **Returns:** `[3]`; zeros where all are NaN.
    Cost O(b).
    """
    known = ~jnp.isnan(levels)
    slack = 64 * jnp.finfo(levels.dtype).eps  # levels are sums of weights
    inside = levels[:, None] <= jnp.asarray(LEVELS, levels.dtype) + slack
    return jnp.sum(inside & known[:, None], axis=0) / jnp.maximum(jnp.sum(known), 1)


def fit_bandwidth(forecasts: Embedding, points: Points) -> Float[Array, ""]:
    r"""Choose the `bandwidth` of `density`: the least mean `log_score` of forecasts.

    32 factors between .05 and 4 are tried. Scores that are worse than that of the widest by 10
    count as that: one point in a tail does not decide.

    **Arguments:** `forecasts`, weights `[b, n]`, for example `leave_out_forecasts(model)`; `points`
    `[b, ...]`, what happened. Forecasts without a distribution are left out.

    **Returns:** a scalar; NaN where no forecast has a finite score. Cost O(32 b n d). **Raises:**
    `ValueError` as `log_score`.
    """
    return _bandwidth(forecasts, _one_each(forecasts, points, "forecasts"))


@eqx.filter_jit
def _bandwidth(forecasts: Embedding, points: Points) -> Float[Array, ""]:
    factors = jnp.asarray(np.geomspace(*WIDTHS, NUM_WIDTHS), forecasts.weights.dtype)
    scores = lax.map(lambda c: log_score(forecasts, points, bandwidth=c), factors)
    limited = jnp.minimum(scores, scores[-1] + 10)
    means = jnp.mean(limited, axis=1, where=~jnp.isnan(limited))
    best = factors[jnp.nanargmin(means)]
    return jnp.where(jnp.any(jnp.isfinite(means)), best, nan_unless_finite(means))


def conformal_margin(
    forecasts: Embedding, points: Points, level: ArrayLike = 0.9
) -> Float[Array, "..."]:
    r"""By how much intervals must grow to hold the truth as often as they say.

    For held-out points $y_j$ and the `credible_interval`s $[l_j, u_j]$ of their forecasts it is the
    $\lceil (b + 1) \, \text{level} \rceil$-th smallest of
    $e_j = \max(l_j - y_j, y_j - u_j)$, for each coordinate (conformalized quantile regression,
    Romano, Patterson and Candes 2019). A new interval, widened by the margin on both sides, holds a
    new y with at least the probability `level`, whatever the distribution, if the pairs are
    exchangeable.

    **Arguments:** `forecasts`, weights `[b, n]`, on real points, or `jax.vmap(forecast)(x)` of a
    `Forecast`; `points` `[b, ...]`, what happened, from data that the model has not seen. With
    `leave_out_forecasts` the guarantee is not exact; it holds well where one pair changes the model
    little. Forecasts without a distribution, such as those of padding, are left out. `level`
    between 0 and 1.

    **Returns:** `[*point]`, negative where intervals are too wide, infinite for fewer than
    level / (1 - level) points. Cost that of `quantile`. **Raises:** `ValueError` as
    `credible_interval` and for another number of points.
    """
    share = as_fraction(level, "level")
    return _margin(_excess(forecasts, points, share), share)


@one_program
def _margin(excess: Float[Array, "b ..."], share: Float[Array, ""]) -> Float[Array, "..."]:
    count = jnp.sum(~jnp.isnan(excess), axis=0)
    product = (count + 1).astype(share.dtype) * share
    rank = jnp.ceil(product * (1 - 4 * jnp.finfo(share.dtype).eps)).astype(int)
    ordered = jnp.sort(excess, axis=0)  # NaN comes last
    place = jnp.clip(rank - 1, 0, excess.shape[0] - 1)
    found = jnp.take_along_axis(ordered, place[None], axis=0)[0]
    return jnp.where(rank > count, jnp.inf, found)


def adaptive_margins(
    forecasts: Embedding, points: Points, level: ArrayLike = 0.9, *, rate: ArrayLike = 0.05
) -> Float[Array, "T ..."]:
    r"""Margins of intervals in time, each from what happened before.

    With $e_t$ of `conformal_margin` and its largest size so far, $b_t$,

    $$ q_{t+1} = q_t + \text{rate} \; b_t \, (1[e_t > q_t] - (1 - \text{level})), \qquad q_1 = 0
       $$

    (quantile tracking, Angelopoulos, Candes and Tibshirani 2023). The share of times t with
    $e_t \le q_t$ tends to `level` for any series, also where the model becomes wrong.

    **Arguments:** `forecasts`, weights `[T, n]`, in the order of time: beliefs of a filter,
    $P(y_t | \dots)$ before $y_t$ is seen; `points` `[T, ...]`; `level` between 0 and 1; `rate` > 0:
    larger follows changes faster and is less steady.

    **Returns:** q `[T, *point]`: the interval at t is `credible_interval` widened by it. Cost that
    of `quantile`. **Raises:** `ValueError` as `conformal_margin`.
    """
    share, step = as_fraction(level, "level"), as_positive(rate, "rate", scalar=True)
    return _tracked(_excess(forecasts, points, share), share, step)


@one_program
def _tracked(
    excess: Float[Array, "T ..."], share: Float[Array, ""], step: Float[Array, ""]
) -> Float[Array, "T ..."]:
    def advance(state, now):
        margin, largest = state
        largest = jnp.fmax(largest, jnp.abs(now))
        missed = (now > margin).astype(now.dtype)
        moved = margin + step.astype(now.dtype) * largest * (missed - (1 - share.astype(now.dtype)))
        # What was not observed teaches nothing.
        return (jnp.where(jnp.isnan(now), margin, moved), largest), margin

    start = jnp.zeros(excess.shape[1:], excess.dtype)
    return lax.scan(advance, (start, start), excess)[1]


def _excess(forecasts: Embedding, points: Points, level: Float[Array, ""]) -> Float[Array, "b ..."]:
    """By how much points lie outside their intervals; negative inside."""
    points = as_points(points, "points")
    atoms = jax.tree.leaves(forecasts.points)[0]
    own = atoms.shape[:2] == forecasts.weights.shape == (size(points), atoms.shape[1])
    if own and isinstance(points, jax.Array) and atoms.ndim == points.ndim + 1:
        # What `jax.vmap` of a `Forecast` returns: each forecast has atoms of its own.
        lower, upper = jax.vmap(lambda one: credible_interval(one, level))(forecasts)
        return _outside(points, lower, upper)
    points = _one_each(forecasts, points, "forecasts")
    return _outside(points, *credible_interval(forecasts, level))


def _one_each(forecasts: Embedding, points: Points, name: str) -> Points:
    """Checked points, one for each member of a batch."""
    points = as_points(points, "points")
    shape = forecasts.weights.shape
    if len(shape) != 2:
        raise ValueError(
            f"`{name}` must be a batch with weights [b, n] and a point for each; got weights of "
            f"shape {list(shape)}."
        )
    check_alike(points, "points", forecasts.points, f"{name}.points")
    if size(points) != shape[0]:
        raise ValueError(f"`{name}` has {shape[0]} members, but `points` holds {size(points)}.")
    return points


@one_program
def _outside(points: Array, lower: Array, upper: Array) -> Float[Array, "b ..."]:
    points = points.astype(lower.dtype)
    return jnp.maximum(lower - points, points - upper)
