"""Hyperparameters by gradient descent on a loss.

One compiled step, the best point seen, and nothing that is not finite.
"""

import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._checks import as_count, as_points, is_concrete, size, take
from .._numerics import all_finite
from .._typing import Array, Bool, Float, Int, PRNGKeyArray, with_numbers
from .._warnings import warn
from ._checkpoint import check_course, read_checkpoint, write_checkpoint
from ._progress import progress_bar
from ._trees import tuned_and_fixed

#: Steps in one compiled program. Between two of them the progress is shown.
CHUNK = 10

#: Steps between two writes of a checkpoint.
_CHECKPOINT_STEPS = 100

#: A resumed run computes so many steps again, to see that it is the same.
_COMPARED = 3


class History(eqx.Module):
    """What happened at each step.

    - `loss` `[steps]`: at the parameters tried, NaN or infinite where they were rejected. `loss[0]`
      is that of the initial ones.
    - `validation` `[steps]`: NaN at steps without one; None without a validation loss.
    - `accepted` `[steps]`: False where loss or gradient was not finite. The step was then halved
      and tried again.
    """

    loss: Float[Array, "*steps"]
    validation: Float[Array, "*steps"] | None
    accepted: Bool[Array, "*steps"]

    __repr__ = with_numbers


class TuneResult(eqx.Module):
    """What `tune` found.

    - `parameters`: the best seen, by the validation loss if there is one.
    - `value`: the loss they were chosen by; `step`: when it was seen.
    - `history`: all steps.
    """

    parameters: Any
    value: Float[Array, ""]
    step: Int[Array, ""]
    history: History

    __repr__ = with_numbers


class _State(eqx.Module):
    """A descent under way, in coordinates where every parameter is free."""

    trial: list[Array]  # what is tried next
    last: list[Array]  # the last point where loss and gradient were finite
    move: list[Array]  # the optimizer's update there, halved if it leads where nothing is finite
    optimizer: Any  # its state, for the tree of parameters
    best: list[Array]
    value: Float[Array, ""]
    step: Int[Array, ""]
    touched: list[Bool[Array, ""]]  # whether the gradient of a leaf was ever other than 0


