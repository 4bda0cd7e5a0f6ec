"""Models that choose their own parameters on held-out data."""

from ._conditional import learn_conditional
from ._filter import learn_filter
from ._maps import DiscriminantMap
from ._posterior import LearnedPosterior, learn_posterior
from ._report import Report

__all__ = [
    "DiscriminantMap",
    "LearnedPosterior",
    "Report",
    "learn_conditional",
    "learn_filter",
    "learn_posterior",
]
