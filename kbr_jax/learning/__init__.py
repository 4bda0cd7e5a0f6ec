"""Models that choose their own parameters on held-out data."""

from ._conditional import learn_conditional
from ._features import learn_features
from ._filter import learn_filter
from ._forecast import Forecast, learn_forecast
from ._images import ImageMap, fit_image_map
from ._instrument import learn_instrument
from ._maps import DiscriminantMap
from ._posterior import LearnedPosterior, learn_posterior
from ._report import Report

__all__ = [
    "DiscriminantMap",
    "Forecast",
    "ImageMap",
    "LearnedPosterior",
    "Report",
    "fit_image_map",
    "learn_conditional",
    "learn_features",
    "learn_filter",
    "learn_forecast",
    "learn_instrument",
    "learn_posterior",
]
