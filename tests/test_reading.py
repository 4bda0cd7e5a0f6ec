"""What is read off forecasts: densities, distribution functions, modes, scores, margins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize, stats

import kbr_jax as kbr
from kbr_jax.embedding import Embedding, cdf, density, modes, probabilities
from kbr_jax.tuning import (
    adaptive_margins,
    conformal_margin,
    fit_bandwidth,
    leave_out_forecasts,
)

RNG = np.random.default_rng(0)
N = 30


def signed(count=None, n=N, d=None):
    """Embeddings with signed weights on n points."""
    points = RNG.normal(size=n if d is None else (n, d))
    weights = RNG.normal(size=n if count is None else (count, n)) + 0.7
    return Embedding(kbr.Gaussian(1.0), jnp.asarray(points), jnp.asarray(weights))


def gaussians(embedding, shares, factor=1.0):
    """Centers, bandwidths by Scott's rule, shares: in NumPy."""
    atoms = np.asarray(embedding.points).reshape(N, -1)
    mean = shares @ atoms
    sigma = np.sqrt(shares @ atoms**2 - mean**2)
    return atoms, factor * sigma * (1 / (shares**2).sum()) ** (-1 / (atoms.shape[1] + 4))


def test_probabilities_are_the_nearest():
    embedding = signed(3)
    found = np.asarray(probabilities(embedding))
    for shares, weights in zip(found, np.asarray(embedding.weights), strict=True):
        target = weights / weights.sum()
        threshold = optimize.brentq(lambda t, w=target: np.maximum(w - t, 0).sum() - 1, -2, 2)
        np.testing.assert_allclose(shares, np.maximum(target - threshold, 0), atol=1e-9)
    plain = Embedding(kbr.Gaussian(1.0), embedding.points, jnp.full(N, 1 / N))
    np.testing.assert_allclose(probabilities(plain), 1 / N, rtol=1e-12)
    lost = Embedding(kbr.Gaussian(1.0), embedding.points, jnp.zeros(N))
    assert np.all(np.isnan(probabilities(lost)))


@pytest.mark.parametrize("d", [None, 1, 2])
def test_density(d):
    embedding = signed(2, d=d)
    at = RNG.normal(size=(5,) if d is None else (5, d))
    found = density(embedding, at, bandwidth=1.5)
    assert found.shape == (2, 5)
    for row, shares in zip(found, np.asarray(probabilities(embedding)), strict=True):
        atoms, width = gaussians(embedding, shares, 1.5)
        expected = [
            shares @ np.prod(stats.norm.pdf((point - atoms) / width) / width, axis=1)
            for point in at.reshape(5, -1)
        ]
        np.testing.assert_allclose(row, expected, rtol=1e-9)
    one = Embedding(embedding.kernel, embedding.points, embedding.weights[0])
    np.testing.assert_allclose(density(one, at[0], bandwidth=1.5), found[0, 0], rtol=1e-12)


@pytest.mark.parametrize("far", [1e4, 1e20, 1e37])
def test_an_atom_without_a_share_moves_no_score(far):
    points = jnp.asarray(np.append(RNG.normal(size=50), far), jnp.float32)
    weights = jnp.asarray(np.append(np.full(50, 0.02), 0), jnp.float32)
    without, embedding = (Embedding(kbr.Gaussian(1.0), points[:k], weights[:k]) for k in (50, 51))
    for read in (density, kbr.embedding.log_score, kbr.embedding.energy_score):
        np.testing.assert_allclose(read(embedding, 0.3), read(without, 0.3), rtol=1e-5)
    # Nor does the point of another forecast.
    two = Embedding(without.kernel, without.points, jnp.stack([without.weights] * 2))
    for read in (kbr.embedding.log_score, kbr.embedding.energy_score):
        scores = read(two, jnp.asarray([0.3, far], jnp.float32))
        np.testing.assert_allclose(scores[0], read(without, 0.3), rtol=1e-5)


