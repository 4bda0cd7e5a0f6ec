"""Conditional independence: regressions in plain NumPy, level and power, what is trusted."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import kbr_jax as kbr
from kbr_jax.hypotheses import _conditional, _regressions
from kbr_jax.hypotheses._regressions import RIDGES, regress, scores, smoother

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
G = kbr.Gaussian(1.0)
ci_test = kbr.hypotheses.conditional_independence_test
pytestmark = pytest.mark.filterwarnings("ignore:The regressions on")


def test_a_regression_against_its_definition():
    features, targets = RNG.normal(size=(12, 4)), RNG.normal(size=(12, 2))
    candidates = jax.tree.map(lambda leaf: leaf[None], smoother(jnp.asarray(features)))
    found = regress(candidates, jnp.asarray(targets))
    # The features keep the center of the whole sample, and the intercept is free.
    design = np.column_stack([features - np.mean(features, axis=0), np.ones(12)])

    def errors(ridge):
        penalty = np.diag([ridge] * 4 + [0.0])
        result = []
        for i in range(12):
            kept = np.arange(12) != i
            normal = design[kept].T @ design[kept] + penalty
            result.append(
                targets[i] - design[i] @ np.linalg.solve(normal, design[kept].T @ targets[kept])
            )
        return np.array(result)

    losses = [np.mean(np.sum(errors(ridge) ** 2, axis=1)) for ridge in RIDGES]
    np.testing.assert_allclose(found.loss, np.min(losses), rtol=1e-8)
    np.testing.assert_allclose(found.ridge, RIDGES[np.argmin(losses)])
    np.testing.assert_allclose(found.left_out(), errors(float(found.ridge)), rtol=1e-7)
    means = [targets[i] - np.mean(np.delete(targets, i, axis=0), axis=0) for i in range(12)]
    np.testing.assert_allclose(found.total, np.mean(np.sum(np.square(means), axis=1)))


def test_the_statistic_and_its_null_against_their_definitions():
    """With kernels of labels, features are of the points themselves."""
    n = 40
    z = RNG.normal(size=(n, 1))
    x, y = (np.asarray(z[:, 0] + RNG.normal(size=n) > 0, int) for _ in range(2))
    found = ci_test(None, None, kbr.Gaussian(0.7), x, y, jnp.asarray(z), key=KEY, num_draws=400)
    center = np.eye(n) - 1 / n
    gram = center @ np.asarray(kbr.gram(kbr.Gaussian(0.7), z)) @ center

    def left(labels):
        features = center @ (labels[:, None] == np.arange(2))

        def loss(ridge):
            residual = center - gram @ np.linalg.inv(gram + ridge * np.eye(n))
            errors = residual @ features / np.diag(residual)[:, None]
            return np.mean(np.sum(errors**2, axis=1)), residual

        residual = min((loss(ridge) for ridge in RIDGES), key=lambda pair: pair[0])[1]
        return residual, residual @ features

    (rx, phi), (ry, psi) = left(x), left(y)
    rows = jax.random.permutation(jax.random.split(KEY, 3)[0], n)[:200]
    omega = np.asarray(_conditional._weights(jnp.asarray(z), rows))
    assert np.all(omega[:, 0] == 1)
    np.testing.assert_allclose(np.sum(omega[:, 1:] ** 2) / n, 1)
    products = (phi @ phi.T) * (psi @ psi.T) * (omega @ omega.T)
    np.testing.assert_allclose(found.statistic, np.sum(products) / n, rtol=1e-6)
    freedom = np.trace(rx @ rx @ ry @ ry) / np.sum(np.diag(rx @ rx) * np.diag(ry @ ry))
    expected, spread = np.trace(products) / n, products - np.diag(np.diag(products))
    spread = np.sqrt(2 * np.sum(spread**2)) / n
    scale = max(freedom, 1)
    assert abs(np.mean(found.null) / scale - expected) < 4 * spread / np.sqrt(400)
    np.testing.assert_allclose(np.std(found.null) / scale, spread, rtol=0.3)
    cross = np.sum((phi.T @ psi) ** 2)
    sizes = np.sum((phi.T @ phi) ** 2) * np.sum((psi.T @ psi) ** 2)
    np.testing.assert_allclose(found.effect, cross / np.sqrt(sizes), rtol=1e-6)


def triples(key, n, shared=0.0, curved=True):
    """The setting in which regressions by a fixed bandwidth and ridge failed."""
    first, second, third = jax.random.split(key, 3)
    z = jax.random.normal(first, (n, 3))
    f, s = jnp.sum(z, axis=1) / np.sqrt(3), shared * jax.random.normal(second, (n,))
    noise = 0.3 * jax.random.normal(third, (2, n))
    x = jnp.sin(2 * f) if curved else f
    return (x + s + noise[0])[:, None], (f + s + noise[1])[:, None], z


def labels(key, n):
    x, y, z = triples(key, n, curved=False)
    return (x[:, 0] > 0).astype(int), y, z


def mixed(key, n):
    """How x and y follow z changes with a label in z."""
    x, y, z = triples(key, n, curved=False)
    group = jnp.arange(n) % 2
    return jnp.where(group[:, None] > 0, x, -x), y, (z, group)


def heavy(key, n):
    x, y, z = triples(key, n, curved=False)
    noise = jax.random.cauchy(jax.random.fold_in(key, 1), (2, n, 1))
    return x + noise[0], y + noise[1], z


def rejections(make, count, n, **options):
    own, draws = jax.random.split(KEY, (2, count))
    data = jax.vmap(lambda key: make(key, n, **options))(draws)
    return int(np.sum(np.asarray(_p_values(own, data)) <= 0.05))


@jax.jit
def _p_values(keys, data):
    def one(row):
        key, triple = row
        return ci_test(None, None, None, *triple, key=key, num_draws=99).p_value

    return jax.lax.map(one, (keys, data))


@pytest.mark.parametrize("make", [triples, labels, mixed, heavy])
def test_the_level_is_kept(make):
    assert rejections(make, 200, 30) <= scipy.stats.binom.ppf(0.999, 200, 0.05)


def test_dependence_is_found():
    assert rejections(triples, 40, 100, shared=0.7) >= 36


def test_what_the_result_says():
    x, y, z = triples(KEY, 100, curved=False)
    found = ci_test(None, None, None, x, y, z, key=KEY)
    assert 0.85 < found.explained[0] < 1 and found.bias < 2
    assert "z predicts 9" in str(found) and "trust" not in str(found)
    many = jax.random.normal(KEY, (60, 10))
    f = jnp.sin(2 * jnp.sum(many, axis=1, keepdims=True) / np.sqrt(10))
    x, y = f + 0.1 * x[:60], f + 0.1 * y[:60]
    with pytest.warns(UserWarning, match="more triples"):
        found = ci_test(None, None, None, x, y, many, key=KEY)
    assert found.bias > 2 and "do not trust" in str(found)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_degenerate_samples(dtype):
    n = 20
    z, noise = (jnp.asarray(RNG.normal(size=(n, 1)), dtype) for _ in range(2))
    constant, same = jnp.full((n, 1), 0.1, dtype), jnp.arange(n) % 2
    cases: list[tuple[Any, Any, Any, bool]] = [
        (constant, noise, z, True),
        (z, noise, z, True),  # z determines x
    ]
    if dtype == jnp.float64:  # labels have the precision of the session
        cases += [
            (noise, z, constant, False),
            (noise[:4], z[:4], z[:4] ** 2, False),
            (noise, same, (z, same), True),
            ((noise, same), z, same, False),
        ]
    for x, y, given, certain in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ci_test(None, None, None, x, y, given, key=KEY, num_draws=99)
        assert found.p_value.dtype == dtype
        assert 0 < found.p_value <= 1 and np.all(np.isfinite(found.null))
        assert np.isfinite(found.bias) and np.all(np.isfinite(found.explained))
        if certain:
            assert found.p_value > 0.2


def test_kernels_that_are_given():
    x, y, z = triples(KEY, 50)
    kernels = kbr.Linear(), G, kbr.Linear()
    assert 0 < ci_test(*kernels, x, y, z, key=KEY, num_draws=99).p_value <= 1


def test_multiples_and_sums_of_a_kernel_are_seen_at_residuals_too():
    x, y, z = triples(KEY, 50)
    expected = ci_test(G, None, None, x, y, z, key=KEY, num_draws=99)
    for kernel, points in (
        (2 * G, x),
        (G + G, x),
        (kbr.TensorProduct((G, kbr.Delta())), (x, jnp.zeros(50, int))),
    ):
        found = ci_test(kernel, None, None, points, y, z, key=KEY, num_draws=99)
        np.testing.assert_allclose(found.explained, expected.explained, rtol=1e-6)
        assert found.p_value == expected.p_value


def test_the_metric_of_z_is_learned_with_the_given_kernels():
    z, noise = RNG.normal(size=(2, 60, 2))
    labels = jnp.asarray(z[:, 0] + noise[:, 0] > 0, int)
    y, z = jnp.asarray(noise[:, 1] + z[:, 0]), jnp.asarray(z)
    expected = ci_test(kbr.Delta(), None, None, labels, y, z, key=KEY)
    given = kbr.Precomputed(kbr.gram(kbr.Delta(), labels))
    trees = (lambda a, b: jnp.where(a["c"] == b["c"], 1.0, 0.0)), {"c": labels}
    for kernel, points in ((given, jnp.arange(60)), trees):
        found = ci_test(kernel, None, None, points, y, z, key=KEY)
        np.testing.assert_allclose(found.null, expected.null, rtol=1e-6)


def test_few_points_and_few_features_have_one_statistic():
    """Products of features, or of their Gram matrices, whichever are fewer."""
    n, rows = 40, jnp.arange(40)
    targets, basis, numbers = (jnp.asarray(RNG.normal(size=(n, 2))) for _ in range(3))
    fitted = regress(jax.tree.map(lambda leaf: leaf[None], smoother(basis)), targets)
    parts = [
        _conditional._Part(
            [fitted], jnp.asarray(RNG.normal(size=(n, 2))), jnp.ones(()), jnp.ones(())
        )
        for _ in range(2)
    ]
    wide = [eqx.tree_at(lambda p: p.left, p, jnp.pad(p.left, ((0, 0), (0, 5)))) for p in parts]
    found, padded = (
        _conditional._compared(each, numbers, rows, KEY, 50, None)[0] for each in (parts, wide)
    )
    for a, b in zip(found, padded, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_batches_and_gradients():
    x, y, z = triples(KEY, 30)

    def statistic(x):
        return ci_test(None, None, None, x, y, z, key=KEY, num_draws=9).statistic

    found = jax.vmap(jax.value_and_grad(statistic))(jnp.stack([x, 2 * x + 1]))
    np.testing.assert_allclose(found[0][0], found[0][1], rtol=1e-6)  # scale and origin: no matter
    np.testing.assert_allclose(found[1][0], 2 * found[1][1], rtol=1e-4, atol=1e-6)
    assert np.all(np.isfinite(found[1]))


def test_parts_of_a_tuple_may_stand_in_any_order():
    rng = np.random.default_rng(0)
    z, e, *noise = rng.normal(size=(4, 60))
    driven, y = (jnp.asarray(np.sin(3 * z) + 0.2 * part) for part in noise)
    test = kbr.hypotheses.conditional_independence_test
    options = {"key": jax.random.key(0), "num_draws": 99}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = (
            test(None, None, None, x, y, jnp.asarray(z), **options)
            for x in ((jnp.asarray(e), driven), (driven, jnp.asarray(e)))
        )
    for name in ("statistic", "p_value", "explained", "bias"):
        np.testing.assert_allclose(getattr(first, name), getattr(second, name), rtol=1e-6)


def test_labels_of_many_values_are_all_told_apart():
    z = jnp.asarray(np.random.default_rng(0).permutation(300) % 40)
    rows = jnp.arange(200)
    count = _conditional._components((z, jnp.ones(300)), 200)
    numbers = np.asarray(_conditional._numbers(z, rows, jnp.float64, count))
    indicators = np.eye(40)[np.asarray(z)]
    indicators = indicators - indicators.mean(0)
    fitted = numbers @ np.linalg.lstsq(numbers, indicators, rcond=None)[0]
    assert count == 40
    assert np.abs(fitted - indicators).max() < 1e-6


def test_lists_and_landmarks():
    z, a, b = np.random.default_rng(0).normal(size=(3, 40))
    options = {"key": jax.random.key(0), "num_draws": 50, "landmarks": 20}
    found = [
        kbr.hypotheses.conditional_independence_test(None, None, None, z + a, z + b, one, **options)
        for one in (z, z.tolist())
    ]
    assert found[0].p_value == found[1].p_value


def test_normal_scores_of_heavy_tails():
    rng = np.random.default_rng(0)
    columns = np.stack([rng.standard_cauchy(100), rng.normal(size=100)], axis=1)
    columns[1, 0] = columns[0, 0]
    found = np.asarray(scores(jnp.asarray(columns)))
    assert list(_regressions.heavy(jnp.asarray(columns))) == [True, False]
    ranks = scipy.stats.rankdata(columns[:, 0])
    np.testing.assert_allclose(found[:, 0], scipy.stats.norm.ppf((ranks - 0.5) / 100), rtol=1e-6)
    np.testing.assert_array_equal(found[:, 1], columns[:, 1])


def test_the_level_with_heavy_tails_in_z():
    """Without normal scores 7 of these 40 true hypotheses are rejected, and 1 with them."""
    rng = np.random.default_rng(1)
    z = rng.standard_cauchy((40, 200))
    x, y = (np.tanh(z) + 0.5 * rng.normal(size=z.shape) for _ in range(2))
    keys = jax.random.split(jax.random.key(0), 40)

    @jax.jit
    def p_values(x, y, z, keys):
        def one(row):
            x, y, z, key = row
            return kbr.hypotheses.conditional_independence_test(
                None, None, None, x, y, z, key=key, num_draws=99, landmarks=50
            ).p_value

        return jax.lax.map(one, (x, y, z, keys))

    assert np.sum(np.asarray(p_values(*map(jnp.asarray, (x, y, z)), keys)) <= 0.05) <= 5


def test_the_level_where_each_column_of_z_adds_something():
    """Without an additive kernel all of these 20 true hypotheses are rejected."""

    def sums(key, n):
        first, second = jax.random.split(key)
        z, noise = jax.random.normal(first, (n, 5)), 0.3 * jax.random.normal(second, (2, n, 1))
        waves = jnp.sum(jnp.sin(2.5 * z), axis=1, keepdims=True) / np.sqrt(5)
        return waves + noise[0], waves + jnp.sum(z, axis=1, keepdims=True) / 2 + noise[1], z

    assert rejections(sums, 20, 300) <= 4


def test_the_additive_smoother_against_its_definition():
    z, rows = RNG.normal(size=(30, 3)), np.arange(12)
    targets = RNG.normal(size=(30, 1))
    targets -= np.mean(targets)
    found = _regressions.learned_smoothers(jnp.asarray(z), jnp.asarray(rows), jnp.asarray(targets))
    z = (z - np.mean(z, axis=0)) / np.std(z, axis=0)
    near = np.exp(-((z[:, None] - z[rows]) ** 2) / 2).mean(axis=2)
    gram = near @ np.linalg.solve(near[rows] + 1e-12 * np.eye(12), near.T) + z @ z.T / 3
    center = np.eye(30) - 1 / 30
    basis = np.asarray(found.basis[1])
    np.testing.assert_allclose(basis @ basis.T, center @ gram @ center, atol=1e-6)
