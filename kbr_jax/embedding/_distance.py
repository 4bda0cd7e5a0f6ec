"""Distances between distributions in the RKHS."""

import jax.numpy as jnp

from .._numerics import matmul, safe_sqrt
from .._typing import Array, Float, Point, Points
from ._embedding import Embedding, check_one_space, evaluate, inner


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

    **Returns:** `[...]`, non-negative up to rounding if biased. Cost O((n + m)^2 d).
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
