r"""Learning a filter's parameters by gradient, against a grid of 400 points, on the rotation
dynamics.

    python -m benchmarks.rotation.tuning [repetitions of the gradient [of the grid [T ...]]]

Cells that are not run keep their last results.

The importance-weighted, two-inverse filter of `rotation_dynamics` (one system as described there)
learns bandwidths and regularizers from its training sequence alone: cut into four stretches, each
filtered by a filter of the rest. The gradient (Adam) takes one stretch a step, drawn by key; the
grid evaluates all four at each of its points. "Readout" learns two more numbers with the rest: the
estimate is the belief's mean m, corrected to m + a (o - m) + b (m' - m) by the observation o and
the mean m' that was predicted before it; without it a = b = 0. Times are of runs, with compilation
beside them: it happens once for all data sets of one size. Errors are on a test sequence, as ratios
to the optimal filter.
"""

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from ..models import importance_filter
from .dynamics import BURN_IN, OBSERVATION_RANK, STATE_RANK, TEST, squared_errors
from .references import OPTIMAL, SYSTEMS, particle_filter, simulate

SIZES, REPETITIONS, GRIDS, FOLDS, STEPS, TRUNCATION = (200, 400, 800), 20, 3, 4, 45, 0.03
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(0.3, STEPS))
#: Where the descent starts: bandwidths in medians, regularizers as anybody would guess.
START = {"h": 0.5, "c": 1.0, "epsilon": 1e-3, "transition": 1e-3, "delta": 1e-2}
READOUT = START | {"a": 0.0, "b": 0.0}
#: 5 x 5 x 4 x 1 x 4 points; one epsilon less than the gradient has, or there were 1600.
GRID = {
    "h": (0.15, 0.3, 0.6, 1.2, 2.4),
    "c": (0.4, 0.8, 1.5, 3.0, 6.0),
    "epsilon": (1e-5, 1e-4, 1e-3, 1e-2),
    "transition": None,
    "delta": (1e-4, 1e-3, 1e-2, 1e-1),
}


