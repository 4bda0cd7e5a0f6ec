"""What is checked at the library's edges.

Shapes and dtypes at trace time, values where they are concrete.
"""

import contextlib
import operator
import os
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ._numerics import all_finite, nan_unless_finite, one_program
from ._tables import REMEDY, as_numbers
from ._typing import Array, ArrayLike, Bool, Float, Points
from ._warnings import warn, warn_of_lost_digits


def is_concrete(x: object) -> bool:
    """Whether the value of `x` can be read now.

    It is not being traced by `jit`, `vmap` or `grad`.
    """
    return not isinstance(x, jax.core.Tracer)


def known(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Where numbers of Python or NumPy can be read inside of `jit` too."""
    if all(map(is_concrete, jax.tree.leaves(value))):
        return jax.ensure_compile_time_eval()
    return contextlib.nullcontext()


def as_arrays(points: Points, name: str) -> Points:
    """`points` with leaves that are arrays; data frames and lists of numbers are arrays."""
    if isinstance(points, list) and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(points)):
        try:
            points = np.asarray(points)
        except ValueError:
            raise ValueError(f"The rows of `{name}` have different lengths.") from None
    if isinstance(points, list):
        raise ValueError(
            f"`{name}` is a list of arrays: give one array (`jnp.stack`), or a tuple of parts."
        )

    def one(leaf):
        given = as_numbers(leaf, name) if hasattr(leaf, "to_numpy") else leaf
        try:
            return _held(given, jnp.asarray(given), name)
        except TypeError:
            raise ValueError(
                f"`{name}` holds {type(leaf).__name__}, which is no array of numbers: {REMEDY}"
            ) from None

    return jax.tree.map(one, points)


def _held(given: Any, array: Array, name: str) -> Array:
    """The array, unless integers do not fit in it: different labels would become one."""
    if isinstance(given, np.ndarray | np.generic) and given.dtype.kind in "iu" and given.size:
        if given.min() < (kept := np.iinfo(array.dtype)).min or given.max() > kept.max:
            raise ValueError(
                f"`{name}` holds integers beyond {array.dtype}: number labels by "
                f"`np.unique(..., return_inverse=True)[1]`, or enable x64 in JAX."
            )
    return array


def check_memory(rows: int, columns: int, dtype: Any, name: str, remedy: str) -> None:
    """Raise a `ValueError` for a matrix larger than the memory of the machine."""
    needed = rows * columns * jnp.dtype(dtype).itemsize
    found = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if found is None and hasattr(os, "sysconf"):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if found is not None and needed > found:
        raise ValueError(
            f"The {rows} x {columns} Gram matrix of {name} takes {needed / 1e9:.0f} GB, and there "
            f"are {found / 1e9:.0f}: {remedy}."
        )


def as_points(points: Points, name: str) -> Points:
    """`points` with array leaves `[n, ...]` of one n >= 1.

    Else a `ValueError` that names the argument.
    """
    given, points = points, as_arrays(points, name)
    leaves = jax.tree.leaves(points)
    warn_of_lost_digits(given, leaves, name)
    if not leaves:
        raise ValueError(f"`{name}` holds no arrays; pass an array [n, ...] or a tuple of them.")
    for leaf in leaves:
        if leaf.ndim == 0:
            raise ValueError(
                f"`{name}` is a scalar; a sample needs a leading axis, [n] for n scalar points. "
                f"Tuples are the parts of joint points: pass a tuple of points as "
                f"`jnp.asarray(points)`."
            )
    sizes = sorted({leaf.shape[0] for leaf in leaves})
    if len(sizes) > 1:
        raise ValueError(
            f"The parts of `{name}` have different numbers of points, {sizes}; they must agree."
        )
    if sizes[0] == 0:
        raise ValueError(f"`{name}` is an empty sample; at least one point is needed.")
    return points


def size(points: Points) -> int:
    """Number of points in a sample."""
    return jax.tree.leaves(points)[0].shape[0]


def take(points: Points, index: Array | np.ndarray | slice | int) -> Points:
    """The points at `index`, from every leaf."""
    if isinstance(index, (int, slice)):
        return jax.tree.map(lambda leaf: leaf[index], points)
    return _gathered(points, index)


@one_program
def _gathered(points: Points, index: ArrayLike) -> Points:
    return jax.tree.map(lambda leaf: leaf[index], points)


def _shapes(points: Points) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape[1:]) for leaf in jax.tree.leaves(points)]


def padded(points: Points, missing: int) -> Points:
    """`missing` copies of the last point behind a sample.

    Any other filling might lie outside a kernel's domain.
    """
    return jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)]), points
    )


def stacked(parts: list, name: str) -> tuple[Points, np.ndarray]:
    """Samples of unequal size as one array `[b, n, ...]` of padded ones, and their sizes."""
    parts = [as_points(part, f"{name}[{index}]") for index, part in enumerate(parts)]
    for index, part in enumerate(parts):
        check_alike(part, f"{name}[{index}]", parts[0], f"{name}[0]")
    sizes = np.asarray([size(part) for part in parts])
    filled = [padded(part, int(sizes.max()) - size(part)) for part in parts]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *filled), sizes


def is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def is_real(points: Points) -> bool:
    """Whether points are one array of real numbers."""
    return isinstance(points, jax.Array) and is_float(points)


def check_choice(value: Any, name: str, *known: str) -> None:
    """Raise a `ValueError` for a word that is not one of the known."""
    if value not in known:
        words = ", ".join(map(repr, known))
        raise ValueError(f"`{name}` must be one of {words}, got {value!r}.")


def like(points: Points, reference: Points) -> Points:
    """Cast points to the precision of another sample of their kind.

    A computation then has one dtype.
    """
    if jax.tree.structure(points) != jax.tree.structure(reference):
        return points
    return jax.tree.map(
        lambda a, b: a.astype(b.dtype) if is_float(a) and is_float(b) else a, points, reference
    )


def as_real(points: Points, reference: Points, name: str = "points") -> Points:
    """Take integers as real numbers where another sample of their kind has those."""
    points = as_arrays(points, name)
    if jax.tree.structure(points) != jax.tree.structure(reference):
        return points
    return jax.tree.map(lambda a, b: a.astype(b.dtype) if is_float(b) else a, points, reference)


def in_one_precision(*samples: Points) -> tuple[Points, ...]:
    """The samples with all their real numbers in one dtype, the widest among them."""
    return in_precision(samples, precision_of(*samples))


def precision_of(*samples: Points) -> Any:
    """The widest dtype of their real numbers, None for labels alone."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(samples) if is_float(leaf)]
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits, default=None)


