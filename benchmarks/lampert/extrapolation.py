r"""Extrapolating the dynamics of distributions on Lampert's synthetic settings: his tables 1 and 2,
and better.

    python -m benchmarks.lampert.extrapolation [repetitions at n = 10, 100, 1000]

A mixture whose shares drift, a Gaussian that moves, a Gaussian that contracts: sets of n points at
each time, the prediction of the next. "EDD" is the paper's (regularizer 1 / n), "noise" has the
mean sampling noise of the embeddings as its regularizer (the default of `fit_dynamics`), "stacked"
is `stacked_forecast`; nothing but the observed sets decides. "+H" is followed by herding of n
points on a grid. Distances are to the true embedding in closed form, in the RKHS of the normal
density.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment

SIZES, REPETITIONS = (10, 100, 1000), (1000, 400, 100)
SETTINGS = ("mixture", "translation", "concentration")
WINDOWS = {"mixture": (-7.0, 7.0), "translation": (-3.0, 5.0), "concentration": (-6.0, 6.0)}
SHARES = np.arange(2, 8) / 10
#: Root mean squared distances to expect at the paper's settings (mean distances for the mixture), n
#: = 10, 100, 1000.
EXPECTED = {
    "translation": {"last": (0.294, 0.269, 0.267), "EDD": (0.310, 0.201, 0.144)},
    "concentration": {"last": (0.253, 0.203, 0.194), "EDD": (0.322, 0.220, 0.155)},
    "mixture": {"last": (0.144, 0.078, 0.069), "EDD": (0.182, 0.059, 0.015)},
}


def kernel() -> kbr.kernels.AbstractKernel:
    """The paper's "Gaussian kernel with unit variance": the density."""
    return float((2 * np.pi) ** -0.5) * kbr.Gaussian(1.0)


def truth(setting: str) -> kbr.experimental.GaussianMixture:
    if setting == "mixture":
        return gaussians([3.0, -3.0], [1.0, 1.0], [0.8, 0.2])
    return gaussians([0.0], [1.0])


def gaussians(means: Any, variances: Any, shares: Any = None) -> kbr.experimental.GaussianMixture:
    shares = None if shares is None else jnp.asarray(shares)
    return kbr.experimental.gaussian_mixture(
        jnp.asarray(means)[..., None], jnp.asarray(variances), shares
    )


def infinite(setting: str) -> kbr.experimental.GaussianMixture:
    """The observed distributions themselves."""
    if setting == "mixture":
        return gaussians([[3.0, -3.0]] * 6, np.ones((6, 2)), np.stack([SHARES, 1 - SHARES], 1))
    steps = np.arange(1.0, 10)
    if setting == "translation":
        return gaussians((10 - steps)[:, None], np.ones((9, 1)))
    return gaussians(np.zeros((9, 1)), (11 - steps)[:, None] ** 2)


