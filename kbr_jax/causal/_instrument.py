r"""Instrumental regression: effects that an unmeasured confounder cannot reach."""

import equinox as eqx
import jax.numpy as jnp

from .._checks import (
    as_batch,
    as_count,
    as_mask,
    as_points,
    in_one_precision,
    is_concrete,
    is_float,
    size,
)
from .._numerics import one_program
from .._typing import Array, ArrayLike, Bool, Float, Points, with_scalars
from .._warnings import warn
from ..features import AbstractFeatureMap
from ..kernels import (
    AbstractKernel,
    DirectSum,
    FeatureMap,
    KernelLike,
    Linear,
    TensorProduct,
    as_kernel,
    checked_kernel,
)
from ._stages import Smoothed, feature_map, regress, second_ridge
from ._units import as_kernels, as_ridges, checked_sample, in_units, outcome_targets

#: A first stage below this strength is called weak (Staiger and Stock 1997).
_WEAK = 10.0


class InstrumentalRegression(eqx.Module):
    r"""A function f with $E[Y | z, c] = E[f(X, C) | z, c]$.

    - `features` of the pairs (c, embedded x), or of the embedded x; `fit`, the regression of y on
      them. `treatments`: features of x.
    - `y`, `covariates`: the sample, `covariates` None where there are none.
    - `regularizers`: the ridges of both stages.
    - `explained`: the shares of variance that the stages explain of points left out, of x and of y.
    - `strength`: n s / (1 - s), with the share s of the variance of x that z explains beyond the
      covariates, of points left out. With covariates sums of functions of single coordinates are
      tried as well as the given kernels, with z and without. Of one linear instrument it is near
      the F statistic of the first stage. Below 10 the instrument is weak.
    """

    features: AbstractFeatureMap
    fit: Smoothed
    treatments: AbstractFeatureMap
    covariates: Points | None
    y: Points
    regularizers: Float[Array, "2"]
    explained: Float[Array, "2"]
    strength: Float[Array, ""]

    __repr__ = with_scalars


