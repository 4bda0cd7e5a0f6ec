"""What a kernel is: a function of two points, and the Gram matrices that follow from it."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_float, as_positive, is_concrete, size
from .._typing import Array, ArrayLike, Float, Point, Points, with_numbers


def check_single_array(x: Points, name: str, kernel: str) -> Array:
    """The only leaf of a sample whose points are single arrays."""
    if not hasattr(x, "dtype"):
        raise ValueError(
            f"{kernel} takes points that are single arrays, but a point of `{name}` is a "
            f"{type(x).__name__} of "
            f"{len(jax.tree.leaves(x))} parts; use TensorProduct or DirectSum for the parts of a "
            f"tuple."
        )
    return x


def check_real(x: Points, name: str, kernel: str) -> None:
    """Points with real coordinates."""
    leaf = check_single_array(x, name, kernel)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"{kernel} is a kernel on real coordinates, but `{name}` has dtype {leaf.dtype}; "
            f"convert it with `{name}.astype(float)`, or use Delta for labels."
        )


def check_histogram(x: Points, name: str, kernel: str) -> None:
    """Points with coordinates that are real and, where they can be read, not negative."""
    check_real(x, name, kernel)
    if is_concrete(x) and np.any(np.asarray(x) < 0):
        raise ValueError(
            f"{kernel} is a kernel on histograms, but `{name}` has negative coordinates."
        )


def check_where(kernel: "AbstractKernel", x: Points, name: str, mask: Any) -> None:
    """As `kernel.check`, without the points where the mask is False (outside `jit`)."""
    if mask is not None and all(map(is_concrete, jax.tree.leaves((x, mask)))):
        rows = np.asarray(mask, bool)
        x = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[rows]), x)
    kernel.check(x, name)


def check_integer(x: Points, name: str, kernel: str) -> None:
    """Points that are integers or booleans: labels, categories, indices."""
    leaf = check_single_array(x, name, kernel)
    if not (jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == bool):
        raise ValueError(
            f"{kernel} compares integer or boolean labels, but `{name}` has dtype {leaf.dtype}."
        )


def check_per_coordinate(x: Array, name: str, kernel: str, what: str, value: Array) -> None:
    """A parameter is a scalar, or has the shape of a point."""
    if value.ndim and value.shape != x.shape[1:]:
        raise ValueError(
            f"The {what} of {kernel} has shape {value.shape}, but a point of `{name}` has shape "
            f"{x.shape[1:]}; give one number, or one per coordinate."
        )


def flat(x: Points) -> Float[Array, "n d"]:
    """A sample of arrays as rows of coordinates."""
    leaf = jax.tree.leaves(x)[0]
    return leaf.reshape(leaf.shape[0], -1)


#: Numbers of points that `_by_pairs` works on at a time: 1000 x 1000 points in 128 dimensions took
#: 1.1 GB at once for a matrix of 8 MB.
_NUMBERS = 2**18


@eqx.filter_jit
def _by_pairs(kernel: "AbstractKernel", x: Points, y: Points) -> Float[Array, "n m"]:
    """Call the kernel for each pair, some rows at a time."""

    def row(a):
        return jax.vmap(lambda b: kernel(a, b))(y)

    rows = max(8, _NUMBERS // max(1, sum(leaf.size for leaf in jax.tree.leaves(y))))
    if rows >= size(x):
        return jax.vmap(row)(x)
    return lax.map(jax.checkpoint(row), x, batch_size=rows)


class AbstractKernel(eqx.Module):
    """A positive semi-definite kernel `k(x, y)` on the points of some domain.

    A new kernel needs `__call__` on one pair of points. `gram` and `diagonal` follow by `vmap`;
    override them where the whole matrix is cheaper than its entries. Parameters are array leaves,
    so `jax.grad` reaches them. Kernels compose: `k + l`, `k * l`, and `2.0 * k` are kernels (no
    division, no powers: `0.5 * k`, `k * k`).
    """

    @abc.abstractmethod
    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        """`k(x, y)` for two single points."""

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        """`[k(x_i, y_j)]_ij` for checked samples; users call `kbr_jax.gram`."""
        return _by_pairs(self, x, y)

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        """`[k(x_i, x_i)]_i` for a checked sample; users call `kbr_jax.kernels.diagonal`."""
        return jax.vmap(lambda a: self(a, a))(x)

    def check(self, x: Points, name: str) -> None:
        """Raise a `ValueError` naming the argument if the sample is not of this kernel's domain."""
        del x, name

    __repr__ = with_numbers

    def __add__(self, other: Any) -> "Sum":
        return Sum(self, as_kernel(other))

    def __mul__(self, other: Any) -> "AbstractKernel":
        return Product(self, as_kernel(other)) if callable(other) else Scaled(self, other)

    def __rmul__(self, other: ArrayLike) -> "Scaled":
        return Scaled(self, other)


