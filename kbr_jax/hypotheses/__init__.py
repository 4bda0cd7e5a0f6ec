"""Tests of hypotheses with embeddings.

Two samples, independence, independence given a third variable or its value, goodness of fit, the
effect of a treatment, and changes in a series.
"""

from ._change_detector import (
    ChangeDetector,
    Detection,
    DetectorState,
    detect_changes,
    detector_step,
    fit_change_detector,
    init_detector,
)
from ._change_points import ChangePoints, change_points
from ._conditional import conditional_independence_test
from ._discovery import causal_learn_test, pgmpy_test
from ._independence import independence_test
from ._results import TestResult
from ._stein import goodness_of_fit_test, kernel_stein_discrepancy, stein_thinning
from ._treatment import treatment_effect_test
from ._two_sample import block_two_sample_test, two_sample_test

__all__ = [
    "ChangeDetector",
    "ChangePoints",
    "Detection",
    "DetectorState",
    "TestResult",
    "block_two_sample_test",
    "causal_learn_test",
    "change_points",
    "conditional_independence_test",
    "detect_changes",
    "detector_step",
    "fit_change_detector",
    "goodness_of_fit_test",
    "independence_test",
    "init_detector",
    "kernel_stein_discrepancy",
    "pgmpy_test",
    "stein_thinning",
    "treatment_effect_test",
    "two_sample_test",
]
