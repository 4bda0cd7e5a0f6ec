"""Factorizations and solves.

Everything that a CPU gives to LAPACK is called from here, and from nowhere else in the library.
"""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ._numerics import in_any_batch, jitter, matmul, safe_divide
from ._typing import Array, Float, Inexact

#: Factors of the jitter after the first attempt of `psd_factor`.
_RETRIES = (1e1, 1e3, 1e5)

#: Up to this size an accelerator makes all attempts of `psd_factor` at once. A condition would cost
#: more there: the host has to read it.
_SMALL = 512


def one_at_a_time(function: Callable, *, columns: bool = False) -> Callable:
    """`function` of arrays, applied by a CPU to one element of a batch after the other.

    jaxlib 0.10 splits a batch of LAPACK calls into tasks of its thread pool, and waits for them in
    a thread of that pool. As many batches at once as the pool has threads wait for ever. A single
    call waits for nothing, and a batch is no slower this way. Other devices get the whole batch.

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
            batch = [a for a, is_batched in zip(arguments, in_batched, strict=True) if is_batched]

            def apply(elements):
                elements = iter(elements)
                return single(
                    *(
                        next(elements) if is_batched else a
                        for a, is_batched in zip(arguments, in_batched, strict=True)
                    )
                )

            return lax.map(apply, batch)

        batched = jax.vmap(function, [0 if is_batched else None for is_batched in in_batched])
        result = lax.platform_dependent(*arguments, cpu=mapped, default=batched)
        return result, jax.tree.map(lambda _: True, result)

    return single


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


_factor = one_at_a_time(_upper)
_solve_factored = one_at_a_time(_solve_both, columns=True)
_solve_general = one_at_a_time(jnp.linalg.solve, columns=True)
_solve_triangular = {
    transpose: one_at_a_time(lambda u, b, t=transpose: _solve_upper(u, b, t), columns=True)
    for transpose in (False, True)
}
_eigh = one_at_a_time(lambda matrix: tuple(jnp.linalg.eigh(matrix)))
_svd = one_at_a_time(lambda matrix: tuple(jnp.linalg.svd(matrix, full_matrices=False)))
_determinant = one_at_a_time(jnp.linalg.det)


def _vectorized(function: Callable, signature: str) -> Callable:
    return jnp.vectorize(function, signature=signature)


@jax.custom_jvp
def cholesky(matrix: Float[Array, "*b n n"]) -> Float[Array, "*b n n"]:
    """The lower factor L of a positive definite matrix; NaN if it is not. Cost O(n^3)."""
    return jnp.swapaxes(_vectorized(_factor, "(n,n)->(n,n)")(matrix), -1, -2)


@cholesky.defjvp
def _(primals, tangents):
    (matrix,), (change,) = primals, tangents
    lower = cholesky(matrix)
    half = triangular_solve(lower, (change + jnp.swapaxes(change, -1, -2)) / 2)
    inner = triangular_solve(lower, jnp.swapaxes(half, -1, -2))
    n = matrix.shape[-1]
    part = jnp.tril(jnp.ones((n, n), matrix.dtype)) - jnp.eye(n, dtype=matrix.dtype) / 2
    return lower, matmul(lower, part * inner)


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
def pseudo_inverse(
    matrix: Float[Array, "n n"], cutoff: Float[Array, ""] | float
) -> Float[Array, "n n"]:
    """Pseudo-inverse of a symmetric matrix; eigenvalues up to `cutoff` times the largest are 0.

    Cost O(n^3).
    """
    values, vectors = _eigh(matrix)
    size = jnp.abs(values)
    kept = size > cutoff * jnp.max(size)
    return matmul(vectors * jnp.where(kept, 1 / jnp.where(kept, values, 1), 0), vectors.T)


@pseudo_inverse.defjvp
def _(primals, tangents):
    (matrix, cutoff), (change, _) = primals, tangents
    inverse = pseudo_inverse(matrix, cutoff)
    change = (change + change.T) / 2
    outside = jnp.eye(matrix.shape[0], dtype=matrix.dtype) - matmul(matrix, inverse)
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


class AbstractFactor(eqx.Module):
    """A positive definite matrix, made ready to be solved with many times."""

    @abc.abstractmethod
    def solve(self, b: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        """Solve for a vector, or for a matrix of right-hand sides `[n, ...]`."""


class PSDFactor(AbstractFactor):
    """A factored positive definite matrix `matrix + shift I`, made to be solved with many times.

    Gradients come from `matrix` and `shift` by implicit differentiation, never from the
    factorization: one more solve, no differentiated Cholesky. Do not replace `matrix` in a finished
    factor (it would be stale); make a new one.
    """

    matrix: Float[Array, "n n"]
    shift: Float[Array, ""]
    upper: Float[Array, "n n"]

    @property
    def cholesky(self) -> Float[Array, "n n"]:
        """The lower Cholesky factor."""
        return jnp.swapaxes(self.upper, -1, -2)

    def solve(self, b: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        """`(matrix + shift I)^{-1} b` for a vector or a matrix of right-hand sides `[n, ...]`;
        O(n^2) a column.

        One step of iterative refinement, with matrix and shift kept apart: for a shift of 1e-8 it
        wins back an order of magnitude that rounding in the factor had lost, and it removes the
        effect of the jitter.
        """
        fixed = lax.stop_gradient(self)

        def product(x):
            return matmul(self.matrix, x) + self.shift * x

        def refined(_, rhs):
            first = _solve_factored(fixed.upper, rhs)
            residual = (rhs - matmul(fixed.matrix, first)) - fixed.shift * first
            return first + _solve_factored(fixed.upper, residual)

        columns = b.reshape(b.shape[0], -1)
        solution = lax.custom_linear_solve(product, columns, refined, symmetric=True)
        return solution.reshape(b.shape)


@jax.jit
def psd_factor(matrix: Float[Array, "n n"], shift: Float[Array, ""] | float = 0.0) -> PSDFactor:
    """Factor `matrix + shift I` of a positive semi-definite matrix; cost O(n^3).

    The factorization adds the jitter (see `jitter`), times 10 for as long as it breaks down, at
    most five times, so rounding errors in a rank-deficient Gram matrix give a finite answer. A
    matrix that is not positive semi-definite to about a part in 10^10 (float64) or 10^2 (float32)
    still gives NaN: that is an error of the caller.
    """
    shift = jnp.asarray(shift, matrix.dtype)
    fixed, ridge = lax.stop_gradient((matrix, shift))
    first = jitter(fixed, ridge)
    retries = jnp.asarray(_RETRIES, matrix.dtype) * first

    def attempt(added):
        return _factor(_shifted(fixed, ridge + added))

    def best(uppers):
        # A factorization that breaks down is NaN.
        found = jnp.all(jnp.isfinite(jnp.diagonal(uppers, axis1=1, axis2=2)), axis=1)
        return uppers[jnp.argmax(found)]

    def in_turn():
        upper = attempt(first)
        failed = ~jnp.all(jnp.isfinite(jnp.diagonal(upper)))
        again = in_any_batch(failed)
        return lax.cond(
            again,
            lambda: jnp.where(failed, best(lax.map(attempt, retries)), upper),
            lambda: upper,
        )

    def at_once():
        return best(jax.vmap(attempt)(jnp.concatenate([first[None], retries])))

    if matrix.shape[0] <= _SMALL:
        upper = lax.platform_dependent(cpu=in_turn, default=at_once)
    else:
        upper = in_turn()
    return PSDFactor(matrix, shift, upper)


def _shifted(matrix: Float[Array, "n n"], shift: Float[Array, ""]) -> Float[Array, "n n"]:
    return matrix + shift * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


def psd_solve(
    matrix: Float[Array, "n n"], b: Float[Array, "n *k"], shift: Float[Array, ""] | float = 0.0
) -> Float[Array, "n *k"]:
    """`(matrix + shift I)^{-1} b` for one or many right-hand sides.

    Cost O(n^3 + n^2 k). See `psd_factor`.
    """
    return psd_factor(matrix, shift).solve(b)


def resolvent(
    matrix: Float[Array, "n n"], squared_shift: Float[Array, ""], b: Float[Array, "n *k"]
) -> tuple[Float[Array, "n *k"], Float[Array, "n *k"]]:
    r"""Both halves of $(M + i\sqrt{\delta} I)^{-1} b$ for a real matrix with real spectrum.

    $$ (M + i\sqrt{\delta})^{-1} = M (M^2 + \delta)^{-1} - i\sqrt{\delta} (M^2 + \delta)^{-1} $$

    so one complex LU gives both squared-regularized solves without ever squaring the matrix: the
    condition number is $|M| / \sqrt{\delta}$, not $|M|^2 / \delta$, which is what keeps float32
    usable, at the price of the real route.

    **Returns:** `M (M^2 + delta)^{-1} b` and `(M^2 + delta)^{-1} b`; cost O(n^3 + n^2 k).
    """
    shift = jnp.sqrt(squared_shift)
    shifted = lax.complex(matrix, shift * jnp.eye(matrix.shape[-1], dtype=matrix.dtype))
    columns = lax.complex(b, jnp.zeros_like(b)).reshape(b.shape[0], -1)
    solution = solve(shifted, columns).reshape(b.shape)
    return jnp.real(solution), -jnp.imag(solution) / shift


def symmetric_resolvent(
    matrix: Float[Array, "n n"], squared_shift: Float[Array, ""], b: Float[Array, "n *k"]
) -> Float[Array, "n *k"]:
    r"""$M (M^2 + \delta I)^{-1} b$ of a symmetric matrix, the first half of `resolvent`; cost O(n^3
    + n^2 k).

    In float64 by a Cholesky factor of $M^2 + \delta I$ and one step of refinement without the
    square: several times faster than the complex LU, good while delta is above 1e-12 of $|M|^2$. In
    float32 the square would leave no digits: `resolvent`.
    """
    if jnp.finfo(matrix.dtype).eps > 1e-10:
        return resolvent(matrix, squared_shift, b)[0]
    fixed, shift = lax.stop_gradient(matrix), lax.stop_gradient(squared_shift)
    # No search for a jitter as in `psd_factor`: far below delta it changes nothing.
    squared = matmul(fixed, fixed)
    upper = _factor(_shifted(squared, shift + jitter(squared)))

    def refined(_, rhs):
        first = _solve_factored(upper, rhs)
        residual = (rhs - matmul(fixed, matmul(fixed, first))) - shift * first
        return first + _solve_factored(upper, residual)

    def square(x):
        return matmul(matrix, matmul(matrix, x)) + squared_shift * x

    columns = b.reshape(b.shape[0], -1)
    solution = lax.custom_linear_solve(square, columns, refined, symmetric=True)
    return matmul(matrix, solution).reshape(b.shape)
