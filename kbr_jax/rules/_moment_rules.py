r"""The rules of probability on moments of the sample instead of the sample: cost and memory without n.

The formulas are those of `_rules`, with every sum over training pairs replaced by a contraction of `Moments`. Embeddings
come out on the landmark points, where they have the same values in the span of the landmarks as the embeddings
on the training points have.
"""

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_regularizer, check_alike
from .._numerics import PSDFactor, matmul, psd_factor, psd_solve, symmetric_resolvent
from .._typing import Array, ArrayLike, Float, Point, Points
from ..embedding import Embedding, JointEmbedding, guarded_sum
from ..features import AbstractFeatureMap, LandmarkFeatures, checked_coordinates
from ._moments import MomentMaps, Moments, contract, kept
from ._prior import check_truncation, clipped


class MomentModel(eqx.Module):
    r"""A conditional embedding of y given x as moments of its training pairs. Build it with `fit_moments`.

    `sum_rule`, `chain_rule`, `bayes_rule` and `condition` take it in place of a `ConditionalEmbedding`, and return embeddings on the
    landmarks of x and y.
    """

    moments: Moments
    regularizer: Float[Array, ""]
    factor: PSDFactor
    centre_codes: Float[Array, "K p"] | None

    @property
    def maps(self) -> MomentMaps:
        """The feature maps and the basis."""
        return self.moments.maps

    def coefficients(self, coordinates: Float[Array, "*b p"]) -> Float[Array, "*b K"]:
        r"""Coefficients c of the prior weights $w_i = b(x_i)^\top c$ for an embedding over x with the given code.

        The ridge regression gives the function $w(x) = \phi(x)^\top (C + n \lambda I)^{-1} m$; soft cells interpolate it
        between their centers, where it is evaluated.
        """
        flat = self.factor.solve(coordinates.reshape(-1, coordinates.shape[-1]).T).T
        if self.centre_codes is not None:
            flat = matmul(flat, self.centre_codes.T)
        return flat.reshape(*coordinates.shape[:-1], flat.shape[-1])

    def clean(
        self,
        coefficients: Float[Array, "*b K"],
        *,
        clip: bool,
        truncation: ArrayLike,
        normalize: bool,
    ) -> Float[Array, "*b K"]:
        """Coefficients clipped, truncated, and divided by the sum of the weights they stand for, as in `clean_weights`."""
        check_truncation(clip, truncation)
        # A coefficient is the weight of each point of a cell: uniform is 1 / n.
        cleaned = clipped(coefficients, truncation, self.moments.uniform) if clip else coefficients
        return (
            cleaned / guarded_sum(cleaned * self.moments.mass)[..., None] if normalize else cleaned
        )


def fit_moments(moments: Moments, *, regularizer: ArrayLike) -> MomentModel:
    r"""Conditional embedding of y given x from the moments of training pairs: `fit_conditional` without the sample.

    **Arguments:** `moments` from `collect_moments` or `collect_chunks`; `regularizer`: lambda > 0 of $(C + n \lambda I)^{-1}$ with
    $C = \sum \phi \phi^\top$. **Returns:** a `MomentModel`. Cost O(p^3). **Raises:** `ValueError` for a regularizer that is not
    positive.
    """
    maps = moments.maps
    regularizer = as_regularizer(regularizer, "regularizer", moments.covariance.dtype)
    factor = psd_factor(moments.covariance, moments.count * regularizer)
    centers = None if maps.cells is None else maps.x.coordinates(maps.cells.centers.points)
    return MomentModel(moments, regularizer, factor, centers)


def condition(model: MomentModel, x: Point | Points) -> Embedding:
    """Embedding of P(Y | X = x) on the landmarks of y; see `kbr_jax.condition`."""
    coordinates, single = checked_coordinates(model.maps.x, x, "x")
    weights = _weights_of_y(model, model.coefficients(coordinates))
    return Embedding(model.maps.y.kernel, model.maps.y.points, weights[0] if single else weights)


def sum_rule(model: MomentModel, prior: Embedding, form: str) -> Embedding | JointEmbedding:
    """Kernel sum rule on the landmarks of y; see `kbr_jax.sum_rule`."""
    maps, coefficients = model.maps, model.coefficients(prior_code(model, prior))
    if form == "a":
        return Embedding(maps.y.kernel, maps.y.points, _weights_of_y(model, coefficients))
    weights = _both_sides(maps.y, maps.y, model.moments.operator(coefficients))
    return JointEmbedding(
        maps.y.kernel, maps.y.kernel, maps.y.points, maps.y.points, weights, False
    )


