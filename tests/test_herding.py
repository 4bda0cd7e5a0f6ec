"""Herding.

Exact cases, the rules in plain NumPy, optimality conditions, and maxima in continuous space.
"""

import json
import pathlib

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr

CASE = json.loads((pathlib.Path(__file__).parent / "reference_cases.json").read_text())[
    "distributions"
]["7_herding"]
DENSITY = float((2 * np.pi) ** -0.5) * kbr.Gaussian(1.0)
TARGET = kbr.embed(DENSITY, jnp.asarray(CASE["X"])[:, None], jnp.asarray(CASE["w"]))
HALF = np.arange(-4, 4.25, 0.5)
RNG = np.random.default_rng(0)
POINTS = RNG.normal(size=(12, 2))
SIGNED = kbr.embed(
    kbr.Gaussian(0.8), jnp.asarray(POINTS), jnp.asarray(RNG.normal(size=12) / 6 + 1 / 12)
)
CANDIDATES = RNG.normal(size=(30, 2))
COUNT = 8


close = closeness(0.0, 1e-10, "atol")


def matrices(kernel=SIGNED.kernel, candidates=CANDIDATES):
    gram = np.asarray(kbr.gram(kernel, jnp.asarray(candidates)))
    target = np.asarray(kbr.gram(kernel, jnp.asarray(candidates), SIGNED.points)) @ np.asarray(
        SIGNED.weights
    )
    return gram, target


def herd(rule, count=COUNT, kernel=SIGNED.kernel):
    target = kbr.Embedding(kernel, SIGNED.points, SIGNED.weights)
    return kbr.herd(target, jnp.asarray(CANDIDATES), num_points=count, rule=rule)


@pytest.mark.parametrize("rule", ["greedy", "chen2010"])
def test_reference_case(rule):
    grid = jnp.asarray(HALF)[:, None]
    close(kbr.evaluate(TARGET, grid), CASE["eta_on_grid_step_half"], 1e-15)
    close(
        kbr.herd(TARGET, grid, num_points=8, rule=rule).embedding.points[:, 0],
        CASE["herd_grid_half"],
        1e-12,
    )
    fine = jnp.asarray(np.arange(-400, 401) / 100)[:, None]
    close(
        kbr.herd(TARGET, fine, num_points=8, rule=rule).embedding.points[:, 0],
        CASE["herd_grid_001"],
        1e-12,
    )
    own = kbr.herd(TARGET, num_points=8, rule=rule)
    close(own.embedding.points[:, 0], CASE["herd_candidates_X"], 0)
    close(own.embedding.weights, np.full(8, 1 / 8), 1e-15)


def test_reference_case_in_continuous_space():
    found = kbr.herding.herd_continuous(
        TARGET, num_points=8, starts=jnp.asarray(HALF)[:, None], lower=-4.0, upper=4.0
    )
    close(found.embedding.points[:, 0], CASE["herd_continuous_box_m4_4"], 1e-7)
    assert found.index is None
    expected = [
        kbr.embedding.squared_mmd(TARGET, kbr.embed(DENSITY, found.embedding.points[: k + 1]))
        - kbr.embedding.squared_norm(TARGET)
        for k in range(8)
    ]
    close(found.objective, expected, 1e-12)


@pytest.mark.parametrize("rule", ["greedy", "chen2010"])
@pytest.mark.parametrize(
    "kernel", [SIGNED.kernel, kbr.Polynomial(2, 1.0, 1.0)], ids=["constant", "varying"]
)
def test_uniform_rules_in_numpy(rule, kernel):
    gram, target = matrices(kernel)
    chosen = []
    for k in range(1, COUNT + 1):
        score = target - gram[:, chosen].sum(1) / k
        if rule == "greedy":
            # By definition: the candidate after which the distance is least.
            score = [
                2 * np.mean(target[[*chosen, j]]) - gram[np.ix_([*chosen, j], [*chosen, j])].mean()
                for j in range(30)
            ]
        chosen.append(int(np.argmax(score)))
    found = herd(rule, kernel=kernel)
    np.testing.assert_array_equal(found.index, chosen)
    for k in (1, COUNT):
        part = chosen[:k]
        close(found.objective[k - 1], gram[np.ix_(part, part)].mean() - 2 * target[part].mean())


def objective(found):
    gram, target = matrices()
    w, index = np.asarray(found.embedding.weights), np.asarray(found.index)
    return w @ gram[np.ix_(index, index)] @ w - 2 * w @ target[index]


def test_line_search_in_numpy():
    gram, target = matrices()
    w = np.zeros(30)
    for k in range(COUNT):
        j = int(np.argmax(target - gram @ w))
        direction = np.eye(30)[j] - w
        slope, curvature = direction @ (target - gram @ w), direction @ gram @ direction
        w = w + (1.0 if k == 0 else np.clip(slope / curvature, 0, 1)) * direction
    found = herd("line-search")
    total = np.zeros(30)
    np.add.at(total, np.asarray(found.index), np.asarray(found.embedding.weights))
    close(total, w)
    close(found.objective[-1], objective(found))


