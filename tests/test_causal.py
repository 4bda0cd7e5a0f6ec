"""Interventions, instruments and proxies: tables and linear models exactly, formulas in NumPy."""

import itertools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import check_gradient, closeness, gaussian

import kbr_jax as kbr
from kbr_jax import causal
from kbr_jax.causal._stages import FOLDS, RIDGES, cross_fitted, feature_map, regress
from kbr_jax.causal._units import outcome_targets

RNG = np.random.default_rng(0)
AFFINE = kbr.Polynomial(degree=1)
TINY = 1e-11

close = closeness(1e-8, 1e-8)


def counted(**tables):
    """Columns of a sample whose frequencies are those of a discrete model, exactly.

    Each table maps the variables before it to the numbers of its values.
    """
    rows = [((), {})]
    for name, table in tables.items():
        longer = []
        for _, known in rows:
            counts = table(**known)
            for value, count in enumerate(counts):
                longer += [((), {**known, name: value})] * count
        rows = longer
    return {name: np.array([row[name] for _, row in rows]) for name in tables}


def white(n, count, seed=0):
    """Columns with mean 0 and covariance I in the sample."""
    x = np.random.default_rng(seed).normal(size=(n, count))
    q, _ = np.linalg.qr(np.c_[np.ones(n), x])
    return q[:, 1:].T * np.sqrt(n)


def shuffled(*columns, seed=1):
    order = np.random.default_rng(seed).permutation(len(columns[0]))
    return tuple(jnp.asarray(column[order]) for column in columns)


# ---------------------------------------------------------------- discrete models, exactly


def test_back_door_table():
    """do(a) is the sum over x of P(x) E[y | a, x]; so for the treated, for V = v, elsewhere."""
    t = counted(
        x=lambda: [1, 2, 3],
        v=lambda x: [1, 2] if x else [2, 1],
        a=lambda x, v: [1 + x, 2 + v],
        y=lambda x, v, a: [1 + a, 2 + x, 1 + a * v],
    )
    x, v, a, y = (t[name] for name in "xvay")
    delta = kbr.Delta()
    model = kbr.fit_conditional(None, delta, (jnp.asarray(a), jnp.asarray(x)), jnp.asarray(y),
                                regularizer=TINY)  # fmt: skip
    means = np.array([[y[(a == i) & (x == j)].mean() for j in range(3)] for i in range(2)])
    shares = np.array([(x == j).mean() for j in range(3)])
    doses = jnp.array([0, 1])

    def expected(embedding):
        return kbr.expectation(embedding, lambda y: y.astype(float))

    found = causal.intervene(model, doses)
    close(expected(found), means @ shares)
    close(found.mass, 1)
    close(expected(causal.intervene(model, 1)), (means @ shares)[1])
    # All probabilities of y, not only its mean.
    shares_y = kbr.expectation(found, lambda y: (y == 2).astype(float))
    of_y = np.array([[(y[(a == i) & (x == j)] == 2).mean() for j in range(3)] for i in range(2)])
    close(shares_y, of_y @ shares)

    treated = kbr.condition(
        kbr.fit_conditional(delta, delta, jnp.asarray(a), jnp.asarray(x), regularizer=TINY), 1
    )
    shares_treated = np.array([(x[a == 1] == j).mean() for j in range(3)])
    close(expected(causal.intervene(model, doses, treated)), means @ shares_treated)
    other = kbr.embed(delta, jnp.array([0, 0, 2]))
    close(expected(causal.intervene(model, doses, other)), means @ np.array([2, 0, 1]) / 3)

    of_v = kbr.fit_conditional(
        None, delta, (jnp.asarray(a), jnp.asarray(v), jnp.asarray(x)), jnp.asarray(y),
        regularizer=TINY,
    )  # fmt: skip
    given = kbr.fit_conditional(
        delta, None, jnp.asarray(v), (jnp.asarray(v), jnp.asarray(x)), regularizer=TINY
    )
    for value in (0, 1):
        rows = v == value
        truth = [
            sum((x[rows] == j).mean() * y[(a == i) & rows & (x == j)].mean() for j in range(3))
            for i in range(2)
        ]
        close(expected(causal.intervene(of_v, doses, kbr.condition(given, value))), truth)


def test_front_door_table():
    """Y under do(a) through a mediator, with an unmeasured cause of a and y."""
    t = counted(
        u=lambda: [1, 1],
        a=lambda u: [1 + 2 * u, 3 - 2 * u],
        m=lambda u, a: [1 + 2 * a, 3 - 2 * a],
        y=lambda u, a, m: [1 + m, 1 + 2 * u, 4 - m - 2 * u],
    )
    a, m, y = (t[name] for name in "amy")
    columns = [jnp.asarray(part) for part in (a, m, y)]
    of_m = kbr.fit_conditional(None, None, columns[0], columns[1], regularizer=TINY)
    of_y = kbr.fit_conditional(None, None, (columns[1], columns[0]), columns[2], regularizer=TINY)
    found = causal.intervene(of_y, kbr.condition(of_m, jnp.array([0, 1])))
    truth = [
        sum(
            (m[a == i] == j).mean() * (a == k).mean() * y[(m == j) & (a == k)].mean()
            for j, k in itertools.product((0, 1), (0, 1))
        )
        for i in (0, 1)
    ]
    close(kbr.expectation(found, lambda y: y.astype(float)), truth)
    # It is the truth of the model, which knows u.
    u = t["u"]
    means = np.array([[y[(u == c) & (m == j)].mean() for j in (0, 1)] for c in (0, 1)])
    direct = [(m[a == i] == j).mean() for i in (0, 1) for j in (0, 1)]
    close(truth, np.reshape(direct, (2, 2)) @ means.mean(0))


