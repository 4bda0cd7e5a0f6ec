"""Losses against refits and against their formulas in NumPy.

Their gradients against finite differences.
"""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr

N, M, T = 12, 5, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = 0.7 * X + 0.4 * RNG.normal(size=(N, 2))
HELD_X = RNG.normal(size=(M, 2))
HELD_Y = 0.7 * HELD_X + 0.4 * RNG.normal(size=(M, 2))
STATES = np.cumsum(0.4 * RNG.normal(size=(N + 1, 2)), axis=0)
SEEN = STATES[:-1] + 0.2 * RNG.normal(size=(N, 2))
TEST_STATES = np.cumsum(0.4 * RNG.normal(size=(T, 2)), axis=0)
TEST_SEEN = TEST_STATES + 0.2 * RNG.normal(size=(T, 2))
LANDMARKS = kbr.Landmarks(jnp.asarray(X[:5]))
REFERENCE = kbr.Gaussian(1.3)
PARAMETERS = {"h_x": 0.9, "h_y": np.array([0.8, 1.1]), "lambda": 0.05, "delta": 0.02}


close = closeness(1e-10, 1e-12, "rtol")


def gram(kernel, a, b):
    return np.asarray(kernel.gram(jnp.asarray(a), jnp.asarray(b)))


def model(p=PARAMETERS, x=X, y=Y, landmarks=None, mask=None):
    kernels = kbr.Gaussian(p["h_x"]), kbr.Gaussian(p["h_y"])
    x, y = jnp.asarray(x), jnp.asarray(y)
    return kbr.fit_conditional(
        *kernels,
        x,
        y,
        regularizer=p["lambda"],
        landmarks_x=landmarks,
        landmarks_y=landmarks,
        mask=mask,
    )


def tracker(p=PARAMETERS, landmarks=None, states=STATES, seen=SEEN, **options):
    return kbr.fit_filter(
        kbr.Gaussian(p["h_x"]),
        kbr.Gaussian(p["h_y"]),
        jnp.asarray(states),
        jnp.asarray(seen),
        regularizer=p["lambda"],
        posterior_regularizer=p["delta"],
        landmarks_states=landmarks,
        landmarks_observations=landmarks,
        **options,
    )


def distances(kernel, weights, points, targets):
    """Squared RKHS distances between embeddings and points, from the definition."""
    own = np.einsum("ti,ij,tj->t", weights, gram(kernel, points, points), weights)
    cross = np.sum(weights * gram(kernel, targets, points), axis=1)
    return np.diag(gram(kernel, targets, targets)) - 2 * cross + own


@pytest.mark.parametrize("kernel", ["own", REFERENCE, kbr.Linear()])
def test_regression_loss(kernel):
    fitted = model()
    kernel = fitted.kernel_y if kernel == "own" else kernel
    weights = np.asarray(kbr.condition(fitted, jnp.asarray(HELD_X)).weights)
    expected = distances(kernel, weights, Y, HELD_Y).mean()
    close(
        kbr.regression_loss(fitted, jnp.asarray(HELD_X), jnp.asarray(HELD_Y), kernel=kernel),
        expected,
    )


def test_the_regression_loss_takes_moments():
    maps = kbr.moments.moment_maps(
        kbr.Gaussian(0.9), kbr.Gaussian(0.8), LANDMARKS, kbr.Landmarks(jnp.asarray(Y[:5]))
    )
    moments = kbr.moments.fit_conditional(
        kbr.moments.collect_moments(maps, jnp.asarray(X), jnp.asarray(Y)), regularizer=0.05
    )
    weights = np.asarray(kbr.condition(moments, jnp.asarray(HELD_X)).weights)
    close(
        kbr.regression_loss(moments, jnp.asarray(HELD_X), jnp.asarray(HELD_Y), kernel=REFERENCE),
        distances(REFERENCE, weights, Y[:5], HELD_Y).mean(),
    )


