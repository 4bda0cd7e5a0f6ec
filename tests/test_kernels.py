"""Every kernel on points of its domain.

Values against the printed formula, positivity, transformations, gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness
from scipy.spatial.distance import pdist

import kbr_jax as kbr
from kbr_jax.kernels import FunctionKernel, Product, Scaled, Sum, as_kernel

N, M = 6, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel family over a scale of its parameters, two samples without common points, and the
    printed formula.
    """

    name: str
    make: Callable[[float], Any]
    x: Any
    y: Any
    formula: Callable[[Any, Any, float], float]


def with_duplicates(sample):
    """The last point repeats the first, so that every sample holds a distance of zero off the
    diagonal.
    """
    sample[-1] = sample[0]
    return jnp.asarray(sample)


def vectors(seed, d=3):
    rng = np.random.default_rng(seed)
    return with_duplicates(rng.normal(size=(N, d))), jnp.asarray(rng.normal(size=(M, d)))


def histograms(seed, d=5):
    """Histograms; those of the first sample have empty bins, two of them the same bin."""
    rng = np.random.default_rng(seed)
    x, y = rng.dirichlet(np.ones(d), size=N), rng.dirichlet(np.ones(d), size=M)
    x[0, 0] = x[1, 0] = x[2, 3] = 0
    return with_duplicates(x), jnp.asarray(y)


def rotations(seed):
    rng = np.random.default_rng(seed)

    def draw(n):
        q, _ = np.linalg.qr(rng.normal(size=(n, 3, 3)))
        return q * np.sign(np.linalg.det(q))[:, None, None]

    return with_duplicates(draw(N)), jnp.asarray(draw(M))


def labels(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, 3, size=(N, *shape))), jnp.asarray(
        rng.integers(0, 3, size=(M, *shape))
    )


def paired(first, second):
    return tuple(zip(first, second, strict=True))


def squared(a, b, h):
    return np.sum(((a - b) / h) ** 2)


def gaussian(a, b, h):
    return np.exp(-squared(a, b, h) / 2)


def matern12(a, b, h):
    return np.exp(-np.sqrt(squared(a, b, h)))


def matern32(a, b, h):
    r = np.sqrt(squared(a, b, h))
    return (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)


def matern52(a, b, h):
    r = np.sqrt(squared(a, b, h))
    return (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r)


def rational_quadratic(a, b, h, alpha):
    return (1 + squared(a, b, h) / (2 * alpha)) ** -alpha


def laplace(a, b, h):
    return np.exp(-np.sum(np.abs(a - b) / h))


def intersection(a, b):
    return np.sum(np.minimum(a, b)) / len(a)


def chi_squared(a, b, h):
    terms = [0.0 if p + q == 0 else (p - q) ** 2 / ((p + q) / 2) for p, q in zip(a, b, strict=True)]
    return np.exp(-np.sum(terms) / len(a) / (2 * h**2))


def equal(a, b):
    return float(np.all(a == b))


def plain(a, b):
    return jnp.exp(-jnp.sum((a - b) ** 2) / 2)


def with_parameter(h, a, b):
    return jnp.exp(-jnp.sum((a - b) ** 2) / (2 * h**2))


ARD = np.array([0.6, 1.1, 2.0])
STATIONARY = {
    "gaussian": (kbr.Gaussian, gaussian),
    "matern12": (kbr.Matern12, matern12),
    "matern32": (kbr.Matern32, matern32),
    "matern52": (kbr.Matern52, matern52),
    "laplace": (kbr.Laplace, laplace),
}
BASIS = np.random.default_rng(90).normal(size=(9, 9))
GIVEN = BASIS @ BASIS.T


def stationary_cases():
    for seed, (name, (kind, formula)) in enumerate(STATIONARY.items()):
        yield Case(
            name,
            lambda s, k=kind: k(1.3 * s),
            *vectors(seed),
            lambda a, b, s, f=formula: f(a, b, 1.3 * s),
        )
        if name in ("matern12", "matern32"):  # the path of Matern 5/2
            continue
        yield Case(
            f"{name}-ard",
            lambda s, k=kind: k(jnp.asarray(ARD * s)),
            *vectors(seed),
            lambda a, b, s, f=formula: f(a, b, ARD * s),
        )
    yield Case(
        "rational-quadratic",
        lambda s: kbr.RationalQuadratic(1.2 * s, 0.7 * s),
        *vectors(10),
        lambda a, b, s: rational_quadratic(a, b, 1.2 * s, 0.7 * s),
    )
    yield Case(
        "rational-quadratic-ard",
        lambda s: kbr.RationalQuadratic(jnp.asarray(ARD * s), alpha=2.0),
        *vectors(11),
        lambda a, b, s: rational_quadratic(a, b, ARD * s, 2.0),
    )
    yield Case(
        "gaussian-wide",
        lambda s: kbr.Gaussian(4.0 * s),
        *vectors(0, d=20),
        lambda a, b, s: gaussian(a, b, 4.0 * s),
    )
    scalars = tuple(part[:, 0] for part in vectors(12))
    yield Case(
        "gaussian-scalars",
        lambda s: kbr.Gaussian(0.8 * s),
        *scalars,
        lambda a, b, s: gaussian(a, b, 0.8 * s),
    )
    yield Case(
        "gaussian-matrices",
        lambda s: kbr.Gaussian(jnp.asarray(np.stack([ARD, ARD, 2 * ARD]) * s)),
        *rotations(13),
        lambda a, b, s: gaussian(a, b, np.stack([ARD, ARD, 2 * ARD]) * s),
    )


