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

from .._checks import as_points, as_regularizer, check_alike, check_finite, like, size
from .._lapack import cholesky, triangular_solve
from .._numerics import in_any_batch, jitter, one_program, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, Points, with_numbers
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

    def of_values(self, values: Float[Array, "*b r"]) -> Float[Array, "*b r"]:
        r"""Coordinates $L^{-1} v$ of embeddings with values v at the active landmarks."""
        return _whiten(self.landmarks, self.cholesky, values)

    def on_landmarks(self, coordinates: Float[Array, "*b r"]) -> Float[Array, "*b r"]:
        r"""Weights $L^{-\top} c$ on the landmark points, of embeddings with coordinates c.

        Exact in the span of the landmarks.
        """
        flat = coordinates.reshape(-1, coordinates.shape[-1])
        return triangular_solve(self.cholesky, flat.T, transpose=True).T.reshape(coordinates.shape)


def _features(
    kernel, landmarks: Landmarks, lower: Float[Array, "r r"], points: Points
) -> Float[Array, "m r"]:
    return _whiten(landmarks, lower, kernel.gram(landmarks.points, points).T.astype(lower.dtype))


@one_program
def _whiten(
    landmarks: Landmarks, lower: Float[Array, "r r"], values: Float[Array, "*b r"]
) -> Float[Array, "*b r"]:
    flat = jnp.where(landmarks.active, values, 0).reshape(-1, values.shape[-1])
    return triangular_solve(lower, flat.T).T.reshape(values.shape)


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
    landmarks, and where its factorization still breaks down 100 or 10^4 times that.
    """
    kernel = as_kernel(kernel)
    check_alike(landmarks.points, "landmarks", points, "points")
    kernel.check(points, "points")
    kernel.check(landmarks.points, "landmarks")
    coordinates, lower = _fitted(kernel, points, landmarks, mask)
    return LandmarkFeatures(kernel, points, coordinates, mask, landmarks, lower)


@eqx.filter_jit
def _fitted(
    kernel: AbstractKernel, points: Points, landmarks: Landmarks, mask: Bool[Array, " n"] | None
) -> tuple[Float[Array, "n r"], Float[Array, "r r"]]:
    matrix = kernel.gram(landmarks.points, landmarks.points)
    matrix = only_active(matrix, landmarks.active)
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    lower = cholesky(matrix + _sufficient(lax.stop_gradient(matrix)) * identity)
    return masked_rows(_features(kernel, landmarks, lower, points), mask), lower


def _sufficient(matrix: Float[Array, "r r"]) -> Float[Array, ""]:
    """The first of a few jitters with which a factorization exists.

    Of nearly equal points in many coordinates, rounding makes the Gram matrix indefinite in float32
    by more than the jitter. The gradient is that of one factorization: through a choice between
    two, one of them NaN, it would be NaN.
    """
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)

    def raised(added):
        lower = cholesky(matrix + added * identity)
        return jnp.where(jnp.all(jnp.isfinite(jnp.diagonal(lower))), added, 100 * added)

    first = 10 * jitter(matrix)
    second = raised(first)
    failed = second > first
    return lax.cond(
        in_any_batch(failed), lambda: jnp.where(failed, raised(second), first), lambda: first
    )


class PartitionOfUnity(eqx.Module):
    r"""Soft assignment of points to K centers by their distance in the RKHS. Build it with
    `soft_partition`.

    $$ a_k(x) \propto \exp\left(-\frac{k(x, x) + k(c_k, c_k) - 2 k(x, c_k)}{2 t}\right). $$

    As the temperature t goes to 0 each point belongs to its nearest center. Centers that are not
    active get nothing.
    """

    kernel: AbstractKernel
    centers: Landmarks
    temperature: Float[Array, ""]

    def assign(self, points: Points) -> Float[Array, "m K"]:
        """The shares $a_k(x)$ of m points; rows sum to 1. Cost O(m K d)."""
        cross = self.kernel.gram(like(points, self.centers.points), self.centers.points)
        # k(x, x) is common to a row and drops out of the normalization.
        logits = (2 * cross - self.kernel.diagonal(self.centers.points)) / (2 * self.temperature)
        return jax.nn.softmax(jnp.where(self.centers.active, logits, -jnp.inf), axis=-1)


def soft_partition(
    kernel: KernelLike, centers: Landmarks, *, temperature: ArrayLike | None = None
) -> PartitionOfUnity:
    r"""Soft cells around given centers.

    **Arguments:**

    - `kernel`: the kernel whose RKHS distance says what is near; `centers`: K points, from
      `greedy_landmarks` say.
    - `temperature`: t > 0, in units of the squared RKHS distance. By default a quarter of the
      median squared distance from a center to its nearest other (no gradient flows through that
      choice), so that a point hardly ever belongs to more than a few cells.

    **Returns:** `PartitionOfUnity`. Cost O(K^2 d).

    **Raises:** `ValueError` for a temperature that is not positive or points outside the kernel's
    domain.
    """
    kernel = as_kernel(kernel)
    kernel.check(centers.points, "centers")
    if temperature is None:
        matrix = kernel.gram(centers.points, centers.points)
        temperature = _apart(lax.stop_gradient(matrix), centers.active)
    dtype = jax.eval_shape(kernel.diagonal, centers.points).dtype
    return PartitionOfUnity(kernel, centers, as_regularizer(temperature, "temperature", dtype))


@one_program
def _apart(gram: Float[Array, "K K"], active: Bool[Array, " K"]) -> Float[Array, ""]:
    """A quarter of the median squared distance from a center to its nearest other."""
    diagonal = jnp.diagonal(gram)
    squares = diagonal[:, None] + diagonal[None, :] - 2 * gram
    apart = active[:, None] & active[None, :] & ~jnp.eye(gram.shape[0], dtype=bool)
    nearest = jnp.min(jnp.where(apart, squares, jnp.inf), axis=1)
    typical = jnp.nanmedian(jnp.where(jnp.isfinite(nearest), nearest, jnp.nan))
    floor = 8 * jnp.finfo(gram.dtype).eps * jnp.max(diagonal)
    # One center has no neighbor: any temperature assigns everything to it.
    return jnp.where(jnp.isfinite(typical), jnp.maximum(typical / 4, floor), 1).astype(gram.dtype)
