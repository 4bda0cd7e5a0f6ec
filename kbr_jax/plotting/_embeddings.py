"""Pictures of embeddings and of witness functions."""

from typing import Any

import numpy as np

from .._typing import Points
from ..embedding import Embedding, evaluate, witness
from ._axes import BLUE, ORANGE, axes, filled, unbatched


def plot_embedding(
    embedding: Embedding,
    grid: Points,
    *,
    axis: Any = None,
    weights: bool = True,
    color: str = BLUE,
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
    axis = axes(axis)
    points, mesh, sides = unbatched(embedding, grid)
    values = np.asarray(evaluate(embedding, mesh))
    own = np.asarray(embedding.weights)
    largest = max(np.max(np.abs(own)), np.finfo(own.dtype).tiny)
    negative = own < 0
    if len(sides) == 2:
        filled(axis, sides, values, both_signs=False)
        if weights:
            share = np.abs(own) / largest
            styles = {
                "black": {"marker": "o", "linewidths": 0},
                ORANGE: {"marker": "x", "linewidths": 0.8},
            }
            for part, (color, style) in zip((~negative, negative), styles.items(), strict=True):
                shown = part & (share > 0.05)
                axis.scatter(*points[shown].T, s=40 * share[shown], color=color, alpha=0.5, **style)
        return axis
    axis.plot(sides[0], values, color=color, lw=2, label=label, zorder=3)
    if weights:
        stems = own * (0.25 * np.max(np.abs(values)) / largest)
        for part, shade in ((own > 0, color), (negative, ORANGE)):
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
    axis = axes(axis)
    _, mesh, sides = unbatched(p, grid)
    unbatched(q, grid)
    values = np.asarray(witness(p, q, mesh))
    if len(sides) == 2:
        return filled(axis, sides, values, both_signs=True)
    z, zeros = sides[0], np.zeros_like(values)
    axis.plot(z, np.asarray(evaluate(p, mesh)), color=BLUE, lw=1, label="p")
    axis.plot(z, np.asarray(evaluate(q, mesh)), color=ORANGE, lw=1, ls="--", label="q")
    axis.fill_between(z, zeros, np.maximum(values, 0), color=BLUE, alpha=0.3, lw=0)
    axis.fill_between(
        z,
        zeros,
        np.minimum(values, 0),
        facecolor=ORANGE,
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
