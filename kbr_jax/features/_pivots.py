"""Pivots among proposed points.

Their choice within a block, and randomly pivoted Cholesky by rejection.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from .._checks import padded, size, take
from .._lapack import triangular_solve
from .._numerics import matmul, safe_divide
from .._typing import Array, Bool, Float, Int, Points, PRNGKeyArray
from ..devices import over_devices
from ..kernels import AbstractKernel

#: All residuals are computed anew once this share of n proposals has been refused, `_TILE` points
#: by `_GROUP` pivots at a time.
_REFUSALS = 1 / 16
_TILE, _GROUP = 2048, 64

#: The limit is so many times higher where the pivots still missing should come within it.
_PATIENCE = 4


class _Sample(eqx.Module):
    kernel: AbstractKernel
    x: Points
    diagonal: Float[Array, " n"]


class Pivots(eqx.Module):
    """Pivots under way.

    Of `index` and of `lower`, the Cholesky factor of their Gram matrix, `count` rows are filled.
    """

    index: Int[Array, " q"]
    lower: Float[Array, "q q"]
    count: Int[Array, ""]

    @property
    def filled(self) -> Bool[Array, " q"]:
        """Which rows are filled."""
        return jnp.arange(self.index.shape[0]) < self.count

    def factor(self) -> Float[Array, "q q"]:
        """`lower` with the rows of the identity behind the filled ones."""
        identity = jnp.eye(self.index.shape[0], dtype=self.lower.dtype)
        return jnp.where(self.filled[:, None] & self.filled, self.lower, identity)


class _Proposals(eqx.Module):
    """Where the proposals from one state of the residuals stand.

    From the latest block: `trace`, an estimate of the sum of all residuals before it, and `least`,
    a lower bound of it after.
    """

    pivots: Pivots
    step: Int[Array, ""]
    refused: Int[Array, ""]
    trace: Float[Array, ""]
    least: Float[Array, ""]


class Share(eqx.Module):
    """The points whose columns a device holds: all, or those from `start` on."""

    points: Points
    start: Int[Array, ""]
    inside: Bool[Array, " m"] | None  # False for points that fill up the last share
    axes: tuple[str, ...] | None = eqx.field(static=True)

    def kernel_rows(self, kernel: AbstractKernel, chosen: Points) -> Float[Array, "c m"]:
        """The kernel of chosen points with those of this device; zero for what only fills up."""
        rows = kernel.gram(chosen, self.points)
        return rows if self.inside is None else jnp.where(self.inside, rows, 0)

    def columns(self, rows: Float[Array, "q m"], index: Int[Array, " c"]) -> Float[Array, "q c"]:
        """Columns of the whole factor."""
        if self.axes is None:
            return rows[:, index]
        own = index - self.start
        found = (own >= 0) & (own < rows.shape[1])
        columns = jnp.where(found, rows[:, jnp.clip(own, 0, rows.shape[1] - 1)], 0)
        return lax.psum(columns, self.axes)

    def total(self, values: Array) -> Array:
        """The sum over devices."""
        return values if self.axes is None else lax.psum(values, self.axes)

    def own(self, values: Float[Array, " n"]) -> Float[Array, " m"]:
        """The entries of the points of this device."""
        if self.axes is None:
            return values
        width = size(self.points)
        values = jnp.pad(values, (0, width))
        return lax.dynamic_slice_in_dim(values, self.start, width)

    def together(self, values: Float[Array, " m"], count: int) -> Float[Array, " n"]:
        """The entries of all devices."""
        if self.axes is None:
            return values
        return lax.all_gather(values, self.axes, tiled=True)[:count]


@eqx.filter_jit
def rejection_pivots(
    kernel: AbstractKernel,
    x: Points,
    rank: int,
    tolerance: Float[Array, ""],
    key: PRNGKeyArray,
    block: int,
    mesh: Mesh | None = None,
) -> Pivots:
    """Randomly pivoted Cholesky, `block` proposals at a time.

    A point is proposed in proportion to its residual as last computed, and accepted with the share
    of it that is left: so the law is that of one pivot at a time (Epperly and Moreno 2023; in
    blocks: Epperly, Tropp and Webber 2024). The residual of a proposal costs O((r + block)^2 + r
    d), whatever n is. Those of all points, O(n r^2 + n r d) with memory O(n), are computed anew
    once too many proposals were refused.
    """
    kernel, x = lax.stop_gradient((kernel, x))
    sample = _Sample(kernel, x, kernel.diagonal(x))
    dtype, width = sample.diagonal.dtype, -(-(rank + block) // _GROUP) * _GROUP
    limit, budget = tolerance * jnp.sum(sample.diagonal), max(int(_REFUSALS * size(x)), 1)

    def renew(carry):
        """Compute the residuals, drop pivots behind the tolerance, and propose from there."""
        pivots, step, _ = carry
        residual, squares = _residuals(sample, pivots, mesh)
        before = (
            jnp.sum(residual) + jnp.cumsum(squares[::-1])[::-1]
        )  # trace before each pivot, of positive terms only
        kept = jnp.sum(pivots.filled & (before > limit)).astype(pivots.count.dtype)
        unfinished = (kept == pivots.count) & (kept < rank)
        cumulative = jnp.cumsum(residual)

        def going(now: _Proposals):
            missing = (rank - now.pivots.count).astype(dtype)
            few = (
                missing * cumulative[-1] <= budget * now.trace
            )  # proposals to come, if the trace stays
            allowed = jnp.where(few, _PATIENCE * budget, budget)
            return unfinished & (missing > 0) & (now.refused <= allowed) & (now.trace > limit)

        start = _Proposals(
            eqx.tree_at(lambda p: p.count, pivots, kept),
            step,
            jnp.zeros_like(step),
            jnp.sum(residual),
            jnp.asarray(0, dtype),
        )
        end = lax.while_loop(
            going, lambda now: _propose(sample, residual, cumulative, rank, key, block, now), start
        )
        # A trace above the limit now was so before every pivot: no need to compute it.
        certain = (end.pivots.count == rank) & (end.least > limit)
        return end.pivots, end.step, unfinished & ~certain & (end.pivots.count > kept)

    none = Pivots(jnp.zeros(width, int), jnp.zeros((width, width), dtype), jnp.asarray(0))
    return lax.while_loop(lambda carry: carry[2], renew, (none, jnp.asarray(0), jnp.asarray(True)))[
        0
    ]


def _propose(
    sample: _Sample, residual, cumulative, rank: int, key, block: int, now: _Proposals
) -> _Proposals:
    """Draw `block` points in proportion to `residual` and add those accepted."""
    pivots, kernel = now.pivots, sample.kernel
    draw, accept = jax.random.split(jax.random.fold_in(key, now.step))
    candidates = _indices(draw, cumulative, block).astype(pivots.index.dtype)
    points, centers = take(sample.x, candidates), take(sample.x, pivots.index)
    gram = jnp.where(pivots.filled[:, None], kernel.gram(centers, points), 0)
    own = triangular_solve(pivots.factor(), gram)
    matrix = kernel.gram(points, points) - matmul(own.T, own)
    # Of a point that was chosen before, rounding would leave a trace.
    again = jnp.any((candidates[:, None] == pivots.index) & pivots.filled, axis=1)
    heights = jnp.where(again, 0, jnp.maximum(jnp.diagonal(matrix), 0))
    bars = residual[candidates] * jax.random.uniform(accept, (block,), residual.dtype)
    floor = (
        4 * jnp.finfo(residual.dtype).eps * jnp.max(sample.diagonal)
    )  # rounding errors are no pivots
    room = rank - pivots.count
    chosen, columns, added, rest = choose_pivots(
        matrix, candidates, heights, jnp.maximum(bars, floor), False, block, room
    )

    lower = lax.dynamic_update_slice(pivots.lower, own[:, chosen].T, (pivots.count, 0))
    lower = lax.dynamic_update_slice(lower, columns[chosen], (pivots.count, pivots.count))
    index = lax.dynamic_update_slice(pivots.index, candidates[chosen], (pivots.count,))
    trace = cumulative[-1] * jnp.mean(
        safe_divide(jnp.where(heights > floor, heights, 0), residual[candidates])
    )
    repeated = jnp.any(jnp.tril(candidates[:, None] == candidates, -1), axis=1)
    least = jnp.sum(jnp.where(repeated, 0, rest))
    pivots = Pivots(index, lower, pivots.count + added)
    return _Proposals(pivots, now.step + 1, now.refused + block - added, trace, least)


def _residuals(
    sample: _Sample, pivots: Pivots, mesh: Mesh | None
) -> tuple[Float[Array, " n"], Float[Array, " q"]]:
    """Residuals of all points, and what each pivot took from their sum."""
    n = size(sample.x)
    missing = 0 if mesh is None else -n % mesh.size
    cases = *padded((sample.x, sample.diagonal), missing), jnp.arange(n + missing) < n
    shared = sample.kernel, take(sample.x, pivots.index), pivots
    residual, squares = over_devices(_substitute, mesh, shared, cases)
    residual = residual[:n].at[jnp.where(pivots.filled, pivots.index, n)].set(0, mode="drop")
    return residual, jnp.sum(squares, axis=0)


def _substitute(shared, cases) -> tuple[Float[Array, " n"], Float[Array, "1 q"]]:
    """Forward substitution for a tile of points at a time."""
    (kernel, centers, pivots), (x, diagonal, real) = shared, cases
    n, width, group = size(x), pivots.index.shape[0], _GROUP
    tile, filled, lower = min(_TILE, n), pivots.filled, pivots.factor()
    corners = jnp.stack([lower[i : i + group, i : i + group] for i in range(0, width, group)])
    units = jnp.broadcast_to(jnp.eye(group, dtype=lower.dtype), corners.shape)
    inverses = triangular_solve(corners, units)

    def sweep(t, carry):
        residual, squares, rows = carry
        start = jnp.minimum(t * tile, n - tile)  # the last tile overlaps the one before it
        index = start + jnp.arange(tile)
        points, fresh = take(x, index), (index >= t * tile) & real[index]

        def substitute(g, carry):
            rows, rest, squares = carry
            own = g * group + jnp.arange(group)

            def subtract(h, new):
                weights = lax.dynamic_slice(lower, (g * group, h * group), (group, group))
                return new - matmul(weights, lax.dynamic_slice_in_dim(rows, h * group, group))

            new = lax.fori_loop(0, g, subtract, kernel.gram(take(centers, own), points))
            new = jnp.where(filled[own][:, None], matmul(inverses[g], new), 0)
            rows = lax.dynamic_update_slice_in_dim(rows, new, g * group, 0)
            squares = squares.at[own].add(jnp.sum(jnp.where(fresh, new, 0) ** 2, axis=1))
            return rows, rest - matmul(jnp.ones(group, new.dtype), new**2), squares

        rest = lax.dynamic_slice_in_dim(diagonal, start, tile)
        rows, rest, squares = lax.fori_loop(
            0, -(-pivots.count // group), substitute, (rows, rest, squares)
        )
        return (
            lax.dynamic_update_slice_in_dim(residual, jnp.maximum(rest, 0), start, 0),
            squares,
            rows,
        )

    empty = (
        jnp.zeros(width, lower.dtype),
        jnp.zeros((width, tile), lower.dtype),
    )  # the same rows for every tile
    residual, squares, _ = lax.fori_loop(0, -(-n // tile), sweep, (diagonal, *empty))
    return residual, squares[None]


def _indices(key: PRNGKeyArray, cumulative: Float[Array, " n"], count: int) -> Int[Array, " c"]:
    """`count` independent indices, drawn in proportion to weights of which these are the cumulative
    sums.
    """
    heights = cumulative[-1] * jax.random.uniform(key, (count,), cumulative.dtype)
    return jnp.minimum(jnp.searchsorted(cumulative, heights, side="right"), cumulative.shape[0] - 1)


def draw_indices(key: PRNGKeyArray, weights: Float[Array, " n"], count: int) -> Int[Array, " c"]:
    """`count` independent indices, drawn in proportion to non-negative weights, in O(n + count log
    n).
    """
    return _indices(key, jnp.cumsum(weights), count)


def choose_pivots(matrix, candidates, heights, bars, greedy: bool, block: int, room):
    """Pivots among candidates: those that are above their bar when their turn comes.

    Turns go to the largest height that is left (`greedy`, as many as `block`), or to all candidates
    in their order. At most `room` (an array) and `block` (static) are chosen.

    **Returns:** positions of the chosen `[block]`, columns of their Cholesky decomposition
    `[c, block]`, their number, and the residuals `[c]` that they leave.
    """

    def turn(t, carry):
        rest, columns, chosen, count = carry
        pivot = jnp.argmax(rest) if greedy else t
        height = rest[pivot]
        accepted = (height > bars[pivot]) & (count < room)
        column = (matrix[:, pivot] - matmul(columns, columns[pivot])) / jnp.sqrt(
            jnp.where(accepted, height, 1)
        )
        column = jnp.where(accepted, column, 0)
        # A refused proposal writes zeros where the next accepted one will stand.
        columns = columns.at[:, count].set(column, mode="drop")
        chosen = chosen.at[count].set(jnp.where(accepted, pivot, 0), mode="drop")
        # A point that was proposed twice is explained exactly; rounding would leave a trace of it.
        rest = jnp.where(
            accepted & (candidates == candidates[pivot]), 0, jnp.maximum(rest - column**2, 0)
        )
        return rest, columns, chosen, count + accepted.astype(count.dtype)

    start = (
        heights,
        jnp.zeros((heights.shape[0], block), matrix.dtype),
        jnp.zeros(block, int),
        jnp.asarray(0),
    )
    rest, columns, chosen, count = lax.fori_loop(
        0, block if greedy else heights.shape[0], turn, start
    )
    return chosen, columns, count, rest


def settled(
    new: Float[Array, "b m"], used: Bool[Array, " b"], rest: Float[Array, " m"]
) -> Float[Array, "b m"]:
    """New rows whose squares do not exceed the residual.

    Near its floor rounding would, by 1e-3 in float32: 15 of 41 draws were 2e-5 off and more.
    """

    def one(rest, inputs):
        row, used = inputs
        most = jnp.sqrt(rest)
        row = jnp.clip(row, -most, most)
        return jnp.maximum(rest - jnp.where(used, row**2, 0), 0), row

    return lax.scan(one, rest, (new, used))[1]
