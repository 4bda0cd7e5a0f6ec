"""Moments of a sample: from arrays, from chunks that never are in memory at once, over devices."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._checks import (
    as_count,
    as_mask,
    as_points,
    check_alike,
    check_finite,
    check_same_size,
    is_concrete,
    like,
    padded,
    size,
    take,
    without_padding,
)
from .._numerics import matmul
from .._trees import same
from .._typing import Array, ArrayLike, Bool, Points
from .._warnings import warn
from ..devices import as_mesh
from ._moments import MomentMaps, Moments, pack

#: Rows of the sample at a time. Products run near the device's peak, and the features of a block
#: stay in its cache.
_BLOCK = 2048
#: Share of the smaller sample that may be lost by rounding without a warning.
_LOST = 0.01


def collect_moments(
    maps: MomentMaps,
    x: Points | Iterable[tuple[Points, ...]],
    y: Points | None = None,
    successors: Points | None = None,
    *,
    mask: ArrayLike | None = None,
    block_size: int | None = None,
    mesh: Mesh | None = None,
) -> Moments:
    r"""Collect the moments of a sample in one pass.

    **Arguments:**

    - `maps`: what to average.
    - `x`, `y`: samples `[n, ...]` of pairs; `successors` `[n, ...]` of x, for a shifted transition.
      Without `y`, `x` is an iterable of pairs `(x, y)` or triples `(x, y, successors)` of arrays,
      for a sample that does not fit in memory. Chunks of one size share one compiled program. A
      shorter one is padded to the size of the first.
    - `mask`: `[n]`, False where a row is padding and does not count, whatever it holds.
    - `block_size`: rows at a time (static), 2048 by default. The result depends on it by rounding.
    - `mesh`: devices to divide the sample over, along all axes of the mesh, with one sum over
      devices at the end. n must be a multiple of the number of devices: pad, and mask.

    **Returns:** `Moments`. Cost O(n K q (q / 2 + e + p)), memory of one block and the moments.
    Differentiable.

    **Raises:** `ValueError` for samples that are empty, unpaired, not finite, or of another kind
    than the landmarks.
    """
    if y is None:
        if mask is not None or mesh is not None:
            raise ValueError("Chunks take no `mask` and no `mesh`: give them with arrays x and y.")
        return _collect_chunks(maps, x, block_size)
    x, y, successors, mask = _checked(maps, x, y, successors, mask)
    block_size = None if block_size is None else as_count(block_size, "block_size")
    if mesh is None:
        return _collect(maps, x, y, successors, mask, block_size)
    mesh = as_mesh(mesh)
    if size(x) % mesh.size:
        raise ValueError(
            f"{size(x)} pairs do not divide over {mesh.size} devices: pad them, and mask the rest."
        )
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return _everywhere(mesh, block_size, maps, jax.device_put((x, y, successors, mask), rows))


@eqx.filter_jit
def _everywhere(mesh: Mesh, block_size: int | None, maps: MomentMaps, data: tuple) -> Moments:
    def on_one_device(maps, data):
        x, y, successors, mask = data
        parts = _collect(maps, x, y, successors, mask, block_size)
        return _over_sums(lambda leaf: lax.psum(leaf, mesh.axis_names), parts)

    # Replication is not inferred through the scan over blocks; the sum establishes it.
    return jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(mesh.axis_names)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(maps, data)


def _checked(maps: MomentMaps, x: Points, y: Points, successors: Points | None, mask: Any):
    """The sample in the precision of the maps, without what padding holds; and its mask."""
    x, y = as_points(x, "x"), as_points(y, "y")
    check_same_size(x, "x", y, "y")
    padding = None if mask is None else as_mask(mask, size(x), "mask")

    def checked(points, name, features, reference_name):
        points = check_finite(without_padding(points, padding), name)
        check_alike(points, name, features.points, reference_name)
        features.kernel.check(points, name)
        return like(points, features.points)

    x = checked(x, "x", maps.x, "landmarks_x")
    y = checked(y, "y", maps.y, "landmarks_y")
    if successors is not None:
        successors = as_points(successors, "successors")
        check_same_size(successors, "successors", x, "x")
        successors = checked(successors, "successors", maps.x, "landmarks_x")
    elif maps.shift:
        raise ValueError("These maps keep a shifted transition: pass the `successors` of x too.")
    return x, y, successors, as_mask(padding, size(x), "mask")


#: What a chunk holds.
_PARTS = ("x", "y", "successors")


def _collect_chunks(maps: MomentMaps, chunks: Any, block_size: int | None) -> Moments:
    moments, rows = None, 0
    for chunk in chunks:
        if not isinstance(chunk, tuple) or len(chunk) < 2:
            raise ValueError("`x` without `y` must yield tuples of x and y: give both.")
        rows = rows or size(chunk[0])
        missing = max(rows - size(chunk[0]), 0)
        mask = np.arange(size(chunk[0]) + missing) < size(chunk[0])
        parts = [as_points(part, name) for part, name in zip(chunk, _PARTS, strict=False)]
        for part, name in zip(parts[1:], _PARTS[1:], strict=False):
            check_same_size(part, name, parts[0], "x")
        data = (padded(part, missing) for part in parts)
        part = collect_moments(maps, *data, mask=mask, block_size=block_size)
        # Not by `merge_moments`, whose checks wait for the sums of each chunk.
        moments = part if moments is None else _over_sums(jnp.add, moments, part)
    if moments is None:
        raise ValueError("`x` yields no chunk; at least one chunk of data is needed.")
    return moments


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Return the moments of two samples together: their sum.

    To learn from new pairs online, merge their moments into the old ones and fit again, O(p^3).

    **Raises:** `ValueError` if they were collected with different maps. Traced maps are compared by
    their shapes only. Warns where one sample is too small to change the sums of the other: in
    float32 a single pair, beside 2^24 pairs.
    """
    if jax.tree.structure(first) != jax.tree.structure(second) or not same(first.maps, second.maps):
        raise ValueError("Merge only moments that were collected with the same `MomentMaps`.")
    merged = _over_sums(jnp.add, first, second)
    if is_concrete(merged.count):
        counts = [np.asarray(m.count, float) for m in (first, second)]
        lost = np.abs(np.asarray(merged.count, float) - sum(counts))
        if np.any(lost > _LOST * np.minimum(*counts)):
            warn(
                f"In {merged.count.dtype} these moments lose a part of the smaller sample: "
                f"{np.max(counts):.0f} and {np.min(counts):.0f} pairs. Merge more pairs at a "
                "time, or keep the moments in float64."
            )
    return merged


