"""Extended and unscented Kalman filters and smoothers of dynamax, with the true model of the
rotation dynamics.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .references import FREQUENCY, NOISE, SYSTEMS

#: Of the first state: so wide that the first observation decides, as in `rotation_references`.
_START = 1e6


def _transition(state, system):
    eta, b = SYSTEMS[system]
    angle = jnp.arctan2(state[1], state[0]) + eta
    return (1 + b * jnp.sin(FREQUENCY * angle)) * jnp.stack([jnp.cos(angle), jnp.sin(angle)])


@functools.cache
def _programs(system):
    try:
        from dynamax.nonlinear_gaussian_ssm import (
            ParamsNLGSSM,
            UKFHyperParams,
            extended_kalman_smoother,
            unscented_kalman_smoother,
        )
    except ImportError as error:
        raise SystemExit(
            "This benchmark compares with dynamax: pip install 'kbr_jax[benchmarks]'."
        ) from error

    def parameters(first) -> Any:
        noise = NOISE**2 * jnp.eye(2)
        return ParamsNLGSSM(
            initial_mean=first,
            initial_covariance=_START * jnp.eye(2),
            dynamics_function=lambda state: _transition(state, system),
            dynamics_covariance=noise,
            emission_function=lambda state: state,
            emission_covariance=noise,
        )

    def extended(observations):
        return extended_kalman_smoother(parameters(observations[0]), observations)

    def unscented(observations):
        points = UKFHyperParams(alpha=1.0, beta=0, kappa=1)
        return unscented_kalman_smoother(parameters(observations[0]), observations, points)

    return {"EKF": jax.jit(extended), "UKF": jax.jit(unscented)}


def kalman_estimates(system, observations):
    """Filtered and smoothed means `[T, 2]` of both, by name."""
    results = {}
    for name, run in _programs(system).items():
        posterior = run(jnp.asarray(observations))
        results[name, "filtered"] = np.asarray(posterior.filtered_means)
        results[name, "smoothed"] = np.asarray(posterior.smoothed_means)
    return results
