"""Inventions of this library without a second witness. Nothing here is promised to stay."""

from ._reset import ResetFilter as ResetFilter
from ._reset import reset_filter as reset_filter
