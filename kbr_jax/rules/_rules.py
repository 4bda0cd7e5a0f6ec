r"""The sum rule, the chain rule and Bayes' rule for embeddings.

Letters follow F11: the model holds n pairs (x_i, y_i) and represents P(Y | X), the prior $\mu_\pi = \sum_j \alpha_j
\phi(\tilde x_j)$ is over X, and Bayes' rule returns X given y. S13 swaps x and y. With $G$ the Gram matrix of x,
$\tilde G = k(X, \tilde X)$ and $K$ the Gram matrix of y,

$$ w = (G + n \lambda I)^{-1} \tilde G \alpha, \quad D = \operatorname{diag}(w), \quad
   \Lambda = (G + n \lambda I)^{-1} \tilde G \operatorname{diag}(\alpha). $$
"""

from typing import Literal, overload

from .._checks import as_fraction, as_regularizer, check_alike
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Point, Points
from ..embedding import Embedding, JointEmbedding, check_unbatched
from ..features import checked_coordinates
from . import _moment_rules as moment_rules
from ._conditional import ConditionalEmbedding
from ._moment_rules import MomentModel
from ._prior import clean_weights

Form = Literal["a", "b"]


@overload
def sum_rule(
    model: ConditionalEmbedding | MomentModel, prior: Embedding, *, form: Literal["a"] = "a"
) -> Embedding: ...
@overload
def sum_rule(
    model: ConditionalEmbedding | MomentModel, prior: Embedding, *, form: Literal["b"]
) -> JointEmbedding: ...
def sum_rule(
    model: ConditionalEmbedding | MomentModel, prior: Embedding, *, form: Form = "a"
) -> Embedding | JointEmbedding:
    r"""Kernel sum rule: embed $Q(Y) = \int P(Y | x) d\pi(x)$.

    - (a) $\hat\mu_Y = \Phi w$, an `Embedding` on the training y (S13 eq 14);
    - (b) $\hat C_{YY} = \Phi D \Phi^\top$, a paired `JointEmbedding` of (Y, Y) (S13 eq 15).

    **Arguments:** `model` of P(Y | X); `prior` over X with m points of the kind of `model.x`, weights `[..., m]`. The
    model's kernel of x is used for both.

    **Returns:** weights `[..., n]`, signed; their sum (`mass`) is near the prior's. Cost O(n m d + n^2) exact,
    O((n + m) r) with landmarks.

    **Raises:** `ValueError` if the prior's points are not of the kind of the training x, or the form is unknown.
    """
    _check_form(form, ("a", "b"))
    if isinstance(model, MomentModel):
        return moment_rules.sum_rule(model, prior, form)
    weights = prior_weights(model, prior)
    if form == "a":
        return Embedding(model.kernel_y, model.y, weights)
    return JointEmbedding(model.kernel_y, model.kernel_y, model.y, model.y, weights, True)


def chain_rule(
    model: ConditionalEmbedding | MomentModel, prior: Embedding, *, form: Form = "b"
) -> JointEmbedding:
    r"""Kernel chain rule: embed $Q(X, Y) = P(Y | X) \pi(X)$.

    - (a) $\hat C_{XY} = \tilde\Phi \Lambda^\top \Upsilon^\top$, full weights $\Lambda^\top$ `[..., m, n]` on the prior's points x
      training y (S13 eq 18);
    - (b) $\hat C_{XY} = \Phi D \Upsilon^\top$, paired weights w `[..., n]` on the training pairs (S13 eq 19).

    They are different estimators. Arguments and errors as `sum_rule`. Cost of (a) O(n^2 m) exact, O(n m r) with
    landmarks; of (b) as `sum_rule`.
    """
    _check_form(form, ("a", "b"))
    if isinstance(model, MomentModel):
        return moment_rules.chain_rule(model, prior, form)
    if form == "b":
        return JointEmbedding(
            model.kernel_x, model.kernel_y, model.x, model.y, prior_weights(model, prior), True
        )
    operator = model.features_x.ridge_weights(model.factor, _prior_codes(model, prior))
    weights = prior.weights[..., :, None] * operator
    return JointEmbedding(model.kernel_x, model.kernel_y, prior.points, model.y, weights, False)


