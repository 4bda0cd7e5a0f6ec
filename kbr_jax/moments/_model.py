r"""A conditional embedding on moments of the sample: cost and memory without n.

The formulas are those of the sample, with every sum over training pairs replaced by a contraction
of `Moments`. Embeddings come out on the landmarks. In the span of the landmarks they have the
values of the embeddings on the training points.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_points, as_regularizer, check_alike, check_same_size, like
from .._numerics import matmul, safe_divide
from .._solves import PSDFactor, psd_factor, psd_solve, symmetric_resolvent
from .._trees import same
from .._typing import Array, ArrayLike, Bool, Float, Int, Points
from ..embedding import Embedding, JointEmbedding, guarded_sum
from ..features import AbstractFeatureMap, AbstractFeatures, LandmarkFeatures
from ..kernels import AbstractKernel
from ..rules import AbstractConditional, Clipping, clipped, prior_coordinates
from ._moments import MomentMaps, Moments, contract, kept


class MomentWeights(eqx.Module):
    r"""Posterior weights in factors, $\beta(x, y) = (b(x)^\top c) (\tilde\psi(y)^\top u)$.

    `prior` is c `[..., K]`, `update` is u `[..., q + 1]`. See `moment_weights`.
    """

    prior: Float[Array, "*b K"]
    update: Float[Array, "*b q1"]


class MomentModel(AbstractConditional):
    """A conditional embedding of y given x as moments of its pairs. See `fit_conditional`.

    All rules and filters take it in place of a `ConditionalEmbedding`. Beliefs are `MomentWeights`.
    """

    moments: Moments
    regularizer: Float[Array, ""]
    factor: PSDFactor
    center_coordinates: Float[Array, "K p"] | None

    @property
    def maps(self) -> MomentMaps:
        """The feature maps and the basis."""
        return self.moments.maps

    @property
    def features_x(self) -> AbstractFeatureMap:
        """Feature map of x, on its landmarks."""
        return self.maps.x

    @property
    def features_y(self) -> AbstractFeatureMap:
        """Feature map of y, on its landmarks."""
        return self.maps.y

    # What the rules need, see `AbstractEmission` and `AbstractConditional`. Prior weights are
    # coefficients of the basis, a belief is `MomentWeights`.

    def weights(self, coordinates: Float[Array, "*b p"]) -> Float[Array, "*b K"]:
        flat = self.factor.solve(coordinates.reshape(-1, coordinates.shape[-1]).T).T
        if self.center_coordinates is not None:
            # Cells interpolate the regression between their centers.
            flat = matmul(flat, self.center_coordinates.T)
        else:
            flat = jnp.pad(flat, ((0, 0), (0, 1)))
        return flat.reshape(*coordinates.shape[:-1], flat.shape[-1])

    def marginal(self) -> Float[Array, " K"]:
        return self.moments.uniform

    def sample(self) -> tuple[AbstractFeatures, AbstractFeatures]:
        raise ValueError(
            "This needs the training pairs, which moments do not hold. For a loss use "
            "`regression_loss` on held-out pairs, else `kbr_jax.fit_conditional` with landmarks."
        )

    def mass(self, weights: Float[Array, "*b K"]) -> Float[Array, "*b K"]:
        return weights * self.moments.mass

    def effective_size(self, weights: Float[Array, "*b K"]) -> Float[Array, "*b"]:
        if self.maps.cells is None:
            return jnp.full(weights.shape[:-1], jnp.nan, weights.dtype)
        return super().effective_size(weights)

    def clip_and_normalize(
        self, weights: Float[Array, "*b K"], clipping: Clipping
    ) -> Float[Array, "*b K"]:
        if clipping.clip:
            if self.maps.cells is None:
                raise ValueError(
                    "Plain moments never see single weights and cannot clip them: pass "
                    "`clipping=Clipping(clip=False, truncation=0.0)`, or collect moments with "
                    "`cells` (see `soft_partition`)."
                )
            weights = clipped(weights, clipping.truncation, self.moments.uniform)
        if clipping.normalize:
            weights = weights / guarded_sum(self.mass(weights))[..., None]
        return weights

    def likelihood(self, coordinates: Float[Array, " q"]) -> Float[Array, " K"]:
        return matmul(self.moments.readout[:, :-1, -1], coordinates)

    def ratio(
        self,
        weights: Float[Array, " K"],
        coordinates: Float[Array, "b q"],
        regularizer: Float[Array, ""],
        importance: bool,
    ) -> Float[Array, "b q"]:
        operator = self.moments.operator(weights)
        if importance:
            return psd_solve(operator, coordinates.T, regularizer).T
        return symmetric_resolvent(operator, regularizer, coordinates.T).T

    def regress(
        self, ratio: Float[Array, "b q"], adjoint: Callable[[Array], Array], positive: bool = False
    ) -> Float[Array, "b m"]:
        values = adjoint(matmul(ratio, self.factor.solve(self.moments.pairs).T))
        return jnp.maximum(values, 0) if positive else values

    def posterior(
        self,
        weights: Float[Array, " K"],
        coordinates: Float[Array, "b q"],
        regularizer: Float[Array, ""],
        importance: bool,
    ) -> MomentWeights:
        update = self.ratio(weights, coordinates, regularizer, importance)
        prior = jnp.broadcast_to(weights, (update.shape[0], weights.shape[0]))
        return MomentWeights(prior, jnp.pad(update, ((0, 0), (0, 1))))

    def restrict(
        self, index: Int[Array, " k"], coordinates: Float[Array, "b q"]
    ) -> tuple["MomentModel", Float[Array, "b q"]]:
        rows = self.moments.likelihood[index]
        return eqx.tree_at(lambda m: m.moments.likelihood, self, rows), coordinates

    def spread(
        self, belief: MomentWeights, index: Int[Array, " k"], like: Float[Array, " K"]
    ) -> MomentWeights:
        return MomentWeights(jnp.zeros_like(like).at[index].set(belief.prior), belief.update)

    def unchanged(self, weights: Float[Array, "*b K"]) -> MomentWeights:
        update = jnp.zeros((*weights.shape[:-1], self.moments.readout.shape[1]), weights.dtype)
        return MomentWeights(weights, update.at[..., -1].set(1))

    def is_zero(self, belief: MomentWeights) -> Bool[Array, ""]:
        # The product of both factors may be 0 where neither is.
        return jnp.all(self._cell_weights(belief) == 0)

    def as_weights(self, belief: MomentWeights) -> Float[Array, "*b K"]:
        if self.maps.cells is None:
            raise ValueError("Only moments with `cells` can use a belief as a prior.")
        return safe_divide(self._cell_weights(belief), self.moments.mass)

    def embed_x(self, belief: MomentWeights) -> Embedding:
        code = self.read(belief, kept(self.moments.embedding, "embedding"))
        return Embedding(self.maps.x.kernel, self.maps.x.points, on_landmarks(self.maps.x, code))

    def embed_belief(self, belief: MomentWeights) -> Embedding:
        if self.maps.cells is None:
            return self.embed_x(belief)
        points = self.maps.cells.centers.points
        return Embedding(self.maps.x.kernel, points, self._cell_weights(belief))

    def mean_x(self, belief: MomentWeights) -> Float[Array, "*b e"]:
        values = self.read(belief, self.moments.readout[..., :-1])
        cells = self._cell_weights(belief)
        mass = guarded_sum(cells)
        known = mass == jnp.sum(cells, axis=-1)  # else NaN, as `kbr_jax.mean`
        mean = values / mass[..., None] + self.maps.origin
        return jnp.where(known[..., None], mean, jnp.nan)

    def total(self, belief: MomentWeights) -> Float[Array, "*b"]:
        """The mass of a belief."""
        return jnp.sum(self._cell_weights(belief), axis=-1)

    def _cell_weights(self, belief: MomentWeights) -> Float[Array, "*b K"]:
        """Sum of the belief's weights over each basis function."""
        return belief.prior * matmul(belief.update, self.moments.readout[..., -1].T)

    def embed_y(self, weights: Float[Array, "*b K"]) -> Embedding:
        code = matmul(weights, self.moments.readout[:, :-1, -1])
        return Embedding(self.maps.y.kernel, self.maps.y.points, on_landmarks(self.maps.y, code))

    def embed_pairs(self, weights: Float[Array, "*b K"]) -> JointEmbedding:
        tensor = kept(self.moments.embedding, "embedding")[:, :-1]
        code = matmul(weights, tensor.reshape(tensor.shape[0], -1))
        code = code.reshape(*weights.shape[:-1], *tensor.shape[1:])
        return self._embed_joint(jnp.swapaxes(code, -1, -2))

    def embed_prior_and_y(self, prior: Embedding) -> JointEmbedding:
        coordinates = prior_coordinates(self.maps.x, prior)
        weights = prior.weights.astype(coordinates.dtype)
        second = matmul(coordinates.T * weights[..., None, :], coordinates)
        return self._embed_joint(matmul(second, self.factor.solve(self.moments.pairs)))

    def _embed_joint(self, code: Float[Array, "*b p q"]) -> JointEmbedding:
        x, y = self.maps.x, self.maps.y
        sides = jnp.swapaxes(on_landmarks(y, code), -1, -2)
        weights = jnp.swapaxes(on_landmarks(x, sides), -1, -2)
        return JointEmbedding(x.kernel, y.kernel, x.points, y.points, weights, False)

    def readout(self, features: AbstractFeatures) -> Float[Array, "K q1 p"]:
        _check_same(features, self.maps.x, "x")
        return kept(self.moments.embedding, "embedding")

    def readout_values(self, kernel: AbstractKernel, points: Points) -> Float[Array, "K q1 a"]:
        if not same(kernel, self.maps.x.kernel):
            raise ValueError(
                "Moments know beliefs in one kernel: that of the states of `transition` must be "
                "the kernel of x of `emission`."
            )
        at = self.maps.x.coordinates(points)
        return matmul(kept(self.moments.embedding, "embedding"), at.T)

    def readout_successors(self, successors: Points | None) -> Float[Array, "K q1 p"]:
        return kept(self.moments.transition, "transition")

    def outputs(self, features: AbstractFeatures) -> Float[Array, "K q"]:
        _check_same(features, self.maps.y, "y")
        return self.moments.readout[:, :-1, -1]

    def read(self, belief: MomentWeights, readout: Float[Array, "K q1 s"]) -> Array:
        return contract(readout, belief.prior, belief.update)

    def observation_factor(self, regularizer: Float[Array, ""]) -> PSDFactor:
        moments = self.moments
        return psd_factor(moments.operator(moments.constant), moments.count * regularizer)

    def from_observation(self, factor: PSDFactor, coordinates: Float[Array, " q"]) -> MomentWeights:
        return MomentWeights(self.moments.constant, jnp.pad(factor.solve(coordinates), (0, 1)))


