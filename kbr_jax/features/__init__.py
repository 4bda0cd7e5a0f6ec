"""Exact and low-rank views of a sample's Gram matrix."""

from ._choice import FeatureChoice, fit_features
from ._explicit import ExplicitFeatures
from ._features import (
    AbstractFeatureMap,
    AbstractFeatures,
    AbstractGram,
    DenseGram,
    checked_coordinates,
    dense_gram,
    masked_rows,
)
from ._fourier import FourierFeatures, RandomFourier, fourier_features, random_fourier
from ._iterative import ConjugateGradient, ConjugateGradientFactor, LazyGram, SolveReport, lazy_gram
from ._landmarks import (
    LandmarkFeatures,
    Landmarks,
    PartitionOfUnity,
    landmark_features,
    only_active,
    soft_partition,
)
from ._sampling import kmeanspp_landmarks, streaming_landmarks
from ._selection import (
    IncompleteCholesky,
    greedy_landmarks,
    incomplete_cholesky,
    rpcholesky_landmarks,
    uniform_landmarks,
)

__all__ = [
    "AbstractFeatureMap",
    "AbstractFeatures",
    "AbstractGram",
    "ConjugateGradient",
    "ConjugateGradientFactor",
    "DenseGram",
    "ExplicitFeatures",
    "FeatureChoice",
    "FourierFeatures",
    "IncompleteCholesky",
    "LandmarkFeatures",
    "Landmarks",
    "LazyGram",
    "PartitionOfUnity",
    "RandomFourier",
    "SolveReport",
    "greedy_landmarks",
    "incomplete_cholesky",
    "kmeanspp_landmarks",
    "random_fourier",
    "rpcholesky_landmarks",
    "soft_partition",
    "streaming_landmarks",
    "uniform_landmarks",
]
