"""Belief propagation with messages that are functions in an RKHS."""

from ._beliefs import Beliefs as Beliefs
from ._beliefs import read_beliefs as read_beliefs
from ._evidence import Likelihood as Likelihood
from ._graph import PairwiseGraph as PairwiseGraph
from ._graph import grid_graph as grid_graph
from ._graph import pairwise_graph as pairwise_graph
from ._inference import Messages as Messages
from ._inference import propagate_loopy as propagate_loopy
from ._inference import propagate_tree as propagate_tree
from ._model import PropagationModel as PropagationModel
from ._model import fit_belief_propagation as fit_belief_propagation