def fit_conditional(moments: Moments, *, regularizer: ArrayLike) -> MomentModel:
    r"""Fit a conditional embedding of y given x to moments of training pairs.

    `kbr_jax.fit_conditional` without the sample.

    **Arguments:** `moments` from `collect_moments`; `regularizer`: lambda > 0 of
    $(C + n \lambda I)^{-1}$ with $C = \sum \phi \phi^\top$.

    **Returns:** a `MomentModel`. Cost O(p^3). **Raises:** `ValueError` for a regularizer that is
    not positive.
    """
    maps = moments.maps
    regularizer = as_regularizer(regularizer, "regularizer", moments.covariance.dtype)
    factor = psd_factor(moments.covariance, moments.count * regularizer, invert=True)
    centers = None if maps.cells is None else maps.x.coordinates(maps.cells.centers.points)
    return MomentModel(moments, regularizer, factor, centers)  # pyright: ignore[reportCallIssue]


def moment_weights(
    model: MomentModel, belief: MomentWeights, x: Points, y: Points
) -> Float[Array, "*b m"]:
    r"""Return a belief's weights on m training pairs,
    $\beta_i = (b(x_i)^\top c)(\tilde\psi(y_i)^\top u)$.

    **Arguments:** `x`, `y` `[m, ...]`. **Returns:** `[..., m]`. Cost O(m (K d + q d + K + q)).
    **Raises:** `ValueError` for samples of different sizes or of other kinds than the landmarks.
    """
    maps = model.maps
    x, y = like(as_points(x, "x"), maps.x.points), like(as_points(y, "y"), maps.y.points)
    check_same_size(x, "x", y, "y")
    for points, name, features in ((x, "x", maps.x), (y, "y", maps.y)):
        check_alike(points, name, features.points, f"landmarks_{name}")
        features.kernel.check(points, name)
    basis, psi = maps.basis(maps.x.coordinates(x), x), maps.y.coordinates(y)
    psi = jnp.concatenate([psi, jnp.ones_like(psi[:, :1])], axis=1)
    return matmul(belief.prior, basis.T) * matmul(belief.update, psi.T)


def on_landmarks(features: AbstractFeatureMap, code: Float[Array, "*b r"]) -> Float[Array, "*b r"]:
    """Weights on the landmarks of embeddings with these coordinates; an error without landmarks."""
    if not isinstance(features, LandmarkFeatures):
        raise ValueError(
            f"{type(features).__name__} have no points to put an embedding on: use landmarks for "
            "this variable, or read beliefs by `state_mean` and `moment_weights`."
        )
    return features.on_landmarks(code)


def _check_same(features: AbstractFeatures, own: AbstractFeatures, name: str) -> None:
    """Two models can exchange coordinates only in one feature map."""
    first, second = (
        (f.kernel, f.landmarks if isinstance(f, LandmarkFeatures) else f.points)
        for f in (features, own)
    )
    if type(features) is not type(own) or not same(first, second):
        raise ValueError(
            f"Two models exchange coordinates of {name} and need one kernel and the same landmarks "
            "for it: states and successors share one feature map."
        )
