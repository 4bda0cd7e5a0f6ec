"""The approximate filter of Song et al. 2009 (algorithms 1 and 2): one conditional embedding."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .._checks import (
    as_regularizer,
    check_choice,
    in_precision,
    precision_of,
)
from .._numerics import matmul
from .._solves import AbstractFactor
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..embedding import Embedding, mean, normalized
from ..features import AbstractFeatureMap, AbstractFeatures, DenseGram, FeatureChoice, fit_features
from ..kernels import AbstractKernel, DirectSum, KernelLike, kernel_for
from ..rules import (
    ConditionalEmbedding,
    centered_weights,
    observed_coordinates,
    single_prior_weights,
)
from ._base import AbstractFilter, FilterOutput, no_controls, step_output
from ._sequences import as_transitions
from ._smoothers import AbstractSmoother, PointSmoother


class ConcatenatedFeatures(AbstractFeatureMap):
    """The features of two variables side by side; its kernel is the direct sum of theirs."""

    kernel: AbstractKernel
    points: Points
    matrix: Float[Array, "n r"]
    mask: Bool[Array, " n"] | None
    first: AbstractFeatures
    second: AbstractFeatures

    def coordinates(self, points: Points) -> Float[Array, "m r"]:
        parts = self.first.coordinates(points[0]), self.second.coordinates(points[1])
        return jnp.concatenate(parts, axis=-1)


class ConditionalEmbeddingFilter(AbstractFilter):
    r"""The filter of S09, $\mu_{s_{t+1} | h_{t+1}} = T_1 \mu_{s_t | h_t} + T_2 \psi(o_{t+1})$ (eq
    11).

    Fit it with `fit_conditional_embedding_filter`. One conditional embedding of $s_{t+1}$ given
    $(s_t, o_{t+1})$, with concatenated features (kernel K + U), is applied to the last belief and
    the new observation. The belief is a set of weights on the training successors:

    - `"song2009"`: $\beta \leftarrow (H K + H U + n \lambda I)^{-1} H (\tilde G \beta + u)$
      (theorem 9, algorithm 2). Its weights sum to 0: read it by `decode`, not by a mean.
    - `"affine"`: the same regression with its intercept; weights sum to 1.

    The first observation belongs to the state after the first move, as in S09: a `prior` is that of
    the state $s_0$ before it.

    Cost of a step: O(n^2) exact, O(n r) with landmarks. On a linear-Gaussian system its gain tends
    to Q / (Q + R), not to the Kalman gain.
    """

    states: AbstractFeatures
    observations: AbstractFeatures
    joint: AbstractFeatures
    successors: Points
    successor_coordinates: Float[Array, "n r"]
    joint_factor: AbstractFactor
    state_factor: AbstractFactor
    regularizer: Float[Array, ""]
    estimator: str = eqx.field(static=True)

    def init(self, prior: Embedding | None) -> Float[Array, " n"]:
        if prior is None:
            return self.states.uniform.astype(self.states.dtype)
        # The regression of the successors on themselves: weights on them of any embedding.
        features = self.states.at(self.successors)
        factor = features.ridge(self.regularizer)
        model = ConditionalEmbedding(features, features, self.regularizer, factor)
        return single_prior_weights(model, prior)

    def kernels(self) -> tuple[AbstractKernel | None, AbstractKernel | None]:
        return self.observations.kernel, None

    def encode(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        codes, observed, lost = observed_coordinates(
            self.observations, observations, observed, name
        )
        return codes, observed & ~lost

    def encode_controls(self, controls: Points | None, count: int) -> None:
        no_controls(controls)

    def start(self, code: Array, regularizer: Array) -> FilterOutput:
        features = self.observations
        factor = features.ridge(regularizer.astype(features.dtype), centered=True)
        own = centered_weights(features, factor, code[None], "affine")[0]
        # Beyond the reach of the kernel nothing was observed.
        own = jnp.where(jnp.all(code == 0), self.states.uniform.astype(own.dtype), own)
        return step_output(own, own, self._predictive_value(own, code))

    def update(
        self, state: Float[Array, " n"], code: Any, control: None, observed: Bool[Array, ""]
    ) -> tuple[Float[Array, " n"], FilterOutput]:
        predicted = self._transition(state, self.estimator)
        if code is None:
            missing = jnp.asarray(jnp.nan, predicted.dtype)
            return predicted, step_output(predicted, predicted, missing)
        past = matmul(state, self.successor_coordinates)
        dense = isinstance(self.joint, DenseGram)
        joint = past + code if dense else jnp.concatenate([past, code])
        belief = centered_weights(self.joint, self.joint_factor, joint[None], self.estimator)[0]
        belief = jnp.where(observed, belief, predicted)
        # The weights of "song2009" sum to 0; the affine prediction foresees the observation.
        value = self._predictive_value(self._transition(state, "affine"), code)
        # Beyond reach the code is 0, and so is the value. What is missing has none.
        value = jnp.where(observed | jnp.all(code == 0), value, jnp.nan)
        return belief, step_output(belief, predicted, value)

    def advance(self, weights: Float[Array, " n"], control: None) -> Float[Array, " n"]:
        return weights

    def embed(self, weights: Float[Array, "*time n"]) -> Embedding:
        return Embedding(self.states.kernel, self.successors, weights)

    def mean(self, weights: Float[Array, "*time n"]) -> Any:
        return mean(self.embed(weights))

    def smoother(self, points: Points) -> AbstractSmoother:
        features = self.states.at(self.successors)
        factor = self.states.ridge(self.regularizer)
        model = ConditionalEmbedding(self.states, features, self.regularizer, factor)
        return PointSmoother(model, self.states.coordinates(points))

    def _transition(self, weights: Float[Array, " n"], estimator: str) -> Float[Array, " n"]:
        coordinates = matmul(weights, self.successor_coordinates)[None]
        return centered_weights(self.states, self.state_factor, coordinates, estimator)[0]

    def _predictive_value(self, predicted: Float[Array, " n"], code: Float[Array, " r"]) -> Array:
        return matmul(normalized(predicted), self.observations.to_sample(code[None])[0])


def fit_conditional_embedding_filter(
    kernel_states: KernelLike,
    kernel_observations: KernelLike,
    states: Points,
    observations: Points,
    *,
    regularizer: ArrayLike,
    successors: Points | None = None,
    landmarks_states: FeatureChoice = None,
    landmarks_observations: FeatureChoice = None,
    mask: ArrayLike | None = None,
    estimator: Literal["affine", "song2009"] = "affine",
) -> ConditionalEmbeddingFilter:
    r"""Fit the filter of Song et al. 2009 to a training sequence with known states (algorithm 1).

    **Arguments:** `states` `[T, ...]` and `observations` `[T, ...]`, the one at t made in state t.
    Pairs are $(s_t, o_{t+1}) \to s_{t+1}$. For data that is not one sequence pass `successors`
    `[n, ...]`, and `observations` made in the successors. `regularizer`: lambda > 0, in
    `H K + H U + n lambda I`. Landmarks: both exact (None) or both low-rank. `mask` as in
    `fit_filter`.

    Cost O(n^3) exact, O(n r^2) with landmarks. **Raises:** `ValueError` as `fit_filter`.
    """
    check_choice(estimator, "estimator", "affine", "song2009")
    if (landmarks_states is None) != (landmarks_observations is None):
        raise ValueError("Give landmarks for both states and observations, or for neither.")
    data = as_transitions(states, observations, successors, 1, mask)
    states, observations, successors, mask = data
    kernel_states = kernel_for(kernel_states, states, mask)
    kernel_observations = kernel_for(kernel_observations, observations, mask)
    kernel_states.check(states, "states")
    kernel_states.check(successors, "successors")
    kernel_observations.check(observations, "observations")
    first = fit_features(kernel_states, states, landmarks_states, mask)
    second = fit_features(kernel_observations, observations, landmarks_observations, mask)
    dtype = precision_of(states, observations)
    if dtype is not None:
        first, second = in_precision((first, second), dtype)
    ridge = as_regularizer(regularizer, "regularizer", first.dtype)
    if isinstance(first, DenseGram) != isinstance(second, DenseGram):
        raise ValueError(
            "One kernel has finite features and the other has not: give landmarks for both."
        )
    kernel, both = DirectSum((kernel_states, kernel_observations)), (states, observations)
    if isinstance(first, DenseGram) and isinstance(second, DenseGram):
        joint = DenseGram(kernel, both, first.matrix + second.matrix, mask)
    else:
        matrix = jnp.concatenate([first.matrix, second.matrix], axis=-1)
        joint = ConcatenatedFeatures(kernel, both, matrix, mask, first, second)
    return ConditionalEmbeddingFilter(
        states=first,
        observations=second,
        joint=joint,
        successors=successors,
        successor_coordinates=first.coordinates(successors),
        joint_factor=joint.ridge(ridge, centered=True),
        state_factor=first.ridge(ridge, centered=True),
        regularizer=ridge,
        estimator=estimator,
    )
