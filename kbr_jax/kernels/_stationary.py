"""Kernels of a distance between real points, with one bandwidth or one per coordinate (ARD)."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_float, as_positive
from .._numerics import distances, exp, safe_sqrt, squared_distances
from .._typing import Array, Float, Point, Points, PRNGKeyArray
from ._base import AbstractKernel, check_per_coordinate, check_real, flat


def as_bandwidth(value):
    return as_positive(value, "bandwidth")


def _rescale(x: Points, bandwidth: Float[Array, "..."]) -> Float[Array, "..."]:
    return x / bandwidth.astype(x.dtype)


#: Ends the error of a kernel without random Fourier features.
WITH_SPECTRUM = (
    "Random Fourier features exist for Gaussian, Laplace, Matern12, Matern32 and Matern52, and for "
    "scaled kernels, sums, "
    "products, TensorProduct and DirectSum of them; use landmarks otherwise."
)


def _gaussian_frequencies(
    key, count: int, dimension: int, dtype, orthogonal: bool
) -> Float[Array, "r d"]:
    """Standard normal rows.

    If orthogonal, rows of Haar blocks with lengths drawn as those of independent ones.
    """
    direction, length = jax.random.split(key)
    normals = jax.random.normal(length, (count, dimension), dtype)
    if not orthogonal:
        return normals
    side = min(count, dimension)
    frames = jax.random.orthogonal(direction, dimension, (-(-count // side),), dtype, side)
    rows = jnp.swapaxes(frames, 1, 2).reshape(-1, dimension)[:count]
    return jnp.linalg.norm(normals, axis=1, keepdims=True) * rows


def _student_frequencies(
    degrees: int, key, count: int, dimension: int, dtype, orthogonal: bool
) -> Float[Array, "r d"]:
    """Rows of the multivariate Student t distribution, the spectral density of a Matern kernel.

    Scaled normal ones.
    """
    first, second = jax.random.split(key)
    normals = _gaussian_frequencies(first, count, dimension, dtype, orthogonal)
    return normals * jnp.sqrt(
        degrees / jax.random.chisquare(second, jnp.asarray(degrees, dtype), (count, 1), dtype)
    )


class AbstractShiftInvariant(AbstractKernel):
    r"""A kernel of `(x - y) / bandwidth`, coordinate by coordinate.

    If $k(x, x) = 1$, then $k(x, y) = E \cos(\omega^\top (x - y) / h)$ for frequencies $\omega$ from
    its spectral density (Bochner's theorem).
    """

    bandwidth: eqx.AbstractVar[Float[Array, "..."]]

    def spectral_frequencies(
        self, key: PRNGKeyArray, count: int, dimension: int, dtype: Any, orthogonal: bool
    ) -> Float[Array, "r d"]:
        r"""`count` draws $\omega$ of the spectral density for bandwidth 1.

        Orthogonal ones if asked (Yu et al. 2016).
        """
        del key, count, dimension, dtype, orthogonal
        raise ValueError(
            f"{type(self).__name__} offers no draws from its spectral density. {WITH_SPECTRUM}"
        )

    def standardize(self, x: Points) -> Float[Array, "n d"]:
        """The coordinates of a checked sample in units of the bandwidth."""
        return flat(_rescale(x, self.bandwidth))

    def check(self, x: Points, name: str) -> None:
        check_real(x, name, type(self).__name__)
        check_per_coordinate(x, name, type(self).__name__, "bandwidth", self.bandwidth)


class AbstractStationary(AbstractShiftInvariant):
    """`k(x, y) = profile(|x - y|_h^2)` with the scaled squared distance
    `sum_c ((x_c - y_c) / h_c)^2`.
    """

    @abc.abstractmethod
    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The kernel as a function of the scaled squared distance.

        Its gradient must be finite at 0.
        """

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        x, y = as_float(x), as_float(y)
        return self.profile(jnp.sum(_rescale(x - y, self.bandwidth) ** 2))

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return _gram(self, x, y)

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self.profile(jnp.zeros(x.shape[0], x.dtype))


# operation by operation it would take several arrays [n, m], and as many passes over memory
@eqx.filter_jit
def _gram(kernel: AbstractStationary, x: Points, y: Points) -> Float[Array, "n m"]:
    return kernel.profile(squared_distances(flat(x), flat(y), _flat_scale(kernel, x)))


def _flat_scale(kernel: AbstractStationary, x: Points) -> Float[Array, "*d"]:
    scale = kernel.bandwidth.astype(x.dtype)
    return scale.reshape(-1) if scale.ndim else scale


class Gaussian(AbstractStationary):
    r"""$k(x, y) = \exp(-|x - y|^2 / (2 h^2))$, the squared exponential.

    **Arguments:**

    - `bandwidth`: h > 0 in the units of the points; a scalar, or one per coordinate in the shape of
      a point.

    Points are arrays of any shape; `S13` writes `exp(-sigma |x - y|^2)` with `sigma = 1 / (2 h^2)`.
    Multiply by `(2 pi h^2)^{-d/2}` for the normalized density.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def spectral_frequencies(
        self, key: PRNGKeyArray, count: int, dimension: int, dtype: Any, orthogonal: bool
    ) -> Float[Array, "r d"]:
        return _gaussian_frequencies(key, count, dimension, dtype, orthogonal)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return exp(-squared / 2)


def _matern0(squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return exp(-safe_sqrt(squared))


#: A squared distance at which a Matern kernel is 0. At an infinite one it would be NaN.
_FAR = 1e30


# The Matern profiles as functions of the squared distance s = r^2. Their derivatives are again
# Matern profiles, so first and second derivatives of the kernels are right at zero distance too,
# where differentiating the root would not be.
@jax.custom_jvp
def _matern1(squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
    r = safe_sqrt(jnp.minimum(squared, _FAR))
    return (1 + r) * exp(-r)


@jax.custom_jvp
def _matern2(squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
    squared = jnp.minimum(squared, _FAR)
    r = safe_sqrt(squared)
    return (1 + r + squared / 3) * exp(-r)


_matern1.defjvps(lambda tangent, _, squared: -_matern0(squared) / 2 * tangent)
_matern2.defjvps(lambda tangent, _, squared: -_matern1(squared) / 6 * tangent)


class Matern12(AbstractStationary):
    r"""$k(x, y) = \exp(-r)$, $r = |x - y| / h$.

    The exponential kernel; the derivative at zero distance is taken as 0.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def spectral_frequencies(
        self, key: PRNGKeyArray, count: int, dimension: int, dtype: Any, orthogonal: bool
    ) -> Float[Array, "r d"]:
        return _student_frequencies(1, key, count, dimension, dtype, orthogonal)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return _matern0(squared)

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return _exponential_gram(self, x, y)


@eqx.filter_jit
def _exponential_gram(kernel: Matern12, x: Points, y: Points) -> Float[Array, "n m"]:
    return exp(-distances(flat(x), flat(y), _flat_scale(kernel, x)))


class Matern32(AbstractStationary):
    r"""$k(x, y) = (1 + \sqrt{3} r) \exp(-\sqrt{3} r)$, $r = |x - y| / h$."""

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def spectral_frequencies(
        self, key: PRNGKeyArray, count: int, dimension: int, dtype: Any, orthogonal: bool
    ) -> Float[Array, "r d"]:
        return _student_frequencies(3, key, count, dimension, dtype, orthogonal)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return _matern1(3 * squared)


class Matern52(AbstractStationary):
    r"""$k(x, y) = (1 + \sqrt{5} r + 5 r^2 / 3) \exp(-\sqrt{5} r)$, $r = |x - y| / h$."""

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def spectral_frequencies(
        self, key: PRNGKeyArray, count: int, dimension: int, dtype: Any, orthogonal: bool
    ) -> Float[Array, "r d"]:
        return _student_frequencies(5, key, count, dimension, dtype, orthogonal)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return _matern2(5 * squared)


class RationalQuadratic(AbstractStationary):
    r"""$k(x, y) = (1 + |x - y|^2 / (2 \alpha h^2))^{-\alpha}$, a scale mixture of Gaussian kernels.

    **Arguments:**

    - `bandwidth`: h > 0, as for `Gaussian`.
    - `alpha`: tail exponent > 0; the Gaussian kernel in the limit of large alpha.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)
    alpha: Float[Array, ""] = eqx.field(
        converter=lambda value: as_positive(value, "alpha", scalar=True), default=1.0
    )

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        alpha = self.alpha.astype(squared.dtype)
        return exp(-alpha * jnp.log1p(squared / (2 * alpha)))


class Laplace(AbstractShiftInvariant):
    r"""$k(x, y) = \exp(-\sum_c |x_c - y_c| / h_c)$, the Laplace kernel of the 1-norm.

    `Matern12` is the kernel of the Euclidean norm. The derivative at a zero coordinate difference
    is taken as 0. `bandwidth` as for `Gaussian`.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        difference = _rescale(as_float(x) - as_float(y), self.bandwidth)
        return exp(-jnp.sum(jnp.where(difference == 0, 0, jnp.abs(difference))))

    def spectral_frequencies(
        self, key: PRNGKeyArray, count: int, dimension: int, dtype: Any, orthogonal: bool
    ) -> Float[Array, "r d"]:
        if orthogonal:
            raise ValueError(
                "Orthogonal frequencies need a spectral density that depends on the length of a "
                "frequency only; that of "
                "Laplace (the 1-norm) is a product over coordinates. Use orthogonal=False, or "
                "Matern12 (the 2-norm)."
            )
        return jax.random.cauchy(key, (count, dimension), dtype)

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return jnp.ones(x.shape[0], x.dtype)
