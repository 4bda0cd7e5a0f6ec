"""The canteen laps as positions and windows of readings.

Nearest neighbors, kernel ridge and Kalman filters on them.
"""

import itertools
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

TRAINING, TEST, USERS = (1, 2, 3, 4, 5), (6, 7, 9), (1, 2)
WINDOWS = (1, 2, 4, 8, 16)
ACCESS_POINTS = 6
NEAREST, WEIGHTS = (1, 2, 3, 10, 30, 60), (0.25, 0.5, 1.0, 2.0)
BANDWIDTHS, RIDGES = (4.0, 8.0, 16.0, 32.0), (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
AGILITIES = tuple(10.0 ** (power / 2) for power in range(-16, 3))


class Lap(NamedTuple):
    """One walk on a grid of whole seconds.

    `position` [T, 2] and, by window, `readings` [T, 12] (NaN: not heard).
    """

    position: np.ndarray
    readings: dict[int, np.ndarray]


class Scale(NamedTuple):
    """What turns readings into features.

    Value of an access point not heard, limit and noise of every channel.
    """

    far: np.ndarray
    noise: np.ndarray


def data_path() -> pathlib.Path:
    """Where the file should be; it is not part of the project."""
    default = pathlib.Path(__file__).parents[1] / "data"
    return pathlib.Path(os.environ.get("KBR_DATA", default)) / "indoor_canteen.npz"


def read_laps(numbers: tuple[int, ...]) -> dict[tuple[int, int], Lap]:
    """The given laps of all users who walked them."""
    with np.load(data_path()) as data:
        return {
            (lap, user): _on_grid(
                *(
                    data[f"lap{lap}_user{user}/{name}"]
                    for name in ("time", "position", "rtt", "rss")
                )
            )
            for lap, user in itertools.product(numbers, USERS)
            if f"lap{lap}_user{user}/time" in data
        }


def _on_grid(time: np.ndarray, position: np.ndarray, rtt: np.ndarray, rss: np.ndarray) -> Lap:
    """Resample to whole seconds: the true position there, and what was read in the window that ends
    there.

    Of the ranges in a window the lower quartile, because a reflected signal only comes late; of the
    strengths the mean.
    """
    grid = np.arange(int(time[-1]) + 1.0)
    truth = np.stack([np.interp(grid, time, axis) for axis in position.T], axis=1)
    readings = {}
    for window in WINDOWS:
        rows = []
        for now in grid:
            inside = (time > now - window) & (time <= now)
            ranges = (
                _summary(channel[inside], lambda x: np.quantile(x, 0.25)) for channel in rtt.T
            )
            strengths = (_summary(channel[inside], np.mean) for channel in rss.T)
            rows.append([*ranges, *strengths])
        readings[window] = np.asarray(rows)
    return Lap(truth, readings)


def _summary(values: np.ndarray, function: Any) -> float:
    heard = values[~np.isnan(values)]
    return float(function(heard)) if heard.size else np.nan


def fit_scale(laps: list[Lap], window: int) -> Scale:
    """Far values and noise levels of the 12 channels, from training laps.

    An access point that is not heard is far or hidden: it gets the longest range (99 %) and the
    weakest signal (1 %), and longer ranges are cut there. Noise: root mean square of a channel
    around its mean over the 20 nearest positions.
    """
    readings = np.concatenate([lap.readings[window] for lap in laps])
    position = np.concatenate([lap.position for lap in laps])
    ranges, strengths = readings[:, :ACCESS_POINTS], readings[:, ACCESS_POINTS:]
    far = np.concatenate(
        [np.nanpercentile(ranges, 99, axis=0), np.nanpercentile(strengths, 1, axis=0)]
    )
    filled = _fill(readings, far)
    chosen = np.arange(0, len(position), 5)
    near = np.argpartition(squared_distances(position[chosen], position), 20, axis=1)[:, :20]
    return Scale(far, np.sqrt(np.mean((filled[chosen] - filled[near].mean(1)) ** 2, axis=0)))


def _fill(readings: np.ndarray, far: np.ndarray) -> np.ndarray:
    filled = np.where(np.isnan(readings), far, readings)
    filled[:, :ACCESS_POINTS] = np.minimum(filled[:, :ACCESS_POINTS], far[:ACCESS_POINTS])
    return filled


def features(lap: Lap, window: int, scale: Scale) -> np.ndarray:
    """Readings `[T, 12]` in units of their noise."""
    return _fill(lap.readings[window], scale.far) / scale.noise


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(np.sum(x**2, 1)[:, None] + np.sum(y**2, 1) - 2 * x @ y.T, 0.0)


def weigh(x: np.ndarray, weight: float) -> np.ndarray:
    """Multiply the signal strengths, so that they count more or less than the ranges."""
    return x * np.repeat([1.0, weight], ACCESS_POINTS)


def split(laps: dict[tuple[int, int], Lap], window: int, tests: dict[tuple[int, int], Lap]) -> Any:
    """Training features and positions, and the features of each test lap.

    Scales are fitted to the training laps only.
    """
    scale = fit_scale(list(laps.values()), window)
    x = np.concatenate([features(lap, window, scale) for lap in laps.values()])
    y = np.concatenate([lap.position for lap in laps.values()])
    return x, y, {key: features(lap, window, scale) for key, lap in tests.items()}


def nearest(
    x: np.ndarray, y: np.ndarray, queries: dict, weight: float, tried: Any = None
) -> dict[tuple, dict]:
    """Estimates of k-nearest neighbors for every k.

    Mean position of the k most similar training readings.
    """
    estimates: dict[tuple, dict] = {(k,): {} for (k,) in tried or itertools.product(NEAREST)}
    for key, query in queries.items():
        order = np.argsort(squared_distances(weigh(query, weight), weigh(x, weight)), axis=1)
        for (k,) in estimates:
            estimates[(k,)][key] = y[order[:, :k]].mean(1)
    return estimates


def ridge(
    x: np.ndarray, y: np.ndarray, queries: dict, weight: float, tried: Any = None
) -> dict[tuple, dict]:
    """Estimates of kernel ridge regression (Gaussian kernel) for every bandwidth and ridge."""
    estimates, mean, n = {}, y.mean(0), len(y)
    tried = tried or list(itertools.product(BANDWIDTHS, RIDGES))
    squares = squared_distances(weigh(x, weight), weigh(x, weight))
    crosses = {
        key: squared_distances(weigh(query, weight), weigh(x, weight))
        for key, query in queries.items()
    }
    for bandwidth in sorted({scale for scale, _ in tried}):
        gram = np.exp(-squares / (2 * bandwidth**2))
        rows = {key: np.exp(-cross / (2 * bandwidth**2)) for key, cross in crosses.items()}
        for epsilon in (ridge for scale, ridge in tried if scale == bandwidth):
            dual = np.linalg.solve(gram + n * epsilon * np.eye(n), y - mean)
            estimates[(bandwidth, epsilon)] = {key: row @ dual + mean for key, row in rows.items()}
    return estimates


def kalman(measured: np.ndarray, agility: float) -> np.ndarray:
    """Kalman filter with nearly constant velocity on measured positions; `agility` is the ratio of
    its two noises.

    Noise of the measurement has variance 1, white noise of the acceleration `agility`: the estimate
    depends on the ratio only.
    """
    transition = np.array([[1.0, 1.0], [0.0, 1.0]])
    process = agility * np.array([[1 / 3, 1 / 2], [1 / 2, 1.0]])
    # Walking is slow against the error of one measurement, so the first velocity is taken as near
    # zero.
    mean, covariance = np.stack([measured[0], np.zeros(2)]), np.diag([1.0, 0.01])
    estimates = [measured[0]]
    for value in measured[1:]:
        mean, covariance = transition @ mean, transition @ covariance @ transition.T + process
        gain = covariance[:, 0] / (covariance[0, 0] + 1)
        mean = mean + gain[:, None] * (value - mean[0])
        covariance = covariance - np.outer(gain, covariance[0])
        estimates.append(mean[0])
    return np.asarray(estimates)


def errors(estimates: dict, laps: dict) -> dict[tuple[int, int], np.ndarray]:
    """Distance to the true position in meters, by lap."""
    return {
        key: np.linalg.norm(estimate - laps[key].position, axis=1)
        for key, estimate in estimates.items()
    }


def mean_error(estimates: dict, laps: dict) -> float:
    return float(np.mean(np.concatenate(list(errors(estimates, laps).values()))))


def select(method: Any, laps: dict, window: int, stride: int) -> list[dict[str, Any]]:
    """Candidates of one window with their estimates on each training lap, fitted to the laps of
    other numbers.
    """
    candidates = []
    for weight in WEIGHTS:
        merged: dict[tuple, dict] = {}
        for number in TRAINING:
            others = {key: lap for key, lap in laps.items() if key[0] != number}
            own = {key: lap for key, lap in laps.items() if key[0] == number}
            x, y, queries = split(others, window, own)
            for parameters, estimates in method(x[::stride], y[::stride], queries, weight).items():
                merged.setdefault(parameters, {}).update(estimates)
        candidates += [
            {
                "window": window,
                "weight": weight,
                "parameters": p,
                "score": mean_error(e, laps),
                "estimates": e,
            }
            for p, e in merged.items()
        ]
    return candidates


def select_kalman(candidates: list[dict[str, Any]], laps: dict) -> dict[str, Any]:
    """The best Kalman filter on top of the best few measurements of every window."""
    tried = []
    for window in WINDOWS:
        best = sorted((c for c in candidates if c["window"] == window), key=lambda c: c["score"])[
            :3
        ]
        for candidate, agility in itertools.product(best, AGILITIES):
            smooth = {
                key: kalman(measured, agility) for key, measured in candidate["estimates"].items()
            }
            score = mean_error(smooth, laps)
            tried.append({**candidate, "agility": agility, "score": score, "estimates": smooth})
    return min(tried, key=lambda c: c["score"])


def apply(method: Any, chosen: dict[str, Any], laps: dict, tests: dict) -> dict:
    """Estimates on test laps of a chosen candidate, fitted to all training laps."""
    x, y, queries = split(laps, chosen["window"], tests)
    estimates = method(x, y, queries, chosen["weight"], [chosen["parameters"]])[
        chosen["parameters"]
    ]
    if "agility" in chosen:
        estimates = {
            key: kalman(measured, chosen["agility"]) for key, measured in estimates.items()
        }
    return estimates


def summary(errors: np.ndarray) -> dict[str, float]:
    """What is reported of errors in meters."""
    median, worst = np.percentile(errors, [50, 90])
    return {"median": float(median), "mean": float(np.mean(errors)), "90 %": float(worst)}


def summarize(chosen: dict, errors: dict[str, dict]) -> dict[str, Any]:
    """Errors of every method on all test laps and each, its choice and what that scored on the
    training laps.
    """
    methods = {}
    for name, by_lap in errors.items():
        together = summary(np.concatenate(list(by_lap.values())))
        choice = {
            key: value for key, value in chosen[name].items() if key not in ("estimates", "model")
        }
        laps = {f"lap {lap}, user {user}": summary(error) for (lap, user), error in by_lap.items()}
        methods[name] = {"all": together, "choice": choice, **laps}
    return dict(sorted(methods.items(), key=lambda item: item[1]["all"]["mean"]))
