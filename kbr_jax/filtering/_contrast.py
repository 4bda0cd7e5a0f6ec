"""Evidence for one hidden state against another, in the one direction of an observation that tells them apart."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import (
    as_count,
    as_points,
    as_positive,
    as_regularizer,
    check_alike,
    check_finite,
    check_same_size,
    size,
)
from .._numerics import matmul, psd_factor
from .._typing import Array, ArrayLike, Float, Int, Point, Points
from ..kernels import AbstractKernel, as_kernel

#: Share of the mean variance that is added to every direction of the residuals' covariance.
SHRINKAGE = 1e-3


class Contrast(eqx.Module):
    r"""How well a state explains an observation, seen only where true states and look-alikes differ. Build it with `fit`.

    From training states $s_i$, features $y_i \in \mathbb R^p$ of the observations, and for each i a rival $r_i$: another state
    that the observation could be taken for.

    - Forward regression with kernel k, $A = G + n \varepsilon I$: $m(s) = \bar y + k(S, s)^\top A^{-1} (Y - \bar y)$ with
      relative variance $\sigma^2(s) = k(s, s) + n \varepsilon - k(S, s)^\top A^{-1} k(S, s)$.
    - Residuals of the truth $z_i = (y_i - m_{-i}(s_i)) / \sigma_{-i}(s_i)$, where $m_{-i}$ has not seen the block of i in time
      (neighbors know the answer), and of the rival $z'_i = (y_i - m(r_i)) / \sigma(r_i)$. Their second moments are C (with
      1e-3 of its mean variance added to every direction) and C'.
    - Directions: the generalized eigenvectors $C' v = g C v$, $v^\top C v = 1$, of the largest ratios g.
    - Evidence: $\ell(s; y) = -\frac{\nu + 1}{2} \sum_v (1 - 1 / g_v)_+ \log(1 + u_v^2 / \nu)$,
      $u_v = v^\top (y - m(s)) / \sigma(s)$: Student's log-density of nu degrees of freedom, in the directions where a rival's
      residuals are larger than the truth's. Differences of it are the log-likelihood ratios of states.

    The other directions say nothing of which state is true, but their prediction errors would drown those that do.
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

    @staticmethod
    def fit(
        kernel: Any,
        states: Points,
        features: ArrayLike,
        rivals: Points,
        *,
        regularizer: ArrayLike,
        degrees: ArrayLike = 3.0,
        directions: int = 1,
        block: int = 40,
    ) -> "Contrast":
        r"""Learn what tells true states from rivals.

        **Arguments:**

        - `kernel`: kernel on states, or a callable of two points.
        - `states`, `rivals`: `[n, ...]`, in order of time; `features`: `[n, p]`.
        - `regularizer`: epsilon > 0 in `G + n epsilon I`.
        - `degrees`: nu > 0 of the evidence; fewer bound what a single observation can say.
        - `directions`: number of contrast directions (static), at most p.
        - `block`: number of successive points left out together (static), at most n / 2: longer than neighbors resemble
          each other.

        The inverse needs double precision where `regularizer` is below about 1e-5. Cost: O(n^3) once, memory O(n^2).

        **Raises:** `ValueError` for samples of different lengths or kinds, non-finite values, or parameters out of range.
        """
        kernel = as_kernel(kernel)
        states, rivals = as_points(states, "states"), as_points(rivals, "rivals")
        features = _as_features(features, states)
        check_alike(rivals, "rivals", states, "states")
        check_same_size(rivals, "rivals", states, "states")
        kernel.check(states, "states")
        n = size(states)
        count = as_count(directions, "directions", features.T, "the features of one observation")
        if 2 * as_count(block, "block") > n:
            raise ValueError(
                f"`block` must leave at least half of the {n} training points, got {block}."
            )
        dtype = features.dtype
        noise = n * as_regularizer(regularizer, "regularizer", dtype)

        center = jnp.mean(features, axis=0)
        inverse = psd_factor(kernel.gram(states, states), noise).solve(jnp.eye(n, dtype=dtype))
        coefficients = matmul(inverse, features - center)
        own = _held_out(inverse, coefficients, block)
        columns = kernel.gram(rivals, states)
        variances = _variances(kernel, rivals, columns, inverse, noise)
        others = (features - center - matmul(columns, coefficients)) / jnp.sqrt(variances)[:, None]
        ratios, vectors = _largest_ratios(own, others, count)
        return Contrast(
            kernel=kernel,
            states=states,
            center=center,
            directions=vectors,
            ratios=ratios,
            coefficients=matmul(coefficients, vectors),
            inverse=inverse,
            noise=noise,
            degrees=as_positive(degrees, "degrees", scalar=True).astype(dtype),
        )

    def project(self, features: Float[Array, "*batch p"]) -> Float[Array, "*batch d"]:
        """What of an observation's features the evidence looks at."""
        return matmul(features - self.center, self.directions)

    def evidence(self, state: Point, projected: Float[Array, " d"]) -> Float[Array, ""]:
        """Log-likelihood of one state, up to a constant, for the projected features of one observation. Cost O(n^2)."""
        point = jax.tree.map(lambda leaf: leaf[None], state)
        column = self.kernel.gram(point, self.states)
        variance = _variances(self.kernel, point, column, self.inverse, self.noise)[0]
        squares = (projected - matmul(column, self.coefficients)[0]) ** 2 / variance
        shares = jnp.maximum(1 - 1 / self.ratios, 0)
        return -0.5 * (self.degrees + 1) * jnp.sum(shares * jnp.log1p(squares / self.degrees))


