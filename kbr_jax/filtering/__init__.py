"""Filters: beliefs about a hidden state as weighted samples."""

from ._base import (
    AbstractFilter,
    FilterOutput,
    belief,
    filter_step,
    init_filter,
    init_from_observation,
    predict,
    run_filter,
    state_mean,
)
from ._cusum import CusumRestartFilter, fit_cusum_restart
from ._diagnosis import Diagnosis, diagnose
from ._discriminant import DiscriminantLikelihood, fit_discriminant
from ._kernel_bayes import KernelBayesFilter, KernelBayesState, fit_filter
from ._known import GaussianTransition, KnownLikelihood, SimulatedTransition, known_likelihood
from ._readout import ReadoutFilter
from ._rival import RivalFilter
from ._sequences import delay_embedding, stretches, transitions
from ._smoothing import smooth
from ._song2009 import ConditionalEmbeddingFilter, fit_conditional_embedding_filter

__all__ = [
    "AbstractFilter",
    "ConditionalEmbeddingFilter",
    "CusumRestartFilter",
    "Diagnosis",
    "DiscriminantLikelihood",
    "FilterOutput",
    "GaussianTransition",
    "KernelBayesFilter",
    "KnownLikelihood",
    "ReadoutFilter",
    "RivalFilter",
    "SimulatedTransition",
    "belief",
    "delay_embedding",
    "diagnose",
    "filter_step",
    "fit_conditional_embedding_filter",
    "fit_cusum_restart",
    "fit_discriminant",
    "fit_filter",
    "init_filter",
    "init_from_observation",
    "known_likelihood",
    "predict",
    "run_filter",
    "smooth",
    "state_mean",
    "stretches",
    "transitions",
]
