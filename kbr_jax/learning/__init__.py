"""Models that choose their own parameters on held-out data."""

from ._filter import learn_filter
from ._maps import DiscriminantMap
from ._report import Report

__all__ = ["DiscriminantMap", "Report", "learn_filter"]
