"""Messages as functions: products of them, and their scale."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._typing import Array, Float

#: Up to this many factors a product is one expression; beyond, a loop that rescales at every
#: factor.
_FEW = 8


def product(start: Array, factor: Callable[[Any], Array], table: Any) -> Array:
    """`start` times the factors whose numbers stand in the last axis of a table."""
    if table.shape[-1] <= _FEW:
        for column in range(table.shape[-1]):
            start = start * factor(table[..., column])
        return start

    def step(total, index):
        total = total * factor(index)
        return total / peak(total), None

    return lax.scan(step, start, jnp.moveaxis(jnp.asarray(table), -1, 0))[0]


def rows_or_ones(table: Float[Array, "n q"], index: Any) -> Float[Array, "..."]:
    """Rows of a table, and ones for indices beyond its end, where no message comes."""
    return table.at[index].get(mode="fill", fill_value=1)


def peak(values: Array) -> Array:
    """The largest value of each function where it is positive, else 1."""
    peak = jnp.max(values, axis=-1, keepdims=True)
    return jnp.where(peak > 0, peak, 1)


def rescaled(values: Float[Array, "*b q"], floor: Float[Array, ""]) -> Float[Array, "*b q"]:
    """Functions with largest value 1 and none below the floor.

    One that is positive nowhere says nothing: it becomes 1.
    """
    silent = jnp.max(values, axis=-1, keepdims=True) <= 0  # not so NaN
    return jnp.where(silent, 1, jnp.maximum(values / peak(values), floor))
