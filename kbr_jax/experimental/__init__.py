"""Inventions of this library without a second witness. Nothing here is promised to stay."""

from ._gaussians import (
    GaussianMixture,
    combine_mixtures,
    evaluate_mixture,
    gaussian_mixture,
    inner_mixtures,
    mixture_gram,
    mmd_mixture,
    mmd_mixtures,
    smoothed_kl,
)
from ._local import local_dependence_test
from ._reset import ResetFilter, reset_filter

__all__ = [
    "GaussianMixture",
    "ResetFilter",
    "combine_mixtures",
    "evaluate_mixture",
    "gaussian_mixture",
    "inner_mixtures",
    "local_dependence_test",
    "mixture_gram",
    "mmd_mixture",
    "mmd_mixtures",
    "reset_filter",
    "smoothed_kl",
]
