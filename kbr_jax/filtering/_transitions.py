"""What moves a belief: a shift to the successors, or a learned transition, with or without inputs.

A transition reads the belief of an emission model and gives the coordinates of the predicted
embedding in the features of that model. `bind_transition` chooses it and computes what it reads.
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import (
    check_alike,
    check_same_size,
    in_precision,
)
from .._numerics import matmul
from .._trees import same
from .._typing import Array, Bool, Float, Points
from ..features import AbstractFeatures, AbstractGram, LandmarkFeatures
from ..kernels import AbstractKernel, TensorProduct
from ..rules import AbstractConditional, AbstractEmission
from ._base import no_controls
from ._sequences import checked_controls
from ._smoothers import AbstractSmoother, PointSmoother


class AbstractTransition(eqx.Module):
    """A transition P(s' | s) or P(s' | (s, u)), bound to an emission model."""

    @abc.abstractmethod
    def forward(
        self, emission: AbstractEmission, belief: Any, control: Any
    ) -> tuple[Float[Array, " p"], Float[Array, " n"] | None]:
        """Coordinates of the predicted embedding, and its weights on successors if it has any."""

    @abc.abstractmethod
    def smoother(self, emission: AbstractEmission, points: Points) -> AbstractSmoother:
        """The transition as a likelihood of the next state, from given points."""

    def kernel_of_controls(self) -> AbstractKernel | None:
        """The kernel of the inputs. None without inputs, and where a known function takes them."""
        return None

    def encode_controls(self, controls: Points | None, count: int) -> Any:
        """What `forward` needs of each of `count` checked inputs."""
        no_controls(controls)


class Shift(AbstractTransition):
    """Each weight moves on to the successor of its state (S13 eq 35)."""

    readout: Array
    learned: AbstractConditional | None

    def forward(self, emission: AbstractEmission, belief: Any, control: Any):
        return emission.read(belief, self.readout), None

    def smoother(self, emission: AbstractEmission, points: Points) -> AbstractSmoother:
        if self.learned is None:
            raise ValueError(
                "A shift moves beliefs forwards only: give the filter a transition too."
            )
        return PointSmoother(self.learned, self.learned.features_x.coordinates(points))


class Learned(AbstractTransition):
    """The sum rule of a fitted transition: weights on its successors, then their coordinates."""

    model: AbstractConditional
    readout: Array
    outputs: Float[Array, "n p"]

    def forward(self, emission: AbstractEmission, belief: Any, control: Any):
        weights = self.model.weights(emission.read(belief, self.readout))
        return matmul(weights, self.outputs), weights

    def smoother(self, emission: AbstractEmission, points: Points) -> AbstractSmoother:
        return PointSmoother(self.model, self.model.features_x.coordinates(points))


class Controlled(AbstractTransition):
    """The same for P(s' | (s, u)) with kernel k_s k_u: an input is a factor for each anchor.

    Anchors are the pairs (s, u) that coordinates stand on: the training pairs or the landmarks.
    """

    model: AbstractConditional
    readout: Array
    outputs: Float[Array, "n p"]

    def forward(self, emission: AbstractEmission, belief: Any, control: Any):
        values = emission.read(belief, self.readout) * control
        weights = self.model.weights(_from_values(self.model.features_x, values))
        return matmul(weights, self.outputs), weights

    def smoother(self, emission: AbstractEmission, points: Points) -> AbstractSmoother:
        kernel, anchors, _ = _anchors(self.model.features_x)
        columns = kernel.kernels[0].gram(points, anchors[0])
        return ControlledSmoother(self.model, columns.astype(self.model.features_x.dtype))

    def kernel_of_controls(self) -> AbstractKernel | None:
        return _anchors(self.model.features_x)[0].kernels[1]

    def encode_controls(self, controls: Points | None, count: int) -> Float[Array, "T a"]:
        kernel, anchors, active = _anchors(self.model.features_x)
        controls = checked_controls(controls, anchors[1], "training controls", count)
        kernel.kernels[1].check(controls, "controls")
        values = kernel.kernels[1].gram(controls, anchors[1])
        values = values.astype(self.model.features_x.dtype)
        return values if active is None else jnp.where(active, values, 0)


class ControlledSmoother(AbstractSmoother):
    """A transition with inputs; `columns` is the kernel of states between points and anchors."""

    model: AbstractConditional
    columns: Float[Array, "m a"]

    def forward(self, weights: Float[Array, "*b m"], control: Any) -> Float[Array, "*b r"]:
        return _from_values(self.model.features_x, matmul(weights, self.columns) * control)

    def adjoint(self, code: Float[Array, "b r"], control: Any) -> Float[Array, "b m"]:
        features = self.model.features_x
        code = features.on_landmarks(code) if isinstance(features, LandmarkFeatures) else code
        return matmul(code * control, self.columns.T)


def bind_transition(
    emission: AbstractEmission,
    transition: AbstractConditional | None,
    shift: bool,
    on_successors: bool,
) -> AbstractTransition:
    """The transition for beliefs on the training states, or on its own successors."""
    states = emission.features_x.points
    if transition is None:
        return Shift(emission.readout_successors(None), None)
    model: AbstractConditional = in_precision(transition, emission.features_x.dtype)
    successors = model.features_y.points
    check_alike(successors, "the successors of `transition`", states, "the states of `emission`")
    if shift:
        _check_same_states(model.features_x.points, states)
        return Shift(emission.readout_successors(successors), model)
    outputs = model.outputs(emission.features_x)
    features = model.features_x
    if jax.tree.structure(features.points) == jax.tree.structure(states):
        check_alike(features.points, "the states of `transition`", states, "those of `emission`")
        if on_successors:
            return Learned(model, features.coordinates(successors), outputs)
        return Learned(model, emission.readout(features), outputs)
    kernel, anchors, _ = _anchors(features)
    check_alike(anchors[0], "the states of `transition`", states, "those of `emission`")
    if on_successors:
        readout = kernel.kernels[0].gram(successors, anchors[0]).astype(features.dtype)
    else:
        readout = emission.readout_values(kernel.kernels[0], anchors[0])
    return Controlled(model, readout, outputs)


def _check_same_states(points: Points, states: Points) -> None:
    """A shift needs the successor of each state of the emission."""
    check_alike(points, "the states of `transition`", states, "those of `emission`")
    check_same_size(points, "the states of `transition`", states, "those of `emission`")
    if not same(points, states):
        raise ValueError(
            "With `shift` the transition must be fitted to the states of `emission`, in their "
            "order: each weight moves on to the successor of its own state."
        )


def _from_values(features: AbstractFeatures, values: Float[Array, "*b a"]) -> Array:
    """Coordinates of embeddings with given values at the anchors."""
    return features.of_values(values) if isinstance(features, LandmarkFeatures) else values


def _anchors(features: AbstractFeatures) -> tuple[TensorProduct, Points, Bool[Array, " a"] | None]:
    """The kernel of pairs (state, input), the pairs that coordinates stand on, which count."""
    kernel = features.kernel
    if not isinstance(kernel, TensorProduct) or len(kernel.kernels) != 2:
        raise ValueError(
            "`transition` is a model of another state than `emission`. With inputs fit it to x = "
            "(states, inputs) with kernel_x = TensorProduct((kernel_states, kernel_inputs))."
        )
    if isinstance(features, LandmarkFeatures):
        return kernel, features.landmarks.points, features.landmarks.active
    if not isinstance(features, AbstractGram):
        raise ValueError(
            "Inputs need exact Gram matrices or landmarks, not random Fourier features."
        )
    return kernel, features.points, features.mask
