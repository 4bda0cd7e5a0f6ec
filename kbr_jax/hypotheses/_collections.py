"""Collections of kernels, of which a test takes the one that decides."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import size, take
from .._numerics import safe_sqrt, squared_distances
from .._typing import Array, Float, Points, PRNGKeyArray
from ..kernels import AbstractKernel, Delta, Gaussian, Laplace, TensorProduct, coordinate_scale
from ..kernels._base import flat

#: Bandwidths of a family. On a geometric grid, power on three alternatives of MMD-FUSE with 500
#: points was .50, .55 and .47 (150 data sets each); on the even grid of its authors .49, .49, .46.
_BANDWIDTHS = 10
#: Points that the distances are read from.
_POINTS = 1000


@eqx.filter_jit
def default_collection(x: Points, key: PRNGKeyArray) -> tuple[AbstractKernel, ...]:
    """Gaussian and Laplace kernels of ten bandwidths each; for labels, `Delta`.

    The bandwidths run geometrically from half the 5 % to twice the 95 % quantile of the distances
    that are not 0, in units of `coordinate_scale`. A tuple has the tensor products of the i-th
    kernels of its parts. Points are drawn by key, not by position: the choice must not know which
    sample a point is of, or the level would not be exact.
    """
    if size(x) > _POINTS:
        x = take(x, jax.random.choice(key, size(x), (_POINTS,), replace=False))
    return _of_points(x)


def _of_points(x: Points) -> tuple[AbstractKernel, ...]:
    if isinstance(x, (tuple, list)):
        parts = [_of_points(part) for part in x]
        return tuple(
            TensorProduct(tuple(part[number % len(part)] for part in parts))
            for number in range(max(map(len, parts)))
        )
    if not hasattr(x, "dtype"):
        raise ValueError("There is no default kernel for trees other than tuples: give a kernel.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (Delta(),)
    scale = coordinate_scale(x)
    rows = flat(x / scale)
    pairs = np.triu_indices(rows.shape[0], k=1)
    euclidean = safe_sqrt(squared_distances(rows, rows))[pairs]
    city_block = lax.map(lambda row: jnp.sum(jnp.abs(rows - row), axis=1), rows)[pairs]
    # The Laplace kernel is exp(-|x - y| sqrt(2) / h) in the papers.
    return tuple(Gaussian(h * scale) for h in _grid(euclidean)) + tuple(
        Laplace(h * scale) for h in _grid(city_block / np.sqrt(2).astype(city_block.dtype))
    )


def _grid(distances: Float[Array, " p"]) -> Float[Array, " h"]:
    """Bandwidths from the smallest to the largest scale of the distances that are not 0."""
    positive = jnp.where(distances > 0, distances, jnp.nan)
    low, high = jnp.nanquantile(positive, jnp.asarray([0.05, 0.95], distances.dtype))
    low, high = (jnp.where(jnp.isnan(value), 1, value) for value in (low / 2, high * 2))
    return low * (high / low) ** jnp.linspace(0, 1, _BANDWIDTHS, dtype=distances.dtype)


def for_each(function: Callable[[AbstractKernel], Any], kernels: Sequence[AbstractKernel]) -> Any:
    """Results of a function for each kernel, stacked along a leading axis.

    Neighbors of one structure share a loop, so that the program holds each structure once.
    """

    def structure(kernel):
        arrays, rest = eqx.partition(kernel, eqx.is_array)
        shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arrays)]
        return jax.tree.structure(kernel), jax.tree.leaves(rest), shapes

    found = []
    for (_, _, shapes), neighbors in itertools.groupby(kernels, structure):
        group = list(neighbors)
        arrays, rest = zip(*(eqx.partition(kernel, eqx.is_array) for kernel in group), strict=True)
        if len(group) == 1 or not shapes:
            values = [function(kernel) for kernel in group]
            found.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *values))
            continue
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
        found.append(lax.map(lambda one, rest=rest: function(eqx.combine(one, rest[0])), together))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)
