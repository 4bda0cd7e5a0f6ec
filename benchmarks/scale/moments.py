r"""The moment form of the filter: steps that do not see the training size, batches, and fitting a
million pairs.

    python -m benchmarks.scale.moments [0 1 2: only these parts]

1. Time of a step at n = 10^3 to 10^6 training triples of the rotation dynamics (b), with 100
   landmarks of both variables.
2. Against the dense NumPy/SciPy filter at n = 1000 (as in `filter_speed`): one sequence, batches of
   64 and 256, and the batch of 256 divided over all devices. Ours run in a process with the
   settings of SCALING.md for a CPU: one thread for each small solve, and each core a device. The
   peer keeps all its threads.
3. Fitting 10^6 pairs with 200 landmarks: rate as a share of the machine's own matrix-product rate,
   and peak memory.
"""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import kbr_jax as kbr

from .. import experiment
from ..models import moment_filter
from ..rotation.references import simulate
from . import filter_speed
from .filter_speed import DELTA, EPSILON, OBSERVATION_BANDWIDTH, STATE_BANDWIDTH

SIZES, RANK, STEPS, BATCHES, SEQUENCES = (1_000, 10_000, 100_000, 1_000_000), 100, 200, (64, 256), 4
FEW = 20  # steps at which a batch is timed
LABELS = {"pairs": "rule (b)", "importance": "importance-weighted"}
CPU = {
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}
FIT_PAIRS, FIT_RANK, DIMENSION = 1_000_000, 200, 5


def fit(states, observations, cells: bool, estimator: Any = "pairs"):
    """A filter by streaming chunks of the sequence.

    Landmarks and cells from its first 1000 steps.
    """
    ks, ko = kbr.Gaussian(STATE_BANDWIDTH), kbr.Gaussian(OBSERVATION_BANDWIDTH)
    landmarks = kbr.greedy_landmarks(ks, states[:1000], rank=RANK)
    maps = kbr.moments.moment_maps(
        ks,
        ko,
        landmarks,
        kbr.greedy_landmarks(ko, observations[:1000], rank=RANK),
        cells=kbr.soft_partition(ks, landmarks) if cells else None,
        embedding=False,
        shift=True,
    )
    n, size = len(states) - 1, 10_000
    parts = (slice(start, min(start + size, n)) for start in range(0, n, size))
    chunks = ((states[p], observations[p], states[1:][p]) for p in parts)
    return moment_filter(maps, chunks, epsilon=EPSILON, delta=DELTA, estimator=estimator)


run = jax.jit(lambda f, o: kbr.state_mean(f, kbr.run_filter(f, o)))
batched = jax.jit(jax.vmap(lambda f, o: kbr.state_mean(f, kbr.run_filter(f, o)), in_axes=(None, 0)))


def step_against_size() -> dict[str, dict[str, float]]:
    """Milliseconds of a step and seconds of fitting, for each training size.

    Steps are timed in turn, the least of 15 medians.
    """
    states, observations = simulate("b", SIZES[-1] + 1, np.random.default_rng(0))
    sequence = jnp.asarray(simulate("b", STEPS, np.random.default_rng(1))[1])
    filters, seconds = {}, {}
    for n in SIZES:
        start = time.perf_counter()
        filters[n] = jax.block_until_ready(fit(states[: n + 1], observations[:n], cells=True))
        seconds[n] = time.perf_counter() - start
    rounds = [
        {n: experiment.milliseconds(lambda f=f: run(f, sequence)) for n, f in filters.items()}
        for _ in range(15)
    ]
    return {
        f"n = {n}": {"ms per step": min(r[n] for r in rounds) / STEPS, "seconds to fit": seconds[n]}
        for n in SIZES
    }


def against_scipy() -> dict[str, dict[str, float]]:
    """The dense peer and ours at n = 1000.

    Milliseconds per step and sequence, and mean squared errors.
    """
    states, observations = simulate("b", 1001, np.random.default_rng(0))
    truth, seen = test_sequences()
    few = 5
    peer = (
        experiment.milliseconds(
            lambda: filter_speed.scipy_filter(states, observations, seen[0, :few]), 3
        )
        / few
    )
    dense = filter_speed.fit(states, observations, None)
    decode = jax.jit(lambda f, o: kbr.state_mean(f, kbr.run_filter(f, o)))
    reference = squared_error([decode(dense, o) for o in seen[:SEQUENCES]], truth)
    rows = {"scipy, dense": {"ms": peer, "mean squared error": reference}} | alone("ours", CPU)
    return {name: row | {"times faster": peer / row["ms"]} for name, row in rows.items()}


def test_sequences() -> tuple[np.ndarray, np.ndarray]:
    """States and observations of as many sequences as the largest batch has."""
    tests = [simulate("b", STEPS, np.random.default_rng(1 + b)) for b in range(max(BATCHES))]
    return np.stack([t[0] for t in tests]), np.stack([t[1] for t in tests])


def squared_error(estimates, truth) -> float:
    return float(np.mean(np.sum((np.asarray(estimates) - truth[:SEQUENCES]) ** 2, -1)))


