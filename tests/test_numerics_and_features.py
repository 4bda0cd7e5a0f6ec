"""Numerical primitives, landmarks and features, against NumPy algebra and differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kbr_jax as kbr
from kbr_jax._numerics import jitter, safe_divide, safe_sqrt, squared_distances
from kbr_jax._solves import (
    _complex_resolvent,
    _resolvent_of_blocks,
    psd_factor,
    psd_solve,
    resolvent,
)
from kbr_jax.features import dense_gram, fit_features, landmark_features

N, R = 10, 4


close = closeness(1e-10, 1e-10, "rtol")


def all_finite(tree):
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


def check_gradient(function, *arguments, seed=0, step=1e-5, rtol=1e-6):
    """Gradient in each argument against a central difference along a random direction."""
    value_and_grad = jax.jit(jax.value_and_grad(function, argnums=tuple(range(len(arguments)))))
    gradients = value_and_grad(*arguments)[1]
    rng = np.random.default_rng(seed)
    for index, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        direction = jnp.asarray(rng.normal(size=argument.shape))

        def moved(amount, index=index, direction=direction):
            shifted = arguments[index] + amount * direction
            return value_and_grad(*arguments[:index], shifted, *arguments[index + 1 :])[0]

        difference = (moved(step) - moved(-step)) / (2 * step)
        np.testing.assert_allclose(jnp.sum(gradient * direction), difference, rtol=rtol, atol=1e-8)


def positive(seed, n=N, rank=None):
    root = np.random.default_rng(seed).normal(size=(n, n if rank is None else rank))
    return jnp.asarray(root @ root.T)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


# Solves


@pytest.mark.parametrize("shape", [(N,), (N, 3)])
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_psd_solve_is_the_dense_solve(shape, shift):
    matrix, b = positive(0) + jnp.eye(N), normal(1, *shape)
    close(psd_solve(matrix, b, shift), np.linalg.solve(matrix + shift * np.eye(N), b))
    close(jax.jit(psd_solve)(matrix, b, shift), psd_solve(matrix, b, shift))


def test_one_factor_solves_many_times():
    matrix = positive(2)
    factor = psd_factor(matrix, 0.5)
    dense = np.linalg.inv(np.asarray(matrix) + 0.5 * np.eye(N))
    for seed in (3, 4):
        close(factor.solve(normal(seed, N)), dense @ normal(seed, N))
    lower = np.asarray(factor.upper).T
    close(lower @ lower.T, matrix + 0.5 * jnp.eye(N), atol=1e-9)


def test_psd_solve_under_vmap():
    matrices, b, shifts = (
        jnp.stack([positive(5), positive(6)]),
        normal(7, 2, N, 3),
        jnp.asarray([0.1, 1.0]),
    )
    batch = jax.vmap(psd_solve)(matrices, b, shifts)
    for index in range(2):
        dense = np.asarray(matrices[index]) + float(shifts[index]) * np.eye(N)
        close(batch[index], np.linalg.solve(dense, b[index]))
    columns = jax.vmap(psd_factor(matrices[0], 0.1).solve, in_axes=1, out_axes=1)(b[0])
    close(columns, batch[0])


@pytest.mark.parametrize("shape", [(N,), (N, 2)])
def test_psd_solve_gradient(shape):
    weights = normal(8, *shape)

    def loss(matrix, b, shift):
        return jnp.sum(weights * psd_solve((matrix + matrix.T) / 2, b, shift) ** 2)

    check_gradient(loss, positive(9) + jnp.eye(N), normal(10, *shape), jnp.asarray(0.7))


def test_psd_solve_second_derivative():
    matrix, b = positive(11) + jnp.eye(N), normal(12, N)
    quadratic = lambda shift: b @ psd_solve(matrix, b, shift)  # noqa: E731
    dense = np.linalg.inv(np.asarray(matrix) + 0.4 * np.eye(N))
    close(jax.jit(jax.grad(jax.grad(quadratic)))(0.4), 2 * b @ dense @ dense @ dense @ b)


def test_psd_solve_of_singular_matrices_is_finite():
    wide = jnp.exp(-((jnp.linspace(0, 1, 5)[:, None] - jnp.linspace(0, 1, 5)) ** 2) / 5000)
    solve = jax.jit(jax.value_and_grad(lambda matrix: jnp.sum(psd_solve(matrix, jnp.ones(5)))))
    for matrix in (
        positive(13, n=5, rank=2),
        wide,
        jnp.zeros((5, 5)),
        jnp.ones((5, 5)),
        1e-100 * jnp.eye(5),
    ):
        assert all_finite(solve(matrix))


def test_refinement_removes_the_jitter():
    matrix, shift = positive(14, n=30, rank=5), 1e-6
    values, vectors = np.linalg.eigh(np.asarray(matrix))
    values = np.where(np.arange(30) < 25, 0, values)
    b = normal(15, 30)
    exact = vectors @ ((vectors.T @ np.asarray(b)) / (values + shift))
    close(psd_solve(matrix, b, shift), exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


def test_jitter_follows_scale_and_dtype():
    matrix = positive(16)
    close(jitter(1e6 * matrix), 1e6 * jitter(matrix))
    assert jitter(matrix.astype(jnp.float32)).dtype == jnp.float32
    assert 0 < float(jitter(jnp.zeros((4, 4)))) < 1e-12


def similar_to_symmetric(seed):
    """A matrix with a real spectrum of both signs, as a Gram matrix of signed weights."""
    return normal(seed, N)[:, None] * positive(seed + 1)


@pytest.mark.parametrize("shape", [(N,), (N, 2)])
def test_resolvent_is_the_printed_formula(shape):
    matrix, b, delta = similar_to_symmetric(20), normal(22, *shape), 0.03
    first, second = resolvent(matrix, jnp.asarray(delta), b)
    inverse = np.linalg.inv(np.asarray(matrix) @ np.asarray(matrix) + delta * np.eye(N))
    close(second, inverse @ b, rtol=1e-9)
    close(first, matrix @ inverse @ b, rtol=1e-9)


def test_the_resolvent_of_a_tpu_is_that_of_others():
    matrix, shift, b = positive(20), jnp.asarray(0.3), normal(22, N, 2)
    for one, other in zip(
        _resolvent_of_blocks(matrix, shift, b), _complex_resolvent(matrix, shift, b), strict=True
    ):
        close(one, other)


def test_resolvent_gradient():
    weights = normal(23, 2, N)

    def loss(matrix, delta, b):
        first, second = resolvent(matrix, delta, b)
        return weights[0] @ first + weights[1] @ second

    check_gradient(loss, similar_to_symmetric(24), jnp.asarray(0.3), normal(26, N))


# Elementary functions


@pytest.mark.parametrize("d", [1, 3, 16, 17, 30])
def test_squared_distances(d):
    x, y = normal(30, 6, d), normal(31, 4, d)
    expected = ((np.asarray(x)[:, None] - np.asarray(y)[None]) ** 2).sum(-1)
    close(squared_distances(x, y), expected, rtol=1e-13, atol=1e-13)
    weights = normal(32, 6, 4)
    check_gradient(lambda x, y: jnp.sum(weights * squared_distances(x, y)), x, y)


@pytest.mark.parametrize("d", [3, 30])
@pytest.mark.parametrize("offset", [0, 1e3, 1e5])
def test_squared_distances_do_not_lose_digits_to_an_offset(d, offset):
    x, y = (offset + normal(seed, 6, d).astype(jnp.float32) for seed in (33, 34))
    exact = ((np.asarray(x, np.float64)[:, None] - np.asarray(y, np.float64)[None]) ** 2).sum(-1)
    distances = squared_distances(x, y)
    assert distances.dtype == jnp.float32
    close(distances, exact, rtol=1e-5)


@pytest.mark.parametrize("d", [3, 30])
def test_squared_distances_are_never_negative(d):
    x = jnp.repeat(normal(35, 4, d), 2, axis=0)
    distances, gradient = jax.value_and_grad(lambda x: jnp.sum(squared_distances(x, x)))(x)
    assert float(jnp.min(squared_distances(x, x))) >= 0 and all_finite((distances, gradient))


@pytest.mark.parametrize("d", [3, 40])
def test_no_distance_depends_on_the_other_points(d):
    x, y = (normal(seed, 6, d).astype(jnp.float32) for seed in (36, 37))
    alone = squared_distances(x, y)
    for stray in (1e5, jnp.inf, jnp.nan):
        for found in (
            squared_distances(x.at[-1].set(stray), y)[:-1],
            squared_distances(y, x.at[-1].set(stray)).T[:-1],
        ):
            close(found, alone[:-1], rtol=1e-5)
    assert bool(jnp.all(jnp.isnan(squared_distances(x.at[-1, 0].set(jnp.nan), y)[-1])))


@pytest.mark.parametrize("d", [3, 40])
@pytest.mark.parametrize("scale", ["one", "each"])
def test_distances_within_clusters_far_apart(d, scale):
    x = jnp.concatenate([normal(38, 3, d), 3e3 + normal(39, 3, d)]).astype(jnp.float32)
    scale = jnp.asarray(0.7 if scale == "one" else 0.5 + np.arange(d) / d, jnp.float32)
    wide = np.asarray(x, np.float64) / np.asarray(scale, np.float64)
    exact = ((wide[:, None] - wide[None]) ** 2).sum(-1)
    close(squared_distances(x, x, scale), exact, rtol=1e-5, atol=1e-5)
    ours, double = (
        jax.grad(
            lambda x, scale: jnp.sum(jnp.exp(-squared_distances(x, x, scale) / d)), argnums=(0, 1)
        )(*arguments)
        for arguments in ((x, scale), (x.astype(jnp.float64), scale.astype(jnp.float64)))
    )
    for found, expected in zip(ours, double, strict=True):
        close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("d", [2, 20])
def test_second_derivative_at_a_copy(d):
    x = normal(40, 3, d)
    hessian = jax.hessian(lambda a: kbr.gram(kbr.Gaussian(2.0), a[None], x)[0, 0])(x[0])
    close(hessian, -np.eye(d) / 4)


@pytest.mark.parametrize("d", [3, 20])
def test_distances_of_no_points_and_inside_a_mesh(d):
    x, scale = normal(40, 4, d), jnp.asarray(2.0)
    assert squared_distances(x[:0], x).shape == (0, 4)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("i",))
    spread = jax.shard_map(
        squared_distances, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P("i")
    )
    close(spread(x, x, scale), squared_distances(x, x, scale))
    gradient = jax.grad(lambda scale: jnp.sum(jnp.exp(-spread(x, x, scale * jnp.ones(d)))))(scale)
    close(
        gradient, jax.grad(lambda scale: jnp.sum(jnp.exp(-squared_distances(x, x, scale))))(scale)
    )


@pytest.mark.parametrize("unit", [1e-19, 1e19])
def test_distances_in_any_unit(unit):
    x = normal(40, 4, 20).astype(jnp.float32)
    close(
        squared_distances(x * unit, x * unit, unit), squared_distances(x, x), rtol=1e-5, atol=1e-5
    )


def test_in_a_batch_one_way_is_taken_for_all():
    x = normal(38, 3, 5, 20).astype(jnp.float32).at[1, 0].add(1e4)
    found = jax.vmap(squared_distances)(x, x)
    close(found, np.stack([squared_distances(one, one) for one in x]), rtol=1e-4, atol=1e-4)
    compiled = jax.jit(jax.vmap(squared_distances)).lower(x, x).compile().as_text()
    assert " conditional(" in compiled


def test_the_gradient_in_many_scales_keeps_no_squares():
    x, scale = normal(38, 64, 160), jnp.full(160, 2.0)
    gradient = jax.jit(jax.grad(lambda scale: jnp.sum(jnp.exp(-squared_distances(x, x, scale)))))
    memory = gradient.lower(scale).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 64 * 160 * 8 / 3
    check_gradient(
        lambda x, scale: jnp.sum(jnp.exp(-squared_distances(x, x, scale) / 160)), x, scale
    )
    hessian = jax.hessian(
        lambda scale: jnp.sum(jnp.exp(-squared_distances(x[:3], x[:3], scale) / 160))
    )(scale[:160])
    close(hessian, hessian.T)


def test_safe_sqrt():
    x = jnp.asarray([-1.0, 0.0, 4.0])
    close(safe_sqrt(x), [0, 0, 2])
    close(jax.grad(lambda x: jnp.sum(safe_sqrt(x)))(x), [0, 0, 0.25])


def test_safe_divide():
    a, b = jnp.asarray([1.0, 0.0, 6.0]), jnp.asarray([0.0, 0.0, 3.0])
    close(safe_divide(a, b), [0, 0, 2])
    gradients = jax.grad(lambda a, b: jnp.sum(safe_divide(a, b)), argnums=(0, 1))(a, b)
    close(gradients[0], [0, 0, 1 / 3])
    close(gradients[1], [0, 0, -2 / 3])


# Landmarks

KERNEL = kbr.Gaussian(1.2)
POINTS = normal(40, N, 2)
REPEATED = jnp.concatenate([POINTS[:3]] * 3)
GRAM = np.exp(
    -((np.asarray(POINTS)[:, None] - np.asarray(POINTS)[None]) ** 2).sum(-1) / (2 * 1.2**2)
)


def greedy_oracle(gram, rank):
    """Pivoted Cholesky decomposition on the explicit Schur complement."""
    rest, pivots, columns = np.array(gram), [], []
    for _ in range(rank):
        pivot = int(np.argmax(np.diagonal(rest)))
        column = rest[:, pivot] / np.sqrt(rest[pivot, pivot])
        rest = rest - np.outer(column, column)
        pivots.append(pivot)
        columns.append(column)
    return pivots, np.stack(columns, axis=1), rest


@pytest.mark.parametrize("rank", [1, 8])
def test_incomplete_cholesky_is_the_greedy_decomposition(rank):
    # A point-dependent scale breaks the ties of a constant diagonal.
    kernel = KERNEL * (kbr.Linear() + kbr.Gaussian(50.0))
    gram = np.asarray(kbr.gram(kernel, POINTS))
    pivots, factor, rest = greedy_oracle(gram, rank)
    result = kbr.features.incomplete_cholesky(kernel, POINTS, rank=rank)
    assert list(np.asarray(result.pivots)) == pivots and bool(jnp.all(result.active))
    close(result.factor, factor, rtol=1e-8, atol=1e-8)
    close(result.residual, np.diagonal(rest), atol=1e-12)
    close(result.residual, np.diagonal(gram) - (np.asarray(result.factor) ** 2).sum(1), atol=1e-12)


def test_incomplete_cholesky_of_full_rank_is_exact():
    result = kbr.features.incomplete_cholesky(KERNEL, POINTS, rank=N)
    close(result.factor @ result.factor.T, GRAM)
    assert sorted(np.asarray(result.pivots)) == list(range(N))
    more = kbr.features.incomplete_cholesky(KERNEL, POINTS, rank=10 * N)
    close(more.factor, result.factor)


@pytest.mark.parametrize("key", [None, 0])
def test_rank_running_out(key):
    key = None if key is None else jax.random.key(key)
    result = kbr.features.incomplete_cholesky(KERNEL, REPEATED, rank=6, key=key)
    assert list(np.asarray(result.active)) == [True] * 3 + [False] * 3
    assert len({int(pivot) % 3 for pivot in result.pivots[:3]}) == 3
    assert not np.any(result.factor[:, 3:])
    close(result.factor @ result.factor.T, kbr.gram(KERNEL, REPEATED))


def test_features_of_a_rank_that_ran_out_are_finite():
    landmarks = kbr.greedy_landmarks(KERNEL, REPEATED, rank=6)

    def features(bandwidth):
        return landmark_features(kbr.Gaussian(bandwidth), REPEATED, landmarks).matrix

    coordinates, slope = jax.jit(lambda h: jax.jvp(features, (h,), (jnp.ones_like(h),)))(
        jnp.asarray(1.2)
    )
    assert (
        all_finite((coordinates, slope))
        and not np.any(coordinates[:, 3:])
        and not np.any(slope[:, 3:])
    )
    close(coordinates @ coordinates.T, kbr.gram(KERNEL, REPEATED))
    assert all_finite(jax.jit(jax.grad(lambda h: jnp.sum(features(h) ** 3)))(1.2))


def test_repeated_active_landmarks_are_finite():
    def loss(bandwidth, points):
        landmarks = kbr.Landmarks(jnp.concatenate([points, points]))
        return jnp.sum(landmark_features(kbr.Gaussian(bandwidth), POINTS, landmarks).matrix ** 2)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    assert all_finite(gradient(jnp.asarray(1.2), POINTS[:3]))


@pytest.mark.parametrize("tolerance", [0.5, 0.1, 0.01])
def test_tolerance_stops_the_decomposition(tolerance):
    result = kbr.features.incomplete_cholesky(KERNEL, POINTS, rank=N, tolerance=tolerance)
    count = int(jnp.sum(result.active))
    assert 0 < count < N and bool(jnp.all(result.active[:count]))
    traces = [np.trace(greedy_oracle(GRAM, rank)[2]) if rank else N for rank in (count - 1, count)]
    assert traces[1] <= tolerance * N < traces[0]
    close(jnp.sum(result.residual), traces[1])


def test_random_pivots():
    draws = [
        kbr.features.incomplete_cholesky(KERNEL, POINTS, rank=R, key=jax.random.key(seed))
        for seed in (0, 0, 1, 2)
    ]
    close(draws[0].factor, draws[1].factor, rtol=0, atol=0)
    assert len({tuple(np.asarray(draw.pivots)) for draw in draws}) == 3
    for draw in draws:
        assert len(set(np.asarray(draw.pivots).tolist())) == R
        factor = np.asarray(draw.factor)
        close(draw.residual, np.diagonal(GRAM) - (factor**2).sum(1), atol=1e-12)
        assert np.linalg.eigvalsh(GRAM - factor @ factor.T).min() > -1e-12
        assert float(jnp.sum(draw.residual)) < 0.4 * N


def test_random_pivots_follow_the_residual():
    labels = jnp.asarray([0] * 6 + [1] * 3 + [2])
    keys = jax.random.split(jax.random.key(3), 400)
    first = jax.vmap(
        lambda key: kbr.features.incomplete_cholesky(kbr.Delta(), labels, rank=1, key=key).pivots[0]
    )(keys)
    share = np.bincount(np.asarray(labels)[np.asarray(first)], minlength=3) / 400
    np.testing.assert_allclose(share, [0.6, 0.3, 0.1], atol=0.08)  # three standard errors


def test_kinds_of_landmarks():
    key = jax.random.key(4)
    uniform = kbr.uniform_landmarks(POINTS, rank=R, key=key)
    close(uniform.points, kbr.uniform_landmarks(POINTS, rank=R, key=key).points, atol=0)
    rows = {tuple(row) for row in np.asarray(POINTS)}
    assert len({tuple(row) for row in np.asarray(uniform.points)} & rows) == R
    greedy = kbr.greedy_landmarks(KERNEL, POINTS, rank=R)
    close(
        greedy.points,
        POINTS[kbr.features.incomplete_cholesky(KERNEL, POINTS, rank=R).pivots],
        atol=0,
    )
    random = kbr.rpcholesky_landmarks(KERNEL, POINTS, rank=R, key=key)
    close(
        random.points,
        POINTS[kbr.features.incomplete_cholesky(KERNEL, POINTS, rank=R, key=key).pivots],
        atol=0,
    )
    given = kbr.Landmarks(POINTS[:3])
    assert all(bool(jnp.all(landmarks.active)) for landmarks in (uniform, greedy, random, given))
    pair = kbr.greedy_landmarks(
        kbr.TensorProduct((KERNEL, kbr.Delta())), (POINTS, jnp.arange(N) % 2), rank=R
    )
    assert pair.points[0].shape == (R, 2) and pair.points[1].shape == (R,)


def test_landmarks_under_jit():
    compiled = jax.jit(lambda h, x: kbr.greedy_landmarks(kbr.Gaussian(h), x, rank=R))(1.2, POINTS)
    close(compiled.points, kbr.greedy_landmarks(KERNEL, POINTS, rank=R).points, atol=0)


def test_no_gradient_flows_through_the_choice():
    gradient = jax.grad(
        lambda h: jnp.sum(kbr.features.incomplete_cholesky(kbr.Gaussian(h), POINTS, rank=R).factor)
    )(1.2)
    assert float(gradient) == 0


# Features


@pytest.mark.parametrize("rank", [1, R])
def test_features_of_the_pivots_are_the_incomplete_cholesky_factor(rank):
    decomposition = kbr.features.incomplete_cholesky(KERNEL, POINTS, rank=rank)
    features = fit_features(KERNEL, POINTS, rank)
    assert features.matrix.shape == (N, rank) and features.size == N
    close(features.matrix, decomposition.factor, rtol=1e-8, atol=1e-8)


def test_features_are_the_nystroem_approximation():
    landmarks = kbr.Landmarks(POINTS[:R])
    features = landmark_features(KERNEL, POINTS, landmarks)
    nystroem = GRAM[:, :R] @ np.linalg.solve(GRAM[:R, :R], GRAM[:R])
    close(features.matrix @ features.matrix.T, nystroem)
    close(features.coordinates(POINTS[2:5]), features.matrix[2:5])
    moved = features.at(POINTS[3:])
    close(moved.matrix, features.matrix[3:])
    assert moved.size == N - 3


def test_exact_features():
    features = dense_gram(KERNEL, POINTS)
    close(features.matrix, GRAM)
    close(features.coordinates(POINTS[:2]), GRAM[:2])
    close(features.at(POINTS[:3]).matrix, GRAM[:3, :3])
    assert fit_features(KERNEL, POINTS, None).size == N


@functools.cache
def both_forms(count):
    """Landmark features, and exact features of the kernel that they define: K = Phi Phi^T."""
    features = landmark_features(KERNEL, POINTS, kbr.Landmarks(POINTS[:count]))

    def kernel(a, b):
        coordinates = features.coordinates(jnp.stack([a, b]))
        return coordinates[0] @ coordinates[1]

    return features, dense_gram(kbr.kernels.as_kernel(kernel), POINTS)


QUERIES = normal(41, 3, 2)
SIGNED = normal(42, N) / N
LAMBDA = jnp.asarray(0.05)


@pytest.fixture(params=[R, N])
def forms(request):
    return both_forms(request.param)


def test_all_points_as_landmarks_are_exact():
    features = both_forms(N)[0]
    close(features.matrix @ features.matrix.T, GRAM)
    exact = dense_gram(KERNEL, POINTS)
    for form in (features, exact):
        weights = form.ridge_weights(form.ridge(LAMBDA), form.coordinates(QUERIES))
        dense = np.linalg.solve(
            GRAM + N * float(LAMBDA) * np.eye(N), exact.coordinates(QUERIES).T
        ).T
        close(weights, dense)


def test_ridge_weights_agree(forms):
    exact = forms[1]
    dense = np.asarray(exact.matrix) + N * float(LAMBDA) * np.eye(N)
    expected = np.linalg.solve(dense, np.asarray(exact.coordinates(QUERIES)).T).T
    for form in forms:
        close(form.ridge_weights(form.ridge(LAMBDA), form.coordinates(QUERIES)), expected)
        close(form.ridge_weights(form.ridge(LAMBDA), form.coordinates(QUERIES)), expected)


def test_expand_and_contract_are_adjoint(forms):
    for form in forms:
        coefficients, values = normal(44, 2, form.matrix.shape[1]), normal(45, 2, N)
        close(
            jnp.sum(form.to_sample(coefficients) * values),
            jnp.sum(coefficients * form.from_sample(values)),
        )


@pytest.mark.parametrize("delta", [1e-1, 1e-3])
def test_posterior_agrees(forms, delta):
    gram = np.asarray(forms[1].matrix)
    weighted = np.diag(SIGNED) @ gram
    k = np.asarray(forms[1].coordinates(QUERIES)).T
    inverse = np.linalg.inv(weighted @ weighted + delta * np.eye(N))
    beta = (weighted @ inverse @ np.diag(SIGNED) @ k).T
    values = (gram @ inverse @ np.diag(SIGNED) @ k).T
    for form in forms:
        actual = form.posterior(SIGNED, form.coordinates(QUERIES), jnp.asarray(delta))
        close(actual[0], beta)
        close(actual[1], values)
        close(SIGNED * actual[1], actual[0])


def test_importance_posterior_agrees(forms):
    weights = jnp.maximum(SIGNED, 0)
    root = np.diag(np.sqrt(weights))
    gram, k = np.asarray(forms[1].matrix), np.asarray(forms[1].coordinates(QUERIES)).T
    dense = root @ np.linalg.solve(root @ gram @ root + float(LAMBDA) * np.eye(N), root @ k)
    for form in forms:
        close(form.importance_posterior(weights, form.coordinates(QUERIES), LAMBDA), dense.T)


def test_importance_posterior_gradient_at_zero_weights(forms):
    for form in forms:
        coordinates = form.coordinates(QUERIES)

        def loss(w, form=form, coordinates=coordinates):
            return jnp.sum(form.importance_posterior(w, coordinates, LAMBDA) ** 2)

        assert all_finite(jax.jit(jax.grad(loss))(jnp.maximum(SIGNED, 0)))


def test_centred_operator_agrees(forms):
    centering = np.eye(N) - 1 / N
    features, exact = forms
    close(exact.ridge_matrix(True), centering @ np.asarray(exact.matrix) @ centering)
    phi = np.asarray(features.matrix)
    close(features.ridge_matrix(True), phi.T @ centering @ phi)
    k = np.asarray(exact.coordinates(QUERIES)).T
    dense = np.linalg.solve(
        centering @ np.asarray(exact.matrix) @ centering + N * float(LAMBDA) * np.eye(N),
        centering @ k,
    )
    for form in forms:
        weights = form.ridge_weights(
            form.ridge(LAMBDA, centered=True), form.center(form.coordinates(QUERIES))
        )
        close(weights - jnp.mean(weights, axis=-1, keepdims=True), dense.T)


def weights_of(bandwidth, landmarks):
    features = landmark_features(kbr.Gaussian(bandwidth), POINTS, landmarks)
    return features.ridge_weights(features.ridge(LAMBDA), features.coordinates(QUERIES))


def test_gradient_in_the_bandwidth_at_fixed_landmarks():
    landmarks, mix = kbr.greedy_landmarks(KERNEL, POINTS, rank=R), normal(46, 3, N)
    check_gradient(lambda h: jnp.sum(mix * weights_of(h, landmarks)), jnp.asarray(1.2))


def test_gradient_in_learnable_landmarks():
    mix = normal(47, 3, N)
    check_gradient(lambda p: jnp.sum(mix * weights_of(1.2, kbr.Landmarks(p))), POINTS[:R] + 0.1)


@pytest.mark.parametrize("landmarks", [None, R])
def test_gradient_in_bandwidth_weights_and_regularizer(landmarks):
    chosen = None if landmarks is None else kbr.greedy_landmarks(KERNEL, POINTS, rank=landmarks)
    mix = normal(48, 4, 3, N)

    def loss(bandwidth, weights, regularizer):
        features = fit_features(kbr.Gaussian(bandwidth), POINTS, chosen)
        coordinates = features.coordinates(QUERIES)
        results = [
            features.ridge_weights(features.ridge(regularizer), coordinates),
            *features.posterior(weights, coordinates, regularizer),
            features.importance_posterior(weights**2 + 0.05, coordinates, regularizer),
        ]
        return jnp.sum(mix * jnp.stack(results))

    check_gradient(loss, jnp.asarray(1.2), SIGNED, jnp.asarray(0.02), step=1e-6)


@pytest.mark.parametrize("landmarks", [None, 3])
def test_a_single_point(landmarks):
    def loss(bandwidth):
        features = fit_features(kbr.Gaussian(bandwidth), POINTS[:1], landmarks)
        coordinates = features.coordinates(QUERIES)
        one = jnp.ones(1)
        return (
            features.ridge_weights(features.ridge(LAMBDA), coordinates),
            features.posterior(one, coordinates, LAMBDA),
            features.importance_posterior(one, coordinates, LAMBDA),
            features.ridge_weights(
                features.ridge(LAMBDA, centered=True), features.center(coordinates)
            ),
        )

    values, slopes = jax.jit(lambda h: jax.jvp(loss, (h,), (jnp.ones_like(h),)))(jnp.asarray(1.2))
    assert all_finite((values, slopes))
    close(values[0][:, 0], np.asarray(kbr.gram(KERNEL, QUERIES, POINTS[:1]))[:, 0] / 1.05)
