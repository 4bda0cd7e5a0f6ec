r"""Extrapolating the dynamics of distributions (L15): ridge regression from each mean embedding to
the next.

Everything here is linear algebra on the T x T Gram matrix G of the embeddings; a prediction is a
vector of T coefficients.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_count,
    as_float,
    as_non_negative,
    as_positive,
    check_choice,
    is_concrete,
)
from .._lapack import pseudo_inverse
from .._numerics import matmul, one_program, safe_divide, safe_sqrt
from .._typing import Array, ArrayLike, Float, with_scalars
from ..embedding import Embedding, inner
from ..kernels import AbstractKernel, KernelLike, as_kernel, default_kernel
from ._sets import SampleSequence, combine, embedding_gram, mean_noise


class DistributionDynamics(eqx.Module):
    r"""The learned operator $\tilde A = \sum_{ts} \nu_t W_{ts} \hat\mu_s^*$ of T embeddings (L15 eq
    4), made by `fit_dynamics`.

    - `kernel`, `sets`: what was embedded; `sets` is None if a Gram matrix was given. `gram`:
      `[T, T]`, $\langle \hat\mu_s, \hat\mu_t \rangle$.
    - `coefficients`: W `[T - 1, T - 1]`. `intervals`: `[T - 1]`, the time from each set to the
      next; 1 with the form "next".
    - `form`: of the response $\nu_t$, "next" or "change".
    """

    kernel: AbstractKernel
    sets: SampleSequence | None
    gram: Float[Array, "T T"]
    coefficients: Float[Array, "t t"]
    intervals: Float[Array, " t"]
    regularizer: Float[Array, ""]
    step_weights: Float[Array, " t"]
    form: Literal["next", "change"] = eqx.field(static=True)

    __repr__ = with_scalars


def fit_dynamics(
    kernel: KernelLike,
    sets: SampleSequence | None,
    *,
    regularizer: ArrayLike | None = None,
    step_weights: ArrayLike | None = None,
    times: ArrayLike | None = None,
    form: Literal["next", "change"] = "next",
    gram: ArrayLike | None = None,
) -> DistributionDynamics:
    r"""Learn how a distribution changes from one sample to the next (L15 eqs 3 and 4).

    It is vector-valued ridge regression,

    $$ \min_A \sum_{t=1}^{T-1} \gamma_t | \hat\mu_{t+1} - A \hat\mu_t |^2 + \lambda |A|^2, \qquad
       W = \Gamma^{1/2} (\Gamma^{1/2} K \Gamma^{1/2} + \lambda I)^{-1} \Gamma^{1/2}, $$

    with the Gram matrix $K_{st} = \langle \hat\mu_s, \hat\mu_t \rangle$ of the first T - 1
    embeddings.

    **Arguments:**

    - `kernel`: of the points; `TensorProduct((kernel_x, Delta()))` for points with labels.
    - `sets`: T >= 2 samples, from `sample_sequence`; or None with a `gram`.
    - `regularizer`: $\lambda \ge 0$, as printed: not multiplied by the number of steps. L15 takes 1
      / n for samples of n points. None takes the mean of `sampling_noise` over sets of more than
      one point, which is better in all of its settings, times the mean of $\Delta_t^2$, so that
      no forecast depends on the unit of `times`; `rolling_origin_errors` chooses one where more
      than noise must be smoothed. 0 interpolates, with the smallest A that does.
    - `step_weights`: $\gamma_t \ge 0$ `[T - 1]`, of the step from set t to t + 1; 1 by default. For
      L15's $\rho^{-t}$ see `recency_weights`; `jnp.sqrt(sets.sizes[1:])` weighs by size.
    - `times`: `[T]`, increasing, of the samples; equal steps of 1 by default. Unequal ones need the
      form "change".
    - `form`: "next", the paper's; or "change", which regresses the rate of change, $(\hat\mu_{t+1}
      - \hat\mu_t) / \Delta_t \approx B \hat\mu_t$ with weights $\gamma_t \Delta_t^2$: steps may be
      unequal, and a large regularizer predicts the last set, not 0.
    - `gram`: `[T, T]`, inner products of the embeddings where they are known otherwise, for example
      in closed form. By default the `embedding_gram` of the sets.

    **Returns:** a `DistributionDynamics`. Cost O(T^2 n^2 d + T^3).

    **Raises:** `ValueError` for fewer than two sets, a negative regularizer, step weights or times
    of a wrong length or order.
    """
    if kernel is None and sets is not None:
        points = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sets.points)
        kernel = default_kernel(points, (sets.weights != 0).reshape(-1))
    kernel = as_kernel(kernel)
    if gram is None:
        if sets is None:
            raise ValueError("Give `sets`, or the Gram matrix `gram` of their embeddings.")
        if sets.weights.ndim != 2:
            raise ValueError(
                f"`sets` must be one sequence [T, ...], not {sets.weights.shape}: use `vmap`."
            )
        gram = embedding_gram(kernel, sets)
    gram = as_float(gram)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] < 2:
        raise ValueError(
            f"The Gram matrix of the sets has shape {gram.shape}; dynamics need at least two sets, "
            "one step from each to the next."
        )
    check_choice(form, "form", "next", "change")
    gammas = as_step_weights(step_weights, gram)
    intervals = _intervals(times, gram.shape[0], form).astype(gram.dtype)
    if regularizer is not None:
        ridge = as_non_negative(regularizer, "regularizer", scalar=True).astype(gram.dtype)
    elif sets is None:
        raise ValueError("Give a `regularizer`: without `sets` no sampling noise is known.")
    else:
        noise = mean_noise(kernel, sets, jnp.diagonal(gram), "give a `regularizer`")
        ridge = noise_ridge(noise, intervals)
    matrix = coefficient_matrix(gram, gammas, intervals, ridge)
    return DistributionDynamics(kernel, sets, gram, matrix, intervals, ridge, gammas, form)


def noise_ridge(noise: Float[Array, ""], intervals: Float[Array, " t"]) -> Float[Array, ""]:
    """The regularizer that sampling noise asks for: the inputs are intervals times embeddings."""
    return noise * jnp.mean(intervals**2)


def as_step_weights(
    step_weights: ArrayLike | None, gram: Float[Array, "T T"]
) -> Float[Array, " t"]:
    """One non-negative weight a step."""
    count = gram.shape[0]
    gammas = (
        jnp.ones(count - 1)
        if step_weights is None
        else as_non_negative(step_weights, "step_weights")
    )
    if gammas.shape != (count - 1,):
        raise ValueError(
            f"`step_weights` has shape {gammas.shape}; {count} sets have {count - 1} steps, one "
            f"weight each."
        )
    return gammas.astype(gram.dtype)


def sets_of(model: DistributionDynamics) -> SampleSequence:
    """The sampled sets that the dynamics were fitted to."""
    if model.sets is None:
        raise ValueError(
            "These dynamics were fitted to a Gram matrix: they hold no `sets` to use a kernel on. "
            "`forecast_coefficients` needs none."
        )
    return model.sets


def _intervals(times: ArrayLike | None, count: int, form: str) -> Float[Array, " t"]:
    if times is None:
        return jnp.ones(count - 1)
    found: Any = times
    if all(map(is_concrete, jax.tree.leaves(times))):
        found = np.asarray(times)
        if found.dtype.kind in "MmO":
            raise ValueError(
                "`times` are dates: give numbers, such as `(times - times[0]) / "
                "np.timedelta64(1, 'D')`."
            )
    # Float32 holds no seconds since 1970: differences first.
    times = found.astype(float) if isinstance(found, np.ndarray) else jnp.asarray(found)
    if times.shape != (count,):
        raise ValueError(
            f"`times` has shape {times.shape}; it must hold one time for each of {count} sets."
        )
    if form == "next":
        raise ValueError(
            'Times of the samples need the form "change": the paper\'s "next" assumes equal steps.'
        )
    return as_positive(times[1:] - times[:-1], "steps of times")


@one_program
def coefficient_matrix(
    gram: Float[Array, "T T"],
    gammas: Float[Array, " t"],
    intervals: Float[Array, " t"],
    ridge: Float[Array, ""],
) -> Float[Array, "t t"]:
    """W, in the units of responses per interval: the inputs are intervals times embeddings."""
    root = safe_sqrt(gammas) * intervals
    identity = jnp.eye(root.shape[0], dtype=gram.dtype)
    scaled = root[:, None] * gram[:-1, :-1] * root[None, :] + ridge * identity
    # The pseudo-inverse is what the limit of lambda to 0 means where embeddings are linearly
    # dependent. With a ridge no eigenvalue is below it, and small ones decide the leave-one-out
    # errors.
    inverse = pseudo_inverse(scaled, jnp.asarray(ridge, gram.dtype))
    return root[:, None] * (inverse + inverse.T) / 2 * root[None, :]


def apply_dynamics(model: DistributionDynamics, embedding: Embedding) -> Float[Array, "*b T"]:
    r"""Apply the learned operator to any embedding $\mu$ of the same RKHS (L15 eq 4).

    **Returns:** coefficients `[..., T]` of $\tilde A \mu$ on the embedded sets, for `combine`
    ("next"), or of the change in one unit of time ("change"; $\mu$ itself has none). Cost O(T n m
    d) for m points of the embedding. **Raises:** `ValueError` for a model without `sets`.
    """
    one = combine(
        model.kernel, sets_of(model), jnp.eye(model.gram.shape[0], dtype=model.gram.dtype)
    )
    products = jax.vmap(lambda w: inner(Embedding(one.kernel, one.points, w), embedding))
    return _applied(model, products(one.weights))


@eqx.filter_jit
def _applied(model: DistributionDynamics, products: Float[Array, "T *b"]) -> Float[Array, "*b T"]:
    values = jnp.moveaxis(products, 0, -1)
    rates = _regressed(model, values[..., :-1]) / model.intervals
    shifted = jnp.pad(rates, ((0, 0),) * (rates.ndim - 1) + ((1, 0),))
    return shifted if model.form == "next" else shifted - jnp.roll(shifted, -1, axis=-1)


def _regressed(model: DistributionDynamics, products: Float[Array, "*b t"]) -> Float[Array, "*b t"]:
    """W of inner products with the inputs, refined.

    Rounding of W, whose entries are up to 1 / lambda, would enter all directions: in float32
    forecasts of normal distributions with 1e-5, 3e-6 and 1e-6 were off by .014, .078 and .031 in
    place of .0027, .0015 and .0010. One refinement leaves .0040, .0027, .0012, two nothing.
    """
    inputs, w = model.step_weights * model.intervals**2, model.coefficients
    found = matmul(products, w)
    for _ in range(2):
        ridge = model.regularizer * safe_divide(found, inputs)
        found = found + matmul(products - matmul(found, model.gram[:-1, :-1]) - ridge, w)
    return found


def advance(
    model: DistributionDynamics, c: Float[Array, " T"], length: Float[Array, ""]
) -> Float[Array, " T"]:
    r"""Apply the operator to $\sum_t c_t \mu_t$ over a time `length`."""
    rates = _regressed(model, matmul(model.gram[:-1], c))
    shifted = jnp.concatenate([jnp.zeros(1, c.dtype), rates / model.intervals])
    return shifted if model.form == "next" else c + length * (shifted - jnp.roll(shifted, -1))


def forecast_coefficients(
    model: DistributionDynamics,
    steps: int = 1,
    *,
    length: ArrayLike | None = None,
    start: ArrayLike | None = None,
) -> Float[Array, "steps T"]:
    r"""Coefficients $\beta^{(k)}$ of the predictions 1, ..., `steps` k steps ahead,
    $\tilde\mu = \sum_t \beta_t \hat\mu_t$ (L15 eq 5).

    With the form "next", $\beta^{(k)} = (W C)^k e_T$ with
    $C_{st} = \langle \hat\mu_s, \hat\mu_{t+1} \rangle$, and the first is 0.

    **Arguments:** `steps` (static); `length` of a step in the units of `times`, by default the mean
    interval (form "change" only); `start` `[T]`, coefficients of the embedding to start from, by
    default the last set.

    **Returns:** `[steps, T]`. They need not sum to 1: mass is lost as lambda grows; see
    `normalize`. With the form "change" they can grow without bound from step to step, as those of
    any line drawn on: stop where the sum of their sizes is far above 1. Cost O(steps T^2).
    """
    steps = as_count(steps, "steps")
    count, dtype = model.gram.shape[0], model.gram.dtype
    if length is not None and model.form == "next":
        raise ValueError(
            'A `length` of the steps needs the form "change"; "next" takes steps as observed.'
        )
    length = (
        jnp.mean(model.intervals)
        if length is None
        else as_positive(length, "length", scalar=True).astype(dtype)
    )
    c = jnp.zeros(count, dtype).at[-1].set(1) if start is None else jnp.asarray(start, dtype)
    if c.shape != (count,):
        raise ValueError(
            f"`start` has shape {c.shape}; it must hold one coefficient for each of {count} sets."
        )

    return _forecasts(model, c, length, steps)


@eqx.filter_jit
def _forecasts(
    model: DistributionDynamics, start: Float[Array, " T"], length: Float[Array, ""], steps: int
) -> Float[Array, "steps T"]:
    def step(c, _):
        c = advance(model, c, length)
        return c, c

    return jax.lax.scan(step, start, length=steps)[1]


def recency_weights(num_sets: int, decay: ArrayLike) -> Float[Array, " t"]:
    r"""L15's step weights $\rho^{-t}$ (section 2.2) for T sets, `[T - 1]`.

    They are divided by their mean, so that one regularizer serves every decay $0 < \rho \le 1$. The
    last step weighs most.
    """
    count = as_count(num_sets, "num_sets")
    if count < 2:
        raise ValueError("`num_sets` is the number of sets; there are steps from 2 on.")
    decay = as_positive(decay, "decay", scalar=True)
    if is_concrete(decay) and float(decay) > 1:
        raise ValueError(f"`decay` must be at most 1: earlier steps weigh less. Got {decay}.")
    weights = decay ** jnp.arange(count - 2, -1, -1).astype(decay.dtype)
    return weights / jnp.mean(weights)
