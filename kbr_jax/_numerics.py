"""The few numerical primitives that everything else stands on.

Safe roots, exponentials, squared distances.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._typing import Array, Bool, Float, Inexact

#: Gram matrices lose positive definiteness in the TF32 and bfloat16 products that accelerators
#: default to.
HIGHEST = lax.Precision.HIGHEST

#: Up to this many coordinates, squared distances are summed directly: about as fast as the matrix
#: product, exact near zero.
_DIRECT_DIMENSIONS = 16
#: Points at a time, where what a function makes of them may be large.
_BATCH = 50


_Function = TypeVar("_Function", bound=Callable)


def evenly(total: int, count: int) -> np.ndarray:
    """At most `count` of `total` rows, evenly spaced."""
    return np.linspace(0, total - 1, min(total, count)).astype(int)


def one_program(function: _Function, **options: Any) -> _Function:
    """Compile a function once where it is called outside of `jit`, not each operation.

    Inside of `jit` it leaves no trace.
    """
    return jax.jit(function, inline=True, **options)  # pyright: ignore[reportReturnType]


def in_batches(function: Callable[[Any], Array], points: Any) -> Float[Array, "n ..."]:
    """A function of one point at all points. What lies between may be large: some at a time."""
    return lax.map(function, points, batch_size=_BATCH)


def matmul(a: Inexact[Array, "..."], b: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """`a @ b` at the highest precision of the device."""
    return jnp.matmul(a, b, precision=HIGHEST)


def nan_unless_finite(x: Inexact[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """NaN where a number is not finite, else 0.

    In place of a constant NaN: XLA for CPUs (jaxlib 0.10 to 0.12) makes of `exp(where(ok, x, nan))`
    with a scalar `ok` in float32 code that returns what happens to be in memory. A computed NaN is
    kept.
    """
    return lax.stop_gradient(jnp.sum(jnp.abs(x) * 0, axis=axis))


def all_finite(arrays: list[Array | np.ndarray]) -> bool | Bool[Array, ""]:
    """Whether all numbers are finite.

    NumPy reads those in the memory of a CPU: a program for each shape would take 50 ms at first.
    """
    if all(map(_on_host, arrays)):
        return all(bool(np.isfinite(np.asarray(array)).all()) for array in arrays)
    return _all_finite(arrays)


def _on_host(x: Array | np.ndarray) -> bool:
    if isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x, np.ndarray) or (
        x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())
    )


@one_program
def _all_finite(arrays: list[Array | np.ndarray]) -> Bool[Array, ""]:
    return jnp.all(jnp.asarray([jnp.all(jnp.isfinite(array)) for array in arrays]))


@one_program
def safe_sqrt(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Square root of `max(x, 0)` whose gradient is 0, not infinite or NaN, wherever `x <= 0`.

    That of NaN is NaN.
    """
    zero = x <= 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, x)))


