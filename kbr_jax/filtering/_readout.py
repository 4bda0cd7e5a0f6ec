"""A filter whose estimates are corrected by the newest observation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import fill
from .._numerics import HIGHEST, in_batches
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ._base import AbstractFilter, AbstractWrappedFilter, FilterOutput
from ._known import as_function


class ReadoutFilter(AbstractWrappedFilter):
    r"""A filter whose `state_mean` is corrected by the newest observation.

    A belief is a weighted sample of training states. Few states near the true one make its mean
    smooth, and the mean then follows an observation less than it should. With the mean $m_t$ of the
    belief, the mean $m'_t$ before the observation, and the linear regression $\ell(o)$ of the state
    on the observation, the estimate is

    $$ \hat s_t = \bar s + a (m_t - \bar s) + b (m'_t - \bar s) + c (\ell(o_t) - \bar s) $$

    around the mean $\bar s$ of the training states: stacked regressions (Breiman 1996).
    `FilterOutput.correction` is $\hat s_t - m_t$. It is 0 where the observation is missing. Beliefs
    and predictions are those of `base`. Cost of a step: that of `base`, plus O(n d) for states of d
    numbers. `learn_filter` fits it.

    - `base`: with beliefs on a sample, not moments.
    - `function`: of an observation, to k coordinates. `origin` `[k]`: where they are 0.
    - `slopes` `[k, *state]`: $\ell(o) = \bar s + \text{slopes}^\top (\text{function}(o) -
      \text{origin})$.
    - `center` `[*state]`: $\bar s$. `shares` `[3]`: a, b and c.
    - `template`: an observation of their kind, in place of missing ones.

    **Raises:** `ValueError` in a step if `base` is of moments.
    """

    base: AbstractFilter
    function: Callable[[Point], Array] = eqx.field(converter=as_function)
    origin: Float[Array, " k"]
    slopes: Float[Array, "k *state"]
    center: Float[Array, "*state"]
    shares: Float[Array, "3"]
    template: Point

    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        codes, observed = self.base.encode(observations, observed, name)
        values = in_batches(self.function, fill(observations, observed, self.template))
        regressed = jnp.tensordot(values - self.origin, self.slopes, 1, precision=HIGHEST)
        return (codes, regressed), observed

    def update(
        self, state: Any, code: Any, control: Any, observed: Bool[Array, ""]
    ) -> tuple[Any, FilterOutput]:
        if code is None:
            return self.base.update(state, None, control, observed)
        code, regressed = code
        state, output = self.base.update(state, code, control, observed)
        if not isinstance(output.weights, jax.Array):
            raise ValueError("`base` must have beliefs on a sample, not moments.")
        mean, before = self.base.mean(output.weights), self.base.mean(output.predicted)
        apart = jnp.stack([mean - self.center, before - self.center, regressed])
        found = self.center + jnp.tensordot(self.shares, apart, 1, precision=HIGHEST)
        correction = jnp.where(observed, found - mean, 0)
        return state, dataclasses.replace(output, correction=correction)

    def init(self, prior: Any) -> Any:
        return self.base.init(prior)

    def start(self, code: Any, regularizer: Array) -> tuple[Any, Float[Array, " n"], Array]:
        return self.base.start(code[0], regularizer)

    def advance(self, weights: Any, control: Any) -> Any:
        return self.base.advance(weights, control)
