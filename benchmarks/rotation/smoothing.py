r"""Smoothing against filtering on the rotation dynamics of F11 and S13, beside the optimal filter
and smoother.

    python -m benchmarks.rotation.smoothing [repetitions [T ...]]

The systems, the sizes T of the training sequence and the test sequences (200 steps, 20 of burn-in)
are those of `benchmarks.rotation.dynamics`. Beliefs given the observations up to 1, 2 or 5 steps
after the state, and given all of them; the mean squared error of each, as a ratio to that of the
optimal filter (a particle filter which knows the true model) and of the optimal smoother of the
same lag (700 particles: a percent or two of Monte-Carlo error), on the same test sequences; and
paired differences to filtering. The defaults are 12 repetitions at T = 200 and 400 and 6 at T =
800; cells that are not run keep their last results.

Filter and smoother have the same six candidates for the filter's parameters, the smoother three
regularizers more. Both are chosen by halving the training sample: fit on one half, run on the
other, and the reverse; the filter by its filtering error, the smoother by its error given the whole
sequence, for every lag.

Extended and unscented Kalman filters and smoothers with the true model are those of dynamax; how
far its filters are from the ones in `benchmarks.rotation.references` is reported too.
"""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from ..models import importance_filter
from .dynamics import (
    BURN_IN,
    EPSILON,
    STATE_SCALE,
    TEST,
    TRANSITION_EPSILON,
    squared_errors,
)
from .peers import kalman_estimates
from .references import (
    SYSTEMS,
    extended_kalman,
    particle_filter,
    particle_smoother,
    simulate,
    unscented_kalman,
)

REPETITIONS, LAGS = {200: 12, 400: 12, 800: 6}, (1, 2, 5, None)
STATE_RANK, OBSERVATION_RANK, TRUNCATION = 60, 40, 0.03
# Observation bandwidths in medians; delta = d / h_o^2, as in the filtering benchmark.
CANDIDATES = np.asarray(list(itertools.product((0.9, 1.5, 2.5), (0.004, 0.012))))
REGULARIZERS = np.asarray([0.2, 0.6, 2.0])


def fit(states, observations, parameters, stretch, controls=None):
    h_s, h_o = kbr.median_heuristic(states), kbr.median_heuristic(observations)
    scale, d = parameters
    return importance_filter(
        (kbr.Gaussian(STATE_SCALE * h_s), kbr.Gaussian(scale * h_o)),
        states,
        observations,
        ridges=(EPSILON * stretch, TRANSITION_EPSILON * stretch),
        delta=d / scale**2,
        ranks=(STATE_RANK, OBSERVATION_RANK),
        truncation=TRUNCATION,
        controls=controls,
    )


def smooth(filt, run, regularizer, **options):
    """Smoothed means."""
    options = {"estimator": "importance", "clipping": filt.clipping, **options}
    return kbr.mean(kbr.smooth(filt, run, regularizer=regularizer, **options))


@eqx.filter_jit
def all_candidates(states, observations, tests):
    """Filtered estimates `[candidates, T, 2]`, smoothed ones `[candidates, regularizers, T, 2]`.

    For half of the training sample.
    """

    def candidate(parameters):
        filt = fit(states, observations, parameters, 2.0)
        run = kbr.run_filter(filt, tests)
        smoothed = functools.partial(smooth, filt, run)
        return kbr.state_mean(filt, run), jax.lax.map(smoothed, jnp.asarray(REGULARIZERS))

    return jax.lax.map(candidate, jnp.asarray(CANDIDATES))


@eqx.filter_jit
def filtered(states, observations, tests, parameters):
    filt = fit(states, observations, parameters, 1.0)
    return kbr.state_mean(filt, kbr.run_filter(filt, tests))


@eqx.filter_jit
def smoothed(states, observations, tests, parameters, regularizer):
    """Estimates of every lag."""
    filt = fit(states, observations, parameters, 1.0)
    run = kbr.run_filter(filt, tests)
    return [smooth(filt, run, regularizer, lag=lag) for lag in LAGS]


