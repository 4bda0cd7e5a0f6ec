"""A transition from weights on fixed points, as `smooth` uses it."""

import abc
from typing import Any

import equinox as eqx

from .._numerics import matmul
from .._typing import Array, Float
from ..rules import AbstractConditional


class AbstractSmoother(eqx.Module):
    """A transition from weights on fixed points, as a likelihood of the next state."""

    model: eqx.AbstractVar[AbstractConditional]

    @abc.abstractmethod
    def forward(self, weights: Float[Array, "*b m"], control: Any) -> Float[Array, "*b r"]:
        """Coordinates of weights on the points, in the features of the model's x."""

    @abc.abstractmethod
    def adjoint(self, code: Float[Array, "b r"], control: Any) -> Float[Array, "b m"]:
        """Values at the points of functions with these coordinates."""


class PointSmoother(AbstractSmoother):
    """A transition whose points have the coordinates `matrix`, row by row."""

    model: AbstractConditional
    matrix: Float[Array, "m r"]

    def forward(self, weights: Float[Array, "*b m"], control: Any) -> Float[Array, "*b r"]:
        return matmul(weights, self.matrix)

    def adjoint(self, code: Float[Array, "b r"], control: Any) -> Float[Array, "b m"]:
        return matmul(code, self.matrix.T)
