"""The approximate filter of Song et al. 2009 (algorithms 1 and 2): one conditional embedding of state and observation."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_count, as_regularizer
from .._numerics import AbstractFactor, matmul
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..embedding import Embedding, normalized
from ..features import AbstractFeatureMap, AbstractFeatures, DenseGram, FeatureChoice, fit_features
from ..kernels import AbstractKernel, DirectSum, as_kernel
from ..rules import centred_weights
from ._base import AbstractSampleFilter, FilterStep, as_transitions, project_prior

Form = Literal["affine", "printed"]


class ConcatenatedFeatures(AbstractFeatureMap):
    """The features of two variables side by side; its kernel is the direct sum of theirs."""

    kernel: AbstractKernel
    points: Points
    matrix: Float[Array, "n r"]
    mask: None
    first: AbstractFeatures
    second: AbstractFeatures

    def coordinates(self, points: Points) -> Float[Array, "m r"]:
        return jnp.concatenate(
            [self.first.coordinates(points[0]), self.second.coordinates(points[1])], axis=-1
        )

    def at(self, points: Points) -> "ConcatenatedFeatures":
        first, second = self.first.at(points[0]), self.second.at(points[1])
        return concatenated_features(first, second)


def concatenated_features(
    first: AbstractFeatures, second: AbstractFeatures
) -> ConcatenatedFeatures:
    """Concatenate two feature maps of paired samples."""
    kernel = DirectSum((first.kernel, second.kernel))
    coordinates = jnp.concatenate([first.matrix, second.matrix], axis=-1)
    return ConcatenatedFeatures(
        kernel, (first.points, second.points), coordinates, None, first, second
    )


class ApproximateFilter(AbstractSampleFilter):
    r"""The filter of S09: $\mu_{s_{t+1} | h_{t+1}} = T_1 \mu_{s_t | h_t} + T_2 \psi(o_{t+1})$ (eq 11). Build it with `fit`.

    One conditional embedding of $s_{t+1}$ given $(s_t, o_{t+1})$, with concatenated features (kernel K + U), is applied to
    the last belief and the new observation; the posterior of $s_t$ is not corrected by $o_{t+1}$. The belief is a set of
    weights on the training successors:

    - `form="printed"`: $\beta \leftarrow (H K + H U + n \lambda I)^{-1} H (\tilde G \beta + u)$ (theorem 9, algorithm 2). Its
      weights sum to 0: decode by `decode`, not by a mean;
    - `form="affine"`: the same regression with its intercept; weights sum to 1 (see `condition_centered`).

    Cost of a step: O(n^2) exact, O(n r) with landmarks. On a linear-Gaussian system its gain tends to Q / (Q + R), not to the
    Kalman gain.
    """

    states: AbstractFeatures
    observations: AbstractFeatures
    joint: AbstractFeatures
    successors: Points
    successor_codes: Float[Array, "n r"]
    joint_factor: AbstractFactor
    state_factor: AbstractFactor
    observation_factor: AbstractFactor
    regularizer: Float[Array, ""]
    form: Form = eqx.field(static=True)

    @property
    def support(self) -> Points:
        """The training successors."""
        return self.successors

    @staticmethod
    def fit(
        kernel_states: Any,
        kernel_observations: Any,
        states: Points,
        observations: Points,
        *,
        successors: Points | None = None,
        regularizer: ArrayLike,
        landmarks_states: FeatureChoice = None,
        landmarks_observations: FeatureChoice = None,
        form: Form = "affine",
    ) -> "ApproximateFilter":
        r"""Learn from a training sequence with known states (S09 algorithm 1).

        **Arguments:** `states` `[T, ...]` and `observations` `[T, ...]`, the one at t made in state t; pairs are
        $(s_t, o_{t+1}) \to s_{t+1}$. For data that is not one sequence pass `successors` `[n, ...]`, and `observations` made in
        the successors. `regularizer`: lambda > 0, in `H K + H U + n lambda I`. Landmarks (or `RandomFourier`): both exact (None) or
        both low-rank.

        **Raises:** `ValueError` as `KernelBayesFilter.fit`.
        """
        if form not in ("affine", "printed"):
            raise ValueError(f"`form` must be 'affine' or 'printed', got {form!r}.")
        if (landmarks_states is None) != (landmarks_observations is None):
            raise ValueError("Give landmarks for both states and observations, or for neither.")
        kernel_states, kernel_observations = (
            as_kernel(kernel_states),
            as_kernel(kernel_observations),
        )
        states, observations, successors, _ = as_transitions(
            states, observations, successors, lag=1
        )
        kernel_states.check(states, "states")
        kernel_observations.check(observations, "observations")
        first = fit_features(kernel_states, states, landmarks_states)
        second = fit_features(kernel_observations, observations, landmarks_observations)
        ridge = as_regularizer(regularizer, "regularizer", first.dtype)
        if landmarks_states is None:
            kernel = DirectSum((kernel_states, kernel_observations))
            joint = DenseGram(kernel, (states, observations), first.matrix + second.matrix, None)
        else:
            joint = concatenated_features(first, second)
        return ApproximateFilter(
            states=first,
            observations=second,
            joint=joint,
            successors=successors,
            successor_codes=first.coordinates(successors),
            joint_factor=joint.ridge(ridge, centered=True),
            state_factor=first.ridge(ridge, centered=True),
            observation_factor=second.ridge(ridge, centered=True),
            regularizer=ridge,
            form=form,
        )

    def init(self, prior: Embedding | None = None) -> Float[Array, " n"]:
        """Weights on the successors: uniform, as algorithm 2 starts, or the regression of a given prior onto them."""
        if prior is None:
            return jnp.full(self.states.size, 1 / self.states.size, self.successor_codes.dtype)
        successors = self.states.at(self.successors)
        return project_prior(successors, prior, successors.ridge(self.regularizer))

    def init_from_observation(self, observation: Point) -> tuple[Float[Array, " n"], FilterStep]:
        """Belief of a first observation without a past: the (affine) conditional embedding of the state given it."""
        code = self.coordinates_of(observation)
        own = centred_weights(self.observations, self.observation_factor, code[None], "affine")[0]
        return own, FilterStep(
            own, own, self._evidence(own, code, jnp.asarray(True)), jnp.asarray(False)
        )

    def update(
        self, state: Float[Array, " n"], code: Float[Array, " r"], observed: Bool[Array, ""]
    ) -> tuple[Float[Array, " n"], FilterStep]:
        """One step for an encoded observation (S09 theorem 9); a missing one leaves the transition alone."""
        past = matmul(state, self.successor_codes)
        coordinates = (
            past + code if isinstance(self.joint, DenseGram) else jnp.concatenate([past, code])
        )
        belief = centred_weights(self.joint, self.joint_factor, coordinates[None], self.form)[0]
        predicted = self._transition(state, self.form)
        belief = jnp.where(observed, belief, predicted)
        # The printed weights sum to 0; only the affine prediction has an evidence.
        evidence = self._evidence(self._transition(state, "affine"), code, observed)
        return belief, FilterStep(belief, predicted, evidence, jnp.asarray(False))

    def predict(self, weights: Float[Array, "*batch n"], steps: int = 1) -> Embedding:
        """Embedding of the state `steps` transitions after a belief, by the conditional embedding of $s_{t+1}$ given $s_t$.

        Arguments and result as `KernelBayesFilter.predict`.
        """
        for _ in range(as_count(steps, "steps")):
            weights = self._transition(weights, self.form)
        return Embedding(self.states.kernel, self.successors, weights)

    def _transition(
        self, weights: Float[Array, "*batch n"], form: Form
    ) -> Float[Array, "*batch n"]:
        coordinates = matmul(weights, self.successor_codes)
        flat = centred_weights(
            self.states, self.state_factor, coordinates.reshape(-1, coordinates.shape[-1]), form
        )
        return flat.reshape(weights.shape)

    def _evidence(
        self, predicted: Float[Array, " n"], code: Float[Array, " r"], observed: Bool[Array, ""]
    ):
        values = self.observations.to_sample(code[None])[0]
        return jnp.where(observed, matmul(normalized(predicted), values), jnp.nan)
