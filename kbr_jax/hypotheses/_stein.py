r"""Does a sample fit a density known up to a constant? The kernel Stein discrepancy.

Chwialkowski, Strathmann and Gretton 2016; Liu, Lee and Jordan 2016.
"""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, as_weights, check_finite, check_memory, size, take
from .._numerics import matmul, root_mean_square, safe_sqrt
from .._typing import Array, ArrayLike, Float, Int, Points, PRNGKeyArray
from ..kernels import AbstractKernel, KernelLike
from ._collections import for_each, fused
from ._results import TestResult, from_null, simulate
from ._series import autocorrelation_time, given_length
from ._stein_kernel import (
    LogDensity,
    Scored,
    by_rows,
    matrix,
    multiquadric,
    smooth_kernel,
    stein,
    with_scores,
)

#: Bandwidths of the default test, in units of the median heuristic. Power at level .05 with 300
#: data sets, for one bandwidth 1, for 1/4, and for these five: shifted normal .67, .12, .66; normal
#: of a larger scale in 5 dimensions .10, .22, .18; Student's t .48, .09, .33; bent banana .20, .44,
#: .33; a normal with ripples .16, .99, .98. Ten of them: as five.
_SCALES = (0.125, 0.25, 0.5, 1.0, 2.0)

#: Shortest chain, in lengths of its multipliers.
_LONGEST = 4


def goodness_of_fit_test(
    log_density: LogDensity,
    x: Points,
    *,
    key: PRNGKeyArray,
    kernel: KernelLike | Sequence[KernelLike] = None,
    num_draws: int = 1000,
    dependent: bool | int = False,
) -> TestResult:
    r"""Test whether x is a sample of a density known up to a constant.

    The density enters by its score $s = \nabla \log p$. With the Stein kernel (Liu et al. 2016,
    theorem 3.6; Chwialkowski et al. 2016, theorem 2.1)

    $$ u(x, y) = s(x)^\top s(y) \, k(x, y) + s(x)^\top \nabla_y k(x, y) + s(y)^\top \nabla_x k(x, y)
       + \operatorname{tr} \nabla_x \nabla_y k(x, y), \qquad
       T = \frac{1}{n (n - 1)} \sum_{i \ne j} u(x_i, x_j), $$

    T estimates the squared discrepancy. It is 0 for a sample of p. With several kernels the
    statistic is the largest normalized one, as in `two_sample_test`. The null distribution is of
    $\frac{1}{n (n - 1)} \sum_{i \ne j} W_i W_j u(x_i, x_j)$ for random multipliers W (wild
    bootstrap): independent signs, or an autoregressive process for `dependent` points,

    $$ W_t = e^{-1/l} W_{t-1} + \sqrt{1 - e^{-2/l}} \, \epsilon_t. $$

    **Arguments:**

    - `log_density`: a function of one point, $\log p$ up to a constant. `jax.grad` makes the score.
      The density is smooth, and falls to 0 at the edge of its support.
    - `x`: n points, real arrays of one shape. `key`: of the draws.
    - `kernel`: None, a kernel, or a list of kernels, with two derivatives. None stands for five
      inverse multiquadrics $(1 + |x - y|^2 / h^2)^{-1/2}$ (Gorham and Mackey 2017), from an eighth
      of the median distance to twice it.
    - `num_draws`: B, draws of the null distribution (static). The smallest p-value is 1 / (B + 1).
    - `dependent`: whether x is a stationary chain. An int is the length l of the dependence. True
      takes it from the data: the cubic root of $n \tau^2$, for the correlation time $\tau$ of the
      features of the Stein kernel.

    **Returns:** a `TestResult`. Cost O(n^2 (d + B)) for each kernel of the distance, O(n^2 (d^2 +
    B)) for others; memory O(n^2 + n B). The level holds for large n, not exactly.

    The discrepancy is a local one. It does not see the weights of modes that lie far apart.

    **Raises:** `ValueError` for fewer than 2 points, a density that is 0 or NaN at a point, a score
    that is not finite, a kernel without derivatives, l above n / 4, or a matrix beyond the memory
    of the machine. Under `jit` such a density gives NaN.

    **Example:**

    >>> import jax, jax.numpy as jnp, kbr_jax as kbr
    >>> x = jax.random.normal(jax.random.key(0), (100, 2))
    >>> log_density = lambda point: -jnp.sum((point - 1) ** 2) / 2
    >>> found = kbr.hypotheses.goodness_of_fit_test(log_density, x, key=jax.random.key(1))
    >>> bool(found.p_value < 0.01)
    True
    """
    x, scores = with_scores(log_density, x)
    n = size(x)
    if n < 2:
        raise ValueError("A test of goodness of fit needs at least 2 points.")
    kernels = _kernels(kernel, x)
    draws = as_count(num_draws, "num_draws")
    check_memory(n, n, x.dtype, "the Stein kernel", "test a part of the points")
    signs = isinstance(dependent, (bool, np.bool_)) and not dependent
    if isinstance(dependent, (bool, np.bool_)):
        length = None
    else:
        length = jnp.asarray(given_length(dependent, n), x.dtype)
    *values, fields = _run(kernels, x, scores, key, draws, length, signs)
    return from_null(
        *values,
        kernels=kernels,
        **fields,
        hypothesis="the sample is drawn from the density",
        valid="large samples of independent points" if signs else "long stationary chains",
    )


