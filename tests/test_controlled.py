"""Filtering, predicting and smoothing under known inputs, against NumPy and exact controlled hidden Markov models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_filtering import (
    DELTA,
    EPSILON,
    H_O,
    H_S,
    MASK,
    STEPS,
    T,
    by_state,
    close,
    gaussian,
    gram_function,
    nonlinear_sequence,
    numpy_bayes,
    numpy_clean,
)
from test_smoothing import DELTA_S, forward_backward, numpy_ratio

import kbr_jax as kbr

H_U, RIDGE = 0.7, 0.04
CLEANING = {"clip": True, "truncation": 0.1, "normalize": True}
RNG = np.random.default_rng(3)
STATES, OBSERVED = nonlinear_sequence(T, 7)
CONTROLS = RNG.normal(size=(T, 1))
TEST = nonlinear_sequence(STEPS, 8)[1]
INPUTS = RNG.normal(size=(STEPS, 1))
GAPS = np.where(MASK[:, None], TEST, np.nan)


def fit(landmarks=None, form="b", bandwidth=H_U, regularizer=RIDGE, **options):
    base = kbr.KernelBayesFilter.fit(
        kbr.Gaussian(H_S),
        kbr.Gaussian(H_O),
        jnp.asarray(STATES),
        jnp.asarray(OBSERVED),
        regularizer=EPSILON,
        landmarks_states=landmarks,
        landmarks_observations=landmarks,
        form=form,
        **{"posterior_regularizer": DELTA, "truncation": 0.1, **options},
    )
    return kbr.ControlledFilter.fit(
        base,
        kbr.Gaussian(bandwidth),
        jnp.asarray(CONTROLS),
        regularizer=regularizer,
        landmarks=landmarks,
    )


def pair_gram(filt):
    """The product kernel of pairs, exact or Nystroem, as a function of two samples of states and inputs."""

    def product(s, u, s_other, u_other):
        return gaussian(s, s_other, H_S) * gaussian(u, u_other, H_U)

    if isinstance(filt.pairs, kbr.DenseGram):
        return product
    s_z, u_z = (
        np.asarray(part)[np.asarray(filt.pairs.landmarks.active)]
        for part in filt.pairs.landmarks.points
    )
    inner = np.linalg.inv(product(s_z, u_z, s_z, u_z))
    return lambda s, u, s_other, u_other: (
        product(s, u, s_z, u_z) @ inner @ product(s_z, u_z, s_other, u_other)
    )


def transition_matrix(filt, control):
    """Weights on the successors of a unit weight on each training state, under an input."""
    pairs, s = pair_gram(filt), STATES[:-1]
    inputs = np.repeat(control[None], T, axis=0)
    gram = pairs(s, CONTROLS, s, CONTROLS)
    return np.linalg.solve(gram + T * RIDGE * np.eye(T), pairs(s, CONTROLS, s, inputs))


def numpy_run(filt, form):
    """Filtered beliefs, cleaned priors, and smoothed beliefs, of the class docstrings."""
    ks, ko = gram_function(filt.states, H_S), gram_function(filt.observations, H_O)
    s, s_next = STATES[:-1], STATES[1:]
    inverse = np.linalg.inv(ks(s, s) + T * EPSILON * np.eye(T))
    w, beliefs, joints = np.full(T, 1 / T), [], []
    for observation, seen, control in zip(TEST, MASK, INPUTS, strict=True):
        w = numpy_clean(w, **CLEANING)
        column = ko(OBSERVED, observation[None])[:, 0]
        beliefs.append(numpy_bayes(form, w, ko(OBSERVED, OBSERVED), column) if seen else w)
        v = transition_matrix(filt, control) @ beliefs[-1]
        joints.append(numpy_clean(v, **CLEANING))
        w = inverse @ ks(s, s_next) @ v
    smoothed = [beliefs[-1] / beliefs[-1].sum()]
    for t in range(STEPS - 2, -1, -1):
        ratio = np.maximum(
            numpy_ratio(form, joints[t], ks(s_next, s_next), ks(s_next, s) @ smoothed[-1]), 0
        )
        belief = beliefs[t] * (transition_matrix(filt, INPUTS[t]).T @ ratio)
        smoothed.append(belief / belief.sum())
    return np.stack(beliefs), np.stack(smoothed[::-1])


@pytest.mark.parametrize("landmarks, form", [(None, "b"), (8, "importance")])
def test_filter_and_smoother(landmarks, form):
    filt = fit(landmarks, form)
    sequence, inputs, mask = jnp.asarray(GAPS), jnp.asarray(INPUTS), jnp.asarray(MASK)
    run = kbr.filter(filt, sequence, controls=inputs, observed=mask)
    beliefs, smoothed = numpy_run(filt, form)
    close(run.weights, beliefs, 1e-7)
    close(kbr.smooth(filt, run.weights, controls=inputs, regularizer=DELTA_S), smoothed, 1e-6, 1e-9)
    lagged = kbr.smooth(filt, run.weights, controls=inputs, regularizer=DELTA_S, lag=2)
    shorter = kbr.smooth(filt, run.weights[:3], controls=inputs[:3], regularizer=DELTA_S)
    close(lagged[0], shorter[0])

    # Online, and from a first observation.
    state, step = filt.init(), None
    for observation, control, seen in zip(sequence[:2], inputs[:2], MASK[:2], strict=True):
        state, step = filt.step(state, observation, bool(seen), control=control)
    close(step.weights, run.weights[1])
    state, first = filt.init_from_observation(sequence[0], inputs[0])
    close(first.weights, filt.base.init_from_observation(sequence[0])[1].weights)
    close(state.shifted, transition_matrix(filt, INPUTS[0]) @ np.asarray(first.weights), 1e-7)

    # What a gap believes is the prediction, regressed and cleaned.
    ahead = filt.predict(run.weights[3], 2, inputs[3:5])
    close(ahead.points, filt.successors)
    weights = filt.states.ridge_weights(
        filt.base.state_factor, (ahead.weights @ filt.base.successor_codes)[None]
    )[0]
    close(run.weights[5], kbr.clean_weights(weights, **CLEANING))
    close(filt.predict(run.weights, 2, inputs[3:5]).weights[3], ahead.weights)


def test_an_input_that_never_changes_is_the_two_inverse_filter():
    states, observations = jnp.asarray(STATES), jnp.asarray(OBSERVED)
    base = kbr.KernelBayesFilter.fit(
        kbr.Gaussian(H_S),
        kbr.Gaussian(H_O),
        states,
        observations,
        regularizer=EPSILON,
        posterior_regularizer=DELTA,
        transition="two-inverse",
    )
    filt = kbr.ControlledFilter.fit(base, kbr.Delta(), jnp.zeros(T + 1, int), regularizer=EPSILON)
    run = kbr.filter(filt, jnp.asarray(TEST), controls=jnp.zeros(STEPS, int))
    plain = kbr.filter(base, jnp.asarray(TEST))
    jax.tree.map(close, run, plain)
    smoothed = kbr.smooth(filt, run.weights, controls=jnp.zeros(STEPS, int), regularizer=DELTA_S)
    close(smoothed, kbr.smooth(base, plain.weights, regularizer=DELTA_S))


def controlled_model(seed):
    """Counts of transitions `[input, state, successor]` and of observations `[state, symbol]`, and a sample exact for both."""
    rng = np.random.default_rng(seed)
    counts = np.stack(
        [[rng.multinomial(8, rng.dirichlet(np.ones(3))) + 1 for _ in range(3)] for _ in range(2)]
    )
    emission = np.maximum(np.round(4 * rng.dirichlet(np.ones(3) * 2, size=3)), 1).astype(int)
    rows = [
        (i, u, j, c)
        for u, i, j in np.ndindex(counts.shape)
        for c in range(3)
        for _ in range(counts[u, i, j] * emission[i, c])
    ]
    matrices = counts / counts.sum(-1, keepdims=True)
    return (
        np.array(rows).T,
        matrices,
        emission / emission.sum(1, keepdims=True),
        rng.integers(3, size=12),
    )


@pytest.mark.parametrize("form", ["b", "importance"])
def test_exact_controlled_hidden_markov_model(form):
    (s, u, s_next, o), matrices, emission, sequence = controlled_model(0)
    inputs = np.random.default_rng(1).integers(2, size=12)
    ridge = 1e-13 if form == "b" else 1e-9
    base = kbr.KernelBayesFilter.fit(
        kbr.Delta(),
        kbr.Delta(),
        jnp.asarray(s),
        jnp.asarray(o),
        successors=jnp.asarray(s_next),
        regularizer=1e-9,
        posterior_regularizer=ridge,
        form=form,
        landmarks_states=3,
        landmarks_observations=3,
        truncation=0.0,
    )
    filt = kbr.ControlledFilter.fit(
        base, kbr.Delta(), jnp.asarray(u), regularizer=1e-9, landmarks=6
    )
    run = kbr.filter(filt, jnp.asarray(sequence), controls=jnp.asarray(inputs))
    belief, filtered = np.bincount(s, minlength=3) / len(s), []
    for symbol, control in zip(sequence, inputs, strict=True):
        belief = belief * emission[:, symbol]
        filtered.append(belief / belief.sum())
        belief = filtered[-1] @ matrices[control]
    filtered = np.stack(filtered)
    close(by_state(filt, run.weights), filtered, 0, 1e-8)
    smoothed = [filtered[-1]]
    for t in range(10, -1, -1):
        smoothed.append(
            forward_backward(np.stack([filtered[t], smoothed[-1]]), matrices[inputs[t]])[0]
        )
    weights = kbr.smooth(filt, run.weights, controls=jnp.asarray(inputs), regularizer=ridge)
    close(by_state(filt, weights), np.stack(smoothed[::-1]), 0, 1e-8)
    assert np.abs(np.stack(smoothed[::-1]) - filtered).max() > 0.02


def test_gradients_and_batches():
    truth = jnp.asarray(nonlinear_sequence(STEPS, 8)[0][:-1])

    def error(logs, sequence):
        bandwidth, epsilon, delta = jnp.exp(logs)
        filt = fit(
            None, "importance", bandwidth, epsilon, posterior_regularizer=0.05, truncation=0.0
        )
        inputs = jnp.asarray(INPUTS)
        weights = kbr.filter(filt, sequence, controls=inputs).weights
        smoothed = kbr.mean(
            filt.belief(kbr.smooth(filt, weights, controls=inputs, regularizer=delta))
        )
        return jnp.mean((smoothed - truth) ** 2) + kbr.filter_loss(
            filt, truth, sequence, controls=inputs
        )

    logs, batch = jnp.log(jnp.asarray([H_U, RIDGE, 0.3])), jnp.asarray(np.stack([TEST, TEST[::-1]]))
    both = jax.jit(jax.vmap(jax.value_and_grad(error), in_axes=(None, 0)))
    gradient, step = both(logs, batch)[1], 1e-6
    for i in range(3):
        shift = step * np.eye(3)[i]
        low, high = (both(logs + sign * shift, batch)[0] for sign in (-1, 1))
        assert np.all(np.abs(gradient[:, i]) > 1e-5)
        close(gradient[:, i], (high - low) / (2 * step), 1e-5, 1e-9)
