"""Forecasts in moved form, and the estimators of scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.utils.estimator_checks import check_estimator

import kbr_jax as kbr
from kbr_jax.learning import _conditional, _forecast, learn_forecast
from kbr_jax.learning._forecast import LEAST_SCALE, located_forecast
from kbr_jax.sklearn import ConditionalEmbeddingClassifier, ConditionalEmbeddingRegressor
from kbr_jax.tuning._leave_out import restored_weights

N = 150


@pytest.fixture(scope="module")
def fast():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TRIALS", 8), ("REFINEMENTS", 4), ("STEPS", 4)):
            patch.setattr(_conditional, name, value)
        yield


def pairs(n, seed=0):
    """Location and scale that move with x."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 1))
    return x, 2 * x[:, 0] + (0.2 + 0.3 * (x[:, 0] + 2)) * rng.normal(size=n)


@pytest.fixture(scope="module")
def learned(fast):
    x, y = pairs(N)
    return learn_forecast(jnp.asarray(x), jnp.asarray(y), progress=False)


def test_atoms_and_weights_by_hand():
    x, y = pairs(20)
    kernel, ridge = kbr.Gaussian(1.0), 1e-2

    def regress(values, rows, at):
        gram = np.asarray(kernel.gram(jnp.asarray(x[rows]), jnp.asarray(x[rows])))
        column = np.asarray(kernel.gram(jnp.asarray(x[rows]), jnp.asarray(at)[None]))[:, 0]
        return np.linalg.solve(gram + len(rows) * ridge * np.eye(len(rows)), column), values[rows]

    def left_out(values):
        found = []
        for i in range(20):
            rows = np.delete(np.arange(20), i)
            weights, rest = regress(values - values.mean(), rows, x[i])
            found.append(values.mean() + weights @ rest)
        return np.array(found)

    residuals = y - left_out(y)
    sizes = np.abs(residuals)
    scale = np.maximum(left_out(sizes), LEAST_SCALE * sizes.mean())
    shape = residuals / scale
    at = np.array([0.4])
    weights, _ = regress(y, np.arange(20), at)
    own = weights / max(weights.sum(), 0.5)
    rest = (1 - own.sum()) / 20
    center = (own + rest) @ y
    size = max((own + rest) @ sizes, LEAST_SCALE * sizes.mean())

    forecast = located_forecast(
        lambda values: kbr.fit_conditional(kernel, None, jnp.asarray(x), values, regularizer=ridge),
        jnp.asarray(y),
    )
    found = forecast(jnp.asarray(at))
    shares = own + rest
    moved = center + size * (shape - shares @ shape)
    np.testing.assert_allclose(found.points[:20], moved, rtol=1e-6)
    np.testing.assert_allclose(found.points[20:], center + y - y.mean())
    expected = np.r_[own.sum() * shares, np.full(20, rest)]
    np.testing.assert_allclose(found.weights, expected, atol=1e-9)
    np.testing.assert_allclose(found.weights.sum(), 1)
    np.testing.assert_allclose(kbr.mean(found), center)


def test_intervals_hold_what_they_say(learned):
    forecast, report = learned
    new_x, new_y = pairs(400, 1)
    low, high = jax.lax.map(lambda p: kbr.credible_interval(forecast(p), 0.8), jnp.asarray(new_x))
    inside = (low <= new_y) & (new_y <= high)
    assert abs(float(jnp.mean(inside)) - 0.8) < 0.1
    for half in (new_x[:, 0] < 0, new_x[:, 0] > 0):  # the scale is followed
        assert abs(float(jnp.mean(inside[half])) - 0.8) < 0.15
    assert forecast.shape is not None and "location" in report.chosen["form"]
    assert report.errors["location, scale and shape"] < report.errors["marginal of y"]
    values = jax.lax.map(
        lambda p: kbr.density(
            forecast(p), jnp.linspace(-12, 12, 400), bandwidth=forecast.bandwidth
        ),
        jnp.asarray(new_x[:3]),
    )
    np.testing.assert_allclose(values.sum(1) * 24 / 399, 1, atol=1e-3)


