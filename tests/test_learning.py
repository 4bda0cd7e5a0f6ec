"""Models that choose their own parameters, and what they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr
from kbr_jax.filtering import RivalFilter
from kbr_jax.kernels import Warped
from kbr_jax.learning import (
    DiscriminantMap,
    Report,
    _candidates,
    _filter,
    _folds,
    _maps,
)

RNG = np.random.default_rng(0)
#: Of the values of a candidate.
NAMES = (*_filter.RANGES, "truncation")


close = closeness(1e-10, 1e-10)


def walk(steps, seed, noise=0.1):
    """A point on a circle and a noisy view of it, with a coordinate of pure noise."""
    rng = np.random.default_rng(seed)
    angle = np.cumsum(0.25 + 0.1 * rng.normal(size=steps))
    states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    seen = np.stack([states[:, 0] + states[:, 1], states[:, 0] ** 2], axis=1)
    seen = np.hstack([seen + noise * rng.normal(size=seen.shape), 50 * rng.normal(size=(steps, 1))])
    return jnp.asarray(states), jnp.asarray(seen)


def test_warped_kernel_is_the_kernel_of_the_values():
    x, y = jnp.asarray(RNG.normal(size=(5, 3))), jnp.asarray(RNG.normal(size=(4, 3)))
    matrix = jnp.asarray(RNG.normal(size=(3, 2)))
    mapped = DiscriminantMap(jnp.ones(3), matrix, counts=False)
    kernel = Warped(kbr.Gaussian(0.7), mapped)
    expected = kbr.gram(kbr.Gaussian(0.7), (x - 1) @ matrix, (y - 1) @ matrix)
    close(kbr.gram(kernel, x, y), expected)
    close(kernel(x[0], y[1]), expected[0, 1])
    close(kernel.diagonal(x), jnp.ones(5))
    gradient = jax.grad(lambda k: jnp.sum(kbr.gram(k, x, y)))(kernel)
    assert bool(jnp.all(jnp.isfinite(gradient.map.matrix)))
    with pytest.raises(ValueError, match=r"map\(x\)"):
        kbr.gram(Warped(kbr.Delta(), mapped), x)


def test_residuals_of_points_left_out():
    x, y = jnp.linspace(-1, 1, 12)[:, None], jnp.asarray(RNG.normal(size=(12, 2)))
    kernel = kbr.Gaussian(0.5)
    model = kbr.fit_conditional(kernel, kbr.Linear(), x, y, regularizer=1e-2)
    found = kbr.tuning.leave_out_residuals(model, y, num_left_out=3)
    close(kbr.tuning.leave_out_residuals(model, y[:, 0], num_left_out=3), found[:, 0], 1e-12)
    for start in range(0, 12, 3):
        out = np.arange(start, start + 3)
        rest = np.setdiff1d(np.arange(12), out)
        gram = np.asarray(kbr.gram(kernel, x[rest])) + 9 * 1e-2 * np.eye(9)
        cross = np.asarray(kbr.gram(kernel, x[out], x[rest]))
        close(found[out], y[out] - cross @ np.linalg.solve(gram, np.asarray(y[rest])), 1e-8)
    close(
        kbr.leave_out_loss(model, num_left_out=3, kernel=kbr.Linear()),
        jnp.mean(jnp.sum(found**2, axis=1)),
        1e-8,
    )


def test_discriminant_map_finds_the_signal():
    """Noise that two coordinates share cancels, and a coordinate of pure noise does not count."""
    rng = np.random.default_rng(1)
    states = jnp.asarray(rng.uniform(-1, 1, size=(200, 1)))
    common, own = rng.normal(size=(2, 200, 1)) * np.array([[[1.0]], [[0.01]]])
    seen = np.hstack([np.asarray(states) + common, common + own, 100 * rng.normal(size=(200, 1))])
    mapped = _maps.fit_discriminant_map((kbr.Gaussian(0.5), 1e-3), states, jnp.asarray(seen))
    codes = np.asarray(jax.vmap(mapped)(jnp.asarray(seen)))
    assert abs(np.corrcoef(codes[:, 0], np.asarray(states)[:, 0])[0, 1]) > 0.8
    assert codes[:, 0].std() > 5 * codes[:, 1:].std(0).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_coordinate_does_not_count(dtype):
    rng = np.random.default_rng(1)
    states = rng.uniform(-1, 1, size=(200, 1)).astype(dtype)
    seen = np.hstack([states + 0.1 * rng.normal(size=(200, 1)), np.full((200, 1), 9.81)])
    chosen = (kbr.Gaussian(0.5), 1e-3)
    mapped = _maps.fit_discriminant_map(chosen, jnp.asarray(states), jnp.asarray(seen, dtype))
    assert np.any(mapped.matrix[0]) and not np.any(mapped.matrix[1])


def test_noise_in_large_units_hides_nothing():
    rng = np.random.default_rng(1)
    states = jnp.asarray(rng.uniform(-1, 1, size=(200, 1)))
    seen, noise = np.asarray(states) + 0.1 * rng.normal(size=(200, 1)), rng.normal(size=(200, 1))
    codes = []
    for unit in (1.0, 1e8):
        observations = jnp.asarray(np.hstack([seen, unit * noise]))
        mapped = _maps.fit_discriminant_map((kbr.Gaussian(0.5), 1e-3), states, observations)
        codes.append(np.abs(jax.vmap(mapped)(observations)))
    close(codes[0], codes[1], 1e-5)


def test_maps_of_many_entries_have_one_width():
    """Those of folds are stacked, whatever the rank of their observations."""
    rng = np.random.default_rng(1)
    states = jnp.asarray(rng.uniform(-1, 1, size=(200, 1)))
    for rank in (3, 30):
        seen = rng.normal(size=(200, rank)) @ rng.normal(size=(rank, 600))
        mapped = _maps.fit_discriminant_map((kbr.Gaussian(0.5), 1e-3), states, jnp.asarray(seen))
        assert mapped.matrix.shape == (600, _maps.MAX_RANK)


def test_counts_are_seen_as_square_roots():
    counts = jnp.asarray(RNG.poisson(3, size=(100, 4)))
    states = jnp.asarray(RNG.normal(size=(100, 1)))
    chosen = (kbr.Gaussian(1.0), 1e-2)
    mapped = _maps.fit_discriminant_map(chosen, states, counts)
    roots = _maps.fit_discriminant_map(chosen, states, jnp.sqrt(counts))
    assert mapped.counts and not roots.counts
    close(jax.vmap(mapped)(counts), jax.vmap(roots)(jnp.sqrt(counts)), 1e-9)
    assert not _maps.are_counts(-counts - 1)


@pytest.mark.parametrize(
    "lengths",
    [[53], [40, 25], [9, 8, 12, 10, 11, 9], [60, 60, 60, 60, 3], [60, 3, 3, 3, 3]],
)
def test_folds_hold_each_step_out_once(lengths):
    states = [jnp.arange(100.0 * i, 100.0 * i + n)[:, None] for i, n in enumerate(lengths)]
    given = states if len(states) > 1 else states[0]
    held = []
    folds = _folds.split(given, given)
    # No fold is a short trajectory alone.
    assert min(max(len(s) for s, _ in out) for _, out in folds) >= min(8, max(lengths))
    for learn, out in folds:
        seen = np.concatenate([np.asarray(s)[:, 0] for s, _ in learn])
        kept = np.concatenate([np.asarray(s)[:, 0] for s, _ in out])
        assert not set(seen) & set(kept)
        assert len(seen) + len(kept) == sum(lengths)
        for one, _ in learn:
            assert np.all(np.diff(np.asarray(one)[:, 0]) == 1)
        held.append(kept)
    assert sorted(np.concatenate(held)) == sorted(np.concatenate(states)[:, 0])


def test_noise_is_that_of_another_time():
    states, seen = walk(200, 2)
    chosen = (kbr.Gaussian(0.5), 1e-3)
    fold = jax.tree.map(lambda leaf: leaf[0], _folds.make_folds(states, seen, chosen))
    flat = fold.truth.reshape(-1, 2)
    model = _maps.regression(chosen, fold.states, fold.codes)
    expected = np.asarray(_maps.predicted(model, flat))
    noise = np.asarray(fold.queries).reshape(len(flat), -1) - expected
    redrawn = np.asarray(fold.redrawn).reshape(len(flat), -1) - expected
    for row, one in enumerate(redrawn):
        source = np.argmin(np.sum((noise - one) ** 2, axis=1))
        close(noise[source], one, 1e-9)
        assert abs(source - row) >= _maps.BLOCK


def rotating(threshold=0.5):
    """A filter whose states look alike from two sides, and a run that starts wrong."""
    states, seen = walk(300, 3)
    seen = seen[:, :2]
    base = kbr.fit_filter(
        kbr.Gaussian(0.4),
        kbr.Gaussian(0.3),
        states,
        seen,
        regularizer=1e-3,
        posterior_regularizer=1e-5,
        max_active=50,
    )
    residual = kbr.leave_out_loss(base.emission, kernel=base.emission.kernel_y)
    return base, RivalFilter(base, residual=residual, threshold=threshold)


def test_evidence_for_a_rival():
    """One step by hand: squared distances of the observation to both predictions."""
    base, filt = rotating()
    states, seen = walk(40, 4)
    seen = seen[:, :2]
    prior = kbr.embed(kbr.Gaussian(0.4), -states[:1])
    state = kbr.init_filter(filt, prior)
    gram = np.asarray(kbr.gram(base.emission.kernel_y, base.emission.features_y.points))
    total, alone, other, compared = 0.0, base.init(prior), base.init(None), 0
    for step in range(3):
        alone, first = kbr.filter_step(base, alone, seen[step])
        other, second = kbr.filter_step(base, other, seen[step])
        column = np.asarray(
            kbr.gram(base.emission.kernel_y, seen[step][None], base.emission.features_y.points)
        )[0]
        errors = [
            w @ gram @ w - 2 * w @ column
            for w in (np.asarray(out.predicted) for out in (first, second))
        ]
        gain = (errors[0] - errors[1]) / float(filt.residual)
        total += np.clip(gain, -0.2, 0.2) if step else 0.0
        state, _ = kbr.filter_step(filt, state, seen[step])
        if abs(total) < 0.5:
            compared += step > 0
            close(state.evidence, total, 1e-8)
    assert compared


@pytest.mark.parametrize("estimator", ["pairs", "importance"])
def test_rival_brings_a_lost_belief_back(estimator):
    """Two rooms without a way between them: a belief in the wrong one can never leave it."""
    rng = np.random.default_rng(11)
    rooms = [sign * 2 + np.cumsum(0.1 * rng.normal(size=(60, 1)), axis=0) for sign in (-1, 1)]
    states = [
        jnp.asarray(np.clip(room, sign - 1.5, sign + 1.5))
        for room, sign in zip(rooms, (-2, 2), strict=True)
    ]
    seen = [s + 0.3 * jnp.asarray(rng.normal(size=s.shape)) for s in states]
    base = kbr.fit_filter(
        kbr.Gaussian(0.3),
        kbr.Gaussian(3.0),
        states,
        seen,
        regularizer=1e-3,
        posterior_regularizer=1e-4,
        estimator=estimator,
    )
    filt = RivalFilter(
        base, residual=kbr.leave_out_loss(base.emission, kernel=base.emission.kernel_y)
    )
    wrong = kbr.embed(kbr.Gaussian(0.3), jnp.asarray([[-2.0]]))
    alone = kbr.state_mean(base, kbr.run_filter(base, seen[1][:30], prior=wrong))
    run = kbr.run_filter(filt, seen[1][:30], prior=wrong)
    assert np.all(np.asarray(alone)[:, 0] < 0)
    assert bool(jnp.any(run.restarted))
    assert np.all(np.asarray(kbr.state_mean(filt, run))[15:, 0] > 1)


def test_rival_leaves_a_right_belief_alone():
    base, filt = rotating()
    seen = walk(80, 4)[1]
    seen = seen[:, :2]
    alone, run = kbr.run_filter(base, seen), kbr.run_filter(filt, seen)
    until = int(np.argmax(np.append(np.asarray(run.restarted), True)))
    close(run.weights[:until], alone.weights[:until], 1e-10)
    missing = kbr.run_filter(filt, seen, observed=jnp.zeros(80, bool))
    assert not bool(jnp.any(missing.restarted))
    assert kbr.predict(filt, run, 2).weights.shape == run.weights.shape
    assert kbr.smooth(filt, run, regularizer=0.1).weights.shape == run.weights.shape


def test_rival_needs_a_sample():
    base, _ = rotating()
    states, seen = walk(60, 5)
    kernels = kbr.Gaussian(0.4), kbr.Gaussian(0.3)
    ridges = {"regularizer": 1e-3, "posterior_regularizer": 1e-4}
    prior = kbr.fit_filter(*kernels, states, seen[:, :2], **ridges, estimator="prior")
    maps = kbr.moments.moment_maps(
        *kernels, kbr.Landmarks(states[:9]), kbr.Landmarks(seen[:9, :2]), shift=True
    )
    emission = kbr.moments.collect_moments(maps, states[:-1], seen[:-1, :2], states[1:])
    emission = kbr.moments.fit_conditional(emission, regularizer=1e-3)
    moments = kbr.KernelBayesFilter(
        emission, None, regularizer=1e-4, shift=True, clipping=kbr.Clipping(False, 0.0)
    )
    for refused in (prior, moments):
        with pytest.raises(ValueError, match="`base` must be a `KernelBayesFilter`"):
            RivalFilter(refused, residual=1.0)
    with pytest.raises(ValueError, match="`threshold`"):
        RivalFilter(base, residual=1.0, threshold=0.0)


def test_a_lost_stretch_costs_what_one_without_memory_does():
    states, seen = walk(150, 4)
    folds = _folds.make_folds(states, seen[:, :2], None)
    fold = jax.tree.map(lambda leaf: leaf[0], folds)
    values = dict(zip(NAMES, jnp.array([0.3, 0.5, 1e-3, 1e-4, 0.02]), strict=True))
    scales = kbr.kernels.coordinate_scale(states), kbr.median_heuristic(fold.codes)

    def setting(lost):
        return _candidates.Setting(*scales, None, None, None, "pairs", lost=jnp.asarray(lost))

    filt = _candidates._fitted(setting(np.inf), values, fold)
    runs = np.asarray(_candidates._runs(setting(np.inf), values, fold, filt)[0])
    right, begun = (errors.mean(1) for errors in runs[:2])
    wrong = runs[2][:, runs[2].shape[1] // 4 :].mean(1)
    assert begun.mean() < right.mean() and begun.mean() < wrong.mean()
    lost = np.median([right, begun, wrong])
    for limit, given in ((np.inf, None), (lost, filt)):
        kinds = np.minimum([right, begun, wrong], limit).mean(1)
        found = _candidates.judge(setting(limit), fold, values, given)[0]
        close(found, np.array([*kinds, begun.mean(), wrong.mean()]), 1e-8)
        close(_candidates.score(found), kinds.prod() ** (1 / 3), 1e-8)


def test_a_belief_is_tested_by_all_coordinates():
    """The kernel sees the first coordinates only, in which states half a turn apart are alike."""
    rng = np.random.default_rng(5)
    angle = np.cumsum(0.2 + 0.05 * rng.normal(size=300))
    states = jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], axis=1))
    seen = np.zeros((300, _maps.LEADING + 1))
    seen[:, :2] = np.stack([np.cos(2 * angle), np.sin(2 * angle)], axis=1)
    seen[:, -1] = 0.3 * np.cos(angle)
    seen = jnp.asarray(seen + 0.02 * rng.normal(size=seen.shape))
    values = dict(zip(NAMES, jnp.array([0.4, 0.3, 1e-3, 1e-4, 0.1]), strict=True))
    scales = kbr.kernels.coordinate_scale(states), kbr.median_heuristic(seen)
    regression = (kbr.Gaussian(0.4), 1e-3)
    setting = _candidates.Setting(
        *scales,
        None,
        None,
        None,
        "pairs",
        jnp.asarray(1.0),
        regression,
        tested=True,
    )
    views = (lambda point: point[:20], lambda point: point)
    filt = setting.fit(values, kbr.filtering.transitions(states, seen), views)
    assert isinstance(filt, kbr.filtering.CusumRestartFilter)
    for start, restarts in ((states[200], 0), (-states[200], 1)):
        prior = kbr.embed(setting.kernel(values), start[None])
        run = kbr.run_filter(filt, seen[200:260], prior=prior)
        assert int(jnp.sum(run.restarted)) == restarts
        errors = jnp.linalg.norm(kbr.state_mean(filt, run) - states[200:260], axis=1)
        assert float(jnp.max(errors[-20:])) < 0.3


def test_a_belief_in_folds_is_tested_by_all_coordinates():
    """They may be as few as the kernel sees."""
    states, seen = walk(150, 4)
    regression, one = (kbr.Gaussian(0.4), 1e-3), jnp.asarray(1.0)
    folds = _folds.make_folds(states, seen[:, :2], regression)
    fold = jax.tree.map(lambda leaf: leaf[0], folds)
    assert fold.leading == fold.codes.shape[-1]
    values = dict(zip(NAMES, jnp.array([0.4, 0.3, 1e-3, 1e-4, 0.1]), strict=True))
    setting = _candidates.Setting(one, one, None, None, None, "pairs", one, regression, tested=True)
    filt = _candidates._of_fold(setting, values, fold)
    assert isinstance(filt, kbr.filtering.CusumRestartFilter)
    close(filt.features(fold.codes[0]), fold.codes[0], 0.0)
    weights = _candidates.beliefs(setting, folds, values, [filt] * 5)
    run = kbr.run_filter(filt, fold.queries[0])
    close(weights[0, : len(fold.queries[0])], run.weights, 1e-8)


@pytest.mark.parametrize("fixed", [{}, {"truncation": 0.1}])
def test_a_given_kernel_of_observations_sees_them_as_they_are(monkeypatch, fixed):
    """A given truncation too."""
    values = dict(zip(_filter.RANGES, jnp.array([0.4, 1.0, 1e-3, 1e-4]), strict=True))
    monkeypatch.setattr(_filter, "_best", lambda setting, folds, step, fixed, bar: values | fixed)
    monkeypatch.setattr(_filter, "_tuned", lambda setting, folds, values, fixed: values)
    monkeypatch.setattr(_filter, "recovering", lambda setting, folds, _: (setting, folds, None, ()))
    monkeypatch.setattr(_filter, "beliefs", lambda *_: None)
    monkeypatch.setattr(_filter, "_report", lambda *_: Report({}, {}, {}, ()))
    states, seen = walk(200, 5)
    kernel = kbr.Gaussian(jnp.array([0.5, 0.5, 100.0]))
    filt, _ = kbr.learn_filter(states, seen, kernel_observations=kernel, progress=False, **fixed)
    scale = kbr.kernels.coordinate_scale(states)
    expected = kbr.fit_filter(
        kbr.Gaussian(0.4 * scale),
        kernel,
        states,
        seen,
        regularizer=1e-3,
        posterior_regularizer=1e-4,
        landmarks_states=_candidates.RANK,
        clipping=kbr.Clipping(truncation=fixed.get("truncation", _filter.TRUNCATION)),
        max_active=_candidates.ACTIVE,
        estimator="importance",
    )
    runs = [kbr.state_mean(one, kbr.run_filter(one, seen[:9])) for one in (filt, expected)]
    close(*runs, 1e-5, 1e-5)  # most landmarks are near others


def test_credible_level_by_hand():
    points = jnp.asarray([[0.0], [0.1], [3.0]])
    belief = kbr.embed(kbr.Gaussian(0.5), points, jnp.asarray([0.5, 0.3, 0.2]))
    density = np.asarray(kbr.gram(belief.kernel, points)) @ np.asarray(belief.weights)
    at = np.asarray(kbr.gram(belief.kernel, jnp.asarray([[0.6]]), points))[0] @ [0.5, 0.3, 0.2]
    expected = np.asarray([0.5, 0.3, 0.2])[density > at].sum()
    level = kbr.embedding.credible_level
    close(level(belief, jnp.asarray([0.6])), expected)
    close(level(belief, jnp.asarray([100.0])), 1.0)
    hot = level(belief, jnp.asarray([0.6]), temperature=1e6)
    close(hot, 2 / 3, 1e-4)
    nothing = kbr.Embedding(belief.kernel, points, jnp.zeros(3))
    assert bool(jnp.isnan(level(nothing, jnp.asarray([1.0]))))
    with pytest.raises(ValueError, match="one point for each of 2 embeddings"):
        level(kbr.Embedding(belief.kernel, points, jnp.ones((2, 3))), points)


def test_calibration_finds_the_temperature():
    """Weights of a normal density to the power 4 need the temperature 4."""
    rng = np.random.default_rng(6)
    grid = jnp.linspace(-6, 6, 400)[:, None]
    centers = rng.uniform(-2, 2, size=300)
    truth = jnp.asarray(centers + rng.normal(size=300))[:, None]
    squares = (grid[:, 0] - jnp.asarray(centers)[:, None]) ** 2
    beliefs = kbr.Embedding(kbr.Gaussian(0.1), grid, jnp.exp(-0.5 * 4 * squares))
    found = float(kbr.tuning.calibrate(beliefs, np.asarray(truth).tolist()))
    assert 2.5 < found < 6
    levels = kbr.embedding.credible_level(beliefs, truth, temperature=found)
    np.testing.assert_allclose(kbr.tuning.coverage(levels), [0.5, 0.8, 0.95], atol=0.07)


def test_reports_without_a_filter():
    report = Report({"a": 1.0}, {"model": (1.0, 0.1)}, {}, ("A note.",))
    assert str(report).endswith("A note.") and "back from" not in str(report)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, o: kbr.learn_filter(s, o, bandwith=1.0), "`bandwith` is not a parameter"),
        (lambda s, o: kbr.learn_filter(s, o, regularizer=-1.0), "`regularizer` must be positive"),
        (lambda s, o: kbr.learn_filter(s, o, truncation=1.5), "`truncation` must be one number"),
        (lambda s, o: kbr.learn_filter(s, o, estimator="prior"), "`estimator` must be one of"),
        (lambda s, o: kbr.learn_filter(s[:30], o[:30]), "at least 50 steps"),
        (lambda s, o: kbr.learn_filter((s, s), o), "`states` must be one array"),
        (lambda s, o: kbr.learn_filter(jnp.arange(200), o), "`states` must be real numbers"),
        (lambda s, o: kbr.learn_filter(s, o.at[3].set(jnp.nan)), "`observations`"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(*walk(200, 1))


def test_short_trajectories_and_folds():
    """A trajectory of one step is legal, and the noise of few steps is mixed too."""
    states, seen = walk(101, 4)
    lengths = [20, 20, 20, 20, 1]
    starts = np.cumsum([0, *lengths])
    trajectories = [states[a : a + n + 1] for a, n in zip(starts, lengths, strict=False)]
    views = [seen[a : a + n] for a, n in zip(starts, lengths, strict=False)]
    folds = _folds.make_folds(trajectories, views, None)
    assert np.isfinite(np.asarray(jax.tree.leaves(folds.truth)[0])).all()
    chosen = (kbr.Gaussian(0.5), 1e-3)
    model = _maps.regression(chosen, states[:60], seen[:60])
    truth, few = states[60:70][None], seen[60:70][None]
    redrawn = np.asarray(_folds._with_other_noise(model, truth, few)).reshape(10, -1)
    expected = np.asarray(_maps.predicted(model, truth[0]))
    noise = np.asarray(few).reshape(10, -1) - expected
    own = np.abs(redrawn - expected - noise).max(axis=1)
    assert np.all(own > 0) and len(np.unique(np.round(redrawn - expected, 8), axis=0)) > 2


def test_a_distance_is_no_kernel():
    with pytest.raises(ValueError, match="not positive semi-definite"):
        kbr.learn_filter(
            *walk(150, 0),
            kernel_observations=lambda a, b: jnp.sum(jnp.abs(a - b)),
            progress=False,
        )


def test_blocks_of_the_map_grow_with_the_sample():
    """Single points below 80 pairs and blocks above gave folds and filter other scales."""
    for n in (4, 30, 72, 79, 80, 90, 500):
        block = _maps.block_of(n)
        assert block == min(20, n // 4) and _maps.in_blocks(n) % block == 0
