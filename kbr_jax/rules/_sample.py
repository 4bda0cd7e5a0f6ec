"""What Bayes' rule needs of a training sample of x: a belief is an array of weights on it."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._numerics import AbstractFactor, matmul
from .._typing import Array, Bool, Float, Int, Points
from ..embedding import Embedding, mean
from ..features import AbstractFeatures
from ._clipping import Clipping, clip_and_normalize
from ._model import AbstractEmission


class AbstractSampleEmission(AbstractEmission):
    """A likelihood P(y | x) on a training sample of x, see `AbstractEmission`."""

    regularizer: eqx.AbstractVar[Float[Array, ""]]
    factor: eqx.AbstractVar[AbstractFactor]

    @property
    def x(self) -> Points:
        """Training points of x."""
        return self.features_x.points

    def weights(self, coordinates: Float[Array, "*b p"]) -> Float[Array, "*b n"]:
        flat = coordinates.reshape(-1, coordinates.shape[-1])
        weights = self.features_x.ridge_weights(self.factor, flat)
        return weights.reshape(*coordinates.shape[:-1], weights.shape[-1])

    def regression_on_x(self) -> tuple[AbstractFeatures, Float[Array, ""], AbstractFactor]:
        return self.features_x, self.regularizer, self.factor

    def marginal(self) -> Float[Array, " n"]:
        return self.features_x.uniform

    def clip_and_normalize(
        self, weights: Float[Array, "*b n"], clipping: Clipping
    ) -> Float[Array, "*b n"]:
        return clip_and_normalize(weights, clipping, mask=self.features_x.mask)

    def spread(
        self, belief: Float[Array, " k"], index: Int[Array, " k"], like: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        return jnp.zeros_like(like).at[index].set(belief)

    def unchanged(self, weights: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        return weights

    def is_zero(self, belief: Float[Array, " n"]) -> Bool[Array, ""]:
        return jnp.all(belief == 0)

    def as_weights(self, belief: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        return belief

    def embed_x(self, belief: Float[Array, "*b n"]) -> Embedding:
        return Embedding(self.features_x.kernel, self.x, belief)

    def mean_x(self, belief: Float[Array, "*b n"]) -> Any:
        return mean(self.embed_x(belief))

    def readout(self, features: AbstractFeatures) -> Float[Array, "n r"]:
        return features.coordinates(self.x)

    def readout_values(self, points: Points) -> Float[Array, "n a"]:
        return self.features_x.kernel.gram(self.x, points)

    def readout_successors(self, successors: Points | None) -> Float[Array, "n p"]:
        if successors is None:
            raise ValueError("A shift needs the successors of the training states.")
        return self.features_x.coordinates(successors)

    def read(self, belief: Float[Array, "*b n"], readout: Float[Array, "n s"]) -> Array:
        return matmul(belief, readout)
