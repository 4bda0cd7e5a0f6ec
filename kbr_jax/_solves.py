"""Moments of weighted rows, and the regularized solves of the rules."""

import abc
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ._lapack import map_batch, solve, solve_factored, solve_upper, upper_factor
from ._numerics import in_any_batch, is_zero, jitter, matmul
from ._typing import Array, Float

#: Factors of the jitter after the first attempt of `psd_factor`.
_RETRIES = (1e1, 1e3, 1e5)

#: Up to this size a factor that is solved with at every step keeps its inverse.
_SMALL = 512

#: In float64 the least squared shift, as a share of the squared norm, for a Cholesky factor of the
#: square. r = 100, relative errors of square and LU: 5e-11 both at 1e-10, 9e-10 and 1e-10 at 1e-11,
#: 6e-8 and 3e-10 at 1e-12, 8e-4 and 3e-9 at 1e-14.
_LEAST_SHARE = 1e-11

#: `weighted_moment` forms the products of this many columns with the others at a time, for at least
#: so many weights, in at most so many numbers. On two cores, n = 1000, r = 100, float64, and 64 or
#: 256 weights: 424 and 225 us a moment; by one product each 574 and 332; 10 columns 442 and 192, 34
#: columns 540 and 200. On an H200, float32, 1024 weights: .3 us, by one product each .8.
_COLUMNS, _MANY, _ROOM = 20, 32, 2**24


@jax.custom_jvp
def weighted_moment(weights: Float[Array, " n"], rows: Float[Array, "n r"]) -> Float[Array, "r r"]:
    r"""$\sum_i w_i \phi_i \phi_i^\top$ of the rows; cost O(n r^2).

    For a batch of weights the products of two columns are formed once, half of them, and one matrix
    product sums them for all weights.
    """
    return _weighted_moment(weights, rows)