def test_a_narrow_belief_among_far_atoms_has_its_own_bandwidth():
    atoms = np.linspace(0, 5000, 20001)
    shares = stats.norm.pdf(atoms, 2500, 1.5)
    shares = shares / shares.sum()
    embedding = Embedding(kbr.Gaussian(1.0), jnp.asarray(atoms), jnp.asarray(shares))
    width = 1.5 * np.sum(shares**2) ** 0.2
    expected = stats.norm.pdf(0, 0, np.hypot(1.5, width))
    np.testing.assert_allclose(density(embedding, 2500.0), expected, rtol=1e-3)
    one = Embedding(kbr.Gaussian(1.0), jnp.arange(5.0), jnp.eye(5)[2])
    np.testing.assert_allclose(density(one, 2.0), stats.norm.pdf(0) / 1e-3, rtol=1e-6)


def test_tuples_have_no_density():
    for part in (jnp.asarray([0, 1, 1]), jnp.asarray([0.0, 1.0, 1.0])):
        with pytest.raises(ValueError, match="one real array"):
            density(kbr.embed(None, (part,)), (part[0],))


def test_density_integrates_to_one():
    embedding = signed()
    grid = np.linspace(-8, 8, 2001)
    assert abs(integrate.trapezoid(np.asarray(density(embedding, grid)), grid) - 1) < 1e-6


@pytest.mark.parametrize("labels", [[0, 1, 1, 2], [False, True, True, True]])
def test_labels_have_probabilities(labels):
    labels = jnp.asarray(labels)
    embedding = Embedding(kbr.Delta(), labels, jnp.asarray([0.5, 0.3, -0.1, 0.3]))
    shares = np.asarray(probabilities(embedding))
    values = jnp.unique(labels)
    expected = [shares[np.asarray(labels) == value].sum() for value in np.asarray(values)]
    np.testing.assert_allclose(density(embedding, values), expected, rtol=1e-12)
    np.testing.assert_allclose(kbr.embedding.log_score(embedding, values[1]), -np.log(expected[1]))


def test_cdf_of_probabilities_counts():
    points = jnp.asarray(RNG.integers(0, 5, size=N).astype(float))  # with ties
    weights = jnp.asarray(RNG.random((2, N)))
    embedding = Embedding(kbr.Gaussian(1.0), points, weights)
    at = jnp.asarray([-1.0, 0.0, 0.5, 1.0, 3.0, 4.0, 7.0])
    shares = np.asarray(weights / weights.sum(1, keepdims=True))
    expected = np.stack([(shares * (np.asarray(points) <= t)).sum(1) for t in np.asarray(at)])
    np.testing.assert_allclose(cdf(embedding, at), expected, atol=1e-12)
    np.testing.assert_allclose(cdf(embedding, 3.0), expected[4], atol=1e-12)


def test_cdf_is_the_inverse_of_the_quantiles():
    embedding = signed(3)
    levels, at = np.linspace(0.01, 0.99, 60), np.sort(RNG.normal(size=40))
    quantiles = np.asarray(kbr.quantile(embedding, levels))
    levels_at = np.asarray(cdf(embedding, at))
    assert levels_at.shape == (40, 3)
    assert np.all(np.diff(levels_at, axis=0) >= 0)
    for row in range(3):
        inside = quantiles[:, row][None, :] <= at[:, None]
        np.testing.assert_array_equal(inside, levels[None, :] <= levels_at[:, row][:, None])
    both = cdf(embedding, at, lambda y: jnp.stack([y, 2 * y]))
    np.testing.assert_allclose(both[..., 0], levels_at)
    np.testing.assert_allclose(both[..., 1], cdf(embedding, at / 2), atol=1e-12)


