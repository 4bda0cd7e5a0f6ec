"""Conditional embeddings on moments of the sample, for training sets of any size."""

from ._collect import collect_moments, merge_moments
from ._model import MomentModel, MomentWeights, fit_conditional, moment_weights
from ._moments import MomentMaps, Moments, moment_maps, ravel_point

__all__ = [
    "MomentMaps",
    "MomentModel",
    "MomentWeights",
    "Moments",
    "collect_moments",
    "fit_conditional",
    "merge_moments",
    "moment_maps",
    "moment_weights",
    "ravel_point",
]