def test_far_from_all_pairs_it_is_the_marginal(learned):
    y = pairs(N)[1]
    far = learned[0](jnp.asarray([1e4]))
    np.testing.assert_allclose(kbr.mean(far), y.mean(), rtol=1e-6)
    np.testing.assert_allclose(kbr.std(far), y.std(), rtol=1e-6)


def test_values_that_repeat_stay_where_they_are(fast):
    x, y = pairs(N)
    counts = jnp.asarray(np.round(y))
    forecast, report = learn_forecast(jnp.asarray(x), counts, progress=False)
    assert forecast.shape is None and report.chosen["form"] == "conditional embedding"
    np.testing.assert_array_equal(forecast(jnp.asarray([0.3])).points, counts)


def test_exact_functions_and_vectors(fast, monkeypatch):
    monkeypatch.setattr(_forecast, "PAIRS", N // 2)
    x, _ = pairs(N)
    y = jnp.asarray(np.concatenate([x, x**2], axis=1))
    forecast, report = learn_forecast(jnp.asarray(x), y, progress=False)
    assert f"The rivals have seen {N // 2} pairs, the forecast {N}." in report.notes
    found = kbr.mean(forecast(jnp.asarray([0.5])))
    np.testing.assert_allclose(found, [0.5, 0.25], atol=0.05)
    with pytest.raises(ValueError, match="one point"):
        forecast(jnp.asarray(x))


def test_estimators_learn(fast):
    x, y = pairs(N)
    regressor = ConditionalEmbeddingRegressor().fit(x, y)
    assert regressor.score(*pairs(100, 1)) > 0.6
    quantiles = regressor.predict_quantiles(x[:5], [0.9, 0.1, 0.5])
    assert quantiles.shape == (5, 3)
    assert np.all(quantiles[:, 1] <= quantiles[:, 2]) and np.all(quantiles[:, 2] <= quantiles[:, 0])
    names = np.where(y > 0, "up", "down")
    classifier = ConditionalEmbeddingClassifier().fit(x, names)
    shares = classifier.predict_proba(x)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert np.all(shares >= 0) and classifier.score(x, names) > 0.8
    with pytest.raises(ValueError, match="or neither"):
        ConditionalEmbeddingRegressor(regularizer=1e-3).fit(x, y)
    with pytest.raises(ValueError, match="`probabilities`"):
        regressor.predict_quantiles(x[:5], 1.5)


@pytest.mark.parametrize(
    "estimator", [ConditionalEmbeddingRegressor, ConditionalEmbeddingClassifier]
)
@pytest.mark.filterwarnings("ignore")  # the checks warn on purpose
def test_checks_of_scikit_learn(estimator):
    found = check_estimator(
        estimator(kernel=kbr.Gaussian(3.0), regularizer=1e-3), on_skip=None, on_fail=None
    )
    failed = [one["check_name"] for one in found if one["status"] == "failed"]
    assert not failed


@pytest.mark.parametrize("kind", [int, float])
def test_estimators_take_kernels_of_labels(kind):
    """A Gram matrix of one's own, as in a grid search over kernels."""
    x = np.random.default_rng(0).normal(size=(40, 1))
    kernel = kbr.Precomputed(np.exp(-((x - x.T) ** 2) / 2))
    rows = np.arange(40, dtype=kind)[:, None]
    options = {"regularizer": 1e-3}
    own = ConditionalEmbeddingRegressor(kernel=kernel, **options).fit(rows[:30], x[:30, 0])
    same = ConditionalEmbeddingRegressor(kernel=kbr.Gaussian(1.0), **options)
    same = same.fit(x[:30], x[:30, 0])
    np.testing.assert_allclose(own.predict(rows[30:]), same.predict(x[30:]), rtol=1e-6)
    classifier = ConditionalEmbeddingClassifier(kernel=kernel, **options)
    classifier = classifier.fit(rows[:30], x[:30, 0] > 0)
    assert classifier.score(rows[30:], x[30:, 0] > 0) > 0.8
    with pytest.raises(ValueError, match="must be one column of integers"):
        own.predict(rows + 0.5)
    with pytest.raises(ValueError, match="must be one column of integers"):
        ConditionalEmbeddingRegressor(kernel=kernel, **options).fit(np.c_[rows, rows], x[:, 0])


def test_probabilities_far_from_all_rows():
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, size=(60, 1))
    labels = np.where(np.sin(x[:, 0]) + rng.normal(size=60) / 3 > -0.5, "yes", "no")
    model = ConditionalEmbeddingClassifier(kernel=kbr.Gaussian(0.5), regularizer=1e-3)
    far = model.fit(x, labels).predict_proba([[1.5], [20.0], [1e6]])
    np.testing.assert_allclose(far.sum(1), 1)
    shares = [np.mean(labels == name) for name in ("no", "yes")]
    np.testing.assert_allclose(far[1:], [shares, shares], atol=1e-6)
    assert model.predict([[1e6]])[0] == "yes"


