"""The filters against NumPy, step by step.

Online, batched and with gaps; exact hidden Markov models; gradients.
"""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness, gaussian

import kbr_jax as kbr

T, STEPS = 14, 6
H_S, H_O, EPSILON, DELTA, RIDGE = 0.8, 0.9, 0.03, 0.02, 0.05
KS, KO = kbr.Gaussian(H_S), kbr.Gaussian(H_O)
LANDMARKS = [None, 5]

#: Estimator and shift; "prior" stands on the successors, which cannot be shifted.
ESTIMATORS = [
    ("pairs", True),
    ("pairs", False),
    ("prior", False),
    ("importance", True),
    ("importance", False),
]
PRINTED = {"clip": False, "truncation": 0.0, "normalize": False}
CLEANINGS = [
    PRINTED,
    {"clip": True, "truncation": 0.0, "normalize": False},
    {"clip": False, "truncation": 0.0, "normalize": True},
    {"clip": True, "truncation": 0.15, "normalize": True},
]


close = closeness(1e-8, 1e-10, "rtol")


def nonlinear_sequence(length, seed):
    """A noisy nonlinear turn in the plane, and its noisy observation."""
    rng = np.random.default_rng(seed)
    s = np.zeros((length + 1, 2))
    s[0] = [1.0, 0.0]
    for t in range(length):
        u, v = s[t]
        s[t + 1] = [np.tanh(0.8 * u - 0.9 * v), 0.9 * u + 0.4 * np.sin(v)] + 0.2 * rng.normal(
            size=2
        )
    return s, s[:-1] ** 3 / 2 + s[:-1] + 0.2 * rng.normal(size=(length, 2))


STATES, OBSERVED = nonlinear_sequence(T, 0)
TEST = nonlinear_sequence(STEPS, 1)[1]
MASK = np.array([True, True, False, True, False, False])
GAPS = np.where(MASK[:, None], TEST, np.nan)


def gram_function(features, h):
    """The kernel of features, exact or Nystroem, as a function of two samples."""
    if isinstance(features, kbr.features.DenseGram):
        return lambda a, b: gaussian(a, b, h)
    points = np.asarray(features.landmarks.points)[np.asarray(features.landmarks.active)]
    inner = np.linalg.inv(gaussian(points, points, h))
    return lambda a, b: gaussian(a, points, h) @ inner @ gaussian(points, b, h)


def numpy_clean(w, clip, truncation, normalize):
    if clip:
        w = np.maximum(w, 0)
        w = np.where(w < truncation * w.max(), 0, w)
    return w / w.sum() if normalize else w


def numpy_bayes(estimator, w, k, column):
    d, identity = np.diag(w), np.eye(len(w))
    if estimator == "importance":
        root = np.sqrt(d)
        return root @ np.linalg.solve(root @ k @ root + DELTA * identity, root @ column)
    solved = np.linalg.solve((d @ k) @ (d @ k) + DELTA * identity, d @ column)
    return k @ solved if estimator == "prior" else d @ k @ solved


def numpy_filter(ks, ko, estimator, shift, cleaning, sequence, mask):
    """The kernel Bayes filter of the class docstring: beliefs and cleaned priors of every step."""
    if estimator == "importance":
        cleaning = {**cleaning, "clip": True}
    s, s_next, o = STATES[:-1], STATES[1:], OBSERVED
    g, shifted_gram, k = ks(s, s), ks(s, s_next), ko(o, o)
    inverse = np.linalg.inv(g + T * EPSILON * np.eye(T))
    w = on_successors = np.full(T, 1 / T)
    if estimator == "prior":  # the marginal of the states, regressed onto the successors
        on_successors = np.linalg.solve(
            ks(s_next, s_next) + T * EPSILON * np.eye(T), ks(s_next, s) @ w
        )
    beliefs, priors = [], []
    for observation, seen in zip(sequence, mask, strict=True):
        w = numpy_clean(w, **cleaning)
        if cleaning["normalize"]:
            on_successors = on_successors / on_successors.sum()
        priors.append(w)
        if not seen:
            belief = on_successors if estimator == "prior" else w
        else:
            belief = numpy_bayes(estimator, w, k, ko(o, observation[None])[:, 0])
            if (
                estimator == "prior"
            ):  # Lambda^T = diag(alpha) G~^T (G + n eps)^-1 of the prior on successors
                belief = on_successors * (shifted_gram.T @ inverse @ belief)
        beliefs.append(belief)
        if estimator == "prior":
            on_successors = inverse @ shifted_gram @ belief
        elif shift:
            on_successors = belief
        else:
            on_successors = inverse @ g @ belief
        w = inverse @ shifted_gram @ on_successors
    return np.stack(beliefs), np.stack(priors)


