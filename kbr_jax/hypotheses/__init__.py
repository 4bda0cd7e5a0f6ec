"""Tests of hypotheses with embeddings.

Two samples, independence, independence given a third variable or its value.
"""

from ._conditional import conditional_independence_test as conditional_independence_test
from ._independence import independence_test as independence_test
from ._local import local_dependence_test as local_dependence_test
from ._results import TestResult as TestResult
from ._two_sample import block_two_sample_test as block_two_sample_test
from ._two_sample import two_sample_test as two_sample_test
