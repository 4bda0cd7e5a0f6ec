r"""Treatment bridges: weights that make the doses independent of the confounder."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_count
from .._lapack import eigh
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding
from ..features import LandmarkFeatures, greedy_landmarks, landmark_features
from ..kernels import AbstractKernel, KernelLike, Linear, TensorProduct
from ._intervene import AbstractCausalModel, product_coordinates
from ._stages import Smoothed, feature_map, regress, smoother
from ._units import as_ridges, outcome_targets, units

#: Bandwidth of the kernel of a real dose, in standard deviations. MEASURE
_DOSE = 0.3


class TreatmentBridge(AbstractCausalModel):
    r"""A function q of dose and treatment proxy with $E[q(a, Z) | a, w] = p(w) / p(w | a)$.

    - `features` of the pairs of doses and embedded proxies; `coefficients` $\theta$, with
      $q(a, z) = 1 + \langle \theta, \phi(a) \otimes \phi(z) \rangle$.
    - `proxies`: features of z. `local`: the regression on the dose, on `local_features`.
    - `regularizers`: the ridges of the three stages.
    - `explained`: the share of the variance of z that the first stage explains of points left out.
    """

    features: LandmarkFeatures
    coefficients: Float[Array, " r"]
    proxies: LandmarkFeatures
    local_features: LandmarkFeatures
    local: Smoothed
    kernel_y: AbstractKernel
    y: Points
    regularizers: Float[Array, "3"]
    explained: Float[Array, ""]

    @property
    def doses(self) -> Points:
        return self.local_features.points

    def at(self, doses: Points, proxies: Float[Array, "m p"]) -> Float[Array, "b m"]:
        """q at each of b doses with each of m features of proxies."""
        landmarks = self.features.landmarks.points
        on_landmarks = self.features.on_landmarks(self.coefficients)
        rows = self.features.kernel.kernels[0].gram(doses, landmarks[0]) * on_landmarks
        return 1 + matmul(rows, matmul(landmarks[1], proxies.T))

    def local_weights(self, doses: Points) -> Float[Array, "b n"]:
        r"""Weights $\beta_i(a) q(a, z_i)$ of units near each dose, of sum near 1."""
        near = self.local.weights(self.local_features.coordinates(doses))
        return near * self.at(doses, self.proxies.matrix)

    def weights(self, doses: Points, adjust: Embedding | None) -> Float[Array, "b n"]:
        refuse_adjust(adjust)
        found = self.local_weights(doses)
        return found + (1 - jnp.sum(found, axis=1, keepdims=True)) * self.local.share


def refuse_adjust(adjust: Embedding | None) -> None:
    """Raise a `ValueError` where a population is given."""
    if adjust is not None:
        raise ValueError(
            "A treatment bridge is fitted for one population: fit it to a sample of the population "
            "you ask for, or use an outcome bridge, and give no `adjust`."
        )


def fit_treatment_bridge(
    a: Points,
    w: Points | None,
    z: Points,
    y: Points,
    *,
    kernels: tuple[KernelLike, KernelLike, KernelLike] | None = None,
    rank: int = 300,
    regularizers: tuple[ArrayLike | None, ArrayLike | None, ArrayLike | None] | None = None,
    cross_fit: bool = True,
    mask: ArrayLike | None = None,
) -> TreatmentBridge:
    r"""x"""
    data = units(a, z if w is None else w, z, y, kernels, mask, _DOSE)
    rank = as_count(rank, "rank")
    proxies = feature_map(data.kernel_z, data.z, rank, data.mask)
    first, second, third = as_ridges(regularizers, 3, proxies.dtype)
    own, embedded = proxies.matrix, proxies.matrix
    ridge, explained = jnp.zeros((), proxies.dtype), jnp.ones((), proxies.dtype)
    free = jnp.broadcast_to(proxies.mean_coordinates(), own.shape)
    if w is not None:
        kernel = TensorProduct((data.kernel_a, data.kernel_w))
        features = feature_map(kernel, (data.a, data.w), rank, data.mask)
        stage = regress(features, own, first)
        ridge, explained = stage.regularizer, stage.explained
        at = product_coordinates(features, data.a, data.w, features.uniform)
        free = matmul(stage.fit.weights(at), own)
        embedded = stage.left_out if cross_fit else stage.fitted(features, own)
    pairs = TensorProduct((data.kernel_a, Linear()))
    landmarks = greedy_landmarks(
        pairs,
        jax.tree.map(lambda *parts: jnp.concatenate(parts), (data.a, embedded), (data.a, free)),
        rank=rank,
    )
    features = landmark_features(pairs, (data.a, embedded), landmarks, data.mask)
    coefficients, shrinkage = _ratio(features, features.at((data.a, free)).matrix, second)
    near = feature_map(data.kernel_a, data.a, rank, data.mask)
    targets = outcome_targets(data.kernel_y, data.y, rank, data.mask)
    moved = targets - matmul(near.uniform, targets)
    products = (moved[:, :, None] * own[:, None, :]).reshape(own.shape[0], -1)
    stage = regress(near, jnp.concatenate([products, own], axis=1), third)
    return TreatmentBridge(
        features,
        coefficients,
        proxies,
        near,
        stage.fit,
        data.kernel_y,
        data.y,
        jnp.stack([ridge, shrinkage, stage.regularizer]),
        explained,
    )


@eqx.filter_jit
def _ratio(
    features: LandmarkFeatures, free: Float[Array, "n r"], ridge: Float[Array, ""] | None
) -> tuple[Float[Array, " r"], Float[Array, ""]]:
    r"""$\theta = (U^\top U + n \eta I)^{-1} \sum_k (v_k - u_k)$ for rows u and v.

    It is the minimum of the mean of $(1 + \theta^\top u_i)^2 - 2 (1 + \theta^\top v_i)$ with the
    ridge $\eta$. The ridge is the largest one whose loss, of points left out, is within a standard
    error of the least loss.
    """
    found = smoother(features)
    share, n = features.uniform, features.count
    values, axes = eigh(matmul(features.matrix.T, features.matrix))
    values = jnp.maximum(values, 0)
    u, v = matmul(features.matrix, axes), matmul(free, axes)
    d = v - u
    total = jnp.sum(d, axis=0)

    def losses(ridge):
        """Of each point, by the fit without it. All are products in the axes."""
        inverse = 1 / (values + n * ridge)
        left = 1 - matmul(u**2, inverse)
        left = jnp.maximum(left, jnp.finfo(left.dtype).eps ** 0.5)
        at_u = (matmul(u, inverse * total) - matmul(u * d, inverse)) / left
        at_v = matmul(v, inverse * total) - matmul(v * d, inverse) + matmul(v * u, inverse) * at_u
        scale = n / jnp.maximum(n - 1, 1)
        return (1 + scale * at_u) ** 2 - 2 * (1 + scale * at_v)

    if ridge is None:
        ridges = found.ridges()
        each = lax.map(losses, ridges)
        means = matmul(each, share)
        more = each - each[jnp.argmin(means)]
        excess = matmul(more, share)
        error = jnp.sqrt(jnp.maximum(matmul(more**2, share) - excess**2, 0) / n)
        ridge = ridges[jnp.max(jnp.where(excess <= error, jnp.arange(ridges.size), 0))]
    return matmul(axes, total / (values + n * ridge)), ridge
