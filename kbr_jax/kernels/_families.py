"""Kernels of an inner product, on labels and indices, and on histograms."""

import abc

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._checks import as_count, as_float, as_positive, is_concrete
from .._numerics import distances, matmul, safe_divide, safe_sqrt
from .._typing import Array, Float, Point, Points
from ._base import (
    AbstractKernel,
    check_histogram,
    check_integer,
    check_per_coordinate,
    check_real,
    flat,
)


class AbstractDotProduct(AbstractKernel):
    """`k(x, y) = profile(<x, y>)`, with the inner product summed over all coordinates of arrays of
    any shape.
    """

    @abc.abstractmethod
    def profile(self, product: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The kernel as a function of the inner product."""

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.profile(jnp.sum(as_float(x) * as_float(y)))

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


class Delta(AbstractKernel):
    """Kronecker delta `k(x, y) = 1` if x equals y in every coordinate, else 0.

    Points are integer or boolean arrays of any shape: labels `[n]`, tuples of labels `[n, d]`. With
    it every rule of this library is the rule of finite probability tables.
    """

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return jnp.all(jnp.asarray(x) == jnp.asarray(y)).astype(float)

    def check(self, x: Points, name: str) -> None:
        check_integer(x, name, "Delta")


class Precomputed(AbstractKernel):
    """`k(i, j) = matrix[i, j]`: a given Gram matrix, with points that are indices into it.

    For objects whose kernel is computed elsewhere: strings, graphs, molecules. Points are integers
    `[n]` in `0 .. N - 1`; others are an error, and inside `jit` NaN. `matrix` is `[N, N]`,
    symmetric and positive semi-definite.

    **Raises:** `ValueError` for a matrix that is not square, finite and symmetric to a thousandth,
    or is negative on its diagonal.
    """

    matrix: Float[Array, "N N"] = eqx.field(converter=as_float)

    def __check_init__(self):
        shape = getattr(self.matrix, "shape", ())
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(
                f"`matrix` must be a square Gram matrix [N, N], got shape {tuple(shape)}."
            )
        if is_concrete(self.matrix):
            matrix = np.asarray(self.matrix)
            rounding = 1e-3 * np.abs(matrix).max(initial=0)
            if not np.all(np.abs(matrix - matrix.T) <= rounding) or np.any(matrix.diagonal() < 0):
                raise ValueError(
                    "`matrix` must be a Gram matrix: finite, symmetric, and not negative on its "
                    "diagonal."
                )

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self._entries(jnp.asarray(x), jnp.asarray(y))

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
        if is_concrete(x):
            count, found = self.matrix.shape[-1], np.asarray(x)
            bad = found[(found < 0) | (found >= count)]
            if bad.size:
                raise ValueError(
                    f"`{name}` holds the index {bad[0]}, but the matrix of Precomputed has "
                    f"{count} rows."
                )


class Energy(AbstractKernel):
    r"""$k(x, y) = \frac12 (|x - c|_s + |y - c|_s - |x - y|_s)$ with $|z|_s = |z / s|$.

    The distance-induced kernel (Sejdinovic et al. 2013). Its squared MMD is half the energy
    distance. For a distribution and one point it is the energy score, in one dimension the CRPS: a
    proper score of a forecast without any bandwidth. Where weights sum to 1, the center c does not
    matter.

    **Arguments:** `center` c and `scale` s > 0: one number, or one per coordinate.
    """

    center: Float[Array, "..."] = eqx.field(converter=as_float, default=0.0)
    scale: Float[Array, "..."] = eqx.field(
        converter=lambda value: as_positive(value, "scale"), default=1.0
    )

    def __call__(self, x: Point, y: Point) -> Float[Array, ""]:
        return self.gram(as_float(x)[None], as_float(y)[None])[0, 0]

    def gram(self, x: Points, y: Points) -> Float[Array, "n m"]:
        scale = self.scale.astype(x.dtype)
        apart = distances(flat(x), flat(y), scale.reshape(-1) if scale.ndim else scale)
        return (_lengths(self._units(x))[:, None] + _lengths(self._units(y)) - apart) / 2

    def diagonal(self, x: Points) -> Float[Array, " n"]:
        return _lengths(self._units(x))

    def _units(self, x: Points) -> Float[Array, "n d"]:
        return flat((x - self.center.astype(x.dtype)) / self.scale.astype(x.dtype))

    def check(self, x: Points, name: str) -> None:
        check_real(x, name, "Energy")
        check_per_coordinate(x, name, "Energy", "center", self.center)
        check_per_coordinate(x, name, "Energy", "scale", self.scale)


def _lengths(x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return safe_sqrt(jnp.sum(x**2, axis=1))


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