def ours() -> dict[str, dict[str, float]]:
    """Milliseconds per step and sequence of every kind of filter and size of batch, timed in turn,
    and mean squared errors.
    """
    states, observations = simulate("b", 1001, np.random.default_rng(0))
    truth, seen = test_sequences()
    devices = jax.device_count()
    mesh, rows = jax.make_mesh((devices,), ("data",)), PartitionSpec("data")
    divided = jax.jit(
        jax.shard_map(
            batched, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False
        )
    )
    results = {}
    for name, kind, estimator in itertools.product(
        ("float64", "float32"), ("cells", "plain"), ("pairs", "importance")
    ):
        if (kind, estimator) == ("plain", "importance"):
            continue
        filt = fit(states.astype(name), observations.astype(name), kind == "cells", estimator)
        o = jnp.asarray(seen, name)
        mse = squared_error(batched(filt, o[:SEQUENCES]), truth)
        calls = {"one": (lambda f=filt, o=o: run(f, o[0]), STEPS)}
        for batch in BATCHES:
            calls[f"batch of {batch}"] = (
                lambda f=filt, o=o[:batch, :FEW]: batched(f, o),
                FEW * batch,
            )
        filt = jax.device_put(filt, NamedSharding(mesh, PartitionSpec()))
        o = jax.device_put(o[:, :FEW], NamedSharding(mesh, rows))
        calls[f"batch of {len(o)} on {devices} devices"] = (
            lambda f=filt, o=o: divided(f, o),
            FEW * len(o),
        )
        rounds = [
            {size: experiment.milliseconds(f, 1) / count for size, (f, count) in calls.items()}
            for _ in range(3)
        ]
        for size in calls:
            row = {"ms": float(np.median([r[size] for r in rounds])), "mean squared error": mse}
            results[f"moments, {kind}, {LABELS[estimator]}, {name}, {size}"] = row
    return results


def peak_megabytes() -> float:
    """Peak memory of this process.

    `getrusage` would count that of the parent it was forked from.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) / 1024  # pyright: ignore[reportOptionalMemberAccess]


def fit_a_million() -> dict[str, float]:
    """Seconds, flops and megabytes; in a process of its own, so that the peak memory is its own."""
    key = jax.random.key(0)
    x, y, following = (
        np.asarray(jax.random.normal(k, (FIT_PAIRS, DIMENSION), jnp.float32))
        for k in jax.random.split(key, 3)
    )
    before = peak_megabytes()
    kernel = kbr.Gaussian(jnp.float32(3.0))
    landmarks = [kbr.Landmarks(jnp.asarray(a[:FIT_RANK])) for a in (x, y)]
    maps = kbr.moments.moment_maps(kernel, kernel, *landmarks, embedding=False, shift=True)
    collect = kbr.moments.collect_moments
    small = jax.block_until_ready(collect(maps, x[:20_000], y[:20_000], following[:20_000]))
    start = time.perf_counter()
    size = 20_000
    parts = (slice(s, s + size) for s in range(0, FIT_PAIRS, size))
    jax.block_until_ready(collect(maps, ((x[p], y[p], following[p]) for p in parts)))
    seconds = time.perf_counter() - start
    k, q, e = FIT_RANK, FIT_RANK, DIMENSION + 1
    flops = 2 * FIT_PAIRS * (k * q * (q + 1) // 2 + k * (q + 1) * (k + e) + 2 * k * k + 3 * k * k)
    del small
    a = jax.random.normal(key, (4096, 4096), jnp.float32)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision="highest"))
    peak = peak_megabytes()
    rate = 2 * 4096**3 / (experiment.milliseconds(lambda: product(a)) / 1e3)
    return {
        "seconds": seconds,
        "flops": flops,
        "share of the matrix-product rate": flops / seconds / rate,
        "matrix-product rate, FLOP/s": rate,
        "peak memory, MB": peak,
        "before the fit, MB": before,
    }


def alone(function: str, environment: dict[str, str] | None = None) -> Any:
    """What a function of this module returns in a process of its own."""
    code = (
        "import json, jax; jax.config.update('jax_enable_x64', True); "
        "from benchmarks.scale import moments; "
        f"print(json.dumps(moments.{function}()))"
    )
    environment = os.environ | (environment or {})
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return json.loads(done.stdout)


PARTS = {
    "step against training size": step_against_size,
    "against scipy": against_scipy,
    "fit of 10^6 pairs, rank 200": lambda: alone("fit_a_million"),
}


def main(*numbers: int) -> None:
    """All parts, or those whose numbers are given; the others keep their last results."""
    results = experiment.previous("moments")
    wanted = [list(PARTS)[number] for number in numbers] or list(PARTS)
    for name in wanted:
        results[name] = PARTS[name]()
        print(name)
        for row, value in results[name].items():
            print("   ", row, value)
        print(
            experiment.save("moments", {name: results[name] for name in PARTS if name in results})
        )


if __name__ == "__main__":
    experiment.start(main)
