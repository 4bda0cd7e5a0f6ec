"""Warped kernels, explicit feature maps, and how they are trained."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import check_gradient, close_trees, closeness

import kbr_jax as kbr
from kbr_jax.features import DenseGram, ExplicitFeatures
from kbr_jax.kernels import FeatureMap, Linear
from kbr_jax.learning import learn_features
from kbr_jax.tuning import leave_out_loss, spectral_loss

RNG = np.random.default_rng(0)
close = closeness(1e-8, 1e-10)


def network(inputs, outputs, seed=0):
    return eqx.nn.MLP(inputs, outputs, 4, 1, jnp.tanh, jnp.tanh, key=jax.random.key(seed))


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(30, 2))
    return jnp.asarray(x), jnp.asarray(np.sin(x[:, :1]) + 0.1 * rng.normal(size=(30, 1)))


def test_a_warped_identity_is_the_plain_kernel(pairs):
    x, y = pairs
    plain = kbr.Gaussian(0.7)
    warped = kbr.Warped(plain, lambda point: point)
    np.testing.assert_array_equal(warped.gram(x, x + 1), plain.gram(x, x + 1))
    models = [kbr.fit_conditional(k, plain, x, y, regularizer=1e-3) for k in (plain, warped)]
    weights = [kbr.condition(model, x[:3]).weights for model in models]
    np.testing.assert_array_equal(*weights)


def test_a_feature_map_is_its_gram_matrix(pairs):
    x, y = pairs
    net = network(2, 5)
    kernel, exact = FeatureMap(net), kbr.Warped(Linear(), net)
    close(kernel.gram(x, x + 1), exact.gram(x, x + 1))
    close(kernel.diagonal(x), jnp.diagonal(kernel.gram(x, x)))
    close(kernel(x[0], x[1]), kernel.gram(x, x)[0, 1])
    fitted = [
        kbr.fit_conditional(k, kbr.Gaussian(0.5), x, y, regularizer=1e-2) for k in (kernel, exact)
    ]
    assert isinstance(fitted[0].features_x, ExplicitFeatures)
    assert isinstance(fitted[1].features_x, DenseGram)
    close(*[kbr.condition(m, x[:4]).weights for m in fitted])
    close(*[kbr.condition_centered(m, x[:4]).weights for m in fitted])
    close(*[leave_out_loss(m) for m in fitted])
    close(*[kbr.tuning.leave_out_forecasts(m).weights for m in fitted])
    prior = [kbr.embed(m.kernel_x, x[:7]) for m in fitted]
    close(*[kbr.sum_rule(m, p).weights for m, p in zip(fitted, prior, strict=True)])
    for estimator in ("pairs", "importance"):
        close(
            *[
                kbr.bayes_rule(m, p, y[0], regularizer=1e-2, estimator=estimator).weights
                for m, p in zip(fitted, prior, strict=True)
            ],
            1e-6,
        )


def test_padding_and_other_points(pairs):
    x, y = pairs
    mask = np.arange(30) < 20
    kernel = FeatureMap(network(2, 5))
    padded = kbr.fit_conditional(kernel, None, x, y, regularizer=1e-2, mask=mask)
    short = kbr.fit_conditional(kernel, padded.kernel_y, x[:20], y[:20], regularizer=1e-2)
    close(kbr.condition(padded, x[3]).weights[:20], kbr.condition(short, x[3]).weights)
    close(kbr.condition(padded, x[3]).weights[20:], 0)
    close(padded.features_x.at(x).matrix[:20], short.features_x.matrix)


def test_gradients_through_network_landmarks_and_filter():
    """The loss of a filter on observations that a network sees, with landmarks inside."""
    states = jnp.asarray(RNG.normal(size=(12, 1)).cumsum(0))
    seen = jnp.concatenate([jnp.sin(states), jnp.cos(states)], axis=1)
    net = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    numbers, rest = eqx.partition(net, eqx.is_inexact_array)
    landmarks = kbr.uniform_landmarks(states, rank=6, key=jax.random.key(1))

    def loss(parameters):
        warped = kbr.Warped(kbr.Gaussian(1.0), eqx.combine(parameters, rest))
        filt = kbr.fit_filter(
            kbr.Gaussian(1.0),
            warped,
            states,
            seen,
            regularizer=1e-2,
            posterior_regularizer=1e-2,
            landmarks_states=landmarks,
            landmarks_observations=kbr.greedy_landmarks(warped, seen, rank=6),
        )
        return kbr.filter_loss(filt, states[:5], seen[:5])

    check_gradient(loss, numbers, rtol=1e-4, atol=1e-7)


def test_parameters_are_leaves_and_saved(tmp_path):
    kernel = FeatureMap(network(2, 3))
    kbr.save(tmp_path / "kernel", kernel)
    close_trees(
        eqx.filter(kbr.load(tmp_path / "kernel"), eqx.is_array), eqx.filter(kernel, eqx.is_array), 0
    )
    found = kbr.tune(
        lambda k: jnp.mean((k.gram(jnp.ones((1, 2)), jnp.ones((1, 2))) - 1.0) ** 2),
        kernel,
        optax.adam(1e-2),
        num_steps=20,
        progress=False,
    )
    assert found.history.loss[-1] < found.history.loss[0]


def test_spectral_loss_by_its_definition():
    u, v = RNG.normal(size=(2, 9, 3))
    a, b = u - u.mean(0), v - v.mean(0)
    apart = [(a[i] @ b[j]) ** 2 for i in range(9) for j in range(9) if i != j]
    expected = np.mean(apart) - 2 * np.sum(a * b) / 8
    close(spectral_loss(jnp.asarray(u), jnp.asarray(v)), expected)
    spread = sum(np.sum((f.T @ f / 9 - np.eye(3)) ** 2) for f in (a, b)) / 3
    close(spectral_loss(jnp.asarray(u), jnp.asarray(v), penalty=0.1), expected + 0.1 * spread)
    with pytest.raises(ValueError, match="`u` and `v`"):
        spectral_loss(jnp.zeros((1, 3)), jnp.zeros((1, 3)))


def test_spectral_loss_finds_the_singular_values():
    """A table P(x, y): the least loss is minus the sum of the squares, reached by its features."""
    joint = np.array([[0.2, 0.05, 0.05], [0.05, 0.25, 0.05], [0.02, 0.08, 0.25]])
    px, py = joint.sum(1), joint.sum(0)
    left, values, right = np.linalg.svd(joint / np.sqrt(np.outer(px, py)))
    rng = np.random.default_rng(0)
    drawn = rng.choice(9, size=10000, p=joint.ravel())
    u = (left[:, 1:] * np.sqrt(values[1:]) / np.sqrt(px)[:, None])[drawn // 3]
    v = (right.T[:, 1:] * np.sqrt(values[1:]) / np.sqrt(py)[:, None])[drawn % 3]
    # 10 000 pairs: the standard error of the loss is about .02.
    best = float(spectral_loss(jnp.asarray(u), jnp.asarray(v)))
    assert abs(best + np.sum(values[1:] ** 2)) < 0.08
    for other in (0.7 * u, 1.4 * u, u @ np.array([[1.0, 0.5], [0.0, 1.0]])):
        assert float(spectral_loss(jnp.asarray(other), jnp.asarray(v))) > best


def test_learned_features_forecast():
    """Y depends on one direction of five: features find it, and the plain network does not."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(300, 5)))
    y = jnp.asarray(np.sin(1.5 * x[:, 0] + x[:, 1]))
    start = eqx.nn.MLP(5, 8, 16, 1, jnp.tanh, jnp.tanh, key=jax.random.key(0))

    def learn():
        return learn_features(
            start,
            x,
            y,
            num_steps=80,
            num_pairs=100,
            optimizer=optax.adam(2e-2),
            key=jax.random.key(1),
            progress=False,
        )

    net, course = learn()
    new = jnp.asarray(rng.normal(size=(200, 5)))
    truth = jnp.sin(1.5 * new[:, 0] + new[:, 1])

    def error(f):
        model = kbr.fit_conditional(FeatureMap(f), None, x, y, regularizer=1e-3)
        return float(jnp.mean((kbr.mean(kbr.condition(model, new)) - truth) ** 2))

    assert error(net) < 0.5 * error(start)
    assert course.value <= course.history.validation[0]
    again, _ = learn()
    close_trees(eqx.filter(net, eqx.is_array), eqx.filter(again, eqx.is_array), 0)


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [(20, {}, "at least 50"), (60, {"num_pairs": 59}, "num_pairs"), (60, {"num_pairs": 2}, "num")],
)
def test_errors_of_learn_features(count, options, message):
    x = jnp.asarray(RNG.normal(size=(count, 2)))
    with pytest.raises(ValueError, match=message):
        learn_features(network(2, 2), x, x[:, 0], num_steps=2, key=jax.random.key(0), **options)


def test_a_map_must_give_one_real_array(pairs):
    x, y = pairs
    for bad in (lambda p: (p, p), lambda p: jnp.argmax(p)):
        with pytest.raises(ValueError, match="one real array"):
            kbr.fit_conditional(FeatureMap(bad), None, x, y, regularizer=1e-2)