def sample(setting: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Observed sets `[T, n, 1]`, and one of the future `[n, 1]`."""
    if setting == "mixture":
        counts = np.round(np.append(SHARES, 0.8) * n).astype(int)
        sets = np.stack(
            [rng.normal(size=n) + np.where(np.arange(n) < count, 3, -3) for count in counts]
        )
    else:
        steps = np.arange(1, 11)[:, None]
        noise = rng.normal(size=(10, n))
        sets = 10 - steps + noise if setting == "translation" else (11 - steps) * noise
    return sets[:-1, :, None], sets[-1][:, None]


def measure(setting: str, sets: jax.Array, future: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """RKHS distances and KL divergences of all methods for one draw."""
    k, target, n = kernel(), truth(setting), sets.shape[1]
    grid = jnp.linspace(*WINDOWS[setting], 1601)[:, None]
    wide = jnp.linspace(-12, 12, 1201)[:, None]
    observed = kbr.dynamics.sample_sequence(sets)
    model = kbr.dynamics.fit_dynamics(k, observed, regularizer=1 / n)
    predictions = {
        "true": kbr.embed(k, future),
        "last": kbr.embed(k, sets[-1]),
        "EDD": kbr.dynamics.extrapolate(model, estimator="ridge"),
        "noise": kbr.dynamics.extrapolate(
            kbr.dynamics.fit_dynamics(k, observed), estimator="ridge"
        ),
        "stacked": kbr.dynamics.combine(
            k, observed, kbr.dynamics.stacked_forecast(model).coefficients
        ),
    }
    for name in ("EDD", "stacked"):
        predictions[name + "+H"] = kbr.herd(predictions[name], grid, num_points=n).embedding
    positive = ("true", "last", "EDD+H", "stacked+H")
    return {
        "distance": {
            name: kbr.experimental.mmd_mixture(p, target) for name, p in predictions.items()
        },
        "KL": {
            name: kbr.experimental.smoothed_kl(target, predictions[name], wide) for name in positive
        },
    }


def summary(values: np.ndarray, setting: str) -> dict[str, float]:
    """As in the paper.

    Mean and SD for the mixture; root of mean square and of the SD of squares for the others.
    """
    count = np.sqrt(len(values))
    if setting == "mixture":
        return {
            "value": values.mean(),
            "spread": values.std(ddof=1),
            "se": values.std(ddof=1) / count,
        }
    squares = values**2
    root = np.sqrt(squares.mean())
    deviation = squares.std(ddof=1)
    return {"value": root, "spread": np.sqrt(deviation), "se": deviation / count / (2 * root)}


def cell(setting: str, n: int, repetitions: int) -> dict[str, Any]:
    run = jax.jit(lambda sets, future: measure(setting, sets, future))
    rows = experiment.repeat(
        f"extrapolation {setting} {n}",
        lambda seed: run(*sample(setting, n, np.random.default_rng([7, seed, n]))),
        repetitions,
    )
    found: dict[str, Any] = {"repetitions": repetitions}
    for measured, names in jax.tree.map(lambda *values: np.stack(values), *rows).items():
        kind = (
            setting if measured == "distance" else "mixture"
        )  # the divergences are printed as mean and SD throughout
        found[measured] = {
            name: {key: float(value) for key, value in summary(values, kind).items()}
            for name, values in names.items()
        }
    return found


def limit(setting: str) -> dict[str, float]:
    """No sampling: the paper's row n = infinity, with the regularizer 0."""
    k, target = kernel(), truth(setting)
    mixtures, distance = infinite(setting), kbr.experimental.mmd_mixtures
    gram = kbr.experimental.mixture_gram(k, mixtures)
    model = kbr.dynamics.fit_dynamics(k, None, gram=gram, regularizer=0.0)
    coefficients = kbr.dynamics.forecast_coefficients(model)[0]
    found = kbr.experimental.combine_mixtures(mixtures, coefficients)
    last = jax.tree.map(lambda leaf: leaf[-1], mixtures)
    return {
        "EDD": float(distance(k, found, target)),
        "last": float(distance(k, last, target)),
        "coefficients": np.asarray(coefficients[1:]).tolist(),
    }


def deviations(setting: str, n: int, found: dict[str, Any]) -> dict[str, float]:
    """(measured - expected) / standard error, where a value is expected."""
    index = SIZES.index(n)
    cells = found["distance"]
    return {
        name: (cells[name]["value"] - values[index]) / cells[name]["se"]
        for name, values in EXPECTED[setting].items()
    }


def main(*repetitions: int) -> None:
    results: dict[str, Any] = {}
    for setting in SETTINGS:
        results[setting] = {"infinity": limit(setting)}
        print(setting, "infinity", results[setting]["infinity"], flush=True)
        for n, count in zip(SIZES, repetitions or REPETITIONS, strict=True):
            found = cell(setting, n, count)
            found["deviations in standard errors"] = deviations(setting, n, found)
            results[setting][str(n)] = found
            for measured in ("distance", "KL"):
                shown = {
                    name: f"{v['value']:.4f} ± {v['spread']:.3f} ({v['se']:.4f})"
                    for name, v in found[measured].items()
                }
                print(setting, n, measured, shown, flush=True)
            print("   ", found["deviations in standard errors"], flush=True)
            experiment.save("extrapolation", results)


if __name__ == "__main__":
    experiment.start(main)
