r"""What a gradient costs beside its loss: time, and temporary memory, with every parameter in it.

    python -m benchmarks.scale.gradient_cost

Losses of `kbr_jax` at sizes that people use, exact and with landmarks; and the filter's loss over
10^4 steps, with and without segments. Memory is what the compiled program allocates beside its
arguments and results.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from ..rotation.references import simulate

PAIRS, RANK, STATES, STEPS, LONG = 1000, 100, 400, 100, 10_000
PARAMETERS = {"h": 0.4, "c": 0.5, "epsilon": 1e-4, "delta": 1e-4}


def data(steps: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    parts = *simulate("b", PAIRS + 1, rng), *simulate("b", steps, rng)
    return tuple(jnp.asarray(part) for part in parts)


def losses() -> dict[str, tuple[Callable, tuple]]:
    """Functions of parameters and landmarks' rank, by name."""
    x, y, held_x, held_y = data(STEPS)
    states, seen = x[: STATES + 1], y[:STATES]
    long_states, long_seen = (
        jnp.asarray(part) for part in simulate("b", LONG, np.random.default_rng(3))
    )

    def model(p, rank):
        kernels = kbr.Gaussian(p["h"]), kbr.Gaussian(p["c"])
        return kbr.fit_conditional(
            *kernels,
            x[:PAIRS],
            y[:PAIRS],
            regularizer=p["epsilon"],
            landmarks_x=rank,
            landmarks_y=rank,
        )

    def tracker(p, rank):
        kernels, ridges = (kbr.Gaussian(p["h"]), kbr.Gaussian(p["c"])), (p["epsilon"], p["delta"])
        options = {"regularizer": ridges[0], "posterior_regularizer": ridges[1]}
        if rank is None:
            return kbr.fit_filter(*kernels, states, seen, **options)
        options |= {"landmarks_states": rank, "landmarks_observations": rank}
        return kbr.fit_filter(*kernels, x, y[:PAIRS], **options)

    def regression(p, rank):
        return kbr.regression_loss(model(p, rank), held_x, held_y, kernel=kbr.Linear())

    def leave_one_out(p, rank):
        return kbr.leave_out_loss(model(p, rank), kernel=kbr.Linear())

    def marginal(p, rank):
        return kbr.tuning.marginal_loss(
            model(p, rank), held_x, held_y, regularizer=p["delta"], kernel=kbr.Gaussian(1.0)
        )

    def tracking(p, rank):
        return kbr.filter_loss(tracker(p, rank), held_x, held_y)

    def long(p, rank, segment=None):
        return kbr.filter_loss(tracker(p, rank), long_states, long_seen, checkpoint_every=segment)

    names = {
        "regression": regression,
        "leave one out": leave_one_out,
        "Bayes, marginal": marginal,
        "filter": tracking,
    }
    found: dict[str, tuple[Callable, tuple]] = {}
    for name, loss in names.items():
        n = STATES if name == "filter" else PAIRS
        found[f"{name}, exact, n = {n}"] = loss, (None,)
        found[f"{name}, rank {RANK}, n = {PAIRS}"] = loss, (RANK,)
    found[f"filter of {LONG} steps, rank 40"] = long, (40,)
    found[f"filter of {LONG} steps, rank 40, segments of 100"] = long, (40, 100)
    return found


def measure(loss: Callable, options: tuple) -> dict[str, float]:
    """Milliseconds and megabytes of a loss and of its value with gradient."""
    row: dict[str, Any] = {}
    p = jax.tree.map(jnp.asarray, PARAMETERS)

    def value(p):
        return loss(p, *options)

    for name, function in {"loss": value, "gradient": jax.value_and_grad(value)}.items():
        compiled = jax.jit(function).lower(p).compile()
        row[f"{name}, ms"] = experiment.milliseconds(lambda c=compiled: c(p), 3)
        memory = compiled.memory_analysis()
        row[f"{name}, MB"] = float("nan") if memory is None else memory.temp_size_in_bytes / 1e6
    row["gradient over loss"] = row["gradient, ms"] / row["loss, ms"]
    return row


def main() -> None:
    results = {}
    for name, (loss, options) in losses().items():
        results[name] = measure(loss, options)
        print(
            name, {key: float(f"{value:.3g}") for key, value in results[name].items()}, flush=True
        )
    print(experiment.save("gradient_cost", results))


if __name__ == "__main__":
    experiment.start(main)
