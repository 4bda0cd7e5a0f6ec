"""A filter that is restarted by a CUSUM test: likelihood against NumPy, wrong and right starts."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

# A walk on the circle, seen as its double angle: half a turn away looks the same, but for a lamp
# near angle 0.
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
        "clipping": kbr.Clipping(truncation=0.05),
        "landmarks_observations": kbr.greedy_landmarks(kbr.Gaussian(0.8), VIEWS, rank=30),
        **options,
    }
    return kbr.fit_filter(kbr.Gaussian(0.3), kbr.Gaussian(0.8), STATES, VIEWS, **options)


@functools.cache
def restarting():
    return fit()


def fit(**options):
    options = {
        "kernel": kbr.Gaussian(0.4),
        "regularizer": 1e-5,
        "observation_regularizer": 1e-3,
        "block_size": 10,
        **options,
    }
    data = np.asarray(STATES[:120]).tolist(), VIEWS  # lists of numbers are arrays
    return kbr.filtering.fit_cusum_restart(
        options.pop("base", base()), options.pop("data", data), features, kbr.mean, **options
    )


def prior(state):
    weights = jnp.exp(-jnp.sum((STATES - state) ** 2, axis=1) / (2 * 0.1**2))
    return kbr.embed(kbr.Gaussian(0.3), STATES, weights / jnp.sum(weights))


run_filter = eqx.filter_jit(kbr.run_filter)


def errors(filt, start):
    run = run_filter(filt, TESTS, prior=prior(start))
    estimates = np.asarray(kbr.state_mean(filt, run))
    return np.linalg.norm(estimates - TRUTH, axis=1), np.asarray(run.restarted)


def test_a_wrong_start_is_left_and_a_right_one_is_kept():
    plain = base()
    lost, _ = errors(plain, -TRUTH[0])
    assert np.median(lost) > 1.5
    back, restarted = errors(restarting(), -TRUTH[0])
    lamp = np.flatnonzero((TRUTH[:, 0] > 0.95) | (TRUTH[:, 0] < -0.95))[0]
    assert restarted.sum() == 1 and back[np.flatnonzero(restarted)[0] :].max() < 0.3
    assert np.flatnonzero(restarted)[0] < lamp + 8
    right, restarted = errors(restarting(), TRUTH[0])
    np.testing.assert_allclose(right, errors(plain, TRUTH[0])[0], rtol=1e-9)
    assert not restarted.any() and right.max() < 0.3


N, P, BLOCK = 23, 4, 5


def sample(noise=0.1):
    """States, alternatives and features."""
    rng = np.random.default_rng(0)
    states, alternatives = rng.normal(size=(N, 2)), rng.normal(size=(N, 2))
    y = np.sin(states @ rng.normal(size=(2, P))) + noise * rng.normal(size=(N, P))
    return states, alternatives, y


def gram(a, b):
    return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * 0.9**2))


def predict(states, y, rows, points, ridge):
    """Kernel ridge regression on some rows, with the ridge and the mean of all."""
    k, inverse = (
        gram(points, states[rows]),
        np.linalg.inv(gram(states[rows], states[rows]) + ridge * N * np.eye(len(rows))),
    )
    variance = 1 + ridge * N - np.einsum("ij,jk,ik->i", k, inverse, k)
    return y.mean(0) + k @ inverse @ (y[rows] - y.mean(0)), variance


def left_out(states, y, ridge):
    """Standardized residuals and variances of blocks left out, and the moments of residuals."""
    residuals, variances = [], []
    for start in [0, 5, 10, 15, 18]:
        rows = np.arange(start, start + BLOCK)
        others = np.setdiff1d(np.arange(N), rows)
        mean, variance = predict(states, y, others, states[rows], ridge)
        residuals.append((y[rows] - mean) / np.sqrt(variance)[:, None])
        variances.append(variance)
    residuals[-1], variances[-1] = residuals[-1][-3:], variances[-1][-3:]
    own = np.concatenate(residuals)
    c = own.T @ own / N
    c = 0.9 * c + np.diag(0.1 * np.diag(c) + 1e-6 * np.trace(c) / P)
    return own, np.concatenate(variances), c


@pytest.mark.parametrize(("noise", "expected"), [(1e-3, 1e-5), (0.03, 1e-4), (0.3, 1e-2)])
def test_the_regularizer_has_the_greatest_likelihood_of_blocks_left_out(noise, expected):
    states, alternatives, y = sample(noise)

    def likelihood(ridge):
        _, variances, c = left_out(states, y, ridge)
        return -np.linalg.slogdet(c)[1] / 2 - P * np.log(variances).mean() / 2

    best = max((1e-5, 1e-4, 1e-3, 1e-2), key=likelihood)
    discriminant = kbr.filtering.fit_discriminant(
        kbr.Gaussian(0.9), states, jnp.asarray(y), alternatives, block_size=BLOCK
    )
    assert best == expected
    np.testing.assert_allclose(discriminant.noise, N * best, rtol=1e-6)


def test_the_likelihood_is_that_of_the_formulas():
    (states, alternatives, y), rng = sample(), np.random.default_rng(1)
    discriminant = kbr.filtering.fit_discriminant(
        kbr.Gaussian(0.9),
        states,
        jnp.asarray(y),
        alternatives,
        regularizer=1e-2,
        degrees=4.0,
        num_directions=2,
        block_size=BLOCK,
    )
    n, p, every = N, P, np.arange(N)
    own, _, c = left_out(states, y, 1e-2)
    mean, variance = predict(states, y, every, alternatives, 1e-2)
    other = (y - mean) / np.sqrt(variance)[:, None]
    size = np.einsum("ip,pq,iq->i", other, np.linalg.inv(c), other) / p
    c_other = (other * (5 / (4 + size))[:, None]).T @ other / n
    ratios, vectors = np.linalg.eig(np.linalg.solve(c, c_other))
    order = np.argsort(-ratios.real)[:2]
    ratios, vectors = ratios.real[order], vectors.real[:, order]
    vectors = vectors / np.sqrt(np.einsum("pd,pq,qd->d", vectors, c, vectors))
    np.testing.assert_allclose(discriminant.ratios, ratios, rtol=1e-8)

    def log_density(residuals):
        return -2.5 * np.log1p((residuals @ vectors) ** 2 / 4) @ np.maximum(1 - 1 / ratios, 0)

    gains = log_density(own) - log_density(other)
    np.testing.assert_allclose(discriminant.informative, np.quantile(gains, 0.9), rtol=1e-7)

    state, seen = rng.normal(size=2), rng.normal(size=p)
    mean, variance = predict(states, y, every, state[None], 1e-2)
    expected = log_density((seen - mean[0]) / np.sqrt(variance[0]))
    got = discriminant.log_likelihood(jnp.asarray(state), discriminant.project(jnp.asarray(seen)))
    np.testing.assert_allclose(got, expected, rtol=1e-7)

    shares = discriminant.noise_shares(jnp.asarray(state)[None])
    np.testing.assert_allclose(shares, [1e-2 * n / variance[0]], rtol=1e-7)


@pytest.mark.parametrize("side", [1, -1])
def test_the_sum_is_that_of_the_smaller_evidence(side):
    """By NumPy; Bayes' rule and likelihoods are tested elsewhere."""
    filt = fit(slack=1e-3, threshold=1e6)
    base, discriminant = filt.base, filt.discriminant
    points, step = np.asarray(STATES[:120]), eqx.filter_jit(kbr.filter_step)
    correct = jax.jit(lambda *inputs: base.correct(*inputs, True)[0])
    likelihoods = jax.jit(jax.vmap(discriminant.log_likelihood, (0, None)))
    total, seconds = 0.0, 0
    state = kbr.init_filter(filt, prior(side * TRUTH[0]))
    for t in range(20):
        start, (state, belief) = state.base, step(filt, state, TESTS[t])
        code, projected, own = jax.tree.map(
            lambda leaf: leaf[0], filt.encode(TESTS[t][None], None)[0]
        )
        values = np.asarray(likelihoods(STATES[:120], projected))

        def log_mean(weights, values=values):
            weights = np.maximum(weights, 0)
            return np.log(weights @ np.exp(values) / weights.sum())

        def posterior(weights, inputs=(start, code)):
            weights = np.where(weights >= 0.05 * weights.max(), weights, 0)
            return np.asarray(correct(jnp.asarray(weights / weights.sum()), *inputs))

        def decoded(weights):
            return np.asarray(kbr.mean(base.embed(jnp.asarray(weights))))

        def similar(weights):
            return np.exp(-((points - decoded(weights)) ** 2).sum(1) / (2 * 0.4**2))

        first = np.asarray(belief.weights)
        rival = posterior(np.where(similar(first) > 0.05, 0, own))
        second = posterior(np.where(similar(first) > similar(rival), own, 0))
        both = jnp.asarray([decoded(first), decoded(second)])
        shares = np.asarray(discriminant.noise_shares(both))
        here = np.where(similar(first) > similar(rival), first, 0)
        gains = shares * (log_mean(rival) - np.array([log_mean(here), log_mean(second)]))
        total, seconds = max(0.0, total + gains.min() - 1e-3), seconds + int(gains[1] < gains[0])
        np.testing.assert_allclose(state.cusum, total, rtol=1e-4, atol=1e-6)
    assert 0 < seconds < 20


