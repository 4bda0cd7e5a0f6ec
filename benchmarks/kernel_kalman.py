r"""The kernel Kalman rule (Gebhardt, Kupcsik and Neumann 2017) against Bayes' rule, on the rotation
dynamics.

    python -m benchmarks.kernel_kalman [repetitions]

The belief is a mean m and a covariance P in the features phi of r landmarks of the states; with
Phi, Phi+ and Psi the features of training states, successors and observations,
$F = \Phi_+^\top \Phi (\Phi^\top \Phi + n \lambda I)^{-1}$ and
$C = \Psi^\top \Phi (\Phi^\top \Phi + n \lambda I)^{-1}$, each with the covariance V, R of its
residuals,

$$ m^- = F m, \quad P^- = F P F^\top + V, \quad Q = P^- C^\top (C P^- C^\top + R + \kappa
   I)^{-1}, \quad
   m = m^- + Q (\psi(o) - C m^-), \quad P = P^- - Q C P^-. $$

The state is read by ridge regression on the features. Same data as `benchmarks.rotation_dynamics`,
T = 200 and 400; all parameters by halving the training sample: bandwidths, lambda and kappa (with
R, and with kappa I alone as printed); for the kernel Bayes filter those of `benchmarks.smoothing`.
Mean squared errors, paired, and the time of a step (200 steps in one scan).
"""

import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr

from . import reporting
from .rotation_dynamics import BURN_IN, TEST, squared_errors
from .rotation_references import SYSTEMS, particle_filter, simulate
from .smoothing import CANDIDATES, filtered, fit, paired

COMMAND = "python -m benchmarks.kernel_kalman"
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
        "optimal (particle filter, true model)": particle_filter(system, tests, rng),
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
        whole = reporting.milliseconds(lambda: function(states, observations, tests, parameters))
        return (
            whole
            - reporting.milliseconds(lambda: function(states, observations, tests[:1], parameters))
        ) / (TEST - 1)

    return {
        "kernel Bayes filter": run(filtered, chosen[0]),
        "kernel Kalman rule": run(final, chosen[1]),
    }


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    count, results = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS, {}
    with tqdm(total=len(SIZES) * len(SYSTEMS) * count, unit="run") as bar:
        for size, system in itertools.product(SIZES, SYSTEMS):
            rows, chosen = [], None
            for seed in range(count):
                row, chosen = repetition(system, size, seed)
                rows.append(row)
                bar.update()
            columns = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
            states, observations = simulate(system, size, np.random.default_rng(0))
            tests = simulate(system, TEST, np.random.default_rng(1))[1]
            results[f"({system}) T = {size}"] = {
                "repetitions": count,
                "to optimal": {
                    name: paired(errors, next(iter(columns.values())))
                    for name, errors in columns.items()
                },
                "rule to filter": paired(
                    columns["kernel Kalman rule"], columns["kernel Bayes filter"]
                ),
                "milliseconds a step": milliseconds_a_step(states, observations, tests, chosen),
            }
            reporting.save("kernel_kalman", COMMAND, results)
    cells = results.values()
    rows = [
        [
            name,
            *(
                f"{c['to optimal'][name]['ratio']:.3f} ± {c['to optimal'][name]['ratio_se']:.3f}"
                for c in cells
            ),
        ]
        for name in next(iter(cells))["to optimal"]
    ]
    for name in ("kernel Bayes filter", "kernel Kalman rule"):
        rows.append(
            [f"{name}, ms a step", *(f"{c['milliseconds a step'][name]:.3f}" for c in cells)]
        )
    print(reporting.table(["mean squared error / optimal", *results], rows))


if __name__ == "__main__":
    main()
