"""A filter whose parameters are all chosen on held-out stretches of its training data."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checks import as_fraction, as_positive, size, take
from .._numerics import safe_sqrt
from .._typing import Array, Float, Point, Points
from ..embedding import Embedding, embed
from ..filtering import AbstractFilter, RivalFilter, fit_filter, run_filter, transitions
from ..kernels import (
    AbstractKernel,
    Gaussian,
    KernelLike,
    Warped,
    as_kernel,
    coordinate_scale,
    median_heuristic,
)
from ..rules import Clipping
from ..rules._model import check_estimator
from ..tuning import leave_out_loss, tune
from ..tuning._losses import Estimate
from ..tuning._progress import Progress, progress_bar
from ._folds import Fold, make_folds, spread
from ._maps import CHOOSING, choose_regression, fit_discriminant_map
from ._report import MEMORYLESS, Report, calibrated, compared, regressions
from ._search import resolvable, search

#: Landmarks of the states, and prior weights that Bayes' rule uses.
RANK, ACTIVE = 150, 100
#: Candidates over the whole range for each estimator, candidates near the best, and Adam's steps.
TRIALS, REFINEMENTS, STEPS, RATE = 12, 16, 5, 0.1
#: One object, so that all calls share a compiled step.
OPTIMIZER = optax.adam(RATE)
#: Ranges that are searched. Bandwidths are in units of the states' scale and of the median distance
#: of observations.
RANGES = {
    "bandwidth_states": (0.05, 1.0),
    "bandwidth_observations": (0.1, 1.5),
    "regularizer": (1e-7, 1e-1),
    "posterior_regularizer": (1e-8, 1e-2),
    "truncation": (3e-3, 0.3),
}
#: Bandwidths of the regression from states to observations.
WIDTHS = (0.1, 0.2, 0.4, 0.8)
#: Evidence at which a rival replaces a belief, and how much worse held-out runs may be with one:
#: the held-out starts may miss what a test sequence meets.
THRESHOLDS, MARGIN = (0.5, 1.0, 2.0), 1.01
#: Pairs that the final map sees.
MAPPED = 2000


class _Setting(eqx.Module):
    """What all candidates share: units, what is fixed, and how beliefs are decoded.

    `lost` is the mean error of an estimate without memory, by regression on one observation.
    """

    scale: Array
    distance: Array
    kernel_states: AbstractKernel | None
    kernel_observations: AbstractKernel | None
    decode: Callable[[Embedding], Point] | None = eqx.field(static=True)
    estimator: str = eqx.field(static=True)
    threshold: Array | None = None
    lost: Array = eqx.field(default_factory=lambda: jnp.asarray(jnp.inf))

    def kernel(self, values: dict) -> AbstractKernel:
        """The kernel of the states."""
        return self.kernel_states or Gaussian(values["bandwidth_states"] * self.scale)

    def fit(self, values: dict, states, observations, successors, warp=None) -> AbstractFilter:
        """The filter of one candidate."""
        kernel = self.kernel_observations
        if kernel is None:
            kernel = Gaussian(values["bandwidth_observations"] * self.distance)
            kernel = kernel if warp is None else Warped(kernel, warp)
        base = fit_filter(
            self.kernel(values),
            kernel,
            states,
            observations,
            successors=successors,
            regularizer=values["regularizer"],
            posterior_regularizer=values["posterior_regularizer"],
            landmarks_states=min(RANK, size(states)),
            estimator=self.estimator,  # pyright: ignore[reportArgumentType]
            clipping=Clipping(truncation=values["truncation"]),
            max_active=min(ACTIVE, size(states)),
        )
        if self.threshold is None:
            return base
        emission: Any = base.emission
        residual = leave_out_loss(emission, kernel=emission.kernel_y)
        return RivalFilter(base, residual=residual, threshold=self.threshold)


def distances(estimates: Points, truth: Points) -> Float[Array, "w l"]:
    """Euclidean distances of points `[w, l, *shape]`."""
    squares = ((estimates - truth) ** 2).reshape(*truth.shape[:2], -1)
    return safe_sqrt(jnp.sum(squares, axis=-1))


def _observed(length: int) -> Array:
    """A gap of a tenth of a stretch, in its middle."""
    return jnp.abs(jnp.arange(length) - length // 2) > length // 20


def _runner(setting: _Setting, values: dict, fold: Fold) -> Callable:
    """Errors `[w, l]` of runs of a candidate, from priors or from states `[w, ...]`."""
    filt = setting.fit(values, fold.states, fold.codes, fold.successors)
    kernel = setting.kernel(values)

    def run(queries, state=None, mask=None):
        prior = None if state is None else embed(kernel, state[None])
        kept = Estimate(filt, setting.decode)
        return run_filter(filt, queries, prior=prior, observed=mask, output_fn=kept)

    return lambda *inputs: distances(jax.vmap(run)(*inputs), fold.truth)


def _runs(setting: _Setting, values: dict, fold: Fold) -> tuple[Array, Array, Array]:
    """Errors `[w, l]` of runs from the marginal with a gap, the true state, and a wrong belief.

    The last has other noise.
    """
    run = _runner(setting, values, fold)
    masks = jnp.broadcast_to(_observed(fold.truth.shape[1]), fold.truth.shape[:2])
    begun = run(fold.queries, fold.truth[:, 0])
    return run(fold.queries, None, masks), begun, run(fold.redrawn, fold.wrong)


def _error(setting: _Setting, fold: Fold, values: dict) -> Float[Array, ""]:
    """Mean error over the runs. A wrong belief has a quarter of a stretch to come back.

    A stretch costs no more than an estimate without memory. Where states look alike nothing in a
    stretch may tell them apart, and a filter that forgets what it knew would else win.
    """
    right, begun, wrong = _runs(setting, values, fold)
    wrong = wrong[:, wrong.shape[1] // 4 :]
    stretches = jnp.stack([jnp.mean(errors, axis=1) for errors in (right, begun, wrong)])
    return jnp.mean(jnp.minimum(stretches, setting.lost.astype(stretches.dtype)))


_compiled_error = eqx.filter_jit(_error)


def score(setting: _Setting, folds: Fold, values: dict, limit: float = np.inf) -> float:
    """Mean error over all folds.

    Where it cannot be below `limit`, a number above it, without the other folds.
    """
    total, count = 0.0, folds.truth.shape[0]
    for index in range(count):
        fold = jax.tree.map(lambda leaf, i=index: leaf[i], folds)
        total += float(_compiled_error(setting, fold, values))
        if total > limit * count:
            break
    return total / count


@eqx.filter_jit
def _held_out(setting: _Setting, folds: Fold, values: dict) -> Any:
    """Errors of all runs, and beliefs from the marginal."""

    def one(fold):
        filt = setting.fit(values, fold.states, fold.codes, fold.successors)
        weights = jax.vmap(lambda o: run_filter(filt, o).weights)(fold.queries)
        return *_runs(setting, values, fold), weights.reshape(-1, weights.shape[-1])

    return jax.lax.map(one, folds)


def _best(
    settings: list[_Setting], folds: Fold, step: float, fixed: dict, bar: Progress
) -> tuple[_Setting, dict]:
    """Setting and values of the best candidate of a coarse and a fine search."""
    ranges = {name: ends for name, ends in RANGES.items() if name not in fixed}
    if "bandwidth_states" in ranges:
        ranges["bandwidth_states"] = min(0.05, step), RANGES["bandwidth_states"][1]

    def complete(values):
        if "truncation" in values:
            values = {**values, "truncation": jnp.minimum(values["truncation"], 0.5)}
        return {**values, **fixed}

    def evaluate(setting, values, limit):
        return score(setting, folds, complete(values), limit)

    setting, values = search(evaluate, settings, ranges, TRIALS, REFINEMENTS, bar)
    return setting, complete(values)


def _checked(states: Any, observations: Any) -> tuple[Points, Points, Points]:
    """Triples of the training sequences, of which parts can be held out."""
    triple = transitions(states, observations)
    total = size(triple[0])
    if total < 50:
        raise ValueError(f"`learn_filter` needs at least 50 steps to hold some out, got {total}.")
    for points, name in zip(triple, ("states", "observations"), strict=False):
        if not isinstance(points, jax.Array):
            raise ValueError(f"`{name}` must be one array a sequence; use `fit_filter` for tuples.")
    if not jnp.issubdtype(triple[0].dtype, jnp.floating):
        raise ValueError("`states` must be real numbers; use `fit_filter` with Delta for labels.")
    return triple


def learn_filter(
    states: Any,
    observations: Any,
    *,
    kernel_states: KernelLike | None = None,
    kernel_observations: KernelLike | None = None,
    estimator: str | None = None,
    decode: Callable[[Embedding], Point] | None = None,
    progress: bool = True,
    **fixed: Any,
) -> tuple[AbstractFilter, Report]:
    r"""Fit a filter to training sequences, with every parameter chosen on held-out stretches.

    1. Observations are mapped to at most 20 coordinates in units of their noise
       (`DiscriminantMap`), fitted to what each fold learns from. States are scaled by their
       standard deviation.
    2. Bandwidths, regularizers, truncation and the estimator are searched. Bandwidths and
       regularizers are then tuned by Adam. The error of a candidate is the mean distance of its
       estimates to held-out states, in three runs of each stretch. One starts from the marginal of
       the states, and has a gap. One starts from the true state. One starts from a wrong belief,
       at the far state whose observation is most like the first, and has the noise of another time;
       it counts after a quarter of the stretch. No stretch costs more than ridge regression on one
       observation does on average: a lost filter is as bad as one without memory, not worse.
    3. The filter gets a rival (`RivalFilter`), unless these runs, or those from the true state
       alone, show that it harms. `filt.base` is the filter without it, at half the cost.
    4. The filter is fitted to all data.

    **Arguments:**

    - `states` `[T, ...]`, real; `observations` `[T, ...]`, real numbers or counts (integers), whose
      square roots are then used. Or lists of trajectories of any lengths, which are held out whole
      where there are at least five.
    - `kernel_states`, `kernel_observations`: fixed kernels. The kernel of observations is then on
      observations as they are.
    - `estimator`: "pairs" or "importance"; both are tried by default.
    - `decode`: from an embedding to a point, for example `decode_rotation`; the mean by default.
    - `fixed`: any of `bandwidth_states` (in units of the states' scale), `bandwidth_observations`
      (of the median distance of mapped observations), `regularizer`, `posterior_regularizer` and
      `truncation`.

    **Returns:** the filter, and its `Report` with the errors of ridge regression and of persistence
    on the same stretches. The filter was chosen on these stretches, the rivals were not: on new
    data its error is larger. The filter takes observations as they are. Cost: two minutes for 2 000
    pairs on two cores. While it chooses it learns from at most 1 000 pairs.

    **Raises:** `ValueError` for fewer than 50 steps, samples of other kinds, an unknown parameter.
    """
    estimators = ("pairs", "importance")
    if estimator is not None:
        check_estimator(estimator, Clipping(), *estimators)
        estimators = (estimator,)
    unknown = set(fixed) - set(RANGES)
    if unknown:
        raise ValueError(f"`{min(unknown)}` is not a parameter; fix any of {', '.join(RANGES)}.")
    triple = _checked(states, observations)
    total = size(triple[0])
    scale, chosen = coordinate_scale(triple[0]), None
    own = None if kernel_states is None else as_kernel(kernel_states)
    if kernel_observations is None:
        kernels: list[AbstractKernel] = (
            [own] if own is not None else [Gaussian(width * scale) for width in WIDTHS]
        )
        rows = spread(total, CHOOSING)
        chosen = choose_regression(kernels, *take(triple[:2], rows))
    folds = make_folds(states, observations, chosen)
    other = None if kernel_observations is None else as_kernel(kernel_observations)
    distance = median_heuristic(folds.codes[0]) if other is None else jnp.ones(())
    alone = regressions(folds, decode, distances).get(MEMORYLESS, np.inf)
    lost = jnp.asarray(np.mean(alone))
    settings = [
        _Setting(scale, distance, own, other, decode, name, lost=lost) for name in estimators
    ]
    fixed = {
        name: as_fraction(value, name) if name == "truncation" else as_positive(value, name)
        for name, value in fixed.items()
    }
    if own is not None:
        fixed["bandwidth_states"] = jnp.ones(())
    if other is not None:
        fixed["bandwidth_observations"] = jnp.ones(())
    # A move of one step should not always stay within a bandwidth.
    moves = distances(triple[0][None] / scale, triple[2][None] / scale)
    step = max(float(jnp.median(moves)) / 3, 1e-3)
    with progress_bar(TRIALS * len(settings) + REFINEMENTS + STEPS, progress) as bar:
        setting, values = _best(settings, folds, step, fixed, bar)
        values, alone = _tuned(setting, folds, values, fixed)
        bar.update(STEPS)
        setting = _with_rival(setting, folds, values, alone)
    warp = None
    if chosen is not None:
        rows = spread(total, MAPPED)
        warp = fit_discriminant_map(chosen, *take(triple[:2], rows))
    report = _report(setting, folds, values)
    return setting.fit(values, *triple, warp=warp), report


def _with_rival(setting: _Setting, folds: Fold, values: dict, alone: float) -> _Setting:
    """The best threshold of a `RivalFilter`, unless all of them make the held-out runs worse.

    Nor may it lose beliefs that started right: where states look alike, a rival from the marginal
    of the states is as likely as a belief that has seen more.
    """
    best, limit = setting, MARGIN * alone
    most = MARGIN * float(jnp.mean(_held_out(setting, folds, values)[1]))
    for threshold in THRESHOLDS:
        rival = eqx.tree_at(
            lambda s: s.threshold, setting, jnp.asarray(threshold), is_leaf=lambda x: x is None
        )
        found = score(rival, folds, values, limit)
        if found <= limit and jnp.mean(_held_out(rival, folds, values)[1]) <= most:
            best, limit = rival, found
    return best


def _tuned(setting: _Setting, folds: Fold, values: dict, fixed: dict) -> tuple[dict, float]:
    """Gradient descent on the held-out error, with a bandwidth for each coordinate.

    The values, and their score.
    """
    start = score(setting, folds, values)
    free = {name: v for name, v in values.items() if name not in (*fixed, "truncation")}
    if not free:
        return values, start
    if "bandwidth_observations" in free:
        shape = folds.codes.shape[2:]
        free["bandwidth_observations"] = jnp.full(shape, free["bandwidth_observations"])
    # One stretch a fold: a gradient costs four times the error.
    runs = (folds.truth, folds.queries, folds.redrawn, folds.wrong)
    one = eqx.tree_at(
        lambda f: (f.truth, f.queries, f.redrawn, f.wrong), folds, [x[:, :1] for x in runs]
    )
    loss = jax.tree_util.Partial(_loss, setting, one, values)
    try:
        found = tune(loss, free, OPTIMIZER, num_steps=STEPS, positive=lambda p: p, progress=False)
    except ValueError:  # in float32 a gradient may overflow
        return values, start
    tuned = {**values, **resolvable(found.parameters)}
    found_score = score(setting, folds, tuned, start)
    return (tuned, found_score) if found_score < start else (values, start)


def _loss(setting: _Setting, folds: Fold, values: dict, free: dict) -> Float[Array, ""]:
    """The score in one program, for gradients."""
    one = jax.checkpoint(lambda fold: _error(setting, fold, {**values, **free}))
    return jnp.mean(jax.lax.map(one, folds))


def _report(setting: _Setting, folds: Fold, values: dict) -> Report:
    right, _, wrong, weights = _held_out(setting, folds, values)
    seen = np.asarray(_observed(right.shape[-1]))

    def of_stretches(errors):
        return np.asarray(jnp.mean(errors[..., seen], axis=-1)).reshape(-1)

    truth = folds.truth
    kept = jnp.broadcast_to(truth[:, :, :1], truth.shape)
    errors = {
        "filter": of_stretches(right),
        **regressions(folds, setting.decode, lambda e, t: distances(e, t)[..., seen]),
        "persistence (first state kept)": of_stretches(jax.vmap(distances)(kept, truth)),
    }
    summary, notes = compared(errors)
    # A stretch that ends further off than nine in ten steps of the other run is still lost.
    limit = np.quantile(np.asarray(right), 0.9)
    ends = np.asarray(wrong[..., -max(1, wrong.shape[-1] // 10) :]).mean(-1)
    flat = truth.reshape(truth.shape[0], -1, *truth.shape[3:])
    temperature, held = calibrated(setting.kernel(values), folds.states, weights, flat)
    return Report(
        chosen={
            **{name: np.asarray(value) for name, value in values.items()},
            "estimator": setting.estimator,
            "rival": "none" if setting.threshold is None else np.asarray(setting.threshold),
        },
        errors=summary,
        recovered=float(np.mean(ends <= limit)),
        coverage=held,
        temperature=temperature,
        notes=("The filter was chosen on these stretches, its rivals were not.", *notes),
    )
