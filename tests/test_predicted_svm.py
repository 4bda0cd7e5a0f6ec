"""Classifiers of predicted distributions.

The exact case, general-purpose optimizers, finite differences.
"""

import json
import pathlib

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from helpers import check_gradient, closeness
from sklearn.svm import LinearSVC

import kbr_jax as kbr

CASE = json.loads((pathlib.Path(__file__).parent / "reference_cases.json").read_text())[
    "distributions"
]["9_predsvm"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2))
CLASSES = np.where(X[:, 0] + 0.5 * RNG.normal(size=40) > 0.3, 7, 4)
THREE = np.digitize(X[:, 0] + 0.3 * RNG.normal(size=40), [-0.5, 0.5])
WEIGHTS = RNG.normal(size=40) / 40 + 1 / 40


close = closeness(0.0, 1e-8, "atol")


def fit(labels=CLASSES, weights=WEIGHTS, penalty=5.0, **options):
    return kbr.dynamics.fit_predicted_svm(
        jnp.asarray(X), jnp.asarray(labels), jnp.asarray(weights), penalty=penalty, **options
    )


def reference_sample():
    x = np.concatenate([points for points, _ in CASE["sets"]])
    labels = np.concatenate([labels for _, labels in CASE["sets"]])
    sizes = [len(points) for points, _ in CASE["sets"]]
    return x, labels, np.repeat(np.asarray(CASE["beta"]) / sizes, sizes)


def test_flipped_labels():
    _, labels, weights = reference_sample()
    flipped, size = kbr.dynamics.flip_labels(labels, weights)
    close(flipped, CASE["flipped_labels"], 0)
    close(size, CASE["weights"], 1e-15)
    flipped, size = np.asarray(flipped), np.asarray(size)
    # The weighted 0/1 loss of any classifier changes by the constant only.
    for guess in (np.ones(7), -np.ones(7), flipped):
        before, after = weights @ (guess != labels), size @ (guess != flipped)
        close(before - after, CASE["constant_of_flip"], 1e-12)


@pytest.mark.parametrize("penalty", [1, 10])
def test_hinge_of_scikit_learn(penalty):
    x, labels, weights = reference_sample()
    linear = LinearSVC(
        C=penalty, loss="hinge", fit_intercept=False, tol=1e-12, max_iter=1_000_000, dual="auto"
    )
    flipped, size = map(np.asarray, kbr.dynamics.flip_labels(labels, weights))
    w = linear.fit(x, flipped, sample_weight=size).coef_[0]
    close(w, CASE[f"w (no bias) C={penalty}"], 1e-6)
    flipped, size = CASE["flipped_labels"], CASE["weights"]
    loss = w @ w / 2 + penalty * np.sum(size * np.maximum(0, 1 - flipped * (x @ w)))
    close(loss, CASE[f"objective C={penalty}"], 1e-6)


def objective(parameters, coordinates, labels, penalty):
    margins = labels * np.sign(WEIGHTS) * (coordinates @ parameters[:-1] + parameters[-1])
    return parameters[:-1] @ parameters[:-1] / 2 + penalty * np.sum(
        np.abs(WEIGHTS) * np.maximum(0, 1 - margins) ** 2
    )