def other_cases():
    yield Case("linear", lambda s: kbr.Linear(), *vectors(20), lambda a, b, s: a @ b)
    yield Case(
        "polynomial",
        lambda s: kbr.Polynomial(3, 0.4 * s, 1.5 * s),
        *vectors(21),
        lambda a, b, s: (0.4 * s * (a @ b) + 1.5 * s) ** 3,
    )
    yield Case(
        "histogram-intersection",
        lambda s: kbr.kernels.HistogramIntersection(),
        *histograms(22),
        _drop(intersection),
    )
    yield Case(
        "chi-squared",
        lambda s: kbr.kernels.ChiSquared(0.5 * s),
        *histograms(23),
        lambda a, b, s: chi_squared(a, b, 0.5 * s),
    )
    yield Case(
        "trace-rotations", lambda s: kbr.Linear(), *rotations(24), lambda a, b, s: np.trace(a.T @ b)
    )
    yield Case("delta", lambda s: kbr.Delta(), *labels(27), _drop(equal))
    yield Case("delta-tuples", lambda s: kbr.Delta(), *labels(28, 2), _drop(equal))
    yield Case(
        "precomputed",
        lambda s: kbr.Precomputed(jnp.asarray(GIVEN * s)),
        *(3 * part for part in labels(29)),
        lambda a, b, s: s * GIVEN[a, b],
    )
    yield Case(
        "sum",
        lambda s: kbr.Gaussian(0.8 * s) + kbr.Polynomial(2, 0.3 * s),
        *vectors(30),
        lambda a, b, s: gaussian(a, b, 0.8 * s) + (0.3 * s * (a @ b) + 1) ** 2,
    )
    yield Case(
        "product",
        lambda s: kbr.Matern32(1.8 * s) * kbr.Linear(),
        *vectors(31),
        lambda a, b, s: matern32(a, b, 1.8 * s) * (a @ b),
    )
    yield Case(
        "scaled",
        lambda s: 2.5 * s * (kbr.Gaussian(0.8) + kbr.Linear() * 0.3),
        *vectors(32),
        lambda a, b, s: 2.5 * s * (gaussian(a, b, 0.8) + 0.3 * (a @ b)),
    )
    yield Case(
        "callable", lambda s: as_kernel(plain), *vectors(33), lambda a, b, s: gaussian(a, b, 1.0)
    )
    yield Case(
        "callable-with-parameter",
        lambda s: as_kernel(
            jax.tree_util.Partial(with_parameter, jnp.asarray(np.asarray(0.7 * s)))
        ),
        *vectors(34),
        lambda a, b, s: gaussian(a, b, 0.7 * s),
    )
    yield Case(
        "tensor-product",
        lambda s: kbr.TensorProduct((kbr.Delta(), kbr.Matern52(1.1 * s))),
        *paired(labels(35), vectors(35)),
        lambda a, b, s: equal(a[0], b[0]) * matern52(a[1], b[1], 1.1 * s),
    )
    yield Case(
        "direct-sum",
        lambda s: kbr.DirectSum((kbr.Gaussian(1.1 * s), 2.0 * s * kbr.Linear())),
        *paired(vectors(36), rotations(36)),
        lambda a, b, s: gaussian(a[0], b[0], 1.1 * s) + 2 * s * np.trace(a[1].T @ b[1]),
    )


def _drop(formula):
    return lambda a, b, s: formula(a, b)


CASES = {case.name: case for case in [*stationary_cases(), *other_cases()]}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def unstack(sample):
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, sample))
    return [jax.tree.unflatten(structure, parts) for parts in zip(*leaves, strict=True)]


def brute_force(case, x, y, scale=1.0):
    return np.array([[case.formula(a, b, scale) for b in unstack(y)] for a in unstack(x)])


