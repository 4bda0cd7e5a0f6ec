r"""Are two variables independent? The test with the Hilbert-Schmidt independence criterion (Gretton
et al. 2008).
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_count, check_finite, size, take
from .._numerics import matmul
from .._typing import Array, Float, Points, PRNGKeyArray
from ..embedding import embed_joint
from ..features import FeatureChoice, fit_features
from ..kernels import AbstractKernel, KernelLike
from ._results import TestResult, centered, from_null, relevant, simulate

#: Of the columns of a Gram matrix, of which only the lower triangle is permuted.
_BLOCKS = 8


def independence_test(
    kernel_x: KernelLike,
    kernel_y: KernelLike,
    x: Points,
    y: Points,
    *,
    key: PRNGKeyArray,
    num_permutations: int = 1000,
    landmarks: FeatureChoice = None,
) -> TestResult:
    r"""Test whether X and Y are independent, from n pairs:
    $\mathrm{HSIC} = \operatorname{tr}(K H L H) / n^2$ under permutations of y.

    **Arguments:**

    - `kernel_x`, `kernel_y`: of any two domains. `x`, `y`: n pairs. `key`: of the permutations.
    - `num_permutations`: B, permutations (static); the smallest p-value is 1 / (B + 1).
    - `landmarks`: the rank r of greedy landmarks for features of each variable: the criterion of
      the low-rank kernels, $|\Phi^\top H \Psi|^2 / n^2$. Then a permutation costs O(n r^2) instead
      of n^2 memory accesses; the level stays exact.

    **Returns:** a `TestResult`. One compiled program; cost O(n^2 (d + B)), or O(n r^2 B).

    **Raises:** `ValueError` for unpaired samples, or fewer than two pairs.
    """
    joint = embed_joint(kernel_x, kernel_y, check_finite(x, "x"), check_finite(y, "y"))
    if size(joint.x) < 2:
        raise ValueError("An independence test needs at least 2 pairs.")
    kernels = joint.kernel_x, joint.kernel_y
    draws = as_count(num_permutations, "num_permutations")
    if landmarks is None:
        return from_null(*_exact(kernels, joint.x, joint.y, key, draws))
    phi, psi = (
        fit_features(k, p, landmarks) for k, p in zip(kernels, (joint.x, joint.y), strict=True)
    )
    return from_null(*_low_rank(phi.matrix, psi.matrix, key, draws))


@eqx.filter_jit
def _exact(
    kernels: tuple[AbstractKernel, AbstractKernel],
    x: Points,
    y: Points,
    key: PRNGKeyArray,
    draws: int,
):
    grams = kernels[0].gram(x, x), kernels[1].gram(y, y)
    # Centering one of the two is enough, but for rounding.
    k, l = (centered(gram.astype(grams[0].dtype)) for gram in grams)  # noqa: E741 (the papers' letter)
    magnitude = relevant(k, grams[0]) * relevant(
        l, grams[1].astype(k.dtype)
    )  # at least that of any permutation
    n = size(x)
    step = -(-n // _BLOCKS)
    k = 2 * jnp.tril(k) - jnp.diag(jnp.diagonal(k))
    blocks = [(i, k[i:, i : i + step]) for i in range(0, n, step)]

    def statistic(order):
        """Both matrices are symmetric.

        In blocks of columns, from their first diagonal entry down. Rows are gathered, never
        columns.
        """
        order = order.astype(jnp.int32)
        columns = jnp.take(l, order, axis=0, mode="clip").T
        parts = [
            jnp.sum(block * jnp.take(columns[:, i : i + step], order[i:], axis=0, mode="clip"))
            for i, block in blocks
        ]
        return sum(parts, jnp.zeros((), k.dtype)) / n**2

    null = simulate(key, draws, lambda one: jax.random.permutation(one, n), _one_by_one(statistic))
    return statistic(jnp.arange(n)), null, magnitude


def _one_by_one(statistic: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda orders: lax.map(statistic, orders)


@eqx.filter_jit
def _low_rank(phi: Float[Array, "n r"], psi: Float[Array, "n s"], key: PRNGKeyArray, draws: int):
    n = phi.shape[0]
    centers = [coordinates - jnp.mean(coordinates, axis=0) for coordinates in (phi, psi)]
    sizes = [
        relevant(center, coordinates) ** 2 * coordinates.shape[1]
        for center, coordinates in zip(centers, (phi, psi), strict=True)
    ]
    phi, psi = centers[0].T, centers[1]

    def statistic(order):
        return jnp.sum(matmul(phi, take(psi, order)) ** 2) / n**2

    null = simulate(key, draws, lambda one: jax.random.permutation(one, n), _one_by_one(statistic))
    return statistic(jnp.arange(n)), null, sizes[0] * sizes[1]
