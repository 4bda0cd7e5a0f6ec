"""Tests of hypotheses.

Statistics in plain NumPy, exact levels, power where it must be, independence of what is permuted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial
import scipy.stats
from helpers import closeness

import kbr_jax as kbr
from kbr_jax.hypotheses._collections import default_collection

G = kbr.Gaussian(1.0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(14, 2)))
Y = jnp.asarray(RNG.normal(size=(11, 2)) + 0.7)
KEY = jax.random.key(0)


close = closeness(0.0, 1e-10, "atol")


def test_two_sample_statistic_and_its_null():
    found = kbr.hypotheses.two_sample_test(G, X, Y, key=KEY, num_permutations=200)
    close(
        found.statistic, kbr.embedding.squared_mmd(kbr.embed(G, X), kbr.embed(G, Y), unbiased=True)
    )
    close(found.p_value, (1 + np.sum(np.asarray(found.null) >= float(found.statistic))) / 201)
    # Every draw is the statistic of some split of the pooled sample: their mean over all splits is
    # 0.
    assert abs(np.mean(found.null)) < 5 * np.std(found.null) / np.sqrt(200)


def test_random_signs():
    found = kbr.hypotheses.two_sample_test(
        G, X[:11], Y, key=KEY, num_permutations=200, null="signs"
    )
    close(
        found.statistic,
        kbr.embedding.squared_mmd(kbr.embed(G, X[:11]), kbr.embed(G, Y), unbiased=True),
        0.02,
    )
    a, b = (np.asarray(kbr.gram(G, points)) for points in (X[:11], Y))
    cross = np.asarray(kbr.gram(G, X[:11], Y))
    h = (a + b - cross - cross.T) * (1 - np.eye(11))
    close(found.statistic, h.sum() / 110)
    assert abs(np.mean(found.null)) < 5 * np.std(found.null) / np.sqrt(200)


def test_the_maximum_of_several_kernels():
    kernels = [kbr.Gaussian(h) for h in (0.1, 1.0, 10.0)] + [kbr.kernels.Laplace(1.0)]
    found = kbr.hypotheses.two_sample_test(kernels, X, Y, key=KEY, num_permutations=99)
    pooled = jnp.concatenate([X, Y])
    each = [
        kbr.embedding.squared_mmd(kbr.embed(k, X), kbr.embed(k, Y), unbiased=True) for k in kernels
    ]
    grams = [np.asarray(kbr.gram(k, pooled)) for k in kernels]
    squares = [np.sum(gram**2) - np.sum(np.diag(gram) ** 2) for gram in grams]
    pairs = len(pooled) * (len(pooled) - 1)
    close(found.statistic, np.max(np.asarray(each) / np.sqrt(np.asarray(squares) / pairs)))
    assert found.null.shape == (99,)
    close(found.p_value, (1 + np.sum(np.asarray(found.null) >= float(found.statistic))) / 100)
    assert found.best == np.argmax(np.asarray(each) / np.sqrt(squares))
    assert found.kernels[int(found.best)].bandwidth == kernels[int(found.best)].bandwidth


def test_tiles_of_a_gram_matrix():
    keys = jax.random.split(KEY)
    x, y = jax.random.normal(keys[0], (700, 1)), jax.random.normal(keys[1], (500, 1)) + 0.1
    found = kbr.hypotheses.two_sample_test(G, x, y, key=KEY, num_permutations=3)
    close(
        found.statistic, kbr.embedding.squared_mmd(kbr.embed(G, x), kbr.embed(G, y), unbiased=True)
    )


def test_features_of_full_rank_are_exact():
    exact, features = (
        kbr.hypotheses.two_sample_test(
            [G, kbr.Gaussian(0.5)], X, Y, key=KEY, num_permutations=20, landmarks=landmarks
        )
        for landmarks in (None, 25)
    )
    close(features.statistic, exact.statistic, 1e-8)
    close(features.null, exact.null, 1e-8)


def test_the_default_collection():
    found = kbr.hypotheses.two_sample_test(None, X, Y, key=KEY, num_permutations=9)
    assert [type(kernel).__name__ for kernel in found.kernels] == ["Gaussian"] * 10 + [
        "Laplace"
    ] * 10 + ["Energy"]
    pooled = np.concatenate([X, Y])
    distances = scipy.spatial.distance.pdist(pooled)
    low, high = np.quantile(distances, [0.05, 0.95])
    bandwidths = np.asarray([kernel.bandwidth for kernel in found.kernels[:10]])
    scale = np.asarray(kbr.kernels.coordinate_scale(jnp.asarray(pooled)))
    assert np.allclose(scale, scale[0])  # one unit: distances are as they are
    np.testing.assert_allclose(bandwidths[:, 0], np.geomspace(low / 2, high * 2, 10))


def test_default_collections_of_any_columns():
    labels, constant = jnp.arange(12) % 3, jnp.zeros(12)
    numbers = jnp.asarray(RNG.normal(size=(12, 2)))
    for x in (labels, constant, (numbers, labels), (numbers, (constant, labels)), numbers[:, 0]):
        first, second = (
            jax.tree.map(lambda leaf: leaf[:5], x),
            jax.tree.map(lambda leaf: leaf[5:], x),
        )
        found = kbr.hypotheses.two_sample_test(None, first, second, key=KEY, num_permutations=19)
        assert 0 < found.p_value <= 1 and np.all(np.isfinite(found.null))


def test_the_energy_kernel_has_no_origin():
    """Its unit comes from the centered matrix, so its center does not matter."""
    first, second = (
        kbr.hypotheses.two_sample_test(
            [kbr.kernels.Energy(center), G], X, Y, key=KEY, num_permutations=20
        )
        for center in (0.0, 5.0)
    )
    close(first.statistic, second.statistic, 1e-8)
    close(first.null, second.null, 1e-8)
    pooled = np.concatenate([X, Y])
    gram = np.asarray(kbr.gram(kbr.kernels.Energy(), pooled))
    center = np.eye(len(pooled)) - 1 / len(pooled)
    square = np.square(center @ gram @ center)[~np.eye(len(pooled), dtype=bool)]
    alone, _ = (
        kbr.hypotheses.two_sample_test(k, X, Y, key=KEY, num_permutations=1)
        for k in (kbr.kernels.Energy(), G)
    )
    twice = kbr.hypotheses.two_sample_test(
        [kbr.kernels.Energy()] * 2, X, Y, key=KEY, num_permutations=1
    )
    close(twice.statistic, alone.statistic / np.sqrt(2 * np.mean(square)), 1e-8)


def test_a_shift_is_found_by_default():
    """Gaussian and Laplace kernels alone find 14 of these 40."""
    x, y = jax.random.normal(jax.random.key(5), (2, 40, 100, 1))

    def one(row):
        x, y, key = row
        return kbr.hypotheses.two_sample_test(None, x, y, key=key, num_permutations=99).p_value

    rows = x, y + 0.4, jax.random.split(KEY, 40)
    assert np.sum(jax.jit(lambda rows: jax.lax.map(one, rows))(rows) <= 0.05) >= 24


def test_numbers_beside_labels_are_seen_by_default():
    """Products with the equality of labels alone find 2 of these 20 lines."""

    def one(key):
        first, second, third, fourth = jax.random.split(key, 4)
        x, noise = jax.random.normal(first, (100, 1)), jax.random.normal(second, (100,))
        labels = jax.random.randint(third, (100,), 0, 5)
        y = 0.4 * x[:, 0] + 0.9 * noise
        options = {"key": fourth, "num_permutations": 99}
        return kbr.hypotheses.independence_test(None, None, (x, labels), y, **options).p_value

    keys = jax.random.split(jax.random.key(3), 20)
    assert np.sum(jax.jit(lambda keys: jax.lax.map(one, keys))(keys) <= 0.05) >= 12


def test_the_order_of_samples_does_not_matter():
    # The tolerance of ties follows the smaller sample, whichever argument it is.
    many = jnp.asarray(RNG.normal(size=(2000, 1)), jnp.float32)
    few = jnp.asarray([[2.5], [2.7]], jnp.float32)
    one, other = (
        kbr.hypotheses.two_sample_test(kbr.Gaussian(jnp.float32(1.0)), *pair, key=KEY)
        for pair in ((many, few), (few, many))
    )
    assert one.p_value == other.p_value
    exact = (1 + np.sum(np.asarray(one.null) >= float(one.statistic))) / 1001
    assert float(one.p_value) <= exact + 0.005


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_draws_equal_up_to_rounding_are_ties(dtype):
    n = 300
    x, constant = (
        jnp.asarray(values, dtype)[:, None] for values in (np.arange(n) < 1, np.zeros(n))
    )
    kernels = [kbr.Gaussian(jnp.asarray(h, dtype)) for h in (0.3, 0.7, 2.0)]
    for kernel in (kernels, kernels[1]):
        for null in ("permutation", "signs"):
            assert (
                kbr.hypotheses.two_sample_test(
                    kernel, x, constant, key=KEY, num_permutations=99, null=null
                ).p_value
                == 1
            )
    y = jnp.asarray(RNG.normal(size=(n, 1)), dtype)
    for landmarks in (None, 3):
        assert (
            kbr.hypotheses.independence_test(
                kernels[1], G, y, constant, key=KEY, num_permutations=99, landmarks=landmarks
            ).p_value
            == 1
        )
    assert kbr.hypotheses.block_two_sample_test(kernels[1], constant, constant).p_value == 0.5


@pytest.mark.parametrize("kernel", [kbr.Gaussian(jnp.float32(60.0)), kbr.Linear()])
def test_rounding_hides_no_difference_in_single_precision(kernel):
    # Of these Gram matrices only the last digits differ from one of rank one.
    x, y, noise = (jnp.asarray(RNG.normal(size=(300, 1)) + 10, jnp.float32) for _ in range(3))
    for null in ("permutation", "signs"):
        assert (
            kbr.hypotheses.two_sample_test(
                kernel, x, y + 1, key=KEY, num_permutations=99, null=null
            ).p_value
            == 0.01
        )
        assert (
            kbr.hypotheses.two_sample_test(
                kernel, x, y, key=KEY, num_permutations=99, null=null
            ).p_value
            < 1
        )
    for landmarks in (None, 4):
        assert (
            kbr.hypotheses.independence_test(
                kernel, kernel, x, x + noise, key=KEY, num_permutations=99, landmarks=landmarks
            ).p_value
            == 0.01
        )


@pytest.mark.parametrize("test", ["two samples", "several kernels", "signs", "pairs"])
def test_p_values_of_discrete_data_count_ties(test):
    x, y = (jnp.asarray(RNG.random((12, 1)) < 0.3, jnp.float64) for _ in range(2))
    kernels = [kbr.Gaussian(0.3), kbr.Gaussian(2.0)]
    if test == "pairs":
        found = kbr.hypotheses.independence_test(*kernels, x, y, key=KEY, num_permutations=199)
    else:
        null = "signs" if test == "signs" else "permutation"
        found = kbr.hypotheses.two_sample_test(
            kernels if test == "several kernels" else kernels[1],
            x,
            y,
            key=KEY,
            num_permutations=199,
            null=null,
        )
    everything = np.round(
        np.concatenate([np.asarray(found.statistic)[None], np.asarray(found.null)]), 10
    )
    close(found.p_value, np.mean(everything >= everything[0]))
    assert len(np.unique(everything)) < 60  # there are ties


def test_keys_of_either_style():
    new, old = (
        kbr.hypotheses.two_sample_test(G, X, Y, key=key, num_permutations=70).null
        for key in (KEY, jax.random.PRNGKey(0))
    )
    close(new, old)


def test_blocks():
    x, y = X[:12], jnp.concatenate([Y, Y[:1]])
    found = kbr.hypotheses.block_two_sample_test(G, x, y, block_size=3)
    parts = [
        kbr.gram(G, x[i : i + 3])
        + kbr.gram(G, y[i : i + 3])
        - 2 * kbr.gram(G, x[i : i + 3], y[i : i + 3])
        for i in (0, 3, 6, 9)
    ]
    values = [(np.sum(part) - np.trace(part)) / 6 for part in parts]
    close(found.statistic, np.mean(values))
    score = np.mean(values) / np.std(values, ddof=1) * 2
    close(found.p_value, scipy.stats.t.sf(score, 3))


def test_blocks_that_all_agree():
    labels = [jnp.zeros(40, int), jnp.ones(40, int)]
    for x, y, p_value in [(labels[0], labels[1], (2 / 3) ** 20), (labels[0], labels[0], 0.5)]:
        close(kbr.hypotheses.block_two_sample_test(kbr.Delta(), x, y).p_value, p_value)
    for shift in (0.3, 0.5, 0.7, 1.1):  # equal but for rounding
        found = kbr.hypotheses.block_two_sample_test(G, jnp.zeros(14), jnp.full(14, shift))
        close(found.p_value, (2 / 3) ** 7)


@pytest.mark.parametrize("landmarks", [None, 12])
def test_independence_statistic(landmarks):
    x, y = X[:12], X[:12, :1] ** 2
    found = kbr.hypotheses.independence_test(
        G, G, x, y, key=KEY, num_permutations=50, landmarks=landmarks
    )
    close(found.statistic, kbr.hsic(G, G, x, y), 1e-8)
    close(found.p_value, (1 + np.sum(np.asarray(found.null) >= float(found.statistic))) / 51)


def pairs_given(x, y, z, regularizer=0.02):
    return kbr.fit_conditional(G, kbr.TensorProduct((G, G)), x, (y, z), regularizer=regularizer)


def test_local_dependence_statistic():
    x, y, z = X[:, :1], X[:, 1:], X[:, :1] * X[:, 1:]
    at = jnp.asarray([[0.0], [0.7]])
    found = kbr.experimental.local_dependence_test(pairs_given(x, y, z), at, key=KEY, num_draws=400)
    kx, ky, kz = (np.asarray(kbr.gram(G, points)) for points in (x, y, z))
    inverse = np.linalg.inv(kx + 14 * 0.02 * np.eye(14))
    beta, r = np.asarray(kbr.gram(G, at, x)) @ inverse, np.eye(14) - kx @ inverse
    product = (r @ ky @ r.T) * (r @ kz @ r.T)
    close(found.statistic, np.einsum("bi,ij,bj->b", beta, product, beta))
    # Random signs leave the diagonal of a quadratic form, and twice the squares of the rest as
    # variance.
    terms = beta[:, :, None] * product * beta[:, None]
    expected = np.trace(terms, axis1=1, axis2=2)
    spread = np.sqrt(2 * (np.sum(terms**2, axis=(1, 2)) - np.einsum("bii->b", terms**2)))
    assert found.null.shape == (2, 400)
    assert np.all(np.abs(np.mean(found.null, axis=1) - expected) < 4 * spread / np.sqrt(400))
    one = kbr.experimental.local_dependence_test(
        pairs_given(x, y, z), at[0], key=KEY, num_draws=400
    )
    close(one.statistic, found.statistic[0])
    close(one.p_value, found.p_value[0])


# ---- level and power over many data sets, in one program each

LEVEL, REPETITIONS, DRAWS, N = 0.1, 300, 99, 20


def rejections(test):
    p = jax.jit(lambda keys: jax.lax.map(test, keys, batch_size=50))(
        jax.random.split(jax.random.key(1), REPETITIONS)
    )
    return int(np.sum(np.asarray(p) <= LEVEL))


def within_binomial_bounds(count):
    low, high = scipy.stats.binom.ppf([0.001, 0.999], REPETITIONS, LEVEL)
    return low <= count <= high


def two_samples(shift, **options):
    def test(key):
        first, second, permute = jax.random.split(key, 3)
        x, y = jax.random.normal(first, (N, 1)), jax.random.normal(second, (N, 1)) + shift
        kernel = options.get("kernel", G)
        return kbr.hypotheses.two_sample_test(
            kernel,
            x,
            y,
            key=permute,
            num_permutations=DRAWS,
            null=options.get("null", "permutation"),
        ).p_value

    return test


def pairs(strength, landmarks=None):
    def test(key):
        first, second, permute = jax.random.split(key, 3)
        x = jax.random.normal(first, (N, 1))
        y = strength * x**2 + jax.random.normal(second, (N, 1))
        return kbr.hypotheses.independence_test(
            G, G, x, y, key=permute, num_permutations=DRAWS, landmarks=landmarks
        ).p_value

    return test


def at_a_point(point):
    """Y and Z share noise where X is positive."""

    def test(key):
        keys = jax.random.split(key, 3)
        x = jax.random.uniform(keys[0], (80, 1), minval=-2, maxval=2)
        first, second = jax.random.normal(keys[1], (2, 80, 1))
        y, z = jnp.sin(2 * x) + first / 2, x + jnp.where(x > 0, first, second) / 2
        kernels = kbr.Gaussian(0.5), kbr.TensorProduct((G, G))
        model = kbr.fit_conditional(*kernels, x, (y, z), regularizer=1e-3)
        return kbr.experimental.local_dependence_test(
            model, jnp.asarray([point]), key=keys[2], num_draws=DRAWS
        ).p_value

    return test


@pytest.mark.parametrize(
    "test",
    [
        two_samples(0.0),
        two_samples(0.0, kernel=None),
        two_samples(0.0, null="signs"),
        pairs(0.0),
        pairs(0.0, landmarks=5),
        at_a_point(-1.0),
    ],
    ids=[
        "two samples",
        "default",
        "signs",
        "pairs",
        "pairs, landmarks",
        "at a point",
    ],
)
def test_the_level_is_kept(test):
    assert within_binomial_bounds(rejections(test))


@pytest.mark.parametrize(
    "test",
    [two_samples(1.5), pairs(3.0), at_a_point(1.0)],
    ids=["two samples", "pairs", "at a point"],
)
def test_what_differs_is_found(test):
    assert rejections(test) > 0.85 * REPETITIONS


@pytest.mark.parametrize("blocks", [2, 100])
def test_the_level_of_blocks(blocks):
    def test(key):
        x, y = jax.random.normal(key, (2, 4 * blocks, 1))
        return kbr.hypotheses.block_two_sample_test(G, x, y, block_size=4).p_value

    # Few blocks are skewed: the test is conservative.
    assert rejections(test) <= scipy.stats.binom.ppf(0.999, REPETITIONS, LEVEL)


def test_the_level_of_blocks_of_labels():
    def test(key):
        x, y = jax.random.bernoulli(key, shape=(2, 4)).astype(int)
        return kbr.hypotheses.block_two_sample_test(kbr.Delta(), x, y).p_value

    assert rejections(test) <= scipy.stats.binom.ppf(0.999, REPETITIONS, LEVEL)


def test_any_domain():
    labels = jnp.asarray(RNG.integers(0, 3, 30))
    found = kbr.hypotheses.independence_test(
        kbr.Delta(), G, labels, labels.astype(float)[:, None], key=KEY, num_permutations=99
    )
    close(found.p_value, 0.01)
    assert (
        float(
            kbr.hypotheses.two_sample_test(
                kbr.Delta(), labels, labels[:10], key=KEY, num_permutations=99
            ).p_value
        )
        > 0.05
    )


def test_landmarks_do_not_know_which_pair_a_point_is_of():
    """Greedy landmarks break ties by position, and narrow kernels have nothing but ties."""
    kernel = kbr.Gaussian(0.05)

    def p_value(key):
        keys = jax.random.split(key, 3)
        x, y = jax.random.normal(keys[0], (40,)), jax.random.normal(keys[1], (40,))
        return kbr.hypotheses.independence_test(
            kernel, kernel, x, y, key=keys[2], num_permutations=39, landmarks=5
        ).p_value

    values = jax.lax.map(jax.jit(p_value), jax.random.split(jax.random.key(0), 200))
    assert float(jnp.mean(values <= 0.05)) < 0.1


def test_landmarks_do_not_know_which_sample_a_point_is_of():
    def p_value(key):
        keys = jax.random.split(key, 3)
        x, y = jax.random.normal(keys[0], (3,)), jax.random.normal(keys[1], (40,))
        return kbr.hypotheses.two_sample_test(
            kbr.Gaussian(0.1), x, y, key=keys[2], num_permutations=39, landmarks=1
        ).p_value

    values = jax.lax.map(jax.jit(p_value), jax.random.split(jax.random.key(0), 200))
    assert float(jnp.mean(values <= 0.1)) < 0.16


@pytest.mark.parametrize("y", [np.arange(9), np.arange(9) > 3])
def test_samples_of_two_kinds(y):
    with pytest.raises(ValueError, match="`x` and `y` must be of one kind"):
        kbr.hypotheses.two_sample_test(None, jnp.arange(9.0), jnp.asarray(y), key=jax.random.key(0))


def test_so_few_points_that_nothing_can_be_rejected():
    """A list of two columns of numbers is two rows: the answer was a plain p = 1."""
    table = [[1.0, 5.0, 2.0], [3.0, 2.0, 6.0]]
    with pytest.warns(UserWarning, match=r"With 2 pairs no p-value is below 0.5. Rows of a table"):
        kbr.hypotheses.independence_test(
            None, None, jnp.asarray(table), jnp.asarray(table), key=jax.random.key(0)
        )
    with pytest.warns(UserWarning, match="With 2 and 3 points no p-value is below 0.1"):
        kbr.hypotheses.two_sample_test(
            None, jnp.arange(2.0), jnp.arange(3.0), key=jax.random.key(0)
        )


def test_a_test_that_did_not_take_place_rejects_and_accepts_nothing():
    x = jnp.asarray(np.random.default_rng(0).normal(size=20))

    @jax.jit
    def test(x):
        return kbr.hypotheses.two_sample_test(
            None, x, x[:9] + 1, key=jax.random.key(0), num_permutations=99
        )

    words = str(test(x.at[0].set(jnp.nan)))
    assert words.startswith("Not tested") and "ejected" not in words


def test_default_kernels_do_not_depend_on_the_origin():
    x = jnp.asarray(np.round(16 * np.random.default_rng(0).normal(size=60)) / 16, jnp.float32)
    key = jax.random.key(0)
    here, there = (default_collection(part, 10, key) for part in (x, x + 2.0**19))
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other.bandwidth, one.bandwidth, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The regressions on `z`")
def test_integers_that_may_be_amounts_are_named():
    rng = np.random.default_rng(0)
    x, y, z = rng.integers(0, 1000, size=(3, 60))
    real = rng.normal(size=60)
    given = kbr.Gaussian(1.0)
    for call in (
        lambda: kbr.hypotheses.two_sample_test(None, x, y + 300, key=KEY, num_permutations=99),
        lambda: kbr.hypotheses.two_sample_test(
            None, (real, x), (real, y), key=KEY, num_permutations=99
        ),
        lambda: kbr.hypotheses.independence_test(
            given, None, real, y, key=KEY, num_permutations=99
        ),
        lambda: kbr.hypotheses.conditional_independence_test(
            given, given, None, real, real, z, key=KEY, num_draws=99
        ),
    ):
        with pytest.warns(UserWarning, match="values among .* points are taken as labels"):
            call()


def test_traced_nan_is_no_p_value():
    x, y, z = jax.random.normal(jax.random.key(0), (3, 60))
    unknown, options = y.at[3].set(jnp.nan), {"key": jax.random.key(1)}

    @jax.jit
    def run(x, y):
        return (
            kbr.hypotheses.conditional_independence_test(
                None, None, None, x, y, z, num_draws=50, **options
            ),
            kbr.hypotheses.independence_test(None, None, x, y, num_permutations=50, **options),
            kbr.hypotheses.two_sample_test(None, x, y, num_permutations=50, **options),
            kbr.hypotheses.block_two_sample_test(None, x, y, block_size=8),
        )

    for result in run(x, unknown):
        assert np.isnan(result.p_value) and np.all(np.isnan(result.effect))


@pytest.mark.parametrize("kernels", ["default", "narrow", "all narrow"])
def test_a_kernel_that_is_far_too_narrow_decides_nothing(kernels):
    """The first version had p = 1: the rounding of one kernel held for all."""
    x, y = np.random.default_rng(0).normal(size=(2, 30, 8))
    y += 2
    if kernels == "default":  # products of the narrowest kernels of all parts
        found = kbr.hypotheses.two_sample_test(None, tuple(x.T), tuple(y.T), key=KEY)
    else:
        widths = [1e-4, 1e-3] if kernels == "all narrow" else np.logspace(-3, 1, 9)
        given = [kbr.Gaussian(width) for width in widths]
        found = kbr.hypotheses.two_sample_test(given, x, y, key=KEY)
    assert float(found.p_value) == 1 if kernels == "all narrow" else found.p_value < 0.01


def test_samples_of_two_precisions_in_any_order():
    x, y = X[:11], Y.astype(np.float32)
    first = kbr.hypotheses.independence_test(G, G, x, y[:11], key=KEY, num_permutations=50)
    second = kbr.hypotheses.independence_test(G, G, y[:11], x, key=KEY, num_permutations=50)
    assert first.statistic.dtype == second.statistic.dtype == np.float64
    close(first.statistic, second.statistic)
    assert kbr.hypotheses.two_sample_test(G, y, x, key=KEY).statistic.dtype == np.float64


def test_random_signs_say_where_they_are_valid():
    x = jax.random.normal(jax.random.key(0), (30, 1))
    options = {"key": jax.random.key(1), "num_permutations": 20}
    found = kbr.hypotheses.two_sample_test(G, x, x + 1, null="signs", **options)
    assert "swapped" in found.valid
    assert kbr.hypotheses.two_sample_test(G, x, x + 1, **options).valid == "samples of any size"
