"""Tests of hypotheses with embeddings.

Two samples, independence, independence given a third variable or its value.
"""

from ._independence import conditional_independence_test, independence_test
from ._results import TestResult
from ._two_sample import block_two_sample_test, two_sample_test

__all__ = [
    "TestResult",
    "block_two_sample_test",
    "conditional_independence_test",
    "independence_test",
    "two_sample_test",
]