def test_modes_of_two_normal_densities():
    points = np.concatenate([RNG.normal(-2, 0.5, 60), RNG.normal(2, 0.5, 140)])
    embedding = Embedding(kbr.Gaussian(1.0), jnp.asarray(points), jnp.full(200, 1 / 200))
    places, heights = modes(embedding, 4, bandwidth=0.8)
    grid = np.linspace(-5, 5, 20001)
    values = np.asarray(density(embedding, grid, bandwidth=0.8))
    tops = np.flatnonzero((values[1:-1] > values[:-2]) & (values[1:-1] > values[2:])) + 1
    tops = tops[np.argsort(-values[tops])]
    assert len(tops) == 2
    np.testing.assert_allclose(places[:2], grid[tops], atol=1e-3)
    np.testing.assert_allclose(heights[:2], values[tops], rtol=1e-5)
    assert np.all(np.isnan(places[2:])) and np.all(np.asarray(heights[2:]) == 0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_mode_between_two_atoms_is_found(count):
    points = jnp.array([-0.9, 0.9, 6.0])
    embedding = kbr.embed(kbr.Gaussian(1.0), points, jnp.array([4.0, 4.0, 5.0]) / 13)
    places, heights = modes(embedding, count, bandwidth=0.4)
    expected = np.array([0.0, 6.0, np.nan])[:count]
    np.testing.assert_allclose(places, expected, atol=1e-3)
    assert np.all(np.diff(heights) <= 0)


def test_modes_of_a_batch_of_vectors():
    embedding = signed(2, d=2)
    places, heights = modes(embedding, 3)
    assert places.shape == (2, 3, 2) and heights.shape == (2, 3)
    np.testing.assert_allclose(density(embedding, places[0, :1])[0], heights[0, :1], rtol=1e-9)
    slope = jax.grad(lambda y: density(embedding, y)[0])(places[0, 0])
    np.testing.assert_allclose(slope, 0, atol=1e-6)


@pytest.mark.parametrize("d", [None, 2])
def test_energy_score(d):
    embedding = signed(2, d=d)
    happened = RNG.normal(size=(2,) if d is None else (2, d))
    found = kbr.embedding.energy_score(embedding, happened)
    atoms = np.asarray(embedding.points).reshape(N, -1)
    apart = np.linalg.norm(atoms[:, None] - atoms[None], axis=2)
    for row, (weights, point) in enumerate(
        zip(np.asarray(embedding.weights), happened.reshape(2, -1), strict=True)
    ):
        shares = weights / weights.sum()
        expected = shares @ np.linalg.norm(atoms - point, axis=1) - shares @ apart @ shares / 2
        np.testing.assert_allclose(found[row], expected, rtol=1e-9)


@pytest.mark.parametrize("unit", [1e-25, 1e-20, 1e25])
def test_energy_score_in_any_unit(unit):
    embedding, happened = signed(d=2), RNG.normal(size=2)
    one = kbr.embedding.energy_score(embedding, happened)
    points, weights = (
        jnp.asarray(part, jnp.float32) for part in (embedding.points, embedding.weights)
    )
    moved = kbr.Embedding(embedding.kernel, np.float32(unit) * points, weights)
    found = kbr.embedding.energy_score(moved, np.float32(unit * happened))
    np.testing.assert_allclose(found / np.float32(unit), one, rtol=1e-4)


@pytest.mark.parametrize("read", [density, kbr.embedding.energy_score])
def test_gradients_in_weights_that_are_0(read):
    points, at = jnp.asarray(RNG.normal(size=(6, 2))), jnp.asarray(RNG.normal(size=2))
    weights = jnp.asarray([0.3, 0.2, 0.0, 0.1, 0.4, 0.0])

    def value(w):
        return read(Embedding(kbr.Gaussian(1.0), points, w), at)

    step = 1e-7 * jnp.eye(6)  # to the right: weights are at their least
    expected = (jax.vmap(value)(weights + step) - value(weights)) / 1e-7
    np.testing.assert_allclose(jax.grad(value)(weights), expected, atol=1e-5)


def test_energy_score_is_the_crps():
    embedding = signed()
    grid = np.linspace(-6, 6, 200001)
    weights = np.asarray(embedding.weights / embedding.weights.sum())
    order = np.argsort(np.asarray(embedding.points))
    place = np.searchsorted(np.asarray(embedding.points)[order], grid, side="right")
    function = np.concatenate([[0], np.cumsum(weights[order])])[place]
    expected = integrate.trapezoid((function - (grid >= 0.3)) ** 2, grid)
    np.testing.assert_allclose(kbr.embedding.energy_score(embedding, 0.3), expected, rtol=1e-3)


def test_log_score_is_of_the_density():
    embedding, happened = signed(4, d=2), RNG.normal(size=(4, 2))
    values = jnp.diagonal(density(embedding, happened, bandwidth=0.7))
    found = kbr.embedding.log_score(embedding, happened, bandwidth=0.7)
    np.testing.assert_allclose(found, -jnp.log(values), rtol=1e-9)
    far = kbr.embedding.log_score(embedding, np.full((4, 2), 500.0))
    assert np.all(np.isfinite(far))


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(1)
    x = rng.uniform(-2, 2, size=(40, 1))
    return jnp.asarray(x), jnp.asarray(np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=40))


