r"""Treatment bridges: weights that make the doses independent of the confounder."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, size
from .._lapack import eigh
from .._numerics import matmul, one_program
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding
from ..features import AbstractFeatureMap, LandmarkFeatures, greedy_landmarks, landmark_features
from ..kernels import AbstractKernel, KernelLike, Linear, TensorProduct
from ._intervene import AbstractCausalModel, product_coordinates
from ._stages import Smoothed, feature_map, regress, smoother
from ._units import as_ridges, outcome_targets, units

#: Bandwidth of the kernel of a real dose, in standard deviations. Mean squared errors of the curves
#: with .3, 1 and 3, ridge of least loss without its bound, two seeds: abortion .010, .021, .026;
#: maths .009, .043, .323; reading .008, .078, 1.28.
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
    proxies: AbstractFeatureMap
    local_features: AbstractFeatureMap
    local: Smoothed
    kernel_y: AbstractKernel
    y: Points
    regularizers: Float[Array, "3"]
    explained: Float[Array, ""]

    @property
    def doses(self) -> Points:
        return self.local_features.points

    def at(self, doses: Points, proxies: Float[Array, "m p"]) -> Float[Array, "b m"]:
        """Q at each of b doses with each of m features of proxies."""
        landmarks = self.features.landmarks.points
        on_landmarks = self.features.on_landmarks(self.coefficients)
        rows = kernel_of_doses(self.features).gram(doses, landmarks[0]) * on_landmarks
        return 1 + matmul(rows, matmul(landmarks[1], proxies.T))

    def own_weights(self, doses: Points) -> Float[Array, "b n"]:
        r"""Weights $\beta_i(a) q(a_i, z_i)$ of units near each dose, with q at their own doses."""
        pairs = self.features.coordinates((self.doses, self.proxies.matrix))
        near = self.local.weights(self.local_features.coordinates(doses))
        return near * (1 + matmul(pairs, self.coefficients))

    def weights(self, doses: Points, adjust: Embedding | None) -> Float[Array, "b n"]:
        refuse_adjust(adjust)
        near = self.local.weights(self.local_features.coordinates(doses))
        found = near * self.at(doses, self.proxies.matrix)
        return found + (1 - jnp.sum(found, axis=1, keepdims=True)) * self.local.share


@one_program
def _with_products(
    targets: Float[Array, "n t"], own: Float[Array, "n p"], uniform: Float[Array, " n"]
) -> Float[Array, "n q"]:
    """Products of the centered targets with the features, beside these."""
    moved = targets - matmul(uniform, targets)
    products = (moved[:, :, None] * own[:, None, :]).reshape(own.shape[0], -1)
    return jnp.concatenate([products, own], axis=1)


def kernel_of_doses(features: LandmarkFeatures) -> AbstractKernel:
    """The kernel of the doses in features of pairs."""
    assert isinstance(features.kernel, TensorProduct)
    return features.kernel.kernels[0]


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
    kernels: tuple[KernelLike, ...] | None = None,
    rank: int = 300,
    regularizers: tuple[ArrayLike | None, ...] | None = None,
    mask: ArrayLike | None = None,
) -> TreatmentBridge:
    r"""Fit weights that undo confounding, from a treatment proxy; no density is estimated.

    With the proxies w and z of an unmeasured confounder as in `fit_outcome_bridge`, a function q
    with $E[q(a, Z) | a, w] = p(w) / p(w | a)$ gives $E[Y | do(a)] = E[Y q(a, Z) | A = a]$ (Cui et
    al. 2024). It is the minimum over q of (Bozkurt et al. 2025, equation 5)

    $$ E[E[q(A, Z) | A, W]^2] - 2 E_{A \otimes W}[E[q(A, Z) | A, W]], $$

    whose second mean is over independent doses and proxies. Here
    $q = 1 + \langle \theta, \phi(a) \otimes \phi(z) \rangle$ with a ridge on $\theta$: with a large
    one q = 1, and nothing is adjusted. There are three ridge regressions: of z on (a, w), for
    $\theta$, and of (y, z) on the dose. Each ridge has the least leave-one-out error of its stage.
    That of $\theta$, times n, is at least the mean of $|\phi(a)|^2 |\phi(z)|^2$: an ordinary unit
    decides less than half of its own weight.

    **Without an unmeasured confounder** give the measured ones as z, and w = None: q(a, x) is then
    p(x) / p(x | a), the weight of a unit with covariates x.

    **What it assumes.** Given U, the dose does not drive w, and z does not drive w or y. The
    proxies vary enough with U: E[g(U) | a, w] = 0 for all w only for g = 0, and there is a bridge.
    Overlap: units of each w get doses near a. Without overlap few units carry all weight. Measured
    covariates belong into both proxies, as tuples.

    **Arguments:** as `fit_outcome_bridge`, with three `regularizers`. The default kernel of a real
    dose has .3 standard deviations: weights follow the density of the doses.

    **Returns:** a `TreatmentBridge` for `intervene`; the weights are made to sum to 1 by the
    marginal of y. Cost O(n r^2 + r^3), and O(n r) more memory for each coordinate or label
    of y.

    On the grade retention data its error is several times that of `fit_outcome_bridge`. It is the
    other half of `doubly_robust`.

    **Raises:** `ValueError` for samples of different sizes, and a wrong number of kernels.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 5)
    >>> u, *noise = (jax.random.normal(key, (500,)) for key in keys)
    >>> w, z = u + noise[0] / 2, u + noise[1] / 2
    >>> a = (u + noise[2] > 0).astype(int)
    >>> y = a.astype(float) - 2 * u + noise[3] / 10
    >>> bridge = kbr.causal.fit_treatment_bridge(a, w, z, y)
    >>> curve = kbr.mean(kbr.causal.intervene(bridge, jnp.array([0, 1])))
    >>> print(f"{curve[1] - curve[0]:.0f}")
    1
    """
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
        free = stage.fit.predict(at, own)
        embedded = stage.fitted(features, own, cross_fit=False)
    pairs = TensorProduct((data.kernel_a, Linear()))
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), (data.a, embedded), (data.a, free))
    # The exact solution is in the span of both.
    landmarks = greedy_landmarks(
        pairs, both, rank=rank if rank < size(data.a) else 2 * size(data.a)
    )
    features = landmark_features(pairs, (data.a, embedded), landmarks, data.mask)
    coefficients, shrinkage = _ratio(features, features.at((data.a, free)).matrix, second)
    near = feature_map(data.kernel_a, data.a, rank, data.mask)
    targets = outcome_targets(data.kernel_y, data.y, rank, data.mask)
    stage = regress(near, _with_products(targets, own, near.uniform), third)
    return TreatmentBridge(
        features=features,
        coefficients=coefficients,
        proxies=proxies,
        local_features=near,
        local=stage.fit,
        kernel_y=data.kernel_y,
        y=data.y,
        regularizers=jnp.stack([ridge, shrinkage, stage.regularizer]),
        explained=explained,
    )


@eqx.filter_jit
def _ratio(
    features: LandmarkFeatures, free: Float[Array, "n r"], ridge: Float[Array, ""] | None
) -> tuple[Float[Array, " r"], Float[Array, ""]]:
    r"""$\theta = (U^\top U + n \eta I)^{-1} \sum_k (v_k - u_k)$ for rows u and v.

    It is the minimum of the mean of $(1 + \theta^\top u_i)^2 - 2 (1 + \theta^\top v_i)$ with the
    ridge $\eta$. By default that of points left out is least, with $n \eta$ at least the mean of
    $|u_i|^2$. Below this bound .03 of the samples of a design with three arms and weak overlap had
    errors above 100, and the error on grade retention was .0086 in place of .0058.
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
        scale = n / jnp.maximum(n - 1, 1)  # the mean of the others' d
        return (1 + scale * at_u) ** 2 - 2 * (1 + scale * at_v)

    if ridge is None:
        ridges = found.ridges()
        means = matmul(lax.map(losses, ridges), share)
        ridge = ridges[jnp.argmin(jnp.where(n * ridges >= found.unit, means, jnp.inf))]
    return matmul(axes, total / (values + n * ridge)), ridge
