"""Single precision.

Every public computation once, its dtype, and its distance from NumPy in double precision.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import kbr_jax as kbr
from kbr_jax._numerics import squared_distances
from kbr_jax._solves import resolvent
from kbr_jax.hypotheses._two_sample import student
from kbr_jax.learning._forecast import _standardized
from kbr_jax.sklearn import ConditionalEmbeddingClassifier

N, M = 30, 8
RNG = np.random.default_rng(0)
X64 = RNG.normal(size=(N, 2))
Y64 = 0.7 * X64 + 0.5 * RNG.normal(size=(N, 2))
U64 = 0.8 * RNG.normal(size=(M, 2))
X, Y, U = (jnp.asarray(a, jnp.float32) for a in (X64, Y64, U64))
LABELS = jnp.asarray(RNG.integers(3, size=N))
H, EPSILON, DELTA = 0.8, 0.01, 1e-3
KERNEL = kbr.Gaussian(H)
ALPHA64 = RNG.dirichlet(np.ones(M))
PRIOR = kbr.embed(KERNEL, U, jnp.asarray(ALPHA64, jnp.float32))
MODEL = kbr.fit_conditional(KERNEL, KERNEL, X, Y, regularizer=EPSILON)
LOW_RANK = kbr.fit_conditional(
    KERNEL, KERNEL, X, Y, regularizer=EPSILON, landmarks_x=25, landmarks_y=25
)
MATRICES = jnp.asarray(np.linalg.qr(RNG.normal(size=(N, 3, 3)))[0], jnp.float32)
HISTOGRAMS = jnp.abs(X)


def single(value):
    """All leaves are finite, and the real ones single."""
    for leaf in jax.tree.leaves(value):
        assert not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float32, leaf.dtype
        assert np.all(np.isfinite(leaf))
    return value


def close(actual, expected, tol):
    np.testing.assert_allclose(np.asarray(single(actual), np.float64), expected, rtol=tol, atol=tol)


def gaussian(a, b, h=H):
    return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * h**2))


GRAM_X, GRAM_Y = gaussian(X64, X64), gaussian(Y64, Y64)
RIDGE = GRAM_X + N * EPSILON * np.eye(N)
CENTRING = np.eye(N) - 1 / N
W64 = np.linalg.solve(RIDGE, gaussian(X64, U64) @ ALPHA64)


def numpy_centered(estimator):
    column = gaussian(X64, X64[:3])
    if estimator == "song2009":
        return np.linalg.solve(CENTRING @ GRAM_X + N * EPSILON * np.eye(N), CENTRING @ column).T
    matrix = CENTRING @ GRAM_X @ CENTRING + N * EPSILON * np.eye(N)
    return 1 / N + np.linalg.solve(matrix, CENTRING @ (column - GRAM_X.mean(1)[:, None])).T


def numpy_bayes(estimator):
    w, column = W64, gaussian(Y64, Y64[:3])
    if estimator == "importance":
        d = np.diag(np.maximum(w, 0))
        return np.linalg.solve(d @ GRAM_Y + DELTA * np.eye(N), d @ column).T
    d = np.diag(w)
    solved = np.linalg.solve(d @ GRAM_Y @ d @ GRAM_Y + DELTA * np.eye(N), d @ column)
    if estimator == "pairs":
        return (d @ GRAM_Y @ solved).T
    operator = np.linalg.solve(RIDGE, gaussian(X64, U64)) * ALPHA64
    return (operator.T @ GRAM_Y @ solved).T


@pytest.mark.parametrize(
    "kernel, x",
    [
        (kbr.Gaussian(1.0), X),
        (kbr.Laplace(1.0), X),
        (kbr.Matern12(1.0), X),
        (kbr.Matern32(1.0), X),
        (kbr.Matern52(1.0), X),
        (kbr.RationalQuadratic(1.0), X),
        (kbr.Linear(), X),
        (kbr.Polynomial(2), X),
        (kbr.kernels.HistogramIntersection(), HISTOGRAMS),
        (kbr.kernels.ChiSquared(), HISTOGRAMS),
        (kbr.Linear(), MATRICES),
        (kbr.Gaussian(1.0), MATRICES),
        (kbr.Delta(), LABELS),
        (kbr.Precomputed(jnp.eye(3)), LABELS),
        (kbr.TensorProduct((kbr.Gaussian(1.0), kbr.Delta())), (X, LABELS)),
        (kbr.DirectSum((kbr.Gaussian(1.0), kbr.Linear())), (X, Y)),
        (2.0 * kbr.Gaussian(1.0) + kbr.Linear() * kbr.Linear(), X),
        (lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)), X),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kernels(kernel, x):
    matrix = single(kbr.gram(kernel, x))
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        single(kbr.kernels.diagonal(kernel, x)), np.diagonal(matrix), rtol=1e-4, atol=1e-5
    )
    assert np.linalg.eigvalsh(np.asarray(matrix, np.float64)).min() > -1e-4


@pytest.mark.parametrize("dimensions", [2, 40])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_gram_far_from_the_origin(dimensions, offset):
    x = np.asarray(np.random.default_rng(106).normal(size=(N, dimensions)) + offset, np.float32)
    h = float(np.sqrt(dimensions))
    expected = gaussian(np.asarray(x, np.float64), np.asarray(x, np.float64), h)
    # Coordinates of this size are themselves known to eps * offset only.
    close(kbr.gram(kbr.Gaussian(h), jnp.asarray(x)), expected, 3e-6 if offset == 0 else 2e-5)
    distances = np.sqrt(((x[:, None].astype(np.float64) - x[None]) ** 2).sum(-1))[
        np.triu_indices(N, 1)
    ]
    close(kbr.median_heuristic(jnp.asarray(x)), np.median(distances), 1e-5)


def test_centers_of_many_points_far_from_the_origin():
    x = np.random.default_rng(0).normal(size=(100_000, 1)) + 1e4
    landmarks = kbr.kmeanspp_landmarks(
        None, x.astype(np.float32), rank=2, key=jax.random.key(0), num_iterations=10
    )
    centers = np.sort(np.asarray(landmarks.points).ravel()) - 1e4
    np.testing.assert_allclose(centers, [-0.8, 0.8], atol=0.1)


def test_products_by_blocks():
    v = np.random.default_rng(116).normal(size=(N, 2))
    weights = jnp.asarray(v, jnp.float32)
    close(kbr.kernels.gram_matvec(KERNEL, X, X, weights, block_size=7), GRAM_X @ v, 1e-5)

    def loss(kernel, x, product):
        return jnp.sum(product(kernel, x) ** 2)

    blocked, dense = (
        single(jax.jit(jax.grad(lambda k, x, f=f: loss(k, x, f), argnums=(0, 1)))(KERNEL, X))
        for f in (
            lambda k, x: kbr.kernels.gram_matvec(k, x, Y, weights, block_size=7),
            # A GPU has three digits in products by default.
            lambda k, x: jnp.matmul(kbr.gram(k, x, Y), weights, precision="highest"),
        )
    )
    for one, other in zip(jax.tree.leaves(blocked), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 10])
def test_conjugate_gradients(rank):
    solver = kbr.ConjugateGradient(rank=rank)
    model = kbr.fit_conditional(KERNEL, KERNEL, X, Y, regularizer=EPSILON, solver=solver)
    close(
        kbr.condition(model, X[:3]).weights, np.linalg.solve(RIDGE, gaussian(X64, X64[:3])).T, 1e-4
    )
    _, report = single(model.factor.diagnose(model.features_x.coordinates(X[:3]).T))
    assert report.converged


def test_embeddings():
    q = kbr.embed(KERNEL, X)
    cross = gaussian(U64, X64)
    close(kbr.evaluate(PRIOR, X), ALPHA64 @ cross, 1e-5)
    close(kbr.inner(PRIOR, q), ALPHA64 @ cross.mean(1), 1e-5)
    distance = ALPHA64 @ gaussian(U64, U64) @ ALPHA64 + GRAM_X.mean() - 2 * ALPHA64 @ cross.mean(1)
    close(kbr.embedding.squared_mmd(PRIOR, q), distance, 1e-5)
    close(kbr.mmd(PRIOR, q), np.sqrt(distance), 1e-4)
    close(kbr.witness(PRIOR, q, X), ALPHA64 @ cross - GRAM_X.mean(0), 1e-5)
    close(kbr.embedding.norm(q), np.sqrt(GRAM_X.mean()), 1e-5)
    close(kbr.embedding.squared_norm(q), GRAM_X.mean(), 1e-5)
    close(kbr.mean(PRIOR), ALPHA64 @ U64, 1e-5)
    close(kbr.expectation(PRIOR, lambda x: x[0] ** 2), ALPHA64 @ U64[:, 0] ** 2, 1e-5)
    close(kbr.embedding.mixture([PRIOR, q], jnp.asarray([0.3, 0.7])).mass, 1.0, 1e-5)
    embedding, mass = kbr.normalize(kbr.Embedding(KERNEL, U, 3 * PRIOR.weights))
    close(embedding.weights, ALPHA64, 1e-6)
    close(mass, 3.0, 1e-6)
    single(kbr.embedding.squared_mmd(PRIOR, q, unbiased=True))


def test_joint_embeddings():
    joint = kbr.embedding.embed_joint(KERNEL, KERNEL, X, Y)
    hs2 = np.trace(CENTRING @ GRAM_X @ CENTRING @ GRAM_Y) / N**2
    close(kbr.hsic(KERNEL, KERNEL, X, Y), hs2, 1e-5)
    close(kbr.embedding.squared_hs_norm(kbr.embedding.cross_covariance(joint)), hs2, 1e-5)
    single(kbr.hsic(KERNEL, KERNEL, X, Y, unbiased=True))
    expected = np.mean(X64[:, 0] * Y64[:, 0])
    close(kbr.embedding.joint_expectation(joint, lambda x: x[0], lambda y: y[0]), expected, 1e-5)
    covariance = expected - X64[:, 0].mean() * Y64[:, 0].mean()
    close(
        kbr.embedding.covariance(
            kbr.embedding.cross_covariance(joint), lambda x: x[0], lambda y: y[0]
        ),
        covariance,
        1e-5,
    )
    single([e.weights for e in kbr.embedding.marginals(joint)])


def test_decoding():
    embedding = kbr.embed(KERNEL, X[:5] / 4)
    best = single(kbr.decode(embedding))
    for decoded in (
        kbr.embedding.decode_fixed_point(embedding, num_steps=np.int64(100)),
        kbr.embedding.decode_gradient(embedding),
        kbr.decode(embedding, jnp.concatenate([X, best[None]])),
    ):
        difference = kbr.embedding.decoding_objective(
            embedding, single(decoded)
        ) - kbr.embedding.decoding_objective(embedding, best)
        assert float(difference) <= 1e-5
    rotations = MATRICES * jnp.linalg.det(MATRICES)[:, None, None]
    turned = single(kbr.decode_rotation(kbr.embed(kbr.Linear(), rotations)))
    np.testing.assert_allclose(turned @ turned.T, np.eye(3), atol=1e-5)
    close(kbr.embedding.nearest_rotation(rotations), np.asarray(rotations), 1e-5)
    permutations = jnp.stack([jnp.eye(3), jnp.eye(3)[jnp.asarray([1, 0, 2])], jnp.eye(3)])
    close(kbr.embedding.decode_permutation(kbr.embed(kbr.Linear(), permutations)), np.eye(3), 0)


def test_landmarks():
    decomposition = single(kbr.features.incomplete_cholesky(KERNEL, X, rank=20))
    low_rank = np.asarray(decomposition.factor, np.float64)
    np.testing.assert_allclose(
        np.diagonal(GRAM_X - low_rank @ low_rank.T), np.asarray(decomposition.residual), atol=1e-5
    )
    key = jax.random.key(0)
    for landmarks in (
        kbr.greedy_landmarks(KERNEL, X, rank=20),
        kbr.rpcholesky_landmarks(KERNEL, X, rank=20, key=key),
        kbr.uniform_landmarks(X, rank=20, key=key),
        kbr.Landmarks(X[:20]),
        kbr.greedy_landmarks(KERNEL, X, rank=20, block_size=8),
        kbr.rpcholesky_landmarks(KERNEL, X, rank=20, key=key, block_size=8),
        kbr.kmeanspp_landmarks(KERNEL, X, rank=20, key=key, num_iterations=2),
        kbr.features.streaming_landmarks(KERNEL, [X[:20], X[20:]], rank=20, key=key),
    ):
        model = kbr.fit_conditional(
            KERNEL, KERNEL, X, Y, regularizer=EPSILON, landmarks_x=landmarks
        )
        single(kbr.condition(model, X).weights)


@pytest.mark.parametrize("key", [None, 5])  # the first version failed for 5
def test_landmarks_in_blocks(key):
    """2000 points whose Gram matrix has far fewer numerical ranks than asked for."""
    x64 = np.random.default_rng(0).normal(size=(2000, 2))
    key = None if key is None else jax.random.key(key)
    result = single(
        kbr.features.incomplete_cholesky(
            kbr.Gaussian(2.0), jnp.asarray(x64, jnp.float32), rank=200, key=key, block_size=32
        )
    )
    low_rank = np.asarray(result.factor, np.float64)
    # The trace of the residual is at most 1e-6 of 2000, and bounds every entry.
    rest = gaussian(x64, x64, 2.0) - low_rank @ low_rank.T
    assert np.abs(rest).max() < 2e-3
    np.testing.assert_allclose(np.diagonal(rest), np.asarray(result.residual), atol=2e-5)
    assert not np.all(result.active)


@pytest.mark.parametrize(
    "kernel",
    [kbr.Gaussian(1.0), kbr.Laplace(2.0), kbr.Matern12(2.0)],
    ids=lambda k: type(k).__name__,
)
def test_fourier_features(kernel):
    points = (
        X + 100
    )  # angles are taken from the center of the points, or they would lose their digits here
    draws = single(kbr.random_fourier(kernel, points, rank=4000, key=jax.random.key(0)))
    model = kbr.fit_conditional(
        kernel, kernel, points, points, regularizer=EPSILON, landmarks_x=draws, landmarks_y=draws
    )
    coordinates = np.asarray(single(model.features_x.matrix), np.float64)
    close(jnp.asarray(np.sum(coordinates**2, axis=1), jnp.float32), np.ones(N), 1e-5)
    assert np.abs(
        coordinates @ coordinates.T - np.asarray(kbr.gram(kernel, points))
    ).max() < 5 / np.sqrt(2000)
    single(
        kbr.bayes_rule(model, kbr.embed(kernel, points[:5]), points[:2], regularizer=DELTA).weights
    )


def as_printed(estimator):
    """The rule of the paper: prior weights as they are, clipped only where they must be."""
    return {
        "estimator": estimator,
        "clipping": kbr.Clipping(estimator == "importance", 0.0, False),
    }


@pytest.mark.parametrize(
    "model, tol", [(MODEL, 1e-4), (LOW_RANK, 5e-3)], ids=["exact", "landmarks"]
)
def test_rules(model, tol):
    close(
        kbr.condition(model, X[:3]).weights, np.linalg.solve(RIDGE, gaussian(X64, X64[:3])).T, tol
    )
    for form in ("affine", "song2009"):
        close(
            kbr.condition_centered(model, X[:3], estimator=form).weights, numpy_centered(form), tol
        )
    expected = np.linalg.solve(RIDGE, gaussian(X64, X64[:3])).T @ Y64
    close(kbr.conditional_expectation(model, X[:3], lambda y: y), expected, tol)
    close(kbr.sum_rule(model, PRIOR).weights, W64, tol)
    close(kbr.chain_rule(model, PRIOR).weights, W64, tol)
    operator = np.linalg.solve(RIDGE, gaussian(X64, U64)) * ALPHA64
    close(kbr.chain_rule(model, PRIOR, estimator="prior").weights, operator.T, tol)
    close(kbr.rules.clip_and_normalize(PRIOR.weights, kbr.Clipping(truncation=0.0)), ALPHA64, tol)
    for estimator in ("prior", "pairs", "importance"):
        posterior = kbr.bayes_rule(model, PRIOR, Y[:3], regularizer=DELTA, **as_printed(estimator))
        close(posterior.weights, numpy_bayes(estimator), tol)


def test_posteriors_from_simulations():
    backward = kbr.fit_conditional(KERNEL, KERNEL, Y, X, regularizer=EPSILON)
    expected = np.linalg.solve(GRAM_Y + N * EPSILON * np.eye(N), gaussian(Y64, Y64[:3])).T
    close(kbr.condition(backward, Y[:3]).weights, expected, 1e-4)
    forward = kbr.fit_conditional(KERNEL, KERNEL, X, Y, regularizer=EPSILON)
    for estimator in ("pairs", "importance"):
        options = {"regularizer": DELTA, **as_printed(estimator)}
        posterior = kbr.bayes_rule(forward, PRIOR, Y[:3], **options)
        close(posterior.weights, numpy_bayes(estimator), 1e-4)
    lower, upper = single(kbr.credible_interval(posterior, 0.8))
    assert np.all(lower <= upper)


def test_conditional_cross_covariance():
    kernel = kbr.TensorProduct((KERNEL, KERNEL))
    model = kbr.fit_conditional(KERNEL, kernel, X, (Y, Y[:, ::-1]), regularizer=EPSILON)
    beta = np.linalg.solve(RIDGE, gaussian(X64, X64[:1]))[:, 0]
    b = np.diag(beta) - np.outer(beta, beta)
    operator = kbr.rules.conditional_cross_covariance(model, X[0])
    close(kbr.embedding.squared_hs_norm(operator), np.trace(b @ GRAM_Y @ b @ GRAM_Y), 1e-4)


@pytest.mark.parametrize("landmarks", [None, 20])
def test_gradients_are_finite(landmarks):
    def loss(h, regularizer, delta):
        kernel = kbr.Gaussian(h)
        options = {"landmarks_x": landmarks, "landmarks_y": landmarks}
        model = kbr.fit_conditional(kernel, kernel, X, Y, regularizer=regularizer, **options)
        prior = kbr.Embedding(kernel, U, PRIOR.weights)
        posteriors = [
            kbr.bayes_rule(model, prior, Y[0], regularizer=delta, **as_printed(e))
            for e in ("prior", "pairs", "importance")
        ]
        centered = jnp.sum(kbr.condition_centered(model, X).weights ** 2)
        return centered + sum(jnp.sum(kbr.mean(p) ** 2) for p in posteriors)

    values = (jnp.asarray(v, jnp.float32) for v in (H, EPSILON, DELTA))
    for gradient in single(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*values)):
        assert float(gradient) != 0


def test_what_is_below_the_rounding_of_a_square():
    prior = kbr.embed(KERNEL, X)
    kbr.bayes_rule(MODEL, prior, Y[0], regularizer=1e-9)
    with pytest.warns(UserWarning, match="below the rounding of float32"):
        kbr.bayes_rule(MODEL, prior, Y[0], regularizer=1e-9, estimator="importance")
    with pytest.warns(UserWarning, match="below the rounding of float32"):
        kbr.bayes_rule(MODEL, prior, Y[0], regularizer=1e-15)


def test_estimators_of_scikit_learn_warn_of_lost_digits():
    seconds = 1.7e9 + np.arange(100.0)
    with pytest.warns(UserWarning, match="digits"):
        ConditionalEmbeddingClassifier(kernel=kbr.Gaussian(3.0), regularizer=1e-3).fit(
            seconds[:, None], np.arange(100) % 2
        )


def test_the_resolvent_at_a_small_shift():
    """A real spectrum in [0, 1] and delta = 1e-6.

    The squared matrix would be lost in single precision.
    """
    matrix = np.diag(np.abs(W64) / np.abs(W64).sum()) @ GRAM_Y
    b = RNG.normal(size=(N, 4))
    inverse = np.linalg.inv(matrix @ matrix + 1e-6 * np.eye(N))
    actual = resolvent(
        jnp.asarray(matrix, jnp.float32),
        jnp.asarray(1e-6, jnp.float32),
        jnp.asarray(b, jnp.float32),
    )
    for part, expected in zip(single(actual), (matrix @ inverse @ b, inverse @ b), strict=True):
        error = np.linalg.norm(np.asarray(part, np.float64) - expected) / np.linalg.norm(expected)
        assert error < 2e-3


def rotation(length, seed):
    """Noisy rotation by 0.3 a step, observed with noise 0.2."""
    rng = np.random.default_rng(seed)
    states = np.zeros((length, 2))
    states[0] = [1.0, 0.0]
    for t in range(1, length):
        angle = np.arctan2(states[t - 1, 1], states[t - 1, 0]) + 0.3
        states[t] = [np.cos(angle), np.sin(angle)] + 0.2 * rng.normal(size=2)
    return states, states + 0.2 * rng.normal(size=(length, 2))


def numpy_filter_error(states, observations, truth, sequence, h, epsilon, delta):
    """The clipped filter with a shifted transition in double precision: its mean squared error."""
    s, s_next, o = states[:-1], states[1:], observations[:-1]
    n = len(s)
    inverse, k = np.linalg.inv(gaussian(s, s, h) + n * epsilon * np.eye(n)), gaussian(o, o, h)
    operator, w, errors = inverse @ gaussian(s, s_next, h), np.full(n, 1 / n), []
    for target, observation in zip(truth, sequence, strict=True):
        w = np.maximum(w, 0)
        w = np.where(w < 0.02 * w.max(), 0, w)
        w = w / w.sum()
        dk = w[:, None] * k
        beta = dk @ np.linalg.solve(
            dk @ dk + delta * np.eye(n), w * gaussian(o, observation[None], h)[:, 0]
        )
        errors.append(np.sum((beta @ s / beta.sum() - target) ** 2))
        w = operator @ beta
    return np.mean(errors[10:])


@pytest.mark.parametrize("landmarks", [None, 60])
def test_a_hundred_steps_of_a_filter(landmarks):
    states, observations = rotation(120, 1)
    truth, sequence = rotation(100, 2)
    h, epsilon, delta = 0.5, 1e-3, 1e-3
    expected = numpy_filter_error(states, observations, truth, sequence, h, epsilon, delta)
    kernel = kbr.Gaussian(h)
    filt = kbr.fit_filter(
        kernel,
        kernel,
        jnp.asarray(states, jnp.float32),
        jnp.asarray(observations, jnp.float32),
        regularizer=epsilon,
        posterior_regularizer=delta,
        landmarks_states=landmarks,
        landmarks_observations=landmarks,
    )
    run = single(kbr.run_filter(filt, jnp.asarray(sequence, jnp.float32)))
    estimate = np.asarray(single(kbr.state_mean(filt, run)), np.float64)
    error = np.mean(np.sum((estimate - truth)[10:] ** 2, axis=1))
    assert abs(error - expected) < 0.03 * expected
    single(kbr.predict(filt, run, 2).weights)
    single(kbr.init_filter(filt, kbr.embed(kernel, jnp.asarray(states[:5], jnp.float32))))
    first = jnp.asarray(sequence[0], jnp.float32)
    state, _ = single(kbr.init_from_observation(filt, first, regularizer=epsilon))
    single(kbr.filter_step(filt, state, jnp.asarray(sequence[1], jnp.float32)))


@pytest.mark.parametrize("kind", ["plain", "cells", "importance"])
def test_a_hundred_steps_on_moments(kind):
    states, observations = rotation(120, 1)
    truth, sequence = rotation(100, 2)
    expected = numpy_filter_error(states, observations, truth, sequence, 0.5, 1e-3, 1e-3)
    kernel, states, observations = (
        kbr.Gaussian(0.5),
        jnp.asarray(states, jnp.float32),
        jnp.asarray(observations, jnp.float32),
    )
    s, o, s_next = states[:-1], observations[:-1], states[1:]
    landmarks = [kbr.greedy_landmarks(kernel, p, rank=60) for p in (s, o)]
    cells = None if kind == "plain" else kbr.soft_partition(kernel, kbr.Landmarks(s))
    maps = kbr.moments.moment_maps(kernel, kernel, *landmarks, cells=cells, shift=True)
    moments = kbr.moments.collect_moments(maps, s, o, s_next)
    filt = kbr.KernelBayesFilter(
        kbr.moments.fit_conditional(moments, regularizer=1e-3),
        None,
        regularizer=1e-2 if kind == "importance" else 1e-3,
        estimator="importance" if kind == "importance" else "pairs",
        clipping=kbr.Clipping(False, 0.0) if kind == "plain" else kbr.Clipping(),
        shift=True,
    )
    run = single(kbr.run_filter(filt, jnp.asarray(sequence, jnp.float32)))
    estimate = np.asarray(single(kbr.state_mean(filt, run)), np.float64)
    error = np.mean(np.sum((estimate - truth)[10:] ** 2, axis=1))
    assert error < (1.05 if kind == "cells" else 1.3) * expected
    single((kbr.belief(filt, run).weights, kbr.predict(filt, run, 2).weights, moments))


def test_rules_on_moments():
    landmarks = [kbr.Landmarks(a[:20]) for a in (X, Y)]
    moments = kbr.moments.collect_moments(kbr.moments.moment_maps(KERNEL, KERNEL, *landmarks), X, Y)
    model = kbr.moments.fit_conditional(moments, regularizer=EPSILON)
    weights_model = kbr.fit_conditional(
        KERNEL,
        KERNEL,
        X,
        Y,
        regularizer=EPSILON,
        landmarks_x=landmarks[0],
        landmarks_y=landmarks[1],
    )
    for rule in (
        lambda m: kbr.sum_rule(m, PRIOR),
        lambda m: kbr.bayes_rule(m, PRIOR, Y[0], regularizer=DELTA, **as_printed("pairs")),
        lambda m: kbr.condition(m, X[:3]),
    ):
        close(kbr.evaluate(rule(model), X[:20]), kbr.evaluate(rule(weights_model), X[:20]), 2e-2)
    single(kbr.chain_rule(model, PRIOR).weights)


@pytest.mark.parametrize("estimator", ["affine", "song2009"])
def test_a_hundred_steps_of_the_filter_of_2009(estimator):
    states, observations = rotation(120, 1)
    sequence = jnp.asarray(rotation(100, 2)[1], jnp.float32)
    data = jnp.asarray(states, jnp.float32), jnp.asarray(observations, jnp.float32)
    filt = kbr.fit_conditional_embedding_filter(
        kbr.Gaussian(0.5), kbr.Gaussian(0.5), *data, regularizer=1e-3, estimator=estimator
    )
    run = kbr.run_filter(filt, sequence)
    single((run.weights, run.predictive_value, kbr.predict(filt, run).weights))
    close(jnp.sum(run.weights, axis=1), np.full(100, float(estimator == "affine")), 1e-4)


def test_the_gradient_of_a_run_of_the_filter():
    states, observations = (jnp.asarray(a, jnp.float32) for a in rotation(40, 1))
    sequence = jnp.asarray(rotation(100, 2)[1], jnp.float32)

    def loss(h, epsilon, delta):
        kernel = kbr.Gaussian(h)
        options = {"regularizer": epsilon, "posterior_regularizer": delta}
        filt = kbr.fit_filter(kernel, kernel, states, observations, **options)
        return jnp.mean((kbr.state_mean(filt, kbr.run_filter(filt, sequence)) - sequence) ** 2)

    values = (jnp.asarray(v, jnp.float32) for v in (0.5, 1e-2, 1e-2))
    single(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*values))


def test_losses_and_their_gradients():
    states, observations = (jnp.asarray(a, jnp.float32) for a in rotation(40, 1))
    truth, seen = (jnp.asarray(a, jnp.float32) for a in rotation(20, 2))
    mask = jnp.arange(20) > 5

    def losses(p):
        kernel = kbr.Gaussian(p["h"])
        options = {"regularizer": p["epsilon"]}
        model = kbr.fit_conditional(kernel, kernel, X, Y, **options)
        low = kbr.fit_conditional(kernel, kernel, X, Y, landmarks_x=10, landmarks_y=10, **options)
        filt = kbr.fit_filter(
            kernel, kernel, states, observations, posterior_regularizer=p["delta"], **options
        )
        return {
            "regression": kbr.regression_loss(model, U, U, kernel=KERNEL),
            "leave one out": kbr.leave_out_loss(model, kernel=KERNEL),
            "leave one out, landmarks": kbr.leave_out_loss(low, kernel=kernel),
            "marginal": kbr.tuning.marginal_loss(
                model, U, U, regularizer=p["delta"], kernel=KERNEL
            ),
            "filter": kbr.filter_loss(filt, truth, seen, counted=mask, checkpoint_every=7),
            "filter, kernel": kbr.filter_loss(filt, truth, seen, kernel=KERNEL),
            "power": kbr.tuning.mmd_power(kernel, X, Y),
            "mmd": kbr.embedding.squared_mmd(kbr.sum_rule(model, PRIOR), kbr.embed(kernel, Y)),
        }

    p = jax.tree.map(jnp.float32, {"h": 0.6, "epsilon": 1e-2, "delta": 1e-2})
    values, gradients = jax.jit(lambda p: (losses(p), jax.jacrev(losses)(p)))(p)
    single((values, gradients))
    assert float(values["filter"]) < 0.2 and 0 < float(values["leave one out"]) < 1


def test_learning():
    def loss(p):
        return kbr.leave_out_loss(
            kbr.fit_conditional(kbr.Gaussian(p["h"]), KERNEL, X, Y, regularizer=p["epsilon"])
        )

    start = {"h": jnp.full(2, 3.0), "epsilon": 0.1}
    tuned = single(
        kbr.tune(loss, start, optax.adam(0.1), num_steps=20, positive=lambda p: p, progress=False)
    )
    assert tuned.value < tuned.history.loss[0]


SETS = kbr.dynamics.sample_sequence(
    jnp.asarray(np.random.default_rng(1).normal(size=(5, 6, 2)), jnp.float32)
)


@pytest.mark.parametrize("form", ["next", "change"])
def test_dynamics_of_distributions(form):
    points = np.asarray(SETS.points, np.float64)
    gram = np.array([[gaussian(a, b).mean() for b in points] for a in points])
    model = kbr.dynamics.fit_dynamics(KERNEL, SETS, regularizer=0.05, form=form)
    close(model.gram, gram, 1e-5)
    rates = np.linalg.solve(gram[:-1, :-1] + 0.05 * np.eye(4), gram[:-1, -1])
    ahead, behind = np.append(0, rates), np.append(rates, 0)
    close(
        kbr.dynamics.forecast_coefficients(model)[0],
        ahead if form == "next" else np.eye(5)[-1] + ahead - behind,
        1e-4,
    )
    single(
        (
            kbr.dynamics.extrapolate(model, 2, estimator="ridge").weights,
            kbr.dynamics.leave_one_out_errors(model),
            kbr.dynamics.rolling_origin_errors(model),
        )
    )
    single(
        (
            kbr.dynamics.stacked_forecast(model).coefficients,
            kbr.dynamics.sampling_noise(KERNEL, SETS),
        )
    )


@pytest.mark.parametrize("ridge", [3e-6, 1e-5])
def test_leaving_a_step_out_with_a_tiny_ridge(ridge):
    """The first version dropped eigenvalues up to eps times the largest: .017 for .014 at 3e-6."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(30, 50, 1)) + 0.4 * np.arange(30)[:, None, None] / 30
    points[7] = points[20]
    gram = np.float32([[gaussian(a, b).mean() for b in points] for a in points])
    model = kbr.dynamics.fit_dynamics(KERNEL, None, gram=jnp.asarray(gram), regularizer=ridge)
    weights = np.linalg.inv(gram[:-1, :-1].astype(float) + ridge * np.eye(29))
    left_out = weights / np.diagonal(weights)[:, None]
    errors = np.einsum("ts,tu,su->t", left_out, left_out, gram[1:, 1:].astype(float))
    found = np.mean(kbr.dynamics.leave_one_out_errors(model))
    np.testing.assert_allclose(found, errors.mean(), rtol=0.1)