def floats(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


close = closeness(1e-12, 1e-12, "rtol")


def directional_errors(value, gradient, tree, rng, step=1e-5):
    """For each float leaf of `tree`.

    Derivative along a random direction, by `gradient` and by central differences.
    """
    leaves, structure = jax.tree.flatten(floats(tree))
    rest = eqx.filter(tree, eqx.is_inexact_array, inverse=True)
    slopes = jax.tree.leaves(floats(gradient))
    assert len(slopes) == len(leaves)
    for index, (leaf, slope) in enumerate(zip(leaves, slopes, strict=True)):
        direction = jnp.asarray(rng.normal(size=leaf.shape))

        def moved(amount, index=index, leaf=leaf, direction=direction):
            parts = [*leaves[:index], leaf + amount * direction, *leaves[index + 1 :]]
            return value(eqx.combine(jax.tree.unflatten(structure, parts), rest))

        yield float(jnp.sum(slope * direction)), float((moved(step) - moved(-step)) / (2 * step))


@functools.cache
def computed(name):
    """Gram matrix, cross Gram matrix and diagonal of a case."""
    case = CASES[name]
    kernel = case.make(1.0)
    return (
        kbr.gram(kernel, case.x),
        kbr.gram(kernel, case.x, case.y),
        kbr.kernels.diagonal(kernel, case.x),
    )


WEIGHTS = np.random.default_rng(70).uniform(0.5, 1.5, size=(N, M))


@functools.cache
def compiled_loss(name):
    """A random combination of the entries of k(x, y), with its gradient in kernel and x, traced
    once for each case.
    """
    del name  # the key of the cache
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def loss(differentiable, y):
        return jnp.sum(jnp.asarray(WEIGHTS) * kbr.gram(*differentiable, y))

    return eqx.filter_jit(eqx.filter_value_and_grad(loss))


def test_gram_is_the_printed_formula(case):
    gram, cross, _ = computed(case.name)
    close(gram, brute_force(case, case.x, case.x))
    assert cross.shape == (N, M) and cross.dtype == jnp.float64
    close(cross, brute_force(case, case.x, case.y))


def test_single_values_are_the_entries_of_the_gram_matrix(case):
    kernel, cross = case.make(1.0), computed(case.name)[1]
    for i, j in [(0, 0), (N - 1, 1)]:
        value = kernel(
            jax.tree.map(lambda leaf, i=i: leaf[i], case.x),
            jax.tree.map(lambda leaf, j=j: leaf[j], case.y),
        )
        assert value.shape == ()
        close(value, cross[i, j])


def test_gram_is_symmetric_and_positive_semidefinite(case):
    gram = np.asarray(computed(case.name)[0])
    close(gram, gram.T, rtol=0, atol=1e-14 * np.abs(gram).max())
    assert np.linalg.eigvalsh(gram).min() >= -1e-12 * np.trace(gram)


def test_diagonal_is_that_of_the_gram_matrix(case):
    gram, _, diagonal = computed(case.name)
    assert diagonal.shape == (N,)
    close(diagonal, np.diagonal(gram))


def test_jit_and_vmap_over_kernel_and_points(case):
    kernels = [case.make(1.0), case.make(1.2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *kernels)
    flipped = jax.tree.map(lambda leaf: leaf[::-1], case.x)
    samples = jax.tree.map(lambda a, b: jnp.stack([a, b]), case.x, flipped)
    batch = jax.jit(jax.vmap(lambda k, x: (kbr.gram(k, x, case.y), kbr.kernels.diagonal(k, x))))(
        stacked, samples
    )
    close(batch[0], [brute_force(case, case.x, case.y), brute_force(case, flipped, case.y, 1.2)])
    close(batch[1][0], computed(case.name)[2])
    close(batch[1][1], kbr.kernels.diagonal(kernels[1], flipped))


def test_pytree_round_trip(case):
    kernel = case.make(1.0)
    leaves, structure = jax.tree.flatten(kernel)
    assert all(eqx.is_inexact_array(leaf) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert eqx.tree_equal(again, kernel)
    assert structure == jax.tree.structure(case.make(2.0))


def test_traced_once_for_different_parameter_values(case):
    for scale in (1.0, 1.7):
        value, _ = compiled_loss(case.name)((case.make(scale), case.x), case.y)
        close(value, np.sum(WEIGHTS * brute_force(case, case.x, case.y, scale)))


def test_gradient_with_respect_to_every_parameter(case):
    loss, kernel, rng = compiled_loss(case.name), case.make(1.0), np.random.default_rng(71)
    _, (gradient, _) = loss((kernel, case.x), case.y)
    for slope, difference in directional_errors(
        lambda k: loss((k, case.x), case.y)[0], gradient, kernel, rng
    ):
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-8)


def test_gradient_with_respect_to_points(case):
    loss, kernel, rng = compiled_loss(case.name), case.make(1.0), np.random.default_rng(72)
    _, (_, gradient) = loss((kernel, case.x), case.y)
    for slope, difference in directional_errors(
        lambda x: loss((kernel, x), case.y)[0], gradient, case.x, rng
    ):
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-8)


def test_gradient_is_finite_at_zero_distance(case):
    same = jax.tree.map(lambda leaf: leaf[:M], case.x)
    _, gradients = compiled_loss(case.name)((case.make(1.0), case.x), same)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(floats(gradients)))


