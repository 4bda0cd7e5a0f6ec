"""Axes, colors and checks that all pictures share."""

from typing import Any

import jax
import numpy as np

from .._checks import as_points, check_finite
from .._typing import ArrayLike, Points
from ..embedding import Embedding

BLUE, ORANGE, SHADES, _BOTH_SIGNS = "#0072b2", "#d55e00", "Blues", "PuOr_r"
_LEVELS = 8  # of one sign


def axes(axis: Any) -> Any:
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


def casing(width: float) -> list:
    """A white edge around a line, which keeps it visible on any shade."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width + 1.8, foreground="white"), Normal()]


def filled(axis: Any, sides: list[np.ndarray], values: np.ndarray, *, both_signs: bool) -> Any:
    """Filled contours of values `[a * b]`, dashed where they are negative."""
    high = max(np.max(np.abs(values) if both_signs else values), np.finfo(values.dtype).tiny)
    table = values.reshape(len(sides[0]), len(sides[1])).T
    # Nothing is painted within one level of 0, where a sign is noise.
    levels = high / _LEVELS * np.arange(1, _LEVELS + 1)
    levels = np.concatenate([-levels[::-1], levels])
    colors, shown = (_BOTH_SIGNS, levels) if both_signs else (SHADES, levels[_LEVELS:])
    axis.contourf(*sides, np.clip(table, levels[0], levels[-1]), shown, cmap=colors)
    dashed = levels[(levels < 0) & (levels > np.min(values))]
    if dashed.size:
        axis.contour(
            *sides,
            table,
            dashed,
            colors="black" if both_signs else ORANGE,
            linestyles="dashed",
            linewidths=0.8,
        )
    axis.set_aspect("equal")
    return axis


def unbatched(embedding: Embedding, grid: Any) -> tuple[np.ndarray, Any, list[np.ndarray]]:
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
        mesh = as_grid(grid, points)
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
    if min(side.size for side in sides) < 2:
        raise ValueError("Each side of `grid` needs at least 2 numbers.")
    return rows, np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2), sides


def as_grid(grid: Any, points: Points) -> Any:
    """A grid as a sample of the kind of the points, in their dtype.

    Numbers `[m]` also where the points are `[n, 1]`.
    """
    grid = as_points(grid, "grid")
    if isinstance(grid, jax.Array) and isinstance(points, jax.Array):
        grid = grid.astype(points.dtype)
        return grid[:, None] if grid.ndim == 1 and points.shape[1:] == (1,) else grid
    return grid


def numbers(numbers: ArrayLike, count: int, name: str) -> np.ndarray:
    array = np.asarray(numbers)
    if array.size != count:
        raise ValueError(f"`{name}` has shape {array.shape}; {count} numbers are needed.")
    return array.reshape(-1)


def periodic_line(numbers: np.ndarray, period: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Times and numbers, with NaN at each jump of more than half a period."""
    steps, numbers = np.arange(numbers.size, dtype=float), numbers.astype(float)
    if period is None:
        return steps, numbers
    jumps = np.flatnonzero(np.abs(np.diff(numbers)) > period / 2) + 1
    return np.insert(steps, jumps, np.nan), np.insert(numbers, jumps, np.nan)
