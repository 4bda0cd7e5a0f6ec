from ._intervene import AbstractCausalModel, intervene
from ._outcome import OutcomeBridge, fit_moment_bridge, fit_outcome_bridge
from ._treatment import TreatmentBridge, fit_treatment_bridge
