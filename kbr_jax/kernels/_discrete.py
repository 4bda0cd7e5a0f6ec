"""Kernels on labels and on indices."""

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_float
from .._typing import Array, Float, Point, Points
from ._base import AbstractKernel
from ._domains import check_integer


class Delta(AbstractKernel):
    """Kronecker delta `k(x, y) = 1` if x equals y in every coordinate, else 0.

    Points are integer or boolean arrays of any shape: labels `[n]`, tuples of labels `[n, d]`. With
    it every rule of this library is the rule of finite probability tables. `dtype` is that of the
    Gram matrix, the default float if None.
    """

    dtype: jnp.dtype | None = eqx.field(
        static=True,
        default=None,
        converter=lambda value: None if value is None else jnp.dtype(value),
    )

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return jnp.all(jnp.asarray(x) == jnp.asarray(y)).astype(
            float if self.dtype is None else self.dtype
        )

    def check(self, x: Points, name: str) -> None:
        check_integer(x, name, "Delta")


class Precomputed(AbstractKernel):
    """`k(i, j) = matrix[i, j]`: a given Gram matrix, with points that are indices into it.

    For objects whose kernel is computed elsewhere: strings, graphs, molecules. Points are integers
    `[n]` in `0 .. N - 1`; out-of-range indices give NaN. `matrix` is `[N, N]`, symmetric and
    positive semi-definite.
    """

    matrix: Float[Array, "N N"] = eqx.field(converter=as_float)

    def __check_init__(self):
        shape = getattr(self.matrix, "shape", ())
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(
                f"`matrix` must be a square Gram matrix [N, N], got shape {tuple(shape)}."
            )

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self._entries(x, y)

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        return self._entries(x[:, None], y[None, :])

    def _entries(self, x: Array, y: Array) -> Float[Array, "..."]:
        x, y = x.astype(int), y.astype(int)  # an int8 may not hold N
        beyond = self.matrix.shape[0]  # a negative index would count from the end
        x, y = jnp.where(x < 0, beyond, x), jnp.where(y < 0, beyond, y)
        return self.matrix.at[x, y].get(mode="fill", fill_value=jnp.nan)

    def check(self, x: Points, name: str) -> None:
        check_integer(x, name, "Precomputed")
        if x.ndim != 1 or x.dtype == bool:
            raise ValueError(
                f"Precomputed takes indices, integers `{name}` of shape [n]; got "
                f"{x.dtype}{list(x.shape)}."
            )
