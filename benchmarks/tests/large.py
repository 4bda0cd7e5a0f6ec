"""Tests of large samples: seconds and megabytes.

    python -m benchmarks.tests.large [row to run in this process]

Points in ten dimensions, float32, 500 permutations, everything else by default. Each row runs in a
process of its own, whose peak of memory is read at the end; a process that only imports the library
needs the first row. Samples of the tests of two samples differ by .02 in each coordinate; of pairs,
the first coordinate of y is .03 times that of x and noise; given z, both are a
coordinate of z and noise of their own. Seconds include compilation. A Gram matrix larger than the
memory is refused, though only tiles of it are formed: it would take hours.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr
from kbr_jax.kernels import default_kernel

from .. import experiment
from .conditional import of_causal_learn

N, DIMENSION, PERMUTATIONS, LANDMARKS = 100_000, 10, 500, 100
KEYS = jax.random.split(jax.random.key(0), 4)
OPTIONS: dict[str, Any] = {"key": KEYS[3], "num_permutations": PERMUTATIONS}


def normal(key: jax.Array, n: int) -> jax.Array:
    return jax.random.normal(key, (n, DIMENSION))


def two_samples(kernel: Any, n: int, **options: Any) -> Any:
    x, y = normal(KEYS[0], n // 2), normal(KEYS[1], n // 2) + 0.02
    kernel = default_kernel(x[:1000]) if kernel == "median" else kernel
    return kbr.hypotheses.two_sample_test(kernel, x, y, **OPTIONS, **options).p_value


def pairs(median: bool) -> Any:
    x, y = normal(KEYS[0], N), normal(KEYS[1], N)
    y = y.at[:, 0].add(0.03 * x[:, 0])
    first, second = (default_kernel(part[:1000]) if median else None for part in (x, y))
    test = kbr.hypotheses.independence_test
    return test(first, second, x, y, **OPTIONS, landmarks=LANDMARKS).p_value


def triple(n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    z = normal(KEYS[2], n)
    x, y = (z[:, 0] + jax.random.normal(key, (n,)) for key in KEYS[:2])
    return x, y, z


def given_z(n: int) -> Any:
    options: dict[str, Any] = {"key": KEYS[3], "num_draws": PERMUTATIONS}
    test = kbr.hypotheses.conditional_independence_test
    return test(None, None, None, *triple(n), **options).p_value


def rcit(n: int) -> float:
    """The peer, which takes random features; its exact test is cubic."""
    x, y, z = map(np.asarray, triple(n))
    return of_causal_learn("rcit")((x, y, z), 0)[0]


ROWS: dict[str, Callable[[], Any]] = {
    "nothing but the import": lambda: None,
    "two samples, 20 kernels, 100 landmarks, n = 100 000": lambda: two_samples(
        None, N, landmarks=LANDMARKS
    ),
    "two samples, one kernel, exact, n = 50 000": lambda: two_samples("median", 50_000),
    "independence, one kernel each, 100 landmarks, n = 100 000": lambda: pairs(True),
    "independence, ten kernels each, 100 landmarks, n = 100 000": lambda: pairs(False),
    "independence given z, n = 10 000": lambda: given_z(10_000),
    "independence given z, n = 10 000, RCIT of causal-learn": lambda: rcit(10_000),
}


def measured(name: str) -> dict[str, float]:
    """Of this process."""
    start = time.perf_counter()
    p_value = ROWS[name]()
    jax.block_until_ready(p_value)
    found = {
        "seconds": time.perf_counter() - start,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return found if p_value is None else found | {"p": float(p_value)}


def main(row: str = "") -> None:
    if row:
        print(json.dumps(measured(row)))
        return
    results = {"permutations": PERMUTATIONS, "dimension": DIMENSION, "rows": {}}
    for name in tqdm(ROWS, unit="test"):
        command = [sys.executable, "-m", "benchmarks.tests.large", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results["rows"][name] = json.loads(done.stdout.splitlines()[-1])
        experiment.save("large", results)


if __name__ == "__main__":
    experiment.start(main, double=False)
