"""Tests of series, collections of kernels for independence, and effects, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import closeness, gaussian

import kbr_jax as kbr
from kbr_jax.hypotheses._series import autocorrelation_time, block_length

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
G = kbr.Gaussian(1.0)
close = closeness(1e-9, 1e-10)


def center(gram):
    h = np.eye(len(gram)) - 1 / len(gram)
    return h @ gram @ h


def normalized(k, l):  # noqa: E741
    """HSIC without its mean over permutations, in units of its spread."""
    n = len(k)
    k, l = center(k), center(l)  # noqa: E741
    expected = np.trace(k) * np.trace(l) / n**2 / (n - 1)
    sides = [np.sum(m**2) - np.sum(np.diag(m) ** 2) for m in (k, l)]
    return (np.sum(k * l) / n**2 - expected) / np.sqrt(np.prod(sides)) * n * (n - 1)


def test_the_maximum_over_pairs_of_kernels():
    x, y = RNG.normal(size=(15, 2)), RNG.normal(size=(15, 1))
    y = y + x[:, :1] ** 2
    widths = (0.5, 2.0), (0.3, 1.0, 3.0)
    kernels = [[kbr.Gaussian(h) for h in own] for own in widths]
    values = np.array(
        [[normalized(gaussian(x, x, a), gaussian(y, y, b)) for b in widths[1]] for a in widths[0]]
    )
    for landmarks in (None, 15):
        found = kbr.hypotheses.independence_test(
            *kernels,
            jnp.asarray(x),
            jnp.asarray(y),
            key=KEY,
            num_permutations=50,
            landmarks=landmarks,
        )
        close(found.statistic, np.max(values), 1e-6)
        assert found.best == np.argmax(values) and len(found.kernels) == 6
        close(found.effect, np.max(values), 1e-6)
        close(found.p_value, (1 + np.sum(np.asarray(found.null) >= float(found.statistic))) / 51)


def test_default_collections_of_pairs():
    x, labels = jnp.asarray(RNG.normal(size=(20, 2))), jnp.arange(20) % 3
    found = kbr.hypotheses.independence_test(None, None, x, labels, key=KEY, num_permutations=9)
    names = [tuple(type(kernel).__name__ for kernel in pair) for pair in found.kernels]
    assert names == [("Gaussian", "Delta")] * 5 + [("Laplace", "Delta")] * 5
    assert 0 < found.p_value <= 1 and np.all(np.isfinite(found.null))


def test_hsic_without_its_mean_has_mean_0_over_all_permutations():
    x, y = jnp.asarray(RNG.normal(size=(40, 1))), jnp.asarray(RNG.normal(size=(40, 1)))
    kernels = [kbr.Gaussian(0.5), kbr.Gaussian(0.5)]
    # One kernel twice: the maximum is the value itself.
    null = kbr.hypotheses.independence_test(kernels, G, x, y, key=KEY, num_permutations=2000).null
    assert abs(np.mean(null)) < 5 * np.std(null) / np.sqrt(2000)


def influence_by_weights(statistic, count):
    """Derivatives of a statistic in the weights of points, by differences."""
    base, step = np.full(count, 1 / count), 1e-6
    found = []
    for i in range(count):
        moved = (1 - step) * base
        moved[i] += step
        found.append((statistic(moved) - statistic(base)) / step)
    return np.array(found)


def test_effect_of_two_samples_and_its_interval():
    x, y = RNG.normal(size=(60, 1)), RNG.normal(size=(80, 1)) + 0.8
    kx, ky, kxy = gaussian(x, x, 1.0), gaussian(y, y, 1.0), gaussian(x, y, 1.0)
    across = np.mean(kxy)
    unbiased = sum((np.sum(k) - len(k)) / len(k) / (len(k) - 1) for k in (kx, ky)) - 2 * across
    effect = unbiased / (2 - 2 * across)

    def ratio(p, q):
        cross = p @ kxy @ q
        return (p @ kx @ p + q @ ky @ q - 2 * cross) / (2 - 2 * cross)

    uniform = [np.full(len(part), 1 / len(part)) for part in (x, y)]
    variances = [
        np.var(influence_by_weights(lambda p: ratio(p, uniform[1]), 60)) / 60,
        np.var(influence_by_weights(lambda q: ratio(uniform[0], q), 80)) / 80,
    ]
    for landmarks in (None, 140):
        found = kbr.hypotheses.two_sample_test(
            G, jnp.asarray(x), jnp.asarray(y), key=KEY, num_permutations=9, landmarks=landmarks
        )
        close(found.effect, effect, 1e-6)
        # The two differ by the diagonals, of order 1 / n.
        half = (found.interval[1] - found.interval[0]) / 2
        close(half, 1.96 * np.sqrt(sum(variances)), 0.1)
        close(jnp.mean(found.interval), found.effect)


def test_effect_of_dependence_and_its_interval():
    x = RNG.normal(size=(120, 1))
    y = x + 0.7 * RNG.normal(size=(120, 1))
    k, l = gaussian(x, x, 1.0), gaussian(y, y, 1.0)  # noqa: E741

    def alignment(p):
        h = np.eye(120) - p
        a, b = h @ k @ h.T, h @ l @ h.T
        products = [p @ (u * v) @ p for u, v in ((a, b), (a, a), (b, b))]
        return products[0] / np.sqrt(products[1] * products[2])

    found = kbr.hypotheses.independence_test(
        G, G, jnp.asarray(x), jnp.asarray(y), key=KEY, num_permutations=9
    )
    close(found.effect, normalized(k, l), 1e-8)
    spread = np.std(influence_by_weights(alignment, 120)) / np.sqrt(120)
    close((found.interval[1] - found.interval[0]) / 2, 1.96 * spread, 0.1)


def test_effects_where_nothing_varies():
    dtype = jnp.float32  # .1 is not .1 there
    x, constant = jnp.asarray(RNG.normal(size=(20, 1)), dtype), jnp.full((20, 1), 0.1, dtype)
    for kernel in (None, kbr.Gaussian(jnp.asarray(1.0, dtype))):
        pair = kbr.hypotheses.independence_test(
            kernel, kernel, x, constant, key=KEY, num_permutations=19
        )
        assert pair.p_value == 1 and pair.effect == 0
        two = kbr.hypotheses.two_sample_test(
            kernel, constant, constant, key=KEY, num_permutations=19
        )
        assert two.p_value == 1 and two.effect == 0
        apart = kbr.hypotheses.two_sample_test(
            kernel, constant, constant + 100, key=KEY, num_permutations=19
        )
        close(apart.effect, 1.0, 1e-5)


def series(key, n, rho):
    steps = jax.random.normal(key, (n + 100, 1)) * jnp.sqrt(1 - rho**2)

    def step(state, new):
        state = rho * state + new
        return state, state

    return jax.lax.scan(step, jnp.zeros(1), steps)[1][100:]


def test_autocorrelation_time():
    x = np.asarray(series(KEY, 60, 0.8))
    gram = center(gaussian(x, x, 1.0))
    rho = [np.trace(gram, lag) / np.trace(gram) for lag in range(20)]
    total = 0.0
    for lag in range(0, 20, 2):
        if rho[lag] + rho[lag + 1] <= 0:
            break
        total += rho[lag] + rho[lag + 1]
    close(autocorrelation_time(kbr.gram(G, jnp.asarray(x))), max(2 * total - 1, 1))
    assert autocorrelation_time(kbr.gram(G, jnp.zeros((30, 1)))) == 1


def test_blocks_of_series():
    x, y = series(KEY, 43, 0.5), series(jax.random.key(1), 64, 0.5)
    found = kbr.hypotheses.two_sample_test(G, x, y, key=KEY, num_permutations=300, dependent=10)
    close(
        found.statistic,
        kbr.embedding.squared_mmd(kbr.embed(G, x[:40]), kbr.embed(G, y[:60]), unbiased=True),
    )
    # 4 and 6 blocks: C(10, 4) splits.
    assert len(np.unique(np.round(np.asarray(found.null), 12))) <= 210
    assert np.all(np.isnan(found.interval)) and "10 points" in str(found)
    assert block_length(False, None, x, y) == 1 and block_length(7, None, x, y) == 7
    x, y = series(KEY, 800, 0.0), series(KEY, 800, 0.8)
    assert block_length(True, None, x, x) < 20 < block_length(True, None, y, y)
    with pytest.warns(UserWarning, match="series are short"):
        assert block_length(True, None, y[:60], y[:60]) == 15
    with pytest.raises(ValueError, match="leave fewer than 4 blocks"):
        block_length(16, None, y[:60], y[:60])
    with pytest.raises(ValueError, match="inside `jit`"):
        jax.jit(lambda x: kbr.hypotheses.two_sample_test(G, x, x, key=KEY, dependent=True))(x)


def test_blocks_are_as_long_as_the_given_kernel_needs():
    """A given Gram matrix is that of its kernel, and a tree has no default kernel."""
    pooled = series(KEY, 300, 0.6)
    index, halves = jnp.arange(300), (slice(150), slice(150, 300))
    options = {"key": KEY, "num_permutations": 99, "dependent": True}

    def run(kernel, points):
        parts = (jax.tree.map(lambda leaf, r=rows: leaf[r], points) for rows in halves)
        return kbr.hypotheses.two_sample_test(kernel, *parts, **options)

    expected = run(G, pooled)
    assert "8 points" not in str(expected)
    tree = run(lambda a, b: G(a["u"], b["u"]), {"u": pooled})
    for found in (run(kbr.Precomputed(kbr.gram(G, pooled)), index), tree):
        assert str(found) == str(expected)
        close(found.null, expected.null, 1e-10)


def test_blocks_are_as_long_as_the_slowest_column_needs():
    """A kernel of all columns hides one that is slow. White columns do not make blocks longer."""
    slow, white = series(KEY, 800, 0.8), jax.random.normal(jax.random.key(1), (800, 9))
    alone = block_length(True, None, slow, slow[::-1])
    constant, labels = jnp.zeros((800, 1)), jnp.arange(800) % 2
    for x in (jnp.concatenate([slow, white], 1), (white, constant, slow, labels)):
        y = jax.tree.map(lambda leaf: leaf[::-1], x)
        assert block_length(True, None, x, y) == alone
    assert block_length(True, None, white[:100], white[100:]) < 12 < 25 < alone


def test_signs_of_blocks():
    x = series(KEY, 40, 0.5)
    found = kbr.hypotheses.two_sample_test(
        G, x, x + 0.1, key=KEY, num_permutations=300, null="signs", dependent=10
    )
    assert len(np.unique(np.round(np.asarray(found.null), 12))) <= 8  # of 2^4 signs, up to one


def test_shifts_of_series():
    x, y = series(KEY, 30, 0.5), series(jax.random.key(1), 30, 0.5)
    found = kbr.hypotheses.independence_test(
        G, G, x, y, key=KEY, num_permutations=200, dependent=True
    )
    shifted = [kbr.hsic(G, G, x, jnp.roll(y, shift, axis=0)) for shift in range(30)]
    close(found.statistic, shifted[0])
    distances = np.abs(np.asarray(found.null)[:, None] - np.asarray(shifted))
    assert np.max(np.min(distances, axis=1)) < 1e-12


@pytest.mark.parametrize("test", ["two samples", "independence"])
def test_level_of_series(test):
    def p_value(key):
        first, second, own = jax.random.split(key, 3)
        x, y = series(first, 100, 0.5), series(second, 100, 0.5)
        if test == "independence":
            run = kbr.hypotheses.independence_test(
                G, G, x, y, key=own, num_permutations=99, dependent=True
            )
        else:
            run = kbr.hypotheses.two_sample_test(
                G, x, y, key=own, num_permutations=99, dependent=16
            )
        return run.p_value

    keys = jax.random.split(jax.random.key(2), 300)
    p_values = jax.jit(lambda keys: jax.lax.map(p_value, keys))(keys)
    low, high = scipy.stats.binom.ppf([0.001, 0.999], 300, 0.1)
    assert low <= np.sum(np.asarray(p_values) <= 0.1) <= high


def test_a_result_in_words():
    x = jnp.asarray(RNG.normal(size=(40, 1)))
    found = kbr.hypotheses.two_sample_test([G, kbr.Gaussian(0.3)], x, x + 2, key=KEY)
    words = str(found)
    assert words.startswith("Rejected at level 0.05: x and y have one distribution (p = 0.000999")
    assert "effect 0." in words and "decided by Gaussian" in words and words.endswith(".")


def test_points_that_are_nan_have_no_small_p_value():
    x = jnp.asarray(RNG.normal(size=(10, 1)))
    found = jax.jit(lambda x: kbr.hypotheses.two_sample_test(G, x, x + 1, key=KEY))(
        x.at[0].set(jnp.nan)
    )
    assert np.isnan(found.p_value)
