"""Weak and strong scaling over devices and processes.

    python -m benchmarks.scale.multihost            # on this machine, writes the results
    python -m benchmarks.scale.multihost cluster    # in every process of a job on a cluster

The first starts processes that find each other by `jax.distributed`, as hosts of a cluster do. Each
process has one core, and its devices are virtual. The second measures the devices of the job, and
its first process prints the times. Run it in jobs of several sizes.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment

#: (processes, devices of each). The first is the base of all ratios.
LAYOUTS = ((1, 1), (2, 1), (1, 8), (2, 4))
REPEATS = 3


def kernel() -> kbr.Gaussian:
    # No constant: an array before `jax.distributed.initialize` would be too early.
    return kbr.Gaussian(1.0)


def sequences(mesh, scale: int) -> Callable:
    x = points(1001, 2)
    filt = kbr.fit_filter(
        kernel(),
        kernel(),
        x[:-1],
        x[1:],
        regularizer=1e-3,
        posterior_regularizer=1e-4,
        landmarks_states=100,
        landmarks_observations=100,
    )
    filt, batch = on_all(mesh, (filt, points(64 * scale * 20, 2).reshape(-1, 20, 2)))
    return lambda: kbr.devices.over_devices(run_all, mesh, filt, batch)


def run_all(filt, batch):
    return jax.vmap(lambda sequence: kbr.run_filter(filt, sequence).weights)(batch)


def on_all(mesh, tree):
    """Arrays on all devices, before the clock starts: a call with others compares them first."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def rows(mesh, scale: int) -> Callable:
    x, y, v = on_all(mesh, (points(6_000 * scale, 10), points(6_000, 10), points(6_000, 4)))
    return lambda: kbr.kernels.gram_matvec(kernel(), x, y, v, mesh=mesh)


def permutations(mesh, scale: int) -> Callable:
    x, y, key = *on_all(mesh, (points(500, 2), points(500, 2))), jax.random.key(0)
    test = kbr.hypotheses.two_sample_test
    draws = 2_000 * scale
    return lambda: test(kernel(), x, y, key=key, num_permutations=draws, mesh=mesh).p_value


def landmarks(mesh, scale: int) -> Callable:
    x = on_all(mesh, points(20_000 * scale, 10))
    return lambda: kbr.greedy_landmarks(kernel(), x, rank=100, mesh=mesh).points


def moments(mesh, scale: int) -> Callable:
    x = points(50_000 * scale, 10)
    chosen = kbr.uniform_landmarks(x, rank=100, key=jax.random.key(0))
    maps, x = on_all(mesh, (kbr.moments.moment_maps(kernel(), kernel(), chosen, chosen), x))
    return lambda: kbr.moments.collect_moments(maps, x, x, mesh=mesh)


WORK = {
    "64 sequences of 20 steps, 100 landmarks": sequences,
    "6000 rows of a Gram matrix": rows,
    "2000 permutations of 1000 points": permutations,
    "100 landmarks among 20 000 points": landmarks,
    "moments of 50 000 pairs": moments,
}


def points(count: int, dimension: int) -> jax.Array:
    values = np.random.default_rng(0).normal(size=(count, dimension))
    return jnp.asarray(values, jnp.float32)


def measure(scales: tuple[int, ...]) -> Iterator[tuple[str, int, float]]:
    """Milliseconds of each piece of work, as it is and `scale` times as large."""
    mesh = jax.make_mesh((jax.device_count(),), ("cases",), axis_types=(AxisType.Auto,))
    for name, make in WORK.items():
        for scale in scales:
            yield name, scale, experiment.milliseconds(make(mesh, scale), REPEATS)


def child(process: int, processes: int, devices: int, port: int, cores: list[int]):
    """One process of a layout, on one core."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    numbers = map(str, (process, processes, port, cores[process]))
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale.multihost", "child", *numbers],
        env=environment,
        stdout=subprocess.PIPE if process == 0 else subprocess.DEVNULL,
        text=True,
    )


def join(process: int, processes: int, port: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    found = list(measure((1, processes) if processes > 1 else (1,)))
    if process == 0:
        print(json.dumps(found))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def local() -> None:
    cores = sorted(os.sched_getaffinity(0))
    results = {name: {} for name in WORK}
    for processes, devices in tqdm(LAYOUTS, unit="layout"):
        if processes > len(cores):
            raise ValueError(f"{processes} processes need as many cores; there are {len(cores)}.")
        port = free_port()
        run = [child(p, processes, devices, port, cores) for p in range(processes)]
        out = run[0].communicate()[0]
        if any(process.wait() for process in run):
            raise RuntimeError(f"{processes} processes of {devices} devices did not finish.")
        for name, scale, time in json.loads(out.splitlines()[-1]):
            label = f"{processes} x {devices}" + (", weak" if scale > 1 else "")
            results[name][label] = time
    experiment.save("multihost", results)
    header = list(results[next(iter(WORK))])
    body = [[name, *(f"{times[key]:.0f}" for key in header)] for name, times in results.items()]
    print(experiment.table(["ms; processes x devices", *header], body))


def cluster() -> None:
    jax.distributed.initialize()
    count = jax.device_count()
    found = [[*row[:2], f"{row[2]:.1f}"] for row in measure((1, count) if count > 1 else (1,))]
    if jax.process_index() == 0:
        print(f"{count} devices of {jax.process_count()} processes")
        print(experiment.table(["work", "times as large", "ms"], found))


def main(word: str = "", *numbers: int) -> None:
    if word == "child":
        join(*numbers)
    elif word == "cluster":
        cluster()
    else:
        local()


if __name__ == "__main__":
    experiment.start(main, double=False)
