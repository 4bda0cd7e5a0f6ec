"""The test of a treatment's effect.

Its regressions and its statistic in NumPy, level with confounding, power, edges.
"""

import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from helpers import closeness, gaussian

import kbr_jax as kbr
from kbr_jax.hypotheses._adjustment import PENALTIES, RIDGES, propensities, regression
from kbr_jax.hypotheses._treatment import _coefficients, treatment_effect_test

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
G = kbr.Gaussian(1.0)

close = closeness(1e-7, 1e-8)


def sample(n, strength=1.0, shift=0.0, spread=1.0, key=KEY):
    """The treatment of a point, and its outcome, follow x."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (n, 1))
    treated = jax.random.bernoulli(keys[1], jax.nn.sigmoid(strength * x[:, 0]))
    noise = jnp.where(treated, spread, 1.0) / 2 * jax.random.normal(keys[2], (n,))
    return x, treated, x[:, 0] + jnp.sin(2 * x[:, 0]) + noise + jnp.where(treated, shift, 0.0)


X, A, Y = sample(30, 0.5, key=jax.random.key(3))
PHI = np.asarray(kbr.features.fit_features(G, X, 8).matrix)
#: Of a wide kernel and of a narrow one.
PHIS = np.stack([kbr.features.fit_features(kbr.Gaussian(h), X, 8).matrix for h in (3.0, 0.3)])
GRAM = gaussian(Y, Y, 1.0)
KNOWN = np.arange(30) % 3 > 0


def ridge_weights(phi, known, ridge, shift):
    """Of the known points, in predictions for all; by the normal equations."""
    design = np.concatenate([phi, np.ones((len(phi), 1))], axis=1)
    penalty = shift * ridge * np.diag([*np.ones(phi.shape[1]), 0])
    inner = design[known].T @ design[known] + penalty
    weights = np.zeros((len(phi), len(phi)))
    weights[:, known] = design @ np.linalg.solve(inner, design[known].T)
    return weights


def chosen_regression(phis, gram, known):
    """The fit of least error of points that are left out, one after the other.

    Of two points the first: any has the same error.
    """
    index, count = np.flatnonzero(known), known.sum()
    fits = [(phi, ridge) for phi in phis for ridge in RIDGES]
    if count == 2:
        return ridge_weights(phis[0], known, RIDGES[0], count)
    losses = []
    for phi, ridge in fits:
        loss = 0
        for i in index:
            without = known & (np.arange(len(known)) != i)
            w = ridge_weights(phi, without, ridge, count)[i]
            loss += gram[i, i] - 2 * w @ gram[i] + w @ gram @ w
        losses.append(loss)
    phi, ridge = fits[np.argmin(losses)]
    return ridge_weights(phi, known, ridge, count)


def chosen_propensities(phis, treated, known):
    a, count = treated.astype(float), known.sum()
    best = -np.inf, None
    for phi, penalty in itertools.product(phis, PENALTIES):
        phi = phi - phi[known].mean(axis=0)
        z = np.concatenate([phi, np.ones((len(phi), 1))], axis=1)
        ridge = count * penalty * np.asarray([*np.ones(phi.shape[1]), 0])

        def loss(w, z=z, ridge=ridge):
            eta = z[known] @ w
            return np.sum(np.logaddexp(0, eta) - a[known] * eta) + np.sum(ridge * w**2) / 2

        def slope(w, z=z, ridge=ridge):
            p = scipy.special.expit(z[known] @ w)
            return z[known].T @ (p - a[known]) + ridge * w

        w = scipy.optimize.minimize(
            loss, np.zeros(z.shape[1]), jac=slope, method="BFGS", options={"gtol": 1e-9}
        ).x
        p = scipy.special.expit(z @ w)
        hessian = (z[known].T * (p * (1 - p))[known]) @ z[known] + np.diag(ridge)
        h = np.sum(z * np.linalg.solve(hessian, z.T).T, axis=1)
        eta = z @ w + h * (p - a) / (1 - p * (1 - p) * h)
        value = np.sum((a * eta - np.logaddexp(0, eta))[known])
        best = max(best, (value, p), key=lambda pair: pair[0])
    return best[1]


@pytest.mark.parametrize("phis", [PHI[None], PHIS, PHIS[::-1]])
def test_the_regression_of_least_leave_one_out_error(phis):
    known = KNOWN & np.asarray(A)
    found = regression(jnp.asarray(phis), jnp.asarray(GRAM), jnp.asarray(known, float))
    close(found, chosen_regression(phis, GRAM, known))
    close(np.sum(found, axis=1), 1)


@pytest.mark.parametrize("phis", [PHI[None], PHIS, PHIS[::-1]])
def test_the_propensities_of_largest_leave_one_out_likelihood(phis):
    found = propensities(jnp.asarray(phis), A, jnp.asarray(KNOWN, float))
    close(found, chosen_propensities(phis, np.asarray(A), KNOWN), 1e-4)


@pytest.mark.filterwarnings("ignore:.* % of the propensities")
@pytest.mark.parametrize("arms", [None, (0, 1), (2, 1)])
def test_the_statistic(arms):
    a, fold = np.asarray(A).astype(int), np.empty(30, int)
    if arms == (2, 1):
        a = np.where(np.arange(30) % 3 == 0, 2, a)  # the points of arm 0 are in the population
    low, high = arms or (0, 1)
    key = jax.random.key(5)
    kind = np.select([a == low, a == high], [0, 1], 2)
    order = np.lexsort((np.asarray(jax.random.uniform(key, (30,))), kind))
    fold[order] = np.arange(30)
    half, fold = fold % 2, fold // 2 % 3
    phi = np.zeros((30, 30))  # coordinates on the features k(y_j, .)
    for h, f in np.ndindex(2, 3):
        held, known = (half == h) & (fold == f), (half == h) & (fold != f)
        share = {
            arm: np.clip(chosen_propensities(PHI[None], a == arm, known), 0.02, 0.98)
            for arm in (low, high)
        }
        zero, one = (chosen_regression(PHI[None], GRAM, known & (a == arm)) for arm in (low, high))
        for i in np.flatnonzero(held):
            weight = {low: -1, high: 1}.get(a[i], 0) / share.get(a[i], np.ones(30))[i]
            own = one[i] if a[i] == high else zero[i]
            phi[i] = weight * (np.eye(30)[i] - own) + one[i] - zero[i]
    found, clipped = _coefficients(
        jnp.asarray(PHI[None]),
        jnp.asarray(GRAM),
        None if arms is None else jnp.asarray(a == low),
        jnp.asarray(a == high),
        jnp.asarray(2 * fold + half),
        3,
    )
    close(found, phi, 1e-3, 1e-3)
    assert 0 <= clipped < 0.5
    products = phi @ GRAM @ phi.T
    f = products[np.ix_(half == 0, half == 1)].mean(axis=1)
    g = products[np.ix_(half == 0, half == 1)].mean(axis=0)
    found = treatment_effect_test(
        G, X, a, Y, key=key, arms=arms, kernel_x=G, num_folds=3, landmarks=8
    )
    score = np.sqrt(15) * f.mean() / f.std(ddof=1)
    close(found.statistic, score, 1e-3, 1e-3)
    close(found.p_value, scipy.stats.t.sf(score, 14), 1e-3, 1e-3)
    close(found.effect, f.mean(), 1e-3, 1e-4)
    reach = 1.96 * np.sqrt((f.var() + g.var()) / 15)
    close(found.interval, np.maximum([f.mean() - reach, f.mean() + reach], 0), 1e-3, 1e-4)
    assert "leaves the distribution" in str(found) and "overlap" in str(found)


# ---- level and power over many data sets, in one program each

REPETITIONS = 300


def many(n, test, repetitions=REPETITIONS, **design):
    """Designs of the same names and sizes share a program."""
    return _many(n, test, repetitions, jax.tree.map(float, design))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _many(n, test, repetitions, design):
    def one(key):
        data, split = jax.random.split(key)
        return test(*sample(n, key=data, **design), split)

    keys = jax.random.split(jax.random.key(1), repetitions)
    return jax.lax.map(one, keys, batch_size=50)


def doubly_robust(x, treated, y, key):
    found = treatment_effect_test(G, x, treated, y, key=key, kernel_x=G, landmarks=12)
    return found.p_value, found.interval


def share(p, level=0.1):
    p = np.asarray(p)
    return np.mean(p[~np.isnan(p)] <= level)


MOST = scipy.stats.binom.ppf(0.999, REPETITIONS, 0.1) / REPETITIONS


def test_level_with_a_confounder():
    p, interval = many(60, doubly_robust)
    assert 0.03 < share(p) <= MOST
    assert np.mean(np.asarray(interval)[:, 0] == 0) > 0.95


def test_level_of_a_small_sample():
    p, _ = many(20, doubly_robust)
    assert share(p) <= MOST and np.mean(np.isnan(p)) < 0.1  # fewer than 6 points of an arm


def test_level_with_a_fast_confounder():
    """Half the median distance hides it: both regressions choose less."""

    def one(key):
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (200, 1))
        cause = jnp.sin(6 * x[:, 0])
        treated = jax.random.bernoulli(keys[1], jax.nn.sigmoid(1.5 * cause))
        y = cause + jax.random.normal(keys[2], (200,)) / 2
        return treatment_effect_test(None, x, treated, y, key=keys[3], landmarks=30).p_value

    p = jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(KEY, 20))
    assert share(p) <= 0.25


@pytest.mark.parametrize(("shift", "spread"), [(1.0, 1.0), (0.0, 6.0)])
def test_power(shift, spread):
    """A shift of the mean, and a change of the variance alone."""
    p, interval = many(120, doubly_robust, 80, strength=0.5, shift=shift, spread=spread)
    assert share(p) > 0.8
    # The squared distance from many draws of both outcomes.
    x, _, y0 = sample(4000)
    treated = jax.random.normal(jax.random.key(9), (4000,)) * spread / 2
    y1 = x[:, 0] + jnp.sin(2 * x[:, 0]) + treated + shift
    truth = kbr.embedding.squared_mmd(kbr.embed(G, y1), kbr.embed(G, y0), unbiased=True)
    inside = (interval[:, 0] <= truth) & (truth <= interval[:, 1])
    assert np.mean(np.asarray(inside)) > 0.88


# ---- edges


def test_labels_tuples_and_other_features():
    x = (X, jnp.asarray(RNG.integers(0, 3, 30)))
    y = jnp.asarray(RNG.integers(0, 2, 30))
    found = treatment_effect_test(None, x, np.asarray(A).astype(int), y, key=KEY)
    assert 0 < found.p_value < 1 and isinstance(found.kernels[0], kbr.kernels.Delta)
    frequencies = kbr.features.random_fourier(G, X, rank=20, key=KEY)
    found = treatment_effect_test(G, X, A, Y, key=KEY, kernel_x=G, landmarks=frequencies)
    assert 0 < found.p_value < 1


@pytest.mark.filterwarnings("ignore:The kernel of `y` is 1")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_outcomes_that_agree(dtype):
    found = treatment_effect_test(G, X.astype(dtype), A, jnp.full(30, 0.3, dtype), key=KEY)
    close(found.p_value, 0.5)
    assert found.p_value.dtype == dtype and abs(found.effect) < 1e-5


def test_float32():
    single = treatment_effect_test(
        G, X.astype(jnp.float32), A, Y.astype(jnp.float32), key=KEY, kernel_x=G, landmarks=8
    )
    assert single.p_value.dtype == single.interval.dtype == jnp.float32
    assert np.isfinite(single.statistic)


def test_under_jit_and_vmap():
    def p(treated):
        return treatment_effect_test(G, X, treated, Y, key=KEY, landmarks=8).p_value

    batch = jnp.stack([A, ~A])
    close(jax.jit(jax.vmap(p))(batch), [p(one) for one in batch], 1e-5)
    assert np.isnan(jax.jit(p)(jnp.arange(30) < 2))
    assert np.isnan(jax.jit(p)(jnp.arange(30)))


def test_a_warning_without_overlap():
    treated = X[:, 0] > 0
    with pytest.warns(UserWarning, match=r"of the propensities are at their bounds"):
        treatment_effect_test(G, X, treated, Y, key=KEY, kernel_x=G)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treatment_effect_test(G, X, jnp.arange(30) % 2, Y, key=KEY, kernel_x=G)


def test_errors():
    def call(x=X, treatment=A, y=Y, **options):
        return treatment_effect_test(G, x, treatment, y, key=KEY, **options)

    with pytest.raises(ValueError, match="pairs need the same number"):
        call(y=Y[:20])
    with pytest.raises(ValueError, match="a label for each of 30 points"):
        call(treatment=A[:20])
    with pytest.raises(ValueError, match="booleans, or 0 and 1"):
        call(treatment=jnp.where(A, 1, -1))
    with pytest.raises(ValueError, match="2 points of an arm, of 30: the test needs 6"):
        call(treatment=jnp.arange(30) < 2)
    with pytest.raises(ValueError, match="`arms` must be two labels"):
        call(arms=(0, 1, 2))
    with pytest.raises(ValueError, match="`arms` must be two different labels"):
        call(arms=(1, 1))
    with pytest.raises(ValueError, match="`y` contains NaN"):
        call(y=Y.at[0].set(jnp.nan))
    with pytest.raises(ValueError, match="`num_folds` must be at least 2"):
        call(num_folds=1)
    with pytest.raises(ValueError, match="`landmarks` must be a rank"):
        call(landmarks=None)


def test_arms_that_are_no_labels():
    x, y = jnp.arange(40.0), jnp.ones(40)
    labels = jnp.arange(40) % 2
    with pytest.raises(ValueError, match=r"`arms` holds 1.7, which is no label of int"):
        kbr.hypotheses.treatment_effect_test(
            None, x, labels, y, arms=(0, 1.7), key=jax.random.key(0)
        )


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_a_linear_kernel_far_from_the_origin(offset):
    x, treated, y = sample(200, shift=1.0)
    x, y = x.astype(jnp.float32), (y + offset).astype(jnp.float32)
    found = treatment_effect_test(kbr.Linear(), x, treated, y, key=KEY)
    assert float(found.p_value) < 1e-6 and 0.3 < float(found.effect) < 2
    same = treatment_effect_test(kbr.Linear(), x, treated, 0 * y + offset, key=KEY)
    assert float(same.p_value) == 0.5
