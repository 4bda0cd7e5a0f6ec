"""A filter that leaves a belief when one that started afresh explains the observations better."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_positive
from .._numerics import matmul
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..embedding import Embedding
from ..features import AbstractGram
from ..rules import ConditionalEmbedding
from ._base import AbstractWrappedFilter, FilterOutput
from ._kernel_bayes import KernelBayesFilter


class RivalState(eqx.Module):
    """States of the belief and its rival, stacked; evidence for the rival, and its age in steps."""

    both: Any
    evidence: Float[Array, ""]
    age: Float[Array, ""]


class RivalFilter(AbstractWrappedFilter):
    r"""Run a second belief that starts afresh again and again, and change to it.

    With $\hat\mu_t$ the embedding of the observation that the belief predicts, and $\hat\mu'_t$
    that of its rival, which started from the marginal of the training states at most `lifetime`
    steps ago, the evidence for the rival is

    $$ \Lambda_t = \sum_{u \le t} \operatorname{clip}\Big( \frac{| \psi(o_u) - \hat\mu_u |^2 -
       | \psi(o_u) - \hat\mu'_u |^2}{\tau^2}, -c, c \Big), $$

    over its steps but the first, with c = .4 `threshold`: no single observation decides. Above
    `threshold` the rival becomes the belief, and `FilterOutput.restarted` is true. Then, below
    minus `threshold`, and at the end of its lifetime, a new rival starts. A missing observation
    changes nothing. Until a restart the beliefs are those of `base`, exactly.

    It is sensor resetting (Lenser and Veloso 2000) with evidence in an RKHS. It cures beliefs that
    observations contradict. It does not tell states apart that look alike to
    the kernel of the observations: for those see `fit_cusum_restart`.

    **Arguments:**

    - `base`: a `KernelBayesFilter` of the estimator "pairs" or "importance" with a learned emission
      on a sample.
    - `residual`: $\tau^2$, the mean squared distance of an observation to its prediction from the
      true state, `leave_out_loss(emission, kernel=emission.kernel_y)` with
      `emission = base.emission`.
    - `threshold`: in these units. `lifetime`: in steps. Filters of a rat's spikes that start on the
      wrong side of the track are back after 13.0 steps alone, and after 3.4, 3.1, 3.1, 3.1 steps
      at lifetimes 5, 10, 20, 40 (`python -m benchmarks.rat.decoding rival`).

    Cost of a step: twice that of `base`, plus O(n^2). **Raises:** `ValueError` for another base,
    and for values that are not positive.
    """

    base: KernelBayesFilter
    residual: Float[Array, ""]
    threshold: Float[Array, ""]
    lifetime: Float[Array, ""]

    def __init__(
        self,
        base: KernelBayesFilter,
        *,
        residual: ArrayLike,
        threshold: ArrayLike = 0.5,
        lifetime: ArrayLike = 10.0,
    ):
        learned = isinstance(base, KernelBayesFilter) and base.estimator != "prior"
        if not (learned and isinstance(base.emission, ConditionalEmbedding)):
            raise ValueError(
                "`base` must be a `KernelBayesFilter` of the estimator 'pairs' or 'importance', "
                "with a learned emission on a sample."
            )
        self.base = base
        self.residual = as_positive(residual, "residual", scalar=True)
        self.threshold = as_positive(threshold, "threshold", scalar=True)
        self.lifetime = as_positive(lifetime, "lifetime", scalar=True)

    def init(self, prior: Embedding | None) -> RivalState:
        return self._with_rival(self.base.init(prior))

    def _with_rival(self, state: Any) -> RivalState:
        both = jax.tree.map(lambda a, b: jnp.stack([a, b]), state, self.base.init(None))
        return RivalState(both, jnp.zeros_like(self.threshold), jnp.zeros_like(self.threshold))

    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        return self.base.encode(observations, observed, name)

    def start(self, code: Any, regularizer: Array) -> FilterOutput:
        return self.base.start(code, regularizer)

    def advance(self, weights: Any, control: Any) -> RivalState:
        return self._with_rival(self.base.advance(weights, control))

    def update(
        self, state: RivalState, code: Any, control: Any, observed: Bool[Array, ""]
    ) -> tuple[RivalState, FilterOutput]:
        following, outputs = jax.vmap(lambda s: self.base.update(s, code, control, observed))(
            state.both
        )
        if code is None:
            first = jax.tree.map(lambda leaf: leaf[0], outputs)
            return RivalState(following, state.evidence, state.age), first
        own, other = self._errors(outputs.predicted, code) / self.residual.astype(
            outputs.predicted.dtype
        )
        cap = 0.4 * self.threshold
        gain = jnp.clip((own - other).astype(cap.dtype), -cap, cap)
        # The code of an observation beyond the reach of the kernel is 0: it counts as missing.
        seen = observed & jnp.any(code != 0)
        evidence = state.evidence + jnp.where(seen & (state.age > 0), gain, 0)
        age = state.age + seen.astype(state.age.dtype)
        won, lost = evidence > self.threshold, evidence < -self.threshold
        chosen = won.astype(int)
        output = jax.tree.map(lambda leaf: leaf[chosen], outputs)
        output = eqx.tree_at(lambda o: o.restarted, output, output.restarted | won)
        fresh = won | lost | (age >= self.lifetime)
        belief = jax.tree.map(lambda leaf: leaf[chosen], following)
        rival = jax.tree.map(
            lambda new, old: jnp.where(fresh, new, old[1]), self.base.init(None), following
        )
        both = jax.tree.map(lambda a, b: jnp.stack([a, b]), belief, rival)
        new = RivalState(both, jnp.where(fresh, 0, evidence), jnp.where(fresh, 0, age))
        return new, output

    def _errors(self, weights: Float[Array, "2 n"], code: Any) -> Float[Array, " 2"]:
        """Squared distances of the observation to its predictions, but for its own norm."""
        emission: Any = self.base.emission
        features = emission.features_y
        image = matmul(weights, features.matrix)
        twice = image if isinstance(features, AbstractGram) else matmul(image, features.matrix.T)
        return jnp.sum(weights * (twice - 2 * emission.likelihood(code)), axis=1)
