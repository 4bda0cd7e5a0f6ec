r"""Posterior means from samples alone, F11 section 5.1: kernel Bayes' rule beside kernel densities
with importance weights.

    python -m benchmarks.inference.posterior [runs]

A sample of 200 pairs (x, y) in d + d dimensions gives the likelihood, 200 points give the prior,
which is narrower than the marginal of x (`gaussian_problem.py`). The mean of x given y
is asked for at 1000 observations. Error: mean over observations and components of the squared
difference to the exact posterior mean; each run draws a new problem; all methods see the same data.
Kernel Bayes' rule: Gaussian kernels, prior weights normalized, eps = .01 / sqrt(n), delta = 1e-4
(eps in the importance form, whose ridge is not squared). Bandwidths: the medians of the distances,
or the medians times a factor chosen by ten-fold cross-validation on the pairs, of two losses: the
discrepancy of F11 section 4.2 in one fixed kernel (`marginal_loss`), and the squared error of the
mean, which also chooses delta. Kernel densities: one bandwidth for x and y as in the paper, by
least-squares cross-validation, and the best on the test points in hindsight, which flatters them.
"""

import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import kbr_jax as kbr

from .. import experiment
from . import density_ratio as density_baseline
from . import gaussian_problem

DIMENSIONS, RUNS, N, TESTS, FOLDS = (2, 4, 8, 12, 16, 24, 32, 48, 64), 20, 200, 1000, 10
EPSILON, DELTA = 0.01 / np.sqrt(N), 1e-4
FACTORS, DELTAS = np.array([0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0]), np.array([1e-4, 1e-5, 1e-6, 1e-7])
#: Bandwidths of the densities, in units of the standard deviation of the data.
DENSITY_FACTORS = 2.0 ** np.arange(-2, 1.51, 0.25)

KBR, SECTION = "kernel Bayes' rule (b), medians", "form (b), F11 section 4.2"
VALIDATED, IMPORTANCE = "form (b), cross-validated error", "importance form, medians"
DENSITY, HINDSIGHT = "kernel densities, cross-validated", "kernel densities, best in hindsight"
PRIOR_MEAN, NO_PRIOR = "answer the prior mean", "ignore the prior (conditional embedding)"
#: Curves of the figure: color and line.
CURVES = {
    KBR: ("#0072b2", "-"),
    VALIDATED: ("#56b4e9", "-"),
    IMPORTANCE: ("#009e73", "-"),
    DENSITY: ("#d55e00", "-"),
    HINDSIGHT: ("#d55e00", ":"),
    NO_PRIOR: ("0.45", "--"),
    PRIOR_MEAN: ("0.45", ":"),
}
#: The importance form has no other: negative weights would go into its square roots.
NORMALIZED, CLIPPED = kbr.Clipping(False, 0.0), kbr.Clipping(True, 0.0)


def fit(factor: jax.Array | float, x: jax.Array, y: jax.Array) -> kbr.rules.ConditionalEmbedding:
    """P(Y | X) with Gaussian kernels of the median bandwidths times a factor."""
    kernel_x, kernel_y = (kbr.Gaussian(factor * kbr.median_heuristic(points)) for points in (x, y))
    return kbr.fit_conditional(kernel_x, kernel_y, x, y, regularizer=EPSILON)


def posterior_mean(
    model: kbr.rules.ConditionalEmbedding,
    prior: jax.Array,
    y: jax.Array,
    estimator: Any = "pairs",
    delta: Any = DELTA,
) -> jax.Array:
    belief = kbr.embed(model.kernel_x, prior)
    clipping = CLIPPED if estimator == "importance" else NORMALIZED
    options = {"regularizer": delta, "estimator": estimator, "clipping": clipping}
    posterior = kbr.bayes_rule(model, belief, y, **options)
    return kbr.expectation(posterior, lambda x: x)


