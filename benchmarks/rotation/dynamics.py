r"""Accuracy on the rotation dynamics of F11 (section 5.3) and S13 (section 5.2) against the optimal
filter.

    python -m benchmarks.rotation.dynamics [repetitions [T ...]]

The defaults are 40 repetitions at T = 200 and 400 and 20 at T = 800; cells that are not run keep
their last results.

State (u, v), $\theta_{t+1} = \operatorname{atan2}(v_t, u_t) + \eta$,
$(u, v)_{t+1} = (1 + b \sin(8 \theta_{t+1})) (\cos\theta_{t+1}, \sin\theta_{t+1})$ plus noise,
observed with noise, both N(0, 0.2^2 I); (a) eta = .3, b = 0; (b) eta = .4, b = .4. Train on T
steps, test on 200 (20 of burn-in): squared error of the state, as a ratio to that of a bootstrap
particle filter which knows the true model, on the same test sequences.

All parameters are chosen by halving the training sample: fit on one half, filter the other, and the
reverse. "Selected" takes the candidate of least validation error V; "averaged" averages the
candidates' estimates with weights exp(-T (V / min V - 1) / 3).
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from ..models import importance_filter
from .references import (
    OPTIMAL,
    SYSTEMS,
    extended_kalman,
    particle_filter,
    simulate,
    unscented_kalman,
)

REPETITIONS, TEST, BURN_IN = {200: 40, 400: 40, 800: 20}, 200, 20
STATE_RANK, OBSERVATION_RANK = 80, 40

# Ours: importance-weighted, two-inverse, clipped. Bandwidths in medians; delta = d / h_o^2.
STATE_SCALE, TRANSITION_EPSILON, EPSILON = 0.33, 2e-4, 6e-4
OBSERVATION_SCALES, D, TRUNCATIONS = (0.9, 1.5, 2.5), (0.004, 0.008, 0.016), (0.0, 0.03, 0.1, 0.2)
# As in the papers: one bandwidth factor for both kernels, one epsilon, signed weights, rule (b),
# shifted.
PAPER_SCALES, PAPER_EPSILONS, PAPER_DELTAS = (
    (0.3, 0.5, 0.7, 1.0),
    (1e-4, 1e-3, 1e-2),
    (1e-5, 1e-4, 1e-3),
)


def _decode(filt, observations):
    return kbr.state_mean(filt, kbr.run_filter(filt, observations))


@eqx.filter_jit
def ours(states, observations, tests, stretch):
    """Estimates `[candidates, T, 2]` of all candidates.

    `stretch` keeps n epsilon constant over sample sizes.
    """
    h_s, h_o = kbr.median_heuristic(states), kbr.median_heuristic(observations)

    def candidate(kernel, landmarks, delta, truncation):
        filt = importance_filter(
            (kbr.Gaussian(STATE_SCALE * h_s), kernel),
            states,
            observations,
            ridges=(EPSILON * stretch, TRANSITION_EPSILON * stretch),
            delta=delta,
            ranks=(STATE_RANK, landmarks),
            truncation=truncation,
        )
        return _decode(filt, tests)

    def of_scale(scale):
        kernel = kbr.Gaussian(scale * h_o)
        landmarks = kbr.greedy_landmarks(
            kernel, observations[: states.shape[0] - 1], rank=OBSERVATION_RANK
        )
        pairs = jnp.asarray(list(itertools.product(D, TRUNCATIONS)))
        return jax.vmap(lambda p: candidate(kernel, landmarks, p[0] / scale**2, p[1]))(pairs)

    estimates = jax.lax.map(of_scale, jnp.asarray(OBSERVATION_SCALES))
    return estimates.reshape(-1, *estimates.shape[2:])


@eqx.filter_jit
def as_in_the_papers(states, observations, tests, stretch):
    """Estimates of all candidates of the filter as S13 prints it."""
    h_s, h_o = kbr.median_heuristic(states), kbr.median_heuristic(observations)

    def candidate(scale, epsilon, delta):
        filt = kbr.fit_filter(
            kbr.Gaussian(scale * h_s),
            kbr.Gaussian(scale * h_o),
            states,
            observations,
            regularizer=epsilon * stretch,
            posterior_regularizer=delta,
            landmarks_states=STATE_RANK,
            landmarks_observations=OBSERVATION_RANK,
            clipping=kbr.Clipping(False, 0.0, False),
        )
        return _decode(filt, tests)

    pairs = jnp.asarray(list(itertools.product(PAPER_EPSILONS, PAPER_DELTAS)))
    estimates = jax.lax.map(
        lambda scale: jax.vmap(lambda p: candidate(scale, p[0], p[1]))(pairs),
        jnp.asarray(PAPER_SCALES),
    )
    return estimates.reshape(-1, *estimates.shape[2:])


@eqx.filter_jit
def ridge_on_windows(states, observations, tests, stretch):
    """Kernel ridge regression of the state on the last 1 to 4 observations (Gaussian kernel).

    No filter.
    """

    def windows(sequence, length):
        index = jnp.maximum(jnp.arange(sequence.shape[0])[:, None] - jnp.arange(length)[None, :], 0)
        return sequence[index].reshape(sequence.shape[0], -1)

    estimates = []
    for length in (1, 2, 3, 4):
        x, query = windows(observations, length), windows(tests, length)
        h = kbr.median_heuristic(x)

        def candidate(p, x=x, query=query, h=h):
            model = kbr.fit_conditional(
                kbr.Gaussian(p[0] * h),
                kbr.Linear(),
                x,
                states,
                regularizer=p[1] * stretch,
                landmarks_y=2,
            )
            return kbr.conditional_expectation(model, query, lambda s: s)

        pairs = itertools.product((0.5, 1.0, 2.0, 4.0), (1e-4, 1e-3, 1e-2, 1e-1))
        estimates.append(jax.lax.map(candidate, jnp.asarray(list(pairs))))
    return jnp.concatenate(estimates)


def squared_errors(estimates, truth, burn_in):
    errors = np.sum((np.nan_to_num(np.asarray(estimates), nan=1e3) - truth) ** 2, axis=-1)[
        ..., burn_in:
    ]
    return np.mean(np.minimum(errors, 10.0), axis=-1)


def choose(method, states, observations, tests):
    """Estimates of the selected candidate, and of the average, by two halves of the training
    sample.
    """
    half = len(states) // 2
    first, second = slice(0, half), slice(half, 2 * half)
    validation = np.mean(
        [
            squared_errors(
                method(states[a], observations[a], observations[b], 2.0), states[b], BURN_IN // 2
            )
            for a, b in ((first, second), (second, first))
        ],
        axis=0,
    )
    weights = np.exp(-(validation / validation.min() - 1) * len(states) / 3)
    estimates = np.asarray(method(states, observations, tests, 1.0))
    return estimates[np.argmin(validation)], np.tensordot(weights / weights.sum(), estimates, 1)


def repetition(system, size, seed):
    """Mean squared error of every method on one training and one test sequence."""
    rng = np.random.default_rng([seed, size, system == "b"])
    states, observations = simulate(system, size, rng)
    truth, tests = simulate(system, TEST, rng)
    selected, averaged = choose(ours, states, observations, tests)
    ridge, ridge_averaged = choose(ridge_on_windows, states, observations, tests)
    estimates = {
        OPTIMAL: particle_filter(system, tests, rng),
        "EKF, true model": extended_kalman(system, tests),
        "UKF, true model": unscented_kalman(system, tests),
        "raw observation": tests,
        "kernel ridge on windows": ridge,
        "kernel ridge on windows, averaged": ridge_averaged,
        "kernel Bayes filter, as in the papers": choose(
            as_in_the_papers, states, observations, tests
        )[0],
        "kernel Bayes filter, selected": selected,
        "kernel Bayes filter, averaged": averaged,
    }
    return {name: float(squared_errors(value, truth, BURN_IN)) for name, value in estimates.items()}


def summarize(rows):
    """Ratio of mean errors to the optimal filter's, and paired differences to ridge regression.

    What is averaged is compared with ridge regression that is averaged too.
    """
    found = experiment.columns(rows)
    summary = experiment.ratios(rows, OPTIMAL)
    for name, errors in found.items():
        ridge = "kernel ridge on windows" + (", averaged" if name.endswith(", averaged") else "")
        pair = experiment.paired(errors, found[ridge])
        summary[name] |= {
            "minus_ridge": pair["difference"],
            "minus_ridge_se": pair["difference_se"],
        }
    return {"methods": summary}


def main(repetitions: int = 0, *sizes: int) -> None:
    results = experiment.run_cells(
        "rotation_dynamics", REPETITIONS, list(SYSTEMS), repetition, summarize, repetitions, sizes
    )
    experiment.show_ratios(results, "methods")


if __name__ == "__main__":
    experiment.start(main)