def in_precision(tree: Any, dtype: Any) -> Any:
    """A pytree of arrays with its real numbers in the given dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


def check_alike(points: Points, name: str, reference: Points, reference_name: str) -> None:
    """Two samples must hold the same kind of point.

    One tree structure, the same shape of every leaf behind axis 0.
    """
    if jax.tree.structure(points) != jax.tree.structure(reference):
        raise ValueError(
            f"`{name}` has the structure {jax.tree.structure(points)} and `{reference_name}` "
            f"{jax.tree.structure(reference)}; they must hold the same kind of point."
        )
    if _shapes(points) != _shapes(reference):
        raise ValueError(
            f"A point of `{name}` has shape {_shapes(points)}, one of `{reference_name}` "
            f"{_shapes(reference)}; they "
            "must agree. A sample has its points along the leading axis: [n, d] for vectors, [n] "
            "for scalars."
        )


def check_same_size(points: Points, name: str, reference: Points, reference_name: str) -> None:
    """Paired samples need one length."""
    if size(points) != size(reference):
        raise ValueError(
            f"`{name}` has {size(points)} points and `{reference_name}` {size(reference)}; pairs "
            f"need the same number."
        )


def as_batch(
    points: Points, name: str, reference: Points, reference_name: str
) -> tuple[Points, bool]:
    """Return one point or a batch of points as a batch `[b, ...]`.

    The second result says whether it was one point.

    `reference` is a sample of the same domain, so nothing is guessed: a leaf with the rank of a
    sample is a batch, a leaf with one axis less is one point, anything else is a `ValueError`.
    Numbers get the precision of a real reference, integers too.
    """
    points = as_real(points, reference, name)
    if jax.tree.structure(points) == jax.tree.structure(reference):
        pairs = list(zip(jax.tree.leaves(points), jax.tree.leaves(reference), strict=True))
        if all(leaf.shape == other.shape[1:] for leaf, other in pairs):
            return jax.tree.map(lambda leaf: leaf[None], points), True
    points = as_points(points, name)
    check_alike(points, name, reference, reference_name)
    return points, False


def as_weights(
    weights: ArrayLike | None, n: int, name: str, dtype: jnp.dtype
) -> Float[Array, "*batch n"]:
    """Weights `[..., n]`; uniform `1 / n` where None is given."""
    if weights is None:
        return jnp.full(n, 1 / n, dtype)
    weights = jnp.asarray(weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(f"`{name}` must be floating-point, not {weights.dtype}.")
    if weights.ndim == 0 or weights.shape[-1] != n:
        raise ValueError(
            f"`{name}` has shape {weights.shape}; its last axis must hold one weight for each of "
            f"{n} points."
        )
    return weights


def as_positive(value: ArrayLike, name: str, *, scalar: bool = False) -> Float[Array, "..."]:
    """A positive parameter as a floating-point array, of one number if `scalar`.

    A number, or a concrete array, that is not positive (or is NaN) is a `ValueError`, inside of
    `jit` too. A traced value is not looked at: its positivity is the caller's, by the
    parametrization.
    """
    return _checked_number(value, name, scalar, np.greater, "be positive")


def as_non_negative(value: ArrayLike, name: str, *, scalar: bool = False) -> Float[Array, "..."]:
    """As `as_positive`, with 0 allowed."""
    return _checked_number(value, name, scalar, np.greater_equal, "not be negative")


def _checked_number(value: ArrayLike, name: str, scalar: bool, holds: Any, words: str) -> Array:
    array = as_float(value)
    if scalar and array.ndim:
        raise ValueError(
            f"`{name}` must be one number, got shape {array.shape}; use `vmap` for several."
        )
    if is_concrete(array) and not np.all(holds(np.asarray(array), 0)):
        raise ValueError(f"`{name}` must {words}, got {np.asarray(array)}.")
    return array


def as_fraction(value: ArrayLike, name: str) -> Float[Array, ""]:
    """A number in [0, 1) as a floating-point scalar; a concrete value outside is a `ValueError`."""
    array = as_float(value)
    if array.ndim or (is_concrete(array) and not 0 <= float(array) < 1):
        raise ValueError(f"`{name}` must be one number in [0, 1), got {value}.")
    return array


def as_float(value: ArrayLike) -> Float[Array, "..."]:
    """`value` as a floating-point array; integers and booleans in the default precision."""
    with known(value):
        array = jnp.asarray(value)
        # The cast drops the weak type of Python numbers too: one program, not two.
        return array.astype(array.dtype if jnp.issubdtype(array.dtype, jnp.floating) else float)


def as_regularizer(value: ArrayLike, name: str, dtype: Any, power: int = 1) -> Float[Array, ""]:
    """A positive scalar in the dtype of the computation; a warning where that cannot hold it."""
    found, least = as_positive(value, name, scalar=True), float(jnp.finfo(dtype).eps) ** power
    if is_concrete(found) and float(found) < least:
        warn(
            f"`{name}` = {float(found):.1e} is below the rounding of {jnp.dtype(dtype).name} "
            f"({least:.0e}) and acts like 0: take a larger one, or float64."
        )
    return found.astype(dtype)


def as_count(value: object, name: str, points: Points = None, points_name: str = "") -> int:
    """Return a static integer >= 1, and at most the size of a given sample."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)  # pyright: ignore
    except TypeError:
        count = 0
    most = None if points is None else size(points)
    if count < 1 or (most is not None and count > most):
        bound = ">= 1" if most is None else f"between 1 and {most} (the points of `{points_name}`)"
        raise ValueError(f"`{name}` must be an integer {bound}, got {value!r}.")
    return count