@functools.partial(weighted_moment.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (weights, rows), (dweights, drows) = primals, tangents
    moment = weighted_moment(weights, rows)
    change = jnp.zeros_like(moment)
    if not is_zero(dweights):
        change = change + _moment(dweights, rows)
    if not is_zero(drows):
        half = matmul((weights[:, None] * rows).T, drows)
        change = change + half + half.T
    return moment, change


def _moment(weights: Float[Array, " n"], rows: Float[Array, "n r"]) -> Float[Array, "r r"]:
    return matmul((weights[:, None] * rows).T, rows)


def _moments_by_products(
    weights: Float[Array, "b n"], rows: Float[Array, "n r"]
) -> Float[Array, "b r r"]:
    n, r = rows.shape
    parts = []
    for start in range(0, r, _COLUMNS):
        end = min(start + _COLUMNS, r)
        products = (rows[:, start:end, None] * rows[:, None, :end]).reshape(n, -1)
        part = matmul(weights, products).reshape(-1, end - start, end)
        parts.append(jnp.pad(part, ((0, 0), (0, 0), (0, r - end))))
    moments = jnp.concatenate(parts, axis=1)
    lower = jnp.tril(jnp.ones((r, r), bool))
    return jnp.where(lower, moments, jnp.swapaxes(moments, 1, 2))


@jax.custom_batching.custom_vmap
def _weighted_moment(weights, rows):
    return _moment(weights, rows)


@_weighted_moment.def_vmap
def _(axis_size, in_batched, weights, rows):
    n, r = rows.shape[-2:]
    shared = in_batched == [True, False]
    if shared and axis_size >= _MANY and n * r * _COLUMNS <= _ROOM:
        return _moments_by_products(weights, rows), True

    def one_by_one(weights, rows):
        return map_batch(_weighted_moment, in_batched, (weights, rows))

    at_once = jax.vmap(_moment, [0 if is_batched else None for is_batched in in_batched])
    return lax.platform_dependent(weights, rows, cpu=one_by_one, default=at_once), True


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
    inverse: Float[Array, "n n"] | None  # of `upper`

    def solve(self, b: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        """`(matrix + shift I)^{-1} b` for a vector or a matrix of right-hand sides `[n, ...]`;
        O(n^2) a column.

        One step of iterative refinement, with matrix and shift kept apart: for a shift of 1e-8 it
        wins back an order of magnitude that rounding in the factor had lost, and it removes the
        effect of the jitter.
        """
        return _solved(self, b.reshape(b.shape[0], -1)).reshape(b.shape)


# Compiled on its own: outside `jit` each call would compile the choice of a platform anew.
@jax.jit
def _solved(factor: PSDFactor, columns: Float[Array, "n k"]) -> Float[Array, "n k"]:
    fixed = lax.stop_gradient(factor)

    def product(x):
        return matmul(factor.matrix, x) + factor.shift * x

    def refined(_, rhs):
        return _refined(
            fixed.upper,
            fixed.inverse,
            lambda x: (rhs - matmul(fixed.matrix, x)) - fixed.shift * x,
            rhs,
        )

    return lax.custom_linear_solve(product, columns, refined, symmetric=True)


def _refined(
    upper: Float[Array, "n n"],
    inverse: Float[Array, "n n"] | None,
    residual: Callable,
    b: Float[Array, "n k"],
) -> Float[Array, "n k"]:
    """One solve and one step of refinement; on an accelerator by the inverse, if it is known."""

    def by_factor(rhs, _=None):
        return solve_factored(upper, rhs)

    def by_inverse(rhs, inverse):
        return matmul(inverse, matmul(inverse.T, rhs))

    def solved(rhs):
        if inverse is None:
            return by_factor(rhs)
        # Four triangular solves of one column take 43 us on an H200 at r = 100, four products 6.
        return lax.platform_dependent(rhs, inverse, cpu=by_factor, default=by_inverse)

    first = solved(b)
    return first + solved(residual(first))


def _inverse(upper: Float[Array, "n n"]) -> Float[Array, "n n"]:
    return solve_upper(upper, jnp.eye(upper.shape[0], dtype=upper.dtype))


@functools.partial(jax.jit, static_argnames="invert")
def psd_factor(
    matrix: Float[Array, "n n"], shift: Float[Array, ""] | float = 0.0, *, invert: bool = False
) -> PSDFactor:
    """Factor `matrix + shift I` of a positive semi-definite matrix; cost O(n^3).

    With `invert`, and up to n = 512, the inverse of the factor is kept too. Accelerators then solve
    by products alone: for a matrix that is solved with at every step.

    The factorization adds the jitter (see `jitter`), and where it breaks down 10, 10^3 or 10^5
    times as much, so rounding errors in a rank-deficient Gram matrix give a finite answer. A
    matrix that is not positive semi-definite to about a part in 10^10 (float64) or 10^2 (float32)
    still gives NaN: that is an error of the caller.
    """
    shift = jnp.asarray(shift, matrix.dtype)
    fixed, ridge = lax.stop_gradient((matrix, shift))
    first = jitter(fixed, ridge)
    retries = jnp.asarray(_RETRIES, matrix.dtype) * first

    def attempt(added):
        return upper_factor(_shifted(fixed, ridge + added))

    def best(uppers):
        # A factorization that breaks down is NaN.
        found = jnp.all(jnp.isfinite(jnp.diagonal(uppers, axis1=1, axis2=2)), axis=1)
        return uppers[jnp.argmax(found)]

    upper = attempt(first)
    failed = ~jnp.all(jnp.isfinite(jnp.diagonal(upper)))
    upper = lax.cond(
        in_any_batch(failed),
        lambda: jnp.where(failed, best(lax.map(attempt, retries)), upper),
        lambda: upper,
    )
    kept = _inverse(upper) if invert and matrix.shape[0] <= _SMALL else None
    return PSDFactor(matrix, shift, upper, kept)


def _shifted(matrix: Float[Array, "n n"], shift: Float[Array, ""]) -> Float[Array, "n n"]:
    return matrix + shift * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


def psd_solve(
    matrix: Float[Array, "n n"], b: Float[Array, "n *k"], shift: Float[Array, ""] | float = 0.0
) -> Float[Array, "n *k"]:
    """`(matrix + shift I)^{-1} b` for one or many right-hand sides.

    Cost O(n^3 + n^2 k). See `psd_factor`.
    """
    return psd_factor(matrix, shift).solve(b)


@jax.jit
def resolvent(
    matrix: Float[Array, "n n"], squared_shift: Float[Array, ""], b: Float[Array, "n *k"]
) -> tuple[Float[Array, "n *k"], Float[Array, "n *k"]]:
    r"""Both halves of $(M + i\sqrt{\delta} I)^{-1} b$ for a real matrix with real spectrum.

    $$ (M + i\sqrt{\delta})^{-1} = M (M^2 + \delta)^{-1} - i\sqrt{\delta} (M^2 + \delta)^{-1} $$

    so one complex LU gives both squared-regularized solves without ever squaring the matrix: the
    condition number is $|M| / \sqrt{\delta}$, not $|M|^2 / \delta$, which is what keeps float32
    usable, at the price of the real route. A TPU cannot factor complex matrices: there the real
    matrix of twice the size is factored.

    **Returns:** `M (M^2 + delta)^{-1} b` and `(M^2 + delta)^{-1} b`; cost O(n^3 + n^2 k).
    """
    shift = jnp.sqrt(squared_shift)
    columns = b.reshape(b.shape[0], -1)
    real, imaginary = lax.platform_dependent(
        matrix, shift, columns, tpu=_resolvent_of_blocks, default=_complex_resolvent
    )
    return real.reshape(b.shape), imaginary.reshape(b.shape) / shift


# A symmetric matrix has a real form with as many digits: ridge regression with the design
# (M, sqrt(delta) I), by two Cholesky factors (shifted Cholesky QR). For n = 30, 100, 200 and 300 it
# takes 19, 218, 1203 and 3577 us on a core (float32), and the complex LU 9, 104, 537 and 1389 us.
def _complex_resolvent(matrix, shift, b):
    shifted = lax.complex(matrix, _shifted(jnp.zeros_like(matrix), shift))
    solution = solve(shifted, lax.complex(b, jnp.zeros_like(b)))
    return jnp.real(solution), -jnp.imag(solution)


def _resolvent_of_blocks(matrix, shift, b):
    n = matrix.shape[0]
    side = _shifted(jnp.zeros_like(matrix), shift)
    blocks = jnp.block([[matrix, side], [-side, matrix]])
    solution = solve(blocks, jnp.concatenate([b, jnp.zeros_like(b)]))
    return solution[:n], solution[n:]


@jax.jit
def symmetric_resolvent(
    matrix: Float[Array, "n n"], squared_shift: Float[Array, ""], b: Float[Array, "n *k"]
) -> Float[Array, "n *k"]:
    r"""$M (M^2 + \delta I)^{-1} b$ of a symmetric matrix, the first half of `resolvent`.

    In float64 by a Cholesky factor of $M^2 + \delta I$ and one step of refinement without the
    square: several times faster than the complex LU. Below delta = 1e-11 of $|M|^2$, and in
    float32, the square would leave too few digits: `resolvent`. Cost O(n^3 + n^2 k).
    """
    if jnp.finfo(matrix.dtype).eps > 1e-10:
        return resolvent(matrix, squared_shift, b)[0]
    columns = b.reshape(b.shape[0], -1)
    squared = matmul(lax.stop_gradient(matrix), lax.stop_gradient(matrix))
    # The trace of the square is at least |M|^2.
    share = squared_shift / jnp.trace(squared)

    solution = lax.cond(
        in_any_batch(share < _LEAST_SHARE),
        lambda: resolvent(matrix, squared_shift, columns)[0],
        lambda: _resolvent_of_square(matrix, squared, squared_shift, columns),
    )
    return solution.reshape(b.shape)


def _resolvent_of_square(matrix, squared, squared_shift, b):
    fixed, shift = lax.stop_gradient(matrix), lax.stop_gradient(squared_shift)
    # No search for a jitter as in `psd_factor`: far below delta it changes nothing.
    upper = upper_factor(_shifted(squared, shift + jitter(squared)))

    def refined(_, rhs):
        def residual(x):
            return (rhs - matmul(fixed, matmul(fixed, x))) - shift * x

        return _refined(upper, None, residual, rhs)

    def square(x):
        return matmul(matrix, matmul(matrix, x)) + squared_shift * x

    return matmul(matrix, lax.custom_linear_solve(square, b, refined, symmetric=True))
