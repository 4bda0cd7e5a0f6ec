"""What may be done to the signed weights of a prior before Bayes' rule uses them."""

import jax.numpy as jnp

from .._checks import is_concrete
from .._typing import Array, ArrayLike, Bool, Float
from ..embedding import normalized


def check_truncation(clip: bool, truncation: ArrayLike) -> None:
    """Truncation compares with the largest weight, which makes sense only for non-negative ones."""
    if not clip and is_concrete(truncation) and float(truncation) > 0:
        raise ValueError(
            f"`truncation` = {float(truncation):.3g} acts on non-negative weights: set `clip=True`, or `truncation=0`."
        )


def clean_weights(
    weights: Float[Array, "*batch n"],
    *,
    clip: bool,
    truncation: ArrayLike,
    normalize: bool,
    mask: Bool[Array, " n"] | None = None,
) -> Float[Array, "*batch n"]:
    r"""Clip at zero, truncate, normalize, in this order.

    - `clip`: $w_i \leftarrow \max(w_i, 0)$. A prior's estimated weights are signed; probabilities are not.
    - `truncation`: $w_i \leftarrow 0$ where $w_i < \tau \max_j w_j$ (a `ValueError` without clipping). Ridge regression leaves small
      weights everywhere; where an observation has two explanations, that haze carries the belief to the wrong one.
    - `normalize`: divide by the sum (see `kbr_jax.normalize`).

    If clipping leaves nothing, the weights become uniform (where `mask` is True, if given): the prior said nothing. The
    operations are piecewise smooth; gradients are those of the kept weights. Cost O(n).
    """
    check_truncation(clip, truncation)
    if clip:
        uniform = (
            1 / weights.shape[-1]
            if mask is None
            else jnp.where(mask, 1 / jnp.sum(mask).astype(weights.dtype), 0)
        )
        weights = clipped(weights, truncation, uniform)
    return normalized(weights) if normalize else weights


def clipped(
    weights: Float[Array, "*batch n"], truncation: ArrayLike, uniform: ArrayLike
) -> Float[Array, "*batch n"]:
    """Weights clipped at zero and truncated, or what is `uniform` where that leaves nothing."""
    weights = jnp.maximum(weights, 0)
    threshold = jnp.asarray(truncation).astype(weights.dtype) * jnp.max(
        weights, axis=-1, keepdims=True
    )
    weights = jnp.where(weights < threshold, 0, weights)
    return jnp.where(jnp.sum(weights, axis=-1, keepdims=True) <= 0, uniform, weights)
