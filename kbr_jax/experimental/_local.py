r"""Do two variables depend on each other where a third has a given value?"""

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import as_count
from .._numerics import matmul
from .._typing import Array, Float, Point, Points, PRNGKeyArray
from ..embedding import CrossCovariance
from ..hypotheses._results import TestResult, from_null, of_residuals, simulate
from ..rules import ConditionalEmbedding, conditional_cross_covariance


def local_dependence_test(
    model: ConditionalEmbedding, x: Point | Points, *, key: PRNGKeyArray, num_draws: int = 1000
) -> TestResult:
    r"""Test whether Y and Z are independent given X = x (S09 eq 9).

    The statistic is the size of $C_{YZ|x}$, at one point or at many.

    With $\beta(x) = (K + n \lambda I)^{-1} k(X, x)$ and the residuals
    $\tilde\phi_i = \phi(y_i) - \hat\mu_{Y|x_i}$ and $\tilde\psi_i = \psi(z_i) - \hat\mu_{Z|x_i}$,

    $$ T(x) = \Big| \sum_i \beta_i(x) \, \tilde\phi_i \otimes \tilde\psi_i \Big|^2
            = \beta(x)^\top (\tilde L \circ \tilde U) \, \beta(x). $$

    The operator itself takes the mean at x from every point (`conditional_cross_covariance`);
    residuals take the mean at each, or a slope of both means near x would pass for dependence.
    Under the hypothesis the terms have mean 0, and T is compared with its values for random signs
    on them.

    **Arguments:**

    - `model` of P((Y, Z) | X), fitted with `kernel_y = TensorProduct((kernel_y, kernel_z))` and
      `(y, z)` as its second sample. Its kernel of x and its regularizer say how local "at x" is.
    - `x`: a point, or b of them. `key`, `num_draws` B (static): of the signs, the same for all
      points.

    **Returns:** a `TestResult`; for b points `p_value` `[b]`, `statistic` `[b]` and `null`
    `[b, B]`, each for a test of its own: many points are many tests. Cost O(n^3 + B b n^2).

    The level holds only where the model predicts Y and Z well, from many points near x. Where X
    explains most of their variance, a regularizer that is too large leaves some of X in both
    residuals, and the test rejects true hypotheses. `leave_out_loss` orders regularizers and
    bandwidths rightly.

    **Raises:** `ValueError` for a model of other than pairs, or points of another kind.
    """
    operator = conditional_cross_covariance(model, x)
    found = _run(model, operator, key, as_count(num_draws, "num_draws"))
    if operator.weights.ndim == 1:
        statistic, null, magnitude = (part[..., 0] for part in found)
        return from_null(statistic, null, magnitude)
    return jax.vmap(from_null, in_axes=(0, 1, 0))(*found)


@eqx.filter_jit
def _run(model: ConditionalEmbedding, operator: CrossCovariance, key: PRNGKeyArray, draws: int):
    features = model.features_x
    beta = jnp.atleast_2d(operator.weights)
    fitted = features.ridge_weights(model.factor, features.matrix)

    def residual(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
        once = gram - matmul(fitted, gram)
        return once - matmul(once, fitted.T)

    grams = [
        operator.kernel_x.gram(operator.x, operator.x),
        operator.kernel_y.gram(operator.y, operator.y),
    ]
    parts = [residual(gram) for gram in grams]
    product = parts[0] * parts[1]

    def draw(_, one: PRNGKeyArray) -> Float[Array, " n"]:
        return jax.random.rademacher(one, beta.shape[1:], beta.dtype)

    def statistics(data, signs: Float[Array, "s n"]) -> Float[Array, "s b"]:
        product, beta = data
        terms = signs[:, None] * beta
        return jnp.sum(matmul(terms, product) * terms, axis=-1)

    data = product, beta
    null = simulate(key, draws, draw, statistics, data)
    magnitude = of_residuals(parts, grams) * jnp.sum(jnp.abs(beta), axis=1) ** 2
    return statistics(data, jnp.ones((1, beta.shape[1]), beta.dtype))[0], null, magnitude
