r"""Forecasts of real y at a new x: conditional embeddings of a location, a scale and a shape."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_points, check_finite, check_same_size, is_real, size
from .._numerics import evenly, matmul, one_program
from .._typing import Array, Float, Point, Points, with_scalars
from ..embedding import Embedding, cdf, energy_score
from ..kernels import coordinate_scale
from ..rules import ConditionalEmbedding
from ..tuning import coverage, fit_bandwidth, leave_out_residuals
from ..tuning._calibration import LEVELS
from ..tuning._leave_out import restored_left_out, restored_weights
from ._conditional import PAIRS, central_levels, error_note, learn_conditional
from ._report import Report, compared

#: The scale at a point is at least this share of its mean over the sample: regressions of
#: positive numbers can go below 0.
LEAST_SCALE = 0.05
#: The two forms, as reports name them.
MOVED, PLAIN = "location, scale and shape", "conditional embedding"


class Forecast(eqx.Module):
    r"""P(Y | X = x) as a function of x; made by `learn_forecast`.

    `forecast(x)` embeds it at one x. With a `scale` and a `shape` it stands on the atoms
    $m(x) + s(x) (e_i - \bar e(x))$, with the weights $w_i(x)$ that `shape` gives to the
    standardized residuals $e_i$, of mean $\bar e(x) = \sum_i w_i(x) e_i$. Where no pair is near x,
    the mass that `location` lacks is on $m(x) + y_i - \bar y$: nothing is known there but the
    marginal of y. Without a `scale` it stands on the training y.

    - `location`, `scale`, `shape`: conditional embeddings of y, of $|y - m(x)|$ and of
      $e = (y - m(x)) / s(x)$ given x.
    - `bandwidth`: of `density` and `log_score`, chosen on held-out pairs.
    """

    location: ConditionalEmbedding
    scale: ConditionalEmbedding | None
    shape: ConditionalEmbedding | None
    bandwidth: Float[Array, ""]

    __repr__ = with_scalars

    def __call__(self, x: Point) -> Embedding:
        """Embed P(Y | X = x), weights of sum 1. Cost O(n^2) exact, O(n r) with landmarks."""
        y, kernel = self.location.y, self.location.kernel_y
        own, far = restored_weights(self.location, x)
        whole = own + far
        if self.scale is None or self.shape is None:
            return Embedding(kernel, y, whole)
        size_ = _average(jnp.add(*restored_weights(self.scale, x)), self.scale.y)
        size_ = jnp.maximum(size_, LEAST_SCALE * jnp.mean(self.scale.y, axis=0))
        shares = jnp.add(*restored_weights(self.shape, x))
        center = _average(whole, y)
        moved = center + size_ * (self.shape.y - _average(shares, self.shape.y))
        elsewhere = center + y - _average(self.location.features_x.uniform, y)
        weights = jnp.concatenate([jnp.sum(own) * shares, far])
        return Embedding(kernel, jnp.concatenate([moved, elsewhere]), weights)


def _average(weights: Float[Array, "*b n"], values: Float[Array, "n *d"]) -> Float[Array, "..."]:
    found = matmul(weights, values.reshape(len(values), -1).astype(weights.dtype))
    return found.reshape(*weights.shape[:-1], *values.shape[1:])


def learn_forecast(
    x: Points, y: Float[Array, "n *d"], *, progress: bool = True
) -> tuple[Forecast, Report]:
    r"""Learn P(Y | X) in a form that one can read: means, intervals, quantiles, densities.

    A plain conditional embedding keeps the training y where they are: within its bandwidth of x the
    mean moves, and the forecast is too wide by that. Here three conditional embeddings are learned
    by `learn_conditional`: of y, of the size of its residuals, and of the standardized residuals.
    The forecast moves and stretches the residuals (heteroscedastic location and scale, as Akritas
    and Van Keilegom 2001), and their weights still change with x. Near the data its mean is
    that of the first model. The plain form is kept where its held-out energy score is better, and
    where y repeats its values. Held-out forecasts are those that `Forecast` gives: where no other
    pair is near, the marginal of y.

    **Arguments:**

    - `x` `[n, ...]`, `y` `[n]` or `[n, d]` real: pairs that are independent of each other given x.
    - `progress`: bars, where tqdm is installed.

    **Returns:** a `Forecast`, and a `Report` with the held-out energy scores of both forms and of
    the rivals of `learn_conditional`. Every choice is made by exact leave-one-out. Cost three times
    that of `learn_conditional`, and O(m n^2) for scores of m <= 1 000 held-out pairs.

    **Raises:** `ValueError` as `learn_conditional`, and for y that are not real.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> x = jnp.linspace(-3, 3, 60)[:, None]
    >>> y = x[:, 0] + (1 + jnp.abs(x[:, 0])) * jax.random.normal(jax.random.key(0), (60,)) / 5
    >>> forecast, report = kbr.learning.learn_forecast(x, y, progress=False)
    >>> low, high = kbr.credible_interval(forecast(jnp.array([2.0])), 0.9)
    >>> bool(low < 2 < high)
    True
    """
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_same_size(x, "x", y, "y")
    if not is_real(y):
        raise ValueError("`y` must be one real array; for labels use `learn_conditional`.")
    reports = []

    def fit(values):
        model, report = learn_conditional(x, values, progress=progress)
        reports.append(report)
        return model

    rows = jnp.asarray(evenly(size(x), PAIRS))
    unit = coordinate_scale(y).astype(y.dtype)
    if repeats(y):
        forecast, held = Forecast(fit(y), None, None, jnp.ones((), y.dtype)), {}
    else:
        forecast = located_forecast(fit, y)
        held = {MOVED: _moved(forecast, rows, unit)}
    held[PLAIN] = _plain(forecast.location, rows, unit)
    ordered = sorted(held, key=lambda form: float(jnp.mean(held[form].scores)))
    best = held[ordered[0]]
    kept = (forecast.scale, forecast.shape) if ordered[0] == MOVED else (None, None)
    bandwidth = fit_bandwidth(best.forecasts, best.happened)
    forecast = Forecast(forecast.location, *kept, bandwidth)
    scores = {form: np.asarray(held[form].scores) for form in ordered}
    report = _report(reports[0], scores, best.levels, y)
    if size(x) > PAIRS:
        seen = f"The rivals have seen {PAIRS} pairs, the forecast {size(x)}."
        report = dataclasses.replace(report, notes=(*report.notes, seen))
    return forecast, report


def repeats(y: Float[Array, "n *d"]) -> bool:
    """Whether a coordinate takes fewer than n / 2 values: moved atoms would miss them all."""
    columns = np.asarray(y).reshape(len(y), -1).T
    return min(len(np.unique(column)) for column in columns) < len(y) / 2


class _HeldOut(NamedTuple):
    """Forecasts of pairs left out, what happened, its scores and its levels `[m, d]`."""

    forecasts: Embedding
    happened: Array
    scores: Float[Array, " m"]
    levels: np.ndarray


def _plain(model: ConditionalEmbedding, rows: Array, unit: Array) -> _HeldOut:
    weights, y = jnp.add(*restored_left_out(model, rows)), model.y
    scores = energy_score(Embedding(model.kernel_y, y / unit, weights), y[rows] / unit)
    values = y.reshape(len(y), -1)
    levels = central_levels(weights, values, values[rows])
    return _HeldOut(model.embed_y(weights), y[rows], scores, np.asarray(levels))


def _moved(forecast: Forecast, rows: Array, unit: Array) -> _HeldOut:
    """In units of the residuals: what happened is one, and what centering takes away."""
    location, scale, shape = forecast.location, forecast.scale, forecast.shape
    assert scale is not None and shape is not None
    own, far = restored_left_out(location, rows)
    shares = jnp.add(*restored_left_out(shape, rows))
    sizes = _average(jnp.add(*restored_left_out(scale, rows)), scale.y)
    sizes = jnp.maximum(sizes, LEAST_SCALE * jnp.mean(scale.y, axis=0))
    residuals = location.y[rows] - _average(own + far, location.y)
    aim = residuals / sizes + _average(shares, shape.y)
    near = jnp.sum(own, axis=1, keepdims=True) * shares
    others = (jnp.sum(location.y, axis=0) - location.y[rows]) / (len(location.y) - 1)
    scores, levels = _moved_scores(forecast, unit, (near, far, sizes, residuals + others, aim))
    return _HeldOut(shape.embed_y(shares), aim, scores, np.asarray(levels))


def located_forecast(
    fit: Callable[[Array], ConditionalEmbedding], y: Float[Array, "n *d"]
) -> Forecast:
    """The moved form from three fits.

    `fit` fits a model to values at the training x.
    """
    location = fit(y)
    residuals = leave_out_residuals(location)
    scale = fit(jnp.abs(residuals))
    shape = fit(_standardized(residuals, leave_out_residuals(scale), y))
    return Forecast(location, scale, shape, jnp.ones((), y.dtype))


@one_program
def _standardized(
    residuals: Float[Array, "n *d"], of_sizes: Float[Array, "n *d"], y: Float[Array, "n *d"]
) -> Float[Array, "n *d"]:
    """Residuals in units of their size as the other pairs expect it."""
    sizes = jnp.abs(residuals)
    # Where y is exactly a function of x the residuals are rounding.
    info = jnp.finfo(y.dtype)
    tiny = float(info.eps) * jnp.max(jnp.abs(y), axis=0) + float(info.tiny)
    expected = jnp.maximum(sizes - of_sizes, LEAST_SCALE * jnp.mean(sizes, axis=0) + tiny)
    return residuals / expected


@eqx.filter_jit
def _moved_scores(
    forecast: Forecast, unit: Array, rows: tuple
) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
    """Energy scores and levels of held-out y, each under its own `Forecast`."""
    y, shape = forecast.location.y, forecast.shape
    assert shape is not None

    def one(row):
        near, far, scale, middle, aim = row
        # Differences from what happened; the mass far from all pairs is on the marginal.
        atoms = jnp.concatenate([scale * (shape.y - aim), y - middle]) / unit
        weights = jnp.concatenate([near, far])
        found = Embedding(shape.kernel_y, atoms, weights)
        zero = jnp.zeros_like(aim)
        columns = atoms.reshape(len(atoms), -1)
        below = jax.vmap(lambda c: cdf(Embedding(shape.kernel_y, c, weights), 0.0), 1)(columns)
        return energy_score(found, zero), jnp.abs(2 * below - 1)

    return lax.map(one, rows)


def _report(plain: Report, scores: dict[str, np.ndarray], levels: np.ndarray, y: Points) -> Report:
    """Scores of both forms, the better one first, and the coverage of that one."""
    summary, notes = compared(scores)
    rivals = {name: value for name, value in plain.errors.items() if name not in summary}
    covered = np.asarray(coverage(jnp.asarray(levels.reshape(-1))))
    held = dict(zip(LEVELS, covered.tolist(), strict=True))
    form, (own, _) = next(iter(summary.items()))
    notes += [
        f"As good or better than the {form} here: {name}."
        for name, (mean, error) in rivals.items()
        if mean - own < error
    ]
    return Report(
        chosen={"form": form, **plain.chosen},
        errors={**summary, **rivals},
        coverage=held,
        notes=(
            error_note("left out", "y", y),
            *notes,
        ),
    )
