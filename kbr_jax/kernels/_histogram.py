"""Kernels on histograms.

Points with non-negative coordinates, as Lampert 2015 (experiment 2) prints them.
"""

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_positive
from .._numerics import safe_divide
from .._typing import Array, Float, Point, Points
from ._base import AbstractKernel
from ._domains import check_histogram


class HistogramIntersection(AbstractKernel):
    r"""$k(z, \bar z) = \frac{1}{d} \sum_{c=1}^d \min(z_c, \bar z_c)$ for
    $z, \bar z \in \mathbb{R}_+^d$ (Lampert 2015, experiment 2).

    A Gram matrix costs O(n m d) without a matrix product.
    """

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return jnp.mean(jnp.minimum(x, y))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return jnp.mean(x.reshape(x.shape[0], -1), axis=1)

    def check(self, x: Points, name: str) -> None:
        check_histogram(x, name, "HistogramIntersection")


class ChiSquared(AbstractKernel):
    r"""$k(z, \bar z) = \exp(-\chi^2(z, \bar z) / (2 h^2))$ with

    $$ \chi^2(z, \bar z) = \frac{1}{d} \sum_{c=1}^d \frac{(z_c - \bar z_c)^2}{\frac12 (z_c + \bar
       z_c)}, $$

    where 0/0 counts as 0, value and gradient. `bandwidth` h = 1 is the kernel as printed (Lampert
    2015, experiment 2).
    """

    bandwidth: Float[Array, ""] = eqx.field(
        converter=lambda value: as_positive(value, "bandwidth", scalar=True), default=1.0
    )

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        chi_squared = jnp.mean(safe_divide((x - y) ** 2, (x + y) / 2))
        return jnp.exp(-chi_squared / (2 * self.bandwidth.astype(chi_squared.dtype) ** 2))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return jnp.ones(x.shape[0], x.dtype)

    def check(self, x: Points, name: str) -> None:
        check_histogram(x, name, "ChiSquared")
