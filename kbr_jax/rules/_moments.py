r"""Sums over a sample that hold all that the rules and filters need of it, whatever its size.

With features $\phi$ of x and $\psi$ of y, every rule meets the n training pairs only through weights of the form

$$ w_i = b(x_i)^\top c, \qquad \beta_i = (b(x_i)^\top c) \, (\tilde\psi(y_i)^\top u), \qquad \tilde\psi = (\psi, 1), $$

and needs of them only sums: $\sum_i w_i \psi_i \psi_i^\top$ and $\sum_i \beta_i z_i$ for some z. Both are contractions of
tensors that are sums over the sample. The basis b is $\phi$ itself, which is exact, and its weights signed; or a
partition of unity (`PartitionOfUnity`), which is exact where w is constant over a cell, and whose weights are non-negative
wherever c is: those can be clipped, truncated, and used as importance weights.
"""

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
    in_precision,
    like,
    padded,
    size,
    take,
    without_padding,
)
from .._numerics import matmul, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, Point, PointFunction, Points
from ..features import (
    AbstractFeatureMap,
    Landmarks,
    PartitionOfUnity,
    RandomFourier,
    fourier_features,
    landmark_features,
)
from ..kernels import AbstractKernel, as_kernel

#: Rows of the sample at a time: products near the device's peak, and features of a block that stay in its cache.
_BLOCK = 2048


def ravel_point(point: Point) -> Float[Array, " e"]:
    """All numbers of a point as one vector: the default of what moments average."""
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(point)])


class MomentMaps(eqx.Module):
    r"""The functions whose products are averaged. Build it with `moment_maps`.

    - `x`, `y`: feature maps $\phi$ `[p]` and $\psi$ `[q]`;
    - `cells`: the basis b `[K]` if it is a partition of unity, else None and $b = \phi$;
    - `function`: f of one point x, with values `[e]`, whose expectations are wanted exactly.
    """

    x: AbstractFeatureMap
    y: AbstractFeatureMap
    cells: PartitionOfUnity | None
    function: PointFunction = eqx.field(static=True)
    embedding: bool = eqx.field(static=True)
    shift: bool = eqx.field(static=True)

    def basis(self, coordinates: Float[Array, "m p"], x: Points) -> Float[Array, "m K"]:
        """The basis at points with the given coordinates."""
        return coordinates if self.cells is None else self.cells.assign(x).astype(coordinates.dtype)


class Moments(eqx.Module):
    r"""Sums over n training pairs (x, y), for filters triples with the successor $x^+$. Add two with `merge_moments`.

    - `count`: n; `total`: $\sum \phi$; `covariance`: $\sum \phi \phi^\top$; `cross`: $\sum \phi \phi^{+\top}$;
    - `likelihood`: $\sum b \otimes \psi \otimes \psi$, each entry of the symmetric part once;
    - `readout`: $\sum b \otimes \tilde\psi \otimes (f, 1)$;
    - `embedding`: $\sum b \otimes \tilde\psi \otimes \phi$, `transition`: $\sum b \otimes \tilde\psi \otimes \phi^+$, where kept.

    Memory O(K q^2 + K q p), whatever n is.
    """

    maps: MomentMaps
    count: Float[Array, ""]
    total: Float[Array, " p"]
    covariance: Float[Array, "p p"]
    cross: Float[Array, "p p"] | None
    likelihood: Float[Array, "K t"]
    readout: Float[Array, "K q1 e1"]
    embedding: Float[Array, "K q1 p"] | None
    transition: Float[Array, "K q1 p"] | None

    @property
    def mass(self) -> Float[Array, " K"]:
        r"""$\sum_i b(x_i)$: how much each basis function holds of the sample."""
        return self.readout[:, -1, -1]

    @property
    def uniform(self) -> Float[Array, ""]:
        """The weight 1 / n of each point, 0 where there is none."""
        return safe_divide(jnp.ones_like(self.count), self.count)

    @property
    def pairs(self) -> Float[Array, "p q"]:
        r"""$\sum_i \phi(x_i) \psi(y_i)^\top$."""
        if self.maps.cells is None:
            return self.readout[:, :-1, -1]
        # The basis sums to 1.
        return jnp.sum(kept(self.embedding, "embedding"), axis=0)[:-1].T

    def operator(
        self, coefficients: Float[Array, "*b k"], index: Any = slice(None)
    ) -> Float[Array, "*b q q"]:
        r"""$\sum_i w_i \psi_i \psi_i^\top$ for $w_i = b(x_i)^\top c$, c on the basis functions at `index`; cost O(k q^2)."""
        return _unpack(matmul(coefficients, self.likelihood[index]), self.maps.y.matrix.shape[1])


