"""All calls of LAPACK. No other module makes one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._numerics import matmul, one_program, safe_divide
from ._typing import Array, Float, Inexact


def one_at_a_time(function: Callable, *, columns: bool = False) -> Callable:
    """Let a CPU apply `function` to one element of a batch after the other.

    jaxlib 0.10 splits a batch of LAPACK calls into tasks of its thread pool, and waits for them in
    a thread of that pool. As many batches at once as the pool has threads wait for ever. A single
    call waits for nothing, and a batch takes as long this way. Other devices get the whole batch.

    With `columns`, the last argument is a matrix `[n, k]` whose columns do not depend on each
    other: a batch of it alone becomes more columns.

    Differentiate around it, never through it.
    """

    @jax.custom_batching.custom_vmap
    def single(*arguments):
        return function(*arguments)

    @single.def_vmap
    def _(axis_size, in_batched, *arguments):
        if columns and not any(in_batched[:-1]):
            *others, b = arguments
            wide = jnp.moveaxis(b, 0, 1).reshape(b.shape[1], -1)
            result = single(*others, wide)
            result = result.reshape(-1, axis_size, b.shape[2])
            return jnp.moveaxis(result, 1, 0), True

        def mapped(*arguments):
            return map_batch(single, in_batched, arguments)

        batched = jax.vmap(function, [0 if is_batched else None for is_batched in in_batched])
        result = lax.platform_dependent(*arguments, cpu=mapped, default=batched)
        return result, jax.tree.map(lambda _: True, result)

    return single


def map_batch(function: Callable, in_batched: list[bool], arguments: tuple) -> Any:
    """`function` of each element of the arguments that are batched."""
    batch = [a for a, is_batched in zip(arguments, in_batched, strict=True) if is_batched]

    def apply(elements):
        elements = iter(elements)
        both = zip(arguments, in_batched, strict=True)
        return function(*(next(elements) if is_batched else a for a, is_batched in both))

    return lax.map(apply, batch)


def _upper(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """R with `R.T R = matrix`, from one half of a symmetric matrix; NaN if there is none.

    Transposed, both have LAPACK's layout: no copies.
    """
    return lax.linalg.cholesky(matrix.T, symmetrize_input=False).T


def _solve_upper(
    upper: Inexact[Array, "n n"], b: Inexact[Array, "n k"], transpose: bool
) -> Inexact[Array, "n k"]:
    return lax.linalg.triangular_solve(
        upper.T, b, left_side=True, lower=True, transpose_a=not transpose
    )


def _solve_both(upper: Float[Array, "n n"], b: Float[Array, "n k"]) -> Float[Array, "n k"]:
    return _solve_upper(upper, _solve_upper(upper, b, True), False)


upper_factor = one_at_a_time(_upper)
solve_factored = one_at_a_time(_solve_both, columns=True)
_solve_general = one_at_a_time(jnp.linalg.solve, columns=True)
_solve_triangular = {
    transpose: one_at_a_time(lambda u, b, t=transpose: _solve_upper(u, b, t), columns=True)
    for transpose in (False, True)
}
solve_upper = _solve_triangular[False]
_eigh = one_at_a_time(lambda matrix: tuple(jnp.linalg.eigh(matrix)))
_svd = one_at_a_time(lambda matrix: tuple(jnp.linalg.svd(matrix, full_matrices=False)))
_determinant = one_at_a_time(jnp.linalg.det)


def _vectorized(function: Callable, signature: str) -> Callable:
    return jnp.vectorize(function, signature=signature)


@jax.custom_jvp
def cholesky(matrix: Float[Array, "*b n n"]) -> Float[Array, "*b n n"]:
    """The lower factor L of a positive definite matrix; NaN if it is not. Cost O(n^3)."""
    return jnp.swapaxes(_vectorized(upper_factor, "(n,n)->(n,n)")(matrix), -1, -2)


@cholesky.defjvp
def _(primals, tangents):
    (matrix,), (change,) = primals, tangents
    lower = cholesky(matrix)
    half = triangular_solve(lower, (change + jnp.swapaxes(change, -1, -2)) / 2)
    inner = triangular_solve(lower, jnp.swapaxes(half, -1, -2))
    n = matrix.shape[-1]
    part = jnp.tril(jnp.ones((n, n), matrix.dtype)) - jnp.eye(n, dtype=matrix.dtype) / 2
    return lower, matmul(lower, part * inner)


@functools.partial(one_program, static_argnames="transpose")
def triangular_solve(
    lower: Float[Array, "*b n n"], b: Float[Array, "*b n k"], *, transpose: bool = False
) -> Float[Array, "*b n k"]:
    """`L^{-1} b`, or `L^{-T} b`, for a lower triangular L; cost O(n^2 k)."""

    def one(lower, b):
        upper = lax.stop_gradient(lower).T
        return lax.custom_linear_solve(
            lambda x: matmul(lower.T if transpose else lower, x),
            b,
            lambda _, rhs: _solve_triangular[not transpose](upper, rhs),
            lambda _, rhs: _solve_triangular[transpose](upper, rhs),
        )

    return _vectorized(one, "(n,n),(n,k)->(n,k)")(lower, b)


@one_program
def solve(
    matrix: Inexact[Array, "*b n n"], b: Inexact[Array, "*b n k"]
) -> Inexact[Array, "*b n k"]:
    """`A^{-1} b` of any square matrix by LU; cost O(n^3 + n^2 k)."""

    def one(matrix, b):
        fixed = lax.stop_gradient(matrix)
        return lax.custom_linear_solve(
            lambda x: matmul(matrix, x),
            b,
            lambda _, rhs: _solve_general(fixed, rhs),
            lambda _, rhs: _solve_general(fixed.T, rhs),
        )

    return _vectorized(one, "(n,n),(n,k)->(n,k)")(matrix, b)


@jax.custom_jvp
@one_program
def eigh(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Ascending eigenvalues and eigenvectors of a symmetric matrix; cost O(n^3).

    The derivative turns no eigenvectors of equal eigenvalues into each other.
    """
    return _eigh(matrix)