def choose(states, observations):
    """The filter's candidate of least filtering error.

    The smoother's of least smoothing error, with its regularizer.
    """
    half = len(states) // 2
    first, second = slice(0, half), slice(half, 2 * half)
    errors = [
        [
            squared_errors(estimates, states[b], BURN_IN // 2)
            for estimates in all_candidates(states[a], observations[a], observations[b])
        ]
        for a, b in ((first, second), (second, first))
    ]
    filtering, smoothing = (errors[0][i] + errors[1][i] for i in range(2))
    candidate, regularizer = np.unravel_index(np.argmin(smoothing), smoothing.shape)
    return CANDIDATES[np.argmin(filtering)], (CANDIDATES[candidate], REGULARIZERS[regularizer])


def name_of(lag):
    return "all observations" if lag is None else f"lag {lag}"


def repetition(system, size, seed):
    """Mean squared errors, distances between the two EKFs and UKFs, the chosen parameters."""
    rng = np.random.default_rng([seed, size, system == "b"])
    states, observations = simulate(system, size, rng)
    truth, tests = simulate(system, TEST, rng)
    for_filter, for_smoother = choose(states, observations)
    kalman = kalman_estimates(system, tests)
    optimal = particle_smoother(system, tests, rng, LAGS)
    ours = dict(zip(LAGS, smoothed(states, observations, tests, *for_smoother), strict=True))
    estimates = {
        "optimal, filter": particle_filter(system, tests, rng),
        **{f"optimal, {name_of(lag)}": optimal[lag] for lag in LAGS},
        "kernel Bayes, filter": filtered(states, observations, tests, for_filter),
        **{f"kernel Bayes, {name_of(lag)}": ours[lag] for lag in LAGS},
        **{
            f"{kind} (dynamax), {'filter' if pass_ == 'filtered' else name_of(None)}": values
            for (kind, pass_), values in kalman.items()
        },
    }
    peers = {
        "EKF": float(np.max(np.abs(kalman["EKF", "filtered"] - extended_kalman(system, tests)))),
        "UKF": float(np.max(np.abs(kalman["UKF", "filtered"] - unscented_kalman(system, tests)))),
    }
    errors = {
        name: float(squared_errors(value, truth, BURN_IN)) for name, value in estimates.items()
    }
    return errors, peers, [*for_filter, *for_smoother[0], for_smoother[1]]


def summarize(rows):
    columns = {name: np.asarray([errors[name] for errors, _, _ in rows]) for name in rows[0][0]}
    methods = {}
    for name, errors in columns.items():
        method, passes = name.split(", ", 1)
        methods[name] = {
            "mse": float(errors.mean()),
            "to optimal filter": experiment.paired(errors, columns["optimal, filter"]),
            "to optimal of its lag": experiment.paired(errors, columns[f"optimal, {passes}"]),
            "to its filter": experiment.paired(errors, columns[f"{method}, filter"]),
        }
    return {
        "methods": methods,
        "dynamax against benchmarks.rotation.references, largest difference": {
            kind: max(peers[kind] for _, peers, _ in rows) for kind in ("EKF", "UKF")
        },
        "chosen": [list(map(float, chosen)) for _, _, chosen in rows],
    }


def _ratio(cell):
    return f"{cell['ratio']:.3f} ± {cell['ratio_se']:.3f}"


def show(results):
    for title in ("to optimal filter", "to optimal of its lag", "to its filter"):
        methods = [cell["methods"] for cell in results.values()]
        rows = [[name, *(_ratio(c[name][title]) for c in methods)] for name in methods[0]]
        print(experiment.table([f"mean squared error {title}", *results], rows), end="\n\n")


def main(repetitions: int = 0, *sizes: int) -> None:
    show(
        experiment.run_cells(
            "smoothing", REPETITIONS, list(SYSTEMS), repetition, summarize, repetitions, sizes
        )
    )


if __name__ == "__main__":
    experiment.start(main)
