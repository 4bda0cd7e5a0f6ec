"""Change points: simulated and annotated series beside `ruptures`, run lengths of the detector.

    KBR_DATA=FOLDER python -m benchmarks.tests.change_points [repetitions]

- Simulated series of 500 points with four changes of mean, variance, or shape at one mean and
  variance. `ruptures` (pip install ruptures; left out where it is missing) finds segments with its
  own bandwidth. It has no rule for the number of changes: it gets ours, or the penalty of its PELT
  search is twice the slope of the costs in D.
- The annotated series of the Turing Change Point Dataset: `annotations.json` and `datasets/` of
  github.com/alan-turing-institute/TCPD in FOLDER. These are the 32 series that lie in its
  repository; each has its own license (see the folder of the series), and none is kept here. Every
  method has one setting, fixed before the annotations were read. F1 has margin 5, and covering is
  the mean over annotators, as in van den Burg and Williams (2020). The scores of other methods with
  their default settings are those stored in github.com/alan-turing-institute/TCPDBench (MIT).
- The detector: run length without a change over the wanted one, and steps until a change is seen.
"""

import importlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kbr_jax.hypotheses._change_detector import detect_changes, fit_change_detector
from kbr_jax.hypotheses._change_points import change_points
from kbr_jax.kernels import default_kernel

from .. import experiment

REPETITIONS, LENGTH, CHANGES, MARGIN, DETECTORS = 50, 500, 4, 10, 64
#: Stored F1 and covering of BOCPD, ECP (energy distance), KCPA and PELT with default settings. NaN
#: where a method did not run.
STORED = {
    "bank": (0.0465, 0.0482, 0.1538, 0.1274, 0.0076, 0.0361, 0.4, 0.5095),
    "brent_spot": (0.5208, 0.5859, 0.4778, 0.3872, 0.104, 0.0216, 0.4647, 0.6266),
    "businv": (0.2703, 0.4631, 0.3011, 0.3108, 0.0475, 0.0127, 0.3704, 0.6028),
    "centralia": (0.9091, 0.6119, 0.7629, 0.6747, 0.7143, 0.44, 0.9091, 0.5636),
    "children_per_woman": (0.6368, 0.7583, 0.3485, 0.3969, 0.0684, 0.0478, 0.6175, 0.7983),
    "co2_canada": (0.6193, 0.7164, 0.8169, 0.639, 0.1688, 0.2633, 0.6614, 0.6114),
    "construction": (0.6341, 0.3953, 0.5735, 0.3523, 0.0381, 0.0163, 0.7091, 0.4227),
    "debt_ireland": (0.7603, 0.5845, 0.4694, 0.3206, 0.5185, 0.2095, 0.7603, 0.6346),
    "gdp_argentina": (0.9474, 0.6303, 0.8235, 0.7371, 0.1311, 0.061, 0.8889, 0.6675),
    "gdp_croatia": (1.0, 0.6417, 0.8235, 0.7083, 0.16, 0.1083, 0.5833, 0.6054),
    "gdp_iran": (0.6222, 0.5202, 0.6517, 0.5826, 0.2188, 0.0621, 0.4915, 0.4773),
    "gdp_japan": (0.8, 0.578, 0.8889, 0.8021, 0.0678, 0.0414, 0.6154, 0.6539),
    "global_co2": (0.7536, 0.6396, 0.7536, 0.5349, 0.1667, 0.1731, 0.7536, 0.6377),
    "homeruns": (0.7286, 0.526, 0.6749, 0.6113, 0.1333, 0.0475, 0.8119, 0.6826),
    "jfk_passengers": (0.4368, 0.5412, 0.4368, 0.438, 0.0256, 0.0081, 0.7755, 0.8393),
    "lga_passengers": (0.6298, 0.4962, 0.3917, 0.3858, 0.0544, 0.0132, 0.4382, 0.4744),
    "nile": (1.0, 0.888, 1.0, 0.8568, 0.04, 0.032, 1.0, 0.8801),
    "ozone": (0.6496, 0.6016, 0.7234, 0.5737, 0.1091, 0.0704, 1.0, 0.6346),
    "quality_control_1": (0.8, 0.8869, 0.6667, 0.6198, 0.0253, 0.0096, 1.0, 0.9924),
    "quality_control_2": (1.0, 0.9273, 1.0, 0.9265, 0.028, 0.0099, 1.0, 0.9223),
    "quality_control_3": (1.0, 0.9967, 1.0, 0.9967, 0.0217, 0.0082, 1.0, 0.9956),
    "quality_control_4": (0.6575, 0.5114, 0.3932, 0.2572, 0.0282, 0.0088, 0.7263, 0.5378),
    "quality_control_5": (1.0, 1.0, 1.0, 1.0, 0.0062, 0.0062, 1.0, 1.0),
    "rail_lines": (0.8462, 0.7665, 0.5366, 0.4282, 0.2, 0.1027, 0.8462, 0.7864),
    "run_log": (1.0, 0.8154, 0.792, 0.6568, 0.1392, 0.1282, math.nan, math.nan),
    "seatbelts": (0.5833, 0.7565, 0.3214, 0.6155, 0.051, 0.0198, 0.6829, 0.7969),
    "shanghai_license": (0.7132, 0.8558, 0.6977, 0.5177, 0.0481, 0.0205, 0.8679, 0.9197),
    "uk_coal_employ": (math.nan, math.nan, 0.5133, 0.3565, 0.5133, 0.3565, math.nan, math.nan),
    "unemployment_nl": (0.6834, 0.4951, 0.6203, 0.4704, 0.1455, 0.0393, 0.773, 0.6484),
    "us_population": (0.2162, 0.2191, 0.1739, 0.0895, 0.0073, 0.0029, 0.4706, 0.5061),
    "usd_isk": (0.6094, 0.6717, 0.6613, 0.6161, 0.0794, 0.0227, 0.6565, 0.7303),
    "well_log": (0.7965, 0.7763, 0.8183, 0.6012, 0.0694, 0.0204, 0.5546, 0.6786),
}
STORED_NAMES = "BOCPD, stored", "ECP, stored", "KCPA, stored", "PELT, stored"
Method = Callable[[np.ndarray], list[int]]