def refitted(block, landmarks, kernel):
    """The loss of leaving out, by refitting."""
    total = 0.0
    for start in range(0, N, block):
        out = np.arange(start, start + block)
        rest = np.setdiff1d(np.arange(N), out)
        part = model(x=X[rest], y=Y[rest], landmarks=landmarks)
        if landmarks is None or kernel != "own":
            kernel = part.kernel_y if kernel == "own" else kernel
            total += block * float(
                kbr.regression_loss(part, jnp.asarray(X[out]), jnp.asarray(Y[out]), kernel=kernel)
            )
        else:
            weights = kbr.condition(part, jnp.asarray(X[out])).weights
            residual = (
                part.features_y.coordinates(jnp.asarray(Y[out])) - weights @ part.features_y.matrix
            )
            total += float(jnp.sum(residual**2))
    return total / N


@pytest.mark.parametrize(
    ("block", "landmarks", "kernel"),
    [
        (1, None, "own"),
        (1, LANDMARKS, "own"),
        (4, None, kbr.Linear()),
        (4, LANDMARKS, REFERENCE),
    ],
)
def test_leaving_out_equals_refitting(block, landmarks, kernel):
    fitted = model(landmarks=landmarks)
    close(
        kbr.leave_out_loss(
            fitted, num_left_out=block, kernel=fitted.kernel_y if kernel == "own" else kernel
        ),
        refitted(block, landmarks, kernel),
    )


def test_the_default_loss_is_the_energy_score():
    """By the formula with distances, for weights that sum to 1, and in units of each coordinate."""
    scale = np.array([1.0, 50.0])
    weights = np.array([0.5, 0.7, -0.2])
    points, target = Y[:3] * scale, Y[3] * scale
    kernel = kbr.kernels.Energy(scale=jnp.asarray(scale))
    embedding = kbr.embed(kernel, jnp.asarray(points), jnp.asarray(weights))
    found = kbr.embedding.squared_mmd(embedding, kbr.embed(kernel, jnp.asarray(target)[None]))
    apart = np.linalg.norm((points - target) / scale, axis=1)
    between = np.linalg.norm((points[:, None] - points) / scale, axis=2)
    close(found, weights @ apart - weights @ between @ weights / 2)
    units = kbr.kernels.coordinate_scale(jnp.asarray(Y * scale))
    close(units, (Y * scale).std(0))
    fitted = model()
    energy = kbr.kernels.Energy(Y.mean(0), kbr.kernels.coordinate_scale(jnp.asarray(Y)))
    close(kbr.leave_out_loss(fitted), kbr.leave_out_loss(fitted, kernel=energy))


def test_a_bandwidth_of_y_does_not_change_the_default_loss():
    """In the model's own kernel the widest bandwidth of y wins."""
    fits = [
        kbr.fit_conditional(kbr.Gaussian(0.9), kbr.Gaussian(h), X, Y, regularizer=0.05)
        for h in (0.3, 30.0)
    ]
    narrow, wide = (kbr.leave_out_loss(one, kernel=one.kernel_y) for one in fits)
    assert float(wide) < 0.2 * float(narrow)
    close(*(kbr.leave_out_loss(one) for one in fits))
    close(*(kbr.regression_loss(one, jnp.asarray(HELD_X), jnp.asarray(HELD_Y)) for one in fits))


@pytest.mark.parametrize(("landmarks", "kernel"), [(None, None), (LANDMARKS, REFERENCE)])
def test_leaving_out_padded_data(landmarks, kernel):
    mask = np.arange(N + 3) < N
    x, y = np.concatenate([X, X[:3] + 9]), np.concatenate([Y, Y[:3]])
    padded = model(x=x, y=y, landmarks=landmarks, mask=mask)
    close(
        kbr.leave_out_loss(padded, kernel=kernel),
        kbr.leave_out_loss(model(landmarks=landmarks), kernel=kernel),
    )
    values = jnp.asarray(np.where(mask, y[:, 0], np.nan))
    close(
        kbr.tuning.leave_out_residuals(padded, values)[:N],
        kbr.tuning.leave_out_residuals(model(landmarks=landmarks), jnp.asarray(Y[:, 0])),
    )


