"""Kernels made of others: on the parts of a tuple, and on the values of a map."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._typing import Array, Float, Point, Points
from ._base import AbstractKernel, as_kernel


def _as_kernels(kernels: Any) -> tuple[AbstractKernel, ...]:
    if not isinstance(kernels, (tuple, list)) or not kernels:
        raise ValueError(
            f"`kernels` must be a non-empty tuple with a kernel for each part, got {kernels!r}."
        )
    return tuple(as_kernel(kernel) for kernel in kernels)


class AbstractParts(AbstractKernel):
    """A kernel on tuples that combines one kernel for each part."""

    kernels: eqx.AbstractVar[tuple[AbstractKernel, ...]]

    @abc.abstractmethod
    def combine(self, values: Float[Array, "parts *s"]) -> Float[Array, "*s"]:
        """The joint kernel from those of the parts, stacked along the first axis."""

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.combine(
            jnp.stack([k(a, b) for k, a, b in zip(self.kernels, x, y, strict=True)])
        )

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self.combine(
            jnp.stack([k.gram(a, b) for k, a, b in zip(self.kernels, x, y, strict=True)])
        )

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self.combine(
            jnp.stack([k.diagonal(a) for k, a in zip(self.kernels, x, strict=True)])
        )

    def check(self, x: Points, name: str) -> None:
        if not isinstance(x, (tuple, list)) or len(x) != len(self.kernels):
            raise ValueError(
                f"{type(self).__name__} of {len(self.kernels)} kernels takes points that are "
                f"tuples of as many parts; "
                f"`{name}` is not such a tuple."
            )
        for index, (kernel, part) in enumerate(zip(self.kernels, x, strict=True)):
            kernel.check(part, f"{name}[{index}]")


class TensorProduct(AbstractParts):
    r"""$k((x_1, x_2, \dots), (y_1, y_2, \dots)) = \prod_p k_p(x_p, y_p)$, the kernel of a joint
    variable.

    Its feature map is the tensor product of those of the parts. `kernels` holds one kernel for each
    part; a sample is a tuple of samples of equal size.
    """

    kernels: tuple[AbstractKernel, ...] = eqx.field(converter=_as_kernels)

    def combine(self, values: Float[Array, "parts *s"]) -> Float[Array, "*s"]:
        return jnp.prod(values, axis=0)


class DirectSum(AbstractParts):
    r"""$k((x_1, x_2, \dots), (y_1, y_2, \dots)) = \sum_p k_p(x_p, y_p)$, the kernel of concatenated
    features.

    S09 (section 5) uses it for the pair of last state and new observation. Points as for
    `TensorProduct`.
    """

    kernels: tuple[AbstractKernel, ...] = eqx.field(converter=_as_kernels)

    def combine(self, values: Float[Array, "parts *s"]) -> Float[Array, "*s"]:
        return jnp.sum(values, axis=0)


class Warped(AbstractKernel):
    r"""$k(f(x), f(y))$ for a kernel k and any map f of points.

    **Arguments:** `kernel`, on the values of the map; `map`, a function of one point. An
    `equinox.Module` has its parameters as leaves, which gradients reach.

    A Gram matrix costs n + m calls of the map more than that of `kernel`.

    **Raises:** `ValueError` where `kernel` does not take the values of the map.
    """

    kernel: AbstractKernel = eqx.field(converter=as_kernel)
    map: Callable[[Point], Any]

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.kernel(self.map(x), self.map(y))

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self.kernel.gram(jax.vmap(self.map)(x), jax.vmap(self.map)(y))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self.kernel.diagonal(jax.vmap(self.map)(x))

    def check(self, x: Points, name: str) -> None:
        self.kernel.check(jax.vmap(self.map)(x), f"map({name})")
