"""Options of the kernel Bayes filter that must not change the answer, and those that must."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

RNG = np.random.default_rng(5)
STATES = jnp.asarray(np.cumsum(0.3 * RNG.normal(size=(61, 2)), axis=0))
OBSERVATIONS = STATES[:60] + jnp.asarray(0.1 * RNG.normal(size=(60, 2)))
TESTS = OBSERVATIONS[10:22] + 0.05


def fit(**options):
    options = {"regularizer": 1e-3, "posterior_regularizer": 1e-4, **options}
    return kbr.KernelBayesFilter.fit(
        kbr.Gaussian(0.7), kbr.Gaussian(0.6), STATES, OBSERVATIONS, **options
    )


def weights(**options):
    return np.asarray(kbr.filter(fit(**options), TESTS).weights)


@pytest.mark.parametrize("landmarks", [None, 20])
@pytest.mark.parametrize("form", ["b", "importance"])
def test_the_largest_weights_suffice_where_no_others_are_active(form, landmarks):
    options = {
        "form": form,
        "truncation": 0.1,
        "landmarks_states": landmarks,
        "landmarks_observations": landmarks,
    }
    run = kbr.filter(fit(**options), TESTS)
    active = int(jnp.max(jnp.sum(run.predicted[1:] > 0, axis=1)))
    assert active < 50
    prior = kbr.embed(kbr.Gaussian(0.7), STATES[8:13])
    full = kbr.filter(fit(**options), TESTS, prior=prior)
    count = int(jnp.max(jnp.sum(full.predicted > 0, axis=1)))
    few = kbr.filter(fit(max_active=count, **options), TESTS, prior=prior)
    np.testing.assert_allclose(few.weights, full.weights, rtol=1e-7, atol=1e-10)


def test_fewer_than_the_active_weights_is_an_approximation():
    few, full = weights(max_active=5), weights()
    assert np.all(np.sum(few != 0, axis=1) <= 5) and np.abs(few - full).max() > 1e-6


@pytest.mark.parametrize("form", ["b", "importance"])
def test_from_a_flat_prior_the_most_likely_weights_are_taken(form):
    at, options = 40, {"form": form, "recovery": None}
    few, full = (
        kbr.filter(
            filt,
            OBSERVATIONS[at : at + 1],
            read=lambda step, filt=filt: kbr.mean(filt.belief(step.weights)),
        )[0]
        for filt in (fit(max_active=15, **options), fit(**options))
    )
    assert (
        np.linalg.norm(few - full)
        < 0.1
        < np.linalg.norm(kbr.mean(fit().belief(jnp.eye(60)[:15].mean(0))) - full)
    )


def filters(states, observations):
    kernels = kbr.Gaussian(0.7), kbr.Gaussian(0.6)
    options = {"regularizer": 1e-3, "posterior_regularizer": 1e-4}
    landmarks = {"landmarks_states": 8, "landmarks_observations": 6}
    yield kbr.KernelBayesFilter.fit(*kernels, states, observations, **options)
    yield kbr.KernelBayesFilter.fit(
        *kernels, states, observations, form="importance", **options, **landmarks
    )
    yield kbr.MomentFilter.fit(*kernels, states, observations, **options, **landmarks)
    cells = kbr.soft_partition(kernels[0], kbr.given_landmarks(states[:40:5]))
    yield kbr.MomentFilter.fit(*kernels, states, observations, cells=cells, **options, **landmarks)
    yield kbr.ApproximateFilter.fit(*kernels, states, observations, regularizer=1e-3)


@pytest.mark.parametrize("number", range(4))
def test_an_observation_beyond_all_kernels_is_as_if_missing(number):
    filt = list(filters(STATES, OBSERVATIONS))[number]
    stray = kbr.filter(filt, TESTS.at[5].set(1e3))
    missing = kbr.filter(filt, TESTS, observed=jnp.arange(12) != 5)
    assert stray.evidence[5] == 0 and np.isnan(missing.evidence[5])
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.delete(a, 5, 0), np.delete(b, 5, 0)),
        stray,
        missing,
    )
    unmarked = kbr.filter(filt, TESTS.at[5].set(jnp.nan))
    assert np.all(np.isnan(jax.tree.leaves(unmarked)[0][6:]))


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("narrow", ["states", "observations", "new"])
def test_samples_of_two_precisions(number, narrow):
    def single(name, points):
        return points.astype(jnp.float32 if name == narrow else points.dtype)

    filt = list(filters(single("states", STATES), single("observations", OBSERVATIONS)))[number]
    prior = kbr.embed(kbr.Gaussian(0.7), single("new", STATES[:3]))
    run = jax.tree.leaves(kbr.filter(filt, single("new", TESTS), prior=prior))[0]
    step = filt.step(filt.init(prior), single("new", TESTS[0]))[1]
    exact = list(filters(STATES, OBSERVATIONS))[number]
    expected = jax.tree.leaves(
        kbr.filter(exact, TESTS, prior=kbr.embed(kbr.Gaussian(0.7), STATES[:3]))
    )[0]
    np.testing.assert_allclose(run, expected, atol=2e-2)
    np.testing.assert_allclose(jax.tree.leaves(step)[0], run[0], rtol=1e-3, atol=1e-3)


def test_the_transition_has_its_own_regularizer_in_the_two_inverse_form():
    same = weights(transition="two-inverse", transition_regularizer=1e-3)
    np.testing.assert_allclose(same, weights(transition="two-inverse"), rtol=0, atol=0)
    assert (
        np.abs(weights(transition="two-inverse", transition_regularizer=1e-1) - same).max() > 1e-4
    )
    np.testing.assert_allclose(weights(transition_regularizer=1e-1), weights(), rtol=0, atol=0)


def test_recovery_from_a_wrong_prior():
    far = kbr.embed(kbr.Gaussian(0.7), STATES[-3:])
    truth = np.asarray(STATES[10:22])

    def error(recovery):
        filt = fit(recovery=recovery)
        estimates = kbr.mean(filt.belief(kbr.filter(filt, TESTS, prior=far).weights))
        return np.linalg.norm(np.asarray(estimates) - truth, axis=1)

    assert np.linalg.norm(np.asarray(STATES[-2]) - truth[0]) > 1  # the prior is really elsewhere
    lost = error(None)[0]
    for recovery in (
        kbr.Recovery(marginal_share=0.05),
        kbr.Recovery(observation_share=0.05),
        kbr.Recovery(restart_below=0.5),
    ):
        assert error(recovery)[-6:].max() < 0.3 < lost
    np.testing.assert_allclose(error(kbr.Recovery()), error(None), rtol=1e-9)
    restarted = kbr.filter(
        fit(recovery=kbr.Recovery(restart_below=0.5)), TESTS, prior=far
    ).restarted
    assert bool(restarted[0]) and not bool(jnp.any(restarted[1:]))
    # How well the observation was foreseen does not depend on what it was then allowed to change.
    for recovery in (kbr.Recovery(observation_share=0.2), kbr.Recovery(restart_below=0.5)):
        first, plain = (
            kbr.filter(fit(recovery=r), TESTS[:1], prior=far).evidence[0] for r in (recovery, None)
        )
        np.testing.assert_allclose(first, plain, rtol=1e-12)
