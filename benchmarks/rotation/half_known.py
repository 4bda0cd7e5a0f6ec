r"""Filters that know half of the model, on the rotation dynamics: known moves, or a known
likelihood.

    python -m benchmarks.rotation.half_known [repetitions [T ...]]

The defaults are 20 repetitions at T = 50 and T = 200. Systems, noise and measure are those of
`benchmarks.rotation.dynamics`. Every filter is importance-weighted and clipped, with exact Gram
matrices. It chooses among the same candidates (bandwidths, ridges, truncation), by halving its
training sample. "Fully learned" learns both models from the pairs. "Known transition" knows s' ~
N(f(s), .2^2 I), in closed form or by ten draws for each state; "known likelihood" knows p(o | s).
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from .dynamics import BURN_IN, TEST, squared_errors
from .references import FREQUENCY, NOISE, SYSTEMS, particle_filter, simulate

REPETITIONS, DRAWS = {50: 20, 200: 20}, 10
STATE_SCALES, OBSERVATION_SCALES = (0.35, 0.7), (0.9, 2.0)
EPSILONS, DELTAS, TRUNCATIONS = (3e-4, 3e-3), (1e-3, 1e-2), (0.0, 0.1)
LEARNED = "fully learned"
METHODS = (LEARNED, "known transition", "known transition, draws", "known likelihood")


class Moves(eqx.Module):
    """The noiseless successor of one state."""

    eta: jax.Array
    b: jax.Array

    def __call__(self, state):
        """Return the successor of a state `[2]`."""
        angle = jnp.arctan2(state[1], state[0]) + self.eta
        radius = 1 + self.b * jnp.sin(FREQUENCY * angle)
        return radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)])


class Simulator(eqx.Module):
    """One draw of the next state."""

    moves: Moves

    def __call__(self, key, state):
        """Return one draw `[2]`."""
        return self.moves(state) + NOISE * jax.random.normal(key, (2,), state.dtype)


def log_likelihood(observation, state):
    """Log p(o | s), up to a constant."""
    return -jnp.sum((observation - state) ** 2) / (2 * NOISE**2)


@eqx.filter_jit
def estimates(method, moves, states, observations, tests, stretch):
    """Estimates `[candidates, T, 2]`; `stretch` keeps n epsilon constant over sample sizes."""
    h_s, h_o = kbr.median_heuristic(states), kbr.median_heuristic(observations)
    s, s_next, o = states[:-1], states[1:], observations[:-1]

    def candidate(p):
        kernel_s, kernel_o = kbr.Gaussian(p[0] * h_s), kbr.Gaussian(p[1] * h_o)
        ridge = {"regularizer": p[2] * stretch}
        if method == "known likelihood":
            emission = kbr.known_likelihood(kernel_s, s, log_likelihood, **ridge)
        else:
            emission = kbr.fit_conditional(kernel_s, kernel_o, s, o, **ridge)
        if method == "known transition":
            transition = kbr.GaussianTransition(moves, NOISE**2)
        elif method == "known transition, draws":
            key = jax.random.key(0)
            transition = kbr.SimulatedTransition(Simulator(moves), key=key, num_draws=DRAWS)
        else:
            transition = kbr.fit_conditional(kernel_s, kernel_s, s, s_next, **ridge)
        clipping = kbr.Clipping(truncation=p[4])
        filt = kbr.KernelBayesFilter(
            emission, transition, regularizer=p[3], estimator="importance", clipping=clipping
        )
        return kbr.run_filter(filt, tests, output_fn=lambda out: kbr.state_mean(filt, out))

    grid = itertools.product(STATE_SCALES, OBSERVATION_SCALES, EPSILONS, DELTAS, TRUNCATIONS)
    return jax.lax.map(candidate, jnp.asarray(list(grid)))


def choose(method, moves, states, observations, tests):
    """Estimates of the candidate that is best on two halves of the training sample."""
    half = len(states) // 2
    first, second = slice(0, half), slice(half, 2 * half)
    validation = [
        squared_errors(
            estimates(method, moves, states[a], observations[a], observations[b], 2.0),
            states[b],
            BURN_IN // 4,
        )
        for a, b in ((first, second), (second, first))
    ]
    best = int(np.argmin(np.mean(validation, axis=0)))
    return np.asarray(estimates(method, moves, states, observations, tests, 1.0))[best]


def repetition(system, size, seed):
    """Mean squared error of every method on one training and one test sequence."""
    rng = np.random.default_rng([seed, size, system == "b"])
    states, observations = simulate(system, size, rng)
    truth, tests = simulate(system, TEST, rng)
    moves = Moves(*map(jnp.asarray, SYSTEMS[system]))
    found = {method: choose(method, moves, states, observations, tests) for method in METHODS}
    found |= {"raw observation": tests, "optimal": particle_filter(system, tests, rng)}
    return {name: float(squared_errors(value, truth, BURN_IN)) for name, value in found.items()}


def main(repetitions: int = 0, *sizes: int) -> None:
    results = experiment.run_cells(
        "half_known",
        REPETITIONS,
        list(SYSTEMS),
        repetition,
        lambda rows: {"methods": experiment.ratios(rows, LEARNED)},
        repetitions,
        sizes,
    )
    experiment.show_ratios(results, "methods")


if __name__ == "__main__":
    experiment.start(main)
