r"""A sample under a kernel that is a finite feature map: no Gram matrix, and nothing lost."""

from .._checks import check_memory, size
from .._typing import Array, Bool, Float, Points
from ..kernels import FeatureMap
from ._features import AbstractFeatureMap, masked_rows


class ExplicitFeatures(AbstractFeatureMap):
    r"""The features $f(x_i)$ of a `FeatureMap`, $K = \Phi \Phi^\top$ exactly. Memory O(n r)."""

    kernel: FeatureMap
    points: Points
    matrix: Float[Array, "n r"]
    mask: Bool[Array, " n"] | None

    def coordinates(self, points: Points) -> Float[Array, "m r"]:
        return self.kernel.features(points).astype(self.dtype)


def explicit_features(
    kernel: FeatureMap, points: Points, mask: Bool[Array, " n"] | None = None
) -> ExplicitFeatures:
    """The sample with its features, for checked arguments. Cost that of n calls of the map."""
    matrix = masked_rows(kernel.features(points), mask)
    check_memory(size(points), matrix.shape[1], matrix.dtype, "a sample", "give a smaller map")
    return ExplicitFeatures(kernel, points, matrix, mask)
