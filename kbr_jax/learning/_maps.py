"""A linear map of observations in whose coordinates noise is alike and states differ."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._checks import precision_of
from .._numerics import in_batches as _in_batches
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Point, Points
from ..kernels import AbstractKernel, Linear
from ..rules import AbstractConditional, conditional_expectation, fit_conditional
from ..tuning import leave_out_residuals

#: Numbers of coordinates that are kept: of the observations, of the map, and of those the first
#: ones that a filter's kernel sees. On a rat's spikes and fields 300 instead of 20 gain nothing
#: (`python -m benchmarks.rat.decoding map`). What tells look-alikes apart may be further down: of
#: 20 wrong starts in the look-alike room 12 came back by 20 coordinates, 16 by 100.
MAX_COMPONENTS, MAX_RANK, LEADING = 500, 100, 20
#: Share of the diagonal in the noise's covariance. There .02 to .3 differ by less than 5 %.
SHRINKAGE = 0.1
#: Pairs that a regression sees while it is chosen.
CHOOSING = 600
#: Successive points that are left out together: neighbors in time resemble each other.
BLOCK = 20
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
in_batches = eqx.filter_jit(_in_batches)


class DiscriminantMap(eqx.Module):
    r"""Coordinates of an observation in units of its noise, $z = W^\top (o - \bar o)$.

    With the ridge regression m from states to observations, residuals $r_i = o_i - m_{-i}(s_i)$ of
    points left out in blocks, $R = \operatorname{Cov}(r)$ and $S = \operatorname{Cov}(o - r)$, the
    columns of W are the generalized eigenvectors $S v = g R v$, $v^\top R v = 1$, of the largest
    ratios g of signal to noise, each times its canonical correlation $\sqrt{g / (1 + g)}$: a
    direction without signal does not count. It is Fisher's discriminant with states in place of
    classes. Noise that coordinates have in common cancels. In R all correlations are shrunk by a
    tenth.
    """

    center: Float[Array, " p"]
    matrix: Float[Array, "p r"]
    counts: bool = eqx.field(static=True)

    def __call__(self, observation: Point) -> Float[Array, " r"]:
        row = as_rows(observation[None], self.counts, self.center.dtype)[0]
        return matmul(row - self.center, self.matrix)

    def leading(self, count: int) -> "DiscriminantMap":
        """The map to its first coordinates."""
        return DiscriminantMap(self.center, self.matrix[:, :count], self.counts)


def distances(first: Any, second: Any) -> np.ndarray:
    """Euclidean distances of rows of any shape."""
    a, b = (np.asarray(rows, float).reshape(len(rows), -1) for rows in (first, second))
    center = b.mean(0)  # far from the origin the squares would cancel
    a, b = a - center, b - center
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    return np.sqrt(np.maximum(squares, 0))


def as_rows(observations: Points, counts: bool, dtype: Any = None) -> Float[Array, "n p"]:
    """Observations as rows of real numbers: square roots of counts, whose noise is then alike."""
    rows = jnp.asarray(observations)
    rows = rows.reshape(rows.shape[0], -1)
    rows = rows.astype(jnp.zeros(0).dtype if dtype is None else dtype)
    return jnp.sqrt(jnp.maximum(rows, 0)) if counts else rows


def are_counts(observations: Points) -> bool:
    """Integers that are not negative."""
    leaf = jnp.asarray(observations)
    return bool(jnp.issubdtype(leaf.dtype, jnp.integer)) and bool(jnp.all(leaf >= 0))


def _centered(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows less their mean, and the mean. Constants become 0, not the rounding of their mean."""
    center = np.where((rows == rows[0]).all(0), rows[0], rows.mean(0))
    return rows - center, center


def _principal_directions(values: np.ndarray) -> np.ndarray:
    """The first `MAX_COMPONENTS` right singular vectors `[p, c]` of `[n, p]`."""
    # An eigenproblem of the smaller side takes a third of the time of singular values. Squares need
    # double precision.
    rows = values.astype(np.float64)
    wide = rows.shape[1] > rows.shape[0]
    squares, vectors = np.linalg.eigh(rows @ rows.T if wide else rows.T @ rows)
    squares, vectors = squares[::-1][:MAX_COMPONENTS], vectors[:, ::-1][:, :MAX_COMPONENTS]
    kept = squares > squares[0] * len(squares) * np.finfo(rows.dtype).eps
    kept[0] = True
    sizes, vectors = np.sqrt(np.maximum(squares[kept], np.finfo(rows.dtype).tiny)), vectors[:, kept]
    return (rows.T @ vectors / sizes if wide else vectors).astype(values.dtype)