def _over_sums(function: Callable[..., Array], *moments: Moments) -> Moments:
    """Apply a function to all sums, and leave the maps alone."""
    bare = [eqx.tree_at(lambda m: m.maps, m, None) for m in moments]
    result = jax.tree.map(function, *bare)
    return eqx.tree_at(lambda m: m.maps, result, moments[0].maps, is_leaf=lambda x: x is None)


@eqx.filter_jit
def _collect(
    maps: MomentMaps,
    x: Points,
    y: Points,
    successors: Points | None,
    mask: Bool[Array, " n"],
    block_size: int | None,
) -> Moments:
    n, block_size = size(x), min(block_size or _BLOCK, size(x))
    count = -(-n // block_size)
    missing = count * block_size - n
    mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
    data = (padded((x, y, successors), missing), mask)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(count, block_size, *leaf.shape[1:]), data)

    def sums(part):
        return _block_sums(maps, *part)

    @jax.checkpoint
    def add(total, part):
        return jax.tree.map(jnp.add, total, sums(part)), None

    shapes = jax.eval_shape(sums, take(blocks, 0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return _from_sums(maps, *lax.scan(add, zeros, blocks)[0])


def _block_sums(
    maps: MomentMaps, points: tuple[Points, Points, Points | None], mask: Bool[Array, " n"]
):
    r"""Sum over a few points: $(b \tilde\psi)^\top (\psi, z)$ for each basis function b and all z.

    Of $\psi \psi^\top$ only a quarter is formed twice. The rows are split in two, and the lower
    left block is left out.
    """
    x, y, successors = points
    phi, psi = maps.x.coordinates(x), maps.y.coordinates(y)
    dtype = phi.dtype
    psi = psi.astype(dtype)
    count = mask.astype(dtype)[:, None]
    one = jnp.ones_like(count)
    values = jax.vmap(maps.function)(x).astype(dtype)
    targets = [values.reshape(values.shape[0], -1) - maps.origin, one]
    targets += [phi] if maps.embedding else []
    targets += [maps.x.coordinates(successors)] if maps.shift else []
    half = psi.shape[1] // 2
    left = psi[:, :half], jnp.concatenate([psi[:, half:], one], axis=1)
    right = jnp.concatenate([psi, *targets], axis=1)

    # The checkpoint keeps the reverse pass from storing the weighted features of every function.
    @jax.checkpoint
    def products(weights):
        top, bottom = (part * weights[:, None] for part in left)
        return matmul(top.T, right), matmul(bottom.T, right[:, half:])

    top, bottom = lax.map(products, (count * maps.basis(phi, x)).T)
    return jnp.sum(count), matmul((count * phi).T, phi), top, bottom


def _from_sums(maps: MomentMaps, count, covariance, top, bottom) -> Moments:
    q, p = maps.y.matrix.shape[1], covariance.shape[0]
    half = top.shape[1]
    rest = jnp.concatenate([top[..., q:], bottom[..., q - half :]], axis=1)
    stops = rest.shape[2] - p * (maps.embedding + maps.shift)
    return Moments(
        maps=maps,
        count=count,
        covariance=covariance,
        likelihood=pack(top[..., :half], top[..., half:q], bottom[:, :-1, : q - half]),
        readout=rest[..., :stops],
        embedding=rest[..., stops : stops + p] if maps.embedding else None,
        transition=rest[..., rest.shape[2] - p :] if maps.shift else None,
    )
