"""Kernels and their Gram matrices."""

from ._base import (
    AbstractKernel,
    FunctionKernel,
    KernelLike,
    Product,
    Scaled,
    Sum,
    as_kernel,
)
from ._defaults import (
    checked_kernel,
    coordinate_scale,
    default_kernel,
    diagonal,
    gram,
    kernel_for,
    warn_of_scale,
)
from ._families import (
    ChiSquared,
    Delta,
    Energy,
    HistogramIntersection,
    Linear,
    Polynomial,
    Precomputed,
)
from ._gram import gram_matvec, median_heuristic
from ._parts import DirectSum, FeatureMap, TensorProduct, Warped
from ._stationary import (
    WITH_SPECTRUM,
    AbstractShiftInvariant,
    AbstractStationary,
    Gaussian,
    Laplace,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
)

__all__ = [
    "AbstractKernel",
    "AbstractShiftInvariant",
    "AbstractStationary",
    "ChiSquared",
    "Delta",
    "DirectSum",
    "Energy",
    "FeatureMap",
    "FunctionKernel",
    "Gaussian",
    "HistogramIntersection",
    "KernelLike",
    "Laplace",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Polynomial",
    "Precomputed",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "Sum",
    "TensorProduct",
    "Warped",
    "coordinate_scale",
    "default_kernel",
    "diagonal",
    "gram",
    "gram_matvec",
    "median_heuristic",
]
