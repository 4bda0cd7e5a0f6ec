"""Filters at the edges: far observations, odd scales, other states, mixed precisions, padding."""

import equinox as eqx
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


def known(offset, reach=np.inf, **options):
    def log_likelihood(seen, state):
        squares = jnp.sum((seen - state) ** 2)
        return jnp.where(squares < reach**2, -0.5 * squares / 0.04 + offset, -jnp.inf)

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
    assert not np.isnan(run.predictive_value).any()
    assert "likelihood 0" not in str(kbr.diagnose(filt, run))


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


def test_padding_of_the_2009_filter_holds_no_observation():
    extra = 5
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


def test_labels_and_priors_do_not_widen_a_filter_of_single_precision():
    single, labels = STATES.astype(jnp.float32), (STATES[:N, 0] > 0).astype(int)
    solver = kbr.ConjugateGradient(rank=5)
    emission = fit_conditional(KERNEL, kbr.Delta(), single[:N], labels, solver=solver, **RIDGE)
    transition = fit_conditional(KERNEL, KERNEL, single[:N], single[1:], **RIDGE)
    filt = KernelBayesFilter(emission, transition, max_active=20, **RIDGE)
    assert kbr.run_filter(filt, labels[:4]).weights.dtype == jnp.float32
    model = fit_conditional(kbr.Delta(), KERNEL, labels, single[:N], **RIDGE)
    prior = kbr.embed(kbr.Delta(), jnp.array([0, 1, 1]))
    posterior = kbr.bayes_rule(model, prior, single[0], estimator="prior", **RIDGE)
    assert posterior.weights.dtype == jnp.float32
    assert kbr.chain_rule(model, prior, estimator="prior").weights.dtype == jnp.float32


def test_the_mean_of_a_moment_filter_keeps_its_digits_far_from_zero():
    """Eastings and northings in meters. The first version was wrong by .4 m on average."""
    rng, length, count = np.random.default_rng(0), 240, 200
    angles = np.cumsum(0.3 + 0.1 * rng.normal(size=length))
    states = 50 * np.stack([np.cos(angles), np.sin(angles)], 1) + 2 * rng.normal(size=(length, 2))
    seen = states[:, :1] + 5 * rng.normal(size=(length, 1))
    kernels = kbr.Gaussian(30.0), kbr.Gaussian(20.0)
    plain = kbr.Clipping(clip=False, truncation=0.0)
    found = []
    for dtype in (np.float64, np.float32):
        x, y = jnp.asarray((states + 5e5).astype(np.float32), dtype), jnp.asarray(seen, dtype)
        chosen = kbr.Landmarks(x[:60]), kbr.Landmarks(y[:40])
        maps = kbr.moments.moment_maps(*kernels, *chosen, shift=True)
        sums = kbr.moments.collect_moments(maps, x[:count], y[:count], x[1 : count + 1])
        emission = kbr.moments.fit_conditional(sums, **RIDGE)
        filt = KernelBayesFilter(emission, None, shift=True, clipping=plain, regularizer=1e-5)
        found.append(np.asarray(kbr.state_mean(filt, kbr.run_filter(filt, y[count:])), float))
    assert np.abs(found[0] - found[1]).mean() < 0.05


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
    with pytest.raises(ValueError, match=f"`covariance` {message}"):
        transition = GaussianTransition(lambda s: s, jnp.asarray(covariance))
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
        with pytest.raises(ValueError, match=r"`observations(\[1\])?` is NaN at step"):
            call()
    kbr.filter_step(filt, kbr.init_filter(filt), seen[3], observed=False)


