r"""Time per filter step against a dense NumPy/SciPy filter, in one run: exact, rank 100, one
sequence and batches.

    python -m benchmarks.scale.filter_speed

The peer is the filter of S13 (algorithm VII) as one writes it in NumPy: the Gram matrix of the
states factored once, and `scipy.linalg.solve` of $(D K)^2 + \delta I$ at each step; prior weights
clipped and truncated as in ours.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

import kbr_jax as kbr

from .. import experiment
from ..rotation.references import simulate

SAMPLE, RANK, STEPS, BATCH = 1000, 100, 200, 64
STATE_BANDWIDTH, OBSERVATION_BANDWIDTH, EPSILON, DELTA, TRUNCATION = 0.4, 0.5, 1e-4, 1e-5, 0.02


def scipy_filter(states, observations, tests):
    """The dense peer; returns the estimates, one row a step."""

    def gram(x, y, h):
        squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2 * x @ y.T
        return np.exp(-np.maximum(squares, 0) / (2 * h**2))

    s, successors, o = states[:-1], states[1:], observations[: len(states) - 1]
    n = len(s)
    k = gram(o, o, OBSERVATION_BANDWIDTH)
    factor = scipy.linalg.cho_factor(gram(s, s, STATE_BANDWIDTH) + n * EPSILON * np.eye(n))
    transfer = gram(s, successors, STATE_BANDWIDTH)
    queries = gram(o, tests, OBSERVATION_BANDWIDTH).T
    ridge = DELTA * np.eye(n)
    w, estimates = np.full(n, 1 / n), []
    for query in queries:
        w = np.maximum(w, 0)
        w[w < TRUNCATION * w.max()] = 0
        w = w / w.sum()
        dk = w[:, None] * k
        belief = dk @ scipy.linalg.solve(dk @ dk + ridge, w * query)
        estimates.append(belief @ s / belief.sum())
        w = scipy.linalg.cho_solve(factor, transfer @ belief)
    return np.stack(estimates)


def fit(states, observations, rank):
    return kbr.fit_filter(
        kbr.Gaussian(STATE_BANDWIDTH),
        kbr.Gaussian(OBSERVATION_BANDWIDTH),
        states,
        observations,
        regularizer=EPSILON,
        posterior_regularizer=DELTA,
        clipping=kbr.Clipping(truncation=TRUNCATION),
        landmarks_states=rank,
        landmarks_observations=rank,
    )


def main() -> None:
    states, observations = simulate("b", SAMPLE, np.random.default_rng(0))
    tests = [simulate("b", STEPS, np.random.default_rng(1 + b)) for b in range(BATCH)]
    truth, seen = np.stack([t[0] for t in tests]), jnp.asarray(np.stack([t[1] for t in tests]))
    few = 20

    def error(estimates, count=None):
        return float(np.mean(np.sum((np.asarray(estimates) - truth[0][:count]) ** 2, -1)))

    start = time.perf_counter()
    low = fit(states, observations, RANK)
    run = jax.jit(lambda f, o: kbr.state_mean(f, kbr.run_filter(f, o)))
    estimates = jax.block_until_ready(run(low, seen[0]))
    first_call = time.perf_counter() - start
    batched = jax.jit(
        jax.vmap(lambda f, o: kbr.state_mean(f, kbr.run_filter(f, o)), in_axes=(None, 0))
    )
    exact = fit(states, observations, None)

    milliseconds = {
        "scipy, dense": experiment.milliseconds(
            lambda: scipy_filter(states, observations, tests[0][1][:few]), 3
        )
        / few,
        "kbr_jax, dense": experiment.milliseconds(lambda: run(exact, seen[0, :few]), 3) / few,
        "kbr_jax, rank 100": experiment.milliseconds(lambda: run(low, seen[0])) / STEPS,
        "kbr_jax, rank 100, batch of 64 (per sequence)": experiment.milliseconds(
            lambda: batched(low, seen), 3
        )
        / STEPS
        / BATCH,
    }
    peer = milliseconds["scipy, dense"]
    reference = scipy_filter(states, observations, tests[0][1])
    results = {
        "milliseconds per step": milliseconds,
        "times faster than scipy": {name: peer / value for name, value in milliseconds.items()},
        "batch over one": milliseconds["kbr_jax, rank 100"]
        / milliseconds["kbr_jax, rank 100, batch of 64 (per sequence)"],
        "first call, fit and compile included, seconds": first_call,
        "mean squared error": {
            "scipy, dense": error(reference),
            "kbr_jax, rank 100": error(estimates),
        },
        "largest difference of dense estimates": float(
            np.abs(np.asarray(run(exact, seen[0, :few])) - reference[:few]).max()
        ),
    }
    rows = [[name, f"{value:.2f}", f"{peer / value:.1f}"] for name, value in milliseconds.items()]
    print(experiment.table([f"step at n = {SAMPLE}, float64", "ms", "times faster"], rows))
    print(f"first call {first_call:.1f} s; MSE {results['mean squared error']}")
    print(
        f"largest difference of dense estimates "
        f"{results['largest difference of dense estimates']:.1e}"
    )
    print(experiment.save("filter_speed", results))


if __name__ == "__main__":
    experiment.start(main)
