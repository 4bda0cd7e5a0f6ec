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
from .._solves import psd_solve
from .._typing import Array, Bool, Float, Int, Points
from ..features import AbstractFeatureMap, fit_features, masked_rows
from ..kernels import AbstractKernel, FeatureMap

#: Ridges, in units of the mean of the kernel's diagonal.
RIDGES = 10.0 ** np.arange(-9.0, 1.1, 0.25)
#: Folds of a first stage, for an instrument. Leaving one unit out instead, an instrument that
#: explains half of the treatment gave a curve with slopes of -40 in place of 1 in one of four
#: samples of 500 units: all predictions together then know each unit. Two folds were no better than
#: five.
FOLDS = 5


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
        # Eigenvalues are not known to less. With 1 for 10, one of 40 samples of 100 units had an
        # effect of 4.2 in place of 1 in float32 (.3 in float64).
        least = 10 * jnp.finfo(self.basis.dtype).eps
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
        # A point that decides its own fit has a residual of rounding.
        left = jnp.maximum(self.left(regularizer), self.least)[:, None]
        return (targets - matmul(shrunk, matmul(self.basis.T, targets))) / left

    def left(self, regularizer: Float[Array, ""]) -> Float[Array, " n"]:
        """What share of its own target a point does not get in the fit."""
        shrunk = self.basis / (self.values + self.count * regularizer)
        return 1 - self.share - jnp.sum(shrunk * self.basis, axis=1)

    @property
    def least(self) -> float:
        """Below this share the residual is rounding."""
        return float(jnp.finfo(self.basis.dtype).eps) ** 0.5


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

    def predict(
        self, coordinates: Float[Array, "b r"], targets: Float[Array, "n t"]
    ) -> Float[Array, "b t"]:
        """Predictions at b features, without the weights `[b, n]`. Cost O((b + n) r t)."""
        # Rows of `slope` sum to 0 up to rounding, which a level of the targets would magnify.
        level = matmul(self.share, targets)
        slope = matmul(self.slope, targets - level)
        return level + matmul(coordinates - self.center, slope)


class Stage(eqx.Module):
    """A regression with its ridge.

    `explained` is the share of the targets' variance that it explains of points left out.
    """

    fit: Smoothed
    regularizer: Float[Array, ""]
    explained: Float[Array, ""]

    def fitted(
        self, features: AbstractFeatureMap, targets: Float[Array, "n t"], cross_fit: bool
    ) -> Float[Array, "n t"]:
        """What the regression predicts of its own points, in folds if `cross_fit`."""
        if cross_fit:
            return cross_fitted(features, targets, self.regularizer)
        return masked_rows(self.fit.predict(features.matrix, targets), features.mask)


def smoother(features: AbstractFeatureMap) -> Smoother:
    """Turn the features of a sample to their principal axes. Cost O(n r^2 + r^3)."""
    share, center = features.uniform, features.mean_coordinates()
    rows = masked_rows(features.matrix - center, features.mask)
    values, axes = eigh(matmul(rows.T, rows))
    unit = jnp.sum(features.matrix**2) * jnp.max(share)
    return Smoother(matmul(rows, axes), jnp.maximum(values, 0), center, axes, share, unit)


@eqx.filter_jit
def regress(
    features: AbstractFeatureMap,
    targets: Float[Array, "n t"],
    ridge: Float[Array, ""] | None,
    cautious: bool = False,
) -> Stage:
    """Regress targets on features, with a given ridge or the one of least leave-one-out error.

    `cautious` takes the largest ridge whose error is within one standard error of the least one. A
    second stage is an inverse problem: small ridges change its error little and its function much.
    With the least error, grade retention (reading) had .0023 in place of .0015 (two seeds), and the
    slopes of the four samples of `FOLDS` were between .5 and 1.6 in place of 1.1 to 1.5.

    Cost O(n r^2 + r^3 + q n r t) for q ridges.
    """
    found = smoother(features)
    targets = targets.astype(found.basis.dtype)
    mean = matmul(found.share, targets)
    moved = jnp.where(found.share[:, None] > 0, targets - mean, 0)

    def loss(ridge):
        return jnp.sum(found.residuals(moved, ridge) ** 2, axis=1)

    if ridge is None:
        ridges = found.ridges()
        losses = lax.map(loss, ridges)
        used = found.share > 0
        known = lax.map(
            lambda ridge: jnp.min(jnp.where(used, found.left(ridge), 1)) > found.least, ridges
        )
        known = known | ~jnp.any(known)  # one unit is its own prediction for any ridge
        best = jnp.argmin(jnp.where(known, jnp.sum(losses, axis=1), jnp.inf))
        if cautious:
            more = losses - losses[best]
            excess = matmul(more, found.share)
            variance = matmul(more**2, found.share) - excess**2
            near = known & (excess <= jnp.sqrt(jnp.maximum(variance, 0) / found.count))
            best = jnp.max(jnp.where(near, jnp.arange(ridges.size), best))
        ridge = ridges[best]
    residuals = found.residuals(moved, ridge)
    n = found.count
    total = jnp.sum(moved**2) * (n / jnp.maximum(n - 1, 1)) ** 2
    explained = 1 - jnp.sum(residuals**2) / jnp.where(total > 0, total, 1)
    return Stage(found.smoothed(ridge), ridge, explained)