def chain_rule(model: MomentModel, prior: Embedding, form: str) -> JointEmbedding:
    """Kernel chain rule on the landmarks of x and y; see `kbr_jax.chain_rule`."""
    maps, coordinates = model.maps, _codes(model, prior)
    if form == "b":
        coefficients = model.coefficients(matmul(prior.weights, coordinates))
        joint = jnp.swapaxes(
            _weighted(kept(model.moments.embedding, "embedding"), coefficients)[..., :-1, :], -1, -2
        )
    else:
        second = matmul(coordinates.T * prior.weights[..., None, :], coordinates)
        joint = matmul(second, model.factor.solve(model.moments.pairs))
    weights = _both_sides(maps.x, maps.y, joint)
    return JointEmbedding(
        maps.x.kernel, maps.y.kernel, maps.x.points, maps.y.points, weights, False
    )


def bayes_rule(
    model: MomentModel,
    prior: Embedding,
    y: Point | Points,
    *,
    regularizer: ArrayLike,
    form: str,
    clip: bool,
    truncation: ArrayLike,
    normalize: bool,
) -> Embedding:
    """Kernel Bayes' rule on the landmarks of x (form (a): on the prior's points); see `kbr_jax.bayes_rule`."""
    check_signs(model.maps, clip, form)
    coordinates, single = checked_coordinates(model.maps.y, y, "y")
    coordinates = coordinates.astype(model.factor.matrix.dtype)
    delta = as_regularizer(regularizer, "regularizer", coordinates.dtype)
    coefficients = model.coefficients(prior_code(model, prior))
    coefficients = model.clean(coefficients, clip=clip, truncation=truncation, normalize=normalize)
    update = posterior(
        model.moments.operator(coefficients), coordinates, delta, form == "importance"
    )
    if form == "a":
        values = matmul(
            matmul(update, model.factor.solve(model.moments.pairs).T), _codes(model, prior).T
        )
        weights, points = prior.weights * values, prior.points
    else:
        update = jnp.concatenate([update, jnp.zeros_like(update[:, :1])], axis=1)
        code = contract(kept(model.moments.embedding, "embedding"), coefficients[None], update)
        weights, points = on_landmarks(model.maps.x, code), model.maps.x.points
    return Embedding(model.maps.x.kernel, points, weights[0] if single else weights)


def posterior(
    operator: Float[Array, "q q"],
    coordinates: Float[Array, "b q"],
    delta: Float[Array, ""],
    importance: bool,
) -> Float[Array, "b q"]:
    r"""The vector u of posterior weights $\beta_i = w_i \psi(y_i)^\top u$, for $A = \sum_i w_i \psi_i \psi_i^\top$ and each code of y:
    $A (A^2 + \delta I)^{-1} \psi(y)$, or $(A + \delta I)^{-1} \psi(y)$ for importance weights.
    """
    return (
        psd_solve(operator, coordinates.T, delta).T
        if importance
        else symmetric_resolvent(operator, delta, coordinates.T).T
    )


def prior_code(model: MomentModel, prior: Embedding) -> Float[Array, "*b p"]:
    """Code of a prior over x."""
    return matmul(prior.weights, _codes(model, prior))


def check_signs(maps: MomentMaps, clip: bool, form: str) -> None:
    """Only a basis that is non-negative can carry weights that are."""
    if maps.cells is None and (clip or form == "importance"):
        raise ValueError(
            "Plain moments never see single weights, so they cannot clip, truncate or importance-weight them: pass "
            "`clip=False` and form 'a' or 'b', or collect moments with `cells` (see `soft_partition`)."
        )


def _codes(model: MomentModel, prior: Embedding) -> Float[Array, "m p"]:
    check_alike(prior.points, "prior.points", model.maps.x.points, "landmarks_x")
    model.maps.x.kernel.check(prior.points, "prior.points")
    return model.maps.x.coordinates(prior.points)


def _weighted(
    tensor: Float[Array, "K *s"], coefficients: Float[Array, "*b K"]
) -> Float[Array, "..."]:
    flat = matmul(coefficients, tensor.reshape(tensor.shape[0], -1))
    return flat.reshape(*coefficients.shape[:-1], *tensor.shape[1:])


def _weights_of_y(model: MomentModel, coefficients: Float[Array, "*b K"]) -> Float[Array, "*b q"]:
    return on_landmarks(model.maps.y, matmul(coefficients, model.moments.readout[:, :-1, -1]))


def _both_sides(
    x: AbstractFeatureMap, y: AbstractFeatureMap, code: Float[Array, "*b p q"]
) -> Float[Array, "*b p q"]:
    return jnp.swapaxes(on_landmarks(x, jnp.swapaxes(on_landmarks(y, code), -1, -2)), -1, -2)


def on_landmarks(
    features: AbstractFeatureMap, coordinates: Float[Array, "*b r"]
) -> Float[Array, "*b r"]:
    """Weights on the landmark points of the embeddings with these coordinates; a `ValueError` for other features."""
    if not isinstance(features, LandmarkFeatures):
        raise ValueError(
            f"{type(features).__name__} have no points to put an embedding on: use landmarks for this variable, or read "
            "beliefs by `expectation` and `weights`."
        )
    return features.on_landmarks(coordinates)
