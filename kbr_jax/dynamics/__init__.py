"""Dynamics of distributions from samples of different times.

Extrapolation, its selection, classifiers of the future.
"""

from ._dynamics import (
    DistributionDynamics,
    apply_dynamics,
    fit_dynamics,
    forecast_coefficients,
    recency_weights,
)
from ._predicted_svm import PredictedSVM, classify, decision_values, fit_predicted_svm, flip_labels
from ._selection import leave_one_out_errors, refit_dynamics, rolling_origin_errors
from ._sets import SampleSequence, combine, embedding_gram, sample_sequence, sampling_noise
from ._stacking import StackedForecast, extrapolate, stacked_forecast

__all__ = [
    "DistributionDynamics",
    "PredictedSVM",
    "SampleSequence",
    "StackedForecast",
    "apply_dynamics",
    "classify",
    "combine",
    "decision_values",
    "embedding_gram",
    "extrapolate",
    "fit_dynamics",
    "fit_predicted_svm",
    "flip_labels",
    "forecast_coefficients",
    "leave_one_out_errors",
    "recency_weights",
    "refit_dynamics",
    "rolling_origin_errors",
    "sample_sequence",
    "sampling_noise",
    "stacked_forecast",
]
