"""Kernels and their Gram matrices."""

from ._bandwidth import median_heuristic
from ._base import (
    AbstractKernel,
    FunctionKernel,
    KernelLike,
    Product,
    Scaled,
    Sum,
    as_kernel,
    diagonal,
    gram,
)
from ._blocked import gram_matvec
from ._discrete import Delta, Precomputed
from ._dot_product import Linear, Polynomial
from ._histogram import ChiSquared, HistogramIntersection
from ._parts import DirectSum, TensorProduct
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
    "diagonal",
    "gram",
    "gram_matvec",
    "median_heuristic",
]
