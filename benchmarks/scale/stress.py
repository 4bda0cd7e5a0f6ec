"""What users do, thousands of times: python -m benchmarks.scale.stress [ROUNDS [PROGRAM ...]].

A batch of LAPACK calls waits in jaxlib's thread pool. Programs with several of them waited for ever
on two cores. Each program here holds several. Run it without environment variables.
"""

import faulthandler
import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment

SIZES = (3, 8)
POINTS = 60
KERNEL = kbr.Gaussian(0.7)


def two_fits(key, x, y, z):
    first, second = (kbr.fit_conditional(KERNEL, KERNEL, x, v, regularizer=1e-3) for v in (y, z))
    return kbr.condition(first, x[:5]).weights + kbr.condition(second, x[:5]).weights


def _filter(x, y, bandwidth=0.7, regularizer=1e-3, estimator="importance"):
    kernel = kbr.Gaussian(bandwidth)
    return kbr.fit_filter(
        kernel,
        kernel,
        x,
        y,
        regularizer=regularizer,
        posterior_regularizer=1e-4,
        estimator=estimator,
        landmarks_states=20,
        landmarks_observations=20,
    )


def filters(key, x, y, z):
    return [
        kbr.run_filter(_filter(x, y, estimator=name), z[:10]).weights
        for name in ("importance", "pairs")
    ]


def tuning(key, x, y, z):
    def loss(values):
        return kbr.filter_loss(_filter(x, y, *values), z[:10], z[:10])

    return jax.grad(loss)((jnp.asarray(0.7, x.dtype), jnp.asarray(1e-3, x.dtype)))


def independence(key, x, y, z):
    return kbr.hypotheses.conditional_independence_test(
        KERNEL, KERNEL, KERNEL, x, y, z, key=key, num_draws=20
    ).p_value


def cross_validation(key, x, y, z):
    def loss(values):
        model = kbr.fit_conditional(
            kbr.Gaussian(values[0]), KERNEL, x, y, regularizer=values[1], landmarks_x=10
        )
        return kbr.leave_out_loss(model, num_left_out=5)

    return jax.grad(loss)((jnp.asarray(0.7, x.dtype), jnp.asarray(1e-3, x.dtype)))


PROGRAMS = (two_fits, filters, tuning, independence, cross_validation)


def main(rounds: int = 10_000, *names: str) -> None:
    rng = np.random.default_rng(0)
    faulthandler.dump_traceback_later(240, repeat=True)
    chosen = [program for program in PROGRAMS if not names or program.__name__ in names]
    jobs = []
    for batch in SIZES:
        data = [jnp.asarray(rng.normal(size=(batch, POINTS, 1))) for _ in range(3)]
        keys = jax.random.split(jax.random.key(0), batch)
        jobs += [(jax.jit(jax.vmap(program)), keys, data) for program in chosen]
    start = time.perf_counter()
    for number in tqdm(range(rounds), mininterval=10):
        run, keys, data = jobs[number % len(jobs)]
        jax.block_until_ready(run(keys, *data))
    print(f"{rounds} rounds in {time.perf_counter() - start:.0f} s, jax {jax.__version__}")


if __name__ == "__main__":
    experiment.start(main, double=False)
