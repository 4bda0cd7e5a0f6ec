"""The kernel Bayes filter: Bayes' rule and the sum rule, in turn (S13 algorithm VII; F11 section 4.3)."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_count, as_fraction, as_regularizer
from .._numerics import AbstractFactor, matmul, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..embedding import Embedding
from ..features import AbstractFeatures, FeatureChoice, fit_features
from ..kernels import as_kernel
from ..rules import check_truncation, clean_weights
from ._base import AbstractSampleFilter, FilterStep, as_transitions, most_active, project_prior


class Recovery(eqx.Module):
    r"""How a filter finds its way back from a wrong belief. All off at 0.

    With w the cleaned prior weights, $v$ the cleaned weights of the observation's own embedding
    $(K + n \varepsilon I)^{-1} k(O, o)$ (what it says without any past), and $k_o = k(O, o)$:

    - `marginal_share` a and `observation_share` b, in [0, 1): $w \leftarrow (1 - a - b) w + |w|_1 (a / n + b v / |v|_1)$.
    - `restart_below`, in [0, 1): $w \leftarrow |w|_1 v / |v|_1$ where the observation contradicts the belief,
      $w^\top k_o / |w|_1 < \text{restart\_below} \cdot v^\top k_o / |v|_1$.

    $|w|_1$ is the sum of the weights, which `clip=False` leaves signed. Not for form (a), whose belief stands on the successors.

    A share does not stay small where the posterior regularizer is: the prior drops out of rule (b) as delta -> 0, so a
    share above about sqrt(delta) competes on the likelihood alone, every step. That helps where a single observation
    tells the candidates apart, and hurts where it does not; try it on held-out data. `RivalFilter` is for the latter.
    """

    marginal_share: Float[Array, ""] = eqx.field(
        converter=lambda value: as_fraction(value, "marginal_share"), default=0.0
    )
    observation_share: Float[Array, ""] = eqx.field(
        converter=lambda value: as_fraction(value, "observation_share"), default=0.0
    )
    restart_below: Float[Array, ""] = eqx.field(
        converter=lambda value: as_fraction(value, "restart_below"), default=0.0
    )


class KernelBayesState(eqx.Module):
    """Prior of the next observation: `weights` on the training states (D of S13 eq 35), `shifted` on their successors."""

    weights: Float[Array, " n"]
    shifted: Float[Array, " n"]


class KernelBayesFilter(AbstractSampleFilter):
    r"""The kernel Bayes filter. Build it with `KernelBayesFilter.fit`.

    From the belief $\sum_i \alpha_i \phi(s_i)$, with G the Gram matrix of the training states, $\tilde G_{ij} = k(s_i, s_{j+1})$
    and K the Gram matrix of the training observations:

    - prediction, `transition="shift"` (S13 eq 35): $w = (G + n \varepsilon I)^{-1} \tilde G \alpha$: each weight moves on to
      the successor of its state;
    - prediction, `transition="two-inverse"` (F11 eq 18):
      $w = (G + n \varepsilon I)^{-1} \tilde G (G + n \varepsilon' I)^{-1} G \alpha$, the sum rule with the learned
      transition. A different estimator: with delta kernels and vanishing regularizers it is the exact forward filter of a
      hidden Markov model, the first is not;
    - w is clipped, truncated and normalized as asked, and mixed by `recovery`;
    - update by `bayes_rule` of form (b), (a) or `"importance"` with $D = \operatorname{diag}(w)$ (S13 eq 36).

    Beliefs are weights on `support`: the training states, or their successors for form (a). Cost of a step: O(n^3) exact,
    O(n r^2 + r^3) with r landmarks of the observations.
    """

    states: AbstractFeatures
    observations: AbstractFeatures
    successors: Points
    successor_codes: Float[Array, "n r"]
    state_factor: AbstractFactor
    transition_factor: AbstractFactor
    observation_factor: AbstractFactor
    regularizer: Float[Array, ""]
    posterior_regularizer: Float[Array, ""]
    truncation: Float[Array, ""]
    recovery: Recovery | None
    form: Literal["a", "b", "importance"] = eqx.field(static=True)
    transition: Literal["shift", "two-inverse"] = eqx.field(static=True)
    clip: bool = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    max_active: int | None = eqx.field(static=True)

    @property
    def support(self) -> Points:
        """The points `[n, ...]` that belief weights stand on."""
        return self.successors if self.form == "a" else self.states.points

    @staticmethod
    def fit(
        kernel_states: Any,
        kernel_observations: Any,
        states: Points,
        observations: Points,
        *,
        successors: Points | None = None,
        mask: ArrayLike | None = None,
        regularizer: ArrayLike,
        posterior_regularizer: ArrayLike,
        transition_regularizer: ArrayLike | None = None,
        observation_regularizer: ArrayLike | None = None,
        landmarks_states: FeatureChoice = None,
        landmarks_observations: FeatureChoice = None,
        form: Literal["a", "b", "importance"] = "b",
        transition: Literal["shift", "two-inverse"] | None = None,
        clip: bool = True,
        truncation: ArrayLike = 0.02,
        normalize: bool = True,
        max_active: int | None = None,
        recovery: Recovery | None = None,
    ) -> "KernelBayesFilter":
        r"""Learn a filter from a training sequence with known states.

        **Arguments:**

        - `kernel_states`, `kernel_observations`: kernels, or callables of two points.
        - `states`: `[T + 1, ...]` or `[T, ...]`, in order of time; `observations`: `[T, ...]`, the one at t made in state t.
          With T states the last pair is dropped: its successor is unknown.
        - `successors`: `[T, ...]`, the state after each of T `states`, for data that is not one sequence (several
          sequences joined, single transitions). Then `states` is `[T, ...]` too.
        - `mask`: one entry a state, False where it is padding, so that data of several lengths share one compiled program.
          Padding may hold anything. The filter is that of the rest, with weight 0 on padding.
        - `regularizer`: epsilon > 0 in `G + n epsilon I`, of the regression that turns the prior into weights on the training
          pairs.
        - `transition_regularizer`: epsilon of the other inverse in `"two-inverse"`, the transition's; as `regularizer` if None.
        - `posterior_regularizer`: delta > 0 of Bayes' rule, on the squared operator (see `bayes_rule`); for
          `"importance"` the ridge itself. Small is sharp but brittle.
        - `observation_regularizer`: ridge of the observation's own embedding, in `K + n epsilon I`, for
          `init_from_observation` and `recovery`; as `regularizer` if None.
        - `landmarks_states`, `landmarks_observations`: None for exact Gram matrices, a rank for greedy landmarks,
          `Landmarks`, or `RandomFourier` of random Fourier features (`random_fourier`).
        - `form`, `transition`: see the class. Form (a) lives on successors and knows only `"two-inverse"`; the default is
          `"two-inverse"` for it and `"shift"` otherwise.
        - `clip`, `truncation`, `normalize`: treatment of the prior's weights (`clean_weights`). `clip=False` with
          `truncation=0` and `normalize=False` is the filter as printed.
        - `max_active`: let Bayes' rule use only k prior weights (static), those that are largest times k(o_i, o). Exact as long
          as no more are non-zero, as truncation tends to arrange, though not for the flat prior of a start; a step then costs
          O(k r^2 + r^3), or O(k^3 + n^2) exact. Not for form (a).
        - `recovery`: what to do about wrong beliefs; nothing if None.

        **Raises:** `ValueError` for samples of wrong or different lengths, non-finite values, parameters out of range, or
        options that exclude each other.
        """
        kernel_states, kernel_observations = (
            as_kernel(kernel_states),
            as_kernel(kernel_observations),
        )
        states, observations, successors, mask = as_transitions(
            states, observations, successors, 0, mask
        )
        kernel_states.check(states, "states")
        kernel_observations.check(observations, "observations")
        transition = transition or ("two-inverse" if form == "a" else "shift")
        truncation = as_fraction(truncation, "truncation")
        _check_options(form, transition, clip, truncation, max_active, recovery)

        state_features = fit_features(kernel_states, states, landmarks_states, mask)
        observation_features = fit_features(
            kernel_observations, observations, landmarks_observations, mask
        )
        dtype = state_features.dtype
        epsilon = as_regularizer(regularizer, "regularizer", dtype)
        delta = as_regularizer(posterior_regularizer, "posterior_regularizer", dtype)
        state_factor = state_features.ridge(epsilon)
        transition_factor = state_factor
        if transition_regularizer is not None:
            ridge = as_regularizer(transition_regularizer, "transition_regularizer", dtype)
            transition_factor = state_features.ridge(ridge)
        ridge = epsilon if observation_regularizer is None else observation_regularizer
        return KernelBayesFilter(
            states=state_features,
            observations=observation_features,
            successors=successors,
            successor_codes=state_features.coordinates(successors),
            state_factor=state_factor,
            transition_factor=transition_factor,
            observation_factor=observation_features.ridge(
                as_regularizer(ridge, "observation_regularizer", dtype)
            ),
            regularizer=epsilon,
            posterior_regularizer=delta,
            truncation=truncation.astype(dtype),
            recovery=recovery,
            form=form,
            transition=transition,
            clip=clip or form == "importance",
            normalize=normalize,
            max_active=None if max_active is None else as_count(max_active, "max_active"),
        )

    def init(self, prior: Embedding | None = None) -> KernelBayesState:
        """Prior of the first observation, from an embedding over states; by default the training states' marginal."""
        if prior is None:
            weights = self.states.uniform
            prior = self._on_states(weights)
        else:
            weights = project_prior(self.states, prior, self.state_factor)
        return KernelBayesState(weights, self._onto_support(weights, prior))

    def init_from_observation(self, observation: Point) -> tuple[KernelBayesState, FilterStep]:
        r"""Belief $(K + n \varepsilon I)^{-1} k(O, o)$ of a first observation without prior (F11 eq 10), and the next state."""
        code = self.coordinates_of(observation)
        own = self.observations.ridge_weights(self.observation_factor, code[None])[0]
        values = self.observations.to_sample(code[None])[0]
        evidence = safe_divide(matmul(own, values), jnp.sum(own))
        belief = self._onto_support(own, self._on_states(own))
        return self._advance(belief), FilterStep(belief, own, evidence, jnp.asarray(False))

    def update(
        self, state: KernelBayesState, code: Float[Array, " r"], observed: Bool[Array, ""]
    ) -> tuple[KernelBayesState, FilterStep]:
        """One step for an encoded observation: clean the prior, apply Bayes' rule, predict."""
        prior = self._clean(state.weights)
        values = self.observations.to_sample(code[None])[0]
        evidence = safe_divide(matmul(prior, values), jnp.sum(prior))
        prior, restarted = self._recover(prior, code, values, observed)
        belief = self._posterior(prior, state.shifted, code)
        # Far from all training observations every k(o_i, o) underflows to 0, and a belief of zeros would forget the past.
        heard = observed & jnp.any(belief != 0)
        belief = jnp.where(heard, belief, state.shifted if self.form == "a" else prior)
        step = FilterStep(belief, prior, jnp.where(observed, evidence, jnp.nan), restarted)
        return self._advance(belief), step

    def predict(self, weights: Float[Array, "*batch n"], steps: int = 1) -> Embedding:
        """Embedding of the state `steps` transitions after a belief: the filter's steps without observations.

        **Arguments:** `weights` `[..., n]` of a belief; `steps` >= 1 (static). **Returns:** an `Embedding` on the
        successors, weights `[..., n]`. Cost O(steps n^2) a belief exact, O(steps n r) with landmarks.
        """
        shifted = self._shift(weights)
        for _ in range(as_count(steps, "steps") - 1):
            if self.form == "a":
                shifted = self._shift(shifted)
            else:
                shifted = self._shift(self._clean(self._on_pairs(shifted)))
        return Embedding(self.states.kernel, self.successors, shifted)

    def _clean(self, weights: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        options = {"clip": self.clip, "truncation": self.truncation, "normalize": self.normalize}
        return clean_weights(weights, **options, mask=self.states.mask)

    def _recover(self, prior, code, values, observed):
        if self.recovery is None:
            return prior, jnp.asarray(False)
        own = self.observations.ridge_weights(self.observation_factor, code[None])[0]
        own = clean_weights(
            own, clip=True, truncation=self.truncation, normalize=True, mask=self.states.mask
        )
        mass = jnp.sum(prior)
        threshold = self.recovery.restart_below.astype(prior.dtype) * matmul(own, values)
        restarted = observed & (safe_divide(matmul(prior, values), mass) < threshold)
        marginal, frame = (
            jnp.where(observed, share.astype(prior.dtype), 0)
            for share in (self.recovery.marginal_share, self.recovery.observation_share)
        )
        mixed = (1 - marginal - frame) * prior + mass * (
            marginal * self.states.uniform + frame * own
        )
        return jnp.where(restarted, mass * own, mixed), restarted

    def _on_states(self, weights: Float[Array, " n"]) -> Embedding:
        return Embedding(self.states.kernel, self.states.points, weights)

    def _onto_support(self, weights: Float[Array, " n"], prior: Embedding) -> Float[Array, " n"]:
        """Weights on the support, of a prior that has the given weights on the states: form (a) stands on the successors."""
        if self.form != "a":
            return weights
        successors = self.states.at(self.successors)
        return project_prior(successors, prior, successors.ridge(self.regularizer))

    def _posterior(self, prior, shifted, code) -> Float[Array, " n"]:
        """Bayes' rule for cleaned prior weights, on the largest `max_active` of them if that is set."""
        delta, features, coordinates = self.posterior_regularizer, self.observations, code[None]
        if self.form == "a":
            values = features.posterior(prior, coordinates, delta)[1]
            return (
                shifted
                * self.states.ridge_values(self.state_factor, values, self.successor_codes)[0]
            )
        active, index = prior, None
        if self.max_active is not None and self.max_active < prior.shape[0]:
            index = most_active(prior, features.to_sample(coordinates)[0], self.max_active)
            active = prior[index]
            features, coordinates = features.restrict(index, coordinates)
        if self.form == "importance":
            belief = features.importance_posterior(active, coordinates, delta)[0]
        else:
            belief = features.posterior(active, coordinates, delta)[0][0]
        return belief if index is None else jnp.zeros_like(prior).at[index].set(belief)

    def _shift(self, belief: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """Weights on the successors, of the state after a belief."""
        return belief if self.transition == "shift" else self._forward(belief)

    def _forward(
        self, belief: Float[Array, "*batch n"], control: None = None
    ) -> Float[Array, "*batch n"]:
        """The learned transition: weights on the successors, by regression on the states. `ControlledFilter` has inputs."""
        return self._regress(self.transition_factor, matmul(belief, self._support_codes))

    def _backward(self, values: Float[Array, "b n"], control: None = None) -> Float[Array, "b n"]:
        """Its adjoint: mean of a function, known at the successors, of the state after each point of the support."""
        return self.states.ridge_values(self.transition_factor, values, self._support_codes)

    @property
    def _support_codes(self) -> Float[Array, "n r"]:
        return self.successor_codes if self.form == "a" else self.states.matrix

    def _regress(
        self, factor: AbstractFactor, coordinates: Float[Array, "*batch r"]
    ) -> Float[Array, "*batch n"]:
        weights = self.states.ridge_weights(factor, coordinates.reshape(-1, coordinates.shape[-1]))
        return weights.reshape(*coordinates.shape[:-1], weights.shape[-1])

    def _advance(self, belief: Float[Array, " n"]) -> KernelBayesState:
        return self._arrive(self._shift(belief))

    def _arrive(self, shifted: Float[Array, " n"]) -> KernelBayesState:
        return KernelBayesState(self._on_pairs(shifted), shifted)

    def _on_pairs(self, shifted: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """Weights on the training states, of an embedding on their successors."""
        return self._regress(self.state_factor, matmul(shifted, self.successor_codes))


def _check_options(
    form: str,
    transition: str,
    clip: bool,
    truncation: Float[Array, ""],
    max_active: int | None,
    recovery: Recovery | None,
) -> None:
    if form not in ("a", "b", "importance"):
        raise ValueError(f"`form` must be 'a', 'b' or 'importance', got {form!r}.")
    if transition not in ("shift", "two-inverse"):
        raise ValueError(f"`transition` must be 'shift' or 'two-inverse', got {transition!r}.")
    if form == "a" and transition == "shift":
        raise ValueError(
            "Form (a) keeps its belief on the successors, which have no successors to shift to: use 'two-inverse'."
        )
    if form == "a" and recovery is not None:
        raise ValueError(
            "`recovery` changes the weights of the training states, and form (a) keeps its belief on the successors: "
            "use form 'b' or 'importance'."
        )
    check_truncation(clip or form == "importance", truncation)
    if max_active is not None and (form == "a" or not (clip or form == "importance")):
        raise ValueError(
            "`max_active` keeps the largest of non-negative weights: it needs `clip=True`, and not form (a)."
        )