def kept(tensor: Array | None, name: str) -> Array:
    """A part of the moments that may have been left out."""
    if tensor is None:
        raise ValueError(
            f"These moments lack `{name}`, which is needed here: collect them with maps that keep it."
        )
    return tensor


def contract(
    tensor: Float[Array, "K q1 s"],
    coefficients: Float[Array, "*#b K"],
    update: Float[Array, "*#b q1"],
) -> Float[Array, "..."]:
    r"""$\sum_i \beta_i z_i$ for $\beta_i = (b_i^\top c)(\tilde\psi_i^\top u)$, from $\sum b \otimes \tilde\psi \otimes z$; O(K q s)."""
    # Over the basis first: for a batch that is one large product, and what it leaves, [q + 1, s], is no more than the outer
    # product of the other order, [K, q + 1], for any s up to K.
    tables = matmul(coefficients, tensor.reshape(tensor.shape[0], -1))
    tables = tables.reshape(*coefficients.shape[:-1], *tensor.shape[1:])
    return matmul(update[..., None, :], tables)[..., 0, :]


def moment_maps(
    kernel_x: Any,
    kernel_y: Any,
    landmarks_x: Landmarks | RandomFourier,
    landmarks_y: Landmarks | RandomFourier,
    *,
    cells: PartitionOfUnity | None = None,
    function: PointFunction = ravel_point,
    embedding: bool = True,
    shift: bool = False,
) -> MomentMaps:
    """What to average over a sample: features of both variables, and what is wanted of them.

    **Arguments:**

    - `kernel_x`, `kernel_y`: kernels of the two variables; `landmarks_x`, `landmarks_y`: their p and q landmarks, chosen
      on a subsample or a stream, or random Fourier frequencies. (Embeddings come out on landmarks, so without them only
      `expectation` and `weights` read a belief.)
    - `cells`: K soft cells of x, for weights that can be clipped and truncated; None for the exact basis (K = p).
    - `function`: f of one point x whose expectations are wanted, with real values `[e]`; the point's own numbers by default.
    - `embedding`: keep what the embedding of a posterior needs (the rules, and filters with the two-inverse transition).
    - `shift`: keep what a filter with the shifted transition needs. Each of these two costs K (q + 1) p numbers.

    Cost O(p^3 + q^3). **Raises:** `ValueError` for points outside a kernel's domain, or cells of other points than x.
    """
    kernel_x, kernel_y = as_kernel(kernel_x), as_kernel(kernel_y)
    x, y = _map(kernel_x, landmarks_x), _map(kernel_y, landmarks_y)
    if cells is not None:
        check_alike(cells.centers.points, "cells.centers", x.points, "landmarks_x")
        cells = in_precision(cells, x.dtype)
    return MomentMaps(x, y, cells, function, embedding, shift)


def _map(kernel: AbstractKernel, choice: Landmarks | RandomFourier) -> AbstractFeatureMap:
    """A feature map that carries no sample."""
    if isinstance(choice, RandomFourier):
        return fourier_features(kernel, choice.center, choice)
    return landmark_features(kernel, choice.points, choice)


