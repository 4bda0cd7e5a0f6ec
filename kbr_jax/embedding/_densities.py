r"""Densities and modes, from weights of any sign."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_batch, as_count, as_positive, is_real
from .._numerics import matmul, safe_sqrt, squared_distances
from .._typing import Array, ArrayLike, Float, Point, Points
from ..kernels._base import flat
from ._embedding import Embedding, check_points, normalized
from ._quantiles import unknown

#: Steps of the mean shift that moves a starting atom to its mode.
SHIFTS = 50
#: The bandwidth of a distribution on one atom, as a share of the spread of all atoms.
_BANDWIDTH_OF_ONE = 1e-3
#: Units beyond which atoms without a share count as that far: squares stay finite in float32.
FAR = 1e15
#: Starts of the mean shift at least, where there are so many.
_STARTS = 64
#: Squared distance, in bandwidths, of two starts or two modes that count as one.
_CLOSE = 0.25


def probabilities(embedding: Embedding) -> Float[Array, "*b n"]:
    r"""Non-negative weights of sum 1: the nearest to those of the embedding.

    $$ p = \arg\min_{p \ge 0, \sum_i p_i = 1} | p - w / \textstyle\sum_j w_j |^2
         = \max(w / \textstyle\sum_j w_j - \tau, 0). $$

    The projection leaves weights alone that are probabilities already.

    **Returns:** `[..., n]`; NaN where the weights cannot be a distribution, as `quantile`. Cost
    O(n log n) for each embedding.
    """
    check_points(embedding)
    return _projected(embedding.weights)


@jax.jit
def _projected(weights: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    shares = normalized(weights)
    ordered = -jnp.sort(-shares, axis=-1)
    excess = jnp.cumsum(ordered, axis=-1) - 1
    ranks = jnp.arange(1, weights.shape[-1] + 1, dtype=weights.dtype)
    # The largest set of atoms that all keep a positive share; one atom always does.
    kept = jnp.sum(ordered * ranks > excess, axis=-1, keepdims=True)
    threshold = jnp.take_along_axis(excess, jnp.maximum(kept - 1, 0), axis=-1)
    threshold = threshold / jnp.maximum(kept, 1).astype(weights.dtype)
    projected = jnp.maximum(shares - threshold, 0)
    # Else rounding in the sum would leave a share on weights of 0.
    proper = jnp.all(shares >= 0, axis=-1, keepdims=True)
    projected = jnp.where(proper, shares, projected)
    return jnp.where(unknown(weights)[..., None], jnp.nan, projected)


def density(
    embedding: Embedding, points: Point | Points, *, bandwidth: ArrayLike = 1.0
) -> Float[Array, "..."]:
    r"""Density of the distribution at points, from weights of any sign.

    $$ f(y) = \sum_i p_i \, \frac{1}{(2 \pi)^{d / 2} \prod_j h_j}
              \exp\Big( - \sum_j \frac{(y_j - y_{ij})^2}{2 h_j^2} \Big) $$

    with p of `probabilities`. For labels, integers or booleans, it is the probability
    $f(y) = \sum_i p_i 1[y_i = y]$.

    **Arguments:**

    - `embedding`, on points that are one array `[n, ...]`, weights `[..., n]`.
    - `points`: one point, or `[m, ...]`.
    - `bandwidth`: c > 0 in $h_j = c \, \sigma_j \, m^{-1 / (d + 4)}$, Scott's rule, with
      $\sigma_j$ the standard deviation of coordinate j under p and $m = 1 / \sum_i p_i^2$ the
      effective number of atoms. `tuning.fit_bandwidth` chooses it. Labels need none. Where p is
      on one atom, $\sigma_j$ is a thousandth of the median distance of all atoms from their median.

    **Returns:** `[..., m]`, or `[...]` for one point. It is non-negative and integrates to 1. NaN
    as `probabilities`. Cost O(b m n d) for b embeddings.

    **Raises:** `ValueError` for points of another kind, and for points that are tuples.
    """
    rows, single = as_batch(points, "points", embedding.points, "embedding.points")
    shares = probabilities(embedding)
    flat = shares.reshape(-1, shares.shape[-1])
    if is_label(embedding.points):
        values = matmul(flat, equal(embedding.points, rows).astype(flat.dtype))
    else:
        atoms, at = real_rows(embedding.points, flat.dtype), real_rows(rows, flat.dtype)
        widths = bandwidths(embedding, flat, bandwidth)
        values = _densities(at, atoms, flat, widths)
    values = values.reshape(*shares.shape[:-1], -1)
    return values[..., 0] if single else values


@jax.jit
def _densities(
    points: Float[Array, "m d"],
    atoms: Float[Array, "n d"],
    shares: Float[Array, "b n"],
    widths: Float[Array, "b d"],
) -> Float[Array, "b m"]:
    def one(row):
        share, width = row
        return matmul(jnp.exp(_log_kernel(points, atoms, width) - log_volume(width)), share)

    return lax.map(one, (shares, widths))


def modes(
    embedding: Embedding, count: int, *, bandwidth: ArrayLike = 1.0
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    r"""The highest local maxima of `density`.

    The atoms whose density no atom within a bandwidth exceeds are moved by the mean shift
    $y \leftarrow \sum_i p_i k(y, y_i) y_i / \sum_i p_i k(y, y_i)$ (Cheng 1995).

    **Arguments:** `embedding`, on points that are one real array; `count` (static), how many at
    most; `bandwidth` as `density`.

    **Returns:** the modes `[..., count, *point]` and their densities `[..., count]`, highest first.
    NaN points and density 0 where fewer exist. Cost O(b n^2 d) for b embeddings. **Raises:**
    `ValueError` as `density`, and for labels: read those by `probabilities`.
    """
    count = as_count(count, "count", embedding.points, "embedding.points")
    shares = probabilities(embedding)
    flat = shares.reshape(-1, shares.shape[-1])
    atoms = real_rows(embedding.points, flat.dtype)
    widths = bandwidths(embedding, flat, bandwidth)
    places, heights = _all_modes(atoms, flat, widths, count)
    shape = jax.tree.leaves(embedding.points)[0].shape[1:]
    batch = shares.shape[:-1]
    return places.reshape(*batch, count, *shape), heights.reshape(*batch, count)


@functools.partial(jax.jit, static_argnames="count")
def _all_modes(
    atoms: Float[Array, "n d"], shares: Float[Array, "b n"], widths: Float[Array, "b d"], count: int
) -> tuple[Float[Array, "b k d"], Float[Array, "b k"]]:
    return lax.map(lambda one: _modes(atoms, one[0], one[1], count), (shares, widths))


def _modes(
    atoms: Float[Array, "n d"], shares: Float[Array, " n"], width: Float[Array, " d"], count: int
) -> tuple[Float[Array, "k d"], Float[Array, " k"]]:
    logs = _log_kernel(atoms, atoms, width)
    heights = matmul(jnp.exp(logs), shares)
    is_top = (heights > 0) & (heights >= jnp.max(jnp.where(logs > -0.5, heights, 0), axis=1))
    # Atoms at one place would be several starts for one mode.
    n = len(atoms)
    same = (logs > -_CLOSE / 2) & jnp.tril(jnp.ones((n, n), bool), -1)
    is_top = is_top & ~jnp.any(same & is_top, axis=1)
    # Some starts end at one mode, and a mode between two atoms is higher than both.
    tries = min(n, max(4 * count, _STARTS))
    found = lax.top_k(jnp.where(is_top, heights, -1), tries)[1]
    starts, known = atoms[found], is_top[found]

    def shift(_, places):
        pull = jnp.exp(_log_kernel(places, atoms, width)) * shares
        total = jnp.sum(pull, axis=1, keepdims=True)
        moved = matmul(pull, atoms) / jnp.where(total > 0, total, 1)
        return jnp.where(total > 0, moved, places)

    places = lax.fori_loop(0, SHIFTS, shift, starts)
    heights = matmul(jnp.exp(_log_kernel(places, atoms, width)), shares)
    order = jnp.argsort(-jnp.where(known, heights, -1))
    places, heights, known = places[order], heights[order], known[order]
    # Two starts may end at one mode: the first of them stays.
    apart = squared_distances(places / width, places / width)
    earlier = jnp.tril(jnp.ones((tries, tries), bool), -1)
    known = known & ~jnp.any(earlier & (apart < _CLOSE) & known[None, :], axis=1)
    order = jnp.argsort(~known, stable=True)[:count]
    places, heights, known = places[order], heights[order], known[order]
    densities = jnp.exp(jnp.log(jnp.where(known, heights, 1)) - log_volume(width))
    return jnp.where(known[:, None], places, jnp.nan), jnp.where(known, densities, 0)


def is_label(points: Points) -> bool:
    return hasattr(points, "dtype") and not jnp.issubdtype(points.dtype, jnp.inexact)


def equal(points: Array, others: Array) -> Array:
    """Which points `[n]` equal which others `[m]`, `[n, m]`."""
    same = points[:, None] == others[None]
    return jnp.all(same.reshape(*same.shape[:2], -1), axis=-1)


def real_rows(points: Points, dtype: jnp.dtype) -> Float[Array, "n d"]:
    """Real points as rows."""
    if not is_real(points):
        raise ValueError(
            "Densities, modes and bandwidths need points that are one real array, such as [n, d]; "
            "take the `marginal` of a part of tuples."
        )
    return flat(points).astype(dtype)


def bandwidths(
    embedding: Embedding, shares: Float[Array, "*b n"], bandwidth: ArrayLike
) -> Float[Array, "k d"]:
    """The bandwidths h of `density`, one row for each of the embeddings."""
    factor = as_positive(bandwidth, "bandwidth", scalar=True).astype(shares.dtype)
    return _bandwidths(real_rows(embedding.points, shares.dtype), shares, factor)


@jax.jit
def _bandwidths(
    atoms: Float[Array, "n d"], shares: Float[Array, "*b n"], factor: Float[Array, ""]
) -> Float[Array, "k d"]:
    shares = shares.reshape(-1, shares.shape[-1])
    centered = atoms - lax.stop_gradient(jnp.median(atoms, axis=0))
    sizes = lax.stop_gradient(jnp.abs(centered))
    usual, most = jnp.median(sizes, axis=0), jnp.max(sizes, axis=0)
    spread = jnp.where(usual > 0, usual, jnp.where(most > 0, most, 1))
    rounding = 8 * jnp.finfo(atoms.dtype).eps

    def deviation(share):
        # Around its own mean, in a unit of its own: atoms without a share may lie far away.
        used = share[:, None] > 0
        apart = centered - matmul(share, centered)
        unit = lax.stop_gradient(jnp.max(jnp.where(used, jnp.abs(apart), 0), axis=0))
        unit = jnp.where(unit > 0, unit, 1)
        found = unit * safe_sqrt(matmul(share, jnp.clip(apart / unit, -FAR, FAR) ** 2))
        single = found <= rounding * jnp.max(jnp.where(used, sizes, 0), axis=0)
        return jnp.where(single, _BANDWIDTH_OF_ONE * spread, found)

    effective = 1 / jnp.sum(shares**2, axis=1, keepdims=True)
    width = lax.map(deviation, shares, batch_size=64)
    return factor * width * effective ** (-1 / (atoms.shape[1] + 4))


def _log_kernel(
    points: Float[Array, "m d"], atoms: Float[Array, "n d"], width: Float[Array, " d"]
) -> Float[Array, "m n"]:
    return -squared_distances(points / width, atoms / width) / 2


def log_volume(width: Float[Array, " d"]) -> Float[Array, ""]:
    """Logarithm of the integral of a Gaussian kernel; a product of widths would underflow."""
    return jnp.sum(jnp.log(width)) + 0.5 * len(width) * math.log(2 * math.pi)
