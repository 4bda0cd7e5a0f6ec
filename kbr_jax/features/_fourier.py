r"""Random Fourier features of shift-invariant kernels: a feature map that does not look at the
sample.

$$ \phi(x) = \sqrt{2 / r}\, [\cos(\omega_j^\top x / h), \sin(\omega_j^\top x / h)]_{j \le r / 2},
   \qquad
   E\, \phi(x)^\top \phi(y) = k(x, y), \quad \phi(x)^\top \phi(x) = k(x, x) = 1, $$

with $\omega_j$ from the spectral density of the kernel of bandwidth 1 (Rahimi and Recht 2007). The
draws are kept and the bandwidth h divides them, so a loss with fixed draws is a smooth function of
h and its gradient flows through the features.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_count, as_points, check_alike, check_finite
from .._numerics import matmul
from .._typing import Array, Bool, Float, Points, PRNGKeyArray
from ..kernels import (
    WITH_SPECTRUM,
    AbstractKernel,
    AbstractShiftInvariant,
    DirectSum,
    KernelLike,
    Product,
    Scaled,
    Sum,
    TensorProduct,
    as_kernel,
    kernel_for,
)
from ._features import AbstractFeatureMap, masked_rows

#: A product of shift-invariant kernels, each with its part of the points, times scalar factors.
_Term = tuple[list[Float[Array, ""]], list[tuple[AbstractShiftInvariant, Any]]]


class RandomFourier(eqx.Module):
    """Draws for random Fourier features, to be passed wherever landmarks are; made by
    `random_fourier`.

    `draws` holds, for each term of a sum of products of kernels and each factor of the term,
    frequencies `[r_t / 2, d]` for bandwidth 1; `center` `[1, ...]` is subtracted from the points,
    which changes no inner product of features but keeps the digits of the angles; `families` names
    the kernels the draws belong to.
    """

    draws: tuple[tuple[Float[Array, "q _"], ...], ...]
    center: Points
    families: tuple[tuple[str, ...], ...] = eqx.field(static=True)


class FourierFeatures(AbstractFeatureMap):
    """Feature map of random frequencies. Memory O(n r + r d)."""

    kernel: AbstractKernel
    points: Points
    matrix: Float[Array, "n r"]
    mask: Bool[Array, " n"] | None
    frequencies: RandomFourier

    def coordinates(self, points: Points) -> Float[Array, "m r"]:
        return _features(self.kernel, self.frequencies, points)


def random_fourier(
    kernel: KernelLike,
    points: Points | int,
    *,
    rank: int,
    key: PRNGKeyArray,
    orthogonal: bool = False,
) -> RandomFourier:
    r"""Draw r random Fourier features of a shift-invariant kernel (Rahimi and Recht 2007).

    Pass the result where landmarks are taken:
    `fit_conditional(..., landmarks_x=random_fourier(...))`. The features are
    $\sqrt{2 / r} [\cos(\omega_j^\top x / h), \sin(\omega_j^\top x / h)]$, whose inner products have
    mean k(x, y) over the draws and variance $(1 + k(2 (x - y)) - 2 k(x - y)^2) / r$; they do not
    adapt to the sample as landmarks do.

    **Arguments:**

    - `kernel`: Gaussian, Laplace (independent Cauchy frequencies), Matern12, Matern32 or Matern52
      (multivariate Student t with 1, 3, 5 degrees of freedom), with scalar or ARD bandwidth;
      `factor * k`; and `k + l` or `DirectSum` by concatenation, `k * l` or `TensorProduct` by
      adding the angles, of any of these. The draws depend on the kernel's family only: use them
      with every bandwidth.
    - `points`: a sample `[n, ...]` for the shape, dtype and center of the points, or d for
      vectors `[n, d]`.
    - `rank`: number r of features, even; for a sum of T products a multiple of 2 T.
    - `key`: randomness.
    - `orthogonal`: frequencies in blocks of d orthogonal ones, each of the right marginal law,
      which lowers the variance (Yu et al. 2016). Not for Laplace, whose spectral density depends on
      more than the length.

    **Returns:** `RandomFourier`. Cost O(r d), orthogonal O(r d^2); their features at n points cost
    O(n r d).

    **Raises:** `ValueError` for a kernel without a spectral density to draw from, a `rank` that is
    not such a multiple, points outside the kernel's domain, or `orthogonal` with Laplace.
    """
    if isinstance(points, (int, np.integer)):
        kernel = as_kernel(kernel)  # a dimension says nothing of a bandwidth
        points = jnp.zeros((1, as_count(points, "points")))
    points = check_finite(as_points(points, "points"), "points")
    kernel = kernel_for(kernel, points)
    terms = _expand(kernel, points)
    kernel.check(points, "points")
    rank = as_count(rank, "rank")
    if rank % (2 * len(terms)):
        raise ValueError(
            f"`rank` must be a multiple of {2 * len(terms)} (pairs of features, {len(terms)} "
            f"terms), got {rank}."
        )
    count = rank // (2 * len(terms))
    keys = iter(jax.random.split(key, sum(len(leaves) for _, leaves in terms)))
    draws = tuple(
        tuple(
            leaf.spectral_frequencies(
                next(keys), count, int(np.prod(part.shape[1:])), part.dtype, orthogonal
            )
            for leaf, part in leaves
        )
        for _, leaves in terms
    )
    center = jax.tree.map(
        lambda leaf: lax.stop_gradient(jnp.mean(leaf, axis=0, keepdims=True)), points
    )
    return RandomFourier(draws, center, _families(terms))


def fourier_features(
    kernel: KernelLike,
    points: Points,
    frequencies: RandomFourier,
    mask: Bool[Array, " n"] | None = None,
) -> FourierFeatures:
    r"""Features of given frequencies at a sample `[n, ...]`, with a `mask` `[n]` False at padding;
    O(n r d), memory O(n r).

    **Raises:** `ValueError` if the frequencies were drawn for kernels of other families or for
    points of another shape.
    """
    kernel = as_kernel(kernel)
    check_alike(frequencies.center, "frequencies", points, "points")
    families = _families(_expand(kernel, points))
    kernel.check(points, "points")
    if families != frequencies.families:
        raise ValueError(
            f"The frequencies were drawn for {frequencies.families}, but the kernel is of "
            f"{families}."
        )
    coordinates = masked_rows(_features(kernel, frequencies, points), mask)
    return FourierFeatures(kernel, points, coordinates, mask, frequencies)


def _features(
    kernel: AbstractKernel, frequencies: RandomFourier, points: Points
) -> Float[Array, "m r"]:
    points = jax.tree.map(
        lambda leaf, center: leaf - center.astype(leaf.dtype), points, frequencies.center
    )
    blocks = []
    for (factors, leaves), draws in zip(_expand(kernel, points), frequencies.draws, strict=True):
        pairs = zip(leaves, draws, strict=True)
        each = [
            matmul(leaf.standardize(part), draw.astype(part.dtype).T)
            for (leaf, part), draw in pairs
        ]
        angles = functools.reduce(jnp.add, each)
        power = functools.reduce(
            jnp.multiply, [f.astype(angles.dtype) for f in factors], jnp.ones((), angles.dtype)
        )
        amplitude = jnp.sqrt(power / angles.shape[1])
        blocks += [amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)]
    return jnp.concatenate(blocks, axis=1)


def _families(terms: Sequence[_Term]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(type(leaf).__name__ for leaf, _ in leaves) for _, leaves in terms)


def _expand(kernel: AbstractKernel, points: Points) -> list[_Term]:
    """The kernel as a sum of products of shift-invariant kernels.

    Each comes with the part of the points that it is a kernel on.

    The spectral density of a product is the law of the sum of independent frequencies; features of
    a sum are concatenated.
    """
    if isinstance(kernel, AbstractShiftInvariant):
        return [([], [(kernel, points)])]
    if isinstance(kernel, Scaled):
        return [
            ([*factors, kernel.factor], leaves)
            for factors, leaves in _expand(kernel.kernel, points)
        ]
    if isinstance(kernel, (Sum, Product)):
        operands = [_expand(kernel.first, points), _expand(kernel.second, points)]
    elif isinstance(kernel, (DirectSum, TensorProduct)):
        kernel.check(points, "points")
        operands = [_expand(part, own) for part, own in zip(kernel.kernels, points, strict=True)]
    else:
        raise ValueError(
            f"{type(kernel).__name__} has no spectral density to draw frequencies from. "
            f"{WITH_SPECTRUM}"
        )
    chain = itertools.chain.from_iterable
    if isinstance(kernel, (Sum, DirectSum)):
        return list(chain(operands))
    return [
        (list(chain(f for f, _ in terms)), list(chain(p for _, p in terms)))
        for terms in itertools.product(*operands)
    ]
