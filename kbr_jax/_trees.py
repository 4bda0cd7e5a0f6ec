"""Comparing pytrees."""

from typing import Any

import jax
import numpy as np

from ._checks import is_concrete, is_float


def same(a: Any, b: Any) -> bool:
    """Whether two trees have one structure and shapes, and equal numbers where these are known.

    Numbers of two precisions are compared in the lower one.
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return all(np.shape(x) == np.shape(y) for x, y in pairs) and all(
        x is y or _equal(x, y) for x, y in pairs if is_concrete(x) and is_concrete(y)
    )


def _equal(x: Any, y: Any) -> bool:
    if is_float(x) and is_float(y):
        dtype = min(x.dtype, y.dtype, key=lambda d: d.itemsize)
        x, y = np.asarray(x).astype(dtype), np.asarray(y).astype(dtype)
    return np.array_equal(x, y)
