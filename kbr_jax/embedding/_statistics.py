r"""What is read off embeddings: moments, quantiles, draws, marginals, distances."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import as_count, as_points, is_concrete, take
from .._numerics import matmul, safe_sqrt
from .._typing import Array, ArrayLike, Float, Point, PointFunction, Points, PRNGKeyArray
from ..kernels import DirectSum, KernelLike, TensorProduct, as_kernel
from ._embedding import (
    Embedding,
    check_one_space,
    evaluate,
    expectation,
    guarded_sum,
    inner,
    normalized,
)

#: Sum of the weights below which a belief says nothing: its nearest training points would decide.
LEAST_MASS = 0.01


def squared_mmd(p: Embedding, q: Embedding, *, unbiased: bool = False) -> Float[Array, "*batch"]:
    r"""Squared maximum mean discrepancy $|\mu_p - \mu_q|^2$.

    **Arguments:**

    - `p`, `q`: embeddings with one kernel; batch axes broadcast.
    - `unbiased`: leave out the pairs i = j within each sample,

    $$ \frac{\sum_{i \ne j} w_i w_j k(x_i, x_j)}{(\sum_i w_i)^2 - \sum_i w_i^2} (\sum_i w_i)^2
       + \text{(the same for q)} - 2 \langle \mu_p, \mu_q \rangle, $$

    which is unbiased for weights that do not depend on the points (for uniform weights the
    U-statistic of Gretton et al. 2012, eq 3), and can be negative. At least two points with
    non-zero weight are needed on each side (else NaN).

    **Returns:** `[...]`, non-negative up to rounding if biased. Cost O((n + m)^2 d). **Raises:**
    `ValueError` as `inner`, and for the unbiased form of one point.
    """
    norms = [_squared_norm(e, unbiased) for e in (p, q)]
    return norms[0] + norms[1] - 2 * inner(p, q)


def mmd(p: Embedding, q: Embedding) -> Float[Array, "*batch"]:
    r"""$|\mu_p - \mu_q|$, the root of the biased `squared_mmd`.

    Its gradient is 0, not NaN, where the distance is 0.
    """
    return safe_sqrt(squared_mmd(p, q))


def witness(p: Embedding, q: Embedding, points: Point | Points) -> Float[Array, "..."]:
    r"""The (unnormalized) witness function $\mu_p(z) - \mu_q(z)$ at points z `[m, ...]`, large
    where p has more mass.
    """
    check_one_space(p, q)
    return evaluate(p, points) - evaluate(q, points)


def _squared_norm(embedding: Embedding, unbiased: bool) -> Float[Array, "*batch"]:
    if not unbiased:
        return inner(embedding, embedding)
    if embedding.weights.shape[-1] < 2:
        raise ValueError(
            "The unbiased MMD needs at least 2 points on each side; use `unbiased=False`."
        )
    weights = embedding.weights
    gram = embedding.kernel.gram(embedding.points, embedding.points)
    gram = gram * (1 - jnp.eye(gram.shape[0], dtype=gram.dtype))
    off_diagonal = jnp.sum(matmul(weights, gram) * weights, axis=-1)
    mass2 = jnp.sum(weights, axis=-1) ** 2
    return off_diagonal * mass2 / (mass2 - jnp.sum(weights**2, axis=-1))


@eqx.filter_jit
def _real(embedding: Embedding, name: str) -> Embedding:
    """The embedding with weights of sum 1, NaN where the sum is about 0; points must be real."""
    points = as_points(embedding.points, "embedding.points")
    for leaf in jax.tree.leaves(points):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"`{name}` averages points, and these are {leaf.dtype}: labels and indices have no "
                f"mean. Read them by `decode` or `sample`, or convert counts by `.astype(float)`."
            )
    weights = embedding.weights
    known = guarded_sum(weights) == jnp.sum(weights, axis=-1)
    weights = jnp.where(known[..., None], normalized(weights), jnp.nan)
    return Embedding(embedding.kernel, points, weights)


def mean(embedding: Embedding) -> Points:
    r"""Mean of the points, $\sum_i w_i x_i / \sum_i w_i$ `[..., *point]`.

    It is NaN where the sum of the weights is too small to divide by (`normalize`). Cost O(n d).
    **Raises:** `ValueError` for points that are not real, such as labels.
    """
    return expectation(_real(embedding, "mean"), lambda x: x)


def variance(embedding: Embedding) -> Points:
    r"""Variance of each coordinate, $\sum_i w_i (x_i - m)^2 / \sum_i w_i$ `[..., *point]`.

    Signed weights can make it negative; then it is 0. NaN and errors as `mean`. Cost O(n d).
    """
    embedding = _real(embedding, "variance")

    def one(leaf):
        flat = leaf.reshape(leaf.shape[0], -1).astype(embedding.weights.dtype)
        # Around the mean of the sample, which keeps digits where the mean is large.
        centered = flat - jnp.mean(flat, axis=0)
        first = matmul(embedding.weights, centered)
        second = matmul(embedding.weights, centered**2)
        return jnp.maximum(second - first**2, 0).reshape(*first.shape[:-1], *leaf.shape[1:])

    return jax.tree.map(one, embedding.points)


def std(embedding: Embedding) -> Points:
    """Standard deviation of each coordinate, the root of `variance`.

    Its gradient is 0 at 0. Result, cost and errors: `variance`.
    """
    return jax.tree.map(safe_sqrt, variance(embedding))


def sample(embedding: Embedding, num_samples: int, *, key: PRNGKeyArray) -> Points:
    r"""Draw points of the embedding's sample, with probabilities $\max(w_i, 0)$ up to a factor.

    **Arguments:** `num_samples` (static); `key`: randomness.

    **Returns:** `[num_samples, *point]`, with the batch axes of the weights behind the first axis.
    Signed weights are clipped. `herd` takes them into account and is deterministic. Weights without
    any positive one give draws that are uniform. Cost O(b n + b num_samples log n).
    """
    count = as_count(num_samples, "num_samples")
    weights = jnp.maximum(embedding.weights, 0)
    empty = jnp.sum(weights, axis=-1, keepdims=True) <= 0
    logits = jnp.log(jnp.where(empty, 1, weights))
    index = jax.random.categorical(key, logits, shape=(count, *weights.shape[:-1]))
    return take(embedding.points, index)


def marginal(embedding: Embedding, part: int, *, kernel: KernelLike | None = None) -> Embedding:
    r"""Embed the marginal of one part of the points: the same weights, on that part alone.

    **Arguments:**

    - `part`: the number of an entry of points that are tuples, or of a coordinate of points `[d]`.
    - `kernel`: of that part. By default the factor of a `TensorProduct` (or the term of a
      `DirectSum`).

    **Returns:** an `Embedding`, in O(n). **Raises:** `ValueError` for points without parts, and for
    a missing kernel.
    """
    points, own = embedding.points, embedding.kernel
    if isinstance(points, (tuple, list)):
        found = points[part]
    elif hasattr(points, "ndim") and points.ndim == 2:
        found = points[:, part]
    else:
        raise ValueError("`marginal` needs points that are tuples, or vectors [n, d].")
    if kernel is None:
        if not isinstance(own, (TensorProduct, DirectSum)):
            raise ValueError("Give the `kernel` of the part: only products and sums have one.")
        kernel = own.kernels[part]
    kernel = as_kernel(kernel)
    kernel.check(found, "embedding.points")
    return Embedding(kernel, found, embedding.weights)


def _itself(point: Point) -> Point:
    return point


def quantile(
    embedding: Embedding, probabilities: ArrayLike, function: PointFunction = _itself
) -> Float[Array, "..."]:
    r"""Quantiles of real functions of the variable, from weights of any sign.

    Each coordinate is read on its own:

    $$ q(u) = f_{(1)} + \sum_{j < n} (f_{(j+1)} - f_{(j)}) \, 1[F(f_{(j)}) < u], \qquad
       F(t) = \sum_i w_i 1[f_i \le t] \Big/ \sum_i w_i, $$

    with the values $f_i = f(x_i)$ in increasing order. For non-negative weights it is
    $\inf \{t : F(t) \ge u\}$. Signed weights make F go up and down; then q is the quantile function
    of its monotone rearrangement, which is never further from the true distribution function than F
    itself, in any $L^p$ norm (Chernozhukov, Fernandez-Val and Galichon 2009).

    **Arguments:** `embedding`, its weights `[..., n]`; `probabilities`, u in [0, 1], a number or
    `[q]`; `function` from one point to a real array, by default the point itself.

    **Returns:** `[..., *shape]`, with a leading axis `[q]` if u is a vector. Between the least and
    the largest value; piecewise constant in the weights, so that gradients reach the values only.
    NaN where the weights cannot be a distribution: where their sum is NaN, infinite, below .01, or
    positive by rounding alone (`normalize`). A belief of such a mass is far from all training
    points: see its `mass`. Normalize weights on another scale first. The indicator of a set is not
    in the RKHS of a smooth kernel: expect the error of F at a scale below the kernel's bandwidth.
    Cost O(b s n (log n + q)) for b embeddings and s coordinates.

    **Raises:** `ValueError` for probabilities outside [0, 1] or of two axes, and for values that
    are not one real array.
    """
    dtype = embedding.weights.dtype
    levels = jnp.asarray(probabilities, dtype)
    if levels.ndim > 1 or (
        is_concrete(levels) and not np.all((np.asarray(levels) >= 0) & (np.asarray(levels) <= 1))
    ):
        raise ValueError(
            f"`probabilities` must be a number in [0, 1], or a vector of them; got {probabilities}."
        )
    values = jax.vmap(function)(as_points(embedding.points, "embedding.points"))
    if not isinstance(values, jax.Array) or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            "Quantiles need real values, one array for each point: give a `function` that returns "
            "such."
        )
    rows = values.reshape(values.shape[0], -1).astype(dtype)
    weights = embedding.weights.reshape(-1, values.shape[0])
    shares = normalized(weights)
    found = jax.vmap(lambda column: _rearranged(shares, column, levels.reshape(-1)), 1, 2)(rows)
    # Comparisons with NaN, or with shares of nothing, would find an end of the sample. Shares add
    # up to 1 unless guarded.
    known = (jnp.sum(weights, axis=1) >= LEAST_MASS) & (jnp.sum(shares, axis=1) > 0.5)
    found = jnp.where(known[:, None], found, jnp.nan)
    return found.reshape(*levels.shape, *embedding.weights.shape[:-1], *values.shape[1:])


def _rearranged(
    weights: Float[Array, "b n"], values: Float[Array, " n"], levels: Float[Array, " q"]
) -> Float[Array, "q b"]:
    order = jnp.argsort(values)
    ordered = values[order]
    distribution = jnp.cumsum(weights[:, order], axis=1)[:, :-1]
    # Weights that sum to u only up to rounding have reached it.
    slack = 8 * jnp.finfo(weights.dtype).eps
    below = jax.vmap(lambda u: distribution < u - slack)(levels)
    return ordered[0] + jnp.sum(jnp.where(below, jnp.diff(ordered), 0), axis=-1)


def credible_interval(
    embedding: Embedding, level: ArrayLike = 0.95, function: PointFunction = _itself
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    r"""The central interval that holds a share `level` of the probability.

    For each coordinate of f its ends are the `quantile`s at $(1 - \text{level}) / 2$ and
    $(1 + \text{level}) / 2$.

    **Returns:** lower and upper ends, each `[..., *shape]`. Arguments, cost and errors: `quantile`.
    """
    share = jnp.asarray(level, embedding.weights.dtype)
    if share.ndim or (is_concrete(share) and not 0 < float(share) < 1):
        raise ValueError(f"`level` must be one number between 0 and 1, got {level}.")
    lower, upper = quantile(embedding, jnp.stack([(1 - share) / 2, (1 + share) / 2]), function)
    return lower, upper