@pytest.mark.parametrize("name", [*STATIONARY, "rational-quadratic", "gaussian-matrices"])
def test_gradient_at_zero_distance_is_zero(name):
    kernel, point = CASES[name].make(1.0), CASES[name].x[0]
    assert not np.any(jax.grad(kernel)(point, point))


@pytest.mark.parametrize("name", ["matern32", "matern52", "matern12", "laplace"])
def test_parameter_gradient_at_zero_distance_is_zero(name):
    points = jnp.zeros((3, 2))
    gradient = eqx.filter_grad(lambda kernel: jnp.sum(kbr.gram(kernel, points)))(
        CASES[name].make(1.0)
    )
    assert float(gradient.bandwidth) == 0


class Stretched(eqx.Module):
    length: jax.Array

    def __call__(self, point):
        return jnp.tanh(point) / self.length


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("kind", ["energy", "energy per coordinate", "matern12", "warped energy"])
def test_gradients_where_points_are_computed(kind, d):
    """A program may round the two copies of a computed point differently."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, d))) + 3

    def total(s):
        kernels: dict[str, Any] = {
            "energy": lambda: kbr.kernels.Energy(0.3, s),
            "energy per coordinate": lambda: kbr.kernels.Energy(0.3, s * jnp.arange(1.0, d + 1)),
            "matern12": lambda: kbr.Warped(kbr.Matern12(1.0), Stretched(s)),
            "warped energy": lambda: kbr.Warped(kbr.kernels.Energy(0.0, 1.3), Stretched(s)),
        }
        return jnp.sum(kbr.gram(kernels[kind](), x, x))

    s, step = jnp.asarray(1.7), 1e-5
    slope = (total(s + step) - total(s - step)) / (2 * step)
    for gradient in (jax.jit(jax.grad(total))(s), jax.jit(jax.vmap(jax.grad(total)))(s[None])[0]):
        np.testing.assert_allclose(gradient, slope, rtol=1e-6)


@pytest.mark.parametrize("kernel", [kbr.Matern12, kbr.Matern32, kbr.Matern52, kbr.Gaussian])
def test_points_whose_distance_overflows_are_unlike(kernel):
    far = kbr.gram(kernel(1.0), jnp.zeros((1, 1)), jnp.full((1, 1), 1e200))
    assert float(far[0, 0]) == 0


@pytest.mark.parametrize("kind", [kbr.Gaussian, kbr.Matern12])
def test_samples_of_two_precisions(kind):
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 2)))
    single = x.astype(jnp.float32)

    def total(h, a, b):
        return jnp.sum(kbr.gram(kind(h), a, b))

    for a, b in ((single, y), (y, single)):
        found = jax.grad(total)(1.0, a, b)
        other = jax.grad(total)(1.0, a.astype(float), b.astype(float))
        np.testing.assert_allclose(found, other, rtol=1e-6)


def test_the_median_of_a_subsample_is_that_of_true_points():
    x = jnp.zeros((5000, 1)).at[:4, 0].set(jnp.array([0.0, 100, 250, 400]))
    options = {"mask": np.arange(5000) < 4, "max_points": 100}
    for seed in range(3):
        close(kbr.median_heuristic(x, key=jax.random.key(seed), **options), 200)


def test_empty_bins_count_as_nothing():
    x = jnp.asarray([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
    kernel = kbr.kernels.ChiSquared()
    chi = ((0.5 - 1.0) ** 2 / 0.75 + 0.5**2 / 0.25) / 3
    close(kbr.gram(kernel, x)[0, 1], np.exp(-chi / 2))
    gradient = jax.grad(kernel)(x[0], x[1])
    assert float(gradient[0]) == 0 and bool(jnp.all(jnp.isfinite(gradient)))


def test_operators_build_the_composites():
    k, l = kbr.Gaussian(1.0), kbr.Linear()  # noqa: E741
    assert isinstance(k + l, Sum) and isinstance(k * l, Product)
    for scaled in (2 * k, k * 2.0, jnp.asarray(2.0) * k, np.float64(2.0) * k):
        assert isinstance(scaled, Scaled) and float(scaled.factor) == 2
    assert as_kernel(k) is k and isinstance(as_kernel(plain), FunctionKernel)


def test_kernel_objects_of_other_libraries_keep_their_parameters():
    class Foreign(eqx.Module):
        length: jax.Array
        power: int = 2

        def __call__(self, a, b):
            return jnp.exp(-jnp.sum(jnp.abs(a - b) ** self.power) / self.length)

    x, y = vectors(40)
    kernel = as_kernel(Foreign(jnp.asarray(1.5)))
    close(
        kbr.gram(kernel, x, y),
        np.exp(-((np.asarray(x)[:, None] - np.asarray(y)[None]) ** 2).sum(-1) / 1.5),
    )
    gradient = eqx.filter_grad(lambda k: jnp.sum(kbr.gram(k, x, y)))(kernel)
    assert float(gradient.function.arrays[0]) > 0


def test_delta_of_booleans():
    gram = kbr.gram(kbr.Delta(), jnp.asarray([True, False, True]))
    assert gram.dtype == jnp.float64
    close(gram, [[1, 0, 1], [0, 1, 0], [1, 0, 1]])


@pytest.mark.parametrize("index", [9, -1, -9])
def test_precomputed_marks_indices_out_of_range(index):
    kernel = kbr.Precomputed(jnp.asarray(GIVEN))
    with pytest.raises(ValueError, match=f"`x` holds the index {index}, but the matrix .* 9 rows"):
        kbr.gram(kernel, jnp.asarray([0, index]))
    gram = np.asarray(jax.jit(kbr.gram)(kernel, jnp.asarray([0, index])))
    assert np.isfinite(gram[0, 0]) and np.isnan(gram[[0, 1, 1], [1, 0, 1]]).all()
    assert np.isnan(kernel(jnp.asarray(0), jnp.asarray(index)))


@pytest.mark.parametrize("dtype", [int, bool, jnp.int8])
def test_kernels_that_count_are_real(dtype):
    coordinates = np.random.default_rng(43).integers(0, 2, (6, 5))
    counts = (coordinates[:, None] == coordinates[None]).sum(-1)

    def matches(a, b):
        return jnp.sum(a == b).astype(dtype)

    for kernel, points in [
        (matches, coordinates),
        (kbr.Precomputed(counts.astype(dtype)), np.arange(6, dtype=np.int8)),
    ]:
        expected = counts.astype(dtype).astype(float)
        close(kbr.gram(kernel, points), expected)
        embedding = kbr.embed(kernel, points)
        close(embedding.weights, np.full(6, 1 / 6))
        close(kbr.evaluate(embedding, points), expected.mean(0))


def test_precomputed_takes_small_integers():
    matrix = np.eye(200)
    close(kbr.gram(kbr.Precomputed(matrix), np.arange(100, dtype=np.int8)), matrix[:100, :100])


@pytest.mark.parametrize("kind", [kbr.Gaussian, kbr.Matern32, kbr.Matern52, kbr.RationalQuadratic])
def test_parameters_keep_single_precision(kind):
    x = jnp.asarray(vectors(41)[0], jnp.float32)
    assert kbr.gram(kind(1.0), x).dtype == jnp.float32
    assert kbr.kernels.diagonal(kind(1.0), x).dtype == jnp.float32


@pytest.mark.parametrize("kind", [kbr.Gaussian, kbr.Matern12, kbr.Matern32, kbr.Matern52])
@pytest.mark.parametrize("d", [16, 40])
def test_repeated_points_are_at_distance_zero(kind, d):
    x = np.tile(np.random.default_rng(42).normal(size=(15, d)), (2, 1))
    gram = np.asarray(kbr.gram(kind(1.0), jnp.asarray(x)))
    close(np.diagonal(gram), 1)
    close(np.diagonal(gram, 15), 1)


@pytest.mark.parametrize(("n", "d"), [(2, 1), (7, 3), (8, 3), (9, 20)])
def test_median_heuristic_is_the_median_distance(n, d):
    x = np.random.default_rng(50).normal(size=(n, d))
    close(jax.jit(kbr.median_heuristic)(jnp.asarray(x)), np.median(pdist(x)))


def test_median_heuristic_flattens_points():
    x, _ = rotations(51)
    close(kbr.median_heuristic(x), np.median(pdist(np.asarray(x).reshape(N, -1))))
    close(kbr.median_heuristic(x[:, 0, 0]), np.median(pdist(np.asarray(x)[:, 0, :1])))


def test_median_heuristic_gradient():
    x = jnp.asarray(np.random.default_rng(52).normal(size=(5, 3)))  # 10 pairs
    value = jax.jit(jax.value_and_grad(kbr.median_heuristic))
    rng = np.random.default_rng(53)
    for slope, difference in directional_errors(lambda x: value(x)[0], value(x)[1], x, rng):
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-9)
    assert bool(jnp.all(jnp.isfinite(value(jnp.zeros((5, 3)))[1])))


@pytest.mark.parametrize("d", [2, 20])
def test_median_heuristic_of_repeated_points(d):
    offset = np.random.default_rng(54).normal(size=d)
    assert float(kbr.median_heuristic(jnp.asarray(np.tile(offset, (7, 1))))) == 1
    x = np.tile(offset, (7, 1))
    x[-1] += 3 / np.sqrt(d)
    close(kbr.median_heuristic(jnp.asarray(x)), np.mean(pdist(x)))  # 6 distances of 3 among 21


def test_median_heuristic_subsample():
    x = jnp.asarray(np.random.default_rng(55).normal(size=(40, 2)))
    keys = [jax.random.key(0), jax.random.key(0), jax.random.key(1)]
    first, again, other = (float(kbr.median_heuristic(x, max_points=10, key=key)) for key in keys)
    assert first == again != other
    exact = np.median(pdist(np.asarray(x)))
    assert abs(first / exact - 1) < 0.5
    close(kbr.median_heuristic(x, max_points=40), exact)
    with pytest.raises(ValueError, match="key"):
        kbr.median_heuristic(x, max_points=10)


def test_entries_of_a_matrix_share_a_unit():
    """An entry that hardly moves is not blown up. Coordinates of a vector have their own units."""
    rows = np.random.default_rng(0).normal(size=(60, 4)) * np.array([1.0, 1.0, 0.01, 1.0])
    matrices = jnp.asarray(rows.reshape(60, 2, 2))
    each = rows.std(0)
    close(kbr.kernels.coordinate_scale(jnp.asarray(rows)), each, 1e-12)
    common = np.full((2, 2), np.sqrt(np.mean(each**2)))
    close(kbr.kernels.coordinate_scale(matrices), common, 1e-12)
    apart = pdist(rows)
    close(kbr.kernels.default_kernel(matrices).bandwidth, np.full((2, 2), np.median(apart)), 1e-8)


def test_default_kernels_follow_the_points():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(60, 2)) * np.array([1.0, 200.0]))
    kernel = kbr.kernels.default_kernel(x)
    scale = np.asarray(x).std(0)
    rows = np.asarray(x) / scale
    apart = np.linalg.norm(rows[:, None] - rows, axis=2)[np.triu_indices(60, 1)]
    np.testing.assert_allclose(kernel.bandwidth, np.median(apart) * scale, rtol=1e-10)
    np.testing.assert_allclose(
        kbr.gram(None, x), kbr.gram(kbr.kernels.default_kernel(100 * x), 100 * x), rtol=1e-9
    )
    labels = jnp.arange(60) % 3
    assert isinstance(kbr.embed(None, labels).kernel, kbr.Delta)
    both = kbr.embed(None, (x, labels)).kernel
    assert isinstance(both, kbr.TensorProduct) and isinstance(both.kernels[0], kbr.Gaussian)
    assert bool(jnp.all(jnp.isfinite(kbr.gram(None, jnp.zeros((5, 2))))))
    gradient = jax.grad(lambda x: jnp.sum(kbr.gram(None, x)))(jnp.zeros((5, 2)))
    assert bool(jnp.all(jnp.isfinite(gradient)))
    with pytest.raises(ValueError, match="no default kernel"):
        kbr.embed(None, {"a": x})


def test_no_kernel_is_the_default_wherever_points_are_given():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 2)))
    default, key = kbr.kernels.default_kernel(x), jax.random.key(0)
    pairs = [
        lambda k: kbr.embed(k, x).weights @ kbr.gram(k, x),
        lambda k: kbr.hsic(k, k, x, x),
        lambda k: kbr.condition(kbr.fit_conditional(k, k, x, x, regularizer=0.1), x).weights,
        lambda k: kbr.greedy_landmarks(k, x, rank=5).points,
        lambda k: kbr.random_fourier(k, x, rank=8, key=key),
        lambda k: kbr.dynamics.fit_dynamics(k, kbr.dynamics.sample_sequence([x[:20], x[20:]])).gram,
        lambda k: (
            kbr.fit_filter(
                k, k, x, x, successors=x[::-1], regularizer=0.1, posterior_regularizer=0.1
            ).emission.features_x.matrix
        ),
    ]
    for call in pairs:
        found, expected = (jax.tree.leaves(call(kernel))[0] for kernel in (None, default))
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    with pytest.raises(ValueError, match="A kernel must be"):
        kbr.random_fourier(None, 2, rank=8, key=key)


@pytest.mark.parametrize("sample", [60, 3000])
@pytest.mark.parametrize(
    ("scale", "words"),
    [(1000.0, "unlike: the bandwidth is too small"), (1e-5, "equal: the bandwidth is too large")],
)
def test_a_kernel_of_the_wrong_scale_is_named(sample, scale, words):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(sample, 3))) * scale
    with pytest.warns(UserWarning, match=words):
        kbr.fit_conditional(kbr.Gaussian(1.0), None, x, x, regularizer=1e-3, landmarks_x=10)
    if sample > 100:
        return
    key, shifted = jax.random.key(0), x + scale
    with pytest.warns(UserWarning, match=words):
        kbr.hypotheses.two_sample_test(kbr.Gaussian(1.0), x, shifted, key=key)
    with pytest.warns(UserWarning, match=words):
        kbr.hypotheses.independence_test(kbr.Gaussian(1.0), None, x, x, key=key)
    found = kbr.hypotheses.two_sample_test(None, x, shifted, key=key)
    assert float(found.p_value) < 0.01


def test_coordinates_on_other_scales_are_named():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(50, 2)) * np.array([1.0, 300.0]))
    for kernel in (kbr.Gaussian(200.0), kbr.TensorProduct((kbr.Gaussian(200.0), kbr.Linear()))):
        points = x if isinstance(kernel, kbr.Gaussian) else (x, x)
        with pytest.warns(UserWarning, match="coordinate 1 of the points varies .* times"):
            kbr.fit_conditional(kernel, None, points, x, regularizer=1e-3)
    kbr.fit_conditional(None, None, x, x, regularizer=1e-3)
    jax.jit(lambda x: kbr.fit_conditional(kbr.Gaussian(1e-9), None, x, x, regularizer=1e-3))(x)


def _on_circle(t):
    return jnp.stack([jnp.cos(t), jnp.sin(t)])


def test_models_with_maps_are_pytrees_of_arrays():
    angles = jnp.linspace(0.0, 6.0, 12)
    network = eqx.nn.MLP("scalar", 3, 4, 1, jnp.tanh, key=jax.random.key(0))
    for kernel in (kbr.Warped(kbr.Gaussian(1.0), _on_circle), kbr.kernels.FeatureMap(network)):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(kernel))

        def fit(shift, kernel=kernel):
            return kbr.fit_conditional(
                kernel, kbr.Gaussian(1.0), angles + shift, angles, regularizer=1e-3
            )

        def at(model, x):
            return kbr.mean(kbr.condition(model, x))

        expected = at(fit(0.0), 1.0)
        np.testing.assert_allclose(jax.jit(at)(jax.jit(fit)(0.0), 1.0), expected, rtol=1e-6)
        many = jax.vmap(fit)(jnp.asarray([0.0, 0.1]))
        np.testing.assert_allclose(jax.vmap(at, (0, None))(many, 1.0)[0], expected, rtol=1e-6)
        gradient = jax.grad(lambda k: kbr.embedding.norm(kbr.embed(k, angles)))(kernel)
        assert jax.tree.structure(gradient) == jax.tree.structure(kernel)


def test_a_map_must_be_callable():
    with pytest.raises(ValueError, match="`map` must be a function of one point"):
        kbr.Warped(kbr.Gaussian(1.0), 3.0)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (kbr.Gaussian(0.5), np.exp(-2)),
        (kbr.Matern12(0.5), np.exp(-2)),
        (kbr.Laplace(0.5), np.exp(-2)),
        (kbr.kernels.RationalQuadratic(0.5), 1 / 3),
        (kbr.kernels.Energy(scale=0.5), 0.0),
        (kbr.kernels.Polynomial(2, scale=0.5, offset=0.5), 0.25),
        (kbr.kernels.Precomputed(np.asarray([[1.0, 0.3], [0.3, 1.0]])), 0.3),
    ],
)
def test_integers_in_a_direct_call(kernel, expected):
    np.testing.assert_allclose(kernel(0, 1), expected, rtol=1e-6)


@pytest.mark.parametrize("value", [0.1, 123.456, 0.25])
def test_a_constant_column_has_unit_1(value):
    x = jnp.stack([jnp.full(101, value), jnp.linspace(0, 1, 101)], axis=1)
    np.testing.assert_array_equal(kbr.kernels.coordinate_scale(x)[0], 1)
    weights = jnp.ones(101).at[50:].set(0)
    np.testing.assert_array_equal(kbr.kernels.coordinate_scale(x, weights)[0], 1)


def test_centers_and_scales_have_the_shape_of_a_point():
    with pytest.raises(ValueError, match="The center of Energy has shape"):
        kbr.gram(kbr.kernels.Energy(center=jnp.arange(3.0)), jnp.arange(3.0))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, b: -jnp.sum((a - b) ** 2), "not positive semi-definite"),
        (lambda a, b: jnp.exp(a[0] - jnp.sum((a - b) ** 2)), "not symmetric"),
        (lambda a, b: jnp.log(jnp.sum((a - b) ** 2)), "not finite"),
    ],
)
def test_functions_that_are_no_kernels(function, message):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2)))
    with pytest.raises(ValueError, match=f"kernel of `x` is {message}"):
        kbr.fit_conditional(function, kbr.Gaussian(1.0), x, x, regularizer=1e-3)


def test_amounts_taken_as_labels():
    with pytest.warns(UserWarning, match="150 values among 150 points are taken as labels"):
        kbr.kernels.default_kernel(jnp.arange(150))
    kbr.kernels.default_kernel(jnp.arange(150) % 10)
    table = jnp.stack([jnp.arange(150), jnp.arange(150) % 2], axis=1)  # an age, and a label
    with pytest.warns(UserWarning, match="150 values among 150 points are taken as labels"):
        kbr.kernels.default_kernel(table)
    kbr.kernels.default_kernel(table % 5)


def test_a_list_of_arrays_is_neither_rows_nor_parts():
    rows = [jnp.ones(3), jnp.zeros(3)]
    with pytest.raises(ValueError, match="`points` is a list of arrays"):
        kbr.embed(None, rows)
    assert len(kbr.embed(None, tuple(rows)).points) == 2


def test_a_function_of_half_precision_is_looked_at_too():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2)), jnp.bfloat16)
    with pytest.raises(ValueError, match="not positive semi-definite"):
        kbr.fit_conditional(
            lambda a, b: -jnp.sum((a - b) ** 2), kbr.Gaussian(1.0), x, x, regularizer=1e-1
        )


def test_default_bandwidths_follow_units_and_offsets():
    """In float32 too, where squares of such numbers would be 0 or infinite."""
    x = np.random.default_rng(50).normal(size=(60, 2))
    expected = np.asarray(kbr.kernels.default_kernel(jnp.asarray(x)).bandwidth)
    for unit in (1e-22, 1e20):
        small = jnp.asarray(x * unit, jnp.float32)
        kernel = kbr.kernels.default_kernel(small)
        np.testing.assert_allclose(np.asarray(kernel.bandwidth) / unit, expected, rtol=1e-4)
        reference = kbr.gram(kbr.Gaussian(expected), jnp.asarray(x))
        np.testing.assert_allclose(kbr.gram(kernel, small), reference, atol=1e-4)
    even = np.random.default_rng(51).integers(0, 8, (60, 1)) / 8
    found = [
        np.asarray(kbr.kernels.default_kernel(jnp.asarray(even + offset, jnp.float32)).bandwidth)
        for offset in (0, 1e5)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_nan_gives_no_bandwidth():
    x = jnp.asarray(np.random.default_rng(52).normal(size=(2, 20)))
    x = x.at[1, 3].set(jnp.nan)
    found = jax.vmap(kbr.median_heuristic)(x)
    assert found[0] > 0 and jnp.isnan(found[1])
    known = jnp.ones(20, bool)
    assert jnp.isnan(jax.jit(lambda x: kbr.median_heuristic(x, mask=known))(x[1]))
    assert jnp.isnan(jax.jit(lambda x: kbr.kernels.default_kernel(x).bandwidth)(x[1]))


def test_gram_follows_what_a_map_closes_over():
    factor, x = {"a": 1.0}, jnp.arange(4.0) / 3
    kernel = kbr.kernels.Warped(kbr.Gaussian(1.0), lambda z: z * factor["a"])
    first = kbr.gram(kernel, x)
    factor["a"] = 5.0
    assert kbr.gram(kernel, x)[0, 3] < first[0, 3] / 100


class _Network(kbr.kernels.AbstractKernel):
    """A kernel of one's own with leaves that are no arrays."""

    net: eqx.nn.MLP
    power: float

    def __call__(self, x, y):
        return jnp.exp(-jnp.sum(jnp.abs(self.net(x) - self.net(y)) ** self.power))


@pytest.mark.parametrize("landmarks", [None, 4])
def test_a_kernel_with_leaves_that_are_no_arrays(landmarks):
    net = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)))

    def mean(kernel):
        options = {"regularizer": 1e-2, "landmarks_x": landmarks}
        model = kbr.fit_conditional(kernel, kbr.Gaussian(1.0), x, x[:, 0], **options)
        return kbr.mean(kbr.condition(model, x[0]))

    expected = mean(lambda x, y: jnp.exp(-jnp.sum(jnp.abs(net(x) - net(y)) ** 2)))
    close(mean(_Network(net, 2.0)), expected)


def test_a_function_that_closes_over_a_parameter():
    x = jnp.linspace(-2, 2, 30)

    def loss(h, kernel):
        model = kbr.fit_conditional(kernel(h), kbr.Gaussian(1.0), x, x**2, regularizer=1e-2)
        return kbr.leave_out_loss(model)

    found, expected = (
        jax.grad(loss)(1.0, kernel)
        for kernel in (lambda h: lambda a, b: jnp.exp(-((a - b) ** 2) / (2 * h**2)), kbr.Gaussian)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
