"""Change points: segmentations against all segmentations, the scan statistic, errors, levels."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import closeness, gaussian

import kbr_jax as kbr
from kbr_jax.hypotheses._change_detector import (
    detect_changes,
    detector_step,
    fit_change_detector,
    init_detector,
)
from kbr_jax.hypotheses._change_points import change_points

G = kbr.Gaussian(1.0)
RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
close = closeness(0.0, 1e-10, "atol")


# ---- segmentations


def scatter(gram):
    return np.trace(gram) - gram.sum() / len(gram)


def by_trying(gram, number, shortest):
    """The least cost of all segmentations with a number of changes, and the first starts of it."""
    count, found = len(gram), []
    for starts in itertools.combinations(range(1, count), number):
        ends = [0, *starts, count]
        if np.diff(ends).min() >= shortest:
            cost = sum(scatter(gram[a:b, a:b]) for a, b in itertools.pairwise(ends))
            found.append((cost, starts))
    return min(found)


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_segmentations_are_the_best_of_all(shortest):
    x = RNG.normal(size=(12, 2))
    x[7:] += 1.0
    found = change_points(G, jnp.asarray(x), max_changes=3, min_length=shortest)
    for number in range(4):
        cost, starts = by_trying(gaussian(x, x, 1.0), number, shortest)
        close(found.costs[number], cost)
        np.testing.assert_array_equal(found.segmentations[number], [*starts, *[12] * (3 - number)])


def least_penalty(gram):
    """Of points less the nearer of their neighbors; of every second one with all apart from it."""
    count, squares = len(gram), []
    moves = np.eye(count)
    for t in range(count):
        beside = [s for s in (t - 1, t + 1) if 0 <= s < count]
        moves[t, max(beside, key=lambda s, t=t: gram[t, s])] = -1
    products = moves @ gram @ moves.T
    for t in range(0, count, 2):
        squares += [products[t, s] ** 2 for s in range(count) if abs(s - t) > 2]
    own = np.diag(products)
    return max(4 * np.mean(squares) / np.mean(own), 0.2 * np.max(own))


def test_the_penalty():
    x = RNG.normal(size=(60, 1))
    x[20:] += 2.0
    found = change_points(G, jnp.asarray(x), max_changes=8)
    costs, number = np.asarray(found.costs), np.arange(9)
    shape = number + np.log([math.comb(59, d) for d in number])
    slope = np.polyfit(shape[4:], costs[4:], 1)[0]
    penalty = max(-2 * slope, least_penalty(gaussian(x, x, 1.0)))
    close(found.penalty, penalty)
    close(found.criteria, costs + penalty * shape)
    assert found.num_changes == np.argmin(costs + penalty * shape)
    given = change_points(G, jnp.asarray(x), max_changes=8, penalty=0.3)
    close(given.criteria, costs + 0.3 * shape)
    assert given.penalty == 0.3
    assert change_points(G, jnp.asarray(x), max_changes=8, penalty=0.0).num_changes == 8
    assert change_points(G, jnp.asarray(x), max_changes=8, penalty=1e3).changes.shape == (0,)


def test_other_points():
    labels = jnp.asarray([0, 1, 0, 1, 1, 0, 2, 2, 3, 2, 3, 3])
    assert change_points(None, labels, max_changes=3, penalty=0.7).changes.tolist() == [6]
    x = jnp.asarray(RNG.normal(size=(40, 2)))
    x = x.at[25:].add(4.0)
    both = change_points(None, (x[:, 0], x[:, 1])).changes
    np.testing.assert_array_equal(both, [25])


def test_a_constant_series_and_ties_have_no_change():
    for value in (0.0, 0.5, 1e6):
        x = jnp.full((90,), value)
        assert change_points(G, x).num_changes == 0
        assert change_points(G, x, penalty=0.0).num_changes == 0
    alternating = jnp.arange(60) % 2
    assert change_points(None, alternating).num_changes == 0


def test_short_series():
    assert change_points(G, jnp.asarray([0.0, 0, 9, 9]), penalty=0.1).changes.tolist() == [2]
    with pytest.raises(ValueError, match="`x` has 3 points"):
        change_points(G, jnp.arange(3.0))


def test_errors_of_change_points():
    x = jnp.arange(20.0)
    with pytest.raises(ValueError, match="`max_changes` = 10"):
        change_points(G, x, max_changes=10)
    with pytest.raises(ValueError, match="`min_length`"):
        change_points(G, x, min_length=0)
    with pytest.raises(ValueError, match="`penalty`"):
        change_points(G, x, penalty=-1.0)
    with pytest.raises(ValueError, match="`x` contains NaN"):
        change_points(G, x.at[3].set(np.nan))
    with pytest.raises(ValueError, match="use `segmentations`"):
        jax.jit(lambda x: change_points(G, x).changes)(x)


def test_change_points_in_programs():
    x = jnp.asarray(RNG.normal(size=(3, 40))).at[:, 18:].add(3.0)
    one = change_points(G, x[1])
    many = jax.jit(jax.vmap(lambda x: change_points(G, x)))(x)
    close(many.costs[1], one.costs)
    np.testing.assert_array_equal(many.segmentations[1], one.segmentations)


def test_how_many_changes_are_found():
    """Without a change there is none; three changes of mean are three, near the true ones."""

    def found(key, shift):
        signs = ((jnp.arange(160) // 40) % 2).astype(float)
        x = jax.random.normal(key, (160,)) + shift * signs
        result = change_points(G, x, max_changes=26)
        return result.num_changes, result.segmentations[3, :3]

    keys = jax.random.split(KEY, 60)
    for shift, number in ((0.0, 0), (2.0, 3)):
        run = jax.jit(lambda keys, s=shift: jax.lax.map(lambda k: found(k, s), keys, batch_size=20))
        counts, starts = run(keys)
        assert np.mean(np.asarray(counts) == number) > 0.8
    assert np.mean(np.abs(np.asarray(starts) - [40, 80, 120])) < 2


# ---- detectors

REFERENCE, STREAM = RNG.normal(size=(30, 2)), RNG.normal(size=(14, 2))


def fitted(reference=REFERENCE, window=5, **options):
    options = {"average_run_length": 50, "key": KEY, **options}
    return fit_change_detector(G, jnp.asarray(reference), window=window, **options)


def squared_mmd(x, y):
    a, b, c = gaussian(x, x, 1.0), gaussian(y, y, 1.0), gaussian(x, y, 1.0)
    n, m = len(a), len(b)
    within = (a.sum() - n) / (n * (n - 1)) + (b.sum() - m) / (m * (m - 1))
    return within - 2 * c.mean()


def scale_of(gram, width):
    n = len(gram)
    means = gram.mean(1)
    centered = (gram - means - means[:, None] + gram.mean()) * (1 - np.eye(n))
    square = (centered**2).sum() / (n * (n - 1))
    parts = 1 / (width * (width - 1)) + 2 / (n * width) + 1 / (n * (n - 1))
    return np.sqrt(2 * square * parts)


def test_the_scan_statistic():
    detector = fitted()
    close(detector.scale, scale_of(gaussian(REFERENCE, REFERENCE, 1.0), 5))
    found = detect_changes(detector, jnp.asarray(STREAM))
    close(found.statistic[:4], 0)
    for end in range(5, 15):
        expected = squared_mmd(REFERENCE, STREAM[end - 5 : end]) / float(detector.scale)
        close(found.statistic[end - 1], expected)
    np.testing.assert_array_equal(found.alarm, found.statistic > detector.threshold)


def test_the_threshold_is_a_quantile_of_shuffled_references():
    detector = fitted()
    maxima, rng = [], np.random.default_rng(1)
    for _ in range(400):
        x = REFERENCE[rng.permutation(30)]
        windows = [(x[s : s + 5], np.delete(x, range(s, s + 5), axis=0)) for s in range(26)]
        maxima.append(max(squared_mmd(rest, window) for window, rest in windows))
    gram = gaussian(REFERENCE, REFERENCE, 1.0)
    wider = (1 / 20 + 2 / 125 + 1 / 600) / (1 / 20 + 2 / 150 + 1 / 870)
    maxima = np.asarray(maxima) / (scale_of(gram, 5) * np.sqrt(wider))
    share = np.mean(maxima <= float(detector.threshold))  # of 385 and of 400 draws
    assert abs(share - np.exp(-26 / 50)) < 4 * np.sqrt(0.25 * (1 / 400 + 1 / 385))


def test_steps_and_parts_of_a_stream():
    detector = fitted()
    whole = detect_changes(detector, jnp.asarray(STREAM))
    first = detect_changes(detector, jnp.asarray(STREAM[:6]))
    second = detect_changes(detector, jnp.asarray(STREAM[6:]), state=first.state)
    close(jnp.concatenate([first.statistic, second.statistic]), whole.statistic)
    state, step = init_detector(detector), jax.jit(detector_step)
    for point, expected in zip(STREAM, whole.statistic, strict=True):
        state, found = step(detector, state, jnp.asarray(point))
        close(found.statistic, expected)
    state, found = step(detector, state, jnp.asarray([np.nan, 0.0]))
    assert found.alarm


def test_a_constant_reference():
    detector = fitted(np.full((30, 2), 0.3))
    same = jnp.full((20, 2), 0.3)
    assert not detect_changes(detector, same).alarm.any()
    assert detect_changes(detector, same.at[10:].add(1.0)).alarm[10:].any()
    labels = jnp.asarray(RNG.integers(0, 3, 90))
    found = fit_change_detector(None, labels, window=10, average_run_length=200, key=KEY)
    assert detect_changes(found, jnp.full(20, 2)).alarm[-1]


def test_errors_of_detectors():
    with pytest.raises(ValueError, match="`window` = 11"):
        fitted(window=11)
    with pytest.raises(ValueError, match="`window` = 1 "):
        fitted(window=1)
    with pytest.raises(ValueError, match="`average_run_length`"):
        fitted(average_run_length=0)
    with pytest.raises(ValueError, match="`reference` contains NaN"):
        fitted(np.full((30, 2), np.nan))
    detector = fitted()
    with pytest.raises(ValueError, match="`stream` contains NaN"):
        detect_changes(detector, jnp.full((20, 2), np.nan))
    with pytest.raises(ValueError, match="A point of `stream`"):
        detect_changes(detector, jnp.zeros((20, 3)))
    with pytest.raises(ValueError, match="A point of `x`"):
        detector_step(detector, init_detector(detector), jnp.zeros(3))
    other = init_detector(fitted(window=7))
    for call in (
        lambda: detector_step(detector, other, jnp.zeros(2)),
        lambda: detect_changes(detector, jnp.zeros((20, 2)), state=other),
    ):
        with pytest.raises(ValueError, match="`state` is of a detector with windows of 7 points"):
            call()


def test_run_length_and_delay():
    """Alarms of 120 detectors in streams of the average run length, with and without a change."""
    length = 200

    def alarms(key):
        first, second, third = jax.random.split(key, 3)
        detector = fit_change_detector(
            G,
            jax.random.normal(first, (150,)),
            window=15,
            average_run_length=length,
            key=second,
        )
        stream = jax.random.normal(third, (length + 14,))
        quiet = detect_changes(detector, stream).alarm
        return quiet.any(), detect_changes(detector, stream[:45].at[25:].add(2.0)).alarm[25:].any()

    keys = jax.random.split(jax.random.key(2), 120)
    false, true = jax.jit(lambda keys: jax.lax.map(alarms, keys, batch_size=20))(keys)
    # 1 - 1/e of the streams where the run length is as wanted; half of it or twice it is the bound.
    low, high = scipy.stats.binom.ppf([0.001, 0.999], 120, 1 - np.exp([-0.5, -2.0]))
    assert low <= int(np.sum(np.asarray(false))) <= high
    assert np.mean(np.asarray(true)) > 0.95


@pytest.mark.parametrize("jump", [3.0, 10.0])
def test_a_jump_brings_no_other_changes(jump):
    """The median distance of all points would be as wide as the jump."""
    find = jax.jit(lambda x: change_points(None, x).num_changes)
    rng = np.random.default_rng(0)
    series = rng.normal(size=(60, 100)) + jump * (np.arange(100) >= 50)
    found = np.asarray([find(jnp.asarray(x)) for x in series])
    assert (found >= 1).all() and (found > 1).mean() <= 0.1


def test_one_change_at_most():
    find = jax.jit(lambda x: change_points(None, x, max_changes=1).num_changes)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(60, 100))
    found = np.asarray([find(jnp.asarray(x + 3 * (np.arange(100) >= 50))) for x in noise])
    none = np.asarray([find(jnp.asarray(x)) for x in noise])
    assert (found == 1).all() and none.mean() <= 0.1


def test_where_most_points_are_equal():
    """Beyond all rare points the costs do not fall any more, and tell no penalty."""
    rng = np.random.default_rng(0)
    find = jax.jit(lambda x: change_points(None, x).num_changes)
    labels = (rng.uniform(size=(40, 120)) < 0.1).astype(int)
    counts = rng.poisson(0.1, (40, 120)).astype(float)
    for series in (labels, counts):
        found = np.asarray([find(jnp.asarray(x)) for x in series])
        assert np.mean(found == 0) > 0.85
    once = jnp.arange(120) == 50
    steps = jnp.arange(120) >= 50
    assert change_points(None, once).num_changes == 0
    assert change_points(None, steps).changes.tolist() == [50]


def test_a_warning_of_as_many_changes_as_are_looked_for():
    rng, steps = np.random.default_rng(0), 6.0 * (np.arange(300) // 7 % 2)
    x = jnp.asarray(rng.normal(size=300) + steps)
    with pytest.warns(UserWarning, match="still fall steeply at 50 changes"):
        change_points(None, x)
    assert abs(change_points(None, x, max_changes=100).num_changes - 42) <= 4


def test_few_points():
    x = jnp.asarray([0.0] * 5 + [9.0] * 5)
    for series in (x, (x > 0, x)):
        assert change_points(None, series, max_changes=3).changes.tolist() == [5]
        with pytest.raises(ValueError, match="10 points are too few to choose the penalty"):
            change_points(None, series)


def test_a_point_that_is_nan_raises_the_alarm_before_the_window_is_full():
    reference = jnp.asarray(np.random.default_rng(0).normal(size=50))
    detector = fit_change_detector(
        None, reference, window=5, average_run_length=1000, key=jax.random.key(0)
    )
    state, alarms = init_detector(detector), []
    for value in (0.0, jnp.nan, 0.0, 0.1, 0.0, -0.1, 0.0, 0.2):
        state, found = detector_step(detector, state, jnp.asarray(value))
        alarms.append(bool(found.alarm) and bool(jnp.isnan(found.statistic)))
    assert alarms == [False, True, True, True, True, True, False, False]


def test_an_integer_point_of_a_real_stream():
    reference = jnp.asarray(0.2 * np.random.default_rng(30).poisson(3, 60))
    detector = kbr.hypotheses.fit_change_detector(
        None, reference, window=5, average_run_length=100, key=jax.random.key(0)
    )
    state = kbr.hypotheses.init_detector(detector)
    first = kbr.hypotheses.detector_step(detector, state, 1)[0].cross
    second = kbr.hypotheses.detector_step(detector, state, 1.0)[0].cross
    np.testing.assert_array_equal(first, second)


def test_a_large_jump_hides_no_other_change():
    x = np.random.default_rng(0).normal(size=300)
    x[150:] += 1000
    x[225:] += 5
    found = change_points(kbr.Linear(), jnp.asarray(x, jnp.float32))
    assert list(found.changes) == [150, 225]


def test_the_scale_is_the_deviation_wherever_the_points_lie():
    x, stream = (np.random.default_rng(seed).normal(size=200) for seed in (0, 1))
    found = []
    for offset in (0.0, 1e3):
        detector = fit_change_detector(
            kbr.Linear(), jnp.asarray(x + offset), window=10, average_run_length=200, key=KEY
        )
        found.append(detector.scale)
        statistic = detect_changes(detector, jnp.asarray(stream + offset)).statistic[10:]
        assert 0.5 < float(jnp.std(statistic)) < 2
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_a_detector_without_digits_warns():
    x = jnp.asarray(np.random.default_rng(0).normal(size=100) + 1e5, jnp.float32)
    with pytest.warns(UserWarning, match="digits of the kernel are lost"):
        fit_change_detector(kbr.Linear(), x, window=10, average_run_length=200, key=KEY)
