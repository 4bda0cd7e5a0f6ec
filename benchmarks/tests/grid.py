"""Level of each test on awkward samples: labels, ties, heavy tails, few points, series.

    python -m benchmarks.tests.grid [repetitions [ROW]]

The hypothesis is true in every data set. Everything is chosen by default.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from .series import series

LEVEL, REPETITIONS, DRAWS, N = 0.05, 1000, 199, 50
Sampler = Callable[[jax.Array, int], Any]


def constant(key: jax.Array, n: int) -> jax.Array:
    return jnp.stack([jax.random.normal(key, (n,)), jnp.ones(n)], axis=1)


def mixed(key: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    first, second = jax.random.split(key)
    return jax.random.normal(first, (n, 1)), jax.random.randint(second, (n,), 0, 3)


def many_labels(key: jax.Array, n: int) -> jax.Array:
    return jax.random.randint(key, (n,), 0, 40)


#: A sample of n points.
SAMPLERS: dict[str, Sampler] = {
    "continuous": lambda key, n: jax.random.normal(key, (n, 2)),
    "labels": lambda key, n: jax.random.randint(key, (n,), 0, 3),
    "counts": lambda key, n: jax.random.poisson(key, 2.0, (n, 1)).astype(float),
    "mixed columns": mixed,
    "heavy tails": lambda key, n: jax.random.cauchy(key, (n, 1)),
    "a constant column": constant,
}


def gaussian(point: jax.Array) -> jax.Array:
    return -jnp.sum(point**2) / 2


#: Log densities of the samples that have one.
DENSITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "continuous": gaussian,
    "heavy tails": lambda point: -jnp.sum(jnp.log1p(point**2)),
}
#: Correlation of neighbors, length of a block (about eight autocorrelation times), and length. See
#: `benchmarks.tests.series` for AR(.9).
SERIES = {"AR(.5), dependent": (0.5, 24, 200)}


def two_samples(make: Sampler, n: int, m: int, **options) -> Callable[[jax.Array], jax.Array]:
    def p_value(key):
        first, second, own = jax.random.split(key, 3)
        return kbr.hypotheses.two_sample_test(
            None, make(first, n), make(second, m), key=own, num_permutations=DRAWS, **options
        ).p_value

    return p_value


def pairs(make: Sampler, n: int, **options) -> Callable[[jax.Array], jax.Array]:
    def p_value(key):
        first, second, own = jax.random.split(key, 3)
        return kbr.hypotheses.independence_test(
            None, None, make(first, n), make(second, n), key=own, num_permutations=DRAWS, **options
        ).p_value

    return p_value


def driven(key: jax.Array, like: Any, cause: jax.Array) -> Any:
    """What z drives: numbers move with it, and labels are more often 1 where it is large."""

    def one(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return (cause + jax.random.normal(key, cause.shape) > 0).astype(int)
        return leaf + cause.reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)

    return jax.tree.map(one, like)


def by_label(key: jax.Array, labels: jax.Array) -> jax.Array:
    """Numbers around a mean of each label."""
    means, noise = jax.random.normal(key, (2, len(labels)))
    return means[labels] + noise


def average(points: Any, n: int) -> jax.Array:
    """Sum over the parts of the mean of each part's coordinates."""
    leaves = jax.tree.leaves(points)
    return sum((leaf.reshape(n, -1).astype(float).mean(axis=1) for leaf in leaves), jnp.zeros(n))


def triples(make: Sampler, n: int, labels: bool = False) -> Callable[[jax.Array], jax.Array]:
    def p_value(key):
        first, second, third, own = jax.random.split(key, 4)
        z = make(third, n)
        if labels:
            x, y = (by_label(key, z) for key in (first, second))
        else:
            cause = average(z, n)
            x, y = (driven(key, make(key, n), cause) for key in (first, second))
        return kbr.hypotheses.conditional_independence_test(
            None, None, None, x, y, z, key=own, num_draws=DRAWS
        ).p_value

    return p_value


def assigned(make: Sampler, n: int) -> Callable[[jax.Array], jax.Array]:
    """Points that drive the treatment and y, which the treatment does not change."""

    def p_value(key):
        first, second, third, own = jax.random.split(key, 4)
        x = make(first, n)
        cause = average(x, n)
        treatment = jax.random.bernoulli(second, jax.nn.sigmoid(cause / (1 + jnp.abs(cause))))
        y = driven(third, make(third, n), cause)
        return kbr.hypotheses.treatment_effect_test(None, x, treatment, y, key=own).p_value

    return p_value


def fits(make: Sampler, n: int, log_density: Callable, **options) -> Callable:
    def p_value(key):
        first, own = jax.random.split(key)
        return kbr.hypotheses.goodness_of_fit_test(
            log_density, make(first, n), key=own, num_draws=DRAWS, **options
        ).p_value

    return p_value


def settings() -> dict[str, dict[str, Callable[[jax.Array], jax.Array]]]:
    found: dict[str, dict[str, Callable]] = {}
    for name, make in SAMPLERS.items():
        found[name] = {
            "two samples": two_samples(make, N, N),
            "independence": pairs(make, N),
            "given z": triples(make, N),
            "treatment": assigned(make, N),
        }
    for name, log_density in DENSITIES.items():
        found[name]["goodness of fit"] = fits(SAMPLERS[name], N, log_density)
    normal = SAMPLERS["continuous"]
    found["sizes 20 and 80"] = {"two samples": two_samples(normal, 20, 80)}
    found["n = 10"] = {
        "two samples": two_samples(normal, 10, 10),
        "independence": pairs(normal, 10),
        "given z": triples(normal, 10),
        "goodness of fit": fits(normal, 10, gaussian),
    }
    found["40 labels, n = 300"] = {
        "two samples": two_samples(many_labels, 300, 300),
        "independence": pairs(many_labels, 300),
        "given z": triples(many_labels, 300, labels=True),
    }
    for name, (rho, block, length) in SERIES.items():

        def correlated(key, n, rho=rho):
            return series(key, n, rho)

        found[f"{name}, n = {length}"] = {
            "two samples": two_samples(correlated, length, length, dependent=block),
            "independence": pairs(correlated, length, dependent=True),
            "goodness of fit": fits(correlated, length, gaussian, dependent=True),
        }
    return found


def main(count: int = REPETITIONS, row: str = "") -> None:
    low, high = scipy.stats.binom.ppf([0.005, 0.995], count, LEVEL) / count
    results: dict[str, Any] = {"repetitions": count, "bounds, 99 %": [float(low), float(high)]}
    keys, cells = jax.random.split(jax.random.key(0), count), settings()
    results["levels"] = experiment.previous("test_levels")["levels"] if row else {}
    cells = {row: cells[row]} if row else cells
    with tqdm(total=sum(map(len, cells.values())), unit="cell") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, tests in cells.items():
            found = results["levels"].setdefault(name, {})
            for test, p_value in tests.items():
                run = jax.jit(lambda keys, p=p_value: jax.lax.map(p, keys))
                found[test] = float(np.mean(np.asarray(run(keys)) <= LEVEL))
                bar.update()
            experiment.save("test_levels", results, part=row)
    print(results)


if __name__ == "__main__":
    experiment.start(main)
