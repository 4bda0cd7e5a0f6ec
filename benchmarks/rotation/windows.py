r"""What a window of past observations does for a filter, and for a regression without one, on the
rotation dynamics.

    python -m benchmarks.rotation.windows [repetitions [T]]

The filter of `rotation_tuning` sees delay vectors of the last 1, 2, 4 or 8 observations; its
parameters are learned as there, with one observation bandwidth for all lags, or one for each (the
weights of the lags). Kernel ridge regression of the state on the same windows learns its bandwidths
and its regularizer by leave-one-out. Ratios of squared errors to the optimal filter's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import kbr_jax as kbr

from .. import experiment
from .dynamics import BURN_IN, TEST, squared_errors
from .references import OPTIMAL, SYSTEMS, particle_filter, simulate
from .tuning import START, by_gradient, decode, stretches

LENGTHS, REPETITIONS, SIZE, STEPS = (1, 2, 4, 8), 6, 400, 60


def regression(
    p: dict[str, Any], states: jax.Array, windows: jax.Array
) -> kbr.rules.ConditionalEmbedding:
    kernel = kbr.Gaussian(jnp.repeat(p["c"], states.shape[1]) * kbr.median_heuristic(windows))
    return kbr.fit_conditional(kernel, kbr.Linear(), windows, states, regularizer=p["epsilon"])


def left_out(data: tuple[jax.Array, jax.Array], p: dict[str, Any]) -> jax.Array:
    fitted = regression(p, *data)
    return kbr.leave_out_loss(fitted, kernel=fitted.kernel_y)


@jax.jit
def regress(
    p: dict[str, Any], states: jax.Array, windows: jax.Array, tests: jax.Array
) -> jax.Array:
    return kbr.condition(regression(p, states, windows), tests).weights @ states


def by_leave_one_out(states: jax.Array, windows: jax.Array, length: int) -> dict[str, Any]:
    start = {"c": jnp.full(length, 1.0), "epsilon": jnp.asarray(1e-3)}
    loss = jax.tree_util.Partial(left_out, (states, windows))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.2, STEPS))
    return kbr.tune(
        loss, start, optimizer, num_steps=STEPS, positive=lambda p: list(p.values()), progress=False
    ).parameters


def repetition(system: str, size: int, seed: int) -> dict[str, float]:
    """Mean squared errors of each method and length."""
    rng = np.random.default_rng([seed, size, system == "b"])
    states, observations = map(jnp.asarray, simulate(system, size, rng))
    truth, tests = simulate(system, TEST, rng)
    estimates = {OPTIMAL: particle_filter(system, tests, rng)}
    for length in LENGTHS:
        windows = kbr.delay_embedding(observations, length)
        seen = kbr.delay_embedding(jnp.asarray(tests), length)
        data = (states, windows, *map(jnp.asarray, stretches(size)))
        for name, bandwidth in (
            ("one bandwidth", START["c"]),
            ("one a lag", np.full(length, START["c"])),
        ):
            found = by_gradient(data, jax.random.key(seed), START | {"c": jnp.asarray(bandwidth)})
            estimates[f"filter, {name}, {length}"] = decode(
                jax.tree.map(jnp.asarray, found), states, windows, seen
            )
        estimates[f"ridge, one a lag, {length}"] = regress(
            by_leave_one_out(states, windows, length), states, windows, seen
        )
    return {name: float(squared_errors(value, truth, BURN_IN)) for name, value in estimates.items()}


def main(repetitions: int = REPETITIONS, size: int = SIZE) -> None:
    results: dict[str, Any] = {"T": size, "repetitions": repetitions}
    with tqdm(total=len(SYSTEMS) * repetitions, unit="run") as bar:
        for system in SYSTEMS:
            rows = experiment.repeat(
                f"windows {system} {size}",
                lambda seed, s=system: repetition(s, size, seed),
                repetitions,
                bar,
            )
            results[f"({system})"] = experiment.ratios(rows, OPTIMAL)
            experiment.save("windows", results, str(repetitions), str(size))
    header = ["last observations", *map(str, LENGTHS)]
    for system in SYSTEMS:
        found = results[f"({system})"]
        methods = ("filter, one bandwidth", "filter, one a lag", "ridge, one a lag")
        print(
            f"({system})\n"
            + experiment.table(
                header,
                [
                    [
                        method,
                        *[
                            f"{found[f'{method}, {n}']['ratio']:.3f} ± "
                            f"{found[f'{method}, {n}']['ratio_se']:.3f}"
                            for n in LENGTHS
                        ],
                    ]
                    for method in methods
                ],
            )
        )


if __name__ == "__main__":
    experiment.start(main)
