"""Squared MMD of many splits of a pooled sample, with memory linear in its size."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .._checks import padded, size, take
from .._numerics import matmul
from .._typing import Array, Bool, Float, Int, Points, PRNGKeyArray
from ..devices import over_devices
from ..kernels import AbstractKernel, gram_matvec
from ._collections import for_each
from ._results import relevant

#: Rows and columns of a tile of a Gram matrix, and draws of permutations side by side.
_TILE, _BATCH = 512, 64

#: Statistics `[kernels]`, those of the splits `[draws, kernels]`, magnitudes of their terms
#: `[kernels]`, and the sums of squares of the Gram matrices without diagonals `[kernels]`.
Found = tuple[
    Float[Array, " kernels"],
    Float[Array, "draws kernels"],
    Float[Array, " kernels"],
    Float[Array, " kernels"],
]
#: For splits `[b, N]`: the sums within the first part `[b]`, the row sums `[N]`, and the sums of
#: squares of the centered matrix and of the matrix; diagonals left out.
Sums = tuple[Float[Array, " b"], Float[Array, " N"], Float[Array, ""], Float[Array, ""]]


@eqx.filter_jit
def by_gram(
    kernels: tuple[AbstractKernel, ...],
    pooled: Points,
    least: int,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
) -> Found:
    """From the Gram matrices of the pool, whose first `least` points are the smaller sample."""
    dtype = jnp.result_type(*(jax.eval_shape(one.diagonal, pooled).dtype for one in kernels))

    def all_sums(shared, chosen):
        kernels, pooled = shared
        return for_each(lambda one: _of_gram(one, pooled, chosen, dtype), kernels)

    return _over_splits(all_sums, (kernels, pooled), size(pooled), least, key, draws, mesh)


@eqx.filter_jit
def by_features(
    maps: tuple[Float[Array, "N r"], ...],
    least: int,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
) -> Found:
    """From features of the pool, one map for each kernel."""

    def all_sums(maps, chosen):
        found = [_of_features(one, chosen) for one in maps]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    return _over_splits(all_sums, maps, maps[0].shape[0], least, key, draws, mesh)


def _over_splits(
    all_sums: Callable, shared, total: int, least: int, key: PRNGKeyArray, draws: int, mesh
) -> Found:
    n, m = least, total - least
    first = jnp.arange(total) < n

    def of_keys(shared, keys):
        chosen = lax.map(lambda one: jax.random.permutation(one, first), keys, batch_size=_BATCH)
        chosen = jnp.concatenate([first[None], chosen])
        within, rows, centers, wholes = all_sums(shared, chosen)
        across = matmul(rows, chosen.T.astype(rows.dtype)) - within
        other = jnp.sum(rows, axis=-1)[:, None] - 2 * across - within
        values = (within / n / (n - 1) + other / m / (m - 1) - 2 * across / n / m).T
        own = jnp.stack([values[0], centers, wholes])
        # Each device finds these again.
        return values[1:], jnp.broadcast_to(own, (keys.shape[0], *own.shape))

    null, own = over_devices(of_keys, mesh, shared, jax.random.split(key, draws))
    statistics, centers, wholes = own[0]
    pairs = float(total * (total - 1))
    # The smaller sample is the first: then no sum of a statistic exceeds this many times its terms.
    magnitude = relevant(centers / pairs, wholes / pairs) * (3 + total**2 / (m * (m - 1)))
    return statistics, null, magnitude, wholes


def _of_gram(kernel: AbstractKernel, pooled: Points, chosen: Bool[Array, "b N"], dtype) -> Sums:
    """In tiles of the lower triangle of the centered Gram matrix."""
    n = size(pooled)
    side = min(_TILE, n)
    count = -(-n // side)
    missing = count * side - n
    means = gram_matvec(kernel, pooled, pooled, jnp.ones(n, dtype)).astype(dtype) / n
    tiles = jax.tree.map(
        lambda leaf: leaf.reshape(count, side, *leaf.shape[1:]), padded(pooled, missing)
    )
    means = jnp.pad(means, (0, missing)).reshape(count, side)
    splits = jnp.pad(chosen, ((0, 0), (0, missing))).reshape(-1, count, side)
    mean, places = jnp.sum(means) / n, jnp.arange(count * side).reshape(count, side)

    def add(sums, tile: Int[Array, "2"]):
        within, rows, centers, wholes = sums
        i, j = tile
        gram = kernel.gram(take(tiles, i), take(tiles, j)).astype(dtype)
        kept = (places[i][:, None] != places[j]) & (places[i][:, None] < n) & (places[j] < n)
        center = jnp.where(kept, gram - means[i][:, None] - means[j] + mean, 0)
        one, two = splits[:, i].astype(dtype), splits[:, j].astype(dtype)
        twice = jnp.where(i == j, 1, 2).astype(dtype)
        within = within + twice * jnp.sum(matmul(one, center) * two, axis=-1)
        rows = rows.at[i].add(jnp.sum(center, axis=1))
        rows = rows.at[j].add(jnp.where(i == j, 0, jnp.sum(center, axis=0)))
        centers = centers + twice * jnp.sum(center**2)
        return (
            within,
            rows,
            centers,
            wholes + twice * jnp.sum(jnp.where(kept, gram, 0) ** 2),
        ), None

    zero = jnp.zeros((), dtype)
    start = jnp.zeros(chosen.shape[0], dtype), jnp.zeros((count, side), dtype), zero, zero
    (within, rows, centers, wholes), _ = lax.scan(
        add, start, jnp.asarray(np.stack(np.tril_indices(count), axis=1))
    )
    return within, rows.reshape(-1)[:n], centers, wholes


def _of_features(phi: Float[Array, "N r"], chosen: Bool[Array, "b N"]) -> Sums:
    """Of the matrix of the products of features."""
    center = phi - jnp.mean(phi, axis=0)

    def squares(features):
        lengths = jnp.sum(features**2, axis=1)
        return lengths, jnp.sum(matmul(features.T, features) ** 2) - jnp.sum(lengths**2)

    (lengths, centers), (_, wholes) = squares(center), squares(phi)
    within = lax.map(
        lambda split: (
            jnp.sum(matmul(split.astype(phi.dtype), center) ** 2)
            - jnp.sum(jnp.where(split, lengths, 0))
        ),
        chosen,
        batch_size=_BATCH,
    )
    rows = matmul(center, jnp.sum(center, axis=0)) - lengths
    return within, rows, jnp.maximum(centers, 0), jnp.maximum(wholes, 0)