def test_corrective_ends_at_the_projection_onto_distributions():
    found = herd("min-norm-point", 30)
    gram, target = matrices()
    w = np.zeros(30)
    np.add.at(w, np.asarray(found.index), np.asarray(found.embedding.weights))
    close(found.objective[-1], objective(found))
    # The conditions of optimality on the simplex, which are sufficient: the problem is convex.
    assert np.all(w >= 0)
    close(w.sum(), 1, 1e-9)
    gradient = gram @ w - target
    assert np.all(gradient >= gradient @ w - 1e-7)
    assert np.all(np.diff(found.objective) <= 1e-12)


def test_free_weights_are_the_best_for_their_points():
    gram, target = matrices()
    found = herd("sbq")
    index = np.asarray(found.index)
    assert len(set(index.tolist())) == COUNT
    best = np.linalg.solve(gram[np.ix_(index, index)], target[index])
    close(found.embedding.weights, best, 1e-8)
    close(
        found.objective,
        [
            -target[p] @ np.linalg.solve(gram[np.ix_(p, p)], target[p])
            for k in range(COUNT)
            for p in [index[: k + 1]]
        ],
    )


@pytest.mark.parametrize("rule", ["min-norm-point", "sbq"])
def test_gradients_by_finite_differences(rule):
    @jax.jit
    def loss(p):
        target = kbr.Embedding(kbr.Gaussian(p["bandwidth"]), SIGNED.points, p["weights"])
        found = kbr.herd(target, p["candidates"], num_points=COUNT, rule=rule)
        return jnp.sum(jnp.sin(found.embedding.weights * jnp.arange(1.0, COUNT + 1))) + jnp.sum(
            found.objective
        )

    start = {
        "bandwidth": jnp.asarray(0.8),
        "weights": SIGNED.weights,
        "candidates": jnp.asarray(CANDIDATES),
    }
    flat, unravel = jax.flatten_util.ravel_pytree(start)
    gradient = jax.flatten_util.ravel_pytree(jax.jit(jax.grad(loss))(start))[0]
    step = 1e-6
    for v in np.concatenate([np.eye(flat.size)[[0, -1]], RNG.normal(size=(3, flat.size))]):
        numeric = (loss(unravel(flat + step * v)) - loss(unravel(flat - step * v))) / (2 * step)
        np.testing.assert_allclose(gradient @ v, numeric, rtol=1e-6, atol=1e-7)


def test_more_freedom_is_nearer():
    ends = [float(herd(rule).objective[-1]) for rule in ("greedy", "min-norm-point", "sbq")]
    assert ends[0] > ends[1] > ends[2]
    assert objective(herd("line-search")) >= ends[1]


@pytest.mark.parametrize("rule", ["min-norm-point", "sbq"])
def test_repeated_candidates_and_exhausted_span(rule):
    points = jnp.asarray([[0.0], [0.0], [1.0]])
    found = kbr.herd(kbr.embed(kbr.Gaussian(1.0), points), points, num_points=3, rule=rule)
    assert np.all(np.isfinite(found.embedding.weights))
    close(kbr.embedding.squared_mmd(found.embedding, kbr.embed(kbr.Gaussian(1.0), points)), 0, 1e-9)


def test_herding_works_on_any_points_and_under_vmap():
    pairs = (jnp.asarray(POINTS), jnp.asarray(RNG.integers(0, 2, 12)))
    joint = kbr.TensorProduct((kbr.Gaussian(1.0), kbr.Delta()))
    found = kbr.herd(kbr.embed(joint, pairs), num_points=4)
    assert found.embedding.points[0].shape == (4, 2) and found.embedding.points[1].shape == (4,)
    weights = jnp.asarray(RNG.normal(size=(3, 12)))
    many = jax.vmap(
        lambda w: kbr.herd(kbr.Embedding(SIGNED.kernel, SIGNED.points, w), num_points=5)
    )(weights)
    one = kbr.herd(kbr.Embedding(SIGNED.kernel, SIGNED.points, weights[1]), num_points=5)
    close(many.objective[1], one.objective, 1e-12)


def test_continuous_herding_stays_in_its_box_and_beats_its_starts():
    lower, upper = jnp.asarray([-0.5, -1.0]), jnp.asarray([0.5, 1.0])
    starts = jnp.clip(jnp.asarray(CANDIDATES), lower, upper)
    boxed = kbr.herding.herd_continuous(
        SIGNED, num_points=3, starts=starts, lower=lower, upper=upper, num_steps=30
    )
    assert np.all((boxed.embedding.points >= lower) & (boxed.embedding.points <= upper))
    assert boxed.objective[0] <= kbr.herd(SIGNED, starts, num_points=3).objective[0]


