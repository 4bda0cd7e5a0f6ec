"""Options of the kernel Bayes filter that must not change the answer, and those that must."""

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
    return kbr.KernelBayesFilter.fit(kbr.Gaussian(0.7), kbr.Gaussian(0.6), STATES, OBSERVATIONS, **options)


def weights(**options):
    return np.asarray(kbr.filter(fit(**options), TESTS).weights)


@pytest.mark.parametrize("landmarks", [None, 20])
@pytest.mark.parametrize("form", ["b", "importance"])
def test_the_largest_weights_suffice_where_no_others_are_active(form, landmarks):
    options = {"form": form, "truncation": 0.1, "landmarks_states": landmarks, "landmarks_observations": landmarks}
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


def test_the_transition_has_its_own_regularizer_in_the_two_inverse_form():
    same = weights(transition="two-inverse", transition_regularizer=1e-3)
    np.testing.assert_allclose(same, weights(transition="two-inverse"), rtol=0, atol=0)
    assert np.abs(weights(transition="two-inverse", transition_regularizer=1e-1) - same).max() > 1e-4
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
    restarted = kbr.filter(fit(recovery=kbr.Recovery(restart_below=0.5)), TESTS, prior=far).restarted
    assert bool(restarted[0]) and not bool(jnp.any(restarted[1:]))