@pytest.mark.parametrize("rule", ["greedy", "chen2010", "line-search", "min-norm-point", "sbq"])
def test_herding(rule):
    embedding = kbr.embed(KERNEL, X)
    found = single(kbr.herd(embedding, num_points=8, rule=rule))
    index, weights = np.asarray(found.index), np.asarray(found.embedding.weights, np.float64)
    expected = weights @ GRAM_X[np.ix_(index, index)] @ weights - 2 * weights @ GRAM_X[index].mean(
        1
    )
    close(found.objective[-1], expected, 1e-5)


def test_herding_in_continuous_space():
    found = single(
        kbr.herding.herd_continuous(kbr.embed(KERNEL, X), num_points=3, num_steps=20, num_starts=2)
    )
    assert np.all(np.diff(found.objective) < 0)


def test_embedded_gaussians():
    mixture = kbr.experimental.gaussian_mixture(
        jnp.zeros((1, 2), jnp.float32), jnp.ones(1, jnp.float32)
    )
    values = np.exp(-(X64**2).sum(1) / (2 * (H**2 + 1))) * H**2 / (H**2 + 1)
    close(kbr.experimental.evaluate_mixture(KERNEL, mixture, X), values, 1e-5)
    single(kbr.experimental.mmd_mixture(kbr.embed(KERNEL, X), mixture))


