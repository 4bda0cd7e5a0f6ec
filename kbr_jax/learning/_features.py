"""Feature maps, such as neural networks, trained to forecast."""

import functools
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from .._checks import as_count, as_points, check_finite, check_same_size, size, take
from .._numerics import evenly
from .._typing import Array, Float, Points, PRNGKeyArray
from ..kernels import AbstractKernel, FeatureMap, default_kernel
from ..rules import fit_conditional
from ..tuning import TuneResult, minibatch, regression_loss, tune
from ..tuning._losses import measuring

#: Every fifth of 25 stretches is held out; a validation sees at most so many pairs of each part.
STRETCHES, HELD_OUT, SEEN = 25, 5, 1000
#: The regularizer before training, in units of the features' mean square.
RIDGE = 1e-2
#: Steps between two validations.
EVERY = 10


@functools.cache
def _optimizer(steps: int) -> optax.GradientTransformation:
    """One object, so that all calls share a compiled step."""
    return optax.adamw(optax.cosine_decay_schedule(1e-3, steps))


class _Parameters(eqx.Module):
    """What is trained."""

    map: Callable
    regularizer: Float[Array, ""]


def _loss(
    kernel_y: AbstractKernel,
    data: tuple[Points, Points],
    pairs: int,
    parameters: _Parameters,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """The score of either half of a draw of pairs, from the other half."""
    batch = minibatch(data, pairs, key=key)
    half = pairs // 2
    first, second = (take(batch, slice(start, start + half)) for start in (0, half))
    one = _held_out(kernel_y, first, second, parameters)
    return (one + _held_out(kernel_y, second, first, parameters)) / 2


def _held_out(
    kernel_y: AbstractKernel,
    known: tuple[Points, Points],
    held: tuple[Points, Points],
    parameters: _Parameters,
) -> Float[Array, ""]:
    """`regression_loss` on held-out pairs of a conditional embedding fitted to the others."""
    kernel = FeatureMap(parameters.map)
    # In units of the features: else the ridge would reward large ones.
    unit = jnp.mean(kernel.diagonal(known[0]))
    ridge = parameters.regularizer.astype(unit.dtype) * unit
    model = fit_conditional(kernel, kernel_y, *known, regularizer=ridge)
    # In the units of the held-out half, as the stored results were made.
    return regression_loss(model, *held, kernel=measuring(kernel_y, held[1]))


def learn_features(
    map: Callable,
    x: Points,
    y: Points,
    *,
    num_steps: int,
    key: PRNGKeyArray,
    num_pairs: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    checkpoint: str | os.PathLike | None = None,
    progress: bool = True,
) -> tuple[Callable, TuneResult]:
    r"""Train a feature map f so that a conditional embedding on f(x) forecasts y.

    Each step draws pairs and splits them. A conditional embedding with the kernel
    $f(x)^\top f(x')$ is fitted to one half, in closed form, and judged on the other by
    `regression_loss`, the energy score; then the halves change places. So the loss of a step is
    held out, as in two-stage deep feature regression (Xu et al. 2021), and nothing rewards features
    that collapse or grow: the regularizer is learned in units of their mean square. Of every five
    stretches one is never trained on, and the map that is returned has the best score there.

    **Arguments:**

    - `map`: a function of one point x with real values of any shape; an `equinox.Module`, such as
      `equinox.nn.MLP`, has parameters to train. Let it end in a bounded function or a
      normalization.
    - `x`, `y`: pairs `[n, ...]`, in the order of time where they have one.
    - `num_steps`, `key`; `num_pairs` of a step, by default 256, or all where there are fewer;
      `optimizer`, by default AdamW of rate 1e-3 with a cosine schedule.
    - `checkpoint`: a file from which the same call goes on, see `tune`.
    - `progress`: a bar, where tqdm is installed.

    **Returns:** the trained map, for `kernels.FeatureMap` or `kernels.Warped`, and what `tune`
    found. The cost of a step is that of the map at `num_pairs` points forth and back, and
    O(b r^2 + b^2) for b pairs and r features.

    **Raises:** `ValueError` for fewer than 50 pairs, more `num_pairs` than can be trained on, and
    as `fit_conditional`.

    **Example:**

    >>> import equinox as eqx, jax, jax.numpy as jnp, kbr_jax as kbr
    >>> x = jax.random.normal(jax.random.key(0), (200, 2))
    >>> y = jnp.sin(3 * x[:, 0])
    >>> net = eqx.nn.MLP(2, 8, 16, 1, jnp.tanh, jnp.tanh, key=jax.random.key(1))
    >>> found, course = kbr.learning.learn_features(
    ...     net, x, y, num_steps=20, num_pairs=64, key=jax.random.key(2), progress=False)
    >>> bool(course.value < course.history.validation[0])
    True
    """
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_same_size(x, "x", y, "y")
    n, steps = size(x), as_count(num_steps, "num_steps")
    if n < 2 * STRETCHES:
        raise ValueError(f"`learn_features` needs at least {2 * STRETCHES} pairs, got {n}.")
    stretch = np.arange(n) * STRETCHES // n
    held = stretch % HELD_OUT == HELD_OUT // 2
    known = take((x, y), np.flatnonzero(~held))
    pairs = min(256, size(known[0])) if num_pairs is None else as_count(num_pairs, "num_pairs")
    if not 4 <= pairs <= size(known[0]):
        raise ValueError(f"`num_pairs` must be between 4 and {size(known[0])}, got {pairs}.")
    kernel_y = default_kernel(y)
    kernel = FeatureMap(map)
    kernel.check(x, "x")
    unseen = take((x, y), np.flatnonzero(held))
    if optimizer is None:
        optimizer = _optimizer(steps)
    start = _Parameters(map, jnp.asarray(RIDGE, kernel.diagonal(take(x, slice(0, 1))).dtype))
    found = tune(
        Partial(_loss, kernel_y, known, pairs),
        start,
        optimizer,
        num_steps=steps,
        positive=lambda p: p.regularizer,
        validation=Partial(_held_out, kernel_y, _few(known), _few(unseen)),
        validate_every=min(EVERY, max(1, steps - 1)),
        key=key,
        progress=progress,
        checkpoint=checkpoint,
    )
    return found.parameters.map, found


def _few(pairs: tuple[Any, Any]) -> tuple[Any, Any]:
    """At most `SEEN` pairs, evenly spaced."""
    return take(pairs, evenly(size(pairs[0]), SEEN))
