"""Checked arguments of the fits: samples of doses, proxies and outcomes, with their kernels."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_mask,
    as_points,
    as_regularizer,
    check_finite,
    in_one_precision,
    is_concrete,
    is_float,
    size,
    without_padding,
)
from .._numerics import one_program
from .._typing import Array, ArrayLike, Bool, Float, Points
from ..kernels import (
    AbstractKernel,
    KernelLike,
    Laplace,
    TensorProduct,
    as_kernel,
    checked_kernel,
    coordinate_scale,
    kernel_for,
)
from ._stages import feature_map


class Units(eqx.Module):
    """Samples of n units, with their kernels."""

    a: Points
    w: Points
    z: Points
    y: Points
    kernel_a: AbstractKernel
    kernel_w: AbstractKernel
    kernel_z: AbstractKernel
    kernel_y: AbstractKernel
    mask: Bool[Array, " n"] | None


def units(
    a: Points,
    w: Points,
    z: Points,
    y: Points,
    kernels: tuple[KernelLike, ...] | None,
    mask: ArrayLike | None,
    bandwidth: float,
) -> Units:
    """Check the arguments of a fit. `bandwidth` is that of the dose, in standard deviations."""
    count = size(as_points(y, "y"))
    mask = None if mask is None else as_mask(mask, count, "mask")
    a, w, z, y = (
        checked_sample(part, name, mask, count)
        for part, name in ((a, "a"), (w, "w"), (z, "z"), (y, "y"))
    )
    a, w, z, y = in_one_precision(a, w, z, y)
    of_a, of_w, of_z = as_kernels(kernels, 3)
    kernel_a = dose_kernel(of_a, a, bandwidth, mask)
    kernel_a.check(a, "a")
    kernel_w, kernel_z, kernel_y = (
        checked_kernel(kernel, part, name, mask)
        for kernel, part, name in ((of_w, w, "w"), (of_z, z, "z"), (None, y, "y"))
    )
    return Units(a, w, z, y, kernel_a, kernel_w, kernel_z, kernel_y, mask)


def checked_sample(points: Points, name: str, mask: Bool[Array, " n"] | None, count: int) -> Points:
    """The checked points of a variable."""
    points = as_points(points, name)
    if size(points) != count:
        raise ValueError(
            f"`{name}` has {size(points)} points and `y` {count}; each unit needs one of each."
        )
    return check_finite(without_padding(points, mask), name)


def dose_kernel(
    kernel: KernelLike, doses: Points, bandwidth: float, mask: Bool[Array, " n"] | None
) -> AbstractKernel:
    """The given kernel, or `Laplace` for real doses and the default for labels."""
    if kernel is not None:
        return as_kernel(kernel)
    if isinstance(doses, (tuple, list)):
        return TensorProduct(tuple(dose_kernel(None, part, bandwidth, mask) for part in doses))
    if not hasattr(doses, "dtype") or not is_float(doses):
        return kernel_for(None, doses, mask)
    weights = None if mask is None else mask.astype(doses.dtype)
    return Laplace(bandwidth * coordinate_scale(doses, weights))


def as_kernels(kernels: Any, count: int) -> tuple[KernelLike, ...]:
    """`count` kernels, None where the default is taken."""
    return _as_tuple(kernels, count, "kernels", f"{count} kernels", "the default")


def as_ridges(regularizers: Any, count: int, dtype: Any) -> tuple[Any, ...]:
    """`count` ridges, None where leave-one-out chooses."""
    given = _as_tuple(regularizers, count, "regularizers", f"{count} numbers", "leave-one-out")
    return tuple(
        None if value is None else as_regularizer(value, "regularizers", dtype) for value in given
    )


def _as_tuple(values: Any, count: int, name: str, kind: str, default: str) -> tuple[Any, ...]:
    if values is None:
        return (None,) * count
    if not isinstance(values, (tuple, list)) or len(values) != count:
        raise ValueError(
            f"`{name}` must be a tuple of {kind}, each of them or all None for {default}, got "
            f"{values!r}."
        )
    return tuple(values)


def outcome_targets(
    kernel: AbstractKernel, y: Points, rank: int, mask: Bool[Array, " n"] | None
) -> Float[Array, "n t"]:
    """What a regression of y predicts: real y in units of their spread, or features of labels."""
    if not hasattr(y, "dtype") or not is_float(y):
        found = feature_map(kernel, y, rank, mask).matrix
        # Few labels need few of the landmarks: the other columns are 0.
        return found[:, np.any(np.asarray(found) != 0, axis=0)] if is_concrete(found) else found
    return in_units(y.reshape(y.shape[0], -1), mask)


@one_program
def in_units(rows: Float[Array, "n t"], mask: Bool[Array, " n"] | None) -> Float[Array, "n t"]:
    """Columns in units of their standard deviations; constants as they are."""
    known = jnp.ones(len(rows), bool) if mask is None else mask
    spread = jnp.std(rows, axis=0, where=known[:, None])
    # That of a constant may be rounding.
    varies = jnp.any(known[:, None] & (rows != rows[jnp.argmax(known)]), axis=0)
    return rows / jnp.where(varies & (spread > 0), spread, 1)
