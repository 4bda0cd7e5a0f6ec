r"""Simulations for posteriors where the likelihood can be simulated but not evaluated.

With pairs $(\theta_i, y_i)$ of `simulate` a posterior is one of the library's rules, fitted once
for all observations (F11 section 4.4):

- under the prior that the parameters were drawn from,
  `condition(fit_conditional(kernel_data, kernel_parameters, data, parameters), observation)`;
- under any other prior on the same simulations,
  `bayes_rule(model, prior, observation)` with a
  `model = fit_conditional(kernel_parameters, kernel_data, parameters, data)`.

A mass far from 1 says that nothing like the observation was simulated. `mean`, `quantile` and
`credible_interval` read posteriors, and `herd` draws samples.
"""

from collections.abc import Callable

import equinox as eqx
import jax
from jax import lax

from ._checks import as_count
from ._typing import Point, Points, PRNGKeyArray, with_numbers
from ._warnings import warn

__all__ = [
    "Simulations",
    "simulate",
]


class Simulations(eqx.Module):
    """What a simulator returned: `parameters` `[n, ...]`, and `data` `[n, ...]` of each."""

    parameters: Points
    data: Points

    __repr__ = with_numbers


def simulate(
    simulator: Callable[[PRNGKeyArray, Point], Point],
    prior_sampler: Callable[[PRNGKeyArray], Point],
    num_samples: int,
    *,
    key: PRNGKeyArray,
    batch_size: int | None = None,
) -> Simulations:
    """Draw parameters from the prior, and data at each of them (F11 section 4.4, steps 1 and 2).

    **Arguments:**

    - `simulator(key, parameter)`: one draw of the data, in JAX, of one shape. For large data return
      summary statistics: kernels compare what is returned.
    - `prior_sampler(key)`: one parameter, an array or a tree of arrays.
    - `num_samples` (static); `batch_size`: draws made side by side (static), all by default. The
      draws do not depend on it, but for keys of the kind "rbg".

    **Returns:** `Simulations`. Cost: one call of the simulator for each sample, in one program.

    **Raises:** `ValueError` for a `num_samples` or `batch_size` below 1, and for functions in
    NumPy. A function that does not use its key is named in a warning: what it draws with NumPy is
    the same in all samples.
    """
    count = as_count(num_samples, "num_samples")
    batch = count if batch_size is None else as_count(batch_size, "batch_size")
    try:
        return _simulate(simulator, prior_sampler, count, key, batch)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise ValueError(
            "`simulator` and `prior_sampler` must be JAX functions. Of a program in NumPy, stack "
            "parameters and data of your own runs: `Simulations(parameters, data)`."
        ) from error


def _warn_without_key(function: Callable, name: str, key: PRNGKeyArray, *rest: Point) -> None:
    program = jax.make_jaxpr(function)(key, *rest).jaxpr
    read = [*program.outvars, *(part for step in program.eqns for part in step.invars)]
    if not any(part is program.invars[0] for part in read):
        warn(f"`{name}` does not use its key: it draws nothing, or with NumPy the same each time.")


@eqx.filter_jit
def _simulate(
    simulator: Callable, prior_sampler: Callable, count: int, key: PRNGKeyArray, batch: int
) -> Simulations:
    _warn_without_key(prior_sampler, "prior_sampler", key)
    parameter = jax.eval_shape(prior_sampler, key)
    _warn_without_key(simulator, "simulator", key, parameter)

    def one(own):
        for_prior, for_data = jax.random.split(own)
        parameter = prior_sampler(for_prior)
        return Simulations(parameter, simulator(for_data, parameter))

    keys = jax.random.split(key, count)
    return jax.vmap(one)(keys) if batch >= count else lax.map(one, keys, batch_size=batch)