def second_ridge(
    whole: AbstractFeatureMap, held: AbstractFeatureMap, targets: Float[Array, "n t"]
) -> Float[Array, ""]:
    """The ridge of a second stage, from predictions with folds and without.

    A fold's predictions err against the noise of its own units, and so against their y. A choice by
    the errors of folds takes that for signal, most where few values of z repeat it. Curves by an
    instrument, mean squared errors with it and with the choice by predictions of all units, n =
    300: two values .80 (at most 20) and .18 (.8), ten 1.4 (66) and .11 (.7); 15 instruments, weak
    ones .18 and .10, strong ones .10 and .14. With whole folds left out two values had 4.0.

    Predictions of all units have seen these units, and in some samples choose a ridge that is far
    too small: two of 30 instruments with heavy tails had errors of 2.2 and 9.6, two of 100 outcome
    bridges with two arms 3.7 and 10 (500 units). So the ridge is not below the best one of the
    folds: these have at most .4 and .02. Nine other designs of instruments had the same errors
    within .01. A cautious choice by both has more error where instruments are weak (.60 for .38).
    """
    careful = regress(whole, targets, None, cautious=True).regularizer
    return jnp.maximum(careful, regress(held, targets, None).regularizer)


@eqx.filter_jit
def cross_fitted(
    features: AbstractFeatureMap, targets: Float[Array, "n t"], ridge: Float[Array, ""]
) -> Float[Array, "n t"]:
    """Predictions of the units of each fold from the other folds. Cost O(n r^2 + r^3).

    Folds are every fifth unit. See `FOLDS` for why they are not single units. A unit without others
    is predicted by itself.
    """
    known, rows = features.uniform > 0, features.matrix
    targets = targets.astype(rows.dtype)
    fold = folds_of(known, FOLDS)
    mean = matmul(features.uniform, targets)
    rows = jnp.concatenate([rows, jnp.ones_like(rows[:, :1])], axis=1)
    penalty = jnp.ones_like(rows[0]).at[-1].set(0)

    def of_fold(total, number):
        used = (known & (fold != number)).astype(rows.dtype)
        weighted = (used[:, None] * rows).T
        matrix = matmul(weighted, rows) + jnp.diag(jnp.sum(used) * ridge * penalty)
        rest = jnp.any(used > 0)
        matrix = jnp.where(rest, matrix, jnp.eye(len(matrix), dtype=matrix.dtype))
        slope = psd_solve(matrix, matmul(weighted, targets))
        own = (known & (fold == number))[:, None]
        return jnp.where(own, jnp.where(rest, matmul(rows, slope), mean), total), None

    return lax.scan(of_fold, jnp.zeros_like(targets), jnp.arange(FOLDS))[0]


def folds_of(known: Bool[Array, " n"], count: int) -> Int[Array, " n"]:
    """Folds of every `count`-th unit, among those that are not padding."""
    return (jnp.cumsum(known) - 1) % count


def feature_map(
    kernel: AbstractKernel, points: Points, rank: int, mask: Bool[Array, " n"] | None
) -> AbstractFeatureMap:
    """At most `rank` features of a sample. With n points or more they are exact."""
    chosen = None if isinstance(kernel, FeatureMap) else min(rank, size(points))
    found = fit_features(kernel, points, chosen, mask)
    assert isinstance(found, AbstractFeatureMap)
    return found
