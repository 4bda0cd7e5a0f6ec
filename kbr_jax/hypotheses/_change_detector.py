r"""Has the distribution of a stream changed? A window is compared with a reference, online.

The scan statistic of Li, Xie, Dai and Song (2019).
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import (
    as_count,
    as_points,
    as_real,
    check_alike,
    check_finite,
    is_concrete,
    size,
    take,
)
from .._typing import Array, Bool, Float, Int, Point, Points, PRNGKeyArray, with_numbers
from .._warnings import warn
from ..kernels import AbstractKernel, KernelLike, checked_kernel, gram_matvec
from ._results import relevant, rounding, simulate
from ._series import feature_time

#: False alarms that the simulation of a threshold waits for. The run length then has a relative
#: error of about 1 / sqrt(200) = 7 %.
_ALARMS = 200
#: Least reference, in windows. Of 3 windows a permutation leaves 2 to compare with.
_WINDOWS = 3
#: A warning where the autocorrelation time exceeds 1 by this, divided by the root of the number of
#: points. Of 200 series of 75 to 1000 independent numbers up to 2 % have one; of those with a
#: coefficient of .5 28 % (75 points), 70 % (150) and 99 % (400).
_DEPENDENT = 10.0


class ChangeDetector(eqx.Module):
    """A reference sample and a threshold. Fit it with `fit_change_detector`.

    - `offset`: mean of the kernel between two points of the reference.
    - `scale`: standard deviation of the squared MMD without a change.
    - `threshold`: an alarm is a statistic above it.
    """

    kernel: AbstractKernel
    reference: Points
    offset: Float[Array, ""]
    scale: Float[Array, ""]
    threshold: Float[Array, ""]
    window: int = eqx.field(static=True)

    __repr__ = with_numbers


class DetectorState(eqx.Module):
    """The last b points, and what the kernel says of them. `filled` of them have been seen."""

    points: Points
    within: Float[Array, "b b"]
    cross: Float[Array, " b"]
    position: Int[Array, ""]
    filled: Int[Array, ""]


class Detection(eqx.Module):
    """Statistic and alarm of a step. Of a stream `[T]` of them, and the state behind the last."""

    statistic: Float[Array, "*steps"]
    alarm: Bool[Array, "*steps"]
    state: DetectorState | None = None

    __repr__ = with_numbers


def fit_change_detector(
    kernel: KernelLike,
    reference: Points,
    *,
    window: int,
    average_run_length: int,
    key: PRNGKeyArray,
) -> ChangeDetector:
    r"""Learn from a reference how large the MMD of a window is without a change.

    The statistic is the unbiased squared MMD of the last b points y and the m reference points x,
    in units of its standard deviation where both have one distribution,

    $$ Z = \frac1\sigma \Big[ \frac{1}{m (m-1)} \sum_{i \ne j} k(x_i, x_j)
       + \frac{1}{b (b-1)} \sum_{i \ne j} k(y_i, y_j) - \frac{2}{m b} \sum_{ij} k(x_i, y_j) \Big],
       \quad \sigma^2 = 2 \, \mathrm{E} \, \tilde k(x, x')^2
       \Big[ \frac{1}{b (b-1)} + \frac{2}{m b} + \frac{1}{m (m-1)} \Big], $$

    with the centered kernel $\tilde k$. The scan B-statistic (Li et al. 2019) averages the
    MMD of the window and each of m / b blocks of the reference. That is the same up to a constant,
    but for pairs which the paper leaves out for speed. A sum over the window costs no more here.

    **Arguments:**

    - `kernel`: what a change is seen with; None stands for `default_kernel(reference)`.
    - `reference`: m points `[m, ...]` from before the change, at least three windows of them.
    - `window`: b, points that are compared (static). A short one reacts to a large change at once;
      a long one sees a small change at all.
    - `average_run_length`: steps from the first full window to a false alarm, on average (static).
    - `key`: of the permutations.

    The threshold h comes from shuffles of the reference, in which each window is compared with the
    rest: $P(\max_{t \le L} Z_t \le h) = e^{-L / \mathrm{ARL}}$. The paper takes Z as normal. It is
    skewed to the right, and with the paper's threshold alarms come too early.

    **Returns:** a `ChangeDetector`, for `detect_changes` and `detector_step`. Cost O(m^2 d), and
    200 ARL b kernel values for the simulation; memory O(m).

    The run length is an average over references, and larger than the wanted one: somewhat with
    a reference of many windows, more than twice with one of three windows, and about twice for
    rare labels. Then changes are seen later too. See the
    [results](../results/tests.md#change-points).

    Points must be independent of each other. Shuffling hides autocorrelation, and the run length
    is then much too short.

    **Raises:** `ValueError` for NaN, a window of one point, and fewer than three windows.

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> x = jax.random.normal(keys[0], (300,))
    >>> detector = kbr.hypotheses.fit_change_detector(
    ...     None, x, window=20, average_run_length=2000, key=keys[1]
    ... )
    >>> stream = jax.random.normal(keys[2], (200,)).at[100:].add(2.0)
    >>> 100 <= int(kbr.hypotheses.detect_changes(detector, stream).alarm.argmax()) < 120
    True
    """
    reference = check_finite(as_points(reference, "reference"), "reference")
    kernel = checked_kernel(kernel, reference, "reference")
    width, length = as_count(window, "window"), as_count(average_run_length, "average_run_length")
    count = size(reference)
    if width < 2 or count < _WINDOWS * width:
        raise ValueError(
            f"`window` = {width} must be at least 2, and at most a third of the {count} points of "
            f"`reference`."
        )
    detector, lost = _fit(kernel, reference, width, length, key)
    time = feature_time(kernel, reference)
    if (
        is_concrete(lost)
        and float(lost) > 0.5 * float(detector.threshold)
        and any(bool(jnp.any(leaf != leaf[0])) for leaf in jax.tree.leaves(reference))
    ):
        warn(
            "Most digits of the kernel are lost to rounding, and changes may be missed: subtract "
            "the mean of `reference` from all points, or use float64."
        )
    elif is_concrete(time) and float(time) > 1 + _DEPENDENT / math.sqrt(count):
        warn(
            f"The points of `reference` depend on each other: their autocorrelation time is "
            f"{float(time):.1f} steps, and false alarms come sooner than after "
            f"{length} steps. Thin the series, or watch the residuals of a model."
        )
    return detector


@eqx.filter_jit
def _fit(
    kernel: AbstractKernel, reference: Points, width: int, length: int, key: Array
) -> tuple[ChangeDetector, Float[Array, ""]]:
    count, diagonal = size(reference), kernel.diagonal(reference)
    whole = gram_matvec(kernel, reference, reference, jnp.ones_like(diagonal))
    others = whole - diagonal
    offset = jnp.sum(others) / float(count * (count - 1))
    # Means with the diagonal: a constant part of the kernel cancels.
    spread = _spread(kernel, reference, whole / count, jnp.sum(whole) / float(count**2))
    scale = spread * _deviation(count, width)
    magnitude = 4 * jnp.mean(jnp.abs(diagonal)) / scale
    windows = min(count - width + 1, length)
    found = simulate(
        key,
        math.ceil(_ALARMS * length / windows),
        lambda data, key: jax.random.permutation(key, count)[: windows + width - 1],
        lambda data, draws: _largest(data[0], data[1], data[2], draws, width),
        (kernel, reference, others),
    )
    largest = jnp.quantile(found, math.exp(-windows / length), method="higher")
    threshold = largest / (spread * _deviation(count - width, width))
    lost = rounding(magnitude)
    return ChangeDetector(kernel, reference, offset, scale, threshold + lost, width), lost


def _deviation(count: int, width: int) -> float:
    """Standard deviation of the squared MMD, in units of the root of E k~(x, x')^2."""
    within = 1 / (width * (width - 1)) + 1 / (count * (count - 1))
    return math.sqrt(2 * (within + 2 / (count * width)))


def _spread(
    kernel: AbstractKernel, x: Points, means: Float[Array, " n"], mean: Float[Array, ""]
) -> Float[Array, ""]:
    """Root of the mean square of the centered kernel between two points, row by row."""
    count = means.shape[0]

    def row(pair):
        index, own = pair
        values = kernel.gram(jax.tree.map(lambda leaf: leaf[index][None], x), x)[0]
        other = jnp.arange(count) != index
        centered = jnp.where(other, values - own - means + mean, 0)
        return jnp.sum(centered**2), jnp.sum(jnp.where(other, values, 0) ** 2)

    sums = lax.map(row, (jnp.arange(count), means), batch_size=min(count, 32))
    return relevant(*(jnp.sum(part) / float(count * (count - 1)) for part in sums))


def _largest(
    kernel: AbstractKernel,
    reference: Points,
    others: Float[Array, " m"],
    draws: Int[Array, "c l"],
    width: int,
) -> Float[Array, " c"]:
    """Largest squared MMD of a window of shuffled points and all points outside, `[c]`."""
    points, (rows, length) = take(reference, draws), draws.shape
    count, last = others.shape[0], length - width + 1
    pairs = jax.vmap(jax.vmap(kernel))

    def add(lag, sums):
        moved = jax.tree.map(lambda leaf: jnp.roll(leaf, lag, axis=1), points)
        values = jnp.where(jnp.arange(length) >= lag, pairs(points, moved), 0)
        sums_to = jnp.cumsum(values, axis=1)
        before = lax.dynamic_slice_in_dim(sums_to, lag - 1, last, axis=1)
        return sums + sums_to[:, width - 1 :] - before

    within = 2 * lax.fori_loop(1, width, add, jnp.zeros((rows, last), others.dtype))
    to_all = jnp.pad(jnp.cumsum(others[draws], axis=1), ((0, 0), (1, 0)))
    to_all = to_all[:, width:] - to_all[:, :last]
    outside = count - width
    own = within / (width * (width - 1))
    rest = (jnp.sum(others) - 2 * to_all + within) / float(outside * (outside - 1))
    return jnp.max(own + rest - 2 * (to_all - within) / (width * outside), axis=1)


def init_detector(detector: ChangeDetector) -> DetectorState:
    """The state before the first point of a stream, for `detector_step`."""
    width, dtype = detector.window, detector.scale.dtype
    none = jnp.zeros((), int)
    return DetectorState(
        take(detector.reference, slice(0, width)),
        jnp.zeros((width, width), dtype),
        jnp.zeros(width, dtype),
        none,
        none,
    )


def detector_step(
    detector: ChangeDetector, state: DetectorState, x: Point
) -> tuple[DetectorState, Detection]:
    """Add one point of a stream: `jax.jit(detector_step)(detector, state, x)`.

    **Arguments:** `state` from `init_detector` or the last step; `x`, one point.

    **Returns:** the next state, and a `Detection`. Its statistic is 0 until the window is full. A
    point that is NaN raises the alarm for as long as it is in the window. Cost O((m + b) d + b^2).

    **Raises:** `ValueError` for a point of another kind than in the reference.
    """
    point = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], x)
    check_alike(point, "x", detector.reference, "detector.reference")
    point = as_real(point, detector.reference)
    detector.kernel.check(point, "x")
    _check_state(detector, state)
    return _add(detector, state, point)


def _add(
    detector: ChangeDetector, state: DetectorState, point: Points
) -> tuple[DetectorState, Detection]:
    width, at, dtype = detector.window, state.position, detector.scale.dtype
    points = jax.tree.map(lambda old, new: old.at[at].set(new[0]), state.points, point)
    row = detector.kernel.gram(point, points)[0].astype(dtype).at[at].set(0)
    within = state.within.at[at].set(row).at[:, at].set(row)
    mean = jnp.mean(detector.kernel.gram(point, detector.reference).astype(dtype))
    cross = state.cross.at[at].set(mean)
    filled = jnp.minimum(state.filled + 1, width)
    squared = detector.offset + jnp.sum(within) / (width * (width - 1)) - 2 * jnp.mean(cross)
    known = (filled == width) | jnp.isnan(squared)
    statistic = jnp.where(known, squared / detector.scale, 0)
    alarm = ~(statistic <= jnp.maximum(detector.threshold, 0))
    following = DetectorState(points, within, cross, (at + 1) % width, filled)
    return following, Detection(statistic, alarm)


def detect_changes(
    detector: ChangeDetector, stream: Points, *, state: DetectorState | None = None
) -> Detection:
    """Compare each window of a stream with the reference, by one scan of `detector_step`.

    **Arguments:**

    - `stream`: T points `[T, ...]` in order of time.
    - `state`: of an earlier part of the stream (`found.state`), to go on from.

    **Returns:** a `Detection` with statistics and alarms `[T]`, and the state behind the last
    point. Alarms do not reset the window. A change is seen some steps late: the change was among
    the last b points of the first alarm, in most cases. Cost O(T ((m + b) d + b^2)).

    **Raises:** `ValueError` for NaN, and for points of another kind than in the reference.
    """
    stream = check_finite(as_points(stream, "stream"), "stream")
    check_alike(stream, "stream", detector.reference, "detector.reference")
    detector.kernel.check(stream, "stream")
    state = init_detector(detector) if state is None else state
    _check_state(detector, state)
    return _run(detector, state, as_real(stream, detector.reference))


def _check_state(detector: ChangeDetector, state: DetectorState) -> None:
    if state.cross.shape[-1] != detector.window:
        raise ValueError(
            f"`state` is of a detector with windows of {state.cross.shape[-1]} points, not "
            f"{detector.window}: start by `init_detector`."
        )


@eqx.filter_jit
def _run(detector: ChangeDetector, state: DetectorState, stream: Points) -> Detection:
    def step(state, x):
        return _add(detector, state, jax.tree.map(lambda leaf: leaf[None], x))

    state, found = lax.scan(step, state, stream)
    return Detection(found.statistic, found.alarm, state)
