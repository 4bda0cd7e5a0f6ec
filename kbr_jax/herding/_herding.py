r"""Herding.

A few points, one after the other, whose embedding follows a given one (L15 eq 9; Chen, Welling and
Smola 2010).
"""

from typing import Any, Literal, get_args

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, as_points, check_alike, check_choice, check_finite, take
from .._lapack import cholesky, triangular_solve
from .._numerics import jitter, matmul
from .._typing import Array, Bool, Float, Int, Points, with_numbers
from ..embedding import Embedding, check_unbatched
from ..kernels import AbstractKernel, gram_matvec

Rule = Literal["greedy", "chen2010", "line-search", "min-norm-point", "sbq"]


class HerdingResult(eqx.Module):
    r"""What herding chose: an `embedding` of m points, in order of choice.

    - `index`: `[m]`, positions among the candidates; a point may be chosen again. Steps of "sbq"
      and "min-norm-point" that find no new point hold position 0, with weight 0. None in
      continuous space.
    - `objective`: `[m]`, $|\eta - \mu_k|^2 - |\eta|^2$ after k points; add `squared_norm(eta)` for
      the squared distance.
    """

    embedding: Embedding
    index: Int[Array, " m"] | None
    objective: Float[Array, " m"]

    __repr__ = with_numbers


def herd(
    embedding: Embedding,
    candidates: Points | None = None,
    *,
    num_points: int,
    rule: Rule = "greedy",
) -> HerdingResult:
    r"""Choose `num_points` m candidates whose embedding follows $\eta = \sum_i w_i k(x_i, \cdot)$.

    The weights may have any sign: this projects $\eta$ onto distributions. The k-th point is, by
    `rule`,

    - "greedy":
      $\operatorname{argmax}_z \eta(z) - \frac1k \sum_{i<k} k(z, z_i) - \frac{1}{2k} k(z, z)$, the
      point that brings $\frac1k \sum_{i \le k} \phi(z_i)$ closest to $\eta$. If k(z, z) is constant
      this is L15 eq 9.
    - "chen2010": L15 eq 9 as printed, without $k(z, z)$ (Chen, Welling and Smola 2010).
    - "line-search": $\operatorname{argmax}_z \langle \eta - \mu_{k-1}, \phi(z) \rangle$; then
      $\mu_k$ is the point nearest to $\eta$ between $\mu_{k-1}$ and $\phi(z)$ (Frank-Wolfe; Bach,
      Lacoste-Julien and Obozinski 2012).
    - "min-norm-point": the same point; then all weights anew, the best non-negative ones of sum 1
      (Wolfe's min-norm point). With enough points it ends at the projection of $\eta$ onto the
      distributions on the candidates.
    - "sbq": the point that lessens the distance most when all weights are the best of any sign
      (sequential Bayesian quadrature; Huszar and Duvenaud 2012).

    The first two have uniform weights 1 / m: samples. The others reach the same distance with fewer
    points.

    **Arguments:** `embedding`, unbatched; `candidates` `[c, ...]`: a grid, a sample, by default the
    embedding's own points; `num_points` and `rule` are static.

    **Returns:** a `HerdingResult`. Cost O(n c d) for $\eta$ at the candidates and O(m c d) for the
    choice, in one compiled scan; further O(m^2 c) for the last two, and O(m^4) for
    "min-norm-point". Memory O(c), O(m c) for the last two. The choice is discrete: `index` carries
    no gradient. Weights and objective have that of the choice as it is; the weights of
    "min-norm-point" that of the best ones on the points whose weight is not 0.

    **Raises:** `ValueError` for a batch, weights that are NaN (under `jit` the result's weights
    become NaN), candidates of another kind, a `num_points` < 1, or an
    unknown rule; with "sbq", for more points than candidates.

    **Example:**

    >>> import jax.numpy as jnp, kbr_jax as kbr
    >>> mu = kbr.embed(kbr.Gaussian(0.5), jnp.array([0.0, 1.0, 2.0]), jnp.array([0.5, -0.1, 0.6]))
    >>> print([round(float(z), 1) for z in kbr.herd(mu, num_points=4).embedding.points])
    [2.0, 0.0, 2.0, 0.0]
    """
    check_unbatched(embedding, "embedding")
    check_finite(embedding.weights, "embedding.weights")
    check_choice(rule, "rule", *get_args(Rule))
    kernel = embedding.kernel
    points = embedding.points if candidates is None else as_points(candidates, "candidates")
    check_alike(points, "candidates", embedding.points, "embedding.points")
    kernel.check(points, "candidates")
    count = as_count(num_points, "num_points", points if rule == "sbq" else None, "candidates")
    return _herd(kernel, embedding, points, count, rule)


