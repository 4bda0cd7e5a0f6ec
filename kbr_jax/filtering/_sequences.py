"""Training sequences as triples, and delay embeddings of observations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_arrays,
    as_count,
    as_mask,
    as_points,
    check_alike,
    check_finite,
    check_same_size,
    in_one_precision,
    is_concrete,
    like,
    size,
    stacked,
    take,
    without_padding,
)
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..kernels import AbstractKernel
from ..kernels._base import check_where


def as_transitions(
    states: Points,
    observations: Points,
    successors: Points | None,
    lag: int,
    mask: ArrayLike | None = None,
) -> tuple[Points, Points, Points, Bool[Array, " n"] | None]:
    """Checked training triples `[n, ...]`: states, observations made `lag` steps later, and
    successors; and their mask.

    From one sequence of T observations with T or T + 1 states (the last may be unobserved), or as
    given with `successors`. A triple of a sequence counts if the mask `[number of states]` is True
    at its state and at its successor. Where there is a state more than observations, the last true
    one has none.
    """
    if isinstance(states, list) or isinstance(observations, list):
        states, observations, successors = _of_trajectories(
            states, observations, successors, lag, mask
        )
        return states, observations, successors, None
    if successors is None:
        _check_one_sequence(states, observations)
    states, observations = as_points(states, "states"), as_points(observations, "observations")
    if mask is not None:
        mask = as_mask(mask, size(states), "mask")
    if successors is not None:
        successors = as_points(successors, "successors")
        check_alike(successors, "successors", states, "states")
        check_same_size(successors, "successors", states, "states")
        check_same_size(observations, "observations", states, "states")
    else:
        count = min(size(states) - 1, size(observations) - lag)
        if size(states) - size(observations) not in (0, 1) or count < 1:
            raise ValueError(
                f"`states` has {size(states)} points and `observations` {size(observations)}; a "
                f"training sequence needs T "
                f"observations with T or T + 1 states, at least two states and {1 + lag} "
                f"observations. For separate "
                "transitions pass `successors`."
            )
        if mask is not None:
            unseen = lag if size(states) > size(observations) else 0
            mask = mask[:count] & mask[1 : count + 1] & mask[1 + unseen : count + 1 + unseen]
        successors = take(states, slice(1, count + 1))
        states, observations = (
            take(states, slice(count)),
            take(observations, slice(lag, lag + count)),
        )
    states, observations, successors = in_one_precision(states, observations, successors)
    states, observations, successors = (
        check_finite(without_padding(points, mask), name)
        for points, name in (
            (states, "states"),
            (observations, "observations"),
            (successors, "successors"),
        )
    )
    return states, observations, successors, mask


def _of_trajectories(
    states: Any, observations: Any, successors: Any, lag: int, mask: Any
) -> tuple[Points, Points, Points]:
    """The triples of several trajectories, none of them across two."""
    check_lists(states, "states", observations, "observations")
    if successors is not None or mask is not None:
        raise ValueError(
            "Lists are whole trajectories: give no `successors` and no `mask` with them."
        )
    parts = []
    for index, pair in enumerate(zip(states, observations, strict=True)):
        try:
            parts.append(as_transitions(*pair, None, lag)[:3])
        except ValueError as error:
            raise ValueError(f"Trajectory {index}: {error}") from None
        for one, first, name in zip(parts[-1], parts[0], ("states", "observations"), strict=False):
            check_alike(one, f"{name}[{index}]", first, f"{name}[0]")
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def as_known(
    observations: Any, observed: Any, controls: Any, many: bool = False
) -> tuple[Any, Any]:
    """Mask and inputs, as arrays where they are of one sequence; a `ValueError` for NaN.

    Observations may be NaN where they are not observed.
    """
    if not many:
        observed = None if observed is None else as_arrays(observed, "observed")
        controls = None if controls is None else as_points(controls, "controls")
    _check_numbers(observations, observed, "observations", "mark missing ones False in `observed`")
    _check_numbers(controls, None, "controls", "no input may be missing")
    return observed, controls


def _check_numbers(points: Any, observed: Any, name: str, cure: str) -> None:
    if isinstance(points, list):
        masks = observed if isinstance(observed, list) else [observed] * len(points)
        for index, (part, mask) in enumerate(zip(points, masks, strict=False)):
            _check_numbers(part, mask, f"{name}[{index}]", cure)
    elif all(map(is_concrete, jax.tree.leaves((points, observed)))):
        for leaf in jax.tree.leaves(points):
            rows = np.asarray(leaf)
            if rows.size and rows.ndim and np.issubdtype(rows.dtype, np.floating):
                bad = np.isnan(rows).reshape(len(rows), -1).any(axis=1)
                if observed is not None and np.shape(observed) == bad.shape:
                    bad = bad & np.asarray(observed, bool)
                if bad.any():
                    raise ValueError(f"`{name}` is NaN at step {int(np.argmax(bad))}: {cure}.")


def check_values(
    kernels: tuple[AbstractKernel | None, AbstractKernel | None],
    observations: Any,
    observed: Any,
    controls: Any,
) -> None:
    """Raise a `ValueError` for values outside the domains of the kernels.

    A program checks kinds while it is traced. Values can be read only outside of it.
    """
    _check_domain(kernels[0], observations, observed, "observations")
    _check_domain(kernels[1], controls, None, "controls")


def _check_domain(kernel: AbstractKernel | None, points: Any, observed: Any, name: str) -> None:
    if isinstance(points, list):
        masks = [None] * len(points) if observed is None else observed
        for index, (part, mask) in enumerate(zip(points, masks, strict=True)):
            _check_domain(kernel, part, mask, f"{name}[{index}]")
        return
    if kernel is not None and points is not None:
        check_where(kernel, as_points(points, name), name, observed)


def check_lists(first: Any, first_name: str, second: Any, second_name: str) -> None:
    """Raise a `ValueError` unless both are lists of as many trajectories."""
    for part, name in ((first, first_name), (second, second_name)):
        if not isinstance(part, list) or not part:
            raise ValueError(
                f"`{name}` must be a list of at least one trajectory, as the other arguments are."
            )
        if isinstance(part[0], (list, int, float)):
            raise ValueError(
                f"`{name}` is a list of numbers or lists, and a list stands for trajectories: give "
                f"one sequence as `np.asarray({name})`, each of several as an array."
            )
    if len(first) != len(second):
        raise ValueError(
            f"`{first_name}` holds {len(first)} trajectories and `{second_name}` {len(second)}."
        )


def transitions(states: Any, observations: Any) -> tuple[Points, Points, Points]:
    """Turn trajectories into triples of state, observation and next state.

    They are what `fit_conditional` and `collect_moments` need for the two models of a filter.

    **Arguments:** `states`, `observations`: one sequence `[T, ...]` each, or lists of them, of any
    lengths. A sequence has as many states as observations or one more.

    **Returns:** states, observations and successors `[n, ...]`. No triple has its two states in
    different trajectories. Cost O(n). **Raises:** `ValueError` for sequences of other lengths.
    """
    return as_transitions(states, observations, None, 0)[:3]


def _check_one_sequence(states: Points, observations: Points) -> None:
    """Raise a `ValueError` for several trajectories given as if they were one sequence."""
    if not all(isinstance(part, (jax.Array, np.ndarray)) for part in (states, observations)):
        return
    first, second = np.shape(states), np.shape(observations)
    # States or observations that are square matrices.
    square = any(len(shape) == 3 and shape[1] == shape[2] for shape in (first, second))
    if len(first) >= 3 and len(second) >= 3 and first[0] == second[0] and not square:
        if second[1] > 1 and first[1] - second[1] in (0, 1):
            raise ValueError(
                f"`states` has shape {list(first)}: it holds several trajectories. Pass lists of "
                "them, `list(states)` and `list(observations)`. Of one trajectory of matrices make "
                "rows, `states.reshape(len(states), -1)`."
            )


def stretches(states: Any, observations: Any) -> tuple[list[Points], list[Points]]:
    """Cut recordings with gaps into stretches without NaN, to train a filter on.

    **Arguments:** `states` and `observations`, one recording `[T, ...]` each (states may have one
    more), or lists of recordings. NaN in either is a gap.

    **Returns:** lists of states and of observations, with as many steps each. Stretches of one step
    hold no transition and are left out. Cost O(T).

    **Raises:** `ValueError` for recordings of different lengths, and where no stretch is left.
    """
    if not isinstance(states, list) and not isinstance(observations, list):
        states, observations = [states], [observations]
    check_lists(states, "states", observations, "observations")
    found: list[tuple[Points, Points]] = []
    for index, (hidden, seen) in enumerate(zip(states, observations, strict=True)):
        names = f"states[{index}]", f"observations[{index}]"
        hidden, seen = as_points(hidden, names[0]), as_points(seen, names[1])
        if size(hidden) not in (size(seen), size(seen) + 1):
            raise ValueError(
                f"`{names[0]}` has {size(hidden)} points and `{names[1]}` {size(seen)}: a "
                f"recording of T observations needs T or T + 1 states."
            )
        count = size(seen)
        known = _without_nan(hidden)[:count] & _without_nan(seen)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], known, [0]])))
        runs = [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a > 1]
        found += [(take(hidden, rows), take(seen, rows)) for rows in runs]
    if not found:
        raise ValueError("No two steps in a row are free of NaN: there is nothing to train on.")
    return [one for one, _ in found], [one for _, one in found]


def _without_nan(points: Points) -> np.ndarray:
    known = np.ones(size(points), bool)
    for leaf in jax.tree.leaves(points):
        rows = np.asarray(leaf).reshape(size(points), -1)
        known &= np.isfinite(rows).all(axis=1)
    return known


def delay_embedding(observations: Any, length: int, *, observed: Any = None) -> Any:
    r"""The last few observations at each time as one vector $(o_t, o_{t-1}, \dots, o_{t-L+1})$, for
    filters and regressions.

    With a Gaussian kernel of one bandwidth for each lag, `Gaussian(jnp.repeat(h, d))` for h
    `[length]`, the weight of each lag is learned: a wide bandwidth leaves its lag out. Windows
    overlap, so Bayes' rule counts old observations twice if the dynamics already carry them: longer
    windows want a larger `posterior_regularizer`.

    **Arguments:**

    - `observations`: one sequence `[T, d]` (or `[T]`, `[T, ...]`, which is flattened), or a list of
      them.
    - `length`: L >= 1 (static). Before the start the first observation is repeated.
    - `observed`: mask `[T]`; a missing observation is replaced by the last one before it (the first
      one there is, at the start), whatever it holds.

    **Returns:** `[T, length * d]`, newest first, or a list of these. Cost O(T L d).

    **Raises:** `ValueError` for an array without a time axis, or a `length` below 1.
    """
    if isinstance(observations, list):
        masks = [None] * len(observations) if observed is None else observed
        check_lists(masks, "observed", observations, "observations")
        pairs = zip(observations, masks, strict=True)
        return [delay_embedding(one, length, observed=mask) for one, mask in pairs]
    observations = as_arrays(observations, "observations")
    if not hasattr(observations, "dtype"):
        raise ValueError("`observations` must be one array, not parts: join their columns first.")
    observations = jnp.asarray(observations)
    if observations.ndim == 0 or observations.shape[0] == 0:
        raise ValueError("`observations` must be a sequence [T, d] with at least one entry.")
    mask = as_mask(observed, observations.shape[0], "observed")
    return _delayed(observations, mask, as_count(length, "length"))


@functools.partial(jax.jit, static_argnames="length")
def _delayed(
    observations: Float[Array, "T *d"], mask: Bool[Array, " T"], length: int
) -> Float[Array, "T c"]:
    steps = jnp.arange(observations.shape[0])
    seen = jnp.where(mask, steps, -1)
    latest = jnp.maximum(jnp.maximum.accumulate(seen), jnp.argmax(mask))
    lagged = jnp.maximum(steps[:, None] - jnp.arange(length), 0)
    rows = observations.reshape(observations.shape[0], -1)
    return rows[latest[lagged]].reshape(observations.shape[0], -1)


def padded_sequences(
    observations: list, controls: list | None, observed: list | None
) -> tuple[tuple[Points, Points | None, Array, Array], np.ndarray]:
    """Sequences of one length: observations, inputs, masks, and False for padded steps."""
    check_lists(observations, "observations", observations, "observations")
    parts, lengths = stacked(observations, "observations")
    going = np.arange(lengths.max()) < lengths[:, None]
    if controls is not None:
        check_lists(controls, "controls", observations, "observations")
        controls, others = stacked(controls, "controls")
        if not np.array_equal(others, lengths):
            raise ValueError("Each of `controls` must be as long as its `observations`.")
    mask = going
    if observed is not None:
        check_lists(observed, "observed", observations, "observations")
        masks = [
            as_mask(m, n, f"observed[{i}]")
            for i, (m, n) in enumerate(zip(observed, lengths.tolist(), strict=True))
        ]
        mask = jnp.stack([jnp.pad(m, (0, lengths.max() - m.shape[0])) for m in masks])
    return (parts, controls, jnp.asarray(mask), jnp.asarray(going)), lengths


def checked_controls(
    controls: Points | None, reference: Points, reference_name: str, count: int
) -> Points:
    """Inputs of the kind and precision of the reference, one for each step."""
    if controls is None:
        raise ValueError("The transition of this filter needs `controls`, one for each step.")
    controls = as_points(controls, "controls")
    check_alike(controls, "controls", reference, reference_name)
    if size(controls) != count:
        raise ValueError(f"`controls` has {size(controls)} points; {count} steps need one each.")
    return like(controls, reference)
