"""Kernels of an inner product between real points."""

import abc

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_count, as_positive
from .._numerics import matmul
from .._typing import Array, Float, Point, Points
from ._base import AbstractKernel
from ._domains import check_real, flat


class AbstractDotProduct(AbstractKernel):
    """`k(x, y) = profile(<x, y>)`, with the inner product summed over all coordinates of arrays of
    any shape.
    """

    @abc.abstractmethod
    def profile(self, product: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The kernel as a function of the inner product."""

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.profile(jnp.sum(x * y))

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self.profile(matmul(flat(x), flat(y).T))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self.profile(jnp.sum(flat(x) ** 2, axis=1))

    def check(self, x: Points, name: str) -> None:
        check_real(x, name, type(self).__name__)


class Linear(AbstractDotProduct):
    r"""$k(x, y) = \langle x, y \rangle$; on matrices $\operatorname{tr}(A^\top B)$ (S09 section 7).

    An embedding under it keeps the mean and nothing else. It cannot hold a belief with two modes.
    Its pre-image is the mean, on rotations and permutations the nearest one of them
    (`decode_rotation`, `decode_permutation`).
    """

    def profile(self, product: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return product


class Polynomial(AbstractDotProduct):
    r"""$k(x, y) = (\gamma \langle x, y \rangle + c)^p$.

    **Arguments:**

    - `degree`: integer p >= 1 (static).
    - `scale`: gamma > 0.
    - `offset`: c > 0; all monomials up to degree p take part.
    """

    degree: int = eqx.field(static=True, converter=lambda value: as_count(value, "degree"))
    scale: Float[Array, ""] = eqx.field(
        converter=lambda value: as_positive(value, "scale", scalar=True), default=1.0
    )
    offset: Float[Array, ""] = eqx.field(
        converter=lambda value: as_positive(value, "offset", scalar=True), default=1.0
    )

    def profile(self, product: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return (
            self.scale.astype(product.dtype) * product + self.offset.astype(product.dtype)
        ) ** self.degree
