"""A search over ranges of parameters: first everywhere, then near the best."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._typing import Array, Points
from .._warnings import warn
from ..tuning import TuneResult, tune
from ..tuning._progress import Progress

Option = TypeVar("Option")
#: Side of the box that is searched near the best, as a share of the ranges' logarithms.
_NEAR = 0.4


def quasi_random(count: int, dimension: int) -> np.ndarray:
    """Points of the additive recurrence of the generalized golden ratio, in the unit cube."""
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (dimension + 1))
    steps = ratio ** -np.arange(1.0, dimension + 1)
    return (0.5 + np.arange(1, count + 1)[:, None] * steps) % 1


def resolvable(values: dict[str, Array]) -> dict[str, Array]:
    """The values, with regularizers that the dtype can hold."""
    return {
        name: jnp.maximum(v, 2 * jnp.finfo(v.dtype).eps) if name.endswith("regularizer") else v
        for name, v in values.items()
    }


def descend(
    loss: Callable[[dict], Any],
    start: dict[str, Array],
    optimizer: optax.GradientTransformation,
    num_steps: int,
) -> dict[str, Array]:
    """Tune positive values.

    Those that the loss does not depend on stay, without a warning; all stay where the gradient is
    not finite, which may overflow in float32.
    """
    found = _tune(loss, start, optimizer, num_steps)
    return start if found is None else resolvable(found.parameters)


def steps_that_help(
    folds: Sequence[tuple[Callable[[dict], Any], Callable[[dict], Any]]],
    start: dict[str, Array],
    optimizer: optax.GradientTransformation,
    num_steps: int,
) -> int:
    """How many steps down the first losses lower the second ones most.

    The first of `num_steps` evaluates the start, as in `descend`: 0 to `num_steps` - 1 move.
    """
    total = np.zeros(num_steps)
    for loss, validation in folds:
        found = _tune(loss, start, optimizer, num_steps, validation)
        if found is None:
            return 0
        total += np.asarray(found.history.validation)
    return int(np.argmin(np.where(np.isfinite(total), total, np.inf)))


def _tune(
    loss: Callable[[dict], Any],
    start: dict[str, Array],
    optimizer: optax.GradientTransformation,
    num_steps: int,
    validation: Callable[[dict], Any] | None = None,
) -> TuneResult | None:
    """None where a loss or the gradient is not finite at the start."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss does not depend on")
        try:
            return tune(
                loss,
                start,
                optimizer,
                num_steps=num_steps,
                positive=lambda p: p,
                validation=validation,
                progress=False,
            )
        except ValueError as error:
            if "not finite" not in str(error):
                raise
            return None


def warn_of_constants(**samples: Points) -> None:
    """Warn where all points are equal."""
    for name, points in samples.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(points):
            if np.all(np.asarray(leaf) == np.asarray(leaf[0])):
                part = f"{name}{jax.tree_util.keystr(path)}"
                warn(f"All points of `{part}` are equal: nothing can be learned from them.")


def search(
    score: Callable[[Option, dict[str, Array], float], Any],
    options: Sequence[Option],
    ranges: dict[str, tuple[float, float]],
    trials: int,
    refinements: int,
    bar: Progress,
) -> tuple[Option, dict[str, Array]]:
    """The option and the values with the least score.

    Of each option `trials` points in the ranges are tried, evenly spread in logarithms, then
    `refinements` points around the best so far. A point may leave the ranges. `score` is told the
    least score so far, and need not tell by how much a point is worse.
    """
    names = list(ranges)
    low, high = (np.log([ranges[name][end] for name in names]) for end in (0, 1))
    tried: list[tuple[float, Option, np.ndarray]] = []

    def values_of(point):
        found = {name: jnp.asarray(v) for name, v in zip(names, np.exp(point), strict=True)}
        return resolvable(found)

    def best():
        return min(tried, key=lambda one: one[0])

    def attempt(option, point):
        value = float(score(option, values_of(point), best()[0] if tried else np.inf))
        tried.append((value if np.isfinite(value) else np.inf, option, point))
        bar.update(1)
        bar.show({"error": f"{best()[0]:.4g}"})

    for unit in quasi_random(trials, len(names)):
        for option in options:
            attempt(option, low + unit * (high - low))
    for unit in quasi_random(refinements, len(names)):
        _, option, point = best()
        attempt(option, point + _NEAR * (unit - 0.5) * (high - low))
    value, option, point = best()
    if not np.isfinite(value):
        raise ValueError("No candidate gives a finite error. Look at the data: is it constant?")
    return option, values_of(point)
