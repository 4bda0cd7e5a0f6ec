r"""Gaussian mixtures embedded by a Gaussian kernel in closed form: a sample of infinite size."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_float, as_points, as_real, as_weights, check_alike
from .._lapack import cholesky, triangular_solve
from .._numerics import exp, matmul, safe_sqrt, squared_distances
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding, check_unbatched, squared_norm
from ..kernels import Gaussian, KernelLike, Scaled, as_kernel


class GaussianMixture(eqx.Module):
    r"""$\sum_c \pi_c N(m_c, \Sigma_c)$ on $\mathbb{R}^d$, with shares of any sign.

    - `means`: `[..., c, d]`; `covariances`: `[..., c, d, d]`, zero for a point mass; `shares`:
      `[..., c]`.
    """

    means: Float[Array, "*batch c d"]
    covariances: Float[Array, "*batch c d d"]
    shares: Float[Array, "*batch c"]


def gaussian_mixture(
    means: ArrayLike, covariances: ArrayLike, shares: ArrayLike | None = None
) -> GaussianMixture:
    r"""A `GaussianMixture` from means `[..., c, d]`, and covariances `[..., c, d, d]`, or variances
    `[..., c]` of round Gaussians.

    `shares` `[..., c]` of any sign, uniform by default. **Raises:** `ValueError` for shapes that do
    not fit.
    """
    means = jnp.asarray(means)
    if means.ndim < 2 or not jnp.issubdtype(means.dtype, jnp.floating):
        raise ValueError(
            f"`means` must be floating-point of shape [..., c, d], got "
            f"{means.dtype}{list(means.shape)}."
        )
    covariances = jnp.asarray(covariances, means.dtype)
    if covariances.shape == means.shape[:-1]:
        covariances = covariances[..., None, None] * jnp.eye(means.shape[-1], dtype=means.dtype)
    if covariances.shape != (*means.shape, means.shape[-1]):
        raise ValueError(
            f"`covariances` has shape {covariances.shape}; for means {means.shape} it must be "
            f"{means.shape[:-1]} (variances) "
            f"or {(*means.shape, means.shape[-1])} (matrices)."
        )
    shares = as_weights(shares, means.shape[-2], "shares", means.dtype)
    return GaussianMixture(
        means, covariances, jnp.broadcast_to(shares.astype(means.dtype), means.shape[:-1])
    )


def _unscaled(kernel: KernelLike, dtype: jnp.dtype) -> tuple[Float[Array, ""] | float, Gaussian]:
    """A Gaussian kernel and the factor before it; any other kernel is a `ValueError`."""
    kernel, factor = as_kernel(kernel), 1.0
    while isinstance(kernel, Scaled):
        factor, kernel = factor * kernel.factor.astype(dtype), kernel.kernel
    if not isinstance(kernel, Gaussian):
        raise ValueError(
            f"Embedded Gaussians have a closed form under `Gaussian` kernels, scaled if you like, "
            f"not {type(kernel).__name__}."
        )
    return factor, kernel


@jax.jit
def _log_expected_kernel(
    kernel: Gaussian, difference: Float[Array, "*s d"], covariance: Float[Array, "*t d d"]
) -> Float[Array, "*u"]:
    r"""$\log E k(X, Y)$ for $X - Y \sim N(difference, covariance)$.

    Leading axes broadcast, each covariance is factored once.
    """
    dimension = difference.shape[-1]
    squares = jnp.broadcast_to(
        kernel.bandwidth.astype(difference.dtype).reshape(-1) ** 2, (dimension,)
    )
    lower = cholesky(jnp.diag(squares) + covariance)
    identity = jnp.broadcast_to(jnp.eye(dimension, dtype=lower.dtype), lower.shape)
    inverse = triangular_solve(lower, identity)
    scaled = matmul(inverse, difference[..., None])[..., 0]
    half_logs = (
        jnp.sum(jnp.log(jnp.diagonal(lower, axis1=-2, axis2=-1)), axis=-1)
        - jnp.sum(jnp.log(squares)) / 2
    )
    return -half_logs - jnp.sum(scaled**2, axis=-1) / 2


def inner_mixtures(
    kernel: KernelLike, p: GaussianMixture, q: GaussianMixture
) -> Float[Array, "*batch"]:
    r"""Inner product of two embedded mixtures,

    $$ \langle \mu_p, \mu_q \rangle = \sum_{ab} \pi_a \rho_b \sqrt{|H| / |H + \Sigma_a + \Sigma_b|}
       \exp(-\tfrac12 (m_a - m_b)^\top (H + \Sigma_a + \Sigma_b)^{-1} (m_a - m_b)), $$

    for a Gaussian kernel of squared bandwidths H, or a multiple of one (`2.0 * Gaussian(1.0)`).
    Batch axes broadcast.

    **Returns:** `[...]`. Cost O(c_p c_q d^3). **Raises:** `ValueError` for any other kernel.
    """
    if p.means.shape[-1] != q.means.shape[-1]:
        raise ValueError(
            f"The mixtures have {p.means.shape[-1]} and {q.means.shape[-1]} coordinates; they must "
            f"agree."
        )
    return _inner(*_unscaled(kernel, jnp.result_type(p.means, q.means)), p, q)


@eqx.filter_jit
def _inner(
    factor: Any, gaussian: Gaussian, p: GaussianMixture, q: GaussianMixture
) -> Float[Array, "*batch"]:
    difference = p.means[..., :, None, :] - q.means[..., None, :, :]
    covariance = p.covariances[..., :, None, :, :] + q.covariances[..., None, :, :, :]
    values = exp(_log_expected_kernel(gaussian, difference, covariance))
    return factor * jnp.sum(p.shares[..., :, None] * q.shares[..., None, :] * values, axis=(-2, -1))


def mixture_gram(kernel: KernelLike, mixtures: GaussianMixture) -> Float[Array, "T T"]:
    r"""Gram matrix of T embedded mixtures, with a leading axis T, for `fit_dynamics(gram=...)`.

    They are samples of infinite size. Cost O(T^2 c^2 d^3). **Raises:** `ValueError` as
    `inner_mixtures`.
    """
    rows = jax.tree.map(lambda leaf: leaf[:, None], mixtures)
    return inner_mixtures(kernel, rows, jax.tree.map(lambda leaf: leaf[None], mixtures))


def combine_mixtures(mixtures: GaussianMixture, coefficients: ArrayLike) -> GaussianMixture:
    r"""$\sum_t c_t p_t$ of T mixtures with a leading axis, for coefficients `[T]` of any sign."""
    means, covariances = (
        leaf.reshape(-1, *leaf.shape[2:]) for leaf in (mixtures.means, mixtures.covariances)
    )
    dtype = mixtures.shares.dtype
    rows = as_weights(as_float(coefficients), len(mixtures.means), "coefficients", dtype)
    shares = rows.astype(dtype)[:, None] * mixtures.shares
    return GaussianMixture(means, covariances, shares.reshape(-1))


def mmd_mixtures(
    kernel: KernelLike, p: GaussianMixture, q: GaussianMixture
) -> Float[Array, "*batch"]:
    r"""$|\mu_p - \mu_q|$ of two embedded mixtures. Batch axes broadcast.

    Cost and errors: `inner_mixtures`.
    """
    square = inner_mixtures(kernel, p, p) - 2 * inner_mixtures(kernel, p, q)
    return safe_sqrt(square + inner_mixtures(kernel, q, q))


def evaluate_mixture(
    kernel: KernelLike, mixture: GaussianMixture, points: Points
) -> Float[Array, "*batch n"]:
    r"""$\mu_p(z) = E_p k(Z, z)$ at points `[n, d]`, in closed form: the density of p smoothed by
    the kernel.

    **Returns:** `[..., n]`, leading axes as the batch of mixtures. Cost O(c d^3 + n c d^2) for
    each.

    **Raises:** `ValueError` as `inner_mixtures`, and for points of another dimension.
    """
    points = as_real(as_points(points, "points"), mixture.means)
    if points.shape[1:] != mixture.means.shape[-1:]:
        raise ValueError(
            f"`points` must be [n, {mixture.means.shape[-1]}] for this mixture, got "
            f"{list(points.shape)}."
        )
    factor, gaussian = _unscaled(kernel, points.dtype)
    difference = points[:, None, :] - mixture.means[..., None, :, :]
    values = exp(
        _log_expected_kernel(gaussian, difference, mixture.covariances[..., None, :, :, :])
    )
    return factor * jnp.sum(mixture.shares[..., None, :] * values, axis=-1)


def mmd_mixture(embedding: Embedding, mixture: GaussianMixture) -> Float[Array, "*batch"]:
    r"""$|\mu - \mu_p|$ of an embedding of n points `[n, d]` and an embedded mixture: its distance
    to a sample of infinite size.

    Batch axes, of the embedding's weights and of the mixture, broadcast. **Returns:** `[...]`. Cost
    O(n^2 d). **Raises:** `ValueError` as `inner_mixtures`.
    """
    kernel = embedding.kernel
    cross = jnp.sum(
        embedding.weights * evaluate_mixture(kernel, mixture, embedding.points), axis=-1
    )
    return safe_sqrt(squared_norm(embedding) - 2 * cross + inner_mixtures(kernel, mixture, mixture))


def smoothed_kl(mixture: GaussianMixture, embedding: Embedding, grid: Points) -> Float[Array, ""]:
    r"""$KL(p * k \,\|\, q * k)$ of a mixture p and a sample q, both smoothed by the kernel.

    It is computed on a grid of equal cells.

    With p known and q a sample without negative weights (for example a herded one) this is the
    divergence of Lampert 2015, table 2. Each is normalized to sum 1 over the grid, which must cover
    both.

    **Arguments:** `grid` `[g, d]`; one mixture and one embedding, use `vmap` for batches.
    **Returns:** a scalar; infinite where q is not positive and p is. In logarithms, so that q is
    positive however far a grid point is from the sample; what of p is too small for its dtype
    counts as 0. Cost O(g (n + c d) d).

    **Raises:** `ValueError` as `inner_mixtures`, for batches, and for a grid or a mixture of
    another dimension.
    """
    grid = as_real(as_points(grid, "grid"), embedding.points)
    check_alike(grid, "grid", embedding.points, "embedding.points")
    check_unbatched(embedding, "embedding")
    if mixture.means.ndim != 2 or mixture.means.shape[1:] != grid.shape[1:]:
        raise ValueError(
            f"`mixture` has means {mixture.means.shape}; one mixture on the `grid` has (c, "
            f"{grid.shape[-1]}). Use `vmap` for several."
        )
    _, kernel = _unscaled(embedding.kernel, grid.dtype)
    squares = squared_distances(kernel.standardize(grid), kernel.standardize(embedding.points))
    log_p = _log_shares(
        _log_expected_kernel(kernel, grid[:, None] - mixture.means, mixture.covariances),
        mixture.shares,
    )
    log_q = _log_shares(-squares / 2, embedding.weights)
    p = exp(log_p)
    present = p > 0
    return jnp.sum(p * jnp.where(present, log_p - jnp.where(present, log_q, 0), 0))


@jax.jit
def _log_shares(logs: Float[Array, "g n"], weights: Float[Array, " n"]) -> Float[Array, " g"]:
    r"""Logarithm of $\sum_i w_i e^{l_{gi}}$, normalized to sum 1 over g.

    $-\infty$ where the sum is not positive.
    """
    nearest = jnp.max(jnp.where(weights != 0, logs, -jnp.inf), axis=1)
    shift = lax.stop_gradient(jnp.where(jnp.isfinite(nearest), nearest, 0))
    # Only terms without weight reach the bound, which keeps 0 times infinity out of the sum.
    sums = matmul(exp(jnp.minimum(logs - shift[:, None], 40)), weights)
    peak = jnp.max(shift)
    total = jnp.sum(sums * exp(shift - peak))
    empty = (sums <= 0) | (total <= 0)
    values = (
        jnp.log(jnp.where(empty, 1, sums))
        + (shift - peak)
        - jnp.log(jnp.where(total <= 0, 1, total))
    )
    return jnp.where(empty, -jnp.inf, values)
