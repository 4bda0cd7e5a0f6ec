"""Kernels chosen from the points, and warnings about kernels that cannot work."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_mask,
    as_points,
    check_alike,
    check_finite,
    is_concrete,
    size,
    take,
    without_padding,
)
from .._numerics import evenly, safe_sqrt
from .._typing import Array, ArrayLike, Bool, Float, Int, Points
from .._warnings import warn
from ._base import AbstractKernel, FunctionKernel, KernelLike, as_kernel, flat
from ._families import Delta
from ._gram import median_distance, pairs_of
from ._parts import TensorProduct
from ._stationary import AbstractShiftInvariant, Gaussian

#: Points that bandwidths are read from, evenly spaced in the sample.
_POINTS = 1000
#: Rows of a Gram matrix that are looked at, values that count as 0 or 1, and ratios of scales.
#: Many coordinates, such as those on principal axes, may differ as much on purpose.
_ROWS, _TINY, _RATIO, _COLUMNS = 100, 1e-6, 100, 16
#: Integers of more values, and of more than a fifth of the points, are hardly labels.
_LABELS = 20


@jax.jit
def coordinate_scale(
    x: Float[Array, "n *d"], weights: Float[Array, " n"] | None = None
) -> Float[Array, "*d"]:
    """Units of the coordinates of points: their standard deviations, or a common one.

    They are common to all coordinates where none is three times another, and to all entries of
    points that are matrices or images. A constant coordinate has unit 1. `weights` of the points
    are uniform by default. Cost O(n d).
    """
    moved = x - jnp.average(x, axis=0, weights=weights)
    # The squares of small or large numbers would leave the range of float32.
    most = jnp.max(jnp.abs(moved), axis=0)
    unit = jnp.where(most > 0, most, 1)
    each = unit * safe_sqrt(jnp.average((moved / unit) ** 2, axis=0, weights=weights))
    # The deviation of a constant would be rounding of its mean.
    same = x == (x[0] if weights is None else x[jnp.argmax(weights > 0)])
    if weights is not None:
        same = same | (weights <= 0).reshape(-1, *[1] * (x.ndim - 1))
    each = jnp.where(jnp.all(same, axis=0), 0, each)
    most = jnp.max(each)
    unit = jnp.where(most > 0, most, 1)
    common = unit * safe_sqrt(jnp.mean((each / unit) ** 2))
    # The entries of a rotation share a unit: one that hardly moves is not noise to be blown up.
    own = (jnp.max(each) > 3 * jnp.min(each)) & (x.ndim == 2)
    found = jnp.where(own, each, common)
    return jnp.where(found <= 0, 1.0, found)  # NaN stays


def default_kernel(x: Points, mask: ArrayLike | None = None) -> AbstractKernel:
    """Choose a kernel from a sample, as functions do for `kernel=None`.

    Tests of two samples and of independence take a collection of kernels instead.

    - Real points: `Gaussian`, with a bandwidth for each coordinate: the median distance of the
      points in units of `coordinate_scale`, times these units.
    - Integers and booleans are labels: `Delta`. Convert counts by `x.astype(float)`.
    - Tuples: `TensorProduct` of the kernels of the parts.

    **Arguments:** `x`, a sample `[n, ...]`; `mask` `[n]`, False where a point is padding.
    **Returns:** a kernel that depends on the sample: give the same kernel to embeddings that are to
    be compared. Cost O(d) times n plus 10^6.
    """
    x = as_points(x, "x")
    if isinstance(x, (tuple, list)):
        return TensorProduct(tuple(default_kernel(part, mask) for part in x))
    if not hasattr(x, "dtype"):
        raise ValueError("There is no default kernel for trees other than tuples: give a kernel.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        warn_of_amounts(x)
        return Delta()
    mask = None if mask is None else as_mask(mask, size(x), "mask")
    x = check_finite(without_padding(x, mask), "x")
    return Gaussian(_bandwidth(x, mask, pairs_of(min(size(x), _POINTS))))


@jax.jit
def _bandwidth(
    x: Float[Array, "n *d"],
    mask: Bool[Array, " n"] | None,
    pairs: tuple[Int[Array, " p"], Int[Array, " p"]],
) -> Float[Array, "*d"]:
    """The median distance in units of the coordinates: with padding that of the true points."""
    n, known = size(x), None
    some, weights = evenly(n, _POINTS), None if mask is None else mask.astype(x.dtype)
    x = x - jnp.average(x, axis=0, weights=weights)  # keeps digits of points far from 0
    scale = coordinate_scale(x, weights)
    if n < 2:
        return scale
    if mask is not None:
        count, most = jnp.sum(mask), len(some)
        place, gaps = jnp.arange(most), max(most - 1, 1)
        whole, rest = jnp.divmod(count - 1, gaps)  # the product with `count` may leave 32 bits
        even = place * whole + place * rest // gaps
        some, known = jnp.argsort(~mask)[jnp.where(count <= most, place, even)], place < count
    return scale * median_distance(flat(x[some] / scale), known, pairs)


def warn_of_amounts(x: Points) -> None:
    """Integers of many values may be amounts."""
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(leaf.dtype, jnp.integer) or not is_concrete(leaf):
            continue
        count = len(np.unique(np.asarray(leaf).reshape(len(leaf), -1), axis=0))
        if count > max(_LABELS, size(x) / 5):
            warn(
                f"Integers of {count} values among {size(x)} points are taken as labels, all "
                f"unlike each other: give `.astype(float)` if they are amounts."
            )


def kernel_for(
    kernel: KernelLike, x: Points, mask: Bool[Array, " n"] | None = None
) -> AbstractKernel:
    """The given kernel, or the default of a sample (True in the mask)."""
    return default_kernel(x, mask) if kernel is None else as_kernel(kernel)


def checked_kernel(
    kernel: KernelLike, x: Points, name: str, mask: Bool[Array, " n"] | None = None
) -> AbstractKernel:
    """As `kernel_for`; an error where the kernel does not fit the points, and `warn_of_scale`."""
    kernel = kernel_for(kernel, x, mask)
    kernel.check(x, name)
    warn_of_scale(kernel, x, name, mask)
    return kernel


def warn_of_scale(
    kernel: AbstractKernel, x: Points, name: str, mask: Bool[Array, " n"] | None = None
) -> None:
    """Warn where a kernel sees all points as equal, or all as unlike.

    Padding, False in the mask, is not looked at, nor anything inside `jit` or `grad`.
    """
    if mask is not None:
        if not is_concrete(mask):
            return
        x = take(x, np.flatnonzero(mask))
    if isinstance(kernel, TensorProduct) and isinstance(x, (tuple, list)):
        for number, (own, part) in enumerate(zip(kernel.kernels, x, strict=True)):
            warn_of_scale(own, part, f"{name}[{number}]")
        return
    if isinstance(kernel, FunctionKernel):
        _check_function(kernel, x, name)
    if not isinstance(kernel, AbstractShiftInvariant) or size(x) < 3:
        return
    if not all(map(is_concrete, jax.tree.leaves((kernel, x)))):
        return
    points, matrix = _of_some(kernel, x)
    if not is_concrete(matrix):  # inside `jit`, also where the points are not traced
        return
    looked, matrix = evenly(size(points), _ROWS), np.asarray(matrix)
    others = matrix[looked[:, None] != np.arange(matrix.shape[1])]
    rows = np.asarray(flat(points))
    spread = np.std(rows, axis=0) * (np.ptp(rows, axis=0) > 0)  # that of a constant may be rounding
    least, most = spread[spread > 0].min(initial=np.inf), spread.max()
    problem = None
    if others.max() < _TINY:
        problem = "is 0 between all points, as if all were unlike: the bandwidth is too small"
    elif others.min() > 1 - _TINY and most > 0:
        problem = "is 1 between all points, as if all were equal: the bandwidth is too large"
    elif (
        kernel.bandwidth.ndim == 0
        and np.ndim(points) <= 2
        and most > _RATIO * least
        and spread.size <= _COLUMNS
    ):
        problem = (
            f"has one bandwidth, and coordinate {int(np.argmax(spread))} of the points varies "
            f"{most / least:.0f} times as much as coordinate "
            f"{int(np.argmin(np.where(spread > 0, spread, np.inf)))}: give a bandwidth for each"
        )
    if problem is not None:
        warn(
            f"The kernel of `{name}` {problem}. `kernel=None` takes the median distance in units "
            f"of each coordinate."
        )


def _check_function(kernel: FunctionKernel, x: Points, name: str) -> None:
    """Raise a `ValueError` for a function that is not a kernel (outside `jit`)."""
    if not all(map(is_concrete, jax.tree.leaves(x))):
        return
    some = take(x, evenly(size(x), _ROWS))
    values = kernel.gram(some, some)
    if not is_concrete(values):  # a function may close over what is traced
        return
    matrix = np.asarray(values, float)
    scale = np.abs(matrix).max() * len(matrix) * float(jnp.finfo(values.dtype).eps)
    what = None
    if not np.isfinite(matrix).all():
        what = "is not finite"
    elif np.abs(matrix - matrix.T).max() > 8 * scale:
        what = "is not symmetric: k(x, y) must be k(y, x)"
    elif np.linalg.eigvalsh(matrix).min() < -8 * scale:
        what = "is not positive semi-definite: its Gram matrix has negative eigenvalues"
    if what is not None:
        raise ValueError(f"The function given as kernel of `{name}` {what}.")


@eqx.filter_jit
def _of_some(kernel: AbstractKernel, x: Points) -> tuple[Points, Float[Array, "r m"]]:
    """Some of the points, and the Gram matrix of a few of them with these."""
    points = take(x, evenly(size(x), 2 * _POINTS))
    return points, kernel.gram(take(points, evenly(size(points), _ROWS)), points)


def gram(kernel: KernelLike, x: Points, y: Points | None = None) -> Float[Array, "n m"]:
    """Gram matrix `[k(x_i, y_j)]_ij` of two samples, or of one with itself.

    **Arguments:**

    - `kernel`: a kernel, any callable of two single points that returns one number, or None
      (`default_kernel`).
    - `x`: sample with n points along its leading axis.
    - `y`: sample with m points; `x` itself if None.

    **Returns:** array `[n, m]`. Cost O(n m d) for points of d coordinates.

    **Raises:** `ValueError` if a sample is empty, the points differ in shape, or the dtype is not
    of the kernel's domain.
    """
    x = as_points(x, "x")
    kernel = kernel_for(kernel, x)
    kernel.check(x, "x")
    if y is None:
        return kernel.gram(x, x)
    y = as_points(y, "y")
    check_alike(y, "y", x, "x")
    kernel.check(y, "y")
    return kernel.gram(x, y)


def diagonal(kernel: KernelLike, x: Points) -> Float[Array, " n"]:
    """Diagonal `[k(x_i, x_i)]_i` of a Gram matrix, `[n]`, in O(n d). Raises as `gram` does."""
    x = as_points(x, "x")
    kernel = kernel_for(kernel, x)
    kernel.check(x, "x")
    return kernel.diagonal(x)