@functools.cache
def fitted(estimator="pairs", shift=True, landmarks=None, cleaning=0):
    if estimator == "importance":
        cleaning = {**CLEANINGS[cleaning], "clip": True}
    else:
        cleaning = CLEANINGS[cleaning]
    return kbr.fit_filter(
        KS,
        KO,
        jnp.asarray(STATES),
        jnp.asarray(OBSERVED),
        regularizer=EPSILON,
        posterior_regularizer=DELTA,
        landmarks_states=landmarks,
        landmarks_observations=landmarks,
        estimator=estimator,
        shift=shift,
        clipping=kbr.Clipping(**cleaning),
    )


def song_2009(landmarks=None, estimator="affine", **options):
    return kbr.fit_conditional_embedding_filter(
        KS,
        KO,
        jnp.asarray(STATES[:-1]),
        jnp.asarray(OBSERVED),
        regularizer=EPSILON,
        landmarks_states=landmarks,
        landmarks_observations=landmarks,
        estimator=estimator,
        **options,
    )


def landmarks_of(kernel, points):
    return kbr.greedy_landmarks(kernel, jnp.asarray(points), rank=5)


def moments(shift, cells):
    """The filter on moments, with everything that smoothing and inputs of a transition need."""
    ls, lo = landmarks_of(KS, STATES[:-1]), landmarks_of(KO, OBSERVED)
    s, o, s_next = (jnp.asarray(points) for points in (STATES[:-1], OBSERVED, STATES[1:]))
    cells = kbr.soft_partition(KS, ls) if cells else None
    maps = kbr.moments.moment_maps(KS, KO, ls, lo, cells=cells, shift=True)
    emission = kbr.moments.collect_moments(maps, s, o, s_next)
    maps = kbr.moments.moment_maps(KS, KS, ls, ls, cells=cells)
    transition = kbr.moments.collect_moments(maps, s, s_next)
    return kbr.KernelBayesFilter(
        kbr.moments.fit_conditional(emission, regularizer=EPSILON),
        kbr.moments.fit_conditional(transition, regularizer=EPSILON),
        regularizer=DELTA,
        clipping=kbr.Clipping() if cells else kbr.Clipping(False, 0.0),
        shift=shift,
    )


def simulate(key, state):
    u, v = state
    move = jnp.stack([jnp.tanh(0.8 * u - 0.9 * v), 0.9 * u + 0.4 * jnp.sin(v)])
    return move + 0.2 * jax.random.normal(key, (2,))


def log_likelihood(observation, state):
    return -jnp.sum((observation - state**3 / 2 - state) ** 2) / (2 * 0.2**2)


def half_known(known):
    s, o = jnp.asarray(STATES[:-1]), jnp.asarray(OBSERVED)
    if known == "transition":
        emission = kbr.fit_conditional(KS, KO, s, o, regularizer=EPSILON)
        transition = kbr.SimulatedTransition(simulate, key=jax.random.key(0), num_draws=5)
        return kbr.KernelBayesFilter(emission, transition, regularizer=DELTA)
    emission = kbr.known_likelihood(KS, s, log_likelihood, regularizer=EPSILON)
    s_next = jnp.asarray(STATES[1:])
    transition = kbr.fit_conditional(KS, KS, s, s_next, regularizer=EPSILON)
    return kbr.KernelBayesFilter(emission, transition)


