"""Domain checks and views shared by the kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import is_concrete
from .._typing import Array, Float, Points


def check_single_array(x: Points, name: str, kernel: str) -> Array:
    """The only leaf of a sample whose points are single arrays."""
    if not hasattr(x, "dtype"):
        raise ValueError(
            f"{kernel} takes points that are single arrays, but a point of `{name}` is a "
            f"{type(x).__name__} of "
            f"{len(jax.tree.leaves(x))} parts; use TensorProduct or DirectSum for the parts of a "
            f"tuple."
        )
    return x


def check_real(x: Points, name: str, kernel: str) -> None:
    """Points with real coordinates."""
    leaf = check_single_array(x, name, kernel)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"{kernel} is a kernel on real coordinates, but `{name}` has dtype {leaf.dtype}; "
            f"convert it with `{name}.astype(float)`, or use Delta for labels."
        )


def check_histogram(x: Points, name: str, kernel: str) -> None:
    """Points with coordinates that are real and, where they can be read, not negative."""
    check_real(x, name, kernel)
    if is_concrete(x) and np.any(np.asarray(x) < 0):
        raise ValueError(
            f"{kernel} is a kernel on histograms, but `{name}` has negative coordinates."
        )


def check_integer(x: Points, name: str, kernel: str) -> None:
    """Points that are integers or booleans: labels, categories, indices."""
    leaf = check_single_array(x, name, kernel)
    if not (jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == bool):
        raise ValueError(
            f"{kernel} compares integer or boolean labels, but `{name}` has dtype {leaf.dtype}."
        )


def flat(x: Points) -> Float[Array, "n d"]:
    """A sample of arrays as rows of coordinates."""
    leaf = jax.tree.leaves(x)[0]
    return leaf.reshape(leaf.shape[0], -1)
