"""Conditional embeddings and the rules of probability for embeddings."""

from ._conditional import ConditionalEmbedding as ConditionalEmbedding
from ._conditional import centred_weights as centred_weights
from ._conditional import condition as condition
from ._conditional import condition_centred as condition_centred
from ._conditional import conditional_cross_covariance as conditional_cross_covariance
from ._conditional import conditional_expectation as conditional_expectation
from ._conditional import encode as encode
from ._conditional import fit_conditional as fit_conditional
from ._prior import check_truncation as check_truncation
from ._prior import clean_weights as clean_weights
from ._rules import bayes_rule as bayes_rule
from ._rules import chain_rule as chain_rule
from ._rules import prior_weights as prior_weights
from ._rules import sum_rule as sum_rule
