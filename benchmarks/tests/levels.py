"""Tests of hypotheses: level over 1000 data sets, and power and time beside hyppo.

    python -m benchmarks.tests.levels [levels | hyppo]

The peer (extra `benchmarks`) runs its own MMD and HSIC, in the same process and on the same data;
at n = 1000 with 40 permutations, whose time is multiplied by 25.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import kbr_jax as kbr

from .. import experiment

LEVEL, REPETITIONS, DRAWS, N = 0.05, 1000, 199, 50
POWER_SETS, POWER_DRAWS, LARGE, LARGE_DRAWS, PEER_DRAWS = 200, 99, 1000, 1000, 40
G = kbr.Gaussian(1.0)


def two_samples(key: jax.Array, shift: float) -> tuple[jax.Array, jax.Array]:
    x, y = jax.random.normal(key, (2, N, 2))
    return x, y + shift


def pairs(key: jax.Array, strength: float) -> tuple[jax.Array, jax.Array]:
    x, noise = jax.random.normal(key, (2, N, 1))
    return x, strength * x**2 + noise


def triples(key: jax.Array, strength: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    first, second, third = jax.random.normal(key, (3, 200, 1))
    z, x = first, jnp.sin(2 * first) + 0.5 * second
    return x, z + strength * x + 0.5 * third, z


def tests() -> dict[str, tuple[Callable[..., jax.Array], float]]:
    """p-value of each test for a key and a strength of the effect, and a strength at which it
    should often be found.
    """
    two = {
        "two samples, permutations": lambda x, y, key: kbr.hypotheses.two_sample_test(
            G, x, y, key=key, num_permutations=DRAWS
        ),
        "two samples, 5 kernels": lambda x, y, key: kbr.hypotheses.two_sample_test(
            [kbr.Gaussian(h) for h in (0.1, 0.3, 1.0, 3.0, 10.0)],
            x,
            y,
            key=key,
            num_permutations=DRAWS,
        ),
        "two samples, default kernels": lambda x, y, key: kbr.hypotheses.two_sample_test(
            None, x, y, key=key, num_permutations=DRAWS
        ),
        "two samples, random signs": lambda x, y, key: kbr.hypotheses.two_sample_test(
            G, x, y, key=key, num_permutations=DRAWS, null="signs"
        ),
        "two samples, blocks of 5": lambda x, y, key: kbr.hypotheses.block_two_sample_test(
            G, x, y, block_size=5
        ),
    }
    one = {
        "independence": lambda x, y, key: kbr.hypotheses.independence_test(
            G, G, x, y, key=key, num_permutations=DRAWS
        ),
        "independence, rank 10": lambda x, y, key: kbr.hypotheses.independence_test(
            G, G, x, y, key=key, num_permutations=DRAWS, landmarks=10
        ),
    }

    def conditional(x, y, z, key):
        return kbr.hypotheses.conditional_independence_test(
            None, None, None, x, y, z, key=key, num_draws=DRAWS
        )

    def bound(make, test):
        def p_value(key, strength):
            data, own = jax.random.split(key)
            return test(*make(data, strength), own).p_value

        return p_value

    found: dict[str, tuple[Callable[..., jax.Array], float]] = {
        name: (bound(two_samples, t), 0.5) for name, t in two.items()
    }
    found |= {name: (bound(pairs, t), 0.7) for name, t in one.items()}
    found |= {"independence given z, n = 200": (bound(triples, conditional), 0.3)}

    def local(x, y, z, key):
        model = kbr.fit_conditional(
            kbr.Gaussian(0.5), kbr.TensorProduct((G, G)), z, (x, y), regularizer=1e-3
        )
        return kbr.experimental.local_dependence_test(model, jnp.zeros(1), key=key, num_draws=DRAWS)

    return found | {"dependence where z = 0, n = 200": (bound(triples, local), 0.3)}


def levels() -> dict[str, Any]:
    low, high = scipy.stats.binom.ppf([0.005, 0.995], REPETITIONS, LEVEL) / REPETITIONS
    results: dict[str, Any] = {"bounds, 99 %": [float(low), float(high)], "level": LEVEL}
    keys = jax.random.split(jax.random.key(0), REPETITIONS)
    for name, (p_value, strength) in tests().items():
        run = jax.jit(lambda keys, s, p=p_value: jax.lax.map(lambda key: p(key, s), keys))
        rates = [
            float(np.mean(np.asarray(run(keys, jnp.asarray(s))) <= LEVEL)) for s in (0.0, strength)
        ]
        results[name] = {
            "type I": rates[0],
            "inside": bool(low <= rates[0] <= high),
            "power": rates[1],
        }
        print(name, results[name], flush=True)
    return results


def against_hyppo() -> dict[str, Any]:
    from hyppo.independence import Hsic  # pyright: ignore[reportMissingImports]
    from hyppo.ksample import MMD  # pyright: ignore[reportMissingImports]

    # hyppo's Gaussian kernel is exp(-gamma |x - y|^2). Our MMD is unbiased, as its default; our
    # HSIC is the V-statistic, which it calls biased.
    hsic = Hsic(compute_kernel="rbf", bias=True, gamma=0.5)
    mmd = MMD(compute_kernel="rbf", gamma=0.5)
    problems: dict[str, Any] = {
        "two samples": (
            lambda x, y, draws: (
                kbr.hypotheses.two_sample_test(
                    G, x, y, key=jax.random.key(1), num_permutations=draws
                ).p_value
            ),
            lambda x, y, draws: mmd.test(x, y, reps=draws, auto=False)[1],
            lambda key: two_samples(key, 0.4),
        ),
        "independence": (
            lambda x, y, draws: (
                kbr.hypotheses.independence_test(
                    G, G, x, y, key=jax.random.key(1), num_permutations=draws
                ).p_value
            ),
            lambda x, y, draws: hsic.test(x, y, reps=draws, auto=False)[1],
            lambda key: pairs(key, 0.5),
        ),
    }

    def large(name: str) -> tuple[np.ndarray, np.ndarray]:
        x, noise = np.asarray(jax.random.normal(jax.random.key(3), (2, LARGE, 2)), np.float64)
        return x, noise + (0.3 if name == "two samples" else 0.5 * x**2)

    def seconds(test: Callable, name: str) -> float:
        x, y = map(jnp.asarray, large(name))
        return experiment.milliseconds(lambda: test(x, y, LARGE_DRAWS), 3) / 1e3

    def rank_50(x: jax.Array, y: jax.Array, draws: int) -> jax.Array:
        return kbr.hypotheses.independence_test(
            G, G, x, y, key=jax.random.key(1), num_permutations=draws, landmarks=50
        ).p_value

    # Before the peer's first call, which leaves threads behind.
    own = {name: seconds(ours, name) for name, (ours, _, _) in problems.items()}
    low_rank = seconds(rank_50, "independence")
    results: dict[str, Any] = {}
    for name, (ours, theirs, make) in problems.items():
        theirs(*(np.asarray(part) for part in make(jax.random.key(4))), 2)  # it compiles too
        start = time.perf_counter()
        theirs(*large(name), PEER_DRAWS)
        peer = (time.perf_counter() - start) * LARGE_DRAWS / PEER_DRAWS
        found = []
        for key in jax.random.split(jax.random.key(2), POWER_SETS):
            data = make(key)
            arrays = [np.asarray(part, np.float64) for part in data]
            found.append(
                (float(ours(*data, POWER_DRAWS)) <= LEVEL, theirs(*arrays, POWER_DRAWS) <= LEVEL)
            )
        rates = np.mean(found, axis=0)
        results[name] = {"power": float(rates[0]), "power, hyppo": float(rates[1])}
        results[name] |= {
            "seconds": own[name],
            "seconds, hyppo": peer,
            "times faster": peer / own[name],
        }
        if name == "independence":
            results[name] |= {
                "seconds, rank 50": low_rank,
                "times faster, rank 50": peer / low_rank,
            }
        print(name, results[name], flush=True)
    return results


def main(*parts: str) -> None:
    results = experiment.previous("hypotheses")
    if "levels" in parts or not parts:
        results["levels"] = levels()
        experiment.save("hypotheses", results)
    if not importlib.util.find_spec("hyppo"):
        print("hyppo is not installed: not compared")
    elif "hyppo" in parts or not parts:
        results["against hyppo"] = against_hyppo()
        results["peer"] = {"bias of HSIC": True}
        experiment.save("hypotheses", results)


if __name__ == "__main__":
    experiment.start(main)
