"""Power of the two-sample test on the alternatives of MMD-FUSE, and its time beside `mmdfuse`.

    KBR_DATA=FOLDER python -m benchmarks.tests.power [repetitions [mixture | perturbed]]

The alternatives are those of Biggs, Schrab and Gretton (2023): a mixture of four Gaussians of which
one is too narrow or too wide, and uniform densities with perturbations. The power of their ten
tests is stored in their repository, github.com/antoninschrab/mmdfuse-paper (MIT). The perturbed
samples are theirs, number for number, by the seeds of `experiment_perturbations.ipynb`; mixtures
are other draws. If the folder has their `mmdfuse.py`, its seconds and decisions come from the same
data as ours. Settings that are not run keep their last results.
"""

import importlib.util
import itertools
import os
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment

LEVEL, DRAWS, REPETITIONS = 0.05, 500, 200
NAMES = "FUSE, stored", "Agg, stored", "best, stored"
#: Stored power of their test, of MMDAgg, and of the best of all ten.
STORED = {
    "mixture, n = 500": (0.51, 0.46, 0.51),
    "mixture, n = 2000": (0.765, 0.785, 0.81),
    "perturbed, d = 1, n = 500": (0.505, 0.605, 0.605),
    "perturbed, d = 1, n = 1500": (0.725, 0.785, 0.785),
    "perturbed, d = 2, n = 500": (0.485, 0.395, 0.485),
    "perturbed, d = 2, n = 1500": (0.69, 0.595, 0.69),
}
#: Where their program runs on our data.
BESIDE = (
    "mixture, n = 500",
    "perturbed, d = 1, n = 500",
    "perturbed, d = 2, n = 500",
)
Samples = tuple[np.ndarray, np.ndarray]


def mixture(n: int, scale: float, seed: int) -> Samples:
    """Four Gaussians; in the second sample the standard deviation of the last is `scale`."""
    rng = np.random.default_rng(seed)
    centers = 20.0 * np.array([[1, 1], [-1, 1], [1, -1], [-1, -1]])
    parts = rng.integers(4, size=(2, n))
    noise = rng.normal(size=(2, n, 2))
    noise[1, parts[1] == 3] *= scale
    return centers[parts[0]] + noise[0], centers[parts[1]] + noise[1]


def bump(x: np.ndarray) -> np.ndarray:
    """A smooth bump on (-1, -1/2), and its negative on (-1/2, 0)."""
    inside = 1 - (4 * (x + 0.5) % 2 - 1) ** 2
    inside = np.where((x > -1) & (x < 0) & (inside > 0), inside, 0)
    values = np.exp(-1 / np.where(inside > 0, inside, 1)) * (inside > 0)
    return np.where(x < -0.5, values, -values)


def perturbed(n: int, dimension: int, size: float, seed: int) -> Samples:
    """A uniform density with two perturbations a dimension, of random signs; and a uniform one."""
    corners = list(itertools.product((1, 2), repeat=dimension))
    # The published samples are of this generator: their signs, rejection sampler and uniform sample
    # have a seed each.
    uniform, random_signs, draws = (np.random.RandomState(seed + k) for k in range(3))
    signs = random_signs.choice([-1, 1], len(corners))

    def density(x):
        bumps = [np.prod(bump(2 * x - np.array(corner)), axis=1) for corner in corners]
        return 1 + size * np.exp(dimension) * signs @ np.array(bumps)

    kept = np.zeros((0, dimension))
    while len(kept) < n:
        rows = draws.uniform(size=(4 * n, dimension + 1))
        x, height = rows[:, :-1], (1 + size) * rows[:, -1]
        kept = np.concatenate([kept, x[height <= density(x)]])
    return kept[:n], uniform.uniform(size=(n, dimension))


#: From the number of a repetition to its samples.
SETTINGS: dict[str, Callable[[int], Samples]] = {
    "mixture, n = 500": lambda i: mixture(500, 0.7, i),
    "mixture, n = 2000": lambda i: mixture(2000, 1.3, i),
    "perturbed, d = 1, n = 500": lambda i: perturbed(500, 1, 0.3, 642 + i),
    "perturbed, d = 1, n = 1500": lambda i: perturbed(1500, 1, 0.2, 442 + i),
    "perturbed, d = 2, n = 500": lambda i: perturbed(500, 2, 0.6, 642 + i),
    "perturbed, d = 2, n = 1500": lambda i: perturbed(1500, 2, 0.4, 442 + i),
}


