"""The smoother against NumPy, step by step; exact forward-backward; lags, gaps, batches, gradients, single precision."""

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
    fitted,
    forward_filter,
    gram_function,
    model_sample,
    nonlinear_sequence,
    numpy_clean,
    random_model,
    rotation,
    table_filter,
)

import kbr_jax as kbr

DELTA_S = 0.05


def numpy_ratio(form, joint, k, columns):
    """What is known of the successors over what was predicted of them, `[n, rows]`, by a solve that the class does not do."""
    d, identity = np.diag(joint), np.eye(len(joint))
    if form == "importance":
        root = np.sqrt(d)
        inner = np.linalg.solve(root @ k @ root + DELTA_S * identity, root @ columns)
        return (columns - k @ root @ inner) / DELTA_S
    return k @ np.linalg.solve((d @ k) @ (d @ k) + DELTA_S * identity, d @ columns)


def numpy_smooth(ks, filt, beliefs, form, cleaning, clip, normalize):
    """The backward recursion of the docstring of `smooth`."""
    s, s_next, support = STATES[:-1], STATES[1:], np.asarray(filt.support)
    forward = np.linalg.solve(ks(s, s) + T * EPSILON * np.eye(T), ks(s, support))
    smoothed = [numpy_clean(beliefs[-1], False, 0.0, normalize)]
    for belief in beliefs[-2::-1]:
        joint = numpy_clean(forward @ belief, **cleaning)
        ratio = numpy_ratio(form, joint, ks(s_next, s_next), ks(s_next, support) @ smoothed[-1])
        ratio = np.maximum(ratio, 0) if clip else ratio
        smoothed.append(numpy_clean(belief * (forward.T @ ratio), False, 0.0, normalize))
    return np.stack(smoothed[::-1])


@pytest.mark.parametrize(
    "landmarks, filter_form, transition, form, clip, normalize",
    [
        (None, "b", "shift", None, False, True),
        (None, "a", "two-inverse", None, False, False),
        (None, "importance", "two-inverse", None, True, True),
        (5, "b", "two-inverse", "importance", False, True),
        (5, "a", "two-inverse", "importance", True, True),
        (5, "importance", "shift", "b", False, True),
    ],
)
def test_smoother(landmarks, filter_form, transition, form, clip, normalize):
    filt = fitted(filter_form, transition, landmarks, 3)
    run = kbr.filter(filt, jnp.asarray(GAPS), observed=jnp.asarray(MASK))
    options = {"form": form, "clip": clip, "normalize": normalize}
    smoothed = kbr.smooth(filt, run.weights, regularizer=DELTA_S, **options)
    form = form or ("importance" if filter_form == "importance" else "b")
    cleaning = {"clip": True, "truncation": 0.15, "normalize": True}
    ks, beliefs = gram_function(filt.states, H_S), np.asarray(run.weights)
    close(smoothed, numpy_smooth(ks, filt, beliefs, form, cleaning, clip, normalize), 1e-7)


def test_the_importance_form_clips_a_signed_joint():
    filt = fitted("b", "two-inverse", None, 0)
    run = kbr.filter(filt, jnp.asarray(TEST))
    smoothed = kbr.smooth(filt, run.weights, regularizer=DELTA_S, form="importance")
    cleaning = {"clip": True, "truncation": 0.0, "normalize": False}
    ks = gram_function(filt.states, H_S)
    close(
        smoothed,
        numpy_smooth(ks, filt, np.asarray(run.weights), "importance", cleaning, True, True),
        1e-7,
    )


def test_a_lag_is_the_sequence_cut_short():
    filt = fitted("importance", "two-inverse", 5, 3)
    weights = kbr.filter(filt, jnp.asarray(GAPS), observed=jnp.asarray(MASK)).weights
    whole = kbr.smooth(filt, weights, regularizer=DELTA_S)
    cleaning = {"clip": True, "truncation": 0.15, "normalize": True}
    ks, beliefs = gram_function(filt.states, H_S), np.asarray(weights)
    for lag in (1, 3):
        lagged = kbr.smooth(filt, weights, regularizer=DELTA_S, lag=lag)
        for t in range(STEPS):
            cut = numpy_smooth(ks, filt, beliefs[: t + lag + 1], "importance", cleaning, True, True)
            close(lagged[t], cut[t], 1e-7)
    for lag in (STEPS - 1, STEPS, 50):
        close(kbr.smooth(filt, weights, regularizer=DELTA_S, lag=lag), whole, 0, 0)
    close(whole[-1], weights[-1] / weights[-1].sum())
    assert not np.allclose(whole[0], lagged[0])


def test_vmap_over_sequences_equals_a_loop():
    filt = fitted("b", "shift", 5, 3)
    batch = jnp.asarray(
        np.stack([TEST, nonlinear_sequence(STEPS, 2)[1], nonlinear_sequence(STEPS, 3)[1]])
    )
    for lag in (None, 2):

        def run(sequence, lag=lag):
            return kbr.smooth(
                filt, kbr.filter(filt, sequence).weights, regularizer=DELTA_S, lag=lag
            )

        together = jax.jit(jax.vmap(run))(batch)
        assert together.shape == (3, STEPS, T)
        for index, sequence in enumerate(batch):
            close(together[index], run(sequence))


