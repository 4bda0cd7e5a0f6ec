"""Scores of a density, and the Stein kernel that they make of a kernel."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_points, check_finite, is_concrete, padded, size, take
from .._numerics import matmul, squared_distances
from .._typing import Array, Float, Points
from ..kernels import (
    AbstractKernel,
    AbstractStationary,
    Delta,
    Energy,
    HistogramIntersection,
    KernelLike,
    Laplace,
    Matern12,
    RationalQuadratic,
    as_kernel,
    default_kernel,
    warn_of_scale,
)
from ..kernels._base import check_real, flat

#: The logarithm of a density at one point, up to a constant: one number.
LogDensity = Callable[[Array], Array]

#: Kernels without the derivatives that a Stein kernel needs.
_ROUGH = (Delta, Energy, HistogramIntersection, Laplace, Matern12)

#: Numbers of a block of rows of the Stein kernel matrix.
_NUMBERS = 2**18


def with_scores(
    log_density: LogDensity, x: Points
) -> tuple[Float[Array, "n *d"], Float[Array, "n *d"]]:
    """Checked points, and the gradients of the log density there."""
    if not callable(log_density):
        raise ValueError(f"`log_density` must be a function of one point, got {log_density!r}.")
    x = check_finite(as_points(x, "x"), "x")
    check_real(x, "x", "The kernel Stein discrepancy")
    value = eqx.filter_eval_shape(log_density, take(x, 0))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`log_density` must return one real number for one point of shape {x.shape[1:]}, got "
            f"{dtype}{list(shape or [])}."
        )
    values, scores = _scores(log_density, x)
    # Booleans can be looked at inside `grad` too.
    outside, finite = values == -jnp.inf, jnp.isfinite(values)
    usable = finite & jnp.all(jnp.isfinite(flat(scores)), axis=1)
    if is_concrete(usable):
        _check_scores(*map(np.asarray, (outside, finite, usable)))
        return x, scores
    return x, jnp.where(jnp.all(usable), scores, jnp.nan)


def _check_scores(outside: np.ndarray, finite: np.ndarray, usable: np.ndarray) -> None:
    problems = (
        (
            outside,
            "`log_density` is -inf {where}: they lie outside the support of the density, which "
            "needs no test. Remove them, or give a density that is positive there.",
        ),
        (~finite, "`log_density` is NaN or infinite {where}: it must be finite."),
        (
            ~usable,
            "The gradient of `log_density` is NaN or infinite {where}: write the function so that "
            "`jax.grad` is finite there (no root of 0, no `where` over a NaN).",
        ),
    )
    for wrong, message in problems:
        if wrong.any():
            count = f"at {wrong.sum()} of {wrong.size} points"
            raise ValueError(
                message.format(where=f"{count} (the first is x[{int(np.argmax(wrong))}])")
            )


@eqx.filter_jit
def _scores(
    log_density: LogDensity, x: Float[Array, "n *d"]
) -> tuple[Float[Array, " n"], Float[Array, "n *d"]]:
    return jax.vmap(jax.value_and_grad(log_density))(x)


def smooth_kernel(kernel: KernelLike, x: Float[Array, "n *d"]) -> AbstractKernel:
    if kernel is None:
        return multiquadric(x, 1.0)
    found = as_kernel(kernel)
    parts = jax.tree.leaves(found, is_leaf=lambda part: isinstance(part, _ROUGH))
    for part in parts:
        if isinstance(part, _ROUGH):
            raise ValueError(
                f"A Stein kernel needs two derivatives of `kernel`, and {type(part).__name__} has "
                f"a kink or a step: take `RationalQuadratic`, `Gaussian` or `Matern52`."
            )
    found.check(x, "x")
    warn_of_scale(found, x, "x")
    return found


def multiquadric(x: Float[Array, "n *d"], scale: float) -> AbstractKernel:
    bandwidth = lax.stop_gradient(jax.tree.leaves(default_kernel(x))[0])
    return RationalQuadratic(bandwidth * scale, jnp.asarray(0.5, x.dtype))


#: Points `[n, ...]` and their scores, of the same shape; or one of each.
Scored = tuple[Array, Array]


def stein(kernel: AbstractKernel, one: Scored, other: Scored) -> Float[Array, "a b"]:
    """The Stein kernel u of each pair of two samples."""
    if isinstance(kernel, AbstractStationary):
        return _of_distance(kernel, one, other)
    return _of_pairs(kernel, one, other)


def _of_distance(kernel: AbstractStationary, one: Scored, other: Scored) -> Float[Array, "a b"]:
    r"""For $k = g(r)$ of the scaled squared distance r, by matrix products."""
    (x, s), (y, t) = (tuple(map(flat, pair)) for pair in (one, other))
    # Differences of points are taken apart into products, which round less near the center.
    center = jnp.mean(y, axis=0)
    x, y = x - center, y - center
    scale = kernel.bandwidth.astype(x.dtype).reshape(-1)
    scale = jnp.broadcast_to(scale, x.shape[1:])
    squares = squared_distances(x, y, scale)
    fourth = squared_distances(x, y, scale**2)

    def slope(squared):
        return jax.jvp(kernel.profile, (squared,), (jnp.ones_like(squared),))[1]

    first, second = jax.jvp(slope, (squares,), (jnp.ones_like(squares),))
    by_s, by_t = s / scale**2, t / scale**2
    # The sum of (t - s) (x - y) / h^2.
    moved = matmul(x, by_t.T) + matmul(by_s, y.T)
    moved = moved - jnp.sum(by_s * x, axis=1)[:, None] - jnp.sum(by_t * y, axis=1)
    curved = 2 * first * jnp.sum(scale**-2) + 4 * second * fourth
    return matmul(s, t.T) * kernel.profile(squares) + 2 * first * moved - curved


def _of_pairs(kernel: AbstractKernel, one: Scored, other: Scored) -> Float[Array, "a b"]:
    """By derivatives at each pair of points, one direction after the other."""
    shape, dtype = one[0].shape[1:], one[0].dtype
    number = int(np.prod(shape))
    directions = jnp.eye(number, dtype=dtype).reshape(number, *shape)

    def of_points(x, y):
        return kernel(x, y).astype(dtype)

    def of_pair(x, s, y, t):
        value, (by_x, by_y) = jax.value_and_grad(of_points, (0, 1))(x, y)

        def add(trace, direction):
            def along(point):
                return jax.jvp(lambda y: of_points(point, y), (y,), (direction,))[1]

            return trace + jax.jvp(along, (x,), (direction,))[1], None

        trace, _ = lax.scan(add, jnp.zeros_like(value), directions)
        return jnp.sum(s * t) * value + jnp.sum(s * by_y + t * by_x) + trace

    return jax.vmap(lambda x, s: jax.vmap(lambda y, t: of_pair(x, s, y, t))(*other))(*one)


def by_rows(function: Callable[[Array], Array], kernel: AbstractKernel, points: Scored) -> Array:
    """`function` of blocks of rows of the matrix of u, one block after the other."""
    n = size(points)
    rows = max(8, _NUMBERS // n)
    if rows >= n:
        return function(stein(kernel, points, points))
    count = -(-n // rows)
    blocks = jax.tree.map(
        lambda leaf: leaf.reshape(count, rows, *leaf.shape[1:]), padded(points, count * rows - n)
    )
    # or reverse mode would keep several matrices
    block = jax.checkpoint(lambda part: function(stein(kernel, part, points)))
    return lax.map(block, blocks).reshape(count * rows, -1)[:n]


def matrix(kernel: AbstractKernel, points: Scored) -> Float[Array, "n n"]:
    return by_rows(lambda rows: rows, kernel, points)
