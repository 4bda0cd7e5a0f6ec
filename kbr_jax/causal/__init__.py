"""Causal rules: interventions, instruments and proxies.

The sum rule with a product kernel is do(a). A conditional embedding inside a second ridge
regression is an instrument, or a proxy of what was not measured.
"""

from ._instrument import InstrumentalRegression, fit_instrument, structural
from ._intervene import AbstractCausalModel, intervene
from ._outcome import OutcomeBridge, fit_moment_bridge, fit_outcome_bridge
from ._robust import Band, DoublyRobust, confidence_band, doubly_robust
from ._treatment import TreatmentBridge, fit_treatment_bridge

__all__ = [
    "AbstractCausalModel",
    "Band",
    "DoublyRobust",
    "InstrumentalRegression",
    "OutcomeBridge",
    "TreatmentBridge",
    "confidence_band",
    "doubly_robust",
    "fit_instrument",
    "fit_moment_bridge",
    "fit_outcome_bridge",
    "fit_treatment_bridge",
    "intervene",
    "structural",
]
