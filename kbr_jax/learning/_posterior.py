"""Bayes' rule with a prior, its parameters chosen on pairs that are held out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import (
    as_points,
    as_positive,
    as_real,
    check_alike,
    check_finite,
    check_same_size,
    is_real,
    size,
    take,
)
from .._numerics import matmul
from .._typing import Array, Float, Point, Points, with_scalars
from ..embedding import Embedding, guarded_sum, normalized
from ..kernels import (
    AbstractKernel,
    Gaussian,
    KernelLike,
    coordinate_scale,
    default_kernel,
    gram,
    kernel_for,
)
from ..rules import ConditionalEmbedding, bayes_rule, fit_conditional
from ..rules._model import single_prior_weights
from ..tuning import coverage
from ..tuning._calibration import LEVELS
from ..tuning._losses import measuring
from ..tuning._progress import progress_bar
from ._conditional import (
    EXACT,
    NEIGHBORS,
    RANK,
    central_levels,
    energy_scores,
    error_note,
    neighbors,
)
from ._folds import distances, spread
from ._report import Report, compared
from ._search import descend, search, warn_of_constants

#: Pairs that are seen while choosing, folds, candidates of each estimator and near the best, and
#: Adam's steps and rate.
PAIRS, FOLDS, TRIALS, REFINEMENTS, STEPS, RATE = 600, 5, 16, 12, 15, 0.1
#: One object, so that all calls share a compiled step.
OPTIMIZER = optax.adam(RATE)
#: Bandwidths are multiples of the default kernel's.
RANGES = {
    "bandwidth_x": (0.05, 2.0),
    "bandwidth_y": (0.05, 2.0),
    "regularizer": (1e-7, 1e-1),
    "posterior_regularizer": (1e-8, 1e-1),
}


class LearnedPosterior(eqx.Module):
    """Bayes' rule as a function of y: `posterior(y)` embeds P(X | y) under the prior.

    It calls `bayes_rule(model, prior, y, regularizer=, estimator=)` and divides the weights by the
    median mass of held-out pairs. So observations like the training y have a mass near 1, and one
    unlike all of them a mass near 0. Fields: the `model` of P(Y | X), the `prior` over X, the
    `regularizer`, the `estimator` and that median, `mass`.
    """

    model: ConditionalEmbedding
    prior: Embedding
    regularizer: Float[Array, ""]
    estimator: str = eqx.field(static=True)
    mass: Float[Array, ""]

    __repr__ = with_scalars

    def __call__(self, y: Point | Points) -> Embedding:
        posterior = bayes_rule(
            self.model,
            self.prior,
            y,
            regularizer=self.regularizer,
            estimator=self.estimator,  # pyright: ignore[reportArgumentType]
        )
        weights = posterior.weights / self.mass.astype(posterior.weights.dtype)
        return Embedding(posterior.kernel, posterior.points, weights)


class _Setting(eqx.Module):
    """What all candidates share."""

    kernel_x: AbstractKernel
    kernel_y: AbstractKernel
    prior: Embedding
    scaled: tuple[bool, bool] = eqx.field(static=True)
    estimator: str = eqx.field(static=True)

    def fit(self, values: dict, x: Points, y: Points, **options: Any) -> LearnedPosterior:
        kernel_x = self._scaled(0, self.kernel_x, values, "bandwidth_x")
        kernel_y = self._scaled(1, self.kernel_y, values, "bandwidth_y")
        ridge = values["regularizer"]
        model = fit_conditional(kernel_x, kernel_y, x, y, regularizer=ridge, **options)
        prior = Embedding(kernel_x, self.prior.points, self.prior.weights)
        delta = values["posterior_regularizer"]
        return LearnedPosterior(model, prior, delta, self.estimator, jnp.ones_like(delta))

    def _scaled(self, index: int, kernel: Any, values: dict, name: str) -> AbstractKernel:
        if not self.scaled[index]:
            return kernel
        return Gaussian(values[name].astype(kernel.bandwidth.dtype) * kernel.bandwidth)


class _Data(eqx.Module):
    """Pairs, the prior's shares of them `[n]`, and the Gram matrix that measures x."""

    x: Points
    y: Points
    shares: Float[Array, " n"]
    matrix: Float[Array, "n n"]


