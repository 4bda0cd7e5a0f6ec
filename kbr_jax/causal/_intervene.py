r"""Distributions of an outcome under an intervention, do(a)."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_batch, as_real, check_alike, like
from .._numerics import matmul
from .._typing import Array, Float, Point, Points, with_scalars
from ..embedding import Embedding, check_unbatched, embed
from ..features import AbstractFeatures, AbstractGram, LandmarkFeatures
from ..kernels import AbstractKernel, TensorProduct, gram_matvec
from ..rules import AbstractConditional, ConditionalEmbedding


class AbstractCausalModel(eqx.Module):
    """A fitted model that gives the weights of n outcomes under do(a)."""

    kernel_y: eqx.AbstractVar[AbstractKernel]
    y: eqx.AbstractVar[Points]

    __repr__ = with_scalars

    @property
    @abc.abstractmethod
    def doses(self) -> Points:
        """The doses of the sample."""

    @abc.abstractmethod
    def weights(self, doses: Points, adjust: Embedding | None) -> Float[Array, "b n"]:
        """Weights of the outcomes for each of b checked doses."""


def intervene(
    model: AbstractConditional | AbstractCausalModel,
    treatment: Point | Points | Embedding,
    adjust: Embedding | None = None,
) -> Embedding:
    r"""Embed the distribution of Y under do(A = a).

    **Back door.** `model` is a conditional embedding of P(Y | A, X), fitted to x = (a, covariates).
    The sum rule with the prior $\phi(a) \otimes \mu_X$ gives (Singh, Xu and Gretton 2024, theorem
    1; for labels Muandet et al. 2021)

    $$ \mu_{Y | do(a)} = C_{Y | A X} (\phi(a) \otimes \mu_X), \qquad
       \mu_X = \tfrac1n \sum_i \phi(x_i). $$

    `adjust` is the embedding of the covariates to average over. It says which population is asked:

    - None: that of the sample, the average effect.
    - `condition(fit_conditional(None, None, a, x, ...), b)`: those who got dose b (effect on the
      treated).
    - `condition` of (V, X) given V = v, for a model of x = (a, v, covariates): those with V = v.
    - `embed(None, new_x)`: another population, whose P(Y | A, X) is the same.

    **Front door.** `treatment` may be an embedding over doses: a random dose. With a `model` of
    P(Y | M, A), x = (m, a), the treatment `condition(model_of_m_given_a, a)` and `adjust=None`,
    the result is Y under do(a), where all of the effect goes through M.

    **Bridges** of this namespace are models too. There `adjust` is over the outcome proxies w. The
    result has mass 1 whatever the mass of `adjust`: take differences of results, not of
    populations.

    **Arguments:**

    - `model`: a conditional embedding, an `OutcomeBridge`, `TreatmentBridge` or `DoublyRobust`.
    - `treatment`: a dose, a batch of b doses, or for a conditional embedding an `Embedding` of m
      doses with weights `[..., m]`.
    - `adjust`: an unbatched `Embedding` with k points.

    **Returns:** an `Embedding` over Y with weights `[n]`, or `[b, n]`. `mean` of it is the
    dose-response curve, and `jax.grad` through it the effect of a small change of the dose.
    `quantile`, `density`, `mmd` between doses and `herd` read the rest. Cost
    O(n k d + b n^2) for the back door, O(n r + k r + b (r^2 + n r)) with landmarks.

    **What it assumes**, for the back door: consistency (the y of a unit is its outcome under the
    dose it got, whatever others got), no unmeasured confounding given x, and overlap (units of each
    x get doses near a). Without the second, the curve shows the confounder. Without the third, it
    is an extrapolation of the ridge regression: far from the data the weights go to 0, and their
    sum (`mass` of the result) says so. For the front
    door: M carries all of the effect, nothing unmeasured drives A and M, and A blocks all that
    drives M and Y.

    **Raises:** `ValueError` for a model of points that are not tuples, and for doses or an `adjust`
    of another kind than the sample's.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> x = jax.random.normal(keys[0], (300,))
    >>> a = x + jax.random.normal(keys[1], (300,))
    >>> y = a - 2 * x + jax.random.normal(keys[2], (300,)) / 10
    >>> model = kbr.fit_conditional(None, None, (a, x), y, regularizer=1e-5)
    >>> curve = kbr.mean(kbr.causal.intervene(model, jnp.array([0.0, 1.0])))
    >>> print(f"{curve[1] - curve[0]:.0f}")
    1
    """
    if isinstance(model, AbstractCausalModel):
        if isinstance(treatment, Embedding):
            raise ValueError("A random `treatment` needs a conditional embedding as `model`.")
        doses, single = as_batch(treatment, "treatment", model.doses, "training doses")
        weights = model.weights(doses, adjust)
        return Embedding(model.kernel_y, model.y, weights[0] if single else weights)
    doses, others = _parts(model.features_x.points)
    if adjust is None:
        adjust = _of_sample(model, others)
    check_unbatched(adjust, "adjust")
    check_alike(adjust.points, "adjust.points", others, "training covariates")
    mixing, single = None, False
    if isinstance(treatment, Embedding):
        check_alike(treatment.points, "treatment.points", doses, "training doses")
        mixing, treatment = treatment.weights, as_real(treatment.points, doses)
    else:
        treatment, single = as_batch(treatment, "treatment", doses, "training doses")
    coordinates = product_coordinates(
        model.features_x, treatment, like(adjust.points, others), adjust.weights
    )
    if mixing is not None:
        coordinates = matmul(mixing.astype(coordinates.dtype), coordinates)
    weights = model.weights(coordinates)
    return model.embed_y(weights[0] if single else weights)


def _parts(points: Points) -> tuple[Points, Points]:
    """The doses, and the other parts, of a sample of tuples."""
    if not isinstance(points, (tuple, list)) or len(points) < 2:
        raise ValueError(
            "`model` must be a conditional embedding given tuples (dose, covariates): fit it with "
            "x = (a, covariates)."
        )
    return points[0], points[1] if len(points) == 2 else tuple(points[1:])


def _joined(doses: Points, others: Points, count: int) -> tuple:
    return (doses, others) if count == 2 else (doses, *others)


def _of_sample(model: AbstractConditional, others: Points) -> Embedding:
    """The covariates of the training sample."""
    if not isinstance(model, ConditionalEmbedding):
        raise ValueError("Moments hold no sample of the covariates: give `adjust`.")
    return embed(lambda a, b: jnp.zeros(()), others, model.features_x.uniform)


def product_coordinates(
    features: AbstractFeatures, doses: Points, others: Points, weights: Float[Array, " k"]
) -> Float[Array, "m r"]:
    """Coordinates of each dose joined with the weighted other parts."""
    kernel, count = features.kernel, len(features.points)
    weights = weights.astype(features.dtype)
    known = isinstance(features, (AbstractGram, LandmarkFeatures))
    if not known or not isinstance(kernel, TensorProduct):

        def one(dose: Any) -> Float[Array, " r"]:
            repeated = jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (weights.shape[0], *leaf.shape)), dose
            )
            return matmul(weights, features.coordinates(_joined(repeated, others, count)))

        return lax.map(one, doses)
    # A product kernel needs each factor once.
    landmarks = isinstance(features, LandmarkFeatures)
    reference = features.landmarks.points if landmarks else features.points
    at_doses, at_others = _parts(reference)
    rest = kernel.kernels[1] if count == 2 else TensorProduct(kernel.kernels[1:])
    smooth = gram_matvec(rest, at_others, others, weights[:, None])[:, 0]
    values = kernel.kernels[0].gram(doses, at_doses).astype(features.dtype)
    values = values * smooth.astype(features.dtype)
    if landmarks:
        return features.of_values(values)
    return values if features.mask is None else jnp.where(features.mask, values, 0)
