"""A discriminant between true states and look-alikes, with Student's likelihood."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    as_count,
    as_points,
    as_positive,
    as_regularizer,
    check_alike,
    check_finite,
    check_same_size,
    in_one_precision,
    is_concrete,
    size,
)
from .._lapack import cholesky, eigh, triangular_solve
from .._numerics import matmul
from .._solves import psd_factor
from .._typing import Array, ArrayLike, Float, Int, Point, Points
from ..kernels import AbstractKernel, KernelLike, as_kernel

#: Regularizers that are tried. In the look-alike room 1e-5 is chosen up to variance .001 of the
#: pixels, and 1e-5 or 1e-4 above. With 1e-4 everywhere a right belief was left in two runs of 24.
#: At .01 and a seed at which 1e-4 is chosen, wrong beliefs are left after 17 frames (median), and
#: with 1e-5 after 20.
REGULARIZERS = (1e-5, 1e-4, 1e-3, 1e-2)
#: Share of its diagonal in the residuals' covariance, and share of the mean variance that is added.
#: In the look-alike room at variance .01 no right belief is left at three seeds of the noise
#: (`python -m benchmarks.camera.recovery`). With 1e-3 of the mean variance alone one was, at one.
SHRINKAGE, FLOOR = 0.1, 1e-6
#: Quantile of the evidence that is called informative. In seven runs of the look-alike room, with
#: the slack .3, sums of right beliefs reach .47, .34 and .30 by the quantiles .75, .9 and .95, and
#: beyond .6 each time 19 or 20 of 20 wrong starts are back in time.
INFORMATIVE = 0.9


class DiscriminantLikelihood(eqx.Module):
    r"""Likelihood of a state in the features that tell it from an alternative.

    Fit it with `fit_discriminant`. From training states $s_i$, features $y_i \in \mathbb R^p$ of
    the observations, and for each i an alternative $r_i$: another state that the observation could
    be taken for.

    - Regression with kernel k, $A = G + n \varepsilon I$:
      $m(s) = \bar y + k(S, s)^\top A^{-1} (Y - \bar y)$ with
      $\sigma^2(s) = k(s, s) + n \varepsilon - k(S, s)^\top A^{-1} k(S, s)$.
    - Residuals of the truth $z_i = (y_i - m_{-i}(s_i)) / \sigma_{-i}(s_i)$, where $m_{-i}$ has not
      seen the block of i in time, and of the alternative $z'_i = (y_i - m(r_i)) / \sigma(r_i)$.
      Their second moments are C and C'. Off the diagonal C is times .9, and it has 1e-6 of its mean
      variance on it. C' has Student's weights
      $(\nu + 1) / (\nu + z_i'^\top C^{-1} z'_i / p)$: where an alternative is a training state, m
      holds its noise and sigma is small. Few such residuals would decide.
    - Directions: the generalized eigenvectors $C' v = g C v$, $v^\top C v = 1$, of the largest g.
    - $\ell(s; y) = -\frac{\nu + 1}{2} \sum_v (1 - 1 / g_v)_+ \log(1 + u_v^2 / \nu)$ with
      $u_v = v^\top (y - m(s)) / \sigma(s)$: Student's log-density of nu degrees of freedom, in the
      directions where residuals of alternatives are larger. Differences are log-likelihood ratios.
    - `informative` is the .9 quantile of $\ell_{-i}(s_i; y_i) - \ell(r_i; y_i)$ over the training
      pairs, in nats: what one in ten observations says for the truth, or more.

    Prediction errors in the other directions would hide what these directions say.
    """

    kernel: AbstractKernel
    states: Points
    center: Float[Array, " p"]
    directions: Float[Array, "p d"]
    ratios: Float[Array, " d"]
    coefficients: Float[Array, "n d"]
    inverse: Float[Array, "n n"]
    noise: Float[Array, ""]
    degrees: Float[Array, ""]
    informative: Float[Array, ""]

    def project(self, features: Float[Array, "*batch p"]) -> Float[Array, "*batch d"]:
        """Return what `log_likelihood` needs of the features of an observation."""
        return matmul(features - self.center, self.directions)

    def predict(self, points: Points) -> tuple[Float[Array, "m d"], Float[Array, " m"]]:
        """Projected features of states, and their variances. Cost O(m n^2)."""
        columns = self.kernel.gram(points, self.states)
        weights = matmul(columns, self.inverse)
        variances = _variances(self.kernel, points, columns, weights, self.noise)
        return matmul(columns, self.coefficients), variances

    def log_likelihoods(
        self, predictions: tuple[Float[Array, "m d"], Float[Array, " m"]], projected: Array
    ) -> Float[Array, " m"]:
        """Return l(s; y) of states with these predictions, for projected features y. Cost O(m)."""
        means, variances = predictions
        residuals = (projected - means) / jnp.sqrt(variances)[:, None]
        return _log_density(residuals, self.ratios, self.degrees)

    def log_likelihood(self, state: Point, projected: Float[Array, " d"]) -> Float[Array, ""]:
        """Return l(state; y) for the projected features of one observation. Cost O(n^2)."""
        point = jax.tree.map(lambda leaf: leaf[None], state)
        return self.log_likelihoods(self.predict(point), projected)[0]

    def noise_shares(self, points: Points) -> Float[Array, " m"]:
        r"""Return $\rho(s) = n \varepsilon / \sigma^2(s)$, the share of noise in the variance.

        Far from the training states the error of m is the same in many observations: together they
        say little. Cost O(m n^2).
        """
        return self.noise / self.predict(points)[1]


def fit_discriminant(
    kernel: KernelLike,
    states: Points,
    features: ArrayLike,
    alternatives: Points,
    *,
    regularizer: ArrayLike | None = None,
    degrees: ArrayLike = 3.0,
    num_directions: int = 1,
    block_size: int = 40,
) -> DiscriminantLikelihood:
    r"""Learn what tells true states from alternatives.

    **Arguments:**

    - `kernel`: kernel on states, or a callable of two points.
    - `states`, `alternatives`: `[n, ...]`, in order of time; `features`: `[n, p]`.
    - `regularizer`: epsilon > 0 in `G + n epsilon I`. Below about 1e-5 it needs float64. By default
      the power of ten from 1e-5 to 1e-2 with which blocks left out are likeliest under a Gaussian
      of covariance $\sigma_{-i}^2 C$: the largest
      $-\frac12 \log\det C - \frac p{2n} \sum_i \log \sigma_{-i}^2(s_i)$.
    - `degrees`: nu > 0. Fewer bound what a single observation can say.
    - `num_directions`: number of directions (static), at most p.
    - `block_size`: number of successive points left out together (static), at most n / 2: longer
      than neighbors in time resemble each other.

    Cost O(n^3 + n^2 p + p^3) for each regularizer that is tried, memory O(n^2).

    **Raises:** `ValueError` for samples of different lengths or kinds, features that are all
    constant, non-finite values, or parameters out of range.
    """
    kernel = as_kernel(kernel)
    states, alternatives = as_points(states, "states"), as_points(alternatives, "alternatives")
    rows = _as_features(features, states)
    states, alternatives, rows = in_one_precision(states, alternatives, rows)
    check_alike(alternatives, "alternatives", states, "states")
    check_same_size(alternatives, "alternatives", states, "states")
    kernel.check(states, "states")
    kernel.check(alternatives, "alternatives")
    n, dtype = size(states), rows.dtype
    count = as_count(num_directions, "num_directions", rows.T, "features of one observation")
    if 2 * as_count(block_size, "block_size") > n:
        raise ValueError(
            f"`block_size` must leave at least half of the {n} training points, got {block_size}."
        )
    if regularizer is None:
        tried = jnp.asarray(REGULARIZERS, dtype)
    else:
        tried = as_regularizer(regularizer, "regularizer", dtype)[None]
    degrees = as_positive(degrees, "degrees", scalar=True).astype(dtype)
    return _learned(kernel, states, rows, alternatives, (n * tried, degrees), count, block_size)


@eqx.filter_jit
def _learned(
    kernel: AbstractKernel,
    states: Points,
    rows: Float[Array, "n p"],
    alternatives: Points,
    numbers: tuple[Float[Array, " e"], Float[Array, ""]],
    count: int,
    block_size: int,
) -> DiscriminantLikelihood:
    noises, degrees = numbers
    center = jnp.mean(rows, axis=0)
    noise = _likeliest(kernel, states, rows - center, noises, block_size)
    inverse, *operators = residual_operators(kernel, states, alternatives, noise, block_size)
    own, others = (matmul(operator, rows - center) for operator in operators)
    ratios, vectors = _largest_ratios(own, others, count, degrees)
    gains = _log_density(matmul(own, vectors), ratios, degrees) - _log_density(
        matmul(others, vectors), ratios, degrees
    )
    return DiscriminantLikelihood(
        kernel=kernel,
        states=states,
        center=center,
        directions=vectors,
        ratios=ratios,
        coefficients=matmul(inverse, matmul(rows - center, vectors)),
        inverse=inverse,
        noise=noise,
        degrees=degrees,
        informative=jnp.quantile(gains, INFORMATIVE),
    )


def _as_features(features: ArrayLike, states: Points) -> Float[Array, "n p"]:
    features = jnp.asarray(features)
    if features.ndim != 2 or not jnp.issubdtype(features.dtype, jnp.floating):
        raise ValueError(
            f"`features` must be a floating-point matrix [n, p], one row for each observation, got "
            f"{features.dtype}{list(features.shape)}."
        )
    check_same_size(features, "features", states, "states")
    if is_concrete(features) and np.ptp(np.asarray(features), axis=0).max() == 0:
        raise ValueError("`features` are the same for all observations: they tell no states apart.")
    return check_finite(features, "features")


@eqx.filter_jit
def residual_operators(
    kernel: AbstractKernel, states: Points, alternatives: Points, noise: Array, block: int
) -> tuple[Float[Array, "n n"], Float[Array, "n n"], Float[Array, "n n"]]:
    r"""Matrices of ridge regression from states with $A = G + \text{noise}\, I$.

    **Returns:** $A^{-1}$, and what takes values `[n, p]` to their standardized residuals: those of
    the states, predicted without their block, and those of the alternatives.
    """
    inverse = _inverse(kernel.gram(states, states), noise)
    unit = jnp.eye(inverse.shape[0], dtype=inverse.dtype)
    columns = kernel.gram(alternatives, states)
    weights = matmul(columns, inverse)
    variances = _variances(kernel, alternatives, columns, weights, noise)
    others = (unit - weights) / jnp.sqrt(variances)[:, None]
    return inverse, _held_out(inverse, block)[0], others


def _inverse(gram: Float[Array, "n n"], noise: Array) -> Float[Array, "n n"]:
    return psd_factor(gram, noise).solve(jnp.eye(gram.shape[0], dtype=gram.dtype))


def _likeliest(
    kernel: AbstractKernel, states: Points, values: Array, noises: Float[Array, " e"], block: int
) -> Float[Array, ""]:
    """The noise with which values left out in blocks have the greatest likelihood."""
    if noises.shape[0] == 1:
        return noises[0]
    gram = kernel.gram(states, states)

    def surprise(noise):
        operator, variances = _held_out(_inverse(gram, noise), block)
        root = cholesky(_shrunk(matmul(operator, values)))
        return 2 * jnp.mean(jnp.log(jnp.diagonal(root))) + jnp.mean(jnp.log(variances))

    found = lax.map(surprise, noises)
    return noises[jnp.argmin(jnp.where(jnp.isfinite(found), found, jnp.inf))]


def _variances(kernel, points, columns, weights, noise) -> Float[Array, " m"]:
    explained = jnp.sum(weights * columns, axis=1)
    return jnp.maximum(kernel.diagonal(points) + noise - explained, noise)


def _held_out(inverse, block: int) -> tuple[Float[Array, "n n"], Float[Array, " n"]]:
    """What takes values Y to residuals of each point, predicted without its block and standardized:
    $(A^{-1}_{bb})^{-1} (A^{-1} Y)_b$, and their variances.

    The last block may reach back into the block before; then only its new rows are used.
    """
    n = inverse.shape[0]
    full = n // block
    starts = [*range(0, full * block, block), n - block]

    def residuals(index: Int[Array, " block"]):
        part = inverse[index[:, None], index[None, :]]
        factor = psd_factor(part)
        variances = jnp.diagonal(factor.solve(jnp.eye(block, dtype=part.dtype)))
        return factor.solve(inverse[index]) / jnp.sqrt(variances)[:, None], variances

    rest = n - full * block

    def joined(rows):
        return jnp.concatenate(
            [rows[:-1].reshape(full * block, *rows.shape[2:]), rows[-1, block - rest :]]
        )

    return jax.tree.map(
        joined, jax.vmap(residuals)(jnp.asarray(starts)[:, None] + jnp.arange(block))
    )


def _largest_ratios(
    own, others, count: int, degrees
) -> tuple[Float[Array, " d"], Float[Array, "p d"]]:
    """The `count` directions v with the largest ratios v'Bv / v'Av of second moments.

    B is that of `others`, with Student's weights, and A that of `own`.
    """
    root = cholesky(_shrunk(own))
    whitened = triangular_solve(root, others.T)
    # In the look-alike room the direction says 3 nats for the true state in 30 of 100 frames, and
    # without weights in 2 to 4.
    shares = (degrees + 1) / (degrees + jnp.mean(whitened**2, axis=0))
    whitened = whitened * jnp.sqrt(shares)
    ratios, vectors = eigh(matmul(whitened, whitened.T) / others.shape[0])
    vectors = triangular_solve(root, vectors[:, ::-1][:, :count], transpose=True)
    return ratios[::-1][:count], vectors


def _log_density(
    residuals: Float[Array, "n d"], ratios: Float[Array, " d"], degrees: Float[Array, ""]
) -> Float[Array, " n"]:
    """Student's, weighted by what a direction tells. Rounding may leave ratios below 0."""
    logs = jnp.log1p(residuals**2 / degrees)
    return -0.5 * (degrees + 1) * matmul(logs, 1 - 1 / jnp.maximum(ratios, 1))


def _shrunk(residuals: Float[Array, "n p"]) -> Float[Array, "p p"]:
    """Second moments of residuals, with a larger diagonal."""
    moment = matmul(residuals.T, residuals) / residuals.shape[0]
    variances = jnp.diagonal(moment)
    floor = FLOOR * jnp.mean(variances)
    return (1 - SHRINKAGE) * moment + jnp.diag(SHRINKAGE * variances + floor)