@pytest.mark.parametrize("landmarks", [None, 12])
def test_leave_out_forecasts_are_refits(pairs, landmarks):
    x, y = pairs
    kernel = kbr.Gaussian(0.5)
    chosen = None if landmarks is None else kbr.greedy_landmarks(kernel, x, rank=landmarks)
    options = {"regularizer": 1e-3, "landmarks_x": chosen}
    model = kbr.fit_conditional(kernel, kbr.Gaussian(0.5), x, y, **options)
    found = leave_out_forecasts(model, jnp.asarray([3, 17]))
    others = leave_out_forecasts(model)
    np.testing.assert_allclose(others.weights[jnp.asarray([3, 17])], found.weights, atol=1e-10)
    for row, index in zip(np.asarray(found.weights), (3, 17), strict=True):
        left = np.delete(np.arange(40), index)
        less = kbr.fit_conditional(kernel, kbr.Gaussian(0.5), x[left], y[left], **options)
        expected = kbr.condition(less, x[index]).weights
        np.testing.assert_allclose(row[left], expected, atol=1e-8)
        assert row[index] == 0


def test_the_bandwidth_has_the_best_log_score(pairs):
    x, y = pairs
    model = kbr.fit_conditional(kbr.Gaussian(0.5), None, x, y, regularizer=1e-3)
    forecasts = leave_out_forecasts(model)
    chosen = fit_bandwidth(forecasts, y)
    scores = [
        np.minimum(kbr.embedding.log_score(forecasts, y, bandwidth=c), 1e3).mean()
        for c in (0.5 * chosen, chosen, 2 * chosen)
    ]
    assert scores[1] < scores[0] and scores[1] < scores[2]


def test_levels_that_are_reached_are_inside():
    points = jnp.cumsum(jnp.arange(20.0, dtype=jnp.float32))
    equal = kbr.Embedding(kbr.Gaussian(20.0), points, jnp.full((20, 20), 0.05, jnp.float32))
    levels = kbr.embedding.credible_level(equal, points)
    np.testing.assert_allclose(kbr.tuning.coverage(levels), [0.5, 0.8, 0.95], atol=0.051)
    assert np.all(np.asarray(kbr.tuning.coverage(levels)) > [0.54, 0.84, 0.99])


def test_conformal_margins_by_their_definition():
    forecasts, happened = signed(9), jnp.asarray(3 * RNG.normal(size=9))
    lower, upper = kbr.credible_interval(forecasts, 0.8)
    excess = np.sort(np.maximum(np.asarray(lower - happened), np.asarray(happened - upper)))
    np.testing.assert_allclose(conformal_margin(forecasts, happened, 0.8), excess[7])
    assert np.isinf(conformal_margin(forecasts, happened, 0.95))
    # Forecasts of padding have no distribution.
    padded = kbr.Embedding(
        forecasts.kernel,
        forecasts.points,
        jnp.concatenate([forecasts.weights, jnp.zeros_like(forecasts.weights[:3])]),
    )
    more = jnp.concatenate([happened, happened[:3]])
    np.testing.assert_allclose(conformal_margin(padded, more, 0.8), excess[7])