def test_slack_and_threshold_are_shares_of_an_informative_observation():
    filt = fit(degrees=30.0)
    nats = filt.discriminant.informative
    assert nats > 9
    np.testing.assert_allclose([filt.slack, filt.threshold], [0.25 * nats, 0.6 * nats])
    blurred = VIEWS + jnp.asarray(np.random.default_rng(0).normal(size=VIEWS.shape))
    filt = fit(data=(STATES[:120], blurred))
    assert filt.discriminant.informative < 6
    np.testing.assert_allclose([filt.slack, filt.threshold], [1.5, 5.0])


def test_jit_vmap_steps_and_missing_observations():
    filt = restarting()
    batch = jnp.stack([TESTS[:12], TESTS[12:24]])
    runs = jax.jit(jax.vmap(lambda o: kbr.run_filter(filt, o).weights))(batch)
    np.testing.assert_allclose(
        runs[1], run_filter(filt, TESTS[12:24]).weights, rtol=1e-6, atol=1e-9
    )

    state, whole = (
        kbr.init_filter(filt, prior(-TRUTH[0])),
        run_filter(filt, TESTS, prior=prior(-TRUTH[0])),
    )
    step = jax.jit(kbr.filter_step)
    for t in range(30):
        state, belief = step(filt, state, TESTS[t])
        np.testing.assert_allclose(belief.weights, whole.weights[t], rtol=1e-6, atol=1e-9)
    unseen, belief = kbr.filter_step(filt, state, jnp.full(3, jnp.nan), observed=False)
    assert (
        unseen.cusum == state.cusum
        and not belief.restarted
        and bool(jnp.all(jnp.isfinite(belief.weights)))
    )
    state, belief = kbr.init_from_observation(filt, TESTS[0], regularizer=1e-3)
    assert state.cusum == 0 and belief.weights.shape == (120,)
    np.testing.assert_allclose(
        kbr.predict(filt, belief, 2).weights, kbr.predict(filt.base, belief, 2).weights
    )


