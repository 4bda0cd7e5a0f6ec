"""Filters and larger work on one device: microseconds a sequence and step, and seconds.

    python -m benchmarks.scale.device [filters] [work]

Without words both. The results of each kind of device are kept in a file of their own. The filters
are those of `benchmarks.scale.accelerator`, n = 1000 and 100 features, `run_filter` and
`state_mean` of 50 steps. The work is what takes long on a CPU, in float32 where nothing else is
said; first calls compile.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from ..tests import large
from . import conjugate_gradient
from .accelerator import BATCHES, STEPS, fit, walk

CELLS = [
    (form, estimator, digits)
    for form in ("weights", "moments")
    for estimator in ("pairs", "importance")
    for digits in (32, 64)
]


def once(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def sequences(count: int, dtype: Any) -> jax.Array:
    _, observations = walk(count * STEPS, 1)
    shape = (STEPS, 2) if count == 1 else (count, STEPS, 2)
    return jnp.asarray(observations.reshape(shape), dtype)


def means(filt, observations):
    return kbr.state_mean(filt, kbr.run_filter(filt, observations))


def fitted(form: str, estimator: str, digits: int) -> Any:
    """A filter, fitted on the CPU: there its programs compile faster."""
    with jax.default_device(jax.devices("cpu")[0]):
        return fit(form, estimator, jnp.dtype(f"float{digits}"))


def placed(tree: Any) -> Any:
    there = jax.devices()[0]
    return jax.tree.map(lambda a: jax.device_put(a, there) if eqx.is_array(a) else a, tree)


def program(filt, count: int, dtype: Any) -> tuple[Any, Any]:
    """A lowered program of `count` sequences and its arguments."""
    function = means if count == 1 else jax.vmap(means, in_axes=(None, 0))
    arrays, rest = eqx.partition(placed(filt), eqx.is_array)
    arguments = (arrays, sequences(count, dtype))
    lowered = jax.jit(lambda a, o: function(eqx.combine(a, rest), o)).lower(*arguments)
    return lowered, arguments


def filters(counts: tuple[int, ...]) -> dict[str, Any]:
    """Microseconds of all cells; all programs are compiled at once, before the clock starts.

    And how far the state means of one sequence are from those of a CPU in float64.
    """
    cells, right, results = {}, {}, {}
    with ThreadPoolExecutor(max(experiment.machine()["cores"], 2)) as pool:
        for form, estimator, digits in tqdm(CELLS, unit="filter lowered"):
            dtype = jnp.dtype(f"float{digits}")
            name = f"{form}, {estimator}, float{digits}"
            with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
                double = fitted(form, estimator, 64)
                right[name] = np.asarray(means(double, sequences(1, jnp.float64)))
            with jax.enable_x64(digits == 64):
                filt = fitted(form, estimator, digits)
                for count in counts:
                    lowered, arguments = program(filt, count, dtype)
                    cells[name, count] = pool.submit(lowered.compile), arguments
    for (name, count), (future, arguments) in tqdm(cells.items(), unit="program"):
        found = results.setdefault(name, {})
        run = future.result()
        first = np.asarray(run(*arguments))
        if count == 1:
            found["difference"] = float(np.abs(first - right[name]).max())
        repeats = int(np.clip(1 / once(run, *arguments), 3, 30))
        seconds = np.median([once(run, *arguments) for _ in range(repeats)])
        found[f"{count} at once"] = 1e6 * float(seconds) / (STEPS * count)
    return results


def normal(n: int, d: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (n, d))


def gram(n: int) -> Callable[[], Any]:
    x, kernel = normal(n, 10), kbr.Gaussian(1.5)
    return lambda: kbr.gram(kernel, x)


def conditional(n: int) -> Callable[[], Any]:
    x, kernel = normal(n, 10), kbr.Gaussian(1.5)
    return lambda: (
        kbr.condition(
            kbr.fit_conditional(kernel, kernel, x, x[:, :1], regularizer=1e-4), x[:100]
        ).weights
    )


def landmarks() -> Any:
    return kbr.greedy_landmarks(kbr.Gaussian(1.5), normal(100_000, 10), rank=300).points


def moments() -> Any:
    x, kernel = normal(1_000_000, 10), kbr.Gaussian(1.5)
    chosen = kbr.uniform_landmarks(x, rank=100, key=jax.random.key(0))
    maps = kbr.moments.moment_maps(kernel, kernel, chosen, chosen)
    return kbr.moments.collect_moments(maps, x, x)


def slopes() -> Any:
    x, y = normal(4000, 10), normal(4000, 1)

    def loss(bandwidth):
        kernel = kbr.Gaussian(bandwidth)
        model = kbr.fit_conditional(kernel, kernel, x, y, regularizer=1e-3)
        return kbr.tuning.leave_out_loss(model)

    return jax.jit(jax.grad(loss))(1.5)


def work() -> dict[str, Callable[[], Any]]:
    tests = {name: test for name, test in large.ROWS.items() if "," in name and "RCIT" not in name}
    return {
        "Gram matrix, n = 20 000": gram(20_000),
        "fit and condition, exact, n = 10 000": conditional(10_000),
        "gradient of the leave-one-out loss, n = 4000": slopes,
        "300 greedy landmarks of 100 000 points": landmarks,
        "moments of 1 000 000 pairs, 100 features": moments,
        "exact, conjugate gradients, n = 100 000, float64": in_double(
            lambda: conjugate_gradient.solve(100_000, 500, 60)
        ),
        **tests,
    }


def in_double(function: Callable[[], Any]) -> Callable[[], Any]:
    def run():
        with jax.enable_x64(True):
            return function()

    return run


def main(*parts: str) -> None:
    gpu = jax.default_backend() != "cpu"
    # "NVIDIA H100 80GB HBM3", "cpu"
    kind = jax.devices()[0].device_kind.removeprefix("NVIDIA ").split()[0].lower()
    name = f"device_{kind}"
    results = experiment.previous(name)
    parts = parts or ("filters", "work")
    if "filters" in parts:
        results["filters"] = filters(BATCHES if gpu else BATCHES[:3])
        experiment.save(name, results)
    if "work" in parts:
        results["work"] = {}
        for row, function in tqdm(work().items(), unit="row"):
            first, second = once(function), once(function)
            results["work"][row] = {"first": first, "second": second}
            experiment.save(name, results)
    for part, values in results.items():
        print(part, values, sep="\n")


if __name__ == "__main__":
    experiment.start(main, double=False)
