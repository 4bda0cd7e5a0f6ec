"""Where single tests and segmentations err: numbers of their docstrings.

    python -m benchmarks.tests.limits

- Segments: share of series without a change that get one, by length; share of series of 100 points
  with one jump that get a second change; share of series of 500 points in 10 dimensions, whose
  deviations change by 1.6 every 100 points, in which any change is found.
- Random signs: share of true hypotheses rejected for uniform x and y = x + .1 modulo 1, where
  (x, y) and (y, x) have different distributions.
- Treatment effects: share of true hypotheses rejected by the overlap of the two arms, and the share
  of points whose propensity is outside .02 and .98.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment

LEVEL, SERIES, WIDE, PAIRS, SAMPLES = 0.05, 400, 50, 1000, 300
LENGTHS, JUMPS, SLOPES = (12, 15, 18, 24, 48, 60, 100, 500), (2, 10, 100), (0.5, 1.0, 1.5, 2.0)


def share(function: Callable[[jax.Array], jax.Array], count: int) -> Any:
    """The mean of a function of a key over `count` keys: a number, or a list for a vector."""
    keys = jax.random.split(jax.random.key(0), count)
    found = jax.jit(lambda keys: jax.lax.map(function, keys))(keys)
    return jnp.mean(found, axis=0).tolist()


def segments(bar: tqdm) -> dict[str, dict[str, float]]:
    def found(x):
        return kbr.hypotheses.change_points(None, x).num_changes

    def still(length, key):
        return found(jax.random.normal(key, (length,))) > 0

    def jump(size, key):
        return found(jax.random.normal(key, (100,)).at[50:].add(size)) > 1

    def wide(key):
        deviation = jnp.where(jnp.arange(500) // 100 % 2 == 1, 1.6, 1.0)
        return found(deviation[:, None] * jax.random.normal(key, (500, 10))) > 0

    results: dict[str, dict[str, float]] = {"no change, points": {}, "one jump, deviations": {}}
    for length in LENGTHS:
        bar.update()
        results["no change, points"][str(length)] = share(lambda k, n=length: still(n, k), SERIES)
    for size in JUMPS:
        bar.update()
        results["one jump, deviations"][str(size)] = share(lambda k, s=size: jump(s, k), SERIES)
    bar.update()
    return results | {"d = 10": {"deviations x 1.6": share(wide, WIDE)}}


def signs(n: int) -> float:
    def one(key):
        first, second = jax.random.split(key)
        x = jax.random.uniform(first, (n,))
        found = kbr.hypotheses.two_sample_test(
            None, x, (x + 0.1) % 1, key=second, num_permutations=200, null="signs"
        )
        return found.p_value <= LEVEL

    return share(one, PAIRS)


def overlap(slope: float) -> dict[str, float]:
    """200 points; x drives the treatment by this slope, and y."""

    def one(key):
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (200, 2))
        propensity = jax.nn.sigmoid(slope * (x[:, 0] + x[:, 1]))
        treatment = jax.random.bernoulli(keys[1], propensity)
        y = x[:, 0] + jnp.sin(2 * x[:, 1]) + 0.5 * jax.random.normal(keys[2], (200,))
        found = kbr.hypotheses.treatment_effect_test(None, x, treatment, y, key=keys[3])
        outside = jnp.mean((propensity < 0.02) | (propensity > 0.98))
        return jnp.stack([found.p_value <= LEVEL, outside])

    return dict(zip(("rejected", "outside"), share(one, SAMPLES), strict=True))


def main() -> None:
    warnings.simplefilter("ignore")
    with tqdm(total=len(LENGTHS) + len(JUMPS) + 3 + len(SLOPES)) as bar:
        found = segments(bar)
        rejected = {}
        for n in (10, 50):
            bar.update()
            rejected[f"n = {n}"] = signs(n)
        effects = {}
        for slope in SLOPES:
            bar.update()
            effects[f"slope {slope}"] = overlap(slope)
    results = {"level": LEVEL, "segments": found, "signs": rejected, "overlap": effects}
    counts = {"series": SERIES, "pairs": PAIRS, "samples": SAMPLES}
    experiment.save("limits", counts | results)


if __name__ == "__main__":
    experiment.start(main)
