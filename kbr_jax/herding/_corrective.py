r"""Herding whose weights are computed anew after each point.

On the simplex (Wolfe 1976), or free (the Newton basis).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import take
from .._numerics import jitter, matmul
from .._typing import Array, Bool, Float, Int, Points
from ..kernels import AbstractKernel

#: A candidate whose part outside the span of those chosen is below this many roundings of its
#: kernel counts as inside.
_SPAN_ROUNDINGS = 64


def kernel_row(
    kernel: AbstractKernel, points: Points, index: Int[Array, ""], dtype: Any
) -> Float[Array, " c"]:
    """Kernel of one candidate with all of them."""
    return kernel.gram(take(points, index[None]), points)[0].astype(dtype)


def corrective(
    kernel: AbstractKernel, points: Points, target: Float[Array, " c"], diagonal, count: int
):
    """The rule "min-norm-point" of `herd`: indices, weights and objectives."""
    dtype = target.dtype

    def step(carry, k):
        rows, gram, goal, weights, active, indices = carry
        index = jnp.argmax(target - matmul(weights, rows))
        new = kernel_row(kernel, points, index, dtype)
        known = (indices == index) & (
            jnp.arange(count) < k
        )  # a point that is chosen again keeps its first place
        place = jnp.where(jnp.any(known), jnp.argmax(known), k)
        column = jnp.where(jnp.arange(count) < k, new[indices], 0).at[place].set(diagonal[index])
        rows, goal = rows.at[place].set(new), goal.at[place].set(target[index])
        gram = gram.at[place].set(column).at[:, place].set(column)
        indices = indices.at[place].set(index)
        # Reverse mode knows no `while_loop`. The objective needs none: it is flat in its best
        # weights.
        weights, active = _min_norm(
            *lax.stop_gradient((gram, goal, weights)), active.at[place].set(True)
        )
        weights = jnp.where(k == 0, jnp.zeros(count, dtype).at[0].set(1), weights)
        objective = jnp.sum(weights * (matmul(gram, weights) - 2 * goal))
        return (rows, gram, goal, weights, active, indices), objective

    start = (
        jnp.zeros((count, target.shape[0]), dtype),
        jnp.zeros((count, count), dtype),
        jnp.zeros(count, dtype),
        jnp.zeros(count, dtype),
        jnp.zeros(count, bool),
        jnp.zeros(count, int),
    )
    (_, gram, goal, weights, active, indices), objective = lax.scan(step, start, jnp.arange(count))
    # The weights as they were found, with the gradient of the best ones on their face, which they
    # are.
    best = _minimize(gram, goal, active)
    return indices, weights + (best - lax.stop_gradient(best)), objective


def _minimize(gram, goal, active: Bool[Array, " m"]):
    """The best weights of sum 1 on a face, of any sign."""
    both = active[:, None] & active[None, :]
    ridge = jitter(jnp.where(both, gram, 0))
    matrix = jnp.where(both, gram, 0) + jnp.diag(jnp.where(active, ridge, 1))
    factor = jax.scipy.linalg.cho_factor(matrix, lower=True)
    solved = jax.scipy.linalg.cho_solve(
        factor, jnp.where(active[:, None], jnp.stack([goal, jnp.ones_like(goal)], 1), 0)
    )
    level = (1 - jnp.sum(solved[:, 0])) / jnp.sum(solved[:, 1])
    return jnp.where(active, solved[:, 0] + level * solved[:, 1], 0)


def _min_norm(gram, goal, weights, active: Bool[Array, " m"]):
    """Wolfe's inner loop.

    From feasible weights to the best of sum 1 on a face where all of them are positive.
    """

    def step(carry):
        weights, active, _ = carry
        best = _minimize(gram, goal, active)
        negative = active & (best <= 0)
        ratios = jnp.where(negative, weights / jnp.where(negative, weights - best, 1), jnp.inf)
        share = jnp.minimum(jnp.min(ratios), 1)
        moved = jnp.where(active, weights + share * (best - weights), 0)
        # The first to reach zero leaves the face, whatever rounding made of it.
        leaves = negative & (ratios <= share)
        return jnp.where(leaves, 0, jnp.maximum(moved, 0)), active & ~leaves, jnp.any(negative)

    weights, active, _ = lax.while_loop(
        lambda carry: carry[2], step, (weights, active, jnp.asarray(True))
    )
    return weights, active


def free(kernel: AbstractKernel, points: Points, target: Float[Array, " c"], diagonal, count: int):
    """The rule "sbq" of `herd`.

    Indices, weights and objectives, through the Newton basis of the chosen points.
    """
    floor = _SPAN_ROUNDINGS * jnp.finfo(target.dtype).eps * jnp.max(diagonal)

    def step(carry, k):
        basis, residual, power = carry
        gains = jnp.where(power > floor, residual**2 / jnp.where(power > floor, power, 1), -1)
        index = jnp.argmax(gains)
        found = gains[index] >= 0
        height = jnp.sqrt(jnp.where(found, power[index], 1))
        new = (
            kernel_row(kernel, points, index, target.dtype) - matmul(basis[:, index], basis)
        ) / height
        new = jnp.where(found, new, 0)
        coefficient = jnp.where(found, residual[index] / height, 0)
        residual, power = (
            residual - coefficient * new,
            jnp.maximum(power - new**2, 0).at[index].set(0),
        )
        return (basis.at[k].set(new), residual, power), (index, coefficient, found)

    start = (jnp.zeros((count, target.shape[0]), target.dtype), target, diagonal)
    (basis, _, _), (index, coefficients, found) = lax.scan(step, start, jnp.arange(count))
    # The basis at the chosen points is triangular; a place that found no point has weight 0.
    triangle = jnp.where(
        found[:, None] & found[None, :], basis[:, index], jnp.eye(count, dtype=target.dtype)
    )
    weights = jax.scipy.linalg.solve_triangular(triangle, coefficients, lower=False)
    return index, weights, -jnp.cumsum(coefficients**2)
