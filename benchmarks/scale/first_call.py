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
RANKS = {"exact": None, "rank 100": 100}
USES = ("embedding", "conditional", "two samples", "independence", "given z")


def uses(kbr, jax, draw) -> dict:
    """What is called first: a function without arguments for each name."""

    def run(rank):
        states, observations, tests = draw(SAMPLE + 1), draw(SAMPLE), draw(STEPS)
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

    def embedding():
        mu = kbr.embed(None, draw(SAMPLE))
        return kbr.mean(mu), kbr.std(mu), kbr.quantile(mu, [0.1, 0.5, 0.9])

    def conditional():
        model = kbr.fit_conditional(None, None, draw(SAMPLE), draw(SAMPLE), regularizer=1e-3)
        found = kbr.condition(model, draw(STEPS))
        return kbr.credible_interval(found, 0.9), kbr.density(found, draw(STEPS))

    def test(name, kernels, *samples):
        found = getattr(kbr.hypotheses, name)(*[None] * kernels, *samples, key=jax.random.key(0))
        return found.p_value

    x, y, z = draw(SAMPLE), draw(SAMPLE), draw(SAMPLE)
    filters = {name: lambda rank=rank: run(rank) for name, rank in RANKS.items()}
    return filters | {
        "embedding": embedding,
        "conditional": conditional,
        "two samples": lambda: test("two_sample_test", 1, x, y),
        "independence": lambda: test("independence_test", 2, x, y),
        "given z": lambda: test("conditional_independence_test", 3, x, y, z),
    }


def child(name: str, double: bool) -> dict[str, float]:
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
    rng = np.random.default_rng(0)

    def draw(count):
        return rng.normal(size=(count, 2)).astype(float if double else np.float32)

    use, times = uses(kbr, jax, draw)[name], []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(use())
        times.append(time.perf_counter() - start)
    return {"import": imported, "first": times[0], "second": times[1], "programs": sum(compiled)}


def run(name: str, double: bool, cache: str) -> dict[str, float]:
    keep = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.first_call", name, str(int(double))],
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
    cases = [(name, double) for name in RANKS for double in (False, True)]
    for name, double in cases + [(name, False) for name in USES]:
        with tempfile.TemporaryDirectory() as cache:
            run(name, double, cache)
            again = middle([run(name, double, cache) for _ in range(REPEATS)])
        found = middle([run(name, double, "") for _ in range(REPEATS)])
        results[f"{name}, float{64 if double else 32}"] = found | {"first, again": again["first"]}
    header = list(next(iter(results.values())))
    rows = [[name, *(f"{row[key]:.2f}" for key in header)] for name, row in results.items()]
    print(experiment.table(["seconds", *header], rows))
    experiment.save("first_call", results)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(child(sys.argv[1], bool(int(sys.argv[2])))))
    else:
        from .. import experiment  # not above: it imports jax, and the import is measured

        experiment.start(main, double=False)
