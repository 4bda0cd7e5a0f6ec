"""What a step of a filter costs on an H100, from programs compiled for it ahead of time.

    pip install "jax[cuda13]"
    python -m benchmarks.scale.accelerator

No such device is needed: `h100.txtpb` describes it to the compiler. Counted are the kernels in the
loop of `run_filter`, and the bytes that the kernels of one `filter_step` read and write. The times
follow from these counts, and are not measured: all launches one by one, all bytes from the memory
of the device and none from a cache, the longer of the two.
"""

import collections
import pathlib
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment

SAMPLE, RANK, STEPS = 1000, 100, 50
BATCHES = (1, 64, 1024, 16384)
#: Seconds to launch a kernel without a CUDA graph, as commonly given (2 to 3 microseconds), and
#: bytes a second of the memory, as in the description of the device.
LAUNCH, BANDWIDTH = 2.5e-6, 3.352e12
#: Instructions that launch nothing. A condition counts as one kernel, beside those of its branch
#: for False: the other one runs only where a factorization would fail.
FREE = {"bitcast", "tuple", "get-tuple-element", "parameter", "constant", "copy-done", "async-done"}


def walk(steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """States that go round a circle at an uneven speed, and noisy observations of them."""
    rng = np.random.default_rng(seed)
    angles = np.cumsum(0.3 + 0.1 * rng.normal(size=steps))
    states = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return states, states + 0.2 * rng.normal(size=states.shape)


def fit(form: str, estimator: Any, dtype):
    path, observations = walk(SAMPLE + 1, 0)
    states, observations = jnp.asarray(path, dtype), jnp.asarray(observations[:-1], dtype)
    kernel = kbr.Gaussian(0.5)
    of_states = kbr.uniform_landmarks(states[:-1], rank=RANK, key=jax.random.key(0))
    of_observations = kbr.uniform_landmarks(observations, rank=RANK, key=jax.random.key(1))
    if form == "weights":
        return kbr.fit_filter(
            kernel,
            kernel,
            states,
            observations,
            regularizer=1e-3,
            posterior_regularizer=1e-4,
            estimator=estimator,
            landmarks_states=of_states,
            landmarks_observations=of_observations,
        )
    cells = kbr.soft_partition(kernel, of_states)
    maps = kbr.moments.moment_maps(
        kernel, kernel, of_states, of_observations, cells=cells, shift=True
    )
    moments = kbr.moments.collect_moments(maps, states[:-1], observations, states[1:])
    model = kbr.moments.fit_conditional(moments, regularizer=1e-3)
    return kbr.KernelBayesFilter(model, None, shift=True, regularizer=1e-4, estimator=estimator)


def compiled(function, device, *arguments):
    there = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    jitted = jax.jit(function, in_shardings=there, out_shardings=there)
    # Without a device nothing can be timed: no choice among products of matrices.
    return jitted.lower(*shapes).compile({"xla_gpu_enable_triton_gemm": False})


def launched(text: str, computation: str) -> list[tuple[str, float]]:
    """What a computation launches: the kind of each instruction, and the bytes it moves."""
    lines = re.search(
        rf"^(?:ENTRY )?%?{re.escape(computation)} \([^\n]*\{{\n(.*?)^\}}", text, re.M | re.S
    )
    assert lines is not None
    sizes, found = {}, []
    for line in lines.group(1).splitlines():
        parsed = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)", line)
        if parsed is None:
            continue
        name, shape, kind, operands = parsed.groups()
        if kind in ("while", "call"):
            raise ValueError(f"What `{kind}` launches is not counted: {line}")
        sizes[name] = bytes_of(shape)
        if kind in FREE:
            continue
        if kind == "conditional":
            usual = re.search(r"(?:false_computation=|branch_computations=\{)%?([\w.\-]+)", line)
            assert usual is not None
            found += [(kind, 0.0), *launched(text, usual.group(1))]
            continue
        library = re.search(r'custom_call_target="([^"]+)"', line)
        moved = sizes[name] + sum(sizes[o] for o in re.findall(r"%([\w.\-]+)", operands))
        found.append((library.group(1) if library else kind, moved))
    return found


