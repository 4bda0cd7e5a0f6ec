r"""A partition of unity over a domain.

Soft cells around centers, $a_k(x) \ge 0$, $\sum_k a_k(x) = 1$.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_regularizer, like
from .._typing import Array, ArrayLike, Float, Points
from ..kernels import AbstractKernel, KernelLike, as_kernel
from ._landmarks import Landmarks


class PartitionOfUnity(eqx.Module):
    r"""Soft assignment of points to K centers by their distance in the RKHS. Build it with
    `soft_partition`.

    $$ a_k(x) \propto \exp\left(-\frac{k(x, x) + k(c_k, c_k) - 2 k(x, c_k)}{2 t}\right). $$

    As the temperature t goes to 0 each point belongs to its nearest center. Centers that are not
    active get nothing.
    """

    kernel: AbstractKernel
    centers: Landmarks
    temperature: Float[Array, ""]

    def assign(self, points: Points) -> Float[Array, "m K"]:
        """The shares $a_k(x)$ of m points; rows sum to 1. Cost O(m K d)."""
        cross = self.kernel.gram(like(points, self.centers.points), self.centers.points)
        # k(x, x) is common to a row and drops out of the normalization.
        logits = (2 * cross - self.kernel.diagonal(self.centers.points)) / (2 * self.temperature)
        return jax.nn.softmax(jnp.where(self.centers.active, logits, -jnp.inf), axis=-1)


def soft_partition(
    kernel: KernelLike, centers: Landmarks, *, temperature: ArrayLike | None = None
) -> PartitionOfUnity:
    r"""Soft cells around given centers.

    **Arguments:**

    - `kernel`: the kernel whose RKHS distance says what is near; `centers`: K points, from
      `greedy_landmarks` say.
    - `temperature`: t > 0, in units of the squared RKHS distance. By default a quarter of the
      median squared distance from a center to its nearest other (no gradient flows through that
      choice), so that a point hardly ever belongs to more than a few cells.

    **Returns:** `PartitionOfUnity`. Cost O(K^2 d).

    **Raises:** `ValueError` for a temperature that is not positive or points outside the kernel's
    domain.
    """
    kernel = as_kernel(kernel)
    kernel.check(centers.points, "centers")
    if temperature is None:
        matrix = lax.stop_gradient(kernel.gram(centers.points, centers.points))
        diagonal = jnp.diagonal(matrix)
        squares = diagonal[:, None] + diagonal[None, :] - 2 * matrix
        apart = (
            centers.active[:, None]
            & centers.active[None, :]
            & ~jnp.eye(matrix.shape[0], dtype=bool)
        )
        nearest = jnp.min(jnp.where(apart, squares, jnp.inf), axis=1)
        typical = jnp.nanmedian(jnp.where(jnp.isfinite(nearest), nearest, jnp.nan))
        floor = 8 * jnp.finfo(matrix.dtype).eps * jnp.max(diagonal)
        # One center has no neighbor: any temperature assigns everything to it.
        temperature = jnp.where(jnp.isfinite(typical), jnp.maximum(typical / 4, floor), 1).astype(
            matrix.dtype
        )
    dtype = jax.eval_shape(kernel.diagonal, centers.points).dtype
    return PartitionOfUnity(kernel, centers, as_regularizer(temperature, "temperature", dtype))
