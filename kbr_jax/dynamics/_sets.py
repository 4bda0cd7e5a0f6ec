r"""Sequences of samples of different sizes, and the inner products of their mean embeddings."""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    as_count,
    as_float,
    as_mask,
    as_points,
    as_weights,
    check_alike,
    check_finite,
    is_concrete,
    stacked,
    take,
    without_padding,
)
from .._numerics import matmul, one_program
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..embedding import Embedding
from ..kernels import AbstractKernel, KernelLike, as_kernel

#: Entries of the Gram matrices that are formed at a time by default: 16 MiB in float64, which a
#: last-level cache holds.
_BLOCK_ENTRIES = 2**21


class SampleSequence(eqx.Module):
    r"""T samples $S_t = \{z^t_1, \dots, z^t_{n_t}\}$, with embeddings
    $\hat\mu_t = \sum_i w_{ti} k(z^t_i, \cdot)$ (L15 eq 2).

    - `points`: `[T, n, ...]`, shorter samples padded with copies of their last point.
    - `weights`: `[T, n]`, $1 / n_t$ by default and 0 on the padding.
    """

    points: Points
    weights: Float[Array, "*batch T n"]

    @property
    def sizes(self) -> Float[Array, "*batch T"]:
        """How many points of each set have a weight."""
        return jnp.sum(self.weights != 0, axis=-1).astype(self.weights.dtype)


def sample_sequence(
    sets: Sequence[Points] | Points,
    weights: ArrayLike | None = None,
    *,
    mask: ArrayLike | None = None,
) -> SampleSequence:
    """T samples of different sizes as one padded `SampleSequence`.

    **Arguments:**

    - `sets`: a list or tuple of samples `[n_t, ...]` (each an array, or a tuple of arrays: vectors
      and their labels), or T samples of one size already stacked, an array `[T, n, ...]`.
    - `weights` `[T, n]`, of any sign; uniform by default. `mask` `[T, n]`, False for padding; for
      stacked samples only. A set that a traced mask leaves empty has the embedding 0 and no noise:
      give the steps from and to it the step weight 0.

    Memory is T times the largest sample: put very uneven ones in several sequences.

    **Raises:** `ValueError` for an empty sequence, an empty (or fully masked) or non-finite sample,
    or samples of different kinds of point.
    """
    if not isinstance(sets, (list, tuple)):
        return _sequence(sets, weights, mask)
    if mask is not None:
        raise ValueError(
            "`mask` belongs to stacked samples [T, n, ...]; a list of samples is padded here."
        )
    if not sets:
        raise ValueError("`sets` is empty; at least one sample is needed.")
    empty = [t for t, one in enumerate(sets) if 0 in np.shape(jax.tree.leaves(one)[0])[:1]]
    if empty:
        raise ValueError(
            f"`sets[{empty[0]}]` is an empty sample: leave it out, and tell `fit_dynamics` the "
            f'`times` of the others with `form="change"`.'
        )
    points, sizes = stacked(list(sets), "sets")
    return _sequence(points, weights, jnp.asarray(np.arange(sizes.max()) < sizes[:, None]))


def _sequence(points: Points, weights: ArrayLike | None, mask: ArrayLike | None) -> SampleSequence:
    points = as_points(points, "sets")
    leaves = jax.tree.leaves(points)
    shape = leaves[0].shape[:2]
    if any(leaf.ndim < 2 or leaf.shape[:2] != shape for leaf in leaves) or shape[1] == 0:
        raise ValueError(
            "Stacked `sets` need the shape [T, n, ...] with n >= 1 in every part; pass a list of "
            "samples if their sizes differ."
        )
    dtype = jnp.result_type(
        *[leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)] or [float]
    )
    present = as_mask(mask, shape, "mask")
    if is_concrete(present) and not np.all(np.any(np.asarray(present), axis=1)):
        empty = np.flatnonzero(~np.any(np.asarray(present), axis=1)).tolist()
        raise ValueError(
            f"`mask` leaves no point of the sets {empty}; drop them: the `times` of `fit_dynamics` "
            f"allow for gaps."
        )
    if mask is not None:
        points = jax.vmap(without_padding)(points, present)
    points = check_finite(points, "sets")
    if weights is None:
        return SampleSequence(points, _uniform(present).astype(dtype))
    weights = as_weights(weights, shape[1], "weights", dtype)
    if weights.shape != shape:
        raise ValueError(
            f"`weights` has shape {weights.shape}; sets of shape {shape} need one weight a point."
        )
    return SampleSequence(points, jnp.where(present, weights, 0))


@one_program
def _uniform(present: Bool[Array, "T n"]) -> Float[Array, "T n"]:
    counts = jnp.sum(present, axis=1, keepdims=True).astype(float)
    return jnp.where(present, 1 / jnp.maximum(counts, 1), 0)


def combine(kernel: KernelLike, sets: SampleSequence, coefficients: ArrayLike) -> Embedding:
    r"""$\sum_t c_t \hat\mu_t$ as one embedding of all points (L15 eqs 5 and 8), coefficients `[T]`
    of any sign.

    The baselines of L15: `[0, ..., 0, 1]` is the last set, `sets.sizes / sets.sizes.sum()` all sets
    together.

    **Returns:** an `Embedding` on T n points, weights $c_t w_{ti}$ `[..., T n]`. Cost O(T n).
    **Raises:** `ValueError` for coefficients of another number, or points outside the kernel's
    domain.
    """
    kernel = as_kernel(kernel)
    count = sets.weights.shape[0]
    coefficients = as_weights(as_float(coefficients), count, "coefficients", sets.weights.dtype)
    points = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), sets.points)
    kernel.check(points, "sets")
    weights = coefficients[..., :, None] * sets.weights
    return Embedding(kernel, points, weights.reshape(*weights.shape[:-2], -1))