def as_mask(mask: ArrayLike | None, n: int | tuple[int, ...], name: str) -> Bool[Array, "*n"]:
    """A boolean mask of n entries, or of a shape n; all True where None is given."""
    shape = n if isinstance(n, tuple) else (n,)
    if mask is None:
        return jnp.ones(shape, bool)
    mask = jnp.asarray(mask)
    if mask.shape != shape or mask.dtype != bool:
        raise ValueError(
            f"`{name}` must be a boolean mask of shape {shape}, got {mask.dtype}{list(mask.shape)}."
        )
    return mask


@one_program
def fill(points: Points, mask: Bool[Array, " n"], like: Points) -> Points:
    """The points where the mask is True, and one point `like` of their domain elsewhere: what stood
    there, NaN included, reaches neither value nor gradient.
    """
    return jax.tree.map(
        lambda leaf, one: jnp.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, one),
        points,
        like,
    )


def without_padding(points: Points, mask: Bool[Array, " n"] | None) -> Points:
    """The sample with copies of its first true point as padding (False in the mask).

    Where all is padding, with zeros.
    """
    if mask is None:
        return points
    found, first = jnp.any(mask), take(points, jnp.argmax(mask))
    return fill(points, mask, jax.tree.map(lambda a: jnp.where(found, a, jnp.zeros_like(a)), first))


def check_finite(points: Points, name: str) -> Points:
    """Training data without NaN or infinity.

    Concrete data that fails is a `ValueError`. A compiled program cannot raise without the help of
    the host: there all points become NaN, and with them every result.
    """
    message = (
        f"`{name}` contains NaN or infinity; remove or impute those points (missing observations: "
        "use a mask where there is one, and `filtering.stretches` to train a filter)."
    )
    leaves, treedef = jax.tree.flatten(points)
    real = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    numbers = [leaf for leaf, inexact in zip(leaves, real, strict=True) if inexact]
    finite = all_finite(numbers)
    if is_concrete(finite):
        if not bool(finite):
            raise ValueError(message)
        return points
    marks = [nan_unless_finite(leaf) for leaf in numbers]

    def one(leaf):
        return jnp.where(finite, leaf, sum(mark.astype(leaf.dtype) for mark in marks))

    pairs = zip(leaves, real, strict=True)
    return treedef.unflatten([one(leaf) if inexact else leaf for leaf, inexact in pairs])