def data(setting: str, seed: int) -> tuple[jax.Array, jax.Array]:
    x, y = SETTINGS[setting](seed)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def ours(x: jax.Array, y: jax.Array, seed: int) -> jax.Array:
    return kbr.hypotheses.two_sample_test(
        None, x, y, key=jax.random.key(seed), num_permutations=DRAWS
    ).p_value


def peer() -> Callable[[jax.Array, jax.Array, int], jax.Array] | None:
    path = pathlib.Path(os.environ.get("KBR_DATA", ".")) / "mmdfuse.py"
    if not path.exists():
        return None
    sys.path.insert(0, str(path.parent))  # for its own imports
    spec = importlib.util.spec_from_file_location("mmdfuse", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda x, y, seed: module.mmdfuse(
        x, y, jax.random.PRNGKey(seed), number_permutations=DRAWS
    )


def compared(setting: str, p_values: list, theirs: Callable, bar: tqdm) -> dict[str, float]:
    """Power of both on the same data, and seconds of both, one after the other."""
    found = experiment.repeat(
        f"mmdfuse {setting}", lambda seed: theirs(*data(setting, seed), seed), len(p_values), bar
    )
    own, other = np.asarray(p_values) <= LEVEL, np.asarray(found) == 1
    x, y = data(setting, 0)
    seconds = [
        experiment.milliseconds(lambda test=test: test(x, y, 0), 3) / 1e3 for test in (ours, theirs)
    ]
    return {
        "power": float(np.mean(own)),
        "power, mmdfuse": float(np.mean(other)),
        "standard error of the difference": float(
            np.std(own.astype(float) - other) / np.sqrt(len(found))
        ),
        "seconds": seconds[0],
        "seconds, mmdfuse": seconds[1],
        "ratio": seconds[1] / seconds[0],
    }


def with_errors(results: dict) -> dict:
    """The results with the difference of each row to its best stored test, in standard errors.

    Where the best is MMD-FUSE and their program ran on our data, difference and error are those of
    the pairs; elsewhere the error is the binomial one of the stored power.
    """
    rows = {name: row for name, row in results["settings"].items() if name != "mean"}
    for name, row in rows.items():
        best, pair = row["best, stored"], results.get("beside mmdfuse", {}).get(name)
        error = np.sqrt(best * (1 - best) / results["repetitions"])
        row["binomial standard errors"] = float((row["power"] - best) / error)
        row["paired"] = False
        row["difference, standard errors"] = row["binomial standard errors"]
        if pair is not None and row["FUSE, stored"] == best:
            difference = pair["power"] - pair["power, mmdfuse"]
            row["paired"] = True
            row["difference, standard errors"] = (
                difference / pair["standard error of the difference"]
            )
    mean = {k: float(np.mean([row[k] for row in rows.values()])) for k in ("power", *NAMES)}
    return {**results, "settings": {**rows, "mean": mean}}


def main(count: int = REPETITIONS, wanted: str = "") -> None:
    last = experiment.previous("power")
    rows = {name: row for name, row in last.get("settings", {}).items() if name != "mean"}
    results = {**last, "repetitions": count, "permutations": DRAWS, "settings": rows}
    theirs, own = peer(), {}
    settings = [name for name in SETTINGS if name.startswith(wanted)]
    shared = [name for name in BESIDE if name in settings and theirs is not None]
    with tqdm(total=(len(settings) + len(shared)) * count, unit="test") as bar:
        for setting in settings:
            own[setting] = experiment.repeat(
                f"power {setting}", lambda seed, s=setting: ours(*data(s, seed), seed), count, bar
            )
            power = float(np.mean(np.asarray(own[setting]) <= LEVEL))
            stored = dict(zip(NAMES, STORED[setting], strict=True))
            results["settings"][setting] = {"power": power, **stored}
        if theirs is not None:
            beside = last.get("beside mmdfuse", {})
            beside = beside | {s: compared(s, own[s], theirs, bar) for s in shared}
            results["beside mmdfuse"] = {name: beside[name] for name in BESIDE if name in beside}
    results = with_errors(results)
    if theirs is None:
        print("`mmdfuse.py` is not in KBR_DATA: not compared")
    experiment.save("power", results)
    print(results)


if __name__ == "__main__":
    experiment.start(main, double=False)
