"""Filters under known inputs, against NumPy and exact controlled hidden Markov models."""

import equinox as eqx
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


def fit(
    landmarks=None, estimator="pairs", bandwidth=H_U, regularizer=RIDGE, delta=DELTA, **options
):
    """The filter with inputs, from the two models it is made of."""
    s, s_next, o = (jnp.asarray(points) for points in (STATES[:-1], STATES[1:], OBSERVED))
    options = {"regularizer": delta, "clipping": kbr.Clipping(**CLEANING), **options}
    ks, ko = kbr.Gaussian(H_S), kbr.Gaussian(H_O)
    of_states, of_pairs, kernel = (
        landmarks,
        landmarks,
        kbr.TensorProduct((ks, kbr.Gaussian(bandwidth))),
    )
    if landmarks is not None:
        of_states = kbr.greedy_landmarks(ks, s, rank=landmarks)
        of_pairs = kbr.greedy_landmarks(kernel, (s, jnp.asarray(CONTROLS)), rank=landmarks)
    emission = kbr.fit_conditional(
        ks, ko, s, o, regularizer=EPSILON, landmarks_x=of_states, landmarks_y=landmarks
    )
    transition = kbr.fit_conditional(
        kernel,
        ks,
        (s, jnp.asarray(CONTROLS)),
        s_next,
        regularizer=regularizer,
        landmarks_x=of_pairs,
        landmarks_y=of_states,
    )
    return kbr.KernelBayesFilter(emission, transition, estimator=estimator, **options)


