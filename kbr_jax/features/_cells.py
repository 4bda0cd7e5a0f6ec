r"""A partition of unity over a domain: soft cells around centres, $a_k(x) \ge 0$, $\sum_k a_k(x) = 1$."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._checks import as_regularizer, like
from .._typing import Array, ArrayLike, Float, Points
from ..kernels import AbstractKernel, as_kernel
from ._landmarks import Landmarks


class SoftCells(eqx.Module):
    r"""Soft assignment of points to K centres by their distance in the RKHS. Build it with `soft_cells`.

    $$ a_k(x) \propto \exp\left(-\frac{k(x, x) + k(c_k, c_k) - 2 k(x, c_k)}{2 t}\right). $$

    As the temperature t goes to 0 each point belongs to its nearest centre. Centres that are not active get nothing.
    """

    kernel: AbstractKernel
    centres: Landmarks
    temperature: Float[Array, ""]

    def assign(self, points: Points) -> Float[Array, "m K"]:
        """The shares $a_k(x)$ of m points; rows sum to 1. Cost O(m K d)."""
        cross = self.kernel.gram(like(points, self.centres.points), self.centres.points)
        # k(x, x) is common to a row and drops out of the normalisation.
        logits = (2 * cross - self.kernel.diagonal(self.centres.points)) / (2 * self.temperature)
        return jax.nn.softmax(jnp.where(self.centres.active, logits, -jnp.inf), axis=-1)


def soft_cells(kernel: Any, centres: Landmarks, *, temperature: ArrayLike | None = None) -> SoftCells:
    r"""Soft cells around given centres.

    **Arguments:**

    - `kernel`: the kernel whose RKHS distance says what is near; `centres`: K points, from `greedy_landmarks` say.
    - `temperature`: t > 0, in units of the squared RKHS distance. By default a quarter of the median squared
      distance from a centre to its nearest other (no gradient flows through that choice), so that a point hardly ever
      belongs to more than a few cells.

    **Returns:** `SoftCells`. Cost O(K^2 d).

    **Raises:** `ValueError` for a temperature that is not positive or points outside the kernel's domain.
    """
    kernel = as_kernel(kernel)
    kernel.check(centres.points, "centres")
    if temperature is None:
        matrix = lax.stop_gradient(kernel.gram(centres.points, centres.points))
        diagonal = jnp.diagonal(matrix)
        squares = diagonal[:, None] + diagonal[None, :] - 2 * matrix
        apart = centres.active[:, None] & centres.active[None, :] & ~jnp.eye(matrix.shape[0], dtype=bool)
        nearest = jnp.min(jnp.where(apart, squares, jnp.inf), axis=1)
        typical = jnp.nanmedian(jnp.where(jnp.isfinite(nearest), nearest, jnp.nan))
        floor = 8 * jnp.finfo(matrix.dtype).eps * jnp.max(diagonal)
        # One centre has no neighbour: any temperature assigns everything to it.
        temperature = jnp.where(jnp.isfinite(typical), jnp.maximum(typical / 4, floor), 1).astype(matrix.dtype)
    dtype = jax.eval_shape(kernel.diagonal, centres.points).dtype
    return SoftCells(kernel, centres, as_regularizer(temperature, "temperature", dtype))
