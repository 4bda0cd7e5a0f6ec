"""The smoother against NumPy, step by step; exact forward-backward; lags, gaps, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_filtering import (
    EPSILON,
    GAPS,
    H_O,
    H_S,
    MASK,
    OBSERVED,
    STATES,
    STEPS,
    TEST,
    T,
    by_state,
    close,
    every_filter,
    fitted,
    forward_filter,
    gram_function,
    model_sample,
    nonlinear_sequence,
    numpy_clean,
    random_model,
    rotation,
    support,
    table_filter,
)

import kbr_jax as kbr

DELTA_S = 0.05


def numpy_ratio(estimator, joint, k, columns):
    """Density ratio at the successors, `[n, rows]`, by a solve that the library does not do."""
    d, identity = np.diag(joint), np.eye(len(joint))
    if estimator == "importance":
        root = np.sqrt(d)
        inner = np.linalg.solve(root @ k @ root + DELTA_S * identity, root @ columns)
        return (columns - k @ root @ inner) / DELTA_S
    return k @ np.linalg.solve((d @ k) @ (d @ k) + DELTA_S * identity, d @ columns)


def numpy_smooth(ks, filt, beliefs, estimator, cleaning, clip, normalize):
    """The backward recursion of the docstring of `smooth`."""
    s, s_next, points = STATES[:-1], STATES[1:], np.asarray(support(filt))
    forward = np.linalg.solve(ks(s, s) + T * EPSILON * np.eye(T), ks(s, points))
    smoothed = [numpy_clean(beliefs[-1], False, 0.0, normalize)]
    for belief in beliefs[-2::-1]:
        joint = numpy_clean(forward @ belief, **cleaning)
        ratio = numpy_ratio(estimator, joint, ks(s_next, s_next), ks(s_next, points) @ smoothed[-1])
        ratio = np.maximum(ratio, 0) if clip else ratio
        smoothed.append(numpy_clean(belief * (forward.T @ ratio), False, 0.0, normalize))
    return np.stack(smoothed[::-1])


CLEANING = {"clip": True, "truncation": 0.15, "normalize": True}
CLIPPING = kbr.Clipping(**CLEANING)


@pytest.mark.parametrize(
    "landmarks, filtered, shift, estimator, clip, normalize",
    [
        (None, "pairs", True, "pairs", False, True),
        (None, "prior", False, "pairs", False, False),
        (None, "importance", False, "importance", True, True),
        (5, "pairs", False, "importance", False, True),
        (5, "prior", False, "importance", True, True),
        (5, "importance", True, "pairs", False, True),
    ],
)
def test_smoother(landmarks, filtered, shift, estimator, clip, normalize):
    filt = fitted(filtered, shift, landmarks, 3)
    run = kbr.run_filter(filt, jnp.asarray(GAPS), observed=jnp.asarray(MASK))
    options = {"estimator": estimator, "positive": clip, "normalize": normalize}
    smoothed = kbr.smooth(filt, run, regularizer=DELTA_S, clipping=CLIPPING, **options)
    ks = gram_function(filt.emission.features_x, H_S)
    beliefs = np.asarray(run.weights)
    expected = numpy_smooth(ks, filt, beliefs, estimator, CLEANING, clip, normalize)
    close(smoothed.weights, expected, 1e-7)
    close(smoothed.points, support(filt))


def test_importance_weights_clip_a_signed_joint():
    filt = fitted("pairs", False, None, 0)
    run = kbr.run_filter(filt, jnp.asarray(TEST))
    cleaning = {"clip": True, "truncation": 0.0, "normalize": False}
    options = {"regularizer": DELTA_S, "estimator": "importance"}
    smoothed = kbr.smooth(filt, run, clipping=kbr.Clipping(**cleaning), **options)
    ks, beliefs = gram_function(filt.emission.features_x, H_S), np.asarray(run.weights)
    expected = numpy_smooth(ks, filt, beliefs, "importance", cleaning, True, True)
    close(smoothed.weights, expected, 1e-7)


def test_a_lag_is_the_sequence_cut_short():
    filt = fitted("importance", False, 5, 3)
    run = kbr.run_filter(filt, jnp.asarray(GAPS), observed=jnp.asarray(MASK))
    options = {"regularizer": DELTA_S, "estimator": "importance", "clipping": CLIPPING}
    whole = kbr.smooth(filt, run, **options).weights
    ks, beliefs = gram_function(filt.emission.features_x, H_S), np.asarray(run.weights)
    for lag in (1, 3):
        lagged = kbr.smooth(filt, run, lag=lag, **options).weights
        for t in range(STEPS):
            part = beliefs[: t + lag + 1]
            cut = numpy_smooth(ks, filt, part, "importance", CLEANING, True, True)
            close(lagged[t], cut[t], 1e-7)
    for lag in (STEPS - 1, STEPS, 50):
        close(kbr.smooth(filt, run, lag=lag, **options).weights, whole, 0, 0)
    close(whole[-1], beliefs[-1] / beliefs[-1].sum())
    assert not np.allclose(whole[0], lagged[0])


@pytest.mark.parametrize("make", every_filter())
def test_every_filter_is_smoothed(make):
    filt = make()
    run = kbr.run_filter(filt, jnp.asarray(GAPS), observed=jnp.asarray(MASK))
    plain = isinstance(filt, kbr.KernelBayesFilter) and not filt.clipping.clip
    clipping = kbr.Clipping(False, 0.0) if plain else kbr.Clipping()
    # As printed in 2009 the weights sum to 0.
    sums = getattr(filt, "estimator", None) != "song2009"
    smoothed = kbr.smooth(filt, run, regularizer=DELTA_S, clipping=clipping, normalize=sums)
    filtered = kbr.belief(filt, run)
    assert smoothed.weights.shape == filtered.weights.shape
    assert np.all(np.isfinite(smoothed.weights))
    last = filtered.weights[-1]
    if sums:
        close(smoothed.weights[-1], last / last.sum())
        assert not np.allclose(smoothed.weights[0], filtered.weights[0])


def test_vmap_over_sequences_equals_a_loop():
    filt = fitted("pairs", True, 5, 3)
    batch = jnp.asarray(
        np.stack([TEST, nonlinear_sequence(STEPS, 2)[1], nonlinear_sequence(STEPS, 3)[1]])
    )
    for lag in (None, 2):

        def run(sequence, lag=lag):
            run = kbr.run_filter(filt, sequence)
            return kbr.smooth(filt, run, regularizer=DELTA_S, lag=lag).weights

        together = jax.jit(jax.vmap(run))(batch)
        assert together.shape == (3, STEPS, T)
        for index, sequence in enumerate(batch):
            close(together[index], run(sequence))


def test_a_single_belief_is_its_own_smoothed_belief():
    filt = fitted("pairs", True, 5, 3)
    run = kbr.run_filter(filt, jnp.asarray(TEST[:1]))
    smoothed = kbr.smooth(filt, run, regularizer=DELTA_S).weights
    close(smoothed, run.weights / run.weights.sum())


def test_padding_changes_nothing():
    kernels, mask = (kbr.Gaussian(H_S), kbr.Gaussian(H_O)), np.arange(T + 4) < T + 1
    padded = (
        np.concatenate([STATES, np.full((3, 2), np.nan)]),
        np.concatenate([OBSERVED, np.full((3, 2), np.nan)]),
    )
    options = {"regularizer": EPSILON, "posterior_regularizer": 0.02}

    @jax.jit
    def run(states, observations, **more):
        filt = kbr.fit_filter(*kernels, states, observations, **options, **more)
        run = kbr.run_filter(filt, jnp.asarray(TEST))
        return kbr.smooth(filt, run, regularizer=DELTA_S).weights

    smoothed = run(*padded, mask=jnp.asarray(mask))
    close(smoothed[:, :T], run(STATES, OBSERVED))
    close(smoothed[:, T:], np.zeros((STEPS, 3)), 0, 0)


# Hidden Markov models.


def forward_backward(filtered, transition):
    """Smoothed probabilities from filtered ones: gamma_t = p_t * P (gamma_{t+1} / (p_t P))."""
    smoothed = [filtered[-1]]
    for belief in filtered[-2::-1]:
        smoothed.append(belief * (transition @ (smoothed[-1] / (belief @ transition))))
    return np.stack(smoothed[::-1])


def brute_force_posterior(initial, transition, emission, sequence):
    """Marginals by summing the probability of every path."""
    marginals = np.zeros((len(sequence), len(initial)))
    for path in np.ndindex(*[len(initial)] * len(sequence)):
        probability = initial[path[0]] * emission[path[0], sequence[0]]
        for t in range(1, len(sequence)):
            probability *= transition[path[t - 1], path[t]] * emission[path[t], sequence[t]]
        marginals[np.arange(len(path)), path] += probability
    return marginals / marginals.sum(1, keepdims=True)


@pytest.mark.parametrize(
    "filtered_by, estimator",
    [("prior", "pairs"), ("pairs", "pairs"), ("importance", "importance")],
)
def test_exact_forward_backward(filtered_by, estimator):
    transitions, emission, sequence = random_model(1)
    s, o, s_next, emission = model_sample(transitions, emission)
    filt, matrix = (
        table_filter(s, o, s_next, filtered_by),
        transitions / transitions.sum(1, keepdims=True),
    )
    initial = np.bincount(s, minlength=3) / len(s)
    filtered = forward_filter(initial, matrix, emission, sequence)
    exact = forward_backward(filtered, matrix)
    close(
        forward_backward(filtered[:6], matrix),
        brute_force_posterior(initial, matrix, emission, sequence[:6]),
    )
    assert np.abs(exact - filtered).max() > 0.05
    run = kbr.run_filter(filt, jnp.asarray(sequence))
    options = {
        "regularizer": 1e-13 if estimator == "pairs" else 1e-9,
        "estimator": estimator,
        "clipping": kbr.Clipping(truncation=0.0),
    }
    close(by_state(kbr.smooth(filt, run, **options)), exact, 0, 1e-8)
    lagged = by_state(kbr.smooth(filt, run, lag=3, **options))
    cut = [forward_backward(filtered[: t + 4], matrix)[t] for t in range(len(sequence))]
    close(lagged, np.stack(cut), 0, 1e-8)


# Gradients, precision, use.


@pytest.mark.parametrize("estimator, lag", [("pairs", None), ("importance", 2)])
def test_gradients(estimator, lag):
    truth, sequence = nonlinear_sequence(30, 6)
    clips = estimator != "pairs"
    clipping = kbr.Clipping(clips, 0.0)

    def loss(logs):
        p = {name: jnp.exp(value) for name, value in logs.items()}
        filt = kbr.fit_filter(
            kbr.Gaussian(p["state"]),
            kbr.Gaussian(p["observation"]),
            jnp.asarray(STATES),
            jnp.asarray(OBSERVED),
            regularizer=p["regularizer"],
            posterior_regularizer=p["delta"],
            estimator=estimator,
            clipping=clipping,
        )
        run = kbr.run_filter(filt, jnp.asarray(sequence))
        options = {"estimator": estimator, "clipping": clipping, "positive": clips}
        smoothed = kbr.smooth(filt, run, regularizer=p["smoother"], lag=lag, **options)
        return jnp.mean((kbr.mean(smoothed) - jnp.asarray(truth[:-1])) ** 2)

    with_gradient = jax.jit(jax.value_and_grad(loss))
    start = {"state": 0.8, "observation": 0.9, "regularizer": 0.01, "delta": 0.05, "smoother": 0.3}
    logs = {name: jnp.log(jnp.asarray(value)) for name, value in start.items()}
    gradient, step = with_gradient(logs)[1], 1e-6 if clips else 1e-5  # clipping has kinks
    for name in logs:
        low, high = (
            float(with_gradient({**logs, name: logs[name] + sign * step})[0]) for sign in (-1, 1)
        )
        assert abs(float(gradient[name])) > 1e-5
        close(gradient[name], (high - low) / (2 * step), 1e-5, 1e-9)


def test_single_precision():
    states, observations = rotation(60, 0)
    sequence = rotation(20, 1)[1]

    @jax.jit
    def smoothed(*data):
        dtype = data[0].dtype
        filt = kbr.fit_filter(
            kbr.Gaussian(jnp.asarray(0.5, dtype)),
            kbr.Gaussian(jnp.asarray(0.5, dtype)),
            *data[:2],
            regularizer=1e-3,
            posterior_regularizer=1e-2,
            estimator="importance",
            landmarks_states=kbr.Landmarks(data[0][:20]),
            landmarks_observations=kbr.Landmarks(data[1][:20]),
        )
        run = kbr.run_filter(filt, data[2])
        return kbr.mean(kbr.smooth(filt, run, regularizer=0.3, estimator="importance"))

    data = states, observations, sequence
    single, double = (
        smoothed(*(jnp.asarray(array, dtype) for array in data))
        for dtype in (jnp.float32, jnp.float64)
    )
    assert single.dtype == jnp.float32
    close(single, double, 0, 2e-3)


def test_smoothing_a_rotation_has_less_error_than_filtering_it():
    states, observations = rotation(150, 0)
    truth, sequence = rotation(220, 1)
    filt = kbr.fit_filter(
        kbr.Gaussian(0.5),
        kbr.Gaussian(0.7),
        jnp.asarray(states),
        jnp.asarray(observations),
        regularizer=1e-3,
        posterior_regularizer=5e-3,
        estimator="importance",
        landmarks_states=40,
        landmarks_observations=40,
    )
    run = kbr.run_filter(filt, jnp.asarray(sequence))

    def error(estimates):
        return float(np.mean(np.sum((np.asarray(estimates) - truth)[20:-5] ** 2, axis=1)))

    smoothed = kbr.smooth(filt, run, regularizer=0.5, estimator="importance")
    # Below .03 it would know more than an optimal smoother.
    assert 0.03 < error(kbr.mean(smoothed)) < 0.95 * error(kbr.state_mean(filt, run))


def test_a_jump_beyond_the_kernel_leaves_the_filter_s_belief():
    """Two rooms without a way between them: before the jump, the smoother has seen no later."""
    rng = np.random.default_rng(0)
    first = np.cumsum(rng.normal(size=40)) * 0.1
    states = [jnp.asarray(first[:, None]), jnp.asarray(first[:, None] + 100)]
    filt = kbr.fit_filter(
        kbr.Gaussian(0.3),
        kbr.Gaussian(0.3),
        states,
        [s[:-1] for s in states],
        regularizer=1e-3,
        posterior_regularizer=1e-4,
    )
    seen = [s[:10] for s in states]
    run = jax.tree.map(lambda *a: jnp.concatenate(a), *kbr.run_filter(filt, seen))
    seen = jnp.concatenate(seen)
    means = kbr.mean(kbr.smooth(filt, run, regularizer=1e-3))
    assert np.all(np.abs(np.asarray(means - seen)) < 0.5)
