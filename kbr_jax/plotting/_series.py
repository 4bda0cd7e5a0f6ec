"""Pictures of beliefs and intervals over time."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._typing import ArrayLike, PointFunction, Points
from ..embedding import Embedding, check_embedding, credible_interval, evaluate, quantile
from ._axes import BLUE, ORANGE, SHADES, as_grid, axes, casing, numbers, periodic_line


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
    axis = axes(axis)
    if beliefs.weights.ndim != 2:
        raise ValueError(
            f"`beliefs` has weights of shape {beliefs.weights.shape}; one row a time is needed, "
            "[T, n]. For one belief there is `plot_embedding`."
        )
    mesh = as_grid(grid, beliefs.points)
    count = beliefs.weights.shape[0]
    if positions is None:
        if not isinstance(mesh, jax.Array) or mesh.size != mesh.shape[0]:
            raise ValueError(
                "The points of `grid` are not numbers: say by `positions` [m] where they stand."
            )
        positions = mesh.reshape(-1)
    values = np.asarray(evaluate(beliefs, mesh))
    height = numbers(positions, values.shape[1], "positions")
    # Bounds of both kinds are given: they must not depend on what one belief happens to be.
    top = np.max(values, where=np.isfinite(values), initial=np.finfo(values.dtype).tiny)
    # A single column has no width that could be seen.
    alone = count == 1
    axis.pcolormesh(
        np.array([-0.25, 0.25]) if alone else np.arange(count),
        height,
        np.repeat(values.T, 2, axis=1) if alone else values.T,
        cmap=SHADES,
        vmin=0,
        vmax=top,
        shading="nearest",
        rasterized=True,
    )
    lines = ((truth, "truth", "black", "-", 1.8), (estimate, "estimate", ORANGE, "--", 1.5))
    for given, name, color, style, width in lines:
        if given is not None:
            line = periodic_line(numbers(given, count, name), period)
            look = {"color": color, "ls": style, "lw": width, "marker": "o" if alone else None}
            axis.plot(*line, label=name, path_effects=casing(width), **look)
    if truth is not None or estimate is not None:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    axis.set(xlabel="time", ylim=(height[0], height[-1]), xlim=(-0.5, count - 0.5))
    return axis


def plot_intervals(
    beliefs: Embedding,
    *,
    times: ArrayLike | None = None,
    truth: ArrayLike | None = None,
    levels: float | Sequence[float] = (0.5, 0.9),
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
    axis = axes(axis)
    check_embedding(beliefs, "beliefs")
    if beliefs.weights.ndim != 2:
        raise ValueError(f"`beliefs` has weights of shape {beliefs.weights.shape}, not [T, n].")
    count = beliefs.weights.shape[0]
    more = () if function is None else (function,)
    median = np.asarray(quantile(beliefs, 0.5, *more))
    if median.size != count:
        raise ValueError("Intervals need one number for each point: give a `function`.")
    x = np.arange(count) if times is None else numbers(times, count, "times")
    if x.dtype.kind in "biufM" and np.any(x[1:] < x[:-1]):
        raise ValueError("`times` must be in ascending order.")
    # A band needs two steps: one between missing ones gets a bar.
    middle = median.reshape(-1)
    known = np.pad(np.isfinite(middle), 1)
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    shares = sorted(np.atleast_1d(levels).tolist(), reverse=True)
    for level in shares:
        low, high = (np.asarray(e).reshape(-1) for e in credible_interval(beliefs, level, *more))
        axis.fill_between(x, low, high, color=BLUE, alpha=0.25, lw=0, label=f"{100 * level:g}%")
        if alone.any():
            axis.vlines(x[alone], low[alone], high[alone], color=BLUE, alpha=0.25, lw=6)
    axis.plot(x, middle, color=BLUE, lw=1.5, label="median")
    axis.plot(x[alone], middle[alone], ".", color=BLUE)
    if truth is not None:
        mark = "o" if count == 1 else None
        true = numbers(truth, count, "truth")
        axis.plot(x, true, color="black", lw=1.2, label="truth", marker=mark)
    legend = axis.legend(frameon=False)
    # Bands lie on each other; in the legend each has the color that it has in the picture.
    bands = [handle for handle in legend.legend_handles if hasattr(handle, "set_facecolor")]
    for depth, handle in enumerate(bands[: len(shares)]):
        handle.set_alpha(1 - 0.75 ** (depth + 1))
    axis.set(xlabel="time", xlim=(x[0] - 0.5, x[0] + 0.5) if count == 1 else (x[0], x[-1]))
    return axis