def collect_moments(
    maps: MomentMaps,
    x: Points,
    y: Points,
    successors: Points | None = None,
    *,
    mask: ArrayLike | None = None,
    block: int | None = None,
    mesh: Mesh | None = None,
) -> Moments:
    r"""The moments of a sample, in one pass over blocks of it.

    **Arguments:**

    - `maps`: what to average. `x`, `y`: samples `[n, ...]` of pairs; `successors` `[n, ...]` of x, for filters.
    - `mask`: `[n]`, False where a row is padding and does not count, whatever it holds.
    - `block`: rows at a time (static); 2048 by default. The result depends on it only by rounding.
    - `mesh`: devices to divide the sample over, along all axes of the mesh; one sum over devices at the end
      (O(K q^2 + K q p) numbers, whatever n is). n must be a multiple of the number of devices: pad, and mask.

    **Returns:** `Moments`. Cost O(n K q (q / 2 + e + p)): matrix products, near the device's peak. Differentiable, with
    the memory of one block.

    **Raises:** `ValueError` for samples that are empty, unpaired, not finite, or not of the landmarks' kind.
    """
    x, y = as_points(x, "x"), as_points(y, "y")
    check_same_size(x, "x", y, "y")
    n = size(x)
    padding = None if mask is None else as_mask(mask, n, "mask")
    mask = as_mask(padding, n, "mask")
    x, y = (
        check_finite(without_padding(points, padding), name)
        for points, name in ((x, "x"), (y, "y"))
    )
    check_alike(x, "x", maps.x.points, "landmarks_x")
    check_alike(y, "y", maps.y.points, "landmarks_y")
    x, y = like(x, maps.x.points), like(y, maps.y.points)
    if successors is not None:
        successors = as_points(successors, "successors")
        check_alike(successors, "successors", x, "x")
        check_same_size(successors, "successors", x, "x")
        successors = like(
            check_finite(without_padding(successors, padding), "successors"), maps.x.points
        )
    elif maps.shift:
        raise ValueError(
            "These maps keep a shifted transition (`shift=True`): pass `successors` of x too."
        )
    if block is not None:
        block = as_count(block, "block")
    if mesh is None:
        return _collect(maps, x, y, successors, mask, block)
    if n % mesh.size:
        raise ValueError(
            f"{n} pairs do not divide over {mesh.size} devices; pad them to a multiple, and mask the rest."
        )
    rows = PartitionSpec(mesh.axis_names)

    def on_one_device(maps, x, y, successors, mask):
        parts = _collect(maps, x, y, successors, mask, block)
        return _over_sums(lambda leaf: lax.psum(leaf, mesh.axis_names), parts)

    # Replication is not inferred through the scan over blocks; the sum over devices establishes it.
    everywhere = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows, rows, rows),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    data = jax.device_put((x, y, successors, mask), NamedSharding(mesh, rows))
    return eqx.filter_jit(everywhere)(maps, *data)


def collect_chunks(
    maps: MomentMaps, chunks: Iterable[tuple[Points, ...]], *, block: int | None = None
) -> Moments:
    """The moments of a sample that never is in memory at once.

    **Arguments:** `maps`; `chunks`, an iterable of pairs `(x, y)`, or triples `(x, y, successors)`, of arrays; `block` as in
    `collect_moments`. Chunks of one size share one compiled program; a shorter one (the last) is padded to the size of
    the first.

    **Returns:** `Moments`. Memory: one chunk and the moments. **Raises:** `ValueError` if there is no chunk, and as
    `collect_moments`.
    """
    moments, rows = None, 0
    for chunk in chunks:
        rows = rows or size(chunk[0])
        missing = max(rows - size(chunk[0]), 0)
        mask = np.arange(size(chunk[0]) + missing) < size(chunk[0])
        part = collect_moments(
            maps,
            *(padded(jax.tree.map(jnp.asarray, c), missing) for c in chunk),
            mask=mask,
            block=block,
        )
        moments = part if moments is None else merge_moments(moments, part)
    if moments is None:
        raise ValueError("`chunks` is empty; at least one chunk of data is needed.")
    return moments


def merge_moments(first: Moments, second: Moments) -> Moments:
    """The moments of two samples together, from moments with the same maps: their sum.

    To learn from new pairs online, merge their moments into the old ones and fit again: O(p^3), without the sample.

    **Raises:** `ValueError` if the two have moments of different kinds or sizes.
    """
    kinds = [
        (jax.tree.structure(m), [leaf.shape for leaf in jax.tree.leaves(m)])
        for m in (first, second)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "Moments can only be merged if they were collected with the same `MomentMaps`."
        )
    return _over_sums(jnp.add, first, second)


def _over_sums(function: Callable[..., Array], *moments: Moments) -> Moments:
    """Apply a function to all sums, and leave the maps alone."""
    bare = [eqx.tree_at(lambda m: m.maps, m, None) for m in moments]
    result = jax.tree.map(function, *bare)
    return eqx.tree_at(lambda m: m.maps, result, moments[0].maps, is_leaf=lambda leaf: leaf is None)


@eqx.filter_jit
def _collect(
    maps: MomentMaps, x: Points, y: Points, successors: Points | None, mask, block: int | None
) -> Moments:
    n, block = size(x), min(block or _BLOCK, size(x))
    count = -(-n // block)
    missing = count * block - n
    data = (padded((x, y, successors), missing), jnp.concatenate([mask, jnp.zeros(missing, bool)]))
    blocks = jax.tree.map(lambda leaf: leaf.reshape(count, block, *leaf.shape[1:]), data)

    def sums(part):
        return _block_sums(maps, *part)

    @jax.checkpoint
    def add(total, part):
        return jax.tree.map(jnp.add, total, sums(part)), None

    shapes = jax.eval_shape(sums, take(blocks, 0))
    total = lax.scan(
        add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), blocks
    )[0]
    return _from_sums(maps, *total)