#: What a kernel argument may be: a kernel, a function of two single points, or None for the default
#: of the points (`default_kernel`).
KernelLike = AbstractKernel | Callable[[Any, Any], Any] | None


class AbstractPair(AbstractKernel):
    """Two kernels on one domain, combined entry by entry."""

    first: eqx.AbstractVar[AbstractKernel]
    second: eqx.AbstractVar[AbstractKernel]

    @abc.abstractmethod
    def combine(self, a: Float[Array, "*s"], b: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The combined kernel from the values of the two."""

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.combine(self.first(x, y), self.second(x, y))

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self.combine(self.first.gram(x, y), self.second.gram(x, y))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self.combine(self.first.diagonal(x), self.second.diagonal(x))

    def check(self, x: Points, name: str) -> None:
        self.first.check(x, name)
        self.second.check(x, name)


class Sum(AbstractPair):
    """`k(x, y) + l(x, y)` on one domain. Made by `k + l`."""

    first: AbstractKernel
    second: AbstractKernel

    def combine(self, a: Float[Array, "*s"], b: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return a + b


class Product(AbstractPair):
    """`k(x, y) l(x, y)` on one domain. Made by `k * l`."""

    first: AbstractKernel
    second: AbstractKernel

    def combine(self, a: Float[Array, "*s"], b: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return a * b


class Scaled(AbstractKernel):
    """`factor * k(x, y)` with a positive factor. Made by `factor * k`."""

    kernel: AbstractKernel
    factor: Float[Array, ""] = eqx.field(
        converter=lambda value: as_positive(value, "factor", scalar=True)
    )

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self._scale(self.kernel(x, y))

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self._scale(self.kernel.gram(x, y))

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return self._scale(self.kernel.diagonal(x))

    def check(self, x: Points, name: str) -> None:
        self.kernel.check(x, name)

    def _scale(self, values: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return self.factor.astype(values.dtype) * values


class PureFunction(eqx.Module):
    """A callable as a pytree of arrays, which `jit`, `vmap` and `grad` take.

    Array leaves of the callable (if it is a pytree) stay differentiable; the rest is static.
    """

    arrays: list[Array]
    static: tuple[Any, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)

    def __init__(self, function: Any):
        leaves, self.structure = jax.tree.flatten(function)
        arrays = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
        pairs = list(zip(leaves, arrays, strict=True))
        self.arrays = [  # without weak types
            jnp.asarray(leaf, leaf.dtype) for leaf, is_array in pairs if is_array
        ]
        self.static = tuple(None if is_array else leaf for leaf, is_array in pairs)

    def __call__(self, *arguments: Any) -> Any:
        arrays = iter(self.arrays)
        leaves = [next(arrays) if leaf is None else leaf for leaf in self.static]
        return jax.tree.unflatten(self.structure, leaves)(*arguments)


def as_pure(function: Any) -> PureFunction:
    """A callable as a pytree of arrays."""
    return function if isinstance(function, PureFunction) else PureFunction(function)


def as_map(function: Any) -> Callable[[Any], Any]:
    """A callable of one point all of whose leaves are arrays."""
    if not callable(function):
        raise ValueError(f"`map` must be a function of one point, got {function!r}.")
    pure = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(function))
    return function if pure else as_pure(function)


class FunctionKernel(AbstractKernel):
    """Any callable `f(x, y)` on two single points, as a kernel: a plain function, or a kernel
    object of another library.

    Its value is one number, shape `()`: an array of any other shape is a `ValueError`; integers and
    booleans become floating-point numbers. Made by `as_kernel`.
    """

    function: PureFunction = eqx.field(converter=as_pure)

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        value = as_float(self.function(x, y))
        if value.shape != ():
            raise ValueError(
                f"A kernel function must return one number for two single points, got shape "
                f"{value.shape}: sum over its axes."
            )
        return value


def as_kernel(kernel: Any) -> AbstractKernel:
    """`kernel` itself, or a plain callable of two points wrapped as one.

    A kernel that holds more than arrays, such as the functions of a network, is wrapped too. A
    `ValueError` for anything else.
    """
    if isinstance(kernel, AbstractKernel) and all(
        hasattr(leaf, "dtype") for leaf in jax.tree.leaves(kernel)
    ):
        return kernel
    if callable(kernel):
        return FunctionKernel(kernel)
    raise ValueError(
        f"A kernel must be a kbr_jax kernel or a callable k(x, y) of two points, got {kernel!r}."
    )
