"""Estimates that the newest observation corrects: by hand, and learned on held-out runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from helpers import closeness

import kbr_jax as kbr
from kbr_jax.filtering import ReadoutFilter
from kbr_jax.filtering._readout import kalman_update
from kbr_jax.learning import _candidates, _filter, _folds
from kbr_jax.learning._readout import RIDGE, _least_distances, learn_readout

RNG = np.random.default_rng(0)
ANGLES = np.cumsum(0.3 + 0.2 * RNG.normal(size=161))
STATES = jnp.asarray(
    np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1) + 0.2 * RNG.normal(size=(161, 2))
)
SEEN = STATES[:-1] @ jnp.array([[1.0, 0.5, 0.0], [0.0, 1.0, 2.0]])
SEEN = SEEN + 0.2 * jnp.asarray(RNG.normal(size=(160, 3)))
NEW = SEEN[140:150] + 0.1

close = closeness(1e-10, 1e-10)


def doubled(observation):
    return 2 * observation[:2]


EXPECTED = kbr.Embedding(kbr.Gaussian(0.8), STATES[:30], jnp.asarray(RNG.normal(size=(2, 30)) / 10))
SHARES = jnp.array([0.5, 0.2, 0.7])
LINE = jnp.array([0.1, 0.2]), jnp.array([[0.4, 0.1], [0.0, -0.3]])


@functools.cache
def readout(decode=None):
    base = kbr.fit_filter(
        kbr.Gaussian(0.6),
        kbr.Gaussian(1.0),
        STATES[:101],
        SEEN[:100],
        regularizer=1e-3,
        posterior_regularizer=1e-3,
    )
    return ReadoutFilter(base, doubled, EXPECTED, SHARES, *LINE, SEEN[0], decode)


def update(belief, state, z, expected=EXPECTED, width=0.8):
    """Of an extended Kalman filter, by the formula."""
    points, weights = np.asarray(expected.points), np.asarray(expected.weights)
    apart = state - points
    values = np.exp(-np.sum(apart**2, axis=1) / (2 * width**2))
    jacobian = weights @ (-values[:, None] * apart / width**2)
    spread, total = np.zeros((2, 2)), 0.0
    for weight, point in zip(np.asarray(belief.weights), np.asarray(belief.points), strict=True):
        if weight > 0:
            spread = spread + weight * np.outer(point - state, point - state)
            total = total + weight
    spread = spread / total
    noise = np.eye(len(z))
    gain = spread @ jacobian.T @ np.linalg.inv(jacobian @ spread @ jacobian.T + noise)
    return gain @ (z - weights @ values)


def on_circle(belief):
    mean = kbr.mean(belief)
    return mean / jnp.linalg.norm(mean)


def divided(points):
    return points / np.linalg.norm(points, axis=-1, keepdims=True)


@pytest.mark.parametrize("decode", [None, on_circle])
def test_the_estimate_by_hand(decode):
    filt = readout(decode)
    run, own = kbr.run_filter(filt, NEW), kbr.run_filter(filt.base, NEW)
    close(run.weights, own.weights)
    points = np.asarray(STATES[:100])
    weights = (np.asarray(w) for w in (run.weights, run.predicted))
    mean, before = (w @ points / w.sum(1, keepdims=True) for w in weights)

    decoded = np.asarray if decode is None else divided
    after, z = decoded(mean), 2 * np.asarray(NEW)[:, :2]
    beliefs = [filt.base.embed(w) for w in run.weights]
    moved = np.array([update(*all_) for all_ in zip(beliefs, after, z, strict=True)])
    moved = decoded(after + moved) - after
    intercept, slopes = map(np.asarray, LINE)
    expected = decoded(0.5 * after + 0.2 * before + 0.7 * moved + intercept + z @ slopes)
    close(kbr.state_mean(filt, run), expected)
    close(kbr.mean(kbr.belief(filt, run)), mean)
    assert own.correction is None
    _, step = kbr.filter_step(filt, kbr.init_filter(filt), NEW[0])
    close(kbr.state_mean(filt, step), expected[0])
    (first, second) = kbr.state_mean(filt, kbr.run_filter(filt, [NEW, NEW[:4]]))
    close(first, expected)
    close(second, expected[:4])
    gap = np.arange(10) != 4
    unseen = kbr.state_mean(filt, kbr.run_filter(filt, NEW, observed=gap))[4]
    other = kbr.mean(kbr.belief(filt, kbr.run_filter(filt, NEW, observed=gap)))[4]
    close(unseen, decoded(np.asarray(other)[None])[0])


@pytest.mark.parametrize("count", [1, 5])
def test_one_update(count):
    """More coordinates than numbers of a state, or fewer: the same formula."""
    rng = np.random.default_rng(count)
    kernel, points = EXPECTED.kernel, EXPECTED.points
    expected = kbr.Embedding(kernel, points, jnp.asarray(rng.normal(size=(count, 30))))
    belief = kbr.Embedding(kernel, STATES[30:50], jnp.asarray(rng.normal(size=20)))
    state, z = jnp.array([0.3, 0.4]), jnp.arange(1.0, count + 1)
    found = kalman_update(expected, belief, state, z)
    close(found, update(belief, np.asarray(state), z, expected))
    certain = kbr.embed(kernel, STATES[:1])
    negative = kbr.Embedding(kernel, STATES[:2], jnp.array([-1.0, -0.5]))
    close(kalman_update(expected, negative, STATES[0], z), 0)
    close(kalman_update(expected, certain, STATES[0], z), 0)
    for own in (belief, certain):
        total = functools.partial(lambda e, b, s: jnp.sum(kalman_update(e, b, s, z)), expected)
        for slopes in jax.tree.leaves(jax.grad(total, argnums=(0, 1))(own, STATES[0])):
            assert jnp.all(jnp.isfinite(slopes))


def test_an_observation_beyond_the_reach_of_the_kernel_counts_as_missing():
    filt, far = readout(), NEW.at[4].set(1e3)
    run, hidden = kbr.run_filter(filt, far), kbr.run_filter(filt, NEW, observed=np.arange(10) != 4)
    assert run.predictive_value[4] == 0
    close(kbr.state_mean(filt, run), kbr.state_mean(filt, hidden))


def test_without_an_observation_nothing_is_corrected():
    filt, observed = readout(), np.arange(10) != 4
    hidden = NEW.at[4].set(jnp.nan)
    run = kbr.run_filter(filt, hidden, observed=observed)
    close(run.correction[4], 0)
    own = kbr.run_filter(filt.base, hidden, observed=observed)
    close(kbr.state_mean(filt, run)[4], kbr.state_mean(filt.base, own)[4])
    ahead, own = kbr.predict(filt, run, 2), kbr.predict(filt.base, own, 2)
    assert ahead.correction is None
    close(kbr.state_mean(filt, ahead), kbr.state_mean(filt.base, own))
    turned = readout(on_circle)
    ahead = kbr.predict(turned, kbr.run_filter(turned, NEW), 2)
    close(kbr.state_mean(turned, ahead), divided(np.asarray(kbr.mean(kbr.belief(turned, ahead)))))
    later, plain = (kbr.smooth(one, run, regularizer=1e-3) for one in (filt, filt.base))
    close(later.weights, plain.weights)
    start, first = kbr.init_from_observation(filt, NEW[0], regularizer=0.1)
    close(first.weights, kbr.init_from_observation(filt.base, NEW[0], regularizer=0.1)[1].weights)
    assert jnp.all(jnp.isfinite(kbr.state_mean(filt, kbr.filter_step(filt, start, NEW[1])[1])))


@pytest.mark.parametrize("decode", [None, on_circle])
def test_a_first_observation_corrects_the_estimate(decode):
    filt = readout(decode)
    _, first = kbr.init_from_observation(filt, NEW[0], regularizer=0.1)
    own = np.asarray(kbr.mean(kbr.belief(filt, first)))[None]
    z = 2 * np.asarray(NEW)[0, :2]
    decoded = np.asarray if decode is None else divided
    after = decoded(own)
    moved = decoded(after + update(kbr.belief(filt, first), after[0], z)) - after
    expected = 0.5 * after + 0.2 * own + 0.7 * moved + np.asarray(LINE[0]) + z @ LINE[1]
    close(kbr.state_mean(filt, first), decoded(expected)[0])


def test_a_known_likelihood_that_underflows_is_an_observation():
    def log_likelihood(seen, state):
        return -1e3 - jnp.sum((seen[:2] - state) ** 2)

    emission = kbr.known_likelihood(
        kbr.Gaussian(0.6), STATES[:100], log_likelihood, regularizer=1e-3
    )
    moves = kbr.fit_conditional(
        kbr.Gaussian(0.6), kbr.Gaussian(0.6), STATES[:100], STATES[1:101], regularizer=1e-3
    )
    base = kbr.KernelBayesFilter(emission, moves)
    filt = ReadoutFilter(base, doubled, EXPECTED, SHARES, *LINE, SEEN[0])
    run = kbr.run_filter(filt, NEW)
    assert np.all(np.asarray(run.predictive_value) == 0)
    assert np.all(np.abs(np.asarray(run.correction)) > 1e-4)


def test_batches_and_gradients():
    filt = readout()

    def means(filt, observations):
        observed = jnp.arange(10) != 4
        return kbr.state_mean(filt, kbr.run_filter(filt, observations, observed=observed))

    batch = jnp.stack([NEW, NEW[::-1]]).at[:, 4].set(jnp.nan)
    found = jax.jit(jax.vmap(means, in_axes=(None, 0)))(filt, batch)
    close(found[1], means(filt, batch[1]), 1e-8)
    slopes = jax.grad(lambda o: jnp.sum(means(filt, o)))(batch[0])
    assert bool(jnp.all(jnp.isfinite(slopes))) and not np.any(slopes[4])
    moved = jax.grad(lambda f: jnp.sum(means(f, batch[0])), allow_int=True)(filt)
    run = kbr.run_filter(filt, batch[0], observed=np.arange(10) != 4)
    beliefs = kbr.belief(filt, run)
    rows, own = [i for i in range(10) if i != 4], []
    for i in rows:
        one = kbr.Embedding(beliefs.kernel, beliefs.points, beliefs.weights[i])
        own.append(update(one, np.asarray(kbr.mean(one)), 2 * np.asarray(batch)[0, i, :2]))
    close(moved.shares[2], np.sum(own))
    close(moved.intercept, len(rows))


def test_moments_are_refused():
    kernel, points = kbr.Gaussian(0.6), (kbr.Landmarks(STATES[:8]), kbr.Landmarks(SEEN[:8]))
    maps = kbr.moments.moment_maps(kernel, kernel, *points, shift=True)
    sums = kbr.moments.collect_moments(maps, STATES[:40], SEEN[:40], STATES[1:41])
    emission = kbr.moments.fit_conditional(sums, regularizer=0.1)
    clipping = kbr.Clipping(False, 0.0)
    base = kbr.KernelBayesFilter(emission, None, regularizer=0.1, shift=True, clipping=clipping)
    prior = kbr.fit_filter(
        kernel,
        kernel,
        STATES[:21],
        SEEN[:20],
        regularizer=0.1,
        posterior_regularizer=0.1,
        estimator="prior",
    )
    with pytest.raises(ValueError, match="estimator 'prior'"):
        wrapped = ReadoutFilter(prior, doubled, EXPECTED, SHARES, *LINE, SEEN[0])
        kbr.run_filter(wrapped, NEW)
    with pytest.raises(ValueError, match="not of moments"):
        kbr.run_filter(ReadoutFilter(base, doubled, EXPECTED, SHARES, *LINE, SEEN[0]), NEW)


CHOSEN = kbr.Gaussian(0.6), 1e-3


def setting(decode=None):
    one = jnp.ones(())
    return _candidates.Setting(one, one, None, None, decode, "importance", one, CHOSEN)


def made_up(shares, noise):
    """Folds, and runs whose true states are these shares of what a filter knows, and noise."""
    rng = np.random.default_rng(1)
    folds = _folds.make_folds(STATES, SEEN, CHOSEN)
    truth = np.asarray(folds.truth)
    k, w, length, d = truth.shape
    means, before, estimates = rng.normal(size=(3, k, 3, w, length, d))
    weights = rng.normal(size=(k, 3, w, length, folds.states.shape[1]))
    for index in range(k):
        s, z, queries = (np.asarray(part[index]) for part in folds.whole)
        points = folds.states[index]
        center, origin = s.mean(0), z.mean(0)
        inner = (z - origin).T @ (z - origin) + RIDGE * len(z) * np.eye(z.shape[1])
        slopes = np.linalg.solve(inner, (z - origin).T @ (s - center))
        gram = np.exp(-((s[:, None] - s) ** 2).sum(-1) / (2 * 0.6**2))
        expected = np.linalg.solve(gram + len(s) * 1e-3 * np.eye(len(s)), z).T
        expected = kbr.Embedding(CHOSEN[0], jnp.asarray(s), jnp.asarray(expected))
        moved = np.zeros_like(means[index])
        for place in np.ndindex(3, w, length):
            belief = kbr.Embedding(CHOSEN[0], points, jnp.asarray(weights[index][place]))
            asked = queries[place[1:]]
            moved[place] = update(belief, means[index][place], asked, expected, 0.6)
        parts = (means[index] - center, before[index] - center, (queries - origin) @ slopes, moved)
        estimates[index] = center + sum(a * part for a, part in zip(shares, parts, strict=True))
    truth = estimates[:, 1] + noise * rng.normal(size=truth.shape)
    errors = np.linalg.norm(means - truth[:, None], axis=-1)
    folds = _folds.Fold(**{**vars(folds), "truth": jnp.asarray(truth)})
    return folds, tuple(map(jnp.asarray, (errors, means, before, weights)))


@pytest.mark.parametrize("pairs", [60, 1000])
def test_shares_are_found(monkeypatch, pairs):
    """The regressions see more pairs than the filter's candidates do."""
    monkeypatch.setattr(_folds, "PAIRS", pairs)
    folds, runs = made_up((0.5, 0.2, 0.4, 0.8), 0.0)
    found = learn_readout(setting(), folds, runs)
    assert found is not None
    close(found.shares, [0.5, 0.2, 0.4, 0.8], 1e-6)
    assert str(found) == "0.50 belief, 0.20 prediction, 0.40 observation, 0.80 update"
    seen = np.asarray(_candidates.gap(found.errors.shape[-1]))
    close(found.errors[..., ~seen], np.asarray(runs[0])[:, 0][..., ~seen])
    assert not np.allclose(found.errors[..., seen], np.asarray(runs[0])[:, 0][..., seen])