@eqx.filter_jit
def _held_out(setting: _Setting, data: _Data, values: dict) -> Float[Array, "n n"]:
    """Weights, of any sum, of the posterior of each pair from the other folds."""
    n = size(data.x)
    folds = np.arange(n).reshape(-1, FOLDS).T
    rest = jnp.asarray([np.setdiff1d(np.arange(n), fold) for fold in folds])

    def one(inputs):
        fold, others = inputs
        posterior = setting.fit(values, take(data.x, others), take(data.y, others))
        weights = posterior(take(data.y, fold)).weights
        return jnp.zeros((fold.shape[0], n), weights.dtype).at[:, others].set(weights)

    found = jax.lax.map(jax.checkpoint(one), (jnp.asarray(folds), rest))
    return jnp.swapaxes(found, 0, 1).reshape(n, n)


def _loss(setting: _Setting, data: _Data, fixed: dict, free: dict) -> Float[Array, ""]:
    weights = normalized(_held_out(setting, data, {**free, **fixed}))
    smooth = matmul(weights, data.matrix)
    scores = jnp.diagonal(data.matrix) - 2 * jnp.diagonal(smooth) + jnp.sum(smooth * weights, 1)
    return jnp.sum(data.shares * scores)


_score = eqx.filter_jit(_loss)


