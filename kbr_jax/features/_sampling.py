"""Landmarks by k-means++, and from a stream that never fits in memory."""

from collections.abc import Iterable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, as_points, check_alike, check_finite, is_real, size, take
from .._numerics import squared_distances, unit_of
from .._typing import Array, Points, PRNGKeyArray
from ..kernels import AbstractKernel, KernelLike, as_kernel
from ..kernels._base import flat
from ._landmarks import Landmarks
from ._pivots import draw_indices
from ._selection import rpcholesky_landmarks

#: The reservoir of a stream holds this many points for each landmark unless told otherwise.
_POOL = 10

#: Lloyd's assignments work through the sample in slices of at most this many points.
_SLICE = 4096


def kmeanspp_landmarks(
    kernel: KernelLike | None, x: Points, *, rank: int, key: PRNGKeyArray, num_iterations: int = 0
) -> Landmarks:
    r"""Landmarks by k-means++ seeding (Arthur and Vassilvitskii 2007), then Lloyd's iterations if
    asked for.

    The first point is drawn uniformly, each next one in proportion to $D_i^2$, the squared distance
    of point i to the nearest one drawn: Euclidean, or, with a `kernel`,
    $k(x, x) - 2 k(x, c) + k(c, c)$ in its space of functions. Lloyd's iterations move every center
    to the mean of the points nearest to it (Zhang, Tsang and Kwok 2008 take these as landmarks).

    **Arguments:**

    - `kernel`: measures the distances of the seeding; None for Euclidean ones. Lloyd's iterations
      are Euclidean in any case.
    - `x`: sample `[n, ...]`; arrays of real coordinates, or any points that the `kernel` takes.
    - `rank`: number r of landmarks, at most n (static). `key`: randomness.
    - `num_iterations`: number of Lloyd's iterations (static); only for arrays. A center that loses
      all its points stays.

    **Returns:** r `Landmarks`, points of the sample for 0 iterations; not `active` where the sample
    holds fewer different points. No gradient flows through them. Seeding costs O(n r d) in r passes
    over the sample and memory O(n d); an iteration O(n r d) and memory O(r) more for each of up to
    4096 points at a time.

    **Raises:** `ValueError` for an empty or non-finite sample, a `rank` above n, `num_iterations`
    below 0, or points that are not real arrays where distances are Euclidean.
    """
    x = check_finite(as_points(x, "x"), "x")
    rank = as_count(rank, "rank", x, "x")
    iterations = as_count(num_iterations, "num_iterations") if num_iterations != 0 else 0
    if kernel is not None:
        kernel = as_kernel(kernel)
        kernel.check(x, "x")
    if (kernel is None or iterations) and not is_real(x):
        raise ValueError(
            "k-means needs `x` to be one array of real coordinates; for other points pass a "
            "`kernel` and 0 iterations."
        )
    seeds, active = _seed(kernel, lax.stop_gradient(x), rank, key)
    return Landmarks(
        _lloyd(seeds, active, lax.stop_gradient(x), iterations) if iterations else seeds, active
    )


@eqx.filter_jit
def _seed(kernel: AbstractKernel | None, x: Points, rank: int, key: PRNGKeyArray):
    kernel = lax.stop_gradient(kernel)

    # In units of the largest number: squares of others may leave the range of float32.
    largest = jnp.max(jnp.abs(flat(x))) if kernel is None else jnp.ones(())
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)

    def distances(index):
        center = take(x, index[None])
        if kernel is None:
            return squared_distances(flat(x), flat(center), unit)[:, 0]
        norms = kernel.diagonal(x) + kernel.diagonal(center)
        squares = norms - 2 * kernel.gram(x, center)[:, 0]
        return jnp.where(
            squares > 8 * jnp.finfo(norms.dtype).eps * norms, squares, 0
        )  # below: rounding

    def add(i, carry):
        nearest, chosen, active = carry
        index = draw_indices(keys[i], nearest, 1)[0].astype(chosen.dtype)
        found = nearest[index] > 0
        nearest = jnp.minimum(nearest, distances(index)).at[index].set(0)
        return nearest, chosen.at[i].set(index), active.at[i].set(found)

    keys = jax.random.split(key, rank)
    first = jax.random.randint(keys[0], (), 0, size(x))
    start = (distances(first).at[first].set(0), jnp.full(rank, first), jnp.ones(rank, bool))
    _, chosen, active = lax.fori_loop(1, rank, add, start)
    return take(x, chosen), active