PROXIES = counted(
    u=lambda: [1, 1],
    w=lambda u: [1 + 2 * u, 3 - 2 * u],
    z=lambda u, w: [3 - 2 * u, 1 + 2 * u],
    a=lambda u, w, z: [1 + u, 2 - u],
)


def proxies():
    t = PROXIES
    y = 1.0 + 2 * t["a"] - 3 * t["u"] + t["a"] * t["u"]
    truth = [1.0 - 1.5, 3.0 - 1.5 + 0.5]
    return *shuffled(t["a"], t["w"], t["z"], y), truth


def test_bridges_on_a_table():
    """Binary proxies of a binary confounder: both bridges, their moments and both together."""
    a, w, z, y, truth = proxies()
    doses = jnp.array([0, 1])
    outcome = causal.fit_outcome_bridge(a, w, z, y, regularizers=(TINY, TINY))
    moments = causal.fit_moment_bridge(a, w, z, y, regularizer=TINY)
    treatment = causal.fit_treatment_bridge(a, w, z, y, regularizers=(TINY, TINY, TINY))
    for model in (outcome, moments, treatment, causal.doubly_robust(outcome, treatment)):
        found = causal.intervene(model, doses)
        close(kbr.mean(found), truth)
        close(found.mass, 1)
    # Without the proxies the answer is another one.
    naive = [float(jnp.mean(y[a == arm])) for arm in (0, 1)]
    assert np.abs(np.subtract(naive, truth)).max() > 0.1


def test_doubly_robust_needs_one_bridge():
    a, w, z, y, truth = proxies()
    doses, large = jnp.array([0, 1]), 1e6
    good = causal.fit_outcome_bridge(a, w, z, y, regularizers=(TINY, TINY))
    bad = causal.fit_outcome_bridge(a, w, z, y, regularizers=(TINY, large))
    weights, wrong = (
        causal.fit_treatment_bridge(a, w, z, y, regularizers=(TINY, ridge, TINY))
        for ridge in (TINY, large)
    )
    assert np.abs(kbr.mean(causal.intervene(bad, doses)) - np.asarray(truth)).max() > 0.1
    assert np.abs(kbr.mean(causal.intervene(wrong, doses)) - np.asarray(truth)).max() > 0.1
    for pair in ((good, wrong), (bad, weights)):
        close(kbr.mean(causal.intervene(causal.doubly_robust(*pair), doses)), truth)


def test_measured_confounders_on_a_table():
    """With z = None and w = None the bridges adjust for what is measured."""
    t = counted(
        x=lambda: [1, 2], a=lambda x: [1 + x, 3 - x], y=lambda x, a: [2 + a, 1 + x, 3 - a - x]
    )
    a, x, y = shuffled(t["a"], t["x"], t["y"].astype(float))
    means = [[float(jnp.mean(y[(a == i) & (x == j)])) for j in (0, 1)] for i in (0, 1)]
    truth = np.array(means) @ [1 / 3, 2 / 3]
    outcome = causal.fit_outcome_bridge(a, x, None, y, regularizers=(None, TINY))
    treatment = causal.fit_treatment_bridge(a, None, x, y, regularizers=(None, TINY, TINY))
    for model in (outcome, treatment, causal.doubly_robust(outcome, treatment)):
        close(kbr.mean(causal.intervene(model, jnp.array([0, 1]))), truth)
    ratio = treatment.at(jnp.array([0, 1]), treatment.proxies.matrix)
    share = np.array([[np.mean(np.asarray(x[a == i]) == j) for j in (0, 1)] for i in (0, 1)])
    close(ratio, (np.array([1 / 3, 2 / 3]) / share)[:, np.asarray(x)])
    adjusted = causal.intervene(outcome, 1, kbr.embed(kbr.Delta(), jnp.array([0])))
    close(kbr.mean(adjusted), means[1][0])


# ---------------------------------------------------------------- linear models, exactly


def test_linear_back_door_and_front_door():
    u, ex, ea, em, ey = map(jnp.asarray, white(40, 5))
    linear = kbr.DirectSum((kbr.Linear(), kbr.Linear()))
    doses = jnp.array([-1.0, 0.5, 2.0])

    def fitted(kernel, x, y):
        # Features are exact here, and the Gram matrix of rank 2 is not inverted.
        return kbr.fit_conditional(kernel, kbr.Linear(), x, y, regularizer=1e-12, landmarks_x=4)

    def mean(embedding):
        return kbr.expectation(embedding, lambda y: y)  # weights of linear kernels have any sum

    x, a = ex, 0.8 * ex + ea
    model = fitted(linear, (a, x), 2 * a - 3 * x + ey)
    close(mean(causal.intervene(model, doses)), 2 * doses)
    shifted = kbr.embed(kbr.Linear(), jnp.array([1.0, 3.0]))
    close(mean(causal.intervene(model, doses, shifted)), 2 * doses - 6)
    slope = jax.vmap(jax.grad(lambda dose: mean(causal.intervene(model, dose))))(doses)
    close(slope, jnp.full(3, 2.0))
    a = u + ea
    m = 0.5 * a + em
    of_m = fitted(kbr.Linear(), a, m)
    of_y = fitted(linear, (m, a), 4 * m + u + ey)
    close(mean(causal.intervene(of_y, kbr.condition(of_m, doses))), 2 * doses)


