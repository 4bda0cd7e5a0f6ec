r"""The kernel Kalman rule (Gebhardt, Kupcsik and Neumann 2017) against Bayes' rule, on the rotation
dynamics.

    python -m benchmarks.rotation.kernel_kalman [repetitions]

The belief is a mean m and a covariance P in the features phi of r landmarks of the states; with
Phi, Phi+ and Psi the features of training states, successors and observations,
$F = \Phi_+^\top \Phi (\Phi^\top \Phi + n \lambda I)^{-1}$ and
$C = \Psi^\top \Phi (\Phi^\top \Phi + n \lambda I)^{-1}$, each with the covariance V, R of its
residuals,

$$ m^- = F m, \quad P^- = F P F^\top + V, \quad Q = P^- C^\top (C P^- C^\top + R + \kappa
   I)^{-1}, \quad
   m = m^- + Q (\psi(o) - C m^-), \quad P = P^- - Q C P^-. $$

The state is read by ridge regression on the features. Same data as `benchmarks.rotation.dynamics`,
T = 200 and 400; all parameters by halving the training sample: bandwidths, lambda and kappa (with
R, and with kappa I alone as printed); for the kernel Bayes filter those of
`benchmarks.rotation.smoothing`.
Mean squared errors, paired, and the time of a step (200 steps in one scan).
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from .dynamics import BURN_IN, TEST, squared_errors
from .references import OPTIMAL, SYSTEMS, particle_filter, simulate
from .smoothing import CANDIDATES, filtered, fit

REPETITIONS, SIZES, STATE_RANK, OBSERVATION_RANK = 4, (200, 400), 60, 40
# Bandwidths of states and observations in medians, lambda, kappa, and whether R is the residuals'
# covariance.
RULES = np.asarray(
    list(itertools.product((0.5, 1.0, 2.0), (1.0, 2.0), (1e-4, 1e-2), (1e-3, 1e-1), (0.0, 1.0)))
)


def kernel_kalman(states, observations, tests, parameters, stretch):
    """Estimates `[T, 2]`."""
    scale_s, scale_o, ridge, kappa, residuals = parameters
    h_s, h_o = kbr.median_heuristic(states), kbr.median_heuristic(observations)
    model = kbr.fit_conditional(
        kbr.Gaussian(scale_s * h_s),
        kbr.Gaussian(scale_o * h_o),
        states[:-1],
        observations[:-1],
        regularizer=ridge * stretch,
        landmarks_x=STATE_RANK,
        landmarks_y=OBSERVATION_RANK,
    )
    phi, psi = model.features_x.matrix, model.features_y.matrix
    after, count = model.features_x.coordinates(states[1:]), states.shape[0] - 1

    def operator(targets):
        """Ridge regression of the targets on the features, and the covariance of its residuals."""
        matrix = model.factor.solve(phi.T @ targets).T
        rest = targets - phi @ matrix.T
        return matrix, rest.T @ rest / count

    (f, v), (c, r), (readout, _) = operator(after), operator(psi), operator(states[:-1])
    r = residuals * r + kappa * jnp.eye(r.shape[0])

    def step(belief, code):
        mean, covariance = belief
        gain = jnp.linalg.solve(c @ covariance @ c.T + r, c @ covariance).T
        mean = mean + gain @ (code - c @ mean)
        covariance = covariance - gain @ c @ covariance
        covariance = (covariance + covariance.T) / 2
        return (f @ mean, f @ covariance @ f.T + v), readout @ mean

    start = phi.mean(0), jnp.cov(phi.T)
    return jax.lax.scan(step, start, model.features_y.coordinates(tests))[1]


@eqx.filter_jit
def validated(states, observations, tests, rule):
    """Estimates of every candidate, fitted to half of the training sample."""

    def run(parameters):
        if rule:
            return kernel_kalman(states, observations, tests, parameters, 2.0)
        filt = fit(states, observations, parameters, 2.0)
        return kbr.state_mean(filt, kbr.run_filter(filt, tests))

    return jax.lax.map(run, jnp.asarray(RULES if rule else CANDIDATES))


@eqx.filter_jit
def final(states, observations, tests, parameters):
    return kernel_kalman(states, observations, tests, parameters, 1.0)


def choose(states, observations, rule):
    half = len(states) // 2
    parts = slice(0, half), slice(half, 2 * half)
    errors = [
        squared_errors(
            validated(states[a], observations[a], observations[b], rule), states[b], BURN_IN // 2
        )
        for a, b in (parts, parts[::-1])
    ]
    return (RULES if rule else CANDIDATES)[np.argmin(errors[0] + errors[1])]


def repetition(system, size, seed):
    rng = np.random.default_rng([seed, size, system == "b"])
    states, observations = simulate(system, size, rng)
    truth, tests = simulate(system, TEST, rng)
    data = states, observations, tests
    chosen = choose(states, observations, False), choose(states, observations, True)
    estimates = {
        OPTIMAL: particle_filter(system, tests, rng),
        "kernel Bayes filter": filtered(*data, chosen[0]),
        "kernel Kalman rule": final(*data, chosen[1]),
    }
    return {
        name: float(squared_errors(value, truth, BURN_IN)) for name, value in estimates.items()
    }, chosen


def milliseconds_a_step(states, observations, tests, chosen):
    """Of a fitted filter.

    The time of a run over the tests less that of one over a single observation, which is the fit's.
    """

    def run(function, parameters):
        whole = experiment.milliseconds(lambda: function(states, observations, tests, parameters))
        return (
            whole
            - experiment.milliseconds(lambda: function(states, observations, tests[:1], parameters))
        ) / (TEST - 1)

    return {
        "kernel Bayes filter": run(filtered, chosen[0]),
        "kernel Kalman rule": run(final, chosen[1]),
    }


def summarize(rows):
    found = experiment.columns([errors for errors, _ in rows])
    base = found[OPTIMAL]
    return {
        "to optimal": {name: experiment.paired(errors, base) for name, errors in found.items()},
        "rule to filter": experiment.paired(
            found["kernel Kalman rule"], found["kernel Bayes filter"]
        ),
        "chosen": rows[-1][1],
    }


def main(repetitions: int = 0, *sizes: int) -> None:
    results = experiment.run_cells(
        "kernel_kalman",
        dict.fromkeys(SIZES, REPETITIONS),
        list(SYSTEMS),
        repetition,
        summarize,
        repetitions,
        sizes,
    )
    experiment.show_ratios(results, "to optimal")
    for size, system in itertools.product(SIZES, SYSTEMS):
        cell = results[f"({system}) T = {size}"]
        states, observations = simulate(system, size, np.random.default_rng(0))
        tests = simulate(system, TEST, np.random.default_rng(1))[1]
        cell["milliseconds a step"] = milliseconds_a_step(
            states, observations, tests, cell["chosen"]
        )
        print(f"({system}) T = {size}: ms a step", cell["milliseconds a step"])
    experiment.save("kernel_kalman", results)


if __name__ == "__main__":
    experiment.start(main)