def fit_instrument(
    x: Points,
    z: Points,
    y: Points,
    *,
    covariates: Points | None = None,
    kernels: tuple[KernelLike, ...] | None = None,
    rank: int = 300,
    regularizers: tuple[ArrayLike | None, ...] | None = None,
    cross_fit: bool = True,
    mask: ArrayLike | None = None,
) -> InstrumentalRegression:
    r"""Fit the effect of x on y with an instrument z.

    The model of Singh, Sahani and Gretton 2019 is $Y = f(X, C) + U$. The noise U may depend on X,
    but has mean 0 given the instrument Z and the covariates C. Two ridge regressions find f:

    $$ \hat\mu(z, c) = \text{regression of } \phi(x) \text{ on } (z, c), \qquad
       \hat f = \arg\min_f \tfrac1n \sum_i (y_i - \langle f, \phi(c_i) \otimes \hat\mu^{(-k)}(z_i,
       c_i) \rangle)^2 + \lambda |f|^2. $$

    $\hat\mu^{(-k)}$ is fitted without the fold k of unit i, one of five of every fifth unit: give
    units in random order. The first ridge has the least leave-one-out error. The second is the
    largest one within a standard error of the least, by the errors with $\hat\mu$ of all units:
    the noise of $\hat\mu^{(-k)}$ is tied to that of y. It is not below the one of least error with
    $\hat\mu^{(-k)}$. Both stages have an intercept.

    **What it assumes.** Relevance: z changes x. Exclusion: z changes y through x alone.
    Independence: given c, nothing drives both z and the noise of y. Additive noise: the effect of x
    does not depend on the confounder. Without relevance the result is noise, and `strength` is
    below 10. Without exclusion or independence it is biased by as much as z drives y, divided by
    how much z drives x; no statistic of the data tells.

    The ridges bend the curve. The second ridge pulls f towards a constant, by several standard
    errors where the instrument is strong. Where the form of f is known there, give the kernel of x
    and `regularizers=(None, 1e-6)`: the [results](../results/causal.md#a-line-by-an-instrument)
    have slopes with and without. Kernels of x and of covariates are multiplied: a line is then
    `Polynomial(degree=1)`, and not `Linear`, which leaves the covariates no effect of their own.

    **Arguments:**

    - `x`: n treatments; `z`: instruments; `y`: outcomes, real, `[n]` or `[n, ...]`.
    - `covariates`: points c that drive x and y and are measured.
    - `kernels`: of x and z, and of the covariates if there are any; None for the defaults.
      `learning.learn_instrument` learns bandwidths; with large noise its choice is not reliable.
    - `rank`: features of each variable at most (static); n or more is exact.
    - `regularizers`: of the first and the second stage; None chooses, also one of them.
    - `cross_fit`: whether the first stage predicts in folds (static). Without it the
      result is two-stage least squares where the kernels are `Polynomial(degree=1)` and the ridges
      vanish, and with many features it leans towards the confounded regression.
    - `mask`: `[n]`, False where a unit is padding.

    **Returns:** an `InstrumentalRegression`; `structural` reads it. Cost O(n r^2 + r^3).

    **Raises:** `ValueError` for samples of different sizes, y that are not real, or a wrong number
    of kernels. A warning where the instrument is weak.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> z, u, e = (jax.random.normal(key, (500,)) for key in keys)
    >>> x = z + u
    >>> y = x + 2 * u + e / 10  # u drives x and y: the regression of y on x has slope 2
    >>> model = kbr.causal.fit_instrument(x, z, y)
    >>> slope = jax.grad(lambda x: kbr.causal.structural(model, x))
    >>> print(f"{slope(0.0):.0f}")
    1
    """
    y = as_points(y, "y")
    count = size(y)
    mask = None if mask is None else as_mask(mask, count, "mask")
    rank = as_count(rank, "rank")
    x, z, y = (
        checked_sample(part, name, mask, count) for part, name in ((x, "x"), (z, "z"), (y, "y"))
    )
    if covariates is not None:
        covariates = checked_sample(covariates, "covariates", mask, count)
    x, z, y, covariates = in_one_precision(x, z, y, covariates)
    if not hasattr(y, "dtype") or not jnp.issubdtype(y.dtype, jnp.floating):
        raise ValueError("`y` must be one real array: an instrument identifies means.")
    of = as_kernels(kernels, 2 if covariates is None else 3)
    kernel_x, kernel_z = (
        checked_kernel(given, part, name, mask)
        for given, part, name in zip(of[:2], (x, z), "xz", strict=True)
    )
    treatments = feature_map(kernel_x, x, rank, mask)
    first, second = as_ridges(regularizers, 2, treatments.dtype)
    plain = outcome_targets(kernel_x, x, rank, mask)
    instrument, kernel, kernel_c = z, kernel_z, None
    if covariates is not None:
        kernel_c = checked_kernel(of[2], covariates, "covariates", mask)
        kernel, instrument = TensorProduct((kernel_z, kernel_c)), (z, covariates)
    instruments = feature_map(kernel, instrument, rank, mask)
    product = regress(instruments, plain, None).explained
    given = (kernel_z, z), (kernel_c, covariates)
    strength = _strength(*_explained(product, *given, plain, rank, mask), treatments.count)
    _warn_if_weak(strength)
    stage = regress(instruments, treatments.matrix, first)

    def features_of(folds: bool) -> AbstractFeatureMap:
        embedded = stage.fitted(instruments, treatments.matrix, folds)
        return _second(embedded, covariates, kernel_c, rank, mask)

    outcomes = outcome_targets(kernel_x, y, rank, mask)
    features = features_of(cross_fit)
    if cross_fit and second is None:
        second = second_ridge(features_of(False), features, outcomes)
    last = regress(features, outcomes, second, cautious=True)
    ridges = jnp.stack([stage.regularizer, last.regularizer])
    explained = jnp.stack([stage.explained, last.explained])
    return InstrumentalRegression(
        features, last.fit, treatments, covariates, y, ridges, explained, strength
    )


