"""Conditional independence: level, power and seconds beside KCI and RCIT of causal-learn.

    KBR_DATA=FOLDER python -m benchmarks.tests.conditional [repetitions [ours]]

With "ours" the peers keep their last results, of the same data. Four parts. Index models: x and y
follow one direction of z and share noise or not. Post-nonlinear models (the setting of Zhang et al.
2011) with 1 to 10 variables in z. Sums of functions of 5 variables, and 10 variables in more
points. Simulated nulls on car insurance premiums: x says whether a zip code is of a minority, y is
the premium and z the risk in 20 steps, and x is permuted among equal z. These tables are in
`data/car-insurance-public/data` of github.com/felipemaiapolo/cit (MIT); the folder has them in
`car-insurance`. KCI has two columns: with its fixed widths and ridges, and with those that Gaussian
processes choose, as published. The second takes seconds for a test of 500 rows and is not in the
last two parts.
"""

import csv
import functools
import os
import pathlib
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

LEVEL, DRAWS, REPETITIONS = 0.05, 500, 200
WARNS = 2.0  # `bias` above which the test warns
CHOSEN = "KCI, chosen"  # widths and ridges of its regressions by Gaussian processes, as published
CARS, MANY = "car insurance", "many variables"
STATES = {"California": "ca", "Illinois": "il", "Missouri": "mo", "Texas": "tx"}
Triples = tuple[np.ndarray, np.ndarray, np.ndarray]


def index_model(rng: np.random.Generator, n: int, kind: str, shared: float) -> Triples:
    """Functions of one direction of z, with noise of a third of their size."""
    z = rng.normal(size=(n, 3))
    f, common = z.sum(axis=1) / np.sqrt(3), shared * rng.normal(size=n)
    noise = 0.3 * rng.normal(size=(2, n))
    functions = {"sine": (np.sin(2 * f), f), "sines": (np.sin(2 * f),) * 2, "lines": (f, f)}
    x, y = functions[kind]
    return x + common + noise[0], y + common + noise[1], z


def sines(rng: np.random.Generator, n: int, shared: float) -> Triples:
    """Sums of functions of five variables."""
    z = rng.normal(size=(n, 5))
    common, noise = shared * rng.normal(size=n), 0.3 * rng.normal(size=(2, n))
    waves = np.sum(np.sin(2.5 * z), axis=1) / np.sqrt(5)
    return waves + common + noise[0], waves + np.sum(z, axis=1) / 2 + common + noise[1], z


def post_nonlinear(rng: np.random.Generator, n: int, d: int, shared: float) -> Triples:
    z = rng.normal(size=(n, d))
    common, noise = shared * rng.normal(size=n), 0.5 * rng.normal(size=(2, n))
    first = np.sum(np.tanh(z), axis=1) / np.sqrt(d)
    second = np.sum(np.sin(z) + 0.5 * z, axis=1) / np.sqrt(d)
    return np.tanh(first + noise[0] + common), (second + noise[1] + common) ** 3, z


@functools.cache
def premiums(state: str) -> np.ndarray:
    """Rows of (minority, combined premium, risk)."""
    folder = pathlib.Path(os.environ["KBR_DATA"]) / "car-insurance"
    with (folder / f"{STATES[state]}-per-zip.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = np.array(
        [(r["minority"] == "TRUE", r["combined_premium"], r["state_risk"]) for r in rows], float
    )
    return found[np.isfinite(found).all(axis=1)]


def car_insurance(rng: np.random.Generator, n: int, state: str) -> Triples:
    """Of n rows; x is permuted within each step of the risk."""
    x, y, risk = rng.permutation(premiums(state))[:n].T
    steps = np.quantile(risk, np.linspace(0.025, 0.975, 20))
    z = steps[np.argmin(np.abs(risk[:, None] - steps), axis=1)]
    for value in np.unique(z):
        x[z == value] = rng.permutation(x[z == value])
    return x, y, z[:, None]


def ours(triples: Triples, seed: int) -> tuple[jax.Array, jax.Array]:
    """The p-value and the diagnostic."""
    x, y, z = (jnp.asarray(part, jnp.float32) for part in triples)
    if np.unique(triples[0]).size == 2:
        x = x.astype(int)  # a label
    found = kbr.hypotheses.conditional_independence_test(
        None, None, None, x, y, z, key=jax.random.key(seed), num_draws=DRAWS
    )
    return found.p_value, found.bias