def test_linear_instrument():
    """Two-stage least squares, and the truth where the sample has the moments of the model."""
    u, z, ex, ey = map(jnp.asarray, white(40, 4))
    x = z + u + ex
    y = 1.5 * x - 2 * u + ey
    fitted = {"regularizers": (1e-12, 1e-12), "cross_fit": False}
    model = causal.fit_instrument(x, z, y, kernels=(AFFINE, AFFINE), **fitted)
    close(causal.structural(model, jnp.array([-1.0, 2.0])), [-1.5, 3.0])
    close(jax.grad(lambda x: causal.structural(model, x))(0.3), 1.5)


def test_linear_bridges_in_arms():
    """Proxies with linear noise in two arms: E[Y | do(a)] = level of the arm + 2 E[u]."""
    parts, level = [], np.array([0.5, -1.0])
    for arm in (0, 1):
        u, ew, ez, ey = white(40, 4, seed=arm)
        u = u + 0.6 * arm
        parts.append((np.full(40, arm), u + ew, u + ez, level[arm] + 2 * u + ey))
    a, w, z, y = shuffled(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    truth = level + 2 * 0.3
    kernels = (None, AFFINE, AFFINE)
    outcome = causal.fit_outcome_bridge(a, w, z, y, kernels=kernels, regularizers=(1e-12, 1e-12))
    moments = causal.fit_moment_bridge(a, w, z, y, kernels=kernels, regularizer=1e-14)
    wrong = causal.fit_treatment_bridge(a, w, z, y, kernels=kernels)
    for model in (outcome, moments, causal.doubly_robust(outcome, wrong)):
        tolerance = 1e-8 if model is not moments else 1e-7
        close(kbr.mean(causal.intervene(model, jnp.array([0, 1]))), truth, tolerance)


# ---------------------------------------------------------------- formulas, in NumPy


def ridge_weights(gram, cross, used, ridge):
    """Weights `[m, n]` of ridge regression with an intercept, in dual form."""
    n = used.sum()
    mean = used / n
    center = np.diag(used.astype(float)) - np.outer(used, mean)
    inner = center @ gram @ center + n * ridge * np.eye(len(used))
    moved = (cross - mean @ gram) @ center.T
    return mean + moved @ np.linalg.solve(inner, center)


def two_stages(of_z, of_x, of_shared, targets, ridges, cross, shared, folds=1):
    """Second-stage predictions at points with values `cross` of x and `shared` of the rest."""
    n = len(targets)
    gamma = np.zeros((n, n))
    for fold in range(folds):
        own = np.arange(n) % folds == fold
        gamma[own] = ridge_weights(of_z, of_z[own], ~own if folds > 1 else own, ridges[0])
    gram = of_shared * (gamma @ of_x @ gamma.T)
    return ridge_weights(gram, shared * (cross @ gamma.T), np.ones(n, bool), ridges[1]) @ targets


def units(n=40, seed=0):
    rng = np.random.default_rng(seed)
    u, w, z, a, y = rng.normal(size=(5, n))
    return a + u, w + u, z + u, np.sin(a) - u + y / 5


def test_outcome_bridge_is_the_formula():
    a, w, z, y = units()
    doses = np.array([-1.0, 0.3])
    ridges = (1e-2, 1e-3)
    kernels = tuple(kbr.Gaussian(h) for h in (1.0, 1.5, 0.8))
    bridge = causal.fit_outcome_bridge(
        *map(jnp.asarray, (a, w, z, y)), kernels=kernels, regularizers=ridges
    )
    of_a, of_w = gaussian(a, a, 1.0), gaussian(w, w, 1.5)
    expected = two_stages(
        of_a * gaussian(z, z, 0.8),
        of_w,
        of_a,
        y,
        ridges,
        np.tile(of_w.mean(0), (2, 1)),
        gaussian(doses, a, 1.0),
    )
    close(kbr.mean(causal.intervene(bridge, jnp.asarray(doses))), expected, 1e-7)
    # For one unit's proxy, and by its gradient.
    adjust = kbr.embed(kernels[1], jnp.asarray(w[:1]))
    expected = two_stages(
        of_a * gaussian(z, z, 0.8), of_w, of_a, y, ridges, of_w[:1], gaussian(doses[:1], a, 1.0)
    )
    close(kbr.mean(causal.intervene(bridge, jnp.asarray(doses[:1]), adjust)), expected, 1e-7)


def two_arms(seed, n):
    """Arms, proxies and outcomes with an effect of 1; u hides it in the means of the arms."""
    u, of_w, of_z, of_a, of_y = np.random.default_rng([seed, n]).normal(size=(5, n))
    a = (u + of_a > 0).astype(int)
    return map(jnp.asarray, (a, u + of_w / 2, u + of_z / 2, a - 2 * u + 0.3 * of_y))


def effect(bridge):
    curve = kbr.mean(causal.intervene(bridge, jnp.array([0, 1])))
    return float(curve[1] - curve[0])


def test_second_ridge_of_an_outcome_bridge():
    """By predictions of all units alone it is 1e-8 here, and the effect -.9 in place of 1."""
    u, a, w, z, y = np.random.default_rng([79, 200]).normal(size=(5, 200))
    a = (a < u / 1.6).astype(int)
    columns = [jnp.asarray(part) for part in (a, u + w / 2, u + z / 2, a + u + y / 2)]
    bridge = causal.fit_outcome_bridge(*columns)
    assert bridge.regularizers[1] > 1e-5 and abs(effect(bridge) - 1) < 0.4
    given = causal.fit_outcome_bridge(*columns, regularizers=tuple(bridge.regularizers))
    close(effect(given), effect(bridge))


def test_first_stage_of_an_outcome_bridge_has_no_folds():
    """With folds the mean effect of these samples was .44."""
    found = [effect(causal.fit_outcome_bridge(*two_arms(seed, 300))) for seed in range(8)]
    assert abs(np.mean(found) - 1) < 0.4


def test_instrument_is_the_formula():
    x, c, z, y = units(seed=3)
    ridges, new = (1e-2, 1e-3), np.array([-0.5, 1.0])
    kernels = tuple(kbr.Gaussian(h) for h in (1.0, 1.5, 0.8))
    columns = [jnp.asarray(part) for part in (x, z, y, c)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 40 units tell little
        model = causal.fit_instrument(
            *columns[:3], covariates=columns[3], kernels=kernels, regularizers=ridges
        )
        plain = causal.fit_instrument(*columns[:3], kernels=kernels[:2], regularizers=ridges)
    of_c = gaussian(c, c, 0.8)
    expected = two_stages(
        gaussian(z, z, 1.5) * of_c, gaussian(x, x, 1.0), of_c, y, ridges,
        gaussian(new, x, 1.0), gaussian(new, c, 0.8), FOLDS,
    )  # fmt: skip
    close(causal.structural(model, jnp.asarray(new), jnp.asarray(new)), expected, 1e-7)
    ones = np.ones((40, 40))
    expected = two_stages(
        gaussian(z, z, 1.5), gaussian(x, x, 1.0), ones, y, ridges, gaussian(new, x, 1.0), ones[:2],
        FOLDS,
    )  # fmt: skip
    close(causal.structural(plain, jnp.asarray(new)), expected, 1e-7)


def test_treatment_bridge_is_the_formula():
    """Minimum of the sample loss over functions 1 + <theta, .>, by its normal equations."""
    a, w, z, y = units(seed=5)
    ridges = (1e-2, 1e-2, 1e-3)
    doses = np.array([-0.5, 0.4])
    kernels = tuple(kbr.Gaussian(h) for h in (1.0, 1.5, 0.8))
    bridge = causal.fit_treatment_bridge(
        *map(jnp.asarray, (a, w, z, y)), kernels=kernels, regularizers=ridges, rank=100
    )
    n, of_a, of_z = len(y), gaussian(a, a, 1.0), gaussian(z, z, 0.8)
    of_aw = of_a * gaussian(w, w, 1.5)
    seen = ridge_weights(of_aw, of_aw, np.ones(n, bool), ridges[0])
    at_free = of_a * gaussian(w, w, 1.5).mean(0)
    free = ridge_weights(of_aw, at_free, np.ones(n, bool), ridges[0])
    # Rows u of the units and v of independent doses and proxies, as points of one Gram matrix.
    both, twice = np.concatenate([seen, free]), np.concatenate([a, a])
    gram = gaussian(twice, twice, 1.0) * (both @ of_z @ both.T)
    d = np.repeat([-1.0, 1.0], n)
    first = np.repeat([1.0, 0.0], n)
    # theta = sum_i b_i row_i: (sum_i u_i u_i^T + n eta) theta = sum (v - u).
    b = np.linalg.solve(np.diag(first) @ gram + n * ridges[1] * np.eye(2 * n), d)
    ratio = 1 + (gaussian(doses, twice, 1.0) * b) @ (both @ of_z)
    close(bridge.at(jnp.asarray(doses), bridge.proxies.matrix), ratio, 1e-6)
    exact = causal.fit_treatment_bridge(
        *map(jnp.asarray, (a, w, z, y)), kernels=kernels, regularizers=ridges, rank=n
    )
    close(exact.at(jnp.asarray(doses), exact.proxies.matrix), ratio, 1e-6)
    near = ridge_weights(of_a, gaussian(doses, a, 1.0), np.ones(n, bool), ridges[2]) * ratio
    expected = near @ y + (1 - near.sum(1)) * y.mean()
    close(kbr.mean(causal.intervene(bridge, jnp.asarray(doses))), expected, 1e-6)


def test_moment_bridge_is_the_formula():
    a, w, z, y = units(seed=7)
    ridge, doses = 1e-3, np.array([-0.5, 0.4])
    kernels = tuple(kbr.Gaussian(h) for h in (1.0, 1.5, 0.8))
    bridge = causal.fit_moment_bridge(
        *map(jnp.asarray, (a, w, z, y)), kernels=kernels, regularizer=ridge, rank=100
    )
    n, of_a = len(y), gaussian(a, a, 1.0)
    design, metric = of_a * gaussian(w, w, 1.5), of_a * gaussian(z, z, 0.8)
    # min (y - m - L b)^T K (y - m - L b) / n^2 + ridge b^T L b, from its normal equations.
    inner = np.block(
        [
            [design @ metric @ design + n**2 * ridge * design, (design @ metric).sum(1)[:, None]],
            [(metric @ design).sum(0)[None], np.array([[metric.sum()]])],
        ]
    )
    right = np.concatenate([design @ metric @ y, [metric.sum(0) @ y]])
    found = np.linalg.lstsq(inner, right, rcond=1e-14)[0]
    at = gaussian(doses, a, 1.0) * gaussian(w, w, 1.5).mean(0)
    curve = at @ found[:n] + found[n]
    close(kbr.mean(causal.intervene(bridge, jnp.asarray(doses))), curve, 1e-5)
    assert np.isnan(bridge.explained).tolist() == [True, False]


def test_ridge_has_the_least_error_of_units_left_out():
    x, t = RNG.normal(size=40), RNG.normal(size=(40, 2))
    t[:, 0] += np.sin(2 * x)
    features = feature_map(kbr.Gaussian(1.0), jnp.asarray(x), 40, None)
    stage = regress(features, jnp.asarray(t), None)
    gram, every = gaussian(x, x, 1.0), np.arange(40)
    errors = []
    for ridge in RIDGES:
        rows = []
        for i in every:
            # The ridge n lambda is that of all n units.
            weights = ridge_weights(gram, gram[i : i + 1], every != i, ridge * 40 / 39)
            rows.append((t[i] - weights[0] @ t) ** 2)
        errors.append(np.sum(rows, axis=1))
    totals = np.sum(errors, axis=1)
    best = int(np.argmin(totals))
    close(stage.regularizer, RIDGES[best])
    spread = np.sum((t - t.mean(0)) ** 2) * (40 / 39) ** 2
    close(stage.explained, 1 - totals[best] / spread, 1e-6)
    more = np.array(errors) - errors[best]
    near = more.mean(1) <= more.std(1) / 40**0.5
    careful = regress(features, jnp.asarray(t), None, cautious=True)
    close(careful.regularizer, RIDGES[np.flatnonzero(near).max()])
    held = cross_fitted(features, jnp.asarray(t), jnp.asarray(0.1))
    for fold in range(FOLDS):
        own = every % FOLDS == fold
        close(held[own], ridge_weights(gram, gram[own], ~own, 0.1) @ t, 1e-7)


# ---------------------------------------------------------------- bands


def test_band_of_a_randomized_experiment():
    """With nothing to adjust for, means of the arms and their textbook errors."""
    n = 40
    a = jnp.asarray(np.arange(n) % 3 // 2)
    y = jnp.asarray(RNG.normal(size=n)) + a.astype(float)
    x = jnp.zeros(n)
    outcome = causal.fit_outcome_bridge(a, x, None, y, regularizers=(None, TINY))
    band = causal.confidence_band(outcome, jnp.array([0, 1]), key=jax.random.key(0))
    for arm in (0, 1):
        own = np.asarray(y)[np.asarray(a) == arm]
        close(band.mean[arm], own.mean())
        # Residuals of units left out are larger by n / (n - 1).
        close(band.error[arm] ** 2, own.var(ddof=1) / (len(own) - 1), 1e-6)
    reach = (band.upper - band.lower) / (2 * band.error)
    close(reach[0], reach[1])
    assert 1.96 < reach[0] < 2.5  # two independent arms: 2.24
    treatment = causal.fit_treatment_bridge(a, None, x, y)
    robust = causal.doubly_robust(outcome, treatment)
    other = causal.confidence_band(robust, jnp.array([0, 1]), key=jax.random.key(0))
    close(other.mean, band.mean, 1e-6)
    with pytest.raises(ValueError, match="`doses` must be a batch"):
        causal.confidence_band(robust, jnp.array(0), key=jax.random.key(0))
    with pytest.raises(ValueError, match="one column of y"):
        several = causal.fit_outcome_bridge(a, x, None, jnp.stack([y, y], 1))
        causal.confidence_band(several, jnp.array([0, 1]), key=jax.random.key(0))
    with pytest.raises(ValueError, match="OutcomeBridge"):
        causal.confidence_band(treatment, jnp.array([0, 1]), key=jax.random.key(0))


# ---------------------------------------------------------------- what every fit must do


def all_models(a, w, z, y, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The instrument is weak")
        outcome = causal.fit_outcome_bridge(a, w, z, y, **options)
        treatment = causal.fit_treatment_bridge(a, w, z, y, **options)
        return (
            outcome,
            causal.fit_moment_bridge(a, w, z, y, **options),
            treatment,
            causal.doubly_robust(outcome, treatment),
            causal.fit_instrument(w, z, y, covariates=a, **options),
        )


def curve(model, doses):
    if isinstance(model, causal.InstrumentalRegression):
        return causal.structural(model, doses, doses)
    return kbr.mean(causal.intervene(model, doses))


def test_padding_anywhere_changes_nothing():
    """Neither default kernels nor folds see it: here all true units are in one class modulo 5."""
    parts = [jnp.asarray(part) for part in units()]
    mask = jnp.arange(200) % 5 == 0
    padded = [jnp.full(200, jnp.nan).at[::5].set(part) for part in parts]
    doses = jnp.array([0.0, 1.0])
    plain, filled = all_models(*parts), all_models(*padded, mask=mask)
    given = {"kernels": (kbr.Gaussian(1.0),) * 3}
    plain += (causal.fit_outcome_bridge(*parts, **given),)
    filled += (causal.fit_outcome_bridge(*padded, mask=mask, **given),)
    for one, other in zip(plain, filled, strict=True):
        close(curve(other, doses), curve(one, doses), rtol=1e-6, atol=1e-8)
    band, other = (
        causal.confidence_band(model, doses, key=jax.random.key(0))
        for model in (plain[3], filled[3])
    )
    close(other.error, band.error, 1e-6)


def test_fits_are_programs():
    """One compiled program for a batch of data sets, with finite gradients of bandwidths."""
    both = [map(jnp.asarray, units(seed=seed)) for seed in (0, 1)]
    data = [jnp.stack(part) for part in zip(*both, strict=True)]
    doses, kernels = jnp.array([0.0, 1.0]), (kbr.Gaussian(1.0),) * 3

    def one(a, w, z, y):
        outcome = causal.fit_outcome_bridge(a, w, z, y, kernels=kernels)
        treatment = causal.fit_treatment_bridge(a, w, z, y, kernels=kernels)
        return curve(outcome, doses), curve(causal.doubly_robust(outcome, treatment), doses)

    batch = jax.jit(jax.vmap(one))(*data)
    for together, alone in zip(batch, one(*(part[1] for part in data)), strict=True):
        close(together[1], alone, 1e-6)

    def loss(bandwidth):
        own = (kbr.Gaussian(1.0), kbr.Gaussian(bandwidth), kbr.Gaussian(1.0))
        model = causal.fit_outcome_bridge(
            *(part[0] for part in data), kernels=own, regularizers=(1e-2, 1e-2)
        )
        return jnp.sum(curve(model, doses)) - model.explained[1]

    check_gradient(loss, jnp.asarray(1.2), rtol=1e-4, atol=1e-6)


def test_doses_of_any_kind():
    """Labels, vectors and tuples of them; repeated units and a constant proxy stay finite."""
    a, w, z, y = map(jnp.asarray, units())
    label = (a > 0).astype(int)
    doses = label, jnp.stack([a, w], 1)
    for fit in (causal.fit_outcome_bridge, causal.fit_treatment_bridge):
        found = causal.intervene(fit(doses, w, z, y), jax.tree.map(lambda v: v[:3], doses))
        assert found.weights.shape == (3, 40) and bool(jnp.all(jnp.isfinite(found.weights)))
        close(found.mass, 1)
    twice = [jnp.concatenate([part[:20], part[:20]]) for part in (a, w, z, y)]
    for model in all_models(*twice):
        assert bool(jnp.all(jnp.isfinite(curve(model, a[:2]))))
    labels = (y > 0).astype(int)
    assert outcome_targets(kbr.Delta(), labels, 30, None).shape == (40, 2)
    for fit in (causal.fit_outcome_bridge, causal.fit_treatment_bridge):
        shares = kbr.embedding.probabilities(causal.intervene(fit(a, w, z, labels), a[:2]))
        close(jnp.sum(shares, axis=-1), 1)


def test_strength_of_an_instrument():
    u, z, e = map(jnp.asarray, RNG.normal(size=(3, 200)))
    x = z + u + e
    model = causal.fit_instrument(x, z, x - u, kernels=(None, AFFINE))
    r2 = float(jnp.corrcoef(x, z)[0, 1] ** 2)
    assert abs(float(model.strength) / (198 * r2 / (1 - r2)) - 1) < 0.15
    with pytest.warns(UserWarning, match="The instrument is weak"):
        causal.fit_instrument(x, jnp.asarray(RNG.normal(size=200)), x - u)


def test_instrument_of_few_values():
    """Predictions of folds differ by noise that is tied to y: no ridge follows it."""
    for seed in (16, 51, 47):
        u, e, v = map(jnp.asarray, np.random.default_rng(seed).normal(size=(3, 300)))
        z = (v > 0).astype(float)
        x = z + u
        model = causal.fit_instrument(x, z, x + u + 0.3 * e, rank=60)
        doses = jnp.quantile(x, jnp.linspace(0.1, 0.9, 9))
        found = causal.structural(model, doses)
        error = jnp.mean((found - found.mean() - doses + doses.mean()) ** 2)
        assert float(error) < 1


def test_instrument_with_heavy_tails():
    """The ridge of predictions of all units alone is 1e-6 here, and the error 9.6."""
    rng = np.random.default_rng([22, 300])
    u, z, noise = rng.normal(size=300), rng.standard_t(3, 300), rng.normal(size=300)
    x = z + u
    model = causal.fit_instrument(*map(jnp.asarray, (x, z, x + u + noise / 2)))
    doses = np.linspace(*np.quantile(x, [0.1, 0.9]), 15)
    curve = causal.structural(model, jnp.asarray(doses))
    assert np.mean((curve - curve.mean() - doses + doses.mean()) ** 2) < 1


def test_strength_of_an_instrument_that_covariates_drive():
    u, e, *c = map(jnp.asarray, np.random.default_rng(1).normal(size=(5, 300)))
    c = jnp.stack(c, 1)
    g = jnp.sin(2 * c[:, 0])
    with pytest.warns(UserWarning, match="The instrument is weak"):
        causal.fit_instrument(g + u, g + 0.3 * e, u, covariates=c)
    assert causal.fit_instrument(e / 2 + g + u, e, u, covariates=c).strength > 20


def test_bad_arguments():
    a, w, z, y = map(jnp.asarray, units())
    fits = (causal.fit_outcome_bridge, causal.fit_moment_bridge, causal.fit_treatment_bridge)
    for fit in fits:
        with pytest.raises(ValueError, match="`w` has 19 points and `y` 40"):
            fit(a, w[:19], z, y)
        with pytest.raises(ValueError, match="`kernels` must be a tuple of 3"):
            fit(a, w, z, y, kernels=(None, None))
        with pytest.raises(ValueError, match="`z` contains NaN"):
            fit(a, w, z.at[0].set(jnp.nan), y)
        with pytest.raises(ValueError, match="`rank` must be an integer"):
            fit(a, w, z, y, rank=0)
    with pytest.raises(ValueError, match="`regularizers` must be a tuple of 2"):
        causal.fit_outcome_bridge(a, w, z, y, regularizers=(1.0,))
    with pytest.raises(ValueError, match="`y` must be one real array"):
        causal.fit_instrument(a, z, (y > 0).astype(int))
    outcome, *_ = models = all_models(a, w, z, y)
    with pytest.raises(ValueError, match="`covariates` must be given"):
        causal.structural(models[4], a[:2])
    with pytest.raises(ValueError, match="`covariates` has 3 points and `x` 2"):
        causal.structural(models[4], a[:2], a[:3])
    with pytest.raises(ValueError, match="fitted for one population"):
        causal.intervene(models[3], a[:2], kbr.embed(None, w))
    with pytest.raises(ValueError, match=r"adjust.points"):
        causal.intervene(outcome, a[:2], kbr.embed(None, jnp.stack([w, w], 1)))
    with pytest.raises(ValueError, match="fit both to the same"):
        causal.doubly_robust(
            outcome, eqx.tree_at(lambda t: t.local.share, models[2], jnp.full(8, 0.125))
        )
    with pytest.raises(ValueError, match="given tuples"):
        causal.intervene(kbr.fit_conditional(None, None, a, y, regularizer=0.1), a[:2])


def test_intervene_with_other_features():
    """Landmarks and random Fourier features, and kernels that are no products."""
    a, x, _, y = map(jnp.asarray, units())
    kernel = kbr.TensorProduct((kbr.Gaussian(1.0), kbr.Gaussian(1.5)))
    doses = jnp.array([-1.0, 0.0, 1.0])
    exact = kbr.fit_conditional(kernel, None, (a, x), y, regularizer=1e-2)
    truth = kbr.mean(causal.intervene(exact, doses))
    pairs = jax.vmap(lambda dose: kbr.condition(exact, (jnp.full(40, dose), x)).weights.mean(0))
    close(causal.intervene(exact, doses).weights @ y, pairs(doses) @ y, 1e-10)
    low = kbr.fit_conditional(kernel, None, (a, x), y, regularizer=1e-2, landmarks_x=40)
    close(kbr.mean(causal.intervene(low, doses)), truth, 1e-6)
    own = kbr.kernels.as_kernel(lambda p, q: kernel(p, q))
    other = kbr.fit_conditional(own, None, (a, x), y, regularizer=1e-2)
    close(kbr.mean(causal.intervene(other, doses)), truth, 1e-8)
    mask = jnp.arange(45) < 40
    padded = [jnp.concatenate([part, jnp.full(5, jnp.nan)]) for part in (a, x, y)]
    masked = kbr.fit_conditional(
        kernel, kbr.Gaussian(1.0), tuple(padded[:2]), padded[2], regularizer=1e-2, mask=mask
    )
    close(kbr.mean(causal.intervene(masked, doses)), truth, 1e-8)


def test_one_unit_is_its_own_prediction():
    one = jnp.ones(1)
    for fit in (causal.fit_outcome_bridge, causal.fit_treatment_bridge):
        assert np.isfinite(kbr.mean(causal.intervene(fit(one, one, one, 2 * one), 1.0)))


def test_the_band_of_a_moment_bridge_is_that_of_its_influence():
    rng = np.random.default_rng(0)
    u, *noise = rng.normal(size=(5, 150))
    a, w, z = (jnp.asarray(part) for part in (u + noise[0], u + noise[1] / 2, u + noise[2] / 2))
    y = a - 2 * jnp.asarray(u) + jnp.asarray(noise[3]) / 10
    doses = jnp.asarray([-1.0, 0.0, 1.0])
    model = causal.fit_moment_bridge(a, w, z, y, kernels=(None, None, kbr.Linear()))
    band = causal.confidence_band(model, doses, key=jax.random.key(0))
    fit, matrix = model.fit, np.asarray(model.features.matrix)
    left = 1 - np.sum((matrix - fit.center) * np.asarray(fit.slope).T, axis=1) - fit.share
    assert np.min(left) < 0.5  # no more than twice the residual: moments are no projection
    residuals = (y - fit.predict(model.own(), y[:, None])[:, 0]) / np.maximum(left, 0.5)

    slope = model.features.on_landmarks(fit.slope @ y)
    points, kernel = model.features.landmarks.points, model.features.kernel
    code = model.proxies.matrix

    def at(dose):
        rows = kernel.gram((jnp.full(150, dose), code), points)
        return np.asarray(rows @ slope)

    values = np.stack([at(dose) for dose in doses])
    weights = np.asarray(model.weights(doses, None))
    influence = 150 * weights * np.asarray(residuals) + values - values.mean(1, keepdims=True)
    np.testing.assert_allclose(band.error, np.sqrt((influence**2).sum(1)) / 150, rtol=1e-6)


def test_noise_is_no_instrument():
    """Many coordinates: each unit decides its own fit where the ridge is small."""
    rng = np.random.default_rng(40)
    x, z, y = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((40,), (40, 30), (40,)))
    with pytest.warns(UserWarning, match="instrument is weak"):
        model = kbr.causal.fit_instrument(x, z, y)
    assert model.strength < 10 and model.explained[0] < 0.2


def test_integers_among_real_doses_are_real():
    rng = np.random.default_rng(41)
    x = rng.normal(size=40)
    a = 0.2 * (x + rng.normal(size=40))
    model = kbr.fit_conditional(
        None, None, (jnp.asarray(a), jnp.asarray(x)), jnp.asarray(a - x), regularizer=1e-3
    )
    doses = np.array([0, 1])
    found = kbr.mean(kbr.causal.intervene(model, jnp.asarray(doses)))
    close(found, kbr.mean(kbr.causal.intervene(model, jnp.asarray(doses, float))), 1e-12)


def test_the_band_of_a_moment_bridge_stays_near_that_of_two_stages():
    rng = np.random.default_rng(11)
    u, *noise = (rng.normal(size=40) for _ in range(5))
    w, z = u + 0.5 * noise[0], u + 0.5 * noise[1]
    a = (u + noise[2] > 0).astype(int)
    y = a - 2 * u + 0.3 * noise[3]
    data, doses = tuple(map(jnp.asarray, (a, w, z, y))), jnp.array([0, 1])
    bands = [
        kbr.causal.confidence_band(fit(*data), doses, key=jax.random.key(0)).error
        for fit in (kbr.causal.fit_moment_bridge, kbr.causal.fit_outcome_bridge)
    ]
    assert np.all(np.asarray(bands[0]) < 4 * np.asarray(bands[1]))


def test_a_level_of_the_outcome_leaves_the_slopes():
    """In single precision, by shifts that are exact; the first version was up to 149 % off."""
    rng = np.random.default_rng(0)
    z, u, *noise = (np.round(16 * part) / 16 for part in rng.normal(size=(4, 100)))
    a, z, y = (jnp.asarray(p, jnp.float32) for p in (z + u, z, z + 2 * u + noise[0]))

    def slopes(shift):
        model = causal.fit_instrument(
            a, z, y + shift, kernels=(kbr.Gaussian(1.0),) * 2, regularizers=(1e-2, 1e-2)
        )
        return jax.vmap(jax.grad(lambda dose: causal.structural(model, dose)))(
            jnp.asarray([-1.0, 0.0, 1.0], jnp.float32)
        )

    np.testing.assert_allclose(slopes(2.0**19), slopes(0.0), atol=1e-2)


def test_variables_of_two_precisions():
    """Labels have kernels of the widest precision, and real variables their own."""
    rng = np.random.default_rng(0)
    a, x = rng.integers(0, 3, 40), rng.normal(size=40)
    z, y = x + 0.1 * rng.normal(size=40), a + x
    doses, narrow = jnp.arange(3), [part.astype(np.float32) for part in (x, z, y)]
    ridge = {"regularizer": 1e-6}  # rounding decides between tiny ones
    wide = kbr.mean(causal.intervene(causal.fit_moment_bridge(a, x, z, y, **ridge), doses))
    model = causal.fit_moment_bridge(a, *narrow, **ridge)
    np.testing.assert_allclose(kbr.mean(causal.intervene(model, doses)), wide, atol=0.05)
    model = kbr.fit_conditional(None, None, (a, narrow[0]), narrow[2], regularizer=1e-3)
    np.testing.assert_allclose(kbr.mean(causal.intervene(model, doses)), [0, 1, 2], atol=0.5)
    first = kbr.mean(causal.intervene(causal.fit_outcome_bridge(x, x, z, y), x[:3]))
    mixed = causal.fit_outcome_bridge(narrow[0], x, narrow[1], y)
    np.testing.assert_allclose(kbr.mean(causal.intervene(mixed, x[:3])), first, atol=1e-3)


def test_constant_outcomes_change_nothing():
    rng = np.random.default_rng(3)
    z = rng.normal(size=40)
    w, a = (jnp.asarray(z + s * rng.normal(size=40)) for s in (0.5, 1.0))
    y, z = jnp.asarray(np.sin(a) + z), jnp.asarray(z)
    both = jnp.stack([y, jnp.full(40, 0.1)], axis=1)
    alone, beside = (causal.fit_outcome_bridge(a, w, z, one) for one in (y, both))
    curves = [kbr.mean(causal.intervene(m, jnp.asarray([-1.0, 0.5]))) for m in (alone, beside)]
    close(curves[1][:, 0], curves[0])
    alone, beside = (causal.fit_instrument(a, z, one) for one in (y, both))
    close(beside.explained, alone.explained)


def test_a_random_dose_needs_a_conditional_embedding():
    a, y = jnp.asarray(RNG.normal(size=(2, 40)))
    model = causal.fit_instrument(a, a, y)
    with pytest.raises(ValueError, match="conditional embedding"):
        causal.intervene(causal.fit_outcome_bridge(a, a, a, y), kbr.embed(None, a))
    assert np.all(np.isfinite(causal.structural(model, [0, 1])))
    joint = kbr.fit_conditional(None, None, (a, a), y, regularizer=0.1)
    close(causal.intervene(joint, [0, 1]).weights, causal.intervene(joint, [0.0, 1.0]).weights)