def test_states_are_decoded():
    """The true states are decoded beliefs, and so are estimates."""
    folds, (_, means, *rest) = made_up((1.0, 0.0, 0.0, 0.0), 0.0)
    means = jnp.asarray(divided(np.asarray(means)))
    noise = 0.1 * RNG.normal(size=folds.truth.shape)
    folds = _folds.Fold(**{**vars(folds), "truth": divided(means[:, 1] + noise)})
    errors = jnp.linalg.norm(means - folds.truth[:, None], axis=-1)
    found = learn_readout(setting(on_circle), folds, (errors + 1, means, *rest))
    assert found is not None
    close(found.shares, [1, 0, 0, 0], 0.2)
    seen = np.asarray(_candidates.gap(found.errors.shape[-1]))
    assert np.all(found.errors[..., seen] <= 2 + 1e-9)  # of two points on a circle


def test_the_least_mean_distance():
    """A tenth of the values is far off; few distances are below a tenth of the median."""
    rng = np.random.default_rng(2)
    rows, values = rng.normal(size=(200, 2, 3)), rng.normal(size=(200, 2))
    values[::10] += 30
    values = rows @ [0.5, 0.2, 0.4] + values

    def loss(shares):
        return np.mean(np.linalg.norm(rows @ shares - values, axis=1))

    best = scipy.optimize.minimize(loss, np.zeros(3), method="BFGS").fun
    assert loss(_least_distances(rows, values)) < 1.001 * best


