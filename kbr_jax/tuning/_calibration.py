"""One temperature that makes credible regions hold what they say."""

import jax.numpy as jnp
from jax import lax

from .._typing import Array, Float, Points
from ..embedding import Embedding, credible_level

#: Masses of the regions whose coverage is matched.
LEVELS = (0.5, 0.8, 0.95)
#: Temperatures are searched between 1 / LIMIT and LIMIT, at COUNT values with equal ratios.
LIMIT, COUNT = 16.0, 33


def calibrate(beliefs: Embedding, points: Points) -> Float[Array, ""]:
    r"""Choose the temperature of credible regions on held-out data.

    It is the $\tau$ for which the shares of true points inside the regions
    $\{s : a_\tau(s) \le u\}$ of `credible_level` differ least from u = .5, .8 and .95, summed over
    squares, among 33 values between 1/16 and 16.

    **Arguments:** `beliefs`, weights `[b, n]`; `points` `[b, ...]`, the true ones, from data that
    the model has not seen. Beliefs without positive weights are left out.

    **Returns:** a scalar, for `credible_level(..., temperature=)`. Cost 33 times that of
    `credible_level`. **Raises:** `ValueError` as `credible_level`.
    """
    temperatures = LIMIT ** jnp.linspace(-1, 1, COUNT)

    def error(tau):
        found = coverage(credible_level(beliefs, points, temperature=tau))
        return jnp.sum((found - jnp.asarray(LEVELS)) ** 2)

    errors = lax.map(error, temperatures)
    # Of equally good ones the nearest to 1.
    near = jnp.abs(jnp.log(temperatures))
    return temperatures[jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors) + 1e-9 * near)]


def coverage(levels: Float[Array, " b"]) -> Float[Array, " u"]:
    """Shares of `credible_level`s inside the regions of 50, 80 and 95 %, leaving NaN out.

    **Arguments:** `levels` `[b]`, in [0, 1] or NaN. **Returns:** `[3]`; zeros where all are NaN.
    Cost O(b).
    """
    known = ~jnp.isnan(levels)
    inside = levels[:, None] <= jnp.asarray(LEVELS)
    return jnp.sum(inside & known[:, None], axis=0) / jnp.maximum(jnp.sum(known), 1)