def learn_posterior(
    x: Points,
    y: Points,
    *,
    prior: Any = None,
    kernel_x: KernelLike = None,
    kernel_y: KernelLike = None,
    progress: bool = True,
    **fixed: Any,
) -> tuple[LearnedPosterior, Report]:
    r"""Fit Bayes' rule with a prior; choose every parameter on held-out pairs.

    The loss is the energy score of the posteriors of pairs that are held out in five folds. Pairs
    count by the share of the prior that lies on them, estimated with the `default_kernel` of the
    prior's points, drawn by their weights, at the regularizer 1e-3. Two estimators are searched.
    Adam then tunes bandwidths for each coordinate.

    **Arguments:**

    - `x`, `y`: pairs `[n, ...]`, independent of each other; parameters and simulated data, for
      example.
    - `prior`: points of x `[m, ...]` drawn from it, or an `Embedding`; by default the training x.
      Under that prior `learn_conditional(y, x)` is simpler.
    - `kernel_x`, `kernel_y`: fixed kernels.
    - `progress`: a bar, where tqdm is installed.
    - `fixed`: any of `bandwidth_x`, `bandwidth_y` (multiples of the default kernel's),
      `regularizer`, `posterior_regularizer`.

    **Returns:** a `LearnedPosterior` p, with p(y) the embedding of X given y, and a `Report` with
    the scores of the prior itself and of nearest neighbors (rejection) on the same pairs. Cost
    O(n^3) for the final fit; at most 600 pairs are seen while choosing. Above 3 000 pairs the model
    has 500 landmarks.

    **Raises:** `ValueError` for fewer than 50 pairs, an unknown parameter, a prior outside
    the training x (see `bayes_rule`), and as `fit_conditional`.
    """
    unknown = set(fixed) - set(RANGES)
    if unknown:
        raise ValueError(f"`{min(unknown)}` is not a parameter; fix any of {', '.join(RANGES)}.")
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_same_size(x, "x", y, "y")
    if size(x) < 50:
        raise ValueError(f"`learn_posterior` needs at least 50 pairs, got {size(x)}.")
    warn_of_constants(x=x, y=y)
    kernels = kernel_for(kernel_x, x), kernel_for(kernel_y, y)
    prior = _as_prior(prior, kernels[0], x)
    rows = spread(size(x), PAIRS)
    rows = rows[: len(rows) // FOLDS * FOLDS]
    few_x, few_y = take(x, rows), take(y, rows)
    shares = _shares(prior, few_x)
    data = _Data(few_x, few_y, shares, gram(measuring(kernels[0], few_x), few_x))
    fixed = {name: as_positive(value, name) for name, value in fixed.items()}
    given = zip((kernel_x, kernel_y), (x, y), strict=True)
    scaled = tuple(kernel is None and is_real(points) for kernel, points in given)
    settings = [
        _Setting(*kernels, prior, scaled, estimator)  # pyright: ignore[reportArgumentType]
        for estimator in ("pairs", "importance")
    ]
    skip = {
        name for name, free in zip(("bandwidth_x", "bandwidth_y"), scaled, strict=True) if not free
    }
    for name in skip & set(fixed):
        raise ValueError(
            f"`{name}` is that of a default kernel on real points: here the kernel is given, or "
            f"the points are labels or tuples."
        )
    ranges = {name: ends for name, ends in RANGES.items() if name not in {*fixed, *skip}}
    with progress_bar(TRIALS * len(settings) + REFINEMENTS + STEPS, progress) as bar:
        setting, free = search(
            lambda option, values, _: _score(option, data, fixed, values),
            settings,
            ranges,
            TRIALS,
            REFINEMENTS,
            bar,
        )
        if free:
            free = _tuned(setting, data, free, fixed)
        bar.update(STEPS)
    values = {**free, **fixed}
    options = {"landmarks_x": RANK, "landmarks_y": RANK} if size(x) > EXACT else {}
    found = setting.fit(values, x, y, **options)
    weights = _held_out(setting, data, values)
    found = eqx.tree_at(lambda p: p.mass, found, _median(guarded_sum(weights), data.shares))
    return found, _report(setting, data, values, np.asarray(normalized(weights)))


def _as_prior(prior: Any, kernel: AbstractKernel, x: Points) -> Embedding:
    if isinstance(prior, Embedding):
        return prior
    points = x if prior is None else as_real(check_finite(as_points(prior, "prior"), "prior"), x)
    check_alike(points, "prior", x, "x")
    count = size(points)
    return Embedding(kernel, points, jnp.full(count, 1 / count))


def _shares(prior: Embedding, x: Points) -> Float[Array, " n"]:
    """The prior as weights of the training pairs that are clipped and sum to 1."""
    # A kernel as wide as the training x would make a narrow prior wide; one that is narrower than
    # their spacing would not reach them. Points without weight say nothing of the width.
    drawn = np.maximum(np.asarray(prior.weights, float), 0)
    middles = (np.arange(drawn.size) + 0.5) / drawn.size * drawn.sum()
    rows = np.searchsorted(np.cumsum(drawn), middles).clip(0, drawn.size - 1)
    kernel = default_kernel(take(prior.points, rows))
    if isinstance(kernel, Gaussian):
        units = coordinate_scale(x)
        unlike = distances(x / units, x / units)
        spacing = np.median(np.sort(unlike, axis=1)[:, 1]).astype(units.dtype)
        kernel = Gaussian(jnp.maximum(kernel.bandwidth, spacing * units))
    model = fit_conditional(kernel, kernel, x, x, regularizer=1e-3)
    weights = jnp.maximum(single_prior_weights(model, prior), 0)
    return weights / jnp.sum(weights)


def _median(masses: Float[Array, " n"], shares: Float[Array, " n"]) -> Float[Array, ""]:
    """The median mass of held-out posteriors.

    The loss does not see masses: regularizers that it calls good may make all of them small.
    """
    order = jnp.argsort(masses)
    return masses[order[jnp.searchsorted(jnp.cumsum(shares[order]), 0.5)]]


def _tuned(setting: _Setting, data: _Data, free: dict, fixed: dict) -> dict:
    """Gradient descent from the best candidate, with a bandwidth for each coordinate."""
    start = dict(free)
    for name, kernel in (("bandwidth_x", setting.kernel_x), ("bandwidth_y", setting.kernel_y)):
        if name in free:
            shape = kernel.bandwidth.shape  # pyright: ignore[reportAttributeAccessIssue]
            start[name] = jnp.broadcast_to(free[name], shape)
    loss = jax.tree_util.Partial(_loss, setting, data, fixed)
    return descend(loss, start, OPTIMIZER, STEPS)


def _report(setting: _Setting, data: _Data, values: dict, weights: np.ndarray) -> Report:
    n = size(data.x)
    matrix, shares = np.asarray(data.matrix), np.asarray(data.shares)
    alone = np.where(np.eye(n, dtype=bool), 0, shares)
    # A pair that holds all of the prior leaves nothing to the others.
    alone = np.where(alone.sum(1, keepdims=True) > 0, alone, 1)
    alone = alone / alone.sum(1, keepdims=True)
    scores = {"posterior": energy_scores(matrix, weights)}
    if is_real(data.y):
        rows = data.y / coordinate_scale(data.y)
        unlike = distances(rows, rows)
        near = [neighbors(unlike, k, shares) for k in NEIGHBORS if k < n]
        scores["nearest neighbors"] = min(
            (energy_scores(matrix, w) for w in near), key=lambda s: shares @ s
        )
    scores["prior"] = energy_scores(matrix, alone)
    # Means under the prior.
    summary, notes = compared(scores, shares)
    held = {}
    if is_real(data.x):
        rows = data.x.reshape(n, -1)
        inside = jax.vmap(coverage)(central_levels(jnp.asarray(weights), rows, rows))
        held = dict(zip(LEVELS, (shares @ np.asarray(inside)).tolist(), strict=True))
    return Report(
        chosen={
            **{name: np.asarray(value) for name, value in values.items()},
            "estimator": setting.estimator,
        },
        errors=summary,
        coverage=held,
        notes=(
            error_note("held out", "x", data.x),
            *notes,
        ),
    )
