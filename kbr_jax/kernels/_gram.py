"""Bandwidths from the data, and products with a Gram matrix that is never formed."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .._checks import (
    as_count,
    as_mask,
    as_points,
    check_alike,
    check_finite,
    padded,
    size,
    take,
    without_padding,
)
from .._numerics import (
    matmul,
    nan_unless_finite,
    one_program,
    safe_sqrt,
    squared_distances,
    unit_of,
)
from .._typing import Array, ArrayLike, Bool, Float, Int, Points, PRNGKeyArray
from ..devices import over_devices
from ._base import AbstractKernel, KernelLike, as_kernel, check_real, flat


def median_heuristic(
    x: Points,
    *,
    max_points: int = 2000,
    key: PRNGKeyArray | None = None,
    mask: ArrayLike | None = None,
) -> Float[Array, ""]:
    r"""Median of the Euclidean distances $|x_i - x_j|$ over pairs $i < j$.

    **Arguments:**

    - `x`: sample `[n, ...]` of real arrays with n >= 2; points of any shape are flattened.
    - `max_points`: up to this size all pairs are used, O(n^2 d); above it a uniform subsample of
      this size.
    - `key`: randomness of the subsample, required above `max_points`.
    - `mask`: `[n]`, False where a point is padding.

    **Returns:** a scalar in the units of the points. Where more than half of the distances are 0
    the mean distance stands in, and 1 where all are.

    **Raises:** `ValueError` for fewer than two points (or `max_points` below 2), a non-real dtype,
    NaN, or a missing `key`.
    """
    x = as_points(x, "x")
    n = size(x)
    known = as_mask(mask, n, "mask")
    x = check_finite(without_padding(x, None if mask is None else known), "x")
    check_real(x, "x", "The median heuristic")
    max_points = as_count(max_points, "max_points")
    if max_points < 2:
        raise ValueError("`max_points` must be at least 2: a distance needs two points.")
    if n < 2:
        raise ValueError(f"The median heuristic needs at least 2 points, got {n}.")
    if n > max_points:
        if key is None:
            raise ValueError(
                f"`x` has {n} > max_points = {max_points} points: pass `key` to subsample, or "
                f"raise `max_points`."
            )
        if mask is None:
            chosen = jax.random.choice(key, n, (max_points,), replace=False)
        else:  # padding last
            chosen = jnp.argsort(jnp.where(known, jax.random.uniform(key, (n,)), 2))[:max_points]
        x, known = take((x, known), chosen)
    rows = flat(x)
    return median_distance(rows, None if mask is None else known, pairs_of(rows.shape[0]))


def pairs_of(n: int) -> Any:
    """The pairs i < j of n points. As constants of a program they would be its larger part."""
    return np.triu_indices(n, k=1)


@one_program
def median_distance(
    rows: Float[Array, "n d"],
    known: Bool[Array, " n"] | None,
    pairs: tuple[Int[Array, " p"], Int[Array, " p"]],
) -> Float[Array, ""]:
    """The core of `median_heuristic`."""
    # Squares of far smaller or larger numbers leave the range of float32.
    unit = unit_of(rows)
    distances = unit * safe_sqrt(squared_distances(rows, rows, unit)[pairs])
    if known is None:
        median, mean = jnp.median(distances), jnp.mean(distances)
    else:
        both = known[pairs[0]] & known[pairs[1]]
        median = jnp.nan_to_num(jnp.nanmedian(jnp.where(both, distances, jnp.nan)))
        mean = jnp.nan_to_num(jnp.mean(distances, where=both))
        median = jnp.where(
            jnp.any(both & jnp.isnan(distances)), nan_unless_finite(distances), median
        )
    # NaN is not above 0 and stays.
    return jnp.where(median <= 0, jnp.where(mean > 0, mean, 1), median)


#: Entries of K in a block by default: 16 MiB in float64, which a last-level cache holds; and rows
#: at least, so that the work on `y` that each block repeats stays small.
_BLOCK_ENTRIES, _BLOCK_ROWS = 2**21, 32


def gram_matvec(
    kernel: KernelLike,
    x: Points,
    y: Points,
    v: ArrayLike,
    *,
    block_size: int | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, "n *k"]:
    r"""$K(X, Y) V$, $\sum_j k(x_i, y_j) V_{jc}$, without the n x m matrix: a block of rows is
    formed, multiplied, forgotten.

    **Arguments:**

    - `kernel`: a kernel, or any callable of two points.
    - `x`, `y`: samples of n and of m points.
    - `v`: a vector `[m]`, or columns `[m, ...]`.
    - `block_size`: the most rows of K to form at a time (static), by default about 2^21 / m, and at
      least 32. The result depends on it only by rounding.
    - `mesh`: devices to divide the rows x over; each gets all of y and v.

    **Returns:** array `[n]`, or `[n, ...]`. Cost O(n m (d + k)), memory O(block_size m) beside
    arguments and result. The gradient with respect to the kernel's parameters, x, y and v forms
    each block once more: the same memory, not O(n m).

    **Raises:** `ValueError` where `gram` does, for a `v` of another length than y, and for a block
    < 1.
    """
    kernel = as_kernel(kernel)
    x, y, v = as_points(x, "x"), as_points(y, "y"), jnp.asarray(v)
    check_alike(y, "y", x, "x")
    kernel.check(x, "x")
    kernel.check(y, "y")
    if not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(
            f"`v` must be floating-point, not {v.dtype}; convert it with `v.astype(float)`."
        )
    if v.ndim == 0 or v.shape[0] != size(y):
        raise ValueError(
            f"`v` has shape {v.shape}; its first axis must hold one number for each of {size(y)} "
            f"points `y`."
        )
    rows = (
        max(_BLOCK_ROWS, _BLOCK_ENTRIES // size(y))
        if block_size is None
        else as_count(block_size, "block_size")
    )
    shared = kernel, y, v.reshape(v.shape[0], -1), rows
    product = over_devices(_by_blocks, mesh, shared, x)
    return product.reshape(-1, *v.shape[1:])


@eqx.filter_jit
def _by_blocks(
    shared: tuple[AbstractKernel, Points, Float[Array, "m k"], int], x: Points
) -> Float[Array, "n k"]:
    kernel, y, v, rows = shared
    n = size(x)
    count = -(-n // rows)
    rows = -(-n // count)  # as even as can be: fewer than `count` rows of padding

    # The checkpoint keeps the reverse pass from storing every block; the gradients of kernel, y and
    # v add up in its carry.
    @jax.checkpoint
    def product(part):
        return matmul(kernel.gram(part, y), v)

    if count == 1:
        return product(x)
    x = padded(x, count * rows - n)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(count, rows, *leaf.shape[1:]), x)
    return lax.map(product, blocks).reshape(count * rows, -1)[:n]
