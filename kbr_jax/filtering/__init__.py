"""Filters: beliefs about a hidden state as weighted samples."""

from ._base import AbstractFilter as AbstractFilter
from ._base import FilterOutput as FilterOutput
from ._base import belief as belief
from ._base import filter_step as filter_step
from ._base import init_filter as init_filter
from ._base import init_from_observation as init_from_observation
from ._base import predict as predict
from ._base import run_filter as run_filter
from ._base import state_mean as state_mean
from ._cusum import CusumRestartFilter as CusumRestartFilter
from ._cusum import fit_cusum_restart as fit_cusum_restart
from ._discriminant import DiscriminantLikelihood as DiscriminantLikelihood
from ._discriminant import fit_discriminant as fit_discriminant
from ._kernel_bayes import KernelBayesFilter as KernelBayesFilter
from ._kernel_bayes import KernelBayesState as KernelBayesState
from ._kernel_bayes import fit_filter as fit_filter
from ._known import GaussianTransition as GaussianTransition
from ._known import KnownLikelihood as KnownLikelihood
from ._known import SimulatedTransition as SimulatedTransition
from ._known import known_likelihood as known_likelihood
from ._sequences import delay_embedding as delay_embedding
from ._smoothing import smooth as smooth
from ._song2009 import ConditionalEmbeddingFilter as ConditionalEmbeddingFilter
from ._song2009 import (
    fit_conditional_embedding_filter as fit_conditional_embedding_filter,
)