def test_a_kernel_equal_to_that_of_y_measures_by_its_features():
    kernel = kbr.Gaussian(0.8)
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    fitted = kbr.fit_conditional(
        kernel, kernel, x, y, regularizer=0.1, landmarks_x=4, landmarks_y=2
    )
    close(
        kbr.leave_out_loss(fitted, kernel=kernel),
        kbr.leave_out_loss(fitted, kernel=fitted.kernel_y),
    )


def test_leaving_out_with_landmarks_forms_no_gram_matrix():
    n = 4096
    x = jnp.zeros((n, 1))

    def loss(x, h):
        landmarks = {
            "landmarks_x": kbr.Landmarks(x[:4]),
            "landmarks_y": kbr.Landmarks(x[:4]),
        }
        fitted = kbr.fit_conditional(
            kbr.Gaussian(h), kbr.Gaussian(h), x, x, regularizer=0.1, **landmarks
        )
        return kbr.leave_out_loss(fitted, num_left_out=4, kernel=REFERENCE)

    memory = jax.jit(loss).lower(x, jnp.asarray(1.0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * n**2 / 2


def test_pairs_of_moments_cannot_be_left_out():
    maps = kbr.moments.moment_maps(kbr.Gaussian(0.9), kbr.Gaussian(0.8), LANDMARKS, LANDMARKS)
    moments = kbr.moments.fit_conditional(
        kbr.moments.collect_moments(maps, jnp.asarray(X), jnp.asarray(Y)), regularizer=0.05
    )
    with pytest.raises(ValueError, match="use `regression_loss`"):
        kbr.leave_out_loss(moments)


def test_default_losses_are_centered_on_what_was_learned_from():
    """Else a single held-out pair would be the mean that a model without weights predicts."""
    fitted = model()
    energy = kbr.kernels.Energy(Y.mean(0), kbr.kernels.coordinate_scale(jnp.asarray(Y)))
    for held in (HELD_Y, HELD_Y[:1]):
        data = jnp.asarray(HELD_X[: len(held)]), jnp.asarray(held)
        close(kbr.regression_loss(fitted, *data), kbr.regression_loss(fitted, *data, kernel=energy))

    def refit(training, held):
        one = kbr.fit_conditional(kbr.Gaussian(0.9), None, *training, regularizer=1e3)
        return kbr.regression_loss(one, *held), kbr.tuning.marginal_loss(
            one, *held, regularizer=1e4
        )

    losses = kbr.cross_validate(refit, (jnp.asarray(X), jnp.asarray(Y)), len(X))
    assert min(losses) > 0.1, losses


def test_points_without_weight_change_no_default_loss():
    fitted, x, y = model(), jnp.asarray(HELD_X), jnp.asarray(HELD_Y)
    share = jnp.full(len(X), 1 / len(X))
    prior = kbr.embed(fitted.kernel_x, jnp.asarray(X), share)
    padded = kbr.embed(
        fitted.kernel_x, jnp.concatenate([X, 1e3 + X]), jnp.concatenate([share, 0 * share])
    )
    close(
        *(
            kbr.tuning.marginal_loss(fitted, x, y, regularizer=1e-3, prior=p)
            for p in (prior, padded)
        )
    )
    points = jnp.asarray(Y[:5])
    idle = kbr.Landmarks(jnp.concatenate([points, 1e3 + points]), jnp.arange(10) < 5)
    losses = []
    for landmarks in (kbr.Landmarks(points), idle):
        maps = kbr.moments.moment_maps(kbr.Gaussian(0.9), kbr.Gaussian(0.8), LANDMARKS, landmarks)
        moments = kbr.moments.fit_conditional(
            kbr.moments.collect_moments(maps, jnp.asarray(X), jnp.asarray(Y)), regularizer=0.05
        )
        losses.append(kbr.regression_loss(moments, x, y))
    close(*losses)


def test_the_default_marginal_loss_is_an_energy_distance():
    fitted, x, y = model(), jnp.asarray(HELD_X), jnp.asarray(HELD_Y)
    points = jnp.asarray(X)
    energy = kbr.kernels.Energy(jnp.mean(points, axis=0), kbr.kernels.coordinate_scale(points))
    found = kbr.tuning.marginal_loss(fitted, x, y, regularizer=1e-3)
    close(found, kbr.tuning.marginal_loss(fitted, x, y, regularizer=1e-3, kernel=energy))


def test_a_single_pair_left_out_leaves_nothing():
    close(kbr.leave_out_loss(model(x=X[:1], y=Y[:1]), kernel=kbr.Gaussian(0.8)), 1)


@pytest.mark.parametrize("estimator", ["pairs", "importance"])
def test_marginal_loss(estimator):
    fitted = model()
    prior = kbr.embed(fitted.kernel_x, jnp.asarray(X))
    weights = kbr.bayes_rule(
        fitted, prior, jnp.asarray(HELD_Y), regularizer=0.02, estimator=estimator
    ).weights
    average = np.asarray(weights).mean(0)
    k = functools.partial(gram, REFERENCE)
    expected = (
        average @ k(X, X) @ average - 2 * (average @ k(X, HELD_X)).mean() + k(HELD_X, HELD_X).mean()
    )
    actual = kbr.tuning.marginal_loss(
        fitted,
        jnp.asarray(HELD_X),
        jnp.asarray(HELD_Y),
        regularizer=0.02,
        kernel=REFERENCE,
        estimator=estimator,
    )
    close(actual, expected, rtol=1e-8)


def test_filter_loss():
    counted = np.arange(T) % 3 > 0

    @jax.jit
    def program(truth, seen):
        filt = tracker()
        belief = kbr.belief(filt, kbr.run_filter(filt, seen))
        losses = [
            kbr.filter_loss(filt, truth, seen, **options)
            for options in ({}, {"counted": counted, "burn_in": 2}, {"kernel": REFERENCE})
        ]
        return losses, belief.points, belief.weights, kbr.mean(belief)

    losses, support, weights, means = program(jnp.asarray(TEST_STATES), jnp.asarray(TEST_SEEN))
    squares = np.sum((np.asarray(means) - TEST_STATES) ** 2, -1)
    in_the_rkhs = distances(REFERENCE, np.asarray(weights), np.asarray(support), TEST_STATES)
    close(losses, [squares.mean(), squares[2:][counted[2:]].mean(), in_the_rkhs.mean()])


def test_steps_that_do_not_count_are_no_zeros_to_a_kernel():
    def cosine(x, y):
        return x @ y / jnp.sqrt((x @ x) * (y @ y))

    def loss(shift):
        filt = tracker(states=STATES + shift)
        seen = jnp.asarray(TEST_SEEN)
        return kbr.filter_loss(filt, jnp.asarray(TEST_STATES), seen, burn_in=2, kernel=cosine)

    assert bool(jnp.isfinite(jax.grad(loss)(0.1)))


def test_filter_losses_share_one_program():
    traces, filters = [], [tracker(states=STATES + shift) for shift in (0.0, 0.1)]

    def decode(belief):
        traces.append(None)
        return kbr.mean(belief)

    losses = [
        kbr.filter_loss(filt, jnp.asarray(TEST_STATES), jnp.asarray(TEST_SEEN), decode=decode)
        for filt in filters
    ]
    assert len(traces) == 1 and losses[0] != losses[1]


def test_filter_loss_of_moments():
    @jax.jit
    def program(truth, seen):
        s, o, s_next = (jnp.asarray(p) for p in (STATES[:-1], SEEN[: len(STATES) - 1], STATES[1:]))
        kernels = kbr.Gaussian(0.9), kbr.Gaussian(0.8)
        landmarks = [
            kbr.greedy_landmarks(k, p, rank=5) for k, p in zip(kernels, (s, o), strict=True)
        ]
        maps = kbr.moments.moment_maps(*kernels, *landmarks, shift=True)
        moments = kbr.moments.collect_moments(maps, s, o, s_next)
        emission = kbr.moments.fit_conditional(moments, regularizer=0.05)
        clipping = kbr.Clipping(False, 0.0)
        filt = kbr.KernelBayesFilter(
            emission, None, regularizer=0.02, shift=True, clipping=clipping
        )
        steps = kbr.run_filter(filt, seen)
        losses = [kbr.filter_loss(filt, truth, seen, kernel=kernel) for kernel in (None, REFERENCE)]
        belief = kbr.belief(filt, steps)
        return losses, kbr.state_mean(filt, steps), belief.points, belief.weights

    losses, means, support, weights = program(jnp.asarray(TEST_STATES), jnp.asarray(TEST_SEEN))
    squares = np.sum((np.asarray(means) - TEST_STATES) ** 2, -1)
    in_the_rkhs = distances(REFERENCE, np.asarray(weights), np.asarray(support), TEST_STATES)
    close(losses, [squares.mean(), in_the_rkhs.mean()])


def test_mmd_power():
    k = functools.partial(gram, REFERENCE)
    h = k(X, X) + k(Y, Y) - k(X, Y) - k(Y, X)
    np.fill_diagonal(h, 0)
    variance = 4 / N**3 * (h.sum(1) ** 2).sum() - 4 / N**4 * h.sum() ** 2
    close(
        kbr.tuning.mmd_power(REFERENCE, jnp.asarray(X), jnp.asarray(Y)),
        h.sum() / N / (N - 1) / np.sqrt(variance + 1e-8),
        rtol=1e-8,
    )


def power(p, x=X, y=Y):
    return kbr.tuning.mmd_power(kbr.Gaussian(p["h_x"]), jnp.asarray(x), jnp.asarray(y))


def regression(p, **data):
    return kbr.regression_loss(
        model(p, **data), jnp.asarray(HELD_X), jnp.asarray(HELD_Y), kernel=REFERENCE
    )


def marginal(p, **data):
    return kbr.tuning.marginal_loss(
        model(p, **data),
        jnp.asarray(HELD_X),
        jnp.asarray(HELD_Y),
        regularizer=p["delta"],
        kernel=REFERENCE,
        clipping=kbr.Clipping(False, 0.0, False),
    )


def tracking(p, landmarks=None, kernel=None, segment=None, **data):
    return kbr.filter_loss(
        tracker(p, landmarks, clipping=kbr.Clipping(False, 0.0), **data),
        jnp.asarray(TEST_STATES),
        jnp.asarray(TEST_SEEN),
        kernel=kernel,
        checkpoint_every=segment,
    )


LOSSES = {
    "regression": regression,
    "marginal": marginal,
    "leave one out": lambda p, **data: kbr.leave_out_loss(model(p, **data), kernel=REFERENCE),
    "leave four out, landmarks": lambda p: kbr.leave_out_loss(
        fitted := model(p, landmarks=LANDMARKS), num_left_out=4, kernel=fitted.kernel_y
    ),
    "leave one out, energy": lambda p, **data: kbr.leave_out_loss(model(p, **data)),
    "leave four out, landmarks, kernel": lambda p: kbr.leave_out_loss(
        model(p, landmarks=LANDMARKS), num_left_out=4, kernel=REFERENCE
    ),
    "filter": tracking,
    "filter, landmarks, segments": functools.partial(tracking, landmarks=LANDMARKS, segment=3),
    "filter, kernel": functools.partial(tracking, kernel=REFERENCE),
    "power": power,
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name):
    flat, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(jnp.asarray, PARAMETERS))
    steps = 1e-3 * jnp.asarray([-2.0, -1.0, 1.0, 2.0])
    rule = jnp.asarray([1.0, -8.0, 8.0, -1.0]) / 12e-3

    @jax.jit
    def both(flat):
        def loss(v):
            return LOSSES[name](unravel(v))

        moved = flat * (1 + steps[:, None, None] * jnp.eye(flat.size))
        values = jax.lax.map(loss, moved.reshape(-1, flat.size)).reshape(4, flat.size)
        return jax.grad(loss)(flat) * flat, rule @ values

    gradient, differences = both(flat)
    close(
        gradient, differences, rtol=1e-6, atol=2e-8 * float(jnp.max(jnp.abs(differences))) + 1e-12
    )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["regression", "leave one out", "marginal", "filter"])
