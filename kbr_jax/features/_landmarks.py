r"""Features of r landmark points, $\phi(x) = L^{-1} k(P, x)$ with $k(P, P) = L L^\top$ (Nystroem), and ways to choose them.

With the pivots of an incomplete Cholesky decomposition as landmarks, $\phi$ at the sample *is* that decomposition.
The choice is discrete and carries no gradient; the features are an ordinary differentiable function of the kernel's
parameters. A loss that chooses landmarks anew at every evaluation jumps where the choice changes; choose once
outside the loss and pass them in for a smooth one.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, as_points, check_alike, check_finite, size, take
from .._numerics import jitter, matmul
from .._typing import Array, Bool, Float, Int, Points, PRNGKeyArray
from ..kernels import AbstractKernel, as_kernel
from ._features import AbstractFeatureMap, AbstractFeatures, exact_features


class Landmarks(eqx.Module):
    """Landmark points; `active` is False where the rank of the Gram matrix ran out before r points were found."""

    points: Points
    active: Bool[Array, " r"]


class IncompleteCholesky(eqx.Module):
    r"""$K \approx L L^\top$ with `factor` L `[n, r]`, `pivots` `[r]` (indices into the sample, in order of choice),
    `active` `[r]` (False: the column is zero) and `residual` `[n]`, the diagonal of $K - L L^\top$.
    """

    factor: Float[Array, "n r"]
    pivots: Int[Array, " r"]
    active: Bool[Array, " r"]
    residual: Float[Array, " n"]


class LandmarkFeatures(AbstractFeatureMap):
    """Feature map of landmarks. Columns of inactive landmarks are zero, value and gradient. Memory O(n r + r^2)."""

    kernel: AbstractKernel
    points: Points
    codes: Float[Array, "n r"]
    landmarks: Landmarks
    cholesky: Float[Array, "r r"]

    def encode(self, points: Points) -> Float[Array, "m r"]:
        return _features(self.kernel, self.landmarks, self.cholesky, points)

    def rebase(self, points: Points) -> "LandmarkFeatures":
        return LandmarkFeatures(self.kernel, points, self.encode(points), self.landmarks, self.cholesky)

    def on_landmarks(self, codes: Float[Array, "*b r"]) -> Float[Array, "*b r"]:
        r"""Weights $L^{-\top} c$ on the landmark points, of embeddings with codes c; exact in the span of the landmarks."""
        flat = codes.reshape(-1, codes.shape[-1])
        return jax.scipy.linalg.solve_triangular(self.cholesky, flat.T, lower=True, trans=1).T.reshape(codes.shape)


def _features(kernel, landmarks: Landmarks, cholesky: Float[Array, "r r"], points: Points) -> Float[Array, "m r"]:
    cross = jnp.where(landmarks.active[:, None], kernel.gram(landmarks.points, points), 0)
    return jax.scipy.linalg.solve_triangular(cholesky, cross, lower=True).T


def landmark_features(kernel: Any, points: Points, landmarks: Landmarks) -> LandmarkFeatures:
    r"""Features $\phi(x) = L^{-1} k(P, x)$ of given landmarks at a sample.

    **Arguments:** `kernel`; `points`, a sample `[n, ...]`; `landmarks` with r points of the same kind.

    Cost O(n r d + n r^2 + r^3), memory O(n r). The landmark Gram matrix gets ten times the library's jitter, so
    that value and gradient stay finite for repeated or nearly repeated landmarks.
    """
    kernel = as_kernel(kernel)
    check_alike(landmarks.points, "landmarks", points, "points")
    kernel.check(points, "points")
    active = landmarks.active
    matrix = kernel.gram(landmarks.points, landmarks.points)
    matrix = jnp.where(active[:, None] & active[None, :], matrix, 0) + jnp.diag((~active).astype(matrix.dtype))
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    cholesky = jnp.linalg.cholesky(matrix + 10 * lax.stop_gradient(jitter(matrix)) * identity)
    return LandmarkFeatures(kernel, points, _features(kernel, landmarks, cholesky, points), landmarks, cholesky)


def fit_features(kernel: Any, points: Points, landmarks: Landmarks | int | None) -> AbstractFeatures:
    """Exact features for None, greedy landmarks for a rank, features of the given landmarks otherwise."""
    kernel = as_kernel(kernel)
    if landmarks is None:
        return exact_features(kernel, points)
    if isinstance(landmarks, (int, np.integer)):
        landmarks = greedy_landmarks(kernel, points, rank=int(landmarks))
    if not isinstance(landmarks, Landmarks):
        raise ValueError(f"Landmarks must be None (exact), a rank, or `Landmarks`; got {type(landmarks).__name__}.")
    return landmark_features(kernel, points, landmarks)


def incomplete_cholesky(
    kernel: Any, x: Points, *, rank: int, tolerance: float | None = None, key: PRNGKeyArray | None = None
) -> IncompleteCholesky:
    r"""Pivoted incomplete Cholesky decomposition of a Gram matrix that is never formed.

    At each step the pivot is the point of largest residual $K_{ii} - (L L^\top)_{ii}$ (greedy), or, with a `key`, a point
    drawn with probability proportional to its residual (randomly pivoted: Chen, Epperly, Tropp and Webber 2023).

    **Arguments:**

    - `kernel`, `x`: kernel and sample `[n, ...]`.
    - `rank`: largest number r of columns (static).
    - `tolerance`: stop once the trace of the residual is at most this fraction of the trace of K; by default 1e-12 in
      float64 and 1e-6 in float32, below which the residual is rounding error.
    - `key`: for random pivots.

    **Returns:** an `IncompleteCholesky`. Columns after the stop are zero and not `active`; the shape is always `[n, r]`.
    No gradient flows through it; use `landmark_features` for one. Cost O(n r^2 + n r d), memory O(n r).
    """
    kernel = as_kernel(kernel)
    x = check_finite(as_points(x, "x"), "x")
    kernel.check(x, "x")
    rank = as_count(rank, "rank")
    dtype = jax.eval_shape(kernel.diagonal, x).dtype
    if tolerance is None:
        tolerance = 1e-12 if jnp.finfo(dtype).eps < 1e-10 else 1e-6
    return _decompose(kernel, x, min(rank, size(x)), jnp.asarray(tolerance, dtype), key)


@eqx.filter_jit
def _decompose(kernel, x, rank: int, tolerance, key) -> IncompleteCholesky:
    kernel, x = lax.stop_gradient((kernel, x))
    diagonal = kernel.diagonal(x)
    floor = 4 * jnp.finfo(diagonal.dtype).eps * jnp.max(diagonal)
    keys = None if key is None else jax.random.split(key, rank)

    def add_column(i, state: IncompleteCholesky) -> IncompleteCholesky:
        if keys is None:
            pivot = jnp.argmax(state.residual)
        else:
            pivot = jax.random.categorical(keys[i], jnp.log(state.residual))
        height = state.residual[pivot]
        active = (height > floor) & (jnp.sum(state.residual) > tolerance * jnp.sum(diagonal))
        kernel_column = kernel.gram(x, take(x, pivot[None]))[:, 0]
        column = (kernel_column - matmul(state.factor, state.factor[pivot])) / jnp.sqrt(jnp.where(active, height, 1))
        column = jnp.where(active, column, 0)
        residual = jnp.maximum(state.residual - column**2, 0)
        return IncompleteCholesky(
            state.factor.at[:, i].set(column),
            state.pivots.at[i].set(pivot),
            state.active.at[i].set(active),
            jnp.where(active, residual.at[pivot].set(0), residual),
        )

    start = IncompleteCholesky(
        jnp.zeros((size(x), rank), diagonal.dtype), jnp.zeros(rank, int), jnp.zeros(rank, bool), diagonal
    )
    return lax.fori_loop(0, rank, add_column, start)


def greedy_landmarks(kernel: Any, x: Points, *, rank: int, tolerance: float | None = None) -> Landmarks:
    """Landmarks by pivoted incomplete Cholesky: each is the point worst explained by those before it.

    The choice of F11 and S13 for low-rank filters. Arguments and cost: `incomplete_cholesky`.
    """
    return _landmarks_of(x, incomplete_cholesky(kernel, x, rank=rank, tolerance=tolerance))


def random_landmarks(
    kernel: Any, x: Points, *, rank: int, key: PRNGKeyArray, tolerance: float | None = None
) -> Landmarks:
    """Landmarks by randomly pivoted Cholesky: drawn in proportion to the residual, so outliers do not take over.

    Arguments and cost: `incomplete_cholesky`.
    """
    return _landmarks_of(x, incomplete_cholesky(kernel, x, rank=rank, tolerance=tolerance, key=key))


def uniform_landmarks(x: Points, *, rank: int, key: PRNGKeyArray) -> Landmarks:
    """A uniform subsample of `rank` points without replacement, O(n)."""
    x = as_points(x, "x")
    rank = as_count(rank, "rank", x, "x")
    return given_landmarks(take(x, jax.random.choice(key, size(x), (rank,), replace=False)))


def given_landmarks(points: Points) -> Landmarks:
    """The given points `[r, ...]` as landmarks. They are differentiable: inducing points can be learned."""
    points = check_finite(as_points(points, "points"), "points")
    return Landmarks(points, jnp.ones(size(points), bool))


def _landmarks_of(x: Points, decomposition: IncompleteCholesky) -> Landmarks:
    return Landmarks(take(jax.tree.map(jnp.asarray, x), decomposition.pivots), decomposition.active)