def pair_gram(filt):
    """The product kernel of pairs, exact or Nystroem, as a function of two samples of states and
    inputs.
    """

    def product(s, u, s_other, u_other):
        return gaussian(s, s_other, H_S) * gaussian(u, u_other, H_U)

    pairs = filt.transition.model.features_x
    if isinstance(pairs, kbr.features.DenseGram):
        return product
    s_z, u_z = (
        np.asarray(part)[np.asarray(pairs.landmarks.active)] for part in pairs.landmarks.points
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


def numpy_run(filt, estimator):
    """Filtered and smoothed beliefs of the class docstrings."""
    ks, ko = (
        gram_function(filt.emission.features_x, H_S),
        gram_function(filt.emission.features_y, H_O),
    )
    s, s_next = STATES[:-1], STATES[1:]
    inverse = np.linalg.inv(ks(s, s) + T * EPSILON * np.eye(T))
    w, beliefs, joints = np.full(T, 1 / T), [], []
    for observation, seen, control in zip(TEST, MASK, INPUTS, strict=True):
        w = numpy_clean(w, **CLEANING)
        column = ko(OBSERVED, observation[None])[:, 0]
        beliefs.append(numpy_bayes(estimator, w, ko(OBSERVED, OBSERVED), column) if seen else w)
        v = transition_matrix(filt, control) @ beliefs[-1]
        joints.append(numpy_clean(v, **CLEANING))
        w = inverse @ ks(s, s_next) @ v
    smoothed = [beliefs[-1] / beliefs[-1].sum()]
    for t in range(STEPS - 2, -1, -1):
        ratio = np.maximum(
            numpy_ratio(estimator, joints[t], ks(s_next, s_next), ks(s_next, s) @ smoothed[-1]), 0
        )
        belief = beliefs[t] * (transition_matrix(filt, INPUTS[t]).T @ ratio)
        smoothed.append(belief / belief.sum())
    return np.stack(beliefs), np.stack(smoothed[::-1])


@pytest.mark.parametrize("landmarks, estimator", [(None, "pairs"), (8, "importance")])
def test_filter_and_smoother(landmarks, estimator):
    filt = fit(landmarks, estimator)
    sequence, inputs, mask = jnp.asarray(GAPS), jnp.asarray(INPUTS), jnp.asarray(MASK)
    run = kbr.run_filter(filt, sequence, controls=inputs, observed=mask)
    beliefs, smoothed = numpy_run(filt, estimator)
    close(run.weights, beliefs, 1e-7)
    options = {"regularizer": DELTA_S, "estimator": estimator, "clipping": filt.clipping}
    close(kbr.smooth(filt, run, controls=inputs, **options).weights, smoothed, 1e-6, 1e-9)
    lagged = kbr.smooth(filt, run, controls=inputs, lag=2, **options)
    short = kbr.run_filter(filt, sequence[:3], controls=inputs[:3], observed=mask[:3])
    shorter = kbr.smooth(filt, short, controls=inputs[:3], **options)
    close(lagged.weights[0], shorter.weights[0])

    # Online, and from a first observation.
    state, step = kbr.init_filter(filt), None
    for observation, control, seen in zip(sequence[:2], inputs[:2], MASK[:2], strict=True):
        state, step = kbr.filter_step(
            filt, state, observation, observed=bool(seen), control=control
        )
    close(step.weights, run.weights[1])
    state, first = kbr.init_from_observation(
        filt, sequence[0], control=inputs[0], regularizer=EPSILON
    )
    factor = filt.emission.features_y.ridge(jnp.asarray(EPSILON))
    code = filt.emission.features_y.coordinates(sequence[:1])
    close(first.weights, filt.emission.features_y.ridge_weights(factor, code)[0])
    ks = gram_function(filt.emission.features_x, H_S)
    s, s_next = STATES[:-1], STATES[1:]
    inverse = np.linalg.inv(ks(s, s) + T * EPSILON * np.eye(T))
    shifted = transition_matrix(filt, INPUTS[0]) @ np.asarray(first.weights)
    close(state.weights, inverse @ ks(s, s_next) @ shifted, 1e-7)

    # What a gap believes is the prediction.
    third = eqx.tree_at(lambda r: r.state, run, None)
    third = jax.tree.map(lambda leaf: leaf[3], third)
    ahead = kbr.predict(filt, third, 2, controls=inputs[3:5])
    close(run.weights[5], ahead.weights)
    close(kbr.predict(filt, run, 2, controls=inputs[3:5]).weights[3], ahead.weights)


@pytest.mark.parametrize("width", [H_S, 0.6 * H_S])
def test_an_input_that_never_changes_is_a_transition_without_inputs(width):
    s, s_next, o = (jnp.asarray(points) for points in (STATES[:-1], STATES[1:], OBSERVED))
    ks, ko = kbr.Gaussian(H_S), kbr.Gaussian(H_O)
    emission = kbr.fit_conditional(ks, ko, s, o, regularizer=EPSILON)
    own = kbr.Gaussian(width)  # of the transition
    plain = kbr.fit_conditional(own, ks, s, s_next, regularizer=EPSILON)
    pairs, kernel = (s, jnp.zeros(T, int)), kbr.TensorProduct((own, kbr.Delta()))
    driven = kbr.fit_conditional(kernel, ks, pairs, s_next, regularizer=EPSILON)
    filters = [
        kbr.KernelBayesFilter(emission, transition, regularizer=DELTA)
        for transition in (driven, plain)
    ]
    inputs = [{"controls": jnp.zeros(STEPS, int)}, {}]
    runs = [
        kbr.run_filter(filt, jnp.asarray(TEST), **more)
        for filt, more in zip(filters, inputs, strict=True)
    ]
    jax.tree.map(close, *runs)
    smoothed = [
        kbr.smooth(filt, run, regularizer=DELTA_S, **more).weights
        for filt, run, more in zip(filters, runs, inputs, strict=True)
    ]
    close(*smoothed)


def test_moments_with_inputs_equal_the_sample():
    """Plain moments of pairs (state, input), on the same landmarks."""
    ks, ko, ku = kbr.Gaussian(H_S), kbr.Gaussian(H_O), kbr.Gaussian(H_U)
    s, s_next, o = (jnp.asarray(points) for points in (STATES[:-1], STATES[1:], OBSERVED))
    pairs, kernel = (s, jnp.asarray(CONTROLS)), kbr.TensorProduct((ks, ku))
    ls, lo = kbr.greedy_landmarks(ks, s, rank=8), kbr.greedy_landmarks(ko, o, rank=8)
    # Anchors whose states are landmarks: what a moment belief knows of a state is exact there.
    picks = jnp.asarray([0, 2, 3, 5, 6, 7])
    points = (ls.points[picks], jnp.asarray(CONTROLS)[picks])
    lp = kbr.Landmarks(points, jnp.ones(6, bool))
    options = {"regularizer": DELTA, "clipping": kbr.Clipping(False, 0.0)}
    sample = kbr.KernelBayesFilter(
        kbr.fit_conditional(ks, ko, s, o, regularizer=EPSILON, landmarks_x=ls, landmarks_y=lo),
        kbr.fit_conditional(
            kernel, ks, pairs, s_next, regularizer=RIDGE, landmarks_x=lp, landmarks_y=ls
        ),
        **options,
    )
    m = kbr.moments
    emission = m.collect_moments(m.moment_maps(ks, ko, ls, lo), s, o)
    maps = m.moment_maps(kernel, ks, lp, ls)
    moments = kbr.KernelBayesFilter(
        m.fit_conditional(emission, regularizer=EPSILON),
        m.fit_conditional(m.collect_moments(maps, pairs, s_next), regularizer=RIDGE),
        **options,
    )
    other = kbr.TensorProduct((kbr.Gaussian(0.6 * H_S), ku))
    with pytest.raises(ValueError, match="Moments know beliefs in one kernel"):
        kbr.KernelBayesFilter(
            moments.emission,
            kbr.fit_conditional(other, ks, pairs, s_next, regularizer=RIDGE, landmarks_y=ls),
            **options,
        )
    inputs, mask = jnp.asarray(INPUTS), jnp.asarray(MASK)
    runs = [
        kbr.run_filter(filt, jnp.asarray(GAPS), controls=inputs, observed=mask)
        for filt in (sample, moments)
    ]
    means = [kbr.state_mean(f, r) for f, r in zip((sample, moments), runs, strict=True)]
    close(means[0], means[1], 1e-6)
    smoothed = kbr.smooth(
        moments, runs[1], controls=inputs, regularizer=DELTA_S, clipping=options["clipping"]
    )
    assert np.all(np.isfinite(smoothed.weights))


def test_a_known_transition_with_inputs():
    """A simulator without noise moves each training state to where the inputs send it."""
    s, o = jnp.asarray(STATES[:-1]), jnp.asarray(OBSERVED)
    ks, inputs = kbr.Gaussian(H_S), jnp.asarray(INPUTS)
    emission = kbr.fit_conditional(ks, kbr.Gaussian(H_O), s, o, regularizer=EPSILON)

    def move(state, control):
        return 0.9 * state + 0.3 * control

    simulated = kbr.SimulatedTransition(
        lambda key, state, control: move(state, control),
        key=jax.random.key(0),
        num_draws=2,
        controls=inputs[0],
    )
    exact = kbr.GaussianTransition(move, 1e-14, controls=inputs[0])
    runs = [
        kbr.run_filter(
            kbr.KernelBayesFilter(emission, known, regularizer=DELTA),
            jnp.asarray(TEST),
            controls=inputs,
        )
        for known in (simulated, exact)
    ]
    close(runs[0].weights, runs[1].weights, 1e-6)
    w = np.asarray(runs[0].weights[0])
    moved = np.asarray(move(STATES[:-1], INPUTS[0]))
    gram = gaussian(STATES[:-1], STATES[:-1], H_S) + T * EPSILON * np.eye(T)
    prior = np.linalg.solve(gram, gaussian(STATES[:-1], moved, H_S) @ w)
    close(runs[0].predicted[1], numpy_clean(prior, True, 0.02, True), 1e-7)


def controlled_model(seed):
    """A sample, and the transitions `[input, state, successor]` and emission it is exact for."""
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


@pytest.mark.parametrize("estimator", ["pairs", "importance"])
def test_exact_controlled_hidden_markov_model(estimator):
    (s, u, s_next, o), matrices, emission, sequence = controlled_model(0)
    inputs = np.random.default_rng(1).integers(2, size=12)
    ridge = 1e-13 if estimator == "pairs" else 1e-9
    delta, exactly = kbr.Delta(), kbr.Clipping(truncation=0.0)
    kernel, pairs = kbr.TensorProduct((delta, delta)), (jnp.asarray(s), jnp.asarray(u))
    ls, lo = (kbr.greedy_landmarks(delta, jnp.asarray(v), rank=3) for v in (s, o))
    filt = kbr.KernelBayesFilter(
        kbr.fit_conditional(
            delta,
            delta,
            jnp.asarray(s),
            jnp.asarray(o),
            regularizer=1e-9,
            landmarks_x=ls,
            landmarks_y=lo,
        ),
        kbr.fit_conditional(
            kernel,
            delta,
            pairs,
            jnp.asarray(s_next),
            regularizer=1e-9,
            landmarks_x=kbr.greedy_landmarks(kernel, pairs, rank=6),
            landmarks_y=ls,
        ),
        regularizer=ridge,
        estimator=estimator,
        clipping=exactly,
    )
    run = kbr.run_filter(filt, jnp.asarray(sequence), controls=jnp.asarray(inputs))
    belief, filtered = np.bincount(s, minlength=3) / len(s), []
    for symbol, control in zip(sequence, inputs, strict=True):
        belief = belief * emission[:, symbol]
        filtered.append(belief / belief.sum())
        belief = filtered[-1] @ matrices[control]
    filtered = np.stack(filtered)
    close(by_state(kbr.belief(filt, run)), filtered, 0, 1e-8)
    smoothed = [filtered[-1]]
    for t in range(10, -1, -1):
        later = np.stack([filtered[t], smoothed[-1]])
        smoothed.append(forward_backward(later, matrices[inputs[t]])[0])
    options = {"regularizer": ridge, "estimator": estimator, "clipping": exactly}
    found = kbr.smooth(filt, run, controls=jnp.asarray(inputs), **options)
    close(by_state(found), np.stack(smoothed[::-1]), 0, 1e-8)
    assert np.abs(np.stack(smoothed[::-1]) - filtered).max() > 0.02


def test_gradients_and_batches():
    truth = jnp.asarray(nonlinear_sequence(STEPS, 8)[0][:-1])

    def error(logs, sequence):
        bandwidth, epsilon, delta = jnp.exp(logs)
        clipping = kbr.Clipping(truncation=0.0)
        filt = fit(None, "importance", bandwidth, epsilon, 0.05, clipping=clipping)
        inputs = jnp.asarray(INPUTS)
        run = kbr.run_filter(filt, sequence, controls=inputs)
        options = {"regularizer": delta, "estimator": "importance", "clipping": clipping}
        smoothed = kbr.mean(kbr.smooth(filt, run, controls=inputs, **options))
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


def test_predictions_of_several_runs_have_inputs_of_their_own():
    filt = fit(None, "pairs", H_U, RIDGE, 0.05)
    inputs = [jnp.asarray(INPUTS[:4]), jnp.asarray(INPUTS[4:7])]
    runs = kbr.run_filter(filt, [jnp.asarray(TEST[:4]), jnp.asarray(TEST[4:7])], controls=inputs)
    ahead = kbr.predict(filt, runs, 2, controls=[own[:2] for own in inputs])
    for run, own, found in zip(runs, inputs, ahead, strict=True):
        alone = kbr.predict(filt, run, 2, controls=own[:2])
        np.testing.assert_array_equal(found.weights, alone.weights)
    with pytest.raises(ValueError, match="`controls` holds 1 trajectories and `output` 2"):
        kbr.predict(filt, runs, 2, controls=inputs[:1])


def test_inputs_are_numbers_in_the_domain_of_their_kernel():
    filt = fit()
    run = kbr.run_filter(filt, TEST, controls=INPUTS)
    gap = np.where(np.arange(STEPS)[:, None] == 2, np.nan, INPUTS)
    for call in (
        lambda: kbr.run_filter(filt, TEST, controls=gap),
        lambda: kbr.run_filter(filt, [TEST, TEST], controls=[INPUTS, gap]),
        lambda: kbr.filter_step(filt, run.state, TEST[0], control=gap[2]),
        lambda: kbr.predict(filt, run, 3, controls=gap[:3]),
        lambda: kbr.smooth(filt, run, controls=gap, regularizer=0.1),
    ):
        with pytest.raises(ValueError, match=r"`controls(\[1\])?` is NaN at step .: no input may"):
            call()


def test_histograms_are_not_negative_in_a_run():
    """Inside the program of a run nothing can be raised."""
    s, s_next = jnp.asarray(STATES[:-1]), jnp.asarray(STATES[1:])
    o, u = jnp.abs(jnp.asarray(OBSERVED)), jnp.abs(jnp.asarray(CONTROLS))
    ks, histogram = kbr.Gaussian(H_S), kbr.kernels.ChiSquared()
    emission = kbr.fit_conditional(ks, histogram, s, o, regularizer=EPSILON)
    pairs = kbr.TensorProduct((ks, histogram))
    transition = kbr.fit_conditional(pairs, ks, (s, u), s_next, regularizer=RIDGE)
    filt = kbr.KernelBayesFilter(emission, transition, regularizer=DELTA)
    seen, inputs = jnp.abs(TEST), jnp.abs(INPUTS)
    run = kbr.run_filter(filt, seen, controls=inputs)
    for call, name in (
        (lambda: kbr.run_filter(filt, seen.at[3].multiply(-1), controls=inputs), "observations"),
        (lambda: kbr.run_filter(filt, seen, controls=-inputs), "controls"),
        (lambda: kbr.run_filter(filt, [seen, -seen], controls=[inputs] * 2), r"observations\[1\]"),
        (lambda: kbr.predict(filt, run, 2, controls=-inputs[:2]), "controls"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` has negative coordinates"):
            call()
    # The value of a missing observation is ignored.
    unseen = jnp.arange(STEPS) != 3
    other = kbr.run_filter(filt, seen.at[3].multiply(-1), controls=inputs, observed=unseen)
    close(other.weights, kbr.run_filter(filt, seen, controls=inputs, observed=unseen).weights)
    kbr.filter_step(filt, run.state, -seen[0], control=inputs[0], observed=False)


def test_labels_as_states_and_inputs_beside_single_precision():
    rng = np.random.default_rng(0)
    labels, inputs = (jnp.asarray(rng.integers(0, most, 20)) for most in (3, 2))
    seen = labels.astype(jnp.float32)
    emission = kbr.fit_conditional(None, None, labels[:-1], seen[:-1], regularizer=1e-2)
    pairs = labels[:-1], inputs[:-1]
    transition = kbr.fit_conditional(None, None, pairs, labels[1:], regularizer=1e-2)
    for estimator in ("pairs", "prior"):
        filt = kbr.KernelBayesFilter(emission, transition, regularizer=1e-2, estimator=estimator)
        run = kbr.run_filter(filt, seen[:5], controls=inputs[:5])
        assert run.weights.dtype == "f4" and np.all(np.isfinite(run.weights))
        if estimator == "pairs":
            smooth = kbr.smooth(filt, run, controls=inputs[:5], regularizer=0.1)
            assert smooth.weights.dtype == "f4"


def test_inputs_and_masks_are_lists_of_numbers_too():
    filt = fit()
    plain = {"controls": INPUTS.tolist(), "observed": MASK.tolist()}
    found = kbr.run_filter(filt, GAPS, **plain)
    close(found.weights, kbr.run_filter(filt, GAPS, controls=INPUTS, observed=MASK).weights)
    ahead = kbr.predict(filt, found, 2, controls=INPUTS[:2].tolist())
    close(ahead.weights, kbr.predict(filt, found, 2, controls=INPUTS[:2]).weights)
