r"""How well learned dynamics predict steps that were observed.

What regularizers, weights and bandwidths are chosen by.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import as_count, as_non_negative, check_choice, is_concrete
from .._numerics import matmul, one_program
from .._typing import Array, ArrayLike, Float
from ..embedding import normalized
from ..kernels import KernelLike, as_kernel
from ._dynamics import DistributionDynamics, advance, as_step_weights, coefficient_matrix, sets_of
from ._sets import embedding_gram

#: Steps of times that differ by a smaller share count as equal: times are rounded.
_EQUAL_STEPS = 1e-3


def refit_dynamics(
    model: DistributionDynamics,
    *,
    regularizer: ArrayLike | None = None,
    step_weights: ArrayLike | None = None,
    form: Literal["next", "change"] | None = None,
) -> DistributionDynamics:
    """The same dynamics with another regularizer, step weights or form, in O(T^3): the Gram matrix
    of the sets is kept.

    What is None stays as it is: a regularizer too, also where the form changes from "change", whose
    regularizer is in squared units of time. The form "next" forgets the times, and counts steps as
    1.

    **Raises:** `ValueError` as `fit_dynamics`; for the form "next", where the steps of the times
    are not equal (if they are traced, they are not looked at).
    """
    gram = model.gram
    ridge = model.regularizer
    if regularizer is not None:
        ridge = as_non_negative(regularizer, "regularizer", scalar=True).astype(gram.dtype)
    gammas = model.step_weights if step_weights is None else as_step_weights(step_weights, gram)
    form = form or model.form
    check_choice(form, "form", "next", "change")
    if form == "next" and is_concrete(model.intervals):
        steps = np.asarray(model.intervals)
        if np.ptp(steps) > _EQUAL_STEPS * np.max(steps):
            raise ValueError(
                f'The form "next" assumes equal steps; those of this model are from '
                f'{steps.min():.3g} to {steps.max():.3g} long. Keep the form "change".'
            )
    return refitted(model, ridge, gammas, intervals_of(model, form), form)


def intervals_of(
    model: DistributionDynamics, form: Literal["next", "change"]
) -> Float[Array, " t"]:
    """The intervals of a model of another form: "next" takes each step as one."""
    return jnp.ones_like(model.intervals) if form == "next" else model.intervals


def refitted(
    model: DistributionDynamics,
    ridge: Float[Array, ""],
    gammas: Float[Array, " t"],
    intervals: Float[Array, " t"],
    form: Literal["next", "change"],
) -> DistributionDynamics:
    """The model with these settings, which are not checked."""
    matrix = coefficient_matrix(model.gram, gammas, intervals, ridge)
    return DistributionDynamics(
        model.kernel, model.sets, model.gram, matrix, intervals, ridge, gammas, form
    )


def _reference(model: DistributionDynamics, kernel: KernelLike | None) -> Float[Array, "T T"]:
    return (
        model.gram
        if kernel is None
        else embedding_gram(as_kernel(kernel), sets_of(model)).astype(model.gram.dtype)
    )


@one_program
def _errors(predictions: Float[Array, "m T"], gram: Float[Array, "T T"]) -> Float[Array, " m"]:
    """Squared distances to the last m sets."""
    count = gram.shape[0]
    residuals = predictions - jnp.eye(count, dtype=gram.dtype)[count - predictions.shape[0] :]
    return jnp.maximum(jnp.sum(matmul(residuals, gram) * residuals, axis=-1), 0)


def leave_one_out_errors(
    model: DistributionDynamics, *, kernel: KernelLike | None = None
) -> Float[Array, " t"]:
    r"""Squared errors of predicting each step from all other steps, without refitting,

    $$ |e_t|^2 = \sum_{su} V_{ts} V_{tu} \langle \nu_s, \nu_u \rangle, \qquad V =
       \operatorname{diag}(W)^{-1} W, $$

    with the responses $\nu_s = \hat\mu_{s+1}$ (or the changes, and $V_{ts} \Delta_t / \Delta_s$
    for steps of unequal times): exactly what refits without step t would give.

    **Arguments:** `kernel` whose RKHS measures the error, by default the model's own. Choose
    bandwidths by `rolling_origin_errors`: leave-one-out is unsafe for bandwidth and regularizer
    together.

    **Returns:** `[T - 1]`. Cost O(T^3). **Raises:** `ValueError` for a regularizer of 0 and a
    Gram matrix of less than full rank (outside `jit`).
    """
    concrete = is_concrete(model.regularizer) and is_concrete(model.gram)
    if concrete and float(model.regularizer) == 0:
        gram = np.asarray(model.gram)[:-1, :-1]
        if np.linalg.matrix_rank(gram, hermitian=True) < gram.shape[0]:
            raise ValueError(
                "Leaving a step out needs a positive `regularizer` where the Gram matrix of the "
                "sets does not have full rank."
            )
    return _errors(left_out_predictions(model), _reference(model, kernel))


@eqx.filter_jit
def left_out_predictions(model: DistributionDynamics) -> Float[Array, "t T"]:
    """Coefficients of each one-step prediction by the operator of all other steps."""
    count = model.gram.shape[0]
    matrix, identity = model.coefficients, jnp.eye(count - 1, dtype=model.gram.dtype)
    diagonal = jnp.diagonal(matrix)
    learned = diagonal > 0
    # A step without weight taught nothing: its error is that of the operator as it is.
    plain = identity - matmul(model.gram[:-1, :-1], matrix)
    ratios = jnp.where(learned[:, None], matrix / jnp.where(learned, diagonal, 1)[:, None], plain)
    ratios = ratios * (model.intervals[:, None] / model.intervals[None, :])
    # The residual of step t is sum_s V_ts nu_s with V_tt = 1: the step itself less its prediction.
    residuals = jnp.zeros((count - 1, count), model.gram.dtype).at[:, 1:].set(ratios)
    if model.form == "change":
        residuals = residuals.at[:, :-1].add(-ratios)
    return jnp.eye(count, dtype=model.gram.dtype)[1:] - residuals


def rolling_origin_errors(
    model: DistributionDynamics, *, first: int = 2, steps: int = 1, kernel: KernelLike | None = None
) -> Float[Array, " m"]:
    r"""Squared errors of predicting each set from those before it:
    $|\tilde\mu_{t + k} - \hat\mu_{t + k}|^2$ where the operator was learned from sets 1 to t, for t
    = `first`, ..., T - k.

    Its mean is what to choose the regularizer, step weights and bandwidth by (with a fixed `kernel`
    for the bandwidth):

        def loss(regularizer):
            refitted = kbr.dynamics.refit_dynamics(model, regularizer=regularizer)
            return jnp.mean(kbr.dynamics.rolling_origin_errors(refitted))

        kbr.grid_search(loss, jnp.logspace(-4, 0, 20)).parameters

    **Arguments:** `first`, sets to learn from at least, >= 2, and `steps` ahead k (both static);
    `kernel` whose RKHS measures the error, by default the model's own.

    **Returns:** `[T - k - first + 1]`. Cost O(T^4), of small matrices. **Raises:** `ValueError` if
    no set is left to predict.
    """
    count = model.gram.shape[0]
    first, steps = as_count(first, "first"), as_count(steps, "steps")
    if first < 2 or first + steps > count:
        raise ValueError(
            f"`first` = {first} and `steps` = {steps} leave nothing to predict in {count} sets; "
            f"`first` is at least 2, and "
            "`first` + `steps` at most the number of sets."
        )
    return _errors(rolling_origin_predictions(model, first, steps), _reference(model, kernel))


@eqx.filter_jit
def rolling_origin_predictions(
    model: DistributionDynamics, first: int, steps: int, restored: bool = False
) -> Float[Array, "m T"]:
    """Coefficients of the predictions of sets `first` + `steps`, ..., T.

    Each is made by the operator that was learned up to `steps` sets before. With `restored` it is
    divided by its mass after each step.
    """
    count, dtype = model.gram.shape[0], model.gram.dtype

    def predict(last):  # the index of the last set that is known
        gammas = jnp.where(jnp.arange(count - 1) < last, model.step_weights, 0)
        known = refitted(model, model.regularizer, gammas, model.intervals, model.form)
        c = jax.nn.one_hot(last, count, dtype=dtype)
        for k in range(steps):
            c = advance(known, c, model.intervals[last + k])
            c = normalized(c) if restored else c
        return c

    return jax.vmap(predict)(jnp.arange(first - 1, count - steps))
