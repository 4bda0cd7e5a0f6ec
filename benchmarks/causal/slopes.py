"""The slope of a line that an instrument finds: by default, and where its form is given.

    python -m benchmarks.causal.slopes

u drives treatment and outcome. 300 units of x = z + u and y = x + u + noise / 2; 2000 units of
x = z + u + noise / 2 and y = x / 2 + u + noise / 2, an instrument that is strong for its number of
units. Slopes are those of the line that fits the curve between the 10 % and 90 % quantiles of x.
"""

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr
from kbr_jax import causal

from .. import experiment

CELLS = {"n = 300, slope 1": (300, 1.0, 0.0, 20), "n = 2000, slope 0.5": (2000, 0.5, 0.5, 10)}


def sample(n: int, slope: float, noise: float, seed: int) -> tuple[jax.Array, ...]:
    """Treatment, instrument and outcome."""
    z, u, first, second = jax.random.normal(jax.random.key(seed), (4, n))
    x = z + u + noise * first
    return x, z, slope * x + u + second / 2


def slopes(x: jax.Array, z: jax.Array, y: jax.Array) -> dict[str, float]:
    line = kbr.Polynomial(degree=1)
    models = {
        "defaults": causal.fit_instrument(x, z, y),
        "a line for x": causal.fit_instrument(x, z, y, kernels=(line, None)),
        "a line for x, last ridge 1e-6": causal.fit_instrument(
            x, z, y, kernels=(line, None), regularizers=(None, 1e-6)
        ),
    }
    low, high = jnp.quantile(x, jnp.array([0.1, 0.9]))
    doses = jnp.linspace(low, high, 20)
    found = {
        name: float(jnp.polyfit(doses, causal.structural(model, doses), 1)[0])
        for name, model in models.items()
    }
    centered = z - jnp.mean(z)
    return found | {
        "two-stage least squares": float(centered @ y / (centered @ x)),
        "least squares": float(jnp.polyfit(x, y, 1)[0]),
    }


def main() -> None:
    results = {}
    for name, (n, slope, noise, count) in CELLS.items():
        rows = experiment.columns([slopes(*sample(n, slope, noise, seed)) for seed in range(count)])
        results[name] = {
            method: {
                "mean": float(np.mean(values)),
                "deviation": float(np.std(values, ddof=1)),
                "samples": count,
            }
            for method, values in rows.items()
        }
    experiment.save("slopes", results)


if __name__ == "__main__":
    experiment.start(main)
