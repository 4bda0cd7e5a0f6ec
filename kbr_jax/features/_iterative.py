r"""Exact ridge regression on samples whose Gram matrix does not fit in memory: conjugate gradients
with blocked products.

Each iteration costs one product $K P$, in blocks of rows (`gram_matvec`). Their number is that of
$M^{-1} (K + n \lambda I)$ with $M = \Phi \Phi^\top + n \lambda I$ from landmark features $\Phi$:
its condition number is at most $1 + |K - \Phi \Phi^\top| / (n \lambda)$, so it takes tens of
iterations once the landmarks explain K down to the ridge.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from .._checks import as_count, in_precision, is_concrete, size, take
from .._numerics import matmul
from .._solves import AbstractFactor, PSDFactor, psd_factor
from .._typing import Array, Float, Int, Points
from ..kernels import AbstractKernel, gram_matvec
from ._features import AbstractGram, DenseGram, dense_gram
from ._landmarks import Landmarks, landmark_features
from ._selection import greedy_landmarks

_NOT_CONVERGED = (
    "Conjugate gradients did not reach the tolerance. Give the preconditioner more landmarks "
    "(`rank`), raise `max_iterations`, `tolerance` or the regularizer, or compute in float64; "
    "`throw=False` and `factor.diagnose` show how far it came."
)
_CANDIDATES = 10  # points among which a landmark is chosen, for each landmark


class ConjugateGradient(eqx.Module):
    r"""How to solve with $K + n \lambda I$ without forming K: conjugate gradients, preconditioned
    by landmarks.

    **Arguments** (all but `landmarks` static):

    - `rank`: number r of landmarks of the preconditioner, chosen greedily among at most 10 r points
      at even steps through the sample; 0 for none. More landmarks, fewer iterations: memory O(n r),
      O(n r^2) once.
    - `landmarks`: given `Landmarks` for the preconditioner, instead of a rank.
    - `tolerance`: on the residual $|b - (K + n \lambda I) w| / |b|$ of each column; by default 1e-8
      in float64, 1e-5 in float32. A float32 residual has a floor of about 1e-7 |K| / (n lambda).
    - `max_iterations`: limit on the iterations of one solve.
    - `block_size`: rows of K formed at a time, as in `gram_matvec`.
    - `mesh`: devices to divide the rows of K over, as in `gram_matvec`.
    - `throw`: where a column ends above the tolerance, raise a `RuntimeError`. A compiled program
      cannot raise: there, and in the solve of a gradient, the column becomes NaN. If False the last
      iterate is returned: look at `ConjugateGradientFactor.diagnose`.
    """

    rank: int = eqx.field(static=True, default=300)
    landmarks: Landmarks | None = None
    tolerance: float | None = eqx.field(static=True, default=None)
    max_iterations: int = eqx.field(static=True, default=200)
    block_size: int | None = eqx.field(static=True, default=None)
    mesh: Mesh | None = eqx.field(static=True, default=None)
    throw: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        if self.rank != 0:
            as_count(self.rank, "rank")
        as_count(self.max_iterations, "max_iterations")
        if self.block_size is not None:
            as_count(self.block_size, "block_size")
        tolerance = self.tolerance
        if tolerance is not None and (not is_concrete(tolerance) or not 0 < tolerance < 1):
            raise ValueError(
                f"`tolerance` must be a plain number in (0, 1), or None for the default; got "
                f"{tolerance}."
            )


class SolveReport(eqx.Module):
    """What conjugate gradients did.

    `iterations` and relative `residual` of each column, and whether it `converged`.
    """

    iterations: Int[Array, " k"]
    residual: Float[Array, " k"]
    converged: Array


class ConjugateGradientFactor(AbstractFactor):
    r"""$K + s I$, or $H K H + s I$ if `centered`, ready to be solved with by conjugate gradients; K
    is never formed.

    `coordinates` holds the landmark features $\Phi$ `[n, r]` of the preconditioner and `inner` the
    factor of $\Phi^\top \Phi + s I$. Gradients come from kernel, points and shift by implicit
    differentiation: one more solve.
    """

    kernel: AbstractKernel
    points: Points
    shift: Float[Array, ""]
    matrix: Float[Array, "n r"] | None
    inner: PSDFactor | None
    settings: ConjugateGradient
    centered: bool = eqx.field(static=True)

    def solve(self, b: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        return self.diagnose(b)[0]

    def diagnose(self, b: Float[Array, "n *k"]) -> tuple[Float[Array, "n *k"], SolveReport]:
        """Return the solution and the report on it, for b `[n]` or columns `[n, ...]`.

        All columns are iterated at once, each with its own steps.

        Cost O(n^2 (d + k)) an iteration, memory O(n (block_size + r + k)).
        """
        solution, report = _solve(self, b.reshape(b.shape[0], -1))
        if self.settings.throw and is_concrete(report.converged) and not report.converged:
            raise RuntimeError(_NOT_CONVERGED)
        return solution.reshape(b.shape), report

    def product(self, x: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """The matrix times columns."""
        inside = _center(x) if self.centered else x
        inside = _gram_product(self.settings, self.kernel, self.points, inside)
        return (_center(inside) if self.centered else inside) + self.shift * x

    def precondition(self, x: Float[Array, "n k"]) -> Float[Array, "n k"]:
        r"""$s (\Phi \Phi^\top + s I)^{-1} x = x - \Phi (\Phi^\top \Phi + s I)^{-1} \Phi^\top x$."""
        if self.matrix is None or self.inner is None:
            return x
        return x - matmul(self.matrix, self.inner.solve(matmul(self.matrix.T, x)))


def _gram_product(
    settings: ConjugateGradient, kernel: AbstractKernel, x: Points, v: Float[Array, "n *k"]
) -> Float[Array, "n *k"]:
    """The product of the Gram matrix of x with columns, as the settings say."""
    blocks, mesh = settings.block_size, settings.mesh
    # A Gram matrix of labels has the default precision.
    own = jax.eval_shape(kernel.diagonal, x).dtype
    found = gram_matvec(kernel, x, x, v.astype(own), block_size=blocks, mesh=mesh)
    return found.astype(v.dtype)


def _center(x: Float[Array, "n k"]) -> Float[Array, "n k"]:
    return x - jnp.mean(x, axis=0)


@eqx.filter_jit
def _solve(
    factor: ConjugateGradientFactor, b: Float[Array, "n k"]
) -> tuple[Float[Array, "n k"], SolveReport]:
    settings, fixed = factor.settings, lax.stop_gradient(factor)
    tolerance = settings.tolerance
    if tolerance is None:
        tolerance = 1e-8 if jnp.finfo(b.dtype).eps < 1e-10 else 1e-5

    def solve(_, rhs):
        scale = jnp.linalg.norm(rhs, axis=0)
        known = jnp.isfinite(scale)  # a missing observation is a column of NaN
        unit = jnp.where(known & (scale > 0), scale, 1)
        columns = jnp.where(known, rhs / unit, 0)
        solution, report = _iterate(fixed, columns, tolerance, settings.max_iterations)
        if settings.throw:
            # In here, so that the solve of a gradient is watched too.
            solution = jnp.where(report.residual <= tolerance, solution, jnp.nan)
        return jnp.where(known, solution * unit, jnp.nan), report

    return lax.custom_linear_solve(factor.product, b, solve, symmetric=True, has_aux=True)


def _iterate(
    factor: ConjugateGradientFactor, b: Float[Array, "n k"], tolerance: float, limit: int
) -> tuple[Float[Array, "n k"], SolveReport]:
    """Conjugate gradients for columns of unit norm.

    They begin again from the true residual while that still helps.
    """

    def unfinished(state):
        _, residual, before, counts = state
        worst = jnp.max(jnp.linalg.norm(residual, axis=0))
        # NaN must end the loop as well; a residual that no longer halves has met the floor of the
        # precision.
        return (worst > tolerance) & (worst <= before / 2) & (jnp.max(counts) < limit)

    def cycle(state):
        x, residual, _, counts = state
        # Half the tolerance, because the residual of the recursion drifts from the true one.
        step, used = _cycle(
            factor.product, factor.precondition, residual, tolerance / 2, limit - jnp.max(counts)
        )
        x = x + step
        return x, b - factor.product(x), jnp.max(jnp.linalg.norm(residual, axis=0)), counts + used

    start = (jnp.zeros_like(b), b, jnp.asarray(jnp.inf, b.dtype), jnp.zeros(b.shape[1], int))
    x, residual, _, counts = lax.while_loop(unfinished, cycle, start)
    residuals = jnp.linalg.norm(residual, axis=0)
    return x, SolveReport(counts, residuals, jnp.all(residuals <= tolerance))


def _cycle(
    product: Callable,
    precondition: Callable,
    b: Float[Array, "n k"],
    tolerance: float,
    limit: Int[Array, ""],
) -> tuple[Float[Array, "n k"], Int[Array, " k"]]:
    """One run of preconditioned conjugate gradients from zero.

    Every column has its own steps and stays as it is once it is done.
    """

    def unfinished(state):
        _, residual, _, _, counts = state
        return jnp.any(jnp.linalg.norm(residual, axis=0) > tolerance) & (jnp.max(counts) < limit)

    def step(state):
        x, residual, direction, height, counts = state
        active = jnp.linalg.norm(residual, axis=0) > tolerance
        image = product(direction)
        curvature = jnp.sum(direction * image, axis=0)
        length = jnp.where(
            active & (curvature > 0), height / jnp.where(curvature > 0, curvature, 1), 0
        )
        x, residual = x + length * direction, residual - length * image
        improved = precondition(residual)
        new_height = jnp.sum(residual * improved, axis=0)
        ratio = jnp.where(active & (height > 0), new_height / jnp.where(height > 0, height, 1), 0)
        return x, residual, improved + ratio * direction, new_height, counts + active.astype(int)

    first = precondition(b)
    start = (jnp.zeros_like(b), b, first, jnp.sum(b * first, axis=0), jnp.zeros(b.shape[1], int))
    x, _, _, _, counts = lax.while_loop(unfinished, step, start)
    return x, counts


class LazyGram(AbstractGram):
    """The exact Gram matrix, not stored: ridge regressions on it are solved by conjugate gradients.

    Memory O(n (block_size + r)) for `coordinates`, `ridge` and what follows from them.
    `coordinates`, `ridge_matrix` and both posteriors (Bayes' rule for the variable of this sample)
    still form the n x n matrix, when asked.
    """

    kernel: AbstractKernel
    points: Points
    mask: None
    settings: ConjugateGradient
    preconditioner: Float[Array, "n r"] | None
    precision: str = eqx.field(static=True)

    @property
    def matrix(self) -> Float[Array, "n r"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The Gram matrix, formed anew."""
        return self.kernel.gram(self.points, self.points).astype(self.dtype)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.precision)

    def mean_coordinates(self) -> Float[Array, " r"]:
        return _gram_product(self.settings, self.kernel, self.points, self.uniform)

    def at(self, points: Points) -> "LazyGram":
        return lazy_gram(self.kernel, points, self.settings, self.dtype)

    def restrict(
        self, index: Int[Array, " k"], coordinates: Float[Array, "b r"]
    ) -> tuple[DenseGram, Float[Array, "b q"]]:
        part = dense_gram(self.kernel, take(self.points, index))
        return in_precision(part, self.dtype), coordinates[:, index]

    def ridge(
        self, regularizer: Float[Array, ""], centered: bool = False
    ) -> ConjugateGradientFactor:
        shift = self.count * regularizer
        coordinates, inner = self.preconditioner, None
        if coordinates is not None:
            coordinates = coordinates - jnp.mean(coordinates, axis=0) if centered else coordinates
            inner = psd_factor(matmul(coordinates.T, coordinates), lax.stop_gradient(shift))
        return ConjugateGradientFactor(
            self.kernel, self.points, shift, coordinates, inner, self.settings, centered
        )


def lazy_gram(
    kernel: AbstractKernel, points: Points, settings: ConjugateGradient, dtype: Any = None
) -> LazyGram:
    """A checked sample, with the landmark features that precondition its solves.

    A Gram matrix of labels has the default precision, and is read in `dtype`. Cost
    O(n r^2 + n r d).
    """
    dtype = jax.eval_shape(kernel.diagonal, points).dtype if dtype is None else jnp.dtype(dtype)
    landmarks, rank = settings.landmarks, settings.rank
    if landmarks is None and rank:
        candidates = take(points, slice(None, None, -(-size(points) // (_CANDIDATES * rank))))
        landmarks = greedy_landmarks(kernel, candidates, rank=rank)
    coordinates = None
    if landmarks is not None:
        coordinates = landmark_features(*lax.stop_gradient((kernel, points, landmarks))).matrix
        coordinates = coordinates.astype(dtype)
    # pyright counts the property `matrix` among the fields.
    return LazyGram(kernel, points, None, settings, coordinates, dtype.name)  # pyright: ignore
