"""Warnings that name the line of the caller, however deep the library finds the cause."""

import sys
import warnings

#: Packages whose frames may lie between the caller and the cause.
_INSIDE = {__package__, "jax", "equinox", "jaxtyping", "contextlib", "functools"}


def warn(message: str) -> None:
    """Warn at the innermost line outside of the library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