def bayes_rule(
    model: ConditionalEmbedding | MomentModel,
    prior: Embedding,
    y: Point | Points,
    *,
    regularizer: ArrayLike,
    form: Literal["a", "b", "importance"] = "b",
    clip: bool = False,
    truncation: ArrayLike = 0.0,
    normalize: bool = False,
) -> Embedding:
    r"""Kernel Bayes' rule: embed the posterior $Q(X | y) \propto P(y | X) \pi(X)$. With $k = k(Y, y)$:

    - (b) $\beta = D K ((D K)^2 + \delta I)^{-1} D k$ on the training x (S13 eq 24, F11 eq 14);
    - (a) $\beta = \Lambda^\top K ((D K)^2 + \delta I)^{-1} D k$ on the prior's points (S13 eq 23 corrected: as printed its
      $(D K)^2$ stands where $(K D)^2$ must);
    - `"importance"`: $\beta = \sqrt{D_+} (\sqrt{D_+} K \sqrt{D_+} + \delta I)^{-1} \sqrt{D_+} k$ on the training x, with
      $D_+$ the clipped weights (Xu, Chen, Doucet and Gretton 2022): one positive definite solve, no squared operator.

    (a) and (b) are different estimators.

    **Arguments:**

    - `model` of P(Y | X); `prior` over X, unbatched, of m points.
    - `y`: one observation, or a batch `[b, ...]` that shares one factorization.
    - `regularizer`: delta > 0. In (a) and (b) it acts on the squared operator: eigenvalues below sqrt(delta) are cut.
      It carries no n, for weights that sum to about 1; where weights are scaled by n, the same delta means
      delta / n^2 here. As delta -> 0 the prior drops out. For `"importance"` it is the ridge itself.
    - `clip`, `truncation`, `normalize`: applied to w before use, as in `clean_weights`; all off is the papers' rule.
      Truncation needs `clip` (`"importance"` always clips).

    **Returns:** an `Embedding` over X with weights `[n]` (`[m]` for form (a)), or `[b, ...]`. They may be signed and need
    not sum to 1: see `normalize`. Cost O(n^3 + b n^2) exact, O(n r^2 + r^3 + b n r) with landmarks on y.

    **Raises:** `ValueError` for points of the wrong kind, a regularizer that is not positive, an unknown form.
    """
    _check_form(form, ("a", "b", "importance"))
    check_unbatched(prior, "prior")
    truncation = as_fraction(truncation, "truncation")
    clip = clip or form == "importance"
    if isinstance(model, MomentModel):
        return moment_rules.bayes_rule(
            model,
            prior,
            y,
            regularizer=regularizer,
            form=form,
            clip=clip,
            truncation=truncation,
            normalize=normalize,
        )
    coordinates, single = checked_coordinates(model.features_y, y, "y")
    beta, points = posterior_weights(
        model,
        prior,
        coordinates,
        regularizer=regularizer,
        form=form,
        clip=clip,
        truncation=truncation,
        normalize=normalize,
    )
    return Embedding(model.kernel_x, points, beta[0] if single else beta)


def posterior_weights(
    model: ConditionalEmbedding,
    prior: Embedding,
    coordinates: Float[Array, "b r"],
    *,
    regularizer: ArrayLike,
    form: Literal["a", "b", "importance"],
    clip: bool,
    truncation: Float[Array, ""],
    normalize: bool,
) -> tuple[Float[Array, "b k"], Points]:
    """`bayes_rule` for observations given by their coordinates, in which it is linear: posterior weights, and the points they stand on."""
    features = model.features_y
    delta = as_regularizer(regularizer, "regularizer", features.dtype)
    weights = clean_weights(
        prior_weights(model, prior),
        clip=clip or form == "importance",
        truncation=truncation.astype(coordinates.dtype),
        normalize=normalize,
        mask=model.features_x.mask,
    )
    if form == "importance":
        return features.importance_posterior(weights, coordinates, delta), model.x
    beta, values = features.posterior(weights, coordinates, delta)
    if form == "b":
        return beta, model.x
    return prior.weights * model.features_x.ridge_values(
        model.factor, values, _prior_codes(model, prior)
    ), prior.points


def prior_weights(model: ConditionalEmbedding, prior: Embedding) -> Float[Array, "*batch n"]:
    r"""$w = (G + n \lambda I)^{-1} \tilde G \alpha$, the weights that the prior puts on the training pairs, `[..., n]`."""
    coordinates = _prior_codes(model, prior)
    mean_codes = matmul(prior.weights, coordinates)
    flat = mean_codes.reshape(-1, mean_codes.shape[-1])
    weights = model.features_x.ridge_weights(model.factor, flat)
    return weights.reshape(*mean_codes.shape[:-1], weights.shape[-1])


def _prior_codes(model: ConditionalEmbedding, prior: Embedding) -> Float[Array, "m r"]:
    check_alike(prior.points, "prior.points", model.x, "model.x")
    model.kernel_x.check(prior.points, "prior.points")
    return model.features_x.coordinates(prior.points)


def _check_form(form: str, allowed: tuple[str, ...]) -> None:
    if form not in allowed:
        raise ValueError(f"`form` must be one of {', '.join(map(repr, allowed))}, got {form!r}.")
