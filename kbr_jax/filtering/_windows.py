"""Delay vectors: the last few observations as one."""

import jax.numpy as jnp

from .._checks import as_count, as_mask
from .._typing import Array, ArrayLike, Float


def delay_embedding(
    observations: Float[Array, "T *d"], length: int, *, observed: ArrayLike | None = None
) -> Float[Array, "T L"]:
    r"""The last few observations at each time as one vector $(o_t, o_{t-1}, \dots, o_{t-L+1})$, for filters and regressions.

    With a Gaussian kernel of one bandwidth for each lag, `Gaussian(jnp.repeat(h, d))` for h `[length]`, the weight of each lag is
    learned: a wide bandwidth leaves its lag out. Windows overlap, so Bayes' rule counts old observations twice if
    the dynamics already carry them: longer windows want a larger `posterior_regularizer`.

    **Arguments:**

    - `observations`: one sequence `[T, d]` (or `[T]`, `[T, ...]`, which is flattened); `vmap` for several.
    - `length`: L >= 1 (static). Before the start the first observation is repeated.
    - `observed`: mask `[T]`; a missing observation is replaced by the last one before it (the first one there is, at the
      start), whatever it holds.

    **Returns:** `[T, length * d]`, newest first. Cost O(T L d).

    **Raises:** `ValueError` for an array without a time axis, or a `length` below 1.
    """
    observations = jnp.asarray(observations)
    if observations.ndim == 0 or observations.shape[0] == 0:
        raise ValueError("`observations` must be a sequence [T, d] with at least one entry.")
    steps = jnp.arange(observations.shape[0])
    mask = as_mask(observed, observations.shape[0], "observed")
    seen = jnp.where(mask, steps, -1)
    latest = jnp.maximum(jnp.maximum.accumulate(seen), jnp.argmax(mask))
    lagged = jnp.maximum(steps[:, None] - jnp.arange(as_count(length, "length")), 0)
    rows = observations.reshape(observations.shape[0], -1)
    return rows[latest[lagged]].reshape(observations.shape[0], -1)
