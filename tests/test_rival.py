"""A filter whose belief is challenged: the evidence against brute-force NumPy, recovery where observations rarely tell."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

# A walk on the circle, seen as its double angle: half a turn away looks the same, but for a lamp near angle 0.
RNG = np.random.default_rng(3)
ANGLES = np.cumsum(0.15 + 0.08 * RNG.normal(size=181))
LAMP = 0.4


def circle(angles):
    return jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=1))


def views(angles, seed):
    rng = np.random.default_rng(seed)
    lamp = np.exp(5 * (np.cos(angles) - 1))
    clean = np.stack([np.cos(2 * angles), np.sin(2 * angles), LAMP * lamp], axis=1)
    return jnp.asarray(clean + 0.02 * rng.normal(size=clean.shape))


STATES, VIEWS = circle(ANGLES[:121]), views(ANGLES[:120], 0)
TRUTH, TESTS = np.asarray(circle(ANGLES[121:])), views(ANGLES[121:], 1)
# What tells the sides apart is hidden between features that say nothing.
MIX = jnp.asarray(np.linalg.qr(RNG.normal(size=(3, 3)))[0])


def features(view):
    return view @ MIX


def base(**options):
    options = {
        "regularizer": 1e-3,
        "posterior_regularizer": 1e-6,
        "truncation": 0.05,
        "landmarks_observations": 30,
        **options,
    }
    return kbr.KernelBayesFilter.fit(kbr.Gaussian(0.3), kbr.Gaussian(0.8), STATES, VIEWS, **options)


@functools.cache
def challenged():
    return fit()


def fit(**options):
    options = {"kernel": kbr.Gaussian(0.4), "regularizer": 1e-5, "block": 10, **options}
    return kbr.RivalFilter.fit(options.pop("base", base()), features, kbr.mean, **options)


def prior(state):
    weights = jnp.exp(-jnp.sum((STATES - state) ** 2, axis=1) / (2 * 0.1**2))
    return kbr.embed(kbr.Gaussian(0.3), STATES, weights / jnp.sum(weights))


run_filter = eqx.filter_jit(kbr.filter)


def errors(filt, start):
    run = run_filter(filt, TESTS, prior=prior(start))
    return np.linalg.norm(
        np.asarray(kbr.mean(filt.belief(run.weights))) - TRUTH, axis=1
    ), np.asarray(run.restarted)


def test_a_wrong_start_finds_back_and_a_right_one_is_left_alone():
    plain = base()
    lost, _ = errors(plain, -TRUTH[0])
    assert np.median(lost) > 1.5
    back, restarted = errors(challenged(), -TRUTH[0])
    lamp = np.flatnonzero((TRUTH[:, 0] > 0.95) | (TRUTH[:, 0] < -0.95))[0]
    assert restarted.sum() == 1 and back[np.flatnonzero(restarted)[0] :].max() < 0.3
    assert np.flatnonzero(restarted)[0] < lamp + 8
    right, restarted = errors(challenged(), TRUTH[0])
    np.testing.assert_allclose(right, errors(plain, TRUTH[0])[0], rtol=1e-9)
    assert not restarted.any() and right.max() < 0.3


def test_evidence_is_that_of_the_formulas():
    n, p, block = 23, 4, 5
    rng = np.random.default_rng(0)
    states, rivals = rng.normal(size=(n, 2)), rng.normal(size=(n, 2))
    y = np.sin(states @ rng.normal(size=(2, p))) + 0.1 * rng.normal(size=(n, p))
    contrast = kbr.Contrast.fit(
        kbr.Gaussian(0.9),
        states,
        jnp.asarray(y),
        rivals,
        regularizer=1e-2,
        degrees=4.0,
        directions=2,
        block=block,
    )

    def gram(a, b):
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * 0.9**2))

    def predict(rows, points):
        """Kernel ridge regression on some rows, with the ridge and the mean of all."""
        k, inverse = (
            gram(points, states[rows]),
            np.linalg.inv(gram(states[rows], states[rows]) + 1e-2 * n * np.eye(len(rows))),
        )
        variance = 1 + 1e-2 * n - np.einsum("ij,jk,ik->i", k, inverse, k)
        return y.mean(0) + k @ inverse @ (y[rows] - y.mean(0)), variance

    def standardized(rows, points, targets):
        mean, variance = predict(rows, points)
        return (targets - mean) / np.sqrt(variance)[:, None]

    own = []
    for start in [0, 5, 10, 15, 18]:
        rows = np.arange(start, start + block)
        own.append(standardized(np.setdiff1d(np.arange(n), rows), states[rows], y[rows]))
    own[-1] = own[-1][-3:]
    own, other = np.concatenate(own), standardized(np.arange(n), rivals, y)
    c, c_rival = own.T @ own / n, other.T @ other / n
    c = c + 1e-3 * np.trace(c) / p * np.eye(p)
    ratios, vectors = np.linalg.eig(np.linalg.solve(c, c_rival))
    order = np.argsort(-ratios.real)[:2]
    ratios, vectors = ratios.real[order], vectors.real[:, order]
    vectors = vectors / np.sqrt(np.einsum("pd,pq,qd->d", vectors, c, vectors))
    np.testing.assert_allclose(contrast.ratios, ratios, rtol=1e-8)

    state, seen = rng.normal(size=2), rng.normal(size=p)
    mean, variance = predict(np.arange(n), state[None])
    squares = ((seen - mean[0]) @ vectors) ** 2 / variance[0]
    expected = -2.5 * np.sum(np.maximum(1 - 1 / ratios, 0) * np.log1p(squares / 4))
    got = contrast.evidence(jnp.asarray(state), contrast.project(jnp.asarray(seen)))
    np.testing.assert_allclose(got, expected, rtol=1e-7)


def test_jit_vmap_steps_and_missing_observations():
    filt = challenged()
    batch = jnp.stack([TESTS[:12], TESTS[12:24]])
    runs = jax.jit(jax.vmap(lambda o: kbr.filter(filt, o).weights))(batch)
    np.testing.assert_allclose(
        runs[1], run_filter(filt, TESTS[12:24]).weights, rtol=1e-6, atol=1e-9
    )

    state, whole = filt.init(prior(-TRUTH[0])), run_filter(filt, TESTS, prior=prior(-TRUTH[0]))
    step = eqx.filter_jit(filt.step)
    for t in range(30):
        state, belief = step(state, TESTS[t])
        np.testing.assert_allclose(belief.weights, whole.weights[t], rtol=1e-6, atol=1e-9)
    unseen, belief = filt.step(state, jnp.full(3, jnp.nan), observed=False)
    assert (
        unseen.doubt == state.doubt
        and not belief.restarted
        and bool(jnp.all(jnp.isfinite(belief.weights)))
    )
    state, belief = filt.init_from_observation(TESTS[0])
    assert state.doubt == 0 and belief.weights.shape == (120,)
    np.testing.assert_allclose(
        filt.predict(belief.weights, 2).weights, filt.base.predict(belief.weights, 2).weights
    )


def test_gradients_are_finite():
    filt = challenged()

    def loss(observations):
        return jnp.sum(
            kbr.mean(filt.belief(kbr.filter(filt, observations, prior=prior(-TRUTH[0])).weights))
            ** 2
        )

    assert bool(jnp.all(jnp.isfinite(jax.grad(loss)(TESTS[:30]))))


def test_an_observation_without_a_rival_leaves_everything_as_it_is():
    filt = fit(overlap=0.0)
    run = run_filter(filt, TESTS, prior=prior(-TRUTH[0]))
    np.testing.assert_allclose(
        run.weights, run_filter(base(), TESTS, prior=prior(-TRUTH[0])).weights, rtol=1e-9
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "a"}, "form"),
        ({"block": 100}, "block"),
        ({"directions": 4}, "directions"),
        ({"drift": 0.0}, "drift"),
        ({"threshold": -1.0}, "threshold"),
        ({"overlap": 1.0}, "overlap"),
        ({"degrees": 0.0}, "degrees"),
        ({"regularizer": 0.0}, "regularizer"),
    ],
)
def test_mistakes_are_errors(options, message):
    if "base" in options:
        options = {"base": base(form="a", transition="two-inverse")}
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_features_must_be_vectors():
    with pytest.raises(ValueError, match="features"):
        kbr.RivalFilter.fit(
            base(), lambda view: view[0], kbr.mean, kernel=kbr.Gaussian(0.4), regularizer=1e-5
        )
    with pytest.raises(ValueError, match="rivals"):
        kbr.Contrast.fit(kbr.Gaussian(0.4), STATES[:120], VIEWS, STATES[:100], regularizer=1e-3)
