r"""The moment form of the filter: steps that do not see the training size, batches, and fitting a million pairs.

    python -m benchmarks.moments

1. Time of a step at n = 10^3 to 10^6 training triples of the rotation dynamics (b), with 100 landmarks of both variables.
2. Against the dense NumPy/SciPy filter at n = 1000 (as in `filter_speed`): one sequence, batches of 64 and 256.
3. Fitting 10^6 pairs with 200 landmarks: rate as a share of the machine's own matrix-product rate, and peak memory.
"""

import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from . import filter_speed, reporting
from .filter_speed import DELTA, EPSILON, OBSERVATION_BANDWIDTH, STATE_BANDWIDTH
from .rotation_references import simulate

COMMAND = "python -m benchmarks.moments"
SIZES, RANK, STEPS, BATCHES, SEQUENCES = (1_000, 10_000, 100_000, 1_000_000), 100, 200, (64, 256), 8
FIT_PAIRS, FIT_RANK, DIMENSION = 1_000_000, 200, 5


def fit(states, observations, cells: bool):
    """A filter by streaming chunks of the sequence; landmarks and cells from its first 1000 steps."""
    ks, ko = kbr.Gaussian(STATE_BANDWIDTH), kbr.Gaussian(OBSERVATION_BANDWIDTH)
    landmarks = kbr.greedy_landmarks(ks, states[:1000], rank=RANK)
    maps = kbr.moment_maps(
        ks,
        ko,
        landmarks,
        kbr.greedy_landmarks(ko, observations[:1000], rank=RANK),
        cells=kbr.soft_cells(ks, landmarks) if cells else None,
        embedding=False,
        shift=True,
    )
    n, size = len(states) - 1, 10_000
    parts = (slice(start, min(start + size, n)) for start in range(0, n, size))
    moments = kbr.collect_chunks(maps, ((states[p], observations[p], states[1:][p]) for p in parts))
    return kbr.MomentFilter.from_moments(moments, regularizer=EPSILON, posterior_regularizer=DELTA)


run = jax.jit(lambda f, o: f.expectation(kbr.filter(f, o)))
batched = jax.jit(jax.vmap(lambda f, o: f.expectation(kbr.filter(f, o)), in_axes=(None, 0)))


def step_against_size(states, observations, sequence) -> dict[str, dict[str, float]]:
    """Milliseconds of a step and seconds of fitting, for each training size; the smallest of several medians."""
    results = {}
    for n in SIZES:
        start = time.perf_counter()
        filt = jax.block_until_ready(fit(states[: n + 1], observations[:n], cells=True))
        seconds = time.perf_counter() - start
        step = min(reporting.milliseconds(lambda filt=filt: run(filt, sequence)) for _ in range(3)) / STEPS
        results[f"n = {n}"] = {"ms per step": step, "seconds to fit": seconds}
    return results


def against_scipy(states, observations, truth, seen) -> dict[str, dict[str, float]]:
    """The dense peer and ours at n = 1000: milliseconds per step and sequence, and mean squared errors."""
    few, scale = 10, STEPS
    peer = reporting.milliseconds(lambda: filter_speed.scipy_filter(states, observations, seen[0, :few]), 3) / few
    dense = filter_speed.fit(states, observations, None)
    decode = jax.jit(lambda f, o: kbr.mean(f.belief(kbr.filter(f, o).weights)))

    def error(estimates):
        return float(np.mean(np.sum((np.asarray(estimates) - truth[:SEQUENCES]) ** 2, -1)))

    reference = error([decode(dense, o) for o in seen[:SEQUENCES]])
    results = {"scipy, dense": {"ms": peer, "times faster": 1.0, "mean squared error": reference}}
    for name, dtype in (("float64", np.float64), ("float32", np.float32)):
        for kind in ("cells", "plain"):
            filt = fit(states.astype(dtype), observations.astype(dtype), kind == "cells")
            o = jnp.asarray(seen, dtype)
            mse = error(batched(filt, o[:SEQUENCES]))
            times = {"one": reporting.milliseconds(lambda f=filt, o=o: run(f, o[0])) / scale}
            for batch in BATCHES:
                parts = o[:batch]
                times[f"batch of {batch}"] = (
                    reporting.milliseconds(lambda f=filt, o=parts: batched(f, o), 3) / scale / batch
                )
            for size, value in times.items():
                row = {"ms": value, "times faster": peer / value, "mean squared error": mse}
                results[f"moments, {kind}, {name}, {size}"] = row
    return results


def fit_a_million() -> None:
    """Runs alone in a process, so that the peak memory is its own; prints seconds, flops and megabytes."""
    key = jax.random.key(0)
    x, y, following = (
        np.asarray(jax.random.normal(k, (FIT_PAIRS, DIMENSION), jnp.float32)) for k in jax.random.split(key, 3)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kernel = kbr.Gaussian(jnp.float32(3.0))
    landmarks = [kbr.given_landmarks(jnp.asarray(a[:FIT_RANK])) for a in (x, y)]
    maps = kbr.moment_maps(kernel, kernel, *landmarks, embedding=False, shift=True)
    collect = kbr.collect_moments
    small = jax.block_until_ready(collect(maps, x[:20_000], y[:20_000], following[:20_000]))
    start = time.perf_counter()
    for _ in range(1):
        size = 100_000
        parts = (slice(s, s + size) for s in range(0, FIT_PAIRS, size))
        moments = kbr.collect_chunks(maps, ((x[p], y[p], following[p]) for p in parts))
        jax.block_until_ready(moments)
    seconds = time.perf_counter() - start
    k, q, e = FIT_RANK, FIT_RANK, DIMENSION + 1
    flops = 2 * FIT_PAIRS * (k * q * (q + 1) // 2 + k * (q + 1) * (k + e) + 2 * k * k + 3 * k * k)
    del small
    a = jax.random.normal(key, (4096, 4096), jnp.float32)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision="highest"))
    rate = 2 * 4096**3 / (reporting.milliseconds(lambda: product(a)) / 1e3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(seconds, flops, flops / seconds / rate, rate, peak, before)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    states, observations = simulate("b", SIZES[-1] + 1, np.random.default_rng(0))
    tests = [simulate("b", STEPS, np.random.default_rng(1 + b)) for b in range(max(BATCHES))]
    truth, seen = (np.stack([t[i][:STEPS] for t in tests]) for i in (0, 1))
    sizes = step_against_size(states, observations, jnp.asarray(seen[0]))
    compared = against_scipy(states[:1001], observations[:1000], truth, seen)
    alone = subprocess.run(
        [sys.executable, "-c", "from benchmarks import moments; moments.fit_a_million()"],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, flops, share, rate, peak, data = map(float, alone.stdout.split())
    million = {
        "seconds": seconds,
        "flops": flops,
        "share of the matrix-product rate": share,
        "matrix-product rate, GFLOP/s": rate / 1e9,
        "peak memory, MB": peak,
        "of which the data and the interpreter, MB": data,
    }
    rows = [[n, *(f"{value:.3f}" for value in row.values())] for n, row in sizes.items()]
    print(reporting.table(["training size", "ms per step", "s to fit"], rows))
    rows = [
        [name, f"{r['ms']:.4f}", f"{r['times faster']:.0f}", f"{r['mean squared error']:.4f}"]
        for name, r in compared.items()
    ]
    print(reporting.table(["step at n = 1000, per sequence", "ms", "times faster", "MSE"], rows))
    print(million)
    results = {"step against training size": sizes, "against scipy": compared, "fit of 10^6 pairs, rank 200": million}
    print(reporting.save("moments", COMMAND, results))


if __name__ == "__main__":
    main()
