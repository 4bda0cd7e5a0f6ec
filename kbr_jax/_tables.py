"""Data frames as arrays of numbers."""

from typing import Any

import numpy as np

#: What to do with what is no number.
REMEDY = (
    "turn words and categories into integer labels, `np.unique(column, return_inverse=True)[1]`, "
    "and objects that are numbers into them by `.astype(float)`. Columns of several kinds are a "
    "tuple of arrays."
)


def as_numbers(table: Any, name: str) -> np.ndarray:
    """The numbers of a data frame, or of one of its columns.

    Nullable numbers are numbers, and NaN where one is missing. Booleans beside numbers are 0 and 1.
    """
    values = table.to_numpy()
    if values.dtype != object or not hasattr(table, "dtypes"):
        return values
    several = hasattr(table.dtypes, "items")
    if several and values.ndim == 1:  # an index of several levels
        return values
    columns = list(table.dtypes.items()) if several else [(table.name, table.dtypes)]
    for column, kind in columns:
        if getattr(kind, "kind", "O") not in "biuf":
            where = f"`{name}`" if column is None else f"Column {column!r} of `{name}`"
            raise ValueError(f"{where} is {kind}, no number: {REMEDY}")
    kinds = {kind.kind for _, kind in columns}
    if np.any(table.isna().to_numpy()):
        return table.to_numpy(dtype=float, na_value=np.nan)
    if kinds == {"b"}:
        return table.to_numpy(dtype=bool)
    if kinds <= {"i", "u"}:
        large = values.max() > np.iinfo(np.int64).max
        return table.to_numpy(dtype=np.uint64 if large else np.int64)
    return table.to_numpy(dtype=float)
