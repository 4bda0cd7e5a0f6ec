r"""The demand design: the effect of a price on sales that a common cause of both hides.

    python -m benchmarks.causal.demand [method [n ...]]

With "as published" only the last method is run, on the same data; other methods and sizes keep
their last results.

The design of Hartford et al. 2017: sales depend on price, time of the year and customer group;
demand shocks drive price and sales with correlation rho; a cost is the instrument. The error is
that of the structural function on a grid of 2800 points, some outside the data, as the logarithm
to base 10 of the mean square.

Methods: `learn_instrument`, which chooses its bandwidths; `fit_instrument` with nothing set;
two-stage least squares; kernel ridge regression without the instrument, with a bandwidth for each
coordinate from the same search and the same number of candidates; kernel instrumental regression as
published (Singh, Sahani and Gretton 2019): a product of Gaussians of single coordinates, each with
its median distance, two halves, each ridge by the error on the other half.
"""

import warnings

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr
from kbr_jax import causal
from kbr_jax.causal._stages import feature_map, regress
from kbr_jax.learning import learn_instrument
from kbr_jax.learning._folds import spread
from kbr_jax.learning._instrument import RANGE, RANK, REFINEMENTS, TRIALS, UNITS
from kbr_jax.learning._search import search
from kbr_jax.tuning._progress import progress_bar

from .. import experiment
from .proxies import gaussian, median

CELLS = {1000: 4, 5000: 2}
RHO = (0.1, 0.5, 0.9)
RIDGES = 10.0 ** np.arange(-10, -1.9, 1.0)
PUBLISHED = "kernel instrument, as published"


def season(t: np.ndarray) -> np.ndarray:
    return 2 * ((t - 5) ** 4 / 600 + np.exp(-4 * (t - 5) ** 2) + t / 10 - 2)


def sales(price: np.ndarray, t: np.ndarray, group: np.ndarray) -> np.ndarray:
    return 100 + (10 + price) * group * season(t) - 2 * price


def sample(n: int, rho: float, seed: int) -> tuple[np.ndarray, ...]:
    """Price, cost, covariates and sales."""
    rng = np.random.default_rng(seed)
    group, t = rng.integers(1, 8, n).astype(float), rng.uniform(0, 10, n)
    cost, shock = rng.normal(size=n), rng.normal(size=n)
    noise = rho * shock + np.sqrt(1 - rho**2) * rng.normal(size=n)
    price = 25 + (cost + 3) * season(t) + shock
    y = sales(price, t, group) + noise
    return price[:, None], cost[:, None], np.stack([t, group], 1), y


GRID = np.stack(
    [
        part.ravel()
        for part in np.meshgrid(
            np.linspace(10, 25, 20), np.linspace(0, 10, 20), np.arange(1.0, 8), indexing="ij"
        )
    ],
    axis=1,
)
TRUTH = sales(*GRID.T)


def least_squares(x, z, c, y) -> np.ndarray:
    """Two stages."""
    one = np.ones((len(y), 1))
    regressors, instruments = np.hstack([one, x, c]), np.hstack([one, z, c])
    fitted = instruments @ np.linalg.lstsq(instruments, regressors, rcond=None)[0]
    slope = np.linalg.lstsq(fitted, y, rcond=None)[0]
    return np.hstack([np.ones((len(GRID), 1)), GRID]) @ slope


@eqx.filter_jit
def _ridge(scales, unit, x, y, rank: int):
    kernel = kbr.Gaussian(unit * jnp.clip(scales, *RANGE))
    features = feature_map(kernel, x, rank, None)
    return features, regress(features, y[:, None] / jnp.std(y), None)


def ridge_regression(x, z, c, y) -> np.ndarray:
    """Sales on price and covariates, as if nothing were hidden."""
    del z
    rows = jnp.asarray(np.hstack([x, c]))
    y = jnp.asarray(y)
    default = kbr.kernels.default_kernel(rows)
    assert isinstance(default, kbr.Gaussian)
    unit = default.bandwidth
    names = ["0", "1", "2"]
    few = spread(len(y), UNITS)

    def score(option, values, best):
        del option, best
        scales = jnp.stack([values[name] for name in names])
        return jnp.log1p(-_ridge(scales, unit, rows[few], y[few], RANK)[1].explained)

    with progress_bar(TRIALS + REFINEMENTS, False) as bar:
        _, values = search(score, [None], dict.fromkeys(names, RANGE), TRIALS, REFINEMENTS, bar)
    scales = jnp.stack([values[name] for name in names])
    features, stage = _ridge(scales, unit, rows, y, 300)
    return np.asarray(stage.fit.weights(features.coordinates(jnp.asarray(GRID))) @ y)


