"""Padding by a mask.

The result is that of the rest, and samples of several sizes share one compiled program.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

K = kbr.Gaussian(0.7)
RNG = np.random.default_rng(0)
N = 20
X, Y = jnp.asarray(RNG.normal(size=(N, 2))), jnp.asarray(RNG.normal(size=(N, 1)))
NEW = jnp.asarray(RNG.normal(size=(6, 1)))
MASK = jnp.arange(N) % 4 != 2  # padding need not be at the end
KEPT = np.flatnonzero(MASK)
BROKEN = [jnp.where(MASK[:, None], part, jnp.nan) for part in (X, Y)]
LANDMARKS = {
    "exact": {},
    "features": {
        "landmarks_x": kbr.random_fourier(K, 2, rank=10, key=jax.random.key(0)),
        "landmarks_y": 6,
    },
}


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", LANDMARKS)
def test_conditional_embedding(kind):
    padded = kbr.fit_conditional(K, K, *BROKEN, regularizer=1e-2, mask=MASK, **LANDMARKS[kind])
    model = kbr.fit_conditional(K, K, X[KEPT], Y[KEPT], regularizer=1e-2, **LANDMARKS[kind])
    prior = kbr.embed(K, X[:3])
    options = {"regularizer": 1e-3, "clip": True, "truncation": 0.1, "normalize": True}

    @eqx.filter_jit
    def embeddings(m):
        return (
            kbr.condition(m, X[0]),
            kbr.condition_centered(m, X[:2]),
            kbr.condition_centered(m, X[:2], form="printed"),
            kbr.sum_rule(m, prior),
            kbr.bayes_rule(m, prior, NEW, **options),
            kbr.bayes_rule(m, prior, NEW, form="importance", **options),
            kbr.bayes_rule(m, prior, NEW, form="a", **options),
        )

    (*found, on_prior), (*expected, expected_on_prior) = embeddings(padded), embeddings(model)
    for one, other in zip(found, expected, strict=True):
        close(np.asarray(one.weights)[..., KEPT], other.weights)
        assert not np.any(np.delete(one.weights, KEPT, axis=-1))
    close(on_prior.weights, expected_on_prior.weights)


@pytest.mark.parametrize(("form", "landmarks"), [("a", None), ("b", 6), ("importance", None)])
def test_filter(form, landmarks):
    def fit(states, observations, successors, mask=None):
        return kbr.KernelBayesFilter.fit(
            K,
            K,
            states,
            observations,
            successors=successors,
            mask=mask,
            regularizer=1e-2,
            posterior_regularizer=1e-3,
            transition="two-inverse",
            form=form,
            landmarks_states=landmarks,
            landmarks_observations=landmarks,
            recovery=None if form == "a" else kbr.Recovery(marginal_share=0.1),
        )

    after = X[::-1]
    padded, filt = fit(*BROKEN, after, MASK), fit(X[KEPT], Y[KEPT], after[KEPT])
    weights = kbr.filter(padded, NEW).weights
    close(weights[:, KEPT], kbr.filter(filt, NEW).weights)
    assert not np.any(np.delete(weights, KEPT, axis=1))


def test_a_padded_sequence_is_the_shorter_sequence():
    options = {"regularizer": 1e-2, "posterior_regularizer": 1e-3}
    for states in (X, X[:-1]):
        count = 12
        observations, extra = Y[:-1], states.shape[0] - (N - 1)
        mask = jnp.arange(states.shape[0]) < count + extra
        filt = kbr.KernelBayesFilter.fit(
            K, K, states[: count + extra], observations[:count], **options
        )
        padded = kbr.KernelBayesFilter.fit(K, K, states, observations, mask=mask, **options)
        used = count - 1 + extra
        close(kbr.filter(padded, NEW).weights[:, :used], kbr.filter(filt, NEW).weights)


def test_sizes_share_one_program():
    traces = []

    @eqx.filter_jit
    def run(x, y, mask):
        traces.append(None)
        filt = kbr.KernelBayesFilter.fit(
            K, K, x, y, successors=x[::-1], mask=mask, regularizer=1e-2, posterior_regularizer=1e-3
        )
        return kbr.filter(filt, NEW).weights

    for count in (5, 12, 20):
        mask = jnp.arange(N) < count
        weights = run(X, Y, mask)
        filt = kbr.KernelBayesFilter.fit(
            K,
            K,
            X[:count],
            Y[:count],
            successors=X[::-1][:count],
            regularizer=1e-2,
            posterior_regularizer=1e-3,
        )
        close(weights[:, :count], kbr.filter(filt, NEW).weights)
    assert len(traces) == 1


def test_sequences_of_unequal_length_in_one_batch():
    filt = kbr.KernelBayesFilter.fit(K, K, X, Y, regularizer=1e-2, posterior_regularizer=1e-3)
    lengths = jnp.asarray([6, 4, 1])
    batch = jnp.where(jnp.arange(6)[None, :, None] < lengths[:, None, None], NEW[None], jnp.nan)
    observed = jnp.arange(6)[None] < lengths[:, None]
    steps = jax.vmap(lambda o, m: kbr.filter(filt, o, observed=m))(batch, observed)
    for weights, length in zip(steps.weights, lengths, strict=True):
        close(weights[:length], kbr.filter(filt, NEW[:length]).weights)
    assert bool(jnp.all(jnp.isfinite(steps.weights)))


def test_bad_masks():
    with pytest.raises(
        ValueError, match=r"`mask` must be a boolean mask of shape \(20,\), got bool\[3\]"
    ):
        kbr.fit_conditional(K, K, X, Y, regularizer=1e-2, mask=jnp.ones(3, bool))
    with pytest.raises(ValueError, match="give no `mask` with it"):
        kbr.fit_conditional(K, K, X, Y, regularizer=1e-2, mask=MASK, solver=kbr.ConjugateGradient())
