"""Padding by a mask.

The result is that of the rest, and samples of several sizes share one compiled program.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

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


close = closeness(1e-7, 1e-9)


@pytest.mark.parametrize("kind", LANDMARKS)
def test_conditional_embedding(kind):
    padded = kbr.fit_conditional(K, K, *BROKEN, regularizer=1e-2, mask=MASK, **LANDMARKS[kind])
    model = kbr.fit_conditional(K, K, X[KEPT], Y[KEPT], regularizer=1e-2, **LANDMARKS[kind])
    prior = kbr.embed(K, X[:3])
    options = {"regularizer": 1e-3, "clipping": kbr.Clipping(truncation=0.1)}

    @eqx.filter_jit
    def embeddings(m):
        return (
            kbr.condition(m, X[0]),
            kbr.condition_centered(m, X[:2]),
            kbr.condition_centered(m, X[:2], estimator="song2009"),
            kbr.sum_rule(m, prior),
            kbr.bayes_rule(m, prior, NEW, **options),
            kbr.bayes_rule(m, prior, NEW, estimator="importance", **options),
            kbr.bayes_rule(m, prior, NEW, estimator="prior", **options),
        )

    (*found, on_prior), (*expected, expected_on_prior) = embeddings(padded), embeddings(model)
    for one, other in zip(found, expected, strict=True):
        close(np.asarray(one.weights)[..., KEPT], other.weights)
        assert not np.any(np.delete(one.weights, KEPT, axis=-1))
    close(on_prior.weights, expected_on_prior.weights)


@pytest.mark.parametrize(
    ("estimator", "landmarks"), [("prior", None), ("pairs", 6), ("importance", None)]
)
def test_filter(estimator, landmarks):
    def fit(states, observations, successors, mask=None):
        return kbr.fit_filter(
            K,
            K,
            states,
            observations,
            successors=successors,
            mask=mask,
            regularizer=1e-2,
            posterior_regularizer=1e-3,
            shift=False,
            estimator=estimator,
            landmarks_states=landmarks,
            landmarks_observations=landmarks,
        )

    after = X[::-1]
    padded, filt = fit(*BROKEN, after, MASK), fit(X[KEPT], Y[KEPT], after[KEPT])
    weights = kbr.run_filter(padded, NEW).weights
    close(weights[:, KEPT], kbr.run_filter(filt, NEW).weights)
    assert not np.any(np.delete(weights, KEPT, axis=1))


def test_a_padded_sequence_is_the_shorter_sequence():
    options = {"regularizer": 1e-2, "posterior_regularizer": 1e-3}
    for states in (X, X[:-1]):
        count = 12
        observations, extra = Y[:-1], states.shape[0] - (N - 1)
        mask = jnp.arange(states.shape[0]) < count + extra
        filt = kbr.fit_filter(K, K, states[: count + extra], observations[:count], **options)
        padded = kbr.fit_filter(K, K, states, observations, mask=mask, **options)
        used = count - 1 + extra
        close(kbr.run_filter(padded, NEW).weights[:, :used], kbr.run_filter(filt, NEW).weights)


def test_sizes_share_one_program():
    traces = []

    @eqx.filter_jit
    def run(x, y, mask):
        traces.append(None)
        filt = kbr.fit_filter(
            K, K, x, y, successors=x[::-1], mask=mask, regularizer=1e-2, posterior_regularizer=1e-3
        )
        return kbr.run_filter(filt, NEW).weights

    for count in (5, 12, 20):
        mask = jnp.arange(N) < count
        weights = run(X, Y, mask)
        filt = kbr.fit_filter(
            K,
            K,
            X[:count],
            Y[:count],
            successors=X[::-1][:count],
            regularizer=1e-2,
            posterior_regularizer=1e-3,
        )
        close(weights[:, :count], kbr.run_filter(filt, NEW).weights)
    assert len(traces) == 1


def test_sequences_of_unequal_length_in_one_batch():
    filt = kbr.fit_filter(K, K, X, Y, regularizer=1e-2, posterior_regularizer=1e-3)
    lengths = jnp.asarray([6, 4, 1])
    batch = jnp.where(jnp.arange(6)[None, :, None] < lengths[:, None, None], NEW[None], jnp.nan)
    observed = jnp.arange(6)[None] < lengths[:, None]
    steps = jax.vmap(lambda o, m: kbr.run_filter(filt, o, observed=m))(batch, observed)
    for weights, length in zip(steps.weights, lengths, strict=True):
        close(weights[:length], kbr.run_filter(filt, NEW[:length]).weights)
    assert bool(jnp.all(jnp.isfinite(steps.weights)))


def test_bad_masks():
    with pytest.raises(
        ValueError, match=r"`mask` must be a boolean mask of shape \(20,\), got bool\[3\]"
    ):
        kbr.fit_conditional(K, K, X, Y, regularizer=1e-2, mask=jnp.ones(3, bool))
    with pytest.raises(ValueError, match="give no `mask` with it"):
        kbr.fit_conditional(K, K, X, Y, regularizer=1e-2, mask=MASK, solver=kbr.ConjugateGradient())


def test_the_filter_of_2009_takes_a_mask():
    after = X[::-1]

    def weights(states, observations, successors, mask=None):
        filt = kbr.fit_conditional_embedding_filter(
            K, K, states, observations, successors=successors, regularizer=1e-2, mask=mask
        )
        return kbr.run_filter(filt, NEW).weights

    padded, exact = weights(*BROKEN, after, MASK), weights(X[KEPT], Y[KEPT], after[KEPT])
    close(padded[:, KEPT], exact)
    assert not np.any(np.delete(padded, KEPT, axis=1))


def _padded(points, extra):
    filling = jnp.full((extra, *points.shape[1:]), jnp.nan)
    return jnp.concatenate([points, filling])


def test_default_kernels_do_not_see_padding():
    extra = 270
    x = jnp.asarray(np.random.default_rng(0).normal(size=(30, 3))) + jnp.asarray([3.0, 0, 0])
    y, mask = jnp.sin(2 * x[:, 0]), jnp.arange(30 + extra) < 30

    def fit(x, y, mask):
        return kbr.fit_conditional(None, None, x, y, regularizer=1e-3, mask=mask)

    plain, filled = fit(x, y, None), fit(_padded(x, extra), _padded(y, extra), mask)
    traced = jax.jit(fit)(_padded(x, extra), _padded(y, extra), mask)
    for model in (filled, traced):
        for name in ("kernel_x", "kernel_y"):
            found, expected = getattr(model, name), getattr(plain, name)
            np.testing.assert_allclose(found.bandwidth, expected.bandwidth, rtol=1e-10)


def test_default_kernels_of_more_points_than_are_looked_at():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2300, 2)))
    mask = jnp.arange(2600) < 2300
    found = kbr.kernels.default_kernel(_padded(x, 300), mask)
    expected = kbr.kernels.default_kernel(x)
    np.testing.assert_allclose(found.bandwidth, expected.bandwidth, rtol=1e-10)
