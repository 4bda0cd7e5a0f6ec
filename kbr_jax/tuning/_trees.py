"""What of a tree of parameters is tuned."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._checks import as_arrays, is_float


def tuned_and_fixed(initial: Any) -> tuple[Any, Any]:
    """Floating-point arrays and Python floats, and all else. NumPy arrays become arrays of JAX."""

    def one(leaf):
        return as_arrays(leaf, "initial") if isinstance(leaf, (float, np.ndarray)) else leaf

    def tuned(leaf):
        return eqx.is_array(leaf) and is_float(leaf)

    return eqx.partition(jax.tree.map(one, initial), tuned)
