r"""Pre-images: the point whose feature is closest to an embedding (S13 eq 26, S09 eq 12),

$$ y^* = \operatorname{argmin}_y |\mu - \phi(y)|^2 = \operatorname{argmin}_y \; k(y, y) - 2
   \mu(y). $$
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import (
    as_batch,
    as_count,
    as_points,
    check_alike,
    in_one_precision,
    is_concrete,
    is_real,
    take,
)
from .._lapack import determinant, solve, svd
from .._numerics import HIGHEST, matmul, nan_unless_finite, one_program, safe_divide
from .._typing import Array, ArrayLike, Bool, Float, Point, Points
from ..kernels import AbstractKernel, Gaussian
from ._embedding import Embedding, check_unbatched, evaluate

#: Descents of `decode_gradient`, from the best points of the sample.
_STARTS = 5


def decoding_objective(embedding: Embedding, points: Point | Points) -> Float[Array, "..."]:
    r"""$k(y, y) - 2 \mu(y)$ at points y `[m, ...]` or at one (S13 eq 26).

    $|\mu - \phi(y)|^2$ less the constant $|\mu|^2$.
    """
    batch, single = as_batch(points, "points", embedding.points, "embedding.points")
    values = embedding.kernel.diagonal(batch) - 2 * evaluate(embedding, batch)
    return values[..., 0] if single else values


def decode(embedding: Embedding, candidates: Points | None = None) -> Point:
    """The best point among candidates: a grid, a list, or by default the embedding's own sample.

    **Arguments:** `candidates` `[m, ...]`. **Returns:** one point, or `[..., *point]` for a batch
    of embeddings. Cost O(n m d). Any kernel, any domain; refine the result with
    `decode_fixed_point` or `decode_gradient`.
    """
    points = embedding.points if candidates is None else as_points(candidates, "candidates")
    check_alike(points, "candidates", embedding.points, "embedding.points")
    best = take(points, jnp.argmin(decoding_objective(embedding, points), axis=-1))
    return _unless_nan(embedding, best)


def _unless_nan(embedding: Embedding, found: Point) -> Point:
    """The point that was found: NaN where the weights are, which say nothing."""
    bad = jnp.isnan(jnp.sum(embedding.weights, axis=-1))
    marks = nan_unless_finite(embedding.weights, axis=-1)

    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            shape = *bad.shape, *[1] * (leaf.ndim - bad.ndim)
            nan = marks.reshape(shape).astype(leaf.dtype)
            return jnp.where(bad.reshape(shape), nan, leaf)
        if is_concrete(bad) and np.any(np.asarray(bad)):
            raise ValueError("The weights of `embedding` are NaN: no label is the best one.")
        return leaf

    return jax.tree.map(one, found)


def decode_fixed_point(
    embedding: Embedding, start: Point | None = None, *, num_steps: int = 100
) -> Point:
    r"""Pre-image under a Gaussian kernel by the fixed point of Mika et al. 1999,

    $$ y \leftarrow \frac{\sum_i w_i k(x_i, y) x_i}{\sum_i w_i k(x_i, y)}. $$

    **Arguments:** `embedding`, unbatched (use `vmap`), with a `Gaussian` kernel; `start`, one
    point, by default the best point of the sample; `num_steps`, the number of iterations (static).

    Signed weights can make the denominator zero or negative, and a step can then go up. A step that
    would raise the objective (by more than rounding) is replaced by the same step halved, and by
    none if that fails too, so the objective never rises above its start. Cost O(num_steps n d).
    Differentiable (through the iterations). Computed in the wider dtype of points and weights.
    """
    return _fixed_point(embedding, start, as_count(num_steps, "num_steps"))


@eqx.filter_jit
def _fixed_point(embedding: Embedding, start: Point | None, num_steps: int) -> Point:
    kernel = embedding.kernel
    if not isinstance(kernel, Gaussian):
        raise ValueError(
            f"The fixed point is that of Gaussian kernels, not {type(kernel).__name__}; use "
            f"`decode_gradient`."
        )
    check_unbatched(embedding, "embedding")
    embedding = _in_one_dtype(embedding)
    points, weights = embedding.points, embedding.weights
    start = jnp.asarray(decode(embedding) if start is None else start, points.dtype)
    if start.shape != points.shape[1:]:
        raise ValueError(
            f"`start` has shape {start.shape}, a point of the embedding {points.shape[1:]}; they "
            f"must agree."
        )
    slack = 8 * jnp.finfo(weights.dtype).eps * lax.stop_gradient(1 + jnp.sum(jnp.abs(weights)))

    def step(y, _):
        terms = weights * kernel.gram(points, y[None])[:, 0]
        mass = jnp.sum(terms)
        safe = mass > jnp.finfo(terms.dtype).eps * jnp.sum(jnp.abs(terms))
        target = jnp.tensordot(terms, points, axes=1, precision=HIGHEST) / jnp.where(safe, mass, 1)
        full = jnp.where(safe, target, y)
        trials = jnp.stack([full, (full + y) / 2, y])
        values = lax.stop_gradient(decoding_objective(embedding, trials))
        improves = values <= values[2] + slack
        return trials[jnp.where(improves[0], 0, jnp.where(improves[1], 1, 2))], None

    return _unless_nan(embedding, lax.scan(step, start, length=num_steps)[0])


def _in_one_dtype(embedding: Embedding) -> Embedding:
    """Points and weights in the wider of their dtypes, as a loop must keep them.

    Points must be one array of real numbers.
    """
    points = as_points(embedding.points, "embedding.points")
    if not is_real(points):
        kinds = [leaf.dtype.name for leaf in jax.tree.leaves(points)]
        raise ValueError(
            f"Only points that are one floating-point array can be moved, not {kinds}: convert "
            f"them, or use `decode`."
        )
    return Embedding(embedding.kernel, *in_one_precision(points, embedding.weights))


def decode_gradient(
    embedding: Embedding,
    starts: Points | None = None,
    *,
    num_steps: int = 200,
    learning_rate: ArrayLike = 0.05,
) -> Point:
    """Pre-image under any differentiable kernel by gradient descent (Adam) on S13 eq 26.

    It descends from several starts.

    **Arguments:**

    - `embedding`: unbatched, on real points (one array); use `vmap` over weights for a batch.
      Computed in the wider dtype of points and weights.
    - `starts`: `[s, ...]`; by default the five best points of the sample.
    - `num_steps` (static), `learning_rate`: of Adam; the rate is in units of the points and decays
      to zero over the steps (cosine).

    **Returns:** the best point seen over all starts and steps, never worse than the best start. Its
    gradient is that of the stationary point it found; at the cusp of a kernel such as `Matern12`,
    that of the start. It holds where the descent has converged. Cost O(s num_steps n d); for a
    gradient also O(n d^2 + d^3). **Raises:** `ValueError` for a batch, for points that are not one
    real array, and for `starts` unlike them.
    """
    # A Python number would be static, and each another program.
    steps = as_count(num_steps, "num_steps")
    return _descend(embedding, starts, jnp.asarray(learning_rate, float), steps)


@eqx.filter_jit
def _descend(
    embedding: Embedding, starts: Points | None, rate: Float[Array, ""], steps: int
) -> Point:
    check_unbatched(embedding, "embedding")
    embedding = _in_one_dtype(embedding)
    if starts is None:
        order = jnp.argsort(decoding_objective(embedding, embedding.points))
        starts = take(embedding.points, order[:_STARTS])
    first = as_points(starts, "starts")
    check_alike(first, "starts", embedding.points, "embedding.points")
    first = first.astype(embedding.points.dtype)
    # A slope is in inverse units of the points: Adam's own `eps` of 1e-8 would hold large units.
    schedule = optax.cosine_decay_schedule(rate.astype(first.dtype), steps)
    optimizer = optax.adam(schedule, eps=float(jnp.finfo(first.dtype).tiny) ** 0.5)

    def descend(start, embedding):
        objective = jax.value_and_grad(lambda y: decoding_objective(embedding, y))

        def step(carry, _):
            y, state, best, best_value = carry
            value, gradient = objective(y)
            better = value < best_value
            best, best_value = jnp.where(better, y, best), jnp.where(better, value, best_value)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
                update, state = optimizer.update(gradient, state)
            return (optax.apply_updates(y, update), state, best, best_value), None

        carry = (start, optimizer.init(start), start, jnp.asarray(jnp.inf, start.dtype))
        carry, _ = lax.scan(step, carry, length=steps + 1)
        return carry[2], carry[3]

    fixed = lax.stop_gradient((first, embedding))
    points, values = jax.vmap(descend, in_axes=(0, None))(*fixed)
    index = jnp.argmin(values)
    best = points[index]

    def objective(y):
        return decoding_objective(embedding, y)

    free = jnp.ones_like(best, bool)
    return _unless_nan(embedding, stationary(objective, embedding, first[index], best, free))


def stationary(
    function: Callable[[Array], Array],
    embedding: Embedding,
    start: Array,
    end: Array,
    free: Bool[Array, "..."],
) -> Float[Array, "..."]:
    """The `end` of an ascent, with the gradient of the stationary point there.

    It is that of the implicit function theorem, in the coordinates that are `free`; 0 where the
    Hessian is singular. The gradient through the steps is NaN where a slope is 0. An end that did
    not leave the cusp of a kernel at its start moves with the start.
    """
    end = lax.stop_gradient(end)
    cusp = _is_cusp(*lax.stop_gradient((embedding.kernel, embedding.points)), end)

    def slope(z):
        return jnp.where(free, jax.grad(function)(z), z - end)

    def tangent(linear, right):
        matrix = jax.jacobian(linear)(right).reshape(right.size, right.size)
        usable = jnp.isfinite(solve(matrix, jnp.ones((right.size, 1), right.dtype))).all()
        matrix = jnp.where(usable, matrix, jnp.eye(right.size, dtype=right.dtype))
        found = solve(matrix, right.reshape(-1, 1)).reshape(right.shape)
        return jnp.where(usable, found, 0)

    found = lax.custom_root(slope, end, lambda _, start: start, tangent)
    return jnp.where(cusp & jnp.all(end == start), start, found)


def _is_cusp(kernel: AbstractKernel, points: Points, end: Array) -> Bool[Array, ""]:
    """Whether the distance to the feature of `end` has a cusp there, not a square.

    The slope of the squared distance then hardly changes where a step is twice as long.
    """
    scale = jnp.max(jnp.abs(points - end))
    step = 1e-2 * jnp.where(scale > 0, scale, 1) * jnp.ones_like(end)
    slope = jax.grad(lambda z: kernel(z, z) - 2 * kernel(z, end))
    near, far = (jnp.abs(jnp.sum(slope(end + length * step))) for length in (1, 2))
    return (near > 0) & (far < 1.5 * near)


@jax.custom_jvp
@one_program
def nearest_rotation(matrix: Float[Array, "*batch d d"]) -> Float[Array, "*batch d d"]:
    r"""Nearest rotation in Frobenius norm: $U \operatorname{diag}(1, \dots, \det(U V^\top)) V^\top$
    from the SVD of the matrix.

    The gradient is that of the projection, finite also at equal singular values (at a rotation
    itself), where differentiating an SVD gives NaN. It is set to zero where the nearest rotation is
    not unique. Cost O(d^3).
    """
    left, _, right = _signed_svd(matrix)
    return matmul(left, right)


@nearest_rotation.defjvp
def _project_rotation_jvp(primals, tangents):
    left, values, right = _signed_svd(primals[0])
    inside = matmul(matmul(jnp.swapaxes(left, -1, -2), tangents[0]), jnp.swapaxes(right, -1, -2))
    sums = values[..., :, None] + values[..., None, :]
    unique = sums > 8 * jnp.finfo(sums.dtype).eps * values[..., :1, None]
    turn = safe_divide(inside - jnp.swapaxes(inside, -1, -2), jnp.where(unique, sums, 0))
    return matmul(left, right), matmul(matmul(left, turn), right)


def _signed_svd(matrix):
    """`left diag(values) right` with `left right` a rotation.

    The sign of a reflection goes to the last value.
    """
    left, values, right = svd(matrix)
    sign = jnp.where(determinant(matmul(left, right)) < 0, -1.0, 1.0).astype(matrix.dtype)[
        ..., None
    ]
    return left.at[..., :, -1].multiply(sign), values.at[..., -1].multiply(sign[..., 0]), right


def decode_rotation(embedding: Embedding) -> Float[Array, "*batch d d"]:
    r"""The rotation `[..., d, d]` nearest to the weighted sum $A = \sum_i w_i R_i$.

    Under the trace kernel on SO(d) it is the exact pre-image
    $\operatorname{argmax}_R \operatorname{tr}(A^\top R)$ (S09 section 7, where it is found by
    descent); under other kernels it is the projected mean. Cost O(n d^2 + d^3).
    """
    # Not divided by the mass: a negative one would turn the sign.
    total = jnp.tensordot(embedding.weights, embedding.points, axes=1, precision=HIGHEST)
    return nearest_rotation(total)


def decode_permutation(embedding: Embedding) -> Float[Array, "d d"]:
    r"""The permutation matrix that maximizes $\operatorname{tr}(A^\top P)$ with
    $A = \sum_i w_i P_i$, by the Hungarian algorithm.

    The exact pre-image under the trace kernel on permutation matrices `[n, d, d]` (S09 section 5).
    Cost O(n d^2 + d^3); unbatched.
    """
    check_unbatched(embedding, "embedding")
    total = jnp.tensordot(embedding.weights, embedding.points, axes=1, precision=HIGHEST)
    return _assigned(total) + nan_unless_finite(total)


@jax.jit
def _assigned(average: Float[Array, "d d"]) -> Float[Array, "d d"]:
    with jax.numpy_dtype_promotion("standard"):
        rows, columns = optax.assignment.hungarian_algorithm(-average)
    return jnp.zeros_like(average).at[rows, columns].set(1)
