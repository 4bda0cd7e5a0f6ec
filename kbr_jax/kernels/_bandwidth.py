"""Bandwidths from the data."""

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import as_count, as_points, check_finite, size, take
from .._numerics import safe_sqrt, squared_distances
from .._typing import Array, Float, Points, PRNGKeyArray
from ._domains import check_real, flat


def median_heuristic(
    x: Points, *, max_points: int = 2000, key: PRNGKeyArray | None = None
) -> Float[Array, ""]:
    r"""Median of the Euclidean distances $|x_i - x_j|$ over pairs $i < j$.

    **Arguments:**

    - `x`: sample `[n, ...]` of real arrays with n >= 2; points of any shape are flattened.
    - `max_points`: up to this size all pairs are used, O(n^2 d); above it a uniform subsample of
      this size.
    - `key`: randomness of the subsample, required above `max_points`.

    **Returns:** a scalar in the units of the points. Where more than half of the distances are 0
    the mean distance stands in, and 1 where all are.

    **Raises:** `ValueError` for fewer than two points (or `max_points` below 2), a non-real dtype,
    NaN, or a missing `key`.
    """
    x = check_finite(as_points(x, "x"), "x")
    check_real(x, "x", "The median heuristic")
    n = size(x)
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
        x = take(x, jax.random.choice(key, n, (max_points,), replace=False))
    rows = flat(x)
    pairs = np.triu_indices(rows.shape[0], k=1)
    distances = safe_sqrt(squared_distances(rows, rows)[pairs])
    median, mean = jnp.median(distances), jnp.mean(distances)
    return jnp.where(median > 0, median, jnp.where(mean > 0, mean, 1))
