"""Landmarks by pivoted incomplete Cholesky decomposition, greedy or random.

Pivots are chosen one at a time or in blocks.

With the pivots as landmarks, the features of `landmark_features` at the sample *are* that
decomposition. The choice is discrete: everything here is behind `stop_gradient`.

A block proposes some points, decides among them on their own small residual matrix, and then adds
the columns of the accepted ones to the factor by one matrix product: the same arithmetic as one
pivot at a time, without reading the whole factor again for each. Random landmarks in blocks do
without the factor (`rejection_pivots`).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._checks import as_count, as_fraction, as_points, check_finite, size, take
from .._lapack import triangular_solve
from .._numerics import matmul
from .._typing import Array, Bool, Float, Int, Points, PRNGKeyArray, with_numbers
from ..devices import as_mesh
from ..kernels import KernelLike, kernel_for
from ._landmarks import Landmarks
from ._pivots import Share, choose_pivots, draw_indices, rejection_pivots, settled

#: From this many points on, landmarks are chosen in blocks unless told otherwise: this changes the
#: greedy choice, but not the law of the random one.
_MANY, _MANY_RANDOM = 10_000, 4_000
_BLOCK = 64

#: A block proposes this many points for each column that it may add.
_PROPOSALS = 4

#: New rows of the factor are made for so many points at a time, from so many old rows at a time:
#: both stay in the cache, and rows that are not filled yet cost nothing.
_TILE, _GROUP = 8192, 64

#: A block of greedy pivots ends where its best remaining candidate falls below this share of the
#: largest residual.
_SHARE = 0.5


class IncompleteCholesky(eqx.Module):
    r"""The decomposition $K \approx L L^\top$.

    - `factor`: L `[n, r]`. `pivots` `[r]`: indices into the sample, in order of choice.
    - `active` `[r]`: False where the column is zero.
    - `residual` `[n]`: the diagonal of $K - L L^\top$.
    """

    factor: Float[Array, "n r"]
    pivots: Int[Array, " r"]
    active: Bool[Array, " r"]
    residual: Float[Array, " n"]

    __repr__ = with_numbers


class _State(eqx.Module):
    """A decomposition under way.

    `count` rows of the transposed factor are filled, those behind them hold anything.
    """

    rows: Float[Array, "q n"]
    pivots: Int[Array, " q"]
    residual: Float[Array, " n"]
    count: Int[Array, ""]
    step: Int[Array, ""]
    going: Bool[Array, ""]


def incomplete_cholesky(
    kernel: KernelLike,
    x: Points,
    *,
    rank: int,
    tolerance: float | None = None,
    key: PRNGKeyArray | None = None,
    block_size: int = 1,
    mesh: Mesh | None = None,
) -> IncompleteCholesky:
    r"""Pivoted incomplete Cholesky decomposition of a Gram matrix that is never formed.

    At each step the pivot is the point of largest residual $K_{ii} - (L L^\top)_{ii}$ (greedy), or,
    with a `key`, a point drawn with probability proportional to its residual (randomly pivoted:
    Chen, Epperly, Tropp and Webber 2023).

    **Arguments:**

    - `kernel`, `x`: kernel and sample `[n, ...]`.
    - `rank`: largest number r of columns (static).
    - `tolerance`: stop once the trace of the residual is at most this fraction of the trace of K;
      by default 1e-12 in float64 and 1e-6 in float32, below which the residual is rounding error.
    - `key`: for random pivots.
    - `block_size`: most columns to add at once (static). Random pivots are proposed from the
      residual at the start of the block and accepted by rejection sampling, which leaves their law
      unchanged (accelerated RPCholesky: Epperly, Tropp and Webber 2024). Greedy pivots are the
      largest of the candidates for as long as one is left with half of the largest residual at the
      start of the block. The candidates are the points of largest residual in each of
      4 `block_size` interleaved parts of the sample. With 1 it is the greedy choice itself, with
      more one of about the same residual trace.
    - `mesh`: devices to divide the rows of the factor over; each gets all points.

    **Returns:** an `IncompleteCholesky`. Columns after the stop are zero and not `active`; the
    shape is always `[n, min(r, n)]`. No gradient flows through it; use `landmark_features` for one.
    Cost O(n r^2 + n r d) and memory O(n (r + block)) for every `block_size`; a larger one reads the
    factor r / `block_size` times instead of r, several times faster for many points.

    **Raises:** `ValueError` for an empty or non-finite sample, one outside the kernel's domain, or
    a `rank` or `block_size` below 1, or a `tolerance` outside [0, 1).
    """
    kernel, x, rank, share = _checked(kernel, x, rank, tolerance)
    block = as_count(block_size, "block_size")
    result = _decompose(kernel, x, rank, share, key, block, mesh)
    active = jnp.arange(rank) < result.count
    factor = jnp.where(active, result.rows[:rank, : size(x)].T, 0)
    return IncompleteCholesky(factor, result.pivots[:rank], active, result.residual)


def _checked(kernel: KernelLike, x: Points, rank: int, tolerance: float | None):
    x = check_finite(as_points(x, "x"), "x")
    kernel = kernel_for(kernel, x)
    kernel.check(x, "x")
    rank = as_count(rank, "rank")
    dtype = jax.eval_shape(kernel.diagonal, x).dtype
    if tolerance is None:
        tolerance = 1e-12 if jnp.finfo(dtype).eps < 1e-10 else 1e-6
    return kernel, x, min(rank, size(x)), as_fraction(tolerance, "tolerance").astype(dtype)


@eqx.filter_jit
def _decompose(
    kernel, x, rank: int, tolerance, key, block: int, mesh: Mesh | None = None
) -> _State:
    kernel, x = lax.stop_gradient((kernel, x))
    if mesh is None:
        share = Share(x, jnp.asarray(0), None, None)
        return _on_one_device(kernel, x, rank, tolerance, key, block, share)
    mesh = as_mesh(mesh)
    width, axes = -(-size(x) // mesh.size), mesh.axis_names

    def on_a_share(arrays):
        kernel, x, tolerance, key = eqx.combine(arrays, rest)
        start = lax.axis_index(axes) * width
        index = start + jnp.arange(width)
        points = take(x, jnp.minimum(index, size(x) - 1))
        share = Share(points, start, index < size(x), axes)
        return _on_one_device(kernel, x, rank, tolerance, key, block, share)

    arrays, rest = eqx.partition((kernel, x, tolerance, key), eqx.is_array)
    divided = _State(P(None, axes), P(), P(), P(), P(), P())  # pyright: ignore[reportArgumentType]
    run = jax.shard_map(on_a_share, mesh=mesh, in_specs=P(), out_specs=divided, check_vma=False)
    return run(arrays)


def _on_one_device(kernel, x, rank: int, tolerance, key, block: int, share: Share) -> _State:
    diagonal = kernel.diagonal(x)
    block = min(block, rank)
    keys = None if key is None else jax.random.split(key, rank)

    room = rank + (1 if block == 1 else max(block, _GROUP))
    start = _State(
        jnp.zeros((room, size(share.points)), diagonal.dtype),
        jnp.zeros(room, int),
        diagonal,
        jnp.asarray(0),
        jnp.asarray(0),
        jnp.asarray(True),
    )
    if block > 1:

        def add(state: _State) -> _State:
            return _add_block(kernel, x, diagonal, rank, tolerance, keys, block, share, state)

        return lax.while_loop(lambda state: state.going & (state.count < rank), add, start)
    # A fixed number of steps stays cheap under `vmap`, where a `while_loop` copies its state.
    return lax.fori_loop(
        0,
        rank,
        lambda _, state: _add_pivot(kernel, x, diagonal, tolerance, keys, share, state),
        start,
    )


def _add_pivot(kernel, x, diagonal, tolerance, keys, share: Share, state: _State) -> _State:
    """Choose one pivot and write its row behind those that are filled.

    What `_add_block` does for a block of one, in a program that compiles a quarter faster.
    """
    if keys is None:
        pivot = jnp.argmax(state.residual)
    else:
        pivot = draw_indices(jax.random.split(keys[state.step])[0], state.residual, 1)[0]
    height = state.residual[pivot]
    used = height > 4 * jnp.finfo(diagonal.dtype).eps * jnp.max(diagonal)
    filled = jnp.arange(state.rows.shape[0]) < state.count
    own = jnp.where(filled, share.columns(state.rows, pivot[None])[:, 0], 0)
    row = share.kernel_rows(kernel, take(x, pivot[None]))[0] - matmul(own, state.rows)
    # Rows whose squares do not exceed the residual, as in `settled`.
    rest = share.own(state.residual)
    most = jnp.sqrt(rest)
    row = jnp.clip(row / jnp.sqrt(jnp.where(used, height, 1)), -most, most)
    kept = used & (jnp.sum(state.residual) > tolerance * jnp.sum(diagonal))
    residual = share.together(rest - jnp.where(kept, row**2, 0), size(x))
    pivot = pivot.astype(state.pivots.dtype)
    return _State(
        lax.dynamic_update_index_in_dim(state.rows, row, state.count, 0),
        state.pivots.at[state.count].set(jnp.where(kept, pivot, 0)),
        jnp.maximum(residual, 0).at[jnp.where(kept, pivot, size(x))].set(0, mode="drop"),
        state.count + kept.astype(state.count.dtype),
        state.step + 1,
        kept,
    )


def _add_block(
    kernel, x, diagonal, rank: int, tolerance, keys, block: int, share: Share, state: _State
) -> _State:
    """Choose up to `block_size` pivots and write their rows behind those that are filled."""
    proposals = min(_PROPOSALS * block, size(x))
    if keys is None:
        candidates = _largest(state.residual, proposals)
        bars = jnp.full(proposals, _SHARE * jnp.max(state.residual))
    else:
        draw, accept = jax.random.split(keys[state.step])
        candidates = draw_indices(draw, state.residual, proposals)
        bars = state.residual[candidates] * jax.random.uniform(accept, (proposals,), diagonal.dtype)
    floor = 4 * jnp.finfo(diagonal.dtype).eps * jnp.max(diagonal)
    room = jnp.minimum(block, rank - state.count)
    filled = jnp.arange(state.rows.shape[0]) < state.count
    points = take(x, candidates)
    own = jnp.where(filled[:, None], share.columns(state.rows, candidates), 0)
    matrix = kernel.gram(points, points) - matmul(own.T, own)
    bars = jnp.maximum(bars, floor)
    heights = state.residual[candidates]
    chosen, cholesky, count, _ = choose_pivots(
        matrix, candidates, heights, bars, keys is None, block, room
    )

    # The new rows are L^-1 [k(accepted, x) - own^T rows].
    used = jnp.arange(block) < count
    identity = jnp.eye(block, dtype=diagonal.dtype)
    lower = jnp.where(used[:, None], cholesky[chosen], identity)
    inverse = triangular_solve(lower, identity)
    mixing = -matmul(inverse, own[:, chosen].T)
    rows, squares = _add_rows(kernel, take(points, chosen), share, inverse, mixing, used, state)
    # Stop, exactly at its column, once the trace is within the tolerance.
    squares = jnp.where(used, share.total(squares), 0)
    trace = jnp.sum(state.residual) - jnp.cumsum(squares) + squares
    kept = used & (trace > tolerance * jnp.sum(diagonal))
    added = jnp.sum(kept)
    # A loop over the rows: compilers for CPUs sum over the leading axis many times slower.
    residual = lax.fori_loop(
        0,
        block,
        lambda i, rest: rest - jnp.where(i < added, rows[state.count + i] ** 2, 0),
        share.own(state.residual),
    )
    residual = share.together(residual, size(x))
    index = candidates[chosen].astype(state.pivots.dtype)
    return _State(
        rows,
        lax.dynamic_update_slice(state.pivots, jnp.where(kept, index, 0), (state.count,)),
        jnp.maximum(residual, 0).at[jnp.where(kept, index, size(x))].set(0, mode="drop"),
        state.count + added,
        state.step + 1,
        added > 0,
    )


def _add_rows(kernel, chosen, share: Share, inverse, mixing, used, state: _State):
    """The factor with the rows `inverse @ k(chosen, x) + mixing @ rows` behind the filled ones, and
    their sums of squares.
    """
    block, n, rest = inverse.shape[0], size(share.points), share.own(state.residual)
    kernel_rows = share.kernel_rows(kernel, chosen)
    tile = min(_TILE, n)
    groups = -(-state.count // _GROUP)

    def add(t, carry):
        rows, squares = carry
        start = jnp.minimum(t * tile, n - tile)  # the last tile overlaps the one before it
        part = lax.dynamic_slice_in_dim(kernel_rows, start, tile, axis=1)

        def subtract(g, new):
            weights = lax.dynamic_slice_in_dim(mixing, g * _GROUP, _GROUP, axis=1)
            return new + matmul(
                weights, lax.dynamic_slice(rows, (g * _GROUP, start), (_GROUP, tile))
            )

        new = lax.fori_loop(0, groups, subtract, matmul(inverse, part))
        new = settled(new, used, lax.dynamic_slice_in_dim(rest, start, tile))
        fresh = start + jnp.arange(tile) >= t * tile
        squares = squares + jnp.sum(jnp.where(fresh, new, 0) ** 2, axis=1)
        return lax.dynamic_update_slice(rows, new, (state.count, start)), squares

    return lax.fori_loop(0, -(-n // tile), add, (state.rows, jnp.zeros(block, inverse.dtype)))


def _largest(residual: Float[Array, " n"], groups: int) -> Int[Array, " c"]:
    """The point of largest residual in each of c interleaved groups, in O(n).

    A sort for the c largest would cost more.
    """
    count = residual.shape[0]
    padded = jnp.pad(residual, (0, -count % groups), constant_values=-1).reshape(-1, groups)
    return jnp.minimum(jnp.argmax(padded, axis=0) * groups + jnp.arange(groups), count - 1)


def greedy_landmarks(
    kernel: KernelLike,
    x: Points,
    *,
    rank: int,
    tolerance: float | None = None,
    block_size: int | None = None,
    mesh: Mesh | None = None,
) -> Landmarks:
    """Landmarks by pivoted incomplete Cholesky: each is the point worst explained by those before
    it.

    The choice of F11 and S13 for low-rank filters. Arguments, `mesh` among them, cost and errors:
    `incomplete_cholesky`; for `block_size` None, one pivot at a time below 10^4 points and 64 from
    there on.
    """
    kernel, x, rank, share = _checked(kernel, x, rank, tolerance)
    result = _decompose(kernel, x, rank, share, None, _as_block(block_size, x, _MANY), mesh)
    return _chosen(x, result.pivots, result.count, rank)


def rpcholesky_landmarks(
    kernel: KernelLike,
    x: Points,
    *,
    rank: int,
    key: PRNGKeyArray,
    tolerance: float | None = None,
    block_size: int | None = None,
    mesh: Mesh | None = None,
) -> Landmarks:
    """Landmarks by randomly pivoted Cholesky: drawn in proportion to the residual, so outliers do
    not take over.

    Arguments, `mesh` among them, and errors: `incomplete_cholesky`. With `block_size` 1, one pivot
    at a time, at its cost. Otherwise of the same law (but other draws), without the factor:
    `block_size` points at a time are proposed in proportion to residuals computed earlier, and
    accepted with the share that is left of theirs (Epperly and Moreno 2023; in blocks: Epperly,
    Tropp and Webber 2024). A proposal costs O((r + block)^2 + r d), whatever n is; all residuals
    are computed anew, O(n r^2 + n r d), when about n / 16 proposals have been refused, and at the
    end if the tolerance may have been reached. Memory O(n + (r + block)^2). For `block_size` None,
    1 below 4000 points and 64 from there on.

    **Returns:** min(r, n) `Landmarks` in the order of choice; not `active` after the stop. No
    gradient flows through them.
    """
    kernel, x, rank, share = _checked(kernel, x, rank, tolerance)
    block = _as_block(block_size, x, _MANY_RANDOM)
    if block == 1:
        result = _decompose(kernel, x, rank, share, key, 1, mesh)
        pivots, count = result.pivots, result.count
    else:
        result = rejection_pivots(kernel, x, rank, share, key, min(block, size(x)), mesh)
        pivots, count = result.index, result.count
    return _chosen(x, pivots, count, rank)


@eqx.filter_jit
def _chosen(x: Points, pivots: Array, count: Array, rank: int) -> Landmarks:
    return Landmarks(take(x, pivots[:rank]), jnp.arange(rank) < count)


def _as_block(block_size: int | None, x: Points, many: int) -> int:
    return (
        as_count(block_size, "block_size")
        if block_size is not None
        else _BLOCK
        if size(x) >= many
        else 1
    )


def uniform_landmarks(x: Points, *, rank: int, key: PRNGKeyArray) -> Landmarks:
    """A uniform subsample of `rank` points without replacement, O(n)."""
    x = as_points(x, "x")
    rank = as_count(rank, "rank", x, "x")
    return Landmarks(take(x, jax.random.choice(key, size(x), (rank,), replace=False)))
