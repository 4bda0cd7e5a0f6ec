r"""Samples with their Gram matrix, exact or as $K \approx \Phi \Phi^\top$, and the linear algebra the rules need of them.

Every rule of the library is written once, against the methods of `AbstractFeatures`. A point enters them as its *code*,
a row of r numbers that is linear in the embedding of the point: `k(X, x)` for the exact Gram matrix (r = n), the
feature vector `phi(x)` for a feature map (r << n). The code of an embedding is the weighted sum of its points' codes.
"""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_batch, size, take
from .._numerics import AbstractFactor, matmul, psd_factor, psd_solve, resolvent, symmetric_resolvent
from .._typing import Array, Bool, Float, Int, Point, Points
from ..kernels import AbstractKernel


class AbstractFeatures(eqx.Module):
    """A sample of n points with (an approximation of) its Gram matrix K.

    Where a `mask` is given, points at False are padding: their rows and columns of K are zero, they get no weight, and n
    counts the others.

    A finished object caches arrays that depend on the kernel's parameters: never replace the kernel in it; fit anew,
    inside the loss if a gradient is wanted.
    """

    kernel: eqx.AbstractVar[AbstractKernel]
    points: eqx.AbstractVar[Points]
    codes: eqx.AbstractVar[Float[Array, "n r"]]
    mask: eqx.AbstractVar[Bool[Array, " n"] | None]

    @abc.abstractmethod
    def encode(self, points: Points) -> Float[Array, "m r"]:
        """Codes of m points."""

    @abc.abstractmethod
    def rebase(self, points: Points) -> "AbstractFeatures":
        """The same features of another sample."""

    @abc.abstractmethod
    def restrict(
        self, index: Int[Array, " k"], codes: Float[Array, "b r"]
    ) -> tuple["AbstractFeatures", Float[Array, "b q"]]:
        """The features of k points of the sample, and given codes as codes of these."""

    @abc.abstractmethod
    def expand(self, coefficients: Float[Array, "b r"]) -> Float[Array, "b n"]:
        """Weights on the sample of vectors given in the coordinates of `operator`."""

    @abc.abstractmethod
    def contract(self, values: Float[Array, "b n"]) -> Float[Array, "b r"]:
        """The adjoint of `expand`."""

    @abc.abstractmethod
    def centre(self, codes: Float[Array, "b r"]) -> Float[Array, "b r"]:
        """Codes as a centred ridge regression takes them."""

    @abc.abstractmethod
    def operator(self, centred: bool) -> Float[Array, "r r"]:
        """The matrix that a ridge regression on this sample inverts (plus its ridge), centred in feature space if asked."""

    @abc.abstractmethod
    def posterior(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
        r"""Both forms of Bayes' rule need the same solve with D = diag(weights), of any sign.

        **Returns:** $\beta = D K ((D K)^2 + \delta I)^{-1} D k$ and $g = K ((D K)^2 + \delta I)^{-1} D k$ with
        $\beta = D g$, for each code of an observation (its $k$).
        """

    @abc.abstractmethod
    def importance_values(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> Float[Array, "b n"]:
        r"""$g = (K D + \delta I)^{-1} k$ with D = diag(weights) >= 0, for each code: `importance_posterior` is $D g$."""

    @abc.abstractmethod
    def importance_posterior(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> Float[Array, "b n"]:
        r"""$\sqrt{D} (\sqrt{D} K \sqrt{D} + \delta I)^{-1} \sqrt{D} k = (D K + \delta I)^{-1} D k$ for weights >= 0."""

    @property
    def size(self) -> int:
        """Number of points, padding included."""
        return size(self.points)

    @property
    def count(self) -> Float[Array, ""]:
        """Number n of points that are no padding."""
        return jnp.asarray(self.size if self.mask is None else jnp.sum(self.mask), self.dtype)

    @property
    def uniform(self) -> Float[Array, " n"]:
        """Weights of the empirical distribution."""
        return self._unpadded(jnp.full(self.size, 1 / self.count))

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the codes."""
        return self.codes.dtype

    def mean_code(self) -> Float[Array, " r"]:
        """Code of the uniformly weighted sample."""
        return matmul(self.uniform, self.codes)

    def _unpadded(self, values: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        return values if self.mask is None else jnp.where(self.mask, values, 0)

    def ridge(self, regularizer: Float[Array, ""], centred: bool = False) -> AbstractFactor:
        """Factor of `K + n regularizer I`, or of its feature form; cost O(n^3) exact, O(n r^2) for features."""
        return psd_factor(self.operator(centred), self.count * regularizer)

    def ridge_weights(self, factor: AbstractFactor, codes: Float[Array, "b r"]) -> Float[Array, "b n"]:
        """`(K + n regularizer I)^{-1} k` for each code; cost O(n^2) exact, O(n r + r^2) for features."""
        return self.expand(factor.solve(codes.T).T)

    def project(self, codes: Float[Array, "b r"], regularizer: Float[Array, ""]) -> Float[Array, "b n"]:
        """Weights on this sample for embeddings given by their codes, by ridge regression: `ridge` and `ridge_weights` in one."""
        return self.ridge_weights(self.ridge(regularizer), codes)

    def ridge_values(
        self, factor: AbstractFactor, values: Float[Array, "b n"], codes: Float[Array, "m r"]
    ) -> Float[Array, "b m"]:
        """`k(X, x)^T (K + n regularizer I)^{-1} values` at each code: kernel ridge regression; the adjoint of `ridge_weights`."""
        return matmul(factor.solve(self.contract(values).T).T, codes.T)


class AbstractGramFeatures(AbstractFeatures):
    """The exact kernel: codes are kernel columns `k(X, x)`, r = n."""

    def encode(self, points: Points) -> Float[Array, "m r"]:
        return self._unpadded(self.kernel.gram(points, self.points))

    def expand(self, coefficients: Float[Array, "b r"]) -> Float[Array, "b n"]:
        return coefficients

    def contract(self, values: Float[Array, "b n"]) -> Float[Array, "b r"]:
        return values

    def centre(self, codes: Float[Array, "b r"]) -> Float[Array, "b r"]:
        return self._unpadded(codes - jnp.sum(codes, axis=-1, keepdims=True) / self.count)

    def operator(self, centred: bool) -> Float[Array, "r r"]:
        return self.centre(self.centre(self.codes).T).T if centred else self.codes

    def posterior(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
        matrix = self.codes
        beta, inverse = resolvent(weights[:, None] * matrix, regularizer, (weights * codes).T)
        return beta.T, matmul(matrix, inverse).T

    def importance_values(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> Float[Array, "b n"]:
        matrix = self.codes * weights + regularizer * jnp.eye(self.size, dtype=codes.dtype)
        return jnp.linalg.solve(matrix, codes.T).T

    def importance_posterior(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> Float[Array, "b n"]:
        matrix = weights[:, None] * self.codes + regularizer * jnp.eye(self.size, dtype=codes.dtype)
        return jnp.linalg.solve(matrix, (weights * codes).T).T


class ExactFeatures(AbstractGramFeatures):
    """The exact Gram matrix, stored and factored. Memory O(n^2)."""

    kernel: AbstractKernel
    points: Points
    codes: Float[Array, "n n"]
    mask: Bool[Array, " n"] | None

    def rebase(self, points: Points) -> "ExactFeatures":
        return exact_features(self.kernel, points, self.mask)

    def restrict(
        self, index: Int[Array, " k"], codes: Float[Array, "b r"]
    ) -> tuple["ExactFeatures", Float[Array, "b q"]]:
        matrix = self.codes[index[:, None], index[None, :]]
        mask = None if self.mask is None else self.mask[index]
        return ExactFeatures(self.kernel, take(self.points, index), matrix, mask), codes[:, index]


class AbstractFeatureMap(AbstractFeatures):
    r"""A finite feature map, $k(x, y) \approx \phi(x)^\top \phi(y)$; codes are feature vectors.

    With $\Phi$ `[n, r]`, $A = \Phi^\top D \Phi$ and $k = \Phi l$, the push-through identity turns every n x n solve into
    an r x r one, exact for $K = \Phi \Phi^\top$:

    $$ (\Phi \Phi^\top + n \lambda I)^{-1} \Phi l = \Phi (\Phi^\top \Phi + n \lambda I)^{-1} l, \qquad
       K ((D K)^2 + \delta I)^{-1} D k = \Phi A (A^2 + \delta I)^{-1} l. $$
    """

    def restrict(
        self, index: Int[Array, " k"], codes: Float[Array, "b r"]
    ) -> tuple["AbstractFeatureMap", Float[Array, "b q"]]:
        part = take((self.points, self.codes, self.mask), index)
        return eqx.tree_at(lambda f: (f.points, f.codes, f.mask), self, part, is_leaf=lambda leaf: leaf is None), codes

    def expand(self, coefficients: Float[Array, "b r"]) -> Float[Array, "b n"]:
        return matmul(coefficients, self.codes.T)

    def contract(self, values: Float[Array, "b n"]) -> Float[Array, "b r"]:
        return matmul(values, self.codes)

    def centre(self, codes: Float[Array, "b r"]) -> Float[Array, "b r"]:
        return codes  # The features of the sample are centred instead, in `operator` and behind `expand`.

    def operator(self, centred: bool) -> Float[Array, "r r"]:
        features = self._unpadded((self.codes - self.mean_code()).T).T if centred else self.codes
        return matmul(features.T, features)

    def posterior(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
        coefficients = symmetric_resolvent(self._weighted(weights), regularizer, codes.T)
        values = self.expand(coefficients.T)
        return weights * values, values

    def importance_values(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> Float[Array, "b n"]:
        return self.expand(psd_solve(self._weighted(weights), codes.T, regularizer).T)

    def importance_posterior(
        self, weights: Float[Array, " n"], codes: Float[Array, "b r"], regularizer: Float[Array, ""]
    ) -> Float[Array, "b n"]:
        return weights * self.importance_values(weights, codes, regularizer)

    def _weighted(self, weights: Float[Array, " n"]) -> Float[Array, "r r"]:
        return matmul((weights[:, None] * self.codes).T, self.codes)


def masked_rows(codes: Float[Array, "n r"], mask: Bool[Array, " n"] | None) -> Float[Array, "n r"]:
    """Codes with zeros for padding."""
    return codes if mask is None else jnp.where(mask[:, None], codes, 0)


def exact_features(kernel: Any, points: Points, mask: Bool[Array, " n"] | None = None) -> ExactFeatures:
    """The sample with its exact Gram matrix, for checked arguments. Cost O(n^2 d)."""
    matrix = kernel.gram(points, points)
    if mask is not None:
        matrix = jnp.where(mask[:, None] & mask[None, :], matrix, 0)
    return ExactFeatures(kernel, points, matrix, mask)


def encode(features: AbstractFeatures, points: Point | Points, name: str) -> tuple[Float[Array, "b r"], bool]:
    """Codes of one point or of a batch, checked against the training sample; and whether it was one point."""
    batch, single = as_batch(points, name, features.points, f"training {name}")
    features.kernel.check(batch, name)
    return features.encode(batch), single
