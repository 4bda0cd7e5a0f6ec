"""A forecast without parameters to choose.

Many learned dynamics, combined by how their errors on observed steps cancel.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._checks import as_positive
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float
from ..embedding import GaussianMixture, normalized
from ._dynamics import DistributionDynamics, forecast, noise_ridge
from ._selection import forward_predictions, intervals_of, left_out_predictions, refitted
from ._sets import sampling_noise

#: Regularizers, in units of the sampling noise of the embeddings.
_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

#: What is regressed, and whether predictions are divided by their mass.
_FAMILIES = (("next", False), ("next", True), ("change", False))

_DESCENT_STEPS = 1000


class Stacked(eqx.Module):
    r"""What `stacked_forecast` found: `coefficients` `[T]` of the prediction for `combine`, and the
    shares of its candidates: `shares` `[3, m]` of the form "next", the same with its mass restored,
    and the form "change", by regularizer; and the share of the straight line, `line`.
    """

    coefficients: Float[Array, " T"]
    shares: Float[Array, "3 m"]
    line: Float[Array, ""]


def stacked_forecast(
    model: DistributionDynamics, *, factors: Sequence[float] | ArrayLike = _FACTORS
) -> Stacked:
    r"""A one-step prediction that needs no regularizer: a convex combination of the predictions of
    many
    (stacking; Wolpert 1992).

    Candidates are both forms of `fit_dynamics`, "next" with and without its mass restored, with
    regularizers $f \sigma^2$ for the mean `sampling_noise` $\sigma^2$ of the embeddings (for
    "change" times the mean of $\Delta_t^2$, as in `fit_dynamics`); and the straight line $a + b t$
    through the embeddings by least squares, which a mixture follows whose shares drift evenly.
    Their shares $\pi$ minimize the squared RKHS error of the combination on steps that were
    observed, each predicted without being known,

    $$ \min_{\pi \ge 0, \sum_c \pi_c = 1} \operatorname{mean}_{t, \text{left out}} | \sum_c \pi_c
       e_{ct} |^2
       + \operatorname{mean}_{t, \text{ahead}} | \sum_c \pi_c e_{ct} |^2 + \sigma^2 |\pi|^2, $$

    all steps but the first left out in turn, and the sets from half of the sequence on predicted
    from those before. Where "next", which shrinks to 0, and "change", which shrinks to the last
    set, err to opposite sides, their errors cancel.

    **Arguments:** `model`, whose Gram matrix is used, with step weights and times (its form and
    regularizer are not). "next" takes unequal steps as equal; its errors on those observed show
    what that costs. `factors` f `[m]`.

    **Returns:** a `Stacked`. Cost O(m T^4) and a descent of O(m^2) steps; no gradient flows through
    the shares.

    **Raises:** `ValueError` for fewer than four sets, or infinite samples, which have no noise.
    """
    count = model.gram.shape[0]
    if count < 4 or isinstance(model.sets, GaussianMixture):
        raise ValueError(
            f"Stacking needs at least 4 sampled sets to judge predictions by, got {count}; use "
            f"`forecast`."
        )
    factors = as_positive(jnp.asarray(factors), "factors").astype(model.gram.dtype)
    noise = jnp.mean(
        sampling_noise(model.kernel, model.sets, squared_norms=jnp.diagonal(model.gram))
    )
    return _stack(
        model,
        factors,
        jnp.maximum(noise, jnp.finfo(model.gram.dtype).eps * jnp.mean(jnp.diagonal(model.gram))),
    )


@eqx.filter_jit
def _stack(
    model: DistributionDynamics, factors: Float[Array, " m"], noise: Float[Array, ""]
) -> Stacked:
    count = model.gram.shape[0]
    first = min(2 + (count - 1) // 2, count - 1)
    identity = jnp.eye(count, dtype=model.gram.dtype)

    def candidate(factor, form, restored):
        intervals = intervals_of(model, form)
        one = refitted(
            model, noise_ridge(factor * noise, intervals), model.step_weights, intervals, form
        )
        found = forecast(one), left_out_predictions(one)[1:], forward_predictions(one, first, 1)
        return tuple(normalized(c) for c in found) if restored else found

    families = [
        jax.vmap(lambda f, a=form, b=restored: candidate(f, a, b))(factors)
        for form, restored in _FAMILIES
    ]
    predictions, left_out, ahead = (
        jnp.concatenate([*parts, line[None]])
        for *parts, line in zip(*families, _line(model, first), strict=True)
    )
    quadratic = noise * jnp.eye(predictions.shape[0], dtype=noise.dtype)
    for errors in (left_out - identity[2:], ahead - identity[first:]):
        smoothed = matmul(errors, model.gram)
        quadratic = quadratic + jnp.einsum("ati,bti->ab", smoothed, errors) / errors.shape[1]
    shares = _on_simplex(lax.stop_gradient(quadratic))
    return Stacked(
        matmul(shares, predictions[:, 0]), shares[:-1].reshape(len(_FAMILIES), -1), shares[-1]
    )


def _line(
    model: DistributionDynamics, first: int
) -> tuple[Float[Array, "1 T"], Float[Array, "left T"], Float[Array, "ahead T"]]:
    """Coefficients of the line's prediction of the set to come, of each but two sets left out, and
    of those ahead.
    """
    count = model.gram.shape[0]
    times = jnp.concatenate([jnp.zeros(1, model.gram.dtype), jnp.cumsum(model.intervals)])
    coming = times[-1:] + jnp.mean(model.intervals)
    earlier = jnp.tri(count, k=-1, dtype=times.dtype)[first:]
    others = 1 - jnp.eye(count, dtype=times.dtype)[2:]

    def at(time, known):
        mean = matmul(known, times) / jnp.sum(known)
        slope = known * (times - mean) / jnp.sum(known * (times - mean) ** 2)
        return known / jnp.sum(known) + slope * (time - mean)

    everything = jnp.ones((1, count), times.dtype)
    return tuple(
        jax.vmap(at)(*case)
        for case in ((coming, everything), (times[2:], others), (times[first:], earlier))
    )


def _on_simplex(quadratic: Float[Array, "c c"]) -> Float[Array, " c"]:
    """Argmin of w' Q w over w >= 0 with sum 1, by accelerated projected gradient descent."""
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
