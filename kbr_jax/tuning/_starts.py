"""Gradient descent from many starts, side by side and over devices."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from .._checks import as_count
from .._typing import PRNGKeyArray
from ..devices import over_devices
from ._progress import progress_bar
from ._trees import tuned_and_fixed
from ._tune import CHUNK, TuneResult, as_problem, check_validated, run_chunk


def tune_starts(
    loss: Callable,
    starts: Sequence[Any],
    optimizer: optax.GradientTransformation,
    *,
    num_steps: int,
    positive: Callable[[Any], Any] | None = None,
    validation: Callable | None = None,
    key: PRNGKeyArray | None = None,
    progress: bool = True,
    mesh: Mesh | None = None,
) -> list[TuneResult]:
    r"""Run `tune` from several initial parameters at once, in one compiled program.

    **Arguments:**

    - `loss`, `optimizer`, `num_steps`, `positive`, `validation`, `key`, `progress`: as in `tune`.
      The validation loss is computed at every step.
    - `starts`: a list of initial parameters. They differ in their floating-point values only.
    - `mesh`: devices to divide the starts over; see `devices.over_devices`.

    **Returns:** one `TuneResult` for each start, the best first. A start where the loss is not
    finite is the last, with an infinite value. Cost and memory: those of all runs together.

    **Raises:** `ValueError` for an empty list, starts of other structures or shapes, a loss that is
    finite at none of them, and where `tune` does.

    **Example:**

    >>> import jax.numpy as jnp, optax, kbr_jax as kbr
    >>> results = kbr.tuning.tune_starts(lambda p: jnp.cos(p) + p / 10, [0.5, 3.0, 9.0],
    ...                                  optax.adam(0.1), num_steps=200, progress=False)
    >>> print([f"{result.parameters:.2f}" for result in results])
    ['3.04', '3.04', '9.32']
    """
    num_steps = as_count(num_steps, "num_steps")
    problem, free = as_problem(loss, _stacked(starts), optimizer, positive, validation, 1)
    states = jax.vmap(problem.start)(free)
    parts, done = [], 0
    with progress_bar(num_steps, progress) as bar:
        bar.show({"first": "compiling"})
        while done < num_steps:
            shared = problem, jnp.asarray(done), jnp.asarray(num_steps), key
            states, part = over_devices(_run_many, mesh, shared, states)
            count = min(CHUNK, num_steps - done)
            parts.append(jax.tree.map(lambda leaf, n=count: leaf[:, :n], part))
            done += count
            if len(parts) == 1 and not bool(jnp.any(part.accepted[:, 0])):
                raise ValueError(
                    "The loss or its gradient is finite at none of the `starts`; start elsewhere, "
                    "for example with larger regularizers."
                )
            bar.update(count)
            if bar:
                bar.show({"best": f"{float(jnp.min(states.value)):.4g}"})
    check_validated(problem, states.value)
    history = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)

    def result(index: int) -> TuneResult:
        best, value, step, own = jax.tree.map(
            lambda leaf: leaf[index], (states.best, states.value, states.step, history)
        )
        return TuneResult(problem.decode(best), value, step, own)

    return [result(index) for index in np.argsort(np.asarray(states.value)).tolist()]


def _run_many(shared: Any, states: Any) -> Any:
    problem, *rest = shared
    return jax.vmap(lambda state: run_chunk(problem, state, *rest))(states)


def _stacked(starts: Sequence[Any]) -> Any:
    """The floating-point leaves of all starts with a leading axis, and what they share."""
    if not isinstance(starts, (list, tuple)) or not starts:
        raise ValueError("`starts` must be a list of at least one set of initial parameters.")
    parts = [tuned_and_fixed(start) for start in starts]
    shapes = [jax.tree.map(jnp.shape, tuned) for tuned, _ in parts]
    for index, (shape, (_, fixed)) in enumerate(zip(shapes, parts, strict=True)):
        if shape != shapes[0] or not eqx.tree_equal(fixed, parts[0][1]):
            raise ValueError(
                f"`starts[{index}]` differs from `starts[0]` in more than floating-point values: "
                "all starts must have one structure and the same shapes."
            )
    tuned = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tuned for tuned, _ in parts))
    return eqx.combine(tuned, parts[0][1])
