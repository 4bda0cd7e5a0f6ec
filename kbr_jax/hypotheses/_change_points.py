"""Where does the distribution of a series change? Segments by dynamic programming.

Harchaoui and Cappe 2007; Arlot, Celisse and Harchaoui 2019.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    as_count,
    as_non_negative,
    as_points,
    check_finite,
    is_concrete,
    size,
    take,
)
from .._numerics import matmul, safe_divide, safe_sqrt
from .._typing import Array, ArrayLike, Float, Int, Points, with_numbers
from ..kernels import (
    AbstractKernel,
    Gaussian,
    KernelLike,
    TensorProduct,
    as_kernel,
    coordinate_scale,
    default_kernel,
    warn_of_scale,
)
from ._results import rounding

#: Most changes by default, and points for each. The slope of the costs needs several times as many
#: changes as the series has: with at most 20 in place of 50, 9 changes of mean in 300 points are
#: counted as 7.6 on average, not 9.2. With 4 points for each in place of 6, 6 % of series of 120
#: points without a change get one, not 3 %.
_MOST, _POINTS_EACH = 50, 6
#: The penalty is this much times the slope of the costs, fitted beyond this share of the most
#: changes: both as in the simulations of Arlot, Celisse and Harchaoui (2019).
_OVER, _BEYOND = 2, 0.6
#: Changes at least, as far as they fit, whose costs the slope is fitted to: with at most one change
#: the line through the costs of none and one would never choose one.
_FITTED = 5
#: Entries of a row that are summed by one product: 3000 sums of 3000 numbers took .4 s less than by
#: `cumsum`.
_SUMMED = 64


class ChangePoints(eqx.Module):
    """The best segmentations of a series of T points, for 0 to D changes.

    - `changes`: the indices at which new segments start, for the chosen number of changes.
    - `num_changes`: the chosen number.
    - `costs` `[D + 1]`: the least scatter within segments, for each number of changes.
    - `criteria` `[D + 1]`: the costs with the penalty; the chosen number has the smallest.
    - `segmentations` `[D + 1, D]`: row d holds the d starts of new segments, then the value T.
    - `penalty`: the constant that multiplies the complexity, see `change_points`.
    """

    num_changes: Int[Array, ""]
    costs: Float[Array, " number"]
    criteria: Float[Array, " number"]
    segmentations: Int[Array, "number most"]
    penalty: Float[Array, ""]

    __repr__ = with_numbers

    @property
    def changes(self) -> np.ndarray:
        """The starts of new segments, as many as there are. Not for use inside `jit`."""
        if not is_concrete(self.num_changes) or np.ndim(self.num_changes):
            raise ValueError(
                "`changes` has as many entries as changes were found, which a program being "
                "compiled, or a batch, cannot have: use `segmentations` and `num_changes`."
            )
        count = int(self.num_changes)
        return np.asarray(self.segmentations)[count, :count]


def change_points(
    kernel: KernelLike,
    x: Points,
    *,
    max_changes: int | None = None,
    penalty: ArrayLike | None = None,
    min_length: int = 2,
) -> ChangePoints:
    r"""Split a series where its distribution changes.

    The cost of a segment is its scatter in the space of the kernel. Dynamic programming finds the
    starts $0 = \tau_0 < \tau_1 < \dots < \tau_D$ with the least sum for each D (Harchaoui and Cappe
    2007; row by row as Celisse et al. 2018),

    $$ C_D = \min_\tau \sum_d \Big[ \sum_{t \in S_d} k(x_t, x_t)
       - \frac{1}{|S_d|} \sum_{s, t \in S_d} k(x_s, x_t) \Big], \quad
       S_d = \{\tau_d, \dots, \tau_{d+1} - 1\}, $$

    and the number of changes minimizes (as in Arlot, Celisse and Harchaoui 2019)

    $$ C_D + c \, \Big[ D + \log \binom{T - 1}{D} \Big]. $$

    **Arguments:**

    - `kernel`: what a change is seen with. None stands for `default_kernel`, with the median
      distance of neighbors in time, which a few changes do not move. A change of shape needs a
      bandwidth as small as the shape.
    - `x`: the series, T points `[T, ...]` in order of time.
    - `max_changes`: the largest D (static); by default T / 6, at most 50. The choice of c needs a
      few times more than there are changes.
    - `penalty`: c >= 0. None takes it from the data, by the slope heuristic: twice the rate at
      which the costs fall with D beyond 60 % of `max_changes` (or of 5, if that is less), where
      splits only follow noise. The paper fits the two terms in D separately; one constant is more
      stable in short series.
    - `min_length`: the fewest points of a segment (static).

    **Returns:** a `ChangePoints`. One compiled program. Cost O(T^2 (d + D)), memory O(T D): the
    Gram matrix is formed by rows, and forgotten.

    Series without a change sometimes get one, short ones more often. The
    [results](../results/tests.md#where-single-tests-err) have the rates. In many dimensions the
    choice of c is cautious, and small changes of the deviations are not found. Look at
    `segmentations`, or give a smaller `penalty`.

    Points must be independent of each other, given the segment. In a series with autocorrelation,
    or with a trend, slow movements count as changes. Then give a `penalty` from a stretch without
    changes, or segment the residuals of a model.

    **Raises:** `ValueError` for NaN, for fewer than `2 min_length` points, where T points do not
    suffice for `max_changes`, and for fewer than 12 points without a `penalty` or a `max_changes`
    above 1.

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> x = jax.random.normal(jax.random.key(0), (120,))
    >>> kbr.hypotheses.change_points(None, x.at[50:].add(9.0)).changes.tolist()
    [50]
    """
    x = check_finite(as_points(x, "x"), "x")
    shortest, count = as_count(min_length, "min_length"), size(x)
    room = count // shortest - 1
    if room < 1:
        raise ValueError(
            f"`x` has {count} points; a change needs two segments of `min_length` = {shortest}."
        )
    kernel = _default(x) if kernel is None else as_kernel(kernel)
    kernel.check(x, "x")
    warn_of_scale(kernel, x, "x")
    if max_changes is None:
        most = min(_MOST, max(1, count // _POINTS_EACH), room)
    else:
        most = as_count(max_changes, "max_changes")
        if most > room:
            raise ValueError(
                f"`max_changes` = {most} segments of `min_length` = {shortest} do not fit into "
                f"{count} points: take at most {room}."
            )
    if penalty is not None:
        penalty = as_non_negative(penalty, "penalty", scalar=True)
        return _segment(kernel, x, most, most, shortest, penalty)
    fitted = max(most, min(_FITTED, count // _POINTS_EACH, room))
    if fitted < 2:
        raise ValueError(
            f"{count} points are too few to choose the penalty from: give a `penalty`"
            + (", or `max_changes` of at least 2." if room > 1 else ".")
        )
    return _segment(kernel, x, most, fitted, shortest, None)


def _default(x: Points) -> AbstractKernel:
    """`default_kernel` with the median distance of neighbors in time.

    The median of all distances is as wide as a large jump: of 200 series of 100 points with a jump
    of 10 deviations, 55 got more changes, now 14 (F1 on annotated series: .654, now .678).
    """
    if isinstance(x, (tuple, list)):
        return TensorProduct(tuple(_default(part) for part in x))
    found = default_kernel(x)
    if not isinstance(found, Gaussian):
        return found
    moves = jnp.diff(x, axis=0)
    scale = coordinate_scale(moves)
    distances = safe_sqrt(jnp.sum((moves / scale).reshape(len(moves), -1) ** 2, axis=1))
    median, mean = jnp.median(distances), jnp.mean(distances)
    return Gaussian(scale * jnp.where(median > 0, median, jnp.where(mean > 0, mean, 1)))


@eqx.filter_jit
def _segment(
    kernel: AbstractKernel, x: Points, most: int, fitted: int, shortest: int, penalty: Array | None
) -> ChangePoints:
    """The penalty is taken from the costs of up to `fitted` changes.

    Costs are those of features relative to one of them: far from 0, a linear kernel keeps digits.
    """
    whole, count = kernel.diagonal(x), size(x)
    middle = count // 2
    offsets = kernel.gram(x, take(x, slice(middle, middle + 1)))[:, 0].astype(whole.dtype)
    offsets = offsets - offsets[middle] / 2
    diagonal = jnp.maximum(whole - 2 * offsets, 0)
    totals = jnp.concatenate([jnp.zeros(1, diagonal.dtype), jnp.cumsum(diagonal)])
    costs, starts = _program(kernel, x, offsets, totals, fitted, shortest)
    number = np.arange(fitted + 1)
    ways = [math.lgamma(count) - math.lgamma(d + 1) - math.lgamma(count - d) for d in number]
    shape = jnp.asarray(number + np.asarray(ways), costs.dtype)
    if penalty is None:
        far = slice(math.floor(_BEYOND * fitted), None)
        moves = shape[far] - jnp.mean(shape[far])
        penalty = -_OVER * safe_divide(jnp.sum(moves * costs[far]), jnp.sum(moves**2))
    penalty = jnp.maximum(penalty.astype(costs.dtype), 0)
    costs, shape, starts = costs[: most + 1], shape[: most + 1], starts[:, :most]
    criteria = costs + penalty * shape
    # What is as good up to rounding has the fewest changes.
    error = rounding(jnp.sum(diagonal) + jnp.max(jnp.abs(whole)))
    chosen = jnp.argmax(criteria <= jnp.min(criteria) + error)
    return ChangePoints(chosen, costs, criteria, _backwards(starts, most), penalty)


def _program(
    kernel: AbstractKernel,
    x: Points,
    offsets: Float[Array, " n"],
    totals: Float[Array, " ends"],
    most: int,
    shortest: int,
) -> tuple[Float[Array, " number"], Int[Array, "n most"]]:
    """Least costs, and the start of the last segment of each beginning of the series.

    A step adds one point to all segments that end there. Its state: the sums of the Gram matrix
    over segments from each start, and the least costs `[D + 1, T]` of the points before each start.
    """
    count = size(x)
    start = jnp.arange(count)

    def step(state, t):
        sums, least = state
        row = kernel.gram(jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, t, 1), x), x)[
            0
        ].astype(totals.dtype)
        before = _sums_from(jnp.where(start < t, row - offsets - offsets[t], 0))
        sums = sums + jnp.where(start <= t, 2 * before + totals[t + 1] - totals[t], 0)
        length = t + 1 - start
        cost = totals[t + 1] - totals[:-1] - sums / jnp.maximum(length, 1).astype(sums.dtype)
        cost = jnp.where(length >= shortest, jnp.maximum(cost, 0), jnp.inf)
        split = least[:-1] + cost
        best = jnp.min(split, axis=1)
        # Faster than `argmin`, which compares pairs of a value and an index one after the other.
        last = jnp.min(jnp.where(split == best[:, None], start, count), axis=1)
        found = jnp.concatenate([cost[:1], best])
        return (sums, least.at[:, t + 1].set(found, mode="drop")), (found, last)

    state = jnp.zeros(count, totals.dtype), jnp.full((most + 1, count), jnp.inf, totals.dtype)
    found, starts = lax.scan(step, state, start)[1]
    return found[-1], starts


def _sums_from(row: Float[Array, " n"]) -> Float[Array, " n"]:
    """`[sum_{j >= i} row_j]_i`, by two products with a triangular matrix."""
    count = row.shape[0]
    parts = jnp.pad(row, (0, -count % _SUMMED)).reshape(-1, _SUMMED)
    within = matmul(parts, jnp.tril(jnp.ones((_SUMMED, _SUMMED), row.dtype)))
    behind = jnp.tril(jnp.ones((parts.shape[0],) * 2, row.dtype), -1)
    return (within + matmul(within[:, 0], behind)[:, None]).reshape(-1)[:count]


def _backwards(starts: Int[Array, "n most"], most: int) -> Int[Array, "number most"]:
    """The starts of all segments, from the last back to the first."""
    count = starts.shape[0]
    number = jnp.arange(most + 1)

    def step(end, column):
        index, last = column
        end = jnp.where(number > index, last[end - 1], end)
        return end, jnp.where(number > index, end, count)

    first = jnp.full(most + 1, count, starts.dtype)
    columns = jnp.arange(most), starts.T
    return lax.scan(step, first, columns, reverse=True)[1].T
