"""Conditional embeddings and the rules of probability for embeddings."""

from ._active import update
from ._conditional import (
    AbstractSampleEmission,
    ConditionalEmbedding,
    centered_weights,
    condition,
    condition_centered,
    conditional_cross_covariance,
    conditional_expectation,
    fit_conditional,
)
from ._model import (
    AbstractConditional,
    AbstractEmission,
    Clipping,
    check_estimator,
    clip_and_normalize,
    clipped,
    observed_coordinates,
    prior_coordinates,
    prior_weights,
    single_prior_weights,
)
from ._rules import bayes_rule, chain_rule, sum_rule

__all__ = [
    "AbstractConditional",
    "AbstractEmission",
    "Clipping",
    "ConditionalEmbedding",
    "bayes_rule",
    "chain_rule",
    "clip_and_normalize",
    "condition",
    "condition_centered",
    "conditional_cross_covariance",
    "conditional_expectation",
    "fit_conditional",
    "sum_rule",
]