# ---- methods


def scatters(x: np.ndarray, gamma: float, segmentations: list[list[int]]) -> np.ndarray:
    """Sum over segments of the scatter with the kernel exp(-gamma |x - y|^2)."""
    gram = np.exp(-gamma * ((x[:, None] - x[None]) ** 2).sum(-1))
    sums = np.pad(gram.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def one(a: int, b: int) -> float:
        return (b - a) - (sums[b, b] - sums[a, b] - sums[b, a] + sums[a, a]) / (b - a)

    return np.asarray([sum(map(one, [0, *ends[:-1]], ends)) for ends in segmentations])


def peers() -> dict[str, Method]:
    """`ruptures` with our rule for the number of changes, and its search with a linear penalty."""
    try:
        ruptures = importlib.import_module("ruptures")
    except ImportError:
        print("`ruptures` is not installed: no results beside it")
        return {}

    def fitted(x):
        most = min(50, max(1, len(x) // 6), len(x) // 2 - 1)
        found = ruptures.KernelCPD(kernel="rbf", min_size=2).fit(x)
        found.predict(n_bkps=most)
        segmentations = [[len(x)], *(found.segmentations_dict[d] for d in range(1, most + 1))]
        return found, segmentations, scatters(x, found.cost.gamma, segmentations)

    def by_slope(x):
        _, segmentations, costs = fitted(x)
        most, count = len(costs) - 1, len(x)
        shape = np.asarray([d + math.log(math.comb(count - 1, d)) for d in range(most + 1)])
        far = slice(math.floor(0.6 * most), None)
        slope = min(np.polyfit(shape[far], costs[far], 1)[0], 0)
        return segmentations[int(np.argmin(costs - 2 * slope * shape))][:-1]

    def by_pelt(x):
        found, _, costs = fitted(x)
        far = np.arange(len(costs))[math.floor(0.6 * (len(costs) - 1)) :]
        slope = min(np.polyfit(far, costs[far], 1)[0], 0)
        return found.predict(pen=max(-2 * slope, 1e-6))[:-1]

    return {"ruptures, our rule": by_slope, "ruptures, PELT": by_pelt}


# ---- scores


def matched(true: list[int], found: list[int], margin: int) -> int:
    """How many true changes have a found one of their own within the margin."""
    left, count = set(found), 0
    for change in true:
        near = [(abs(change - other), other) for other in left if abs(change - other) <= margin]
        if near:
            left.discard(min(near)[1])
            count += 1
    return count


def f_measure(annotations: list[list[int]], found: list[int], margin: int) -> float:
    """F1 with 0 as a change of all: precision of any annotator, mean recall over them."""
    given = [sorted({0, *changes}) for changes in annotations]
    found = sorted({0, *found})
    precision = matched(sorted(set().union(*given)), found, margin) / len(found)
    recall = float(np.mean([matched(one, found, margin) / len(one) for one in given]))
    return 2 * precision * recall / (precision + recall)


def covering(annotations: list[list[int]], found: list[int], count: int) -> float:
    """Mean over annotators of the overlap of each segment with the best found one."""

    def segments(changes):
        edges = sorted({0, *changes, count})
        return list(itertools.pairwise(edges))

    def overlap(one, other):
        common = max(0, min(one[1], other[1]) - max(one[0], other[0]))
        return common / (one[1] - one[0] + other[1] - other[0] - common)

    def covered(one):
        mine = segments(found)
        return sum((b - a) * max(overlap((a, b), s) for s in mine) for a, b in segments(one))

    return float(np.mean([covered(one) for one in annotations])) / count


def hausdorff(true: list[int], found: list[int], count: int) -> float:
    """Largest distance from a change to the nearest of the other list; T if one is empty."""
    if not true or not found:
        return float(count)
    distances = np.abs(np.subtract.outer(true, found))
    return float(max(distances.min(0).max(), distances.min(1).max()))


# ---- simulated series


def series(kind: str, dimension: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Segments of two distributions in turn, none shorter than half of their mean length."""
    rng = np.random.default_rng(seed)
    least = LENGTH // (2 * (CHANGES + 1))
    rest = LENGTH - least * (CHANGES + 1)
    lengths = least + rng.multinomial(rest, np.full(CHANGES + 1, 1 / (CHANGES + 1)))
    starts = np.cumsum(lengths)[:-1]
    second = (np.searchsorted(starts, np.arange(LENGTH), side="right") % 2)[:, None]
    noise = rng.normal(size=(LENGTH, dimension))
    if kind == "mean":
        x = noise + second * (1.5 if dimension == 1 else 2.25 / math.sqrt(dimension))
    elif kind == "variance":
        x = noise * np.where(second, 3.0 if dimension == 1 else 1.6, 1)
    elif kind == "shape":  # two peaks
        sides = rng.choice([-0.95, 0.95], size=noise.shape)
        x = np.where(second, sides + math.sqrt(1 - 0.95**2) * noise, noise)
    else:
        if kind == "autocorrelated":
            for t in range(1, LENGTH):
                noise[t] = 0.5 * noise[t - 1] + math.sqrt(0.75) * noise[t]
        return noise, []
    return x, starts.tolist()


def simulated(count: int, methods: dict[str, Method], bar: Any) -> dict[str, Any]:
    settings = [(k, d) for k in ("none", "mean", "variance", "shape") for d in (1, 10)]
    results = {}
    for kind, dimension in [*settings, ("autocorrelated", 1)]:
        scores = {name: [] for name in methods}
        for seed in range(count):
            x, true = series(kind, dimension, seed)
            for name, method in methods.items():
                found = [int(change) for change in method(x)]
                scores[name].append(
                    (
                        len(found) - len(true),
                        len(found) == len(true),
                        f_measure([true], found, MARGIN),
                        hausdorff(true, found, LENGTH),
                    )
                )
            bar.update()
        names = "number, error", "number, right", "F1", "Hausdorff"
        results[f"{kind}, d = {dimension}"] = {
            name: dict(zip(names, np.mean(np.asarray(rows, float), axis=0).tolist(), strict=True))
            | {"number, absolute error": float(np.mean(np.abs([row[0] for row in rows])))}
            for name, rows in scores.items()
        }
    return results


def seconds(methods: dict[str, Method]) -> dict[str, Any]:
    results = {}
    for count in (500, 1000, 3000):
        x = np.random.default_rng(0).normal(size=(count, 1))
        results[f"T = {count}"] = {
            name: experiment.milliseconds(lambda m=method, x=x: m(x), 3) / 1e3
            for name, method in methods.items()
        }
    return results


# ---- annotated series


def annotated(methods: dict[str, Method]) -> dict[str, Any]:
    folder = pathlib.Path(os.environ.get("KBR_DATA", "."))
    if not (folder / "annotations.json").exists():
        print("`annotations.json` is not in KBR_DATA: no annotated series")
        return {}
    annotations = json.loads((folder / "annotations.json").read_text())
    found: dict[str, Any] = {}
    for name, stored in STORED.items():
        data = json.loads((folder / "datasets" / name / f"{name}.json").read_text())
        values = np.asarray([part["raw"] for part in data["series"]], float).T
        kept = np.flatnonzero(np.isfinite(values).all(axis=1))
        given = list(annotations[name].values())
        scores = {}
        for method, run in methods.items():
            changes = [int(kept[change]) for change in run(values[kept])]
            scores[method] = (
                f_measure(given, changes, 5),
                covering(given, changes, len(values)),
                len(changes),
            )
        scores["no changes"] = (f_measure(given, [], 5), covering(given, [], len(values)), 0)
        pairs = zip(stored[::2], stored[1::2], strict=True)
        found[name] = scores | dict(zip(STORED_NAMES, pairs, strict=True))
    common = [name for name in found if np.isfinite(STORED[name]).all()]
    means = {
        method: np.mean([found[name][method][:2] for name in common], axis=0).tolist()
        for method in found["nile"]
    }
    cleaned = {
        name: {m: [None if v != v else round(v, 4) for v in s] for m, s in scores.items()}
        for name, scores in found.items()
    }
    columns = "F1, covering, number of changes"
    return {"columns": columns, "series in the mean": len(common), "mean": means, "each": cleaned}


# ---- the detector


def points(kind: str, key: jax.Array, count: int) -> jax.Array:
    if kind == "Student, 3 degrees":
        return jax.random.t(key, 3.0, (count, 1))
    noise = jax.random.normal(key, (count, 10 if kind == "normal, d = 10" else 1))
    if kind != "autocorrelated":
        return noise

    def step(x, e):
        x = 0.5 * x + math.sqrt(0.75) * e
        return x, x

    return jax.lax.scan(step, noise[0], noise)[1]


def run_length(kind: str, wanted: int, window: int) -> float:
    """Steps from the first full window to an alarm, over the wanted mean: steps over alarms."""
    count = 6 * wanted
    kernel = default_kernel(points(kind, jax.random.key(1), 1000))

    def one(key):
        first, second, third = jax.random.split(key, 3)
        detector = fit_change_detector(
            kernel,
            points(kind, first, 500),
            window=window,
            average_run_length=wanted,
            key=second,
        )
        alarm = detect_changes(detector, points(kind, third, count)).alarm[window - 1 :]
        return jnp.where(jnp.any(alarm), jnp.argmax(alarm) + 1, alarm.size), jnp.any(alarm)

    keys = jax.random.split(jax.random.key(7), DETECTORS)
    steps, alarms = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=16))(keys)
    return float(jnp.sum(steps) / jnp.sum(alarms)) / wanted


CHANGED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean + 1": lambda e, _: e + 1,
    "mean + 2": lambda e, _: e + 2,
    "deviation x 2": lambda e, _: 2 * e,
    "two peaks": lambda e, s: 0.95 * s + math.sqrt(1 - 0.95**2) * e,
}


def delay(change: str, window: int) -> list[float]:
    """Median steps from the change to the first alarm behind it, and the share seen in 1000."""

    def one(key):
        keys = jax.random.split(key, 4)
        kernel = default_kernel(points("normal", jax.random.key(1), 1000))
        detector = fit_change_detector(
            kernel,
            points("normal", keys[0], 500),
            window=window,
            average_run_length=1000,
            key=keys[1],
        )
        noise = points("normal", keys[2], window + 1000)
        signs = jax.random.rademacher(keys[3], noise.shape, noise.dtype)
        later = jnp.arange(noise.shape[0])[:, None] >= window
        stream = jnp.where(later, CHANGED[change](noise, signs), noise)
        alarm = detect_changes(detector, stream).alarm[window:]
        return jnp.where(jnp.any(alarm), jnp.argmax(alarm) + 1, alarm.size), jnp.any(alarm)

    keys = jax.random.split(jax.random.key(8), DETECTORS)
    steps, seen = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=16))(keys)
    return [float(jnp.median(steps)), float(jnp.mean(seen))]


def detectors() -> dict[str, Any]:
    wanted = [
        ("normal", 500, 25),
        ("normal", 1000, 25),
        ("normal", 1000, 100),
        ("Student, 3 degrees", 1000, 25),
        ("normal, d = 10", 1000, 25),
        ("autocorrelated", 1000, 25),
    ]
    return {
        "run length over the wanted one": {
            "{}, {} wanted, window {}".format(*row): run_length(*row) for row in wanted
        },
        "median delay, share seen": {
            f"{change}, window {window}": delay(change, window)
            for change in CHANGED
            for window in (25, 50)
        },
    }


def main(count: int = REPETITIONS) -> None:
    methods: dict[str, Method] = {
        "ours": lambda x: change_points(None, jnp.asarray(x)).changes.tolist(),
        **peers(),
    }
    with tqdm(total=9 * count, unit="series") as bar:
        results: dict[str, Any] = {
            "repetitions": count,
            "simulated": simulated(count, methods, bar),
            "seconds": seconds(methods),
        }
    results["annotated"] = annotated(methods)
    jax.config.update("jax_enable_x64", False)
    results["detector"] = detectors()
    experiment.save("change_points", results)
    print(json.dumps({k: v for k, v in results.items() if k != "annotated"}, indent=1))
    print(json.dumps(results["annotated"].get("mean"), indent=1))


if __name__ == "__main__":
    experiment.start(main)
