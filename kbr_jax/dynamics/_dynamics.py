r"""Extrapolating the dynamics of distributions (L15): ridge regression from each mean embedding to
the
next.

Everything here is linear algebra on the T x T Gram matrix G of the embeddings; a prediction is a
vector of T coefficients.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_count, as_non_negative, as_positive
from .._numerics import matmul, safe_sqrt
from .._typing import Array, ArrayLike, Float
from ..embedding import Embedding, GaussianMixture, normalized
from ..kernels import AbstractKernel, as_kernel
from ._sets import SampleSequence, combine, embedding_gram, sampling_noise


class DistributionDynamics(eqx.Module):
    r"""The learned operator $\tilde A = \sum_{ts} \nu_t W_{ts} \hat\mu_s^*$ of T embeddings (L15 eq
    4),
    made by `fit_dynamics`.

    - `kernel`, `sets`: what was embedded. `gram`: `[T, T]`, $\langle \hat\mu_s, \hat\mu_t \rangle$.
    - `coefficients`: W `[T - 1, T - 1]`. `intervals`: `[T - 1]`, the time from each set to the
      next; 1 with the form "next".
    - `form`: of the response $\nu_t$, "next" or "change".
    """

    kernel: AbstractKernel
    sets: SampleSequence | GaussianMixture
    gram: Float[Array, "T T"]
    coefficients: Float[Array, "t t"]
    intervals: Float[Array, " t"]
    regularizer: Float[Array, ""]
    step_weights: Float[Array, " t"]
    form: Literal["next", "change"] = eqx.field(static=True)


def fit_dynamics(
    kernel: Any,
    sets: SampleSequence | GaussianMixture,
    *,
    regularizer: ArrayLike | None = None,
    step_weights: ArrayLike | None = None,
    times: ArrayLike | None = None,
    form: Literal["next", "change"] = "next",
    block: int | None = None,
) -> DistributionDynamics:
    r"""Learn how a distribution changes from one sample to the next, by vector-valued ridge
    regression
    (L15 eqs 3 and 4),

    $$ \min_A \sum_{t=1}^{T-1} \gamma_t | \hat\mu_{t+1} - A \hat\mu_t |^2 + \lambda |A|^2, \qquad
       W = \Gamma^{1/2} (\Gamma^{1/2} K \Gamma^{1/2} + \lambda I)^{-1} \Gamma^{1/2}, $$

    with the Gram matrix $K_{st} = \langle \hat\mu_s, \hat\mu_t \rangle$ of the first T - 1
    embeddings.

    **Arguments:**

    - `kernel`: of the points; `TensorProduct((kernel_x, Delta()))` for points with labels.
    - `sets`: T >= 2 samples, from `sample_sequence`; or a `GaussianMixture` with a leading axis of
      T, for the limit of infinite samples under a Gaussian kernel.
    - `regularizer`: $\lambda \ge 0$, as printed: not multiplied by the number of steps. L15 takes 1
      / n for samples of n points. None takes the mean of `sampling_noise`, which is better in all
      of its settings, times the mean of $\Delta_t^2$, so that no forecast depends on the unit of
      `times`; `rolling_origin_errors` chooses one where more than noise must be smoothed. 0
      interpolates, with the smallest A that does.
    - `step_weights`: $\gamma_t \ge 0$ `[T - 1]`, of the step from set t to t + 1; 1 by default. For
      L15's $\rho^{-t}$ see `recency_weights`; `jnp.sqrt(sets.sizes[1:])` weighs by size.
    - `times`: `[T]`, increasing, of the samples; equal steps of 1 by default. Unequal ones need the
      form "change".
    - `form`: "next", the paper's; or "change", which regresses the rate of change, $(\hat\mu_{t+1}
      - \hat\mu_t) / \Delta_t \approx B \hat\mu_t$ with weights $\gamma_t \Delta_t^2$: steps may be
      unequal, and a large regularizer predicts the last set, not 0.

    **Returns:** a `DistributionDynamics`. Cost O(T^2 n^2 d + T^3).

    **Raises:** `ValueError` for fewer than two sets, a negative regularizer, step weights or times
    of a wrong length or order.
    """
    kernel = as_kernel(kernel)
    count = _length(sets)
    if count < 2:
        raise ValueError(
            f"`sets` holds {count} sample; dynamics need at least two, one step from each to the "
            f"next."
        )
    form = as_form(form)
    gram = embedding_gram(kernel, sets, block=block)
    gammas = as_step_weights(step_weights, gram)
    intervals = _intervals(times, count, form).astype(gram.dtype)
    if regularizer is None:
        ridge = noise_ridge(jnp.mean(_noise(kernel, sets, gram)), intervals)
    else:
        ridge = as_non_negative(regularizer, "regularizer", scalar=True).astype(gram.dtype)
    matrix = coefficient_matrix(gram, gammas, intervals, ridge)
    return DistributionDynamics(kernel, sets, gram, matrix, intervals, ridge, gammas, form)


def _noise(
    kernel: AbstractKernel, sets: SampleSequence | GaussianMixture, gram: Float[Array, "T T"]
) -> Float[Array, " T"]:
    if isinstance(sets, GaussianMixture):
        return jnp.zeros(gram.shape[0], gram.dtype)
    return sampling_noise(kernel, sets, squared_norms=jnp.diagonal(gram))


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


def as_form(form: Any) -> Literal["next", "change"]:
    """What is regressed on an embedding: the next one, or the change to it."""
    if form not in ("next", "change"):
        raise ValueError(f'`form` must be "next" or "change", got {form!r}.')
    return form


def _length(sets: SampleSequence | GaussianMixture) -> int:
    leading = sets.weights if isinstance(sets, SampleSequence) else sets.shares
    if leading.ndim != 2:
        raise ValueError(
            f"`sets` must be one sequence, [T, ...]; this one has shape {leading.shape}. Use "
            f"`vmap` for several."
        )
    return leading.shape[0]


def _intervals(times: ArrayLike | None, count: int, form: str) -> Float[Array, " t"]:
    if times is None:
        return jnp.ones(count - 1)
    times = jnp.asarray(times)
    if times.shape != (count,):
        raise ValueError(
            f"`times` has shape {times.shape}; it must hold one time for each of {count} sets."
        )
    if form == "next":
        raise ValueError(
            'Times of the samples need the form "change": the paper\'s "next" assumes equal steps.'
        )
    return as_positive(jnp.diff(times), "steps of times")


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
    # dependent.
    cutoff = 10 * root.shape[0] * jnp.finfo(gram.dtype).eps
    inverse = jnp.linalg.pinv(scaled, rtol=cutoff, hermitian=True)
    return root[:, None] * (inverse + inverse.T) / 2 * root[None, :]


def advance(
    model: DistributionDynamics,
    matrix: Float[Array, "t t"],
    c: Float[Array, " T"],
    length: Float[Array, ""],
) -> Float[Array, " T"]:
    """Coefficients of the operator with coefficients `matrix`, applied to sum_t c_t mu_t over a
    time `length`.
    """
    rates = matmul(matrix, matmul(model.gram[:-1], c))
    shifted = jnp.concatenate([jnp.zeros(1, c.dtype), rates / model.intervals])
    return shifted if model.form == "next" else c + length * (shifted - jnp.roll(shifted, -1))


def forecast(
    model: DistributionDynamics,
    steps: int = 1,
    *,
    length: ArrayLike | None = None,
    start: ArrayLike | None = None,
) -> Float[Array, "steps T"]:
    r"""Coefficients $\beta^{(k)}$ of the predictions 1, ..., `steps` k steps ahead, $\tilde\mu =
    \sum_t
    \beta_t \hat\mu_t$ (L15 eq 5).

    With the form "next", $\beta^{(k)} = (W C)^k e_T$ with $C_{st} = \langle \hat\mu_s,
    \hat\mu_{t+1} \rangle$, and the first is 0.

    **Arguments:** `steps` (static); `length` of a step in the units of `times`, by default the mean
    interval (form "change" only); `start` `[T]`, coefficients of the embedding to start from, by
    default the last set.

    **Returns:** `[steps, T]`. They need not sum to 1: mass is lost as lambda grows; see
    `normalize`. Cost O(steps T^2).
    """
    steps = as_count(steps, "steps")
    count, dtype = model.gram.shape[0], model.gram.dtype
    if length is not None and model.form == "next":
        raise ValueError(
            'A `length` of the steps needs the form "change"; the form "next" takes steps as observed.'
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

    def step(c, _):
        c = advance(model, model.coefficients, c, length)
        return c, c

    return jax.lax.scan(step, c, length=steps)[1]


def extrapolate(
    model: DistributionDynamics,
    steps: int = 1,
    *,
    length: ArrayLike | None = None,
    normalize: bool = False,
) -> Embedding | GaussianMixture:
    r"""The predicted distribution $\tilde\mu_{T + k} = \tilde A^k \hat\mu_T$, `steps` k steps ahead
    (L15 eqs 5 and 8, algorithm 1).

    **Arguments:** as `forecast`; `normalize` divides by the sum of the coefficients, which restores
    lost mass before herding (guarded as the function `normalize`).

    **Returns:** an `Embedding` of all points with signed weights $c_t w_{ti}$; a `GaussianMixture`
    if the model has mixtures. For several horizons: `jax.vmap(lambda c: combine(kernel, sets,
    c))(forecast(model, steps))`.
    """
    c = forecast(model, steps, length=length)[-1]
    if normalize:
        c = normalized(c)
    if isinstance(model.sets, SampleSequence):
        return combine(model.kernel, model.sets, c)
    sets = model.sets
    means, covariances = (
        leaf.reshape(-1, *leaf.shape[2:]) for leaf in (sets.means, sets.covariances)
    )
    return GaussianMixture(means, covariances, (c[:, None] * sets.shares).reshape(-1))


def recency_weights(count: int, decay: ArrayLike) -> Float[Array, " t"]:
    r"""L15's step weights $\rho^{-t}$ (section 2.2) for `count` sets, `[count - 1]`, divided by
    their
    mean so that one regularizer serves every decay $0 < \rho \le 1$; the last step weighs most.
    """
    count = as_count(count, "count")
    if count < 2:
        raise ValueError("`count` is the number of sets; there are steps from 2 on.")
    decay = as_positive(decay, "decay", scalar=True)
    weights = decay ** jnp.arange(count - 2, -1, -1).astype(decay.dtype)
    return weights / jnp.mean(weights)
