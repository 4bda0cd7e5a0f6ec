"""What a rule needs of a fitted model of P(Y | X).

A model keeps the sample or its moments. An embedding over X enters by its *coordinates* in the
features of x. The model turns them into the *weights* of a prior on its training pairs. Bayes' rule
gives a *belief*: posterior weights on these. Both are pytrees that only the model reads.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_fraction,
    as_mask,
    as_points,
    check_alike,
    check_choice,
    fill,
    is_concrete,
    like,
    size,
    take,
)
from .._numerics import matmul, one_program, safe_divide
from .._solves import AbstractFactor
from .._typing import Array, ArrayLike, Bool, Float, Int, Points, with_scalars
from .._warnings import warn
from ..embedding import Embedding, JointEmbedding, check_embedding, check_unbatched, normalized
from ..features import AbstractFeatures
from ..kernels._base import AbstractKernel, check_where
from ..kernels._parts import of_products

#: Least share of a prior that must lie on the training x. It is about 1 inside them and 0 some
#: bandwidths outside.
LEAST_SHARE = 0.01
#: A share that is warned of. At x in [-2, 2] a prior on [1, 3] has .68 and one on [1.5, 4] .35.
LITTLE = 0.4


class Clipping(eqx.Module):
    r"""Say how the weights of a prior are clipped, truncated and normalized, in this order.

    - `clip`: $w_i \leftarrow \max(w_i, 0)$. Estimated weights are signed; probabilities are not.
    - `truncation`: $w_i \leftarrow 0$ where $w_i < \tau \max_j w_j$, with $\tau$ in [0, 1). Ridge
      regression leaves small weights everywhere. Where an observation has two explanations, they
      carry the belief to the wrong one. Give 0 for gradient descent: losses jump at the limit.
    - `normalize`: divide by the sum (see `kbr_jax.normalize`).

    The default is that of all rules and filters. `Clipping(False, 0.0, False)` is the papers' rule.

    **Raises:** `ValueError` for a truncation outside [0, 1), and for a truncation without clipping.
    """

    clip: bool = eqx.field(static=True, default=True)
    truncation: Float[Array, ""] = eqx.field(
        converter=lambda value: as_fraction(value, "truncation"), default=0.02
    )
    normalize: bool = eqx.field(static=True, default=True)

    __repr__ = with_scalars

    def __check_init__(self):
        tau = self.truncation
        if not self.clip and is_concrete(tau) and np.any(np.asarray(tau) > 0):
            raise ValueError(
                f"`truncation` = {np.max(np.asarray(tau)):.3g} acts on non-negative weights: set "
                "`clip=True`, or `truncation=0`."
            )


def check_estimator(estimator: str, clipping: Clipping, *known: str) -> None:
    """Raise a `ValueError` for an unknown estimator, or for importance weights of any sign."""
    check_choice(estimator, "estimator", *known)
    if estimator == "importance" and not clipping.clip:
        raise ValueError("Importance weights are non-negative: give a `clipping` that clips.")


def clip_and_normalize(
    weights: Float[Array, "*batch n"], clipping: Clipping, *, mask: Bool[Array, " n"] | None = None
) -> Float[Array, "*batch n"]:
    """Clip, truncate and normalize weights as `clipping` says, in O(n).

    If clipping leaves nothing, all weights become equal (where `mask` is True, if given): the prior
    said nothing. Gradients are those of the kept weights.
    """
    if clipping.clip:
        uniform = 1 / weights.shape[-1]
        if mask is not None:
            uniform = jnp.where(mask, 1 / jnp.sum(mask).astype(weights.dtype), 0)
        weights = clipped(weights, clipping.truncation, uniform)
    return normalized(weights) if clipping.normalize else weights


@one_program
def clipped(
    weights: Float[Array, "*batch n"], truncation: ArrayLike, uniform: ArrayLike
) -> Float[Array, "*batch n"]:
    """Weights clipped and truncated, or `uniform` where that leaves nothing but rounding."""
    eps = float(jnp.finfo(weights.dtype).eps) * weights.shape[-1] ** 0.5
    least = eps * jnp.max(jnp.abs(weights), axis=-1, keepdims=True)
    most = jnp.max(weights, axis=-1, keepdims=True)
    share = jnp.asarray(truncation).astype(weights.dtype)
    return jnp.where(most <= least, uniform, jnp.where(weights < share * most, 0, weights).clip(0))


class AbstractEmission(eqx.Module):
    """A likelihood P(y | x) with what Bayes' rule needs of it."""

    #: Whether it was learned from pairs.
    learned: ClassVar[bool] = False

    features_x: eqx.AbstractVar[AbstractFeatures]

    __repr__ = with_scalars

    @abc.abstractmethod
    def weights(self, coordinates: Float[Array, "*b p"]) -> Float[Array, "*b n"]:
        r"""Prior weights $w = (G + n \lambda I)^{-1} m$ of an embedding over X."""

    @abc.abstractmethod
    def marginal(self) -> Float[Array, " n"]:
        """Weights of the training marginal of X."""

    def regression_on_x(self) -> tuple[AbstractFeatures, Float[Array, ""], AbstractFactor]:
        """Features of a sample of X, and ridge and factor of regressions on it."""
        raise ValueError(
            "Smoothing with a known transition needs a training sample: fit moments of simulated "
            "pairs (s, s') as the transition instead."
        )

    def mass(self, weights: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        """How much of the sample's mass each weight stands for."""
        return weights

    @abc.abstractmethod
    def clip_and_normalize(
        self, weights: Float[Array, "*b n"], clipping: Clipping
    ) -> Float[Array, "*b n"]:
        """Weights clipped, truncated and normalized."""

    @abc.abstractmethod
    def observe(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        """Coordinates of m checked observations, and the mask of those that were made."""

    @abc.abstractmethod
    def likelihood(self, coordinates: Any) -> Float[Array, " n"]:
        """How well each training x explains one observation: the scale of the weights' products."""

    def scaled(self, weights: Float[Array, " n"], coordinates: Any) -> tuple[Any, Float[Array, ""]]:
        """Coordinates of a likelihood that does not underflow, and the logarithm of its scale."""
        return coordinates, jnp.zeros((), weights.dtype)

    def effective_size(self, weights: Float[Array, "*b n"]) -> Float[Array, "*b"]:
        r"""Number of training points that non-negative weights stand on, $(\sum_i w_i)^2 /
        \sum_i w_i^2$; NaN where weights are not those of points.
        """
        masses = self.mass(jnp.maximum(weights, 0))
        squares = jnp.sum(masses * weights, axis=-1)
        return safe_divide(jnp.sum(masses, axis=-1) ** 2, squares)

    @abc.abstractmethod
    def posterior(
        self,
        weights: Float[Array, " n"],
        coordinates: Any,
        regularizer: Float[Array, ""] | None,
        importance: bool,
    ) -> Any:
        """Belief after each observation of a batch, given by their coordinates."""

    @abc.abstractmethod
    def restrict(self, index: Int[Array, " k"], coordinates: Any) -> tuple["AbstractEmission", Any]:
        """The model on k of its weights, and the coordinates of an observation for it."""

    @abc.abstractmethod
    def spread(self, belief: Any, index: Int[Array, " k"], like: Float[Array, " n"]) -> Any:
        """A belief of the model restricted to `index` as one of this model."""

    @abc.abstractmethod
    def unchanged(self, weights: Float[Array, "*b n"]) -> Any:
        """The belief that is the prior itself: nothing was observed."""

    @abc.abstractmethod
    def is_zero(self, belief: Any) -> Bool[Array, ""]:
        """Whether Bayes' rule left nothing: the observation is beyond the reach of the kernel."""

    @abc.abstractmethod
    def embed_x(self, belief: Any) -> Embedding:
        """The belief as an embedding over X."""

    def embed_belief(self, belief: Any) -> Embedding:
        """As `embed_x`, on points with weights that can be clipped where there are any."""
        return self.embed_x(belief)

    @abc.abstractmethod
    def mean_x(self, belief: Any) -> Any:
        """Mean of x under the belief."""

    @abc.abstractmethod
    def as_weights(self, belief: Any) -> Float[Array, "*b n"]:
        """The belief as the weights of a prior."""

    @abc.abstractmethod
    def readout(self, features: AbstractFeatures) -> Array:
        """What `read` needs for coordinates of beliefs in features of x."""

    @abc.abstractmethod
    def readout_values(self, kernel: AbstractKernel, points: Points) -> Array:
        """What `read` needs for values, in this kernel, of beliefs at points."""

    @abc.abstractmethod
    def readout_successors(self, successors: Points | None) -> Array:
        """What `read` needs for coordinates of a belief whose points moved to their successors."""

    @abc.abstractmethod
    def read(self, belief: Any, readout: Array) -> Float[Array, "*b s"]:
        """A linear function of a belief."""

    @abc.abstractmethod
    def observation_factor(self, regularizer: Float[Array, ""]) -> AbstractFactor | None:
        """What `from_observation` solves with."""

    @abc.abstractmethod
    def from_observation(self, factor: AbstractFactor | None, coordinates: Any) -> Any:
        r"""Belief $(K + n \varepsilon I)^{-1} k(Y, y)$ of one observation without a prior."""


class AbstractConditional(AbstractEmission):
    """A conditional embedding of P(Y | X) learned from pairs."""

    learned: ClassVar[bool] = True

    features_y: eqx.AbstractVar[AbstractFeatures]
    regularizer: eqx.AbstractVar[Float[Array, ""]]
    factor: eqx.AbstractVar[AbstractFactor]

    @property
    def kernel_x(self) -> Any:
        """Kernel of the conditioning variable."""
        return self.features_x.kernel

    @property
    def kernel_y(self) -> Any:
        """Kernel of the conditioned variable."""
        return self.features_y.kernel

    @abc.abstractmethod
    def ratio(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b q"],
        regularizer: Float[Array, ""],
        importance: bool,
    ) -> Array:
        r"""Density ratio of posterior to prior as a function of y:
        $g = K ((D K)^2 + \delta I)^{-1} D k$.

        For importance weights $(K D + \delta I)^{-1} k$.
        """

    @abc.abstractmethod
    def regress(
        self, ratio: Array, adjoint: Callable[[Array], Array], positive: bool = False
    ) -> Float[Array, "b m"]:
        """Mean of a ratio given each x, the adjoint of `weights`; clipped at 0 if `positive`.

        `adjoint` maps coordinates `[b, p]` of functions of x to their values at the x.
        """

    @abc.abstractmethod
    def sample(self) -> tuple[AbstractFeatures, AbstractFeatures]:
        """The training pairs in their features; a `ValueError` for moments."""

    @abc.abstractmethod
    def outputs(self, features: AbstractFeatures) -> Float[Array, "n r"]:
        """Coordinates of the training y in features of y.

        `weights @ outputs` reads the sum rule.
        """

    @abc.abstractmethod
    def embed_y(self, weights: Float[Array, "*b n"]) -> Embedding:
        """The sum rule's embedding over Y of prior weights."""

    @abc.abstractmethod
    def embed_pairs(self, weights: Float[Array, "*b n"]) -> JointEmbedding:
        """The joint embedding of prior weights on the training pairs."""

    @abc.abstractmethod
    def embed_prior_and_y(self, prior: Embedding) -> JointEmbedding:
        """The joint embedding on the prior's points x training y."""

    def observe(
        self, observations: Points, observed: ArrayLike | None, name: str = "observations"
    ) -> tuple[Any, Array]:
        """See `AbstractEmission`."""
        codes, observed, _ = observed_coordinates(self.features_y, observations, observed, name)
        return codes.astype(self.features_x.dtype), observed


def observed_coordinates(
    features: AbstractFeatures, observations: Points, observed: ArrayLike | None, name: str
) -> tuple[Float[Array, "m r"], Bool[Array, " m"], Bool[Array, " m"]]:
    """Coordinates of observations, which are observed, and which the training data do not reach.

    The coordinates of those are 0: the shares of tiny similarities would make a belief as sure as
    those of large ones.
    """
    observations = as_points(observations, name)
    check_alike(observations, name, features.points, "training observations")
    observed = as_mask(observed, size(observations), "observed")
    check_where(features.kernel, observations, name, observed)
    filled = fill(like(observations, features.points), observed, take(features.points, 0))
    codes = features.coordinates(filled)
    lost = features.beyond_reach(codes, filled)
    return jnp.where(lost[:, None], 0, codes), observed, lost


def prior_coordinates(features: AbstractFeatures, prior: Embedding) -> Float[Array, "m p"]:
    """Coordinates of each point of a prior in the features of x."""
    check_embedding(prior, "prior")
    check_alike(prior.points, "prior.points", features.points, "training x")
    features.kernel.check(prior.points, "prior.points")
    return features.coordinates(like(prior.points, features.points))


def prior_weights(model: AbstractEmission, prior: Embedding) -> Float[Array, "*b n"]:
    r"""Weights $w = (G + n \lambda I)^{-1} \tilde G \alpha$ that a prior puts on the training
    pairs.
    """
    coordinates = prior_coordinates(model.features_x, prior)
    return model.weights(matmul(prior.weights.astype(coordinates.dtype), coordinates))


def single_prior_weights(model: AbstractEmission, prior: Embedding) -> Float[Array, " n"]:
    """Weights that one prior puts on the training pairs; a `ValueError` where it lies elsewhere.

    Inside `jit` the prior is not looked at.
    """
    check_unbatched(prior, "prior")
    weights = prior_weights(model, prior)
    total, sizes = jnp.sum(prior.weights), jnp.sum(jnp.abs(prior.weights))
    if not all(map(is_concrete, (weights, total))):
        return weights
    # Sums of weights mean nothing where the features hold no constant, nor where masses cancel as
    # in the printed 2009 estimator.
    local = not of_products(getattr(model.features_x, "kernel", prior.kernel))
    if local and abs(float(total)) > LEAST_SHARE * float(sizes):
        # A large ridge shrinks the weights of any prior: compare with those of the training x.
        sample = model.weights(model.features_x.mean_coordinates())
        of_sample = float(jnp.sum(model.mass(sample)))
        share = float(jnp.sum(model.mass(weights))) / float(total) / of_sample
        words = f"Of the `prior` {100 * share:.2g} % lies on the training x, the rest is forgotten"
        if not share >= LEAST_SHARE:
            raise ValueError(f"{words}: train there, or take a wider kernel of x.")
        if share < LITTLE:
            warn(f"{words}.")
    return weights
