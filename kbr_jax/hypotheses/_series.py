r"""How long points of a series depend on each other."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, is_concrete, size, take
from .._numerics import safe_divide, safe_sqrt
from .._typing import Array, Float, Points
from .._warnings import warn
from ..kernels import AbstractKernel, default_kernel
from ._results import centered

#: Length of a block in autocorrelation times. Two independent AR(.5) series of 100 points were
#: rejected at level .05 in .087, .065 and .055 of 400 pairs with blocks of 5, 6 and 8 times; AR(.9)
#: series of 300 points in .075, .062 and .055 with 3, 5 and 7.
_TIMES = 8
#: Blocks of a sample at least. From 2 x 3 blocks no p-value is below .05.
_BLOCKS = 4
#: Points that the time is read from.
_POINTS = 1000
#: Columns that are looked at alone: those whose neighbors in time correlate most.
_COLUMNS = 32


def block_length(dependent: bool | int, kernels: Any, x: Points, y: Points) -> int:
    """Points of a block: 1 for independent points, for True chosen by the features of the kernels.

    None takes the default kernel of the points. The slowest column counts too: two series of 500
    points, one column AR(.95) and nine of white noise, were rejected at level .05 in .16 of 100
    pairs without it, with it in .02.
    """
    most = min(size(x), size(y)) // _BLOCKS
    truth = isinstance(dependent, (bool, np.bool_))
    if truth and not dependent:
        return 1
    if not truth:
        return given_length(dependent, min(size(x), size(y)))
    if not all(map(is_concrete, jax.tree.leaves((x, y)))):
        raise ValueError(
            "`dependent=True` reads the points and cannot be used inside `jit`: give the length "
            "of a block as an integer."
        )
    if kernels is None:
        kernels = [default_kernel(jax.tree.map(lambda a, b: jnp.concatenate([a, b]), x, y))]
    time = max(float(feature_time(kernel, points)) for kernel in kernels for points in (x, y))
    time = max(time, _slowest_column(x, y))
    wanted = int(np.ceil(_TIMES * time))
    if wanted > most:
        warn(
            f"The series are short: their autocorrelation time is {time:.1f} steps, and blocks of "
            f"{wanted} points would leave fewer than {_BLOCKS} of them. Blocks of {max(most, 1)} "
            f"points are taken; the test may reject too often."
        )
    return max(min(wanted, most), 1)


def _slowest_column(x: Points, y: Points) -> float:
    """Longest autocorrelation time of a column alone. Of a single column its kernel tells.

    A kernel of many columns changes with all of them, and forgets the slow one with the fast ones.
    """
    pairs = [
        [leaf.reshape(len(leaf), -1) for leaf in pair]
        for pair in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    if sum(first.shape[1] for first, _ in pairs) < 2:
        return 1.0
    return max(float(_column_time(*pair)) for pair in pairs if pair[0].shape[1])


@eqx.filter_jit
def _column_time(x: Array, y: Array) -> Float[Array, ""]:
    chosen = lax.top_k(jnp.maximum(_following(x), _following(y)), min(_COLUMNS, x.shape[1]))[1]

    def time(columns):
        kernel = default_kernel(jnp.concatenate(columns))
        grams = (kernel.gram(column, column) for column in (c[:_POINTS] for c in columns))
        return jnp.maximum(*(_sure_time(gram, 2 * x.shape[1]) for gram in grams))

    return jnp.max(lax.map(time, (x[:, chosen].T, y[:, chosen].T)))


def _sure_time(gram: Float[Array, "n n"], many: int) -> Float[Array, ""]:
    """Autocorrelation time, and 1 where neighbors correlate as those of `many` white series may.

    The largest of m standard normals is about sqrt(2 log m). Without this bound 11 of 20 pairs of
    white series of 60 points and 30 columns had blocks of a quarter of the points, and a warning.
    """
    inner = centered(gram)
    spread = safe_sqrt(jnp.mean(inner**2) * gram.shape[0])
    sure = jnp.sum(jnp.diagonal(inner, 1)) > math.sqrt(2 * math.log(many)) * spread
    return jnp.where(sure, autocorrelation_time(gram), 1)


def _following(x: Array) -> Float[Array, " d"]:
    """Correlation of each column with itself one step later."""
    values = x.astype(float)
    moves = values - jnp.mean(values, axis=0)
    return safe_divide(jnp.sum(moves[1:] * moves[:-1], axis=0), jnp.sum(moves**2, axis=0))


def given_length(dependent: int, n: int) -> int:
    """A length of dependence that a series of n points holds four times."""
    length, most = as_count(dependent, "dependent"), max(n // _BLOCKS, 1)
    if length > most:
        raise ValueError(
            f"`dependent` = {length} points a block leave fewer than {_BLOCKS} blocks in a sample; "
            f"give at most {most}, or longer series."
        )
    return length


@eqx.filter_jit
def feature_time(kernel: AbstractKernel, x: Points) -> Float[Array, ""]:
    """Autocorrelation time of the features of a series."""
    x = take(x, slice(_POINTS))
    return autocorrelation_time(kernel.gram(x, x))


def autocorrelation_time(gram: Float[Array, "n n"]) -> Float[Array, ""]:
    r"""$1 + 2 \sum_k \rho_k$ of the features of a series.

    The sum ends before the first pair of lags whose sum is not positive (Geyer 1992, section 3.3).
    $\rho_k$ is the mean of $\langle \tilde\phi(x_t), \tilde\phi(x_{t + k}) \rangle$ over t, divided
    by that at lag 0. Of the first 1000 points, up to a third of them as lag.
    """
    gram = centered(gram[:_POINTS, :_POINTS])
    n = gram.shape[0]
    lags = max(n // 3, 2) // 2 * 2
    # In rows of 2 n + 1 numbers, column k holds the k-th diagonal.
    shifted = jnp.pad(jnp.pad(gram, ((0, 0), (0, n))).reshape(-1), (0, n)).reshape(n, -1)
    found = jnp.sum(shifted, axis=0)[:lags]
    pairs = jnp.sum((found / jnp.where(found[0] > 0, found[0], 1)).reshape(-1, 2), axis=1)
    kept = jnp.cumprod(pairs > 0).astype(pairs.dtype)
    return jnp.maximum(2 * jnp.sum(pairs * kept) - 1, 1)
