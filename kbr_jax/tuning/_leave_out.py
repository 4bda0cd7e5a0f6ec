"""Errors of points that are left out of a fit, in closed form."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, as_float, is_concrete, known
from .._lapack import solve
from .._numerics import HIGHEST, matmul, one_program
from .._solves import psd_factor
from .._trees import same
from .._typing import Array, ArrayLike, Float, Int, Point, Points
from ..embedding import Embedding
from ..features import AbstractFeatures, DenseGram, LazyGram, masked_rows
from ..kernels import AbstractKernel, KernelLike, as_kernel, gram_matvec
from ..rules import AbstractConditional, condition
from ._losses import measuring


def leave_out_loss(
    model: AbstractConditional, *, num_left_out: int = 1, kernel: KernelLike | None = None
) -> Float[Array, ""]:
    r"""Leave-one-out (or leave-block-out) regression loss of a fitted model, without refitting:

    $$ \frac1n \sum_B | \Psi_B - \hat\Psi_B^{(-B)} |^2, \qquad \Psi_B - \hat\Psi_B^{(-B)} = (I -
       H)_{BB}^{-1} ((I - H) \Psi)_B, $$

    with $H = K (K + (n - |B|) \lambda I)^{-1}$: exactly the loss of models fitted, with the same
    lambda, to the n - |B| pairs outside each block B (for landmarks: with the same features).

    **Arguments:**

    - `model`: fitted to all n pairs, exact or with landmarks.
    - `num_left_out`: size of the blocks left out (static), consecutive pairs; 1 is leave-one-out, n
      / k is k-fold. It must divide n.
    - `kernel` of y that measures the error, see `regression_loss`. Given as `model.kernel_y` it is
      the distance of features where y has landmarks.

    **Returns:** a scalar. With landmarks, a small ridge and a pair that decides its own fit,
    rounding can be more than a tenth of it: then it is NaN. Cost O(n^3) exact, and with n / 2
    landmarks or more; with fewer on x O(n^2 (d + r) + n b^2) in memory O(n (r + b)), and on y too,
    in the model's kernel, O(n r (r + b) + n b^2).

    **Raises:** `ValueError` if `num_left_out` does not divide n, for padded data with
    `num_left_out` > 1, for moments, which hold no pairs, or a model without a factor.
    """
    features, ridge, count = _leaving_out(model, num_left_out)
    coordinates = model.sample()[1]
    both = kernel, model.kernel_y
    known_equal = all(map(is_concrete, jax.tree.leaves(both))) and same(*both)
    of_features = kernel is model.kernel_y or known_equal
    if kernel is None:
        measure = measuring(model.kernel_y, coordinates.points, features.uniform)
    else:
        measure = as_kernel(kernel)
    return _loss(features, ridge, count, coordinates, measure, of_features)


@eqx.filter_jit
def _loss(
    features: AbstractFeatures,
    ridge: Float[Array, ""],
    count: int,
    coordinates: AbstractFeatures,
    measure: AbstractKernel,
    of_features: bool,
) -> Float[Array, ""]:
    y = coordinates.points
    if of_features and not isinstance(coordinates, (DenseGram, LazyGram)):
        errors = jnp.sum(_left_out(features, ridge, count, coordinates.matrix) ** 2, axis=-1)
    elif isinstance(features, DenseGram) or 2 * features.matrix.shape[1] >= features.size:
        # The square of a difference, not the difference of squares. With many landmarks the cost is
        # about the same.
        residual = _left_out(features, ridge, count, jnp.eye(features.size, dtype=features.dtype))
        errors = jnp.sum(
            matmul(residual, measure.gram(y, y).astype(residual.dtype)) * residual, axis=-1
        )
    else:
        errors = _low_rank_errors(features, ridge, count, measure, y)
    return jnp.sum(features.uniform * errors)


def leave_out_residuals(
    model: AbstractConditional,
    values: Float[Array, "n *d"] | None = None,
    *,
    num_left_out: int = 1,
) -> Float[Array, "n *d"]:
    r"""Differences $f_i - \hat f^{(-B)}(x_i)$ of values to their regression on x without block B.

    The formula is that of `leave_out_loss`, with the values of any functions of y in place of its
    features. Residuals are those of predictions of new points.

    **Arguments:** `model`, with a factor, fitted to n pairs; `values` `[n, ...]` at these
    pairs; `num_left_out`, the size of the blocks. By default the values are y less its mean: what
    the weights of the regression lack to the sum 1 then stands at the mean, and residuals do not
    depend on the origin of y.

    **Returns:** `[n, ...]`. Cost O(n^3) exact, O(n r (r + b) + n b^2) with landmarks on x.
    **Raises:** `ValueError` as `leave_out_loss`, and without values for y that are not one real
    array.
    """
    features, ridge, count = _leaving_out(model, num_left_out)
    if values is None:
        y = _real_y(model)
        values = _from_mean(y, features.uniform)
    values = as_float(values)
    if values.ndim == 0 or len(values) != features.size:
        raise ValueError(
            f"`values` must hold one value for each of {features.size} pairs, got shape "
            f"{values.shape}."
        )
    columns = values.astype(features.dtype).reshape(values.shape[0], -1)
    columns = masked_rows(columns, features.mask)
    return _left_out(features, ridge, count, columns).reshape(values.shape)


def leave_out_forecasts(model: AbstractConditional, index: ArrayLike | None = None) -> Embedding:
    r"""Embed $P(Y | X = x_i)$ as all pairs but i see it, without refitting.

    $$ w_{ij} = H_{ij} / (1 - H_{ii}), \quad j \ne i, \qquad w_{ii} = 0, $$

    with H of `leave_out_loss`. They are forecasts of pairs that the model has not seen: scores,
    `fit_bandwidth`, `calibrate` and `conformal_margin` take them where no data are held out.

    **Arguments:** `model`, with a factor, fitted to n pairs; `index` `[m]`, the pairs that are left
    out in turn, by default all.

    **Returns:** an `Embedding` with weights `[m, n]`. Cost O(n^3) exact, O(n r (r + m)) with
    landmarks. **Raises:** `ValueError` as `leave_out_loss`.
    """
    features, ridge, _ = _leaving_out(model, 1)
    rows = jnp.arange(features.size) if index is None else _as_index(index, features.size)
    return model.embed_y(_weights_left_out(features, ridge, rows))


@eqx.filter_jit
def _weights_left_out(
    features: AbstractFeatures, ridge: Float[Array, ""], rows: Int[Array, " m"]
) -> Float[Array, "m n"]:
    # No n x n matrix: with landmarks n may be large.
    identity = (rows[:, None] == jnp.arange(features.size)).astype(features.dtype)
    if isinstance(features, DenseGram):
        matrix = psd_factor(features.matrix, ridge).solve(identity.T).T
    else:
        solved, _ = _low_rank(features, ridge, 1)
        matrix = identity - matmul(solved[rows], features.matrix.T)
    own = jnp.take_along_axis(matrix, rows[:, None], axis=1)
    return jnp.where(identity == 1, 0, -matrix / own)


def _leaving_out(
    model: AbstractConditional, num_left_out: int
) -> tuple[AbstractFeatures, Array, int]:
    """Features of x, the ridge of the smaller sample, and the size of a block."""
    features = model.sample()[0]
    count = as_count(num_left_out, "num_left_out", features.points, "model.x")
    if isinstance(features, LazyGram):
        raise ValueError(
            "Leaving out needs a factored Gram matrix: fit the model without a `solver`, or with "
            "landmarks."
        )
    if features.size % count or (features.mask is not None and count > 1):
        raise ValueError(
            f"Blocks of {count} must divide {features.size} pairs without padding; use another "
            f"`num_left_out`, or `cross_validate`."
        )
    if not isinstance(features, DenseGram) and features.matrix.shape[1] >= features.size:
        # As many features as points fit all of them, and 1 - H would be a difference of rounding.
        rows = masked_rows(features.matrix, features.mask)
        features = DenseGram(features.kernel, features.points, matmul(rows, rows.T), features.mask)
    # Where nothing is left to learn from, the prediction is 0 for any ridge.
    ridge = jnp.where(features.count > count, features.count - count, 1) * model.regularizer
    return features, ridge, count


@eqx.filter_jit
def _left_out(
    features: AbstractFeatures, ridge: Float[Array, ""], count: int, psi: Float[Array, "n c"]
) -> Float[Array, "n c"]:
    r"""$((I - H)_{BB}^{-1} ((I - H) \Psi)_B)_B$."""
    n = features.size
    if isinstance(features, DenseGram):
        # (I - H) up to a factor that cancels; no difference of nearly equal numbers.
        matrix = psd_factor(features.matrix, ridge).solve(jnp.eye(n, dtype=features.dtype))
        residual = matmul(matrix, psi)
        blocks = jax.vmap(lambda rows, start: lax.dynamic_slice_in_dim(rows, start, count, 1))(
            matrix.reshape(-1, count, n), jnp.arange(0, n, count)
        )
    else:
        solved, blocks = _low_rank(features, ridge, count)
        residual = psi - matmul(solved, matmul(features.matrix.T, psi))
    return _solve_blocks(blocks, residual.reshape(-1, count, psi.shape[-1])).reshape(psi.shape)


def _low_rank(
    features: AbstractFeatures, ridge: Float[Array, ""], count: int
) -> tuple[Array, Array]:
    r"""Z with $H = Z C^\top$ for the coordinates C, and the blocks $(I - H)_{BB}$."""
    coordinates = features.matrix
    solved = features.ridge(ridge / features.count).solve(coordinates.T).T
    rows, columns = (
        part.reshape(-1, count, coordinates.shape[1]) for part in (solved, coordinates)
    )
    return solved, jnp.eye(count, dtype=coordinates.dtype) - matmul(
        rows, jnp.swapaxes(columns, -1, -2)
    )


def _solve_blocks(
    blocks: Float[Array, "k b b"], rows: Float[Array, "k b c"]
) -> Float[Array, "k b c"]:
    return rows / blocks if blocks.shape[-1] == 1 else solve(blocks, rows)


def _low_rank_errors(
    features: AbstractFeatures,
    ridge: Float[Array, ""],
    count: int,
    kernel: AbstractKernel,
    y: Points,
) -> Float[Array, " n"]:
    r"""Diagonal of $R G R^\top$ for the matrix R of `_left_out`.

    Of $(I - H) G (I - H)^\top$ only blocks are formed.
    """
    coordinates, (solved, blocks) = features.matrix, _low_rank(features, ridge, count)
    spread = gram_matvec(kernel, y, y, coordinates)
    middle = matmul(coordinates.T, spread)
    own = jax.vmap(lambda block: kernel.gram(block, block))(
        jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), y)
    )
    rows, columns = (
        solved.reshape(-1, count, coordinates.shape[1]),
        spread.reshape(-1, count, coordinates.shape[1]),
    )
    cross = matmul(rows, jnp.swapaxes(columns, -1, -2))
    explained = matmul(matmul(rows, middle), jnp.swapaxes(rows, -1, -2))
    inner = own.astype(coordinates.dtype) - cross - jnp.swapaxes(cross, -1, -2) + explained
    left = _solve_blocks(blocks, inner)
    errors = jnp.diagonal(_solve_blocks(blocks, jnp.swapaxes(left, -1, -2)), axis1=-2, axis2=-1)
    # Rounding of the sum, enlarged as the errors are. What it decides is not known, but for losses
    # near 0: y may be a function of x.
    size_ = jnp.abs(jnp.diagonal(own, axis1=-2, axis2=-1)).astype(coordinates.dtype)
    roots = jnp.sqrt(jnp.finfo(coordinates.dtype).eps * size_)
    enlarged = _solve_blocks(blocks, jax.vmap(jnp.diag)(roots))
    rounding = lax.stop_gradient(jnp.mean(jnp.sum(enlarged**2, axis=-1)))
    unknown = (rounding > 0.1 * jnp.mean(errors)) & (rounding > 1e-3 * jnp.mean(size_))
    return jnp.where(unknown, jnp.nan, errors).reshape(-1)


def _as_index(index: ArrayLike, n: int) -> Int[Array, " m"]:
    with known(index):
        rows = jnp.asarray(index)
    vector = jnp.issubdtype(rows.dtype, jnp.integer) and rows.ndim == 1
    if not vector or (is_concrete(rows) and not np.all(np.isin(rows, np.arange(-n, n)))):
        raise ValueError(f"`index` must be a vector of numbers of {n} pairs, got {index}.")
    return rows % n


@one_program
def _from_mean(y: Float[Array, "n *d"], weights: Float[Array, " n"]) -> Float[Array, "n *d"]:
    return y - jnp.tensordot(weights.astype(y.dtype), y, 1, precision=HIGHEST)


def _real_y(model: AbstractConditional) -> Float[Array, "n *d"]:
    y = model.sample()[1].points
    if not (hasattr(y, "dtype") and jnp.issubdtype(y.dtype, jnp.floating)):
        raise ValueError("y must be one real array; else use `condition`.")
    return y


def restored_weights(
    model: AbstractConditional, x: Point
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Weights at x, and the mass that is missing there, on all pairs alike.

    No division by a mass near 0: signed weights that cancel would throw the mean far away.
    """
    weights = condition(model, x).weights
    if weights.ndim != 1:
        raise ValueError(
            "`x` must be one point. For several read the number inside of `vmap`: "
            "`jax.vmap(lambda x: kbr.mean(forecast(x)))(xs)`."
        )
    return restored(weights, model.sample()[0].uniform.astype(weights.dtype))