@eqx.filter_jit
def _lloyd(centers: Array, active: Array, x: Array, iterations: int) -> Array:
    points, shape = flat(x), centers.shape
    unit = unit_of(points)
    rank, count = shape[0], points.shape[0]
    width = min(_SLICE, count)
    padded = jnp.pad(points, ((0, -count % width), (0, 0))).reshape(-1, width, points.shape[1])

    def move(_, centers):
        def nearest(rows):
            return jnp.argmin(
                jnp.where(active, squared_distances(rows, centers, unit), jnp.inf), axis=1
            )

        owner = lax.map(nearest, padded).reshape(-1)[:count]
        # From the old centers: sums of many points far from 0 lose their digits.
        moved = jax.ops.segment_sum(points - centers[owner], owner, rank)
        counts = jax.ops.segment_sum(jnp.ones(count, points.dtype), owner, rank)[:, None]
        return centers + moved / jnp.maximum(counts, 1)

    return lax.fori_loop(0, iterations, move, flat(centers)).reshape(shape)


def streaming_landmarks(
    kernel: KernelLike,
    chunks: Iterable[Points],
    *,
    rank: int,
    key: PRNGKeyArray,
    pool: int | None = None,
) -> Landmarks:
    r"""Landmarks of a sample that comes in chunks and is seen once, in any order.

    A reservoir keeps a uniform subsample of `pool` of all the points seen (each gets a random
    priority, the largest stay); randomly pivoted Cholesky then chooses among these. So the law of
    the landmarks is that of `rpcholesky_landmarks` on a uniform subsample, whatever the order of
    the points, and for a stream of at most `pool` points it is `rpcholesky_landmarks` of all
    points. The residual of the subsample estimates that of the stream; what is rarer than 1 in
    `pool` may be missed.

    **Arguments:**

    - `kernel`: kernel, or a callable of two points.
    - `chunks`: samples `[n_i, ...]` of one kind of point, from any iterable. All share one
      compilation: smaller ones are padded to the size of the first, larger ones cut.
    - `rank`: number r of landmarks. `key`: randomness.
    - `pool`: points that the reservoir holds, at least r; 10 r if None.

    **Returns:** r `Landmarks`, fewer if fewer points came. Memory O(pool (d + r)) and one chunk;
    cost O(n log pool) for the stream of n points and O(pool r^2 + pool r d) at its end.

    **Raises:** `ValueError` for an empty stream, an empty or non-finite chunk, chunks of different
    points or dtypes, or a `pool` below `rank`.
    """
    kernel, rank = as_kernel(kernel), as_count(rank, "rank")
    pool = _POOL * rank if pool is None else as_count(pool, "pool")
    if pool < rank:
        raise ValueError(f"`pool` must hold at least `rank` = {rank} points, got {pool}.")
    draw, choose = jax.random.split(key)
    state, seen = None, 0
    for index, (piece, count) in enumerate(_pieces(kernel, chunks)):
        if state is None:
            empty = jax.tree.map(lambda leaf: jnp.zeros((pool, *leaf.shape[1:]), leaf.dtype), piece)
            state = empty, jnp.zeros(pool, jnp.uint32)
        state = _absorb(*state, piece, jnp.asarray(count), jax.random.fold_in(draw, index))
        seen += count
    if state is None:
        raise ValueError("`chunks` is an empty stream; at least one chunk is needed.")
    points = take(state[0], slice(min(seen, pool)))
    return rpcholesky_landmarks(kernel, points, rank=rank, key=choose)


def _pieces(kernel: AbstractKernel, chunks: Iterable[Points]) -> Iterator[tuple[Points, int]]:
    """The checked chunks as pieces of one size, with their numbers of true points."""
    first = None
    for index, chunk in enumerate(chunks):
        name = f"chunks[{index}]"
        chunk = check_finite(as_points(chunk, name), name)
        first = chunk if first is None else first
        check_alike(chunk, name, first, "chunks[0]")
        kinds = [[str(leaf.dtype) for leaf in jax.tree.leaves(c)] for c in (chunk, first)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"`{name}` has the dtypes {kinds[0]} and `chunks[0]` {kinds[1]}; they must agree."
            )
        kernel.check(chunk, name)
        width = size(first)
        for start in range(0, size(chunk), width):
            piece = take(chunk, slice(start, start + width))
            count = size(piece)
            yield piece if count == width else take(piece, jnp.arange(width) % count), count


@jax.jit
def _absorb(
    points: Points, priorities: Array, piece: Points, count: Array, key: PRNGKeyArray
) -> tuple[Points, Array]:
    """The reservoir after one more piece.

    The points of largest priority; padding has the priority of an empty place.
    """
    width = size(piece)
    # Integers, since random floats have too few values near their largest to tell many points
    # apart.
    bits = jnp.maximum(jax.random.bits(key, (width,), jnp.uint32), 1)
    own = jnp.where(jnp.arange(width) < count, bits, 0)
    priorities, best = lax.top_k(jnp.concatenate([priorities, own]), priorities.shape[0])
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b])[best], points, piece)
    return joined, priorities