def kernel_stein_discrepancy(
    log_density: LogDensity,
    x: Points,
    kernel: KernelLike = None,
    weights: ArrayLike | None = None,
) -> Float[Array, "*batch"]:
    r"""How far weighted points are from a density that is known up to a constant:
    $\sqrt{\sum_{ij} w_i w_j u(x_i, x_j)}$ (Gorham and Mackey 2017), for the Stein kernel u of
    `goodness_of_fit_test`.

    **Arguments:** `log_density`, of one point; `x`, n points; `kernel`, by default the inverse
    multiquadric of the median distance, through which no gradient flows; `weights` `[..., n]`, 1 /
    n by default.

    **Returns:** a number, or one for each row of weights, differentiable in the density, x, the
    kernel and the weights. The gradient is 0 where the discrepancy is 0. Cost O(n^2 d), or O(n^2
    d^2) for kernels that are not of the distance; memory O(n). A gradient takes as much.

    **Raises:** `ValueError` as `goodness_of_fit_test`.
    """
    x, scores = with_scores(log_density, x)
    shares = check_finite(as_weights(weights, size(x), "weights", x.dtype), "weights")
    return _discrepancy(smooth_kernel(kernel, x), x, scores, shares.astype(x.dtype))


def stein_thinning(
    log_density: LogDensity,
    x: Points,
    num_points: int,
    kernel: KernelLike = None,
) -> Int[Array, " m"]:
    r"""Choose points of a chain that stand for a density best (Riabiz et al. 2022, algorithm 1):

    $$ i_j = \operatorname{argmin}_i \tfrac12 u(x_i, x_i) + \sum_{l < j} u(x_{i_l}, x_i), $$

    for the Stein kernel u of `goodness_of_fit_test`. The chain may be biased, or start far away.

    **Arguments:** `log_density`, of one point; `x`, n points; `num_points` m (static), more or less
    than n; `kernel`, as for `kernel_stein_discrepancy`.

    **Returns:** `[m]` indices into x, in the order of choice. A point may come several times. Cost
    O(n m d), or O(n m d^2) for kernels that are not of the distance; memory O(n d).

    **Raises:** `ValueError` as `goodness_of_fit_test`.
    """
    x, scores = with_scores(log_density, x)
    return _thinned(smooth_kernel(kernel, x), x, scores, as_count(num_points, "num_points"))


