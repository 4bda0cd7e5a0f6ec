r"""Depth from features on a grid (S13 section 5.1.3, figure 7), on synthetic scenes, since the
authors' images were never released.

    python -m benchmarks.depth.images            both sizes, figure and JSON
    python -m benchmarks.depth.images small      20 x 16 only, the rest of the JSON stays
    python -m benchmarks.depth.images large      107 x 86 and the figure
    python -m benchmarks.depth.images again      parameters and errors of the JSON stay; only times
                                                 and what is missing are measured

Scenes and features: `depth_worlds`; a feature fits several depths. Edge types by row, as in the
paper: one sample for the horizontal edges of a row, for the vertical edges below it, and for its
likelihood. All methods learn from the same pairs; the parameters of each are the best of as many
random candidates on validation scenes, judged by mean absolute error after 10 sweeps. Test scenes
are others.
"""

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # its threads wait for each other on busy machines

import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from . import methods, sampled
from .worlds import World, worlds

SWEEPS, PIVOTS = 10, 32

#: Rows, columns; scenes for training, validation and test; pairs an edge type; candidates.
SIZES = {"20 x 16": (20, 16, 40, 6, 120, 400, 40), "107 x 86": (107, 86, 20, 1, 10, 400, 10)}
FEWER = {"20 x 16": 24, "107 x 86": 16}
#: Belief propagation with mixtures of Gaussians takes seconds a scene: fewer candidates, and not on
#: the large grid.
MIXTURE_CANDIDATES = 12

_BINS = {
    "bins": (16, 24, 32, 48, 64),
    "blur": (0.0, 0.005, 0.01, 0.02, 0.04),
    "alpha": (1e-3, 1e-2, 1e-1),
    "floor": (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 2e-1),
}
_DEPTH = {"h": (0.015, 0.025, 0.04, 0.06, 0.09), "kappa": (1e-5, 1e-4, 1e-3, 1e-2), "rank": (60,)}
_FEATURES = (0.1, 0.15, 0.25, 0.4, 0.6)

_SAMPLED = {"h": _DEPTH["h"], "c": _FEATURES, "alpha": _BINS["alpha"], "floor": _BINS["floor"]}

SPACES = {
    "kernel": {
        **_DEPTH,
        "c": _FEATURES,
        "epsilon": (1e-5, 1e-4, 1e-3, 1e-2),
        "floor": _BINS["floor"],
    },
    "cells": {**_BINS, "cells": (8, 16, 32, 64, 128)},
    "bins": {**_BINS, "c": _FEATURES},
    "alone": {**_DEPTH, "c": _FEATURES},
    "regression": {"c": (0.25, 0.4, 0.6, 1.0, 1.6), "kappa": (1e-5, 1e-4, 1e-3, 1e-2)},
    "particles": _SAMPLED,
    "mixtures": _SAMPLED,
}

CELLS, BINS = "discrete BP, discrete features", "discrete BP, kernel likelihood"
PARTICLES, MIXTURES = "particle BP", "Gaussian-mixture BP"


