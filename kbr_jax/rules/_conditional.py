r"""Conditional embeddings $\mu_{Y|x} = C_{Y|X} \phi(x)$: ridge regression from points to embeddings."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .._checks import (
    as_mask,
    as_points,
    as_regularizer,
    check_finite,
    check_same_size,
    size,
    without_padding,
)
from .._numerics import AbstractFactor
from .._typing import Array, ArrayLike, Float, Point, PointFunction, Points
from ..embedding import CrossCovariance, Embedding, expectation
from ..features import (
    AbstractFeatures,
    ConjugateGradient,
    FeatureChoice,
    checked_coordinates,
    fit_features,
    lazy_gram,
)
from ..kernels import AbstractKernel, TensorProduct, as_kernel
from . import _moment_rules as moment_rules
from ._moment_rules import MomentModel


class ConditionalEmbedding(eqx.Module):
    r"""A fitted conditional embedding operator $\hat C_{Y|X} = \Phi (K + n \lambda I)^{-1} \Upsilon^\top$ of P(Y | X).

    - `features_x`, `features_y`: the training pairs with their Gram matrices or low-rank features.
    - `regularizer`: the ridge lambda; `factor`: the factored `K + n lambda I`.

    It caches what its kernels imply: fit anew (inside the loss) rather than replace a kernel in it.
    """

    features_x: AbstractFeatures
    features_y: AbstractFeatures
    regularizer: Float[Array, ""]
    factor: AbstractFactor

    @property
    def kernel_x(self) -> AbstractKernel:
        """Kernel of the conditioning variable."""
        return self.features_x.kernel

    @property
    def kernel_y(self) -> AbstractKernel:
        """Kernel of the conditioned variable."""
        return self.features_y.kernel

    @property
    def x(self) -> Points:
        """Training points of the conditioning variable."""
        return self.features_x.points

    @property
    def y(self) -> Points:
        """Training points of the conditioned variable."""
        return self.features_y.points


def fit_conditional(
    kernel_x: Any,
    kernel_y: Any,
    x: Points,
    y: Points,
    *,
    regularizer: ArrayLike,
    landmarks_x: FeatureChoice = None,
    landmarks_y: FeatureChoice = None,
    solver: ConjugateGradient | None = None,
    mask: ArrayLike | None = None,
) -> ConditionalEmbedding:
    r"""Fit $\hat C_{Y|X} = \Phi (K + n \lambda I)^{-1} \Upsilon^\top$ to n pairs (S13 eq 10; F11 writes $n \varepsilon$ as here).

    **Arguments:**

    - `kernel_x`, `kernel_y`: kernels of the conditioning and of the conditioned variable, or callables of two points.
    - `x`, `y`: samples `[n, ...]` of pairs.
    - `regularizer`: lambda > 0. The matrix inverted is `K + n regularizer I`; S13 prints `K + lambda I`, so
      lambda_S13 = n regularizer.
    - `landmarks_x`, `landmarks_y`: None for exact Gram matrices, an integer r for r greedy landmarks, `Landmarks`, or
      `RandomFourier` of random Fourier features (`random_fourier`).

    - `mask`: `[n]`, False where a pair is padding, so that samples of several sizes share one compiled program. Padding
      may hold anything. The model is that of the other pairs, with weight 0 on padding.
    - `solver`: None to factor; `ConjugateGradient()` where n x n matrices do not fit: exact without forming the Gram
      matrix of x, nor (unless `landmarks_y` are given) that of y, which only Bayes' rule would need.

    **Returns:** a `ConditionalEmbedding`. Cost O(n^3) and memory O(n^2) exact; O(n r^2) and O(n r) with landmarks. With a
    `solver` fitting costs O(n r^2), and each call of a rule on b points O(n^2 (d + b)) an iteration, memory
    O(n (block + r + b)); `model.factor.diagnose(model.features_x.coordinates(x).T)` reports on the solve.

    **Raises:** `ValueError` for empty, unpaired or non-finite samples, a dtype outside a kernel's domain, or a regularizer
    that is not positive. (Traced data with NaN raises when the compiled program runs.)
    """
    kernel_x, kernel_y = as_kernel(kernel_x), as_kernel(kernel_y)
    x, y = as_points(x, "x"), as_points(y, "y")
    check_same_size(x, "x", y, "y")
    if mask is not None:
        mask = as_mask(mask, size(x), "mask")
        if solver is not None:
            raise ValueError(
                "Padding is for many small problems, a `solver` for one large one: give no `mask` with it."
            )
    x, y = (
        check_finite(without_padding(points, mask), name) for points, name in ((x, "x"), (y, "y"))
    )
    kernel_x.check(x, "x")
    kernel_y.check(y, "y")
    if solver is None:
        features_x = fit_features(kernel_x, x, landmarks_x, mask)
    elif landmarks_x is None:
        features_x = lazy_gram(kernel_x, x, solver)
    else:
        raise ValueError(
            "`landmarks_x` approximate the Gram matrix, a `solver` is for the exact one: give one of them. The landmarks of "
            "the preconditioner are `ConjugateGradient(landmarks=...)`."
        )
    if solver is None or landmarks_y is not None:
        features_y = fit_features(kernel_y, y, landmarks_y, mask)
    else:
        features_y = lazy_gram(kernel_y, y, ConjugateGradient(rank=0, block=solver.block))
    regularizer = as_regularizer(regularizer, "regularizer", features_x.dtype)
    return ConditionalEmbedding(features_x, features_y, regularizer, features_x.ridge(regularizer))


def condition(model: ConditionalEmbedding | MomentModel, x: Point | Points) -> Embedding:
    r"""Embedding of P(Y | X = x), $\hat\mu_{Y|x} = \sum_i \beta_i(x) \phi(y_i)$, $\beta(x) = (K + n \lambda I)^{-1} k(X, x)$
    (S13 eq 11).

    **Arguments:** `x`, one point or a batch `[b, ...]`.

    **Returns:** an `Embedding` on the training y with weights `[n]`, or `[b, n]` for a batch. The weights sum to nearly,
    not exactly, 1. Cost O(b n^2) exact, O(b n r) with landmarks.
    """
    if isinstance(model, MomentModel):
        return moment_rules.condition(model, x)
    coordinates, single = checked_coordinates(model.features_x, x, "x")
    return _on_y(model, model.features_x.ridge_weights(model.factor, coordinates), single)


def condition_centered(
    model: ConditionalEmbedding, x: Point | Points, *, form: Literal["affine", "printed"] = "affine"
) -> Embedding:
    r"""The 2009 conditional embedding, from centered features with $H = I - 1 1^\top / n$.

    - `"affine"` (default): $\beta(x) = 1/n + (H K H + n \lambda I)^{-1} H (k(X, x) - K 1 / n)$. Ridge regression with an
      intercept; the weights sum to 1.
    - `"printed"`: $\beta(x) = (H K + n \lambda I)^{-1} H k(X, x)$ (S09 theorem 5). It omits both means, so its weights
      sum to 0 and it is not an embedding of P(Y | x); for fidelity to the paper.

    Arguments, returns and cost as `condition`, plus the factorization of the centered matrix on each call.
    """
    if form not in ("affine", "printed"):
        raise ValueError(f"`form` must be 'affine' or 'printed', got {form!r}.")
    if isinstance(model, MomentModel):
        raise ValueError(
            "`condition_centered` needs the sample: use a model of `fit_conditional` with landmarks, or `condition`."
        )
    coordinates, single = checked_coordinates(model.features_x, x, "x")
    factor = model.features_x.ridge(model.regularizer, centered=True)
    return _on_y(model, centred_weights(model.features_x, factor, coordinates, form), single)


def centred_weights(
    features: AbstractFeatures,
    factor: AbstractFactor,
    coordinates: Float[Array, "b r"],
    form: Literal["affine", "printed"],
) -> Float[Array, "b n"]:
    """Weights of the 2009 estimator for each code; `factor` is `features.ridge(regularizer, centered=True)`."""
    if form == "affine":
        coordinates = coordinates - features.mean_coordinates()
    weights = features.ridge_weights(factor, features.center(coordinates))
    weights = weights - jnp.sum(weights, axis=-1, keepdims=True) * features.uniform
    return weights + features.uniform if form == "affine" else weights


def conditional_expectation(
    model: ConditionalEmbedding, function: PointFunction, x: Point | Points
) -> Any:
    r"""Estimate of $E[f(Y) | X = x]$, $\sum_i \beta_i(x) f(y_i)$ (S13 section 3.2): kernel ridge regression of f(Y) on X.

    **Arguments:** `function` of one point y with values of any shape; `x`, one point or a batch.
    **Returns:** `[*shape]`, or `[b, *shape]`. Cost as `condition`.
    """
    return expectation(condition(model, x), function)


def conditional_cross_covariance(model: ConditionalEmbedding, x: Point | Points) -> CrossCovariance:
    r"""Conditional cross-covariance operator $C_{YZ|x} = \mu_{YZ|x} - \mu_{Y|x} \otimes \mu_{Z|x}$ (S09 eq 9).

    In weights, $B = \operatorname{diag}(\beta) - \beta \beta^\top$ with $\beta = \beta(x)$ of `condition`.

    **Arguments:** `model` of P((Y, Z) | X), fitted with `kernel_y = TensorProduct((kernel_y, kernel_z))` and `(y, z)` as
    its second sample; `x`, one point or a batch.

    **Returns:** a `CrossCovariance`: `covariance(c, f, g)` is Cov[f(Y), g(Z) | x], and `squared_hs_norm(c)`,
    $\operatorname{tr}(B L B U)$, measures the dependence of Y and Z at x.
    """
    kernel = model.kernel_y
    if not isinstance(kernel, TensorProduct) or len(kernel.kernels) != 2:
        raise ValueError(
            "`conditional_cross_covariance` needs a model of pairs (y, z): fit it with kernel_y = TensorProduct((ky, kz)) "
            "and y = (y, z)."
        )
    y, z = model.y
    return CrossCovariance(*kernel.kernels, y, z, condition(model, x).weights)


def _on_y(model: ConditionalEmbedding, weights: Float[Array, "b n"], single: bool) -> Embedding:
    return Embedding(model.kernel_y, model.y, weights[0] if single else weights)
