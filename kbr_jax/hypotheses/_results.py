"""What a test returns, and how simulated null distributions become p-values."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from .._checks import padded
from .._typing import Array, Float, Int, PRNGKeyArray, with_numbers
from ..devices import over_devices
from ..kernels import AbstractKernel

#: Draws of the null distribution that are computed side by side.
_BATCH = 64


class TestResult(eqx.Module):
    """Outcome of a test.

    - `p_value`: small where the hypothesis (same distribution, independence) is doubtful; reject at
      level alpha if it is <= alpha.
    - `statistic`: as the test defines it.
    - `null`: `[draws]`, the statistic under permutations or random signs; empty for tests of
      blocks.
    - `kernels`: those that a two-sample test has tried, and `best`, the index of the one whose
      normalized statistic is largest.

    What agrees with the statistic up to rounding counts as equal to it: on discrete data many
    permutations do.

    `local_dependence_test` at many points has them as a leading axis of all three.
    """

    __test__ = False  # not for pytest to collect

    p_value: Float[Array, "*points"]
    statistic: Float[Array, "..."]
    null: Float[Array, "..."]
    kernels: tuple[AbstractKernel, ...] = eqx.field(default=(), repr=False)
    best: Int[Array, "..."] = eqx.field(default=0, converter=lambda value: jnp.asarray(value, int))

    __repr__ = with_numbers


def simulate(
    key: PRNGKeyArray,
    count: int,
    draw: Callable[[Any, PRNGKeyArray], Array],
    statistics: Callable[[Any, Array], Array],
    data: Any,
    mesh: Mesh | None = None,
) -> Array:
    """`statistics(data, draws)` of `count` draws `draw(data, key)`, divided over devices.

    Of a batch `[b, ...]` of them at a time, so that products with matrices stay products. All
    arrays are in `data`: a function on a device cannot refer to arrays of a mesh.
    """
    whole = -(-count // min(_BATCH, count)) * min(_BATCH, count)
    keys = jax.random.split(key, whole)[:count]

    def of_keys(data, keys):
        count, size = keys.shape[0], min(_BATCH, keys.shape[0])
        keys = padded(keys, -count % size)
        batches = keys.reshape(-1, size, *keys.shape[1:])  # keys of new style or old
        found = lax.map(
            lambda batch: statistics(data, jax.vmap(draw, in_axes=(None, 0))(data, batch)), batches
        )
        return found.reshape(-1, *found.shape[2:])[:count]

    return over_devices(of_keys, mesh, data, keys)


def centered(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """H K H."""
    rows = jnp.mean(gram, axis=0)
    return gram - rows - rows[:, None] + jnp.mean(rows)


def relevant(center: Float[Array, "*s"], whole: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Root mean square of what centering leaves, and of its own rounding.

    From the mean squares of both.
    """
    return jnp.sqrt(center) + jnp.finfo(center.dtype).eps * jnp.sqrt(whole)


def of_residuals(
    parts: Sequence[Float[Array, "n n"]], wholes: Sequence[Float[Array, "n n"]]
) -> Float[Array, ""]:
    """Magnitude of the mean product of two residuals.

    Each is known up to the rounding of its whole Gram matrix.
    """
    sizes, bounds = (
        [jnp.mean(jnp.abs(jnp.diagonal(m))) for m in matrices] for matrices in (parts, wholes)
    )
    return sizes[0] * bounds[1] + bounds[0] * sizes[1]


def rounding(magnitude: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The error by rounding of a sum whose terms have absolute sum `magnitude`."""
    return 16 * jnp.finfo(magnitude.dtype).eps * magnitude


def from_null(
    statistic: Float[Array, ""],
    null: Float[Array, " draws"],
    magnitude: Float[Array, ""],
    kernels: tuple[AbstractKernel, ...] = (),
    best: Int[Array, ""] | int = 0,
) -> TestResult:
    r"""The p-value $(1 + \#\{b : T_b \ge T\}) / (1 + B)$, exact for permutations; `magnitude` of
    the terms of T: see `rounding`.
    """
    above = jnp.sum(null >= statistic - rounding(magnitude))
    return TestResult(
        (1 + above) / (1 + null.shape[0]), statistic, null, kernels, jnp.asarray(best)
    )
