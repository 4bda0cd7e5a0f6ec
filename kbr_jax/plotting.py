r"""Pictures of embeddings, beliefs and learning curves, on matplotlib axes:
`from kbr_jax import plotting`.

Needs the extra `plot`, which is imported when something is drawn. Colors are told apart by
color-blind eyes, and nothing is told by color alone: what is negative also points down or is
dashed, and shades only grow darker.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ._checks import as_points, check_finite
from ._typing import ArrayLike, PointFunction, Points
from .embedding import Embedding, credible_interval, evaluate, quantile, witness
from .learning import Report
from .tuning import TuneResult

_BLUE, _ORANGE, _SHADES, _BOTH_SIGNS = "#0072b2", "#d55e00", "Blues", "PuOr_r"
_LEVELS = 8  # of one sign


def plot_embedding(
    embedding: Embedding,
    grid: Points,
    *,
    axis: Any = None,
    weights: bool = True,
    color: str = _BLUE,
    label: str | None = None,
) -> Any:
    r"""The function $\mu(z) = \sum_i w_i k(x_i, z)$: a curve over a line, filled contours over the
    plane.

    **Arguments:**

    - `embedding` of real numbers, points `[n]` or `[n, 1]`, or of the plane, `[n, 2]`; weights
      `[n]`.
    - `grid`: on the line `[m]` numbers in ascending order; over the plane a pair of those, `[a]`
      and `[b]`.
    - `axis`: where to draw; a new figure by default.
    - `weights`: show the points too: on the line as stems, the largest a quarter as long as the
      curve is high, the negative ones orange and downwards; in the plane as dots of an area
      proportional to |w|, the negative ones as orange crosses, and none for those below a twentieth
      of the largest.
    - `color`, `label`: of the curve on the line, and its name in a legend.

    Over the plane there are eight shades between 0 and the largest value, the lowest left white,
    and contours where $\mu$ is negative are dashed.

    **Returns:** the axis. Cost that of `evaluate`.

    **Raises:** `ValueError` for a batch of embeddings, points or a grid of another kind;
    `ImportError` without matplotlib.
    """
    axis = _axes(axis)
    points, mesh, sides = _unbatched(embedding, grid)
    values = np.asarray(evaluate(embedding, mesh))
    own = np.asarray(embedding.weights)
    largest = max(np.max(np.abs(own)), np.finfo(own.dtype).tiny)
    negative = own < 0
    if len(sides) == 2:
        _filled(axis, sides, values, both_signs=False)
        if weights:
            share = np.abs(own) / largest
            styles = {
                "black": {"marker": "o", "linewidths": 0},
                _ORANGE: {"marker": "x", "linewidths": 0.8},
            }
            for part, (color, style) in zip((~negative, negative), styles.items(), strict=True):
                shown = part & (share > 0.05)
                axis.scatter(*points[shown].T, s=40 * share[shown], color=color, alpha=0.5, **style)
        return axis
    axis.plot(sides[0], values, color=color, lw=2, label=label, zorder=3)
    if weights:
        stems = own * (0.25 * np.max(np.abs(values)) / largest)
        for part, shade in ((own > 0, color), (negative, _ORANGE)):
            axis.vlines(points[part, 0], 0, stems[part], color=shade, lw=0.8, alpha=0.7)
    axis.axhline(0, color="gray", lw=0.6)
    axis.set(xlim=(sides[0][0], sides[0][-1]), ylabel="μ(z)")
    return axis


def plot_witness(p: Embedding, q: Embedding, grid: Points, *, axis: Any = None) -> Any:
    r"""The witness function $\mu_p(z) - \mu_q(z)$: where p has more mass than q, and where less.

    **Arguments:** `p`, `q` of one kind, unbatched (with one kernel); `grid` and `axis` as in
    `plot_embedding`.

    On the line both embeddings are drawn as thin lines, q dashed, and their difference filled: blue
    where positive, orange and hatched where negative. Over the plane negative contours are dashed.

    **Returns:** the axis. **Raises:** as `plot_embedding`.
    """
    axis = _axes(axis)
    _, mesh, sides = _unbatched(p, grid)
    _unbatched(q, grid)
    values = np.asarray(witness(p, q, mesh))
    if len(sides) == 2:
        return _filled(axis, sides, values, both_signs=True)
    z, zeros = sides[0], np.zeros_like(values)
    axis.plot(z, np.asarray(evaluate(p, mesh)), color=_BLUE, lw=1, label="p")
    axis.plot(z, np.asarray(evaluate(q, mesh)), color=_ORANGE, lw=1, ls="--", label="q")
    axis.fill_between(z, zeros, np.maximum(values, 0), color=_BLUE, alpha=0.3, lw=0)
    axis.fill_between(
        z,
        zeros,
        np.minimum(values, 0),
        facecolor=_ORANGE,
        alpha=0.3,
        lw=0,
        hatch="///",
        edgecolor="white",
    )
    axis.plot(z, values, color="black", lw=1.5, label="witness p - q")
    axis.axhline(0, color="gray", lw=0.6)
    low, high = axis.get_ylim()
    axis.set(xlim=(z[0], z[-1]), ylim=(low, high + 0.15 * (high - low)))  # room for the legend
    axis.legend(loc="upper center", ncols=3, frameon=False)
    return axis


def plot_beliefs(
    beliefs: Embedding,
    grid: Points,
    *,
    truth: ArrayLike | None = None,
    estimate: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    period: float | None = None,
    axis: Any = None,
) -> Any:
    r"""Beliefs over time as a heat map: column t is $\mu_t(z)$ along the grid.

    **Arguments:**

    - `beliefs`: a batch with weights `[T, n]`, as `belief(filt, run)`.
    - `grid`: m points of the kind of the states, `[m, ...]`; for real numbers `[m]`.
    - `truth`, `estimate`: `[T]`, drawn on top, in black and as an orange dashed line; NaN leaves a
      gap.
    - `positions`: `[m]`, ascending, where the points of the grid stand on the vertical axis, by
      default at their own values. For rotations in the plane: points $(\cos a, \sin a)$ as `grid`,
      and the angles a as `positions`.
    - `period`: of the positions, if they are angles: lines are interrupted where they jump by more
      than half of it.
    - `axis`: where to draw; a new figure by default.

    Values below 0 are drawn as 0, and the shades are shared by all columns, so a belief that is
    spread out is pale. A belief that is NaN is left white.

    **Returns:** the axis. Cost that of `evaluate` for T embeddings, O(n m (d + T)).

    **Raises:** `ValueError` for beliefs that are not a batch, numbers of another length, or a grid
    of points that are not numbers without `positions`; `ImportError` without matplotlib.
    """
    axis = _axes(axis)
    if beliefs.weights.ndim != 2:
        raise ValueError(
            f"`beliefs` has weights of shape {beliefs.weights.shape}; one row a time is needed, "
            "[T, n]. For one belief there is `plot_embedding`."
        )
    mesh = _like(grid, beliefs.points)
    count = beliefs.weights.shape[0]
    if positions is None:
        if not isinstance(mesh, jax.Array) or mesh.size != mesh.shape[0]:
            raise ValueError(
                "The points of `grid` are not numbers: say by `positions` [m] where they stand."
            )
        positions = mesh.reshape(-1)
    values = np.asarray(evaluate(beliefs, mesh))
    height = _numbers(positions, values.shape[1], "positions")
    # Bounds of both kinds are given: they must not depend on what one belief happens to be.
    top = np.max(values, where=np.isfinite(values), initial=np.finfo(values.dtype).tiny)
    # A single column has no width that could be seen.
    alone = count == 1
    axis.pcolormesh(
        np.array([-0.25, 0.25]) if alone else np.arange(count),
        height,
        np.repeat(values.T, 2, axis=1) if alone else values.T,
        cmap=_SHADES,
        vmin=0,
        vmax=top,
        shading="nearest",
        rasterized=True,
    )
    lines = ((truth, "truth", "black", "-", 1.8), (estimate, "estimate", _ORANGE, "--", 1.5))
    for given, name, color, style, width in lines:
        if given is not None:
            line = _line(_numbers(given, count, name), period)
            look = {"color": color, "ls": style, "lw": width, "marker": "o" if alone else None}
            axis.plot(*line, label=name, path_effects=_casing(width), **look)
    if truth is not None or estimate is not None:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    axis.set(xlabel="time", ylim=(height[0], height[-1]), xlim=(-0.5, count - 0.5))
    return axis


def plot_history(tuned: TuneResult, *, axis: Any = None) -> Any:
    """Draw the learning curve of `tune`.

    **Arguments:** `tuned`, what `tune` returned; `axis`: where to draw; a new figure by default.

    The loss is a blue line, the validation loss an orange dashed one. A ring marks what was
    returned. Steps that were rejected, because loss or gradient was not finite, leave gaps in the
    lines and crosses at the bottom. The scale is logarithmic where all that is drawn is positive
    and spans more than a factor of ten.

    **Returns:** the axis. **Raises:** `ImportError` without matplotlib.
    """
    axis = _axes(axis)
    history, step, value = tuned.history, int(tuned.step), float(tuned.value)
    accepted = np.asarray(history.accepted)
    lines, names = [history.loss, history.validation], ("loss", "validation")
    marker = None if accepted.all() else "."  # a line between two gaps is a point
    curves = [np.where(accepted & np.isfinite(c), c, np.nan) for c in lines if c is not None]
    for curve, name, color, style in zip(
        curves, names, (_BLUE, _ORANGE), ("-", "--"), strict=False
    ):
        # A validation loss now and then is a line nevertheless. The loss has gaps.
        steps = np.flatnonzero(np.isfinite(curve) | (name == "loss"))
        axis.plot(steps, curve[steps], color=color, ls=style, lw=2, label=name, marker=marker)
    ring = {"ms": 9, "mfc": "none", "mec": "black", "mew": 1.5}
    axis.plot(step, value, "o", label=f"best, step {step}", **ring)
    drawn = np.concatenate([curve[np.isfinite(curve)] for curve in curves])
    wide = drawn.size and np.max(drawn) > 10 * np.min(drawn) > 0
    axis.set(xlabel="step", ylabel="loss", yscale="log" if wide else "linear")
    rejected = np.flatnonzero(~accepted)
    if rejected.size:
        # At a fixed height of the picture: a rejected step has no loss to stand at.
        low, bottom = np.full(rejected.shape, 0.03), axis.get_xaxis_transform()
        axis.plot(rejected, low, "x", color="black", ms=5, transform=bottom, label="rejected")
    axis.legend(frameon=False)
    return axis


def plot_report(report: Report, *, axis: Any = None) -> Any:
    """Draw the held-out errors of a learned model and its rivals, with their standard errors.

    **Returns:** the axis. **Raises:** `ImportError` without matplotlib.
    """
    axis, names = _axes(axis), list(report.errors)
    means, spreads = zip(*report.errors.values(), strict=True)
    axis.barh(names, means, xerr=spreads, color=[_BLUE] + ["lightgray"] * (len(names) - 1))
    axis.invert_yaxis()
    axis.set_xlabel("held-out error")
    if report.coverage:
        parts = zip(*report.coverage.items(), strict=True)
        nominal, shares = (", ".join(f"{100 * u:.0f}" for u in part) for part in parts)
        axis.set_title(f"{nominal} % regions hold {shares} %", fontsize="medium", loc="right")
    return axis


def plot_intervals(
    beliefs: Embedding,
    *,
    times: ArrayLike | None = None,
    truth: ArrayLike | None = None,
    levels: Sequence[float] = (0.5, 0.9),
    function: PointFunction | None = None,
    axis: Any = None,
) -> Any:
    r"""Draw the median and credible intervals of a batch of embeddings over time.

    **Arguments:**

    - `beliefs`: a batch with weights `[T, n]`, of numbers `[n]` or `[n, 1]`; or of any points with
      a `function` from a point to one number.
    - `times`, `truth`: `[T]`; steps 0, 1, ... by default. NaN in the truth leaves a gap.
    - `levels`: of the intervals, each a band, the widest lightest.
    - `axis`: where to draw; a new figure by default.

    **Returns:** the axis. **Raises:** `ValueError` for beliefs that are not a batch or not of
    numbers; as `credible_interval`; `ImportError` without matplotlib.
    """
    axis = _axes(axis)
    if beliefs.weights.ndim != 2:
        raise ValueError(f"`beliefs` has weights of shape {beliefs.weights.shape}, not [T, n].")
    count = beliefs.weights.shape[0]
    more = () if function is None else (function,)
    median = np.asarray(quantile(beliefs, 0.5, *more))
    if median.size != count:
        raise ValueError("Intervals need one number for each point: give a `function`.")
    x = np.arange(count) if times is None else _numbers(times, count, "times")
    for level in sorted(levels, reverse=True):
        low, high = (np.asarray(e).reshape(-1) for e in credible_interval(beliefs, level, *more))
        axis.fill_between(x, low, high, color=_BLUE, alpha=0.25, lw=0, label=f"{level:.0%}")
    axis.plot(x, median.reshape(-1), color=_BLUE, lw=1.5, label="median")
    if truth is not None:
        axis.plot(x, _numbers(truth, count, "truth"), color="black", lw=1.2, label="truth")
    axis.legend(frameon=False)
    axis.set(xlabel="time", xlim=(x[0], x[-1]))
    return axis


def _axes(axis: Any) -> Any:
    """The given axis, or that of a new figure."""
    if axis is not None:
        return axis
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib, which is an extra: pip install 'kbr_jax[plot]'"
        ) from error
    return pyplot.subplots(layout="constrained")[1]


def _casing(width: float) -> list:
    """A white edge around a line, which keeps it visible on any shade."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width + 1.8, foreground="white"), Normal()]


