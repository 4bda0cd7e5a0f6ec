r"""The moment form of the filter: steps that do not see the training size, batches, and fitting a million pairs.

    python -m benchmarks.moments [0 1 2: only these parts]

1. Time of a step at n = 10^3 to 10^6 training triples of the rotation dynamics (b), with 100 landmarks of both variables.
2. Against the dense NumPy/SciPy filter at n = 1000 (as in `filter_speed`): one sequence, batches of 64 and 256.
3. Fitting 10^6 pairs with 200 landmarks: rate as a share of the machine's own matrix-product rate, and peak memory.
"""

import pathlib
import re
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
SIZES, RANK, STEPS, BATCHES, SEQUENCES = (1_000, 10_000, 100_000, 1_000_000), 100, 200, (64, 256), 4
FEW = 40  # steps at which a batch is timed
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


def step_against_size() -> dict[str, dict[str, float]]:
    """Milliseconds of a step and seconds of fitting, for each training size; steps are timed in turn, the least of five medians."""
    states, observations = simulate("b", SIZES[-1] + 1, np.random.default_rng(0))
    sequence = jnp.asarray(simulate("b", STEPS, np.random.default_rng(1))[1])
    filters, seconds = {}, {}
    for n in SIZES:
        start = time.perf_counter()
        filters[n] = jax.block_until_ready(fit(states[: n + 1], observations[:n], cells=True))
        seconds[n] = time.perf_counter() - start
    rounds = [{n: reporting.milliseconds(lambda f=f: run(f, sequence)) for n, f in filters.items()} for _ in range(5)]
    return {f"n = {n}": {"ms per step": min(r[n] for r in rounds) / STEPS, "seconds to fit": seconds[n]} for n in SIZES}


def against_scipy() -> dict[str, dict[str, float]]:
    """The dense peer and ours at n = 1000: milliseconds per step and sequence, and mean squared errors."""
    states, observations = simulate("b", 1001, np.random.default_rng(0))
    tests = [simulate("b", STEPS, np.random.default_rng(1 + b)) for b in range(max(BATCHES))]
    truth, seen = (np.stack([t[i] for t in tests]) for i in (0, 1))
    few, scale = 5, STEPS
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
                parts = o[:batch, :FEW]
                ms = reporting.milliseconds(lambda f=filt, o=parts: batched(f, o), 3)
                times[f"batch of {batch}"] = ms / FEW / batch
            for size, value in times.items():
                row = {"ms": value, "times faster": peer / value, "mean squared error": mse}
                results[f"moments, {kind}, {name}, {size}"] = row
    return results


def peak_megabytes() -> float:
    """Peak memory of this process; `getrusage` would count that of the parent it was forked from."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) / 1024  # pyright: ignore[reportOptionalMemberAccess]


def fit_a_million() -> None:
    """Runs alone in a process, so that the peak memory is its own; prints seconds, flops and megabytes."""
    key = jax.random.key(0)
    x, y, following = (
        np.asarray(jax.random.normal(k, (FIT_PAIRS, DIMENSION), jnp.float32)) for k in jax.random.split(key, 3)
    )
    before = peak_megabytes()
    kernel = kbr.Gaussian(jnp.float32(3.0))
    landmarks = [kbr.given_landmarks(jnp.asarray(a[:FIT_RANK])) for a in (x, y)]
    maps = kbr.moment_maps(kernel, kernel, *landmarks, embedding=False, shift=True)
    collect = kbr.collect_moments
    small = jax.block_until_ready(collect(maps, x[:20_000], y[:20_000], following[:20_000]))
    start = time.perf_counter()
    size = 20_000
    parts = (slice(s, s + size) for s in range(0, FIT_PAIRS, size))
    jax.block_until_ready(kbr.collect_chunks(maps, ((x[p], y[p], following[p]) for p in parts)))
    seconds = time.perf_counter() - start
    k, q, e = FIT_RANK, FIT_RANK, DIMENSION + 1
    flops = 2 * FIT_PAIRS * (k * q * (q + 1) // 2 + k * (q + 1) * (k + e) + 2 * k * k + 3 * k * k)
    del small
    a = jax.random.normal(key, (4096, 4096), jnp.float32)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision="highest"))
    rate = 2 * 4096**3 / (reporting.milliseconds(lambda: product(a)) / 1e3)
    peak = peak_megabytes()
    print(seconds, flops, flops / seconds / rate, rate, peak, before)


def alone(function: str) -> list[float]:
    """The numbers that a function of this module prints in a process of its own."""
    code = (
        f"import jax; jax.config.update('jax_enable_x64', True); from benchmarks import moments; moments.{function}()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return [float(number) for number in done.stdout.split()]


def million() -> dict[str, float]:
    names = ("seconds", "flops", "share of the matrix-product rate", "matrix-product rate, FLOP/s")
    return dict(zip((*names, "peak memory, MB", "of which the data, MB"), alone("fit_a_million"), strict=True))


PARTS = {
    "step against training size": step_against_size,
    "against scipy": against_scipy,
    "fit of 10^6 pairs, rank 200": million,
}


def main() -> None:
    """All parts, or those whose numbers are given; the others keep their last results."""
    jax.config.update("jax_enable_x64", True)
    results = reporting.previous("moments")
    wanted = [list(PARTS)[int(number)] for number in sys.argv[1:]] or list(PARTS)
    for name in wanted:
        results[name] = PARTS[name]()
        print(name)
        for row, value in results[name].items():
            print("   ", row, value)
        print(reporting.save("moments", COMMAND, {name: results[name] for name in PARTS if name in results}))


if __name__ == "__main__":
    main()
