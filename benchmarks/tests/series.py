"""Tests of series: level and power, beside the wild bootstrap as published.

    python -m benchmarks.tests.series [repetitions]

Pairs of independent autoregressions, and pairs that differ: by a shift of the second, or because
the second holds a share of the first. The wild bootstrap is that of Chwialkowski, Sejdinovic and
Gretton (2014): V-statistics, multipliers from an autoregressive process of length 20, centered.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr
from kbr_jax.kernels import default_kernel

from .. import experiment

LEVEL, REPETITIONS, DRAWS, LENGTH = 0.05, 300, 199, 20
#: For power the second sample is moved, or holds a share of the first.
EFFECTS = {"shift": 0.5, "share": 0.4}
SETTINGS = [(n, rho) for n in (100, 300) for rho in (0.0, 0.5, 0.9)]


def series(key: jax.Array, n: int, rho: float) -> jax.Array:
    noise = jax.random.normal(key, (n + 200,)) * np.sqrt(1 - rho**2)

    def step(state, new):
        state = rho * state + new
        return state, state

    return jax.lax.scan(step, jnp.zeros(()), noise)[1][200:]


def multipliers(key: jax.Array, n: int) -> jax.Array:
    """Draws of the process, centered `[draws, n]`."""
    keep = np.exp(-1 / LENGTH)
    noise = jax.random.normal(key, (n + 100, DRAWS)) * np.sqrt(1 - keep**2)

    def step(state, new):
        state = keep * state + new
        return state, state

    found = jax.lax.scan(step, jnp.zeros(DRAWS), noise)[1][100:].T
    return found - jnp.mean(found, axis=1, keepdims=True)


@jax.jit
def wild_two(x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    pooled = jnp.concatenate([x, y])
    gram = default_kernel(pooled).gram(pooled, pooled)
    keys = jax.random.split(key)
    drawn = [multipliers(k, x.size) / x.size for k in keys]
    weights = jnp.concatenate([drawn[0], -drawn[1]], axis=1)
    signs = jnp.repeat(jnp.asarray([1.0, -1.0]), x.size) / x.size
    null = jnp.sum((weights @ gram) * weights, axis=1)
    return (1 + jnp.sum(null >= signs @ gram @ signs)) / (1 + DRAWS)


@jax.jit
def wild_pairs(x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    center = jnp.eye(x.size) - 1 / x.size
    grams = [center @ default_kernel(part).gram(part, part) @ center for part in (x, y)]
    weights = multipliers(key, x.size)
    null = jnp.sum((weights @ (grams[0] * grams[1])) * weights, axis=1)
    return (1 + jnp.sum(null >= jnp.sum(grams[0] * grams[1]))) / (1 + DRAWS)


def p_values(n: int, rho: float, seed: int, shift: float, share: float) -> list[float]:
    """Of the two-sample test three ways, and of the test of independence three ways."""
    first, second, own = jax.random.split(jax.random.key(seed), 3)
    x, y = series(first, n, rho), series(second, n, rho)
    options: dict[str, Any] = {"key": own, "num_permutations": DRAWS}
    moved, mixed = y + shift, y + share * x
    kernel, pair = default_kernel(x), (default_kernel(x), default_kernel(mixed))
    tests = kbr.hypotheses
    found = [
        tests.two_sample_test(kernel, x, moved, **options).p_value,
        tests.two_sample_test(kernel, x, moved, **options, dependent=True).p_value,
        wild_two(x, moved, own),
        tests.independence_test(*pair, x, mixed, **options).p_value,
        tests.independence_test(*pair, x, mixed, **options, dependent=True).p_value,
        wild_pairs(x, mixed, own),
    ]
    return [float(value) for value in found]


NAMES = (
    "two samples, as if independent",
    "two samples, blocks",
    "two samples, wild bootstrap",
    "independence, as if independent",
    "independence, shifts",
    "independence, wild bootstrap",
)


def main(count: int = REPETITIONS) -> None:
    warnings.filterwarnings("ignore", message="The series are short")
    results: dict[str, Any] = {"repetitions": count, "level": LEVEL, **EFFECTS, "rates": {}}
    with tqdm(total=2 * len(SETTINGS) * count, unit="pair") as bar:
        for n, rho in SETTINGS:
            row = {name: {} for name in NAMES}
            for kind, effects in (("level", dict.fromkeys(EFFECTS, 0.0)), ("power", EFFECTS)):
                found = []
                for seed in range(count):
                    found.append(p_values(n, rho, seed, **effects))
                    bar.update()
                for name, rate in zip(
                    NAMES, np.mean(np.asarray(found) <= LEVEL, axis=0), strict=True
                ):
                    row[name][kind] = float(rate)
            results["rates"][f"{n} points, coefficient {rho}"] = row
            print(n, rho, row, flush=True)
    experiment.save("series", results)


if __name__ == "__main__":
    experiment.start(main, double=False)