class _Problem(eqx.Module):
    """What stays the same from step to step.

    Functions, and how free coordinates become parameters.
    """

    fixed: Any
    treedef: Any = eqx.field(static=True)
    positive: tuple[bool, ...] = eqx.field(static=True)
    loss: Callable  # may hold arrays, which are not part of the program
    validation: Callable | None
    optimizer: optax.GradientTransformationExtraArgs = eqx.field(static=True)
    every: int = eqx.field(static=True)

    def tree(self, leaves: list[Array]) -> Any:
        return jax.tree.unflatten(self.treedef, leaves)

    def decode(self, free: list[Array]) -> Any:
        leaves = [
            jnp.exp(leaf) if positive else leaf
            for leaf, positive in zip(free, self.positive, strict=True)
        ]
        return eqx.combine(self.tree(leaves), self.fixed)

    def start(self, free: list[Array]) -> _State:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
            optimizer = self.optimizer.init(self.tree(free))
            dtype = jnp.result_type(*free)
        still = jax.tree.map(jnp.zeros_like, free)
        worst = jnp.asarray(jnp.inf, dtype)
        touched = [jnp.asarray(False) for _ in free]
        return _State(free, free, still, optimizer, free, worst, jnp.zeros((), int), touched)

    def step(
        self, state: _State, number: Int[Array, ""], key: PRNGKeyArray | None
    ) -> tuple[_State, History]:
        """Evaluate the trial point, and go on from it, or halve the way there."""
        more = () if key is None else (jax.random.fold_in(key, number),)

        def loss(free: list[Array]) -> Float[Array, ""]:
            return jnp.asarray(self.loss(self.decode(free), *more))

        value, gradient = jax.value_and_grad(loss)(state.trial)
        value = value.astype(state.value.dtype)
        accepted = _all_finite((value, gradient))
        gradient = [jnp.where(accepted, g, 0) for g in gradient]
        move, optimizer = self.update(loss, state, jnp.where(accepted, value, 0), gradient)
        accepted = accepted & _all_finite(move)
        score, scored = self.score(state.trial, value, number)
        # Of minibatches the least loss is that of the luckiest: then the last parameters count.
        noisy = key is not None and self.validation is None
        lower = jnp.asarray(noisy) | (score < state.value)
        better = accepted & scored & jnp.isfinite(score) & lower
        half = jax.tree.map(lambda m: m / 2, state.move)

        def where(
            condition, new, old
        ):  # in the old dtype, which promotion in the optimizer may have changed
            return jax.tree.map(
                lambda n, o: jnp.where(condition, jnp.asarray(n, o.dtype), o), new, old
            )

        last = where(accepted, state.trial, state.last)
        move = where(accepted, move, half)
        new = _State(
            trial=[(p + m).astype(p.dtype) for p, m in zip(last, move, strict=True)],
            last=last,
            move=move,
            optimizer=where(accepted, optimizer, state.optimizer),
            best=where(better, state.trial, state.best),
            value=jnp.where(better, score, state.value),
            step=jnp.where(better, number, state.step),
            touched=[t | jnp.any(g != 0) for t, g in zip(state.touched, gradient, strict=True)],
        )
        # A finite loss whose gradient is not finite is none to choose by.
        value = jnp.where(accepted | ~jnp.isfinite(value), value, jnp.nan)
        return new, History(value, None if self.validation is None else score, accepted)

    def update(
        self, loss: Callable, state: _State, value: Float[Array, ""], gradient: list[Array]
    ) -> tuple[Any, Any]:
        """The optimizer's move and its new state.

        It sees the user's tree, for labels and masks, not a list of leaves.
        """
        tree = self.tree(gradient)
        more = {
            "value": value,
            "grad": tree,
            "value_fn": lambda free: loss(jax.tree.leaves(free)).astype(value.dtype),
        }
        with jax.numpy_dtype_promotion("standard"):
            move, optimizer = self.optimizer.update(
                tree, state.optimizer, self.tree(state.trial), **more
            )
        return jax.tree.leaves(move), optimizer

    def score(self, free: list[Array], value: Float[Array, ""], number: Int[Array, ""]):
        """What parameters are chosen by, and whether it was computed at this step."""
        if self.validation is None:
            return value, jnp.asarray(True)
        scored, validation = number % self.every == 0, self.validation
        score = lax.cond(
            scored,
            lambda: validation(self.decode(free)).astype(value.dtype),
            lambda: jnp.full_like(value, jnp.nan),
        )
        return score, scored


