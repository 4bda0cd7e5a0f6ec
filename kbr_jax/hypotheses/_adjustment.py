"""Regressions on covariates that choose their features: of outcomes, and of a treatment."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._lapack import cholesky, eigh, triangular_solve
from .._numerics import matmul
from .._typing import Array, Bool, Float, Int

#: Ridges of the regressions of y, in units of the kernel of x, and of the propensity, from a
#: constant on. With penalties down to 1e-4, 1e-3 and 1e-2, a true hypothesis was rejected at level
#: .1 in .11, .12 and .15 of 300 samples of 100 points (propensity of slope 1), and in .18, .18 and
#: .30 of 200 points (slope 2: weak overlap); a shift of the mean was found at level .05 in .42, .52
#: and .83 of 200 points.
RIDGES, PENALTIES = 10.0 ** np.arange(1.0, -6.0, -1.0), 10.0 ** np.arange(1.0, -4.0, -1.0)
#: Newton steps for each penalty, from the solution of the one before.
_STEPS = 6


def regression(
    candidates: Float[Array, "c n r"], gram: Float[Array, "n n"], known: Float[Array, " n"]
) -> Float[Array, "n n"]:
    """Weights of the known y in conditional embeddings at all x.

    Rows have sum 1. Kernel ridge regression with an intercept, with the features and the ridge of
    least leave-one-out error.
    """
    count = jnp.sum(known)
    # Errors of an embedding are products with the Gram matrix, centered in the arm.
    means = matmul(gram, known) / count
    apart = gram - means - means[:, None] + jnp.sum(known * means) / count
    ridges = jnp.asarray(RIDGES, gram.dtype)

    def fitted(phi: Float[Array, "n r"]):
        center = phi - matmul(known, phi) / count
        values, vectors = eigh(matmul((known[:, None] * center).T, center))
        basis = matmul(center, vectors)
        back = known[:, None] * basis
        cross = matmul(apart, back)
        inner = matmul(back.T, cross)

        def shrunk(ridge: Float[Array, ""]) -> Float[Array, "n r"]:
            return basis / (jnp.maximum(values, 0) + count * ridge)

        def loss(ridge: Float[Array, ""]) -> Float[Array, ""]:
            fit = shrunk(ridge)
            errors = jnp.diagonal(apart) + jnp.sum((matmul(fit, inner) - 2 * cross) * fit, axis=1)
            left = 1 - 1 / count - jnp.sum(fit * basis, axis=1)
            # The error of a point that decides its own fit is rounding, and not known.
            least = jnp.finfo(left.dtype).eps ** 0.5
            found = jnp.sum(known * errors / jnp.maximum(left, least) ** 2)
            return jnp.where(jnp.min(jnp.where(known > 0, left, 1)) > least, found, jnp.inf)

        losses = lax.map(loss, ridges)
        best = _first_of_two(count, losses)
        return losses[best], shrunk(ridges[best]), back

    losses, fits, backs = lax.map(fitted, candidates)
    best = _first_of_two(count, losses)
    return matmul(fits[best], backs[best].T) + known / count


def _first_of_two(count: Float[Array, ""], losses: Float[Array, " q"]) -> Int[Array, ""]:
    """The least loss. Two points have the same error with any fit, and rounding would choose."""
    return jnp.where(count > 2, jnp.argmin(losses), 0)


def propensities(
    candidates: Float[Array, "c n r"], treated: Bool[Array, " n"], known: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Probabilities of the treatment at all points, of the features of largest likelihood."""
    found, likelihoods = lax.map(lambda phi: _logistic(phi, treated, known), candidates)
    return found[_largest(likelihoods)]


def _largest(likelihoods: Float[Array, " q"]) -> Int[Array, ""]:
    """Where Newton's method has left the numbers, the other fits are compared."""
    return jnp.argmax(jnp.where(jnp.isnan(likelihoods), -jnp.inf, likelihoods))


def _logistic(
    phi: Float[Array, "n r"], treated: Bool[Array, " n"], known: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, ""]]:
    r"""Logistic ridge regression with an intercept, at all points, and its likelihood.

    Newton steps along a path of penalties. The penalty has the largest likelihood of known points,
    each left out by one Newton step: $\eta_i + h_i (p_i - a_i) / (1 - p_i (1 - p_i) h_i)$ with
    $h_i = z_i^\top H^{-1} z_i$ for the Hessian H.
    """
    count = jnp.sum(known)
    center = phi - matmul(known, phi) / count
    z = jnp.concatenate([center, jnp.ones_like(center[:, :1])], axis=1)
    labels = treated.astype(phi.dtype)
    odds = jnp.sum(known * labels) / jnp.sum(known * (1 - labels))
    free = jnp.zeros_like(z[0]).at[-1].set(1)

    def at(w: Float[Array, " q"], ridge: Float[Array, " q"]):
        """Probabilities, their variances, and a root of the Hessian."""
        share = jax.nn.sigmoid(matmul(z, w))
        spread = share * (1 - share)
        hessian = matmul(z.T, (known * spread)[:, None] * z) + jnp.diag(ridge)
        return share, spread, cholesky(hessian)

    def fit(w, penalty):
        ridge = count * penalty * (1 - free)

        def step(w, _):
            share, _, root = at(w, ridge)
            slope = matmul(z.T, known * (share - labels)) + ridge * w
            half = triangular_solve(root, slope[:, None])
            return w - triangular_solve(root, half, transpose=True)[:, 0], None

        w, _ = lax.scan(step, w, None, length=_STEPS)
        share, spread, root = at(w, ridge)
        own = jnp.sum(triangular_solve(root, z.T) ** 2, axis=0)
        left = jnp.maximum(1 - spread * own, jnp.finfo(own.dtype).eps ** 0.5)
        out = matmul(z, w) + own * (share - labels) / left
        likelihood = jnp.sum(known * jax.nn.log_sigmoid(jnp.where(treated, out, -out)))
        return w, (w, likelihood)

    start = free * jnp.log(odds)
    _, (paths, likelihoods) = lax.scan(fit, start, jnp.asarray(PENALTIES, phi.dtype))
    best = _largest(likelihoods)
    return jax.nn.sigmoid(matmul(z, paths[best])), likelihoods[best]