def in_blocks(n: int) -> int:
    """The largest number of points up to n that blocks divide."""
    return n // block_of(n) * block_of(n)


def block_of(n: int) -> int:
    """How many of n points are left out together: at most a quarter of them.

    A map of single points left out in folds, and of blocks in the whole sample, would have other
    scales there: the kernels of a filter of 90 steps were then ten times too wide.
    """
    return min(BLOCK, max(n // 4, 1))


#: The kernel of the states, and the ridge, of a regression from states.
Regression = tuple[AbstractKernel, ArrayLike]


def regression(chosen: Regression, states: Points, values: ArrayLike) -> AbstractConditional:
    """Ridge regression from states to values `[n, p]`, which should be centered."""
    kernel, ridge = chosen
    return fit_conditional(kernel, Linear(), states, jnp.asarray(values), regularizer=ridge)


def predicted(model: AbstractConditional, states: Points) -> Array:
    """Values `[m, p]` of a `regression`."""
    return conditional_expectation(model, states, lambda value: value)


def choose_regression(
    kernels: list[AbstractKernel], states: Points, observations: Array
) -> Regression:
    """The kernel and ridge whose regression from states leaves least of the observations."""
    rows = np.asarray(as_rows(observations, are_counts(observations), precision_of(states)))
    values = _centered(rows)[0] / np.maximum(rows.std(0), np.finfo(rows.dtype).tiny)
    if values.shape[1] > MAX_COMPONENTS:
        values = values @ _principal_directions(values)

    def error(pair):
        kernel, ridge = pair
        residuals = left_out_residuals(kernel, jnp.asarray(ridge), states, jnp.asarray(values))
        return float(jnp.mean(residuals**2))

    return min(((kernel, ridge) for kernel in kernels for ridge in RIDGES), key=error)


@eqx.filter_jit
def left_out_residuals(
    kernel: AbstractKernel, ridge: Array, x: Points, values: Array
) -> Float[Array, "n p"]:
    """Residuals of blocks left out, of the ridge regression from x to the values.

    n is as of `in_blocks`.
    """
    model = regression((kernel, ridge), x, values)
    return leave_out_residuals(model, values, num_left_out=block_of(len(values)))


def fit_discriminant_map(
    chosen: Regression, states: Points, observations: Array
) -> DiscriminantMap:
    """Learn which directions of observations tell states apart.

    **Arguments:** `chosen`, the regression from `states` `[n, ...]` to `observations`
    `[n, ...]`, in order of time, n as of `in_blocks`.

    Integers are counts: the map takes their square roots. Cost O(n^3 + p^3).
    """
    counts = are_counts(observations)
    rows = np.asarray(as_rows(observations, counts, precision_of(states)))
    (values, center), basis = _centered(rows), None
    if values.shape[1] > MAX_COMPONENTS:
        basis = _principal_directions(values)
        values = values @ basis
    kernel, ridge = chosen
    residuals = np.asarray(
        left_out_residuals(kernel, jnp.asarray(ridge), states, jnp.asarray(values))
    )
    # Each column has units of its own, and principal components have one. A constant says nothing.
    spread = values.std(0)
    floor = 1e-6 * (spread if basis is None else spread.max()) + np.finfo(values.dtype).tiny
    level = np.where(spread > 0, np.maximum(residuals.std(0), floor), np.inf)
    noise, signal = residuals / level, (values - residuals) / level
    covariance = noise.T @ noise / len(noise)
    covariance += SHRINKAGE * (np.eye(len(covariance)) - covariance)
    root = np.linalg.cholesky(covariance)
    whitened = np.linalg.solve(root, signal.T)
    ratios, vectors = np.linalg.eigh(whitened @ whitened.T / len(signal))
    rank = min(MAX_RANK, len(ratios))
    ratios, vectors = np.maximum(ratios[::-1][:rank], 0), vectors[:, ::-1][:, :rank]
    matrix = np.linalg.solve(root.T, vectors) * np.sqrt(ratios / (1 + ratios)) / level[:, None]
    if basis is not None:  # of one width whatever the rank of a fold is
        matrix = np.pad(basis @ matrix, ((0, 0), (0, MAX_RANK - rank)))
    return DiscriminantMap(jnp.asarray(center), jnp.asarray(matrix), counts)
