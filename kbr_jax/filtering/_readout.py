"""A filter whose estimates are corrected by the newest observation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import fill, like
from .._lapack import solve
from .._numerics import HIGHEST, in_batches, matmul
from .._solves import psd_solve
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..embedding import Embedding, evaluate
from ..kernels import Linear
from ._base import AbstractFilter, AbstractWrappedFilter, FilterOutput
from ._known import as_function


class ReadoutFilter(AbstractWrappedFilter):
    r"""A filter whose `state_mean` is corrected by the newest observation.

    A belief is a weighted sample of training states. Few states near the true one make its mean
    smooth, and the mean then follows an observation less than it should. The estimate is

    $$ \hat s_t = a m_t + b m'_t + e \, \delta_t + \text{intercept} + \text{slopes}^\top z_t, \qquad
       \delta_t = P_t J^\top (J P_t J^\top + I)^{-1} (z_t - h(m_t)), $$

    from the mean $m_t$ of the belief, the mean $m'_t$ before the observation, and coordinates
    $z_t$ of the observation in units of their noise: stacked regressions (Breiman 1996). h(s) is
    what is expected of z in the state s, J its Jacobian at $m_t$, and $P_t$ the second moment of
    the belief's positive weights around $m_t$. $\delta_t$ is the update of an extended Kalman
    filter (Jazwinski 1970, section 8.3): it leaves the hull of the training states. With `decode`,
    $m_t$ is the decoded belief, and $m_t + \delta_t$ and $\hat s_t$ are decoded as embeddings of
    one point.

    `FilterOutput.correction` is $\hat s_t$ less the mean of the belief. Where there is no
    observation, as in a prediction, or where it counts as missing (`predictive_value` 0 with a
    learned emission), $\hat s_t$ is $m_t$. Beliefs and predictions are those of
    `base`. Cost of a step: that of `base`, plus O(n (k + d) d + min(k, d)^3), states of d numbers.
    `learn_filter` fits it.

    - `base`: with beliefs on the training states.
    - `function`: of an observation, to z `[k]`.
    - `expected`: h as an embedding with weights `[k, n]`: `evaluate` gives h(s).
    - `shares` `[3]`: a, b and e. `intercept` `[*state]`, `slopes` `[k, *state]`.
    - `template`: an observation of their kind, in place of missing ones.
    - `decode`: from an embedding to a point, or None for the mean.

    **Raises:** `ValueError` in a step if `base` is of moments, or of the estimator "prior".
    """

    base: AbstractFilter
    function: Callable[[Point], Array] = eqx.field(converter=as_function)
    expected: Embedding
    shares: Float[Array, "3"]
    intercept: Float[Array, "*state"]
    slopes: Float[Array, "k *state"]
    template: Point
    decode: Callable[[Embedding], Point] | None = eqx.field(static=True, default=None)

    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        codes, observed = self.base.encode(observations, observed, name)
        filled = fill(like(observations, self.template), observed, self.template)
        z = in_batches(self.function, filled).astype(self.expected.weights.dtype)
        return (codes, z), observed

    def update(
        self, state: Any, code: Any, control: Any, observed: Bool[Array, ""]
    ) -> tuple[Any, FilterOutput]:
        if code is None:
            state, output = self.base.update(state, None, control, observed)
            if self.decode is None:
                return state, output
            correction = self.decode(self.base.embed(output.weights))
            correction = correction - self.base.mean(output.weights)
            return state, dataclasses.replace(output, correction=correction)
        code, z = code
        state, output = self.base.update(state, code, control, observed)
        return state, self._corrected(output, z, observed)

    def _corrected(
        self, output: FilterOutput, z: Float[Array, " k"], observed: Bool[Array, ""]
    ) -> FilterOutput:
        on_sample = isinstance(output.weights, jax.Array)
        if not on_sample or getattr(self.base, "estimator", "") == "prior":
            raise ValueError(
                "`base` must have beliefs on the training states, not of moments and not of the "
                "estimator 'prior'."
            )
        belief = self.base.embed(output.weights)
        own, before = self.base.mean(output.weights), self.base.mean(output.predicted)
        mean = own if self.decode is None else self.decode(belief)
        moved = decoded(self.decode, mean + kalman_update(self.expected, belief, mean, z))
        parts = jnp.stack([mean, before, moved - mean])
        found = jnp.tensordot(self.shares, parts, 1, precision=HIGHEST) + self.intercept
        found = found + jnp.tensordot(z, self.slopes, 1, precision=HIGHEST)
        found = decoded(self.decode, found)
        # The value of a known likelihood may underflow.
        learned = getattr(getattr(self.base, "emission", None), "learned", True)
        made = observed & (output.predictive_value != 0) if learned else observed
        return dataclasses.replace(output, correction=jnp.where(made, found, mean) - own)

    def init(self, prior: Any) -> Any:
        return self.base.init(prior)

    def start(self, code: Any, regularizer: Array) -> FilterOutput:
        code, z = code
        return self._corrected(self.base.start(code, regularizer), z, jnp.asarray(True))

    def advance(self, weights: Any, control: Any) -> Any:
        return self.base.advance(weights, control)


def decoded(decode: Callable[[Embedding], Point] | None, point: Array) -> Array:
    """A point as what an embedding of it alone is decoded to."""
    if decode is None:
        return point
    return decode(Embedding(Linear(), point[None], jnp.ones(1, point.dtype)))


def kalman_update(
    expected: Embedding, belief: Embedding, state: Array, z: Float[Array, " k"]
) -> Array:
    r"""$P J^\top (J P J^\top + I)^{-1} (z - h(s))$ of an extended Kalman filter."""

    def of(s):
        return evaluate(expected, s)

    jacobian = jax.jacfwd(of)(state).reshape(len(z), -1)
    shares = jnp.maximum(belief.weights, 0)
    total = jnp.sum(shares)
    shares = shares / jnp.where(total > 0, total, 1)
    apart = (belief.points - state).reshape(len(shares), -1)
    spread = matmul(apart.T * shares, apart)
    missed, gain = z - of(state), matmul(spread, jacobian.T)
    if len(z) < len(spread):
        moved = matmul(gain, psd_solve(matmul(jacobian, gain), missed, 1.0))
    else:
        inner = matmul(gain, jacobian) + jnp.eye(len(spread), dtype=gain.dtype)
        moved = solve(inner, matmul(gain, missed)[:, None])[:, 0]
    return moved.reshape(state.shape)
