"""Filters at the edges: far observations, odd scales, other states, mixed precisions, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr
from kbr_jax.filtering import (
    GaussianTransition,
    KernelBayesFilter,
    RivalFilter,
    fit_conditional_embedding_filter,
    fit_discriminant,
    known_likelihood,
)
from kbr_jax.rules import fit_conditional

RIDGE = {"regularizer": 1e-3}
N = 60
ANGLES = 0.4 * np.arange(N + 1) + 0.1 * np.random.default_rng(0).normal(size=N + 1)
STATES = jnp.asarray(np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1))
SEEN = STATES[:N] + 0.1 * jnp.asarray(np.random.default_rng(1).normal(size=(N, 2)))
KERNEL, KERNEL_SEEN = kbr.Gaussian(0.5), kbr.Gaussian(0.3)


def fit(**options):
    options = {"posterior_regularizer": 1e-3, **RIDGE, **options}
    return kbr.fit_filter(KERNEL, KERNEL_SEEN, STATES, SEEN, **options)


def known(offset, **options):
    def log_likelihood(seen, state):
        return -0.5 * jnp.sum((seen - state) ** 2) / 0.04 + offset

    emission = known_likelihood(KERNEL, STATES[:N], log_likelihood, **RIDGE)
    transition = fit_conditional(KERNEL, KERNEL, STATES[:N], STATES[1:], **RIDGE)
    return KernelBayesFilter(emission, transition, **options)


def test_an_observation_beyond_reach_is_no_evidence_for_a_rival():
    base = fit()
    residual = kbr.tuning.leave_out_loss(base.emission, kernel=base.emission.kernel_y)
    filt = RivalFilter(base, residual=residual)
    seen = jnp.concatenate([SEEN[:10], jnp.full((10, 2), 1e6), SEEN[20:25]])
    far = kbr.run_filter(filt, seen)
    missing = kbr.run_filter(filt, seen, observed=jnp.abs(seen[:, 0]) < 10)
    np.testing.assert_array_equal(far.restarted, missing.restarted)
    np.testing.assert_allclose(far.weights, missing.weights, atol=1e-12)


@pytest.mark.parametrize("max_active", [None, 5])
@pytest.mark.parametrize("offset", [-1000.0, 800.0])
def test_a_known_likelihood_is_known_up_to_a_factor(offset, max_active):
    expected = kbr.run_filter(known(0.0, max_active=max_active), SEEN[:6])
    filt = known(offset, max_active=max_active)
    run = kbr.run_filter(filt, SEEN[:6])
    np.testing.assert_allclose(run.weights, expected.weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(run.discarded, expected.discarded, atol=1e-9)
    assert not np.isnan(run.predictive_value).any()
    assert "beyond the reach" not in str(kbr.diagnose(filt, run))


def test_the_predictive_value_of_a_known_likelihood_keeps_its_units():
    values = kbr.run_filter(known(0.0), SEEN[:6]).predictive_value
    scaled = kbr.run_filter(known(float(np.log(3.0))), SEEN[:6]).predictive_value
    np.testing.assert_allclose(scaled, 3 * np.asarray(values), rtol=1e-9)


def test_a_missing_observation_that_is_nan_has_finite_gradients():
    transition = fit_conditional(KERNEL, KERNEL, STATES[:N], STATES[1:], **RIDGE)

    def loss(width, value):
        def log_likelihood(seen, state):
            return -0.5 * jnp.sum((seen - state[:1]) ** 2) / width**2

        emission = known_likelihood(KERNEL, STATES[:N], log_likelihood, **RIDGE)
        filt = KernelBayesFilter(emission, transition)
        state, _ = kbr.filter_step(filt, kbr.init_filter(filt), value, observed=False)
        _, output = kbr.filter_step(filt, state, SEEN[1, :1])
        return jnp.sum(kbr.state_mean(filt, output) ** 2)

    found = [jax.grad(loss)(0.2, jnp.full(1, value)) for value in (jnp.nan, 0.0)]
    np.testing.assert_allclose(*found, rtol=1e-9)


def test_fourier_features_of_full_rank_are_no_gram_matrix():
    features = kbr.random_fourier(KERNEL, STATES[:N], rank=N, key=jax.random.key(0))
    emission = fit_conditional(KERNEL, KERNEL_SEEN, STATES[:N], SEEN, landmarks_x=features, **RIDGE)
    with pytest.raises(ValueError, match="no random Fourier features"):
        filt = KernelBayesFilter(emission, GaussianTransition(lambda s: s, 0.01), **RIDGE)
        kbr.run_filter(filt, SEEN[:3])


def test_a_transition_on_other_states():
    emission = fit().emission
    other = jnp.concatenate([STATES, STATES[:, :1]], axis=1)
    unlike = fit_conditional(KERNEL, KERNEL, other[:N], other[1:], **RIDGE)
    with pytest.raises(ValueError, match="successors of `transition`"):
        KernelBayesFilter(emission, unlike, **RIDGE)
    order = np.random.default_rng(0).permutation(N)
    permuted = fit_conditional(KERNEL, KERNEL, STATES[:N][order], STATES[1:][order], **RIDGE)
    with pytest.raises(ValueError, match="fitted to the states of `emission`"):
        KernelBayesFilter(emission, permuted, shift=True, **RIDGE)
    fewer = fit_conditional(KERNEL, KERNEL, STATES[:35], STATES[1:36], **RIDGE)
    with pytest.raises(ValueError, match="has 35 points"):
        KernelBayesFilter(emission, fewer, shift=True, **RIDGE)


def test_ratios_below_0_have_no_share():
    states = STATES[:N, :1]
    features = jnp.concatenate([SEEN[:, :1], SEEN[:, :1]], axis=1)
    found = fit_discriminant(
        KERNEL, states, features, -states, num_directions=2, block_size=10, **RIDGE
    )
    moved = found.log_likelihood(states[0], features[0] + jnp.asarray([0.1, 0.0]))
    assert abs(float(moved)) < 1e3


@pytest.mark.parametrize("extra", [0, 5])
def test_padding_of_the_2009_filter_holds_no_observation(extra):
    states = jnp.concatenate([STATES, jnp.full((extra, 2), jnp.nan)])
    seen = jnp.concatenate([SEEN, jnp.full((extra, 2), jnp.nan)])
    mask = jnp.arange(N + 1 + extra) < N + 1
    kernels = KERNEL, KERNEL_SEEN
    padded = fit_conditional_embedding_filter(*kernels, states, seen, mask=mask, **RIDGE)
    plain = fit_conditional_embedding_filter(*kernels, STATES, SEEN, **RIDGE)
    means = [kbr.state_mean(f, kbr.run_filter(f, SEEN[:5])) for f in (padded, plain)]
    np.testing.assert_allclose(*means, rtol=1e-8)


def test_the_2009_filter_takes_finite_features_and_far_observations():
    linear = kbr.kernels.FeatureMap(lambda s: jnp.concatenate([s, jnp.ones(1)]))
    filt = fit_conditional_embedding_filter(linear, linear, STATES, SEEN, **RIDGE)
    assert np.isfinite(kbr.state_mean(filt, kbr.run_filter(filt, SEEN[:5]))).all()
    with pytest.raises(ValueError, match="give landmarks for both"):
        fit_conditional_embedding_filter(linear, KERNEL_SEEN, STATES, SEEN, **RIDGE)
    filt = fit_conditional_embedding_filter(KERNEL, KERNEL_SEEN, STATES, SEEN, **RIDGE)
    far = kbr.run_filter(filt, SEEN[:5].at[3].set(1e6))
    missing = kbr.run_filter(filt, SEEN[:5], observed=jnp.arange(5) != 3)
    np.testing.assert_allclose(far.weights, missing.weights, atol=1e-12)


def test_a_prior_on_successors_moves_with_inputs():
    inputs = jnp.ones((N, 1))
    kernel = kbr.kernels.TensorProduct((KERNEL, kbr.Gaussian(1.0)))
    transition = fit_conditional(kernel, KERNEL, (STATES[:N], inputs), STATES[1:], **RIDGE)
    plain = fit_conditional(KERNEL, KERNEL, STATES[:N], STATES[1:], **RIDGE)
    filters = [
        KernelBayesFilter(fit().emission, model, estimator="prior", **RIDGE)
        for model in (transition, plain)
    ]
    first = kbr.run_filter(filters[0], SEEN[:6], controls=inputs[:6])
    second = kbr.run_filter(filters[1], SEEN[:6])
    np.testing.assert_allclose(first.weights, second.weights, atol=1e-8)


def test_single_and_double_precision_together():
    single, double = STATES.astype(jnp.float32), STATES
    emission = fit_conditional(KERNEL, KERNEL_SEEN, single[:N], SEEN, **RIDGE)
    assert emission.features_x.dtype == emission.features_y.dtype == jnp.float64
    emission = fit_conditional(KERNEL, KERNEL_SEEN, single[:N], SEEN.astype(jnp.float32), **RIDGE)
    learned = fit_conditional(KERNEL, KERNEL, double[:N], double[1:], **RIDGE)
    turn = jnp.asarray([[np.cos(0.4), -np.sin(0.4)], [np.sin(0.4), np.cos(0.4)]])
    moved = GaussianTransition(lambda s: turn @ s.astype(turn.dtype), 0.01)
    for transition in (learned, moved):
        filt = KernelBayesFilter(emission, transition, **RIDGE)
        run = kbr.run_filter(filt, SEEN[:5])
        assert kbr.state_mean(filt, run).dtype == jnp.float32
    fit_discriminant(KERNEL, single[:N], SEEN, double[:N], block_size=10, **RIDGE)


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        (-0.1, "must not be negative"),
        (np.nan, "must not be negative"),
        ([[0.04]], "must be a number"),
        (np.eye(3), "must be a number"),
        ([0.1, 0.1, 0.1], "must be a number"),
        ([[1.0, 2.0], [2.0, 1.0]], "must not be negative"),
    ],
)
def test_covariances_of_a_transition(covariance, message):
    transition = GaussianTransition(lambda s: s, jnp.asarray(covariance))
    with pytest.raises(ValueError, match=f"`covariance` {message}"):
        kbr.run_filter(KernelBayesFilter(fit().emission, transition, **RIDGE), SEEN[:3])


def test_weights_of_a_basis_are_not_counted_as_points():
    kernels = KERNEL, KERNEL_SEEN
    landmarks = [
        kbr.features.greedy_landmarks(kernel, points, rank=20)
        for kernel, points in zip(kernels, (STATES[:N], SEEN), strict=True)
    ]
    maps = kbr.moments.moment_maps(*kernels, *landmarks, shift=True)
    moments = kbr.moments.collect_moments(maps, STATES[:N], SEEN, successors=STATES[1:])
    model = kbr.moments.fit_conditional(moments, **RIDGE)
    plain = kbr.Clipping(False, 0.0, True)
    filt = KernelBayesFilter(model, None, shift=True, clipping=plain, **RIDGE)
    found = kbr.diagnose(filt, kbr.run_filter(filt, SEEN[:9]))
    assert np.isnan(found.effective_size).all()
    assert "fewer than" not in str(found)
    with pytest.raises(ValueError, match="'prior' needs a learned emission on a sample"):
        transition = fit_conditional(KERNEL, KERNEL, STATES[:N], STATES[1:], **RIDGE)
        KernelBayesFilter(model, transition, estimator="prior", **RIDGE)


def test_nan_must_be_marked_as_missing():
    filt, seen = fit(), SEEN[:6].at[3].set(jnp.nan)
    observed = jnp.arange(6) != 3
    kbr.run_filter(filt, seen, observed=observed)
    kbr.run_filter(filt, [seen, SEEN[:4]], observed=[observed, jnp.ones(4, bool)])
    for call in (
        lambda: kbr.run_filter(filt, seen),
        lambda: kbr.run_filter(filt, [SEEN[:4], seen]),
        lambda: kbr.filter_step(filt, kbr.init_filter(filt), seen[3]),
    ):
        with pytest.raises(ValueError, match="`observations` are NaN at step"):
            call()
    kbr.filter_step(filt, kbr.init_filter(filt), seen[3], observed=False)