def tune(
    loss: Callable,
    initial: Any,
    optimizer: optax.GradientTransformation,
    *,
    num_steps: int,
    positive: Callable[[Any], Any] | None = None,
    validation: Callable | None = None,
    validate_every: int = 1,
    key: PRNGKeyArray | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
) -> TuneResult:
    r"""Minimize a differentiable loss over a pytree of parameters.

    Parameters are bandwidths, regularizers, landmark positions, whole kernels. Fit inside the loss:
    `lambda p: filter_loss(fit_filter(Gaussian(p["h"]), ...), state, observations)`.

    **Arguments:**

    - `loss(parameters)`, a scalar. With a `key` it is `loss(parameters, key)`, and the key differs
      from step to step: for minibatches (`minibatch`) and random features. Calls with one function
      and one optimizer share a compiled program. Give what differs between them, the data, as
      `jax.tree_util.Partial(loss, data=data)`.
    - `initial`: any pytree. Its floating-point arrays and Python floats are tuned. All else stays.
    - `optimizer`: of optax, with schedules, masks and labels, for example `optax.adam(3e-2)`; or
      `optax.lbfgs()` for a loss without noise. It sees the tree of `initial` with None for what
      stays, and logarithms of positive parameters.
    - `num_steps`: evaluations of the loss and its gradient (static); the first is at `initial`.
    - `positive`: says which parameters are positive. Of the tree it returns the leaf, the subtree,
      or a tuple of these, as `lambda p: (p["h"], p["epsilon"])`. They are tuned by their logarithm,
      so learning rates are relative changes. `loss` sees natural units.
    - `validation(parameters)`: the result is chosen by it, every `validate_every` steps; without it
      by the loss itself. A loss that takes a key says little at one step: without a validation the
      result is then the last one.
    - `progress`: a bar with the loss and the scalar parameters, where tqdm is installed.
    - `checkpoint`: a file, written every 100 steps and at the end, from which the same call goes
      on. The result is the one without interruption. `num_steps` may have been raised meanwhile.

    Where loss or gradient is not finite, the step that led there is halved, again and again. Such
    points are marked in the history and never returned. For several starts call `tune` for each:
    the calls share one compiled program.

    A leaf whose gradient was 0 at every step is named in a warning, and so is a Python integer.

    **Returns:** `TuneResult`. Cost: a gradient a step, at most about four times the loss; and one
    for each trial of a line search.

    **Raises:** `ValueError` if nothing can be tuned, `positive` returns anything but leaves of its
    argument, a positive parameter is not, the loss is not finite at `initial`, the validation is
    finite nowhere, or the checkpoint is of another run or of more steps.

    **Example:**

    >>> import optax, kbr_jax as kbr
    >>> found = kbr.tune(lambda p: (p["h"] - 2) ** 2, {"h": 1.0}, optax.adam(0.1), num_steps=200,
    ...                  positive=lambda p: p["h"], progress=False)
    >>> print(f"{found.parameters['h']:.2f}")
    2.00
    """
    num_steps = as_count(num_steps, "num_steps")
    problem, free = as_problem(loss, initial, optimizer, positive, validation, validate_every)
    state = problem.start(free)
    told = problem.every, num_steps
    resumed = None if checkpoint is None else read_checkpoint(checkpoint, free, state, key, *told)
    done, start, parts = (0, state, []) if resumed is None else resumed
    if done:
        first = jnp.asarray(0), jnp.asarray(min(done, _COMPARED))
        check_course(
            checkpoint, parts[0], run_chunk(problem, state, *first, key)[1], min(done, _COMPARED)
        )
    saved, state = done, start
    with progress_bar(num_steps, progress) as bar:
        bar.update(done)
        bar.show({"first": "compiling"})
        while done < num_steps:
            state, part = run_chunk(problem, state, jnp.asarray(done), jnp.asarray(num_steps), key)
            count = min(CHUNK, num_steps - done)
            parts.append(jax.tree.map(lambda leaf, n=count: leaf[:n], part))
            done += count
            if len(parts) == 1 and not bool(parts[0].accepted[0]):
                raise ValueError(
                    "The loss or its gradient is not finite at the initial parameters; start "
                    "elsewhere, for example with larger regularizers and bandwidths near the "
                    "median distance."
                )
            bar.update(count)
            if bar:
                bar.show(_summary(problem, state, parts))
            if checkpoint is not None and done >= min(num_steps, saved + _CHECKPOINT_STEPS):
                saved = done
                write_checkpoint(checkpoint, free, done, state, parts, key, problem.every)
    check_validated(problem, state.value)
    _warn_of_constants(problem, state, initial)
    history = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return TuneResult(problem.decode(state.best), state.value, state.step, history)


def check_validated(problem: _Problem, value: Array) -> None:
    """Raise a `ValueError` where no validation told anything."""
    if problem.validation is not None and not bool(jnp.any(jnp.isfinite(value))):
        raise ValueError(
            "The validation loss was not finite at any step at which it was computed: evaluate it "
            "at `initial`."
        )


