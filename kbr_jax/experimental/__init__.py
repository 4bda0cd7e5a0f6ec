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

__all__ = [
    "GaussianMixture",
    "combine_mixtures",
    "evaluate_mixture",
    "gaussian_mixture",
    "inner_mixtures",
    "local_dependence_test",
    "mixture_gram",
    "mmd_mixture",
    "mmd_mixtures",
    "smoothed_kl",
]