def _kernels(
    kernel: KernelLike | Sequence[KernelLike], x: Float[Array, "n *d"]
) -> tuple[AbstractKernel, ...]:
    if kernel is None:
        return tuple(multiquadric(x, scale) for scale in _SCALES)
    given: list[Any] = list(kernel) if isinstance(kernel, (list, tuple)) else [kernel]
    if not given:
        raise ValueError("`kernel` is an empty list; give at least one kernel.")
    return tuple(smooth_kernel(one, x) for one in given)


@eqx.filter_jit
def _run(
    kernels: tuple[AbstractKernel, ...],
    x: Float[Array, "n *d"],
    scores: Float[Array, "n *d"],
    key: PRNGKeyArray,
    draws: int,
    length: Float[Array, ""] | None,
    signs: bool,
):
    n = size(x)
    if length is None and not signs:
        time = jnp.max(for_each(lambda k: autocorrelation_time(matrix(k, (x, scores))), kernels))
        # The bias of the variance of the draws is of order time / length, and their own variance of
        # order length / n: the cubic root balances both.
        length = jnp.clip(jnp.cbrt(n * time**2), 1, max(1, n // _LONGEST))

    def draw(length, one: PRNGKeyArray) -> Float[Array, " n"]:
        if signs:
            return jax.random.rademacher(one, (n,), x.dtype)
        return multipliers(one, n, length, x.dtype)

    drawn = simulate(key, draws, draw, lambda _, drawn: drawn, length)
    pairs = float(n * (n - 1))

    def of(kernel: AbstractKernel):
        u = matrix(kernel, (x, scores)) * (1 - jnp.eye(n, dtype=x.dtype))
        null = jnp.sum(matmul(drawn, u) * drawn, axis=-1) / pairs
        unit = root_mean_square(u) * (n / math.sqrt(pairs))
        return jnp.sum(u) / pairs, null, jnp.sum(jnp.abs(u)) / pairs, unit

    statistics, null, magnitude, units = for_each(of, kernels)
    # There is no theory of an effect.
    unknown = jnp.full((len(kernels), 3), jnp.nan, x.dtype)
    return fused((statistics, null.T, magnitude, units), unknown)


def multipliers(
    key: PRNGKeyArray, n: int, length: Float[Array, ""], dtype: jnp.dtype
) -> Float[Array, " n"]:
    """A stationary autoregressive process of unit variance and correlations exp(-lag / length)."""
    share = jnp.exp(-1 / length).astype(dtype)
    noise = jax.random.normal(key, (n,), dtype)
    noise = noise.at[1:].multiply(safe_sqrt(1 - share**2))

    def step(last, new):
        value = share * last + new
        return value, value

    return lax.scan(step, jnp.zeros((), dtype), noise)[1]


@eqx.filter_jit
def _discrepancy(
    kernel: AbstractKernel,
    x: Float[Array, "n *d"],
    scores: Float[Array, "n *d"],
    weights: Float[Array, "*batch n"],
) -> Float[Array, "*batch"]:
    rows = weights.reshape(-1, weights.shape[-1])
    products = by_rows(lambda u: matmul(u, rows.T), kernel, (x, scores))
    squares = jnp.sum(products.T * rows, axis=-1)
    return safe_sqrt(squares).reshape(weights.shape[:-1])


@eqx.filter_jit
def _thinned(
    kernel: AbstractKernel, x: Float[Array, "n *d"], scores: Float[Array, "n *d"], count: int
) -> Int[Array, " m"]:
    points = x, scores

    def row(point: Scored, others: Scored) -> Float[Array, " b"]:
        return stein(kernel, jax.tree.map(lambda leaf: leaf[None], point), others)[0]

    own = jax.vmap(lambda p: row(p, jax.tree.map(lambda leaf: leaf[None], p))[0])(points)

    def step(total, _):
        chosen = jnp.argmin(total)
        return total + row(take(points, chosen), points), chosen

    return lax.scan(step, own / 2, None, length=count)[1]
