r"""Distributions as weighted samples: $\mu = \sum_i w_i \phi(x_i)$, with weights of any sign."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_arrays,
    as_batch,
    as_points,
    as_real,
    as_weights,
    check_alike,
    check_finite,
    is_concrete,
    size,
)
from .._numerics import HIGHEST, matmul, one_program, safe_sqrt
from .._trees import same
from .._typing import Array, ArrayLike, Float, Point, PointFunction, Points, with_numbers
from ..kernels import AbstractKernel, KernelLike, gram_matvec, kernel_for


class Embedding(eqx.Module):
    r"""Mean embedding $\mu = \sum_i w_i k(x_i, \cdot)$ of a distribution: an estimate of S13 eq 1,
    with $w_i = 1 / n$ its eq 4.

    - `kernel`: the kernel of the RKHS.
    - `points`: sample `[n, ...]`.
    - `weights`: `[n]`, or `[..., n]` for a batch of embeddings on one sample. Negative weights are
      legal, and weights need not sum to 1 (`mass`).
    """

    kernel: AbstractKernel
    points: Points
    weights: Float[Array, "*batch n"]

    __repr__ = with_numbers

    @property
    def mass(self) -> Float[Array, "*batch"]:
        """Sum of the weights.

        1 for a probability distribution, near 1 for a good estimate of one.
        """
        return jnp.sum(self.weights, axis=-1)


def embed(kernel: KernelLike, points: Points, weights: ArrayLike | None = None) -> Embedding:
    r"""Embed a sample: $\hat\mu = \sum_i w_i k(x_i, \cdot)$ (S13 eq 4; S09 eq 2b), uniform weights
    $1 / n$ by default.

    **Arguments:**

    - `kernel`: a kernel, any callable of two points, or None (`default_kernel`).
    - `points`: sample `[n, ...]`: an array, or a pytree of arrays with a common leading axis.
    - `weights`: `[n]` or `[..., n]`, of any sign.

    **Raises:** `ValueError` for an empty or non-finite sample, a dtype that is not the kernel's,
    weights of a wrong length. Weights that are NaN mark a missing belief.

    **Example:**

    >>> import jax.numpy as jnp, kbr_jax as kbr
    >>> mu = kbr.embed(kbr.Gaussian(1.0), jnp.arange(5.0))
    >>> print(f"{kbr.mean(mu):.2f} {kbr.std(mu):.2f} {kbr.evaluate(mu, 2.0):.2f}")
    2.00 1.41 0.50
    """
    points = check_finite(as_points(points, "points"), "points")
    kernel = kernel_for(kernel, points)
    kernel.check(points, "points")
    dtype = jax.eval_shape(kernel.diagonal, points).dtype
    weights = as_weights(weights, size(points), "weights", dtype)
    return Embedding(kernel, points, weights.astype(np.promote_types(weights.dtype, dtype)))


def check_embedding(value: Any, name: str) -> None:
    """Raise a `ValueError` for anything but an embedding, such as its points."""
    if not isinstance(value, Embedding):
        kind = type(value).__name__ if is_concrete(value) else "an array"
        raise ValueError(
            f"`{name}` must be an Embedding, got {kind}: embed a sample by "
            f"`kbr.embed(kernel, points)`."
        )
    check_points(value)


def check_points(embedding: Any) -> None:
    """Raise a `ValueError` unless all embeddings have the same points."""
    if not isinstance(embedding, Embedding):
        check_embedding(embedding, "embedding")
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(embedding.points) if np.ndim(leaf)}
    if sizes - {embedding.weights.shape[-1]}:
        raise ValueError(
            f"An embedding has weights of shape {embedding.weights.shape} and {min(sizes)} points. "
            f"If it was made by `vmap`, read the number inside of it: "
            f"`jax.vmap(lambda x: kbr.mean(forecast(x)))(xs)`."
        )


def check_unbatched(embedding: Embedding, name: str) -> None:
    """One embedding, not a batch of them; else a `ValueError` that names the argument."""
    check_embedding(embedding, name)
    if embedding.weights.ndim != 1:
        raise ValueError(
            f"`{name}` is a batch of shape {embedding.weights.shape}; use `jax.vmap` over its "
            f"weights."
        )


def one_each(embedding: Embedding, points: Point | Points) -> Points:
    """One point for each embedding of a batch, itself a batch."""
    if embedding.weights.ndim > 2:
        raise ValueError("Give weights `[n]` or `[b, n]`; use `jax.vmap` for more axes.")
    count = 1 if embedding.weights.ndim == 1 else len(embedding.weights)
    if embedding.weights.ndim == 1:
        points = jax.tree.map(lambda leaf: leaf[None], as_arrays(points, "points"))
    points = as_real(as_points(points, "points"), embedding.points)
    check_alike(points, "points", embedding.points, "embedding.points")
    if size(points) != count:
        raise ValueError(
            f"`points` must hold one point for each of {count} embeddings, got {size(points)}."
        )
    return points


def evaluate(embedding: Embedding, points: Point | Points) -> Float[Array, "..."]:
    r"""Values $\mu(z) = \sum_i w_i k(x_i, z)$ at one point or m points `[m, ...]`; cost O(n m d).

    For a density-like view of a belief, evaluate it on a grid. Returns `[..., m]`, or `[...]` for
    one point.
    """
    check_points(embedding)
    batch, single = as_batch(points, "points", embedding.points, "embedding.points")
    embedding.kernel.check(batch, "points")
    values = matmul(embedding.weights, embedding.kernel.gram(embedding.points, batch))
    return values[..., 0] if single else values


def expectation(embedding: Embedding, function: PointFunction) -> Any:
    r"""Estimate of $E[f(X)]$, $\sum_i w_i f(x_i)$.

    **Arguments:** `function` maps one point to an array of any shape (or a pytree of arrays); it
    need not be in the RKHS, but convergence is assured only for functions that are, or nearly are.

    **Returns:** `[..., *shape]`, leading axes as the batch of weights. Not divided by the mass: for
    weights that do not sum to 1 consider `normalize`. Cost: n calls of `function`.
    """
    check_points(embedding)
    values, weights = jax.vmap(function)(embedding.points), embedding.weights
    return jax.tree.map(
        lambda v: jnp.tensordot(weights, v.astype(weights.dtype), axes=1, precision=HIGHEST), values
    )


def inner(p: Embedding, q: Embedding) -> Float[Array, "*batch"]:
    r"""$\langle \mu_p, \mu_q \rangle = \sum_{ij} w_i v_j k(x_i, y_j)$; batch axes broadcast.

    With q the expansion of a function g, this is the kernel Bayes average $E_p[g]$ (S13 eq 25).
    Cost O(n m d), in blocks: memory O(n + m). **Raises:** `ValueError` for points of different
    kinds, and for kernels that differ, where their parameters can be read.
    """
    check_one_space(p, q)
    return _inner(p, q)


@eqx.filter_jit
def _inner(p: Embedding, q: Embedding) -> Float[Array, "*batch"]:
    if q.weights.ndim > p.weights.ndim:
        p, q = q, p
    columns = q.weights.reshape(-1, q.weights.shape[-1]).T
    smooth = gram_matvec(p.kernel, p.points, q.points, columns).T
    return jnp.sum(p.weights * smooth.reshape(*q.weights.shape[:-1], -1), axis=-1)


def check_one_space(p: Embedding, q: Embedding) -> None:
    """Raise a `ValueError` unless two embeddings may live in one RKHS."""
    check_embedding(p, "p")
    check_embedding(q, "q")
    check_alike(q.points, "q.points", p.points, "p.points")
    if not same(p.kernel, q.kernel):
        raise ValueError(
            f"The embeddings have different kernels, {p.kernel} and {q.kernel}: they are not in "
            "one RKHS. Embed both with one kernel."
        )


def squared_norm(embedding: Embedding) -> Float[Array, "*batch"]:
    r"""$|\mu|^2$ in the RKHS; cost O(n^2 d)."""
    return inner(embedding, embedding)


def norm(embedding: Embedding) -> Float[Array, "*batch"]:
    r"""$|\mu|$ in the RKHS, with gradient 0 at $\mu = 0$; cost O(n^2 d)."""
    return safe_sqrt(squared_norm(embedding))


def mixture(embeddings: Sequence[Embedding], shares: ArrayLike) -> Embedding:
    r"""The mixture $\sum_c \pi_c \mu_c$, on the concatenated samples.

    **Arguments:** `embeddings` in one RKHS (the kernel of the first is kept), unbatched; `shares`
    `[c]`, of any sign.
    """
    if not embeddings:
        raise ValueError("`embeddings` is empty; a mixture needs at least one.")
    shares = as_weights(jnp.asarray(shares), len(embeddings), "shares", embeddings[0].weights.dtype)
    if shares.ndim != 1:
        raise ValueError(
            f"`shares` must be one vector of {len(embeddings)} numbers, got shape {shares.shape}."
        )
    for index, other in enumerate(embeddings):
        check_alike(
            other.points,
            f"embeddings[{index}].points",
            embeddings[0].points,
            "embeddings[0].points",
        )
        check_unbatched(other, f"embeddings[{index}]")
    points = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[e.points for e in embeddings])
    weights = [
        share.astype(e.weights.dtype) * e.weights
        for share, e in zip(shares, embeddings, strict=True)
    ]
    return Embedding(embeddings[0].kernel, points, jnp.concatenate(weights))


def normalize(embedding: Embedding) -> tuple[Embedding, Float[Array, "*batch"]]:
    r"""Divide the weights by their sum.

    **Returns:** the embedding with weights of sum 1, and the mass before, as the diagnostic: a mass
    far from 1, or small beside $\sum_i |w_i|$, says that the estimate is poor. Signed weights can
    cancel: below a relative mass of `sqrt(eps)` (1e-8 in float64, 3e-4 in float32) the divisor is
    kept at that fraction of $\sum_i |w_i|$, so the result is finite (and its mass not 1).
    """
    mass = embedding.mass
    return Embedding(embedding.kernel, embedding.points, normalized(embedding.weights)), mass


@one_program
def normalized(weights: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Weights divided by their sum, guarded as `normalize` says."""
    return weights / guarded_sum(weights)[..., None]


@one_program
def guarded_sum(weights: Float[Array, "*batch n"]) -> Float[Array, "*batch"]:
    """The sum of weights, kept away from 0 as `normalize` says."""
    mass, size_ = jnp.sum(weights, axis=-1), jnp.sum(jnp.abs(weights), axis=-1)
    floor = float(np.sqrt(jnp.finfo(weights.dtype).eps)) * jnp.where(size_ > 0, size_, 1)
    return jnp.where(jnp.abs(mass) > floor, mass, jnp.where(mass < 0, -floor, floor))
