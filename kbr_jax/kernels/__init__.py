"""Kernels and their Gram matrices."""

from ._bandwidth import median_heuristic as median_heuristic
from ._base import AbstractKernel as AbstractKernel
from ._base import FunctionKernel as FunctionKernel
from ._base import Product as Product
from ._base import Scaled as Scaled
from ._base import Sum as Sum
from ._base import as_kernel as as_kernel
from ._base import diagonal as diagonal
from ._base import gram as gram
from ._discrete import Delta as Delta
from ._discrete import Precomputed as Precomputed
from ._dot_product import Linear as Linear
from ._dot_product import Polynomial as Polynomial
from ._histogram import HistogramIntersection as HistogramIntersection
from ._histogram import RBFChiSquared as RBFChiSquared
from ._matrix import ChordalGaussian as ChordalGaussian
from ._matrix import Trace as Trace
from ._parts import DirectSum as DirectSum
from ._parts import TensorProduct as TensorProduct
from ._stationary import AbstractStationary as AbstractStationary
from ._stationary import Gaussian as Gaussian
from ._stationary import Laplace as Laplace
from ._stationary import Matern12 as Matern12
from ._stationary import Matern32 as Matern32
from ._stationary import Matern52 as Matern52
from ._stationary import RationalQuadratic as RationalQuadratic