def every_filter():
    """One filter of each kind, in both precisions of the Gram matrix."""
    return [
        pytest.param(lambda: fitted("pairs", True, None, 3), id="shift"),
        pytest.param(lambda: fitted("prior", False, 5, 1), id="on the prior, landmarks"),
        pytest.param(lambda: fitted("importance", False, 5, 3), id="importance, landmarks"),
        pytest.param(song_2009, id="2009"),
        pytest.param(lambda: song_2009(5, "song2009"), id="2009 as printed, landmarks"),
        pytest.param(lambda: moments(True, False), id="moments, shift"),
        pytest.param(lambda: moments(False, True), id="moments, cells"),
        pytest.param(lambda: half_known("transition"), id="known transition"),
        pytest.param(lambda: half_known("likelihood"), id="known likelihood"),
    ]


def every_state():
    """One filter for each kind of state that a scan carries."""
    kinds = {"shift", "on the prior, landmarks", "2009", "moments, cells", "known transition"}
    return [one for one in every_filter() if one.id in kinds]


def support(filt):
    """The points that beliefs stand on."""
    return kbr.belief(filt, kbr.run_filter(filt, jnp.asarray(TEST[:1]))).points


@pytest.mark.parametrize("cleaning", range(len(CLEANINGS)))
@pytest.mark.parametrize("estimator, shift", ESTIMATORS)
@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_kernel_bayes_filter(landmarks, estimator, shift, cleaning):
    filt = fitted(estimator, shift, landmarks, cleaning)
    ks = gram_function(filt.emission.features_x, H_S)
    ko = gram_function(filt.emission.features_y, H_O)
    run = kbr.run_filter(filt, jnp.asarray(GAPS), observed=jnp.asarray(MASK))
    beliefs, priors = numpy_filter(ks, ko, estimator, shift, CLEANINGS[cleaning], TEST, MASK)
    close(run.weights, beliefs)
    close(run.predicted, priors)
    values = [
        p @ ko(OBSERVED, o[None])[:, 0] / p.sum() if seen else np.nan
        for p, o, seen in zip(priors, TEST, MASK, strict=True)
    ]
    close(run.predictive_value, values)
    assert not np.any(run.restarted)


def numpy_2009(ks, ko, estimator, sequence):
    """S09 theorem 9, and the same with an intercept. The pairs are (s_t, o_{t+1}) -> s_{t+1}."""
    s, s_next, o = STATES[:-2], STATES[1:-1], OBSERVED[1:]
    n = len(s)
    h, k, u, cross = np.eye(n) - 1 / n, ks(s, s), ko(o, o), ks(s, s_next)
    beta, beliefs = np.full(n, 1 / n), []
    for observation in sequence:
        code = cross @ beta + ko(o, observation[None])[:, 0]
        if estimator == "song2009":
            beta = np.linalg.solve(h @ k + h @ u + n * EPSILON * np.eye(n), h @ code)
        else:
            centered = h @ (code - (k + u).mean(1))
            beta = 1 / n + np.linalg.solve(h @ (k + u) @ h + n * EPSILON * np.eye(n), centered)
        beliefs.append(beta)
    return np.stack(beliefs)


@pytest.mark.parametrize("estimator", ["affine", "song2009"])
@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_conditional_embedding_filter(landmarks, estimator):
    filt = song_2009(landmarks, estimator)
    ks, ko = gram_function(filt.states, H_S), gram_function(filt.observations, H_O)
    run = kbr.run_filter(filt, jnp.asarray(TEST))
    close(run.weights, numpy_2009(ks, ko, estimator, TEST))
    close(jnp.sum(run.weights, axis=1), np.full(STEPS, float(estimator == "affine")))
    close(kbr.belief(filt, run).points, STATES[1:-1])


# One filter, many ways to run it.