def root_mean_square(x: Float[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """Return the root mean square over an axis, or over all numbers.

    The squares of the numbers may leave the range of their dtype.
    """
    most = lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    unit = jnp.where(most > 0, most, 1)
    return safe_sqrt(jnp.mean((x / unit) ** 2, axis=axis)) * jnp.squeeze(unit, axis)


@one_program
def safe_divide(a: Float[Array, "*s"], b: Float[Array, "*t"]) -> Float[Array, "..."]:
    """`a / b`, with value and gradient 0 wherever `b == 0`."""
    zero = b == 0
    return jnp.where(zero, 0, a / jnp.where(zero, 1, b))


def _exp_by_polynomial(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """`exp(x) = 2^k exp(r)` in float64 with `|r| <= log(2) / 2` and a polynomial.

    Within an ulp; 0 below x = -708.
    """
    k = lax.round(x * math.log2(math.e), lax.RoundingMethod.TO_NEAREST_EVEN)
    shifted = k + 1.5 * 2.0**52  # the integer k now stands in the low bits
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10  # log(2) in two parts
    series = jnp.full_like(r, 1 / math.factorial(13))
    for power in range(12, -1, -1):
        series = series * r + 1 / math.factorial(power)
    exponent = (lax.bitcast_convert_type(shifted, jnp.int64) + 1022) << 52
    value = 2 * series * lax.bitcast_convert_type(exponent, jnp.float64)
    return jnp.where(x < -708.0, 0, jnp.where(x > 709.782712893384, jnp.inf, value))


@jax.custom_jvp
@one_program
def exp(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """`exp(x)`.

    In float64 on a CPU XLA calls a scalar function for every number; a polynomial is four times as
    fast there.
    """
    if x.dtype != jnp.float64:
        return jnp.exp(x)
    return lax.platform_dependent(x, cpu=_exp_by_polynomial, default=jnp.exp)


exp.defjvps(lambda tangent, value, x: tangent * value)


@one_program
def squared_distances(
    x: Float[Array, "n d"], y: Float[Array, "m d"], scale: Float[Array, "*d"] | float = 1.0
) -> Float[Array, "n m"]:
    r"""Squared Euclidean distances $\sum_c ((x_{ic} - y_{jc}) / h_c)^2$, `[n, m]`.

    `scale` h is one number, or one for each coordinate. Cost O(n m d), memory O(n m). Apart from
    rounding, no distance depends on the other points.

    Above 16 coordinates one matrix product does the work, of points shifted by their common center:
    the error of $|x|^2 + |y|^2 - 2 x y$ grows with the square of the distance from there. Where
    that would leave fewer than half of the digits (a point more than 1 / eps^{1/4} scales from the
    center: 50 in float32, 8000 in float64), the squares are summed as for few coordinates, up to
    three times slower. What is below the rounding error of the product counts as zero, so that a
    point and its copy are at distance 0.
    """
    x, y, scale = _in_the_wider(x, y, scale)
    # By a power of two nothing is rounded, and 1 / scale^2 stays inside the range of float32.
    unit = power_of_two(lax.stop_gradient(scale))
    return _squares(x / unit, y / unit, scale / unit)


@one_program
def distances(
    x: Float[Array, "n d"], y: Float[Array, "m d"], scale: Float[Array, "*d"] | float = 1.0
) -> Float[Array, "n m"]:
    """Roots of `squared_distances`, with gradient 0 where they are rounding of the points.

    Two copies of points that are computed in a program may be rounded differently. The slope at a
    point and its copy would be a rounding error divided by another.
    """
    x, y, scale = _in_the_wider(x, y, scale)
    squares = squared_distances(x, y, scale)
    norms = (jnp.sum((lax.stop_gradient(part) / scale) ** 2, axis=1) for part in (x, y))
    apart = (16 * jnp.finfo(squares.dtype).eps) ** 2 * jnp.add.outer(*norms)
    return safe_sqrt(jnp.where(squares <= apart, lax.stop_gradient(squares), squares))


def _in_the_wider(x: Array, y: Array, scale: Any) -> list[Array]:
    """All in the dtype of more bits of two samples."""
    wider = max(x.dtype, y.dtype, key=lambda dtype: jnp.finfo(dtype).bits)
    return [jnp.asarray(part).astype(wider) for part in (x, y, scale)]


def unit_of(rows: Float[Array, "n d"]) -> Float[Array, ""]:
    """A power of two near the usual distance of rows from their median.

    In this unit squares stay in the range of float32, but for single rows that are far off.
    """
    rows = lax.stop_gradient(rows[evenly(len(rows), 1000)])
    apart = jnp.max(jnp.abs(rows - jnp.median(rows, axis=0)), axis=1)
    middle, most = jnp.median(apart), jnp.max(apart)
    found = jnp.where(middle > 0, middle, most)
    return power_of_two(jnp.where((found > 0) & jnp.isfinite(found), found, 1))


def power_of_two(scale: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """A power of two near to a scale. `exp2` would round, and copies would lie apart."""
    bits = 7 if jnp.finfo(scale.dtype).bits <= 32 else 10
    largest = 2**bits - 2
    near = jnp.nan_to_num(jnp.round(jnp.log2(scale)), posinf=0, neginf=0)
    power = jnp.clip(near, -largest, largest).astype(int)
    unit = jnp.ones_like(scale)
    for bit in range(bits):
        factor = jnp.where(power < 0, 2.0 ** -(2**bit), 2.0 ** (2**bit)).astype(scale.dtype)
        unit = unit * jnp.where((jnp.abs(power) >> bit) & 1 == 1, factor, 1)
    return unit


@jax.custom_jvp
@jax.jit
def _squares(
    x: Float[Array, "n d"], y: Float[Array, "m d"], scale: Float[Array, "*d"]
) -> Float[Array, "n m"]:
    if x.shape[1] <= _DIRECT_DIMENSIONS:
        return _weighted_squares(x.T, y.T, 1 / scale**2)
    near_x, near_y = (part / scale for part in _centered(x, y))
    norms_x, norms_y = jnp.sum(near_x**2, 1), jnp.sum(near_y**2, 1)

    def product():
        norms = norms_x[:, None] + norms_y[None, :]
        squares = norms - 2 * matmul(near_x, near_y.T)
        return jnp.where(squares <= 8 * jnp.finfo(x.dtype).eps * norms, 0, squares)  # NaN stays

    return lax.cond(
        _too_far(norms_x, norms_y), lambda: _summed_squares(x, y, 1 / scale**2), product
    )


def _too_far(*norms: Array) -> Bool[Array, ""]:
    """Whether a point is too far from the center for squares to keep their digits."""
    most = float(jnp.finfo(norms[0].dtype).eps) ** -0.5
    return in_any_batch(jnp.any(jnp.stack([jnp.any(part > most) for part in norms])))


@jax.custom_batching.custom_vmap
def in_any_batch(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """`flag`, and in a batch one for all.

    A condition on it stays a condition, where both branches would run to select.
    """
    return flag


@in_any_batch.def_vmap
def _(axis_size, in_batched, flags):
    return in_any_batch(jnp.any(flags)), False


def _centered(
    x: Float[Array, "n d"], y: Float[Array, "m d"]
) -> tuple[Float[Array, "n d"], Float[Array, "m d"]]:
    # Without what is not finite: it stays in its own row. From one of the points on: XLA may
    # compute the center of x and that of y differently, and far from 0 their rounding is seen.
    first = jnp.sum(x[:1], axis=0)  # x may be empty
    first = lax.stop_gradient(jnp.where(jnp.isfinite(first), first, 0))
    x, y = x - first, y - first
    total = sum(jnp.sum(jnp.where(jnp.isfinite(part), part, 0), 0) for part in (x, y))
    center = lax.stop_gradient(total / (x.shape[0] + y.shape[0]))
    return x - center, y - center


def _summed_squares(
    x: Float[Array, "n d"], y: Float[Array, "m d"], weights: Float[Array, "*d"]
) -> Float[Array, "n m"]:
    """`_weighted_squares` of any number of coordinates, some at a time."""
    count = -(-x.shape[1] // _DIRECT_DIMENSIONS)

    def blocks(columns):
        rest = count * _DIRECT_DIMENSIONS - columns.shape[0]
        return jnp.pad(columns, ((0, rest), (0, 0))).reshape(
            count, _DIRECT_DIMENSIONS, columns.shape[1]
        )

    parts = blocks(x.T), blocks(y.T), blocks(jnp.broadcast_to(weights, x.shape[1])[:, None])[..., 0]

    @jax.checkpoint  # or reverse mode in the weights would keep n m d squares
    def block(b):
        return _weighted_squares(*(part[b] for part in parts))

    # From the first block, not from zeros, which would be of no device inside `shard_map`.
    return lax.fori_loop(1, count, lambda b, total: total + block(b), block(0))


def _weighted_squares(
    x: Float[Array, "d n"], y: Float[Array, "d m"], weights: Float[Array, "*d"]
) -> Float[Array, "n m"]:
    # One vector operation a coordinate over all pairs: a reduction over an axis of d numbers does
    # not use vector units.
    total = jnp.zeros((x.shape[1], y.shape[1]), x.dtype)
    for c in range(x.shape[0]):
        squares = (x[c, :, None] - y[c, None, :]) ** 2
        total = total + (weights[c] * squares if weights.ndim else squares)
    return total if weights.ndim else weights * total


def _squares_jvp(primals, tangents):
    r"""$2 \sum_c h_c^{-2} (x_c - y_c)(dx_c - dy_c)$ by matrix products, in both modes: four times
    as fast as differentiating the sum.

    Multiplied out it cancels, but only to the first order, and the points are centered first.
    """
    (x, y, scale), (dx, dy, dscale) = primals, tangents
    squares = _squares(x, y, scale)
    near_x, near_y = _centered(x, y)

    def moved():
        total = jnp.zeros_like(squares)
        if not is_zero(dx):
            weighted = 2 / scale**2 * dx
            total = total + jnp.sum(near_x * weighted, 1)[:, None] - matmul(weighted, near_y.T)
        if not is_zero(dy):
            weighted = 2 / scale**2 * dy
            total = total + jnp.sum(near_y * weighted, 1)[None, :] - matmul(near_x, weighted.T)
        return total

    if jnp.finfo(x.dtype).eps < 1e-10:
        total = moved()  # 1e8 scales away eight digits are left
    else:
        far = _too_far(*(jnp.sum((part / scale) ** 2, 1) for part in (near_x, near_y)))
        total = lax.cond(far, lambda: _summed_moves(x, y, 2 / scale**2, dx, dy), moved)
    if not is_zero(dscale) and scale.ndim == 0:
        total = total - 2 * dscale / scale * squares
    elif not is_zero(dscale) and x.shape[1] <= _DIRECT_DIMENSIONS:
        total = total + _weighted_squares(x.T, y.T, -2 * dscale / scale**3)
    elif not is_zero(dscale):
        slope = -2 * dscale / scale**3
        norms = [jnp.sum((lax.stop_gradient(part / scale)) ** 2, 1) for part in (near_x, near_y)]
        slopes = [jnp.sum(slope * part**2, 1) for part in (near_x, near_y)]

        def product():
            return slopes[0][:, None] + slopes[1][None, :] - 2 * matmul(slope * near_x, near_y.T)

        total = total + lax.cond(_too_far(*norms), lambda: _summed_squares(x, y, slope), product)
    return squares, total


def _summed_moves(
    x: Float[Array, "n d"], y: Float[Array, "m d"], weights: Float[Array, "*d"], dx, dy
) -> Float[Array, "n m"]:
    r"""$\sum_c w_c (x_c - y_c)(dx_c - dy_c)$, for points whose product would cancel."""
    dx, dy = (jnp.zeros_like(p) if is_zero(dp) else dp for p, dp in ((x, dx), (y, dy)))
    columns = x.T, y.T, jnp.broadcast_to(weights, x.shape[1]), dx.T, dy.T

    @jax.checkpoint  # or reverse mode would keep n m d differences
    def add(total, column):
        x, y, w, dx, dy = column
        return total + w * (x[:, None] - y) * (dx[:, None] - dy), None

    return lax.scan(add, jnp.zeros((x.shape[0], y.shape[0]), x.dtype), columns)[0]


_squares.defjvp(_squares_jvp, symbolic_zeros=True)


def is_zero(tangent: object) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def jitter(matrix: Float[Array, "n n"], shift: Float[Array, ""] | float = 0.0) -> Float[Array, ""]:
    """The numerical jitter of a positive semi-definite `matrix + shift I`: n times the machine
    epsilon times its mean diagonal.

    It follows scale and dtype of the matrix, and is far below any useful regularizer. It does not
    replace one.
    """
    n = matrix.shape[-1]
    scale = jnp.mean(jnp.diagonal(matrix)) + shift
    return n * jnp.finfo(matrix.dtype).eps * jnp.where(scale > 0, scale, 1)