def of_causal_learn(method: str, **options: Any) -> Callable[[Triples, int], tuple[float]]:
    """Its test with its own default kernels; RCIT draws from NumPy's global generator."""
    from causallearn.utils.cit import CIT

    def test(triples: Triples, seed: int) -> tuple[float]:
        np.random.seed(seed)
        data = np.column_stack(triples)
        peer: Any = CIT(data, method, **options)
        return (float(peer(0, 1, list(range(2, data.shape[1])))),)

    return test


def settings(data: bool) -> dict[str, dict[str, Callable[[int], Triples]]]:
    def seeded(make: Callable[..., Triples], *arguments) -> Callable[[int], Triples]:
        return lambda seed: make(np.random.default_rng(seed), *arguments)

    index = {
        f"{kind}, n = {n}, {'dependent' if shared else 'null'}": seeded(
            index_model, n, kind, shared
        )
        for n in (25, 100, 300)
        for kind in ("sine", "sines", "lines")
        for shared in (0.0, 0.7)
    }
    nonlinear = {
        f"{d} in z, {'dependent' if shared else 'null'}": seeded(post_nonlinear, 200, d, shared)
        for d in (1, 3, 5, 10)
        for shared in (0.0, 0.3)
    }
    cars = {state: seeded(car_insurance, 500, state) for state in STATES}
    many: dict[str, Callable[[int], Triples]] = {}
    for shared, kind in ((0.0, "null"), (0.3, "dependent")):
        many[f"sums of sines of 5, n = 300, {kind}"] = seeded(sines, 300, shared)
        many[f"post-nonlinear in 10, n = 1000, {kind}"] = seeded(
            post_nonlinear, 1000, 10, shared / 2
        )
    found = {"index": index, "post-nonlinear": nonlinear, MANY: many}
    return found | {CARS: cars} if data else found


def rates(name: str, make: Callable[[int], Triples], tests: dict, count: int, bar: tqdm) -> dict:
    found: dict[str, Any] = {}
    for label, test in tests.items():
        rows = experiment.repeat(
            f"conditional {name} {label}", lambda seed, t=test: t(make(seed), seed), count, bar
        )
        columns = np.transpose(rows)
        found[label] = float(np.mean(columns[0] <= LEVEL))
        if label == "ours":
            found["warned"] = float(np.mean(columns[1] > WARNS))
    return found


def main(count: int = REPETITIONS, only: str = "") -> None:
    tests = {"ours": ours, "KCI": of_causal_learn("kci"), "RCIT": of_causal_learn("rcit")}
    chosen = {CHOSEN: of_causal_learn("kci", use_gp=True)}
    if only not in ("", "ours"):
        raise SystemExit(__doc__)
    last = experiment.previous("conditional") if only else {}
    data = "KBR_DATA" in os.environ
    parts = settings(data)
    low, high = scipy.stats.binom.ppf([0.005, 0.995], count, LEVEL) / count
    if last and last["repetitions"] != count:
        raise SystemExit(f"The peers have {last['repetitions']} repetitions.")
    results: dict[str, Any] = last | {
        "repetitions": count,
        "level": LEVEL,
        "bounds, 99 %": [float(low), float(high)],
    }
    peers = {part: tests if part in (CARS, MANY) else tests | chosen for part in parts}

    def known(part: str, name: str) -> dict[str, float]:
        return last.get(part, {}).get(name, {})

    def run(part: str, name: str) -> dict[str, Any]:
        done = set(known(part, name)) - {"ours"}
        return {label: test for label, test in peers[part].items() if label not in done}

    total = count * sum(len(run(part, name)) for part in parts for name in parts[part])
    with tqdm(total=total, unit="test") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part, makers in parts.items():
            results[part] = {
                name: known(part, name) | rates(f"{part} {name}", make, run(part, name), count, bar)
                for name, make in makers.items()
            }
        triples = index_model(np.random.default_rng(0), 1000, "sine", 0.0)
        results["seconds, n = 1000"] = {
            label: experiment.milliseconds(lambda t=test: t(triples, 0), 3) / 1e3
            for label, test in (tests | chosen).items()
        }
    experiment.save("conditional", results, part=only)
    if not data:
        print("KBR_DATA is not set: no car insurance")
    print(results["seconds, n = 1000"])


if __name__ == "__main__":
    experiment.start(main, double=False)
