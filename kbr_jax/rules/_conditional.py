r"""Conditional embeddings $\mu_{Y|x} = C_{Y|X} \phi(x)$.

Ridge regression from points to embeddings.
"""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .._checks import (
    as_mask,
    as_points,
    as_regularizer,
    check_choice,
    check_finite,
    check_same_size,
    in_one_precision,
    in_precision,
    precision_of,
    size,
    without_padding,
)
from .._numerics import matmul
from .._solves import AbstractFactor
from .._typing import Array, ArrayLike, Bool, Float, Int, Point, PointFunction, Points
from ..embedding import CrossCovariance, Embedding, JointEmbedding, expectation, mean
from ..features import (
    AbstractFeatures,
    ConjugateGradient,
    FeatureChoice,
    checked_coordinates,
    fit_features,
    lazy_gram,
)
from ..kernels import AbstractKernel, KernelLike, TensorProduct, checked_kernel
from ._model import (
    AbstractConditional,
    AbstractEmission,
    Clipping,
    clip_and_normalize,
    prior_coordinates,
)


class AbstractSampleEmission(AbstractEmission):
    """A likelihood P(y | x) on a training sample of x, see `AbstractEmission`."""

    regularizer: eqx.AbstractVar[Float[Array, ""]]
    factor: eqx.AbstractVar[AbstractFactor]

    def total(self, belief: Float[Array, "*b n"]) -> Float[Array, "*b"]:
        """The mass of a belief."""
        return jnp.sum(belief, axis=-1)

    @property
    def x(self) -> Points:
        """Training points of x."""
        return self.features_x.points

    def weights(self, coordinates: Float[Array, "*b p"]) -> Float[Array, "*b n"]:
        flat = coordinates.reshape(-1, coordinates.shape[-1])
        weights = self.features_x.ridge_weights(self.factor, flat)
        return weights.reshape(*coordinates.shape[:-1], weights.shape[-1])

    def regression_on_x(self) -> tuple[AbstractFeatures, Float[Array, ""], AbstractFactor]:
        return self.features_x, self.regularizer, self.factor

    def marginal(self) -> Float[Array, " n"]:
        return self.features_x.uniform

    def clip_and_normalize(
        self, weights: Float[Array, "*b n"], clipping: Clipping
    ) -> Float[Array, "*b n"]:
        return clip_and_normalize(weights, clipping, mask=self.features_x.mask)

    def spread(
        self, belief: Float[Array, " k"], index: Int[Array, " k"], like: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        return jnp.zeros_like(like).at[index].set(belief)

    def unchanged(self, weights: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        return weights

    def is_zero(self, belief: Float[Array, " n"]) -> Bool[Array, ""]:
        return jnp.all(belief == 0)

    def as_weights(self, belief: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        return belief

    def embed_x(self, belief: Float[Array, "*b n"]) -> Embedding:
        return Embedding(self.features_x.kernel, self.x, belief)

    def mean_x(self, belief: Float[Array, "*b n"]) -> Any:
        return mean(self.embed_x(belief))

    def readout(self, features: AbstractFeatures) -> Float[Array, "n r"]:
        return features.coordinates(self.x)

    def readout_values(self, kernel: AbstractKernel, points: Points) -> Float[Array, "n a"]:
        return kernel.gram(self.x, points).astype(self.features_x.dtype)

    def readout_successors(self, successors: Points | None) -> Float[Array, "n p"]:
        if successors is None:
            raise ValueError("A shift needs the successors of the training states.")
        return self.features_x.coordinates(successors)

    def read(self, belief: Float[Array, "*b n"], readout: Float[Array, "n s"]) -> Array:
        return matmul(belief, readout)


class ConditionalEmbedding(AbstractSampleEmission, AbstractConditional):
    r"""A fitted operator $\hat C_{Y|X} = \Phi (K + n \lambda I)^{-1} \Upsilon^\top$ of P(Y | X).

    - `features_x`, `features_y`: the training pairs with their Gram matrices or features.
    - `regularizer`: the ridge lambda; `factor`: the factored `K + n lambda I`.

    It stores what its kernels imply. To change a kernel, fit again (inside the loss).
    """

    features_x: AbstractFeatures
    features_y: AbstractFeatures
    regularizer: Float[Array, ""]
    factor: AbstractFactor

    @property
    def y(self) -> Points:
        """Training points of the conditioned variable."""
        return self.features_y.points

    # What the rules need beside `AbstractSampleEmission`: see `AbstractConditional`.

    def sample(self) -> tuple[AbstractFeatures, AbstractFeatures]:
        return self.features_x, self.features_y

    def likelihood(self, coordinates: Float[Array, " q"]) -> Float[Array, " n"]:
        return self.features_y.to_sample(coordinates[None])[0]

    def posterior(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b q"],
        regularizer: Float[Array, ""],
        importance: bool,
    ) -> Float[Array, "b n"]:
        if importance:
            return self.features_y.importance_posterior(weights, coordinates, regularizer)
        return self.features_y.posterior(weights, coordinates, regularizer)[0]

    def ratio(
        self,
        weights: Float[Array, " n"],
        coordinates: Float[Array, "b q"],
        regularizer: Float[Array, ""],
        importance: bool,
    ) -> Float[Array, "b n"]:
        if importance:
            return self.features_y.importance_values(weights, coordinates, regularizer)
        return self.features_y.posterior(weights, coordinates, regularizer)[1]

    def regress(
        self, ratio: Float[Array, "b n"], adjoint: Callable[[Array], Array], positive: bool = False
    ) -> Float[Array, "b m"]:
        ratio = jnp.maximum(ratio, 0) if positive else ratio
        return adjoint(self.factor.solve(self.features_x.from_sample(ratio).T).T)

    def restrict(
        self, index: Int[Array, " k"], coordinates: Float[Array, "b q"]
    ) -> tuple["ConditionalEmbedding", Float[Array, "b s"]]:
        part, coordinates = self.features_y.restrict(index, coordinates)
        return eqx.tree_at(lambda m: m.features_y, self, part), coordinates

    def embed_y(self, weights: Float[Array, "*b n"]) -> Embedding:
        return Embedding(self.kernel_y, self.y, weights)

    def embed_pairs(self, weights: Float[Array, "*b n"]) -> JointEmbedding:
        return JointEmbedding(self.kernel_x, self.kernel_y, self.x, self.y, weights, True)

    def embed_prior_and_y(self, prior: Embedding) -> JointEmbedding:
        operator = self.weights(prior_coordinates(self.features_x, prior))
        weights = prior.weights.astype(operator.dtype)[..., :, None] * operator
        return JointEmbedding(self.kernel_x, self.kernel_y, prior.points, self.y, weights, False)

    def outputs(self, features: AbstractFeatures) -> Float[Array, "n r"]:
        return features.coordinates(self.y)

    def observation_factor(self, regularizer: Float[Array, ""]) -> AbstractFactor:
        return self.features_y.ridge(regularizer)

    def from_observation(
        self, factor: AbstractFactor, coordinates: Float[Array, " q"]
    ) -> Float[Array, " n"]:
        return self.features_y.ridge_weights(factor, coordinates[None])[0]


def fit_conditional(
    kernel_x: KernelLike,
    kernel_y: KernelLike,
    x: Points,
    y: Points,
    *,
    regularizer: ArrayLike,
    landmarks_x: FeatureChoice = None,
    landmarks_y: FeatureChoice = None,
    solver: ConjugateGradient | None = None,
    mask: ArrayLike | None = None,
) -> ConditionalEmbedding:
    r"""Fit $\hat C_{Y|X} = \Phi (K + n \lambda I)^{-1} \Upsilon^\top$ to n pairs (S13 eq 10).

    **Arguments:**

    - `kernel_x`, `kernel_y`: kernels of the two variables, callables of two points, or None
      (`default_kernel`).
    - `x`, `y`: samples `[n, ...]` of pairs.
    - `regularizer`: lambda > 0 in `K + n regularizer I`, as in F11. S13 prints `K + lambda I`, so
      its lambda is n times the regularizer.
    - `landmarks_x`, `landmarks_y`: None for exact Gram matrices, a rank, `Landmarks`, or
      `RandomFourier` features.
    - `mask`: `[n]`, False where a pair is padding. Padding may hold anything and gets weight 0.
    - `solver`: `ConjugateGradient()` where n x n matrices do not fit. The solution is exact, and
      neither Gram matrix is formed.

    **Returns:** a `ConditionalEmbedding`. Cost O(n^3), memory O(n^2); with landmarks O(n r^2) and
    O(n r). With a `solver` a rule on b points costs O(n^2 (d + b)) an iteration;
    `model.factor.diagnose(model.features_x.coordinates(x).T)` reports on the solve.

    **Raises:** `ValueError` for empty, unpaired or non-finite samples, points outside a kernel's
    domain, and a regularizer that is not positive. Traced data with NaN give NaN.

    **Example:**

    >>> import jax.numpy as jnp, kbr_jax as kbr
    >>> x = jnp.linspace(-2, 2, 100)
    >>> model = kbr.fit_conditional(kbr.Gaussian(0.5), kbr.Gaussian(0.5), x, x**2, regularizer=1e-5)
    >>> print(f"{kbr.mean(kbr.condition(model, 1.5)):.2f}")
    2.25
    """
    x, y = as_points(x, "x"), as_points(y, "y")
    check_same_size(x, "x", y, "y")
    if mask is not None:
        mask = as_mask(mask, size(x), "mask")
        if solver is not None:
            raise ValueError(
                "Padding is for many small problems, a `solver` for one large one: give no `mask` "
                "with it."
            )
    x, y = in_one_precision(without_padding(x, mask), without_padding(y, mask))
    x, y = check_finite(x, "x"), check_finite(y, "y")
    kernel_x = checked_kernel(kernel_x, x, "x", mask)
    kernel_y = checked_kernel(kernel_y, y, "y", mask)
    dtype = precision_of(x, y)
    if solver is None:
        features_x = fit_features(kernel_x, x, landmarks_x, mask)
    elif landmarks_x is None:
        features_x = lazy_gram(kernel_x, x, solver, dtype)
    else:
        raise ValueError(
            "`landmarks_x` approximate the Gram matrix, a `solver` is for the exact one: give one "
            "of them. The preconditioner has its own, `ConjugateGradient(landmarks=...)`."
        )
    if solver is None or landmarks_y is not None:
        features_y = fit_features(kernel_y, y, landmarks_y, mask)
    else:
        plain = ConjugateGradient(rank=0, block_size=solver.block_size, mesh=solver.mesh)
        features_y = lazy_gram(kernel_y, y, plain, dtype)
    if dtype is not None:  # Gram matrices of labels have the default one
        features_x, features_y = in_precision((features_x, features_y), dtype)
    regularizer = as_regularizer(regularizer, "regularizer", features_x.dtype)
    factor = features_x.ridge(regularizer)
    return ConditionalEmbedding(features_x, features_y, regularizer, factor)


def condition(model: AbstractConditional, x: Point | Points) -> Embedding:
    r"""Embed P(Y | X = x), $\hat\mu_{Y|x} = \sum_i \beta_i(x) \phi(y_i)$ (S13 eq 11).

    $\beta(x) = (K + n \lambda I)^{-1} k(X, x)$. The weights sum to nearly, not exactly, 1.

    **Arguments:** `x`, one point or a batch `[b, ...]`.

    **Returns:** an `Embedding` on the training y (on the landmarks of y for moments), weights `[n]`
    or `[b, n]`. Cost O(b n^2) exact, O(b n r) with landmarks.
    """
    coordinates, single = checked_coordinates(model.features_x, x, "x")
    weights = model.weights(coordinates)
    return model.embed_y(weights[0] if single else weights)


def condition_centered(
    model: AbstractConditional,
    x: Point | Points,
    *,
    estimator: Literal["affine", "song2009"] = "affine",
) -> Embedding:
    r"""Embed P(Y | X = x) by the 2009 estimator, with $H = I - 1 1^\top / n$.

    - `"affine"`: $\beta(x) = 1/n + (H K H + n \lambda I)^{-1} H (k(X, x) - K 1 / n)$. Ridge
      regression with an intercept; the weights sum to 1.
    - `"song2009"`: $\beta(x) = (H K + n \lambda I)^{-1} H k(X, x)$ (S09 theorem 5, as printed). It
      leaves out both means. Its weights sum to 0, and it embeds no distribution.

    Arguments, result and cost are those of `condition`, plus one factorization in each call.

    **Raises:** `ValueError` for an unknown estimator, and for a model of moments.
    """
    check_choice(estimator, "estimator", "affine", "song2009")
    features = model.sample()[0]
    coordinates, single = checked_coordinates(features, x, "x")
    factor = features.ridge(model.regularizer, centered=True)
    weights = centered_weights(features, factor, coordinates, estimator)
    return model.embed_y(weights[0] if single else weights)


def centered_weights(
    features: AbstractFeatures,
    factor: AbstractFactor,
    coordinates: Float[Array, "b r"],
    estimator: str,
) -> Float[Array, "b n"]:
    """Weights of the 2009 estimator; `factor` is `features.ridge(regularizer, centered=True)`."""
    affine = estimator == "affine"
    if affine:
        coordinates = coordinates - features.mean_coordinates()
    weights = features.ridge_weights(factor, features.center(coordinates))
    weights = weights - jnp.sum(weights, axis=-1, keepdims=True) * features.uniform
    return weights + features.uniform if affine else weights


def conditional_expectation(
    model: AbstractConditional, x: Point | Points, function: PointFunction
) -> Any:
    r"""Estimate $E[f(Y) | X = x] = \sum_i \beta_i(x) f(y_i)$ by kernel ridge regression.

    **Arguments:** `x`, one point or a batch; `function` of one point y with values of any shape.
    **Returns:** `[*shape]` or `[b, *shape]`. Cost as `condition` (S13 section 3.2).
    """
    return expectation(condition(model, x), function)


def conditional_cross_covariance(model: AbstractConditional, x: Point | Points) -> CrossCovariance:
    r"""Embed the covariance of Y and Z given x, $\mu_{YZ|x} - \mu_{Y|x} \otimes \mu_{Z|x}$.

    In weights, $B = \operatorname{diag}(\beta) - \beta \beta^\top$ with $\beta$ of `condition` (S09
    eq 9).

    **Arguments:** `model` of P((Y, Z) | X), fitted with `kernel_y = TensorProduct((ky, kz))` and
    `y = (y, z)`; `x`, one point or a batch.

    **Returns:** a `CrossCovariance` c. `covariance(c, f, g)` is Cov[f(Y), g(Z) | x], and
    `squared_hs_norm(c)` measures the dependence of Y and Z at x.

    **Raises:** `ValueError` for a model of anything but pairs.
    """
    kernel = model.kernel_y
    if not isinstance(kernel, TensorProduct) or len(kernel.kernels) != 2:
        raise ValueError(
            "`conditional_cross_covariance` needs a model of pairs (y, z): fit it with "
            "kernel_y = TensorProduct((ky, kz)) and y = (y, z)."
        )
    embedding = condition(model, x)
    y, z = embedding.points
    return CrossCovariance(*kernel.kernels, y, z, embedding.weights)