@pytest.mark.parametrize("kernel", [None, KERNEL])
def test_predicted_classifier(kernel):
    weights = jnp.asarray(np.random.default_rng(1).normal(size=N) / N + 1 / N, jnp.float32)
    svm = kbr.dynamics.fit_predicted_svm(X, LABELS, weights, penalty=3.0, kernel=kernel)
    single((svm.coefficients, svm.intercepts))
    assert np.all(svm.converged)


def test_hypotheses():
    key = jax.random.key(0)
    for test in (
        kbr.hypotheses.two_sample_test(KERNEL, X, Y, key=key, num_permutations=50),
        kbr.hypotheses.block_two_sample_test(KERNEL, X, Y, block_size=5),
        kbr.hypotheses.independence_test(KERNEL, KERNEL, X, Y, key=key, num_permutations=50),
        kbr.hypotheses.conditional_independence_test(
            KERNEL, KERNEL, KERNEL, X, Y, X[:, :1], key=key, num_draws=50
        ),
    ):
        single((test.p_value, test.statistic, test.null))  # an effect is NaN without a theory
        assert 0 < float(test.p_value) <= 1


@pytest.mark.parametrize("d", [2, 20])
def test_gradients_beside_a_point_far_away(d):
    """A sentinel 1e8 bandwidths away used to take all digits of the other points' gradients."""
    x = np.random.default_rng(0).normal(size=(5, d)).astype(np.float32)

    def gradient(rest):
        y = jnp.concatenate([jnp.asarray(x), rest])
        loss = lambda p: jnp.sum(kbr.gram(kbr.Gaussian(1.0), p, y)[:, :5])  # noqa: E731
        return jax.grad(loss)(jnp.asarray(x + 0.3))

    alone = gradient(jnp.zeros((0, d), jnp.float32))
    np.testing.assert_allclose(
        gradient(jnp.full((1, d), 1e8, jnp.float32)), alone, rtol=1e-5, atol=1e-5
    )


