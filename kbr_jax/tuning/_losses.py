r"""What hyperparameters are learned by: pure, differentiable functions of fitted models and
held-out data.

A loss that is measured in the RKHS of a kernel under learning can be made small by making the
kernel flat. Losses are therefore energy scores by default: they have no bandwidth.
"""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from .._checks import (
    as_float,
    as_mask,
    as_non_negative,
    as_points,
    check_alike,
    check_same_size,
    in_one_precision,
    is_concrete,
    is_real,
    size,
    without_padding,
)
from .._numerics import matmul, one_program, safe_sqrt
from .._typing import Array, ArrayLike, Float, Points
from ..embedding import Embedding, embed, squared_mmd
from ..filtering import AbstractFilter, FilterOutput, belief, run_filter, state_mean
from ..filtering._sequences import check_lists
from ..kernels import (
    AbstractKernel,
    Energy,
    KernelLike,
    as_kernel,
    coordinate_scale,
    gram_matvec,
)
from ..moments import MomentModel, ravel_point
from ..rules import AbstractConditional, bayes_rule, condition


def regression_loss(
    model: AbstractConditional, x: Points, y: Points, *, kernel: KernelLike | None = None
) -> Float[Array, ""]:
    r"""Vector-valued regression loss on held-out pairs, $\frac1m \sum_i | \phi(y_i) -
    \hat\mu_{Y|x_i}
    |^2$ (S13, figure 6), by default in the RKHS of `Energy`: the energy score.

    **Arguments:** `model`, fitted on other pairs; `x`, `y` `[m, ...]`; `kernel` of y whose RKHS
    measures the error. By default it is `Energy`, with the mean and the `coordinate_scale` of the
    training y (of moments, of the landmarks of y), for y that are one real array, and the model's
    own for others. With `Linear()` it is the squared error of the conditional mean.
    `model.kernel_y` is the paper's; a bandwidth of y that is tuned by it becomes as wide as can be.

    **Returns:** a scalar. Cost O(n^2 (d + m)), memory O(m n). **Raises:** `ValueError` for samples
    that are unpaired or of another kind.
    """
    x, y = as_points(x, "x"), as_points(y, "y")
    check_same_size(x, "x", y, "y")
    beliefs = condition(model, x)
    if kernel is None:
        # Not of the held-out y: where they are few, a model that predicts nothing would be near.
        known = _training_y(model) if is_real(y) else (y,)
        kernel = measuring(model.kernel_y, *known)
    return jnp.mean(_errors(beliefs, y, kernel, "y"))


def _training_y(model: AbstractConditional) -> tuple[Points, Array]:
    """The training y and their shares; of moments, the landmarks."""
    if isinstance(model, MomentModel):
        landmarks: Any = model.maps.y.landmarks  # pyright: ignore[reportAttributeAccessIssue]
        return landmarks.points, landmarks.active.astype(model.maps.y.dtype)
    features, coordinates = model.sample()
    return coordinates.points, features.uniform


def measuring(kernel_y: AbstractKernel, y: Points, weights: Array | None = None) -> AbstractKernel:
    """The kernel of an error where none is given: `Energy` on y, or the model's own."""
    if not is_real(y):
        return kernel_y
    return Energy(*_center_and_scale(y, weights))


@jax.jit
def _center_and_scale(
    y: Float[Array, "n *d"], weights: Float[Array, " n"] | None
) -> tuple[Float[Array, "*d"], Float[Array, "*d"]]:
    return jnp.average(y, axis=0, weights=weights), coordinate_scale(y, weights)


def _errors(
    beliefs: Embedding, points: Points, kernel: KernelLike | None, name: str
) -> Float[Array, " m"]:
    r"""$| \phi(z_i) - \mu_i |^2$ for m embeddings on one sample and m points."""
    check_alike(points, name, beliefs.points, f"training {name}")
    kernel = beliefs.kernel if kernel is None else as_kernel(kernel)
    kernel.check(points, name)
    return _rkhs_errors(kernel, beliefs.points, beliefs.weights, points)


