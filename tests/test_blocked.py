"""Products with Gram matrices by blocks against the dense ones, their memory, and conjugate
gradients against Cholesky.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import CASES, close, floats

import kbr_jax as kbr
from kbr_jax._numerics import exp, squared_distances

RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=(120, 2))) for _ in range(2))
QUERIES = jnp.asarray(RNG.normal(size=(4, 2)))
KERNEL = kbr.Gaussian(0.6)


def arguments_of(name):
    """Kernel, 7 points x, 4 points y and two columns."""
    case = CASES[name]
    x = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[1:2]]), case.x)
    return case.make(1.0), x, case.y, jnp.asarray(np.random.default_rng(1).normal(size=(4, 2)))


# The product knows nothing of the inside of a kernel: one case of each kind of point is enough.
@pytest.mark.parametrize(
    "name",
    [
        "gaussian",
        "gaussian-wide",
        "gaussian-scalars",
        "gaussian-matrices",
        "laplace",
        "histogram-intersection",
        "precomputed",
        "callable-with-parameter",
        "tensor-product",
    ],
)
def test_products_are_those_of_the_dense_matrix_for_every_block(name):
    kernel, x, y, v = arguments_of(name)
    expected = kbr.gram(kernel, x, y) @ v
    for block in (1, 3, 50):  # 3 needs padding, 50 is more than there are
        close(kbr.kernels.gram_matvec(kernel, x, y, v, block_size=block), expected)


@pytest.mark.parametrize(
    "name", ["gaussian-wide", "precomputed", "callable-with-parameter", "tensor-product"]
)
def test_gradients_are_those_of_the_dense_matrix(name):
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(7, 2)))

    @eqx.filter_jit
    def compute(arguments):
        def blocked(arguments):
            return jnp.sum(weights * kbr.kernels.gram_matvec(*arguments, block_size=3))

        def dense(arguments):
            kernel, x, y, v = arguments
            return jnp.sum(weights * (kbr.gram(kernel, x, y) @ v))

        return eqx.filter_grad(blocked)(arguments), eqx.filter_grad(dense)(arguments)

    slopes = [jax.tree.leaves(floats(gradient)) for gradient in compute(arguments_of(name))]
    for slope, dense_slope in zip(*slopes, strict=True):
        close(slope, dense_slope, rtol=1e-11, atol=1e-11)


def test_vectors_columns_and_the_default_block():
    expected = kbr.gram(KERNEL, X, Y)
    columns = jnp.asarray(RNG.normal(size=(120, 2, 3)))
    close(kbr.kernels.gram_matvec(KERNEL, X, Y, columns[:, 0, 0]), expected @ columns[:, 0, 0])
    close(
        kbr.kernels.gram_matvec(KERNEL, X, Y, columns, block_size=50),
        jnp.tensordot(expected, columns, axes=1),
    )


def test_vmap_over_columns_and_kernels():
    kernels = jax.tree.map(lambda *leaves: jnp.stack(leaves), kbr.Gaussian(0.5), kbr.Gaussian(1.0))
    v = jnp.asarray(RNG.normal(size=(2, 120)))
    batch = jax.jit(jax.vmap(lambda k, v: kbr.kernels.gram_matvec(k, X, Y, v, block_size=50)))(
        kernels, v
    )
    for product, h, column in zip(batch, (0.5, 1.0), v, strict=True):
        close(product, kbr.gram(kbr.Gaussian(h), X, Y) @ column)


@pytest.mark.parametrize(
    "kernel", [KERNEL, kbr.Laplace(1.0), kbr.Gaussian(jnp.ones(20))], ids=["few", "laplace", "wide"]
)
def test_memory_is_that_of_a_block_also_for_the_gradient(kernel):
    n, block, d = 5000, 10, 20 if kernel.bandwidth.ndim else 3
    x, v = jax.ShapeDtypeStruct((n, d), jnp.float64), jax.ShapeDtypeStruct((n, 2), jnp.float64)

    def loss(kernel, x, y, v):
        return jnp.sum(kbr.kernels.gram_matvec(kernel, x, y, v, block_size=block) ** 2)

    for function, blocks in ((loss, 4), (jax.grad(loss, argnums=(0, 1, 2, 3)), 12)):
        memory = jax.jit(function).lower(kernel, x, x, v).compile().memory_analysis()
        # Beside the blocks, some copies of the arguments; the whole matrix would be 500 blocks.
        assert memory.temp_size_in_bytes < 8 * n * (blocks * block + 6 * (d + 2))


@pytest.mark.parametrize(
    ("v", "block", "message"),
    [
        (jnp.ones(3), None, "one number for each of 120 points"),
        (jnp.asarray(1.0), None, "one number for each of 120 points"),
        (jnp.ones(120, int), None, "astype"),
        (jnp.ones(120), 0, "`block_size` must be an integer >= 1"),
    ],
)
def test_wrong_arguments_of_a_product(v, block, message):
    with pytest.raises(ValueError, match=message):
        kbr.kernels.gram_matvec(KERNEL, X, Y, v, block_size=block)


def test_the_exponential_is_within_an_ulp():
    x = np.concatenate(
        [np.linspace(-745, 710, 20001), -np.logspace(-300, 0, 50), [0, np.inf, -np.inf, np.nan]]
    )
    with np.errstate(over="ignore"):
        expected = np.exp(x)
    expected = np.where(
        expected < 3.4e-308, 0, expected
    )  # close to the subnormal numbers, zero will do
    actual = np.asarray(exp(jnp.asarray(x)))
    np.testing.assert_allclose(np.where(actual < 3.4e-308, 0, actual), expected, rtol=4.5e-16)
    second = jax.grad(jax.grad(exp))(jnp.asarray(-0.3))
    close(second, np.exp(-0.3), rtol=1e-15)


@pytest.mark.parametrize("scale", [np.array([0.5, 1.0, 2.0])])
def test_both_modes_and_second_derivatives_of_squared_distances(scale):
    x, y, scale = (
        jnp.asarray(RNG.normal(size=(4, 3))),
        jnp.asarray(RNG.normal(size=(5, 3))),
        jnp.asarray(scale),
    )
    weights = jnp.asarray(RNG.normal(size=(4, 5)))

    def plain(x, y, scale):
        return jnp.sum(weights * jnp.sum(((x[:, None] - y[None]) / scale) ** 2, -1) ** 2)

    def ours(x, y, scale):
        return jnp.sum(weights * squared_distances(x, y, scale) ** 2)

    for transform in (jax.jacfwd, jax.jacrev, jax.hessian):
        actual, expected = (
            jax.jit(transform(f, argnums=(0, 1, 2)))(x, y, scale) for f in (ours, plain)
        )
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            close(one, other, rtol=1e-11, atol=1e-10)


def fit(solver=None, regularizer=1e-4, bandwidth=0.6, **options):
    kernel = kbr.Gaussian(bandwidth)
    return kbr.fit_conditional(
        kernel, kernel, X, Y, regularizer=regularizer, solver=solver, **options
    )


EXACT = fit()
SOLVERS = {
    "plain": kbr.ConjugateGradient(rank=0, max_iterations=500, tolerance=1e-12),
    "landmarks": kbr.ConjugateGradient(rank=40, tolerance=1e-12, block_size=50),
    "given": kbr.ConjugateGradient(landmarks=kbr.Landmarks(X[:40]), tolerance=1e-12),
}


@pytest.mark.parametrize("solver", [SOLVERS["landmarks"]], ids=["landmarks"])
def test_the_rules_agree_with_the_factored_solve(solver):
    model = fit(solver)
    prior = kbr.embed(KERNEL, QUERIES, jnp.asarray([0.4, 0.3, 0.2, 0.1]))
    for rule in (
        lambda m: kbr.condition(m, QUERIES).weights,
        lambda m: kbr.conditional_expectation(m, QUERIES, lambda y: y),
        lambda m: kbr.sum_rule(m, prior).weights,
        lambda m: kbr.chain_rule(m, prior, estimator="prior").weights,
        lambda m: kbr.condition_centered(m, QUERIES).weights,
    ):
        close(rule(model), rule(EXACT), rtol=1e-7, atol=1e-7)


def test_bayes_rule_with_landmarks_or_by_forming_the_matrix():
    prior = kbr.embed(KERNEL, QUERIES)
    for landmarks in (None, 60):
        expected, actual = (
            kbr.bayes_rule(
                fit(s, landmarks_y=landmarks), prior, QUERIES[:2], regularizer=1e-3
            ).weights
            for s in (None, SOLVERS["landmarks"])
        )
        close(actual, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("throw", [True, False])
def test_a_missing_observation_is_missing_alone(throw):
    queries = QUERIES.at[1].set(jnp.nan)
    solver = kbr.ConjugateGradient(rank=10, throw=throw)
    expected, found = (kbr.condition(fit(s), queries).weights for s in (None, solver))
    assert np.all(np.isnan(found[1]))
    others = np.arange(len(queries)) != 1
    close(found[others], expected[others], rtol=1e-6, atol=1e-7)


def test_gradients_are_those_of_the_factored_solve():
    def loss(parameters, solver):
        model = fit(solver, parameters[1], parameters[0])
        return jnp.sum(kbr.conditional_expectation(model, QUERIES, lambda y: y) ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    parameters = jnp.asarray([0.6, 1e-3])
    close(gradient(parameters, SOLVERS["landmarks"]), gradient(parameters, None), rtol=1e-8)


def test_landmarks_save_iterations_and_the_report_is_true():
    columns = EXACT.features_x.coordinates(QUERIES).T
    columns = columns.at[:, 0].set(0)
    counts = {}
    for name, solver in SOLVERS.items():
        model = fit(solver)
        solution, report = model.factor.diagnose(columns)
        residual = columns - (EXACT.features_x.matrix @ solution + 120 * 1e-4 * solution)
        norms = np.linalg.norm(residual, axis=0)[1:] / np.linalg.norm(columns, axis=0)[1:]
        assert report.converged and norms.max() < 1.1e-12
        close(report.residual[1:], norms, rtol=0, atol=1e-13)
        assert report.iterations[0] == 0 and not np.any(solution[:, 0])
        counts[name] = int(report.iterations.max())
    assert counts["landmarks"] < counts["plain"] / 3


def test_a_solve_that_does_not_converge_is_an_error_or_a_report():
    few = {"rank": 0, "max_iterations": 3}
    with pytest.raises(RuntimeError, match="did not reach the tolerance"):
        kbr.condition(fit(kbr.ConjugateGradient(**few)), QUERIES)
    compiled = jax.jit(lambda model: kbr.condition(model, QUERIES).weights)
    assert np.all(np.isnan(compiled(fit(kbr.ConjugateGradient(**few)))))
    assert np.all(np.isfinite(compiled(fit(kbr.ConjugateGradient(**few, throw=False)))))
    model = fit(kbr.ConjugateGradient(**few, throw=False))
    _, report = model.factor.diagnose(EXACT.features_x.coordinates(QUERIES).T)
    assert (
        not report.converged
        and np.all(report.iterations == 3)
        and np.all(np.isfinite(report.residual))
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: kbr.ConjugateGradient(rank=-1),
        lambda: kbr.ConjugateGradient(max_iterations=0),
        lambda: kbr.ConjugateGradient(block_size=0),
        lambda: kbr.ConjugateGradient(tolerance=0.0),
        lambda: fit(kbr.ConjugateGradient(), landmarks_x=10),
    ],
)
def test_wrong_settings(make):
    with pytest.raises(ValueError):
        make()


def test_the_same_call_compiles_once(caplog):
    """Each used to compile at every call, until the process ran out of memory maps."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 2)))
    permutations = jnp.stack([jnp.eye(3), jnp.eye(3)[::-1]])
    model = fit(SOLVERS["landmarks"])
    for call in (
        lambda: kbr.kernels.gram_matvec(kbr.Gaussian(1.0), x, x, x[:, 0], block_size=10),
        lambda: kbr.embedding.decode_permutation(kbr.embed(kbr.Gaussian(1.0), permutations)),
        lambda: kbr.condition_centered(model, QUERIES[0]).weights,
    ):
        call()
        caplog.clear()
        with jax.log_compiles():
            call()
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


@pytest.mark.parametrize(
    "kernel",
    [
        kbr.Laplace(1.0),
        kbr.kernels.ChiSquared(1.0),
        kbr.kernels.HistogramIntersection(),
        kbr.Gaussian(1.0) * kbr.Laplace(1.0),
        lambda a, b: jnp.exp(-jnp.sum(jnp.abs(a - b))),
    ],
)
def test_a_gram_matrix_takes_less_than_three_times_its_memory(kernel):
    x = jax.ShapeDtypeStruct((600, 128), jnp.zeros(()).dtype)
    compiled = jax.jit(lambda x: kbr.gram(kernel, x, x)).lower(x).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 3 * memory.output_size_in_bytes