def test_forecasts_are_read_in_single_precision():
    held = kbr.tuning.leave_out_forecasts(MODEL)
    weights = np.asarray(held.weights, float)
    shares = weights / weights.sum(1, keepdims=True)
    assert np.all(np.diag(weights) == 0)
    apart = np.linalg.norm(Y64[:, None] - Y64, axis=2)
    expected = (shares * apart).sum(1) - ((shares @ apart) * shares).sum(1) / 2
    scores = kbr.embedding.energy_score(held, Y)
    close = {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_allclose(scores, expected, **close)
    chosen = np.asarray(kbr.embedding.probabilities(held), float)
    np.testing.assert_allclose(chosen.sum(1), 1, atol=1e-5)
    mean = chosen @ Y64
    sigma = np.sqrt(np.maximum(chosen @ Y64**2 - mean**2, 0))
    width = sigma * (1 / (chosen**2).sum(1, keepdims=True)) ** (-1 / 6)
    bumps = np.exp(-(((Y64[:, None] - U64) / width[0]) ** 2).sum(2) / 2)
    values = chosen[0] @ bumps / (2 * np.pi * width[0].prod())
    one = kbr.embed(KERNEL, Y, held.weights[0])
    found = kbr.density(one, U)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, values, **close)
    levels = kbr.cdf(one, U[:, 0], lambda y: y[0])
    quantiles = kbr.quantile(one, jnp.clip(levels, 0.01, 0.99), lambda y: y[0])
    assert levels.dtype == jnp.float32 and bool(jnp.all(jnp.isfinite(quantiles)))
    margin = kbr.tuning.conformal_margin(held, Y, 0.8)
    assert margin.shape == (2,) and margin.dtype == jnp.float32


