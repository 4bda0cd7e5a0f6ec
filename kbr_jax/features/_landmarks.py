r"""Features of r landmark points, $\phi(x) = L^{-1} k(P, x)$ with $k(P, P) = L L^\top$ (Nystroem).

The choice of landmarks is discrete and carries no gradient; the features are an ordinary
differentiable function of the kernel's parameters. A loss that chooses landmarks anew at every
evaluation jumps where the choice changes; choose once outside the loss and pass them in for a
smooth one.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_points, check_alike, check_finite, size
from .._numerics import jitter, safe_divide
from .._repr import with_numbers
from .._typing import Array, Bool, Float, Points
from ..kernels import AbstractKernel, KernelLike, as_kernel
from ._features import AbstractFeatureMap, masked_rows


class Landmarks(eqx.Module):
    """Landmark points `[r, ...]`. They are differentiable, so inducing points can be learned.

    `active` `[r]` is False where the rank of the Gram matrix ran out before r points were found; by
    default all are active. **Raises:** `ValueError` for points that are empty or not finite.
    """

    points: Points
    active: Bool[Array, " r"]

    __repr__ = with_numbers

    def __init__(self, points: Points, active: Bool[Array, " r"] | None = None):
        if active is None:
            points = check_finite(as_points(points, "points"), "points")
            active = jnp.ones(size(points), bool)
        self.points, self.active = points, active


class LandmarkFeatures(AbstractFeatureMap):
    """Feature map of landmarks.

    Columns of inactive landmarks are zero, value and gradient. Memory O(n r + r^2).
    """

    kernel: AbstractKernel
    points: Points
    matrix: Float[Array, "n r"]
    mask: Bool[Array, " n"] | None
    landmarks: Landmarks
    cholesky: Float[Array, "r r"]

    def coordinates(self, points: Points) -> Float[Array, "m r"]:
        return _features(self.kernel, self.landmarks, self.cholesky, points)

    def at(self, points: Points) -> "LandmarkFeatures":
        coordinates = masked_rows(self.coordinates(points), self.mask)
        return LandmarkFeatures(
            self.kernel, points, coordinates, self.mask, self.landmarks, self.cholesky
        )

    def of_values(self, values: Float[Array, "*b r"]) -> Float[Array, "*b r"]:
        r"""Coordinates $L^{-1} v$ of embeddings with values v at the active landmarks."""
        return _whiten(self.landmarks, self.cholesky, values)

    def on_landmarks(self, coordinates: Float[Array, "*b r"]) -> Float[Array, "*b r"]:
        r"""Weights $L^{-\top} c$ on the landmark points, of embeddings with coordinates c.

        Exact in the span of the landmarks.
        """
        flat = coordinates.reshape(-1, coordinates.shape[-1])
        return jax.scipy.linalg.solve_triangular(
            self.cholesky, flat.T, lower=True, trans=1
        ).T.reshape(coordinates.shape)


def _features(
    kernel, landmarks: Landmarks, cholesky: Float[Array, "r r"], points: Points
) -> Float[Array, "m r"]:
    return _whiten(landmarks, cholesky, kernel.gram(landmarks.points, points).T)


def _whiten(
    landmarks: Landmarks, cholesky: Float[Array, "r r"], values: Float[Array, "*b r"]
) -> Float[Array, "*b r"]:
    flat = jnp.where(landmarks.active, values, 0).reshape(-1, values.shape[-1])
    return jax.scipy.linalg.solve_triangular(cholesky, flat.T, lower=True).T.reshape(values.shape)


def only_active(matrix: Float[Array, "r r"], active: Bool[Array, " r"]) -> Float[Array, "r r"]:
    """Set landmarks that are not active apart in a Gram matrix, at its scale.

    Jitter and shifts follow it.
    """
    both = active[:, None] & active[None, :]
    total = lax.stop_gradient(jnp.sum(jnp.where(active, jnp.diagonal(matrix), 0)))
    mean = safe_divide(total, jnp.sum(active).astype(total.dtype))
    return jnp.where(both, matrix, 0) + jnp.diag(jnp.where(active, 0, jnp.where(mean > 0, mean, 1)))


def landmark_features(
    kernel: KernelLike, points: Points, landmarks: Landmarks, mask: Bool[Array, " n"] | None = None
) -> LandmarkFeatures:
    r"""Features $\phi(x) = L^{-1} k(P, x)$ of given landmarks at a sample.

    **Arguments:** `kernel`; `points`, a sample `[n, ...]`; `landmarks` with r points of the same
    kind; `mask` `[n]`, False where a point is padding.

    Cost O(n r d + n r^2 + r^3), memory O(n r). The landmark Gram matrix gets ten times the
    library's jitter, so that value and gradient stay finite for repeated or nearly repeated
    landmarks.
    """
    kernel = as_kernel(kernel)
    check_alike(landmarks.points, "landmarks", points, "points")
    kernel.check(points, "points")
    active = landmarks.active
    matrix = kernel.gram(landmarks.points, landmarks.points)
    matrix = only_active(matrix, active)
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    cholesky = jnp.linalg.cholesky(matrix + 10 * lax.stop_gradient(jitter(matrix)) * identity)
    coordinates = masked_rows(_features(kernel, landmarks, cholesky, points), mask)
    return LandmarkFeatures(kernel, points, coordinates, mask, landmarks, cholesky)
