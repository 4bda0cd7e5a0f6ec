"""What is done to the signed weights of a prior before Bayes' rule uses them."""

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_fraction, is_concrete
from .._repr import with_numbers
from .._typing import Array, ArrayLike, Bool, Float
from ..embedding import normalized


class Clipping(eqx.Module):
    r"""Say how the weights of a prior are clipped, truncated and normalized, in this order.

    - `clip`: $w_i \leftarrow \max(w_i, 0)$. Estimated weights are signed; probabilities are not.
    - `truncation`: $w_i \leftarrow 0$ where $w_i < \tau \max_j w_j$, with $\tau$ in [0, 1). Ridge
      regression leaves small weights everywhere. Where an observation has two explanations, they
      carry the belief to the wrong one.
    - `normalize`: divide by the sum (see `kbr_jax.normalize`).

    The default is that of all rules and filters. `Clipping(False, 0.0, False)` is the papers' rule.

    **Raises:** `ValueError` for a truncation outside [0, 1), and for a truncation without clipping.
    """

    clip: bool = eqx.field(static=True, default=True)
    truncation: Float[Array, ""] = eqx.field(
        converter=lambda value: as_fraction(value, "truncation"), default=0.02
    )
    normalize: bool = eqx.field(static=True, default=True)

    __repr__ = with_numbers

    def __check_init__(self):
        tau = self.truncation
        if not self.clip and is_concrete(tau) and float(tau) > 0:
            raise ValueError(
                f"`truncation` = {float(tau):.3g} acts on non-negative weights: set `clip=True`, "
                "or `truncation=0`."
            )


def check_estimator(estimator: str, clipping: Clipping, *known: str) -> None:
    """Raise a `ValueError` for an unknown estimator, or for importance weights of any sign."""
    if estimator not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"`estimator` must be one of {names}, got {estimator!r}.")
    if estimator == "importance" and not clipping.clip:
        raise ValueError("Importance weights are non-negative: give a `clipping` that clips.")


def clip_and_normalize(
    weights: Float[Array, "*batch n"], clipping: Clipping, *, mask: Bool[Array, " n"] | None = None
) -> Float[Array, "*batch n"]:
    """Clip, truncate and normalize weights as `clipping` says, in O(n).

    If clipping leaves nothing, all weights become equal (where `mask` is True, if given): the prior
    said nothing. Gradients are those of the kept weights.
    """
    if clipping.clip:
        uniform = 1 / weights.shape[-1]
        if mask is not None:
            uniform = jnp.where(mask, 1 / jnp.sum(mask).astype(weights.dtype), 0)
        weights = clipped(weights, clipping.truncation, uniform)
    return normalized(weights) if clipping.normalize else weights


def clipped(
    weights: Float[Array, "*batch n"], truncation: ArrayLike, uniform: ArrayLike
) -> Float[Array, "*batch n"]:
    """Weights clipped at zero and truncated, or `uniform` where that leaves nothing."""
    weights = jnp.maximum(weights, 0)
    threshold = jnp.asarray(truncation).astype(weights.dtype)
    threshold = threshold * jnp.max(weights, axis=-1, keepdims=True)
    weights = jnp.where(weights < threshold, 0, weights)
    return jnp.where(jnp.sum(weights, axis=-1, keepdims=True) <= 0, uniform, weights)