@eqx.filter_jit
def _herd(
    kernel: AbstractKernel, embedding: Embedding, points: Points, count: int, rule: Rule
) -> HerdingResult:
    target = gram_matvec(kernel, points, embedding.points, embedding.weights)
    known = jnp.all(jnp.isfinite(target))
    diagonal = kernel.diagonal(points).astype(target.dtype)
    if rule in ("greedy", "chen2010"):
        index, weights, objective = _uniform(
            kernel, points, target, diagonal, count, rule == "greedy"
        )
    else:
        choose = {"line-search": _line_search, "min-norm-point": corrective, "sbq": free}[rule]
        index, weights, objective = choose(kernel, points, target, diagonal, count)
    weights = jnp.where(known, weights, jnp.nan)
    return HerdingResult(Embedding(kernel, take(points, index), weights), index, objective)


def _uniform(kernel, points, target, diagonal, count: int, greedy: bool):
    penalty = diagonal / 2 if greedy else jnp.zeros_like(diagonal)

    def step(carry, k):
        total, linear, square = carry
        index = jnp.argmax(target - (total + penalty) / k)
        linear = linear + target[index]
        square = square + 2 * total[index] + diagonal[index]
        total = total + kernel_row(kernel, points, index, target.dtype)
        return (total, linear, square), (index, square / k**2 - 2 * linear / k)

    zero = jnp.zeros((), target.dtype)
    steps = jnp.arange(1, count + 1).astype(target.dtype)
    _, (index, objective) = lax.scan(step, (jnp.zeros_like(target), zero, zero), steps)
    return index, jnp.full(count, 1 / count, target.dtype), objective


def _line_search(kernel, points, target, diagonal, count: int):
    def step(carry, k):
        current, linear, square, weights = carry
        index = jnp.argmax(target - current)
        slope = (target[index] - current[index]) - (linear - square)
        curvature = diagonal[index] - 2 * current[index] + square
        share = jnp.clip(slope / jnp.where(curvature > 0, curvature, 1), 0, 1)
        share = jnp.where(k == 0, 1, jnp.where(curvature > 0, share, 0))
        square = (
            (1 - share) ** 2 * square
            + 2 * share * (1 - share) * current[index]
            + share**2 * diagonal[index]
        )
        linear = (1 - share) * linear + share * target[index]
        current = (1 - share) * current + share * kernel_row(kernel, points, index, target.dtype)
        weights = ((1 - share) * weights).at[k].set(share)
        return (current, linear, square, weights), (index, square - 2 * linear)

    zero = jnp.zeros((), target.dtype)
    start = (jnp.zeros_like(target), zero, zero, jnp.zeros(count, target.dtype))
    carry, (index, objective) = lax.scan(step, start, jnp.arange(count))
    return index, carry[-1], objective


#: A candidate whose part outside the span of those chosen is below this many roundings of its
#: kernel counts as inside.
_SPAN_ROUNDINGS = 64


def kernel_row(
    kernel: AbstractKernel, points: Points, index: Int[Array, ""], dtype: Any
) -> Float[Array, " c"]:
    """Kernel of one candidate with all of them."""
    return kernel.gram(take(points, index[None]), points)[0].astype(dtype)


def corrective(
    kernel: AbstractKernel, points: Points, target: Float[Array, " c"], diagonal, count: int
):
    """The rule "min-norm-point" of `herd`: indices, weights and objectives."""
    dtype = target.dtype

    def step(carry, k):
        rows, gram, goal, weights, active, indices = carry
        index = jnp.argmax(target - matmul(weights, rows))
        new = kernel_row(kernel, points, index, dtype)
        known = (indices == index) & (
            jnp.arange(count) < k
        )  # a point that is chosen again keeps its first place
        place = jnp.where(jnp.any(known), jnp.argmax(known), k)
        column = jnp.where(jnp.arange(count) < k, new[indices], 0).at[place].set(diagonal[index])
        rows, goal = rows.at[place].set(new), goal.at[place].set(target[index])
        gram = gram.at[place].set(column).at[:, place].set(column)
        indices = indices.at[place].set(index)
        # Reverse mode knows no `while_loop`. The objective needs none: it is flat in its best
        # weights.
        weights, active = _min_norm(
            *lax.stop_gradient((gram, goal, weights)), active.at[place].set(True)
        )
        weights = jnp.where(k == 0, jnp.zeros(count, dtype).at[0].set(1), weights)
        objective = jnp.sum(weights * (matmul(gram, weights) - 2 * goal))
        return (rows, gram, goal, weights, active, indices), objective

    start = (
        jnp.zeros((count, target.shape[0]), dtype),
        jnp.zeros((count, count), dtype),
        jnp.zeros(count, dtype),
        jnp.zeros(count, dtype),
        jnp.zeros(count, bool),
        jnp.zeros(count, int),
    )
    (_, gram, goal, weights, active, indices), objective = lax.scan(step, start, jnp.arange(count))
    # The weights as they were found, with the gradient of the best ones on their face, which they
    # are.
    best = _minimize(gram, goal, active)
    return indices, weights + (best - lax.stop_gradient(best)), objective