def test_features_are_trained_in_single_precision():
    x = jnp.asarray(RNG.normal(size=(60, 3)), jnp.float32)
    start = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    net, course = kbr.learning.learn_features(
        start,
        x,
        x[:, 0],
        num_steps=12,
        num_pairs=20,
        optimizer=optax.adam(1e-2),
        key=jax.random.key(1),
        progress=False,
    )
    assert net.weight.dtype == jnp.float32 and bool(jnp.isfinite(course.value))


def test_maps_of_images_are_in_single_precision(monkeypatch):
    monkeypatch.setattr(kbr.learning._images, "STEPS", 1)
    images = jnp.asarray(RNG.normal(size=(40, 6, 6)), jnp.float32)
    found = kbr.learning.fit_image_map(
        KERNEL, images[:, 0, 0], images, images[:, 0], key=jax.random.key(0)
    )
    values = jax.vmap(found)(images)
    assert values.dtype == jnp.float32 and bool(jnp.all(jnp.isfinite(values)))


def test_causal_curves():
    """E[Y | do(a)] = a where u drives the dose and the outcome, by every estimator."""
    rng = np.random.default_rng(1)
    u, a, *noise = rng.normal(size=(6, 300))
    a, w, z = u + a, u + noise[0] / 2, u + noise[1] / 2
    y = jnp.asarray(a + u + noise[2] / 2, jnp.float32)
    a, w, z, u, iv = (jnp.asarray(x, jnp.float32) for x in (a, w, z, u, a - u + noise[3] / 2))
    doses = jnp.asarray([-1.0, 0.0, 1.0], jnp.float32)
    outcome = kbr.causal.fit_outcome_bridge(a, w, z, y)
    treatment = kbr.causal.fit_treatment_bridge(a, w, z, y)
    for model in (
        outcome,
        kbr.causal.fit_moment_bridge(a, w, z, y),
        treatment,
        kbr.causal.doubly_robust(outcome, treatment),
        kbr.causal.fit_outcome_bridge(a, u, None, y),
    ):
        close(kbr.mean(kbr.causal.intervene(model, doses)), doses, 0.25)
    band = single(kbr.causal.confidence_band(outcome, doses, key=jax.random.key(0)))
    assert bool(jnp.all((band.lower < doses) & (doses < band.upper)))
    linear = (kbr.Polynomial(degree=1),) * 2
    model = kbr.causal.fit_instrument(a, iv, y, kernels=linear)
    close(kbr.causal.structural(model, doses), doses, 0.25)