def _warn_of_constants(problem: _Problem, state: _State, initial: Any) -> None:
    """Name what cannot move: leaves without a gradient, and Python integers."""
    tree = problem.tree(state.touched)
    still = [path for path, touched in jax.tree_util.tree_leaves_with_path(tree) if not touched]
    if still:
        names = ", ".join(f"`initial{jax.tree_util.keystr(path)}`" for path in still)
        warn(
            f"The loss does not depend on {names}: the gradient was 0 at every step. Is it used in "
            "the loss, or behind a step function such as `quantile`?"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(initial):
        if type(leaf) is int:
            warn(
                f"`initial{jax.tree_util.keystr(path)}` is the integer {leaf} and was not tuned: "
                f"write {leaf}.0 to tune it, or keep it out of `initial`."
            )


def minibatch(data: Any, num_rows: int, *, key: PRNGKeyArray) -> Any:
    """Draw rows (static number), without replacement, of a tree of arrays with one leading axis.

    Cost O(n). **Raises:** `ValueError` for more rows than there are, and arrays of other lengths.
    """
    data = as_points(data, "data")
    count = as_count(num_rows, "num_rows", data, "data")
    return take(data, jax.random.choice(key, size(data), (count,), replace=False))


def as_problem(
    loss, initial, optimizer, positive, validation, every
) -> tuple[_Problem, list[Array]]:
    """The parts of a problem, and the initial parameters in free coordinates."""
    tuned, fixed = tuned_and_fixed(initial)
    leaves, treedef = jax.tree.flatten(tuned)
    # Weak types would turn strong after the first step, and compile everything twice.
    leaves = [leaf.astype(leaf.dtype) for leaf in leaves]
    if not leaves:
        raise ValueError("`initial` holds no floating-point arrays, so there is nothing to tune.")
    mask = _positive(positive, treedef)
    for leaf, log in zip(leaves, mask, strict=True):
        if log and is_concrete(leaf) and not np.all(np.asarray(leaf) > 0):
            raise ValueError(f"A parameter declared positive starts at {leaf}; start it above 0.")
    problem = _Problem(
        fixed=fixed,
        treedef=treedef,
        positive=mask,
        loss=loss,
        validation=validation,
        optimizer=optax.with_extra_args_support(optimizer),
        every=as_count(every, "validate_every"),
    )
    return problem, [jnp.log(leaf) if log else leaf for leaf, log in zip(leaves, mask, strict=True)]


def _positive(choose: Callable[[Any], Any] | None, treedef: Any) -> tuple[bool, ...]:
    """Which leaves the user's function picks from a tree of marks."""
    marks = [object() for _ in range(treedef.num_leaves)]
    chosen = [] if choose is None else jax.tree.leaves(choose(jax.tree.unflatten(treedef, marks)))
    for leaf in chosen:
        if not any(leaf is mark for mark in marks):
            raise ValueError(
                "`positive` must return leaves or subtrees of the tree that it is given, as "
                "`lambda p: (p['h'], p['epsilon'])`; "
                f"it returned {leaf!r}."
            )
    return tuple(any(leaf is mark for leaf in chosen) for mark in marks)


@eqx.filter_jit
def run_chunk(
    problem: _Problem, state: _State, first: Int[Array, ""], limit: Int[Array, ""], key
) -> tuple[_State, History]:
    """A chunk of steps. Beyond the limit nothing is computed."""

    def step(state, number):
        def go_on():
            return problem.step(state, number, key)

        def stay():
            record = jax.eval_shape(go_on)[1]
            return state, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), record)

        return lax.cond(number < limit, go_on, stay)

    return lax.scan(step, state, first + jnp.arange(CHUNK))


def _all_finite(tree: Any) -> Bool[Array, ""]:
    return jnp.asarray(all_finite(jax.tree.leaves(tree)))


def _summary(problem: _Problem, state: _State, parts: list[History]) -> dict[str, str]:
    """What the progress bar says: the last loss, the best value, the best scalar parameters."""
    rejected = sum(int(jnp.sum(~part.accepted)) for part in parts)
    words = {"loss": f"{float(parts[-1].loss[-1]):.4g}", "best": f"{float(state.value):.4g}"}
    words |= {"rejected": str(rejected)} if rejected else {}
    tuned = eqx.filter(problem.decode(state.best), eqx.is_inexact_array)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tuned):
        if leaf.ndim == 0:
            words[jax.tree_util.keystr(path, simple=True, separator=".")] = f"{float(leaf):.3g}"
    return words
