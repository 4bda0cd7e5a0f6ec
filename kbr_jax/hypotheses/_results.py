"""What a test returns, and how simulated null distributions become p-values."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .._checks import padded
from .._typing import Array, Bool, Float, Int, PRNGKeyArray, with_numbers, with_scalars
from .._warnings import warn
from ..devices import over_devices

#: Draws of the null distribution that are computed side by side.
_BATCH = 64
#: `bias` above which a result says not to trust it.
MOST_BIAS = 2.0


class TestResult(eqx.Module):
    """Outcome of a test. `print(result)` says it in words.

    - `p_value`: small where the hypothesis (same distribution, independence) is doubtful; reject at
      level alpha if it is <= alpha, compared as an array: `float` of .05 in float32 is above .05.
    - `statistic`: as the test defines it.
    - `null`: `[draws]`, the statistic under permutations or random signs; empty for tests that
      compare with a known distribution.
    - `kernels`: those that the test has tried, and `best`, the index of the one whose normalized
      statistic is largest. A test of two variables has pairs of kernels.
    - `effect`: how large the difference is, in the units that the test defines, and `interval`
      `[2]`, which holds the true one in 95 % of large samples. NaN where there is no theory. The
      interval does not know that the kernel was chosen.
    - `explained` `[2]`: of a conditional test, the shares of the variance of x and of y that z
      predicts, left out of the fit. `bias`: what the regressions on z may leave in the statistic,
      in its standard deviations. Above 2, do not trust a small p-value. NaN for other tests.
    - `hypothesis`, `valid`: what was tested, and for which samples the level holds.

    What agrees with the statistic up to rounding counts as equal to it: on discrete data many
    permutations do.

    `local_dependence_test` at many points has them as a leading axis of all three.
    """

    __test__ = False  # not for pytest to collect

    p_value: Float[Array, "*points"]
    statistic: Float[Array, "..."]
    null: Float[Array, "..."]
    kernels: tuple[Any, ...] = eqx.field(default=(), repr=False)
    best: Int[Array, "..."] = eqx.field(default=0, converter=lambda value: jnp.asarray(value, int))
    effect: Float[Array, "..."] = eqx.field(default=np.nan, converter=jnp.asarray)
    interval: Float[Array, "... 2"] = eqx.field(default=(np.nan, np.nan), converter=jnp.asarray)
    explained: Float[Array, "2"] = eqx.field(default=(np.nan, np.nan), converter=jnp.asarray)
    bias: Float[Array, ""] = eqx.field(default=np.nan, converter=jnp.asarray)
    hypothesis: str = eqx.field(default="the hypothesis", static=True)
    valid: str = eqx.field(default="samples of any size", static=True)

    __repr__ = with_numbers

    def __str__(self) -> str:
        """One sentence for each test."""
        if self.p_value.ndim:
            return repr(self)
        if jnp.isnan(self.p_value):
            reason = "the data or what was given cannot be tested"
            return f"Not tested: {self.hypothesis} (p = nan: {reason})."
        level = 0.05
        verdict = "Rejected" if self.p_value <= level else "Not rejected"
        words = (
            f"{verdict} at level {level}: {self.hypothesis} "
            f"(p = {self.p_value:.3g}; the level holds for {self.valid})"
        )
        if not jnp.isnan(self.effect):
            words += f", effect {self.effect:.3g}"
        if not jnp.isnan(self.interval).any():
            low, high = self.interval
            words += f", 95 % interval {low:.3g} to {high:.3g}"
        if len(self.kernels) > 1:
            kernel = re.sub(r"(?<=\()\s+|\s+(?=\))", "", with_scalars(self.kernels[int(self.best)]))
            words += f", decided by {' '.join(kernel.split())}"
        if not jnp.isnan(self.bias):
            shares = " and ".join(f"{100 * float(share):.0f} %" for share in self.explained)
            words += f"; z predicts {shares} of the variances of x and y"
        if self.bias > MOST_BIAS:
            words += "; the regressions on z need more points, do not trust a small p-value"
        return words + "."


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


def warn_if_hopeless(orders: int, sizes: str) -> None:
    """Warn where so few orders of the points exist that no p-value is below .05."""
    if orders < 20:
        warn(
            f"With {sizes} no p-value is below {1 / orders:.2g}. Rows of a table are points; its "
            f"columns are a tuple of arrays."
        )


def is_constant(matrix: Float[Array, "n r"]) -> Bool[Array, ""]:
    """Whether the rows of a Gram or feature matrix are one, but for rounding.

    Far from 0 some kernels leave few digits of a centered matrix; their rows still differ.
    """
    return jnp.all(jnp.abs(matrix - matrix[0]) <= rounding(jnp.max(jnp.abs(matrix))))


def from_null(
    statistic: Float[Array, ""],
    null: Float[Array, " draws"],
    magnitude: Float[Array, ""],
    **fields: Any,
) -> TestResult:
    r"""The result with p-value $(1 + \#\{b : T_b \ge T\}) / (1 + B)$, exact for permutations.

    `magnitude` is that of the terms of T: see `rounding`. The rest are fields of the result.
    """
    return TestResult(_p_value(statistic, null, magnitude), statistic, null, **fields)


@jax.jit
def _p_value(
    statistic: Float[Array, ""], null: Float[Array, " draws"], magnitude: Float[Array, ""]
) -> Float[Array, ""]:
    above = jnp.sum(null >= statistic - rounding(magnitude))
    # NaN in points that are traced, or an overflow, must not look like a p-value.
    known = jnp.isfinite(statistic) & jnp.isfinite(magnitude) & jnp.all(jnp.isfinite(null))
    p_value = jnp.where(known, (1 + above) / (1 + null.shape[0]), jnp.nan)
    return p_value.astype(null.dtype)


def interval_of(
    effect: Float[Array, "*k"], influence: Sequence[Float[Array, "*k _"]]
) -> Float[Array, "*k 2"]:
    """The 95 % interval of an estimate, from its influence functions at the points."""
    variances = [jnp.var(values, axis=-1) / values.shape[-1] for values in influence]
    reach = 1.96 * jnp.sqrt(sum(variances[1:], variances[0]))
    return jnp.stack([effect - reach, effect + reach], axis=-1)
