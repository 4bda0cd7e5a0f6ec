"""Conditional embeddings and the rules of probability for embeddings."""

from ._conditional import ConditionalEmbedding as ConditionalEmbedding
from ._conditional import centred_weights as centred_weights
from ._conditional import condition as condition
from ._conditional import condition_centred as condition_centred
from ._conditional import conditional_cross_covariance as conditional_cross_covariance
from ._conditional import conditional_expectation as conditional_expectation
from ._conditional import fit_conditional as fit_conditional
from ._moment_rules import MomentModel as MomentModel
from ._moment_rules import check_signs as check_signs
from ._moment_rules import fit_moments as fit_moments
from ._moment_rules import posterior as posterior
from ._moments import MomentMaps as MomentMaps
from ._moments import Moments as Moments
from ._moments import collect_chunks as collect_chunks
from ._moments import collect_moments as collect_moments
from ._moments import contract as contract
from ._moments import kept as kept
from ._moments import merge_moments as merge_moments
from ._moments import moment_maps as moment_maps
from ._moments import ravel_point as ravel_point
from ._prior import check_truncation as check_truncation
from ._prior import clean_weights as clean_weights
from ._rules import bayes_rule as bayes_rule
from ._rules import chain_rule as chain_rule
from ._rules import prior_weights as prior_weights
from ._rules import sum_rule as sum_rule
