"""Warnings that name the line of the caller, however deep the library finds the cause."""

import sys
import warnings
from typing import Any

import numpy as np

from ._tables import as_numbers

#: Rounding, in standard deviations of a column, of which there is a warning. Regression on 100
#: hours, largest error of a sine: .003 without rounding, .002, .011, .024, .10 and .57 where it is
#: .001, .01, .02, .1 and .24.
_LOST = 1e-2
#: Packages whose frames may lie between the caller and the cause.
_INSIDE = {__package__, "jax", "equinox", "jaxtyping", "contextlib", "functools"}


def warn(message: str) -> None:
    """Warn at the innermost line outside of the library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_of_lost_digits(given: Any, leaves: list, name: str) -> None:
    """Warn where columns in double precision vary by less than single precision can tell.

    `leaves` are the arrays that `given`, one array or data frame, has become.
    """
    if len(leaves) != 1 or leaves[0].dtype != np.float32 or isinstance(given, (tuple, dict)):
        return
    if np.ndim(given) == 0:
        return
    rows = as_numbers(given, name) if hasattr(given, "to_numpy") else given
    rows = np.asarray(rows) if isinstance(rows, list) else rows
    if not isinstance(rows, np.ndarray) or rows.dtype != np.float64 or len(rows) < 2:
        return
    with np.errstate(all="ignore"):  # of what is not finite the caller tells
        lost = np.abs(rows).max(axis=0) * np.finfo(np.float32).eps
        if np.any((lost > _LOST * rows.std(axis=0)) & (np.ptp(rows, axis=0) > 0)):
            warn(
                f"`{name}` loses its digits in float32: it varies little around a large number. "
                f"Subtract the mean, or `jax.config.update('jax_enable_x64', True)`."
            )