@pytest.mark.parametrize("make", every_state())
def test_online_use_equals_the_scan(make):
    filt, sequence = make(), jnp.asarray(GAPS)
    run = kbr.run_filter(filt, sequence, observed=jnp.asarray(MASK))
    state, steps, advance = kbr.init_filter(filt), [], jax.jit(kbr.filter_step)
    for observation, seen in zip(sequence, MASK, strict=True):
        state, step = advance(filt, state, observation, observed=bool(seen))
        steps.append(step)
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)
    whole = eqx.tree_at(lambda r: r.state, run, None, is_leaf=lambda leaf: leaf is None)
    jax.tree.map(close, together, whole)
    jax.tree.map(close, run.state, state)
    # The same in two pieces.
    first = kbr.run_filter(filt, sequence[:3], observed=jnp.asarray(MASK[:3]))
    second = kbr.run_filter(filt, sequence[3:], observed=jnp.asarray(MASK[3:]), state=first.state)
    for a, b, c in zip(*(jax.tree.leaves(r.weights) for r in (first, second, run)), strict=True):
        close(jnp.concatenate([a, b]), c)
    jax.tree.map(close, second.state, state)
    assert str(round(float(run.predictive_value[0]), 3))[:4] in repr(run)


@pytest.mark.parametrize("make", every_state())
def test_vmap_over_sequences_equals_a_loop(make):
    filt = make()
    batch = jnp.asarray(
        np.stack([TEST, nonlinear_sequence(STEPS, 2)[1], nonlinear_sequence(STEPS, 3)[1]])
    )
    together = jax.vmap(lambda sequence: kbr.run_filter(filt, sequence))(batch)
    assert together.predictive_value.shape == (3, STEPS)
    for index, sequence in enumerate(batch):
        alone = kbr.run_filter(filt, sequence)
        jax.tree.map(lambda a, b, index=index: close(a[index], b), together, alone)


@pytest.mark.parametrize("make", every_filter())
def test_missing_observations_are_predictions(make):
    """After some observations, k missing ones give the belief of `predict(k)`."""
    filt = make()
    run = kbr.run_filter(filt, jnp.asarray(TEST[:3]))
    gap = jnp.full((3, 2), jnp.nan)
    missing = kbr.run_filter(filt, gap, observed=jnp.zeros(3, bool), state=run.state)
    assert np.all(np.isnan(missing.predictive_value))
    for k in (1, 2, 3):
        ahead = kbr.predict(filt, run, k)
        jax.tree.map(lambda a, b, k=k: close(a[-1], b[k - 1]), ahead.weights, missing.weights)
        at = jnp.asarray(STATES[:5])
        expected = kbr.evaluate(kbr.belief(filt, missing), at)[k - 1]
        close(kbr.evaluate(kbr.belief(filt, ahead), at)[-1], expected)


def test_a_prediction_is_the_sum_rule_regressed_and_clipped():
    for filt in (fitted("pairs", True, None, 3), fitted("importance", False, 5, 3)):
        run = kbr.run_filter(filt, jnp.asarray(TEST[:3]))
        belief = kbr.belief(filt, run)
        moved = kbr.Embedding(KS, belief.points, belief.weights[-1])
        if filt is fitted("pairs", True, None, 3):
            moved = kbr.Embedding(KS, filt.transition.learned.features_y.points, moved.weights)
        else:
            moved = kbr.sum_rule(filt.transition.model, moved)
        ks = filt.emission.features_x
        mean = moved.weights @ ks.coordinates(moved.points)
        weights = ks.ridge_weights(filt.emission.factor, mean[None])[0]
        expected = kbr.rules.clip_and_normalize(weights, filt.clipping)
        close(kbr.predict(filt, run).weights[-1], expected)


@pytest.mark.parametrize("make", every_filter())
def test_missing_values_reach_neither_value_nor_gradient(make):
    filt, mask = make(), jnp.asarray(MASK)

    @eqx.filter_jit
    @jax.value_and_grad
    def loss(sequence, filt):
        run = kbr.run_filter(filt, sequence, observed=mask)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(run.weights))

    value, gradient = loss(jnp.asarray(GAPS), filt)
    expected, expected_gradient = loss(jnp.asarray(np.where(MASK[:, None], TEST, 7.0)), filt)
    close(value, expected, 1e-14)
    close(gradient, expected_gradient, 1e-14)
    close(gradient[~MASK], np.zeros((3, 2)), 0, 0)
    assert np.all(np.abs(gradient[0]) > 0)


