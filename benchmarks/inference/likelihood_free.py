r"""Posterior means without a likelihood, F11 section 5.2: error against cost, kernel methods beside
ABC, d = 2 and 6.

    python -m benchmarks.inference.likelihood_free [runs]

The simulator and the prior are those of `gaussian_problem.py`; 10 observations a run are
drawn from the model, prior included; each run draws a new problem. Error: mean over runs,
observations and components of the squared difference to the exact posterior mean. All methods read
the same table of draws, each as many of its rows as it is given, and use them for all 10
observations.

Cost: calls of the simulator, and seconds: calls times 0, 1, 10, 100 or 1000 microseconds, plus what
the method itself computes for the 10 observations (processor time of one core, compiled before).
ABC may choose the number of draws it accepts in hindsight, up to all of them, for each number of
calls, on the errors shown; kernel methods choose nothing by them. They take the medians of the
distances and eps = .01 / sqrt(n), delta = 1e-4; or the bandwidth of the data and the regularizer
lambda of the least leave-one-out error of the conditional embedding on the first 200 draws, whose
time counts, with delta = lambda^2 for Bayes' rule.
"""

import pathlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import kbr_jax as kbr

from .. import experiment
from . import abc as abc_baselines
from . import gaussian_problem

DIMENSIONS, RUNS, OBSERVATIONS = (2, 6), 10, 10
CALLS = (100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
ACCEPTED = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
EXACT, LOW_RANK = (100, 300, 1000), (1000, 4000, 16_000)
MICROSECONDS = (0, 1, 10, 100, 1000)
FACTORS, REGULARIZERS, SELECTION = np.array([1.0, 3.0, 9.0]), 10.0 ** np.arange(-6, -1), 200

REJECTION, REGRESSION = "rejection ABC", "regression ABC"
CONDITIONAL, BAYES = "conditional embedding, medians", "kernel Bayes' rule, medians"
CONDITIONAL_LOO, BAYES_LOO = "conditional embedding", "kernel Bayes' rule"
CONDITIONAL_LOW, BAYES_LOW = "conditional embedding, rank 100", "kernel Bayes' rule, rank 100"
#: Curves of the figure: color and line.
CURVES = {
    REJECTION: ("#d55e00", "-"),
    REGRESSION: ("#d55e00", ":"),
    CONDITIONAL: ("#56b4e9", "--"),
    BAYES: ("#009e73", "--"),
    CONDITIONAL_LOO: ("#0072b2", "-"),
    BAYES_LOO: ("#009e73", "-"),
    CONDITIONAL_LOW: ("#0072b2", ":"),
    BAYES_LOW: ("#009e73", ":"),
}


def by_leave_one_out(
    theta: jax.Array, data: jax.Array, h: jax.Array, c: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Bandwidth of the data and regularizer, of the least leave-one-out error of the mean on the
    first draws.
    """
    theta, data = theta[:SELECTION], data[:SELECTION]

    def loss(candidate):
        kernels = kbr.Gaussian(candidate[0] * c), kbr.Gaussian(h)
        model = kbr.fit_conditional(*kernels, data, theta, regularizer=candidate[1])
        return kbr.leave_out_loss(model, kernel=kbr.Linear())

    factors, regularizers = (
        part.ravel() for part in jnp.meshgrid(jnp.asarray(FACTORS), jnp.asarray(REGULARIZERS))
    )
    best = jnp.argmin(jax.lax.map(loss, (factors, regularizers)))
    return factors[best] * c, regularizers[best]


@partial(jax.jit, static_argnames=("method", "select", "rank"))
def kernel_means(
    theta: jax.Array,
    data: jax.Array,
    observed: jax.Array,
    method: Any,
    select: bool,
    rank: int | None,
) -> jax.Array:
    h, c = (kbr.median_heuristic(points[:SELECTION]) for points in (theta, data))
    regularizer, delta = 0.01 / np.sqrt(len(data)), 1e-4
    if select:
        c, regularizer = by_leave_one_out(theta, data, h, c)
        delta = regularizer**2
    of_theta, of_data = kbr.Gaussian(h), kbr.Gaussian(c)
    ranks = [
        rank and kbr.greedy_landmarks(k, p, rank=rank)
        for k, p in zip((of_theta, of_data), (theta, data), strict=True)
    ]
    if method == "conditional":
        model = kbr.fit_conditional(
            of_data, of_theta, data, theta, regularizer=regularizer, landmarks_x=ranks[1]
        )
        return kbr.mean(kbr.condition(model, observed))
    model = kbr.fit_conditional(
        of_theta,
        of_data,
        theta,
        data,
        regularizer=regularizer,
        landmarks_x=ranks[0],
        landmarks_y=ranks[1],
    )
    clipping = kbr.Clipping(False, 0.0)
    prior = kbr.embed(of_theta, theta)
    posterior = kbr.bayes_rule(model, prior, observed, regularizer=delta, clipping=clipping)
    return kbr.mean(posterior)


def timed(function: Callable[[], Any]) -> tuple[np.ndarray, float]:
    start = time.process_time()
    value = np.asarray(function())
    return value, time.process_time() - start


#: Name, numbers of draws, options of `kernel_means`.
METHODS: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    (CONDITIONAL, EXACT, {"method": "conditional", "select": False, "rank": None}),
    (CONDITIONAL_LOO, EXACT, {"method": "conditional", "select": True, "rank": None}),
    (CONDITIONAL_LOW, LOW_RANK, {"method": "conditional", "select": True, "rank": 100}),
    (BAYES, EXACT, {"method": "bayes", "select": False, "rank": None}),
    (BAYES_LOO, EXACT, {"method": "bayes", "select": True, "rank": None}),
    (BAYES_LOW, LOW_RANK, {"method": "bayes", "select": True, "rank": 100}),
)


Means = dict[tuple[str, int], np.ndarray]
Times = dict[tuple[str, int], float]


def by_abc(theta: np.ndarray, data: np.ndarray, observed: np.ndarray) -> tuple[Means, Times]:
    """(method, accepted) -> posterior means of the observations, and processor time.

    The search for neighbors is in each.
    """
    few = [k for k in ACCEPTED if k < len(data)]
    if len(data) <= max(ACCEPTED):
        return of_accepted(theta, data, observed, [*few, len(data)])
    # To sort all draws takes longer than to find the nearest: they have a search of their own.
    nearest = of_accepted(theta, data, observed, few)
    everything = of_accepted(theta, data, observed, [len(data)])
    return nearest[0] | everything[0], nearest[1] | everything[1]


def of_accepted(
    theta: np.ndarray, data: np.ndarray, observed: np.ndarray, accepted: list[int]
) -> tuple[Means, Times]:
    """The same for some numbers of accepted draws, after one search."""
    start = time.process_time()
    scale = data.std(0)
    found = [abc_baselines.nearest(data, y, scale, max(accepted)) for y in observed]
    searching = time.process_time() - start

    def regression(k):
        means = []
        for y, (index, distances) in zip(observed, found, strict=True):
            points, weights = abc_baselines.adjusted(
                theta[index[:k]], data[index[:k]], y, distances[:k]
            )
            means.append(weights @ points)
        return means

    values, times = {}, {}
    for k in accepted:
        values[REJECTION, k], times[REJECTION, k] = timed(
            lambda k=k: [theta[index[:k]].mean(0) for index, _ in found]
        )
        if k >= 2 * data.shape[1] + 4:
            values[REGRESSION, k], times[REGRESSION, k] = timed(lambda k=k: regression(k))
    return values, {key: value + searching for key, value in times.items()}


def run(d: int, seed: int) -> dict[tuple[str, int, int], tuple[float, float]]:
    """(method, calls, accepted or 0) -> error and processor time."""
    rng = np.random.default_rng([seed, d])
    problem = gaussian_problem.make(d, rng)
    theta = gaussian_problem.draw(problem.prior, max(CALLS), rng)
    data = problem.simulate(theta, rng)
    observed = problem.simulate(gaussian_problem.draw(problem.prior, OBSERVATIONS, rng), rng)
    truth = problem.posterior_mean(observed)
    found: dict[tuple[str, int, int], tuple[float, float]] = {}

    for calls in CALLS:
        values, times = by_abc(theta[:calls], data[:calls], observed)
        found |= {
            (name, calls, k): (error(v, truth), times[name, k]) for (name, k), v in values.items()
        }
    for name, sizes, options in METHODS:
        for n in sizes:
            call = partial(
                kernel_means, *map(jnp.asarray, (theta[:n], data[:n], observed)), **options
            )
            if seed == 0:
                call()
            value, seconds = timed(call)
            found[name, n, 0] = error(value, truth), seconds
    return found


def error(means: np.ndarray, truth: np.ndarray) -> float:
    return float(np.mean((means - truth) ** 2))


def summary(
    runs: list[dict[tuple[str, int, int], tuple[float, float]]],
) -> dict[str, list[dict[str, float]]]:
    """For each method and number of calls the error and its standard error.

    For ABC at the best number of accepted draws.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CURVES}
    for name, calls in sorted(
        {(name, calls) for name, calls, _ in runs[0]}, key=lambda pair: pair[1]
    ):
        best: dict[str, Any] = {}
        for key in [key for key in runs[0] if key[:2] == (name, calls)]:
            errors = np.array([one[key][0] for one in runs])
            if not best or errors.mean() < best["error"]:
                seconds = float(np.median([one[key][1] for one in runs]))
                best = {
                    "calls": calls,
                    "error": float(errors.mean()),
                    "se": float(errors.std(ddof=1) / np.sqrt(len(errors))),
                    "seconds": seconds,
                } | ({"accepted": key[2]} if key[2] else {})
        found[name].append(best)
    return found


def seconds(point: dict[str, float], cost: float) -> float:
    return point["seconds"] + 1e-6 * cost * point["calls"]


def comparison(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """At each cost of a call.

    How many times longer rejection ABC takes than the quickest run of a method that errs no more.
    """
    results: dict[str, Any] = {}
    for cost in MICROSECONDS:
        for target in (
            point for point in found[REJECTION] if point["calls"] in (10_000, 100_000, 1_000_000)
        ):
            row = {}
            for name, curve in found.items():
                reached = [
                    seconds(point, cost) for point in curve if point["error"] <= target["error"]
                ]
                row[name] = seconds(target, cost) / min(reached) if reached else None
            results[
                f"{cost} microseconds, as good as rejection ABC with {target['calls']} calls"
            ] = row
    return results


def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    costs = (None, 0, 10, 1000)
    figure, axes = plt.subplots(2, len(costs), figsize=(13, 6), layout="constrained", sharey="row")
    for row, d in zip(axes, DIMENSIONS, strict=True):
        for axis, cost in zip(row, costs, strict=True):
            for name, (color, line) in CURVES.items():
                curve = results[f"d = {d}"]["curves"][name]
                across = [
                    point["calls"] if cost is None else seconds(point, cost) for point in curve
                ]
                axis.errorbar(
                    across,
                    [point["error"] for point in curve],
                    [point["se"] for point in curve],
                    color=color,
                    linestyle=line,
                    marker="o",
                    ms=3,
                    label=name,
                )
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_xlabel(
                "calls of the simulator" if cost is None else f"seconds, {cost} microseconds a call"
            )
        row[0].set_ylabel(f"mean squared error, d = {d}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(count: int = RUNS) -> None:
    results: dict[str, Any] = {"runs": count, "observations": OBSERVATIONS}
    for d in DIMENSIONS:
        rows = experiment.repeat(
            f"likelihood free {d}", lambda seed, d=d: list(run(d, seed).items()), count
        )
        found = summary([{tuple(name): value for name, value in row} for row in rows])
        results[f"d = {d}"] = {
            "curves": found,
            "times faster than rejection ABC": comparison(found),
        }
        experiment.save("likelihood_free", results)
        rows = [
            [
                name,
                point["calls"],
                f"{point['error']:.4f} ± {point['se']:.4f}",
                f"{point['seconds']:.3f}",
            ]
            for name, curve in found.items()
            for point in curve
        ]
        print(
            f"d = {d}\n"
            + experiment.table(["method", "calls", "error", "seconds beside the calls"], rows)
        )
        ratios = results[f"d = {d}"]["times faster than rejection ABC"]
        cells = [
            [key, *["" if v is None else f"{v:.2g}" for v in row.values()]]
            for key, row in ratios.items()
        ]
        print(experiment.table(["times faster than rejection ABC", *CURVES], cells), flush=True)
    draw(results, experiment.FIGURES / "likelihood_free.png")


if __name__ == "__main__":
    experiment.start(main)