def test_a_gain_while_tracking_may_cost_too_much_where_a_filter_is_lost():
    folds, (errors, means, before, weights) = made_up((0.5, 0.2, 0.4, 0.0), 0.0)
    assert learn_readout(setting(), folds, (errors, means, before, weights)) is not None
    lost = before.at[:, 0].add(1e3)  # what a filter expects from the marginal
    assert learn_readout(setting(), folds, (errors, means, lost, weights)) is None


def test_a_belief_that_knows_all_is_left_alone():
    assert learn_readout(setting(), *made_up((1.0, 0.0, 0.0, 0.0), 1e-3)) is None


NAMES = (*_filter.RANGES, "truncation")
VALUES = dict(zip(NAMES, jnp.array([0.4, 1.0, 1e-3, 1e-3, 0.05]), strict=True))
VALUES["bandwidth_observations"] = jnp.full(3, 1.0)


@pytest.mark.parametrize("decode", [None, on_circle])
def test_learned(monkeypatch, decode):
    """Observations have more to say of states off the circle than few training states."""
    monkeypatch.setattr(_filter, "_best", lambda *_: VALUES)
    monkeypatch.setattr(_filter, "_tuned", lambda setting, folds, values, fixed: values)
    states = STATES if decode is None else jax.vmap(lambda s: s / jnp.linalg.norm(s))(STATES)
    filt, report = kbr.learn_filter(states[:121], SEEN[:120], decode=decode, progress=False)
    assert isinstance(filt, ReadoutFilter)
    found = kbr.state_mean(filt, kbr.run_filter(filt, SEEN[120:]))
    plain = kbr.mean(kbr.belief(filt, kbr.run_filter(filt.base, SEEN[120:])))
    if decode is None:
        assert "observation" in report.chosen["readout"]
    else:
        close(jnp.linalg.norm(found, axis=1), 1)
        plain = plain / jnp.linalg.norm(plain, axis=1, keepdims=True)
    errors = [float(jnp.mean(jnp.sum((x - states[120:-1]) ** 2, axis=1))) for x in (found, plain)]
    assert errors[0] < errors[1] if report.chosen["readout"] != "none" else np.isclose(*errors)


