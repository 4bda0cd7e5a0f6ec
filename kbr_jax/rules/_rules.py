r"""The sum rule, the chain rule and Bayes' rule for embeddings.

Letters follow F11. The model holds n pairs $(x_i, y_i)$ and represents P(Y | X). The prior
$\mu_\pi = \sum_j \alpha_j \phi(\tilde x_j)$ is over X, and Bayes' rule returns X given y (S13 swaps
x and y). With G the Gram matrix of x, $\tilde G = k(X, \tilde X)$ and K the Gram matrix of y,

$$ w = (G + n \lambda I)^{-1} \tilde G \alpha, \qquad D = \operatorname{diag}(w), \qquad
   \Lambda = (G + n \lambda I)^{-1} \tilde G \operatorname{diag}(\alpha). $$

The papers know two estimators. One stands on the training pairs (`"pairs"`, form (b)), the other on
the points of the prior (`"prior"`, form (a)).
"""

from typing import Literal

from .._checks import as_regularizer, check_choice
from .._numerics import matmul
from .._typing import ArrayLike, Point, Points
from ..embedding import Embedding, JointEmbedding
from ..features import checked_coordinates
from ._model import (
    AbstractConditional,
    Clipping,
    check_estimator,
    prior_coordinates,
    prior_weights,
    single_prior_weights,
)


def sum_rule(model: AbstractConditional, prior: Embedding) -> Embedding:
    r"""Embed $Q(Y) = \int P(Y | x) d\pi(x)$ by the kernel sum rule, $\hat\mu_Y = \Phi w$.

    S13 eq 14. Form (b) of the paper, eq 15, holds the same weights: it is the joint embedding of
    (Y, Y) with `w` on its diagonal.

    **Arguments:** `model` of P(Y | X); `prior` over X with m points of the kind of the training x,
    weights `[..., m]`. The kernel of the model is used for both.

    **Returns:** an `Embedding` on the training y, weights `[..., n]` of any sign (on the landmarks
    of y for moments). Their sum is near that of the prior. Cost O(n m d + n^2) exact, O((n + m) r)
    with landmarks.

    **Raises:** `ValueError` if the points of the prior are of another kind than the training x.
    """
    return model.embed_y(prior_weights(model, prior))


def chain_rule(
    model: AbstractConditional, prior: Embedding, *, estimator: Literal["pairs", "prior"] = "pairs"
) -> JointEmbedding:
    r"""Embed $Q(X, Y) = P(Y | X) \pi(X)$ by the kernel chain rule.

    - `"pairs"`: $\hat C_{XY} = \Phi D \Upsilon^\top$, weights w `[..., n]` on the training pairs
      (S13 eq 19, form (b));
    - `"prior"`: $\hat C_{XY} = \tilde\Phi \Lambda^\top \Upsilon^\top$, weights `[..., m, n]` on the
      prior's points x training y (S13 eq 18, form (a)).

    Arguments and errors as `sum_rule`. Cost as `sum_rule`; for `"prior"` O(n^2 m) exact, O(n m r)
    with landmarks.
    """
    check_choice(estimator, "estimator", "pairs", "prior")
    if estimator == "pairs":
        return model.embed_pairs(prior_weights(model, prior))
    return model.embed_prior_and_y(prior)


def bayes_rule(
    model: AbstractConditional,
    prior: Embedding,
    y: Point | Points,
    *,
    regularizer: ArrayLike,
    estimator: Literal["pairs", "prior", "importance"] = "pairs",
    clipping: Clipping | None = None,
) -> Embedding:
    r"""Embed the posterior $Q(X | y) \propto P(y | X) \pi(X)$. With $k = k(Y, y)$:

    - `"pairs"`: $\beta = D K ((D K)^2 + \delta I)^{-1} D k$ on the training x (S13 eq 24, F11 eq
      14);
    - `"prior"`: $\beta = \Lambda^\top K ((D K)^2 + \delta I)^{-1} D k$ on the points of the prior
      (S13 eq 23 corrected: its $(D K)^2$ is printed where $(K D)^2$ must stand);
    - `"importance"`: $\beta = \sqrt{D} (\sqrt{D} K \sqrt{D} + \delta I)^{-1} \sqrt{D} k$ on the
      training x, for weights that are clipped (Xu, Chen, Doucet and Gretton 2022). One positive
      definite solve.

    **Arguments:**

    - `model` of P(Y | X); `prior` over X, unbatched, of m points.
    - `y`: one observation, or a batch `[b, ...]` that shares one factorization.
    - `regularizer`: delta > 0. It acts on the squared operator: eigenvalues below sqrt(delta) are
      cut. It does not scale with n, for weights that sum to about 1. As delta -> 0 the prior drops
      out. For `"importance"` it is the ridge itself.
    - `clipping`: what is done to w before use, by default `Clipping()`. The papers' rule is
      `Clipping(False, 0.0, False)`.

    **Returns:** an `Embedding` over X with weights `[n]` (`[m]` for `"prior"`), or `[b, ...]`. They
    may be signed and need not sum to 1: see `normalize`. Cost O(n^3 + b n^2) exact, O(n r^2 + r^3 +
    b n r) with landmarks of y, and O(K q^2 + q^3) with moments.

    **Raises:** `ValueError` for a prior of which less than 1 % lies on the training x (outside
    `jit`), points of another kind, a regularizer that is not positive, an unknown estimator,
    importance weights that are not clipped, or moments that cannot clip.

    **Example:**

    >>> import jax.numpy as jnp, kbr_jax as kbr
    >>> x = jnp.linspace(-2, 2, 200)
    >>> model = kbr.fit_conditional(kbr.Gaussian(0.3), kbr.Gaussian(0.3), x, x**2, regularizer=1e-4)
    >>> prior = kbr.embed(kbr.Gaussian(0.3), x[100:])  # positive
    >>> print(f"{kbr.mean(kbr.bayes_rule(model, prior, 1.0, regularizer=1e-5)):.1f}")
    1.0
    """
    clipping = Clipping() if clipping is None else clipping
    check_estimator(estimator, clipping, "pairs", "prior", "importance")
    weights = single_prior_weights(model, prior)
    coordinates, single = checked_coordinates(model.features_y, y, "y")
    coordinates = coordinates.astype(model.features_x.dtype)
    # Added to a square, but for importance weights.
    power = 1 if estimator == "importance" else 2
    delta = as_regularizer(regularizer, "regularizer", coordinates.dtype, power)
    weights = model.clip_and_normalize(weights, clipping)
    if estimator == "prior":
        ratio = model.ratio(weights, coordinates, delta, False)
        at = prior_coordinates(model.features_x, prior)
        at_prior = model.regress(ratio, lambda code: matmul(code, at.T))
        weights = prior.weights.astype(at_prior.dtype)
        posterior = Embedding(model.kernel_x, prior.points, weights * at_prior)
    else:
        posterior = model.embed_x(
            model.posterior(weights, coordinates, delta, estimator == "importance")
        )
    if not single:
        return posterior
    return Embedding(posterior.kernel, posterior.points, posterior.weights[0])
