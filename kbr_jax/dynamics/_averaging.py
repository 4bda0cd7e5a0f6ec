"""A forecast without parameters to choose: many learned dynamics, averaged by how well they predicted what was observed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._checks import as_positive
from .._typing import Array, ArrayLike, Float
from ..embedding import GaussianMixture
from ._dynamics import DistributionDynamics, forecast
from ._selection import forward_errors, leave_one_out_errors, refit_dynamics
from ._sets import sampling_noise

#: Regularizers, in units of the sampling noise of the embeddings.
_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

#: A score below this share of the noise is not told from 0.
_FLOOR = 0.05


def averaged_forecast(
    model: DistributionDynamics, *, factors: Sequence[float] | ArrayLike = _FACTORS, power: ArrayLike = 4.0
) -> Float[Array, " T"]:
    r"""Coefficients of a one-step prediction that needs no regularizer: both forms of `fit_dynamics` with regularizers
    $\lambda = f \sigma^2$, averaged with weights $s^{-p}$.

    $\sigma^2$ is the mean `sampling_noise` of the embeddings, and s the error of a candidate on observed steps less that noise:
    the mean of `leave_one_out_errors` (but for the first step, before all others) plus that of `forward_errors` from half of
    the sets on. "next" shrinks to 0 and "change" to the last set; where neither is right their errors partly cancel.

    **Arguments:** `model`, whose Gram matrix is used, with step weights and times (its form and regularizer are not);
    `factors` f `[m]`; `power` p, 0 for a plain mean.

    **Returns:** `[T]`, for `mix_sets`. Cost O(m T^4). **Raises:** `ValueError` for fewer than four sets, unequal times, or
    infinite samples, which have no noise.
    """
    count = model.gram.shape[0]
    if count < 4 or isinstance(model.sets, GaussianMixture):
        raise ValueError(
            f"Averaging needs at least 4 sampled sets to judge predictions by, got {count}; use `forecast`."
        )
    factors = as_positive(jnp.asarray(factors), "factors").astype(model.gram.dtype)
    noise = jnp.mean(sampling_noise(model.kernel, model.sets, squared_norms=jnp.diagonal(model.gram)))
    first = min(2 + (count - 1) // 2, count - 1)

    def candidate(form, factor):
        one = refit_dynamics(model, regularizer=factor * noise, form=form)
        errors = jnp.mean(leave_one_out_errors(one)[1:]) + jnp.mean(forward_errors(one, first=first)) - 2 * noise
        return forecast(one)[0], jnp.maximum(errors, _FLOOR * noise)

    found = [jax.vmap(lambda factor, form=form: candidate(form, factor))(factors) for form in ("next", "change")]
    predictions, errors = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
    # Relative to the least, so that no power overflows.
    shares = (jnp.min(errors) / errors) ** jnp.asarray(power, errors.dtype)
    return jnp.sum((shares / jnp.sum(shares))[:, None] * predictions, axis=0)
