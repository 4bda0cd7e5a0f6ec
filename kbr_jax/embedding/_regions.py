"""Credible regions by the density of a belief, for points of any number of dimensions."""

import math

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_positive
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Points
from ._embedding import Embedding, one_each


def credible_level(
    embedding: Embedding, points: Points, *, temperature: ArrayLike = 1.0
) -> Float[Array, "*b"]:
    r"""Return the mass of the smallest credible region that holds a point.

    With $p_i \propto \max(w_i, 0)^{1/\tau}$, of sum 1, and the density
    $f(x) = \sum_i p_i k(x, x_i)$ in the kernel of the embedding,

    $$ a(s) = \sum_i p_i \, 1[f(x_i) > f(s)]. $$

    The credible region of mass u is $\{s : a(s) \le u\}$. It may have several parts. Where beliefs
    are calibrated, a(s) of the true states is uniform on [0, 1].

    **Arguments:** `embedding`, weights `[n]`, or `[b, n]` for b beliefs; `points`, one point, or
    `[b, ...]`; `temperature` $\tau$ > 0: above 1 regions are wider, see
    `kbr_jax.tuning.calibrate`.

    **Returns:** a scalar, or `[b]`, in [0, 1]; NaN where no weight is positive. Cost
    O(n^2 (b + d)).

    **Raises:** `ValueError` for points of another kind or number.
    """
    points = one_each(embedding, points)
    embedding.kernel.check(points, "points")
    tau = as_positive(temperature, "temperature", scalar=True)
    levels = _levels(embedding, points, tau)
    return levels[0] if embedding.weights.ndim == 1 else levels


@eqx.filter_jit
def _levels(embedding: Embedding, points: Points, tau: Float[Array, ""]) -> Float[Array, " b"]:
    positive = jnp.maximum(jnp.atleast_2d(embedding.weights), 0)
    # Powers of weights relative to the largest cannot all underflow. 0/0 marks a missing belief.
    relative = positive / jnp.max(positive, axis=1, keepdims=True)
    shares = jnp.where(relative > 0, relative, 0) ** (1 / tau.astype(relative.dtype))
    shares = jnp.where(jnp.isnan(relative), jnp.nan, shares)
    shares = shares / jnp.sum(shares, axis=1, keepdims=True)
    kernel = embedding.kernel
    own = matmul(shares, kernel.gram(embedding.points, embedding.points).astype(shares.dtype))
    at = jnp.sum(kernel.gram(points, embedding.points).astype(shares.dtype) * shares, axis=1)
    # The two sums round differently: a point is not more likely than its own copy.
    n, eps = shares.shape[1], float(jnp.finfo(shares.dtype).eps)
    slack = 4 * eps * math.sqrt(n) * jnp.max(jnp.abs(own), axis=1, keepdims=True)
    levels = jnp.sum(jnp.where(own > at[:, None] + slack, shares, 0), axis=1)
    return jnp.where(jnp.isnan(at), jnp.nan, levels)