def _as_features(features: ArrayLike, states: Points) -> Float[Array, "n p"]:
    features = jnp.asarray(features)
    if features.ndim != 2 or not jnp.issubdtype(features.dtype, jnp.floating):
        raise ValueError(
            f"`features` must be a floating-point matrix [n, p], one row for each observation, got "
            f"{features.dtype}{list(features.shape)}."
        )
    check_same_size(features, "features", states, "states")
    return check_finite(features, "features")


def _variances(kernel, points, columns, inverse, noise) -> Float[Array, " m"]:
    explained = jnp.sum(matmul(columns, inverse) * columns, axis=1)
    return jnp.maximum(kernel.diagonal(points) + noise - explained, noise)


def _held_out(inverse, coefficients, block: int) -> Float[Array, "n p"]:
    """Standardised residuals of each point, predicted without its block: $(A^{-1}_{bb})^{-1} (A^{-1} Y)_b$ and its variance.

    The last block may be a full one that reaches back into the block before; then only its new rows are used.
    """
    n = inverse.shape[0]
    full = n // block
    starts = [*range(0, full * block, block), n - block]

    def residuals(index: Int[Array, " block"]):
        part = inverse[index[:, None], index[None, :]]
        factor = psd_factor(part)
        variances = jnp.diagonal(factor.solve(jnp.eye(block, dtype=part.dtype)))
        return factor.solve(coefficients[index]) / jnp.sqrt(variances)[:, None]

    rows = jax.vmap(residuals)(jnp.asarray(starts)[:, None] + jnp.arange(block))
    rest = n - full * block
    return jnp.concatenate([rows[:-1].reshape(full * block, -1), rows[-1, block - rest :]])


def _largest_ratios(own, others, count: int) -> tuple[Float[Array, " d"], Float[Array, "p d"]]:
    """The `count` directions v in which the second moment of `others` is the largest multiple of that of `own`."""
    p = own.shape[1]
    moment = matmul(own.T, own) / own.shape[0]
    moment = moment + SHRINKAGE * jnp.trace(moment) / p * jnp.eye(p, dtype=moment.dtype)
    root = jnp.linalg.cholesky(moment)
    whitened = jax.scipy.linalg.solve_triangular(root, others.T, lower=True)
    ratios, vectors = jnp.linalg.eigh(matmul(whitened, whitened.T) / others.shape[0])
    vectors = jax.scipy.linalg.solve_triangular(root.T, vectors[:, ::-1][:, :count], lower=False)
    return ratios[::-1][:count], vectors
