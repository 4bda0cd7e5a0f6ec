r"""Kernel ridge regressions on a variable, whose kernel and ridge are chosen by leave-one-out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtri

from .._lapack import eigh
from .._numerics import matmul, root_mean_square, safe_divide, safe_sqrt
from .._solves import psd_solve
from .._typing import Array, Bool, Float, Int, PRNGKeyArray
from ..features import Landmarks, landmark_features
from ..kernels import Gaussian, as_kernel, median_heuristic

#: Ridges in units of the kernel, which is about 1 on its diagonal.
RIDGES = np.logspace(-4, 2, 13)
#: Bandwidths in units of the median distance, and how often the metric is learned.
_BANDWIDTHS, _ROUNDS = (0.5, 1.0), 2
#: Share of the directions in which nothing was seen to change.
_FLOOR = 1e-3
#: A column has heavy tails where a number lies so many deviations from the mean; of 10^8 normal
#: numbers none does. Of 100 true hypotheses of conditional independence, n = 200, were rejected at
#: level .05 with normal scores among the candidates, and without, x and y each with noise of
#: deviation .5: Cauchy z and its tanh 8 and 18, its sine 9 and 11, itself 6 and 7; lognormal z and
#: its logarithm 7 and 17. With noise of .3 the sine has 21 with scores.
_TAILS = 6.0


def _least(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) ** 0.5


def standardized(columns: Float[Array, "n d"]) -> tuple[Float[Array, "n d"], Float[Array, " d"]]:
    """Columns of mean 0 and variance 1, or zeros, and their standard deviations."""
    columns = columns - jnp.mean(columns, axis=0)
    spread = root_mean_square(columns, axis=0)
    return safe_divide(columns, spread), spread


@jax.jit
def heavy(columns: Float[Array, "n d"]) -> Bool[Array, " d"]:
    """Whether columns have heavy tails."""
    return jnp.max(jnp.abs(standardized(columns)[0]), axis=0) > _TAILS


def scores(columns: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """Normal scores of columns with heavy tails; the others stay. Equal numbers stay equal."""

    def one(column):
        ordered = jnp.sort(column)
        below, upto = (jnp.searchsorted(ordered, column, side=side) for side in ("left", "right"))
        return ndtri((below + upto).astype(column.dtype) / (2 * len(column)))

    found = jax.vmap(one, in_axes=1, out_axes=1)(columns)
    return jnp.where(heavy(columns), found, columns)


class Smoother(eqx.Module):
    r"""Ridge regressions on centered features in their principal axes, with an intercept.

    `basis` W `[n, p]` has orthogonal columns of squared norms `values` `[p]`, and
    $R = H - W (W^\top W + \rho I)^{-1} W^\top$ takes a fit away. The candidates of a choice are a
    leading axis of both.
    """

    basis: Float[Array, "*c n p"]
    values: Float[Array, "*c p"]

    def left(self, ridge: Float[Array, ""]) -> Float[Array, " n"]:
        """The diagonal of R."""
        n = self.basis.shape[0]
        found = 1 - 1 / n - matmul(self.basis**2, 1 / (self.values + ridge))
        # A point that decides its own fit has a residual of rounding.
        return jnp.maximum(found, _least(found.dtype))

    def slope(self, targets: Float[Array, "n t"], ridge: Float[Array, ""]) -> Float[Array, "p t"]:
        """Coefficients of centered targets on the axes."""
        return matmul(self.basis.T, targets) / (self.values + ridge)[:, None]

    def residual(self, targets: Float[Array, "n t"], ridge: Float[Array, ""]) -> Array:
        """R t of centered targets."""
        return targets - matmul(self.basis, self.slope(targets, ridge))

    def losses(self, targets: Float[Array, "n t"], ridges: Float[Array, " q"]) -> Array:
        """Mean squared leave-one-out error of centered targets, for each ridge."""
        n, count = self.basis.shape[0], targets.shape[1]
        shrunk = 1 / (self.values[:, None] + ridges)
        found = matmul(self.basis.T, targets)
        fits = (shrunk[:, :, None] * found[:, None]).reshape(-1, ridges.size * count)
        errors = targets[:, None] - matmul(self.basis, fits).reshape(n, ridges.size, count)
        left = jax.vmap(self.left, out_axes=1)(ridges)
        found = jnp.mean(jnp.sum(errors**2, axis=2) / left**2, axis=0)
        # Where a point decides its own fit up to rounding, its error is not known.
        return jnp.where(jnp.min(left, axis=0) > _least(left.dtype), found, jnp.inf)


def smoother(features: Float[Array, "n p"]) -> Smoother:
    """Turn features to their principal axes. Cost O(n p^2 + p^3)."""
    return _rotated(features)[0]


def _rotated(features: Float[Array, "n p"]) -> tuple[Smoother, Float[Array, "p p"]]:
    features = features - jnp.mean(features, axis=0)
    values, vectors = eigh(matmul(features.T, features))
    return Smoother(matmul(features, vectors), jnp.maximum(values, 0)), vectors


class Regression(eqx.Module):
    """A chosen regression of targets whose mean is taken away.

    `loss` is its mean squared leave-one-out error, and `total` that of the mean.
    """

    smoother: Smoother
    ridge: Float[Array, ""]
    targets: Float[Array, "n t"]
    loss: Float[Array, ""]
    total: Float[Array, ""]

    def residual(self) -> Float[Array, "n t"]:
        """What the fit to all points leaves."""
        return self.smoother.residual(self.targets, self.ridge)

    def left_out(self) -> Float[Array, "n t"]:
        """What is left of each point by the fit without it."""
        return self.residual() / self.smoother.left(self.ridge)[:, None]

    def halved(self, key: PRNGKeyArray) -> Float[Array, ""]:
        """Mean squared error where each half of the sample predicts the other."""
        half = self.targets.shape[0] // 2
        order = jax.random.permutation(key, self.targets.shape[0])
        halves = order[: 2 * half].reshape(2, half)

        def errors(parts):
            fit, held = parts
            basis, targets = self.smoother.basis, self.targets
            mean = jnp.mean(targets[fit], axis=0)
            center = jnp.mean(basis[fit], axis=0)
            known, rows = basis[fit] - center, basis[held] - center
            inner = matmul(known.T, known)
            slope = psd_solve(inner, matmul(known.T, targets[fit] - mean), self.ridge)
            return jnp.sum((targets[held] - mean - matmul(rows, slope)) ** 2)

        return jnp.mean(lax.map(errors, (halves, halves[::-1]))) / half


def regress(candidates: Smoother, targets: Float[Array, "n t"]) -> Regression:
    """Regress by the candidate and the ridge with the least leave-one-out error."""
    n = targets.shape[0]
    targets = targets - jnp.mean(targets, axis=0)
    ridges = jnp.asarray(RIDGES, targets.dtype)
    losses = lax.map(lambda one: one.losses(targets, ridges), candidates)
    best = jnp.where(jnp.any(jnp.isfinite(losses)), jnp.argmin(losses), losses.size - 1)
    chosen = jax.tree.map(lambda leaf: leaf[best // ridges.size], candidates)
    total = jnp.mean(jnp.sum(targets**2, axis=1)) * (n / (n - 1)) ** 2
    return Regression(chosen, ridges[best % ridges.size], targets, jnp.min(losses), total)


def learned_smoothers(
    z: Float[Array, "n d"], rows: Int[Array, " r"], targets: Float[Array, "n t"]
) -> Smoother:
    """Linear and additive regression, and Gaussian kernels with a linear part in learned metrics.

    The additive kernel is the mean of Gaussians of single coordinates. The first metric is that of
    the standardized coordinates. The next ones are the mean outer product of the gradients of the
    targets' regressions (Trivedi et al. 2014): directions in which no target changes stop counting.
    The targets have mean 0.
    """
    z, _ = standardized(z)
    d = z.shape[1]
    linear = z / jnp.sqrt(jnp.asarray(d, z.dtype))
    simple = [smoother(jnp.pad(linear, ((0, 0), (0, rows.size))))]

    def fitted(kernel, seen):
        chosen = Landmarks(seen[rows], jnp.ones(rows.size, bool))
        features = landmark_features(kernel, seen, chosen)
        found, vectors = _rotated(jnp.concatenate([linear, features.matrix], axis=1))
        return found, vectors, features

    if d > 1:
        simple.append(fitted(as_kernel(_additive), z)[0])

    def turn(metric, _):
        seen = matmul(z, metric)
        median = median_heuristic(seen[rows], max_points=rows.size)
        bandwidths = median * jnp.asarray(_BANDWIDTHS, z.dtype)
        found, vectors, features = lax.map(lambda h: fitted(Gaussian(h), seen), bandwidths)
        last = jax.tree.map(lambda leaf: leaf[-1], (found, vectors, features))
        product = _slopes(z, rows, metric, last, targets)
        floor = _FLOOR * jnp.eye(d, dtype=z.dtype)
        shares = safe_divide(product, jnp.trace(product)) * d + floor
        values, axes = eigh(shares)
        return matmul(axes * safe_sqrt(values), axes.T), found

    rounds = lax.scan(turn, jnp.eye(d, dtype=z.dtype), length=_ROUNDS + 1)[1]
    merged = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rounds)
    return jax.tree.map(
        lambda *leaves: jnp.concatenate([jnp.stack(leaves[:-1]), leaves[-1]]), *simple, merged
    )


def _additive(x: Float[Array, " d"], y: Float[Array, " d"]) -> Float[Array, ""]:
    """The mean over coordinates of Gaussian kernels as wide as a deviation.

    Of 200 true hypotheses were rejected at level .05, with this candidate and without, both with
    100 landmarks: z has 10 variables that all drive x and y, n = 200 .06 and .11, n = 1000 .12 and
    .53; sums of sines of 5 variables, n = 300, .05 and 1.00. With twice the bandwidth .08, .11 and
    .93. Half of it as well gains nothing.
    """
    return jnp.mean(jnp.exp(-((x - y) ** 2) / 2))


def _slopes(z: Array, rows: Array, metric: Array, fitted: tuple, targets: Array) -> Array:
    """Mean outer product of the gradients of the best regression of the targets."""
    found, vectors, features = fitted
    n, d = z.shape
    ridges = jnp.asarray(RIDGES, z.dtype)
    ridge = ridges[jnp.argmin(found.losses(targets, ridges))]
    slope = matmul(vectors, found.slope(targets, ridge))
    weights = features.on_landmarks(slope[d:].T).T
    gram, points = features.kernel.gram(features.points, features.landmarks.points), z[rows]
    near = matmul(gram, (weights[:, :, None] * points[:, None]).reshape(rows.size, -1))
    near = near.reshape(n, -1, d) - matmul(gram, weights)[:, :, None] * z[:, None]
    curved = matmul(near, matmul(metric, metric.T)) / features.kernel.bandwidth**2
    gradients = (curved + slope[:d].T / jnp.sqrt(jnp.asarray(d, z.dtype))).reshape(-1, d)
    return matmul(gradients.T, gradients) / n
