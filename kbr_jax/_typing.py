"""Names for arrays, points and samples, and how results are printed."""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.core
import numpy as np
from jaxtyping import Array as Array
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Inexact as Inexact
from jaxtyping import Int as Int
from jaxtyping import PRNGKeyArray as PRNGKeyArray

#: What an array argument may be: it is converted with `jnp.asarray`.
ArrayLike: TypeAlias = jax.Array | np.ndarray | float | int

#: One point of any domain: an array of any shape, or a pytree of them (a tuple for a joint
#: variable).
Point: TypeAlias = Any

#: A sample: a point with one more axis in front of every leaf. `[n, d]` for vectors, `[n, 3, 3]`
#: for rotations.
Points: TypeAlias = Any

#: A function of one point with values of any fixed shape.
PointFunction: TypeAlias = Callable[[Point], Any]


def with_numbers(self: eqx.Module) -> str:
    """A record with the numbers of its arrays. Long arrays are shortened."""
    with np.printoptions(threshold=20, edgeitems=3):
        return eqx.tree_pformat(self, short_arrays=False)


def with_scalars(self: Any) -> str:
    """A fitted model, or several, with short parameters, and the shapes of arrays."""
    return eqx.tree_pformat(jax.tree.map(_Numbers.of, self))


class _Numbers:
    """A scalar or a short vector, printed with four digits."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __repr__(self) -> str:
        shown = [f"{value:.4g}" for value in np.ravel(self.values)]
        return f"[{', '.join(shown)}]" if self.values.ndim else shown[0]

    @classmethod
    def of(cls, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return leaf
        short = leaf.ndim < 2 and leaf.size <= 4 and leaf.is_fully_addressable
        numbers = short and jax.numpy.issubdtype(leaf.dtype, np.number)
        return cls(np.asarray(leaf)) if numbers else leaf