@eigh.defjvp
def _(primals, tangents):
    (matrix,), (change,) = primals, tangents
    values, vectors = eigh(matrix)
    inner = matmul(vectors.T, matmul((change + change.T) / 2, vectors))
    turn = safe_divide(inner, values[None, :] - values[:, None])
    return (values, vectors), (jnp.diagonal(inner), matmul(vectors, turn))


@jax.custom_jvp
@one_program
def pseudo_inverse(matrix: Float[Array, "n n"], floor: Float[Array, ""]) -> Float[Array, "n n"]:
    """Pseudo-inverse of a symmetric matrix without eigenvalues below `floor`.

    Those below it, or below the rounding of the largest, are raised. With `floor` 0, eigenvalues up
    to 10 n eps times the largest are 0. Cost O(n^3).
    """
    values, vectors = _eigh(matrix)
    size, eps = jnp.abs(values), jnp.finfo(matrix.dtype).eps
    least = jnp.maximum(floor, 2 * eps * jnp.max(size))
    kept = (size > 10 * len(matrix) * eps * jnp.max(size)) | (floor > 0)
    values = jnp.where(floor > 0, jnp.maximum(values, least), values)
    return matmul(vectors * jnp.where(kept, 1 / jnp.where(kept, values, 1), 0), vectors.T)


@pseudo_inverse.defjvp
def _(primals, tangents):
    (matrix, floor), (change, _) = primals, tangents
    inverse = pseudo_inverse(matrix, floor)
    change = (change + change.T) / 2
    outside = jnp.eye(matrix.shape[0], dtype=matrix.dtype) - matmul(matrix, inverse)
    outside = jnp.where(floor > 0, 0, outside)
    cross = matmul(matmul(matmul(inverse, inverse), change), outside)
    return inverse, cross + cross.T - matmul(inverse, matmul(change, inverse))


def svd(
    matrix: Float[Array, "*b m n"],
) -> tuple[Float[Array, "*b m k"], Float[Array, "*b k"], Float[Array, "*b k n"]]:
    """The thin singular value decomposition. Differentiate around it."""
    return _vectorized(_svd, "(m,n)->(m,k),(k),(k,n)")(matrix)


def determinant(matrix: Float[Array, "*b n n"]) -> Float[Array, "*b"]:
    """The determinant. Differentiate around it."""
    return _vectorized(_determinant, "(n,n)->()")(matrix)
