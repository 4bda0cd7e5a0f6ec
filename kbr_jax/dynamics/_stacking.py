"""A forecast without parameters to choose.

Many learned dynamics, combined by how their errors on observed steps cancel.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import as_count, check_choice
from .._numerics import HIGHEST, matmul, safe_divide
from .._typing import Array, Float, with_numbers
from ..embedding import Embedding, normalized
from ._dynamics import DistributionDynamics, advance, forecast_coefficients, noise_ridge, sets_of
from ._selection import intervals_of, left_out_predictions, refitted, rolling_origin_predictions
from ._sets import combine, mean_noise

#: Regularizers, in units of the sampling noise of the embeddings.
_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

#: What is regressed, and whether predictions are divided by their mass.
_FAMILIES = (("next", False), ("next", True), ("change", False))

_DESCENT_STEPS = 1000


class StackedForecast(eqx.Module):
    """What `stacked_forecast` found.

    - `coefficients` `[T]` of the prediction, for `combine`.
    - `shares` `[families, m]` of the ridge regressions, by regularizer. Families: "next", "next"
      with its mass restored, "change"; beyond one step ahead only the last two, which keep mass.
    - `line`: the share of the straight line.
    """

    coefficients: Float[Array, " T"]
    shares: Float[Array, "families m"]
    line: Float[Array, ""]

    __repr__ = with_numbers


def stacked_forecast(model: DistributionDynamics, steps: int = 1) -> StackedForecast:
    r"""Predict without a regularizer to choose, by stacking many predictions (Wolpert 1992).

    The candidates are both forms of `fit_dynamics` with regularizers $f \sigma^2$, where $\sigma^2$
    is the mean `sampling_noise` of sets of more than one point, and f = 1/2, 1, ..., 16 (for
    "change" times the mean of $\Delta_t^2$). One more is the straight line $a + b t$ through the
    embeddings by least squares. A mixture whose shares drift evenly follows it. The shares $\pi$
    minimize

    $$ \operatorname{mean}_{t, \text{left out}} | \sum_c \pi_c e_{ct} |^2
       + \operatorname{mean}_{t, \text{ahead}} | \sum_c \pi_c e_{ct} |^2 + \sigma^2 |\pi|^2,
       \qquad \pi \ge 0, \; \sum_c \pi_c = 1. $$

    The errors e are those of observed sets, each predicted without being known: all steps but the
    first left out in turn, and the sets from half of the sequence on predicted from those before.
    "next" shrinks to 0 and "change" to the last set. Where they err to opposite sides, their errors
    cancel.

    Several steps ahead no step is left out, all sets from number k + 2 on are predicted, "next" is
    divided by its mass after each step. Sets of one mass give a prediction of that mass. Its
    distance in the RKHS is then often larger than that of the ridge forecast, which loses mass and
    goes to 0.

    **Arguments:** `model`: its Gram matrix, step weights and times are used, its form and
    regularizer are not. "next" takes unequal steps as equal. `steps` ahead k (static).

    **Returns:** a `StackedForecast`. Cost O(m T^4) and a descent of O(m^2) steps. No gradient flows
    through the shares.

    **Raises:** `ValueError` for fewer than max(4, k + 2) sets, and for a model without `sets`.
    """
    count, steps, sets = model.gram.shape[0], as_count(steps, "steps"), sets_of(model)
    if count < max(4, steps + 2):
        raise ValueError(
            f"Stacking needs at least {max(4, steps + 2)} sampled sets to judge predictions by, "
            f"got {count}; use `estimator='ridge'`."
        )
    norms = jnp.diagonal(model.gram)
    noise = mean_noise(model.kernel, sets, norms, "use `estimator='ridge'`")
    floor = jnp.finfo(model.gram.dtype).eps * jnp.mean(jnp.diagonal(model.gram))
    return _stack(model, jnp.maximum(noise, floor), steps)


def extrapolate(
    model: DistributionDynamics,
    steps: int = 1,
    *,
    estimator: Literal["stacked", "ridge"] = "stacked",
) -> Embedding:
    r"""Predict the distribution `steps` steps ahead (L15 eqs 5 and 8, algorithm 1).

    - `"stacked"`: the combination of `stacked_forecast`. It uses neither the form nor the
      regularizer of the model. From two steps ahead on it keeps the mass of the sets.
    - `"ridge"`: $\tilde\mu_{T + k} = \tilde A^k \hat\mu_T$ with the operator of the model, as in
      L15. Mass is lost as the regularizer and k grow; `normalize` restores it.

    **Returns:** an `Embedding` of all points with signed weights $c_t w_{ti}$. Cost as
    `stacked_forecast`, or O(steps T^2). For several horizons:
    `combine(kernel, sets, forecast_coefficients(model, steps))`.

    **Raises:** `ValueError` for an unknown estimator, for a model without `sets`, and as
    `stacked_forecast`.

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 8)
    >>> sets = [jax.random.normal(key, (200,)) + 0.2 * t for t, key in enumerate(keys)]
    >>> sequence = kbr.dynamics.sample_sequence(sets)
    >>> model = kbr.dynamics.fit_dynamics(kbr.Gaussian(1.0), sequence)
    >>> future = kbr.dynamics.extrapolate(model)
    >>> bool(kbr.mean(future) > sets[-1].mean())
    True
    """
    check_choice(estimator, "estimator", "stacked", "ridge")
    if estimator == "stacked":
        coefficients = stacked_forecast(model, steps).coefficients
    else:
        coefficients = forecast_coefficients(model, steps)[-1]
    return combine(model.kernel, sets_of(model), coefficients)


@eqx.filter_jit
def _stack(model: DistributionDynamics, noise: Float[Array, ""], steps: int) -> StackedForecast:
    count = model.gram.shape[0]
    first = min(2 + (count - 1) // 2, count - 1) if steps == 1 else 2
    identity = jnp.eye(count, dtype=model.gram.dtype)
    factors = jnp.asarray(_FACTORS, model.gram.dtype)
    families = _FAMILIES if steps == 1 else _FAMILIES[1:]

    def candidate(factor, form, restored):
        intervals = intervals_of(model, form)
        one = refitted(
            model, noise_ridge(factor * noise, intervals), model.step_weights, intervals, form
        )
        length, c = jnp.mean(intervals), identity[-1]
        for _ in range(steps):
            c = advance(one, c, length)
            c = normalized(c) if restored else c
        left_out = left_out_predictions(one)[1:]
        left_out = normalized(left_out) if restored else left_out
        return c[None], left_out, rolling_origin_predictions(one, first, steps, restored)

    parts = [
        jax.vmap(lambda f, a=form, b=restored: candidate(f, a, b))(factors)
        for form, restored in families
    ]
    predictions, left_out, ahead = (
        jnp.concatenate([*part, line[None]])
        for *part, line in zip(*parts, _line(model, first, steps), strict=True)
    )
    quadratic = noise * jnp.eye(predictions.shape[0], dtype=noise.dtype)
    # Steps of weight 0 lead to or from sets that say nothing.
    known = (model.step_weights > 0).astype(noise.dtype)
    on_the_way = jnp.stack([known[first - 1 + k : count - steps + k] for k in range(steps)])
    errors = [(left_out - identity[2:], known[1:])] if steps == 1 else []
    for error, counted in (
        *errors,
        (ahead - identity[first - 1 + steps :], jnp.min(on_the_way, axis=0)),
    ):
        smoothed = matmul(error, model.gram) * counted[:, None]
        products = jnp.einsum("ati,bti->ab", smoothed, error, precision=HIGHEST)
        quadratic = quadratic + safe_divide(products, jnp.sum(counted))
    shares = _on_simplex(lax.stop_gradient(quadratic))
    return StackedForecast(
        matmul(shares, predictions[:, 0]), shares[:-1].reshape(len(families), -1), shares[-1]
    )


def _line(
    model: DistributionDynamics, first: int, steps: int
) -> tuple[Float[Array, "1 T"], Float[Array, "left T"], Float[Array, "ahead T"]]:
    """Coefficients of the line's predictions: of the set to come, left out, and ahead."""
    count = model.gram.shape[0]
    times = jnp.concatenate([jnp.zeros(1, model.gram.dtype), jnp.cumsum(model.intervals)])
    coming = times[-1:] + steps * jnp.mean(model.intervals)
    step_known = jnp.pad((model.step_weights > 0).astype(times.dtype), 1)
    touched = jnp.maximum(step_known[:-1], step_known[1:])
    earlier = touched * jnp.tri(count, k=-steps, dtype=times.dtype)[first - 1 + steps :]
    others = touched * (1 - jnp.eye(count, dtype=times.dtype)[2:])

    def at(time, known):
        mean = safe_divide(matmul(known, times), jnp.sum(known))
        slope = safe_divide(known * (times - mean), jnp.sum(known * (times - mean) ** 2))
        return safe_divide(known, jnp.sum(known)) + slope * (time - mean)

    everything = touched[None]
    return tuple(
        jax.vmap(at)(*case)
        for case in (
            (coming, everything),
            (times[2:], others),
            (times[first - 1 + steps :], earlier),
        )
    )


def _on_simplex(quadratic: Float[Array, "c c"]) -> Float[Array, " c"]:
    """Argmin of w' Q w on the simplex, by accelerated projected gradient descent."""
    # In a unit of its own: squares of its entries may leave the range of float32.
    quadratic = safe_divide(quadratic, jnp.max(jnp.abs(quadratic)))
    rate = 1 / jnp.linalg.norm(quadratic)

    def step(_, carry):
        w, ahead, momentum = carry
        with jax.numpy_dtype_promotion("standard"):  # optax mixes counts with floats
            new = optax.projections.projection_simplex(
                ahead - rate * matmul(quadratic, ahead)
            ).astype(w.dtype)
        following = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
        return new, new + (momentum - 1) / following * (new - w), following

    start = jnp.full(quadratic.shape[0], 1 / quadratic.shape[0], quadratic.dtype)
    return lax.fori_loop(0, _DESCENT_STEPS, step, (start, start, jnp.ones((), quadratic.dtype)))[0]