def test_gradients_are_finite_on_one_point_and_on_copies_of_it(name, rows):
    x, y = np.repeat(X[:1], rows, 0), np.repeat(Y[:1], rows, 0)
    data = {"x": x, "y": y}
    if name == "filter":
        data = {"states": np.repeat(STATES[:1], rows + 1, 0), "seen": y}
    gradient = jax.jit(jax.grad(lambda p: LOSSES[name](p, **data)))(
        jax.tree.map(jnp.asarray, PARAMETERS)
    )
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))


def test_the_gradient_of_the_power_is_finite_where_the_samples_are_equal():
    value, gradient = jax.value_and_grad(lambda p: power(p, y=X))(
        jax.tree.map(jnp.asarray, PARAMETERS)
    )
    assert float(value) == 0 and all(
        bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient)
    )


def test_in_a_fixed_kernel_the_widest_bandwidth_does_not_win():
    """In the kernel that is selected it would, as printed in F11 section 4.2.

    Everything is near everything there.
    """

    def loss(h):
        fitted = kbr.fit_conditional(
            kbr.Gaussian(h), kbr.Gaussian(1.0), jnp.asarray(X), jnp.asarray(Y), regularizer=1e-3
        )
        held_out = jnp.asarray(HELD_X), jnp.asarray(HELD_Y)
        return kbr.tuning.marginal_loss(fitted, *held_out, regularizer=1e-2, kernel=REFERENCE)

    assert (
        np.argmin(
            jax.jit(lambda h: jax.lax.map(loss, h))(jnp.asarray([0.3, 0.6, 1.2, 30.0, 100.0]))
        )
        < 3
    )


