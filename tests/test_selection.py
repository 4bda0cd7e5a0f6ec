"""Choosing landmarks.

In blocks, by k-means++, from a stream; against one pivot at a time and dense algebra.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr
from kbr_jax.features import _pivots, _sampling, _selection, landmark_features

RNG = np.random.default_rng(0)
N, D = 600, 4
X = jnp.asarray(RNG.normal(size=(N, D)))
KERNEL = kbr.Gaussian(1.5)
GRAM = np.asarray(kbr.gram(KERNEL, X))
LABELS = jnp.asarray([0] * 60 + [1] * 30 + [2] * 9 + [3])


@jax.jit
def trace(landmarks, points=X, kernel=KERNEL):
    """Trace of what the Nystroem approximation of these landmarks leaves of the Gram matrix."""
    return jnp.sum(kbr.kernels.diagonal(kernel, points)) - jnp.sum(
        landmark_features(kernel, points, landmarks).matrix ** 2
    )


def distinct(landmarks):
    return len(
        {row.tobytes() for row in np.asarray(landmarks.points)[np.asarray(landmarks.active)]}
    )


# Blocks


@pytest.mark.parametrize("block", [7, 1000])
@pytest.mark.parametrize("key", [None, 0])
def test_blocks_are_a_cholesky_decomposition(block, key):
    key = None if key is None else jax.random.key(key)
    result = kbr.features.incomplete_cholesky(KERNEL, X, rank=50, key=key, block_size=block)
    factor, pivots = np.asarray(result.factor), np.asarray(result.pivots)
    assert np.all(result.active) and len(set(pivots.tolist())) == 50 and factor.shape == (N, 50)
    nystroem = GRAM[:, pivots] @ np.linalg.solve(GRAM[np.ix_(pivots, pivots)], GRAM[pivots])
    np.testing.assert_allclose(factor @ factor.T, nystroem, atol=1e-9)
    np.testing.assert_allclose(result.residual, np.diagonal(GRAM - nystroem), atol=1e-9)
    np.testing.assert_allclose(np.triu(factor[pivots], 1), 0, atol=1e-9)  # in the order of choice


@pytest.mark.parametrize("key", [None, 0])
def test_tiles_do_not_change_the_decomposition(key, monkeypatch):
    """600 points in tiles of 128, of which the last overlaps, and old rows in groups of 8."""
    monkeypatch.setattr(_selection, "_TILE", 128)
    monkeypatch.setattr(_selection, "_GROUP", 8)
    key = None if key is None else jax.random.key(key)
    result = kbr.features.incomplete_cholesky(
        KERNEL, X, rank=43, key=key, block_size=7
    )  # a shape that no other test has compiled
    pivots = np.asarray(result.pivots)
    nystroem = GRAM[:, pivots] @ np.linalg.solve(GRAM[np.ix_(pivots, pivots)], GRAM[pivots])
    assert np.all(result.active)
    np.testing.assert_allclose(result.factor @ result.factor.T, nystroem, atol=1e-9)
    np.testing.assert_allclose(result.residual, np.diagonal(GRAM - nystroem), atol=1e-9)
    # It stops at the column where the tolerance is met, in the middle of a block.
    left = N - np.cumsum(np.sum(np.asarray(result.factor) ** 2, axis=0))
    just_below = float(left[38] - 1e-6 * (left[38] - left[39]))
    stopped = kbr.features.incomplete_cholesky(
        KERNEL, X, rank=43, key=key, block_size=7, tolerance=just_below / N
    )
    assert np.sum(stopped.active) == 40


def test_blocks_leave_about_the_same_trace():
    block = 64
    greedy = float(jnp.sum(kbr.features.incomplete_cholesky(KERNEL, X, rank=100).residual))
    blocked = float(
        jnp.sum(kbr.features.incomplete_cholesky(KERNEL, X, rank=100, block_size=block).residual)
    )
    assert blocked < 1.1 * greedy
    keys = jax.random.split(jax.random.key(1), 15)
    random = [
        np.mean(
            [
                np.sum(
                    kbr.features.incomplete_cholesky(
                        KERNEL, X, rank=100, key=k, block_size=b
                    ).residual
                )
                for k in keys
            ]
        )
        for b in (1, block)
    ]
    rejection = np.mean(
        [
            trace(kbr.rpcholesky_landmarks(KERNEL, X, rank=100, key=k, block_size=block))
            for k in keys
        ]
    )
    np.testing.assert_allclose([random[1], rejection], random[0], rtol=0.03)


PLACES = 0.7 * LABELS[:, None].astype(float)
PAIRS = {
    "factor": (
        np.eye(4),
        lambda key: LABELS[
            kbr.features.incomplete_cholesky(
                kbr.Delta(), LABELS, rank=2, key=key, block_size=2
            ).pivots
        ],
    ),
    "rejection, partly explained": (
        np.exp(-((0.7 * (np.arange(4)[:, None] - np.arange(4))) ** 2) / 2),
        lambda key: (
            kbr.rpcholesky_landmarks(
                kbr.Gaussian(1.0), PLACES, rank=2, key=key, block_size=2
            ).points[:, 0]
            / 0.7
        ),
    ),
}


@pytest.mark.parametrize(("gram", "pair"), PAIRS.values(), ids=PAIRS)
def test_blocks_keep_the_law_of_random_pivots(gram, pair):
    """The labels of the first two pivots against their probabilities, one pivot at a time."""
    counts, draws = np.asarray([60, 30, 9, 1]), 1000
    left = counts * (1 - gram**2)  # what the first pivot, by row, leaves of the trace
    expected = counts[:, None] / 100 * left / np.sum(left, axis=1, keepdims=True)
    pairs = np.asarray(jax.vmap(pair)(jax.random.split(jax.random.key(2), draws)))
    share = np.histogram2d(*pairs.T, bins=4, range=[[-0.5, 3.5]] * 2)[0] / draws
    assert np.all(np.abs(share - expected) <= 5 * np.sqrt(expected / draws))


def test_residuals_of_all_points_from_pivots(monkeypatch):
    """600 points in tiles of 128, of which the last overlaps, and pivots in groups of 8, of which
    the last is not filled.
    """
    monkeypatch.setattr(_pivots, "_TILE", 128)
    monkeypatch.setattr(_pivots, "_GROUP", 8)
    index, count = jnp.asarray(RNG.permutation(N)[:24]), 19
    chosen = index[:count]
    lower = jnp.linalg.cholesky(GRAM[np.ix_(chosen, chosen)])
    padded = (
        jnp.full((24, 24), 7.0).at[:count, :count].set(lower)
    )  # what stands behind the filled rows is not read
    sample = _pivots._Sample(KERNEL, X, jnp.ones(N))
    residual, squares = _pivots._residuals(
        sample, _pivots.Pivots(index, padded, jnp.asarray(count)), None
    )
    columns = jax.scipy.linalg.solve_triangular(lower, GRAM[chosen], lower=True)
    np.testing.assert_allclose(residual, 1 - jnp.sum(columns**2, axis=0), atol=1e-12)
    np.testing.assert_allclose(squares[:count], jnp.sum(columns**2, axis=1), atol=1e-10)
    assert not np.any(squares[count:])


def test_rejection_computes_residuals_when_many_are_refused(monkeypatch):
    """A trace that falls by 10^8 over the pivots.

    Proposals from the start would nearly all be refused.
    """
    passes, residuals = [], _pivots._residuals

    def counted(sample, pivots, mesh):
        jax.debug.callback(lambda count: passes.append(int(count)), pivots.count)
        return residuals(sample, pivots, mesh)

    monkeypatch.setattr(_pivots, "_residuals", counted)
    points = X[:, :1]
    # A rank that no other test has compiled for this shape.
    landmarks = kbr.rpcholesky_landmarks(
        KERNEL, points, rank=11, key=jax.random.key(0), block_size=16
    )
    jax.effects_barrier()
    assert np.all(landmarks.active) and passes[0] == 0 and 2 < len(passes) < 12
    one_by_one = kbr.rpcholesky_landmarks(
        KERNEL, points, rank=11, key=jax.random.key(0), block_size=1
    )
    assert trace(one_by_one, points) < 1e-8 * N and trace(landmarks, points) < 100 * trace(
        one_by_one, points
    )


@pytest.mark.parametrize("key", [None, 0])
def test_blocks_stop_where_the_rank_runs_out(key):
    repeated = jnp.concatenate([X[:5]] * 20)
    key = None if key is None else jax.random.key(key)
    result = kbr.features.incomplete_cholesky(KERNEL, repeated, rank=20, key=key, block_size=8)
    assert list(np.asarray(result.active)) == [True] * 5 + [False] * 15 and not np.any(
        result.factor[:, 5:]
    )
    np.testing.assert_allclose(
        result.factor @ result.factor.T, kbr.gram(KERNEL, repeated), atol=1e-12
    )


def test_blocks_stop_at_the_tolerance():
    result = kbr.features.incomplete_cholesky(
        KERNEL, X, rank=300, tolerance=0.1, key=jax.random.key(0), block_size=64
    )
    count = int(jnp.sum(result.active))
    traces = [N - float(jnp.sum(result.factor[:, :c] ** 2)) for c in (count - 1, count)]
    assert traces[1] <= 0.1 * N < traces[0]
    assert not np.any(result.factor[:, count:])


def test_rejection_stops_at_the_tolerance():
    """Reached long before the rank, or in the last block, which is cut."""
    for share, least in ((0.3, 0), (0.025, 85)):
        landmarks = kbr.rpcholesky_landmarks(
            KERNEL, X, rank=100, tolerance=share, key=jax.random.key(0), block_size=64
        )
        count = int(jnp.sum(landmarks.active))
        kept = jnp.arange(100)[:, None] < count - jnp.arange(2)
        traces = [trace(kbr.Landmarks(landmarks.points, active)) for active in kept.T]
        assert least < count < 100 and traces[0] <= share * N < traces[1]


def test_rejection_stops_where_the_rank_runs_out():
    repeated = jnp.concatenate([X[:5]] * 20)
    for tolerance in (None, 0.0):
        landmarks = kbr.rpcholesky_landmarks(
            KERNEL, repeated, rank=20, key=jax.random.key(1), block_size=8, tolerance=tolerance
        )
        assert (
            list(np.asarray(landmarks.active)) == [True] * 5 + [False] * 15
            and distinct(landmarks) == 5
        )


def test_blocks_under_vmap_and_grad():
    def factor(h):
        return kbr.features.incomplete_cholesky(
            kbr.Gaussian(h), X[:60], rank=20, block_size=8
        ).factor

    batch = jax.vmap(factor)(jnp.asarray([0.5, 2.0]))
    for index, h in enumerate((0.5, 2.0)):
        np.testing.assert_allclose(batch[index], factor(h), atol=1e-10)
    assert float(jax.grad(lambda h: jnp.sum(factor(h)))(1.0)) == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_rejection_stops_where_only_rounding_is_left(dtype):
    """4000 points, so that many proposals are allowed, and none that is missing can be found."""
    points = jnp.asarray(RNG.normal(size=(4000, 3)), dtype)
    for tolerance in (None, 0.0):
        landmarks = kbr.rpcholesky_landmarks(
            kbr.Linear(), points, rank=10, key=jax.random.key(0), tolerance=tolerance
        )
        assert landmarks.points.dtype == dtype and int(jnp.sum(landmarks.active)) == 3


def test_rejection_under_vmap_and_grad():
    def points(h):
        return kbr.rpcholesky_landmarks(
            kbr.Gaussian(h), X[:60], rank=20, key=jax.random.key(0), block_size=8
        ).points

    batch = jax.vmap(points)(jnp.asarray([0.5, 2.0]))
    for index, h in enumerate((0.5, 2.0)):
        np.testing.assert_array_equal(batch[index], points(h))
    assert float(jax.grad(lambda h: jnp.sum(points(h)))(1.0)) == 0


def test_many_points_are_chosen_in_blocks():
    points = jnp.asarray(RNG.normal(size=(10_000, 2)))
    options = {"kernel": KERNEL, "x": points, "rank": 20}
    default, blocked = (
        kbr.greedy_landmarks(**options),
        kbr.greedy_landmarks(**options, block_size=64),
    )
    np.testing.assert_array_equal(default.points, blocked.points)
    key = jax.random.key(3)
    default, blocked = (
        kbr.rpcholesky_landmarks(**options, key=key, **more) for more in ({}, {"block_size": 64})
    )
    np.testing.assert_array_equal(default.points, blocked.points)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_landmarks_that_are_not_active_change_nothing(scale):
    x = jnp.asarray(RNG.normal(size=(50, 2)), jnp.float32) * scale
    landmarks = kbr.greedy_landmarks(kbr.Linear(), x, rank=20)
    active = np.flatnonzero(landmarks.active)
    assert len(active) == 2
    some, coordinates = (
        landmark_features(kbr.Linear(), x, chosen).matrix
        for chosen in (kbr.Landmarks(landmarks.points[active]), landmarks)
    )
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64).T
    for found in (some, coordinates):
        assert np.linalg.norm(
            np.asarray(found, np.float64) @ np.asarray(found, np.float64).T - exact
        ) < (1e-4 * np.linalg.norm(exact))


# k-means++


CLUSTERS = np.repeat(10 * np.eye(5), 40, axis=0) + 0.01 * RNG.normal(size=(200, 5))


@pytest.mark.parametrize("kernel", [None, kbr.Gaussian(1.0)])
def test_kmeans_finds_separated_clusters(kernel):
    x = jnp.asarray(RNG.permutation(CLUSTERS))
    landmarks = kbr.kmeanspp_landmarks(kernel, x, rank=5, key=jax.random.key(0))
    assert sorted(np.argmax(np.asarray(landmarks.points), axis=1)) == list(range(5))
    assert {row.tobytes() for row in np.asarray(landmarks.points)} <= {
        row.tobytes() for row in np.asarray(x)
    }
    centers = kbr.kmeanspp_landmarks(
        None, x, rank=5, key=jax.random.key(0), num_iterations=2
    ).points
    order = np.argsort(np.argmax(np.asarray(centers), axis=1))
    np.testing.assert_allclose(
        np.asarray(centers)[order], CLUSTERS.reshape(5, 40, 5).mean(axis=1), atol=1e-12
    )


def test_kmeans_draws_in_proportion_to_squared_distances():
    x = jnp.asarray([0.0, 1.0, 3.0])
    keys = jax.random.split(jax.random.key(1), 3000)
    draws = np.asarray(
        jax.vmap(lambda key: kbr.kmeanspp_landmarks(None, x, rank=2, key=key).points)(keys)
    )
    expected = {
        (0, 1): 1 / 30,
        (0, 3): 9 / 30,
        (1, 0): 1 / 15,
        (1, 3): 4 / 15,
        (3, 0): 3 / 13,
        (3, 1): 4 / 39,
    }
    for pair, share in expected.items():
        assert abs(np.mean(np.all(draws == pair, axis=1)) - share) < 5 * np.sqrt(share / 3000)


def test_iterations_of_kmeans_lower_its_objective():
    def objective(iterations):
        centers = kbr.kmeanspp_landmarks(
            None, X, rank=20, key=jax.random.key(2), num_iterations=iterations
        ).points
        return ((np.asarray(X)[:, None] - np.asarray(centers)[None]) ** 2).sum(-1).min(1).sum()

    values = [objective(iterations) for iterations in (0, 1, 5)]
    assert values[0] > values[1] > values[2]


def test_kmeans_of_few_different_points():
    repeated = jnp.concatenate([X[:3]] * 4)
    for options in (
        {},
        {"num_iterations": 2},
        {"kernel": KERNEL},
        {"kernel": kbr.Linear() + kbr.Linear()},
    ):
        landmarks = kbr.kmeanspp_landmarks(
            **{"kernel": None, **options}, x=repeated, rank=5, key=jax.random.key(3)
        )
        assert (
            list(np.asarray(landmarks.active)) == [True] * 3 + [False] * 2
            and distinct(landmarks) == 3
        )
    labels = kbr.kmeanspp_landmarks(kbr.Delta(), LABELS, rank=4, key=jax.random.key(4))
    assert sorted(np.asarray(labels.points)) == [0, 1, 2, 3]


def test_kmeans_landmarks_beat_uniform_ones():
    keys = [jax.random.key(seed) for seed in range(5)]
    kmeans, uniform = (
        np.mean([trace(choose(key)) for key in keys])
        for choose in (
            lambda key: kbr.kmeanspp_landmarks(None, X, rank=60, key=key, num_iterations=3),
            lambda key: kbr.uniform_landmarks(X, rank=60, key=key),
        )
    )
    assert kmeans < uniform


# Streams


def chunked(points, width):
    return (points[start : start + width] for start in range(0, len(points), width))


def test_a_stream_leaves_about_the_trace_of_a_choice_on_all_points():
    # The distribution moves along the stream, so a choice from its beginning or its end would be
    # poor.
    x = jnp.asarray(
        RNG.normal(size=(4000, 3)) + np.linspace(0, 10, 4000)[:, None] * np.asarray([1.0, 0, 0])
    )
    keys = [jax.random.key(seed) for seed in range(3)]
    streamed = np.mean(
        [
            trace(kbr.features.streaming_landmarks(KERNEL, chunked(x, 300), rank=60, key=k), x)
            for k in keys
        ]
    )
    everything = np.mean(
        [trace(kbr.rpcholesky_landmarks(KERNEL, x, rank=60, key=k), x) for k in keys]
    )
    assert streamed < 1.2 * everything


def test_all_chunks_share_one_compilation():
    kernel = kbr.Gaussian(0.9)
    before = _sampling._absorb._cache_size()
    landmarks = kbr.features.streaming_landmarks(
        kernel, chunked(X, 130), rank=10, key=jax.random.key(0)
    )  # the last has 80 points
    assert _sampling._absorb._cache_size() == before + 1
    assert landmarks.points.shape == (10, D) and distinct(landmarks) == 10
    kbr.features.streaming_landmarks(
        kernel, [X[:130], X[:50], X], rank=10, key=jax.random.key(0)
    )  # a large one is cut
    assert _sampling._absorb._cache_size() == before + 1


def test_the_reservoir_is_a_uniform_sample_of_any_chunks():
    points, share, runs = jnp.arange(200), np.zeros(200), 40
    for seed in range(runs):
        chosen = kbr.features.streaming_landmarks(
            kbr.Delta(), chunked(points, 30), rank=50, key=jax.random.key(seed), pool=50
        )
        assert distinct(chosen) == 50
        share += np.isin(np.arange(200), np.asarray(chosen.points)) / runs
    assert np.all(np.abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / runs))
    chunks = np.asarray(
        [np.mean(part) for part in np.array_split(share[:180], 6)]
    )  # none of them is preferred
    assert np.all(np.abs(chunks - 0.25) < 5 * np.sqrt(0.25 * 0.75 / runs / 30))


def test_short_streams():
    few = kbr.features.streaming_landmarks(KERNEL, [X[:3], X[3:5]], rank=8, key=jax.random.key(0))
    assert distinct(few) == 5
    pairs = kbr.TensorProduct((KERNEL, kbr.Delta()))
    tuples = [(X[:30], jnp.arange(30) % 3), (X[30:50], jnp.arange(20) % 3)]
    both = kbr.features.streaming_landmarks(pairs, tuples, rank=6, key=jax.random.key(1))
    assert both.points[0].shape == (6, D) and both.points[1].shape == (6,)


KEY = jax.random.key(0)
ERRORS = {
    "block zero": (
        lambda: kbr.features.incomplete_cholesky(KERNEL, X, rank=3, block_size=0),
        "`block_size` must be an integer >= 1, got 0",
    ),
    "greedy block": (
        lambda: kbr.greedy_landmarks(KERNEL, X, rank=3, block_size=-1),
        "`block_size` must be an integer >= 1",
    ),
    "random block": (
        lambda: kbr.rpcholesky_landmarks(KERNEL, X, rank=3, key=KEY, block_size=0),
        "`block_size` must be an integer",
    ),
    "tolerance": (
        lambda: kbr.rpcholesky_landmarks(KERNEL, X, rank=3, key=KEY, tolerance=-0.1),
        r"`tolerance` must be one .*-0.1",
    ),
    "kmeans rank": (
        lambda: kbr.kmeanspp_landmarks(None, X, rank=N + 1, key=KEY),
        "`rank` must be an integer between 1 and",
    ),
    "kmeans iterations": (
        lambda: kbr.kmeanspp_landmarks(None, X, rank=3, key=KEY, num_iterations=-1),
        "`num_iterations` must be",
    ),
    "kmeans labels": (
        lambda: kbr.kmeanspp_landmarks(None, LABELS, rank=3, key=KEY),
        "one array of real coordinates",
    ),
    "kmeans of a tuple": (
        lambda: kbr.kmeanspp_landmarks(None, (X, X), rank=3, key=KEY),
        "one array of real coordinates",
    ),
    "kmeans domain": (
        lambda: kbr.kmeanspp_landmarks(KERNEL, LABELS, rank=3, key=KEY),
        "real coordinates",
    ),
    "kmeans nan": (
        lambda: kbr.kmeanspp_landmarks(None, X.at[0].set(jnp.nan), rank=3, key=KEY),
        "`x` contains NaN",
    ),
    "no chunks": (
        lambda: kbr.features.streaming_landmarks(KERNEL, [], rank=3, key=KEY),
        "`chunks` is an empty stream",
    ),
    "empty chunk": (
        lambda: kbr.features.streaming_landmarks(KERNEL, [X, X[:0]], rank=3, key=KEY),
        r"`chunks\[1\]` is an empty",
    ),
    "other points": (
        lambda: kbr.features.streaming_landmarks(KERNEL, [X, X[:, :2]], rank=3, key=KEY),
        r"`chunks\[1\]` has shape",
    ),
    "other dtype": (
        lambda: kbr.features.streaming_landmarks(
            KERNEL, [X, X.astype(jnp.float32)], rank=3, key=KEY
        ),
        r"`chunks\[1\]` has the dtypes .*float32",
    ),
    "stream domain": (
        lambda: kbr.features.streaming_landmarks(KERNEL, [LABELS], rank=3, key=KEY),
        "real coordinates",
    ),
    "small pool": (
        lambda: kbr.features.streaming_landmarks(KERNEL, [X], rank=3, key=KEY, pool=2),
        "`pool` must hold at least",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()
