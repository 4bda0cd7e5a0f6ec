r"""Posteriors over parameters from simulations.

Everything that inverts is done once, an observation costs one product.
"""

from typing import Any, Literal, get_args

import equinox as eqx
import jax.numpy as jnp

from .._checks import as_fraction, as_points, check_finite, check_same_size, is_concrete
from .._numerics import matmul
from .._typing import Array, ArrayLike, Float, Point, Points
from ..embedding import Embedding, check_unbatched, embed
from ..features import FeatureChoice, checked_coordinates
from ..rules import ConditionalEmbedding, fit_conditional, posterior_weights
from ._simulations import Simulations

Method = Literal["conditional", "bayes", "importance"]


class PosteriorModel(eqx.Module):
    r"""A fitted map from an observation to the embedding of the posterior, which is linear in the
    code
    of the observation.

    - `model`: the fitted conditional embedding, of P(parameter | data) for the method
      "conditional", else of P(data | parameter).
    - `operator`: `[r, n]`, Bayes' rule for the prior: posterior weights of an observation with code
      c are $c^\top$ `operator`. None for "conditional", whose factor the model holds.
    - `method`: as given to `fit_posterior`.

    It caches what its kernels imply: fit anew rather than replace a kernel in it.
    """

    model: ConditionalEmbedding
    operator: Float[Array, "r n"] | None
    method: Method = eqx.field(static=True)

    def posterior(self, observation: Point | Points) -> Embedding:
        r"""Embedding of the posterior $\sum_i \beta_i k(\theta_i, \cdot)$ given one observation, or
        one
        for each of a batch `[b, ...]`.

        **Returns:** an `Embedding` on the simulated parameters with weights `[n]`, or `[b, n]`.
        They are signed; a mass far from 1 says that nothing like the observation was simulated.
        `mean`, `expectation`, `quantile` and `credible_interval` take a batch; `herd` draws samples
        (one posterior at a time, or under `vmap`). Cost O(n (d + r)) an observation, r = n if
        exact.

        **Raises:** `ValueError` for observations that are not points like the simulated data.
        """
        model = self.model
        coordinates, single = checked_coordinates(
            model.features_x if self.operator is None else model.features_y,
            observation,
            "observation",
        )
        if self.operator is None:
            weights, kernel, points = (
                model.features_x.ridge_weights(model.factor, coordinates),
                model.kernel_y,
                model.y,
            )
        else:
            weights, kernel, points = matmul(coordinates, self.operator), model.kernel_x, model.x
        return Embedding(kernel, points, weights[0] if single else weights)


def fit_posterior(
    kernel_parameters: Any,
    kernel_data: Any,
    simulations: Simulations,
    *,
    regularizer: ArrayLike,
    method: Method = "conditional",
    prior: Embedding | None = None,
    posterior_regularizer: ArrayLike | None = None,
    clip: bool = False,
    truncation: ArrayLike = 0.0,
    normalize: bool = False,
    landmarks_parameters: FeatureChoice = None,
    landmarks_data: FeatureChoice = None,
) -> PosteriorModel:
    r"""Fit the posterior of parameters given data, for any observation, from n simulations
    $(\theta_i,
    y_i)$ (F11 section 4.4).

    By `method`, with $K$ the Gram matrix of the data, $k = k(Y, y)$, and w the prior's weights on
    the simulations:

    - "conditional": $\beta = (K + n \lambda I)^{-1} k$ (F11 eq 10), the conditional embedding: the
      posterior for the prior that the parameters were drawn from. The simplest, with one
      regularizer.
    - "bayes": kernel Bayes' rule (b), $\beta = D K ((D K)^2 + \delta I)^{-1} D k$ with $D =
      \operatorname{diag}(w)$ (F11 eq 14), for any `prior`.
    - "importance": $\beta = \sqrt{D_+} (\sqrt{D_+} K \sqrt{D_+} + \delta I)^{-1} \sqrt{D_+} k$, for
      any `prior`, with clipped weights.

    **Arguments:**

    - `kernel_parameters`, `kernel_data`: kernels, or callables of two points. For statistics in
      different units scale each: `Gaussian(s * median_heuristic(data / s))` with `s = data.std(0)`.
    - `simulations`: n pairs; `simulate` draws them.
    - `regularizer`: lambda > 0, of the conditional embedding that is fitted. For "conditional"
      choose it, and the bandwidth of the data, by `leave_out_loss(fitted.model, kernel=Linear())`.
    - `prior`: an embedding of m parameters, if not the distribution that the simulated ones were
      drawn from. It has to lie where there are simulations. Not for "conditional".
    - `posterior_regularizer`: delta > 0, for the other two methods, on the scale that each has in
      `bayes_rule`: lambda for "importance" is about what lambda^2 is for "bayes".
    - `clip`, `truncation`, `normalize`: of the prior's weights, as in `clean_weights`; not for
      "conditional".
    - `landmarks_parameters`, `landmarks_data`: for low rank, as in `fit_conditional`.

    **Returns:** a `PosteriorModel`. Cost O(n^3) and memory O(n^2) exact, O(n r^2 + r^3) and O(n r)
    with landmarks.

    **Raises:** `ValueError` for simulations that are not paired or not finite (leave those out), an
    unknown `method`, a missing or superfluous `posterior_regularizer` or `prior`, and as
    `fit_conditional` and `bayes_rule`.
    """
    parameters, data = _checked(simulations)
    if method not in get_args(Method):
        raise ValueError(
            f"`method` must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}."
        )
    cleaned = clip or normalize or not is_concrete(truncation) or float(truncation) != 0
    if method == "conditional":
        if (
            prior is not None
            or posterior_regularizer is not None
            or landmarks_parameters is not None
            or cleaned
        ):
            raise ValueError(
                "The method 'conditional' answers for the prior that the parameters were drawn "
                "from: it takes no `prior`, "
                "`posterior_regularizer`, `landmarks_parameters`, `clip`, `truncation` or "
                "`normalize`; use 'bayes' or 'importance'."
            )
        model = fit_conditional(
            kernel_data,
            kernel_parameters,
            data,
            parameters,
            regularizer=regularizer,
            landmarks_x=landmarks_data,
        )
        return PosteriorModel(model, None, method)
    if posterior_regularizer is None:
        raise ValueError(
            f"The method {method!r} needs a `posterior_regularizer`; see `bayes_rule` for its "
            f"scale."
        )
    model = fit_conditional(
        kernel_parameters,
        kernel_data,
        parameters,
        data,
        regularizer=regularizer,
        landmarks_x=landmarks_parameters,
        landmarks_y=landmarks_data,
    )
    prior = embed(model.kernel_x, model.x) if prior is None else prior
    check_unbatched(prior, "prior")
    # Bayes' rule is linear in the code of the observation: its weights for the unit coordinates are
    # the whole map.
    operator, _ = posterior_weights(
        model,
        prior,
        jnp.eye(model.features_y.matrix.shape[1], dtype=model.features_y.dtype),
        regularizer=posterior_regularizer,
        form="b" if method == "bayes" else "importance",
        clip=clip,
        truncation=as_fraction(truncation, "truncation"),
        normalize=normalize,
    )
    return PosteriorModel(model, operator, method)


def _checked(simulations: Simulations) -> tuple[Points, Points]:
    names = "simulations.parameters", "simulations.data"
    parameters, data = (
        as_points(simulations.parameters, names[0]),
        as_points(simulations.data, names[1]),
    )
    check_same_size(parameters, names[0], data, names[1])
    return check_finite(parameters, names[0]), check_finite(data, names[1])
