r"""Outcome bridges: effects where the confounder is seen through two proxies."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, check_alike, like, size
from .._lapack import eigh
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding, check_unbatched
from ..features import (
    AbstractFeatureMap,
    LandmarkFeatures,
    greedy_landmarks,
    landmark_features,
)
from ..kernels import AbstractKernel, KernelLike, Linear, TensorProduct
from ._intervene import AbstractCausalModel
from ._stages import Smoothed, feature_map, folds_of, regress, second_ridge
from ._units import Units, as_ridges, outcome_targets, units

#: Bandwidth of the kernel of a real dose, in standard deviations. Mean squared errors of the curves
#: with 1, 3 and 10, three seeds: abortion .0134, .0070, .0049; maths .0031, .0017, .0014; reading
#: .0032, .0019, .0036. A Gaussian kernel with the median distance: .153, .0049, .0034 (1000 units).
DOSE = 3.0
#: Folds of the cross-validation of `fit_moment_bridge`.
_FOLDS = 5


class OutcomeBridge(AbstractCausalModel):
    r"""A function h of dose and outcome proxy with $E[Y | a, z] = E[h(a, W) | a, z]$.

    - `features` of the pairs of doses and embedded proxies; `fit`, the regression of y on them.
    - `proxies`: features of w; `population`: their mean over the sample.
    - `regularizers`: the ridges, of the first stage (0 without one) and of the second.
    - `explained`: the shares of variance that the stages explain of points left out, of the proxy w
      and of y. A first share near 0 says that z tells nothing about w: no bridge can be found. It
      is NaN for `fit_moment_bridge`, which has no first stage. The second share is somewhat too
      large: the first stage has seen the units.
    """

    features: LandmarkFeatures
    fit: Smoothed
    proxies: AbstractFeatureMap
    population: Float[Array, " p"]
    kernel_y: AbstractKernel
    y: Points
    regularizers: Float[Array, "2"]
    explained: Float[Array, "2"]

    @property
    def doses(self) -> Points:
        return self.features.points[0]

    def at(self, doses: Points, proxies: Float[Array, "b p"]) -> Float[Array, "b n"]:
        """Weights of y in h at doses and features of proxies."""
        return self.fit.weights(self.features.coordinates((doses, proxies)))

    def own(self) -> Float[Array, "n r"]:
        """Features of the units: their doses, with their proxies as they were measured."""
        return self.features.coordinates((self.doses, self.proxies.matrix))

    def weights(self, doses: Points, adjust: Embedding | None) -> Float[Array, "b n"]:
        proxy = self.population
        if adjust is not None:
            check_unbatched(adjust, "adjust")
            check_alike(adjust.points, "adjust.points", self.proxies.points, "w")
            rows = self.proxies.coordinates(like(adjust.points, self.proxies.points))
            proxy = matmul(adjust.weights.astype(rows.dtype), rows)
        return self.at(doses, jnp.broadcast_to(proxy, (size(doses), proxy.shape[0])))


def paired(data: Units, proxies: Float[Array, "n p"], rank: int) -> LandmarkFeatures:
    """Features of the doses with features of their proxies."""
    kernel, pairs = TensorProduct((data.kernel_a, Linear())), (data.a, proxies)
    landmarks = greedy_landmarks(kernel, pairs, rank=min(rank, size(data.a)))
    return landmark_features(kernel, pairs, landmarks, data.mask)


def fit_outcome_bridge(
    a: Points,
    w: Points,
    z: Points | None,
    y: Points,
    *,
    kernels: tuple[KernelLike, ...] | None = None,
    rank: int = 300,
    regularizers: tuple[ArrayLike | None, ...] | None = None,
    mask: ArrayLike | None = None,
) -> OutcomeBridge:
    r"""Fit a bridge from an outcome proxy to the outcome (kernel proxy variables).

    An unmeasured confounder U drives dose and outcome. Two proxies of it are measured: w may drive
    the outcome but not be driven by the dose, z may drive the dose but not the outcome. A function
    h with $E[Y | a, z] = E[h(a, W) | a, z]$ gives $E[Y | do(a)] = E[h(a, W)]$ (Miao, Geng and
    Tchetgen Tchetgen 2018). Two ridge regressions find it (Mastouri et al. 2021, section 3.2):

    $$ \hat\mu(a, z) = \text{regression of } \phi(w) \text{ on } (a, z), \qquad
       \hat h = \arg\min_h \tfrac1n \sum_i (y_i - \langle h, \phi(a_i) \otimes
       \hat\mu(a_i, z_i) \rangle)^2 + \lambda |h|^2. $$

    The first ridge has the least leave-one-out error. The second is the largest one within a
    standard error of the least, and not below the best one with predictions in five folds of every
    fifth unit: give units in random order. Both stages have an intercept. The result is linear in
    functions of y, so that it gives the distribution of Y under do(a).

    **Without an unmeasured confounder** give the measured ones as w, and z = None: h is then the
    regression of y on dose and covariates, and `intervene` adjusts for them.

    **What it assumes.** Given U, the dose does not drive w, and z does not drive w or y. The
    proxies vary enough with U: E[g(U) | a, z] = 0 for all z only for g = 0, and there is a bridge.
    Measured covariates belong into both proxies, as tuples. Without these the curve is biased, and
    no statistic of the data tells, except for `explained[0]`: near 0, z knows nothing about w.

    **Arguments:**

    - `a`: n doses, reals, vectors, labels, or tuples of them; `w`, `z`: proxies; `y`: outcomes.
    - `kernels`: of a, w and z, None for the defaults. That of a real dose is `Laplace` with 3
      standard deviations: it extrapolates by constants, and has smaller errors than a Gaussian
      kernel in the [results](../results/causal.md#two-proxies-of-a-confounder). Kernels
      `Polynomial(degree=1)` with vanishing ridges give two-stage least squares. `Linear` holds no
      constant: multiplied with the kernel of a, it leaves the dose no effect of its own.
    - `rank`: features of each variable at most (static); n or more is exact.
    - `regularizers`: of the first and the second stage; None chooses, also one of them.
    - `mask`: `[n]`, False where a unit is padding.

    **Returns:** an `OutcomeBridge` for `intervene`. Cost O(n r^2 + r^3).

    **Raises:** `ValueError` for samples of different sizes, and a wrong number of kernels.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 5)
    >>> u, *noise = (jax.random.normal(key, (500,)) for key in keys)
    >>> w, z = u + noise[0] / 2, u + noise[1] / 2
    >>> a = u + noise[2]
    >>> y = a - 2 * u + noise[3] / 10
    >>> bridge = kbr.causal.fit_outcome_bridge(a, w, z, y)
    >>> curve = kbr.mean(kbr.causal.intervene(bridge, jnp.array([0.0, 1.0])))
    >>> print(f"{curve[1] - curve[0]:.0f}")
    1
    """
    data = units(a, w, w if z is None else z, y, kernels, mask, DOSE)
    rank = as_count(rank, "rank")
    proxies = feature_map(data.kernel_w, data.w, rank, data.mask)
    first, second = as_ridges(regularizers, 2, proxies.dtype)
    embedded, targets = proxies.matrix, outcome_targets(data.kernel_y, data.y, rank, data.mask)
    ridge, explained = jnp.zeros((), proxies.dtype), jnp.ones((), proxies.dtype)
    if z is not None:
        kernel = TensorProduct((data.kernel_a, data.kernel_z))
        instruments = feature_map(kernel, (data.a, data.z), rank, data.mask)
        stage = regress(instruments, proxies.matrix, first)
        ridge, explained = stage.regularizer, stage.explained
        # Predictions in folds err more, and so adjust less. Mean squared errors with folds and
        # without, 7 data sets: abortion .0085 and .0082, maths .0015 and .0010, reading .0017 and
        # .0008. Effects of 300 units, root mean square: two arms .51 and .35, weak proxies .96 and
        # .80, noise of 2 .26 and .28.
        embedded = stage.fitted(instruments, proxies.matrix, cross_fit=False)
    features = paired(data, embedded, rank)
    if z is not None and second is None:
        held = stage.fitted(instruments, proxies.matrix, cross_fit=True)
        second = second_ridge(features, paired(data, held, rank), targets)
    stage = regress(features, targets, second, cautious=True)
    return OutcomeBridge(
        features=features,
        fit=stage.fit,
        proxies=proxies,
        population=proxies.mean_coordinates(),
        kernel_y=data.kernel_y,
        y=data.y,
        regularizers=jnp.stack([ridge, stage.regularizer]),
        explained=jnp.stack([explained, stage.explained]),
    )


def fit_moment_bridge(
    a: Points,
    w: Points,
    z: Points,
    y: Points,
    *,
    kernels: tuple[KernelLike, ...] | None = None,
    rank: int = 300,
    regularizer: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> OutcomeBridge:
    r"""Fit an outcome bridge by maximum moment restriction (Mastouri et al. 2021, section 3.3).

    One stage in place of two: h leaves as little as possible in the moments with the features of
    (a, z),

    $$ \hat h = \arg\min_h \Big| \tfrac1n \sum_i (y_i - h(a_i, w_i)) \, \phi(a_i) \otimes
       \phi(z_i) \Big|^2 + \lambda |h|^2. $$

    h has an intercept. The ridge has the least squared moments of held-out units, in 5 folds of
    every fifth unit: give units in random order. What it assumes, its arguments, result and errors
    are those of `fit_outcome_bridge`; `explained[1]` is the share of the squared moments of y.

    It needs no first stage, and has less error than the two stages on grade retention. It
    rests on the moments alone: with few units or weak proxies the two stages are more stable.

    Cost O(n r^2 + q r^3) for q ridges.
    """
    data = units(a, w, z, y, kernels, mask, DOSE)
    rank = as_count(rank, "rank")
    proxies = feature_map(data.kernel_w, data.w, rank, data.mask)
    (fixed,) = as_ridges(None if regularizer is None else (regularizer,), 1, proxies.dtype)
    features = paired(data, proxies.matrix, rank)
    kernel = TensorProduct((data.kernel_a, data.kernel_z))
    tests = feature_map(kernel, (data.a, data.z), rank, data.mask)
    targets = outcome_targets(data.kernel_y, data.y, rank, data.mask).astype(proxies.dtype)
    fit, ridge, explained = _moments(features, tests, targets, fixed)
    return OutcomeBridge(
        features=features,
        fit=fit,
        proxies=proxies,
        population=proxies.mean_coordinates(),
        kernel_y=data.kernel_y,
        y=data.y,
        regularizers=jnp.stack([jnp.zeros_like(ridge), ridge]),
        explained=jnp.stack([jnp.full_like(explained, jnp.nan), explained]),
    )


class _System(eqx.Module):
    r"""The moments $g = T^\top 1 / n$, $B = T^\top \Phi / n$ and $T^\top Y / n$ of a sample."""

    one: Float[Array, " s"]
    cross: Float[Array, "s r"]
    outcome: Float[Array, "s t"]

    def solve(self, ridge: Float[Array, ""], right: Float[Array, "s k"]) -> Float[Array, "r k"]:
        """Coefficients for right-hand sides; an intercept takes the direction of g away."""
        unit = self.one / jnp.sqrt(jnp.sum(self.one**2))
        cross = self.cross - jnp.outer(unit, matmul(unit, self.cross))
        right = right - jnp.outer(unit, matmul(unit, right))
        values, axes = eigh(matmul(cross.T, cross))
        inner = matmul(axes.T, matmul(cross.T, right))
        return matmul(axes, inner / (jnp.maximum(values, 0) + ridge)[:, None])

    def risk(self, fitted: "_System", ridge: Float[Array, ""]) -> Float[Array, ""]:
        """Squared moments of what another sample's bridge leaves of this one."""
        slope = fitted.solve(ridge, fitted.outcome)
        size = jnp.sum(fitted.one**2)
        level = matmul(fitted.one, fitted.outcome - matmul(fitted.cross, slope)) / size
        rest = self.outcome - matmul(self.cross, slope) - jnp.outer(self.one, level)
        return jnp.sum(rest**2)