@pytest.mark.parametrize("key", [None, jax.random.key(0)])
def test_cross_validation_is_a_mean_over_folds(key):
    data = (jnp.asarray(X), jnp.asarray(Y))

    def score(training, held_out):
        fitted = kbr.fit_conditional(
            kbr.Gaussian(0.9), kbr.Gaussian(0.8), *training, regularizer=0.05
        )
        return kbr.regression_loss(fitted, *held_out), held_out[0]

    order = np.arange(N) if key is None else np.asarray(jax.random.permutation(key, N))
    loss, mean_held_out = kbr.cross_validate(score, data, 5, key=key)
    close(mean_held_out, X[order[:10]].reshape(5, 2, 2).mean(0))  # two rows are never held out
    values = []
    for part in order[:10].reshape(5, 2):
        rest = np.asarray([i for i in order if i not in part])
        values.append(
            score(
                (jnp.asarray(X[rest]), jnp.asarray(Y[rest])),
                (jnp.asarray(X[part]), jnp.asarray(Y[part])),
            )[0]
        )
    close(loss, np.mean(values))


def test_grid_search_finds_the_least_finite_loss():
    grid = {"a": jnp.asarray([-1.0, 0.5, 2.0]), "b": (jnp.asarray([0.0, 1.0]),)}

    def loss(p):
        return jnp.where(p["a"] < 0, jnp.nan, (p["a"] - 1) ** 2 + (p["b"][0] - 1) ** 2)

    found = kbr.grid_search(loss, grid, batch_size=4)
    assert found.values.shape == (3, 2) and float(found.value) == 0.25
    close(found.parameters["a"], 0.5)
    close(found.parameters["b"][0], 1.0)