def select(x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The factor by the corrected F11 section 4.2.

    Factor and delta by the error of the mean. The prior is the marginal of x.
    """
    reference = kbr.Gaussian(kbr.median_heuristic(x))

    def marginal(factor):
        def score(training, held_out):
            model = fit(factor, *training)
            return kbr.tuning.marginal_loss(
                model, *held_out, regularizer=DELTA, kernel=reference, clipping=NORMALIZED
            )

        return kbr.cross_validate(score, (x, y), FOLDS)

    def error(candidate):
        def score(training, held_out):
            found = posterior_mean(
                fit(candidate[0], *training), training[0], held_out[1], delta=candidate[1]
            )
            return jnp.mean((found - held_out[0]) ** 2)

        return kbr.cross_validate(score, (x, y), FOLDS)

    factors, deltas = (
        part.ravel() for part in jnp.meshgrid(jnp.asarray(FACTORS), jnp.asarray(DELTAS))
    )
    best = jnp.argmin(jax.lax.map(error, (factors, deltas)))
    own = jnp.asarray(FACTORS)
    return own[jnp.argmin(jax.lax.map(marginal, own))], (factors[best], deltas[best])


@jax.jit
def kernel_estimates(
    x: jax.Array, y: jax.Array, prior: jax.Array, tests: jax.Array
) -> tuple[Any, Any]:
    by_marginal, (factor, delta) = select(x, y)
    median = fit(1.0, x, y)
    backward = kbr.fit_conditional(median.kernel_y, median.kernel_x, y, x, regularizer=EPSILON)
    estimates = {
        KBR: posterior_mean(median, prior, tests),
        "form (a), medians": posterior_mean(median, prior, tests, "prior"),
        IMPORTANCE: posterior_mean(median, prior, tests, "importance", EPSILON),
        SECTION: posterior_mean(fit(by_marginal, x, y), prior, tests),
        VALIDATED: posterior_mean(fit(factor, x, y), prior, tests, delta=delta),
        NO_PRIOR: kbr.expectation(kbr.condition(backward, tests), lambda point: point),
        PRIOR_MEAN: jnp.broadcast_to(jnp.mean(prior, axis=0), tests.shape),
    }
    return estimates, {
        "factor, F11 section 4.2": by_marginal,
        "factor, error": factor,
        "delta, error": delta,
    }


def run(d: int, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of all methods on one draw of the problem, and the factors and bandwidths chosen."""
    rng = np.random.default_rng([seed, d])
    problem = gaussian_problem.make(d, rng)
    x, y = problem.pairs(N, rng)
    prior, tests = gaussian_problem.draw(problem.prior, N, rng), problem.observations(TESTS, rng)
    truth = problem.posterior_mean(tests)
    estimates, chosen = kernel_estimates(*map(jnp.asarray, (x, y, prior, tests)))
    errors = {
        name: float(np.mean((np.asarray(value) - truth) ** 2)) for name, value in estimates.items()
    }
    joint = np.hstack([x, y])
    bandwidths = DENSITY_FACTORS * joint.std(0).mean()
    best = int(np.argmin(density_baseline.least_squares_scores(joint, bandwidths)))
    means = [density_baseline.posterior_means(x, y, prior, tests, h) for h in bandwidths]
    found = [float(np.mean((value - truth) ** 2)) for value in means]
    errors |= {DENSITY: found[best], HINDSIGHT: min(found)}
    factors = {
        "factor, densities": DENSITY_FACTORS[best],
        "factor, densities in hindsight": DENSITY_FACTORS[np.argmin(found)],
    }
    return errors, {name: float(value) for name, value in (chosen | factors).items()}


def seconds_of_many(d: int = 8) -> dict[str, float]:
    """1000 observations in one call, which share one factorization, and one call for one.

    Milliseconds.
    """
    rng = np.random.default_rng(0)
    problem = gaussian_problem.make(d, rng)
    x, y = map(jnp.asarray, problem.pairs(N, rng))
    prior, tests = (
        jnp.asarray(gaussian_problem.draw(problem.prior, N, rng)),
        jnp.asarray(problem.observations(TESTS, rng)),
    )
    call = jax.jit(lambda y_: posterior_mean(fit(1.0, x, y), prior, y_))
    found = {f"{TESTS} observations": experiment.milliseconds(lambda: call(tests))}
    found["one observation"] = experiment.milliseconds(lambda: call(tests[0]))
    start = time.perf_counter()
    arrays = [np.asarray(part) for part in (x, y, prior, tests)]
    density_baseline.posterior_means(arrays[0], arrays[1], arrays[2], arrays[3], float(np.std(x)))
    return found | {f"kernel densities, {TESTS} observations": 1e3 * (time.perf_counter() - start)}


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Mean and standard error of each method, and how often kernel Bayes' rule by medians was
    better, run by run.
    """
    found: dict[str, Any] = {}
    for name in rows[0]:
        errors, own = np.array([row[name] for row in rows]), np.array([row[KBR] for row in rows])
        found[name] = {
            "error": float(errors.mean()),
            "se": float(errors.std(ddof=1) / np.sqrt(len(rows))),
        }
        if name != KBR:
            found[name] |= {
                "difference": float(np.mean(errors - own)),
                "difference_se": float(np.std(errors - own, ddof=1) / np.sqrt(len(rows))),
                "runs in which KBR by medians is better": int(np.sum(own < errors)),
            }
    return found


def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    found = [results[f"d = {d}"] for d in DIMENSIONS]
    for name, (color, line) in CURVES.items():
        errors, spread = (np.array([row[name][part] for row in found]) for part in ("error", "se"))
        own = np.array([row[KBR]["error"] for row in found])
        axes[0].errorbar(
            DIMENSIONS, errors, spread, color=color, linestyle=line, marker="o", ms=3, label=name
        )
        axes[1].plot(DIMENSIONS, errors / own, color=color, linestyle=line, marker="o", ms=3)
    axes[0].set_ylabel("mean squared error of a component")
    axes[1].set_ylabel("ratio to kernel Bayes' rule (b), medians")
    axes[1].set_yscale("log")
    axes[1].set_yticks([0.7, 1, 1.5, 2, 3, 4], labels=["0.7", "1", "1.5", "2", "3", "4"])
    axes[1].minorticks_off()
    for axis in axes:
        axis.set_xlabel("dimension d of x and of y")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(runs: int = RUNS) -> None:
    results: dict[str, Any] = {"n": N, "runs": runs, "milliseconds, d = 8": seconds_of_many()}
    for d in tqdm(DIMENSIONS):
        found = experiment.repeat(f"posterior {d}", lambda seed, d=d: run(d, seed), runs)
        rows, chosen = zip(*found, strict=True)
        results[f"d = {d}"] = summary(list(rows))
        results[f"d = {d}"]["chosen, medians over runs"] = {
            name: float(np.median([row[name] for row in chosen])) for name in chosen[0]
        }
    experiment.save("posterior_inference", results)
    draw(results, experiment.FIGURES / "posterior_inference.png")
    names = [name for name in results["d = 2"] if "chosen" not in name]
    cells = [
        [
            name,
            *[
                f"{results[f'd = {d}'][name]['error']:.3g} ± {results[f'd = {d}'][name]['se']:.1g}"
                for d in DIMENSIONS
            ],
        ]
        for name in names
    ]
    print(experiment.table(["error", *(f"d = {d}" for d in DIMENSIONS)], cells))
    better = "runs in which KBR by medians is better"
    wins = [
        [name, *[results[f"d = {d}"][name].get(better, "") for d in DIMENSIONS]] for name in names
    ]
    print(experiment.table([f"{better}, of {runs}", *(f"d = {d}" for d in DIMENSIONS)], wins))
    print(
        [results[f"d = {d}"]["chosen, medians over runs"] for d in DIMENSIONS],
        results["milliseconds, d = 8"],
    )


if __name__ == "__main__":
    experiment.start(main)
