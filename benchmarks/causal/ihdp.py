r"""Effects on children of home visits: semi-synthetic outcomes of the infant health program.

    python -m benchmarks.causal.ihdp

Data: the files `ihdp_npci_*.csv` of the public repository AMLab-Amsterdam/CEVAE
(`datasets/IHDP/csv`) in the folder `KBR_DATA`/ihdp; they are not part of the project. 747 children,
139 treated, 25 covariates, 10 simulated outcomes. Both mean outcomes of each child are known.

Errors: that of the average effect, absolute, and the root mean squared error of the effects of the
children. Methods: an outcome bridge of dose and covariates, nothing set, its doubly robust average,
and the share of data sets whose 95 % band of both arms holds the truth; kernel ridge regression in
each arm (scikit-learn, bandwidth and ridge by cross-validation); a causal forest (econml, its
defaults, 1000 trees, tuned by its own search).
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from econml.dml import CausalForestDML
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV

import kbr_jax as kbr
from kbr_jax import causal

from .. import experiment
from ..indoor.baselines import data_path

SEEDS = 10
ARMS = jnp.array([0, 1])


def load(seed: int) -> tuple[np.ndarray, ...]:
    """Treatment, outcome, both means, and standardized covariates, in random order."""
    path = data_path().parent / "ihdp" / f"ihdp_npci_{seed + 1}.csv"
    data = np.random.default_rng(seed).permutation(np.loadtxt(path, delimiter=","))
    x = data[:, 5:]
    return data[:, 0].astype(int), data[:, 1], data[:, 3:5], (x - x.mean(0)) / x.std(0)


def per_arm(a: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Kernel ridge regression of each arm."""
    grid = {"gamma": 10.0 ** np.arange(-4, 0.1, 0.5), "alpha": 10.0 ** np.arange(-3, 1.1, 0.5)}
    values = []
    for arm in (0, 1):
        level = y[a == arm].mean()
        search = GridSearchCV(KernelRidge(kernel="rbf"), grid, cv=5)
        search.fit(x[a == arm], y[a == arm] - level)
        values.append(search.predict(x) + level)
    return values[1] - values[0]


def forest(a: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Effects by a causal forest."""
    model = CausalForestDML(discrete_treatment=True, n_estimators=1000, random_state=0, n_jobs=1)
    model.tune(y, a, X=x)
    model.fit(y, a, X=x)
    return np.asarray(model.effect(x)).reshape(-1)


def repetition(seed: int) -> dict[str, float]:
    """Errors of all methods on one data set."""
    a, y, means, x = load(seed)
    effect = means[:, 1] - means[:, 0]
    doses, outcomes, rows = jnp.asarray(a), jnp.asarray(y), jnp.asarray(x)
    outcome = causal.fit_outcome_bridge(doses, rows, None, outcomes)
    kernel = outcome.proxies.kernel

    def of_child(point):
        adjust = kbr.Embedding(kernel, point[None], jnp.ones(1))
        low, high = kbr.mean(causal.intervene(outcome, ARMS, adjust))
        return high - low

    effects = {"fit_outcome_bridge": np.asarray(jax.lax.map(of_child, rows))}
    effects["kernel ridge in each arm"] = per_arm(a, y, x)
    effects["causal forest"] = forest(a, y, x)
    model = causal.doubly_robust(outcome, causal.fit_treatment_bridge(doses, None, rows, outcomes))
    band = causal.confidence_band(model, ARMS, key=jax.random.key(seed))
    found = {}
    for name, values in effects.items():
        found[f"average, {name}"] = abs(values.mean() - effect.mean())
        found[f"children, {name}"] = np.sqrt(np.mean((values - effect) ** 2))
    found["average, doubly_robust"] = abs(float(band.mean[1] - band.mean[0]) - effect.mean())
    inside = (np.asarray(band.lower) <= means.mean(0)) & (means.mean(0) <= np.asarray(band.upper))
    found["inside"] = float(inside.all())
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    rows = experiment.repeat("ihdp", repetition, SEEDS)
    results = {
        name: {
            "error": float(values.mean()),
            "median": float(np.median(values)),
            "se": float(values.std(ddof=1) / np.sqrt(len(values))),
        }
        for name, values in experiment.columns(rows).items()
    }
    experiment.save("ihdp", results)
    print(results)


if __name__ == "__main__":
    experiment.start(main)