def test_a_list_of_numbers_is_a_row_of_a_grid():
    grids = {"h": [0.5, 1.0, 2.0]}, {"h": jnp.asarray([0.5, 1.0, 2.0])}
    found = [kbr.grid_search(lambda p: (p["h"] - 1.2) ** 2, grid) for grid in grids]
    assert float(found[0].parameters["h"]) == float(found[1].parameters["h"]) == 1.0


def test_segments_change_memory_only():
    filt, seen = tracker(), jnp.asarray(TEST_SEEN)
    whole = kbr.run_filter(filt, seen)
    for segment in (3, 4, 100):
        parts = kbr.run_filter(filt, seen, checkpoint_every=segment)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
            close(a, b)
    read = kbr.run_filter(
        filt, seen, output_fn=lambda step: step.predictive_value, checkpoint_every=3
    )
    close(read, whole.predictive_value)


def test_delay_windows():
    sequence = np.arange(8.0).reshape(4, 2)
    windows = kbr.delay_embedding(jnp.asarray(sequence), 3)
    rows = [[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 2, 1]]
    close(windows, sequence[np.asarray(rows)].reshape(4, 6))
    holed = sequence.copy()
    holed[[0, 2]] = np.nan
    missing = kbr.delay_embedding(
        jnp.asarray(holed), 3, observed=np.array([False, True, False, True])
    )
    close(missing, sequence[np.asarray([[1, 1, 1], [1, 1, 1], [1, 1, 1], [3, 1, 1]])].reshape(4, 6))


