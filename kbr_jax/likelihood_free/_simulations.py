"""Pairs (parameter, data) from a prior and a simulator."""

from collections.abc import Callable

import equinox as eqx
import jax
from jax import lax

from .._checks import as_count
from .._typing import Point, Points, PRNGKeyArray


class Simulations(eqx.Module):
    """What a simulator returned: `parameters` `[n, ...]` and, for each of them, `data` `[n, ...]`
    (or
    summary statistics of it).

    For a simulator that is not written in JAX (a Python loop, a program), build it from the arrays:
    `Simulations(parameters, data)`.
    """

    parameters: Points
    data: Points


def simulate(
    simulator: Callable[[PRNGKeyArray, Point], Point],
    prior_sampler: Callable[[PRNGKeyArray], Point],
    count: int,
    *,
    key: PRNGKeyArray,
    batch: int | None = None,
) -> Simulations:
    """Draw `count` n parameters from the prior, and data at each of them (F11 section 4.4, steps 1
    and
    2), in one compiled program.

    **Arguments:**

    - `simulator(key, parameter)`: one draw of the data, in JAX, of a shape that does not depend on
      the draw. Return summary statistics where the data are large: kernels compare what is
      returned.
    - `prior_sampler(key)`: one parameter, an array or a tree of arrays.
    - `count` (static); `batch`: draws made side by side (static), all by default; fewer where
      memory ends. The draws do not depend on it.

    **Returns:** `Simulations`. Cost: n calls of the simulator.

    **Raises:** `ValueError` for a `count` or `batch` below 1.
    """
    count = as_count(count, "count")
    return _simulate(
        simulator, prior_sampler, count, key, count if batch is None else as_count(batch, "batch")
    )


@eqx.filter_jit
def _simulate(
    simulator: Callable, prior_sampler: Callable, count: int, key: PRNGKeyArray, batch: int
) -> Simulations:
    def one(own):
        for_prior, for_data = jax.random.split(own)
        parameter = prior_sampler(for_prior)
        return Simulations(parameter, simulator(for_data, parameter))

    keys = jax.random.split(key, count)
    return jax.vmap(one)(keys) if batch >= count else lax.map(one, keys, batch_size=batch)