@eqx.filter_jit
def _rkhs_errors(
    kernel: AbstractKernel, atoms: Points, weights: Float[Array, "m n"], points: Points
) -> Float[Array, " m"]:
    smoothed = gram_matvec(kernel, atoms, atoms, weights.T).T
    cross = jnp.sum(kernel.gram(points, atoms).astype(weights.dtype) * weights, axis=-1)
    return (
        kernel.diagonal(points).astype(weights.dtype)
        - 2 * cross
        + jnp.sum(smoothed * weights, axis=-1)
    )


def marginal_loss(
    model: AbstractConditional,
    x: Points,
    y: Points,
    *,
    regularizer: ArrayLike,
    kernel: KernelLike = None,
    estimator: Literal["pairs", "prior", "importance"] = "pairs",
    prior: Embedding | None = None,
    **options: Any,
) -> Float[Array, ""]:
    r"""Model selection for Bayes' rule (F11 section 4.2): posteriors, averaged over the marginal of
    y, give back the marginal of x.

    $$ \Big| \frac1m \sum_j \hat\mu_{X|y_j} - \frac1m \sum_j \phi(x_j) \Big|^2 $$

    **Arguments:**

    - `model` of P(Y | X), fitted on other pairs; `x`, `y` `[m, ...]`: held-out pairs. Use it with
      `cross_validate`.
    - `regularizer`, `estimator` and `options`: of `bayes_rule`.
    - `kernel` of x that measures the discrepancy, by default `Energy`, as in `regression_loss`,
      with the mean and the scale of the prior: in the model's own, as printed in the paper, the
      widest wins.
    - `prior`: by default the training marginal of x.

    **Returns:** a scalar. Cost that of `bayes_rule` for m observations, and O((n + m)^2 d).
    **Raises:** `ValueError` as `bayes_rule`, for unpaired samples, and for moments without a
    `prior`.
    """
    x, y = as_points(x, "x"), as_points(y, "y")
    check_same_size(x, "x", y, "y")
    if prior is None:
        features = model.sample()[0]
        prior = Embedding(features.kernel, features.points, features.uniform)
    posterior = bayes_rule(model, prior, y, regularizer=regularizer, estimator=estimator, **options)
    if kernel is None:
        kernel = measuring(model.kernel_x, prior.points, jnp.maximum(prior.weights, 0))
    kernel = as_kernel(kernel)
    average = Embedding(kernel, posterior.points, jnp.mean(posterior.weights, axis=0))
    return squared_mmd(average, embed(kernel, x))