@pytest.mark.parametrize(
    "dtypes", [("float64", "float64"), ("float32", "float64"), ("float64", "float32")]
)
def test_continuous_herding_of_few_points_in_the_wider_dtype(dtypes):
    points, weights = jnp.asarray(POINTS[:3], jnp.float32), jnp.full(3, 1 / 4, jnp.float32)
    target = kbr.Embedding(SIGNED.kernel, points.astype(dtypes[0]), weights.astype(dtypes[1]))
    with jax.numpy_dtype_promotion("standard"):
        found = kbr.herding.herd_continuous(target, num_points=2, num_steps=10)
    assert {
        leaf.dtype for leaf in (found.embedding.points, found.embedding.weights, found.objective)
    } == {jnp.dtype("float64")}
    values = kbr.evaluate(
        kbr.Embedding(SIGNED.kernel, points.astype(float), weights.astype(float)),
        points.astype(float),
    )
    # No worse than the best start.
    assert found.objective[0] <= 1 - 2 * np.max(values)


def test_nan_weights_choose_nothing():
    unknown = kbr.embed(kbr.Gaussian(1.0), jnp.arange(3.0), jnp.full(3, jnp.nan))
    with pytest.raises(ValueError, match="NaN"):
        kbr.herd(unknown, num_points=2)
    chosen = jax.jit(lambda e: kbr.herd(e, num_points=2).embedding.weights)(unknown)
    assert np.all(np.isnan(chosen))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weights", [[0.3, 0.7], [0.0, 1.0], [1.0, 0.0]])
@pytest.mark.parametrize("scale", [1.0, 0.03])
def test_a_point_that_needs_no_weight(dtype, weights, scale):
    """The loop of the minimum-norm point never returned."""
    x = jnp.asarray(np.array([[0.0, 0.0], [0.0, scale]]), dtype)
    mu = kbr.embed(kbr.Linear(), x, jnp.asarray(np.asarray(weights, dtype)))
    found = kbr.herd(mu, num_points=2, rule="min-norm-point").embedding
    np.testing.assert_allclose(kbr.mean(found), kbr.mean(mu), atol=1e-3 * scale)


def test_continuous_herding_of_what_is_no_belief():
    points = jnp.asarray([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    nan = kbr.embed(kbr.Gaussian(1.0), points, jnp.asarray([jnp.nan, 0.5, 0.5]))
    with pytest.raises(ValueError, match=r"`embedding.weights` contains NaN"):
        kbr.herding.herd_continuous(nan, num_points=2)
    line = kbr.embed(kbr.Gaussian(1.0), points[:, 0])
    with pytest.raises(ValueError, match="`lower` must be a number"):
        kbr.herding.herd_continuous(line, num_points=2, lower=jnp.asarray([-1.0]))
    with pytest.raises(ValueError, match="`lower` must not be above `upper`"):
        kbr.herding.herd_continuous(line, num_points=2, lower=1.0, upper=-1.0)


def test_gradients_through_newton_steps_are_finite():
    points = jnp.asarray([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])

    def loss(h):
        found = kbr.herding.herd_continuous(
            kbr.embed(kbr.Laplace(h), points), num_points=2, num_steps=5, num_starts=2
        )
        return found.objective[-1]

    assert np.isfinite(jax.grad(loss)(1.0))


@pytest.mark.parametrize("bounds", [{}, {"lower": -0.1, "upper": 0.2}])
def test_gradients_of_points_on_a_constant_coordinate(bounds):
    points = jax.random.normal(jax.random.key(0), (20, 2)).at[:, 1].set(3.0)

    def total(weights):
        belief = kbr.embed(kbr.Gaussian(1.0), points, weights)
        return jnp.sum(
            kbr.herding.herd_continuous(
                belief, num_points=1, num_steps=100, **bounds
            ).embedding.points
        )

    weights, move = jnp.full(20, 0.05), jnp.zeros(20).at[0].set(1e-4)
    slope = (total(weights + move) - total(weights - move)) / 2e-4
    np.testing.assert_allclose(jax.grad(total)(weights)[0], slope, rtol=5e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_free_weights_of_a_smooth_kernel(dtype):
    """Points almost in the span of others had weights of 1e5 that cancelled."""
    points = jax.random.normal(jax.random.key(0), (300, 2), dtype)
    belief = kbr.embed(kbr.Gaussian(2.0), points)
    result = kbr.herding.herd(belief, num_points=40, rule="sbq")
    single = dtype == jnp.float32
    apart = kbr.embedding.squared_mmd(result.embedding, belief)
    assert float(apart) < (1e-6 if single else 1e-8)
    assert float(jnp.sum(jnp.abs(result.embedding.weights))) < (10 if single else 1000)
    own = kbr.embedding.squared_norm(belief)
    np.testing.assert_allclose(result.objective[-1] + own, apart, atol=1e-5 if single else 1e-10)
    assert np.all(np.diff(result.objective) <= 0)


def test_traced_nan_weights_give_nan_weights():
    run = jax.jit(
        lambda w: (
            kbr.herding.herd_continuous(
                kbr.embed(kbr.Gaussian(1.0), jnp.arange(5.0), w), num_points=2, num_steps=3
            ).embedding.weights
        )
    )
    assert np.isnan(run(jnp.full(5, jnp.nan))).all()
    np.testing.assert_allclose(run(jnp.full(5, 0.2)), 0.5)