def test_a_tuple_of_one_part_inside_of_programs():
    x, kernel = jnp.arange(12.0)[:, None], kbr.TensorProduct((kbr.Gaussian(1.0),))
    expected = kbr.gram(kernel, (x,))
    np.testing.assert_allclose(jax.jit(lambda x: kbr.gram(kernel, (x,)))(x), expected)
    assert np.isfinite(jax.grad(lambda x: kbr.gram(kernel, (x,)).sum())(x)).all()


def test_default_products_of_many_parts_find_a_shift():
    """The first version had p = 1."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = jax.random.normal(keys[0], (30, 5)), jax.random.normal(keys[1], (30, 5)) + 2
    found = kbr.hypotheses.two_sample_test(None, tuple(x.T), tuple(y.T), key=keys[2])
    assert float(found.p_value) < 0.01


@pytest.mark.filterwarnings("ignore:Most digits")
@pytest.mark.parametrize("zero", [0.0, 1e3, 3e3, 1e4])
def test_a_linear_kernel_far_from_zero_still_finds_an_effect(zero):
    """The first version took a Gram matrix of few digits for a constant one: p = .5, effect 0."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (200, 2))
    arm = jax.random.bernoulli(keys[1], 0.5, (200,))
    arms = arm.astype(jnp.float32)
    y = zero + x[:, 0] + 2 * arms + jax.random.normal(keys[2], (200,)) / 2
    linear = kbr.Linear()
    found = kbr.hypotheses.treatment_effect_test(linear, x, arm, y, key=keys[3])
    assert float(found.p_value) < 1e-6 and 2 < float(found.effect) < 6
    other = kbr.hypotheses.independence_test(linear, linear, arms, y, key=keys[3])
    assert float(other.p_value) < 0.01 and float(other.effect) > 0