def test_smoothing_with_a_known_transition_that_takes_inputs():
    """An input that changes nothing, and one that differs in each step against single steps."""
    steps = 7
    inputs = jnp.asarray(np.random.default_rng(2).normal(size=steps))
    emission = fit_conditional(KERNEL, KERNEL_SEEN, STATES[:N], SEEN, **RIDGE)

    def filt(mean, example):
        return KernelBayesFilter(
            emission, GaussianTransition(mean, 0.01, controls=example), regularizer=1e-2
        )

    example = jnp.zeros(())
    free = filt(lambda s: 0.9 * s, None)
    idle = filt(lambda s, u: 0.9 * s + 0 * u, example)
    run = kbr.run_filter(free, SEEN[:steps])
    again = kbr.run_filter(idle, SEEN[:steps], controls=inputs)
    expected = kbr.smooth(free, run, regularizer=0.1)
    found = kbr.smooth(idle, again, regularizer=0.1, controls=inputs)
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-12)
    moved = filt(lambda s, u: 0.9 * s + 0.1 * u, example)
    smoother = moved.smoother(emission.embed_x(run.weights).points)
    both = smoother.forward(run.weights, inputs)
    for t in range(steps):
        one = smoother.forward(run.weights[t : t + 1], inputs[t : t + 1])[0]
        np.testing.assert_allclose(both[t], one, atol=1e-12)
    assert np.abs(np.asarray(both - smoother.forward(run.weights, inputs[::-1]))).max() > 1e-4


def test_moves_are_states_and_their_covariance_is_symmetric():
    features = fit_conditional(KERNEL, KERNEL_SEEN, STATES[:N], SEEN, **RIDGE).features_x
    for covariance in ([[0.1, 0.05], [0.0, 0.1]], [[0.1, 5.0], [0.0, 0.1]]):
        with pytest.raises(ValueError, match="symmetric"):
            GaussianTransition(lambda s: s, np.array(covariance)).coordinates(
                features, STATES[:2], None
            )
    with pytest.raises(ValueError, match="must return a state of shape"):
        GaussianTransition(lambda s: s[0], 0.1).coordinates(features, STATES[:2], None)


@pytest.mark.parametrize(
    "kernel",
    [
        2.0 * kbr.Linear(),
        kbr.kernels.Warped(kbr.Linear(), jnp.tanh),
        kbr.TensorProduct((kbr.Linear(), kbr.Linear())),
    ],
)
def test_priors_in_a_kernel_without_a_constant(kernel):
    x = np.random.default_rng(3).normal(size=(30, 2))
    x = jnp.asarray(x - x.mean(axis=0))
    points = (x[:, :1], x[:, 1:]) if isinstance(kernel, kbr.TensorProduct) else x
    model = fit_conditional(kernel, KERNEL_SEEN, points, x[:, 0], **RIDGE)
    prior = kbr.embed(kernel, jax.tree.map(lambda leaf: leaf[:7], points))
    assert np.isfinite(kbr.bayes_rule(model, prior, x[0, 0], **RIDGE).weights).all()


def test_a_prior_elsewhere_is_refused_whatever_its_own_kernel_is():
    model = fit_conditional(KERNEL, KERNEL_SEEN, STATES[:N], SEEN, **RIDGE)
    with pytest.raises(ValueError, match="lies on the training x"):
        kbr.bayes_rule(model, kbr.embed(kbr.Linear(), STATES[:5] + 30), SEEN[0], **RIDGE)


def test_nan_is_no_first_observation():
    with pytest.raises(ValueError, match="NaN"):
        kbr.filtering.init_from_observation(fit(), jnp.full(2, jnp.nan), regularizer=0.1)


def test_a_loss_of_no_step_is_an_error():
    with pytest.raises(ValueError, match="No step is counted"):
        kbr.filter_loss(fit(), STATES[:6], SEEN[:6], burn_in=10)
    with pytest.raises(ValueError, match="No step is counted"):
        kbr.filter_loss(fit(), STATES[:6], SEEN[:6], counted=np.zeros(6, bool))
    with pytest.raises(ValueError, match=r"states\[1\]"):
        kbr.filter_loss(fit(), [STATES[:6], STATES[:6]], [SEEN[:6], SEEN[:5]])