class Problem:
    """Scenes of one size, the training pairs, and the methods fitted to them."""

    def __init__(self, name: str):
        """Draw the scenes; distances of features are in units of their median."""
        self.rows, self.columns, train, validation, test, count, self.candidates = SIZES[name]
        parts = [
            worlds(self.rows, self.columns, n, seed)
            for seed, n in enumerate((train, validation, test))
        ]
        self.validation, self.test = parts[1], parts[2]
        self.data = methods.Training.draw(parts[0], count, 0)
        self.grid = self.data.grid()
        self.median = float(
            kbr.median_heuristic(jnp.asarray(self.data.features[:, :100].reshape(-1, 8)[:2000]))
        )

    def scaled(self, p: dict) -> dict:
        """Parameters with the bandwidth of features in the features' own units."""
        return {**p, "c": p["c"] * self.median} if "c" in p else p

    def image(self, scene: World) -> jax.Array:
        """Features `[rows, columns, d]`."""
        return methods.values(scene).reshape(self.rows, self.columns, -1)

    def kernel(
        self, p: dict, **form: Any
    ) -> tuple[kbr.propagation.PropagationModel, Callable[[World], np.ndarray]]:
        """Kernel belief propagation: the model, and estimates of a scene."""
        model = methods.fit_kernel(self.data, self.scaled(p), **form)
        return model, lambda scene: np.asarray(
            methods.estimate(model, self.grid, methods.values(scene), SWEEPS, p["floor"])
        )

    def alone(self, p: dict) -> Callable[[World], np.ndarray]:
        """Posterior medians without neighbors."""
        model = methods.fit_alone(self.data, self.scaled(p))
        return lambda scene: np.asarray(
            methods.estimate(model, self.grid, methods.values(scene), 1, 1e-4)
        )

    def discrete(self, p: dict) -> tuple[dict, Callable[[World], np.ndarray]]:
        """Discrete belief propagation: the tables, and estimates of a scene."""
        tables = methods.fit_discrete(self.data, self.scaled(p))
        return tables, lambda scene: np.asarray(
            methods.discrete_estimate(tables, self.image(scene), SWEEPS, p["floor"])
        )

    def regression(self, p: dict) -> Callable[[World], np.ndarray]:
        """Ridge regression, node by node."""
        given = (jnp.asarray(self.data.depth), jnp.asarray(self.data.features))
        c, kappa = jnp.float32(p["c"] * self.median), jnp.float32(p["kappa"])
        return lambda scene: np.asarray(methods.regress(*given, c, kappa, self.image(scene)))

    def sampled(self, p: dict, estimate: Callable) -> tuple[dict, Callable[[World], np.ndarray]]:
        """Belief propagation by samples: the tables, and estimates of a scene."""
        tables = sampled.fit_sampled(self.data, self.scaled(p))
        return tables, lambda scene: np.asarray(
            estimate(tables, self.image(scene), SWEEPS, p["floor"])
        )

    def particles(self, p: dict) -> Callable[[World], np.ndarray]:
        """Particle belief propagation."""
        return self.sampled(p, sampled.particle_estimate)[1]

    def mixtures(self, p: dict) -> Callable[[World], np.ndarray]:
        """Belief propagation with mixtures of Gaussians."""
        return self.sampled(p, sampled.mixture_estimate)[1]

    def fitted(self, name: str, p: dict) -> Callable[[World], np.ndarray]:
        """Estimates of a scene by the method of this name."""
        if name == "kernel":
            return self.kernel(p)[1]
        return self.discrete(p)[1] if name in ("cells", "bins") else getattr(self, name)(p)


def tune(problem: Problem, known: dict[str, dict]) -> dict[str, dict]:
    """The best random candidate on the validation scenes, for each method that is not `known`."""
    rng, best = np.random.default_rng(7), dict(known)
    for name, space in SPACES.items():
        if name in known or (name == "mixtures" and problem.rows > 20):
            continue
        trials = []
        for _ in tqdm(
            range(MIXTURE_CANDIDATES if name == "mixtures" else problem.candidates), desc=name
        ):
            p = {key: choices[rng.integers(len(choices))] for key, choices in space.items()}
            estimate = problem.fitted(name, p)
            trials.append(
                (np.mean([methods.absolute_error(estimate(w), w) for w in problem.validation]), p)
            )
        trials = [trial for trial in trials if np.isfinite(trial[0])]
        error, p = min(trials, key=lambda trial: trial[0])
        best[name] = {**p, "validation error": float(error)}
        print(name, best[name], flush=True)
    return best


def memory() -> float:
    """Peak memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def sweep_time(run: Callable[[int], Any]) -> float:
    """Milliseconds of one sweep.

    What some more of them cost, the fastest of 7 each, since other work shares the machine.
    """

    def fastest(sweeps: int, repeats: int = 7) -> float:
        jax.block_until_ready(run(sweeps))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(run(sweeps))
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)

    one = fastest(1)
    more = 50 if fastest(4, 1) - one < 30 else 3
    return (fastest(1 + more) - one) / more


def compiled_in(run: Callable[[], Any]) -> float:
    """Seconds that the first call takes beyond the second."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times[0] - times[1]


