r"""Joint distributions $C_{XY} = \sum_{ij} W_{ij} \phi(x_i) \otimes \psi(y_j)$, covariances and
dependence.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_points, as_weights, check_finite, check_same_size, size
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, PointFunction, Points
from ..kernels import AbstractKernel, KernelLike, kernel_for
from ._embedding import Embedding


class JointEmbedding(eqx.Module):
    r"""Embedding of a joint distribution, $C_{XY} = \sum_{ij} W_{ij} \phi(x_i) \otimes \psi(y_j)$
    (S13 section 2).

    - `kernel_x`, `kernel_y`, `x` `[n, ...]`, `y` `[m, ...]`: kernels and samples of the two
      variables.
    - `weights`: `[..., n]` with `paired` (n = m, W diagonal: the points are pairs), else the full W
      `[..., n, m]`.
    """

    kernel_x: AbstractKernel
    kernel_y: AbstractKernel
    x: Points
    y: Points
    weights: Float[Array, "..."]
    paired: bool = eqx.field(static=True)

    @property
    def mass(self) -> Float[Array, "*batch"]:
        """Sum of the weights, 1 for a probability distribution."""
        return jnp.sum(self.weights, axis=-1 if self.paired else (-2, -1))


class CrossCovariance(eqx.Module):
    r"""Cross-covariance operator of weighted pairs,
    $C = \sum_i w_i \phi(x_i) \otimes \psi(y_i) - \mu_x \otimes \mu_y$.

    In the Gram form $\Upsilon (\operatorname{diag}(w) - w w^\top) \Phi^\top$; with uniform weights
    S09 eq 3 and its estimator $\Upsilon H \Phi^\top / n$. `weights` is `[..., n]`.
    """

    kernel_x: AbstractKernel
    kernel_y: AbstractKernel
    x: Points
    y: Points
    weights: Float[Array, "*batch n"]


def embed_joint(
    kernel_x: KernelLike,
    kernel_y: KernelLike,
    x: Points,
    y: Points,
    weights: ArrayLike | None = None,
) -> JointEmbedding:
    r"""Embed pairs: $\hat C_{XY} = \sum_i w_i \phi(x_i) \otimes \psi(y_i)$ (S13 eq 5), uniform
    weights by default.

    **Arguments:** kernels; samples `x` `[n, ...]` and `y` `[n, ...]`; `weights` `[n]` or `[..., n]`
    of any sign.

    **Raises:** `ValueError` for samples of different sizes, empty or non-finite samples, wrong
    dtypes or weights.
    """
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    kernel_x, kernel_y = kernel_for(kernel_x, x), kernel_for(kernel_y, y)
    check_same_size(x, "x", y, "y")
    kernel_x.check(x, "x")
    kernel_y.check(y, "y")
    dtype = jax.eval_shape(kernel_x.diagonal, x).dtype
    return JointEmbedding(
        kernel_x, kernel_y, x, y, as_weights(weights, size(x), "weights", dtype), True
    )


def marginals(joint: JointEmbedding) -> tuple[Embedding, Embedding]:
    """Embeddings of the two marginals."""
    w_x, w_y = (
        (joint.weights, joint.weights)
        if joint.paired
        else (joint.weights.sum(-1), joint.weights.sum(-2))
    )
    return Embedding(joint.kernel_x, joint.x, w_x), Embedding(joint.kernel_y, joint.y, w_y)


def joint_expectation(
    joint: JointEmbedding, f: PointFunction, g: PointFunction
) -> Float[Array, "*batch"]:
    r"""Estimate of $E[f(X) g(Y)]$, $\sum_{ij} W_{ij} f(x_i) g(y_j)$, for real-valued f and g.

    Cost O(n m), paired O(n).
    """
    a, b = _values(f, joint.x, joint.weights.dtype), _values(g, joint.y, joint.weights.dtype)
    if joint.paired:
        return matmul(joint.weights, a * b)
    return matmul(matmul(joint.weights, b), a)


def _values(function: PointFunction, points: Points, dtype: jnp.dtype) -> Float[Array, " n"]:
    values = jax.vmap(function)(points)
    if jnp.ndim(values) != 1:
        raise ValueError(
            f"The function must map a point to one number; its values have shape "
            f"{jnp.shape(values)[1:]}."
        )
    return values.astype(dtype)


def cross_covariance(joint: JointEmbedding) -> CrossCovariance:
    """The cross-covariance operator of paired points.

    A full W has none in this form (`ValueError`).
    """
    if not joint.paired:
        raise ValueError(
            "`cross_covariance` needs a joint embedding of pairs; chain rule (b) gives one."
        )
    return CrossCovariance(joint.kernel_x, joint.kernel_y, joint.x, joint.y, joint.weights)


def covariance(
    operator: CrossCovariance, f: PointFunction, g: PointFunction
) -> Float[Array, "*batch"]:
    r"""Estimate of Cov[f(X), g(Y)] =
    $\sum_i w_i f(x_i) g(y_i) - (\sum_i w_i f(x_i)) (\sum_i w_i g(y_i))$ (S09 eq 4).

    f and g map one point to a number. Cost O(n).
    """
    w = operator.weights
    a, b = _values(f, operator.x, w.dtype), _values(g, operator.y, w.dtype)
    return matmul(w, a * b) - matmul(w, a) * matmul(w, b)


@eqx.filter_jit
def squared_hs_norm(operator: CrossCovariance) -> Float[Array, "*batch"]:
    r"""Squared Hilbert-Schmidt norm $\operatorname{tr}(B K B L)$ with
    $B = \operatorname{diag}(w) - w w^\top$.

    $$ w^\top (K \circ L) w - 2 w^\top (K w \circ L w) + (w^\top K w)(w^\top L w), $$

    so the cost is O(n^2 d), with no matrix product. Zero where a variable is constant and the
    weights sum to 1 (else what is missing from 1 remains, squared).
    """
    k, f = _centered(operator.kernel_x.gram(operator.x, operator.x))
    l, g = _centered(operator.kernel_y.gram(operator.y, operator.y))  # noqa: E741 (the papers' letter)
    w = operator.weights
    kw, lw = matmul(w, k), matmul(w, l)

    def total(*factors):
        return functools.reduce(jnp.multiply, factors).sum(axis=-1)

    joint = total(matmul(w, k * l), w) - 2 * total(w, kw, lw) + total(w, kw) * total(w, lw)
    # B 1 = (1 - sum(w)) w: weights of another mass see what centering takes away.
    mass = total(w)
    bf, bg = (w * (part - total(w, part)[..., None]) for part in (f, g))
    uncentered = kw + mass[..., None] * f + total(w, f)[..., None]
    return joint + 2 * (1 - mass) * (total(bf, lw) + total(bg, uncentered))


def _centered(gram: Float[Array, "n n"]) -> tuple[Float[Array, "n n"], Float[Array, " n"]]:
    r"""The centered C and f of a Gram matrix $C + f 1^\top + 1 f^\top$.

    Where points are far from the origin of the feature space, sums over K would cancel.
    """
    f = jnp.mean(gram, axis=1) - jnp.mean(gram) / 2
    return gram - f[:, None] - f, f


def hsic(
    kernel_x: KernelLike, kernel_y: KernelLike, x: Points, y: Points, *, unbiased: bool = False
) -> Float[Array, ""]:
    r"""Hilbert-Schmidt independence criterion of n pairs, $\operatorname{tr}(K H L H) / n^2$
    (Gretton et al. 2005).

    `unbiased` gives the U-statistic (Song et al. 2012), which needs n >= 4 and can be negative:

    $$ \frac{1}{n (n-3)} \Big[ \operatorname{tr}(\tilde K \tilde L)
       + \frac{1^\top \tilde K 1 \, 1^\top \tilde L 1}{(n-1)(n-2)} - \frac{2}{n-2} 1^\top \tilde
          K \tilde L 1 \Big], $$

    with the tilde for a zero diagonal. Zero in the limit if and only if X and Y are independent,
    for characteristic kernels. Cost O(n^2 d). Raises as `embed_joint`.
    """
    joint = embed_joint(kernel_x, kernel_y, x, y)
    if not unbiased:
        return squared_hs_norm(cross_covariance(joint))
    n = size(joint.x)
    if n < 4:
        raise ValueError(f"The unbiased HSIC needs at least 4 pairs, got {n}.")
    return _unbiased_hsic(joint)


@eqx.filter_jit
def _unbiased_hsic(joint: JointEmbedding) -> Float[Array, ""]:
    n = size(joint.x)
    off = 1 - jnp.eye(n, dtype=joint.weights.dtype)
    # Centering does not change the statistic.
    k = off * _centered(joint.kernel_x.gram(joint.x, joint.x))[0]
    l = off * _centered(joint.kernel_y.gram(joint.y, joint.y))[0]  # noqa: E741
    rows_k, rows_l = jnp.sum(k, axis=0), jnp.sum(l, axis=0)
    trace, product = jnp.sum(k * l), jnp.sum(rows_k) * jnp.sum(rows_l)
    product = product / float((n - 1) * (n - 2)) - 2 * matmul(rows_k, rows_l) / (n - 2)
    return (trace + product) / float(n * (n - 3))