def as_published(x, z, c, y, seed: int) -> np.ndarray:
    """Kernel instrumental regression with halves and median distances."""
    order = np.random.default_rng(seed).permutation(len(y))
    one, two = np.array_split(order, 2)
    rows, instruments = np.hstack([x, c]), np.hstack([z, c])

    def grams(left, right, of):
        """The product of Gaussians of single columns, each with the median distance of its own."""
        columns = zip(left.T, right.T, of.T, strict=True)
        return np.prod(
            [gaussian(a[:, None], b[:, None], median(c[:1000, None])) for a, b, c in columns],
            axis=0,
        )

    of_x = grams(rows[one], rows[one], rows[one])
    of_x_cross = grams(rows[one], rows[two], rows[one])
    of_z = grams(instruments[one], instruments[one], instruments[one])
    of_z_cross = grams(instruments[one], instruments[two], instruments[one])
    n, m = len(one), len(two)
    values, vectors = np.linalg.eigh(of_z)

    def embedded(ridge):
        return vectors @ ((vectors.T @ of_z_cross) / (values + n * ridge)[:, None])

    def error(ridge):
        weights = embedded(ridge)
        return np.sum(weights * (of_x @ weights)) - 2 * np.sum(of_x_cross * weights)

    moved = of_x @ embedded(min(RIDGES, key=error))
    inner = moved @ moved.T
    jitter = 1e-10 * np.trace(inner) / n * np.eye(n)
    found = [np.linalg.solve(inner + m * ridge * of_x + jitter, moved @ y[two]) for ridge in RIDGES]
    slope = min(found, key=lambda slope: float(np.sum((y[one] - of_x @ slope) ** 2)))
    return grams(GRID, rows[one], rows[one]) @ slope


def log_error(found: np.ndarray) -> float:
    return float(np.log10(np.mean((found - TRUTH) ** 2)))


def repetition(n: int, rho: float, seed: int, only: str = "") -> dict[str, float]:
    """Logarithms of the mean squared errors."""
    x, z, c, y = sample(n, rho, seed)
    published = log_error(as_published(x, z, c, y, seed))
    if only:
        return {PUBLISHED: published}
    arrays = [jnp.asarray(part) for part in (x, z, y, c)]
    grid = jnp.asarray(GRID)
    learned, _ = learn_instrument(*arrays[:3], covariates=arrays[3], progress=False)
    plain = causal.fit_instrument(*arrays[:3], covariates=arrays[3])
    found = {
        name: np.asarray(causal.structural(model, grid[:, :1], grid[:, 1:]))
        for name, model in (("learn_instrument", learned), ("fit_instrument", plain))
    }
    found["two-stage least squares"] = least_squares(x, z, c, y)
    found["kernel ridge, no instrument"] = ridge_regression(x, z, c, y)
    return {name: log_error(f) for name, f in found.items()} | {PUBLISHED: published}


def main(only: str = "", *sizes: int) -> None:
    if only not in ("", "as published"):
        raise ValueError(f"only 'as published' can be run alone, got {only!r}")
    warnings.simplefilter("ignore")
    results = experiment.previous("demand")
    for n in sizes or CELLS:
        for rho in RHO:
            rows = experiment.repeat(
                f"demand {n} {rho} {only}",
                lambda s, n=n, r=rho: repetition(n, r, s, only),
                CELLS[n],
            )
            last = results.get(f"n = {n}, rho = {rho}", {}) if only else {}
            results[f"n = {n}, rho = {rho}"] = last | {
                name: {
                    "error": float(errors.mean()),
                    "se": float(errors.std(ddof=1) / np.sqrt(len(errors))),
                }
                for name, errors in experiment.columns(rows).items()
            }
            experiment.save("demand", results, part=only)
            print(n, rho, results[f"n = {n}, rho = {rho}"], flush=True)


if __name__ == "__main__":
    experiment.start(main)
