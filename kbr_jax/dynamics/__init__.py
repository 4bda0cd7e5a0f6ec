"""Dynamics of distributions from samples of different times: extrapolation, its selection, classifiers of the future."""

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
from ._selection import forward_errors as forward_errors
from ._selection import leave_one_out_errors as leave_one_out_errors
from ._selection import refit_dynamics as refit_dynamics
from ._sets import SampleSets as SampleSets
from ._sets import mix_sets as mix_sets
from ._sets import sample_sets as sample_sets
from ._sets import sampling_noise as sampling_noise
from ._sets import set_gram as set_gram
from ._stacking import Stacked as Stacked
from ._stacking import stacked_forecast as stacked_forecast