def filter_loss(
    filt: AbstractFilter,
    states: Points,
    observations: Points,
    *,
    controls: Any = None,
    observed: Any = None,
    counted: Any = None,
    burn_in: int = 0,
    kernel: KernelLike | None = None,
    decode: Callable[[Embedding], Points] | None = None,
    checkpoint_every: int | None = None,
) -> Float[Array, ""]:
    r"""Error of a filter on held-out sequences, mean over time.

    It is the squared distance of the decoded belief to the state.

    $$ \frac{1}{T} \sum_t | \hat s_t - s_t |^2 \quad\text{or, with a `kernel`,}\quad \frac{1}{T}
       \sum_t | \hat\mu_t - \phi(s_t) |^2. $$

    **Arguments:**

    - `filt`: fitted on other data. `states`, `observations`: `[T, ...]`, or lists of sequences of
      any lengths; then `controls`, `observed` and `counted` are lists too.
    - `controls`: `[T, ...]`, known inputs, see `run_filter`.
    - `observed`: mask `[T]` of observations that were made; `counted`: mask `[T]` of the steps that
      enter the mean (padding of sequences of unequal length, unlabeled states); the first `burn_in`
      steps do not.
    - `kernel` of the states, fixed: measure in its RKHS, where a belief with two modes is not
      punished for its mean.
    - `decode`: from the embedding of a belief to a point; `state_mean` by default.
    - `checkpoint_every`: for long sequences, see `run_filter`.

    For gradients give the filter `clipping=Clipping(truncation=0.0)`: the default truncation makes
    the loss jump.

    **Returns:** a scalar. Cost that of `run_filter`; with a `kernel`, O(T n^2) more. **Raises:**
    `ValueError` as `run_filter`, and for states of another kind or number.
    """
    if isinstance(states, list) or isinstance(observations, list):
        check_lists(states, "states", observations, "observations")
        for index, (true, seen) in enumerate(zip(states, observations, strict=True)):
            names = f"states[{index}]", f"observations[{index}]"
            true, seen = (as_points(p, name) for p, name in zip((true, seen), names, strict=True))
            check_same_size(true, names[0], seen, names[1])
    else:
        observations = as_points(observations, "observations")
        check_same_size(as_points(states, "states"), "states", observations, "observations")
    output_fn = Estimate(filt, decode) if kernel is None else None
    run = run_filter(
        filt,
        observations,
        controls=controls,
        observed=observed,
        output_fn=output_fn,
        checkpoint_every=checkpoint_every,
    )
    if not isinstance(run, list):
        run, states, counted = [run], [states], [counted]
    counted = [None] * len(run) if counted is None else counted
    check_lists(counted, "counted", run, "observations")
    sums, total = 0.0, 0
    for one, true, mask in zip(run, states, counted, strict=True):
        true = as_points(true, "states")
        mask = as_mask(mask, size(true), "counted") & (jnp.arange(size(true)) >= burn_in)
        true = without_padding(true, mask)
        if kernel is None:
            errors = _squared_errors(one, true)
        else:
            errors = _errors(belief(filt, one), true, kernel, "states")
        # Where nothing is counted neither value nor gradient may depend on what stands there.
        sums, total = sums + jnp.sum(jnp.where(mask, errors, 0)), total + jnp.sum(mask)
    if all(size(true) <= burn_in for true in states) or (is_concrete(total) and total == 0):
        raise ValueError(
            f"No step is counted: `burn_in` = {burn_in} or `counted` leaves none of "
            f"{sum(map(size, states))} steps."
        )
    return sums / jnp.maximum(total, 1).astype(errors.dtype)


class Estimate(eqx.Module):
    """The point read off a step, with the filter as a pytree: a closure would compile each time."""

    filt: AbstractFilter
    decode: Callable[[Embedding], Points] | None

    def __call__(self, output: FilterOutput) -> Points:
        if self.decode is None:
            return state_mean(self.filt, output)
        return self.decode(belief(self.filt, output))


@one_program
def _squared_errors(estimates: Points, states: Points) -> Float[Array, " T"]:
    """Squared differences, summed over all numbers of a point."""
    found, true = jax.vmap(ravel_point)(estimates), jax.vmap(ravel_point)(states)
    if found.shape != true.shape:
        raise ValueError(
            "The decoded beliefs are not points like `states`; give a `decode` (or a `function` of "
            "moments) that returns such "
            "points, or a `kernel` to compare embeddings."
        )
    return jnp.sum((found - true) ** 2, axis=-1)


#: What is added to the variance of `mmd_power`.
_FLOOR = 1e-8


