"""The kernel Stein discrepancy.

A NumPy reference from the formula, levels and power over many data sets, chains, thinning.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial
import scipy.stats
from helpers import check_gradient, closeness

import kbr_jax as kbr
from kbr_jax.hypotheses._stein import (
    goodness_of_fit_test,
    kernel_stein_discrepancy,
    multipliers,
    stein_thinning,
)
from kbr_jax.hypotheses._stein_kernel import matrix
from kbr_jax.kernels import Laplace, Matern32, Matern52, RationalQuadratic

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
X = jnp.asarray(RNG.normal(size=(13, 2)))
H = np.asarray([0.7, 1.6])
IMQ = RationalQuadratic(jnp.asarray(H), 0.5)

close = closeness(1e-9, 1e-10)


def normal(point):
    return -jnp.sum(point**2) / 2


def banana(point):
    return -(point[0] ** 2) / 2 - 2 * (point[1] - point[0] ** 2) ** 2


def mixture(point):
    return jnp.logaddexp(normal(point - 2), normal(point + 2))


def banana_score(x):
    bend = 4 * (x[:, 1] - x[:, 0] ** 2)
    return np.stack([-x[:, 0] + 2 * bend * x[:, 0], -bend], axis=1)


def reference(x, s, h=H):
    """The Stein kernel of the inverse multiquadric, pair by pair, with derivatives by hand."""
    n, d = x.shape
    h = np.broadcast_to(h, d)
    u = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            z = x[i] - x[j]
            base = 1 + np.sum(z**2 / h**2)
            k = base**-0.5
            by_x = -z / h**2 * base**-1.5
            trace = np.sum(base**-1.5 / h**2 - 3 * base**-2.5 * z**2 / h**4)
            u[i, j] = s[i] @ s[j] * k - s[i] @ by_x + s[j] @ by_x + trace
    return u


U = reference(np.asarray(X), banana_score(np.asarray(X)))


def test_the_statistic_and_its_null():
    found = goodness_of_fit_test(banana, X, key=KEY, kernel=IMQ, num_draws=300)
    off = U - np.diag(np.diag(U))
    close(found.statistic, off.sum() / 13 / 12)
    above = np.sum(np.asarray(found.null) >= float(found.statistic))
    close(found.p_value, (1 + above) / 301)
    spread = np.sqrt(2 * np.sum(off**2)) / 13 / 12
    assert abs(np.mean(found.null)) < 5 * spread / np.sqrt(300)
    close(np.std(found.null), spread, 0.2)
    assert "drawn from the density" in str(found) and "independent points" in str(found)


def test_the_discrepancy_of_weighted_points():
    weights = RNG.normal(size=(2, 13))
    close(kernel_stein_discrepancy(banana, X, IMQ), np.sqrt(U.mean()))
    found = kernel_stein_discrepancy(banana, X, IMQ, weights)
    close(found, np.sqrt(np.einsum("bi,ij,bj->b", weights, U, weights)))
    median = np.median(scipy.spatial.distance.pdist(np.asarray(X)))
    h = np.asarray(kbr.kernels.coordinate_scale(X))
    assert np.all(h == h[0])
    s = -np.asarray(X)
    close(kernel_stein_discrepancy(normal, X), np.sqrt(reference(-s, s, median).mean()))


def test_thinning_is_the_greedy_choice():
    chosen = []
    for _ in range(20):
        chosen.append(np.argmin(np.diag(U) / 2 + U[chosen].sum(axis=0)))
    np.testing.assert_array_equal(stein_thinning(banana, X, 20, IMQ), chosen)


def test_thinning_leaves_a_biased_start():
    start = jnp.linspace(8, 2, 40)[:, None]
    x = jnp.concatenate([start, jax.random.normal(KEY, (300, 1))])
    chosen = stein_thinning(normal, x, 30)
    assert np.mean(np.asarray(chosen) < 40) < 0.1
    few = kernel_stein_discrepancy(normal, x[chosen])
    assert few < kernel_stein_discrepancy(normal, x) / 3


@pytest.mark.parametrize(
    "kernel", [kbr.Gaussian(0.8), kbr.Gaussian(H), Matern52(1.3), Matern32(1.3), IMQ]
)
def test_both_ways_to_derive_a_kernel(kernel):
    """By the profile of the distance, and by pairs of points."""
    points = X, jnp.asarray(RNG.normal(size=(13, 2)))
    close(matrix(kernel, points), matrix(1.0 * kernel, points))


def test_other_kernels_and_points_that_are_matrices():
    points = tuple(jnp.asarray(RNG.normal(size=(2, 6, 2, 3))))
    flat = tuple(part.reshape(6, 6) for part in points)
    for kernel in (kbr.Gaussian(1.5), kbr.Gaussian(1.5) + RationalQuadratic(1.0, 2.0)):
        close(matrix(kernel, points), matrix(kernel, flat))
    function = kbr.kernels.as_kernel(lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2) / 4.5))
    close(matrix(function, points), matrix(kbr.Gaussian(1.5), points))


def test_many_coordinates():
    points = tuple(jnp.asarray(RNG.normal(size=(2, 7, 20))))
    close(matrix(kbr.Gaussian(3.0), points), matrix(1.0 * kbr.Gaussian(3.0), points), 1e-7)


def test_blocks_of_rows():
    x = jnp.asarray(RNG.normal(size=(600, 1)))
    u = np.asarray(matrix(kbr.Gaussian(1.0), (x, -x)))
    z = np.asarray(x - x.T)
    expected = np.exp(-(z**2) / 2) * (np.asarray(x * x.T) + 1 - 2 * z**2)
    close(u, expected)
    close(kernel_stein_discrepancy(normal, x, kbr.Gaussian(1.0)), np.sqrt(expected.mean()))


def test_gradients():
    weights = jnp.asarray(RNG.uniform(size=13))

    def loss(p):
        def density(point):
            return banana((point - p["mean"]) / p["scale"])

        kernel = RationalQuadratic(p["h"], 0.5)
        return kernel_stein_discrepancy(density, p["x"], kernel, p["weights"])

    at = {"mean": X[0], "scale": jnp.asarray(1.2), "h": jnp.asarray(H), "weights": weights}
    check_gradient(loss, {**at, "x": X}, rtol=1e-5, atol=1e-6, entries=range(0, 40, 3))
    by_pairs = jax.grad(lambda x: kernel_stein_discrepancy(banana, x, 1.0 * IMQ))(X)
    close(jax.grad(lambda x: kernel_stein_discrepancy(banana, x, IMQ))(X), by_pairs)
    assert np.all(np.isfinite(jax.grad(lambda x: kernel_stein_discrepancy(banana, x))(X)))


def test_multipliers_are_an_autoregressive_process():
    drawn = jax.vmap(lambda key: multipliers(key, 40, jnp.asarray(5.0), jnp.dtype(float)))(
        jax.random.split(KEY, 20000)
    )
    found = np.asarray(drawn.T @ drawn) / 20000
    lags = np.abs(np.arange(40)[:, None] - np.arange(40))
    close(found, np.exp(-lags / 5), 0.0, 0.05)


# ---- level and power over many data sets, in one program for both

REPETITIONS, DRAWS, LEVEL = 300, 99, 0.1


def rejections(log_density, draw, count=REPETITIONS, **options):
    """The share of rejections as a function of what `draw` takes besides a key."""

    def test(value, key):
        data, signs = jax.random.split(key)
        return goodness_of_fit_test(
            log_density, draw(data, value), key=signs, num_draws=DRAWS, **options
        ).p_value

    keys = jax.random.split(jax.random.key(1), count)
    program = jax.jit(lambda value: jax.lax.map(partial(test, value), keys, batch_size=50))
    return lambda value: np.mean(np.asarray(program(value)) <= LEVEL)


MOST = scipy.stats.binom.ppf(0.999, REPETITIONS, LEVEL) / REPETITIONS


def of_banana(key, bend):
    z = jax.random.normal(key, (50, 2))
    return jnp.stack([z[:, 0], bend * z[:, 0] ** 2 + z[:, 1] / 2], axis=1)


def of_mixture(key, spread):
    side, noise = jax.random.split(key)
    sides = jax.random.rademacher(side, (50, 1), float)
    return 2 * sides + spread * jax.random.normal(noise, (50, 1))


def of_normal(key, shift):
    return jax.random.normal(key, (20, 1)) + shift


def of_chain(key, shift):
    ones = multipliers(key, 100, jnp.asarray(-1 / np.log(0.8)), jnp.dtype(float))
    return ones[:, None] + shift


@pytest.mark.parametrize(
    ("log_density", "draw", "level", "power", "least"),
    [
        (normal, of_normal, 0.0, 0.8, 0.01),
        (banana, of_banana, 1.0, 0.5, 0.03),
        (mixture, of_mixture, 1.0, 0.4, 0.01),
    ],
    ids=["normal", "banana", "mixture"],
)
def test_level_and_power(log_density, draw, level, power, least):
    share = rejections(log_density, draw)
    assert least < share(level) <= MOST
    assert share(power) > 0.8


def test_level_and_power_for_a_chain():
    share = rejections(normal, of_chain, 200, dependent=True, kernel=kbr.Gaussian(1.0))
    most = scipy.stats.binom.ppf(0.999, 200, LEVEL) / 200
    assert share(0.0) <= most + 0.05  # short chains: .12
    assert share(1.5) > 0.6


def test_a_chain_as_if_its_points_were_independent():
    assert rejections(normal, of_chain, 200, kernel=kbr.Gaussian(1.0))(0.0) > 0.4


# ---- edges


def test_several_kernels_and_a_known_length():
    found = goodness_of_fit_test(banana, X, key=KEY, num_draws=50)
    assert len(found.kernels) == 5 and 0 <= int(found.best) < 5
    found = goodness_of_fit_test(normal, X, key=KEY, num_draws=50, dependent=3)
    assert "stationary chains" in str(found)


def test_ties_and_small_samples_are_not_significant():
    assert goodness_of_fit_test(normal, jnp.zeros((30, 1)), key=KEY, dependent=True).p_value > 0.01
    assert goodness_of_fit_test(normal, X[:2], key=KEY).p_value >= 0.4
    flat = goodness_of_fit_test(lambda p: 0.0 * jnp.sum(p), X, key=KEY, kernel=lambda x, y: x @ y)
    assert flat.statistic.shape == ()


def test_float32_and_numbers():
    x = X.astype(jnp.float32)
    found = goodness_of_fit_test(banana, x, key=KEY, kernel=IMQ)
    assert found.p_value.dtype == found.null.dtype == jnp.float32
    close(found.statistic, goodness_of_fit_test(banana, X, key=KEY, kernel=IMQ).statistic, 1e-4)
    close(kernel_stein_discrepancy(banana, x, 1.0 * IMQ), np.sqrt(U.mean()), 1e-4)
    for dependent in (True, 2):
        found = goodness_of_fit_test(normal, x[:, 0], key=KEY, dependent=dependent)
        assert found.p_value.dtype == jnp.float32
    assert stein_thinning(normal, x[:, 0], 3).shape == (3,)


def test_a_batch_of_samples():
    batch = jnp.stack([X, X + 0.5])

    def test(x):
        return goodness_of_fit_test(banana, x, key=KEY, num_draws=50).p_value

    close(jax.jit(jax.vmap(test))(batch), [test(x) for x in batch])


def outside(point):
    return jnp.where(point[0] > 0, jnp.sum(jnp.log(jnp.abs(point))), -jnp.inf)


def test_errors():
    for call in (
        lambda p, x: goodness_of_fit_test(p, x, key=KEY),
        kernel_stein_discrepancy,
        lambda p, x: stein_thinning(p, x, 3),
    ):
        with pytest.raises(ValueError, match=r"`log_density` is -inf at .* outside the support"):
            call(outside, X)
        with pytest.raises(ValueError, match=r"`log_density` is NaN or infinite at 13 of 13"):
            call(lambda p: jnp.log(-1 - jnp.sum(p**2)), X)
        with pytest.raises(ValueError, match="gradient of `log_density` is NaN or infinite at 1"):
            call(lambda p: -jnp.sqrt(jnp.sum(p**2)), X.at[2].set(0))
        with pytest.raises(ValueError, match="one real number"):
            call(lambda p: -p, X)
        with pytest.raises(ValueError, match="real coordinates"):
            call(normal, jnp.arange(3))
        with pytest.raises(ValueError, match="`x` contains NaN"):
            call(normal, X.at[0].set(jnp.nan))
    with pytest.raises(ValueError, match="at least 2"):
        goodness_of_fit_test(normal, X[:1], key=KEY)
    with pytest.raises(ValueError, match="empty list"):
        goodness_of_fit_test(normal, X, key=KEY, kernel=[])
    with pytest.raises(ValueError, match="`dependent`"):
        goodness_of_fit_test(normal, X, key=KEY, dependent=0)
    for kernel in (Laplace(1.0), 2.0 * (kbr.Gaussian(1.0) + Laplace(1.0))):
        with pytest.raises(ValueError, match="Laplace has a kink"):
            kernel_stein_discrepancy(normal, X, kernel)


def test_under_jit_what_is_not_finite_gives_nan():
    found = jax.jit(lambda x: goodness_of_fit_test(outside, x, key=KEY, num_draws=20).p_value)(X)
    assert np.isnan(found)
    assert np.isnan(jax.jit(lambda x: kernel_stein_discrepancy(outside, x))(X))