def test_an_observation_beyond_reach_has_value_0_in_the_2009_filter():
    filt = fit_conditional_embedding_filter(KERNEL, KERNEL_SEEN, STATES, SEEN, **RIDGE)
    seen = SEEN[:3].at[1].set(1e6)
    values = kbr.run_filter(filt, seen, observed=np.array([True, True, False])).predictive_value
    assert values[1] == 0 and np.isnan(values[2]) and values[0] > 0


@pytest.mark.parametrize("random", [False, True])
def test_moments_are_diagnosed_by_their_own_mass(random):
    first, second = (
        kbr.greedy_landmarks(kernel, sample, rank=15)
        for kernel, sample in ((KERNEL, STATES), (KERNEL_SEEN, SEEN))
    )
    if random:
        first = kbr.features.random_fourier(KERNEL, STATES, rank=80, key=jax.random.key(0))
    maps = kbr.moments.moment_maps(KERNEL, KERNEL_SEEN, first, second, shift=True)
    moments = kbr.moments.collect_moments(maps, STATES[:N], SEEN, STATES[1:])
    clipping = kbr.Clipping(clip=False, truncation=0.0)
    emission = kbr.moments.fit_conditional(moments, **RIDGE)
    filt = KernelBayesFilter(emission, None, shift=True, clipping=clipping, **RIDGE)
    run = kbr.run_filter(filt, SEEN[:5])
    mass = kbr.filtering.diagnose(filt, run).mass
    np.testing.assert_allclose(mass, emission.total(run.weights))


def test_chunks_of_unpaired_parts_are_named():
    maps = kbr.moments.moment_maps(
        KERNEL, KERNEL_SEEN, kbr.Landmarks(STATES[:5]), kbr.Landmarks(SEEN[:5])
    )
    with pytest.raises(ValueError, match="`y` has 4 points and `x` 3"):
        kbr.moments.collect_moments(maps, iter([(STATES[:5], SEEN[:5]), (STATES[:3], SEEN[:4])]))


@pytest.mark.parametrize("landmarks", [None, 10])
def test_labels_beside_points_in_single_precision(landmarks):
    """Gram matrices of labels have the default dtype, float64 here."""
    states = STATES[:N].astype(jnp.float32)
    labels = (states[:, 0] > 0).astype(int) + (states[:, 1] > 0).astype(int)
    model = fit_conditional(KERNEL, None, states, labels, **RIDGE)
    assert kbr.bayes_rule(model, kbr.embed(KERNEL, states[:5]), 1, **RIDGE).weights.dtype == "f4"
    of_labels = None if landmarks is None else 3
    for estimator in ("pairs", "importance", "prior"):
        filt = kbr.fit_filter(
            KERNEL,
            None,
            states,
            labels,
            **RIDGE,
            posterior_regularizer=1e-3,
            estimator=estimator,
            landmarks_states=landmarks,
            landmarks_observations=of_labels,
        )
        run = kbr.run_filter(filt, labels[:5])
        assert run.weights.dtype == "f4" and np.all(np.isfinite(run.weights))
    filt = fit_conditional_embedding_filter(
        KERNEL,
        None,
        states,
        labels,
        **RIDGE,
        landmarks_states=landmarks,
        landmarks_observations=of_labels,
    )
    assert kbr.run_filter(filt, labels[:5]).weights.dtype == "f4"


def test_padding_of_an_emission_is_not_that_of_the_successors():
    """The estimator "prior" regresses on the successors of the transition, another sample."""
    mask = jnp.arange(20) < 10
    states, seen = STATES[:10], SEEN[:10]
    padded = [jnp.concatenate([part, jnp.full((10, 2), jnp.nan)]) for part in (states, seen)]
    transition = fit_conditional(KERNEL, KERNEL, STATES[20:40], STATES[21:41], **RIDGE)
    runs = []
    for emission in (
        fit_conditional(KERNEL, KERNEL_SEEN, states, seen, **RIDGE),
        fit_conditional(KERNEL, KERNEL_SEEN, *padded, mask=mask, **RIDGE),
    ):
        filt = KernelBayesFilter(emission, transition, estimator="prior", **RIDGE)
        observed = jnp.arange(4) != 0
        prior = kbr.embed(KERNEL, STATES[:5])
        state = kbr.filtering.init_filter(filt, prior)
        runs.append(kbr.run_filter(filt, SEEN[:4], observed=observed, state=state).weights)
    np.testing.assert_allclose(*runs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["pairs", "prior", "moments", "cells", "known", "song2009"])
