"""Conditional embeddings and the rules of probability for embeddings."""

from ._clipping import Clipping as Clipping
from ._clipping import check_estimator as check_estimator
from ._clipping import clip_and_normalize as clip_and_normalize
from ._clipping import clipped as clipped
from ._conditional import ConditionalEmbedding as ConditionalEmbedding
from ._conditional import centered_weights as centered_weights
from ._conditional import check_centered as check_centered
from ._conditional import condition as condition
from ._conditional import condition_centered as condition_centered
from ._conditional import conditional_cross_covariance as conditional_cross_covariance
from ._conditional import conditional_expectation as conditional_expectation
from ._conditional import fit_conditional as fit_conditional
from ._model import AbstractConditional as AbstractConditional
from ._model import AbstractEmission as AbstractEmission
from ._model import prior_coordinates as prior_coordinates
from ._model import prior_mean as prior_mean
from ._model import prior_weights as prior_weights
from ._model import single_prior_mean as single_prior_mean
from ._model import update as update
from ._rules import bayes_rule as bayes_rule
from ._rules import chain_rule as chain_rule
from ._rules import sum_rule as sum_rule
from ._sample import AbstractSampleEmission as AbstractSampleEmission
