"""Dynamics of distributions from samples of different times.

Extrapolation, its selection, classifiers of the future.
"""

from ._dynamics import DistributionDynamics as DistributionDynamics
from ._dynamics import extrapolate as extrapolate
from ._dynamics import fit_dynamics as fit_dynamics
from ._dynamics import forecast as forecast
from ._dynamics import recency_weights as recency_weights
from ._predicted_estimator import PredictedEstimator as PredictedEstimator
from ._predicted_estimator import fit_predicted_estimator as fit_predicted_estimator
from ._predicted_svm import PredictedSVM as PredictedSVM
from ._predicted_svm import classify as classify
from ._predicted_svm import decision_values as decision_values
from ._predicted_svm import fit_predicted_svm as fit_predicted_svm
from ._predicted_svm import flip_labels as flip_labels
from ._selection import leave_one_out_errors as leave_one_out_errors
from ._selection import refit_dynamics as refit_dynamics
from ._selection import rolling_origin_errors as rolling_origin_errors
from ._sets import SampleSequence as SampleSequence
from ._sets import combine as combine
from ._sets import embedding_gram as embedding_gram
from ._sets import sample_sequence as sample_sequence
from ._sets import sampling_noise as sampling_noise
from ._stacking import Stacked as Stacked
from ._stacking import stacked_forecast as stacked_forecast
