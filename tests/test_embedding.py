"""Embeddings, distances, joint distributions and pre-images, against double sums, traces and
exhaustive searches.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness
from scipy.linalg import orthogonal_procrustes
from scipy.optimize import linear_sum_assignment

import kbr_jax as kbr
from kbr_jax._typing import with_scalars

N, M = 7, 5
KERNEL = kbr.Gaussian(1.1)
PAIR_KERNEL = kbr.TensorProduct((kbr.Gaussian(0.9), kbr.Delta()))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


close = closeness(1e-11, 1e-11, "rtol")


def gram(x, y, h=1.1):
    """The Gaussian Gram matrix in NumPy."""
    x, y = (np.asarray(part).reshape(len(part), -1) for part in (x, y))
    return np.exp(-((x[:, None] - y[None]) ** 2).sum(-1) / (2 * h**2))


def pair_gram(x, y):
    return gram(x[0], y[0], 0.9) * (np.asarray(x[1])[:, None] == np.asarray(y[1])[None])


def pairs(seed, n):
    return normal(seed, n, 2), jnp.asarray(np.random.default_rng(seed).integers(0, 2, size=n))


VECTORS = (KERNEL, gram, normal(0, N, 2), normal(1, M, 2))
TUPLES = (PAIR_KERNEL, pair_gram, pairs(2, N), pairs(3, M))


@pytest.fixture(params=["vectors", "tuples"])
def domain(request):
    """Kernel, its Gram matrix in NumPy, and two samples.

    Of vectors, and of tuples of a vector and a label.
    """
    return {"vectors": VECTORS, "tuples": TUPLES}[request.param]


@pytest.fixture(params=[(), (2, 3)], ids=str)
def batch(request):
    return request.param


def check_gradient(function, argument, seed=0, step=1e-5, rtol=1e-6):
    """Gradient against a central difference along a random direction."""
    value_and_grad = jax.jit(jax.value_and_grad(function))
    direction = jnp.asarray(np.random.default_rng(seed).normal(size=argument.shape))
    ahead, behind = (value_and_grad(argument + amount * direction)[0] for amount in (step, -step))
    slope = jnp.sum(value_and_grad(argument)[1] * direction)
    assert np.isfinite(slope)  # NaN would equal NaN
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=rtol, atol=1e-8)


# Embeddings


def test_embed_is_uniform_by_default(domain):
    kernel, _, x, _ = domain
    embedding = kbr.embed(kernel, x)
    close(embedding.weights, np.full(N, 1 / N))
    close(embedding.mass, 1)


def test_evaluate(domain, batch):
    kernel, gram_of, x, y = domain
    weights = normal(4, *batch, N)
    embedding = kbr.embed(kernel, x, weights)
    close(embedding.mass, np.asarray(weights).sum(-1))
    values = kbr.evaluate(embedding, y)
    assert values.shape == (*batch, M)
    close(values, np.asarray(weights) @ gram_of(x, y))
    single = kbr.evaluate(embedding, jax.tree.map(lambda leaf: leaf[3], y))
    assert single.shape == batch
    close(single, values[..., 3])
    close(kbr.evaluate(embedding, jax.tree.map(lambda leaf: leaf[:1], y)), values[..., :1])


def test_evaluate_on_scalar_points():
    x, z = normal(5, N), normal(6, M)
    embedding = kbr.embed(KERNEL, x)
    close(kbr.evaluate(embedding, z), gram(x, z).mean(0))
    close(kbr.evaluate(embedding, z[0]), gram(x, z).mean(0)[0])


def test_expectation(batch):
    x, weights = VECTORS[2], normal(7, *batch, N)
    embedding = kbr.embed(KERNEL, x, weights)
    points, w = np.asarray(x), np.asarray(weights)
    close(kbr.expectation(embedding, lambda p: p[0] * p[1]), w @ (points[:, 0] * points[:, 1]))
    outer = kbr.expectation(
        embedding, lambda p: {"second": p[:, None] * p[None], "above": p[0] > 0}
    )
    assert outer["second"].shape == (*batch, 2, 2)
    close(outer["second"], np.einsum("...n,ni,nj->...ij", w, points, points))
    close(outer["above"], w @ (points[:, 0] > 0))


def test_mean(batch):
    weights = jnp.abs(normal(8, *batch, N))
    w = np.asarray(weights) / np.asarray(weights).sum(-1, keepdims=True)
    embedding = kbr.embed(PAIR_KERNEL, TUPLES[2], weights)
    part = kbr.marginal(embedding, 0, kernel=kbr.Gaussian(1.0))
    average = w @ np.asarray(TUPLES[2][0])
    close(kbr.mean(part), average)
    squares = np.einsum("...n,nd->...d", w, np.asarray(TUPLES[2][0]) ** 2) - average**2
    close(kbr.variance(part), squares)
    close(kbr.std(part), np.sqrt(squares))
    with pytest.raises(ValueError, match="labels and indices have no mean"):
        kbr.mean(embedding)


def test_nothing_has_no_mean():
    nothing = kbr.embed(kbr.Gaussian(1.0), jnp.arange(3.0), jnp.asarray([1.0, 0.0, -1.0]))
    assert np.isnan(kbr.mean(nothing)) and np.isnan(kbr.variance(nothing))
    batch = kbr.embed(kbr.Gaussian(1.0), jnp.arange(3.0), jnp.stack([jnp.zeros(3), jnp.ones(3)]))
    np.testing.assert_array_equal(kbr.mean(batch), [np.nan, 1.0])


def test_draws_follow_the_nearest_distribution():
    weights = jnp.asarray([[0.5, -0.3, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]])
    embedding = kbr.embed(kbr.Delta(), jnp.arange(4), weights)
    drawn = np.asarray(kbr.sample(embedding, 4000, key=jax.random.key(0)))
    assert drawn.shape == (4000, 2) and np.all(drawn[:, 1] == 2)
    # (.5, .25, .25) / .7 less a common .143.
    close(np.bincount(drawn[:, 0], minlength=4) / 4000, [4 / 7, 0, 1.5 / 7, 1.5 / 7], 0.03)
    nothing = kbr.embed(kbr.Delta(), jnp.arange(4), jnp.asarray([0.5, -0.5, 0.0, 0.0]))
    with pytest.raises(ValueError, match="cannot be a distribution"):
        kbr.sample(nothing, 3, key=jax.random.key(0))


def test_variance_is_that_of_the_quantiles():
    """With signed weights, of vectors and in a batch; the plain second moment is negative there."""
    x, w = (np.array(part) for part in (normal(40, 30, 2), normal(41, 3, 30) / 6 + 1 / 30))
    w[0], w[1] = w[0] * (-np.abs(x[:, 0])), np.abs(w[1])
    w /= w.sum(axis=1, keepdims=True)
    assert np.any(w @ x**2 - (w @ x) ** 2 < 0) and np.all(w[1] >= 0)
    embedding = kbr.embed(kbr.Gaussian(1.0), jnp.asarray(x), jnp.asarray(w))
    levels = (np.arange(20_000) + 0.5) / 20_000
    found = np.asarray(kbr.quantile(embedding, levels))
    close(kbr.variance(embedding), found.var(axis=0), 2e-3)
    alone = kbr.embed(kbr.Gaussian(1.0), jnp.asarray(x + 1e6), jnp.asarray(w[0]))
    close(kbr.std(alone), found.std(axis=0)[0], 2e-3)
    one = kbr.embed(kbr.Gaussian(1.0), jnp.asarray(x), jnp.asarray(w[1]))
    close(kbr.variance(one), w[1] @ x**2 - (w[1] @ x) ** 2)
    slope = jax.grad(lambda w: kbr.std(kbr.Embedding(kbr.Gaussian(1.0), jnp.asarray(x), w)).sum())
    assert np.all(np.isfinite(slope(jnp.asarray(w[0]))))


def test_marginals_of_parts():
    kernel = kbr.TensorProduct((kbr.Gaussian(0.7), kbr.Delta()))
    points = jnp.asarray(normal(3, N, 2)), jnp.arange(N) % 3
    embedding = kbr.embed(kernel, points)
    first, second = kbr.marginal(embedding, 0), kbr.marginal(embedding, 1)
    close(kbr.evaluate(first, points[0]), kbr.gram(kbr.Gaussian(0.7), points[0]).mean(0))
    close(kbr.evaluate(second, points[1]), kbr.gram(kbr.Delta(), points[1]).mean(0))
    third = kbr.marginal(first, 1, kernel=kbr.Gaussian(2.0))
    close(kbr.mean(third), points[0][:, 1].mean())
    with pytest.raises(ValueError, match="Give the `kernel` of the part"):
        kbr.marginal(first, 1)
    with pytest.raises(ValueError, match="needs points that are tuples, or vectors"):
        kbr.marginal(third, 0)


def test_results_show_their_numbers():
    embedding = kbr.embed(kbr.Gaussian(0.25), jnp.asarray([1.5, 2.5]))
    for number in ("0.25", "1.5", "2.5", "0.5"):
        assert number in repr(embedding)
    assert repr(jax.jit(lambda e: e)(embedding)) == repr(embedding)


def test_models_show_their_parameters_and_no_matrix():
    x = jnp.linspace(0.0, 1.0, 20)[:, None]
    model = kbr.fit_conditional(kbr.Gaussian(0.125), kbr.Linear(), x, x, regularizer=1e-3)
    shown = repr(model)
    for part in ("bandwidth=0.125", "regularizer=0.001", "[20,1]", "mask=None"):
        assert part in shown
    assert "\n" in shown and "..." not in shown and len(shown) < 1000
    jax.make_jaxpr(lambda m: repr(m) and m.regularizer)(model)  # no number to show
    with_key = kbr.filtering.SimulatedTransition(lambda key, s: s, key=jax.random.key(0))
    assert "key<fry>[]" in with_scalars(with_key)
    filt = kbr.fit_filter(
        kbr.Gaussian(jnp.asarray([0.25])),
        kbr.Linear(),
        x,
        x,
        regularizer=1e-3,
        posterior_regularizer=1e-4,
    )
    assert "regularizer=0.0001" in repr(filt) and "bandwidth=[0.25]" in repr(filt)


def test_inner_and_norm(domain, batch):
    kernel, gram_of, x, y = domain
    w, v = normal(9, *batch, N), normal(10, *batch[-1:], M)
    p, q = kbr.embed(kernel, x, w), kbr.embed(kernel, y, v)
    expected = ((np.asarray(w) @ gram_of(x, y)) * np.asarray(v)).sum(-1)
    close(kbr.inner(p, q), expected)
    close(kbr.inner(q, p), expected)
    squared = ((np.asarray(w) @ gram_of(x, x)) * np.asarray(w)).sum(-1)
    close(kbr.embedding.squared_norm(p), squared)
    close(kbr.embedding.norm(p), np.sqrt(squared))


def test_norm_of_nothing_has_gradient_zero():
    gradient = jax.grad(lambda w: kbr.embedding.norm(kbr.embed(KERNEL, VECTORS[2], w)))(
        jnp.zeros(N)
    )
    assert not np.any(gradient)


def test_mix(domain):
    kernel, gram_of, x, y = domain
    w, v = normal(11, N), normal(12, M)
    mixture = kbr.embedding.mixture(
        [kbr.embed(kernel, x, w), kbr.embed(kernel, y, v)], jnp.asarray([0.3, -0.7])
    )
    close(
        kbr.evaluate(mixture, y),
        0.3 * np.asarray(w) @ gram_of(x, y) - 0.7 * np.asarray(v) @ gram_of(y, y),
    )
    close(mixture.weights, np.concatenate([0.3 * np.asarray(w), -0.7 * np.asarray(v)]))


def test_mix_keeps_the_dtype_of_the_weights():
    embeddings = [
        kbr.embed(KERNEL, VECTORS[2].astype(np.float32)),
        kbr.embed(KERNEL, VECTORS[3].astype(np.float32)),
    ]
    mixture = kbr.embedding.mixture(embeddings, np.array([0.25, 0.75]))
    assert mixture.weights.dtype == np.float32
    close(mixture.weights, np.repeat([0.25 / N, 0.75 / M], [N, M]), rtol=1e-6)


def test_shares_of_a_mixture_are_one_vector():
    embeddings = [kbr.embed(KERNEL, VECTORS[2][:2]), kbr.embed(KERNEL, VECTORS[2][2:4])]
    with pytest.raises(ValueError, match="shares"):
        kbr.embedding.mixture(embeddings, jnp.asarray([[0.5, 0.5], [0.1, 0.9]]))


def test_normalize(batch):
    weights = normal(13, *batch, N) + 0.5
    embedding, mass = kbr.normalize(kbr.embed(KERNEL, VECTORS[2], weights))
    close(mass, np.asarray(weights).sum(-1))
    close(embedding.mass, np.ones(batch))
    close(embedding.weights * mass[..., None], weights)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [1.0, -1.0 - 1e-12], [0.0, 0.0]])
def test_normalise_is_finite_where_weights_cancel(weights):
    def loss(w):
        return kbr.normalize(kbr.embed(KERNEL, VECTORS[2][:2], w))[0].weights

    weights = jnp.asarray(weights)
    total = jnp.sum(jnp.abs(weights))
    assert np.isfinite(loss(weights)).all() and np.isfinite(jax.jacobian(loss)(weights)).all()
    assert float(jnp.max(jnp.abs(loss(weights)))) <= (
        0.5 / np.sqrt(np.finfo(float).eps) * 1.01 if total else 0
    )


# Distances


def test_mmd_is_the_double_sum(domain, batch):
    kernel, gram_of, x, y = domain
    w, v = normal(14, *batch, N), normal(15, M)
    p, q = kbr.embed(kernel, x, w), kbr.embed(kernel, y, v)
    stacked = np.concatenate([np.asarray(w), np.broadcast_to(-np.asarray(v), (*batch, M))], axis=-1)
    points = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), x, y)
    expected = ((stacked @ gram_of(points, points)) * stacked).sum(-1)
    close(kbr.embedding.squared_mmd(p, q), expected)
    close(kbr.mmd(p, q), np.sqrt(expected))
    close(kbr.embedding.squared_mmd(q, p), expected)


def test_unbiased_mmd_is_the_u_statistic(domain):
    kernel, gram_of, x, y = domain
    within = [
        sum(k[i, j] for i, j in itertools.permutations(range(len(k)), 2))
        for k in (gram_of(x, x), gram_of(y, y))
    ]
    expected = within[0] / (N * (N - 1)) + within[1] / (M * (M - 1)) - 2 * gram_of(x, y).mean()
    close(
        kbr.embedding.squared_mmd(kbr.embed(kernel, x), kbr.embed(kernel, y), unbiased=True),
        expected,
    )


def test_unbiased_mmd_with_weights(batch):
    x, y = VECTORS[2], VECTORS[3]
    w, v = jnp.abs(normal(16, *batch, N)), jnp.abs(normal(17, M))

    def off_diagonal(weights, points):
        weights, k = np.asarray(weights), gram(points, points)
        mass2, own = weights.sum(-1) ** 2, (weights**2).sum(-1)
        double = np.einsum("...i,...j,ij->...", weights, weights, k - np.diag(np.diagonal(k)))
        return double / (mass2 - own) * mass2

    expected = (
        off_diagonal(w, x) + off_diagonal(v, y) - 2 * (np.asarray(w) @ gram(x, y) @ np.asarray(v))
    )
    close(
        kbr.embedding.squared_mmd(kbr.embed(KERNEL, x, w), kbr.embed(KERNEL, y, v), unbiased=True),
        expected,
    )


def test_unbiased_mmd_has_mean_zero_for_equal_distributions():
    x, y = normal(18, 400, N, 1), normal(19, 400, M, 1)
    sample = jax.jit(
        jax.vmap(
            lambda a, b: [
                kbr.embedding.squared_mmd(kbr.embed(KERNEL, a), kbr.embed(KERNEL, b), unbiased=flag)
                for flag in (True, False)
            ]
        )
    )
    unbiased, biased = (np.asarray(values) for values in sample(x, y))
    assert abs(unbiased.mean()) < 3 * unbiased.std() / 20
    assert biased.min() > 0 and biased.mean() > 10 * biased.std() / 20 and unbiased.min() < 0


def test_mmd_gradient_at_distance_zero():
    def distance(x):
        return kbr.mmd(kbr.embed(KERNEL, x), kbr.embed(KERNEL, jax.lax.stop_gradient(x)))

    assert not np.any(jax.grad(distance)(VECTORS[2]))
    mixed = jax.grad(lambda x: kbr.mmd(kbr.embed(KERNEL, x), kbr.embed(KERNEL, VECTORS[2][::-1])))(
        VECTORS[2]
    )
    assert np.isfinite(mixed).all()


@pytest.mark.parametrize("unbiased", [False, True])
def test_mmd_gradient(unbiased):
    q = kbr.embed(KERNEL, VECTORS[3])
    check_gradient(
        lambda x: kbr.embedding.squared_mmd(kbr.embed(KERNEL, x), q, unbiased=unbiased), VECTORS[2]
    )
    check_gradient(lambda x: kbr.mmd(kbr.embed(KERNEL, x), q), VECTORS[2])


def test_mmd_uses_one_kernel():
    x = VECTORS[2]
    p, q = kbr.embed(kbr.Gaussian(3.0), x), kbr.embed(kbr.Gaussian(0.3), x)
    for compare in (kbr.mmd, kbr.inner, kbr.embedding.squared_mmd):
        with pytest.raises(ValueError, match="different kernels"):
            compare(p, q)
    with pytest.raises(ValueError, match="different kernels"):
        kbr.witness(p, q, VECTORS[3])
    # Parameters under a trace are not looked at.
    close(jax.jit(lambda h: kbr.mmd(p, kbr.embed(kbr.Gaussian(h), x)))(3.0), 0, 1e-7)


def test_witness(domain):
    kernel, gram_of, x, y = domain
    p, q = kbr.embed(kernel, x), kbr.embed(kernel, y)
    close(kbr.witness(p, q, y), gram_of(x, y).mean(0) - gram_of(y, y).mean(0))
    expected = kbr.expectation(p, lambda z: kbr.witness(p, q, z)) - kbr.expectation(
        q, lambda z: kbr.witness(p, q, z)
    )
    close(expected, kbr.embedding.squared_mmd(p, q))


# Joint distributions

X, Y = normal(20, N, 2), normal(21, N)
GRAM_X, GRAM_Y = gram(X, X), gram(Y, Y, 0.8)


def joint(weights=None):
    return kbr.embedding.embed_joint(KERNEL, kbr.Gaussian(0.8), X, Y, weights)


def f(point):
    return jnp.sin(point[0]) + point[1]


def g(point):
    return point**2


F, G = np.sin(np.asarray(X)[:, 0]) + np.asarray(X)[:, 1], np.asarray(Y) ** 2


def test_joint_expectation_and_marginals(batch):
    weights = normal(22, *batch, N)
    pairs_ = joint(weights)
    close(pairs_.mass, np.asarray(weights).sum(-1))
    close(kbr.embedding.joint_expectation(pairs_, f, g), np.asarray(weights) @ (F * G))
    for marginal, points in zip(kbr.embedding.marginals(pairs_), (X, Y), strict=True):
        close(marginal.weights, weights)
        close(marginal.points, points)


def test_joint_embedding_with_full_weights(batch):
    weights = normal(23, *batch, N, M)
    full = kbr.embedding.JointEmbedding(KERNEL, kbr.Gaussian(0.8), X, Y[:M], weights, False)
    w = np.asarray(weights)
    close(full.mass, w.sum((-2, -1)))
    close(kbr.embedding.joint_expectation(full, f, g), np.einsum("...ij,i,j->...", w, F, G[:M]))
    first, second = kbr.embedding.marginals(full)
    close(first.weights, w.sum(-1))
    close(second.weights, w.sum(-2))
    with pytest.raises(ValueError, match="pairs"):
        kbr.embedding.cross_covariance(full)


def test_covariance_is_that_of_the_sample(batch):
    operator = kbr.embedding.cross_covariance(joint())
    close(kbr.embedding.covariance(operator, f, g), np.cov(F, G, bias=True)[0, 1])
    weights = jnp.abs(normal(24, *batch, N))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    actual = kbr.embedding.covariance(kbr.embedding.cross_covariance(joint(weights)), f, g)
    for index in np.ndindex(*batch):
        close(actual[index], np.cov(F, G, ddof=0, aweights=np.asarray(weights[index]))[0, 1])


def test_covariance_of_indicators():
    operator = kbr.embedding.cross_covariance(joint())
    above = (np.asarray(Y) > 0).astype(float)
    close(kbr.embedding.covariance(operator, f, lambda y: y > 0), np.cov(F, above, bias=True)[0, 1])
    close(kbr.embedding.joint_expectation(joint(), f, lambda y: y > 0), np.mean(F * above))


def test_hilbert_schmidt_norm_is_the_trace(batch):
    weights = normal(25, *batch, N)
    w = np.asarray(weights)
    actual = kbr.embedding.squared_hs_norm(kbr.embedding.cross_covariance(joint(weights)))
    assert actual.shape == batch
    for index in np.ndindex(*batch):
        middle = np.diag(w[index]) - np.outer(w[index], w[index])
        close(actual[index], np.trace(middle @ GRAM_X @ middle @ GRAM_Y))


def test_hilbert_schmidt_norm_is_zero_for_a_constant():
    constant = kbr.embedding.embed_joint(KERNEL, KERNEL, X, jnp.ones((N, 1)))
    close(kbr.embedding.squared_hs_norm(kbr.embedding.cross_covariance(constant)), 0, atol=1e-15)


def test_biased_hsic_is_the_trace():
    centering = np.eye(N) - 1 / N
    expected = np.trace(GRAM_X @ centering @ GRAM_Y @ centering) / N**2
    close(kbr.hsic(KERNEL, kbr.Gaussian(0.8), X, Y), expected)
    check_gradient(lambda x: kbr.hsic(KERNEL, kbr.Gaussian(0.8), x, Y), X)


def test_unbiased_hsic_is_the_u_statistic():
    # E k(x, x') l(y, y') - 2 E k(x, x') l(y, y'') + E k(x, x') l(y'', y'''), over tuples of
    # distinct indices.
    k, l = GRAM_X, GRAM_Y  # noqa: E741
    tuples = itertools.permutations(range(N), 4)
    expected = np.mean([k[a, b] * (l[a, b] - 2 * l[a, c] + l[c, d]) for a, b, c, d in tuples])
    close(kbr.hsic(KERNEL, kbr.Gaussian(0.8), X, Y, unbiased=True), expected)
    check_gradient(lambda x: kbr.hsic(KERNEL, kbr.Gaussian(0.8), x, Y, unbiased=True), X)


def test_unbiased_hsic_has_mean_zero_under_independence():
    x, y = normal(26, 400, 6, 1), normal(27, 400, 6, 1)
    values = np.asarray(
        jax.jit(jax.vmap(lambda a, b: kbr.hsic(KERNEL, KERNEL, a, b, unbiased=True)))(x, y)
    )
    assert abs(values.mean()) < 3 * values.std() / 20
    dependent = jax.jit(
        jax.vmap(lambda a, b: kbr.hsic(KERNEL, KERNEL, a, a + 0.1 * b, unbiased=True))
    )(x, y)
    assert float(jnp.mean(dependent)) > 10 * values.std() / 20


# Pre-images


def signed(seed, n=N):
    weights = np.random.default_rng(seed).normal(size=n)
    return jnp.asarray(weights / np.abs(weights).sum())


def objective(x, weights, y):
    return 1 - 2 * np.asarray(weights) @ gram(x, y)


def test_decoding_objective_is_the_distance_to_the_feature(domain, batch):
    kernel, gram_of, x, y = domain
    weights = normal(30, *batch, N)
    embedding = kbr.embed(kernel, x, weights)
    actual = kbr.embedding.decoding_objective(embedding, y)
    close(actual, np.diagonal(gram_of(y, y)) - 2 * np.asarray(weights) @ gram_of(x, y))
    point = jax.tree.map(lambda leaf: leaf[0], y)
    close(kbr.embedding.decoding_objective(embedding, point), actual[..., 0])
    feature = kbr.embed(kernel, jax.tree.map(lambda leaf: leaf[:1], y))
    close(
        kbr.embedding.squared_mmd(embedding, feature),
        actual[..., 0] + kbr.embedding.squared_norm(embedding),
    )


def test_decode_is_the_best_candidate(batch):
    x, y, weights = VECTORS[2], VECTORS[3], normal(31, *batch, N)
    embedding = kbr.embed(KERNEL, x, weights)
    close(
        kbr.decode(embedding, y),
        np.asarray(y)[np.argmin(objective(x, weights, y), axis=-1)],
        atol=0,
    )
    close(
        kbr.decode(embedding), np.asarray(x)[np.argmin(objective(x, weights, x), axis=-1)], atol=0
    )


def test_decode_tuples():
    embedding = kbr.embed(PAIR_KERNEL, TUPLES[2])
    vector, label = kbr.decode(embedding)
    best = np.argmin(1 - 2 * pair_gram(TUPLES[2], TUPLES[2]).mean(0))
    close(vector, TUPLES[2][0][best], atol=0)
    assert int(label) == int(TUPLES[2][1][best])


def test_decoding_an_embedded_point_returns_it():
    point = jnp.asarray([0.4, -0.3])
    embedding = kbr.embed(KERNEL, point[None])
    close(kbr.embedding.decode_fixed_point(embedding, point + 0.5), point)
    close(kbr.embedding.decode_gradient(embedding, (point + 0.5)[None]), point, atol=1e-4)


def test_fixed_point_finds_the_mode():
    x = 0.3 * VECTORS[2]
    embedding = kbr.embed(KERNEL, x)
    point = kbr.embedding.decode_fixed_point(embedding)
    close(jax.grad(lambda y: kbr.evaluate(embedding, y))(point), np.zeros(2), atol=1e-7)
    close(kbr.embedding.decode_gradient(embedding), point, atol=1e-3)


def test_fixed_point_with_a_bandwidth_for_each_coordinate():
    embedding = kbr.embed(kbr.Gaussian(jnp.asarray([0.8, 2.0])), 0.3 * VECTORS[2])
    point = kbr.embedding.decode_fixed_point(embedding)
    close(jax.grad(lambda y: kbr.evaluate(embedding, y))(point), np.zeros(2), atol=1e-7)


def test_fixed_point_never_rises_under_signed_weights():
    x, starts = VECTORS[2], normal(32, 40, 2)
    weights = jnp.stack([signed(seed) for seed in range(40)])

    def run(w, start):
        embedding = kbr.embed(KERNEL, x, w)
        steps = [
            kbr.embedding.decode_fixed_point(embedding, start, num_steps=count)
            for count in (1, 2, 20)
        ]
        return jnp.stack([start, *steps])

    paths = np.asarray(jax.jit(jax.vmap(run))(weights, starts))
    assert np.isfinite(paths).all()
    values = np.stack([objective(x, w, path) for w, path in zip(weights, paths, strict=True)])
    assert (np.diff(values, axis=1) <= 1e-12).all()
    assert (values[:, -1] < values[:, 0] - 1e-3).any()


def test_fixed_point_under_vmap_is_that_of_each_embedding():
    x = VECTORS[2]
    weights = jnp.stack([signed(seed) for seed in (50, 51, 52)])
    batch = jax.vmap(
        lambda w: kbr.embedding.decode_fixed_point(kbr.embed(KERNEL, x, w), num_steps=10)
    )(weights)
    for w, point in zip(weights, batch, strict=True):
        close(
            kbr.embedding.decode_fixed_point(kbr.embed(KERNEL, x, w), num_steps=10),
            point,
            rtol=1e-6,
            atol=1e-6,
        )


@pytest.mark.parametrize("weights", [np.zeros(N), -np.ones(N)])
def test_fixed_point_stays_where_there_is_no_mass(weights):
    start = jnp.asarray([0.2, 0.1])
    close(
        kbr.embedding.decode_fixed_point(kbr.embed(KERNEL, VECTORS[2], weights), start),
        start,
        atol=0,
    )


def test_fixed_point_gradient():
    mix = normal(33, 2)
    weights = jnp.abs(signed(34))
    start = jnp.asarray([0.1, 0.1])

    def loss(w):
        return mix @ kbr.embedding.decode_fixed_point(
            kbr.embed(KERNEL, 0.3 * VECTORS[2], w), start, num_steps=5
        )

    check_gradient(loss, weights)


def test_gradient_descent_is_never_worse_than_its_starts():
    x = VECTORS[2]
    for seed, kernel in [(35, KERNEL), (36, kbr.Matern52(1.0)), (37, kbr.Matern12(1.0))]:
        embedding = kbr.embed(kernel, x, signed(seed))
        point = kbr.embedding.decode_gradient(embedding, num_steps=60)
        best = float(jnp.min(kbr.embedding.decoding_objective(embedding, x)))
        assert float(kbr.embedding.decoding_objective(embedding, point)) <= best + 1e-12


@pytest.mark.parametrize("kernel", [kbr.Linear(), kbr.Polynomial(degree=2, offset=1.0)])
def test_a_sample_point_at_the_optimum_is_no_cusp(kernel):
    def found(y):
        return kbr.embedding.decode_gradient(kbr.embed(kernel, y, jnp.full(3, 1 / 3)))

    expected = [1 / 3, 1 / 3, 1 / 3] if isinstance(kernel, kbr.Linear) else [1.0, 1.0, 1.0]
    close(jax.grad(found)(jnp.array([-1.0, 0.0, 1.0])), expected)


def test_the_cusp_of_distances_in_the_plane():
    weights = jnp.array([0.7, 0.1, 0.1, 0.1])

    def found(w):
        return kbr.embedding.decode_gradient(kbr.embed(kbr.kernels.Energy(), VECTORS[2][:4], w))

    np.testing.assert_array_equal(found(weights), VECTORS[2][0])
    close(jax.jacrev(found)(weights), np.zeros((2, 4)))


@pytest.mark.parametrize("kernel", [kbr.Matern12(1.0), kbr.Laplace(1.0), kbr.kernels.Energy()])
@pytest.mark.parametrize("find", [kbr.embedding.decode_gradient, kbr.herding.herd_continuous])
def test_a_point_at_a_cusp_moves_with_its_atom(kernel, find):
    weights = jnp.array([0.1, 0.7, 0.2])

    def found(y):
        embedding = kbr.embed(kernel, y, weights)
        if find is kbr.embedding.decode_gradient:
            return find(embedding)
        return find(embedding, num_points=1).embedding.points[0]

    y = jnp.array([0.0, 1.0, 3.0])
    close(found(y), 1.0)
    close(jax.grad(found)(y), [0.0, 1.0, 0.0])


def test_the_mode_at_an_atom_of_symmetric_data_moves_with_all_atoms():
    y = jnp.array([-1.0, 0.0, 1.0])

    def embedding(y):
        return kbr.embed(kbr.Gaussian(2.0), y, jnp.full(3, 1 / 3))

    def herded(y):
        return kbr.herding.herd_continuous(embedding(y), num_points=1).embedding.points[0]

    check_gradient(herded, y)
    close(jax.grad(lambda y: kbr.embedding.decode_gradient(embedding(y)))(y), jax.grad(herded)(y))


@pytest.mark.parametrize("unit", [1e-9, 1e9, 1e12])
def test_gradient_descent_in_any_unit(unit):
    def found(unit):
        embedding = kbr.embed(kbr.Gaussian(unit), unit * VECTORS[2], jnp.abs(signed(35)))
        return kbr.embedding.decode_gradient(embedding, learning_rate=0.05 * unit) / unit

    close(found(unit), found(1.0), rtol=1e-5)


def test_gradient_descent_under_vmap():
    x = VECTORS[2]
    weights = jnp.stack([signed(seed) for seed in (38, 39)])
    starts = VECTORS[3][:2]
    batch = jax.vmap(
        lambda w: kbr.embedding.decode_gradient(kbr.embed(KERNEL, x, w), starts, num_steps=20)
    )(weights)
    assert batch.shape == (2, 2)
    for w, point in zip(weights, batch, strict=True):
        close(
            kbr.embedding.decode_gradient(kbr.embed(KERNEL, x, w), starts, num_steps=20),
            point,
            rtol=1e-8,
            atol=1e-8,
        )


@pytest.mark.parametrize(
    "parts", [("points",), ("weights",), ("starts",), ("points", "starts")], ids=str
)
def test_decoding_is_in_the_wider_dtype(parts):
    def cast(name, array):
        return array.astype(np.float32).astype(np.float32 if name in parts else float)

    points, weights = cast("points", VECTORS[2]), cast("weights", jnp.abs(signed(70)))
    starts = cast("starts", VECTORS[3][:2])

    def decoded(points, weights, starts):
        embedding = kbr.Embedding(KERNEL, points, weights)
        return (
            kbr.embedding.decode_gradient(embedding, starts, num_steps=5),
            kbr.embedding.decode_gradient(embedding, num_steps=5),
            kbr.embedding.decode_fixed_point(embedding, starts[0], num_steps=5),
            kbr.embedding.decode_fixed_point(embedding, num_steps=5),
        )

    found = decoded(points, weights, starts)
    for point, same in zip(
        found, decoded(*(a.astype(float) for a in (points, weights, starts))), strict=True
    ):
        assert point.dtype == float
        close(point, same)


def test_learning_rates_share_one_program():
    traces = []

    def kernel(a, b):
        traces.append(None)
        return jnp.exp(-jnp.sum((a - b) ** 2))

    embedding = kbr.embed(kernel, VECTORS[2])
    slow = kbr.embedding.decode_gradient(embedding, num_steps=20, learning_rate=0.01)
    count = len(traces)
    fast = kbr.embedding.decode_gradient(embedding, num_steps=20, learning_rate=0.1)
    assert len(traces) == count and bool(jnp.any(slow != fast))


@pytest.mark.parametrize(
    "decode", [kbr.embedding.decode_gradient, kbr.embedding.decode_fixed_point]
)
@pytest.mark.parametrize("points", [jnp.arange(N), TUPLES[2]], ids=["integers", "tuples"])
def test_only_real_points_can_be_moved(decode, points):
    with pytest.raises(ValueError, match="floating-point array"):
        decode(kbr.Embedding(KERNEL, points, jnp.ones(N)))


# Embedded mixtures of Gaussians

MIXTURE = kbr.experimental.gaussian_mixture(jnp.asarray([[-3.0], [3.0]]), jnp.ones(2))


def normal_density(z, mean, variance):
    return np.exp(-((z - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)


def test_mixtures_in_a_batch():
    means, variances = normal(80, 3, 4, 2, 1), jnp.abs(normal(81, 3, 4, 2)) + 0.1
    shares, points = jnp.abs(normal(82, 3, 4, 2)), normal(83, 4, 1)
    weights = normal(84, 3, 1, 4)
    mixtures = kbr.experimental.gaussian_mixture(means, variances, shares)
    values = kbr.experimental.evaluate_mixture(KERNEL, mixtures, points)
    total = 1.21 + np.asarray(variances)[..., None, :]
    heights = normal_density(
        np.asarray(points), np.asarray(means)[..., None, :, 0], total
    ) * np.sqrt(2 * np.pi * 1.21)
    close(values, np.sum(np.asarray(shares)[..., None, :] * heights, axis=-1))
    distances = kbr.experimental.mmd_mixture(kbr.embed(KERNEL, points, weights), mixtures)
    assert distances.shape == (3, 4)
    for i, j in np.ndindex(3, 4):
        one = kbr.experimental.GaussianMixture(
            means[i, j], mixtures.covariances[i, j], shares[i, j]
        )
        close(
            distances[i, j],
            kbr.experimental.mmd_mixture(kbr.embed(KERNEL, points, weights[i, 0]), one),
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_smoothed_kl_does_not_depend_on_where_the_grid_ends(dtype):
    points = np.linspace(-5, 5, 30)
    z = np.linspace(-20, 20, 801)
    p = (normal_density(z, -3, 2) + normal_density(z, 3, 2)) / 2
    q = np.mean(normal_density(z[:, None], points, 1), axis=1)
    expected = np.sum(p / p.sum() * np.log(p / q * q.sum() / p.sum()))
    mixture = jax.tree.map(lambda leaf: leaf.astype(dtype), MIXTURE)
    sample = kbr.embed(
        2.0 * kbr.Gaussian(jnp.asarray(1.0, dtype)), jnp.asarray(points[:, None], dtype)
    )
    for end in (20, 80):
        grid = jnp.linspace(-end, end, 801, dtype=dtype)[:, None]
        close(
            kbr.experimental.smoothed_kl(mixture, sample, grid),
            expected,
            rtol=1e-4 if dtype == np.float32 else 1e-9,
        )


def test_smoothed_kl_of_distributions_far_apart():
    grid = jnp.linspace(-10, 110, 801)[:, None]
    sample = kbr.embed(kbr.Gaussian(1.0), jnp.asarray([[100.0]]))
    mixture = kbr.experimental.gaussian_mixture(jnp.zeros((1, 1)), jnp.ones(1))
    close(
        kbr.experimental.smoothed_kl(mixture, sample, grid),
        (2 + 100**2 - 1 - np.log(2)) / 2,
        rtol=1e-9,
    )


def test_smoothed_kl_is_infinite_where_the_sample_is_not_positive():
    sample = kbr.embed(KERNEL, jnp.asarray([[-3.0], [0.0], [3.0]]), jnp.asarray([1.0, -1.0, 1.0]))
    grid = jnp.linspace(-8, 8, 81)[:, None]
    assert float(kbr.experimental.smoothed_kl(MIXTURE, sample, grid)) == np.inf
    nowhere = kbr.embed(KERNEL, sample.points, jnp.full(sample.weights.shape, 0.1).at[0].set(-2.0))
    assert float(kbr.experimental.smoothed_kl(MIXTURE, nowhere, grid)) == np.inf
    unknown = kbr.embed(KERNEL, sample.points, jnp.asarray([1.0, np.nan, 1.0]))
    assert np.isnan(kbr.experimental.smoothed_kl(MIXTURE, unknown, grid))


def test_smoothed_kl_gradient():
    grid = jnp.linspace(-80, 80, 801)[:, None]
    x, weights = (
        normal(85, 6, 1),
        jnp.asarray([0.2, 0.3, 0.0, 0.25, 0.25, 0.0]),
    )  # zero weights have a gradient as well
    check_gradient(
        lambda v: kbr.experimental.smoothed_kl(MIXTURE, kbr.embed(KERNEL, v, weights), grid), x
    )
    check_gradient(
        lambda v: kbr.experimental.smoothed_kl(MIXTURE, kbr.embed(KERNEL, x, v), grid),
        weights,
        step=1e-7,
    )
    check_gradient(
        lambda v: kbr.experimental.smoothed_kl(
            kbr.experimental.gaussian_mixture(v, jnp.ones(2)), kbr.embed(KERNEL, x), grid
        ),
        MIXTURE.means,
    )


def test_smoothed_kl_wants_one_mixture_and_one_sample():
    grid, batch = jnp.linspace(-8, 8, 9)[:, None], jax.tree.map(lambda leaf: leaf[None], MIXTURE)
    sample = kbr.embed(KERNEL, grid[:3])
    with pytest.raises(ValueError, match="Use `vmap`"):
        kbr.experimental.smoothed_kl(batch, sample, grid)
    with pytest.raises(ValueError, match="`embedding` is a batch"):
        kbr.experimental.smoothed_kl(MIXTURE, kbr.embed(KERNEL, grid[:3], jnp.ones((2, 3))), grid)


# Rotations and permutations


def rotation(seed, d=3):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))
    q[:, 0] *= np.linalg.det(q)
    return q


@pytest.mark.parametrize("d", [2, 3])
def test_projection_is_a_rotation(d):
    matrices = normal(40, 20, d, d)
    turns = np.asarray(kbr.embedding.nearest_rotation(matrices))
    close(np.swapaxes(turns, 1, 2) @ turns, np.broadcast_to(np.eye(d), turns.shape))
    close(np.linalg.det(turns), np.ones(20))
    for matrix, turn in zip(np.asarray(matrices), turns, strict=True):
        close(kbr.embedding.nearest_rotation(jnp.asarray(matrix)), turn)
        if np.linalg.det(matrix) > 0:  # then the nearest orthogonal matrix is a rotation
            close(turn, orthogonal_procrustes(np.eye(d), matrix)[0], atol=1e-9)
        # No rotation nearby or anywhere else is closer.
        others = [turn @ rotation(seed, d) for seed in range(50)]
        assert max(np.sum(matrix * other) for other in others) <= np.sum(matrix * turn) + 1e-12


def test_projection_in_the_plane_is_the_best_angle():
    angles = np.linspace(0, 2 * np.pi, 20001)
    scan = np.stack(
        [
            np.stack([np.cos(angles), -np.sin(angles)], -1),
            np.stack([np.sin(angles), np.cos(angles)], -1),
        ],
        1,
    )
    for matrix in np.asarray(normal(41, 6, 2, 2)):
        best = scan[np.argmax(np.sum(scan * matrix, axis=(1, 2)))]
        close(kbr.embedding.nearest_rotation(jnp.asarray(matrix)), best, atol=1e-3)


AT = {
    "generic": np.random.default_rng(42).normal(size=(3, 3)),
    "negative determinant": np.diag([1.0, 1.0, -1.0])
    @ (np.eye(3) + 0.2 * np.random.default_rng(43).normal(size=(3, 3)))
    + np.diag([1.0, 0.5, 0.0]),
    "rotation": rotation(44),
    "scaled rotation": 0.3 * rotation(45),
    "identity": np.eye(3),
    "rank two": rotation(46) @ np.diag([2.0, 1.0, 0.0]) @ rotation(47),
}


@pytest.mark.parametrize("name", AT)
def test_gradient_of_the_projection(name):
    mix = normal(48, 3, 3)
    check_gradient(
        lambda matrix: jnp.sum(mix * kbr.embedding.nearest_rotation(matrix)), jnp.asarray(AT[name])
    )


@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((3, 3)),
        np.diag([1.0, 1.0, -1.0]),
        rotation(49) @ np.diag([1.0, 1.0, -1.0]) @ rotation(49).T,
        rotation(49) @ np.diag([1.0, 0.0, 0.0]) @ rotation(44),
    ],
)
def test_gradient_of_the_projection_stays_bounded_where_it_is_not_unique(matrix):
    jacobian = np.asarray(
        jax.jit(jax.jacobian(kbr.embedding.nearest_rotation))(jnp.asarray(matrix))
    )
    assert np.isfinite(jacobian).all() and np.abs(jacobian).max() < 10


def test_decode_rotation(batch):
    points = np.stack([rotation(seed) for seed in range(60, 60 + N)])
    weights = jnp.abs(normal(62, *batch, N))
    turns = kbr.decode_rotation(kbr.embed(kbr.Linear(), jnp.asarray(points), weights))
    assert turns.shape == (*batch, 3, 3)
    sums = np.einsum("...n,nij->...ij", np.asarray(weights), points)
    close(turns, kbr.embedding.nearest_rotation(jnp.asarray(sums)))
    candidates = np.stack([rotation(seed) for seed in range(200)])
    scores = np.einsum("...ij,cij->...c", sums, candidates)
    assert (scores.max(-1) <= np.sum(sums * np.asarray(turns), axis=(-2, -1)) + 1e-12).all()


def test_decode_rotation_of_one_point_is_that_point():
    points = jnp.asarray(rotation(63)[None])
    close(kbr.decode_rotation(kbr.embed(kbr.Gaussian(0.5), points)), points[0])


@pytest.mark.parametrize("d", [1, 4])
def test_decode_permutation_is_the_best_assignment(d):
    rng = np.random.default_rng(64)
    decode = jax.jit(lambda p, w: kbr.embedding.decode_permutation(kbr.embed(kbr.Linear(), p, w)))
    for _ in range(5):
        points = np.stack([np.eye(d)[rng.permutation(d)] for _ in range(N)])
        weights = rng.normal(size=N)
        average = np.einsum("n,nij->ij", weights, points)
        actual = np.asarray(decode(jnp.asarray(points), jnp.asarray(weights)))
        assert set(np.unique(actual)) <= {0.0, 1.0}
        close(actual.sum(0), np.ones(d))
        close(actual.sum(1), np.ones(d))
        rows, columns = linear_sum_assignment(-average)
        close(np.sum(average * actual), average[rows, columns].sum())
        if d <= 4:
            best = max(
                sum(average[i, p[i]] for i in range(d)) for p in itertools.permutations(range(d))
            )
            close(np.sum(average * actual), best)
    assert np.all(np.isnan(decode(jnp.asarray(points), jnp.asarray(weights).at[0].set(jnp.nan))))


def test_a_rotation_of_negative_mass_maximizes_the_objective():
    """Of random signed weights: no other rotation has a larger trace."""
    rng = np.random.default_rng(0)
    rotations = kbr.embedding.nearest_rotation(jnp.asarray(rng.normal(size=(30, 3, 3))))
    for _ in range(10):
        weights = jnp.asarray(rng.normal(size=30))
        found = kbr.decode_rotation(kbr.embed(kbr.Gaussian(1.0), rotations, weights))
        total = np.tensordot(np.asarray(weights), np.asarray(rotations), 1)
        assert np.sum(total * found) >= np.max(np.sum(total * np.asarray(rotations), (1, 2))) - 1e-9


@pytest.mark.parametrize("mass", [1.0, 0.7, -0.3])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_hs_norm_of_weights_of_any_mass(mass, offset):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 12, 2)) + offset
    w = rng.normal(size=(3, 12))
    w = w / w.sum(1, keepdims=True) * mass
    k, l = x @ x.T, y @ y.T  # noqa: E741
    expected = []
    for row in w:
        b = np.diag(row) - np.outer(row, row)
        expected.append(np.trace(b @ k @ b @ l))
    kernel = kbr.Linear()
    joint = kbr.embedding.embed_joint(
        kernel, kernel, jnp.asarray(x), jnp.asarray(y), jnp.asarray(w)
    )
    found = kbr.embedding.squared_hs_norm(kbr.embedding.cross_covariance(joint))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * offset**4)


@pytest.mark.parametrize("unbiased", [False, True])
def test_hsic_far_from_the_origin(unbiased):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 200, 2)).astype(np.float32)
    kernel = kbr.Linear()

    def at(offset):
        x, y = jnp.asarray(a) + offset, jnp.asarray(b + a) + offset
        return kbr.hsic(kernel, kernel, x, y, unbiased=unbiased)

    np.testing.assert_allclose(at(300.0), at(0.0), rtol=5e-2)


@pytest.mark.parametrize("kernel", [kbr.Matern12, kbr.Matern32, kbr.Matern52, kbr.Gaussian])
def test_a_point_that_is_nan_is_at_no_distance(kernel):
    gram = kernel(1.0).gram(jnp.asarray([0.0, jnp.nan, 2.0]), jnp.asarray([0.0, 2.0]))
    np.testing.assert_array_equal(np.isnan(gram).all(1), [False, True, False])


def test_the_spread_of_a_belief_without_weights_is_unknown():
    nothing = kbr.embed(kbr.Gaussian(1.0), jnp.arange(4.0), jnp.zeros(4))
    assert np.isnan(kbr.embedding.variance(nothing)) and np.isnan(kbr.embedding.std(nothing))


def test_a_part_that_is_not_there():
    embedding = kbr.embed(kbr.Gaussian(1.0), jnp.ones((4, 2)))
    with pytest.raises(ValueError, match="`part` must be the number of one of 2 parts, got 5"):
        kbr.marginal(embedding, 5, kernel=kbr.Gaussian(1.0))


def test_credible_levels_of_points_outside_the_domain():
    belief = kbr.embed(kbr.Gaussian(1.0), jnp.linspace(0, 2, 9))
    level = kbr.embedding.credible_level
    np.testing.assert_allclose(level(belief, 1), level(belief, 1.0))
    with pytest.raises(ValueError, match="`points` has dtype float"):
        level(kbr.embed(kbr.Delta(), jnp.arange(9)), 1.5)
    with pytest.raises(ValueError, match="more axes"):
        kbr.embedding.credible_level(
            kbr.embed(kbr.Gaussian(1.0), jnp.arange(4.0), jnp.ones((2, 2, 4))), jnp.ones(2)
        )


def test_nan_weights_have_no_best_point():
    bad = kbr.embed(kbr.Gaussian(1.0), jnp.arange(5.0) + 3, jnp.full(5, jnp.nan))
    decoders = kbr.decode, kbr.embedding.decode_fixed_point, kbr.embedding.decode_gradient
    assert all(np.isnan(decode(bad)) for decode in decoders)
    weights = jnp.stack([jnp.full(5, jnp.nan), jnp.eye(5)[2]])
    batch = kbr.decode(kbr.Embedding(bad.kernel, bad.points, weights))
    assert np.isnan(batch[0]) and batch[1] == 5
    with pytest.raises(ValueError, match="no label"):
        kbr.decode(kbr.embed(kbr.Delta(), jnp.arange(5), jnp.full(5, jnp.nan)))


def test_credible_levels_of_ties():
    """Of two labels the more likely one is in every region."""
    rng = np.random.default_rng(60)
    labels, weights = rng.integers(0, 2, 300), rng.random((50, 300))
    weights /= weights.sum(axis=1, keepdims=True)
    shares = np.stack([weights[:, labels == label].sum(axis=1) for label in (0, 1)], axis=1)
    for dtype in (jnp.float32, jnp.float64):
        beliefs = kbr.embed(kbr.Delta(), jnp.asarray(labels), jnp.asarray(weights, dtype))
        found = kbr.embedding.credible_level(beliefs, jnp.asarray(shares.argmax(axis=1)))
        np.testing.assert_array_equal(found, 0)
        found = kbr.embedding.credible_level(beliefs, jnp.asarray(shares.argmin(axis=1)))
        close(found, shares.max(axis=1), 1e-5)


def test_weights_get_the_precision_of_the_points():
    points = jnp.asarray(1e6 + np.random.default_rng(61).normal(size=200) * 0.01)
    embedding = kbr.embed(kbr.Gaussian(0.01), points, jnp.full(200, 1 / 200, jnp.float32))
    close(kbr.variance(embedding), np.var(np.asarray(points)), 1e-5)


def test_the_deviation_of_a_narrow_belief_keeps_its_digits():
    x = np.random.default_rng(0).uniform(0, 1, 20_000)
    w = np.exp(-0.5 * ((x - 0.9) / 1e-3) ** 2)
    w = w / w.sum()
    belief = kbr.embed(kbr.Gaussian(0.1), jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
    expected = np.sqrt((w * (x - (w * x).sum()) ** 2).sum())
    np.testing.assert_allclose(kbr.std(belief), expected, rtol=1e-3)


@pytest.mark.parametrize("unit", [1e-20, 1e15])
def test_densities_follow_units(unit):
    z = jnp.asarray(np.random.default_rng(0).normal(size=300), jnp.float32)
    first, other = (kbr.embed(kbr.Gaussian(s), z * jnp.float32(s)) for s in (1.0, unit))
    density = kbr.density(other, z[0] * jnp.float32(unit)) * jnp.float32(unit)
    np.testing.assert_allclose(density, kbr.density(first, z[0]), rtol=1e-4)


def test_the_gradient_of_a_decoded_point_on_a_constant_coordinate():
    points = jax.random.normal(jax.random.key(0), (20, 2)).at[:, 1].set(3.0)

    def total(weights):
        return jnp.sum(kbr.embedding.decode_gradient(kbr.embed(kbr.Gaussian(1.0), points, weights)))

    weights, move = jnp.full(20, 0.05), jnp.zeros(20).at[0].set(1e-4)
    slope = (total(weights + move) - total(weights - move)) / 2e-4
    np.testing.assert_allclose(jax.grad(total)(weights)[0], slope, rtol=2e-3)


def test_the_gradient_of_a_variance_is_that_of_its_own_belief():
    """Beside weights of any sign the first version halved it at weight 0."""
    points = jnp.asarray([0.0, 1.0, 2.0, 4.0])
    own, signed = jnp.asarray([0.3, 0.3, 0.4, 0.0]), jnp.asarray([0.5, -0.2, 0.4, 0.3])

    def spread(weights):
        return kbr.variance(kbr.embed(kbr.Gaussian(1.0), points, weights))

    alone = jax.grad(spread)(own)
    beside = jax.grad(lambda w: spread(jnp.stack([w, signed]))[0])(own)
    np.testing.assert_allclose(beside, alone, rtol=1e-12)


def test_scores_take_a_point_as_a_list():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2)))
    belief = kbr.embed(kbr.Gaussian(1.0), x)
    for read in (kbr.embedding.energy_score, kbr.embedding.log_score, kbr.embedding.credible_level):
        assert read(belief, [0.1, 0.2]) == read(belief, jnp.asarray([0.1, 0.2]))


def test_embeddings_of_vmap_are_read_inside_of_it():
    """Each of b embeddings has points of its own, which is no batch of weights."""
    points = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)))
    many = jax.vmap(lambda x: kbr.embed(kbr.Gaussian(1.0), x))(points)
    for read in (kbr.mean, kbr.std, kbr.credible_interval, kbr.embedding.probabilities):
        with pytest.raises(ValueError, match="read the number inside"):
            read(many)
    with pytest.raises(ValueError, match="read the number inside"):
        kbr.expectation(many, jnp.sin)
    close(jax.vmap(lambda x: kbr.mean(kbr.embed(kbr.Gaussian(1.0), x)))(points), points.mean(1))


def test_one_kernel_in_two_precisions_is_one_kernel():
    kernel = kbr.Gaussian(0.7)
    x = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
    model = kbr.fit_conditional(kernel, kernel, x, x, regularizer=1e-2)
    assert np.isfinite(kbr.mmd(kbr.condition(model, x[0]), kbr.embed(kernel, x)))
    with pytest.raises(ValueError, match="different kernels"):
        kbr.mmd(kbr.condition(model, x[0]), kbr.embed(kbr.Gaussian(0.8), x))


def test_the_score_of_a_label_by_a_belief_of_nothing_is_nan():
    nothing = kbr.embed(kbr.Delta(), np.array([0, 1, 1]), np.array([[1e-3, 0, -1e-4]]))
    assert np.all(np.isnan(kbr.embedding.log_score(nothing, np.array([5]))))
