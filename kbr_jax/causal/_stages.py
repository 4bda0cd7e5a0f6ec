r"""Ridge regressions with an intercept, whose ridge has the least leave-one-out error.

All stages of the estimators are such regressions. A sample enters as rows of r features. With the
centered rows $\Phi$ `[n, r]`, targets T and their mean $\bar T$,

$$ \hat T = \bar T + \Phi (\Phi^\top \Phi + n \lambda I)^{-1} \Phi^\top (T - \bar T), \qquad
   t_i - \hat t_i^{(-i)} = \frac{t_i - \hat t_i}{1 - H_{ii}}, $$

where H is the matrix that maps T to its fit.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import size
from .._lapack import eigh
from .._numerics import matmul
from .._typing import Array, Bool, Float, Points
from ..features import AbstractFeatureMap, fit_features
from ..kernels import AbstractKernel, FeatureMap

#: Ridges, in units of the mean of the kernel's diagonal.
RIDGES = 10.0 ** np.arange(-9.0, 1.1, 0.25)


class Smoother(eqx.Module):
    r"""Centered features of a sample in their principal axes.

    `basis` `[n, r]` has orthogonal columns of squared norms `values`. `center` `[r]` is the mean of
    the features, and `axes` `[r, r]` turns features to the axes. `share` `[n]` holds the weights of
    the sample: 1 / n, and 0 for padding. `unit` is the mean of the kernel's diagonal.
    """

    basis: Float[Array, "n r"]
    values: Float[Array, " r"]
    center: Float[Array, " r"]
    axes: Float[Array, "r r"]
    share: Float[Array, " n"]
    unit: Float[Array, ""]

    @property
    def count(self) -> Float[Array, ""]:
        """Points without the padding."""
        return 1 / jnp.max(self.share)

    def ridges(self) -> Float[Array, " q"]:
        """The ridges to choose from."""
        least = jnp.finfo(self.basis.dtype).eps
        return lax.stop_gradient(
            jnp.asarray(RIDGES[RIDGES > float(least)], self.basis.dtype) * self.unit
        )

    def smoothed(self, regularizer: Float[Array, ""]) -> "Smoothed":
        """The regression with a given ridge."""
        shrunk = self.basis / (self.values + self.count * regularizer)
        return Smoothed(self.center, matmul(self.axes, shrunk.T), self.share)

    def residuals(self, targets: Float[Array, "n t"], regularizer: Float[Array, ""]) -> Array:
        """Centered targets minus their predictions from the other points."""
        shrunk = self.basis / (self.values + self.count * regularizer)
        left = 1 - self.share - jnp.sum(shrunk * self.basis, axis=1)
        # A point that decides its own fit has a residual of rounding.
        left = jnp.maximum(left, jnp.finfo(left.dtype).eps ** 0.5)
        return (targets - matmul(shrunk, matmul(self.basis.T, targets))) / left[:, None]


class Smoothed(eqx.Module):
    r"""A fitted regression, linear in its targets: weights `share` $+ (c - \bar c) C$ at features
    c.

    They sum to 1. `center` is $\bar c$ `[r]`, `slope` is C `[r, n]`.
    """

    center: Float[Array, " r"]
    slope: Float[Array, "r n"]
    share: Float[Array, " n"]

    def weights(self, coordinates: Float[Array, "b r"]) -> Float[Array, "b n"]:
        """Weights of the targets in the predictions at b features."""
        return self.share + matmul(coordinates - self.center, self.slope)


class Stage(eqx.Module):
    """A regression with its ridge, and what it predicts of each point from the others.

    `explained` is the share of the targets' variance that these predictions explain.
    """

    fit: Smoothed
    regularizer: Float[Array, ""]
    left_out: Float[Array, "n t"]
    explained: Float[Array, ""]

    def fitted(
        self, features: AbstractFeatureMap, targets: Float[Array, "n t"]
    ) -> Float[Array, "n t"]:
        """What the regression predicts of its own points."""
        found = matmul(self.fit.weights(features.matrix), targets)
        return found if features.mask is None else jnp.where(features.mask[:, None], found, 0)


def smoother(features: AbstractFeatureMap) -> Smoother:
    """Turn the features of a sample to their principal axes. Cost O(n r^2 + r^3)."""
    share, center = features.uniform, features.mean_coordinates()
    rows = features.matrix - center
    if features.mask is not None:
        rows = jnp.where(features.mask[:, None], rows, 0)
    values, axes = eigh(matmul(rows.T, rows))
    unit = jnp.sum(features.matrix**2) * jnp.max(share)
    return Smoother(matmul(rows, axes), jnp.maximum(values, 0), center, axes, share, unit)


@eqx.filter_jit
def regress(
    features: AbstractFeatureMap, targets: Float[Array, "n t"], ridge: Float[Array, ""] | None
) -> Stage:
    """Regress targets on features, with a given ridge or the one of least leave-one-out error.

    Cost O(n r^2 + r^3 + q n r t) for q ridges.
    """
    found = smoother(features)
    targets = targets.astype(found.basis.dtype)
    mean = matmul(found.share, targets)
    moved = jnp.where(found.share[:, None] > 0, targets - mean, 0)

    def loss(ridge):
        return jnp.sum(found.residuals(moved, ridge) ** 2)

    if ridge is None:
        ridges = found.ridges()
        ridge = ridges[jnp.argmin(lax.map(loss, ridges))]
    residuals = found.residuals(moved, ridge)
    n = found.count
    total = jnp.sum(moved**2) * (n / jnp.maximum(n - 1, 1)) ** 2
    explained = 1 - jnp.sum(residuals**2) / jnp.where(total > 0, total, 1)
    left_out = jnp.where(found.share[:, None] > 0, targets - residuals, 0)
    return Stage(found.smoothed(ridge), ridge, left_out, explained)


def feature_map(
    kernel: AbstractKernel, points: Points, rank: int, mask: Bool[Array, " n"] | None
) -> AbstractFeatureMap:
    """At most `rank` features of a sample. With n points or more they are exact."""
    chosen = None if isinstance(kernel, FeatureMap) else min(rank, size(points))
    found = fit_features(kernel, points, chosen, mask)
    assert isinstance(found, AbstractFeatureMap)
    return found
