"""Kernels made of others: on the parts of a tuple, and on the values of a map."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import precision_of
from .._numerics import HIGHEST, matmul
from .._typing import Array, Float, Point, Points
from ._base import AbstractKernel, FunctionKernel, as_kernel, as_map
from ._families import AbstractDotProduct, Energy, Precomputed


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
        return self._combined([k(a, b) for k, a, b in zip(self.kernels, x, y, strict=True)], x, y)

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self._combined(
            [k.gram(a, b) for k, a, b in zip(self.kernels, x, y, strict=True)], x, y
        )

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self._combined([k.diagonal(a) for k, a in zip(self.kernels, x, strict=True)], x)

    def _combined(self, values: list[Array], *points: Any) -> Float[Array, "*s"]:
        # Labels have values in the widest dtype. Beside real numbers of fewer digits, the result
        # has these digits, and jitters must be theirs.
        own = precision_of(*points)
        values = values if own is None else [each.astype(own) for each in values]
        return self.combine(jnp.stack(values))

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
    `equinox.Module` has its arrays as leaves, which gradients reach; what else it holds is static.

    A Gram matrix costs n + m calls of the map more than that of `kernel`.

    **Raises:** `ValueError` where `kernel` does not take the values of the map.
    """

    kernel: AbstractKernel = eqx.field(converter=as_kernel)
    map: Callable[[Point], Any] = eqx.field(converter=as_map)

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.kernel(self.map(x), self.map(y))

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self.kernel.gram(jax.vmap(self.map)(x), jax.vmap(self.map)(y))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self.kernel.diagonal(jax.vmap(self.map)(x))

    def check(self, x: Points, name: str) -> None:
        self.kernel.check(jax.vmap(self.map)(x), f"map({name})")


class FeatureMap(AbstractKernel):
    r"""$k(x, y) = f(x)^\top f(y)$ for a finite feature map f, such as a neural network.

    **Arguments:** `map`, a function of one point with real values of any fixed shape. An
    `equinox.Module` has its arrays as leaves, which gradients reach; what else it holds is static.

    Where the library takes a sample with its exact Gram matrix, it keeps the r features of each
    point instead: costs are those of r landmarks, and nothing is approximated. The kernel of large
    values, such as $10^3$, is badly conditioned: let the map end in a normalization.

    `learning.learn_features` trains a map.
    """

    map: Callable[[Point], Any] = eqx.field(converter=as_map)

    def features(self, x: Points) -> Float[Array, "n r"]:
        """Values of the map as rows."""
        values = jax.vmap(self.map)(x)
        return values.reshape(values.shape[0], -1)

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return jnp.vdot(self.map(x), self.map(y), precision=HIGHEST)

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return matmul(self.features(x), self.features(y).T)

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return jnp.sum(self.features(x) ** 2, axis=1)

    def check(self, x: Points, name: str) -> None:
        values = jax.eval_shape(jax.vmap(self.map), x)
        if not hasattr(values, "dtype") or not jnp.issubdtype(values.dtype, jnp.floating):
            raise ValueError(f"The map of `FeatureMap` must give one real array for each `{name}`.")


def of_products(kernel: AbstractKernel) -> bool:
    """Whether some part of a kernel is an inner product, or may be one.

    Its RKHS need not hold a constant: sums of weights mean nothing.
    """
    found = (AbstractDotProduct, FeatureMap, FunctionKernel, Precomputed, Energy)
    parts = jax.tree.leaves(kernel, is_leaf=lambda part: isinstance(part, found))
    return any(isinstance(part, found) for part in parts)
