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
from .._typing import Array, ArrayLike, Bool, Float, Int, Points, with_numbers
from .._warnings import warn
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
#: The penalty is at least this much times the scale of the gain of a split in noise, and times the
#: largest square of a lone difference (see `_noise`). Where most points are equal, splits
#: beyond `_BEYOND` have cut out all others and gain nothing. Right number of changes in 100 series
#: of 200 points, by the slope alone, with the first bound, and with both: labels of which .1, .03
#: or .01 are 1, without a change .08, .92, .97; .00, .67, 1; .14, .33, 1; counts of mean .1 .05,
#: .93, .96; normal numbers without a change .96, 1, 1, with a step of 1 .94, .96, .96, with 3 steps
#: of 1.5 .88, .94, .94, with 15 of 300 raised by 3 .97, .99, .99. 6 in place of 4 misses steps of 1
#: (.85) and raised points (.70).
_SCALES, _LONE = 4, 0.2
#: A warning where twice the slope is more than this much times that scale and the mean square of
#: noise. Of normal numbers and labels with few changes none of 60 series has more than 1.2 times;
#: 10 series of 1000 points with 39 steps and at most 50 changes have 3.3 times, AR(.9) 1.9 times.
#: With fewer than `_FITTED` changes 5 of 100 series of 14 normal numbers were warned of.
_STEEP = 2
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
      few times more than there are changes. With about as many as there are, none may be found; a
      warning says so, except inside `jit`.
    - `penalty`: c >= 0. None takes it from the data, by the slope heuristic: twice the rate at
      which the costs fall with D beyond 60 % of `max_changes` (or of 5, if that is less), where
      splits only follow noise; at least a multiple of the noise, from neighbors in time, which
      decides for rare labels, counts and rounded numbers. The paper fits the two terms in D
      separately; one constant is more stable in short series.
    - `min_length`: the fewest points of a segment (static).

    **Returns:** a `ChangePoints`. One compiled program. Cost O(T^2 (d + D)), memory O(T D): the
    Gram matrix is formed by rows, and forgotten.

    Series without a change sometimes get one, short ones more often. The
    [results](../results/tests.md#where-single-tests-err) have the rates. In many dimensions the
    choice of c is cautious, and small changes of the deviations are not found. With an unbounded
    kernel an outlier hides changes that are smaller. Look at
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
        return _segment(kernel, x, most, most, shortest, penalty)[0]
    fitted = max(most, min(_FITTED, count // _POINTS_EACH, room))
    if fitted < 2:
        raise ValueError(
            f"{count} points are too few to choose the penalty from: give a `penalty`"
            + (", or `max_changes` of at least 2." if room > 1 else ".")
        )
    found, steep = _segment(kernel, x, most, fitted, shortest, None)
    if is_concrete(steep) and bool(steep):
        warn(
            f"The costs still fall steeply at {fitted} changes, so the penalty is too large: there "
            f"are about as many changes or more, or a trend or autocorrelation. Raise "
            f"`max_changes`, or give a `penalty`."
        )
    return found


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
) -> tuple[ChangePoints, Bool[Array, ""]]:
    """The segmentations, and whether the costs still fall steeply.

    The penalty is taken from the costs of up to `fitted` changes.

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
    steep = jnp.zeros((), bool)
    if penalty is None:
        far = slice(math.floor(_BEYOND * fitted), None)
        moves = shape[far] - jnp.mean(shape[far])
        slope = -safe_divide(jnp.sum(moves * costs[far]), jnp.sum(moves**2))
        scale, mean, largest = (part.astype(costs.dtype) for part in _noise(kernel, x))
        penalty = jnp.maximum(_OVER * slope, jnp.maximum(_SCALES * scale, _LONE * largest))
        # Where nothing is noise, as in exact steps, there is no penalty to be too large.
        if fitted >= _FITTED:
            steep = (mean > 0) & (_OVER * slope > _STEEP * (scale + mean))
    penalty = jnp.maximum(penalty.astype(costs.dtype), 0)
    costs, shape, starts = costs[: most + 1], shape[: most + 1], starts[:, :most]
    criteria = costs + penalty * shape
    # What is as good up to rounding has the fewest changes.
    error = rounding(jnp.sum(diagonal) + jnp.max(jnp.abs(whole)))
    chosen = jnp.argmax(criteria <= jnp.min(criteria) + error)
    found = ChangePoints(chosen, costs, criteria, _backwards(starts, most), penalty)
    return found, steep


def _noise(kernel: AbstractKernel, x: Points) -> tuple[Float[Array, ""], ...]:
    r"""Scale of noise, its mean square and its largest square.

    Noise is the difference of a point and the nearer of its neighbors in time: a step moves a
    point away from one of them, noise and lone values from both. For noise with eigenvalues
    $\lambda$ a split gains about a chi-squared variable times the scale
    $\sum \lambda^2 / \sum \lambda$.
    """
    index, square = jnp.arange(size(x)), kernel.diagonal(x)
    after = square[1:] + square[:-1] - 2 * jax.vmap(kernel)(take(x, index[1:]), take(x, index[:-1]))
    before, after = (jnp.pad(after, ends, constant_values=jnp.inf) for ends in ((1, 0), (0, 1)))
    near = jnp.where(after < before, index + 1, index - 1)
    squares = jnp.maximum(jnp.minimum(before, after), 0)

    def row(t):
        pair = kernel.gram(take(x, jnp.stack([t, near[t]])), x)
        moves = pair[0] - pair[1]
        apart = jnp.abs(index - t) > 2  # differences have no point in common
        products = jnp.where(apart, (moves - moves[near]) ** 2, 0)
        return jnp.sum(products), jnp.sum(apart)

    # Every second row: as many kernel values as the segmentation has.
    sums, counts = lax.map(row, index[::2], batch_size=min(size(x), _SUMMED))
    mean = safe_divide(jnp.sum(sums), jnp.sum(counts).astype(sums.dtype))
    spread = jnp.mean(squares)
    return safe_divide(mean, spread), spread, jnp.max(squares)


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
