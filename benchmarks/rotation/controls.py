r"""A driven rotation: what it is worth to know the inputs.

    python -m benchmarks.rotation.controls [repetitions, 6 by default]

The rotation of `benchmarks.rotation.dynamics` (a), with a turn per step that is a known input,
$u_t$ uniform on [-0.2, 0.8], in place of eta = 0.3, its mean. Train on T = 200 and 400 steps, test
on 200 (20 of burn-in): mean squared error of the state as a ratio to that of a particle filter
which knows the model and the inputs, for a filter that ignores the inputs, and one that knows them,
filtered and smoothed. Both choose observation bandwidth, delta, and the bandwidth of the inputs'
kernel (the second only) by halving the training sample, with filtering errors.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from .dynamics import BURN_IN, TEST, squared_errors
from .references import NOISE, bootstrap
from .smoothing import CANDIDATES, fit, smooth

OPTIMAL = "optimal (particle filter, true model, inputs known)"
REPETITIONS, SIZES, LOW, HIGH = 6, (200, 400), -0.2, 0.8
PAIR_RANK, SMOOTHER_REGULARIZER = 120, 0.6
CONTROLLED = np.asarray([(*row, width) for row in CANDIDATES for width in (0.5, 1.0)])


def turned(states, turns):
    angle = np.arctan2(states[..., 1], states[..., 0]) + turns
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def simulate(steps, rng, warm_up=20):
    """States, observations `[steps, 2]`, and inputs `[steps, 1]`, each acting from its state to the
    next.
    """
    turns = rng.uniform(LOW, HIGH, warm_up + steps)
    states = [np.array([1.0, 0.0])]
    for turn in turns[:-1]:
        states.append(turned(states[-1], turn) + NOISE * rng.normal(size=2))
    states = np.stack(states[warm_up:])
    return states, states + NOISE * rng.normal(size=states.shape), turns[warm_up:, None]


def particle_filter(observations, turns, rng, particles=2000):
    angles = rng.uniform(0, 2 * np.pi, particles)
    x = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    moves = [functools.partial(turned, turns=turn) for turn in (0.0, *turns[:-1, 0])]
    return np.stack([weights @ x for x, weights in bootstrap(moves, x, observations, rng)])


def estimates(train, test, parameters, stretch, controlled, smoothed):
    """Filtered means `[T, 2]`, and smoothed ones if asked."""
    states, observations, turns = train
    controls, inputs = None, None
    if controlled:
        controls, inputs = (kbr.Gaussian(parameters[2]), turns, PAIR_RANK), test[1]
    filt = fit(states, observations, parameters[:2], stretch, controls)
    run = kbr.run_filter(filt, test[0], controls=inputs)
    if not smoothed:
        return kbr.state_mean(filt, run)
    return kbr.state_mean(filt, run), smooth(filt, run, SMOOTHER_REGULARIZER, controls=inputs)


@eqx.filter_jit
def validated(train, test, controlled):
    """Filtered means of every candidate, fitted to half of the training sample."""
    candidates = jnp.asarray(CONTROLLED if controlled else CANDIDATES)
    return jax.lax.map(
        lambda parameters: estimates(train, test, parameters, 2.0, controlled, False), candidates
    )


@eqx.filter_jit
def final(train, test, parameters, controlled):
    return estimates(train, test, parameters, 1.0, controlled, True)


def selected(train, test, controlled):
    """Estimates of the candidate of least validation error."""
    half = len(train[0]) // 2
    parts = [tuple(part[s] for part in train) for s in (slice(0, half), slice(half, 2 * half))]
    errors = [
        squared_errors(validated(a, b[1:], controlled), b[0], BURN_IN // 2)
        for a, b in (parts, reversed(parts))
    ]
    best = (CONTROLLED if controlled else CANDIDATES)[np.argmin(errors[0] + errors[1])]
    return final(train, test, best, controlled)


def repetition(size, seed):
    rng = np.random.default_rng([seed, size])
    train, (truth, observations, turns) = simulate(size, rng), simulate(TEST, rng)
    ignored, used = (
        selected(train, (observations, turns), controlled) for controlled in (False, True)
    )
    methods = {
        OPTIMAL: particle_filter(observations, turns, rng),
        "raw observation": observations,
        "inputs ignored, filter": ignored[0],
        "inputs ignored, smoother": ignored[1],
        "inputs used, filter": used[0],
        "inputs used, smoother": used[1],
    }
    return {name: float(squared_errors(value, truth, BURN_IN)) for name, value in methods.items()}


def summarize(rows):
    found = experiment.columns(rows)
    summary = experiment.ratios(rows, OPTIMAL)
    for kind in ("filter", "smoother"):
        pair = experiment.paired(found[f"inputs used, {kind}"], found[f"inputs ignored, {kind}"])
        summary[f"inputs used, {kind}"] |= {
            key: pair[key] for key in ("difference", "difference_se")
        }
    return {"methods": summary}


def main(repetitions: int = 0, *sizes: int) -> None:
    results = experiment.run_cells(
        "controls",
        dict.fromkeys(SIZES, REPETITIONS),
        [""],
        lambda _, size, seed: repetition(size, seed),
        summarize,
        repetitions,
        sizes,
    )
    experiment.show_ratios(results, "methods")


if __name__ == "__main__":
    experiment.start(main)
