"""Posteriors where the likelihood can be simulated but not evaluated."""

from ._posterior import PosteriorModel as PosteriorModel
from ._posterior import fit_posterior as fit_posterior
from ._simulations import Simulations as Simulations
from ._simulations import simulate as simulate
