r"""Samples with their Gram matrix, exact or as $K \approx \Phi \Phi^\top$.

The linear algebra of the rules is here too.

Every rule of the library is written once, against the methods of `AbstractFeatures`. A point enters
them as its *code*, a row of r numbers that is linear in the embedding of the point: `k(X, x)` for
the exact Gram matrix (r = n), the feature vector `phi(x)` for a feature map (r << n). The code of
an embedding is the weighted sum of its points' coordinates.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_batch, check_memory, in_precision, size, take
from .._lapack import solve
from .._numerics import matmul
from .._solves import (
    AbstractFactor,
    psd_factor,
    psd_solve,
    resolvent,
    symmetric_resolvent,
    weighted_moment,
)
from .._typing import Array, Bool, Float, Int, Point, Points, with_scalars
from ..kernels import AbstractKernel

#: Similarity below which a point is like none of the sample: rounding in double precision, 8.5
#: bandwidths of a Gaussian kernel. One reading in 1 700 of a walker in a canteen is beyond it, the
#: first of a lap. Its belief was 13 m off, for 13 steps. Any number from 2e-16 to .05 mends that.
REACH = 2.0**-52


class AbstractFeatures(eqx.Module):
    """A sample of n points with (an approximation of) its Gram matrix K.

    Where a `mask` is given, points at False are padding: their rows and columns of K are zero, they
    get no weight, and n counts the others.

    A finished object caches arrays that depend on the kernel's parameters: never replace the kernel
    in it; fit anew, inside the loss if a gradient is wanted.
    """

    kernel: eqx.AbstractVar[AbstractKernel]
    points: eqx.AbstractVar[Points]
    matrix: eqx.AbstractVar[Float[Array, "n r"]]
    mask: eqx.AbstractVar[Bool[Array, " n"] | None]

    __repr__ = with_scalars

    @abc.abstractmethod
    def coordinates(self, points: Points) -> Float[Array, "m r"]:
        """Codes of m points."""

    @abc.abstractmethod
    def beyond_reach(self, coordinates: Float[Array, "m r"], points: Points) -> Bool[Array, " m"]:
        """Whether codes of m points are less than `REACH` of what the kernel can give."""

    @abc.abstractmethod
    def at(self, points: Points) -> "AbstractFeatures":
        """The same features of another sample."""

    @abc.abstractmethod
    def restrict(
        self, index: Int[Array, " k"], coordinates: Float[Array, "b r"]
    ) -> tuple["AbstractFeatures", Float[Array, "b q"]]:
        """The features of k points of the sample, and given coordinates as coordinates of these."""

    @abc.abstractmethod
    def to_sample(self, coefficients: Float[Array, "b r"]) -> Float[Array, "b n"]:
        """Weights on the sample of vectors given in the coordinates of `ridge_matrix`."""

    @abc.abstractmethod
    def from_sample(self, values: Float[Array, "b n"]) -> Float[Array, "b r"]:
        """The adjoint of `to_sample`."""

    @abc.abstractmethod
    def center(self, coordinates: Float[Array, "b r"]) -> Float[Array, "b r"]:
        """Codes as a centered ridge regression takes them."""

    @abc.abstractmethod
    def ridge_matrix(self, centered: bool) -> Float[Array, "r r"]:
        """The matrix that a ridge regression on this sample inverts, without its ridge.

        It is centered in feature space if asked.
        """

    @abc.abstractmethod
    def posterior(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b r"],
        regularizer: Float[Array, ""],
    ) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
        r"""Solve Bayes' rule for D = diag(weights) of any sign: both of its forms.

        **Returns:** $\beta = D K ((D K)^2 + \delta I)^{-1} D k$ and
        $g = K ((D K)^2 + \delta I)^{-1} D k$ with $\beta = D g$, for each code of an observation
        (its $k$).
        """

    @abc.abstractmethod
    def importance_values(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b r"],
        regularizer: Float[Array, ""],
    ) -> Float[Array, "b n"]:
        r"""$g = (K D + \delta I)^{-1} k$ with D = diag(weights) >= 0, for each code.

        `importance_posterior` is $D g$.
        """

    def importance_posterior(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b r"],
        regularizer: Float[Array, ""],
    ) -> Float[Array, "b n"]:
        r"""$\sqrt{D} (\sqrt{D} K \sqrt{D} + \delta I)^{-1} \sqrt{D} k = D (K D + \delta I)^{-1} k$
        for weights >= 0.
        """
        return weights * self.importance_values(weights, coordinates, regularizer)

    @property
    def size(self) -> int:
        """Number of points, padding included."""
        return size(self.points)

    @property
    def count(self) -> Float[Array, ""]:
        """Number n of points without the padding."""
        return jnp.asarray(self.size if self.mask is None else jnp.sum(self.mask), self.dtype)

    @property
    def uniform(self) -> Float[Array, " n"]:
        """Weights of the empirical distribution."""
        return self._unpadded(jnp.full(self.size, 1 / self.count))

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the coordinates."""
        return self.matrix.dtype

    def mean_coordinates(self) -> Float[Array, " r"]:
        """Code of the uniformly weighted sample."""
        return matmul(self.uniform, self.matrix)

    def _unpadded(self, values: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        return values if self.mask is None else jnp.where(self.mask, values, 0)

    def ridge(self, regularizer: Float[Array, ""], centered: bool = False) -> AbstractFactor:
        """Factor of `K + n regularizer I`, or of its feature form.

        Cost O(n^3) exact, O(n r^2) for features.
        """
        return psd_factor(self.ridge_matrix(centered), self.count * regularizer, invert=True)

    def ridge_weights(
        self, factor: AbstractFactor, coordinates: Float[Array, "b r"]
    ) -> Float[Array, "b n"]:
        """`(K + n regularizer I)^{-1} k` for each code.

        Cost O(n^2) exact, O(n r + r^2) for features.
        """
        return self.to_sample(factor.solve(coordinates.T).T)


class AbstractGram(AbstractFeatures):
    """The exact kernel: coordinates are kernel columns `k(X, x)`, r = n."""

    def coordinates(self, points: Points) -> Float[Array, "m r"]:
        return self._unpadded(self.kernel.gram(points, self.points)).astype(self.dtype)

    def beyond_reach(self, coordinates: Float[Array, "m r"], points: Points) -> Bool[Array, " m"]:
        return jnp.max(jnp.abs(coordinates), axis=-1) <= REACH * self.kernel.diagonal(
            points
        ).astype(self.dtype)

    def to_sample(self, coefficients: Float[Array, "b r"]) -> Float[Array, "b n"]:
        return coefficients

    def from_sample(self, values: Float[Array, "b n"]) -> Float[Array, "b r"]:
        return values

    def center(self, coordinates: Float[Array, "b r"]) -> Float[Array, "b r"]:
        return self._unpadded(
            coordinates - jnp.sum(coordinates, axis=-1, keepdims=True) / self.count
        )

    def ridge_matrix(self, centered: bool) -> Float[Array, "r r"]:
        return self.center(self.center(self.matrix).T).T if centered else self.matrix

    def posterior(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b r"],
        regularizer: Float[Array, ""],
    ) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
        matrix = self.matrix
        beta, inverse = resolvent(weights[:, None] * matrix, regularizer, (weights * coordinates).T)
        return beta.T, matmul(matrix, inverse).T

    def importance_values(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b r"],
        regularizer: Float[Array, ""],
    ) -> Float[Array, "b n"]:
        matrix = self.matrix * weights + regularizer * jnp.eye(self.size, dtype=coordinates.dtype)
        return solve(matrix, coordinates.T).T


class DenseGram(AbstractGram):
    """The exact Gram matrix, stored and factored. Memory O(n^2)."""

    kernel: AbstractKernel
    points: Points
    matrix: Float[Array, "n n"]
    mask: Bool[Array, " n"] | None

    def at(self, points: Points) -> "DenseGram":
        return in_precision(dense_gram(self.kernel, points, self.mask), self.dtype)

    def restrict(
        self, index: Int[Array, " k"], coordinates: Float[Array, "b r"]
    ) -> tuple["DenseGram", Float[Array, "b q"]]:
        matrix = self.matrix[index[:, None], index[None, :]]
        mask = None if self.mask is None else self.mask[index]
        return DenseGram(self.kernel, take(self.points, index), matrix, mask), coordinates[:, index]


class AbstractFeatureMap(AbstractFeatures):
    r"""A finite feature map, $k(x, y) \approx \phi(x)^\top \phi(y)$; coordinates are feature
    vectors.

    With $\Phi$ `[n, r]`, $A = \Phi^\top D \Phi$ and $k = \Phi l$, the push-through identity turns
    every n x n solve into an r x r one, exact for $K = \Phi \Phi^\top$:

    $$ (\Phi \Phi^\top + n \lambda I)^{-1} \Phi l = \Phi (\Phi^\top \Phi + n \lambda I)^{-1} l,
       \qquad
       K ((D K)^2 + \delta I)^{-1} D k = \Phi A (A^2 + \delta I)^{-1} l. $$
    """

    def at(self, points: Points) -> "AbstractFeatureMap":
        matrix = masked_rows(self.coordinates(points), self.mask)
        return eqx.tree_at(lambda f: (f.points, f.matrix), self, (points, matrix))

    def restrict(
        self, index: Int[Array, " k"], coordinates: Float[Array, "b r"]
    ) -> tuple["AbstractFeatureMap", Float[Array, "b q"]]:
        part = take((self.points, self.matrix, self.mask), index)
        return eqx.tree_at(
            lambda f: (f.points, f.matrix, f.mask), self, part, is_leaf=lambda leaf: leaf is None
        ), coordinates

    def beyond_reach(self, coordinates: Float[Array, "m r"], points: Points) -> Bool[Array, " m"]:
        least = REACH * jnp.sqrt(self.kernel.diagonal(points).astype(self.dtype))
        return jnp.max(jnp.abs(coordinates), axis=-1) <= least

    def to_sample(self, coefficients: Float[Array, "b r"]) -> Float[Array, "b n"]:
        return matmul(coefficients, self.matrix.T)

    def from_sample(self, values: Float[Array, "b n"]) -> Float[Array, "b r"]:
        return matmul(values, self.matrix)

    def center(self, coordinates: Float[Array, "b r"]) -> Float[Array, "b r"]:
        # The features of the sample are centered instead, in `ridge_matrix` and behind `to_sample`.
        return coordinates

    def ridge_matrix(self, centered: bool) -> Float[Array, "r r"]:
        features = self.matrix
        if centered:
            features = masked_rows(features - self.mean_coordinates(), self.mask)
        return matmul(features.T, features)

    def posterior(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b r"],
        regularizer: Float[Array, ""],
    ) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
        coefficients = symmetric_resolvent(self._weighted(weights), regularizer, coordinates.T)
        values = self.to_sample(coefficients.T)
        return weights * values, values

    def importance_values(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b r"],
        regularizer: Float[Array, ""],
    ) -> Float[Array, "b n"]:
        return self.to_sample(psd_solve(self._weighted(weights), coordinates.T, regularizer).T)

    def _weighted(self, weights: Float[Array, " n"]) -> Float[Array, "r r"]:
        return weighted_moment(weights, self.matrix)


def masked_rows(
    coordinates: Float[Array, "n r"], mask: Bool[Array, " n"] | None
) -> Float[Array, "n r"]:
    """Codes with zeros for padding."""
    return coordinates if mask is None else jnp.where(mask[:, None], coordinates, 0)


def dense_gram(
    kernel: AbstractKernel, points: Points, mask: Bool[Array, " n"] | None = None
) -> DenseGram:
    """The sample with its exact Gram matrix, for checked arguments. Cost O(n^2 d)."""
    n = size(points)
    dtype = jax.eval_shape(kernel.diagonal, points).dtype
    check_memory(n, n, dtype, "a sample", "give landmarks, for example a rank of 500")
    matrix = kernel.gram(points, points)
    if mask is not None:
        matrix = jnp.where(mask[:, None] & mask[None, :], matrix, 0)
    return DenseGram(kernel, points, matrix, mask)


def checked_coordinates(
    features: AbstractFeatures, points: Point | Points, name: str
) -> tuple[Float[Array, "b r"], bool]:
    """Codes of one point or of a batch, checked against the training sample.

    And whether it was one point.
    """
    batch, single = as_batch(points, name, features.points, f"training {name}")
    features.kernel.check(batch, name)
    return features.coordinates(batch), single
