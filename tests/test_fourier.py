"""Random Fourier features.

Their law, their smoothness in the bandwidth, and every place that takes them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr
from kbr_jax.features import fit_features

N, D = 12, 3
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, D)))
Y = jnp.asarray(0.7 * RNG.normal(size=(N, 2)))
ARD = jnp.asarray([0.8, 1.5, 3.0])
G = kbr.Gaussian(1.3)


def products(kernel, points, count, orthogonal=False, seed=0):
    """Kernel estimates of each frequency (of one for each term of a sum), `[count, n, n]`."""
    key, terms = (
        jax.random.key(seed),
        len(kbr.random_fourier(kernel, points, rank=8, key=jax.random.key(0)).draws),
    )
    rank = 2 * terms * count
    draws = kbr.random_fourier(kernel, points, rank=rank, key=key, orthogonal=orthogonal)
    coordinates = np.asarray(fit_features(kernel, points, draws).matrix).reshape(
        -1, terms, 2, count
    )
    return count * np.einsum("itpc,jtpc->cij", coordinates, coordinates)


KERNELS = {
    "Gaussian, ARD": (kbr.Gaussian(ARD), X),
    "Laplace, ARD": (kbr.Laplace(ARD), X),
    "Matern12": (kbr.Matern12(1.7), X),
    "Matern32": (kbr.Matern32(ARD), X),
    "Matern52": (kbr.Matern52(1.1), X),
    "sum of products": ((G + 0.5 * kbr.Matern52(2.0)) * kbr.Laplace(3.0), X),
    "tensor product": (kbr.TensorProduct((G, kbr.Laplace(1.0))), (X, Y)),
    "direct sum": (kbr.DirectSum((G, 3.0 * kbr.Matern12(1.0))), (X, Y)),
    "matrices": (kbr.Gaussian(2.0), X.reshape(4, 3, D)),
    "scalars": (kbr.Matern32(1.0), X[:, 0]),
}


def check_mean(estimates, exact):
    error = estimates.std(axis=0) / np.sqrt(len(estimates))
    assert np.all(np.abs(estimates.mean(axis=0) - exact) <= 5 * error + 1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_features_are_unbiased(name):
    kernel, points = KERNELS[name]
    estimates, exact = products(kernel, points, 2000), np.asarray(kbr.gram(kernel, points))
    check_mean(estimates, exact)
    # cos^2 + sin^2: the diagonal is exact in every draw.
    diagonals = np.broadcast_to(np.diagonal(exact), (len(estimates), len(exact)))
    np.testing.assert_allclose(np.diagonal(estimates, axis1=1, axis2=2), diagonals, rtol=1e-12)


@pytest.mark.parametrize("kernel", [G, kbr.Matern52(ARD)], ids=lambda k: type(k).__name__)
def test_orthogonal_features_are_unbiased(kernel):
    check_mean(products(kernel, X, 2000, orthogonal=True), np.asarray(kbr.gram(kernel, X)))


def off_diagonal(matrices):
    return matrices[..., ~np.eye(matrices.shape[-1], dtype=bool)]


def test_orthogonal_features_have_less_variance():
    d = 16
    points, kernel = jnp.asarray(RNG.normal(size=(8, d))), kbr.Gaussian(4.0)
    plain, orthogonal = (
        off_diagonal(
            products(kernel, points, 300 * d, flag).reshape(300, d, 8, 8).mean(axis=1).var(axis=0)
        ).mean()
        for flag in (False, True)
    )
    assert orthogonal < 0.6 * plain
    draws = kbr.random_fourier(
        kernel, points, rank=2 * d, key=jax.random.key(0), orthogonal=True
    ).draws[0][0]
    np.testing.assert_allclose(off_diagonal(np.asarray(draws @ draws.T)), 0, atol=1e-12)


def test_the_variance_is_the_documented_one_and_falls_as_one_over_the_rank():
    exact, twice, estimates = (
        np.asarray(kbr.gram(G, X)),
        np.asarray(kbr.gram(G, 2 * X)),
        products(G, X, 2**14),
    )
    for rank in (8, 128):
        variance = estimates.reshape(-1, rank // 2, N, N).mean(axis=1).var(axis=0)
        expected = (1 + twice - 2 * exact**2) / rank
        np.testing.assert_allclose(
            off_diagonal(variance).mean(), off_diagonal(expected).mean(), rtol=0.1
        )


def test_the_gradient_in_the_bandwidth_holds_the_draws_fixed():
    draws = kbr.random_fourier(kbr.Matern32(1.0), D, rank=10, key=jax.random.key(1))
    mix = jnp.asarray(RNG.normal(size=(N, 10)))

    def loss(bandwidth):
        return jnp.sum(mix * fit_features(2.0 * kbr.Matern32(bandwidth), X, draws).matrix)

    gradient = jax.grad(loss)(ARD)
    for c in range(D):
        step = 1e-6 * jnp.eye(D)[c]
        np.testing.assert_allclose(
            gradient[c], (loss(ARD + step) - loss(ARD - step)) / 2e-6, rtol=1e-6
        )


def test_features_of_new_points_and_samples():
    draws = kbr.random_fourier(G, X, rank=6, key=jax.random.key(2))
    features = fit_features(G, X, draws)
    np.testing.assert_allclose(features.coordinates(X[2:5]), features.matrix[2:5])
    np.testing.assert_allclose(features.at(X[4:]).matrix, features.matrix[4:])
    moved = fit_features(
        kbr.Gaussian(0.7), Y[:, :1] * X, draws
    )  # another bandwidth, another sample
    assert moved.matrix.shape == (N, 6) and features.frequencies is draws


def linear_kernel(draws, kernel):
    """The kernel that the features define, exactly."""
    features = fit_features(kernel, X[:1], draws)

    def k(a, b):
        both = features.coordinates(jnp.stack([a, b]))
        return both[0] @ both[1]

    return k


def test_the_rules_take_frequencies():
    kernel = kbr.Gaussian(1.0)
    draws = kbr.random_fourier(kernel, X, rank=8, key=jax.random.key(3))
    exact = linear_kernel(draws, kernel)
    low = kbr.fit_conditional(
        kernel, kernel, X, X[::-1], regularizer=0.05, landmarks_x=draws, landmarks_y=draws
    )
    dense = kbr.fit_conditional(exact, exact, X, X[::-1], regularizer=0.05)
    np.testing.assert_allclose(
        kbr.condition(low, X[:2]).weights, kbr.condition(dense, X[:2]).weights, atol=1e-9
    )
    for estimator in ("pairs", "importance"):
        options = {
            "regularizer": 0.01,
            "estimator": estimator,
            "clipping": kbr.Clipping(estimator == "importance", 0.0, False),
        }
        posteriors = [
            kbr.bayes_rule(model, kbr.embed(k, X[:4]), X[:2], **options).weights
            for model, k in ((low, kernel), (dense, exact))
        ]
        # The prior of the features' model enters by the Gaussian kernel's features too.
        np.testing.assert_allclose(posteriors[0], posteriors[1], atol=1e-8)


@pytest.mark.parametrize("fit", [kbr.fit_filter, kbr.fit_conditional_embedding_filter])
def test_the_filters_take_frequencies(fit):
    angles = 0.3 * jnp.arange(60.0)
    states = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1) + 0.05 * jnp.asarray(
        RNG.normal(size=(60, 2))
    )
    kernel = kbr.Gaussian(0.7)
    draws = kbr.random_fourier(kernel, states, rank=200, key=jax.random.key(4), orthogonal=True)
    options = {"regularizer": 1e-3} | (
        {"posterior_regularizer": 1e-3} if fit is kbr.fit_filter else {}
    )
    estimates = []
    for choice in (None, draws):
        chosen = {"landmarks_states": choice, "landmarks_observations": choice}
        filt = fit(kernel, kernel, states, states, **options, **chosen)
        run = kbr.run_filter(filt, states[:30])
        estimates.append(np.asarray(kbr.state_mean(filt, run)))
    assert np.sqrt(np.mean((estimates[0] - estimates[1])[3:] ** 2)) < 0.1


def test_one_compilation_serves_all_draws_and_bandwidths():
    traced = []

    @jax.jit
    def features(kernel, draws):
        traced.append(None)
        return fit_features(kernel, X, draws).matrix

    for seed in range(3):
        kernel = kbr.Gaussian(1.0 + seed)
        features(kernel, kbr.random_fourier(kernel, X, rank=4, key=jax.random.key(seed)))
    assert len(traced) == 1


def spectrum(kernel, points=X, rank=8, **options):
    return lambda: kbr.random_fourier(kernel, points, rank=rank, key=jax.random.key(0), **options)


def use(kernel, points, draws):
    return lambda: kbr.fit_conditional(kernel, G, points, Y, regularizer=0.1, landmarks_x=draws)


ERRORS = {
    "no spectral density": (
        spectrum(kbr.Linear()),
        "Linear has no spectral density.*Gaussian, Laplace, Matern12",
    ),
    "inside a sum": (spectrum(G + kbr.Polynomial(2)), "Polynomial has no spectral density"),
    "rational quadratic": (
        spectrum(kbr.RationalQuadratic(1.0)),
        "RationalQuadratic offers no draws",
    ),
    "callable": (
        spectrum(lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2))),
        "FunctionKernel has no spectral density",
    ),
    "orthogonal Laplace": (
        spectrum(kbr.Laplace(1.0), orthogonal=True),
        "Orthogonal .* Laplace .* product",
    ),
    "odd rank": (spectrum(G, rank=5), "`rank` must be a multiple of 2 "),
    "rank of a sum": (spectrum(G + G, rank=6), "`rank` must be a multiple of 4 .*2 terms"),
    "rank zero": (spectrum(G, rank=0), "`rank` must be an integer >= 1"),
    "dimension zero": (spectrum(G, 0), "`points` must be an integer >= 1"),
    "integers": (spectrum(G, jnp.arange(6)), "real coordinates"),
    "nan": (spectrum(G, X.at[0].set(jnp.nan)), "`points` contains NaN"),
    "other family": (
        use(kbr.Laplace(1.0), X, spectrum(G)()),
        "drawn for .*Gaussian.* kernel is of .*Laplace",
    ),
    "other shape": (use(G, X[:, :2], spectrum(G)()), "must agree"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()
