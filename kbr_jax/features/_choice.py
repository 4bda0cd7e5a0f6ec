"""What the library takes where a sample may be represented at low rank."""

from typing import TypeAlias

import numpy as np

from .._typing import Array, Bool, Points
from ..kernels import FeatureMap, KernelLike, kernel_for
from ._explicit import explicit_features
from ._features import AbstractFeatures, dense_gram
from ._fourier import RandomFourier, fourier_features
from ._landmarks import Landmarks, landmark_features
from ._selection import greedy_landmarks

#: None for the exact Gram matrix, a rank for greedy landmarks, given landmarks, or random Fourier
#: features.
FeatureChoice: TypeAlias = Landmarks | RandomFourier | int | None


def fit_features(
    kernel: KernelLike,
    points: Points,
    landmarks: FeatureChoice,
    mask: Bool[Array, " n"] | None = None,
) -> AbstractFeatures:
    """Fit exact features for None, greedy landmarks for a rank, else the given features."""
    kernel = kernel_for(kernel, points, mask)
    if landmarks is None and isinstance(kernel, FeatureMap):
        return explicit_features(kernel, points, mask)
    if landmarks is None:
        return dense_gram(kernel, points, mask)
    if isinstance(landmarks, RandomFourier):
        return fourier_features(kernel, points, landmarks, mask)
    rank = isinstance(landmarks, (int, np.integer))
    if rank and landmarks > 0:
        landmarks = greedy_landmarks(kernel, points, rank=int(landmarks))
    if not isinstance(landmarks, Landmarks):
        raise ValueError(
            "Landmarks must be None (exact), a rank of at least 1, `Landmarks`, or `RandomFourier` "
            f"of random Fourier features; got {landmarks if rank else type(landmarks).__name__}."
        )
    return landmark_features(kernel, points, landmarks, mask)