def test_learned_of_single_precision(monkeypatch):
    """The first version had coordinates of the session's precision beside states of their own."""
    single = {name: value.astype(jnp.float32) for name, value in VALUES.items()}
    monkeypatch.setattr(_filter, "_best", lambda *_: single)
    monkeypatch.setattr(_filter, "_tuned", lambda setting, folds, values, fixed: values)
    states, seen = STATES.astype(jnp.float32), SEEN.astype(jnp.float32)
    filt = kbr.learn_filter(states[:121], seen[:120], progress=False)[0]
    assert isinstance(filt, ReadoutFilter)
    for new in (seen[120:130], SEEN[120:130]):
        assert kbr.state_mean(filt, kbr.run_filter(filt, new)).dtype == jnp.float32


def test_without_a_readout_the_belief_is_decoded(monkeypatch):
    monkeypatch.setattr(_filter, "_best", lambda *_: VALUES)
    monkeypatch.setattr(_filter, "_tuned", lambda setting, folds, values, fixed: values)
    monkeypatch.setattr(_filter, "learn_readout", lambda *_: None)
    filt, report = kbr.learn_filter(STATES[:121], SEEN[:120], decode=on_circle, progress=False)
    assert report.chosen["readout"] == "none"
    run = kbr.run_filter(filt, SEEN[120:])
    mean = kbr.mean(kbr.belief(filt, run))
    close(kbr.state_mean(filt, run), mean / jnp.linalg.norm(mean, axis=1, keepdims=True))
    filt = kbr.learn_filter(STATES[:121], SEEN[:120], progress=False)[0]
    assert not isinstance(filt, ReadoutFilter)