def test_conformal_intervals_cover():
    """A wrong forecast, made right: 200 calibrations of 49 pairs, 49 new ones each."""
    points = jnp.linspace(-1, 1, 20)
    forecast = Embedding(kbr.Gaussian(1.0), points, jnp.full((49, 20), 1 / 20))
    drawn = jnp.asarray(RNG.standard_t(3, size=(200, 2, 49)))

    def covered(pair):
        margin = conformal_margin(forecast, pair[0], 0.9)
        lower, upper = kbr.credible_interval(forecast, 0.9)
        return jnp.mean((pair[1] >= lower - margin) & (pair[1] <= upper + margin))

    shares = jax.lax.map(covered, drawn)
    # The guarantee: at least .9, at most .9 + 1 / 50.
    error = 4 * float(jnp.std(shares)) / np.sqrt(200)
    assert 0.9 - error < float(jnp.mean(shares)) < 0.92 + error


def test_adaptive_margins_follow_a_change():
    points = jnp.linspace(-1, 1, 20)
    forecast = Embedding(kbr.Gaussian(1.0), points, jnp.full((600, 20), 1 / 20))
    scale = np.where(np.arange(600) < 300, 1.0, 3.0)
    happened = jnp.asarray(scale * RNG.normal(size=600)).at[5].set(jnp.nan)
    margins = np.asarray(adaptive_margins(forecast, happened, 0.8))
    lower, upper = kbr.credible_interval(forecast, 0.8)
    excess = np.asarray(jnp.maximum(lower - happened, happened - upper))
    expected, largest = [0.0], 0.0
    for now in excess[:-1]:
        if np.isnan(now):
            expected.append(expected[-1])
            continue
        largest = max(largest, abs(now))
        step = 0.05 * largest * ((now > expected[-1]) - 0.2)
        expected.append(expected[-1] + step)
    np.testing.assert_allclose(margins, expected, atol=1e-9)
    for part in (slice(50, 300), slice(400, 600)):
        assert abs(np.nanmean(excess[part] <= margins[part]) - 0.8) < 0.06