def test_between_two_groups_a_forecast_is_the_marginal():
    """Between two groups as beyond them; the mean is that of the first model everywhere."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(np.concatenate([rng.uniform(-1, 1, 40), rng.uniform(9, 11, 40)]))
    y = jnp.where(x > 5, 5, 0) + jnp.sin(3 * x) + 0.1 * jnp.asarray(rng.normal(size=80))

    def fit(values):
        return kbr.fit_conditional(kbr.Gaussian(0.5), None, x, values, regularizer=1e-3)

    forecast = located_forecast(fit, y)
    for place in (0.2, 1.5, 2.0, 5.0, 20.0):
        found = forecast(jnp.asarray(place))
        whole = jnp.add(*restored_weights(forecast.location, jnp.asarray(place)))
        np.testing.assert_allclose(kbr.mean(found), whole @ y, rtol=1e-8)
        np.testing.assert_allclose(found.mass, 1)
    for place in (5.0, 20.0):
        found = forecast(jnp.asarray(place))
        np.testing.assert_allclose(kbr.std(found), jnp.std(y), rtol=1e-3)
        np.testing.assert_allclose(kbr.mean(found), jnp.mean(y), rtol=1e-3)


def test_a_pair_without_others_near_it_has_a_score(fast):
    """It had none, and neither form could be chosen by its scores."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(N, 1))).at[0].set(40.0)
    y = jnp.asarray(np.where(rng.random(N) < 0.5, 2.0, -2.0) + 0.1 * rng.normal(size=N))
    _, report = learn_forecast(x, y, progress=False)
    assert np.all(np.isfinite(list(report.errors.values())))
    plain, moved = (
        report.errors[form][0] for form in ("conditional embedding", "location, scale and shape")
    )
    assert plain < moved and report.chosen["form"] == "conditional embedding"


def test_held_out_forecasts_are_those_of_a_fit_without_the_pair():
    """Scores and levels of both forms, against forecasts from the pairs without one."""
    x, y = (jnp.asarray(part) for part in pairs(30))
    x = x.at[3].set(9.0)

    def fit_to(x):
        return lambda values: kbr.fit_conditional(
            kbr.Gaussian(0.5), None, x, values, regularizer=1e-2
        )

    forecast, unit = located_forecast(fit_to(x), y), jnp.ones(())
    assert forecast.scale is not None and forecast.shape is not None
    rows = jnp.asarray([3, 7, 20])
    plain = _forecast._plain(forecast.location, rows, unit)
    moved = _forecast._moved(forecast, rows, unit)
    for at, i in enumerate(rows):
        keep = np.arange(30) != int(i)
        fit = fit_to(x[keep])
        without = _forecast.Forecast(
            fit(y[keep]), fit(forecast.scale.y[keep]), fit(forecast.shape.y[keep]), unit
        )
        found = without(x[i])
        np.testing.assert_allclose(moved.scores[at], kbr.embedding.energy_score(found, y[i]))
        below = float(kbr.cdf(found, y[i]))
        np.testing.assert_allclose(moved.levels[at], abs(2 * below - 1), atol=1e-6)
        own = _forecast.Forecast(without.location, None, None, unit)(x[i])
        np.testing.assert_allclose(plain.scores[at], kbr.embedding.energy_score(own, y[i]))
