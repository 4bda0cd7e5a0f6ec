"""A conditional embedding whose parameters are chosen by exact leave-one-out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    as_points,
    as_positive,
    check_finite,
    check_same_size,
    is_real,
    size,
    take,
)
from .._numerics import evenly, matmul
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding, cdf
from ..kernels import (
    AbstractKernel,
    Gaussian,
    KernelLike,
    Linear,
    TensorProduct,
    as_kernel,
    coordinate_scale,
    default_kernel,
    gram,
)
from ..kernels._base import flat
from ..rules import ConditionalEmbedding, fit_conditional
from ..tuning import coverage, leave_out_loss, leave_out_residuals, regression_loss
from ..tuning._calibration import LEVELS
from ..tuning._leave_out import restored
from ..tuning._losses import measuring
from ..tuning._progress import progress_bar
from ._folds import distances
from ._report import Report, compared
from ._search import descend, search, steps_that_help, warn_of_constants

#: Pairs that are seen while choosing, candidates over the whole range and near the best, Adam's
#: steps at most and its rate. Up to `EXACT` pairs the final fit is exact, above it has `RANK`
#: landmarks.
#: Up to `FEW` pairs the number of steps comes from five folds, above it from two, whose time is
#: a third of Adam's. Halves of 50 pairs missed a sine of 1 in 10 columns in 2 of 16 samples.
FEW = 300
PAIRS, TRIALS, REFINEMENTS, STEPS, RATE, EXACT, RANK = 1000, 24, 12, 40, 0.1, 3000, 500
#: One object, so that all calls share a compiled step.
OPTIMIZER = optax.adam(RATE)
#: Bandwidths are in units of the median distance.
BANDWIDTH = "bandwidth_x"
RANGES = {BANDWIDTH: (0.03, 3.0), "regularizer": (1e-8, 1.0)}
#: Candidates of the rivals.
NEIGHBORS, RIDGES = (3, 10, 30, 100), (1e-4, 1e-2, 1.0)
AFFINE = Linear() + (lambda a, b: jnp.ones((), jnp.result_type(a)))


class _Setting(eqx.Module):
    """What all candidates share; with `units`, the real parts of x have bandwidths to be chosen."""

    kernel_x: AbstractKernel
    kernel_y: AbstractKernel
    units: dict[str, Array]

    def fit(self, values: dict, x: Points, y: Points, **options: Any) -> ConditionalEmbedding:
        chosen = {
            name: Gaussian(values[name if name in values else BANDWIDTH].astype(unit.dtype) * unit)
            for name, unit in self.units.items()
        }
        kernels = [chosen.get(name, kernel) for name, kernel in _parts(self.kernel_x)]
        kernel = jax.tree.unflatten(jax.tree.structure(self.kernel_x, is_leaf=_is_part), kernels)
        return fit_conditional(
            kernel, self.kernel_y, x, y, regularizer=values["regularizer"], **options
        )


def _is_part(kernel: Any) -> bool:
    return isinstance(kernel, AbstractKernel) and not isinstance(kernel, TensorProduct)


def _parts(kernel: AbstractKernel) -> list[tuple[str, AbstractKernel]]:
    """The kernels of the parts of x, with the names of their bandwidths."""
    if not isinstance(kernel, TensorProduct):
        return [(BANDWIDTH, kernel)]
    parts = jax.tree.leaves(kernel, is_leaf=_is_part)
    return [(f"{BANDWIDTH}, part {index}", part) for index, part in enumerate(parts)]


def _loss(setting: _Setting, x: Points, y: Points, fixed: dict, free: dict) -> Float[Array, ""]:
    return leave_out_loss(setting.fit({**free, **fixed}, x, y))


def _held_out(
    setting: _Setting, x: Points, y: Points, new: Points, happened: Points, fixed: dict, free: dict
) -> Float[Array, ""]:
    return regression_loss(setting.fit({**free, **fixed}, x, y), new, happened)


_score = eqx.filter_jit(_loss)


def learn_conditional(
    x: Points,
    y: Points,
    *,
    kernel_x: KernelLike = None,
    kernel_y: KernelLike = None,
    regularizer: ArrayLike | None = None,
    progress: bool = True,
) -> tuple[ConditionalEmbedding, Report]:
    r"""Fit P(Y | X); choose bandwidths and regularizer by exact leave-one-out.

    The loss is `leave_out_loss`: the energy score of the forecast of a pair from all others, which
    judges means and spreads and does not depend on the kernel of y. A coarse search over a common
    bandwidth of x and the regularizer comes first. Then Adam tunes a bandwidth for each coordinate.
    It takes as many steps as help pairs that are held out: with many columns and few pairs the
    steps after them learn noise.

    **Arguments:**

    - `x`, `y`: pairs `[n, ...]`, independent of each other given x. For labels y the score is
      Brier's. Real x are taken in units of `coordinate_scale`.
    - `kernel_x`, `kernel_y`: fixed kernels. By default `default_kernel` of y, and of x with chosen
      bandwidths. Of tuples the real parts have bandwidths.
    - `regularizer`: a fixed one.
    - `progress`: a bar, where tqdm is installed.

    **Returns:** the model, and a `Report` with the scores of a linear model, of nearest neighbors
    and of the marginal of y on the same pairs, also left out. Its coverage is that of the central
    intervals of `condition_adjusted`, one coordinate at a time. Cost O(n^3) for each of 36
    candidates and four times that for each of at most 40 steps, whose number takes three times
    that again up to 300 pairs and a third of it above; at most 1 000 pairs are seen while
    choosing. Above 3 000 pairs the model has 500 landmarks.

    **Raises:** `ValueError` for fewer than 10 pairs, and as `fit_conditional`.

    **Example:**

    >>> import jax.numpy as jnp, kbr_jax as kbr
    >>> x = jnp.linspace(-3, 3, 100)[:, None]
    >>> model, report = kbr.learn_conditional(x, jnp.sin(x), progress=False)
    >>> print(f"{kbr.mean(kbr.condition(model, jnp.array([1.0])))[0]:.2f}")
    0.84
    """
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_same_size(x, "x", y, "y")
    if size(x) < 10:
        raise ValueError(f"`learn_conditional` needs at least 10 pairs, got {size(x)}.")
    warn_of_constants(x=x, y=y)
    rows = evenly(size(x), PAIRS)
    few_x, few_y = take(x, rows), take(y, rows)
    kernel = default_kernel(few_x) if kernel_x is None else as_kernel(kernel_x)
    units = {}
    if kernel_x is None:
        parts = _parts(kernel)
        units = {name: part.bandwidth for name, part in parts if isinstance(part, Gaussian)}
    own_y = default_kernel(y) if kernel_y is None else as_kernel(kernel_y)
    setting = _Setting(kernel, own_y, units)
    fixed = {} if regularizer is None else {"regularizer": as_positive(regularizer, "regularizer")}
    ranges = {name: ends for name, ends in RANGES.items() if name not in fixed}
    if not units:
        del ranges[BANDWIDTH]
    with progress_bar(TRIALS + REFINEMENTS + STEPS, progress) as bar:

        def evaluate(option, values, _):
            return _score(option, few_x, few_y, fixed, values)

        _, free = search(evaluate, [setting], ranges, TRIALS, REFINEMENTS, bar)
        if free:
            free = _tuned(setting, few_x, few_y, free, fixed)
        bar.update(STEPS)
    values = {**free, **fixed}
    options = {"landmarks_x": RANK} if size(x) > EXACT else {}
    model = setting.fit(values, x, y, **options)
    return model, _report(setting, values, few_x, few_y)


def _tuned(setting: _Setting, x: Points, y: Points, free: dict, fixed: dict) -> dict:
    """Gradient descent from the best candidate, with a bandwidth for each coordinate."""
    start = {name: value for name, value in free.items() if name != BANDWIDTH}
    for name, unit in setting.units.items():
        start[name] = jnp.broadcast_to(free[BANDWIDTH], unit.shape)

    steps = steps_that_help(_folds(setting, x, y, fixed), start, OPTIMIZER, STEPS)
    loss = jax.tree_util.Partial(_loss, setting, x, y, fixed)
    return descend(loss, start, OPTIMIZER, steps + 1) if steps else start


def _folds(setting: _Setting, x: Points, y: Points, fixed: dict) -> list[tuple[Any, Any]]:
    """For each fold the loss of the other pairs, and that of its own forecasts."""
    count = 5 if size(x) <= FEW else 2
    # At random: rows may take turns.
    rows = np.random.default_rng(0).permutation(size(x))[: size(x) // count * count]
    folds = []
    for fold in rows.reshape(count, -1):
        pairs = [take(z, at) for at in (np.setdiff1d(rows, fold), fold) for z in (x, y)]
        folds.append(
            (
                jax.tree_util.Partial(_loss, setting, *pairs[:2], fixed),
                jax.tree_util.Partial(_held_out, setting, *pairs, fixed),
            )
        )
    return folds


def energy_scores(matrix: np.ndarray, weights: Any) -> np.ndarray:
    """Energy scores `[n]` of forecasts of n points by weights on all of them."""
    weights = np.asarray(weights, matrix.dtype)
    smooth = np.asarray(matmul(jnp.asarray(weights), jnp.asarray(matrix)))
    return np.diag(matrix) - 2 * np.diagonal(smooth) + (smooth * weights).sum(1)


def neighbors(unlike: np.ndarray, count: int, shares: np.ndarray | None = None) -> np.ndarray:
    """Weights of the `count` nearest others of each point, in proportion to `shares`."""
    nearest = np.argsort(np.where(np.eye(len(unlike), dtype=bool), np.inf, unlike), axis=1)
    chosen = np.zeros_like(unlike)
    np.put_along_axis(chosen, nearest[:, :count], 1.0, axis=1)
    chosen = chosen if shares is None else chosen * shares
    return chosen / np.maximum(chosen.sum(1, keepdims=True), np.finfo(chosen.dtype).tiny)


def _report(setting: _Setting, values: dict, x: Points, y: Points) -> Report:
    n = size(y)
    model = setting.fit(values, x, y)
    identity = jnp.eye(n, dtype=model.features_x.dtype)
    weights = identity - leave_out_residuals(model, identity)
    measure = measuring(model.kernel_y, y)
    matrix = np.asarray(gram(measure, y))
    scores = {"conditional embedding": energy_scores(matrix, weights)}
    uniform = (np.ones((n, n)) - np.eye(n)) / (n - 1)
    if is_real(x):
        rows = (x - jnp.mean(x, axis=0)) / coordinate_scale(x)
        around = y - jnp.mean(y, axis=0) if is_real(y) else y
        linear = []
        for ridge in RIDGES:
            fit = fit_conditional(AFFINE, setting.kernel_y, rows, around, regularizer=ridge)
            if is_real(y):
                # Its forecast is its mean with the left-out residuals of the other pairs.
                residuals = np.asarray(gram(measure, leave_out_residuals(fit)))
                linear.append(energy_scores(residuals, uniform))
            else:
                left_out = np.asarray(identity - leave_out_residuals(fit, identity))
                linear.append(energy_scores(matrix, left_out))
        unlike = distances(rows, rows)
        near = [energy_scores(matrix, neighbors(unlike, k)) for k in NEIGHBORS if k < n]
        scores["linear regression"] = min(linear, key=np.mean)
        scores["nearest neighbors"] = min(near, key=np.mean)
    scores["marginal of y"] = energy_scores(matrix, uniform)
    summary, notes = compared(scores)
    held = {}
    if is_real(y):
        held = _covered(np.asarray(weights), flat(leave_out_residuals(model)), flat(y))
    return Report(
        chosen={name: np.asarray(value) for name, value in values.items()},
        errors=summary,
        coverage=held,
        notes=(
            error_note("left out", "y", y),
            *notes,
        ),
    )


def error_note(how: str, name: str, values: Points) -> str:
    """What the errors of a report are."""
    words, unit = "energy scores", ""
    if is_real(values):
        unit = f", in standard deviations of {name}"
    elif hasattr(values, "dtype"):
        words = "Brier scores"
    return (
        f"The errors are {words} of pairs that are {how}{unit}. The same pairs chose the "
        f"parameters: with many columns and few pairs the errors are too small, and pairs of your "
        f"own judge better."
    )


def _level(atoms: Array, weights: Array, truth: Array) -> Float[Array, " d"]:
    """Mass of the central interval that ends at the truth; half of what is equal is below it."""
    found = Embedding(Gaussian(1.0), atoms, weights)
    # The rounding of `cdf`, in the units of each coordinate.
    nothing = 32 * jnp.finfo(atoms.dtype).eps * jnp.max(jnp.abs(atoms), axis=0)
    up_to, below = (
        jnp.diagonal(jax.vmap(cdf, (None, 0))(found, end))
        for end in (truth + nothing, truth - nothing)
    )
    return jnp.abs(up_to + below - 1)


@jax.jit
def central_levels(weights: Array, values: Array, truth: Array) -> Float[Array, "m d"]:
    """Masses of the central intervals that end at the truth `[m, d]`; weights `[m, n]`."""
    return jax.lax.map(lambda row: _level(values, *row), (weights, truth))


@jax.jit
def _levels(own: Array, far: Array, residuals: Array, y: Array) -> Float[Array, "n d"]:
    def level(row):
        own, far, truth = row
        atoms = jnp.concatenate([matmul(own + far, y) + residuals, y])
        return _level(atoms, jnp.concatenate([own, far]), truth)

    return jax.lax.map(level, (own, far, y))


def _covered(weights: np.ndarray, residuals: Array, y: Array) -> dict[float, float]:
    """How many y lie inside the central intervals of `condition_adjusted` from the others."""
    others = (1 - np.eye(len(y), dtype=weights.dtype)) / (len(y) - 1)
    levels = _levels(*restored(jnp.asarray(weights), jnp.asarray(others)), residuals, y).reshape(-1)
    return dict(zip(LEVELS, np.asarray(coverage(jnp.asarray(levels))).tolist(), strict=True))
