"""The kernel Bayes filter: Bayes' rule and the sum rule, in turn (S13 algorithm VII; F11 section 4.3)."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_regularizer, as_share, is_concrete, size, take
from .._numerics import PSDFactor, matmul, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..embedding import Embedding
from ..features import AbstractFeatures, Landmarks, fit_features
from ..kernels import as_kernel
from ..rules import clean_weights, encode
from ._base import AbstractFilter, FilterStep, as_sequence, as_triples, project_prior


class Recovery(eqx.Module):
    r"""How a filter finds its way back from a wrong belief. All off at 0.

    With w the cleaned prior weights, $v$ the cleaned weights of the observation's own embedding
    $(K + n \varepsilon I)^{-1} k(O, o)$ (what it says without any past), and $k_o = k(O, o)$:

    - `marginal_share` a and `observation_share` b, in [0, 1): $w \leftarrow (1 - a - b) w + |w|_1 (a / n + b v / |v|_1)$.
    - `restart_below`, in [0, 1): $w \leftarrow v$ where the observation contradicts the belief,
      $w^\top k_o / |w|_1 < \text{restart\_below} \cdot v^\top k_o / |v|_1$.
    """

    marginal_share: Float[Array, ""] = eqx.field(converter=lambda value: as_share(value, "marginal_share"), default=0.0)
    observation_share: Float[Array, ""] = eqx.field(
        converter=lambda value: as_share(value, "observation_share"), default=0.0
    )
    restart_below: Float[Array, ""] = eqx.field(converter=lambda value: as_share(value, "restart_below"), default=0.0)


class KernelBayesState(eqx.Module):
    """Prior of the next observation: `weights` on the training states (D of S13 eq 35), `shifted` on their successors."""

    weights: Float[Array, " n"]
    shifted: Float[Array, " n"]


class KernelBayesFilter(AbstractFilter):
    r"""The kernel Bayes filter. Build it with `KernelBayesFilter.fit`.

    From the belief $\sum_i \alpha_i \phi(s_i)$, with G the Gram matrix of the training states, $\tilde G_{ij} = k(s_i, s_{j+1})$
    and K the Gram matrix of the training observations:

    - prediction, `transition="shift"` (S13 eq 35): $w = (G + n \varepsilon I)^{-1} \tilde G \alpha$: each weight moves on to
      the successor of its state;
    - prediction, `transition="two-inverse"` (F11 eq 18): $w = (G + n \varepsilon I)^{-1} \tilde G (G + n \varepsilon I)^{-1} G \alpha$,
      the sum rule with the learned transition. A different estimator: with delta kernels and vanishing regularizers it
      is the exact forward filter of a hidden Markov model, the first is not;
    - w is clipped, truncated and normalised as asked, and mixed by `recovery`;
    - update by `bayes_rule` of form (b), (a) or `"importance"` with $D = \operatorname{diag}(w)$ (S13 eq 36).

    Beliefs are weights on `support`: the training states, or their successors for form (a). Cost of a step: O(n^3) exact,
    O(n r^2 + r^3) with r landmarks of the observations.
    """

    states: AbstractFeatures
    observations: AbstractFeatures
    successors: Points
    successor_codes: Float[Array, "n r"]
    state_factor: PSDFactor
    observation_factor: PSDFactor
    regularizer: Float[Array, ""]
    posterior_regularizer: Float[Array, ""]
    truncation: Float[Array, ""]
    recovery: Recovery | None
    form: Literal["a", "b", "importance"] = eqx.field(static=True)
    transition: Literal["shift", "two-inverse"] = eqx.field(static=True)
    clip: bool = eqx.field(static=True)
    normalise: bool = eqx.field(static=True)

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
        regularizer: ArrayLike,
        posterior_regularizer: ArrayLike,
        observation_regularizer: ArrayLike | None = None,
        landmarks_states: Landmarks | int | None = None,
        landmarks_observations: Landmarks | int | None = None,
        form: Literal["a", "b", "importance"] = "b",
        transition: Literal["shift", "two-inverse"] | None = None,
        clip: bool = True,
        truncation: ArrayLike = 0.02,
        normalise: bool = True,
        recovery: Recovery | None = None,
    ) -> "KernelBayesFilter":
        r"""Learn a filter from a training sequence with known states.

        **Arguments:**

        - `kernel_states`, `kernel_observations`: kernels, or callables of two points.
        - `states`: `[T + 1, ...]` or `[T, ...]`, in order of time; `observations`: `[T, ...]`, the one at t made in state t.
          With T states the last pair is dropped: its successor is unknown.
        - `successors`: `[T, ...]`, the state after each of T `states`, for data that is not one sequence (several
          sequences joined, single transitions). Then `states` is `[T, ...]` too.
        - `regularizer`: epsilon > 0 of the state regressions, in `G + n epsilon I`.
        - `posterior_regularizer`: delta > 0 of Bayes' rule, on the squared operator (see `bayes_rule`); for
          `"importance"` the ridge itself. Small is sharp but brittle.
        - `observation_regularizer`: ridge of the observation's own embedding, in `K + n epsilon I`, for
          `init_from_observation` and `recovery`; as `regularizer` if None.
        - `landmarks_states`, `landmarks_observations`: None for exact Gram matrices, a rank for greedy landmarks, or
          `Landmarks`.
        - `form`, `transition`: see the class. Form (a) lives on successors and knows only `"two-inverse"`; the default is
          `"two-inverse"` for it and `"shift"` otherwise.
        - `clip`, `truncation`, `normalise`: treatment of the prior's weights (`clean_weights`). `clip=False` with
          `truncation=0` and `normalise=False` is the filter as printed.
        - `recovery`: what to do about wrong beliefs; nothing if None.

        **Raises:** `ValueError` for samples of wrong or different lengths, non-finite values, parameters out of range, or
        options that exclude each other.
        """
        kernel_states, kernel_observations = as_kernel(kernel_states), as_kernel(kernel_observations)
        if successors is None:
            states, observations = as_sequence(states, observations)
            count = size(states) - 1
            states, observations, successors = (
                take(states, slice(0, count)),
                take(observations, slice(0, count)),
                take(states, slice(1, None)),
            )
        else:
            states, observations, successors = as_triples(states, observations, successors)
        kernel_states.check(states, "states")
        kernel_observations.check(observations, "observations")
        transition = transition or ("two-inverse" if form == "a" else "shift")
        truncation = as_share(truncation, "truncation")
        _check_options(form, transition, clip, truncation)

        state_features = fit_features(kernel_states, states, landmarks_states)
        observation_features = fit_features(kernel_observations, observations, landmarks_observations)
        dtype = state_features.codes.dtype
        epsilon = as_regularizer(regularizer, "regularizer", dtype)
        delta = as_regularizer(posterior_regularizer, "posterior_regularizer", dtype)
        ridge = epsilon
        if observation_regularizer is not None:
            ridge = as_regularizer(observation_regularizer, "observation_regularizer", dtype)
        return KernelBayesFilter(
            states=state_features,
            observations=observation_features,
            successors=successors,
            successor_codes=state_features.encode(successors),
            state_factor=state_features.ridge(epsilon),
            observation_factor=observation_features.ridge(ridge),
            regularizer=epsilon,
            posterior_regularizer=delta,
            truncation=truncation.astype(dtype),
            recovery=recovery,
            form=form,
            transition=transition,
            clip=clip or form == "importance",
            normalise=normalise,
        )

    def init(self, prior: Embedding | None = None) -> KernelBayesState:
        """Prior of the first observation, from an embedding over states; by default the training states' marginal."""
        if prior is None:
            uniform = jnp.full(self.states.size, 1 / self.states.size, self.successor_codes.dtype)
            return KernelBayesState(uniform, uniform)
        weights = project_prior(self.states, prior, self.regularizer)
        if self.form != "a":
            return KernelBayesState(weights, weights)
        shifted = project_prior(self.states.rebase(self.successors), prior, self.regularizer)
        return KernelBayesState(weights, shifted)

    def init_from_observation(self, observation: Point) -> tuple[KernelBayesState, FilterStep]:
        r"""Belief $(K + n \varepsilon I)^{-1} k(O, o)$ of a first observation without prior (F11 eq 10), and the next state."""
        codes, _ = encode(self.observations, observation, "observation")
        own = self.observations.ridge_weights(self.observation_factor, codes)[0]
        values = self.observations.expand(codes)[0]
        step = FilterStep(own, own, safe_divide(jnp.dot(own, values), jnp.sum(own)), jnp.asarray(False))
        return self._advance(own), step

    def update(
        self, state: KernelBayesState, code: Float[Array, " r"], observed: Bool[Array, ""]
    ) -> tuple[KernelBayesState, FilterStep]:
        """One step for an encoded observation: clean the prior, apply Bayes' rule, predict."""
        prior = self._clean(state.weights)
        values = self.observations.expand(code[None])[0]
        prior, restarted = self._recover(prior, code, values, observed)
        if self.form == "importance":
            belief = self.observations.importance_posterior(prior, code[None], self.posterior_regularizer)[0]
        elif self.form == "b":
            belief = self.observations.posterior(prior, code[None], self.posterior_regularizer)[0][0]
        else:
            inner = self.observations.posterior(prior, code[None], self.posterior_regularizer)[1]
            regressed = self.states.ridge_values(self.state_factor, inner, self.successor_codes)[0]
            belief = state.shifted * regressed
        belief = jnp.where(observed, belief, state.shifted if self.form == "a" else prior)
        evidence = safe_divide(jnp.dot(prior, values), jnp.sum(prior))
        step = FilterStep(belief, prior, jnp.where(observed, evidence, jnp.nan), restarted)
        return self._advance(belief), step

    def predict(self, weights: Float[Array, "*batch n"], steps: int = 1) -> Embedding:
        """Embedding of the state `steps` transitions after a belief: the filter's steps without observations.

        **Arguments:** `weights` `[..., n]` of a belief; `steps` >= 1 (static). **Returns:** an `Embedding` on the
        successors, weights `[..., n]`. Cost O(steps n^2) a belief exact, O(steps n r) with landmarks.
        """
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"`steps` must be an integer >= 1, got {steps!r}.")
        shifted = self._shift(weights)
        for _ in range(steps - 1):
            if self.form == "a":
                shifted = self._shift(shifted)
            else:
                shifted = self._shift(self._clean(self._regress(matmul(shifted, self.successor_codes))))
        return Embedding(self.states.kernel, self.successors, shifted)

    def _clean(self, weights: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        return clean_weights(weights, clip=self.clip, truncation=self.truncation, normalise=self.normalise)

    def _recover(self, prior, code, values, observed):
        if self.recovery is None:
            return prior, jnp.asarray(False)
        own = self.observations.ridge_weights(self.observation_factor, code[None])[0]
        own = clean_weights(own, clip=True, truncation=self.truncation, normalise=True)
        mass = jnp.sum(prior)
        threshold = self.recovery.restart_below.astype(prior.dtype) * jnp.dot(own, values)
        restarted = observed & (safe_divide(jnp.dot(prior, values), mass) < threshold)
        marginal, frame = (
            jnp.where(observed, share.astype(prior.dtype), 0)
            for share in (self.recovery.marginal_share, self.recovery.observation_share)
        )
        mixed = (1 - marginal - frame) * prior + mass * (marginal / prior.shape[0] + frame * own)
        return jnp.where(restarted, mass * own, mixed), restarted

    def _shift(self, belief: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """Weights on the successors, of the state after a belief."""
        if self.form == "a":
            return self._regress(matmul(belief, self.successor_codes))
        if self.transition == "shift":
            return belief
        return self._regress(matmul(belief, self.states.codes))

    def _regress(self, codes: Float[Array, "*batch r"]) -> Float[Array, "*batch n"]:
        weights = self.states.ridge_weights(self.state_factor, codes.reshape(-1, codes.shape[-1]))
        return weights.reshape(*codes.shape[:-1], weights.shape[-1])

    def _advance(self, belief: Float[Array, " n"]) -> KernelBayesState:
        shifted = self._shift(belief)
        return KernelBayesState(self._regress(matmul(shifted, self.successor_codes)), shifted)


def _check_options(form: str, transition: str, clip: bool, truncation: Float[Array, ""]) -> None:
    if form not in ("a", "b", "importance"):
        raise ValueError(f"`form` must be 'a', 'b' or 'importance', got {form!r}.")
    if transition not in ("shift", "two-inverse"):
        raise ValueError(f"`transition` must be 'shift' or 'two-inverse', got {transition!r}.")
    if form == "a" and transition == "shift":
        raise ValueError(
            "Form (a) keeps its belief on the successors, which have no successors to shift to: use 'two-inverse'."
        )
    if not clip and form != "importance" and is_concrete(truncation) and float(truncation) > 0:
        raise ValueError("`truncation` acts on non-negative weights; with `clip=False` set `truncation=0`.")
