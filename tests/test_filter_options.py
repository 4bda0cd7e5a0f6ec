"""Options of the kernel Bayes filter that must not change the answer, and those that must."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_filtering import rotation

import kbr_jax as kbr
from kbr_jax.rules._active import active

RNG = np.random.default_rng(5)
STATES = jnp.asarray(np.cumsum(0.3 * RNG.normal(size=(61, 2)), axis=0))
OBSERVATIONS = STATES[:60] + jnp.asarray(0.1 * RNG.normal(size=(60, 2)))
TESTS = OBSERVATIONS[10:22] + 0.05


def fit(**options):
    options = {"regularizer": 1e-3, "posterior_regularizer": 1e-4, **options}
    return kbr.fit_filter(kbr.Gaussian(0.7), kbr.Gaussian(0.6), STATES, OBSERVATIONS, **options)


def weights(**options):
    return np.asarray(kbr.run_filter(fit(**options), TESTS).weights)


@pytest.mark.parametrize("landmarks", [None, 20])
@pytest.mark.parametrize("estimator", ["pairs", "importance"])
def test_the_largest_weights_suffice_where_no_others_are_active(estimator, landmarks):
    options = {
        "estimator": estimator,
        "clipping": kbr.Clipping(truncation=0.1),
        "landmarks_states": landmarks,
        "landmarks_observations": landmarks,
    }
    run = kbr.run_filter(fit(**options), TESTS)
    active = int(jnp.max(jnp.sum(run.predicted[1:] > 0, axis=1)))
    assert active < 50
    prior = kbr.embed(kbr.Gaussian(0.7), STATES[8:13])
    full = kbr.run_filter(fit(**options), TESTS, prior=prior)
    count = int(jnp.max(jnp.sum(full.predicted > 0, axis=1)))
    few = kbr.run_filter(fit(max_active=count, **options), TESTS, prior=prior)
    np.testing.assert_allclose(few.weights, full.weights, rtol=1e-7, atol=1e-10)


def test_fewer_than_the_active_weights_is_an_approximation():
    few, full = weights(max_active=5), weights()
    assert np.all(np.sum(few != 0, axis=1) <= 5) and np.abs(few - full).max() > 1e-6


@pytest.mark.parametrize("count", [3, 10, 40])
def test_active_weights_stand_for_all(count):
    """Masses that are chosen and divided by their shares have the sum of all."""
    rng = np.random.default_rng(0)
    masses, likelihood = rng.gamma(0.3, size=(2, 500))
    index, shares = active(jnp.asarray(masses), jnp.asarray(likelihood), count)
    sizes = masses * (likelihood / (masses @ likelihood / masses.sum()) + 0.1)
    # The level by bisection.
    low, high = 0.0, sizes.sum()
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(sizes / level, 1).sum() > count else (low, level)
    expected = np.minimum(sizes / level, 1)
    np.testing.assert_allclose(shares, expected[index], rtol=1e-8)
    assert len(set(np.asarray(index).tolist())) == count
    assert set(np.flatnonzero(expected == 1)) <= set(np.asarray(index).tolist())
    np.testing.assert_allclose(np.sum(sizes[index] / shares), sizes.sum(), rtol=1e-8)
    few = np.where(np.arange(500) % 200 == 7, masses, 0)  # three
    index, shares = active(jnp.asarray(few), jnp.asarray(likelihood), count)
    assert set(np.asarray(index[:3]).tolist()) == set(np.flatnonzero(few))
    np.testing.assert_allclose(shares, np.arange(count) < 3, rtol=1e-12)
    nothing = active(jnp.zeros(500), jnp.asarray(likelihood), count)[1]
    np.testing.assert_array_equal(nothing, 0)


def test_active_weights_keep_their_worth_in_many_training_pairs():
    """The 30 largest of 1500 weights lie so near each other that they know no doubt."""
    rng = np.random.default_rng(1)
    states = np.zeros((1900, 1))
    for i in range(1, 1900):
        states[i] = 0.95 * states[i - 1] + 0.3 * rng.normal(size=1)
    seen = states + 0.7 * rng.normal(size=states.shape)
    options = {"regularizer": 0.01, "posterior_regularizer": 0.05, "estimator": "importance"}
    options |= {"landmarks_states": 40, "clipping": kbr.Clipping(truncation=0.01)}
    filt = kbr.fit_filter(
        kbr.Gaussian(0.3), kbr.Gaussian(0.4), states[:1500], seen[:1500], max_active=30, **options
    )
    run = kbr.run_filter(filt, seen[1500:])
    belief = kbr.belief(filt, run)
    errors = np.abs(np.asarray(kbr.mean(belief)) - states[1500:])
    level = np.asarray(kbr.embedding.credible_level(belief, jnp.asarray(states[1500:])))
    assert np.mean(errors) < 0.4 and 0.6 < np.mean(level < 0.8) < 0.9  # of largest: .62, .20


@pytest.mark.parametrize("estimator", ["pairs", "importance"])
def test_from_a_flat_prior_the_most_likely_weights_are_taken(estimator):
    at, options = 40, {"estimator": estimator}
    few, full = (
        kbr.run_filter(
            filt,
            OBSERVATIONS[at : at + 1],
            output_fn=lambda step, filt=filt: kbr.state_mean(filt, step),
        )[0]
        for filt in (fit(max_active=15, **options), fit(**options))
    )
    assert (
        np.linalg.norm(few - full)
        < 0.1
        < np.linalg.norm(kbr.mean(fit().embed(jnp.eye(60)[:15].mean(0))) - full)
    )


def moment_filter(kernels, states, observations, cells):
    states, observations = (leaf.astype(jnp.float64) for leaf in (states, observations))
    pairs = states[:-1], observations[: len(states) - 1]
    ls, lo = (
        kbr.greedy_landmarks(k, p, rank=r) for k, p, r in zip(kernels, pairs, (8, 6), strict=True)
    )
    maps = kbr.moments.moment_maps(*kernels, ls, lo, cells=cells, shift=True)
    moments = kbr.moments.collect_moments(maps, *pairs, states[1:])
    emission = kbr.moments.fit_conditional(moments, regularizer=1e-3)
    clipping = kbr.Clipping(False, 0.0) if cells is None else kbr.Clipping()
    return kbr.KernelBayesFilter(emission, None, regularizer=1e-4, shift=True, clipping=clipping)


def filters(states, observations):
    kernels = kbr.Gaussian(0.7), kbr.Gaussian(0.6)
    options = {"regularizer": 1e-3, "posterior_regularizer": 1e-4}
    landmarks = {"landmarks_states": 8, "landmarks_observations": 6}
    yield kbr.fit_filter(*kernels, states, observations, **options)
    yield kbr.fit_filter(
        *kernels, states, observations, estimator="importance", **options, **landmarks
    )
    yield moment_filter(kernels, states, observations, None)
    cells = kbr.soft_partition(kernels[0], kbr.Landmarks(states[:40:5]))
    yield moment_filter(kernels, states, observations, cells)
    yield kbr.fit_conditional_embedding_filter(*kernels, states, observations, regularizer=1e-3)


def filter_of(number, states, observations):
    """One of `filters`; those behind it are not fitted."""
    return next(itertools.islice(filters(states, observations), number, None))


@pytest.mark.parametrize("number", range(4))
def test_an_observation_beyond_all_kernels_is_as_if_missing(number):
    filt = filter_of(number, STATES, OBSERVATIONS)
    stray = kbr.run_filter(filt, TESTS.at[5].set(1e3))
    missing = kbr.run_filter(filt, TESTS, observed=jnp.arange(12) != 5)
    assert stray.predictive_value[5] == 0 and np.isnan(missing.predictive_value[5])
    for a, b in zip(*(jax.tree.leaves(r.weights) for r in (stray, missing)), strict=True):
        np.testing.assert_array_equal(np.delete(a, 5, 0), np.delete(b, 5, 0))
    with pytest.raises(ValueError, match="`observations` is NaN at step 5"):
        kbr.run_filter(filt, TESTS.at[5].set(jnp.nan))
    run = jax.jit(lambda filt, seen: kbr.state_mean(filt, kbr.run_filter(filt, seen)))
    assert np.all(np.isnan(run(filt, TESTS.at[5].set(jnp.nan))[6:]))


@pytest.mark.parametrize(
    ("number", "narrow"),
    [
        *((number, "states") for number in (0, 1, 3, 4)),  # moments are collected in float64
        *((0, narrow) for narrow in ("observations", "new")),
    ],
)
def test_samples_of_two_precisions(number, narrow):
    def single(name, points):
        return points.astype(jnp.float32 if name == narrow else points.dtype)

    filt = filter_of(number, single("states", STATES), single("observations", OBSERVATIONS))
    prior = kbr.embed(kbr.Gaussian(0.7), single("new", STATES[:3]))
    run = jax.tree.leaves(kbr.run_filter(filt, single("new", TESTS), prior=prior))[0]
    step = kbr.filter_step(filt, kbr.init_filter(filt, prior), single("new", TESTS[0]))[1]
    exact = filter_of(number, STATES, OBSERVATIONS)
    expected = jax.tree.leaves(
        kbr.run_filter(exact, TESTS, prior=kbr.embed(kbr.Gaussian(0.7), STATES[:3]))
    )[0]
    np.testing.assert_allclose(run, expected, atol=2e-2)
    np.testing.assert_allclose(jax.tree.leaves(step)[0], run[0], rtol=1e-3, atol=1e-3)


def test_two_models_with_their_own_regularizers():
    kernels, o = (kbr.Gaussian(0.7), kbr.Gaussian(0.6)), OBSERVATIONS
    s, s_next = STATES[:-1], STATES[1:]
    emission = kbr.fit_conditional(*kernels, s, o, regularizer=1e-3)

    def run(ridge, shift):
        transition = kbr.fit_conditional(kernels[0], kernels[0], s, s_next, regularizer=ridge)
        filt = kbr.KernelBayesFilter(emission, transition, regularizer=1e-4, shift=shift)
        return np.asarray(kbr.run_filter(filt, TESTS).weights)

    same = run(1e-3, False)
    np.testing.assert_allclose(same, weights(shift=False), rtol=0, atol=1e-12)
    assert np.abs(run(1e-1, False) - same).max() > 1e-4
    np.testing.assert_allclose(run(1e-1, True), weights(), rtol=0, atol=1e-12)


def test_half_known_models_have_less_error_than_a_learned_one():
    """On the rotation of F11, in the mean of four training sets."""
    kernels = kbr.Gaussian(0.6), kbr.Gaussian(1.2)

    def move(state):
        angle = jnp.arctan2(state[1], state[0]) + 0.3
        return jnp.stack([jnp.cos(angle), jnp.sin(angle)])

    def simulate(key, state):
        return move(state) + 0.2 * jax.random.normal(key, (2,))

    def likelihood(o, s):
        return -jnp.sum((o - s) ** 2) / (2 * 0.2**2)

    gaussian = kbr.GaussianTransition(move, 0.2**2)
    simulated = kbr.SimulatedTransition(simulate, key=jax.random.key(0), num_draws=30)

    def models(seed):
        states, seen = (jnp.asarray(part) for part in rotation(100, seed))
        s, s_next, o = states[:-1], states[1:], seen[:-1]
        emission = kbr.fit_conditional(*kernels, s, o, regularizer=3e-4)
        transition = kbr.fit_conditional(kernels[0], kernels[0], s, s_next, regularizer=3e-4)
        known = kbr.known_likelihood(kernels[0], s, likelihood, regularizer=3e-4)
        learned = emission, transition
        return learned, (emission, gaussian), (emission, simulated), (known, transition)

    def error(pair, seed):
        truth, tests = (jnp.asarray(part) for part in rotation(150, seed))
        clipping = kbr.Clipping(truncation=0.0)
        options = {"regularizer": 1e-2, "estimator": "importance", "clipping": clipping}
        filt = kbr.KernelBayesFilter(*pair, **options)
        estimates = kbr.state_mean(filt, kbr.run_filter(filt, tests))
        return float(jnp.mean(jnp.sum((estimates - truth) ** 2, axis=1)[20:]))

    errors = [[error(pair, seed + 1) for pair in models(seed)] for seed in (0, 2, 4, 6)]
    learned, *known = np.mean(errors, axis=0)
    assert np.all(np.asarray(known) > 0.035) and np.all(np.asarray(known) < 0.99 * learned)
    assert abs(known[0] - known[1]) < 0.02 * learned


def test_a_gaussian_move_is_the_mean_of_many_draws():
    kernel = kbr.Gaussian(jnp.asarray([0.7, 1.1]))
    s = STATES[:20]
    root = jnp.asarray([[0.3, 0.0], [0.1, 0.2]])
    gaussian = kbr.GaussianTransition(lambda s: 0.9 * s, root @ root.T)
    simulated = kbr.SimulatedTransition(
        lambda key, s: 0.9 * s + root @ jax.random.normal(key, (2,)),
        key=jax.random.key(1),
        num_draws=4000,
    )
    for landmarks in (None, kbr.greedy_landmarks(kernel, s, rank=7)):
        model = kbr.fit_conditional(kernel, kernel, s, s, regularizer=1e-3, landmarks_x=landmarks)
        exact, drawn = (
            known.coordinates(model.features_x, s, None) for known in (gaussian, simulated)
        )
        np.testing.assert_allclose(exact, drawn, atol=0.04)


def test_a_known_likelihood_is_bayes_rule_on_the_training_states():
    s, s_next = STATES[:-1], STATES[1:]
    kernel = kbr.Gaussian(0.7)
    emission = kbr.known_likelihood(
        kernel, s, lambda o, s: -jnp.sum((o - s) ** 2) / (2 * 0.1**2), regularizer=1e-3
    )
    transition = kbr.fit_conditional(kernel, kernel, s, s_next, regularizer=1e-3)
    filt = kbr.KernelBayesFilter(emission, transition)
    run = kbr.run_filter(filt, TESTS)
    gaps = np.asarray(TESTS)[:, None] - np.asarray(s)[None]
    density = np.exp(-np.sum(gaps**2, axis=2) / 0.02)
    joint = np.asarray(run.predicted) * density
    np.testing.assert_allclose(run.weights, joint / joint.sum(1, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(run.predictive_value, joint.sum(1), rtol=1e-9)
    # Far outside the likelihoods underflow, and their ratios do not.
    far = kbr.run_filter(filt, TESTS[:1] + 20.0)
    assert far.predictive_value[0] == 0
    nearest = int(np.argmin(np.sum((np.asarray(s) - np.asarray(TESTS[0]) - 20) ** 2, axis=1)))
    assert int(np.argmax(far.weights[0])) == nearest and np.isclose(far.weights[0].sum(), 1)


def walking(n=200, seed=0):
    rng = np.random.default_rng(seed)
    states = np.clip(np.cumsum(0.2 * rng.normal(size=(n, 1)), axis=0), -2, 2)
    return jnp.asarray(states), jnp.asarray(states + 0.2 * rng.normal(size=(n, 1)))


def diagnosed(change=lambda o: o, bandwidth=0.5, regularizer=1e-4, delta=1e-4, **options):
    states, seen = walking()
    filt = kbr.fit_filter(
        kbr.Gaussian(bandwidth),
        kbr.Gaussian(0.5),
        states,
        seen,
        regularizer=regularizer,
        posterior_regularizer=delta,
        **options,
    )
    run = kbr.run_filter(filt, change(walking(60, 1)[1]))
    return run, kbr.diagnose(filt, run)


def test_a_good_run_has_no_notes():
    run, found = diagnosed()
    assert found.notes == () and "No problem" in str(found)
    shares = np.maximum(run.predicted, 0)
    shares = shares / shares.sum(1, keepdims=True)
    np.testing.assert_allclose(found.effective_size, 1 / (shares**2).sum(1))
    np.testing.assert_allclose(found.mass, np.asarray(run.weights).sum(1))


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("prior stands on fewer than 3 points", {"bandwidth": 0.003, "regularizer": 1e-8}),
        ("have likelihood 0", {"change": lambda o: o.at[5].set(1e3)}),
        ("From step 20 to 39", {"change": lambda o: o.at[20:40].set(-o[20:40] + 5)}),
        ("sum to far from 1", {"delta": 100.0}),
        (
            "sum to far from 1, first at step 10",
            {"change": lambda o: o.at[10].set(5.5), "clipping": kbr.Clipping(False, 0.0, False)},
        ),
    ],
)
def test_a_bad_run_is_diagnosed(words, settings):
    run, found = diagnosed(**settings)
    assert any(words in note for note in found.notes), (str(found), run.predictive_value)


@pytest.mark.parametrize("landmarks", [None, 60])
@pytest.mark.parametrize("estimator", ["pairs", "importance"])
def test_a_reading_like_none_in_training_counts_as_missing(estimator, landmarks):
    """Its tiny likelihoods pointed somewhere, and the belief was sure of it."""
    filt = fit(estimator=estimator, landmarks_observations=landmarks)
    reach = 0.6 * np.sqrt(2 * 52 * np.log(2))
    largest = float(jnp.max(OBSERVATIONS[:, 0]))
    for far, missing in ((1.3, True), (0.5, False)):
        seen = TESTS.at[5].set(jnp.array([largest + far * reach, OBSERVATIONS[0, 1]]))
        run = kbr.run_filter(filt, seen)
        without = kbr.run_filter(filt, seen, observed=jnp.arange(12) != 5)
        assert (float(run.predictive_value[5]) == 0) == missing
        assert np.allclose(run.weights, without.weights, atol=1e-9) == missing


def test_diagnose_takes_runs():
    states, seen = walking()
    filt = kbr.fit_filter(None, None, states, seen, regularizer=1e-3, posterior_regularizer=1e-4)
    runs = kbr.run_filter(filt, [seen[:20], seen[:30]])
    assert [one.mass.shape for one in kbr.diagnose(filt, runs)] == [(20,), (30,)]
    with pytest.raises(ValueError, match="run of one sequence"):
        kbr.diagnose(filt, jax.tree.map(lambda leaf: leaf[None], runs[0]))


def test_boolean_observations_stay_booleans():
    """A likelihood with `~` read the integer -2."""

    def log_likelihood(seen, state):
        quiet, loud = jnp.log(jnp.asarray([0.9, 0.2])), jnp.log(jnp.asarray([0.1, 0.8]))
        return jnp.where(~seen, quiet[state], loud[state])

    emission = kbr.filtering.known_likelihood(
        kbr.Delta(), jnp.array([0, 1]), log_likelihood, regularizer=1e-9
    )
    still = kbr.filtering.SimulatedTransition(lambda key, state: state, key=jax.random.key(0))
    filt = kbr.KernelBayesFilter(emission, still)
    run = kbr.run_filter(filt, jnp.array([True]))
    np.testing.assert_allclose(run.weights[0], [1 / 9, 8 / 9], rtol=1e-6)
    # A start from an observation is Bayes' rule from the marginal, like a run.
    _, first = kbr.init_from_observation(filt, jnp.array(True), regularizer=1e-3)
    for name in ("weights", "predicted", "predictive_value"):
        np.testing.assert_allclose(getattr(first, name), getattr(run, name)[0], rtol=1e-6)


def test_matrices_are_states_and_observations():
    turns = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (12, 3, 3)))[0]
    markers, options = turns[:, :, :2], {"regularizer": 1e-2, "posterior_regularizer": 1e-2}
    one = kbr.fit_filter(kbr.Gaussian(1.0), kbr.Gaussian(1.0), turns, markers, **options)
    other = kbr.fit_filter(
        kbr.Gaussian(1.0),
        kbr.Gaussian(1.0),
        markers[:-1],
        markers[:-1],
        successors=markers[1:],
        **options,
    )
    assert one.emission.x.shape == (11, 3, 3) and other.emission.x.shape == (11, 3, 2)
