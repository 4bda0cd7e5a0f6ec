"""A filter whose prior is mixed with what a single observation says: sensor resetting."""

from typing import Any

import jax.numpy as jnp

from .._checks import as_fraction, as_regularizer
from .._numerics import matmul, safe_divide
from .._solves import AbstractFactor
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..embedding import Embedding
from ..filtering import FilterOutput, KernelBayesFilter, KernelBayesState
from ..filtering._base import AbstractWrappedFilter
from ..rules import Clipping


class ResetFilter(AbstractWrappedFilter):
    r"""A kernel Bayes filter that can leave a wrong belief by resetting. See `reset_filter`.

    With w the prior weights of `base`, v the clipped weights of the observation's own embedding
    $(K + n \varepsilon I)^{-1} k(O, o)$, and $k_o = k(O, o)$:

    - `marginal_share` a and `observation_share` b, in [0, 1):
      $w \leftarrow (1 - a - b) w + |w|_1 (a / n + b v / |v|_1)$.
    - `restart_below`, in [0, 1): $w \leftarrow |w|_1 v / |v|_1$ where the observation contradicts
      the belief, $w^\top k_o / |w|_1 < \text{restart\_below} \cdot v^\top k_o / |v|_1$.

    A share competes on the likelihood alone where it is above about sqrt(delta): the prior drops
    out of Bayes' rule as delta -> 0. That helps where one observation tells the candidates apart,
    and hurts where it does not; `CusumRestartFilter` is for the latter.
    """

    base: KernelBayesFilter
    factor: AbstractFactor | None
    marginal_share: Float[Array, ""]
    observation_share: Float[Array, ""]
    restart_below: Float[Array, ""]

    def init(self, prior: Embedding | None) -> KernelBayesState:
        return self.base.init(prior)

    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        return self.base.encode(observations, observed, name)

    def start(self, code: Any, regularizer: Array) -> tuple[Any, Float[Array, " n"], Array]:
        return self.base.start(code, regularizer)

    def advance(self, weights: Any, control: Any) -> KernelBayesState:
        return self.base.advance(weights, control)

    def update(
        self, state: KernelBayesState, code: Any, control: Any, observed: Bool[Array, ""]
    ) -> tuple[KernelBayesState, FilterOutput]:
        base, emission = self.base, self.base.emission
        if code is None:
            return base.update(state, None, control, observed)
        prior, likelihood = base.prior(state), emission.likelihood(code)
        own = emission.as_weights(emission.from_observation(self.factor, code))
        own = emission.clip_and_normalize(own, Clipping(True, base.clipping.truncation, True))
        mass = jnp.sum(emission.mass(prior))
        value = safe_divide(matmul(prior, likelihood), mass)
        threshold = self.restart_below.astype(prior.dtype) * matmul(own, likelihood)
        restarted = observed & (value < threshold)
        marginal, frame = (
            jnp.where(observed, share.astype(prior.dtype), 0)
            for share in (self.marginal_share, self.observation_share)
        )
        uniform = emission.marginal()
        mixed = (1 - marginal - frame) * prior + mass * (marginal * uniform + frame * own)
        prior = jnp.where(restarted, mass * own, mixed)
        belief, _, discarded = base.correct(prior, state, code, observed)
        value = jnp.where(observed, value, jnp.nan)
        return base.advance(belief, control), FilterOutput(
            belief, prior, value, discarded, restarted
        )


def reset_filter(
    base: KernelBayesFilter,
    *,
    observation_regularizer: ArrayLike,
    marginal_share: ArrayLike = 0.0,
    observation_share: ArrayLike = 0.0,
    restart_below: ArrayLike = 0.0,
) -> ResetFilter:
    """Wrap a filter in `ResetFilter`.

    **Arguments:** `base`, not of the estimator `"prior"`; `observation_regularizer`: epsilon > 0 of
    the observation's own embedding; the shares and the threshold of `ResetFilter`, off at 0.

    **Raises:** `ValueError` for parameters out of range, and for the estimator `"prior"`.
    """
    if base.estimator == "prior":
        raise ValueError(
            "A reset changes the weights of the training states: `base` must not have the "
            "estimator 'prior', which keeps its belief on the successors."
        )
    dtype = base.emission.features_x.dtype
    ridge = as_regularizer(observation_regularizer, "observation_regularizer", dtype)
    return ResetFilter(
        base=base,
        factor=base.emission.observation_factor(ridge),
        marginal_share=as_fraction(marginal_share, "marginal_share"),
        observation_share=as_fraction(observation_share, "observation_share"),
        restart_below=as_fraction(restart_below, "restart_below"),
    )
