r"""Classifiers of a predicted distribution (PredSVM, L15 section 5): training points with weights
of any sign.

A negative weight is a positive one of the other label, $\ell(y, \bar y) = 1 - \ell(-y, \bar y)$, so
that

$$ \tfrac12 |w|^2 + C \sum_i |\beta_i| \, \ell(\operatorname{sign}(\beta_i) y_i, f(x_i)) $$

is convex for a convex loss (L15 eqs 11 and 12). Several classes are told apart one against the
rest.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    as_points,
    as_positive,
    as_weights,
    check_alike,
    check_finite,
    check_same_size,
    is_concrete,
    is_real,
    size,
)
from .._numerics import matmul, one_program, safe_divide
from .._solves import psd_solve
from .._typing import Array, ArrayLike, Bool, Float, Points, with_numbers
from ..features import AbstractFeatureMap, FeatureChoice, Landmarks, fit_features
from ..kernels import KernelLike
from ..kernels._base import flat

#: Newton steps at most: the active set of a squared hinge settles within a few.
_NEWTON_STEPS = 50


def flip_labels(
    labels: ArrayLike, weights: ArrayLike
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    r"""Labels $\operatorname{sign}(\beta_i) y_i$ and weights $|\beta_i|$ of an equivalent problem
    with weights >= 0 (L15 eq 12).

    **Arguments:** `labels` `[n]` in {-1, 1}; `weights` `[n]` of any sign, those of a predicted
    embedding, $\beta_t / n_t$.

    The weighted 0/1 loss changes by the constant $\sum_{\beta_i < 0} \beta_i$. **Raises:**
    `ValueError` for other labels.
    """
    labels = jnp.asarray(labels)
    if is_concrete(labels) and not np.all(np.abs(np.asarray(labels)) == 1):
        raise ValueError(
            "`labels` must be -1 or 1; classes of other names go to `fit_predicted_svm`."
        )
    weights = as_weights(weights, labels.shape[0], "weights", jnp.dtype("float32"))
    return _flipped(labels.astype(weights.dtype), weights)


@one_program
def _flipped(
    labels: Float[Array, " n"], weights: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    return jnp.where(weights < 0, -labels, labels), jnp.abs(weights)


class PredictedSVM(eqx.Module):
    r"""Squared-hinge classifier $f(x) = \langle w, \psi(x) \rangle + b$ of a predicted
    distribution, made by `fit_predicted_svm`.

    - `features`: $\psi$, None for linear ones. `coefficients`: w `[c, r]`; `intercepts`: b `[c]`,
      with c = 1 for two classes.
    - `classes`: the labels, `[2]` (the second is the positive one) or `[c]`. `converged`: False
      where Newton's method was stopped before the points inside the margin had settled; the result
      then carries no gradient.
    """

    features: AbstractFeatureMap | None
    coefficients: Float[Array, "c r"]
    intercepts: Float[Array, " c"]
    classes: Array
    converged: Bool[Array, " c"]

    __repr__ = with_numbers


def _codes(features: AbstractFeatureMap | None, x: Points) -> Float[Array, "n r"]:
    if features is not None:
        return features.coordinates(x)
    if not is_real(x):
        raise ValueError(
            "Linear features need points that are one real array [n, ...]; give a `kernel` for "
            "others."
        )
    return flat(x)


def fit_predicted_svm(
    x: Points,
    labels: ArrayLike,
    weights: ArrayLike,
    *,
    penalty: ArrayLike,
    kernel: KernelLike | None = None,
    landmarks: FeatureChoice = None,
    classes: ArrayLike | None = None,
    intercept: bool = True,
) -> PredictedSVM:
    r"""Train on weighted points of any sign: for each class, with labels y = 1 in it and -1
    outside,

    $$ \min_{w, b} \tfrac12 |w|^2 + C \sum_i |\beta_i| \max(0, 1 - \bar y_i f(x_i))^2, \qquad
       \bar y_i = \operatorname{sign}(\beta_i) y_i, \quad f(x) = \langle w, \psi(x) \rangle + b, $$

    L15 eq 12 with the squared hinge, which makes the result differentiable in x, weights, penalty
    and kernel. Newton's method finds the points inside the margin, without a gradient; one linear
    solve with them gives result and gradient.

    **Arguments:**

    - `x`, `labels`, `weights`: n points, their classes `[n]`, and weights `[n]`: points and weights
      of a predicted embedding. With points that are pairs (x, y), `x, labels = prediction.points`.
    - `penalty`: C > 0. The weights sum to about 1: C here is C n where the loss is summed over n
      points.
    - `kernel`: None for linear features of real points. `landmarks`: of the kernel's features, as
      for `fit_conditional`; by default all points.
    - `classes`: `[c]` distinct labels, needed under `jit` (static length); by default those that
      occur.
    - `intercept`: whether there is a b (not penalized).

    **Returns:** a `PredictedSVM`. Cost O(c (n r^2 + r^3)) a Newton step.

    **Raises:** `ValueError` for unpaired arguments, NaN, a penalty <= 0, fewer than two classes,
    labels that are in none, or conjugate gradients as features. Under `jit` NaN gives NaN, and
    `converged` is False.
    """
    x = check_finite(as_points(x, "x"), "x")
    labels = jnp.asarray(as_points(labels, "labels"))
    check_same_size(labels, "labels", x, "x")
    weights = as_weights(weights, size(x), "weights", jnp.dtype("float32"))
    for values, name in ((labels, "labels"), (weights, "weights")):
        if values.ndim != 1:
            raise ValueError(f"`{name}` must be one number for each point, {[size(x)]}.")
    weights = jnp.asarray(check_finite(weights, "weights"))
    classes = _as_classes(labels, classes)
    features = None
    if kernel is not None:
        features = fit_features(kernel, x, Landmarks(x) if landmarks is None else landmarks)
    if features is not None and not isinstance(features, AbstractFeatureMap):
        raise ValueError(
            "A classifier needs explicit features: `landmarks` as a rank, `Landmarks` or "
            "`RandomFourier`."
        )
    penalty = as_positive(penalty, "penalty", scalar=True).astype(weights.dtype)
    coordinates = _codes(features, x).astype(weights.dtype)
    w, b, converged = _trained(coordinates, labels, weights, penalty, classes, intercept)
    return PredictedSVM(features, w, b, classes, converged)


@functools.partial(one_program, static_argnums=5)
def _trained(
    coordinates: Float[Array, "n r"],
    labels: Array,
    weights: Float[Array, " n"],
    penalty: Float[Array, ""],
    classes: Array,
    intercept: bool,
) -> tuple[Float[Array, "c r"], Float[Array, " c"], Bool[Array, " c"]]:
    amounts = jnp.abs(weights)
    center = jnp.zeros(coordinates.shape[1], coordinates.dtype)
    if intercept:  # far from the origin its trace of a penalty would be one of w
        center = safe_divide(matmul(amounts, coordinates), jnp.sum(amounts))
        coordinates = coordinates - center
        coordinates = jnp.concatenate(
            [coordinates, jnp.ones((coordinates.shape[0], 1), coordinates.dtype)], axis=1
        )
    positive = classes[1:] if classes.shape[0] == 2 else classes
    targets = jnp.where(labels[None, :] == positive[:, None], 1, -1).astype(weights.dtype)
    targets = jnp.where(weights < 0, -targets, targets)
    w, converged = jax.vmap(lambda y: _squared_hinge(coordinates, y, penalty * amounts, intercept))(
        targets
    )
    if not intercept:
        return w, jnp.zeros(w.shape[0], w.dtype), converged
    return w[:, :-1], w[:, -1] - matmul(w[:, :-1], center), converged


def _as_classes(labels: Array, classes: ArrayLike | None) -> Array:
    if classes is None:
        if not is_concrete(labels):
            raise ValueError("Under `jit` the labels cannot be looked at: give `classes`.")
        classes = np.unique(np.asarray(labels))
    given, classes = classes, jnp.asarray(classes, labels.dtype)
    if is_concrete(classes):
        same = np.asarray(classes).astype(np.asarray(given).dtype) == np.asarray(given)
        if not np.all(same) or len(np.unique(np.asarray(classes))) < classes.size:
            raise ValueError(f"`classes` must be different labels of {labels.dtype}, got {given}.")
    if classes.ndim != 1 or classes.shape[0] < 2:
        raise ValueError(f"A classifier needs at least two `classes`, got {classes.shape}.")
    if is_concrete(labels) and is_concrete(classes):
        unknown = np.setdiff1d(labels, classes)
        if len(unknown):
            raise ValueError(f"`labels` holds {unknown[0]}, which is not among `classes`.")
    return classes


def _squared_hinge(coordinates: Float[Array, "n r"], y, scale, intercept: bool):
    """Minimum of |w|^2 / 2 + sum_i s_i max(0, 1 - y_i f_i)^2.

    The second result says whether the points inside the margin have settled.
    """
    free = jnp.zeros(coordinates.shape[1], coordinates.dtype)
    # The intercept is not penalized; a trace keeps the system definite where no point is inside the
    # margin.
    ridge = jnp.ones_like(free)
    if intercept:
        ridge = ridge.at[-1].set(1e-6 * lax.stop_gradient(jnp.minimum(jnp.sum(scale), 1)))

    def minimum(coordinates, y, scale, inside):
        s = jnp.where(inside, 2 * scale, 0)
        matrix = matmul(coordinates.T, s[:, None] * coordinates) + jnp.diag(ridge)
        # Coordinates have units of their own: the jitter of a large one is not for a small one.
        diagonal = jnp.diagonal(matrix)
        unit = lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1))
        right = unit * matmul(coordinates.T, s * y)
        return unit * psd_solve(unit[:, None] * matrix * unit, right)

    fixed = lax.stop_gradient((coordinates, y, scale))

    def objective(w):
        gap = jnp.maximum(1 - fixed[1] * matmul(fixed[0], w), 0)
        return jnp.sum(ridge * w**2) / 2 + jnp.sum(fixed[2] * gap**2)

    def inside_margin(w):
        return (fixed[1] * matmul(fixed[0], w) < 1) & (fixed[2] > 0)

    shares = 0.5 ** jnp.arange(10).astype(coordinates.dtype)

    def step(carry):
        w, inside, _, count = carry
        full = minimum(*fixed, inside)
        # The full step is the minimum where it has those points inside its margin that it was
        # solved for. A damped step that leaves them as they were is not.
        settled = jnp.all(inside_margin(full) == inside)
        trials = w + shares[:, None] * (full - w)
        w = jnp.where(settled, full, trials[jnp.argmin(jax.vmap(objective)(trials))])
        return w, inside_margin(w), settled, count + 1

    start = (free, inside_margin(free), jnp.asarray(False), jnp.asarray(0))
    w, inside, converged, _ = lax.while_loop(lambda c: ~c[2] & (c[3] < _NEWTON_STEPS), step, start)
    w = jnp.where(converged, minimum(coordinates, y, scale, inside), w)
    # A point of weight NaN is in no margin.
    w = jnp.where(jnp.all(jnp.isfinite(scale)), w, jnp.nan)
    return w, converged & jnp.all(jnp.isfinite(w))


def decision_values(svm: PredictedSVM, x: Points) -> Float[Array, "n c"]:
    """The value f of each class at points `[n, ...]`.

    One column for two classes, positive for the second. Cost O(n r (d + c)).
    """
    x = as_points(x, "x")
    if svm.features is not None:
        check_alike(x, "x", svm.features.points, "the training points")
        svm.features.kernel.check(x, "x")
    coordinates = _codes(svm.features, x).astype(svm.coefficients.dtype)
    if coordinates.shape[1] != svm.coefficients.shape[1]:
        raise ValueError(
            f"`x` has {coordinates.shape[1]} features, the classifier {svm.coefficients.shape[1]}; "
            f"they must agree."
        )
    return _values(coordinates, svm.coefficients, svm.intercepts)


@one_program
def _values(
    coordinates: Float[Array, "n r"], w: Float[Array, "c r"], b: Float[Array, " c"]
) -> Float[Array, "n c"]:
    return matmul(coordinates, w.T) + b


def classify(svm: PredictedSVM, x: Points) -> Array:
    """The class `[n]` of largest decision value at points `[n, ...]`.

    Cost and errors as `decision_values`.
    """
    return _of_largest(decision_values(svm, x), svm.classes)


@one_program
def _of_largest(values: Float[Array, "n c"], classes: Array) -> Array:
    index = (values[:, 0] > 0).astype(int) if values.shape[1] == 1 else jnp.argmax(values, axis=1)
    return classes[index]