def test_a_single_belief_is_its_own_smoothed_belief():
    filt = fitted("b", "shift", 5, 3)
    weights = kbr.filter(filt, jnp.asarray(TEST[:1])).weights
    close(kbr.smooth(filt, weights, regularizer=DELTA_S), weights / weights.sum())


def test_padding_changes_nothing():
    kernels, mask = (kbr.Gaussian(H_S), kbr.Gaussian(H_O)), np.arange(T + 4) < T + 1
    padded = (
        np.concatenate([STATES, np.full((3, 2), np.nan)]),
        np.concatenate([OBSERVED, np.full((3, 2), np.nan)]),
    )
    options = {"regularizer": EPSILON, "posterior_regularizer": 0.02}

    @jax.jit
    def run(states, observations, **more):
        filt = kbr.KernelBayesFilter.fit(*kernels, states, observations, **options, **more)
        weights = kbr.filter(filt, jnp.asarray(TEST)).weights
        return kbr.smooth(filt, weights, regularizer=DELTA_S)

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
    "filter_form, form", [("a", "b"), ("b", "b"), ("importance", "importance")]
)
def test_exact_forward_backward(filter_form, form):
    transitions, emission, sequence = random_model(1)
    s, o, s_next, emission = model_sample(transitions, emission)
    filt, matrix = (
        table_filter(s, o, s_next, filter_form),
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
    weights = kbr.filter(filt, jnp.asarray(sequence)).weights
    ridge = 1e-13 if form == "b" else 1e-9
    close(by_state(filt, kbr.smooth(filt, weights, regularizer=ridge, form=form)), exact, 0, 1e-8)
    lagged = by_state(filt, kbr.smooth(filt, weights, regularizer=ridge, form=form, lag=3))
    cut = [forward_backward(filtered[: t + 4], matrix)[t] for t in range(len(sequence))]
    close(lagged, np.stack(cut), 0, 1e-8)


# Gradients, precision, use.


@pytest.mark.parametrize("form, lag", [("b", None), ("importance", 2)])
def test_gradients(form, lag):
    truth, sequence = nonlinear_sequence(30, 6)

    def loss(logs):
        p = {name: jnp.exp(value) for name, value in logs.items()}
        filt = kbr.KernelBayesFilter.fit(
            kbr.Gaussian(p["state"]),
            kbr.Gaussian(p["observation"]),
            jnp.asarray(STATES),
            jnp.asarray(OBSERVED),
            regularizer=p["regularizer"],
            posterior_regularizer=p["delta"],
            form=form,
            truncation=0.0,
            clip=form != "b",
        )
        weights = kbr.filter(filt, jnp.asarray(sequence)).weights
        smoothed = kbr.smooth(filt, weights, regularizer=p["smoother"], lag=lag, clip=form != "b")
        return jnp.mean((kbr.mean(filt.belief(smoothed)) - jnp.asarray(truth[:-1])) ** 2)

    with_gradient = jax.jit(jax.value_and_grad(loss))
    start = {"state": 0.8, "observation": 0.9, "regularizer": 0.01, "delta": 0.05, "smoother": 0.3}
    logs = {name: jnp.log(jnp.asarray(value)) for name, value in start.items()}
    gradient, step = with_gradient(logs)[1], 1e-5 if form == "b" else 1e-6  # clipping has kinks
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
        filt = kbr.KernelBayesFilter.fit(
            kbr.Gaussian(jnp.asarray(0.5, dtype)),
            kbr.Gaussian(jnp.asarray(0.5, dtype)),
            *data[:2],
            regularizer=1e-3,
            posterior_regularizer=1e-2,
            form="importance",
            landmarks_states=kbr.given_landmarks(data[0][:20]),
            landmarks_observations=kbr.given_landmarks(data[1][:20]),
        )
        weights = kbr.filter(filt, data[2]).weights
        return kbr.mean(filt.belief(kbr.smooth(filt, weights, regularizer=0.3)))

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
    filt = kbr.KernelBayesFilter.fit(
        kbr.Gaussian(0.5),
        kbr.Gaussian(0.7),
        jnp.asarray(states),
        jnp.asarray(observations),
        regularizer=1e-3,
        posterior_regularizer=5e-3,
        form="importance",
        landmarks_states=40,
        landmarks_observations=40,
    )
    weights = kbr.filter(filt, jnp.asarray(sequence)).weights

    def error(beliefs):
        return float(
            np.mean(
                np.sum((np.asarray(kbr.mean(filt.belief(beliefs))) - truth)[20:-5] ** 2, axis=1)
            )
        )

    smoothed = error(kbr.smooth(filt, weights, regularizer=0.5))
    assert (
        0.03 < smoothed < 0.95 * error(weights)
    )  # below .03 it would know more than an optimal smoother
