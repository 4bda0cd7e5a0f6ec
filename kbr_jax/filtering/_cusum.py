"""A filter that is restarted when an alternative explains the observations better."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import (
    as_fraction,
    as_points,
    as_positive,
    as_regularizer,
    check_same_size,
    fill,
    like,
    size,
    take,
)
from .._numerics import in_batches, safe_divide
from .._solves import AbstractFactor
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..embedding import Embedding
from ..kernels import AbstractKernel, KernelLike, kernel_for
from ..rules import Clipping
from ._base import AbstractWrappedFilter, FilterOutput
from ._discriminant import DiscriminantLikelihood, fit_discriminant
from ._kernel_bayes import KernelBayesFilter, KernelBayesState
from ._known import as_function

#: Training observations for which alternatives are made at a time. In the look-alike room, 1000
#: pairs, one at a time takes 1.5 s, 10, 20 and 50 take .8, .7 and .6 s. Fewer where the matrices of
#: Bayes' rule would be large together: 128 MB each.
_BATCH, _ENTRIES = 20, 2**24
#: Defaults of `fit_cusum_restart`. Slack and threshold are shares of what an informative
#: observation says: 13 nats at variance .0003 of the pixels of the look-alike room, 6 at .01. The
#: errors of the regression, which many observations share, grow with it. In ten runs of that room,
#: .0003 to .01, the sums of right beliefs reach 1.2, .56, .38 and .33 with the slacks .15, .2, .25
#: and .3. Beyond the threshold .6, 19 or 20 of 20 wrong starts are back in time with each of these,
#: and 16 to 20 with the slack .4. With a slack of 2 nats everywhere the sums of right beliefs reach
#: 13 nats at .0003, and at .01 those of wrong ones stay below 8 in up to 7 of 20 starts.
#: Where features say little, nats count: the color histogram of `benchmarks.camera.recovery` says
#: 1.8 at .01. With a slack of 1.25 nats the sum of a right belief reaches 4.9 there, with 2 nats 0.
EXCLUSION, SLACK, THRESHOLD = 0.05, 0.25, 0.6
LEAST_SLACK, LEAST_THRESHOLD = 1.5, 5.0


class CusumState(eqx.Module):
    """The state of the base filter, and the cumulative sum against its belief."""

    base: KernelBayesState
    cusum: Float[Array, ""]


class CusumRestartFilter(AbstractWrappedFilter):
    r"""A kernel Bayes filter that leaves a wrong belief. Fit it with `fit_cusum_restart`.

    Where two states look alike, a filter that follows the wrong one is not contradicted by its
    kernel on observations. Here every observation o proposes an alternative:

    - Its own embedding $v = (K + n \varepsilon I)^{-1} k(O, o)$, clipped, and without the training
      states near the estimate $\hat s$ (see `exclusion`), is a prior. Bayes' rule with o gives the
      weights r of the alternative belief, decoded as $\hat r$.
    - The side of $\hat s$ are those training states that are more like $\hat s$ than like
      $\hat r$, by the kernel. The features y of o have the likelihood
      $L(w) = \sum_i w_i e^{\ell(s_i; y)} / \sum_i w_i$ under the positive weights w of the belief
      on this side, with l of `DiscriminantLikelihood`. For the alternative they say
      $\rho(\hat s) (\log L(r) - \log L(w))$, with $\rho$ of `DiscriminantLikelihood.noise_shares`.
    - The belief may be imprecise, and yet on the right side. The states of this side in v give w'
      and $\hat s'$ in the same way, if there are any. The evidence e is the smaller of
      $\rho(\hat s) (\log L(r) - \log L(w))$ and $\rho(\hat s') (\log L(r) - \log L(w'))$.
    - Page's CUSUM test adds up: $S \leftarrow \max(0, S + e - \text{slack})$. A missing
      observation, or one without an alternative, leaves S as it is.
    - When S exceeds `threshold` the alternative replaces the belief, S is 0 again, and
      `FilterOutput.restarted` is true. `predicted` is then the prior of the alternative, and
      `predictive_value` that of the prediction that failed.

    Until a restart the beliefs are those of `base`, exactly. Inputs, smoothing, gaps and moments
    with cells work as in `base`. Cost of a step: about three times that of `base`, plus O(n^2).
    Memory: n numbers for each observation of a sequence.
    """

    base: KernelBayesFilter
    discriminant: DiscriminantLikelihood
    factor: AbstractFactor | None
    points: Points
    predictions: tuple[Float[Array, "m d"], Float[Array, " m"]]
    template: Point
    features: Callable[[Point], Array]
    decode: Callable[[Embedding], Point] = eqx.field(static=True)
    exclusion: Float[Array, ""]
    slack: Float[Array, ""]
    threshold: Float[Array, ""]

    def init(self, prior: Embedding | None) -> CusumState:
        return self._fresh(self.base.init(prior))

    def _fresh(self, state: KernelBayesState) -> CusumState:
        return CusumState(state, jnp.zeros((), state.weights.dtype))

    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        codes, observed = self.base.encode(observations, observed, name)
        observations = like(jax.tree.map(jnp.asarray, observations), self.template)
        filled = fill(observations, observed, self.template)
        projected = self.discriminant.project(in_batches(self.features, filled))
        # Here for all observations at once: in a step the solve with 1799 pairs takes 4 of 7 ms.
        return (codes, projected, _own_weights(self.base, self.factor, codes)), observed

    def start(self, code: Any, regularizer: Array) -> FilterOutput:
        return self.base.start(code[0], regularizer)

    def advance(self, weights: Any, control: Any) -> CusumState:
        return self._fresh(self.base.advance(weights, control))

    def update(
        self, state: CusumState, code: Any, control: Any, observed: Bool[Array, ""]
    ) -> tuple[CusumState, FilterOutput]:
        if code is None:
            following, output = self.base.update(state.base, None, control, observed)
            return CusumState(following, state.cusum), output
        output = self.base.update(state.base, code[0], control, observed)[1]
        estimate, own = self.decode(self.base.embed(output.weights)), code[2]
        similar = _similarity(self.discriminant.kernel, estimate, self.points)
        far = jnp.where(similar > self.exclusion.astype(similar.dtype), 0, own)
        other, prior = _alternative(self.base, far, code[0])
        gain = self._evidence((output.weights, estimate, similar), other, code)
        cusum = jnp.maximum(state.cusum + (gain - self.slack).astype(state.cusum.dtype), 0)
        tested = observed & jnp.any(far > 0)
        cusum = jnp.where(tested, cusum, state.cusum)
        restart = tested & (cusum > self.threshold)

        def chosen(new, old):
            return jax.tree.map(lambda a, b: jnp.where(restart, a, b), new, old)

        weights = chosen(other, output.weights)
        output = FilterOutput(
            weights,
            chosen(prior, output.predicted),
            output.predictive_value,
            restart,
        )
        following = self.base.advance(weights, control)
        return CusumState(following, jnp.where(restart, 0, cusum)), output

    def _evidence(self, belief: tuple[Any, Point, Array], other: Any, code: Any) -> Array:
        """What an observation says for another belief: the smaller of two differences."""
        first, estimate, similar = belief
        code, projected, own = code
        rival = self.decode(self.base.embed(other))
        side = similar > _similarity(self.discriminant.kernel, rival, self.points)
        same = jnp.where(side, own, 0)
        second = _alternative(self.base, same, code)[0]
        estimates = estimate, self.decode(self.base.embed(second))
        shares = self.discriminant.noise_shares(
            jax.tree.map(lambda *points: jnp.stack(points), *estimates)
        )
        # A belief may be on both sides; its estimate is on one.
        weights, *others = (
            jnp.maximum(self.base.embed(one).weights, 0) for one in (first, second, other)
        )
        here = jnp.where(side, weights, 0)
        here = jnp.where(jnp.any(here > 0), here, weights)
        values = self.discriminant.log_likelihoods(self.predictions, projected)
        one, two, against = (_log_mean(held, values) for held in (here, *others))
        gains = (against - jnp.stack([one, two])) * shares
        return jnp.where(jnp.any(same > 0), jnp.min(gains), gains[0])


def _own_weights(
    base: KernelBayesFilter, factor: AbstractFactor | None, codes: Any
) -> Float[Array, "T m"]:
    """Positive weights of the embeddings that each observation alone gives."""
    emission = base.emission
    own = jax.vmap(lambda code: emission.as_weights(emission.from_observation(factor, code)))
    return jnp.maximum(own(codes), 0)


def _alternative(
    base: KernelBayesFilter, own: Float[Array, " m"], code: Any
) -> tuple[Any, Float[Array, " m"]]:
    """Belief and prior of one observation, from some of its own weights."""
    clipping = Clipping(True, base.clipping.truncation, True)
    prior = base.emission.clip_and_normalize(own, clipping)
    return base.correct(prior, KernelBayesState(prior, None), code, True)[0], prior


def _log_mean(weights: Float[Array, " m"], values: Float[Array, " m"]) -> Float[Array, ""]:
    """The logarithm of the mean of exp(values) under weights."""
    top = jnp.max(values)
    mean = safe_divide(jnp.sum(weights * jnp.exp(values - top)), jnp.sum(weights))
    return top + jnp.log(jnp.maximum(mean, jnp.finfo(mean.dtype).tiny))


def _similarity(kernel: AbstractKernel, state: Point, points: Points) -> Float[Array, " m"]:
    """The kernel of a state with points, as a share of that with itself."""
    point = jax.tree.map(lambda leaf: leaf[None], state)
    return safe_divide(kernel.gram(point, points)[0], kernel.diagonal(point)[0])


def fit_cusum_restart(
    base: KernelBayesFilter,
    data: tuple[Points, Points],
    features: Callable[[Point], Array],
    decode: Callable[[Embedding], Point],
    *,
    kernel: KernelLike,
    regularizer: ArrayLike | None = None,
    observation_regularizer: ArrayLike = 1e-3,
    exclusion: ArrayLike = EXCLUSION,
    slack: ArrayLike | None = None,
    threshold: ArrayLike | None = None,
    **options: Any,
) -> CusumRestartFilter:
    r"""Learn which features of an observation expose a wrong belief.

    **Arguments:**

    - `base`: a filter of the estimator `"pairs"` or `"importance"`; moments need cells.
    - `data`: training `(states, observations)` `[n, ...]` in order of time.
    - `features`: function of one observation to `[p]` numbers, in which the true state and its
      look-alikes differ somewhere: a color histogram, a bag of words. An `equinox.Module` if it has
      parameters.
    - `decode`: function of a belief (one `Embedding`) to a point, such as `kbr_jax.mean`.
    - `kernel`, `regularizer`, `options`: of the regression from states to features, see
      `fit_discriminant` (`degrees`, `num_directions`, `block_size`).
    - `observation_regularizer`: epsilon > 0 of the alternatives' embedding.
    - `exclusion`: in [0, 1). States whose `kernel` with the estimate is above this share of that of
      the estimate with itself are near it.
    - `slack` > 0: nats that an observation must say for the alternative to count at all.
    - `threshold` > 0: nats, beyond the slacks, at which the belief is replaced. By default, slack
      and threshold are .25 and .6 of what an informative observation says, `informative` of
      `DiscriminantLikelihood`, and at least 1.5 and 5 nats.

    **Returns:** a `CusumRestartFilter`. Cost: n steps of Bayes' rule, and O(n^3) for each
    regularizer that is tried (four by default).

    **Raises:** `ValueError` for another estimator, plain moments, a `base` fitted with a `mask`,
    fewer pairs than two blocks, features that are not a vector, and as `fit_discriminant`.
    """
    if base.estimator == "prior":
        raise ValueError("`base` must have the estimator 'pairs' or 'importance', not 'prior'.")
    if base.emission.features_x.mask is not None:
        raise ValueError("`base` was fitted to padded data; fit it without a `mask`.")
    function = as_function(features)
    exclusion = as_fraction(exclusion, "exclusion")
    states, observations = (as_points(part, f"data[{i}]") for i, part in enumerate(data))
    check_same_size(states, "data[0]", observations, "data[1]")
    kernel = kernel_for(kernel, states)
    kernel.check(states, "data[0]")
    codes = base.encode(observations, None)[0]
    dtype = base.emission.features_x.dtype
    ridge = as_regularizer(observation_regularizer, "observation_regularizer", dtype)
    factor = base.emission.observation_factor(ridge)
    points = base.embed(base.emission.unchanged(base.emission.marginal())).points

    def propose(inputs):
        code, own, state = inputs
        similar = _similarity(kernel, state, points)
        far = jnp.where(similar > exclusion.astype(similar.dtype), 0, own)
        return decode(base.embed(_alternative(base, far, code)[0]))

    batch = max(1, min(_BATCH, _ENTRIES // (base.max_active or size(states)) ** 2))
    inputs = codes, _own_weights(base, factor, codes), states
    proposals = lax.map(propose, inputs, batch_size=batch)
    rows, options = in_batches(function, observations), {"regularizer": regularizer, **options}
    discriminant = fit_discriminant(kernel, states, rows, proposals, **options)
    nats = discriminant.informative
    slack = jnp.maximum(SLACK * nats, LEAST_SLACK) if slack is None else slack
    if threshold is None:
        threshold = jnp.maximum(THRESHOLD * nats, LEAST_THRESHOLD)
    return CusumRestartFilter(
        base=base,
        discriminant=discriminant,
        factor=factor,
        points=points,
        predictions=discriminant.predict(points),
        template=take(observations, 0),
        features=function,
        decode=decode,
        exclusion=exclusion,
        slack=as_positive(slack, "slack", scalar=True),
        threshold=as_positive(threshold, "threshold", scalar=True),
    )
