"""Half of the model known: a simulator or Gaussian moves of the state, or a likelihood."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_count,
    as_mask,
    as_points,
    as_regularizer,
    check_alike,
    check_finite,
    fill,
    is_concrete,
    like,
    size,
    take,
    without_padding,
)
from .._lapack import cholesky, triangular_solve
from .._numerics import matmul
from .._solves import AbstractFactor
from .._typing import Array, ArrayLike, Float, Int, Points, PRNGKeyArray
from ..features import (
    AbstractFeatures,
    AbstractGram,
    FeatureChoice,
    LandmarkFeatures,
    fit_features,
)
from ..kernels import Gaussian, KernelLike, kernel_for
from ..kernels._base import as_map
from ..rules import AbstractEmission, AbstractSampleEmission, ConditionalEmbedding
from ._base import no_controls
from ._sequences import checked_controls
from ._smoothers import AbstractSmoother
from ._transitions import AbstractTransition


def as_function(function: Callable) -> Any:
    """A function as a pytree of arrays: a plain one holds none."""
    return as_map(function) if isinstance(function, eqx.Module) else jax.tree_util.Partial(function)


class AbstractKnownTransition(eqx.Module):
    """A known transition P(s' | s) or P(s' | s, u)."""

    learned: ClassVar[bool] = False

    controls: eqx.AbstractVar[Points | None]

    @abc.abstractmethod
    def coordinates(
        self, features: AbstractFeatures, points: Points, control: Any
    ) -> Float[Array, "m p"]:
        r"""Coordinates of $E[\phi(s') \mid s, u]$ for each of m points s."""

    def bind(self, emission: AbstractEmission) -> "KnownTransition":
        """The transition for the beliefs of an emission model."""
        points = emission.embed_belief(emission.unchanged(emission.marginal())).points
        if self.controls is not None:
            return KnownTransition(self, points, None)
        return KnownTransition(self, points, self.coordinates(emission.features_x, points, None))


class KnownTransition(AbstractTransition):
    """A known transition from the points that beliefs stand on."""

    known: AbstractKnownTransition
    points: Points
    matrix: Float[Array, "m p"] | None

    def forward(self, emission: AbstractEmission, belief: Any, control: Any):
        weights = emission.embed_belief(belief).weights
        return matmul(weights, self._matrix(emission, control)), None

    def _matrix(self, emission: AbstractEmission, control: Any) -> Float[Array, "m p"]:
        if self.matrix is not None:
            return self.matrix
        return self.known.coordinates(emission.features_x, self.points, control)

    def encode_controls(self, controls: Points | None, count: int) -> Any:
        if self.known.controls is None:
            return no_controls(controls)
        example = jax.tree.map(lambda leaf: leaf[None], self.known.controls)
        return checked_controls(controls, example, "the example of an input", count)

    def smoother(self, emission: AbstractEmission, points: Points) -> AbstractSmoother:
        features, ridge, factor = emission.regression_on_x()
        # The predicted embedding as weights on the training states: the ridge regression of the
        # identity, from the coordinates that the transition gives.
        model = ConditionalEmbedding(features, features, ridge, factor)
        return KnownSmoother(model, self)


class KnownSmoother(AbstractSmoother):
    """A known transition as a likelihood; with inputs its coordinates differ at each step."""

    model: ConditionalEmbedding
    transition: KnownTransition

    def forward(self, weights: Float[Array, "b m"], control: Any) -> Float[Array, "b r"]:
        if self.transition.known.controls is None:
            return matmul(weights, self._matrix(None))
        rows = weights, control
        return jax.lax.map(lambda row: matmul(row[0], self._matrix(row[1])), rows)

    def adjoint(self, code: Float[Array, "b r"], control: Any) -> Float[Array, "b m"]:
        return matmul(code, self._matrix(control).T)

    def _matrix(self, control: Any) -> Float[Array, "m r"]:
        return self.transition._matrix(self.model, control)


class SimulatedTransition(AbstractKnownTransition):
    r"""A transition known as a simulator of the next state: $E[\phi(s') | s]$ by draws.

    The kernel Monte Carlo filter of Kanagawa, Nishiyama, Gretton and Fukumizu (2016) draws the next
    states of a weighted sample. Here each training state has `num_draws` next states, drawn once
    (with inputs: with the same random numbers at each step), so that a filter is deterministic.

    **Arguments:**

    - `simulate(key, state)`, or `simulate(key, state, control)`, returns one next state. Give an
      `equinox.Module` if it has parameters.
    - `key`: randomness; `num_draws` for each training state (static).
    - `controls`: an example of one input, for a simulator that takes inputs; else None.

    Cost of binding O(n num_draws r); with inputs, of each step.
    """

    simulate: Callable
    key: PRNGKeyArray
    controls: Points | None
    num_draws: int = eqx.field(static=True)

    def __init__(
        self,
        simulate: Callable,
        *,
        key: PRNGKeyArray,
        num_draws: int = 10,
        controls: Points | None = None,
    ):
        self.simulate, self.key = as_function(simulate), key
        self.controls = jax.tree.map(jnp.asarray, controls)
        self.num_draws = as_count(num_draws, "num_draws")

    def coordinates(
        self, features: AbstractFeatures, points: Points, control: Any
    ) -> Float[Array, "m p"]:
        inputs = () if self.controls is None else (control,)

        def draw(key):
            keys = jax.random.split(key, size(points))
            following = jax.vmap(lambda s, k: self.simulate(k, s, *inputs))(points, keys)
            check_alike(following, "the simulated states", points, "training states")
            features.kernel.check(following, "the simulated states")
            return features.coordinates(like(following, points))

        draws = jax.lax.map(draw, jax.random.split(self.key, self.num_draws))
        return jnp.mean(draws, axis=0)


class GaussianTransition(AbstractKnownTransition):
    r"""A transition $s' \sim N(f(s), \Sigma)$, in closed form under a Gaussian kernel.

    $$ E[k(p, s') | s] = \sqrt{\frac{|H|}{|H + \Sigma|}}
       \exp\left(-\tfrac12 (p - f(s))^\top (H + \Sigma)^{-1} (p - f(s))\right), \quad
       H = \operatorname{diag}(h^2) $$

    for each training state or landmark p (Nishiyama, Kanagawa, Gretton and Fukumizu 2020). States
    are vectors with a `Gaussian` kernel, exact or with landmarks.

    **Arguments:** `mean(state)` or `mean(state, control)`, f; `covariance` `[d, d]`, or a number or
    `[d]` for a diagonal; `controls`: an example of one input, if f takes inputs.

    Cost O(n r d^2).

    **Raises:** `ValueError` for another kernel, random Fourier features, or states that are not
    vectors.
    """

    mean: Callable
    covariance: Float[Array, "..."]
    controls: Points | None

    def __init__(self, mean: Callable, covariance: ArrayLike, *, controls: Points | None = None):
        self.mean, self.covariance = as_function(mean), _as_covariance(covariance)
        self.controls = jax.tree.map(jnp.asarray, controls)

    def coordinates(
        self, features: AbstractFeatures, points: Points, control: Any
    ) -> Float[Array, "m p"]:
        landmarks = isinstance(features, LandmarkFeatures)
        kernel, anchors = features.kernel, features.points
        anchors = features.landmarks.points if landmarks else anchors
        if (
            not isinstance(kernel, Gaussian)
            or not isinstance(points, jax.Array)
            or points.ndim != 2
        ):
            raise ValueError(
                "A `GaussianTransition` needs states that are vectors with a `Gaussian` kernel; "
                "`SimulatedTransition` takes any."
            )
        if not landmarks and not isinstance(features, AbstractGram):
            raise ValueError(
                "A `GaussianTransition` takes no random Fourier features of the states."
            )
        d = points.shape[1]
        inputs = () if self.controls is None else (control,)
        centers = jax.vmap(lambda s: self.mean(s, *inputs))(points)
        if centers.shape != points.shape:
            raise ValueError(
                f"`mean` must return a state of shape {points.shape[1:]}, got {centers.shape[1:]}."
            )
        centers = centers.astype(points.dtype)
        covariance = self.covariance.astype(points.dtype)
        if covariance.shape not in ((), (d,), (d, d)):
            raise ValueError(
                f"`covariance` must be a number, [{d}] or [{d}, {d}] for states of {d} "
                f"coordinates, got shape {covariance.shape}."
            )
        if covariance.ndim < 2:
            covariance = covariance * jnp.eye(d, dtype=points.dtype)
        scale = jnp.broadcast_to(kernel.bandwidth, (d,)).astype(points.dtype)
        # In units of the bandwidth the kernel is N(0, I) and the moves have covariance S.
        root = cholesky(jnp.eye(d, dtype=points.dtype) + covariance / jnp.outer(scale, scale))
        gaps = (anchors[None, :, :] - centers[:, None, :]) / scale
        flat = triangular_solve(root, gaps.reshape(-1, d).T)
        values = jnp.exp(-jnp.sum(flat**2, axis=0) / 2) / jnp.prod(jnp.diagonal(root))
        values = values.reshape(gaps.shape[:2])
        if landmarks:
            return features.of_values(values)
        return values if features.mask is None else jnp.where(features.mask, values, 0)


def _as_covariance(covariance: ArrayLike) -> Array:
    found = jnp.asarray(covariance)
    square = found.ndim == 2 and found.shape[0] == found.shape[1]
    if is_concrete(found) and (found.ndim < 2 or square):  # other shapes meet the states' check
        values = np.asarray(found)
        if square and not np.allclose(values, values.T, atol=0):
            raise ValueError(f"`covariance` must be symmetric, got {values}.")
        least = np.linalg.eigvalsh(values).min() if square else values.min()
        if not least >= -np.finfo(np.float32).eps * np.abs(values).max():
            raise ValueError(f"`covariance` must not be negative, got {values}.")
    return found


class KnownLikelihood(AbstractSampleEmission):
    r"""An emission model with a known likelihood $p(o | s)$. Build it with `known_likelihood`.

    Bayes' rule is exact on the training states: $\beta_i = w_i p(o | s_i) / \sum_j w_j p(o | s_j)$.
    The predictive value is $\sum_i w_i p(o | s_i) / \sum_i w_i$, in the units of the likelihood.
    """

    features_x: AbstractFeatures
    regularizer: Float[Array, ""]
    factor: AbstractFactor
    log_likelihood: Callable

    def observe(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        observations = as_points(observations, name)
        observed = as_mask(observed, size(observations), "observed")
        first = take(observations, jnp.argmax(observed))
        # Where nothing was observed this is a missing value too, and NaN would reach gradients.
        first = jax.tree.map(lambda a: jnp.where(jnp.any(observed), a, jnp.zeros_like(a)), first)
        filled = fill(observations, observed, first)

        def column(observation):
            values = jax.vmap(lambda s: self.log_likelihood(observation, s))(self.x)
            if values.ndim != 1:
                raise ValueError(
                    f"`log_likelihood(observation, state)` must be a scalar, got "
                    f"{values.shape[1:]}."
                )
            return values.astype(self.features_x.dtype)

        return jax.vmap(column)(filled), observed

    def likelihood(self, coordinates: Float[Array, " n"]) -> Float[Array, " n"]:
        return jnp.exp(coordinates)

    def scaled(
        self, weights: Float[Array, " n"], coordinates: Float[Array, " n"]
    ) -> tuple[Float[Array, " n"], Float[Array, ""]]:
        # By the largest likelihood of a state in question: it underflows nowhere. A density may be
        # infinite.
        coordinates = jnp.minimum(coordinates, jnp.finfo(coordinates.dtype).max)
        peak = jnp.max(jnp.where(weights != 0, coordinates, -jnp.inf))
        peak = jnp.where(jnp.isneginf(peak), 0, peak)
        return jnp.where(weights != 0, coordinates - peak, -jnp.inf), peak

    def posterior(
        self, weights: Float[Array, " n"], coordinates: Float[Array, "b n"], *_: Any
    ) -> Float[Array, "b n"]:
        scaled = jax.vmap(lambda c: self.scaled(weights, c)[0])(coordinates)
        product = weights * jnp.exp(scaled)
        total = jnp.sum(product, axis=-1, keepdims=True)
        return jnp.where(total == 0, 0, product / jnp.where(total == 0, 1, total))

    def restrict(
        self, index: Int[Array, " k"], coordinates: Float[Array, "b n"]
    ) -> tuple["KnownLikelihood", Float[Array, "b k"]]:
        return self, coordinates[:, index]

    def observation_factor(self, regularizer: Float[Array, ""]) -> None:
        return None

    def from_observation(self, factor: None, coordinates: Float[Array, " n"]) -> Array:
        return self.posterior(self.marginal(), coordinates[None])[0]


def known_likelihood(
    kernel: KernelLike,
    states: Points,
    log_likelihood: Callable[[Any, Any], ArrayLike],
    *,
    regularizer: ArrayLike,
    landmarks: FeatureChoice = None,
    mask: ArrayLike | None = None,
) -> KnownLikelihood:
    r"""Make an emission model from a known likelihood and training states.

    **Arguments:** `kernel` and training `states` `[n, ...]`; `log_likelihood(observation, state)`,
    the logarithm of $p(o | s)$ up to a term that does not depend on the state (an `equinox.Module`
    if it has parameters); `regularizer`: epsilon > 0 in `G + n epsilon I`; `landmarks` and `mask`
    as in `fit_conditional`.

    **Returns:** a `KnownLikelihood`, the `emission` of a `KernelBayesFilter`. Cost O(n^3) exact,
    O(n r^2) with landmarks; n likelihoods for each observation.

    **Raises:** `ValueError` as `fit_conditional`.
    """
    states = as_points(states, "states")
    mask = None if mask is None else as_mask(mask, size(states), "mask")
    states = check_finite(without_padding(states, mask), "states")
    kernel = kernel_for(kernel, states, mask)
    kernel.check(states, "states")
    features = fit_features(kernel, states, landmarks, mask)
    regularizer = as_regularizer(regularizer, "regularizer", features.dtype)
    factor = features.ridge(regularizer)
    return KnownLikelihood(
        features_x=features,
        regularizer=regularizer,
        factor=factor,
        log_likelihood=as_function(log_likelihood),
    )