def embedding_gram(
    kernel: KernelLike,
    sets: SampleSequence,
    others: SampleSequence | None = None,
    *,
    block_size: int | None = None,
) -> Float[Array, "S T"]:
    r"""Inner products of embedded samples, $G_{st} = \sum_{ij} w_{si} w'_{tj} k(z^s_i, z'^t_j)$
    (L15, below eq 5).

    **Arguments:**

    - `kernel`: of the points. `sets`, `others`: S and T samples; `others` None for the sets with
      themselves, each pair once.
    - `block_size`: pairs of sets whose Gram matrices are formed at a time (static), by default
      about 2^21 / (n m).

    **Returns:** `[S, T]`. Cost O(S T n m d), half for one sequence; memory O(n m) beside the sets;
    the gradient forms each block once more, in the same memory.

    **Raises:** `ValueError` if the points differ in kind or are not of the kernel's domain.
    """
    kernel = as_kernel(kernel)
    same = others is None
    others = sets if others is None else others
    first, second = (jax.tree.map(lambda leaf: leaf[0], part.points) for part in (sets, others))
    check_alike(second, "a set of `others`", first, "one of `sets`")
    for part, name in ((sets, "sets"), (others, "others"))[: 1 if same else 2]:
        kernel.check(
            jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), part.points), name
        )
    s, t = sets.weights.shape[0], others.weights.shape[0]
    pairs = np.triu_indices(s) if same else np.unravel_index(np.arange(s * t), (s, t))
    entries = sets.weights.shape[1] * others.weights.shape[1]
    block_size = (
        max(1, _BLOCK_ENTRIES // entries)
        if block_size is None
        else as_count(block_size, "block_size")
    )
    values = _products(
        kernel,
        sets,
        others,
        pairs,
        min(block_size, len(pairs[0])),
    )
    if not same:
        return values.reshape(s, t)
    return _symmetric(values, s)


@functools.partial(one_program, static_argnums=1)
def _symmetric(upper: Float[Array, " p"], size: int) -> Float[Array, "T T"]:
    gram = jnp.zeros((size, size), upper.dtype).at[np.triu_indices(size)].set(upper)
    return gram + jnp.triu(gram, 1).T


@eqx.filter_jit
def _products(
    kernel: AbstractKernel, sets: SampleSequence, others: SampleSequence, pairs, block: int
) -> Float[Array, " p"]:
    # The checkpoint keeps the reverse pass from storing the Gram matrix of every pair.
    @jax.checkpoint
    def product(pair):
        a, b = take(sets, pair[0]), take(others, pair[1])
        values = kernel.gram(a.points, b.points).astype(a.weights.dtype)
        return jnp.sum(a.weights * matmul(values, b.weights))

    return lax.map(product, pairs, batch_size=block) if block > 1 else lax.map(product, pairs)


def sampling_noise(
    kernel: KernelLike, sets: SampleSequence, *, squared_norms: Float[Array, " T"] | None = None
) -> Float[Array, " T"]:
    r"""Expected squared distance of each embedding from that of its distribution,
    $E |\hat\mu_t - \mu_t|^2$, estimated without bias:
    $(\frac1n \sum_i k(z_i, z_i) - |\hat\mu_t|^2) / (n - 1)$ for n points of equal weight (0 for one
    point, or for a mass of 0).

    With weights of sum s, $v = \sum_i w_i^2 / s^2$ takes the place of 1 / n. **Arguments:**
    `squared_norms` `[T]` of the embeddings, the diagonal of `embedding_gram`, if known.
    **Returns:** `[T]`. Cost O(T n^2 d), or O(T n d) with the norms.
    """
    kernel = as_kernel(kernel)
    kernel.check(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), sets.points), "sets")
    weights = sets.weights
    if squared_norms is None:
        index = jnp.arange(weights.shape[0])
        squared_norms = _products(kernel, sets, sets, (index, index), 1)
    own = jax.vmap(kernel.diagonal)(sets.points).astype(weights.dtype)
    return _noise(weights, own, squared_norms)


def mean_noise(
    kernel: AbstractKernel, sets: SampleSequence, squared_norms: Float[Array, " T"], remedy: str
) -> Float[Array, ""]:
    """The mean of `sampling_noise` over sets of more than one point: one does not tell it."""
    many = sets.sizes > 1
    if is_concrete(many) and not np.any(np.asarray(many)):
        raise ValueError(f"Sets of one point do not tell how much an embedding scatters: {remedy}.")
    noise = sampling_noise(kernel, sets, squared_norms=squared_norms)
    return _mean_where(noise, many)


@one_program
def _mean_where(values: Float[Array, " T"], kept: Bool[Array, " T"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(kept, values, 0)) / jnp.maximum(jnp.sum(kept), 1).astype(values.dtype)


@one_program
def _noise(
    weights: Float[Array, "T n"], own: Float[Array, "T n"], squared_norms: Float[Array, " T"]
) -> Float[Array, " T"]:
    mass = jnp.sum(weights, axis=-1)
    whole = mass != 0
    spread = jnp.where(whole, jnp.sum(weights**2, axis=-1) / jnp.where(whole, mass, 1) ** 2, 1)
    excess = jnp.sum(weights * own, axis=-1) * mass - squared_norms
    # Weights of mixed sign may have a spread above 1, and then an excess below 0.
    alone = jnp.abs(1 - spread) <= 4 * jnp.finfo(weights.dtype).eps
    return jnp.maximum(jnp.where(alone, 0, excess * spread / jnp.where(alone, 1, 1 - spread)), 0)
