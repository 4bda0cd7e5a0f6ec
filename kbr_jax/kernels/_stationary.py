"""Kernels of a distance between real points, with one bandwidth or one per coordinate (ARD)."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_positive
from .._numerics import exp, safe_sqrt, squared_distances
from .._typing import Array, Float, Point, Points
from ._base import AbstractKernel
from ._domains import check_real, flat


def as_bandwidth(value):
    return as_positive(value, "bandwidth")


def _rescale(x: Points, bandwidth: Float[Array, "..."]) -> Float[Array, "..."]:
    return x / bandwidth.astype(x.dtype)


def check_bandwidth(x: Points, name: str, kernel: str, bandwidth: Float[Array, "..."]) -> None:
    """A bandwidth is a scalar, or has the shape of a point."""
    check_real(x, name, kernel)
    if bandwidth.ndim and bandwidth.shape != x.shape[1:]:
        raise ValueError(
            f"{kernel} has bandwidths of shape {bandwidth.shape}, but a point of `{name}` has shape {x.shape[1:]}; "
            "give one bandwidth, or one per coordinate."
        )


class AbstractStationary(AbstractKernel):
    """`k(x, y) = profile(|x - y|_h^2)` with the scaled squared distance `sum_c ((x_c - y_c) / h_c)^2`."""

    bandwidth: eqx.AbstractVar[Float[Array, "..."]]

    @abc.abstractmethod
    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The kernel as a function of the scaled squared distance; its gradient must be finite at 0."""

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        x, y = jnp.asarray(x), jnp.asarray(y)
        return self.profile(jnp.sum(_rescale(x - y, self.bandwidth) ** 2))

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return _gram(self, x, y)

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self.profile(jnp.zeros(x.shape[0], x.dtype))

    def check(self, x: Points, name: str) -> None:
        check_bandwidth(x, name, type(self).__name__, self.bandwidth)


@eqx.filter_jit  # operation by operation it would take several arrays [n, m], and as many passes over memory
def _gram(kernel: AbstractStationary, x: Points, y: Points) -> Float[Array, "n m"]:
    scale = kernel.bandwidth.astype(x.dtype)
    return kernel.profile(squared_distances(flat(x), flat(y), scale.reshape(-1) if scale.ndim else scale))


class Gaussian(AbstractStationary):
    r"""$k(x, y) = \exp(-|x - y|^2 / (2 h^2))$, the squared exponential.

    **Arguments:**

    - `bandwidth`: h > 0 in the units of the points; a scalar, or one per coordinate in the shape of a point.

    Points are arrays of any shape; `S13` writes `exp(-sigma |x - y|^2)` with `sigma = 1 / (2 h^2)`. Multiply by
    `(2 pi h^2)^{-d/2}` for the normalised density.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return exp(-squared / 2)


def _matern0(squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return exp(-safe_sqrt(squared))


# The Matern profiles as functions of the squared distance s = r^2. Their derivatives are again Matern profiles, so first
# and second derivatives of the kernels are right at zero distance too, where differentiating the root would not be.
@jax.custom_jvp
def _matern1(squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
    r = safe_sqrt(squared)
    return (1 + r) * exp(-r)


@jax.custom_jvp
def _matern2(squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
    r = safe_sqrt(squared)
    return (1 + r + squared / 3) * exp(-r)


_matern1.defjvps(lambda tangent, _, squared: -_matern0(squared) / 2 * tangent)
_matern2.defjvps(lambda tangent, _, squared: -_matern1(squared) / 6 * tangent)


class Matern12(AbstractStationary):
    r"""$k(x, y) = \exp(-r)$, $r = |x - y| / h$: the exponential kernel; the derivative at zero distance is taken as 0."""

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return _matern0(squared)


class Matern32(AbstractStationary):
    r"""$k(x, y) = (1 + \sqrt{3} r) \exp(-\sqrt{3} r)$, $r = |x - y| / h$."""

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return _matern1(3 * squared)


class Matern52(AbstractStationary):
    r"""$k(x, y) = (1 + \sqrt{5} r + 5 r^2 / 3) \exp(-\sqrt{5} r)$, $r = |x - y| / h$."""

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return _matern2(5 * squared)


class RationalQuadratic(AbstractStationary):
    r"""$k(x, y) = (1 + |x - y|^2 / (2 \alpha h^2))^{-\alpha}$, a scale mixture of Gaussian kernels.

    **Arguments:**

    - `bandwidth`: h > 0, as for `Gaussian`.
    - `alpha`: tail exponent > 0; the Gaussian kernel in the limit of large alpha.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)
    alpha: Float[Array, ""] = eqx.field(converter=lambda value: as_positive(value, "alpha", scalar=True), default=1.0)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        alpha = self.alpha.astype(squared.dtype)
        return exp(-alpha * jnp.log1p(squared / (2 * alpha)))


class Laplace(AbstractKernel):
    r"""$k(x, y) = \exp(-\sum_c |x_c - y_c| / h_c)$, the Laplace kernel of the 1-norm.

    `Matern12` is the kernel of the Euclidean norm. The derivative at a zero coordinate difference is taken as 0.
    `bandwidth` as for `Gaussian`.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        difference = _rescale(jnp.asarray(x) - jnp.asarray(y), self.bandwidth)
        return exp(-jnp.sum(jnp.where(difference == 0, 0, jnp.abs(difference))))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return jnp.ones(x.shape[0], x.dtype)

    def check(self, x: Points, name: str) -> None:
        check_bandwidth(x, name, "Laplace", self.bandwidth)
