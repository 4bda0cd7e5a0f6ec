"""Posteriors from simulations.

NumPy from the formulas, exact discrete and Gaussian posteriors, quantiles of signed weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import closeness, gaussian

import kbr_jax as kbr

RNG = np.random.default_rng(0)
N, M = 25, 7
THETA = RNG.normal(size=(N, 2))
DATA = np.hstack([THETA @ RNG.normal(size=(2, 2)), RNG.normal(size=(N, 1))]) + 0.3 * RNG.normal(
    size=(N, 3)
)
SEEN = RNG.normal(size=(4, 3))
OTHER, ALPHA = 0.5 * RNG.normal(size=(M, 2)), RNG.dirichlet(np.ones(M))
H, C, EPSILON, DELTA = 0.9, 1.3, 1e-2, 1e-3
SIMULATIONS = kbr.likelihood_free.Simulations(jnp.asarray(THETA), jnp.asarray(DATA))
METHODS = ("conditional", "bayes", "importance")


close = closeness(1e-9, 1e-9)


PRINTED = kbr.Clipping(False, 0.0, False)


def fit(
    method,
    h=H,
    c=C,
    epsilon=EPSILON,
    delta=DELTA,
    prior=None,
    simulations=SIMULATIONS,
    clipping=PRINTED,
    kernels=None,
    landmarks_parameters=None,
    landmarks_data=None,
):
    """The posterior of a method as a function of the observation, from one fit."""
    kernel_p, kernel_d = kernels or (kbr.Gaussian(h), kbr.Gaussian(c))
    parameters, data = simulations.parameters, simulations.data
    if method == "conditional":
        model = kbr.fit_conditional(
            kernel_d, kernel_p, data, parameters, regularizer=epsilon, landmarks_x=landmarks_data
        )
        return lambda seen: kbr.condition(model, seen)
    model = kbr.fit_conditional(
        kernel_p,
        kernel_d,
        parameters,
        data,
        regularizer=epsilon,
        landmarks_x=landmarks_parameters,
        landmarks_y=landmarks_data,
    )
    prior = kbr.embed(model.kernel_x, model.x) if prior is None else prior
    options = {"regularizer": delta, "clipping": clipping}
    if method == "importance":
        clipping = clipping if clipping.clip else kbr.Clipping(True, 0.0, False)
        options |= {"estimator": "importance", "clipping": clipping}
    return lambda seen: kbr.bayes_rule(model, prior, seen, **options)


def numpy_weights(method, h=H, c=C, points=THETA, alpha=None):
    k, column = gaussian(DATA, DATA, c), gaussian(DATA, SEEN, c)
    if method == "conditional":
        return np.linalg.solve(k + N * EPSILON * np.eye(N), column).T
    alpha = np.full(len(points), 1 / len(points)) if alpha is None else alpha
    ridge = gaussian(THETA, THETA, h) + N * EPSILON * np.eye(N)
    w = np.linalg.solve(ridge, gaussian(THETA, points, h) @ alpha)
    if method == "importance":
        root = np.diag(np.sqrt(np.maximum(w, 0)))
        return (root @ np.linalg.solve(root @ k @ root + DELTA * np.eye(N), root @ column)).T
    dk = w[:, None] * k
    return (dk @ np.linalg.solve(dk @ dk + DELTA * np.eye(N), w[:, None] * column)).T


# ---- the three methods


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_those_of_the_formulas(method):
    seen = jnp.asarray(SEEN)
    posterior, alone = jax.jit(
        lambda: (fit(method)(seen), [fit(method)(one).weights for one in seen])
    )()
    close(posterior.weights, numpy_weights(method))
    close(posterior.points, THETA)
    # One fit for all: a batch gives what each observation gives alone.
    close(np.stack(alone), posterior.weights, 1e-12)


@pytest.mark.parametrize("method", METHODS[1:])
def test_another_prior_for_the_same_simulations(method):
    @jax.jit
    def weights():
        prior = kbr.embed(kbr.Gaussian(H), jnp.asarray(OTHER), jnp.asarray(ALPHA))
        return fit(method, prior=prior)(jnp.asarray(SEEN)).weights

    close(weights(), numpy_weights(method, points=OTHER, alpha=ALPHA))


def test_discrete_posteriors_are_exact():
    """Three parameters, two outcomes, delta kernels.

    Counts, and Bayes' rule with the counted likelihood.
    """
    parameters, data = RNG.integers(0, 3, 60), RNG.integers(0, 2, 60)
    counts = np.array(
        [[np.sum((parameters == t) & (data == y)) for y in (0, 1)] for t in (0, 1, 2)]
    )
    simulations = kbr.likelihood_free.Simulations(jnp.asarray(parameters), jnp.asarray(data))
    prior = kbr.embed(kbr.Delta(), jnp.arange(3), jnp.asarray([0.2, 0.7, 0.1]))
    likelihood = counts / counts.sum(1, keepdims=True) * np.array([0.2, 0.7, 0.1])[:, None]
    for method, options, truth in (
        ("conditional", {}, counts / counts.sum(0)),
        ("bayes", {"delta": 1e-14, "prior": prior}, likelihood / likelihood.sum(0)),
        ("importance", {"delta": 1e-9, "prior": prior}, likelihood / likelihood.sum(0)),
    ):
        kernels = kbr.Delta(), kbr.Delta()
        rule = fit(method, epsilon=1e-10, simulations=simulations, kernels=kernels, **options)
        posterior = rule(jnp.arange(2))
        found = [
            [float(np.sum(np.asarray(row)[parameters == t])) for row in posterior.weights]
            for t in range(3)
        ]
        close(found, truth, 1e-5)


LINE = kbr.Landmarks(jnp.linspace(-3.5, 3.5, 30)[:, None])


def gaussian_posteriors(key):
    """Parameters from N(0, 1), y = theta + N(0, .5).

    Second prior N(.5, .5). Posterior means, intervals and masses of the methods.
    """
    sims = kbr.likelihood_free.simulate(
        lambda k, t: t + float(np.sqrt(0.5)) * jax.random.normal(k, (1,)),
        lambda k: jax.random.normal(k, (1,)),
        600,
        key=key,
    )
    seen = jnp.linspace(-1.5, 1.5, 7)[:, None]
    other = kbr.embed(
        kbr.Gaussian(0.5),
        0.5 + float(np.sqrt(0.5)) * jax.random.normal(jax.random.key(5), (600, 1)),
    )
    found = {}
    for name, method, prior in (
        ("conditional", "conditional", None),
        ("bayes", "bayes", None),
        ("importance", "importance", None),
        ("bayes, other", "bayes", other),
        ("importance, other", "importance", other),
    ):
        delta = 1e-5 if method == "bayes" else 3e-3
        ranks = {"landmarks_data": LINE} | (
            {} if method == "conditional" else {"landmarks_parameters": LINE}
        )
        model = fit(
            method, h=0.5, c=0.7, epsilon=1e-3, delta=delta, prior=prior, simulations=sims, **ranks
        )
        posterior = model(seen)
        found[name] = kbr.mean(posterior), *kbr.credible_interval(posterior, 0.8), posterior.mass
    return seen, found


def test_a_gaussian_posterior():
    seen, found = jax.jit(gaussian_posteriors)(jax.random.key(1))
    seen = np.asarray(seen)
    for name, (mean, low, high, mass) in found.items():
        precision = 4.0 if "other" in name else 3.0
        truth = (2 * seen + (1.0 if "other" in name else 0.0)) / precision
        spread = scipy.stats.norm.ppf(0.9) / np.sqrt(precision)
        assert np.sqrt(np.mean((mean - truth) ** 2)) < 0.12, name
        assert np.sqrt(np.mean((low - truth + spread) ** 2)) < 0.2, name
        assert np.sqrt(np.mean((high - truth - spread) ** 2)) < 0.2, name
        assert np.all(np.abs(mass - 1) < 0.1), name


def test_intervals_cover():
    """Over 1000 parameters and data from the model, 80 % intervals hold 80 % of the parameters.

    One fit for all of them.
    """

    @jax.jit
    def covered(key):
        def noisy(k, t):
            return t + 0.7 * jax.random.normal(k, (1,))

        def prior(k):
            return jax.random.normal(k, (1,))

        first, second = jax.random.split(key)
        sims, tests = (
            kbr.likelihood_free.simulate(noisy, prior, 800, key=first),
            kbr.likelihood_free.simulate(noisy, prior, 1000, key=second),
        )
        model = fit("conditional", c=0.5, epsilon=1e-3, simulations=sims, landmarks_data=LINE)
        low, high = kbr.credible_interval(model(tests.data), 0.8)
        return jnp.mean((low <= tests.parameters) & (tests.parameters <= high))

    assert abs(float(covered(jax.random.key(3))) - 0.8) < 0.05


def test_herded_samples_stand_for_the_posterior():
    posterior = fit("conditional")(jnp.asarray(DATA[3]))
    samples = kbr.herd(posterior, num_points=40).embedding
    assert float(jnp.max(jnp.abs(kbr.mean(samples) - kbr.mean(posterior)))) < 0.15


# ---- simulations


def test_simulations_do_not_depend_on_the_batch():
    def simulator(key, parameter):
        return {"sum": parameter[0] + jax.random.normal(key), "all": parameter[1] * jnp.ones(3)}

    def prior(key):
        first, second = jax.random.split(key)
        return jax.random.uniform(first), jax.random.normal(second)

    sims = kbr.likelihood_free.simulate(simulator, prior, 10, key=jax.random.key(0))
    for batch in (3, 10, 50):
        for one, other in zip(
            jax.tree.leaves(sims),
            jax.tree.leaves(
                kbr.likelihood_free.simulate(
                    simulator, prior, 10, key=jax.random.key(0), batch_size=batch
                )
            ),
            strict=True,
        ):
            close(one, other, 1e-12)
    assert sims.parameters[0].shape == (10,) and sims.data["all"].shape == (10, 3)
    close(sims.data["all"][:, 0], sims.parameters[1], 0)
    assert len(np.unique(sims.parameters[0])) == 10


def test_parameters_and_data_of_several_parts():
    """Arrays of a NumPy simulator, parameters and data as tuples."""
    pairs = kbr.TensorProduct((kbr.Gaussian(1.0), kbr.Gaussian(2.0)))
    simulations = kbr.likelihood_free.Simulations(
        (THETA[:, 0], THETA[:, 1:]), (DATA[:, 0], DATA[:, 1:])
    )

    @jax.jit
    def intervals(simulations):
        options = {"epsilon": 0.1, "delta": 0.1, "kernels": (pairs, pairs)}
        rule = fit("bayes", simulations=simulations, **options)
        posterior = rule((jnp.asarray(SEEN[:, 0]), jnp.asarray(SEEN[:, 1:])))
        return kbr.credible_interval(posterior, 0.9, lambda point: point[0] + point[1][0])

    low, high = intervals(simulations)
    assert low.shape == (4,) and np.all(low < high)


# ---- quantiles


def rearranged(weights, values, u):
    """The definition: the distribution function, sorted as a function of t, then inverted."""
    order = np.argsort(values)
    values, heights = values[order], np.cumsum(weights[order])[:-1]
    lengths, ascending = np.diff(values), np.argsort(heights)
    ends = values[0] + np.cumsum(lengths[ascending])
    below = heights[ascending] < u - 1e-12
    return ends[below][-1] if below.any() else values[0]


def test_quantiles_from_the_definition():
    values, positive = RNG.normal(size=30), RNG.dirichlet(np.ones(30))
    signed = RNG.normal(size=30) + 0.4
    signed = signed / signed.sum()
    levels = np.array([0.0, 0.03, 0.3, 0.5, 0.77, 0.97, 1.0])
    order = np.argsort(values)

    @jax.jit
    def quantiles(weights):
        return kbr.quantile(kbr.Embedding(kbr.Gaussian(1.0), jnp.asarray(values), weights), levels)

    for weights in (positive, signed):
        close(quantiles(3 * weights), [rearranged(weights, values, u) for u in levels])
    inverse = values[order][np.searchsorted(np.cumsum(positive[order]), levels[1:-1])]
    close(quantiles(positive)[1:-1], inverse)
    close(quantiles(np.full(30, 1 / 30))[3], np.quantile(values, 0.5, method="inverted_cdf"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_quantiles_of_values_that_repeat_are_these_values(dtype):
    """Not next to them: a test value that is one of them lies in an interval that ends there."""
    kinds = ((np.arange(7.0) - 2.34) / 0.789).astype(dtype)
    values, levels = kinds[RNG.integers(0, 7, 60)], jnp.linspace(0, 1, 41, dtype=dtype)
    positive = RNG.dirichlet(np.ones(60))
    signed = positive - 1e-3 * (np.arange(60) % 5 == 0)
    for weights in (positive, signed):
        belief = kbr.Embedding(kbr.Gaussian(1.0), values, jnp.asarray(weights, dtype))
        found = kbr.quantile(belief, levels)
        assert np.isin(np.asarray(found), kinds).all()
    low, high = kbr.credible_interval(kbr.embed(kbr.Gaussian(1.0), values), 0.9)
    assert np.mean((values >= low) & (values <= high)) >= 0.9


def test_quantiles_of_batches_and_functions():
    weights = RNG.normal(size=(3, N)) + 1
    batch = kbr.Embedding(kbr.Gaussian(1.0), jnp.asarray(THETA), jnp.asarray(weights))
    levels = jnp.asarray([0.1, 0.9])

    def scaled(scale):
        return jnp.sum(kbr.quantile(batch, levels, lambda t: scale * t))

    found, second, (low, high), median, gradient = jax.jit(
        lambda: (
            kbr.quantile(batch, levels),
            kbr.quantile(batch, 0.9, lambda t: t[1]),
            kbr.credible_interval(batch, 0.8),
            kbr.quantile(batch, 0.5),
            jax.grad(scaled)(2.0),
        )
    )()
    assert found.shape == (2, 3, 2)
    for i in range(3):
        for j in range(2):
            close(
                found[:, i, j],
                [rearranged(weights[i] / weights[i].sum(), THETA[:, j], u) for u in (0.1, 0.9)],
            )
    close(second, found[1, :, 1])
    close(low, found[0])
    close(high, found[1])
    assert median.shape == (3, 2)
    close(gradient, np.sum(found))


def test_quantiles_of_no_distribution_are_unknown():
    weights = jnp.asarray(
        [
            [0.2, 0.3, 0.5],
            [0.2, np.nan, 0.5],
            [0.0, 0.0, 0.0],
            [0.1, 0.2, -0.3],
            [-0.2, -0.3, -0.5],
            [0.1, np.inf, 0.1],
        ]
    )
    embedding = kbr.Embedding(kbr.Gaussian(1.0), jnp.asarray([1.0, 2.0, 4.0]), weights)

    def lower_and_upper(scale):
        return jnp.stack(kbr.credible_interval(embedding, 0.8, lambda t: scale * t))

    ends, gradient = jax.jit(
        lambda s: (lower_and_upper(s), jax.grad(lambda t: jnp.nansum(lower_and_upper(t)))(s))
    )(3.0)
    close(ends[:, 0], [3.0, 12.0])
    assert np.isnan(ends[:, 1:]).all()
    close(gradient, 5.0)
    assert np.isnan(kbr.quantile(embedding, 0.5)[1:]).all()


def test_ties_and_padding_count_once():
    embedding = kbr.embed(
        kbr.Gaussian(1.0), jnp.asarray([1.0, 1.0, 2.0, 2.0]), jnp.asarray([0.25, 0.25, 0.5, 0.0])
    )
    close(kbr.quantile(embedding, jnp.asarray([0.5, 0.51])), [1.0, 2.0])


def test_an_observation_beyond_the_simulations_has_no_interval():
    """The first version gave an interval of width 0 at the nearest simulation."""
    theta, data = jnp.asarray(THETA[:, :1]), jnp.asarray(DATA[:, :1])
    model = kbr.fit_conditional(kbr.Gaussian(0.3), None, data, theta, regularizer=1e-3)
    posterior = kbr.condition(model, jnp.max(data, axis=0) + 1.4)
    assert 0 < abs(float(posterior.mass)) < 0.01
    low, high = kbr.credible_interval(posterior, 0.9)
    assert bool(jnp.isnan(low[0]) & jnp.isnan(high[0]))


def test_a_simulator_in_numpy_is_told_what_to_do():
    with pytest.raises(ValueError, match="must be JAX functions"):
        kbr.likelihood_free.simulate(
            lambda key, p: np.random.default_rng(0).normal(np.asarray(p)),
            lambda key: jax.random.normal(key),
            5,
            key=jax.random.key(0),
        )


@pytest.mark.parametrize(
    ("simulator", "sampler", "name"),
    [
        (lambda key, p: p + np.random.normal(), jax.random.normal, "simulator"),
        (lambda key, p: p + jax.random.normal(key), lambda key: jnp.ones(()), "prior_sampler"),
    ],
)
def test_a_function_without_its_key_is_named(simulator, sampler, name):
    with pytest.warns(UserWarning, match=f"`{name}` does not use its key"):
        kbr.likelihood_free.simulate(simulator, sampler, 3, key=jax.random.key(0))


def test_values_that_decide_need_jax():
    with pytest.raises(ValueError, match="must be JAX functions"):
        kbr.likelihood_free.simulate(
            lambda key, p: p if p > 0 else -p, jax.random.normal, 3, key=jax.random.key(0)
        )