@pytest.mark.parametrize("bridge", ["outcome", "moment", "robust"])
def test_a_band_does_not_depend_on_the_zero_of_y(bridge):
    """The mean of the first version was off by 6 at 10 000: weights summed to 1.0006."""
    rng = np.random.default_rng(0)
    u, *noise = rng.normal(size=(5, 500))
    w, z, a = u + noise[0] / 2, u + noise[1] / 2, u + noise[2]
    parts = (jnp.asarray(part, jnp.float32) for part in (a, w, z, a - 2 * u + noise[3] / 10))
    a, w, z, y = parts
    doses = jnp.linspace(-1.5, 1.5, 4)
    names = {"outcome": "fit_outcome_bridge"}
    fit = getattr(kbr.causal, names.get(bridge, "fit_moment_bridge"))

    def band(shift):
        model = fit(a, w, z, y + shift)
        if bridge == "robust":
            model = kbr.causal.doubly_robust(
                model, kbr.causal.fit_treatment_bridge(a, w, z, y + shift)
            )
        return kbr.causal.confidence_band(model, doses, key=jax.random.key(0))

    here, there = band(0.0), band(1e4)
    np.testing.assert_allclose(there.mean - 1e4, here.mean, atol=0.05)
    np.testing.assert_allclose(there.lower - 1e4, here.lower, atol=0.05)


@pytest.mark.parametrize("name", ["independence", "change detector", "HSIC", "power"])
def test_squares_of_sizes_are_no_integers_of_32_bits(name):
    """Traced, not run: the first version divided by n (n - 1), which did not fit."""
    kernel = kbr.Gaussian(1.0)
    programs = {
        "independence": lambda x, y: kbr.hypotheses.independence_test(
            kernel, kernel, x, y, key=jax.random.key(0), num_permutations=9, landmarks=5
        ),
        "change detector": lambda x, y: kbr.hypotheses.fit_change_detector(
            kernel, x, window=5, average_run_length=100, key=jax.random.key(0)
        ),
        "HSIC": lambda x, y: kbr.hsic(kernel, kernel, x, y, unbiased=True),
        "power": lambda x, y: kbr.tuning.mmd_power(kernel, x, y),
    }
    sample = jax.ShapeDtypeStruct((50_000, 1), jnp.float32)
    found = jax.eval_shape(programs[name], sample, sample)
    assert all(leaf.dtype != jnp.float64 for leaf in jax.tree.leaves(found))


def test_truth_values_of_numpy():
    x, y = jnp.arange(20.0), jnp.ones(20).at[::2].set(0.0)
    options = {"key": jax.random.key(0), "num_permutations": 19}
    found = [
        kbr.hypotheses.two_sample_test(None, x, y, dependent=chosen, **options).p_value
        for chosen in (False, np.bool_(False))
    ]
    assert found[0] == found[1]


def test_of_equally_good_temperatures_the_nearest_to_1():
    beliefs = kbr.embed(kbr.Gaussian(1.0), jnp.zeros((1, 1)), jnp.ones((5, 1)))
    np.testing.assert_allclose(kbr.tuning.calibrate(beliefs, jnp.ones((5, 1))), 1)


def test_warnings_name_the_line_of_the_caller():
    """However deep in the library they come from."""
    narrow, key = kbr.Gaussian(1e-6), jax.random.key(0)
    for call in (
        lambda: kbr.fit_conditional(narrow, None, X, X, regularizer=1e-3),
        lambda: kbr.hypotheses.two_sample_test(narrow, X, X + 0.5, key=key),
        lambda: kbr.hypotheses.independence_test(narrow, narrow, X, X, key=key),
        lambda: kbr.fit_filter(narrow, None, X, X, regularizer=1e-3, posterior_regularizer=1e-3),
        lambda: kbr.fit_conditional(None, None, jnp.arange(60), jnp.arange(60), regularizer=1e-3),
    ):
        with pytest.warns(UserWarning) as found:
            call()
        assert {one.filename for one in found} == {__file__}


def test_the_tail_of_student_with_many_degrees():
    for degrees in (1001, 500_000, 5_000_000):
        for score in (-1.0, 0.5, 1.645, 4.0):
            found = float(student(jnp.float32(score), degrees))
            np.testing.assert_allclose(found, stats.t.sf(score, degrees), rtol=2e-4)


@pytest.mark.parametrize("unit", [1e-21, 1e-19, 1e19])
def test_tests_do_not_depend_on_units(unit):
    """The squares of such numbers leave the range of float32."""
    rng, key, unit = np.random.default_rng(0), jax.random.key(0), np.float32(unit)
    z = rng.normal(size=150)
    x, y = (jnp.asarray(z + 0.5 * rng.normal(size=150), jnp.float32) for _ in range(2))
    z = jnp.asarray(z, jnp.float32)
    test = kbr.hypotheses.conditional_independence_test
    options = {"key": key, "num_draws": 99}
    assert test(None, None, None, x, y, z * unit, **options).p_value > 0.2
    assert test(None, None, None, x * unit, z, y, **options).p_value < 0.02


@pytest.mark.parametrize("unit", [1e-9, 1e10])
def test_goodness_of_fit_in_any_units(unit):
    x = jnp.asarray(np.random.default_rng(0).normal(size=60) + 0.7, jnp.float32) * np.float32(unit)
    sigma, key = np.float32(1 / unit), jax.random.key(0)
    fit = kbr.hypotheses.goodness_of_fit_test
    assert fit(lambda p: -((p * sigma) ** 2) / 2, x, key=key, num_draws=99).p_value < 0.02


def test_a_polynomial_kernel_of_large_numbers():
    """Squares of the entries of its Gram matrix overflow."""
    rng, key = np.random.default_rng(0), jax.random.key(0)
    incomes = np.exp(10.5 + 0.6 * rng.normal(size=(2, 100))) * np.array([[1.0], [1.5]])
    x, y = jnp.asarray(incomes, jnp.float32)
    kernel = kbr.kernels.Polynomial(2)
    test = kbr.hypotheses.two_sample_test
    for options in ({}, {"landmarks": 10}, {"null": "signs"}):
        assert test(kernel, x, y, key=key, num_permutations=99, **options).p_value < 0.02
    assert kbr.hypotheses.block_two_sample_test(kernel, x, y, block_size=10).p_value < 0.1
    # Where nothing can be said, nothing is.
    cubes = kbr.kernels.Polynomial(4)
    assert np.isnan(kbr.hypotheses.independence_test(cubes, cubes, x, y, key=key).p_value)


def test_changes_of_the_mean_far_from_zero():
    rng = np.random.default_rng(0)
    series = np.concatenate([rng.normal(size=100), rng.normal(size=100) + 3])
    for offset in (0.0, 1e3):
        x = jnp.asarray(series + offset, jnp.float32)
        found = kbr.hypotheses.change_points(kbr.Linear(), x)
        assert found.changes.tolist() == [100]