def fit(p, states, observations, successors=None):
    h, c = kbr.median_heuristic(states), kbr.median_heuristic(observations)
    lags = jnp.broadcast_to(
        p["c"], (observations.shape[1] // states.shape[1],)
    )  # one for each observation of a window
    return importance_filter(
        (
            kbr.Gaussian(p["h"] * h),
            kbr.Gaussian(jnp.repeat(lags, states.shape[1]) * c),
        ),
        states,
        observations,
        ridges=(p["epsilon"], p["epsilon"] if p["transition"] is None else p["transition"]),
        delta=p["delta"],
        ranks=(STATE_RANK, OBSERVATION_RANK),
        truncation=TRUNCATION,
        successors=successors,
    )


def estimate(p, filt, observations):
    """The belief's mean, corrected by the readout if there is one."""

    def means(step):
        return kbr.state_mean(filt, step), kbr.mean(filt.embed(step.predicted))

    after, before = kbr.run_filter(filt, observations, output_fn=means)
    newest = observations[:, : after.shape[1]]
    return after + p.get("a", 0.0) * (newest - after) + p.get("b", 0.0) * (before - after)


def stretches(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training transitions and of the held-out steps, for each fold.

    All folds have as many.
    """
    held = size // FOLDS
    parts = [np.arange(start, start + held) for start in range(0, FOLDS * held, held)]
    rest = []
    for part in parts:
        inside = np.isin(np.arange(size), part)
        transitions = np.flatnonzero(~inside[:-1] & ~inside[1:])
        rest.append(transitions[-(size - held - 2) :])
    return np.stack(rest), np.stack(parts)


def of_fold(data, p, fold):
    """Loss on one stretch."""
    states, observations, rest, parts = data
    index, part = rest[fold], parts[fold]
    filt = fit(p, states[index], observations[index], states[index + 1])
    errors = jnp.sum((estimate(p, filt, observations[part]) - states[part]) ** 2, axis=-1)
    return jnp.mean(errors[BURN_IN // 2 :])


def on_all(data, p):
    return jnp.mean(jax.lax.map(lambda fold: of_fold(data, p, fold), jnp.arange(FOLDS)))


def on_one(data, p, key):
    return of_fold(data, p, jax.random.randint(key, (), 0, FOLDS))


def on_grid(data, p):
    return on_all(data, p | {"transition": p["epsilon"]})


def by_gradient(data, key, start: dict[str, Any]) -> dict[str, Any]:
    tuned = kbr.tune(
        jax.tree_util.Partial(on_one, data),
        start,
        OPTIMIZER,
        num_steps=STEPS,
        positive=lambda p: [p[name] for name in START],
        validation=jax.tree_util.Partial(on_all, data),
        validate_every=11,
        key=key,
        progress=False,
    )
    return tuned.parameters


def by_grid(data) -> dict[str, Any]:
    grid = {name: jnp.asarray(values) for name, values in GRID.items() if values is not None}
    p = kbr.grid_search(jax.tree_util.Partial(on_grid, data), grid).parameters
    return p | {"transition": p["epsilon"]}


@jax.jit
def decode(p, states, observations, tests):
    return estimate(p, fit(p, states, observations), tests)


def repetition(
    system: str, size: int, seed: int, grid: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean squared errors of each method, and seconds of the two searches."""
    rng = np.random.default_rng([seed, size, system == "b"])
    states, observations = map(jnp.asarray, simulate(system, size, rng))
    truth, tests = simulate(system, TEST, rng)
    data = (states, observations, *map(jnp.asarray, stretches(size)))
    estimates = {
        OPTIMAL: particle_filter(system, tests, rng),
    }
    chosen, seconds = {"start of the descent": START}, {}
    searches = {
        "gradient": lambda: by_gradient(data, jax.random.key(seed), START),
        "gradient, readout": lambda: by_gradient(data, jax.random.key(seed), READOUT),
    }
    searches |= {"grid": lambda: by_grid(data)} if grid else {}
    for name, search in searches.items():
        start = time.perf_counter()
        chosen[name] = jax.block_until_ready(search())
        seconds[name] = time.perf_counter() - start
    for name, p in chosen.items():
        p = jax.tree.map(jnp.asarray, p)
        estimates[name] = decode(p, states, observations, tests)
    return {
        name: float(squared_errors(value, truth, BURN_IN)) for name, value in estimates.items()
    }, seconds


def cell(system: str, size: int, repetitions: int, grids: int, bar: tqdm) -> dict[str, Any]:
    """One table cell.

    Ratios of all methods, and apart those of the repetitions in which the grid ran too.
    """
    rows, seconds = [], []
    for seed in range(repetitions):
        row, time_of = repetition(system, size, seed, seed < grids)
        rows.append(row)
        seconds.append(time_of)
        bar.update()
    common = [name for name in rows[-1] if name != "grid"]
    found = {
        "repetitions": repetitions,
        "methods": experiment.ratios(
            [{name: row[name] for name in common} for row in rows], OPTIMAL
        ),
        # The first run compiles.
        "seconds": medians(seconds[1:]),
        "seconds of the first run": seconds[0],
    }
    if grids:
        found["where all ran"] = {
            "repetitions": grids,
            "methods": experiment.ratios(rows[:grids], OPTIMAL),
        }
    return found


def medians(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Median of each entry over the runs that have it."""
    return {
        name: float(np.median([row[name] for row in seconds if name in row]))
        for row in seconds
        for name in row
    }


def words(results: dict[str, Any]) -> str:
    """Arguments of the runs that the cells come from, in order of T."""
    runs: dict[tuple[int, int], list[str]] = {}
    for name, found in results.items():
        size, grids = name.split("T = ")[1], found.get("where all ran", {}).get("repetitions", 0)
        sizes = runs.setdefault((found["repetitions"], grids), [])
        sizes += [size] if size not in sizes else []
    return "; ".join(" ".join([*map(str, counts), *sizes]) for counts, sizes in runs.items())


def main(repetitions: int = REPETITIONS, grids: int = GRIDS, *sizes: int) -> None:
    sizes = sizes or SIZES
    results = experiment.previous("rotation_tuning")
    with tqdm(total=len(SYSTEMS) * len(sizes) * repetitions, unit="run") as bar:
        for size, system in itertools.product(sizes, SYSTEMS):
            results[f"({system}) T = {size}"] = found = cell(system, size, repetitions, grids, bar)
            for part in (found, found.get("where all ran", {})):
                ratios = {name: round(m["ratio"], 3) for name, m in part.get("methods", {}).items()}
                print(f"({system}) T = {size}", ratios, part.get("seconds"), flush=True)
            experiment.save("rotation_tuning", results, words(results))


if __name__ == "__main__":
    experiment.start(main)
