"""Conditional embeddings on moments of the sample, for training sets of any size."""

from ._collect import collect_moments as collect_moments
from ._collect import merge_moments as merge_moments
from ._model import MomentModel as MomentModel
from ._model import MomentWeights as MomentWeights
from ._model import fit_conditional as fit_conditional
from ._model import moment_weights as moment_weights
from ._moments import MomentMaps as MomentMaps
from ._moments import Moments as Moments
from ._moments import moment_maps as moment_maps
from ._moments import ravel_point as ravel_point
