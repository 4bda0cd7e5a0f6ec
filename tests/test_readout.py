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


@functools.cache
def readout():
    base = kbr.fit_filter(
        kbr.Gaussian(0.6),
        kbr.Gaussian(1.0),
        STATES[:101],
        SEEN[:100],
        regularizer=1e-3,
        posterior_regularizer=1e-3,
    )
    numbers = jnp.array([0.3, -0.2]), jnp.array([[0.4, 0.1], [0.0, -0.3]]), jnp.array([0.1, 0.2])
    return ReadoutFilter(base, doubled, *numbers, jnp.array([0.5, 0.2, 0.4]), SEEN[0])


def test_the_estimate_by_hand():
    filt = readout()
    run, own = kbr.run_filter(filt, NEW), kbr.run_filter(filt.base, NEW)
    close(run.weights, own.weights)
    points, center = np.asarray(STATES[:100]), np.array([0.1, 0.2])
    weights = (np.asarray(w) for w in (run.weights, run.predicted))
    after, before = (w @ points / w.sum(1, keepdims=True) for w in weights)
    line = (2 * np.asarray(NEW)[:, :2] - np.asarray(filt.origin)) @ np.asarray(filt.slopes)
    expected = center + 0.5 * (after - center) + 0.2 * (before - center) + 0.4 * line
    close(kbr.state_mean(filt, run), expected)
    close(kbr.mean(kbr.belief(filt, run)), after)
    assert own.correction is None
    _, step = kbr.filter_step(filt, kbr.init_filter(filt), NEW[0])
    close(kbr.state_mean(filt, step), expected[0])
    (first, second) = kbr.state_mean(filt, kbr.run_filter(filt, [NEW, NEW[:4]]))
    close(first, expected)
    close(second, expected[:4])


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
    later, plain = (kbr.smooth(one, run, regularizer=1e-3) for one in (filt, filt.base))
    close(later.weights, plain.weights)
    start, first = kbr.init_from_observation(filt, NEW[0], regularizer=0.1)
    close(first.weights, kbr.init_from_observation(filt.base, NEW[0], regularizer=0.1)[1].weights)
    assert jnp.all(jnp.isfinite(kbr.state_mean(filt, kbr.filter_step(filt, start, NEW[1])[1])))


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
    line = np.asarray(2 * batch[0, :, :2] - filt.origin) @ np.asarray(filt.slopes)
    close(moved.shares[2], line[np.arange(10) != 4].sum())


def test_moments_are_refused():
    kernel, points = kbr.Gaussian(0.6), (kbr.Landmarks(STATES[:8]), kbr.Landmarks(SEEN[:8]))
    maps = kbr.moments.moment_maps(kernel, kernel, *points, shift=True)
    sums = kbr.moments.collect_moments(maps, STATES[:40], SEEN[:40], STATES[1:41])
    emission = kbr.moments.fit_conditional(sums, regularizer=0.1)
    clipping = kbr.Clipping(False, 0.0)
    base = kbr.KernelBayesFilter(emission, None, regularizer=0.1, shift=True, clipping=clipping)
    numbers = jnp.zeros(2), jnp.zeros((2, 2)), jnp.zeros(2), jnp.zeros(3)
    with pytest.raises(ValueError, match="not moments"):
        kbr.run_filter(ReadoutFilter(base, doubled, *numbers, SEEN[0]), NEW)


def made_up(shares, noise):
    """Folds, and runs whose true states are these shares of what a filter knows, and noise."""
    rng = np.random.default_rng(1)
    folds = _folds.make_folds(STATES, SEEN, (kbr.Gaussian(0.6), 1e-3))
    truth = np.asarray(folds.truth)
    k, w, length, d = truth.shape
    means, before, expected = rng.normal(size=(3, k, 3, w, length, d))
    lines = np.empty_like(truth)
    for index in range(k):
        z, s = np.asarray(folds.codes[index]), np.asarray(folds.states[index])
        z, center = z[:, : folds.leading], s.mean(0)
        origin = z.mean(0)
        z = z - origin
        slopes = np.linalg.solve(z.T @ z + RIDGE * len(z) * np.eye(z.shape[1]), z.T @ (s - center))
        lines[index] = (np.asarray(folds.queries[index])[..., : folds.leading] - origin) @ slopes
        parts = means[index] - center, before[index] - center, lines[index]
        expected[index] = center + sum(a * part for a, part in zip(shares, parts, strict=True))
    truth = expected[:, 1] + noise * rng.normal(size=truth.shape)
    errors = np.linalg.norm(means - truth[:, None], axis=-1)
    folds = _folds.Fold(**{**vars(folds), "truth": jnp.asarray(truth)})
    return folds, tuple(map(jnp.asarray, (errors, means, before)))


def test_shares_are_found():
    folds, runs = made_up((0.5, 0.2, 0.4), 0.0)
    found = learn_readout(folds, runs, 1.0)
    assert found is not None
    close(found.shares, [0.5, 0.2, 0.4], 1e-6)
    assert str(found) == "0.50 belief, 0.20 prediction, 0.40 observation"
    seen = np.asarray(_candidates.gap(found.errors.shape[-1]))
    close(found.errors[..., ~seen], np.asarray(runs[0])[:, 0][..., ~seen])
    assert not np.allclose(found.errors[..., seen], np.asarray(runs[0])[:, 0][..., seen])


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
    folds, (errors, means, before) = made_up((0.5, 0.2, 0.4), 0.0)
    assert learn_readout(folds, (errors, means, before), 1.0) is not None
    lost = before.at[:, 0].add(1e3)  # what a filter expects from the marginal
    assert learn_readout(folds, (errors, means, lost), 1.0) is None


def test_a_belief_that_knows_all_is_left_alone():
    assert learn_readout(*made_up((1.0, 0.0, 0.0), 1e-3), 1.0) is None


@pytest.mark.parametrize("decode", [None, kbr.mean])
def test_learned(monkeypatch, decode):
    """Observations have more to say of states off the circle than few training states."""
    values = dict(zip(_filter.RANGES, jnp.array([0.4, 1.0, 1e-3, 1e-3, 0.05]), strict=True))
    values["bandwidth_observations"] = jnp.full(3, 1.0)
    monkeypatch.setattr(_filter, "_best", lambda *_: values)
    monkeypatch.setattr(_filter, "_tuned", lambda setting, folds, values, fixed: values)
    filt, report = kbr.learn_filter(STATES[:121], SEEN[:120], decode=decode, progress=False)
    if decode is not None:
        assert report.chosen["readout"] == "none" and not isinstance(filt, ReadoutFilter)
        return
    assert isinstance(filt, ReadoutFilter) and "observation" in report.chosen["readout"]
    means = [kbr.state_mean(one, kbr.run_filter(one, SEEN[120:])) for one in (filt, filt.base)]
    errors = [float(jnp.mean(jnp.sum((one - STATES[120:-1]) ** 2, axis=1))) for one in means]
    assert errors[0] < errors[1]
