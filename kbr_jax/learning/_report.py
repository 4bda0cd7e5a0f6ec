"""What was chosen, how well it does on held-out data, and what rivals do."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import is_real
from .._numerics import HIGHEST, safe_sqrt
from .._typing import Array, Float, Points
from ..embedding import Embedding, credible_level
from ..kernels import AbstractKernel, Gaussian, Linear, median_heuristic
from ..rules import condition, fit_conditional
from ..tuning import calibrate, coverage
from ..tuning._calibration import LEVELS
from ._folds import WINDOW, spread
from ._maps import CHOOSING, left_out_residuals

#: Candidates of the rivals: bandwidths in medians of the distance, and ridges.
BANDWIDTHS, RIDGES = (0.2, 0.5, 1.0), (1e-5, 1e-4, 1e-3, 1e-2)
#: The rival without memory.
MEMORYLESS = "ridge regression, one observation"


class Report(eqx.Module):
    """How a model was chosen. `print(report)` is a table.

    - `chosen`: the parameters, by name.
    - `errors`: for the learned model and each rival the mean held-out error and its standard error
      over stretches.
    - `recovered`: the share of held-out stretches in which a filter comes back from a wrong belief,
      NaN for other models.
    - `coverage`: the share of true values inside credible regions of 50, 80 and 95 %, held out.
    - `temperature`: of these regions, see `calibrate`.
    - `notes`: what the numbers mean, in sentences.
    """

    chosen: dict[str, Any]
    errors: dict[str, tuple[float, float]]
    coverage: dict[float, float]
    notes: tuple[str, ...]
    recovered: float = float("nan")
    temperature: float = 1.0

    def __str__(self) -> str:
        lines = [f"{'held-out error':<38}mean      +-"]
        lines += [f"  {name:<36}{m:<9.4g} {s:.2g}" for name, (m, s) in self.errors.items()]
        if not np.isnan(self.recovered):
            share = f"{100 * self.recovered:.0f} % of stretches"
            lines.append(f"back from a wrong belief              {share}")
        if self.coverage:
            shares = ", ".join(f"{100 * u:g} %: {100 * c:.0f} %" for u, c in self.coverage.items())
            lines.append(f"regions hold the truth                {shares}")
        lines.append("chosen")
        lines += [f"  {name:<36}{_short(value)}" for name, value in self.chosen.items()]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__


def _short(value: Any) -> str:
    if not isinstance(value, (np.ndarray, jax.Array)):
        return str(value)
    numbers = np.asarray(value).reshape(-1)
    if np.ptp(numbers) == 0:
        return f"{float(numbers[0]):.3g}"
    return f"{numbers.min():.3g} to {numbers.max():.3g} ({numbers.size} numbers)"


def errors_of(estimates: Points, truth: Points) -> Float[Array, "w l"]:
    """Euclidean distances of estimates `[w, l, *shape]` from the truth."""
    squares = ((estimates - truth) ** 2).reshape(*truth.shape[:2], -1)
    return safe_sqrt(jnp.sum(squares, axis=-1))


def compared(
    errors: dict[str, np.ndarray], shares: np.ndarray | None = None
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Mean and standard error over stretches, and a sentence where a rival is as good.

    `errors` are means of stretches `[w]`, of the model first; `shares` of the stretches in the
    means, by default the same.
    """
    count = len(next(iter(errors.values())))
    share = np.full(count, 1 / count) if shares is None else np.asarray(shares, float)
    others = 1 - share @ share  # the share of the rest, where one holds all

    def average(values):
        mean = float(share @ values)
        spread = share**2 @ (values - mean) ** 2
        return mean, float(np.sqrt(spread / others)) if others > 1e-6 else np.nan

    summary = {name: average(values) for name, values in errors.items()}
    (own, values), *rivals = errors.items()
    notes = []
    for name, other in rivals:
        gain, margin = average(other - values)
        if gain < np.nan_to_num(margin):
            notes.append(f"As good or better than the {own} here: {name}.")
    return summary, notes


def calibrated(
    kernel: AbstractKernel, states: Points, weights: Array, truth: Points
) -> tuple[float, dict[float, float]]:
    """One temperature, and the coverage of regions; each fold with the temperature of the others.

    `states` `[k, n, ...]`, `weights` `[k, b, n]` and true states `[k, b, ...]` of k folds.
    """
    beliefs = [Embedding(kernel, *pair) for pair in zip(states, weights, strict=True)]
    logs = np.asarray([np.log(calibrate(*pair)) for pair in zip(beliefs, truth, strict=True)])
    others = (logs.sum() - logs) / max(len(logs) - 1, 1)
    levels = [
        credible_level(belief, points, temperature=np.exp(other))
        for belief, points, other in zip(beliefs, truth, others, strict=True)
    ]
    held = np.asarray(coverage(jnp.concatenate(levels)))
    return float(np.exp(logs.mean())), dict(zip(LEVELS, held.tolist(), strict=True))


def regressions(folds: Any, decode: Callable[[Embedding], Any] | None) -> dict[str, Array]:
    """Held-out errors `[k, w, l]` of ridge regression on one observation and on a window.

    Bandwidth and ridge have the least leave-out error on training pairs of the first fold.
    """
    found = {}
    for name, train, query in (
        (MEMORYLESS, folds.seen(folds.codes), folds.seen(folds.queries)),
        (f"ridge regression, last {WINDOW}", folds.history, folds.query_history),
    ):
        if not is_real(train):
            continue
        kernel, ridge = _choose_regression(train[0], folds.states[0])

        def of_fold(fold, kernel=kernel, ridge=ridge):
            x, states, z, truth = fold
            model = fit_conditional(kernel, Linear(), x, states, regularizer=ridge)
            estimates = _decoded(condition(model, z.reshape(-1, *z.shape[2:])), decode)
            return errors_of(estimates.reshape(truth.shape), truth)

        found[name] = jax.lax.map(of_fold, (train, folds.states, query, folds.truth))
    return found


def _decoded(beliefs: Embedding, decode: Callable[[Embedding], Any] | None) -> Array:
    """Estimates; what the weights lack to the sum 1 is on all points alike."""
    missing = 1 - jnp.sum(beliefs.weights, axis=-1, keepdims=True)
    weights = beliefs.weights + missing / beliefs.weights.shape[-1]
    beliefs = Embedding(beliefs.kernel, beliefs.points, weights)
    if decode is not None:
        return jax.vmap(lambda w: decode(Embedding(beliefs.kernel, beliefs.points, w)))(
            beliefs.weights
        )
    return jnp.tensordot(beliefs.weights, beliefs.points, 1, precision=HIGHEST)


def _choose_regression(x: Array, y: Points) -> tuple[AbstractKernel, float]:
    rows = y.reshape(y.shape[0], -1)
    rows = rows - jnp.mean(rows, axis=0)
    distance = median_heuristic(x)

    few = spread(len(rows), CHOOSING)

    def error(pair):
        kernel = Gaussian(pair[0] * distance)
        residuals = left_out_residuals(kernel, jnp.asarray(pair[1]), x[few], rows[few])
        return float(jnp.mean(residuals**2))

    width, ridge = min(((h, e) for h in BANDWIDTHS for e in RIDGES), key=error)
    return Gaussian(width * distance), ridge