# Beginnings.


@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_init_from_a_prior(landmarks):
    rng = np.random.default_rng(4)
    points, weights = rng.normal(size=(4, 2)), np.array([0.4, 0.3, 0.4, -0.1])
    prior = kbr.embed(KS, jnp.asarray(points), jnp.asarray(weights))
    s, s_next = STATES[:-1], STATES[1:]

    def projected(ks, sample):
        return np.linalg.solve(
            ks(sample, sample) + T * EPSILON * np.eye(T), ks(sample, points) @ weights
        )

    for estimator, shift in (("pairs", True), ("prior", False)):
        filt = fitted(estimator, shift, landmarks)
        ks = gram_function(filt.emission.features_x, H_S)
        state = kbr.init_filter(filt, prior)
        close(state.weights, projected(ks, s))
        if estimator == "prior":
            close(state.shifted, projected(ks, s_next))
        run = kbr.run_filter(filt, jnp.asarray(TEST), prior=prior)
        close(run.weights[0], kbr.filter_step(filt, state, jnp.asarray(TEST[0]))[1].weights)
    close(kbr.init_filter(fitted("pairs", True, landmarks)).weights, np.full(T, 1 / T))


@pytest.mark.parametrize("landmarks", LANDMARKS)
@pytest.mark.parametrize("estimator, shift", ESTIMATORS[:2])
def test_init_from_an_observation(estimator, shift, landmarks):
    filt = fitted(estimator, shift, landmarks)
    ko = gram_function(filt.emission.features_y, H_O)
    column = ko(OBSERVED, TEST[:1])[:, 0]
    own = np.linalg.solve(ko(OBSERVED, OBSERVED) + T * RIDGE * np.eye(T), column)
    state, step = kbr.init_from_observation(filt, jnp.asarray(TEST[0]), regularizer=RIDGE)
    close(step.weights, own)
    close(step.predictive_value, own @ column / own.sum())
    ks = gram_function(filt.emission.features_x, H_S)
    s, s_next = STATES[:-1], STATES[1:]
    inverse = np.linalg.inv(ks(s, s) + T * EPSILON * np.eye(T))
    shifted = own if shift else inverse @ ks(s, s) @ own
    close(state.weights, inverse @ ks(s, s_next) @ shifted)


@pytest.mark.parametrize("make", every_filter())
def test_every_filter_starts_from_an_observation(make):
    filt = make()
    state, step = kbr.init_from_observation(filt, jnp.asarray(TEST[0]), regularizer=RIDGE)
    run = kbr.run_filter(filt, jnp.asarray(TEST[1:]), state=state)
    ahead = kbr.predict(filt, step)
    gap = kbr.run_filter(filt, jnp.full((1, 2), jnp.nan), observed=np.array([False]), state=state)
    jax.tree.map(lambda a, b: close(a, b[0]), ahead.weights, gap.weights)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(run.weights))


def test_moments_start_from_an_observation_as_the_sample_does():
    ours = moments(True, False)
    theirs = kbr.fit_filter(
        KS,
        KO,
        jnp.asarray(STATES),
        jnp.asarray(OBSERVED),
        regularizer=EPSILON,
        posterior_regularizer=DELTA,
        landmarks_states=landmarks_of(KS, STATES[:-1]),
        landmarks_observations=landmarks_of(KO, OBSERVED),
        clipping=kbr.Clipping(False, 0.0),
    )
    starts = [
        kbr.init_from_observation(filt, jnp.asarray(TEST[0]), regularizer=RIDGE)
        for filt in (ours, theirs)
    ]
    runs = [
        kbr.run_filter(filt, jnp.asarray(TEST[1:]), state=state)
        for filt, (state, _) in zip((ours, theirs), starts, strict=True)
    ]
    for filt, (_, step), run in zip((ours, theirs), starts, runs, strict=True):
        close(kbr.state_mean(filt, step), kbr.state_mean(ours, starts[0][1]))
        close(kbr.state_mean(filt, run), kbr.state_mean(ours, runs[0]))


