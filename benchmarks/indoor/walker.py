r"""Where is the walker? A canteen, a telephone, and Wi-Fi ranges and signal strengths to six access
points.

    python -m benchmarks.indoor.walker [METHOD]

With "nearest neighbors" or "kernel ridge regression" only this method and the Kalman filter on it
are run, nothing is drawn, and the other methods keep their last results.

Data: `indoor_canteen.npz` of the folder `KBR_DATA` (default: `benchmarks/data`, where it is not
included), walks of two users from the public set haiyaoyu/RTT-Indoor-localization-data-set; not
part of the project. Trained on laps 1 to 5, tested on laps 6, 7 and 9.

Time steps are uneven (.2 to .8 s) and differ between laps, so every lap is put on a grid of whole
seconds: the true position is interpolated, and the observation summarizes what was read in the
window of the last w seconds (lower quartile of each range, because reflections only lengthen it;
mean of each strength). All methods see the same observations and choose w.

The filter is that of `learn_filter` on the ten laps, at the w of the least held-out error in its
report. No number is set by hand. It starts from the marginal of all positions. The parameters of
the other methods have the least mean error on each of laps 1 to 5 with a model of the other four.
Laps 6, 7 and 9 are read once everything is chosen.
"""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from . import baselines
from .baselines import TEST, TRAINING

FILTER_WINDOWS = (4, 8, 16)
# Rivals, each with the stride of its training points while choosing; at the end it has all of them.
METHODS = {
    "nearest neighbors": (baselines.nearest, 1),
    "kernel ridge regression": (baselines.ridge, 4),
}


def choose_filter(laps: dict) -> dict[str, Any]:
    """The learned filter of the window with the least held-out error."""
    tried = []
    for window in FILTER_WINDOWS:
        scale = baselines.fit_scale(list(laps.values()), window)
        seen = [jnp.asarray(baselines.features(lap, window, scale)) for lap in laps.values()]
        positions = [jnp.asarray(lap.position) for lap in laps.values()]
        filt, report = kbr.learn_filter(positions, seen, progress=False)
        print(f"window of {window} s", report, sep="\n", flush=True)
        score, _ = report.errors["filter"]
        parameters = {"test": str(report.chosen["test of the belief"])}
        tried.append(
            {"window": window, "score": score, "parameters": parameters, "model": (filt, scale)}
        )
    return min(tried, key=lambda one: one["score"])


def apply_filter(chosen: dict[str, Any], tests: dict) -> dict:
    """Estimates of the chosen filter on each test lap."""
    filt, scale = chosen["model"]
    seen = [jnp.asarray(baselines.features(lap, chosen["window"], scale)) for lap in tests.values()]
    means = kbr.state_mean(filt, kbr.run_filter(filt, seen))
    return dict(zip(tests, map(np.asarray, means), strict=True))


def choose(laps: dict, only: str = "") -> dict[str, dict[str, Any]]:
    """The best candidate of every method by its mean error on laps that were left out."""
    chosen = {} if only else {"kernel Bayes filter": choose_filter(laps)}
    for name, (method, stride) in METHODS.items():
        if only not in ("", name):
            continue
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
            estimates[name] = apply_filter(choice, tests)
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
    left.set(title=f"lap {key[0]}, user {key[1]}", xlabel="meters", ylabel="meters", aspect="equal")
    left.legend(fontsize=8)
    for name, by_lap in errors.items():
        values = np.sort(np.concatenate(list(by_lap.values())))
        right.plot(values, (np.arange(len(values)) + 1) / len(values), label=name)
    right.set(
        title="all test laps",
        xlabel="error in meters",
        ylabel="share of seconds",
        xlim=(0, 1.5),
        ylim=(0, 1),
    )
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(experiment.FIGURES / "indoor.png", dpi=130)


def main(only: str = "") -> None:
    if only and only not in METHODS:
        raise ValueError(f"one of {list(METHODS)} can be run alone, got {only!r}")
    if not baselines.data_path().exists():
        print(
            f"No {baselines.data_path()}: set KBR_DATA to the folder of indoor_canteen.npz. "
            f"Nothing was run."
        )
        return
    began = time.perf_counter()
    laps = baselines.read_laps(TRAINING)
    chosen = choose(laps, only)
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
        "position error in meters",
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
    if only:
        results = experiment.previous("indoor")
        methods = results["methods"] | methods
        methods = dict(sorted(methods.items(), key=lambda item: item[1]["all"]["mean"]))
        print(experiment.save("indoor", results | {"methods": methods}, part=only))
        return
    draw(tests, estimates, errors)
    results = {
        "seconds": round(time.perf_counter() - began),
        "training laps": list(TRAINING),
        "methods": methods,
    }
    print(experiment.save("indoor", results))


if __name__ == "__main__":
    experiment.start(main)