@eqx.filter_jit
def _moments(
    features: LandmarkFeatures,
    tests: AbstractFeatureMap,
    targets: Float[Array, "n t"],
    ridge: Float[Array, ""] | None,
) -> tuple[Smoothed, Float[Array, ""], Float[Array, ""]]:
    """The bridge of the moments, with a ridge from cross-validation."""
    share = features.uniform
    phi, psi = features.matrix, tests.matrix
    mean = matmul(share, targets)
    targets = targets - mean

    def system(chosen: Float[Array, " n"]) -> _System:
        rows = chosen[:, None] * psi
        return _System(jnp.sum(rows, 0), matmul(rows.T, phi), matmul(rows.T, targets))

    whole = system(share)
    if ridge is None:
        fold = folds_of(share > 0, _FOLDS)
        parts = [system(jnp.where(fold == k, share, 0)) for k in range(_FOLDS)]
        ridges = 10.0 ** jnp.arange(-12, 0.1, 0.5, targets.dtype)
        ridges = ridges * jnp.sum(whole.cross**2)

        def loss(ridge):
            total = jnp.zeros((), targets.dtype)
            for part in parts:
                rest = _System(
                    whole.one - part.one, whole.cross - part.cross, whole.outcome - part.outcome
                )
                total = total + part.risk(rest, ridge)
            return total

        ridge = ridges[jnp.argmin(lax.map(loss, ridges))]
    moved = (share[:, None] * psi).T
    slope = whole.solve(ridge, moved)
    square = jnp.sum(whole.one**2)
    center = matmul(whole.one, whole.cross) / square
    level = matmul(whole.one, moved) / square
    # Weights sum to 1. A tiny ridge makes the rounding of a row's sum large.
    slope = slope - jnp.sum(slope, axis=1, keepdims=True) * share
    fit = Smoothed(center, slope, level)
    left = whole.risk(whole, ridge) / jnp.sum(whole.outcome**2)
    return fit, ridge, 1 - left
