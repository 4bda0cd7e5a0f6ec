r"""Dose-response curves from two proxies: grade retention, and abortion and crime.

    python -m benchmarks.causal.proxies

Data: the folders `deaner` and `abortion` of the public repository
BariscanBozkurt/Density-Ratio-Based-Proxy-Causal-Learning-without-Density-Ratios (`data`) in the
folder `KBR_DATA`; they are not part of the project. Outcomes are simulated from models of real
data, so that the curve is known. Each table has 10 data sets: 3000 pupils in grade retention
(cognitive tests in mathematics and in reading), 1500 in abortion and crime.

The error of a method is the mean squared error of its curve at the given doses. Methods: the
functions of `kbr_jax.causal` with nothing set; kernel ridge regression of the outcome on the dose
(scikit-learn, bandwidth and ridge by cross-validation); kernel proxy variables as published
(Mastouri et al. 2021): Gaussian kernels with median distances, two halves of the sample, each
ridge by the error on the other half.
"""

import warnings

import jax.numpy as jnp
import numpy as np
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV

import kbr_jax as kbr
from kbr_jax import causal

from .. import experiment
from ..indoor.baselines import data_path

TABLES = ("maths", "reading", "abortion")
SEEDS = 10
RIDGES = 10.0 ** np.arange(-5, 0.1, 0.5)


def load(table: str, seed: int) -> dict[str, np.ndarray]:
    """Proxies w and z, doses a, outcomes y; doses and curve of the truth."""
    folder = data_path().parent
    if table == "abortion":
        paths = (
            folder / f"abortion/train/main_ab_seed{seed}.npz",
            folder / f"abortion/test/do_A_ab_seed{seed}.npz",
        )
    else:
        kind = {"maths": "IM", "reading": "IR"}[table]
        name, number = f"deaner/{kind}_80_N", 100 * (seed + 1)
        paths = (
            folder / name / f"main_edu_{kind}_80_seed{number}.npz",
            folder / name / f"do_A_edu_{kind}_80_seed{number}.npz",
        )
    sample, truth = map(np.load, paths)
    found = {key: np.asarray(sample[f"train_{key}"], float) for key in "wzay"}
    found["y"] = found["y"].reshape(-1)
    found["doses"] = np.asarray(truth["do_A"], float).reshape(-1, 1)
    found["curve"] = np.asarray(truth["gt_EY_do_A"], float).reshape(-1)
    return found


def naive(data: dict[str, np.ndarray]) -> np.ndarray:
    """The regression of the outcome on the dose."""
    middle, scale = data["a"].mean(0), data["a"].std(0)
    grid = {"gamma": [0.1, 1.0, 10.0, 100.0], "alpha": [1e-3, 1e-2, 0.1, 1.0]}
    search = GridSearchCV(KernelRidge(kernel="rbf"), grid, cv=5)
    level = data["y"].mean()
    search.fit((data["a"] - middle) / scale, data["y"] - level)
    return search.predict((data["doses"] - middle) / scale) + level


def gaussian(x: np.ndarray, y: np.ndarray, width: float) -> np.ndarray:
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    return np.exp(-np.maximum(squares, 0) / (2 * width**2))


def median(x: np.ndarray) -> float:
    squares = (x**2).sum(1)[:, None] + (x**2).sum(1) - 2 * x @ x.T
    return float(np.sqrt(np.median(squares[np.triu_indices(len(x), 1)])))


def as_published(data: dict[str, np.ndarray], seed: int) -> np.ndarray:
    """Kernel proxy variables with halves and median distances, on standardized variables."""
    scaled = {k: (data[k] - data[k].mean(0)) / data[k].std(0) for k in "wzay"}
    doses = (data["doses"] - data["a"].mean(0)) / data["a"].std(0)
    order = np.random.default_rng(seed).permutation(len(data["y"]))
    halves = np.array_split(order, 2)
    widths = {k: median(scaled[k][order[:1000]]) for k in "wza"}

    def gram(key: str, i: int, j: int) -> np.ndarray:
        return gaussian(scaled[key][halves[i]], scaled[key][halves[j]], widths[key])

    first, cross = gram("a", 0, 0) * gram("z", 0, 0), gram("a", 0, 1) * gram("z", 0, 1)
    of_w, of_w_cross = gram("w", 0, 0), gram("w", 0, 1)
    n, m = len(halves[0]), len(halves[1])
    values, vectors = np.linalg.eigh(first)

    def embedded(right: np.ndarray, ridge: float) -> np.ndarray:
        return vectors @ ((vectors.T @ right) / (values + n * ridge)[:, None])

    def error(ridge: float) -> float:
        weights = embedded(cross, ridge)
        return float(np.sum(weights * (of_w @ weights)) - 2 * np.sum(of_w_cross * weights))

    ridge = min(RIDGES, key=error)
    weights, back = embedded(cross, ridge), embedded(first, ridge)
    second = gram("a", 1, 1) * (weights.T @ of_w @ weights)
    held = gram("a", 0, 1) * (back.T @ of_w @ weights)
    y = [scaled["y"][half] for half in halves]
    found = [np.linalg.solve(second + m * ridge * np.eye(m), y[1]) for ridge in RIDGES]
    slope = min(found, key=lambda slope: float(np.sum((y[0] - held @ slope) ** 2)))
    of_doses = gaussian(scaled["a"][halves[1]], doses, widths["a"])
    at_mean = weights.T @ gaussian(scaled["w"][halves[0]], scaled["w"], widths["w"]).mean(1)
    return (of_doses.T @ (slope * at_mean)) * data["y"].std() + data["y"].mean()


def repetition(table: str, seed: int) -> dict[str, float]:
    """Mean squared errors of the curves."""
    data = load(table, seed)
    # Units in random order: folds are every fifth unit.
    order = np.random.default_rng(seed).permutation(len(data["y"]))
    a, w, z, y = (jnp.asarray(data[key][order]) for key in "awzy")
    doses = jnp.asarray(data["doses"])
    models = {
        "fit_outcome_bridge": causal.fit_outcome_bridge(a, w, z, y),
        "fit_moment_bridge": causal.fit_moment_bridge(a, w, z, y),
        "fit_treatment_bridge": causal.fit_treatment_bridge(a, w, z, y),
    }
    models["doubly_robust"] = causal.doubly_robust(
        models["fit_outcome_bridge"], models["fit_treatment_bridge"]
    )
    curves = {
        name: np.asarray(kbr.mean(causal.intervene(model, doses))) for name, model in models.items()
    }
    curves["kernel proxy variables, as published"] = as_published(data, seed)
    curves["regression on the dose"] = naive(data)
    return {name: float(np.mean((c - data["curve"]) ** 2)) for name, c in curves.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    results = {}
    for table in TABLES:
        rows = experiment.repeat(f"proxies {table}", lambda s, t=table: repetition(t, s), SEEDS)
        results[table] = {
            name: {
                "mse": float(errors.mean()),
                "se": float(errors.std(ddof=1) / np.sqrt(len(errors))),
                "worst": float(errors.max()),
            }
            for name, errors in experiment.columns(rows).items()
        }
        experiment.save("proxies", results)
        print(table, results[table], flush=True)


if __name__ == "__main__":
    experiment.start(main)