def test_separate_transitions_equal_the_sequence_they_come_from():
    s, o, sequence = jnp.asarray(STATES), jnp.asarray(OBSERVED), jnp.asarray(TEST)

    def weights(fit, *data, **more):
        return kbr.run_filter(fit(KS, KO, *data, regularizer=EPSILON, **more), sequence).weights

    fit = functools.partial(kbr.fit_filter, posterior_regularizer=DELTA)
    whole = weights(fit, s, o)
    close(weights(fit, s, jnp.concatenate([o, o[:1]])), whole)  # the last pair is dropped
    close(weights(fit, s[:-1], o, successors=s[1:]), whole)
    fit = kbr.fit_conditional_embedding_filter
    close(weights(fit, s[:-2], o[1:], successors=s[1:-1]), weights(fit, s, o))


# Hidden Markov models: with delta kernels and vanishing regularizers the two-inverse filter is the
# forward filter.


def random_model(seed, hidden=3, symbols=3):
    rng = np.random.default_rng(seed)
    rows = [rng.multinomial(8, rng.dirichlet(np.ones(hidden))) + 1 for _ in range(hidden)]
    return (
        np.stack(rows),
        rng.dirichlet(np.ones(symbols) * 2, size=hidden),
        rng.integers(symbols, size=12),
    )


def model_sample(transitions, emission):
    """Transitions with given counts, each beside observations in proportion 10 to (rounded)
    emission probabilities.

    State, observation and successor are a product sample for each state, so the sample is exact for
    its own tables.
    """
    counts = np.maximum(np.round(4 * emission), 1).astype(int)
    s, o, s_next = [], [], []
    for i, j in np.ndindex(transitions.shape):
        for c in range(counts.shape[1]):
            repeat = transitions[i, j] * counts[i, c]
            s += [i] * repeat
            o += [c] * repeat
            s_next += [j] * repeat
    return np.array(s), np.array(o), np.array(s_next), counts / counts.sum(1, keepdims=True)


def forward_filter(initial, transition, emission, sequence):
    belief, beliefs = initial, []
    for symbol in sequence:
        belief = belief * emission[:, symbol]
        belief = belief / belief.sum()
        beliefs.append(belief)
        belief = belief @ transition
    return np.stack(beliefs)


def table_filter(s, o, s_next, estimator):
    return kbr.fit_filter(
        kbr.Delta(),
        kbr.Delta(),
        jnp.asarray(s),
        jnp.asarray(o),
        successors=jnp.asarray(s_next),
        regularizer=1e-9,
        posterior_regularizer=1e-9 if estimator == "importance" else 1e-13,
        estimator=estimator,
        shift=False,
        landmarks_states=kbr.greedy_landmarks(kbr.Delta(), jnp.asarray(s), rank=3),
        landmarks_observations=kbr.greedy_landmarks(kbr.Delta(), jnp.asarray(o), rank=3),
        clipping=kbr.Clipping(True, 0.0),
    )


def by_state(belief):
    """A belief as normalized probabilities of the three states."""
    points = np.asarray(belief.points)
    table = np.asarray(belief.weights) @ (points[:, None] == np.arange(3)).astype(float)
    return table / table.sum(-1, keepdims=True)


@pytest.mark.parametrize("default", [True, False], ids=["default prior", "given prior"])
@pytest.mark.parametrize("estimator", ["prior", "pairs", "importance"])
@pytest.mark.parametrize("seed", range(2))
def test_random_hidden_markov_models(seed, estimator, default):
    transitions, emission, sequence = random_model(seed)
    s, o, s_next, emission = model_sample(transitions, emission)
    filt, matrix = (
        table_filter(s, o, s_next, estimator),
        transitions / transitions.sum(1, keepdims=True),
    )
    initial = np.bincount(s, minlength=3) / len(s) if default else np.array([0.6, 0.3, 0.1])
    prior = None if default else kbr.embed(kbr.Delta(), jnp.arange(3), jnp.asarray(initial))
    run = kbr.run_filter(filt, jnp.asarray(sequence), prior=prior)
    expected = forward_filter(initial, matrix, emission, sequence)
    close(by_state(kbr.belief(filt, run)), expected, 0, 1e-6)
    observed_probability = np.concatenate([[initial], expected[:-1] @ matrix]) @ emission
    close(run.predictive_value, observed_probability[np.arange(12), sequence], 0, 1e-6)


