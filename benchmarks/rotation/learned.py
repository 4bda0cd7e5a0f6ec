r"""`learn_filter` on the rotation dynamics, with nothing set by hand.

    python -m benchmarks.rotation.learned [repetitions [T ...]]

The defaults are 12 repetitions at T = 200 and 400 and 8 at T = 800; cells that are not run keep
their last results. Systems, sequences and measure are those of `benchmarks.rotation.dynamics`: its
repetition of the same number has the same sequences. Coverage is the share of true states of the
test sequence inside the credible regions of 50, 80 and 95 %, at the temperature of the report.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .. import experiment
from .dynamics import BURN_IN, TEST, choose, ridge_on_windows, squared_errors
from .references import OPTIMAL, SYSTEMS, particle_filter, simulate

REPETITIONS = {200: 12, 400: 12, 800: 8}
LEARNED, PLAIN, RIDGE = "`learn_filter`", "without its readout", "kernel ridge on windows"


def repetition(system: str, size: int, seed: int) -> dict[str, Any]:
    """Mean squared errors, and the coverage of the learned filter's regions."""
    rng = np.random.default_rng([seed, size, system == "b"])
    states, observations = simulate(system, size, rng)
    truth, tests = simulate(system, TEST, rng)
    filt, report = kbr.learn_filter(jnp.asarray(states), jnp.asarray(observations), progress=False)
    run = kbr.run_filter(filt, jnp.asarray(tests))
    level = kbr.embedding.credible_level(
        kbr.belief(filt, run), jnp.asarray(truth), temperature=report.temperature
    )
    estimates = {
        OPTIMAL: particle_filter(system, tests, rng),
        RIDGE: choose(ridge_on_windows, states, observations, tests)[0],
        LEARNED: kbr.state_mean(filt, run),
        PLAIN: kbr.mean(kbr.belief(filt, run)),
    }
    errors = {name: float(squared_errors(e, truth, BURN_IN)) for name, e in estimates.items()}
    return {"errors": errors, "coverage": np.asarray(kbr.tuning.coverage(level)).tolist()}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of mean errors to the optimal filter's, and the mean coverage."""
    shares = np.mean([row["coverage"] for row in rows], axis=0)
    return {
        "methods": experiment.ratios([row["errors"] for row in rows], OPTIMAL),
        "coverage": dict(zip(("50 %", "80 %", "95 %"), map(float, shares), strict=True)),
    }


def main(repetitions: int = 0, *sizes: int) -> None:
    results = experiment.run_cells(
        "rotation_learned", REPETITIONS, list(SYSTEMS), repetition, summarize, repetitions, sizes
    )
    experiment.show_ratios(results, "methods")


if __name__ == "__main__":
    experiment.start(main)