@pytest.mark.parametrize("kernel", [None, kbr.Gaussian(1.0)])
def test_squared_hinge_is_minimized(kernel):
    svm = fit(kernel=kernel, landmarks=5 if kernel else None)
    assert np.all(svm.converged)
    coordinates = X if svm.features is None else np.asarray(svm.features.matrix)
    labels = np.where(CLASSES == 7, 1, -1)
    best = scipy.optimize.minimize(
        objective,
        np.zeros(coordinates.shape[1] + 1),
        (coordinates, labels, 5.0),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    close(np.append(svm.coefficients[0], svm.intercepts), best.x, 2e-5)
    values = kbr.dynamics.decision_values(svm, jnp.asarray(X))[:, 0]
    close(values, coordinates @ best.x[:-1] + best.x[-1], 5e-5)
    np.testing.assert_array_equal(
        kbr.dynamics.classify(svm, jnp.asarray(X)), np.where(values > 0, 7, 4)
    )


@pytest.mark.parametrize("seed", [13, 33, 46, 3])
def test_converged_is_the_minimum(seed):
    # Seeds where Newton's full step goes too far (the points that a damped one has inside are the
    # same as before), and one other.
    draw = np.random.default_rng(seed)
    x, _, labels = (
        draw.normal(size=(12, 5)),
        draw.normal(size=(12, 1)),
        draw.choice([-1.0, 1.0], 12),
    )
    svm = kbr.dynamics.fit_predicted_svm(
        jnp.asarray(x), jnp.asarray(labels), jnp.full(12, 1 / 12), penalty=1e3
    )
    assert np.all(svm.converged)
    w, b = np.asarray(svm.coefficients[0]), float(svm.intercepts[0])
    # The gradient, which vanishes nowhere else: the problem is convex. The value at the center is
    # penalized by 5e-7 of its square.
    slopes = 2e3 / 12 * np.maximum(1 - labels * (x @ w + b), 0) * labels
    trace = 1e-6 * (b + x.mean(0) @ w)
    close(w + trace * x.mean(0), slopes @ x, 1e-7)
    close(trace, slopes.sum(), 1e-7)


def test_squared_hinge_of_scikit_learn_without_intercept():
    linear = LinearSVC(C=5.0, fit_intercept=False, tol=1e-10, max_iter=100_000)
    flipped, size = kbr.dynamics.flip_labels(np.where(CLASSES == 7, 1, -1), WEIGHTS)
    linear.fit(X, np.asarray(flipped), sample_weight=np.asarray(size))
    close(fit(intercept=False).coefficients, linear.coef_, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("units", [(1e4, 1e4), (1.0, 1e5)])
def test_units_of_coordinates(units, dtype):
    x, y = jnp.asarray(X, dtype), jnp.asarray(CLASSES)
    weights, scale = jnp.full(40, 1 / 40, dtype), jnp.asarray(units, dtype)
    large = kbr.dynamics.fit_predicted_svm(x * scale, y, weights, penalty=1e3 / units[0] ** 2)
    assert bool(large.converged[0])
    if units[0] == units[1]:  # the same problem
        plain = kbr.dynamics.fit_predicted_svm(x, y, weights, penalty=1e3)
        np.testing.assert_allclose(large.coefficients * scale, plain.coefficients, rtol=2e-3)
        np.testing.assert_allclose(large.intercepts, plain.intercepts, rtol=2e-3)
    double = kbr.dynamics.fit_predicted_svm(
        np.asarray(x, np.float64) * np.asarray(units),
        y,
        np.full(40, 1 / 40),
        penalty=1e3 / units[0] ** 2,
    )
    np.testing.assert_allclose(large.coefficients, double.coefficients, rtol=1e-3)


def test_several_classes_one_against_the_rest():
    svm, weights = fit(THREE, kernel=kbr.Gaussian(0.8)), jnp.asarray(WEIGHTS)
    assert svm.coefficients.shape == (3, 40)
    for c in range(3):
        own = kbr.dynamics.fit_predicted_svm(
            jnp.asarray(X),
            jnp.asarray(THREE == c).astype(int),
            weights,
            penalty=5.0,
            kernel=kbr.Gaussian(0.8),
        )
        close(
            kbr.dynamics.decision_values(svm, jnp.asarray(X))[:, c],
            kbr.dynamics.decision_values(own, jnp.asarray(X))[:, 0],
        )


def test_padding_of_weight_zero_changes_nothing():
    x = jnp.concatenate([jnp.asarray(X), jnp.full((3, 2), 50.0)])
    labels, weights = (
        jnp.append(jnp.asarray(CLASSES), jnp.asarray([4, 7, 4])),
        jnp.append(jnp.asarray(WEIGHTS), jnp.zeros(3)),
    )
    padded = kbr.dynamics.fit_predicted_svm(x, labels, weights, penalty=5.0)
    close(padded.coefficients, fit().coefficients, 1e-10)


def test_gradients_by_finite_differences():
    @jax.jit
    def loss(p):
        svm = kbr.dynamics.fit_predicted_svm(
            jnp.asarray(X),
            jnp.asarray(CLASSES),
            p["weights"],
            penalty=p["penalty"],
            kernel=kbr.Gaussian(p["bandwidth"]),
            landmarks=kbr.Landmarks(jnp.asarray(X[:6])),
            classes=jnp.asarray([4, 7]),
        )
        return jnp.sum(jnp.sin(kbr.dynamics.decision_values(svm, jnp.asarray(X[:4]))))

    parameters = {
        "weights": jnp.asarray(WEIGHTS),
        "penalty": jnp.asarray(5.0),
        "bandwidth": jnp.asarray(0.9),
    }
    entries = (0, 1, 5, 20, jax.flatten_util.ravel_pytree(parameters)[0].size - 1)
    check_gradient(loss, parameters, entries=entries, rtol=2e-6, atol=1e-8)


def test_nan_and_unknown_labels_are_not_trained_on():
    x, labels, weights = jnp.arange(4.0)[:, None], jnp.asarray([0, 1, 0, 1]), jnp.ones(4) / 4

    def train(weights, labels=labels):
        return kbr.dynamics.fit_predicted_svm(
            x, labels, weights, penalty=1.0, classes=jnp.arange(2)
        )

    with pytest.raises(ValueError, match="NaN"):
        train(weights.at[0].set(jnp.nan))
    with pytest.raises(ValueError, match="5, which is not among"):
        train(weights, labels.at[0].set(5))
    assert not jax.jit(train)(weights.at[0].set(jnp.nan)).converged[0]


def test_nan_in_the_points_of_a_linear_classifier():
    x = jnp.ones((6, 2)).at[2, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="`x` contains NaN"):
        kbr.dynamics.fit_predicted_svm(x, jnp.arange(6) % 2, jnp.ones(6), penalty=1.0)


@pytest.mark.parametrize("classes", [[0.0, 1.7], [0, 1, 1]])
def test_classes_are_different_labels(classes):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 1)))
    with pytest.raises(ValueError, match="must be different labels"):
        kbr.dynamics.fit_predicted_svm(
            x, jnp.arange(6) % 2, jnp.ones(6), penalty=1.0, classes=jnp.asarray(classes)
        )


@pytest.mark.parametrize(("dtype", "offset"), [("float64", 1e4), ("float32", 1e3)])
def test_the_classifier_does_not_depend_on_the_origin(dtype, offset):
    rng = np.random.default_rng(0)
    labels = np.arange(100) % 2
    x = rng.normal(size=100) + 2.0 * labels
    fits = [
        kbr.dynamics.fit_predicted_svm(
            jnp.asarray(x + by, dtype), labels, jnp.full(100, 0.01, dtype), penalty=1.0
        )
        for by in (0.0, offset)
    ]
    near, far = (fit.coefficients for fit in fits)
    np.testing.assert_allclose(far, near, rtol=1e-8 if dtype == "float64" else 1e-3)


def test_points_of_another_kind_are_refused():
    svm = fit(kernel=kbr.Gaussian(0.7))
    for x in (X[:3, :1], np.concatenate([X[:3], X[:3]], axis=1)):
        with pytest.raises(ValueError, match="`x`"):
            kbr.dynamics.classify(svm, x)