def _explained(
    product: Float[Array, ""],
    instrument: tuple[AbstractKernel, Points],
    covariates: tuple[AbstractKernel | None, Points | None],
    targets: Float[Array, "n t"],
    rank: int,
    mask: Bool[Array, " n"] | None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What an instrument and covariates explain of x, and what covariates alone do.

    `product` is what the product of their kernels explains. Sums of functions are tried too. One
    bandwidth for three covariates misses the sine of one of them. z was that sine, drove nothing,
    and had a strength above 10 in .78 of 40 samples of 300 units; with additive kernels in .05. Of
    an instrument with slope .5 the median rose from 24 to 67.
    """
    kernel_c, c = covariates
    if kernel_c is None:
        return product, jnp.zeros_like(product)

    def explained(kernel: AbstractKernel, points: Points) -> Float[Array, ""]:
        return regress(feature_map(kernel, points, rank, mask), targets, None).explained

    parts = [_additive(*instrument, mask), _additive(kernel_c, c, mask)]
    kernels, points = zip(*parts, strict=True)
    base = jnp.maximum(explained(kernel_c, c), explained(*parts[1]))
    return jnp.maximum(product, explained(DirectSum(kernels), points)), jnp.maximum(base, 0)


def _additive(
    kernel: AbstractKernel, points: Points, mask: Bool[Array, " n"] | None
) -> tuple[AbstractKernel, Points]:
    """The additive kernel of standardized coordinates, or the given kernel of other points."""
    if not hasattr(points, "dtype") or not is_float(points):
        return kernel, points
    rows = in_units(points.reshape(size(points), -1), mask)
    known = None if mask is None else mask[:, None]
    return as_kernel(_sum_of_coordinates), rows - jnp.mean(rows, axis=0, where=known)


def _sum_of_coordinates(x: Float[Array, " d"], y: Float[Array, " d"]) -> Float[Array, ""]:
    return jnp.mean(jnp.exp(-((x - y) ** 2) / 2) + x * y)


@one_program
def _strength(
    explained: Float[Array, ""], base: Float[Array, ""], count: Float[Array, ""]
) -> Float[Array, ""]:
    """`InstrumentalRegression.strength`, from what both explain and what the covariates do."""
    share = (explained - base) / (1 - base)
    share = jnp.clip(share, 0, 1 - jnp.finfo(share.dtype).eps)
    return count * share / (1 - share)


def _itself(point: Array) -> Array:
    return point


def _second(
    embedded: Float[Array, "n p"],
    covariates: Points | None,
    kernel: KernelLike,
    rank: int,
    mask: Bool[Array, " n"] | None,
) -> AbstractFeatureMap:
    """Features of the second stage."""
    if covariates is None:
        return feature_map(FeatureMap(_itself), embedded, rank, mask)
    return feature_map(TensorProduct((kernel, Linear())), (covariates, embedded), rank, mask)


def _warn_if_weak(strength: Float[Array, ""]) -> None:
    if is_concrete(strength) and strength < _WEAK:
        warn(
            f"The instrument is weak: its strength is {float(strength):.2g}, and below "
            f"{_WEAK:.0f} the effect is hardly determined. Find a stronger instrument."
        )


def structural(
    model: InstrumentalRegression, x: Points, covariates: Points | None = None
) -> Float[Array, "..."]:
    r"""The structural function $\hat f(x, c)$: the mean of y where x is set, whatever drove it.

    **Arguments:** `model`; `x`, one point or a batch `[b, ...]`; `covariates` of as many points,
    where the model has them.

    **Returns:** the shape of one y, or `[b, ...]`. `jax.grad` gives the effect of a small change.
    Cost O((b + n) r). **Raises:** `ValueError` for points of another kind, or missing covariates.
    """
    x, single = as_batch(x, "x", model.treatments.points, "training x")
    rows = model.treatments.coordinates(x)
    if (covariates is None) != (model.covariates is None):
        raise ValueError(
            "`covariates` must be given where the model was fitted with them, and only there."
        )
    if covariates is None:
        coordinates = model.features.coordinates(rows)
    else:
        points, _ = as_batch(covariates, "covariates", model.covariates, "training covariates")
        if size(points) != size(x):
            raise ValueError(f"`covariates` has {size(points)} points and `x` {size(x)}.")
        coordinates = model.features.coordinates((points, rows))
    y = model.y.astype(coordinates.dtype)
    values = model.fit.predict(coordinates, y.reshape(y.shape[0], -1))
    values = values.reshape(-1, *y.shape[1:])
    return values[0] if single else values
