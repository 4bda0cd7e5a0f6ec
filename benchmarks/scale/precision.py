"""How far float32 is from float64, for each path and regularizer.

    python -m benchmarks.scale.precision

Rotation dynamics (b), n = 400, exact Gram matrices unless said otherwise. For one-step results the
largest error of the estimated state, relative to its scale; for filters the mean squared error in
both precisions over 200 steps (their trajectories part at small regularizers, their errors should
not).
"""

import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from ..models import moment_filter
from ..rotation.references import simulate

SIZE, STEPS, RANK = 400, 200, 60
RIDGES, DELTAS = (1e-2, 1e-4, 1e-6, 1e-8), (1e-3, 1e-5, 1e-7, 1e-9)


def paths(states, observations, tests):
    """Name of each path, with a function of its regularizer that estimates states."""
    kernel_s, kernel_o = kbr.Gaussian(0.4), kbr.Gaussian(0.5)
    clipped = kbr.Clipping(True, 0.0, False)

    def condition(regularizer):
        model = kbr.fit_conditional(
            kernel_o, kernel_s, observations, states, regularizer=regularizer
        )
        return kbr.expectation(kbr.condition(model, tests), lambda s: s)

    def sum_rule(regularizer):
        model = kbr.fit_conditional(
            kernel_o, kernel_s, observations, states, regularizer=regularizer
        )
        return kbr.expectation(kbr.sum_rule(model, kbr.embed(kernel_o, tests[:50])), lambda s: s)

    def bayes(estimator):
        def estimate(delta):
            model = kbr.fit_conditional(kernel_s, kernel_o, states, observations, regularizer=1e-3)
            prior = kbr.embed(kernel_s, states[:50])
            options = {"regularizer": delta, "estimator": estimator, "clipping": clipped}
            return kbr.expectation(kbr.bayes_rule(model, prior, tests, **options), lambda s: s)

        return estimate

    def filtered(**options):
        def estimate(delta):
            filt = kbr.fit_filter(
                kernel_s,
                kernel_o,
                states,
                observations,
                regularizer=1e-3,
                posterior_regularizer=delta,
                **options,
            )
            return kbr.state_mean(filt, kbr.run_filter(filt, tests))

        return estimate

    def moments(cells):
        def estimate(delta):
            s, o, s_next = states[:-1], observations[:-1], states[1:]
            landmarks = [
                kbr.greedy_landmarks(k, p, rank=RANK) for k, p in ((kernel_s, s), (kernel_o, o))
            ]
            centers = kbr.greedy_landmarks(kernel_s, states, rank=RANK)
            parts = kbr.soft_partition(kernel_s, centers) if cells else None
            maps = kbr.moments.moment_maps(
                kernel_s, kernel_o, *landmarks, cells=parts, embedding=False, shift=True
            )
            filt = moment_filter(maps, [(s, o, s_next)], epsilon=1e-3, delta=delta)
            return kbr.state_mean(filt, kbr.run_filter(filt, tests))

        return estimate

    one_step = {
        "conditional embedding": (condition, RIDGES),
        "sum rule": (sum_rule, RIDGES),
        "Bayes' rule (b)": (bayes("pairs"), DELTAS),
        "Bayes' rule (a)": (bayes("prior"), DELTAS),
        "Bayes' rule, importance-weighted": (bayes("importance"), DELTAS),
    }
    landmarks = {"landmarks_states": RANK, "landmarks_observations": RANK}
    filters = {
        "filter (b)": filtered(),
        f"filter (b), {RANK} landmarks": filtered(**landmarks),
        f"filter, importance-weighted, {RANK} landmarks": filtered(
            estimator="importance", **landmarks
        ),
        "moments, soft cells": moments(cells=True),
        "moments, plain": moments(cells=False),
    }
    return one_step, filters


def main() -> None:
    rng = np.random.default_rng(0)
    states, observations = simulate("b", SIZE, rng)
    truth, tests = simulate("b", STEPS, rng)
    data = {
        dtype: [jnp.asarray(a, dtype) for a in (states, observations, tests)]
        for dtype in ("float32", "float64")
    }
    single, double = (paths(*data[dtype]) for dtype in ("float32", "float64"))
    results: dict[str, dict] = {}
    for name, (estimate, values) in single[0].items():
        results[name] = {}
        for value in values:
            reference = np.asarray(double[0][name][0](value))
            error = np.abs(np.asarray(estimate(value)) - reference).max() / np.abs(reference).max()
            results[name][f"{value:g}"] = float(error)
    for name, run in single[1].items():
        results[f"{name}, MSE float32 / float64"] = {
            f"{delta:g}": [
                float(np.mean(np.sum((np.asarray(estimate(delta)) - truth) ** 2, -1)))
                for estimate in (run, double[1][name])
            ]
            for delta in DELTAS
        }
    rows = []
    for name, cells in results.items():
        values = [
            f"{k}: " + (f"{v:.0e}" if isinstance(v, float) else " / ".join(f"{x:.4f}" for x in v))
            for k, v in cells.items()
        ]
        rows.append([name, *values])
    print(experiment.table(["path", *(f"regularizer {i + 1}" for i in range(4))], rows))
    print(experiment.save("precision", results))


if __name__ == "__main__":
    experiment.start(main)
