r"""Does a treatment change the distribution of an outcome? A doubly robust test.

Martinez-Taboada, Ramdas and Kennedy 2023.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import (
    as_arrays,
    as_count,
    as_points,
    check_finite,
    check_memory,
    check_same_size,
    is_concrete,
    size,
)
from .._numerics import matmul
from .._typing import Array, ArrayLike, Bool, Float, Int, Points, PRNGKeyArray
from .._warnings import warn
from ..features import AbstractFeatureMap, FeatureChoice, fit_features
from ..kernels import AbstractKernel, KernelLike, checked_kernel
from ._adjustment import propensities, regression
from ._results import TestResult, centered, interval_of, is_constant, rounding
from ._two_sample import student

#: Propensities stay this far from 0 and 1: no point has more than 50 times the weight of others.
_CLIP = 0.02
#: Share of clipped propensities with a warning.
_MANY = 0.1
#: Points of an arm at least: each fit then has 2 of them, for 5 folds.
_LEAST = 6
#: Bandwidths of x by default, in units of the median. With the median alone, both regressions miss
#: the same jump or fast change of x, and more points find the miss. Of true hypotheses, n = 400,
#: were rejected at level .05 with these, and with the median alone: sin 6x .08 of 40 and 1.00 of
#: 20, a jump .03 and .13 of the same 40. A shift of .15 in smooth x was found in .23 and .25 of 60.
#: A linear and an additive kernel gain nothing where 2 of 30 columns matter, n = 200: .45 and .44.
_BANDWIDTHS = (1.0, 0.5, 0.25, 0.125)


def treatment_effect_test(
    kernel_y: KernelLike,
    x: Points,
    treatment: ArrayLike,
    y: Points,
    *,
    key: PRNGKeyArray,
    arms: tuple[ArrayLike, ...] | None = None,
    kernel_x: KernelLike = None,
    num_folds: int = 5,
    landmarks: FeatureChoice = 100,
) -> TestResult:
    r"""Test whether a treatment changes the distribution of y, where x drives both.

    The embeddings of the two counterfactual outcomes differ by the mean of (Martinez-Taboada et al.
    2023, section 4)

    $$ \phi_i = \left( \frac{a_i}{\pi(x_i)} - \frac{1 - a_i}{1 - \pi(x_i)} \right)
       (k(y_i, \cdot) - \beta_{a_i}(x_i)) + \beta_1(x_i) - \beta_0(x_i), $$

    with the propensity $\pi(x) = P(a = 1 | x)$ and the conditional embeddings $\beta_a(x)$ of y in
    each arm. The sample has two halves, and each half K parts. Estimates for a part come from the
    rest of its half. With the n' points of one half, and the mean over the other,

    $$ f_i = \langle \phi_i, \bar\phi_{\text{other half}} \rangle, \qquad
       T = \sqrt{n'} \, \bar f / \operatorname{sd}(f), $$

    T is normal without an effect (algorithm 1; here it is compared with Student's t). An error of
    the propensity alone, or of the embeddings alone, does no harm in large samples.

    **What it assumes.**

    - Consistency: the y of a point is its outcome under the treatment it got, whatever others got.
    - No unmeasured confounding: x holds all that drives both treatment and outcome. Without it the
      test finds the confounder, and calls it an effect.
    - Overlap: points of each x get either treatment. Without it the outcomes are extrapolated. A
      warning tells that many propensities are at their bounds .02 and .98.
    - x was there before the treatment: what the treatment changes may not be in it.

    **Arguments:**

    - `kernel_y`, `kernel_x`: of any two domains; None for their defaults. The test sees differences
      that kernel_y sees. Without kernel_x the propensity and the embeddings each choose their share
      of the median bandwidth: 1, 1/2, 1/4 or 1/8.
    - `x`: n covariates. `treatment`: `[n]` of booleans, or 0 and 1. `y`: n outcomes.
    - `arms`: of more than two treatments, the labels (b, a) to compare: does Y differ under do(a)
      and do(b), for all points of the sample? Then `treatment` is `[n]` of integers, and the
      propensities of a and b have a fit each.
    - `key`: of the split. Another key gives another p-value: choose one before you look.
    - `num_folds`: K, parts of a half (static).
    - `landmarks`: the rank r of features of x for both regressions. Ridge and bandwidth of the
      embeddings are chosen by their exact leave-one-out error, those of the propensity by the
      approximate leave-one-out likelihood (Rad and Maleki 2020).

    **Returns:** a `TestResult` with the one-sided p-value. `effect` estimates the squared distance
    of the counterfactual embeddings, in units of kernel_y. Its interval holds without an effect
    too. `null` is empty. Cost O(K (n^2 r + r^3)), memory O(n^2).

    The level holds for large n. Weak overlap needs more points: see the
    [results](../results/tests.md#where-single-tests-err). So do many covariates, most of all where
    few of them matter: on some hundreds of points with tens of columns the test rejects too often.
    Choose the columns before you look at y. One half of the points decides against
    the other: in a randomized experiment `two_sample_test` finds an effect with fewer points.

    **Raises:** `ValueError` for samples of different sizes, labels other than 0 and 1 without
    `arms`, or fewer than 6 points of an arm. Under `jit` these give NaN.

    **Example:**

    >>> import jax, kbr_jax as kbr
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> x = jax.random.normal(keys[0], (200, 1))
    >>> treatment = jax.random.bernoulli(keys[1], jax.nn.sigmoid(x[:, 0] / 2))
    >>> y = x[:, 0] + treatment.astype(float) + jax.random.normal(keys[2], (200,)) / 2
    >>> found = kbr.hypotheses.treatment_effect_test(None, x, treatment, y, key=keys[3])
    >>> bool(found.p_value < 0.01)
    True
    """
    x, y = check_finite(as_points(x, "x"), "x"), check_finite(as_points(y, "y"), "y")
    check_same_size(y, "y", x, "x")
    n = size(x)
    control, treated, usable = _as_arms(treatment, arms, n)
    folds = as_count(num_folds, "num_folds", x, "x")
    if folds < 2:
        raise ValueError("`num_folds` must be at least 2: one part is predicted from the others.")
    kernels = checked_kernel(kernel_x, x, "x"), checked_kernel(kernel_y, y, "y")
    dtype = jax.eval_shape(kernels[1].diagonal, y).dtype
    check_memory(n, n, dtype, "the outcomes", "test a part of the points")
    rank = min(int(landmarks), n) if isinstance(landmarks, (int, np.integer)) else landmarks
    features = _candidates(kernel_x is None, kernels[0], x, rank)
    gram = kernels[1].gram(y, y)
    found = _run(features.astype(dtype), gram, control, treated, usable, key, folds)
    p_value, statistic, effect, interval, clipped, lost = found
    if is_concrete(lost) and lost:
        warn(
            "Most digits of the kernel of y are lost to rounding: subtract the mean of y, or use "
            "float64."
        )
    if is_concrete(clipped) and clipped > _MANY:
        warn(
            f"{100 * float(clipped):.0f} % of the propensities are at their bounds {_CLIP} and "
            f"{1 - _CLIP}: points of some x seem to get one treatment only, and nothing tells what "
            f"the other would do. Restrict the sample to x where both occur."
        )
    return TestResult(
        p_value,
        statistic,
        jnp.zeros(0, dtype),
        kernels=(kernels[1],),
        effect=effect,
        interval=interval,
        hypothesis="the treatment leaves the distribution of the outcome as it is",
        valid="large samples with overlap and without unmeasured confounding",
    )


def _candidates(
    scaled: bool, kernel: AbstractKernel, x: Points, landmarks: FeatureChoice
) -> Float[Array, "c n r"]:
    """Features of x, of kernels among which the regressions choose."""
    found = []
    # A default kernel holds no numbers but bandwidths, and that of labels none.
    for scale in _BANDWIDTHS if scaled and jax.tree.leaves(kernel) else (1.0,):
        own = jax.tree.map(lambda bandwidth, scale=scale: scale * bandwidth, kernel)
        features = fit_features(own, x, landmarks)
        if not isinstance(features, AbstractFeatureMap):
            raise ValueError("`landmarks` must be a rank, `Landmarks` or `RandomFourier`.")
        found.append(features.matrix)
    return jnp.stack(found)


def _as_arms(
    treatment: ArrayLike, arms: tuple[ArrayLike, ...] | None, n: int
) -> tuple[Bool[Array, " n"] | None, Bool[Array, " n"], Bool[Array, ""]]:
    """Select the points of both arms. Say whether they can be tested with."""
    labels = as_arrays(treatment, "treatment")
    if labels.shape != (n,):
        raise ValueError(
            f"`treatment` must hold a label for each of {n} points, got shape {labels.shape}."
        )
    if arms is None:
        control, treated = None, labels.astype(bool)
        known = jnp.all(treated.astype(labels.dtype) == labels)
        if is_concrete(known) and not known:
            raise ValueError("`treatment` must be booleans, or 0 and 1. Of more, choose `arms`.")
    else:
        if not isinstance(arms, (tuple, list)) or len(arms) != 2:
            raise ValueError(f"`arms` must be two labels of `treatment`, got {arms!r}.")
        for arm in arms:
            if not is_concrete(arm):
                continue
            value = np.asarray(arm)
            if value.dtype.kind not in "biuf" or value.astype(labels.dtype) != value:
                raise ValueError(f"`arms` holds {arm!r}, which is no label of {labels.dtype}.")
        control, treated = (labels == jnp.asarray(arm, labels.dtype) for arm in arms)
        known = ~jnp.any(control & treated)
        if is_concrete(known) and not known:
            raise ValueError(f"`arms` must be two different labels, got {arms!r}.")
    count = jnp.sum(treated)
    least = jnp.minimum(count, n - count if control is None else jnp.sum(control))
    if is_concrete(least) and least < _LEAST:
        raise ValueError(
            f"`treatment` has {least} points of an arm, of {n}: the test needs {_LEAST} of each."
        )
    return control, treated, known & (least >= _LEAST)


@eqx.filter_jit
def _run(
    phi: Float[Array, "c n r"],
    gram: Float[Array, "n n"],
    control: Bool[Array, " n"] | None,
    treated: Bool[Array, " n"],
    usable: Bool[Array, ""],
    key: PRNGKeyArray,
    num_folds: int,
):
    n = gram.shape[0]
    # Coefficients have sum 0: a constant part of the kernel cancels, and would cost digits.
    center = centered(gram)
    constant, most = is_constant(gram), jnp.max(jnp.abs(gram))
    lost = ~constant & (jnp.max(jnp.abs(center)) <= rounding(most))
    gram = jnp.where(constant, 0, center)
    # Halves and folds have their share of each arm.
    rest = 0 if control is None else jnp.where(control, 0, 2)
    arm = jnp.where(treated, 1, rest)
    order = jnp.lexsort((jax.random.uniform(key, (n,)), arm))
    place = jnp.zeros(n, int).at[order].set(jnp.arange(n))
    coefficients, clipped = _coefficients(phi, gram, control, treated, place, num_folds)
    halves = [coefficients[order[start::2]] for start in (0, 1)]
    means = [jnp.mean(half, axis=0) for half in halves]
    values = [
        matmul(half, matmul(gram, mean)) for half, mean in zip(halves, means[::-1], strict=True)
    ]
    effect = jnp.mean(values[0])
    sizes = [jnp.mean(jnp.abs(half), axis=0) for half in halves]
    noise = rounding(matmul(sizes[0], matmul(jnp.abs(gram), sizes[1])))
    count = values[0].shape[0]
    error = jnp.std(values[0], ddof=1) / np.sqrt(count).astype(gram.dtype)
    # Of outcomes that all agree nothing is left but rounding.
    certain = (jnp.abs(effect) <= noise) & (error <= noise)
    score = jnp.where(certain, 0, effect / jnp.where(certain, 1, error))
    found = student(score, count - 1), score, effect, interval_of(effect, values)
    p_value, score, effect, interval = (jnp.where(usable, value, jnp.nan) for value in found)
    # No squared distance is negative.
    return p_value.astype(gram.dtype), score, effect, jnp.maximum(interval, 0), clipped, lost


def _coefficients(
    phi: Float[Array, "c n r"],
    gram: Float[Array, "n n"],
    control: Bool[Array, " n"] | None,
    treated: Bool[Array, " n"],
    place: Int[Array, " n"],
    num_folds: int,
) -> tuple[Float[Array, "n n"], Float[Array, ""]]:
    r"""The weights of k(y_j, .) in each $\phi_i$, and the share of clipped propensities."""
    n = gram.shape[0]
    most = n - n // 2
    # A half of odd samples gets a point of the other: it is neither known nor held.
    order = jnp.argsort(place % 2)
    halves = jnp.stack([order[:most], order[n - most :]])
    fold, identity = place // 2 % num_folds, jnp.eye(most, dtype=gram.dtype)
    other = ~treated if control is None else control

    def of_half(number):
        points = halves[number]
        inside = place[points] % 2 == number
        own_phi, own_gram = phi[:, points], gram[points][:, points]
        zeros, ones = other[points], treated[points]

        def add(carry, part):
            held = inside & (fold[points] == part)
            known = (inside & ~held).astype(gram.dtype)
            found = propensities(own_phi, ones, known)
            rest = 1 - found if control is None else propensities(own_phi, zeros, known)
            share, left = (jnp.clip(p, _CLIP, 1 - _CLIP) for p in (found, rest))
            weight = jnp.where(ones, 1 / share, jnp.where(zeros, -1 / left, 0))
            zero, one = (
                regression(own_phi, own_gram, jnp.where(arm, known, 0)) for arm in (zeros, ones)
            )
            own = jnp.where(ones[:, None], one, zero)
            rows = weight[:, None] * (identity - own) + one - zero
            return (
                jnp.where(held[:, None], rows, carry[0]),
                carry[1] + jnp.sum(held & ((found != share) | (rest != left))),
            ), None

        start = jnp.zeros_like(own_gram), jnp.zeros((), int)
        return lax.scan(add, start, jnp.arange(num_folds))[0]

    rows, clipped = lax.map(of_half, jnp.arange(2))
    rows = jnp.zeros_like(gram).at[halves[:, :, None], halves[:, None]].add(rows)
    return rows, jnp.sum(clipped).astype(gram.dtype) / n