def bytes_of(shape: str) -> float:
    """Bytes of all arrays in a type as `(f32[64,100]{1,0}, s32[])`."""
    arrays = re.findall(r"\b(?:[a-z]+?(\d+)|pred)\w*\[([\d,]*)\]", shape)
    return sum(
        int(bits or 8) / 8 * np.prod([int(n) for n in lengths.split(",") if n], dtype=float)
        for bits, lengths in arrays
    )


def loop_body(text: str) -> str:
    """The name of the computation that the loop over the steps repeats."""
    loops = re.findall(r'body=%?([\w.\-]+)[^\n]*known_trip_count":\{"n":"(\d+)"', text)
    (body,) = [name for name, count in loops if int(count) == STEPS]
    return body


def cost(filt, count: int, device, dtype) -> dict:
    """Kernels, bytes and times of one step of `count` sequences."""
    arrays, rest = eqx.partition(filt, eqx.is_array)

    def batched(function):
        return function if count == 1 else jax.vmap(function, in_axes=(None, 0))

    def run(arrays, sequence):
        filt = eqx.combine(arrays, rest)
        return kbr.state_mean(filt, kbr.run_filter(filt, sequence))

    def step(arrays, state_and_observation):
        filt = eqx.combine(arrays, rest)
        state, output = kbr.filter_step(filt, *state_and_observation)
        return state, kbr.state_mean(filt, output)

    def shaped(leaf):
        return jax.ShapeDtypeStruct((count, *leaf.shape) if count > 1 else leaf.shape, leaf.dtype)

    state = jax.tree.map(shaped, jax.eval_shape(kbr.filtering.init_filter, filt))
    sequence, observation = (
        shaped(jax.ShapeDtypeStruct(shape, dtype)) for shape in ((STEPS, 2), (2,))
    )
    loop = compiled(batched(run), device, arrays, sequence)
    one = compiled(batched(step), device, arrays, (state, observation))
    text = str(loop.as_text())
    kinds = collections.Counter(kind for kind, _ in launched(text, loop_body(text)))
    text = str(one.as_text())
    (entry,) = re.findall(r"^ENTRY %?([\w.\-]+)", text, re.M)
    kernels, moved = sum(kinds.values()), sum(count for _, count in launched(text, entry))
    times = {"launch": 1e6 * LAUNCH * kernels, "memory": 1e6 * moved / BANDWIDTH}
    memory = one.memory_analysis()
    assert memory is not None
    return {
        "kernels": kernels,
        "library calls": {kind: n for kind, n in kinds.items() if "cu" in kind},
        "megabytes": moved / 1e6,
        "temporary memory, GB": memory.temp_size_in_bytes / 1e9,
        "microseconds": times,
        "microseconds a sequence": max(times.values()) / count,
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # finds the plugins
    target = pathlib.Path(__file__).with_name("h100.txtpb").read_text()
    topology = topologies.get_topology_desc(
        topology_name="", platform="cuda", target_config=target, topology="1x1x1"
    )
    results, rows = {}, []
    cells = [
        (f, e, d) for f in ("weights", "moments") for e in ("pairs", "importance") for d in (32, 64)
    ]
    for form, estimator, digits in tqdm(cells, unit="filter"):
        with jax.enable_x64(digits == 64):
            dtype = jnp.dtype(f"float{digits}")
            filt = fit(form, estimator, dtype)
            found = {count: cost(filt, count, topology.devices[0], dtype) for count in BATCHES}
        name = f"{form}, {estimator}, float{digits}"
        results[name] = {"kernels": found[1]["kernels"]} | {
            f"{count} at once": values for count, values in found.items()
        }
        rows.append(
            [
                name,
                found[1]["kernels"],
                *(f"{v['microseconds a sequence']:.2f}" for v in found.values()),
            ]
        )
    experiment.save("accelerator", results)
    print(experiment.table(["us a sequence and step", "kernels", *map(str, BATCHES)], rows))


if __name__ == "__main__":
    experiment.start(main, double=False)