def _filled(axis: Any, sides: list[np.ndarray], values: np.ndarray, *, both_signs: bool) -> Any:
    """Filled contours of values `[a * b]`, dashed where they are negative."""
    high = max(np.max(np.abs(values) if both_signs else values), np.finfo(values.dtype).tiny)
    table = values.reshape(len(sides[0]), len(sides[1])).T
    # Nothing is painted within one level of 0, where a sign is noise.
    levels = high / _LEVELS * np.arange(1, _LEVELS + 1)
    levels = np.concatenate([-levels[::-1], levels])
    colors, shown = (_BOTH_SIGNS, levels) if both_signs else (_SHADES, levels[_LEVELS:])
    axis.contourf(*sides, np.clip(table, levels[0], levels[-1]), shown, cmap=colors)
    dashed = levels[(levels < 0) & (levels > np.min(values))]
    if dashed.size:
        axis.contour(
            *sides,
            table,
            dashed,
            colors="black" if both_signs else _ORANGE,
            linestyles="dashed",
            linewidths=0.8,
        )
    axis.set_aspect("equal")
    return axis


def _unbatched(embedding: Embedding, grid: Any) -> tuple[np.ndarray, Any, list[np.ndarray]]:
    """Points `[n, d]`, the grid as points of their kind, and its sides.

    One on the line, two over the plane.
    """
    if embedding.weights.ndim != 1:
        raise ValueError(
            f"A batch of embeddings, with weights of shape {embedding.weights.shape}, is not one "
            "function: draw one at a time, or beliefs over time by `plot_beliefs`."
        )
    check_finite(embedding.weights, "embedding.weights")
    points = embedding.points
    if not isinstance(points, jax.Array) or points.ndim > 2 or points.size > 2 * points.shape[0]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(points)]
        raise ValueError(
            f"Only points on the line or in the plane can be drawn, [n], [n, 1] or [n, 2]; these "
            f"are {shapes}."
        )
    rows = np.asarray(points).reshape(points.shape[0], -1)
    if rows.shape[1] == 1:
        mesh = _like(grid, points)
        return rows, mesh, [np.asarray(mesh).reshape(-1)]
    if (
        not isinstance(grid, (tuple, list))
        or len(grid) != 2
        or any(np.ndim(side) != 1 for side in grid)
    ):
        raise ValueError(
            "For points in the plane `grid` must be a pair of arrays of numbers, one for each side."
        )
    sides = [np.asarray(side, rows.dtype) for side in grid]
    return rows, np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2), sides


def _like(grid: Any, points: Points) -> Any:
    """A grid as a sample of the kind of the points, in their dtype.

    Numbers `[m]` also where the points are `[n, 1]`.
    """
    grid = as_points(grid, "grid")
    if isinstance(grid, jax.Array) and isinstance(points, jax.Array):
        grid = grid.astype(points.dtype)
        return grid[:, None] if grid.ndim == 1 and points.shape[1:] == (1,) else grid
    return grid


def _numbers(numbers: ArrayLike, count: int, name: str) -> np.ndarray:
    array = np.asarray(numbers)
    if array.size != count:
        raise ValueError(f"`{name}` has shape {array.shape}; {count} numbers are needed.")
    return array.reshape(-1)


def _line(numbers: np.ndarray, period: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Times and numbers, with NaN at each jump of more than half a period."""
    steps, numbers = np.arange(numbers.size, dtype=float), numbers.astype(float)
    if period is None:
        return steps, numbers
    jumps = np.flatnonzero(np.abs(np.diff(numbers)) > period / 2) + 1
    return np.insert(steps, jumps, np.nan), np.insert(numbers, jumps, np.nan)