def mmd_power(kernel: KernelLike, x: Points, y: Points) -> Float[Array, ""]:
    r"""Criterion of the asymptotic power of the MMD test (Liu et al. 2020, eq 3 to 5); maximize it
    over kernels on a split of the data.

    $$ J = \frac{\mathrm{MMD}_u^2}{\hat\sigma}, \quad h_{ij} = k(x_i, x_j) + k(y_i, y_j) - k(x_i,
       y_j) - k(y_i, x_j), \quad
       \hat\sigma^2 = \frac{4}{n^3} \sum_i \Big( \sum_{j \ne i} h_{ij} \Big)^2 - \frac{4}{n^4} \Big(
          \sum_{i \ne j} h_{ij} \Big)^2 + \varepsilon. $$

    **Arguments:** `kernel`; samples `x`, `y` of one size n >= 2. Epsilon is 1e-8: value and
    gradient are finite at X = Y.

    **Returns:** a scalar, signed; cost O(n^2 d). **Raises:** `ValueError` for samples of different
    sizes or of one point.
    """
    kernel, x, y = as_kernel(kernel), as_points(x, "x"), as_points(y, "y")
    check_same_size(x, "x", y, "y")
    check_alike(y, "y", x, "x")
    if size(x) < 2:
        raise ValueError("`mmd_power` needs at least 2 points in each sample.")
    kernel.check(x, "x")
    kernel.check(y, "y")
    return _power(kernel, *in_one_precision(x, y))


@eqx.filter_jit
def _power(kernel: AbstractKernel, x: Points, y: Points) -> Float[Array, ""]:
    n = size(x)
    cross = kernel.gram(x, y)
    h = kernel.gram(x, x) + kernel.gram(y, y) - cross - cross.T
    h = h * (1 - jnp.eye(n, dtype=h.dtype))
    statistic = jnp.sum(h) / float(n * (n - 1))
    rows = jnp.sum(h, axis=1) / n
    # The variance of the rows' means, in the form without cancellation.
    variance = 4 * jnp.mean((rows - jnp.mean(rows)) ** 2)
    return statistic / safe_sqrt(variance + _FLOOR)


def spectral_loss(
    u: Float[Array, "b r"], v: Float[Array, "b r"], *, penalty: ArrayLike = 0.0
) -> Float[Array, ""]:
    r"""Loss of two feature maps whose product is the dependence of X and Y:

    $$ \frac{1}{b (b - 1)} \sum_{i \ne j} (\tilde u_i^\top \tilde v_j)^2
       - \frac{2}{b - 1} \sum_i \tilde u_i^\top \tilde v_i
       + \text{penalty} \, (|\hat C_u - I|^2 + |\hat C_v - I|^2) / r $$

    with $\tilde u = u - \bar u$, $\tilde v = v - \bar v$ and covariances $\hat C$. Without the
    penalty the least value is $- \sum_{i \le r} \sigma_i^2$, with the largest singular values of
    the operator $f \mapsto E[f(Y) | X] - E f(Y)$: then $u^\top v$ is
    $p(x, y) / (p(x) p(y)) - 1$, cut at rank r (neural conditional probability, Kostic et al.
    2024). The penalty keeps the features from collapsing onto few directions.

    **Arguments:** `u`, `v`: features of the x and of the y of b >= 2 pairs; `penalty` >= 0.

    **Returns:** a scalar. Cost O(b^2 r). **Raises:** `ValueError` for features of different shapes
    and for one pair.

    `kernels.FeatureMap` takes the map of x, and `fit_conditional` then reads P(Y | x) off it.
    """
    u, v = as_float(u), as_float(v)
    if u.shape != v.shape or u.ndim != 2 or u.shape[0] < 2:
        raise ValueError(
            f"`u` and `v` must be features [b, r] of b >= 2 pairs, got {u.shape} and {v.shape}."
        )
    b, r = u.shape
    u, v = u - jnp.mean(u, axis=0), v - jnp.mean(v, axis=0)
    products = matmul(u, v.T)
    pairs = jnp.diagonal(products)
    apart = (jnp.sum(products**2) - jnp.sum(pairs**2)) / (b * (b - 1))
    identity = jnp.eye(r, dtype=u.dtype)
    spread = sum(jnp.sum((matmul(f.T, f) / b - identity) ** 2) for f in (u, v)) / r
    weight = as_non_negative(penalty, "penalty", scalar=True).astype(u.dtype)
    return apart - 2 * jnp.sum(pairs) / (b - 1) + weight * spread
