"""Seconds until the first result in a new process, and how many programs are compiled for it.

    python -m benchmarks.scale.first_call

Each row is a process of its own. "Again" is one that finds all programs in the compilation cache
of the process before.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

SAMPLE, STEPS, REPEATS = 500, 50, 3


def child(rank: int | None, double: bool) -> dict[str, float]:
    start = time.perf_counter()
    import jax
    import numpy as np

    import kbr_jax as kbr

    imported = time.perf_counter() - start
    jax.config.update("jax_enable_x64", double)
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiled.append(event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    states, observations, tests = (
        np.random.default_rng(0).normal(size=(count, 2)).astype(float if double else np.float32)
        for count in (SAMPLE + 1, SAMPLE, STEPS)
    )

    def use():
        kernel = kbr.Gaussian(1.0)
        filt = kbr.fit_filter(
            kernel,
            kernel,
            states,
            observations,
            regularizer=1e-3,
            posterior_regularizer=1e-4,
            landmarks_states=rank,
            landmarks_observations=rank,
        )
        return kbr.state_mean(filt, kbr.run_filter(filt, tests))

    times = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(use())
        times.append(time.perf_counter() - start)
    return {"import": imported, "first": times[0], "second": times[1], "programs": sum(compiled)}


def run(rank: int | None, double: bool, cache: str) -> dict[str, float]:
    keep = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.first_call", str(rank or 0), str(int(double))],
        env=os.environ | (keep if cache else {}),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def middle(rows: list[dict[str, float]]) -> dict[str, float]:
    """The run whose first call took the median time."""
    return sorted(rows, key=lambda row: row["first"])[len(rows) // 2]


def main() -> None:
    results = {}
    for rank in (None, 100):
        for double in (False, True):
            with tempfile.TemporaryDirectory() as cache:
                run(rank, double, cache)
                again = middle([run(rank, double, cache) for _ in range(REPEATS)])
            found = middle([run(rank, double, "") for _ in range(REPEATS)])
            name = f"{f'rank {rank}' if rank else 'exact'}, float{64 if double else 32}"
            results[name] = found | {"first, again": again["first"]}
    header = list(next(iter(results.values())))
    rows = [[name, *(f"{row[key]:.2f}" for key in header)] for name, row in results.items()]
    print(experiment.table(["seconds", *header], rows))
    experiment.save("first_call", results)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(child(int(sys.argv[1]) or None, bool(int(sys.argv[2])))))
    else:
        from .. import experiment  # not above: it imports jax, and the import is measured

        experiment.start(main, double=False)
