r"""Forecasts on ten tables with several targets: scores, and how often intervals hold the truth.

    python -m benchmarks.forecasts.tables [table ...]

Data: the files `*.arff` of the public repository lorismichel/drf (folder
`applications/benchmarking/data/datasets`) in the folder `KBR_DATA`; they are not part of the
project. Labels become indicators, missing numbers medians. Three random folds; everything is
standardized by the other two. The targets are forecast together, and scores are means over targets:

- the CRPS, as twice the mean pinball loss of 99 quantiles, in standard deviations;
- the share of test values in the central interval of 90 %;
- the same with a conformal margin from one half of the test fold, on the other half, both ways.

Methods: `learn_forecast`, nothing set; a quantile forest of 500 trees (`quantile-forest`, the least
size of a leaf chosen among 1, 5, 10 and 20 by out-of-bag CRPS); a Gaussian process (scikit-learn, a
bandwidth for each column up to 30 columns, and noise, by marginal likelihood, two restarts
  up to 600 training rows).
"""

import io
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from quantile_forest import RandomForestQuantileRegressor
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import KFold
from sklearn.utils._testing import ignore_warnings

import kbr_jax as kbr
from kbr_jax.learning import learn_forecast

from .. import experiment
from ..indoor.baselines import data_path

#: Tables and how many of their last columns are targets.
TABLES = {
    "andro": 6,
    "atp1d": 6,
    "edm": 2,
    "enb": 2,
    "jura": 3,
    "scpf": 3,
    "sf1": 3,
    "sf2": 3,
    "slump": 3,
    "wq": 14,
}
FOLDS, LEVELS = 3, np.arange(1, 100) / 100


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of numbers: columns that say something, and targets."""
    lines = data_path().with_name(f"{name}.arff").read_text().splitlines()
    head = [line for line in lines if line.lower().startswith("@attribute")]
    start = next(i for i, line in enumerate(lines) if line.lower().startswith("@data"))
    text = "\n".join(line for line in lines[start + 1 :] if line.strip())
    table = pd.read_csv(io.StringIO(text), header=None, na_values="?", skipinitialspace=True)
    for column, line in enumerate(head):
        if "{" in line:
            table[column] = table[column].astype(str)
    split = table.shape[1] - TABLES[name]
    x = pd.get_dummies(table.iloc[:, :split]).astype(float)
    x = x.fillna(x.median()).to_numpy()
    return x[:, x.std(0) > 0], table.iloc[:, split:].astype(float).to_numpy()


def ours(x, y, new):
    """Quantiles `[m, levels, targets]` of `learn_forecast`."""
    forecast, _ = learn_forecast(jnp.asarray(x), jnp.asarray(y), progress=False)
    levels = jnp.asarray(LEVELS)
    return jax.lax.map(lambda p: kbr.quantile(forecast(p), levels), jnp.asarray(new))


def forest(x, y, new):
    """Quantiles of a forest, its leaves by out-of-bag CRPS."""
    found = []
    for leaf in (1, 5, 10, 20):
        trees = RandomForestQuantileRegressor(500, min_samples_leaf=leaf, random_state=0, n_jobs=1)
        trees.fit(x, y)
        held = _last(trees.predict(x, quantiles=list(LEVELS), oob_score=True))
        found.append((crps(held, y), leaf, trees))
    return _last(min(found, key=lambda one: one[:2])[2].predict(new, quantiles=list(LEVELS)))


def _last(values: np.ndarray) -> np.ndarray:
    """`[m, targets, levels]` as `[m, levels, targets]`."""
    return np.swapaxes(values, 1, 2)


@ignore_warnings(category=ConvergenceWarning)
def process(x, y, new):
    """Quantiles of a Gaussian process for each target."""
    found = []
    for target in y.T:
        length: Any = np.full(x.shape[1], np.sqrt(x.shape[1])) if x.shape[1] <= 30 else 10.0
        kernel = ConstantKernel() * RBF(length, (1e-1, 1e4)) + WhiteKernel(0.1, (1e-6, 10))
        restarts = 2 if len(x) <= 600 else 0
        model = GaussianProcessRegressor(kernel, n_restarts_optimizer=restarts, random_state=0)
        mean, spread = map(np.asarray, model.fit(x, target).predict(new, return_std=True)[:2])
        found.append(stats.norm.ppf(LEVELS, mean[:, None], spread[:, None] + 1e-12))
    return np.stack(found, axis=2)


METHODS = {"learn_forecast": ours, "quantile forest": forest, "Gaussian process": process}


def crps(quantiles: np.ndarray, truth: np.ndarray) -> float:
    """Twice the mean pinball loss."""
    apart = truth[:, None] - quantiles
    return float(2 * np.mean(np.maximum(LEVELS[:, None] * apart, (LEVELS[:, None] - 1) * apart)))


def conformal(quantiles: np.ndarray, truth: np.ndarray) -> float:
    """The share inside intervals whose margin comes from the other half."""
    low, high = quantiles[:, 4], quantiles[:, 94]
    excess, inside = np.maximum(low - truth, truth - high), []
    for half in (0, 1):
        known = np.sort(excess[half::2], axis=0)
        rank = int(np.ceil((len(known) + 1) * 0.9)) - 1
        margin = known[rank] if rank < len(known) else np.inf
        inside.append(excess[1 - half :: 2] <= margin)
    return float(np.concatenate(inside).mean())


def main(*names: str) -> None:
    results = experiment.previous("tables")
    for name in names or TABLES:
        x, y = load(name)
        rows: dict[str, list] = {method: [] for method in METHODS}
        for train, test in KFold(FOLDS, shuffle=True, random_state=0).split(x):
            middle, scale = x[train].mean(0), np.maximum(x[train].std(0), 1e-9)
            center, unit = y[train].mean(0), np.maximum(y[train].std(0), 1e-9)
            z, new = (x[train] - middle) / scale, (x[test] - middle) / scale
            keep = x[train].std(0) > 0
            t, truth = (y[train] - center) / unit, (y[test] - center) / unit
            for method, run in METHODS.items():
                start = time.perf_counter()
                quantiles = np.asarray(run(z[:, keep], t, new[:, keep]))
                seconds = time.perf_counter() - start
                inside = (quantiles[:, 4] <= truth) & (truth <= quantiles[:, 94])
                rows[method].append(
                    (
                        crps(quantiles, truth),
                        inside.mean(),
                        conformal(quantiles, truth),
                        seconds,
                    )
                )
        keys = ("crps", "coverage", "conformal", "seconds")
        results[name] = {"rows": len(x), "columns": x.shape[1], "targets": y.shape[1]} | {
            method: dict(zip(keys, np.mean(values, axis=0).tolist(), strict=True))
            | {"crps_folds": [value[0] for value in values]}
            for method, values in rows.items()
        }
        experiment.save("tables", results)
        print(name, results[name], flush=True)


if __name__ == "__main__":
    experiment.start(main)