def test_gradients_are_finite_and_programs_batch():
    embedding = signed(d=1)

    def total(weights, points):
        one = Embedding(embedding.kernel, points, weights)
        value = jnp.zeros(1)
        return (
            kbr.embedding.energy_score(one, value)
            + kbr.embedding.log_score(one, value)
            + density(one, value)
        )

    same = embedding.points.at[1].set(embedding.points[0])
    gradient = jax.grad(total, (0, 1))(embedding.weights, same)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))
    constant = jax.grad(total, (0, 1))(embedding.weights, jnp.ones_like(same))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(constant))
    batch = jnp.stack([embedding.weights, embedding.weights + 1])
    both = jax.jit(jax.vmap(total, (0, None)))(batch, same)
    np.testing.assert_allclose(both[0], total(embedding.weights, same), rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: density(e, jnp.zeros((3, 2))), "points"),
        (lambda e: density(e, 0.0, bandwidth=0.0), "bandwidth"),
        (lambda e: cdf(e, jnp.zeros((2, 2))), "values"),
        (lambda e: modes(e, 0), "count"),
        (lambda e: kbr.embedding.energy_score(e, jnp.zeros(3)), "one point for each"),
        (lambda e: conformal_margin(e, jnp.zeros(3)), "has 2 members, but `points` holds 3"),
        (lambda e: conformal_margin(e, jnp.zeros(2), 1.0), "level"),
        (lambda e: adaptive_margins(e, jnp.zeros(2), rate=0.0), "rate"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(signed(2))


def test_labels_have_no_distance():
    embedding = Embedding(kbr.Delta(), jnp.arange(4), jnp.full(4, 0.25))
    with pytest.raises(ValueError, match="log_score"):
        kbr.embedding.energy_score(embedding, 1)
    with pytest.raises(ValueError, match="real array"):
        modes(embedding, 1)


def test_modes_of_atoms_that_repeat():
    atoms = jnp.asarray(np.repeat([0.0, 1.0, 4.0, 9.0], [20, 5, 15, 10]))
    belief = kbr.embed(kbr.Gaussian(1.0), atoms)
    found, heights = modes(belief, 4, bandwidth=0.3)
    grid = jnp.linspace(-3, 12, 3001)
    values = np.asarray(density(belief, grid, bandwidth=0.3))
    tops = np.flatnonzero((values[1:-1] > values[:-2]) & (values[1:-1] > values[2:])) + 1
    order = tops[np.argsort(-values[tops])]
    assert np.isnan(found[len(order) :]).all()
    np.testing.assert_allclose(found[: len(order)], np.asarray(grid)[order], atol=5e-3)
    np.testing.assert_allclose(heights[: len(order)], values[order], rtol=1e-4)


def test_an_atom_without_weight_is_no_mode():
    atoms, weights = jnp.asarray([0.0, 0.3, 0.5, 100.0]), jnp.asarray([0.3, 0.4, 0.3, 0.0])
    found, heights = modes(kbr.embed(kbr.Gaussian(1.0), atoms, weights), 4)
    assert np.isnan(found[1:]).all() and (np.asarray(heights[1:]) == 0).all()


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_densities_in_many_dimensions_keep_their_scale(unit):
    atoms = jnp.asarray(unit * RNG.normal(size=(100, 20)), jnp.float32)
    belief = kbr.embed(kbr.Gaussian(1.0), atoms)
    unit = np.float32(unit)
    at = jnp.stack([atoms[0], atoms[0] + 100 * unit])
    far = float(density(belief, at[1]))
    assert far == 0
    expected = -kbr.embedding.log_score(belief, at[0]) + 20 * np.log(unit)
    plain = Embedding(belief.kernel, atoms / unit, belief.weights)
    np.testing.assert_allclose(expected, np.log(density(plain, at[0] / unit)), rtol=1e-4)
    found = modes(belief, 2)[0]
    np.testing.assert_allclose(found / unit, modes(plain, 2)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_weights_of_zero_stay_zero(seed):
    weights = np.random.default_rng(seed).uniform(size=10).astype(np.float32)
    weights[7:] = 0
    shares = probabilities(kbr.embed(kbr.Delta(), jnp.arange(10), jnp.asarray(weights)))
    np.testing.assert_array_equal(shares[7:], 0)


def test_the_distribution_function_between_values_that_are_close():
    def at(values, wanted):
        return cdf(kbr.embed(kbr.Gaussian(1.0), jnp.asarray(values)), jnp.asarray(wanted))

    wide = np.concatenate([np.linspace(0, 1, 100), [1e6]]).astype(np.float32)
    for t in (0.1, 0.5, 0.9):
        t = np.float32(t)
        np.testing.assert_allclose(at(wide, t), (wide <= t).mean(), rtol=1e-5)
    narrow = (1000 + np.linspace(0, 0.01, 101)).astype(np.float32)
    for t in narrow[[10, 50]]:
        np.testing.assert_allclose(at(narrow, t), (narrow <= t).mean(), rtol=1e-5)
    assert np.isnan(at(narrow, np.float32(np.nan)))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [jnp.nan, 1.0]])
def test_scores_of_no_distribution(weights):
    belief = kbr.embed(kbr.Gaussian(1.0), jnp.asarray([0.0, 1.0]), jnp.asarray(weights))
    assert np.isnan(kbr.embedding.energy_score(belief, 0.7))


def test_margins_of_forecasts_with_atoms_of_their_own():
    x, y = jnp.linspace(0, 1, 40), jnp.linspace(0, 2, 40) ** 2
    model = kbr.fit_conditional(kbr.Gaussian(0.3), kbr.Gaussian(0.3), x, y, regularizer=1e-3)
    common = kbr.condition(model, x)
    own = jax.vmap(lambda point: kbr.condition(model, point))(x)
    assert own.points.shape == (40, 40)
    found, expected = (conformal_margin(held, y, 0.9) for held in (own, common))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_whole_numbers_as_events_of_real_forecasts():
    forecast = kbr.embed(kbr.Gaussian(1.0), jnp.asarray(np.random.default_rng(0).normal(size=20)))
    for read in (kbr.embedding.energy_score, kbr.embedding.log_score, kbr.density):
        np.testing.assert_allclose(read(forecast, 1), read(forecast, 1.0))