def time_sampled(problem: Problem, best: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Milliseconds a sweep of belief propagation by samples."""
    times, image = {}, problem.image(problem.test[0])
    p = best["particles"]
    particles = sampled.particle_tables(sampled.fit_sampled(problem.data, problem.scaled(p)), image)
    times[PARTICLES] = {
        "sweep ms": sweep_time(lambda n: sampled.particle_messages(particles, n, p["floor"]))
    }
    if "mixtures" in best:
        q = best["mixtures"]
        tables = sampled.fit_sampled(problem.data, problem.scaled(q))
        times[MIXTURES] = {
            "sweep ms": sweep_time(lambda n: sampled.mixture_estimate(tables, image, n, q["floor"]))
        }
    return times


def measure(
    name: str, problem: Problem, best: dict[str, dict], known: dict[str, list]
) -> tuple[dict, dict]:
    """Errors on every test scene, unless `known`, and seconds of every method.

    And the estimates on the first test scene.
    """
    p, floor = best["kernel"], best["kernel"]["floor"]
    features = methods.values(problem.test[0])
    forms: dict[str, dict] = {"kernel BP, features": {}}
    forms |= {f"kernel BP, {count} pivots": {"pivots": count} for count in (PIVOTS, FEWER[name])}
    if name == "20 x 16":
        forms["kernel BP, exact"] = {"exact": True}
    errors, times, pictures = {}, {}, {}

    def record(method: str, estimate: Callable[[World], np.ndarray]):
        pictures[method] = estimate(problem.test[0])
        errors[method] = known.get(method, [])
        if len(errors[method]) != len(problem.test):
            errors[method] = [methods.absolute_error(estimate(w), w) for w in problem.test]

    record("regression, node by node", problem.regression(best["regression"]))
    record("posterior median, node by node", problem.alone(best["alone"]))
    for method, key in ((CELLS, "cells"), (BINS, "bins")):
        tables, discrete = problem.discrete(best[key])
        record(method, discrete)
        local = methods.discrete_local(tables, problem.image(problem.test[0]), best[key]["floor"])
        run = functools.partial(methods.discrete_messages, tables, local, floor=best[key]["floor"])
        whole = experiment.milliseconds(lambda e=discrete: e(problem.test[0]), 3)
        times[method] = {"sweep ms": sweep_time(lambda n, run=run: run(n)), "all ms": whole}
    times |= time_sampled(problem, best)
    record(PARTICLES, problem.particles(best["particles"]))
    if "mixtures" in best:
        record(MIXTURES, problem.mixtures(best["mixtures"]))
    for form, options in forms.items():
        jax.block_until_ready(jax.tree.leaves(problem.kernel(p, **options)[0]))  # compiles
        start = time.perf_counter()
        model, estimate = problem.kernel(p, **options)
        jax.block_until_ready(jax.tree.leaves(model))
        fit = time.perf_counter() - start
        propagate = functools.partial(
            kbr.propagation.belief_propagation, model, features, floor=floor, schedule="loopy"
        )
        jax.clear_caches()
        compile_seconds = compiled_in(lambda run=propagate: run(num_sweeps=SWEEPS).values)
        sweep = sweep_time(lambda n, run=propagate: run(num_sweeps=n).values)
        record(form, estimate)
        whole = experiment.milliseconds(lambda e=estimate: e(problem.test[0]), 3)
        times[form] = {
            "fit s": fit,
            "compile s": compile_seconds,
            "sweep ms": sweep,
            "all ms": whole,
        }
        print(
            form,
            times[form],
            f"error {np.mean(errors[form]):.4f}, memory {memory():.2f} GB",
            flush=True,
        )
    return {"errors": errors, "times": times, "memory GB": memory()}, pictures


def summary(result: dict) -> str:
    """Mean error, paired difference to kernel BP in feature form, and time, as a table."""
    errors, rows = result["errors"], []
    reference = np.asarray(errors["kernel BP, features"])
    for method, values in errors.items():
        difference = np.asarray(values) - reference
        deviation = difference.std(ddof=1) / np.sqrt(len(difference))
        sweep = result["times"].get(method, {}).get("sweep ms")
        paired = (
            "" if method == "kernel BP, features" else f"{difference.mean():+.4f} ± {deviation:.4f}"
        )
        rows.append(
            [method, f"{np.mean(values):.4f}", paired, "" if sweep is None else f"{sweep:.2f}"]
        )
    return experiment.table(
        ["method", "mean absolute error", "minus kernel BP, features (paired)", "ms a sweep"], rows
    )


def draw(problem: Problem, pictures: dict, result: dict) -> None:
    """Truth, one feature, estimates, their errors, and time a sweep."""
    scene, pivots = problem.test[0], f"kernel BP, {PIVOTS} pivots"
    figure, axes = plt.subplots(2, 5, figsize=(12, 6.2), constrained_layout=True)
    low, high = scene.depth.min(), scene.depth.max()
    names = ["regression, node by node", PARTICLES, CELLS, BINS, "kernel BP, features", pivots]
    for axis, title in zip(axes.flat, ["truth", "one of eight features", *names], strict=False):
        axis.set(xticks=[], yticks=[])
        if title == "one of eight features":
            axis.imshow(scene.features[..., 0], cmap="gray")
            axis.set_title(f"{title}\n(fits several depths)", fontsize=9)
            continue
        shown = (
            scene.depth
            if title == "truth"
            else np.asarray(pictures[title]).reshape(scene.depth.shape)
        )
        axis.imshow(shown, vmin=low, vmax=high, cmap="viridis")
        error = (
            "log depth" if title == "truth" else f"error {methods.absolute_error(shown, scene):.3f}"
        )
        axis.set_title(
            f"{title.replace(', ', ',' + chr(10), 1)}\n{error}"
            if title in names
            else f"{title}\n{error}",
            fontsize=9,
        )
    short = [
        "regression",
        "particles",
        "discrete,\ncells",
        "discrete,\nkernel",
        "kernel,\nfeatures",
        "kernel,\npivots",
    ]
    colors = ["0.7", "0.5", "tab:orange", "tab:red", "tab:blue", "tab:cyan"]
    errors = [result["errors"][name] for name in names]
    spread = [np.std(e, ddof=1) / np.sqrt(len(e)) for e in errors]
    axes.flat[8].barh(short, [np.mean(e) for e in errors], xerr=spread, color=colors)
    axes.flat[8].set_title(
        f"mean absolute error\n{len(errors[0])} scenes, ± standard error", fontsize=9
    )
    times = [result["times"][name]["sweep ms"] for name in names[1:]]
    axes.flat[9].barh(short[1:], times, color=colors[1:])
    axes.flat[9].set(xscale="log")
    axes.flat[9].set_title("milliseconds a sweep", fontsize=9)
    for axis in axes.flat[8:]:
        axis.invert_yaxis()
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path = experiment.FIGURES / "depth.png"
    figure.savefig(path, dpi=80)
    Image.open(path).convert("RGB").quantize(160).save(path, optimize=True)


def main(*words: str) -> None:
    chosen = [
        name for name, word in zip(SIZES, ("small", "large"), strict=True) if word in words
    ] or list(SIZES)
    results: dict = experiment.previous("depth")
    for name in chosen:
        problem = Problem(name)
        known = results.get(name, {}) if "again" in words else {}
        best = tune(problem, known.get("parameters", {}))
        result, pictures = measure(name, problem, best, known.get("errors", {}))
        results[name] = {"parameters": best, "feature distance": problem.median, **result}
        print(f"\n{name}\n\n{summary(result)}\n\nmemory {result['memory GB']:.2f} GB", flush=True)
        if name == "107 x 86":
            draw(problem, pictures, result)
    print(experiment.save("depth", results))


if __name__ == "__main__":
    experiment.start(main, double=False)
