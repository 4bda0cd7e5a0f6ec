"""Kernels on matrices: rotations, permutations."""

import equinox as eqx
import jax.numpy as jnp

from .._typing import Array, Float, Points
from ._domains import check_matrices
from ._dot_product import AbstractDotProduct
from ._stationary import AbstractStationary, as_bandwidth, check_bandwidth


class Trace(AbstractDotProduct):
    r"""$k(A, B) = \operatorname{tr}(A^\top B)$ on matrices `[p, q]` (S09 section 7; permutations in
    S09
    section 5).

    An embedding under it keeps the mean matrix and nothing else, so it cannot hold a belief with
    two modes; its pre-image is a projection (`decode_rotation`, `decode_permutation`).
    """

    def profile(self, product: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return product

    def check(self, x: Points, name: str) -> None:
        check_matrices(x, name, "Trace")


class ChordalGaussian(AbstractStationary):
    r"""$k(A, B) = \exp(-|A - B|_F^2 / (2 h^2))$, the Gaussian kernel of the chordal distance on
    matrices `[p, q]`.

    Positive definite on every set of matrices, rotations among them (the Gaussian kernel of the
    geodesic distance is not). On SO(3), |A - B|_F = 2 sqrt(2) sin(angle / 2), at most 2.83;
    `bandwidth` h is in these units.
    """

    bandwidth: Float[Array, "..."] = eqx.field(converter=as_bandwidth)

    def profile(self, squared: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return jnp.exp(-squared / 2)

    def check(self, x: Points, name: str) -> None:
        check_matrices(x, name, "ChordalGaussian")
        check_bandwidth(x, name, "ChordalGaussian", self.bandwidth)