def with_cells():
    """The same filter on moments with a cell for each training state."""
    ks, ko, s, s_next = kbr.Gaussian(0.3), kbr.Gaussian(0.8), STATES[:120], STATES[1:]
    ls, lo = kbr.greedy_landmarks(ks, s, rank=60), kbr.greedy_landmarks(ko, VIEWS, rank=30)
    cells = kbr.soft_partition(ks, kbr.Landmarks(s), temperature=1e-9)
    maps = kbr.moments.moment_maps(ks, ko, ls, lo, cells=cells, shift=True)
    moments = kbr.moments.collect_moments(maps, s, VIEWS, s_next)
    emission = kbr.moments.fit_conditional(moments, regularizer=1e-3)
    clipping = kbr.Clipping(truncation=0.05)
    return kbr.KernelBayesFilter(emission, None, regularizer=1e-6, shift=True, clipping=clipping)


def with_inputs():
    """The same filter with a transition that knows an input which says nothing."""
    ks, ko, s, s_next = kbr.Gaussian(0.3), kbr.Gaussian(0.8), STATES[:120], STATES[1:]
    lo = kbr.greedy_landmarks(ko, VIEWS, rank=30)
    kernel = kbr.TensorProduct((ks, kbr.Delta()))
    emission = kbr.fit_conditional(ks, ko, s, VIEWS, regularizer=1e-3, landmarks_y=lo)
    transition = kbr.fit_conditional(kernel, ks, (s, jnp.zeros(120, int)), s_next, regularizer=1e-3)
    clipping = kbr.Clipping(truncation=0.05)
    return kbr.KernelBayesFilter(emission, transition, regularizer=1e-6, clipping=clipping)


