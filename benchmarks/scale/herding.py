"""Herding, and inner products of sample sets, against coreax and one blocked product with a Gram
matrix.

    python -m benchmarks.scale.herding [candidates]

1000 points from 10^5 candidates in 10 dimensions, Gaussian kernel, float32: the candidates are the
sample too, so both libraries first compute its mean embedding at every candidate. coreax (extra
`benchmarks`) gets the block size that is fastest for it here.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment

CANDIDATES, DIMENSIONS, POINTS, BANDWIDTH = 100_000, 10, 1000, 3.0
SETS, SET_SIZE = 100, 1000
BLOCKS = (1000, 4000)


def squared_distance(
    kernel: kbr.Gaussian, chosen: jax.Array, mean: jax.Array, index: np.ndarray
) -> float:
    """|mu - mu_chosen|^2 less the norm of mu, the same for all."""
    return float(np.mean(np.asarray(kbr.gram(kernel, chosen), np.float64))) - 2 * float(
        np.mean(np.asarray(mean, np.float64)[index])
    )


def coreax_herding(x: jax.Array, unique: bool, block: int) -> Callable[[], np.ndarray]:
    import equinox as eqx
    from coreax import Data
    from coreax.kernels import SquaredExponentialKernel
    from coreax.solvers import KernelHerding

    solver: Any = KernelHerding(
        coreset_size=POINTS,
        kernel=SquaredExponentialKernel(length_scale=BANDWIDTH),  # pyright: ignore[reportArgumentType]
        unique=unique,
        block_size=block,
    )
    reduce = eqx.filter_jit(solver.reduce)
    data = Data(x)
    return lambda: np.asarray(reduce(data)[0].indices.data).reshape(-1)


def herding(count: int) -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(0), (count, DIMENSIONS)) * jnp.linspace(0.5, 2, DIMENSIONS)
    kernel = kbr.Gaussian(jnp.asarray(BANDWIDTH, jnp.float32))
    mean = kbr.kernels.gram_matvec(kernel, x, x, jnp.full(count, 1 / count))
    embedding = kbr.embed(kernel, x)
    methods: dict[str, Callable[[], Any]] = {
        "kbr_jax": lambda: kbr.herd(embedding, num_points=POINTS).index,
        "the mean embedding alone, kbr_jax": lambda: kbr.kernels.gram_matvec(
            kernel, x, x, jnp.full(count, 1 / count)
        ),
    }
    try:
        times = {
            block: experiment.milliseconds(coreax_herding(x[:10_000], False, block), 1)
            for block in BLOCKS
        }
        print("coreax, block sizes at n = 10^4", times, flush=True)
        methods["coreax"] = coreax_herding(x, False, min(times, key=lambda block: times[block]))
    except ImportError:
        print("coreax is not installed: not compared")
    found = {}
    for name, method in methods.items():
        # A call takes long enough to count its compilation too, for everybody.
        start = time.perf_counter()
        index = np.asarray(jax.block_until_ready(method()))
        found[name] = {"seconds": time.perf_counter() - start}
        if "alone" not in name:
            found[name]["squared distance less |mu|^2"] = squared_distance(
                kernel, x[index], mean, index
            )
        print(name, found[name], flush=True)
    return found


def set_products() -> dict[str, float]:
    """Gram matrix of 100 sets of 1000 points, beside one blocked product with the Gram matrix of
    all 10^5.
    """
    points = jax.random.normal(jax.random.key(1), (SETS, SET_SIZE, DIMENSIONS))
    kernel = kbr.Gaussian(jnp.asarray(BANDWIDTH, jnp.float32))
    flat, ones = points.reshape(-1, DIMENSIONS), jnp.full(SETS * SET_SIZE, 1 / SET_SIZE)
    sets = kbr.dynamics.sample_sequence(points)
    times = {
        "Gram matrix of the sets": experiment.milliseconds(
            lambda: kbr.dynamics.embedding_gram(kernel, sets), 1
        )
        / 1e3,
        "between two sequences": experiment.milliseconds(
            lambda: kbr.dynamics.embedding_gram(kernel, sets, sets), 1
        )
        / 1e3,
        "one blocked product": experiment.milliseconds(
            lambda: kbr.kernels.gram_matvec(kernel, flat, flat, ones), 1
        )
        / 1e3,
    }
    print(times, flush=True)
    return times


def main(count: int = CANDIDATES) -> None:
    results = {
        "candidates": count,
        "seconds, sets of points": set_products(),
        "herding": herding(count),
    }
    experiment.save("herding_speed", results)


if __name__ == "__main__":
    experiment.start(main, double=False)