@pytest.mark.parametrize("estimator", ["prior", "pairs", "importance"])
def test_a_first_observation_without_a_prior_is_bayes_with_the_training_frequencies(estimator):
    transitions, emission, sequence = random_model(0)
    s, o, s_next, emission = model_sample(transitions, emission)
    filt, matrix = (
        table_filter(s, o, s_next, estimator),
        transitions / transitions.sum(1, keepdims=True),
    )
    expected = forward_filter(np.bincount(s, minlength=3) / len(s), matrix, emission, sequence)
    state, first = kbr.init_from_observation(filt, jnp.asarray(sequence[0]), regularizer=1e-9)
    close(by_state(kbr.belief(filt, first)), expected[0], 0, 1e-6)
    rest = kbr.run_filter(filt, jnp.asarray(sequence[1:]), state=state)
    close(by_state(kbr.belief(filt, rest)), expected[1:], 0, 1e-6)


def test_the_mass_of_a_long_run_stays_near_one():
    """With the estimator "prior" the masses of 300 steps were multiplied: 1e-18."""
    rng = np.random.default_rng(0)
    angles = 0.3 * np.arange(701) + np.cumsum(rng.normal(0, 0.1, 701))
    states = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    seen = states[:, :1] + 0.1 * rng.normal(size=(701, 1))
    filt = kbr.fit_filter(
        kbr.Gaussian(0.5),
        kbr.Gaussian(0.3),
        states[:101],
        seen[:100],
        regularizer=1e-3,
        posterior_regularizer=1e-1,
        estimator="prior",
    )
    mass = np.asarray(jnp.sum(kbr.run_filter(filt, jnp.asarray(seen[101:])).weights, axis=1))
    assert 0.2 < np.quantile(mass, 0.05) < np.quantile(mass, 0.95) < 5


# Gradients through a long scan.

LONG = 200
PARAMETERS = {"state": 0.8, "observation": 0.9, "regularizer": 0.01, "posterior_regularizer": 0.01}


@functools.cache
def validation_error(kind):
    """Mean squared error of the filtered state on 200 steps, as a function of log parameters."""
    states, observations = nonlinear_sequence(30, 5)
    truth, sequence = nonlinear_sequence(LONG, 6)
    options = {
        "printed": {"clipping": kbr.Clipping(False, 0.0, False)},
        "clipped": {"clipping": kbr.Clipping()},
        "importance": {
            "estimator": "importance",
            "clipping": kbr.Clipping(truncation=0.0),
            "shift": False,
        },
        "on the prior": {"estimator": "prior", "clipping": kbr.Clipping(False, 0.0)},
        "2009": {},
    }[kind]

    def loss(logs):
        p = {name: jnp.exp(value) for name, value in logs.items()}
        kernels = kbr.Gaussian(p["state"]), kbr.Gaussian(p["observation"])
        data = jnp.asarray(states), jnp.asarray(observations)
        if kind == "2009":
            filt = kbr.fit_conditional_embedding_filter(
                *kernels, *data, regularizer=p["regularizer"]
            )
        else:
            ridges = {name: p[name] for name in ("regularizer", "posterior_regularizer")}
            filt = kbr.fit_filter(*kernels, *data, **ridges, **options)
        run = kbr.run_filter(filt, jnp.asarray(sequence))
        return jnp.mean((kbr.state_mean(filt, run) - jnp.asarray(truth[:-1])) ** 2)

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("kind", ["printed", "clipped", "importance", "on the prior", "2009"])
def test_gradients_through_two_hundred_steps(kind):
    with_gradient = validation_error(kind)
    logs = {name: jnp.log(jnp.asarray(value)) for name, value in PARAMETERS.items()}
    value, gradient = with_gradient(logs)
    assert 0 < float(value) < 1
    step = 1e-6 if kind == "clipped" else 1e-4
    for name in logs:
        runs = (
            with_gradient({**logs, name: logs[name] + shift * step}) for shift in (-2, -1, 1, 2)
        )
        low2, low, high, high2 = (float(error) for error, _ in runs)
        expected = (8 * (high - low) - (high2 - low2)) / (12 * step)
        if kind == "2009" and name == "posterior_regularizer":
            assert float(gradient[name]) == expected == 0.0
        else:
            assert abs(expected) > 1e-6
            close(gradient[name], expected, 1e-5)