def test_filter_loss_wants_points_like_the_states():
    filt = tracker()
    with pytest.raises(ValueError, match="not points like"):
        kbr.filter_loss(
            filt,
            jnp.asarray(TEST_STATES),
            jnp.asarray(TEST_SEEN),
            decode=lambda belief: (kbr.mean(belief), belief.mass),
        )


@pytest.mark.parametrize("kernel", [None, kbr.Gaussian(0.5)])
def test_uncounted_states_that_are_nan_reach_no_gradient(kernel):
    rng = np.random.default_rng(0)
    states = jnp.asarray(np.cumsum(0.3 * rng.normal(size=(40, 1)), axis=0))
    seen, counted = states + 0.1, jnp.ones(12, bool).at[5].set(False)

    def loss(h, value):
        filt = kbr.fit_filter(
            kbr.Gaussian(h),
            kbr.Gaussian(0.5),
            states,
            seen,
            regularizer=1e-2,
            posterior_regularizer=1e-2,
        )
        true = states[:12].at[5].set(value)
        return kbr.filter_loss(filt, true, seen[:12], counted=counted, kernel=kernel)

    found, expected = (jax.value_and_grad(loss)(0.5, value) for value in (jnp.nan, 0.3))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_pairs_that_are_left_out_by_number():
    x = jnp.linspace(0, 1, 24)
    model = kbr.fit_conditional(kbr.Gaussian(0.3), kbr.Gaussian(0.3), x, x**2, regularizer=1e-3)
    last = kbr.tuning.leave_out_forecasts(model, np.asarray([-1])).weights
    np.testing.assert_allclose(
        last, kbr.tuning.leave_out_forecasts(model, np.asarray([23])).weights
    )
    for index in ([24], [-25], [0.5], np.ones(24, bool)):
        with pytest.raises(ValueError, match="`index` must be a vector of numbers of 24 pairs"):
            kbr.tuning.leave_out_forecasts(model, np.asarray(index))
    with pytest.raises(ValueError, match="`values` must hold one value for each of 24 pairs"):
        kbr.tuning.leave_out_residuals(model, jnp.ones(23))


@pytest.mark.parametrize("num_features", [30, 64])
def test_many_features_in_single_precision(num_features):
    """The first version gave -108 for .14: a difference of squares, divided by a small square."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(40, 4)), rng.normal(size=(4, num_features))
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=40)
    features = np.tanh(x @ w)
    for ridge in (1e-3, 1e-5):
        inverse = np.linalg.inv(features @ features.T + 39 * ridge * np.eye(40))
        residuals = inverse @ y / np.diag(inverse)
        single = [jnp.asarray(part, jnp.float32) for part in (x, y, w)]
        network = jax.tree_util.Partial(lambda w, z: jnp.tanh(z @ w), single[2])
        model = kbr.fit_conditional(
            kbr.kernels.FeatureMap(network), kbr.Gaussian(0.7), *single[:2], regularizer=ridge
        )
        found = kbr.tuning.leave_out_loss(model, kernel=kbr.Linear())
        np.testing.assert_allclose(found, np.mean(residuals**2), rtol=0.03)
        np.testing.assert_allclose(
            kbr.tuning.leave_out_residuals(model, single[1]), residuals, atol=0.03
        )


def test_what_rounding_decides_is_nan():
    """A pair far from all others, in single precision, at a landmark of its own."""
    x = jnp.asarray(np.r_[np.linspace(0, 1, 19), 50.0], jnp.float32)
    model = kbr.fit_conditional(
        kbr.Gaussian(1.0), kbr.Gaussian(1.0), x, x, regularizer=2e-7, landmarks_x=8
    )
    assert np.isnan(kbr.tuning.leave_out_loss(model))