def test_a_first_observation_beyond_reach_is_none(kind):
    """The belief is the marginal of the states, and later observations change it."""
    raw = {"clipping": kbr.Clipping(False, 0.0, False)}
    if kind in ("moments", "cells"):
        landmarks = [kbr.greedy_landmarks(KERNEL, part[:N], rank=20) for part in (STATES, SEEN)]
        cells = kbr.soft_partition(KERNEL, landmarks[0]) if kind == "cells" else None
        maps = kbr.moments.moment_maps(KERNEL, KERNEL_SEEN, *landmarks, cells=cells, shift=True)
        sums = kbr.moments.collect_moments(maps, STATES[:N], SEEN, STATES[1:])
        emission = kbr.moments.fit_conditional(sums, **RIDGE)
        filt = KernelBayesFilter(emission, None, shift=True, regularizer=1e-3, **raw)
    elif kind == "known":
        # Only states within a distance of 1 explain an observation.
        filt = known(0.0, reach=1.0, **raw)
    elif kind == "song2009":
        filt = fit_conditional_embedding_filter(KERNEL, KERNEL_SEEN, STATES, SEEN, **RIDGE)
    else:
        filt = fit(estimator=kind, **raw)
    state, output = kbr.init_from_observation(filt, jnp.full(2, 1e3), regularizer=1e-3)
    expected = jnp.mean(STATES[1:] if kind == "song2009" else STATES[:N], axis=0)
    np.testing.assert_allclose(kbr.state_mean(filt, output), expected, atol=0.02)
    run = kbr.run_filter(filt, SEEN[1:9], state=state)
    assert float(jnp.max(jnp.abs(kbr.state_mean(filt, run)))) > 0.3


def test_predictions_of_a_list_of_runs():
    filt = fit()
    runs = kbr.run_filter(filt, [SEEN[:4], SEEN[:2]])
    for run, ahead in zip(runs, kbr.predict(filt, runs, 2), strict=True):
        alone = kbr.predict(filt, run, 2)
        np.testing.assert_array_equal(ahead.weights, alone.weights)


def test_the_filter_of_2009_as_printed_has_no_mass_to_diagnose():
    options = {"estimator": "song2009", **RIDGE}
    filt = fit_conditional_embedding_filter(KERNEL, KERNEL_SEEN, STATES[:N], SEEN, **options)
    assert "sum to far from 1" not in str(kbr.diagnose(filt, kbr.run_filter(filt, SEEN[:9])))


def test_the_covariance_of_a_known_transition_is_checked_at_once():
    for covariance, words in ((-0.05, "negative"), ([[0.1, 0.3], [-0.2, 0.1]], "symmetric")):
        with pytest.raises(ValueError, match=words):
            GaussianTransition(lambda s, u: s, jnp.asarray(covariance), controls=jnp.ones(1))


def test_known_transitions_of_networks_are_pytrees():
    class Move(eqx.Module):
        net: eqx.nn.MLP

        def __call__(self, s):
            return s + 0.1 * self.net(s)

    emission = fit_conditional(KERNEL, KERNEL_SEEN, STATES[:N], SEEN, **RIDGE)
    move = Move(eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0)))
    filt = KernelBayesFilter(emission, GaussianTransition(move, 0.05), regularizer=1e-4)
    step = jax.jit(kbr.filter_step)(filt, kbr.init_filter(filt), SEEN[0])[1]
    np.testing.assert_allclose(step.weights, kbr.run_filter(filt, SEEN[:1]).weights[0], rtol=1e-6)
    jax.grad(lambda f: kbr.filter_loss(f, STATES[:5], SEEN[:5]))(filt)