def test_one_compilation_serves_all_parameters():
    sequence, states, observations = jnp.asarray(TEST), jnp.asarray(STATES), jnp.asarray(OBSERVED)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def weights(bandwidth, epsilon, delta):
        filt = kbr.fit_filter(
            kbr.Gaussian(bandwidth),
            KO,
            states,
            observations,
            regularizer=epsilon,
            posterior_regularizer=delta,
        )
        return kbr.run_filter(filt, sequence).weights

    runs = [weights(*values) for values in ((0.8, 0.03, 0.02), (0.9, 0.01, 0.02), (1.0, 0.2, 0.1))]
    assert not np.allclose(runs[0], runs[1])


def test_a_refitted_filter_is_not_compiled_again():
    traces = []

    class Counting(kbr.Gaussian):
        def gram(self, x, y):
            traces.append(None)
            return super().gram(x, y)

    def run(bandwidth, epsilon):
        filt = kbr.fit_filter(
            KS,
            Counting(bandwidth),
            jnp.asarray(STATES),
            jnp.asarray(OBSERVED),
            regularizer=epsilon,
            posterior_regularizer=DELTA,
            clipping=kbr.Clipping(truncation=epsilon),
        )
        before = len(traces)
        kbr.run_filter(filt, jnp.asarray(TEST))
        return len(traces) - before

    assert [run(0.9, 0.03), run(0.7, 0.01), run(jnp.asarray(0.8), jnp.asarray(0.02))] == [1, 0, 0]


# Accuracy.


def rotation(length, seed):
    """The rotation of F11 section 5.3 (a), as the project fixes its noise levels."""
    rng = np.random.default_rng(seed)
    states = np.zeros((length, 2))
    states[0] = [1.0, 0.0]
    for t in range(1, length):
        angle = np.arctan2(states[t - 1, 1], states[t - 1, 0]) + 0.3
        states[t] = [np.cos(angle), np.sin(angle)] + 0.2 * rng.normal(size=2)
    return states, states + 0.2 * rng.normal(size=(length, 2))


def test_the_filter_beats_the_raw_observation_on_a_rotation():
    states, observations = rotation(150, 0)
    truth, sequence = rotation(220, 1)

    def error(estimate):
        return float(np.mean(np.sum((np.asarray(estimate) - truth)[20:] ** 2, axis=1)))

    kernels = kbr.Gaussian(0.5), kbr.Gaussian(0.5)
    data = jnp.asarray(states), jnp.asarray(observations)
    filt = kbr.fit_filter(
        *kernels,
        *data,
        regularizer=1e-3,
        posterior_regularizer=1e-4,
        landmarks_states=40,
        landmarks_observations=40,
    )
    filtered = error(kbr.state_mean(filt, kbr.run_filter(filt, jnp.asarray(sequence))))
    simpler = kbr.fit_conditional_embedding_filter(*kernels, *data, regularizer=1e-3)
    simple = error(kbr.state_mean(simpler, kbr.run_filter(simpler, jnp.asarray(sequence))))
    raw = error(sequence)
    assert 0.06 < raw < 0.1
    assert 0.035 < filtered < 0.8 * raw  # below .04 it would know more than an optimal filter
    assert 0.035 < simple < raw
