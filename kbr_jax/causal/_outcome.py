r"""Outcome bridges: effects where the confounder is seen through two proxies."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, check_alike, like, size
from .._lapack import eigh
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding, check_unbatched
from ..features import AbstractFeatureMap
from ..kernels import AbstractKernel, KernelLike, Linear, TensorProduct
from ._intervene import AbstractCausalModel
from ._stages import Smoothed, feature_map, regress
from ._units import as_ridges, outcome_targets, units

#: Bandwidth of the kernel of a real dose, in standard deviations.
DOSE = 3.0
#: Folds of the cross-validation of `fit_moment_bridge`.
_FOLDS = 5


class OutcomeBridge(AbstractCausalModel):
    r"""A function h of dose and outcome proxy with $E[Y | a, z] = E[h(a, W) | a, z]$.

    - `features` of the pairs of doses and embedded proxies; `fit`, the regression of y on them.
    - `proxies`: features of w; `population`: their mean over the sample.
    - `regularizers`: the ridges, of the first stage (0 without one) and of the second.
    - `explained`: the shares of variance that the stages explain of points left out, of the proxy w
      and of y. A first share near 0 says that z tells nothing about w: no bridge can be found.
    """

    features: AbstractFeatureMap
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

    def weights(self, doses: Points, adjust: Embedding | None) -> Float[Array, "b n"]:
        proxy = self.population
        if adjust is not None:
            check_unbatched(adjust, "adjust")
            check_alike(adjust.points, "adjust.points", self.proxies.points, "w")
            rows = self.proxies.coordinates(like(adjust.points, self.proxies.points))
            proxy = matmul(adjust.weights.astype(rows.dtype), rows)
        return self.at(doses, jnp.broadcast_to(proxy, (size(doses), proxy.shape[0])))


def fit_outcome_bridge(
    a: Points,
    w: Points,
    z: Points | None,
    y: Points,
    *,
    kernels: tuple[KernelLike, KernelLike, KernelLike] | None = None,
    rank: int = 300,
    regularizers: tuple[ArrayLike | None, ArrayLike | None] | None = None,
    cross_fit: bool = True,
    mask: ArrayLike | None = None,
) -> OutcomeBridge:
    r"""x"""
    data = units(a, w, w if z is None else z, y, kernels, mask, DOSE)
    rank = as_count(rank, "rank")
    proxies = feature_map(data.kernel_w, data.w, rank, data.mask)
    first, second = as_ridges(regularizers, 2, proxies.dtype)
    embedded = proxies.matrix
    ridge, explained = jnp.zeros((), proxies.dtype), jnp.ones((), proxies.dtype)
    if z is not None:
        kernel = TensorProduct((data.kernel_a, data.kernel_z))
        instruments = feature_map(kernel, (data.a, data.z), rank, data.mask)
        stage = regress(instruments, embedded, first)
        ridge, explained = stage.regularizer, stage.explained
        embedded = stage.left_out if cross_fit else stage.fitted(instruments, embedded)
    features = feature_map(
        TensorProduct((data.kernel_a, Linear())), (data.a, embedded), rank, data.mask
    )
    stage = regress(features, outcome_targets(data.kernel_y, data.y, rank, data.mask), second)
    return OutcomeBridge(
        features,
        stage.fit,
        proxies,
        proxies.mean_coordinates(),
        data.kernel_y,
        data.y,
        jnp.stack([ridge, stage.regularizer]),
        jnp.stack([explained, stage.explained]),
    )


def fit_moment_bridge(
    a: Points,
    w: Points,
    z: Points,
    y: Points,
    *,
    kernels: tuple[KernelLike, KernelLike, KernelLike] | None = None,
    rank: int = 300,
    regularizer: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> OutcomeBridge:
    r"""x"""
    data = units(a, w, z, y, kernels, mask, DOSE)
    rank = as_count(rank, "rank")
    proxies = feature_map(data.kernel_w, data.w, rank, data.mask)
    (fixed,) = as_ridges(None if regularizer is None else (regularizer,), 1, proxies.dtype)
    features = feature_map(
        TensorProduct((data.kernel_a, Linear())), (data.a, proxies.matrix), rank, data.mask
    )
    kernel = TensorProduct((data.kernel_a, data.kernel_z))
    tests = feature_map(kernel, (data.a, data.z), rank, data.mask)
    targets = outcome_targets(data.kernel_y, data.y, rank, data.mask).astype(proxies.dtype)
    fit, ridge, explained = _moments(features, tests, targets, fixed)
    nothing = jnp.zeros_like(ridge)
    return OutcomeBridge(
        features,
        fit,
        proxies,
        proxies.mean_coordinates(),
        data.kernel_y,
        data.y,
        jnp.stack([nothing, ridge]),
        jnp.stack([nothing, explained]),
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
    features: AbstractFeatureMap,
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
        fold = jnp.arange(size(features.points)) % _FOLDS
        parts = [system(jnp.where(fold == k, share, 0)) for k in range(_FOLDS)]
        ridges = 10.0 ** jnp.arange(-12, 0.1, 0.5) * jnp.trace(matmul(whole.cross.T, whole.cross))

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
    fit = Smoothed(center, slope, level)
    left = whole.risk(whole, ridge) / jnp.sum(whole.outcome**2)
    return fit, ridge, 1 - left
