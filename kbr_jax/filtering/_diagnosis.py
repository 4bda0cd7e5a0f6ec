"""What went wrong in a run, in words that name the cause."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._numerics import safe_divide
from ._base import AbstractFilter

#: A prior on fewer points than this cannot follow a state, and a share of steps below it is said.
FEW_POINTS, SHARE = 3.0, 0.1
#: A value this many times below the typical one of the run, for this many steps, is said.
DROP, STEPS = 10.0, 10
#: Mass of beliefs that is far from 1.
MASSES = (0.2, 5.0)


class Diagnosis(eqx.Module):
    r"""Numbers of a run by which a filter fails. `print(diagnosis)` says what they mean.

    - `effective_size` `[T]`: of the prior of each step, $1 / \sum_i p_i^2$ with the clipped and
      normalized weights p; NaN for moments without cells, whose weights are not those of points.
    - `mass` `[T]`: sum of the weights of each belief. Beliefs are read as if it were 1.
    - `lost`: first and last step of the longest stretch of observed steps whose predictive
      value is less than a tenth of the run's upper quartile; `(0, 0)` for none.
    - `notes`: sentences, none where nothing is wrong.
    """

    effective_size: np.ndarray
    mass: np.ndarray
    lost: tuple[int, int]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.notes) or "No problem found in these numbers."

    __repr__ = __str__


def diagnose(filt: AbstractFilter, run: Any) -> Any:
    """Look at a run for what makes filters fail, and name causes and remedies.

    It looks for priors on few points, long stretches of unexpected observations, observations
    beyond the reach of the kernel, and beliefs of a mass far from 1.

    **Arguments:** `run`, what `run_filter` returned. It is not for use inside `jit`.

    **Returns:** a `Diagnosis`; a list for a list of runs. Cost O(T n). **Raises:** `ValueError` for
    a single step, or a batch of `vmap`.
    """
    if isinstance(run, list):
        return [diagnose(filt, one) for one in run]
    if jnp.ndim(run.predictive_value) != 1:
        raise ValueError("Diagnose the run of one sequence; give several as a list.")
    emission: Any = getattr(getattr(filt, "base", filt), "emission", None)
    if emission is None:
        prior = jnp.maximum(run.predicted, 0)
        size = safe_divide(jnp.sum(prior, axis=1) ** 2, jnp.sum(prior**2, axis=1))
        mass = jnp.sum(filt.embed(run.weights).weights, axis=1)
    else:
        size, mass = emission.effective_size(run.predicted), emission.total(run.weights)
    size, mass = np.asarray(size), np.asarray(mass)
    values = np.asarray(run.predictive_value)
    lost = _longest(values)
    notes: list[Any] = [
        _few_points(size),
        _unexpected(values, lost),
        _unreachable(values) if emission is None or emission.learned else None,
        None if getattr(filt, "estimator", "") == "song2009" else _far_from_one(mass),
    ]
    return Diagnosis(size, mass, lost, tuple(note for note in notes if note))


def _longest(values: np.ndarray) -> tuple[int, int]:
    """The longest stretch of low values; missing observations neither count nor end it."""
    seen = np.flatnonzero(~np.isnan(values))
    if not seen.size:
        return 0, 0
    # A density may be infinite, and then no quantile is a number.
    finite = np.minimum(values[seen], np.finfo(values.dtype).max)
    low = finite < np.quantile(finite, 0.75) / DROP
    ends = np.flatnonzero(np.diff(np.concatenate([[0], low, [0]])))
    stretches = list(zip(ends[::2], ends[1::2], strict=True))
    if not stretches:
        return 0, 0
    start, stop = max(stretches, key=lambda pair: pair[1] - pair[0])
    return int(seen[start]), int(seen[stop - 1])


def _few_points(size: np.ndarray) -> str | None:
    share = float(np.mean(size < FEW_POINTS))
    if share < SHARE:
        return None
    return (
        f"In {share:.0%} of the steps the prior stands on fewer than {FEW_POINTS:.0f} points: take "
        f"a wider kernel of the states, a larger regularizer, less truncation, or more data."
    )


def _unexpected(values: np.ndarray, lost: tuple[int, int]) -> str | None:
    steps = int(np.sum(~np.isnan(values[lost[0] : lost[1] + 1])))
    if lost[1] == lost[0] or steps < STEPS:
        return None
    return (
        f"From step {lost[0]} to {lost[1]} the observations are {DROP:.0f} times less expected "
        f"than elsewhere: the belief may be wrong there. A `RivalFilter` leaves such a belief; a "
        f"wider kernel of the observations recovers sooner."
    )


def _unreachable(values: np.ndarray) -> str | None:
    count = int(np.sum(values == 0))
    if count == 0:
        return None
    return (
        f"{count} observations have likelihood 0 and were taken as missing. Either they are beyond "
        f"the reach of the kernel (unlike all in training, or its bandwidth is too small), or the "
        f"belief excludes them, and a `RivalFilter` or a larger regularizer leaves it."
    )


def _far_from_one(mass: np.ndarray) -> str | None:
    far = ~((mass >= MASSES[0]) & (mass <= MASSES[1]))
    if not far.any():
        return None
    step = int(np.argmax(far))
    return (
        f"The weights of {int(far.sum())} beliefs sum to far from 1, first at step {step} "
        f"({mass[step]:.2g}). Where these are few, their observations are far from all in "
        f"training, and the beliefs are not to be trusted: take a wider kernel of the observations "
        f"or more data. Where they are many, the regularizer of Bayes' rule is too large."
    )
