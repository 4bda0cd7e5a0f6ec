r"""What is read off embeddings: moments, draws, marginals, distances."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, as_points, is_concrete, take
from .._numerics import matmul, safe_sqrt
from .._typing import Array, Float, Point, Points, PRNGKeyArray
from ..kernels import DirectSum, KernelLike, TensorProduct, as_kernel
from ._densities import probabilities
from ._embedding import (
    Embedding,
    check_one_space,
    check_points,
    evaluate,
    expectation,
    guarded_sum,
    inner,
    normalized,
)
from ._quantiles import LEAST_MASS, rearranged_variance


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
    check_one_space(p, q)
    return _squared_mmd(p, q, bool(unbiased))


@eqx.filter_jit
def _squared_mmd(p: Embedding, q: Embedding, unbiased: bool) -> Float[Array, "*batch"]:
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
    check_points(embedding)
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
    r"""Variance of each coordinate under the distribution that `quantile` reads `[..., *point]`.

    For non-negative weights it is $\sum_i w_i (x_i - m)^2 / \sum_i w_i$. With signed weights that
    sum can be negative: a narrow posterior would get the variance 0. The distribution of
    `quantile` goes up only, and lies nearer to the truth.

    NaN and errors as `mean`. Cost O(n d), and for signed weights O(b d n log n) for b embeddings.
    """
    embedding = _real(embedding, "variance")

    def one(leaf):
        unit, found = _variance(leaf, embedding.weights)
        return unit**2 * found

    return jax.tree.map(one, embedding.points)


@jax.jit
def _variance(
    leaf: Float[Array, "n *d"], weights: Float[Array, "*b n"]
) -> tuple[Float[Array, "*d"], Float[Array, "..."]]:
    """A unit for each coordinate, and variances in it: squares of small numbers underflow."""
    flat = leaf.reshape(leaf.shape[0], -1).astype(weights.dtype)
    # Around the mean of the sample, which keeps digits where the mean is large.
    centered = flat - jnp.mean(flat, axis=0)
    unit = lax.stop_gradient(jnp.max(jnp.abs(centered), axis=0))
    unit = jnp.where(unit > 0, unit, 1)
    centered = centered / unit
    rows = weights.reshape(-1, weights.shape[-1])

    def plain():
        def around(row):  # its own mean: a narrow belief would cancel around another
            weights, mean = row
            return jnp.sum(weights[:, None] * (centered - mean) ** 2, axis=0)

        return lax.map(around, (rows, matmul(rows, centered)), batch_size=64)

    def rearranged():
        found = lax.map(lambda column: rearranged_variance(rows, column), centered.T).T
        # Where no weight is negative both are equal, but not in their gradients at weight 0.
        return jnp.where(jnp.all(rows >= 0, axis=1, keepdims=True), plain(), found)

    found = lax.cond(jnp.all(rows >= 0), plain, rearranged)
    found = jnp.where(jnp.isnan(jnp.sum(rows, axis=1, keepdims=True)), jnp.nan, found)
    found = jnp.maximum(found, 0).reshape(*weights.shape[:-1], *leaf.shape[1:])
    return unit.reshape(leaf.shape[1:]), found


def std(embedding: Embedding) -> Points:
    """Standard deviation of each coordinate, the root of `variance`.

    Its gradient is 0 at 0. Result, cost and errors: `variance`.
    """
    embedding = _real(embedding, "std")

    def one(leaf):
        unit, found = _variance(leaf, embedding.weights)
        return unit * safe_sqrt(found)

    return jax.tree.map(one, embedding.points)


def sample(embedding: Embedding, num_samples: int, *, key: PRNGKeyArray) -> Points:
    r"""Draw points of the embedding's sample, with the weights of `probabilities`.

    **Arguments:** `num_samples` (static); `key`: randomness.

    **Returns:** `[num_samples, *point]`, with the batch axes of the weights behind the first axis.
    Signed weights count by the nearest distribution on the sample. Where they say that the
    distribution lies outside of the sample, as extrapolations do, `herd` with candidates there.
    Cost O(b n log n + b num_samples log n).

    **Raises:** `ValueError` for weights that cannot be a distribution, see `quantile`. Inside `jit`
    their draws are uniform.
    """
    count = as_count(num_samples, "num_samples")
    shares = probabilities(embedding)
    if is_concrete(shares) and np.isnan(shares).any():
        raise ValueError(
            "The weights of `embedding` cannot be a distribution: their sum is NaN or below "
            f"{LEAST_MASS}. Normalize weights on another scale first."
        )
    logits = jnp.log(jnp.where(jnp.isnan(shares), 1, shares))
    index = jax.random.categorical(key, logits, shape=(count, *shares.shape[:-1]))
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
        count = len(points)
    elif hasattr(points, "ndim") and points.ndim == 2:
        count = points.shape[1]
    else:
        raise ValueError("`marginal` needs points that are tuples, or vectors [n, d].")
    if not -count <= part < count:
        raise ValueError(f"`part` must be the number of one of {count} parts, got {part}.")
    found = points[part] if isinstance(points, (tuple, list)) else points[:, part]
    if kernel is None:
        if not isinstance(own, (TensorProduct, DirectSum)):
            raise ValueError("Give the `kernel` of the part: only products and sums have one.")
        kernel = own.kernels[part]
    kernel = as_kernel(kernel)
    kernel.check(found, "embedding.points")
    return Embedding(kernel, found, embedding.weights)
