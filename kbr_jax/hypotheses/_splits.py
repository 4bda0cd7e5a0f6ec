"""Squared MMD of many splits of a pooled sample, with memory linear in its size."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .._checks import padded, size, take
from .._numerics import matmul, safe_sqrt
from .._typing import Array, Bool, Float, Int, Points, PRNGKeyArray
from ..devices import over_devices
from ..kernels import AbstractKernel, gram_matvec
from ._collections import for_each
from ._results import interval_of, relevant

#: Rows and columns of a tile of a Gram matrix, and draws of permutations side by side.
_TILE, _BATCH = 512, 64

#: Statistics `[kernels]`, those of the splits `[draws, kernels]`, magnitudes of their terms
#: `[kernels]`, root mean squares of the Gram matrices without diagonals, as they are and centered,
#: `[2, kernels]`, and effect with its interval `[kernels, 3]`.
Found = tuple[
    Float[Array, " kernels"],
    Float[Array, "draws kernels"],
    Float[Array, " kernels"],
    Float[Array, "2 kernels"],
    Float[Array, "kernels 3"],
]


class Sums(eqx.Module):
    """Sums of a centered Gram matrix, diagonals left out, for splits `[b, N]`.

    - `within`: over the first part of each split, and `rows`: over all points.
    - `first`: over the first part of the first split, for each point.
    - `centers`, `wholes`: of squares of the centered matrix, and of the matrix itself, in units of
      its largest entry, `unit`. The squares of a polynomial kernel may leave the range of float32.
    """

    within: Float[Array, "*k b"]
    rows: Float[Array, "*k N"]
    first: Float[Array, "*k N"]
    centers: Float[Array, "*k"]
    wholes: Float[Array, "*k"]
    unit: Float[Array, "*k"]
    diagonal: Float[Array, "*k N"]


@eqx.filter_jit
def by_gram(
    kernels: tuple[AbstractKernel, ...],
    pooled: Points,
    least: int,
    length: int,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
) -> Found:
    """From the Gram matrices of the pool, whose first `least` points are the smaller sample.

    Blocks of `length` points stay together.
    """
    dtype = jnp.result_type(*(jax.eval_shape(one.diagonal, pooled).dtype for one in kernels))

    def all_sums(shared, chosen):
        kernels, pooled = shared
        return for_each(lambda one: _of_gram(one, pooled, chosen, dtype), kernels)

    sizes = size(pooled), least, length
    return _over_splits(all_sums, (kernels, pooled), sizes, key, draws, mesh)


@eqx.filter_jit
def by_features(
    maps: tuple[Float[Array, "N r"], ...],
    least: int,
    length: int,
    key: PRNGKeyArray,
    draws: int,
    mesh: Mesh | None,
) -> Found:
    """From features of the pool, one map for each kernel."""

    def all_sums(maps, chosen):
        found = [_of_features(one, chosen) for one in maps]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    sizes = maps[0].shape[0], least, length
    return _over_splits(all_sums, maps, sizes, key, draws, mesh)


def _over_splits(
    all_sums: Callable, shared, sizes: tuple[int, int, int], key: PRNGKeyArray, draws: int, mesh
) -> Found:
    total, n, length = sizes
    m = total - n
    first = jnp.arange(total) < n

    def of_keys(shared, keys):
        def split(one):
            return jnp.repeat(jax.random.permutation(one, first[::length]), length)

        chosen = lax.map(split, keys, batch_size=_BATCH)
        chosen = jnp.concatenate([first[None], chosen])
        sums = all_sums(shared, chosen)
        across = matmul(sums.rows, chosen.T.astype(sums.rows.dtype)) - sums.within
        other = jnp.sum(sums.rows, axis=-1)[:, None] - 2 * across - sums.within
        values = (sums.within / n / (n - 1) + other / m / (m - 1) - 2 * across / n / m).T
        effect = _effect(sums, n)
        own = jnp.stack([values[0], sums.centers, sums.wholes, sums.unit, *effect])
        # Each device finds these again.
        return values[1:], jnp.broadcast_to(own, (keys.shape[0], *own.shape))

    null, own = over_devices(of_keys, mesh, shared, jax.random.split(key, draws))
    statistics, centers, wholes, unit, *effect = own[0]
    pairs = float(total * (total - 1))
    # The smaller sample is the first: then no sum of a statistic exceeds this many times its terms.
    magnitude = unit * relevant(centers / pairs, wholes / pairs) * (3 + total**2 / (m * (m - 1)))
    spreads = unit * safe_sqrt(jnp.stack([wholes, centers]) / pairs)
    return statistics, null, magnitude, spreads, jnp.stack(effect, axis=-1)


def _unit(diagonal: Float[Array, " N"]) -> Float[Array, ""]:
    """The largest entry of a Gram matrix."""
    most = jnp.max(jnp.abs(diagonal))
    return jnp.where(most > 0, most, 1)


def _effect(
    sums: Sums, n: int
) -> tuple[Float[Array, " k"], Float[Array, " k"], Float[Array, " k"]]:
    r"""Energy coefficient $\mathrm{MMD}^2 / E|\phi(x) - \phi(y)|^2$ and its interval.

    Székely and Rizzo (2013) have it for distances. The interval is that of the delta method.
    """
    m = sums.rows.shape[-1] - n
    second = sums.rows - sums.first
    own = jnp.split(sums.diagonal, [n], axis=-1)
    same = sums.first[:, :n] / (n - 1), second[:, n:] / (m - 1)
    cross = second[:, :n] / m, sums.first[:, n:] / n
    across = jnp.mean(cross[0], axis=-1)
    squared = sum(jnp.mean(part, axis=-1) for part in same) - 2 * across
    distance = sum(jnp.mean(part, axis=-1) for part in own) - 2 * across
    # Samples of one point only have no distance.
    distance = jnp.where(distance > 0, distance, 1)
    effect = squared / distance
    influence = [
        (2 * (s - c) - effect[:, None] * (d - 2 * c)) / distance[:, None]
        for s, c, d in zip(same, cross, own, strict=True)
    ]
    interval = interval_of(effect, influence)
    return effect, interval[:, 0], interval[:, 1]


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
    diagonal = kernel.diagonal(pooled).astype(dtype)
    unit = _unit(diagonal)

    def add(sums, tile: Int[Array, "2"]):
        i, j = tile
        gram = kernel.gram(take(tiles, i), take(tiles, j)).astype(dtype)
        kept = (places[i][:, None] != places[j]) & (places[i][:, None] < n) & (places[j] < n)
        center = jnp.where(kept, gram - means[i][:, None] - means[j] + mean, 0)
        one, two = splits[:, i].astype(dtype), splits[:, j].astype(dtype)
        twice = jnp.where(i == j, 1, 2).astype(dtype)
        left = matmul(one, center)
        below = jnp.where(i == j, 0, jnp.stack([jnp.sum(center, axis=0), left[0]]))
        beside = jnp.stack([jnp.sum(center, axis=1), matmul(center, two[0])])
        within, rows, centers, wholes = sums
        return (
            within + twice * jnp.sum(left * two, axis=-1),
            rows.at[:, i].add(beside).at[:, j].add(below),
            centers + twice * jnp.sum((center / unit) ** 2),
            wholes + twice * jnp.sum((jnp.where(kept, gram, 0) / unit) ** 2),
        ), None

    zero = jnp.zeros((), dtype)
    start = jnp.zeros(chosen.shape[0], dtype), jnp.zeros((2, count, side), dtype), zero, zero
    (within, rows, centers, wholes), _ = lax.scan(
        add, start, jnp.asarray(np.stack(np.tril_indices(count), axis=1))
    )
    rows, first = rows.reshape(2, -1)[:, :n]
    diagonal = diagonal - 2 * means.reshape(-1)[:n] + mean
    return Sums(within, rows, first, centers, wholes, unit, diagonal)


def _of_features(phi: Float[Array, "N r"], chosen: Bool[Array, "b N"]) -> Sums:
    """Of the matrix of the products of features."""
    center = phi - jnp.mean(phi, axis=0)

    unit = _unit(jnp.sum(phi**2, axis=1))

    def squares(features):
        lengths = jnp.sum(features**2, axis=1)
        products = jnp.sum((matmul(features.T, features) / unit) ** 2)
        return lengths, jnp.maximum(products - jnp.sum((lengths / unit) ** 2), 0)

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
    own = chosen[0].astype(phi.dtype)
    first = matmul(center, matmul(own, center)) - own * lengths
    return Sums(within, rows, first, centers, wholes, unit, lengths)