def _minimize(gram, goal, active: Bool[Array, " m"]):
    """The best weights of sum 1 on a face, of any sign."""
    lower, sides = _factor(gram, jnp.stack([goal, jnp.ones_like(goal)], 1), active)
    solved = triangular_solve(lower, triangular_solve(lower, sides), transpose=True)
    level = (1 - jnp.sum(solved[:, 0])) / jnp.sum(solved[:, 1])
    return jnp.where(active, solved[:, 0] + level * solved[:, 1], 0)


def _min_norm(gram, goal, weights, active: Bool[Array, " m"]):
    """Wolfe's inner loop.

    From feasible weights to the best of sum 1 on a face where all of them are positive.
    """

    def step(carry):
        weights, active, _ = carry
        best = _minimize(gram, goal, active)
        negative = active & (best <= 0)
        # A new point has no weight yet, and may need none: then it is there already.
        gap = weights - best
        ratios = jnp.where(gap > 0, weights / jnp.where(gap > 0, gap, 1), 0)
        ratios = jnp.where(negative, ratios, jnp.inf)
        share = jnp.minimum(jnp.min(ratios), 1)
        moved = jnp.where(active, weights + share * (best - weights), 0)
        # The first to reach zero leaves the face, whatever rounding made of it.
        leaves = negative & (ratios <= share)
        return jnp.where(leaves, 0, jnp.maximum(moved, 0)), active & ~leaves, jnp.any(negative)

    weights, active, _ = lax.while_loop(
        lambda carry: carry[2], step, (weights, active, jnp.asarray(True))
    )
    return weights, active


def free(kernel: AbstractKernel, points: Points, target: Float[Array, " c"], diagonal, count: int):
    """The rule "sbq" of `herd`.

    Indices, weights and objectives. The Newton basis of the chosen points chooses the next one. The
    weights are of a Cholesky factor with jitter: those of the basis would be rounding for points
    that are almost in the span of others.
    """
    floor = _SPAN_ROUNDINGS * jnp.finfo(target.dtype).eps * jnp.max(diagonal)

    def step(carry, k):
        basis, residual, power = carry
        gains = jnp.where(power > floor, residual**2 / jnp.where(power > floor, power, 1), -1)
        index = jnp.argmax(gains)
        found = gains[index] >= 0
        height = jnp.sqrt(jnp.where(found, power[index], 1))
        new = (
            kernel_row(kernel, points, index, target.dtype) - matmul(basis[:, index], basis)
        ) / height
        new = jnp.where(found, new, 0)
        coefficient = jnp.where(found, residual[index] / height, 0)
        residual, power = (
            residual - coefficient * new,
            jnp.maximum(power - new**2, 0).at[index].set(0),
        )
        return (basis.at[k].set(new), residual, power), (index, found)

    start = (jnp.zeros((count, target.shape[0]), target.dtype), target, diagonal)
    _, (index, found) = lax.scan(step, start, jnp.arange(count))
    chosen = take(points, index)
    lower, goal = _factor(kernel.gram(chosen, chosen).astype(target.dtype), target[index], found)
    # A place that found no point has weight 0. A leading block is the factor of the first points.
    coefficients = triangular_solve(lower, goal[:, None])
    weights = triangular_solve(lower, coefficients, transpose=True)[:, 0]
    return index, weights, -jnp.cumsum(coefficients[:, 0] ** 2)


def _factor(gram, goal, active: Bool[Array, " m"]):
    """Cholesky factor of the active points with jitter, of the identity elsewhere, and goals."""
    gram = jnp.where(active[:, None] & active[None, :], gram, 0)
    lower = cholesky(gram + jnp.diag(jnp.where(active, jitter(gram), 1)))
    return lower, jnp.where(active.reshape(-1, *[1] * (goal.ndim - 1)), goal, 0)
