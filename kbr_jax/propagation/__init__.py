"""Belief propagation with messages that are functions in an RKHS."""

from ._beliefs import Beliefs, beliefs
from ._evidence import Likelihood
from ._graph import PairwiseGraph, grid_graph, pairwise_graph
from ._inference import Messages, belief_propagation
from ._model import PropagationModel, fit_belief_propagation

__all__ = [
    "Beliefs",
    "Likelihood",
    "Messages",
    "PairwiseGraph",
    "PropagationModel",
    "belief_propagation",
    "beliefs",
    "fit_belief_propagation",
    "grid_graph",
    "pairwise_graph",
]