@one_program
def restored(
    weights: Float[Array, "*b n"], uniform: Float[Array, "*b n"]
) -> tuple[Float[Array, "*b n"], Float[Array, "*b n"]]:
    """Weights, and the mass that they lack, as `uniform`."""
    own = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 0.5)
    return own, (1 - jnp.sum(own, axis=-1, keepdims=True)) * uniform


def restored_left_out(
    model: AbstractConditional, rows: Int[Array, " m"]
) -> tuple[Float[Array, "m n"], Float[Array, "m n"]]:
    """As `restored_weights`, at pairs that are left out in turn."""
    weights = leave_out_forecasts(model, rows).weights
    n = weights.shape[1]
    return restored(weights, jnp.where(rows[:, None] == jnp.arange(n), 0, 1 / (n - 1)))


def condition_adjusted(
    model: AbstractConditional, residuals: Float[Array, "n *d"], x: Point
) -> Embedding:
    r"""Embed P(Y | X = x) on atoms that move with the regression: $m(x) + r_i$.

    `condition` keeps the training y where they are. Within its bandwidth the mean moves, and its
    intervals are too wide by that. Here each y is replaced by the conditional mean at x and its own
    residual $r_i = y_i - m_{-i}(x_i)$, with the weights of `condition`: the regression adjustment
    of Beaumont et al. 2002, with residuals of points left out. Where the weights sum to less than
    1/2, no training pair is near x, and the missing part goes to the training y themselves. That
    reading of the sum needs a kernel of x that falls off with distance, not `Linear`.

    **Arguments:**

    - `model` of P(Y | X) on a sample, y one real array `[n, ...]`.
    - `residuals`: `leave_out_residuals(model)`, in the shape of y.
    - `x`: one point; `jax.vmap` for several.

    **Returns:** an `Embedding` of weights `[2 n]`, of sum 1. `mean`, `quantile` and
    `credible_interval` read it. Cost O(n^2) exact, O(n r) with landmarks.

    **Raises:** `ValueError` for residuals of another shape, and for y that are not one real array.
    """
    y = _real_y(model)
    if residuals.shape != y.shape:
        raise ValueError(f"`residuals` has shape {residuals.shape}, but y has {y.shape}.")
    own, other = restored_weights(model, x)
    center = jnp.tensordot(own + other, y.astype(own.dtype), 1, precision=HIGHEST)
    atoms = jnp.concatenate([center + residuals, y])
    return Embedding(model.kernel_y, atoms, jnp.concatenate([own, other]))
