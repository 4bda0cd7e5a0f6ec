r"""The learned transition of the rotation dynamics (b): conditional embeddings against the
operators of kooplearn.

    python -m benchmarks.scale.transition_operators

1000 pairs of one state and the next, Gaussian kernel of one bandwidth; regularizer and, for
kooplearn's reduced-rank regression, rank are the best of a grid on another sequence. Ours keeps
weights on all pairs, exact or with 200 landmarks drawn uniformly, or moments, whose predictions do
not see n. Time to fit, time to predict 1000 states, and mean squared error against the true
conditional mean one and five steps ahead (that of five steps from 2000 simulations each).

kooplearn 2.0.3 predicts from the observable at the training inputs, one step behind: it is given
the successors as its observable.
"""

import functools

import jax
import numpy as np

import kbr_jax as kbr

from .. import experiment
from ..rotation.references import NOISE, simulate, transition

PAIRS, RANK, QUERIES, BANDWIDTH, STEPS, SIMULATIONS = 1000, 200, 1000, 0.3, 5, 2000
REGULARIZERS, RANKS = 10.0 ** np.arange(-9.0, -2.0), (25, 100, 200)


@functools.partial(jax.jit, static_argnums=3)
def fit(states, landmarks, regularizer, form):
    kernel, points, pairs = (
        kbr.Gaussian(BANDWIDTH),
        kbr.Landmarks(landmarks),
        (states[:-1], states[1:]),
    )
    if form == "moments":
        maps = kbr.moments.moment_maps(kernel, kernel, points, points, embedding=False)
        return kbr.moments.fit_conditional(
            kbr.moments.collect_moments(maps, *pairs), regularizer=regularizer
        )
    choice = None if form == "exact" else points
    return kbr.fit_conditional(
        kernel, kernel, *pairs, regularizer=regularizer, landmarks_x=choice, landmarks_y=choice
    )


@jax.jit
def predict(model, queries):
    """Means one and `STEPS` steps ahead: one conditioning, then the sum rule."""
    belief = kbr.condition(model, queries)
    first = kbr.mean(belief)
    for _ in range(STEPS - 1):
        belief = kbr.sum_rule(model, belief)
    return first, kbr.mean(belief)


def ours(states, regularizer, form):
    landmarks = states[np.random.default_rng(0).choice(PAIRS, RANK, replace=False)]
    model = fit(states, landmarks, regularizer, form)
    return {
        "fit": lambda: fit(states, landmarks, regularizer, form),
        "predict": lambda queries: predict(model, queries),
    }


def kooplearn(states, regularizer, option):
    from kooplearn import kernel

    name, rank = option
    extra = {"n_centers": RANK} if name == "NystroemKernelRidge" else {}

    def fitted():
        gamma = 1 / (2 * BANDWIDTH**2)
        model = getattr(kernel, name)(
            rank, kernel="rbf", gamma=gamma, alpha=regularizer, random_state=0, **extra
        )
        return model.fit(states[:-1], y=states[1:])

    model = fitted()

    def predicted(queries):
        return tuple(model.predict(queries, n_steps=steps, observable=True) for steps in (1, STEPS))

    return {"fit": fitted, "predict": predicted}


def true_means(queries):
    rng = np.random.default_rng(2)
    cloud = np.repeat(queries[:, None], SIMULATIONS, axis=1)
    for _ in range(STEPS - 1):
        cloud = transition(cloud, "b") + NOISE * rng.normal(size=cloud.shape)
    return transition(queries, "b"), transition(cloud, "b").mean(1)


def main() -> None:
    states = simulate("b", PAIRS + 1, np.random.default_rng(0))[0]
    held_out = simulate("b", QUERIES + 1, np.random.default_rng(1))[0]
    queries = simulate("b", QUERIES, np.random.default_rng(3))[0]
    truth, results = true_means(queries), {}
    methods = {
        "kbr_jax, exact": (ours, ("exact",)),
        f"kbr_jax, {RANK} landmarks": (ours, ("landmarks",)),
        f"kbr_jax, {RANK} landmarks, moments": (ours, ("moments",)),
        "kooplearn, exact": (kooplearn, [("KernelRidge", rank) for rank in RANKS]),
        f"kooplearn, {RANK} landmarks": (
            kooplearn,
            [("NystroemKernelRidge", rank) for rank in RANKS],
        ),
    }
    for name, (method, options) in methods.items():
        grid = [(float(regularizer), option) for regularizer in REGULARIZERS for option in options]
        errors = [
            np.mean(
                (np.asarray(method(states, *point)["predict"](held_out[:-1])[0]) - held_out[1:])
                ** 2
            )
            for point in grid
        ]
        best = grid[np.nanargmin(errors)]
        chosen = method(states, *best)
        estimates = chosen["predict"](queries)
        results[name] = {
            "regularizer": best[0],
            "rank": best[1][1] if method is kooplearn else None,
            "fit, ms": experiment.milliseconds(chosen["fit"]),
            "predict, ms": experiment.milliseconds(lambda p=chosen["predict"]: p(queries)),
            "error, one step": float(
                np.mean(np.sum((np.asarray(estimates[0]) - truth[0]) ** 2, -1))
            ),
            f"error, {STEPS} steps": float(
                np.mean(np.sum((np.asarray(estimates[1]) - truth[1]) ** 2, -1))
            ),
        }
    rows = [
        [name, *("" if value is None else f"{value:.3g}" for value in row.values())]
        for name, row in results.items()
    ]
    print(experiment.table(["", *next(iter(results.values()))], rows))
    print(experiment.save("transition_operators", results))


if __name__ == "__main__":
    experiment.start(main)