def _block_sums(
    maps: MomentMaps, points: tuple[Points, Points, Points | None], mask: Bool[Array, " n"]
):
    r"""Sums over a few points: those of $\phi$, and for each basis function b the product $(b \tilde\psi)^\top (\psi, z)$ with all z.

    Of $\psi \psi^\top$ only a quarter is formed twice: the rows are split in two, and the lower left block is left out.
    """
    x, y, successors = points
    phi, psi = maps.x.coordinates(x), maps.y.coordinates(y)
    dtype = phi.dtype
    psi = psi.astype(dtype)
    count = mask.astype(dtype)[:, None]
    one = jnp.ones_like(count)
    values = jax.vmap(maps.function)(x).astype(dtype)
    targets = [values.reshape(values.shape[0], -1), one]
    targets += [phi] if maps.embedding else []
    following = None
    if successors is not None:
        following = maps.x.coordinates(successors)
        targets += [following] if maps.shift else []
    half = psi.shape[1] // 2
    left = psi[:, :half], jnp.concatenate([psi[:, half:], one], axis=1)
    right = jnp.concatenate([psi, *targets], axis=1)

    # The checkpoint keeps the reverse pass from storing the weighted features of every basis function.
    @jax.checkpoint
    def products(weights):
        top, bottom = (part * weights[:, None] for part in left)
        return matmul(top.T, right), matmul(bottom.T, right[:, half:])

    top, bottom = lax.map(products, (count * maps.basis(phi, x)).T)
    kept = count * phi
    cross = None if following is None else matmul(kept.T, following)
    return jnp.sum(count), jnp.sum(kept, axis=0), matmul(kept.T, phi), cross, top, bottom


def _from_sums(maps: MomentMaps, count, total, covariance, cross, top, bottom) -> Moments:
    q, p = maps.y.matrix.shape[1], covariance.shape[0]
    half = top.shape[1]
    rest = jnp.concatenate([top[..., q:], bottom[..., q - half :]], axis=1)
    stops = rest.shape[2] - p * (maps.embedding + maps.shift)
    return Moments(
        maps=maps,
        count=count,
        total=total,
        covariance=covariance,
        cross=cross,
        likelihood=_pack(top[..., :half], top[..., half:q], bottom[:, :-1, : q - half]),
        readout=rest[..., :stops],
        embedding=rest[..., stops : stops + p] if maps.embedding else None,
        transition=rest[..., rest.shape[2] - p :] if maps.shift else None,
    )


def _pack(
    first: Float[Array, "*b h h"], corner: Float[Array, "*b h l"], second: Float[Array, "*b l l"]
) -> Float[Array, "*b t"]:
    """Symmetric matrices [[first, corner], [corner^T, second]], l = h or h + 1, without their repeated entries.

    One rectangle [l, h + 1] holds both triangles: up to the diagonal `second`, behind it `first`. Taking it apart
    again is a few transposes of dense blocks, much faster than gathering entries.
    """
    h, low = first.shape[-1], second.shape[-1]
    rows = [(0, 0)] * (first.ndim - 2)
    left = jnp.pad(second, (*rows, (0, 0), (0, h + 1 - low)))
    right = jnp.pad(first, (*rows, (0, low - h), (1, 0)))
    triangles = jnp.where(np.tri(low, h + 1, dtype=bool), left, right)
    flat = [part.reshape(*part.shape[:-2], -1) for part in (corner, triangles)]
    return jnp.concatenate(flat, axis=-1)


def _unpack(packed: Float[Array, "*b t"], q: int) -> Float[Array, "*b q q"]:
    """The symmetric matrices of `_pack`."""
    h = q // 2
    low = q - h
    corner = packed[..., : h * low].reshape(*packed.shape[:-1], h, low)
    triangles = packed[..., h * low :].reshape(*packed.shape[:-1], low, h + 1)
    first, second = triangles[..., :h, 1:], triangles[..., :low]
    first = jnp.where(np.tri(h, dtype=bool), jnp.swapaxes(first, -1, -2), first)
    second = jnp.where(np.tri(low, dtype=bool), second, jnp.swapaxes(second, -1, -2))
    top = jnp.concatenate([first, corner], axis=-1)
    bottom = jnp.concatenate([jnp.swapaxes(corner, -1, -2), second], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)