@pytest.mark.parametrize("make", [with_cells, with_inputs])
def test_it_wraps_moments_and_inputs(make):
    plain = make()
    filt = fit(base=plain)
    controls = jnp.zeros(len(TESTS), int) if make is with_inputs else None
    lost, run = (
        kbr.run_filter(f, TESTS, prior=prior(-TRUTH[0]), controls=controls) for f in (plain, filt)
    )
    far, near = (
        np.linalg.norm(np.asarray(kbr.state_mean(f, r)) - TRUTH, axis=1)
        for f, r in ((plain, lost), (filt, run))
    )
    restarted = np.flatnonzero(run.restarted)
    assert np.median(far) > 1.5 and len(restarted) == 1 and near[restarted[0] :].max() < 0.35
    right = kbr.run_filter(filt, TESTS, prior=prior(TRUTH[0]), controls=controls)
    assert not np.any(right.restarted)
    if make is with_inputs:
        smoothed = kbr.smooth(filt, run, regularizer=0.1, controls=controls)
        assert np.all(np.isfinite(smoothed.weights))


def test_gradients_are_finite():
    filt = restarting()

    def loss(observations):
        run = kbr.run_filter(filt, observations, prior=prior(-TRUTH[0]))
        return jnp.sum(kbr.state_mean(filt, run) ** 2)

    assert bool(jnp.all(jnp.isfinite(jax.grad(loss)(TESTS[:30]))))


def test_an_observation_without_an_alternative_leaves_everything_as_it_is():
    filt = fit(exclusion=0.0)
    run = run_filter(filt, TESTS, prior=prior(-TRUTH[0]))
    np.testing.assert_allclose(
        run.weights, run_filter(base(), TESTS, prior=prior(-TRUTH[0])).weights, rtol=1e-9
    )


def plain_moments():
    ks, ko = kbr.Gaussian(0.3), kbr.Gaussian(0.8)
    ls, lo = kbr.greedy_landmarks(ks, STATES, rank=9), kbr.greedy_landmarks(ko, VIEWS, rank=9)
    maps = kbr.moments.moment_maps(ks, ko, ls, lo, shift=True)
    moments = kbr.moments.collect_moments(maps, STATES[:120], VIEWS, STATES[1:])
    emission = kbr.moments.fit_conditional(moments, regularizer=1e-3)
    clipping = kbr.Clipping(False, 0.0)
    return kbr.KernelBayesFilter(emission, None, regularizer=1e-3, shift=True, clipping=clipping)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "prior"}, "estimator"),
        ({"base": "plain moments"}, "cells"),
        ({"block_size": 100}, "block_size"),
        ({"num_directions": 4}, "num_directions"),
        ({"slack": 0.0}, "slack"),
        ({"threshold": -1.0}, "threshold"),
        ({"exclusion": 1.0}, "exclusion"),
        ({"degrees": 0.0}, "degrees"),
        ({"regularizer": 0.0}, "regularizer"),
    ],
)
def test_mistakes_are_errors(options, message):
    if "base" in options:
        made = plain_moments() if options["base"] == "plain moments" else base(estimator="prior")
        options = {"base": made}
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_features_must_be_vectors():
    data, options = (STATES[:120], VIEWS), {"kernel": kbr.Gaussian(0.4), "regularizer": 1e-5}
    with pytest.raises(ValueError, match="features"):
        kbr.filtering.fit_cusum_restart(
            base(), data, lambda view: view[0], kbr.mean, observation_regularizer=1e-3, **options
        )
    with pytest.raises(ValueError, match="same for all observations"):
        kbr.filtering.fit_cusum_restart(base(), data, lambda v: 0 * v, kbr.mean, **options)
    with pytest.raises(ValueError, match="alternatives"):
        kbr.filtering.fit_discriminant(
            kbr.Gaussian(0.4), STATES[:120], VIEWS, STATES[:100], regularizer=1e-3
        )
