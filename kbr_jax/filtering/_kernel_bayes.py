"""The kernel Bayes filter: Bayes' rule and the sum rule, in turn (S13 algorithm VII)."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_count, as_regularizer
from .._numerics import matmul, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..embedding import Embedding, mean, normalized
from ..features import FeatureChoice
from ..kernels import AbstractKernel, KernelLike, kernel_for
from ..rules import (
    AbstractConditional,
    AbstractEmission,
    Clipping,
    ConditionalEmbedding,
    check_estimator,
    fit_conditional,
    prior_weights,
    single_prior_weights,
    update,
)
from ._base import AbstractFilter, FilterOutput, step_output
from ._known import AbstractKnownTransition
from ._sequences import as_transitions
from ._smoothers import AbstractSmoother
from ._transitions import AbstractTransition, bind_transition


class KernelBayesState(eqx.Module):
    """Prior of the next observation.

    `weights` on the training pairs, `shifted` on the successors.
    """

    weights: Float[Array, " n"]
    shifted: Float[Array, " m"] | None


class KernelBayesFilter(AbstractFilter):
    r"""The kernel Bayes filter: an emission model P(o | s) and a transition model P(s' | s).

    With G the Gram matrix of the training states, $\tilde G_{ij} = k(s_i, s_{j+1})$ and K the Gram
    matrix of the training observations, a step from the belief $\alpha$ is

    - the sum rule. $w = (G + n \varepsilon I)^{-1} \tilde G (G + n \varepsilon' I)^{-1} G \alpha$
      (F11 eq 18), or $w = (G + n \varepsilon I)^{-1} \tilde G \alpha$ with `shift`: each weight
      moves on to the successor of its state (S13 eq 35);
    - `clip_and_normalize`;
    - Bayes' rule with $D = \operatorname{diag}(w)$ (S13 eq 36): `bayes_rule`.

    With delta kernels and vanishing regularizers the filter without `shift` is the exact forward
    filter of a hidden Markov model.

    **Arguments:**

    - `emission`: of `fit_conditional(kernel_s, kernel_o, states, observations)`, of the same in
      `kbr_jax.moments`, or a `KnownLikelihood`.
    - `transition`: of `fit_conditional(kernel_s, kernel_s, states, successors)`, or with inputs of
      `fit_conditional(TensorProduct((kernel_s, kernel_u)), kernel_s, (states, inputs), next)`; or a
      `SimulatedTransition` or `GaussianTransition`. None for moments that `shift`.
    - `regularizer`: delta > 0 of Bayes' rule (see `bayes_rule`). Small is sharp but brittle. Unused
      with a `KnownLikelihood`.
    - `estimator`: of Bayes' rule. `"prior"` keeps its belief on the successors of `transition`.
      Where `clipping` normalizes, their weights before an observation are divided by their sum too.
    - `clipping`: of the prior's weights, by default `Clipping()`. The filter as printed has
      `Clipping(False, 0.0, False)`.
    - `shift`: move weights to the successors. The states of both models must then be the same.
    - `max_active`: let Bayes' rule use only that many prior weights (static). Those of the largest
      posterior masses are kept, and a sample of the others stands for the rest (Fearnhead and
      Clifford 2003). It is exact where no more weights are positive.

    Cost of a step: O(n^3) exact; O(n r^2 + r^3) with r landmarks of the observations; O(k r^2 +
    r^3) with k active weights; O(K q^2 + q^3 + K q p) with moments, whatever n is.

    **Raises:** `ValueError` for options that exclude each other, and for models of other states.
    """

    emission: AbstractEmission
    transition: AbstractTransition
    regularizer: Float[Array, ""] | None
    clipping: Clipping
    estimator: str = eqx.field(static=True)
    max_active: int | None = eqx.field(static=True)

    def __init__(
        self,
        emission: AbstractEmission,
        transition: AbstractConditional | AbstractKnownTransition | None,
        *,
        regularizer: ArrayLike | None = None,
        estimator: Literal["pairs", "prior", "importance"] = "pairs",
        clipping: Clipping | None = None,
        shift: bool = False,
        max_active: int | None = None,
    ):
        clipping = Clipping() if clipping is None else clipping
        check_estimator(estimator, clipping, "pairs", "prior", "importance")
        _check_options(emission, transition, regularizer, estimator, clipping, shift, max_active)
        dtype = emission.features_x.dtype
        if regularizer is not None:
            power = 1 if estimator == "importance" else 2  # added to a square
            regularizer = as_regularizer(regularizer, "regularizer", dtype, power)
        # Raises where these weights cannot be clipped.
        jax.eval_shape(emission.clip_and_normalize, emission.marginal(), clipping)
        self.emission = emission
        model: Any = transition
        if transition is None or transition.learned:
            self.transition = bind_transition(emission, model, shift, estimator == "prior")
        else:
            self.transition = model.bind(emission)
        self.regularizer = regularizer
        self.clipping = clipping
        self.estimator = estimator
        self.max_active = None if max_active is None else as_count(max_active, "max_active")

    def update(
        self, state: KernelBayesState, code: Any, control: Any, observed: Bool[Array, ""]
    ) -> tuple[KernelBayesState, FilterOutput]:
        prior = self.prior(state)
        belief, value = self.correct(prior, state, code, observed)
        return self.advance(belief, control), step_output(belief, prior, value)

    def prior(self, state: KernelBayesState) -> Float[Array, " n"]:
        """D of S13 eq 35: the prior's weights as Bayes' rule uses them."""
        return self.emission.clip_and_normalize(state.weights, self.clipping)

    def correct(
        self,
        prior: Float[Array, " n"],
        state: KernelBayesState,
        code: Any,
        observed: ArrayLike,
    ) -> tuple[Any, Float[Array, ""]]:
        """S13 eq 36: the belief and its predictive value."""
        emission, nan = self.emission, jnp.asarray(jnp.nan, prior.dtype)
        on_successors = self.estimator == "prior"
        shifted: Any = state.shifted
        if on_successors and self.clipping.normalize:  # as the prior, else masses multiply
            shifted = normalized(shifted)
        unchanged = shifted if on_successors else emission.unchanged(prior)
        if code is None:
            return unchanged, nan
        mass = jnp.sum(emission.mass(prior))
        value = predictive_value(emission, prior, code, mass)
        if on_successors:
            belief = self._on_successors(prior, shifted, code)
        else:
            importance = self.estimator == "importance"
            belief = update(emission, prior, code, self.regularizer, importance, self.max_active)
        # The code of an observation far from all training observations is 0. A belief of zeros
        # would forget the past.
        made = jnp.asarray(observed)
        zero = jnp.all(belief == 0) if on_successors else emission.is_zero(belief)
        belief = jax.tree.map(lambda b, u: jnp.where(made & ~zero, b, u), belief, unchanged)
        return belief, jnp.where(made, value, nan)

    def _on_successors(self, prior: Array, shifted: Array, code: Array) -> Float[Array, " m"]:
        """Bayes' rule of form (a), whose prior stands on the successors."""
        model: Any = self.emission
        outputs = self.transition.outputs  # pyright: ignore[reportAttributeAccessIssue]
        ratio = model.ratio(prior, code[None], self.regularizer, False)
        return shifted * model.regress(ratio, lambda c: matmul(c, outputs.T))[0]

    def advance(self, weights: Any, control: Any) -> KernelBayesState:
        mean, shifted = self.transition.forward(self.emission, weights, control)
        shifted = shifted if self.estimator == "prior" else None
        return KernelBayesState(self.emission.weights(mean), shifted)

    def init(self, prior: Embedding | None) -> KernelBayesState:
        emission = self.emission
        if prior is None:
            weights = emission.marginal()
        else:
            weights = single_prior_weights(emission, prior)
        if self.estimator != "prior":
            return KernelBayesState(weights, None)
        prior = emission.embed_x(weights) if prior is None else prior
        return KernelBayesState(weights, self._regress_on_successors(prior))

    def _regress_on_successors(self, prior: Embedding) -> Float[Array, " m"]:
        own: Any = self.transition.model.features_y  # pyright: ignore[reportAttributeAccessIssue]
        features = eqx.tree_at(
            lambda f: f.mask, self.emission.features_x, own.mask, is_leaf=lambda leaf: leaf is None
        ).at(own.points)
        factor = features.ridge(self.emission.regularizer)  # pyright: ignore
        model = eqx.tree_at(lambda m: (m.features_x, m.factor), self.emission, (features, factor))
        return prior_weights(model, prior)

    def start(self, code: Any, regularizer: Array) -> FilterOutput:
        emission = self.emission
        factor = emission.observation_factor(regularizer.astype(emission.features_x.dtype))
        prior = emission.marginal()
        own = emission.from_observation(factor, code)
        # Beyond the reach of the kernel nothing was observed.
        lost = emission.is_zero(own)
        own = jax.tree.map(lambda a, b: jnp.where(lost, b, a), own, emission.unchanged(prior))
        if not isinstance(own, jax.Array):
            return step_output(own, prior, jnp.asarray(jnp.nan, emission.features_x.dtype))
        if not emission.learned:  # Bayes' rule from the marginal
            return step_output(own, prior, predictive_value(emission, prior, code, jnp.sum(prior)))
        value = predictive_value(emission, own, code, jnp.sum(own))
        if self.estimator != "prior":
            return step_output(own, own, value)
        return step_output(self._regress_on_successors(emission.embed_x(own)), own, value)

    def kernels(self) -> tuple[AbstractKernel | None, AbstractKernel | None]:
        emission: Any = self.emission
        of_observations = emission.features_y.kernel if emission.learned else None
        return of_observations, self.transition.kernel_of_controls()

    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        return self.emission.observe(observations, observed, name)

    def encode_controls(self, controls: Points | None, count: int) -> Any:
        return self.transition.encode_controls(controls, count)

    def embed(self, weights: Any) -> Embedding:
        if self.estimator == "prior":
            points = self.transition.model.features_y.points  # pyright: ignore
            return Embedding(self.emission.features_x.kernel, points, weights)
        return self.emission.embed_belief(weights)

    def mean(self, weights: Any) -> Any:
        if self.estimator == "prior":
            return mean(self.embed(weights))
        return self.emission.mean_x(weights)

    def smoother(self, points: Points) -> AbstractSmoother:
        return self.transition.smoother(self.emission, points)


def predictive_value(
    emission: AbstractEmission, weights: Float[Array, " n"], code: Any, mass: Array
) -> Float[Array, ""]:
    """Mean likelihood of an observation under weights of this mass."""
    scaled, logarithm = emission.scaled(weights, code)
    mean_likelihood = safe_divide(matmul(weights, emission.likelihood(scaled)), mass)
    return mean_likelihood * jnp.exp(logarithm)


def _check_options(emission, transition, regularizer, estimator, clipping, shift, max_active):
    if emission.learned and regularizer is None:
        raise ValueError("A learned emission needs the `regularizer` of Bayes' rule.")
    if shift and transition is not None and not transition.learned:
        raise ValueError("A known `transition` moves any state: leave `shift` out.")
    if estimator == "prior" and (shift or transition is None or not transition.learned):
        raise ValueError(
            "The estimator 'prior' keeps its belief on the successors of a learned transition: "
            "give one, without `shift`."
        )
    if estimator == "prior" and not isinstance(emission, ConditionalEmbedding):
        raise ValueError("The estimator 'prior' needs a learned emission on a sample.")
    if transition is None and not shift:
        raise ValueError("Give a `transition`, or `shift=True` for moments with their successors.")
    if max_active is not None and (estimator == "prior" or not clipping.clip):
        raise ValueError(
            "`max_active` chooses among non-negative weights: it needs a `clipping` that "
            "clips, and not the estimator 'prior'."
        )


def fit_filter(
    kernel_states: KernelLike,
    kernel_observations: KernelLike,
    states: Points,
    observations: Points,
    *,
    regularizer: ArrayLike,
    posterior_regularizer: ArrayLike,
    successors: Points | None = None,
    landmarks_states: FeatureChoice = None,
    landmarks_observations: FeatureChoice = None,
    mask: ArrayLike | None = None,
    **options: Any,
) -> KernelBayesFilter:
    r"""Fit a `KernelBayesFilter` to a training sequence with known states.

    It fits both models with one `regularizer`, and shares the landmarks of the states. Use
    `fit_conditional` twice for anything else.

    **Arguments:**

    - `states`: `[T + 1, ...]` or `[T, ...]`, in order of time; `observations`: `[T, ...]`, the one
      at t made in state t. With T states the last pair is dropped: its successor is unknown. Give
      lists for several trajectories, of any lengths. No pair goes across their ends.
    - `successors`: `[T, ...]`, the state after each of T `states`, for single transitions.
    - `regularizer`: epsilon > 0 in `G + n epsilon I` of both models.
    - `posterior_regularizer`: delta > 0, the `regularizer` of the `KernelBayesFilter`.
    - `landmarks_states`, `landmarks_observations`: as in `fit_conditional`.
    - `mask`: one entry a state, False where it is padding.
    - `options`: of `KernelBayesFilter`. By default `shift=True`, but for the estimator `"prior"`.

    Cost O(n^3) and memory O(n^2) exact; O(n r^2) and O(n r) with r landmarks of both.

    **Raises:** `ValueError` for samples of wrong or different lengths, non-finite values, and as
    `KernelBayesFilter`.

    **Example:**

    >>> import jax.numpy as jnp, kbr_jax as kbr
    >>> angle = 0.3 * jnp.arange(101.0)
    >>> states = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    >>> seen = states[:, 0] ** 2  # the same at four angles
    >>> kernels = kbr.Gaussian(0.5), kbr.Gaussian(0.1)
    >>> filt = kbr.fit_filter(*kernels, states, seen[:100], regularizer=1e-3,
    ...                       posterior_regularizer=1e-4)
    >>> run = kbr.run_filter(filt, seen[:5])
    >>> run.weights.shape, kbr.state_mean(filt, run).shape
    ((5, 100), (5, 2))
    """
    states, observations, successors, mask = as_transitions(
        states, observations, successors, 0, mask
    )
    kernel_states = kernel_for(kernel_states, states, mask)
    kernel_observations = kernel_for(kernel_observations, observations, mask)
    kernel_states.check(states, "states")
    kernel_states.check(successors, "successors")
    kernel_observations.check(observations, "observations")
    emission = fit_conditional(
        kernel_states,
        kernel_observations,
        states,
        observations,
        regularizer=regularizer,
        landmarks_x=landmarks_states,
        landmarks_y=landmarks_observations,
        mask=mask,
    )
    power = 1 if options.get("estimator") == "importance" else 2
    delta = as_regularizer(
        posterior_regularizer, "posterior_regularizer", emission.features_x.dtype, power
    )
    # The transition shares states, features and ridge with the emission.
    moved = emission.features_x.at(successors)
    transition = eqx.tree_at(lambda model: model.features_y, emission, moved)
    options = {"shift": options.get("estimator") != "prior", **options}
    return KernelBayesFilter(emission, transition, regularizer=delta, **options)