def test_landmarks_of_tight_clusters_in_many_coordinates():
    """Rounding of their distances makes the landmarks' Gram matrix indefinite."""
    rng = np.random.default_rng(0)
    center = rng.normal(size=20)
    center *= 20 / np.linalg.norm(center)
    sides = np.where(np.arange(80)[:, None] % 2, center, -center)
    x = jnp.asarray(sides + 0.01 * rng.normal(size=(80, 20)), jnp.float32)

    def at_first(bandwidth, landmarks):
        kernel = kbr.Gaussian(bandwidth)
        model = kbr.fit_conditional(
            kernel, kernel, x, x[:, 0], regularizer=1e-3, landmarks_x=landmarks
        )
        return kbr.mean(kbr.condition(model, x[0]))

    exact = at_first(1.0, None)
    value, slope = jax.value_and_grad(at_first)(1.0, kbr.Landmarks(x))
    np.testing.assert_allclose(value, exact, rtol=1e-3)
    assert np.isfinite(slope)


def test_times_are_seconds_since_1970():
    sets = kbr.dynamics.sample_sequence([X, X + 0.1, X + 0.2, X + 0.3])
    times = 1.7e9 + 3600 * np.arange(4.0)
    model = kbr.dynamics.fit_dynamics(KERNEL, sets, form="change", times=times)
    np.testing.assert_array_equal(model.intervals, 3600)
    with pytest.raises(ValueError, match="`times` are dates: give numbers"):
        days = np.datetime64("2020-01-01") + np.arange(4)
        kbr.dynamics.fit_dynamics(KERNEL, sets, form="change", times=days)


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_copies_far_from_the_origin_are_at_distance_zero(offset):
    base = np.random.default_rng(0).normal(size=(7, 50))
    points = jnp.asarray((np.repeat(base, 5, axis=0) + offset).astype(np.float32))
    rows = np.asarray(points, np.float64)
    expected = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    assert np.all(np.asarray(squared_distances(points, points[:1]))[:5] == 0)
    np.testing.assert_allclose(squared_distances(points, points), expected, rtol=1e-5, atol=1e-4)
    chosen = kbr.features.kmeanspp_landmarks(None, points, rank=12, key=jax.random.key(1))
    assert int(chosen.active.sum()) == 7


@pytest.mark.parametrize("unit", [1e-30, 1e25])
def test_kmeanspp_in_any_unit(unit):
    points = jnp.asarray(unit * np.repeat(X64[:7], 3, axis=0), jnp.float32)
    chosen = kbr.features.kmeanspp_landmarks(None, points, rank=12, key=jax.random.key(1))
    assert int(chosen.active.sum()) == 7

    def moved(unit):
        points = jnp.asarray(unit * X64, jnp.float32)
        options = {"rank": 3, "key": jax.random.key(1), "num_iterations": 5}
        return np.asarray(kbr.features.kmeanspp_landmarks(None, points, **options).points) / unit

    np.testing.assert_allclose(moved(unit), moved(1.0), rtol=1e-5)


@pytest.mark.parametrize("fill", [1e18, 1e20, 1e37])
def test_one_value_that_is_far_off_leaves_units_alone(fill):
    points = jnp.asarray(X64[:, 0], jnp.float32)
    found = kbr.median_heuristic(points.at[3].set(fill))
    np.testing.assert_allclose(found, kbr.median_heuristic(points), rtol=0.1)
    atoms = jnp.asarray([0.0, 1e-30], jnp.float32)
    score = kbr.embedding.energy_score(kbr.embed(KERNEL, atoms), jnp.float32(1))
    np.testing.assert_allclose(score, 1.0)


@pytest.mark.parametrize("ridge", [1e-8, 1e-7, 1e-6])
def test_a_tiny_ridge_does_not_magnify_rounding(ridge):
    """Smooth drift: predictions were off by 157 at 1e-8 where tiny eigenvalues were inverted."""
    rng = np.random.default_rng(0)
    base, times = rng.normal(size=(20, 2)) * 0.3, 0.1 * np.arange(25)
    sets = base + np.stack([np.cos(times), np.sin(times)], 1)[:, None]
    sequence = kbr.dynamics.sample_sequence(jnp.asarray(sets, jnp.float32))
    model = kbr.dynamics.fit_dynamics(kbr.Gaussian(2.0), sequence, regularizer=ridge)
    assert np.mean(kbr.dynamics.rolling_origin_errors(model)) < 0.03


@pytest.mark.parametrize("unit", [1e-30, 1e-20, 1e20])
def test_the_median_heuristic_in_any_unit(unit):
    def median(unit):
        return np.float64(kbr.median_heuristic(jnp.asarray(unit * X64, jnp.float32))) / unit

    np.testing.assert_allclose(median(unit), median(1.0), rtol=1e-5)


def test_digits_that_are_lost_are_named():
    seconds = 1.7e9 + np.random.default_rng(0).normal(size=50)
    with pytest.warns(UserWarning, match="`points` loses its digits in float32"):
        kbr.embed(KERNEL, seconds)
    kbr.embed(KERNEL, 1e3 + X64)
    kbr.embed(KERNEL, np.c_[X64, np.full(N, 0.3)])  # a constant has none


@pytest.mark.parametrize("unit", [1e-30, 1e-19, 1e20])
def test_standard_deviations_in_any_unit(unit):
    """The first version squared them: 0 at 1e-19, infinity at 1e20."""
    found = kbr.std(kbr.embed(KERNEL, unit * X64))
    np.testing.assert_allclose(np.asarray(found, np.float64), unit * X64.std(axis=0), rtol=1e-5)


def test_standardized_residuals_in_any_unit():
    """The first version added 1.2e-7, whatever the unit: intervals held 75 for 90 %."""
    parts = [jnp.asarray(RNG.normal(size=(N, 1)) * 0.1, jnp.float32) for _ in range(3)]
    found = _standardized(*(1e-8 * part for part in parts))
    np.testing.assert_allclose(found, _standardized(*parts), rtol=1e-5)


@pytest.mark.parametrize("unit", [1e-10, 1e10])
def test_stacked_forecasts_in_any_unit(unit):
    sets = [X64[:10] + np.array([0.5 * t, 0.0]) for t in range(6)]
    found = [
        kbr.dynamics.stacked_forecast(
            kbr.dynamics.fit_dynamics(
                kbr.kernels.Linear(),
                kbr.dynamics.sample_sequence([(scale * s).astype(np.float32) for s in sets]),
            )
        ).coefficients
        for scale in (1.0, unit)
    ]
    np.testing.assert_allclose(found[1], found[0], atol=0.02)


def test_probabilities_of_a_classifier_sum_to_one():
    x, y = np.random.default_rng(0).normal(size=(2, 60, 3))
    model = ConditionalEmbeddingClassifier(kernel=KERNEL, regularizer=1e-2)
    shares = model.fit(x, np.argmax(y, axis=1)).predict_proba(x)
    assert np.all(shares <= 1) and np.allclose(shares.sum(axis=1), 1, atol=1e-12)


def test_belief_propagation_with_numpy():
    graph = kbr.propagation.pairwise_graph([[0, 1]], observed_nodes=[1])
    model = kbr.propagation.fit_belief_propagation(
        graph, KERNEL, points=[X64[:, 0], Y64[:, 0]], regularizer=EPSILON
    )
    single(model)
