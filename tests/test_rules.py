"""The rules against NumPy, written from their formulas, and against closed forms."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness, gaussian

import kbr_jax as kbr

N, M = 12, 7
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = 0.7 * X + 0.6 * RNG.normal(size=(N, 2))
PRIOR_X = 0.8 * RNG.normal(size=(M, 2)) + 0.3
ALPHA = np.array([0.5, 0.3, -0.1, 0.2, 0.15, -0.1, 0.05])
QUERIES = RNG.normal(size=(3, 2))
LAMBDA, DELTA, H_X, H_Y = 0.05, 0.02, 0.7, 0.8
COEFFICIENTS = RNG.normal(size=N)
KX, KY = kbr.Gaussian(H_X), kbr.Gaussian(H_Y)

#: None is exact; five landmarks of twelve points leave much out.
LANDMARKS = [None, 5]
ESTIMATORS = ["prior", "pairs", "importance"]
CLEANING = [
    {},
    {"clip": True},
    {"normalize": True},
    {"clip": True, "truncation": 0.3, "normalize": True},
]


PRINTED, CLIPPED = kbr.Clipping(False, 0.0, False), kbr.Clipping(True, 0.0, False)


def as_printed(estimator):
    """The options of an estimator whose prior weights are clipped only where they must be."""
    clipping = CLIPPED if estimator == "importance" else PRINTED
    return {"estimator": estimator, "clipping": clipping}


def clipping(clip=False, truncation=0.0, normalize=False):
    """The record of some options, all off by default: the rule as printed."""
    return kbr.Clipping(clip, truncation, normalize)


close = closeness(1e-9, 1e-11, "rtol")


def gram_function(h, features):
    """The kernel of features, exact or Nystroem, as a function of two samples."""
    if isinstance(features, kbr.features.DenseGram):
        return lambda a, b: gaussian(a, b, h)
    active = np.asarray(features.landmarks.active)
    points = np.asarray(features.landmarks.points)[active]
    inner = np.linalg.inv(gaussian(points, points, h))
    return lambda a, b: gaussian(a, points, h) @ inner @ gaussian(points, b, h)


def fit(landmarks=None, x=X, y=Y, regularizer=LAMBDA):
    return kbr.fit_conditional(
        KX,
        KY,
        jnp.asarray(x),
        jnp.asarray(y),
        regularizer=regularizer,
        landmarks_x=landmarks,
        landmarks_y=landmarks,
    )


def fitted(landmarks):
    """A model, and the Gram functions of its two sides in NumPy."""
    model = fit(landmarks)
    return model, gram_function(H_X, model.features_x), gram_function(H_Y, model.features_y)


def prior_of(weights=ALPHA, kernel=KX):
    return kbr.embed(kernel, jnp.asarray(PRIOR_X), jnp.asarray(weights))


def ridge(k):
    return k(X, X) + N * LAMBDA * np.eye(N)


def numpy_clean(w, clip=False, truncation=0.0, normalize=False):
    if clip:
        w = np.maximum(w, 0)
        w = np.where(w < truncation * w.max(), 0, w)
    return w / w.sum() if normalize else w


def numpy_prior_weights(kx):
    return np.linalg.solve(ridge(kx), kx(X, PRIOR_X) @ ALPHA)


def numpy_bayes(kx, ky, estimator, query, **cleaning):
    """One posterior, straight from the formula of its estimator."""
    if estimator == "importance":
        cleaning["clip"] = True
    w = numpy_clean(numpy_prior_weights(kx), **cleaning)
    k, column, identity = ky(Y, Y), ky(Y, query[None])[:, 0], np.eye(N)
    d = np.diag(w)
    if estimator == "importance":
        root = np.sqrt(d)
        return root @ np.linalg.inv(root @ k @ root + DELTA * identity) @ root @ column
    inverse = np.linalg.inv((d @ k) @ (d @ k) + DELTA * identity)
    if estimator == "pairs":
        return d @ k @ inverse @ d @ column
    operator = np.linalg.inv(ridge(kx)) @ kx(X, PRIOR_X) @ np.diag(ALPHA)
    return operator.T @ k @ inverse @ d @ column


def single_and_batch(rule, expected):
    """A rule on a batch of queries and on each alone; `expected` of one query."""
    batch = np.stack([expected(q) for q in QUERIES])
    close(rule(jnp.asarray(QUERIES)), batch)
    close(rule(jnp.asarray(QUERIES[0])), batch[0])


@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_condition(landmarks):
    model, kx, _ = fitted(landmarks)
    single_and_batch(
        lambda q: kbr.condition(model, q).weights,
        lambda q: np.linalg.solve(ridge(kx), kx(X, q[None]))[:, 0],
    )


@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_condition_centered(landmarks):
    model, kx, _ = fitted(landmarks)
    k, h = kx(X, X), np.eye(N) - 1 / N

    def affine(q):
        column = kx(X, q[None])[:, 0] - k.mean(1)
        return 1 / N + np.linalg.solve(h @ k @ h + N * LAMBDA * np.eye(N), h @ column)

    def printed(q):
        return np.linalg.solve(h @ k + N * LAMBDA * np.eye(N), h @ kx(X, q[None])[:, 0])

    single_and_batch(lambda q: kbr.condition_centered(model, q).weights, affine)
    single_and_batch(
        lambda q: kbr.condition_centered(model, q, estimator="song2009").weights, printed
    )
    close(kbr.condition_centered(model, jnp.asarray(QUERIES)).mass, np.ones(3))
    close(
        kbr.condition_centered(model, jnp.asarray(QUERIES), estimator="song2009").mass, np.zeros(3)
    )


@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_conditional_expectation(landmarks):
    model, kx, _ = fitted(landmarks)
    values = np.stack([np.outer(y, y) + np.sin(y) for y in Y])
    single_and_batch(
        lambda q: kbr.conditional_expectation(model, q, lambda y: jnp.outer(y, y) + jnp.sin(y)),
        lambda q: np.einsum("i,ijk", np.linalg.solve(ridge(kx), kx(X, q[None]))[:, 0], values),
    )


def cross_model(z, landmarks_x=None):
    kernel = kbr.TensorProduct((KY, kbr.Gaussian(1.3)))
    x, pairs = jnp.asarray(X), (jnp.asarray(Y), jnp.asarray(z))
    return kbr.fit_conditional(KX, kernel, x, pairs, regularizer=LAMBDA, landmarks_x=landmarks_x)


@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_conditional_cross_covariance(landmarks):
    z = np.sin(X[:, :1] + 2 * Y[:, :1])
    model = cross_model(z, landmarks)
    kx = gram_function(H_X, model.features_x)
    k, l = gaussian(Y, Y, H_Y), gaussian(z, z, 1.3)  # noqa: E741
    f, g = Y[:, 0] ** 2, np.cos(z[:, 0])

    def centering(q):
        beta = np.linalg.solve(ridge(kx), kx(X, q[None]))[:, 0]
        return np.diag(beta) - np.outer(beta, beta)

    def hs2(q):
        return kbr.embedding.squared_hs_norm(kbr.rules.conditional_cross_covariance(model, q))

    def cov(q):
        operator = kbr.rules.conditional_cross_covariance(model, q)
        return kbr.embedding.covariance(operator, lambda y: y[0] ** 2, lambda z: jnp.cos(z[0]))

    single_and_batch(hs2, lambda q: np.trace(centering(q) @ k @ centering(q) @ l))
    single_and_batch(cov, lambda q: f @ centering(q) @ g)


def test_a_constant_has_no_cross_covariance():
    """Where z is constant C = (1 - sum beta) mu_y (x) psi(z).

    Zero once the weights of x sum to 1.
    """
    operator = kbr.rules.conditional_cross_covariance(
        cross_model(np.ones((N, 1))), jnp.asarray(QUERIES)
    )
    mass = jnp.sum(operator.weights, axis=-1, keepdims=True)
    operator = eqx.tree_at(lambda c: c.weights, operator, operator.weights / mass)
    close(kbr.embedding.squared_hs_norm(operator), np.zeros(3), atol=1e-14)
    close(
        kbr.embedding.covariance(operator, lambda y: y[0], lambda z: z[0]), np.zeros(3), atol=1e-14
    )


@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_sum_and_chain_rule(landmarks):
    model, kx, _ = fitted(landmarks)
    prior, w = prior_of(), numpy_prior_weights(kx)
    close(kbr.sum_rule(model, prior).weights, w)
    joint = kbr.chain_rule(model, prior)
    assert joint.paired
    close(joint.weights, w)
    joint = kbr.chain_rule(model, prior, estimator="prior")
    assert not joint.paired
    close(joint.weights, (np.linalg.inv(ridge(kx)) @ kx(X, PRIOR_X) @ np.diag(ALPHA)).T)
    close(joint.x, PRIOR_X)
    close(joint.y, Y)
    # The second marginal is the sum rule.
    close(kbr.embedding.marginals(joint)[1].weights, w)


@pytest.mark.parametrize("cleaning", CLEANING, ids=lambda c: "-".join(c) or "printed")
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("landmarks", LANDMARKS)
def test_bayes_rule(landmarks, estimator, cleaning):
    model, kx, ky = fitted(landmarks)
    if estimator == "importance":
        cleaning = {**cleaning, "clip": True}

    def rule(q):
        options = {"estimator": estimator, "clipping": clipping(**cleaning)}
        posterior = kbr.bayes_rule(model, prior_of(), q, regularizer=DELTA, **options)
        close(posterior.points, PRIOR_X if estimator == "prior" else X)
        return posterior.weights

    single_and_batch(rule, lambda q: numpy_bayes(kx, ky, estimator, q, **cleaning))


def test_importance_weights_must_be_clipped():
    model = fit()
    w = numpy_prior_weights(lambda a, b: gaussian(a, b, H_X))
    assert w.min() < -1e-3, "the case must have negative prior weights"
    query = jnp.asarray(QUERIES[0])
    options = {"regularizer": DELTA, "estimator": "importance"}
    clipping = kbr.Clipping(True, 0.1, False)
    clipped = kbr.bayes_rule(model, prior_of(), query, clipping=clipping, **options)
    close(np.asarray(clipped.weights)[w <= 0], 0, 0, 0)
    with pytest.raises(ValueError, match="clips"):
        kbr.bayes_rule(model, prior_of(), query, clipping=PRINTED, **options)


def test_one_default_of_clipping_for_rule_and_filter():
    model, query = fit(), jnp.asarray(QUERIES[0])
    given = kbr.bayes_rule(model, prior_of(), query, regularizer=DELTA, clipping=kbr.Clipping())
    close(kbr.bayes_rule(model, prior_of(), query, regularizer=DELTA).weights, given.weights, 0, 0)
    s = jnp.asarray(X)
    filt = kbr.fit_filter(
        KX, KY, s, jnp.asarray(Y), regularizer=LAMBDA, posterior_regularizer=DELTA
    )
    assert eqx.tree_equal(filt.clipping, kbr.Clipping())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_all_points_as_landmarks_are_exact(estimator):
    posteriors = [
        kbr.bayes_rule(
            fit(landmarks),
            prior_of(),
            jnp.asarray(QUERIES),
            regularizer=DELTA,
            **as_printed(estimator),
        ).weights
        for landmarks in (None, N)
    ]
    close(posteriors[1], posteriors[0])


@pytest.mark.parametrize(
    "weights, options, expected",
    [
        (
            [0.5, -0.2, 0.1],
            {"clip": False, "truncation": 0.0, "normalize": False},
            [0.5, -0.2, 0.1],
        ),
        ([0.5, -0.2, 0.1], {"clip": True, "truncation": 0.0, "normalize": False}, [0.5, 0.0, 0.1]),
        ([0.5, -0.2, 0.1], {"clip": True, "truncation": 0.2, "normalize": False}, [0.5, 0.0, 0.1]),
        ([0.5, -0.2, 0.1], {"clip": True, "truncation": 0.21, "normalize": False}, [0.5, 0.0, 0.0]),
        ([0.5, -0.2, 0.1], {"clip": True, "truncation": 0.21, "normalize": True}, [1.0, 0.0, 0.0]),
        (
            [0.5, -0.2, 0.1],
            {"clip": True, "truncation": 0.0, "normalize": True},
            [5 / 6, 0.0, 1 / 6],
        ),
        (
            [0.5, -0.2, 0.1],
            {"clip": False, "truncation": 0.0, "normalize": True},
            [1.25, -0.5, 0.25],
        ),
        ([-0.5, -0.2, -0.1], {"clip": True, "truncation": 0.3, "normalize": False}, [1 / 3] * 3),
        ([0.0, 0.0, 0.0], {"clip": True, "truncation": 0.3, "normalize": True}, [1 / 3] * 3),
        ([3.0], {"clip": True, "truncation": 0.9, "normalize": True}, [1.0]),
    ],
)
def test_cleaning_of_weights(weights, options, expected):
    weights = jnp.asarray(weights)
    close(kbr.rules.clip_and_normalize(weights, clipping(**options)), expected)
    batch = jnp.stack([weights, 2 * weights, jnp.ones_like(weights)])
    each = [kbr.rules.clip_and_normalize(w, clipping(**options)) for w in batch]
    close(kbr.rules.clip_and_normalize(batch, clipping(**options)), jnp.stack(each))
    gradient = jax.grad(
        lambda w: jnp.sum(kbr.rules.clip_and_normalize(w, clipping(**options)) ** 2)
    )(weights)
    assert np.all(np.isfinite(gradient))


def test_gradient_of_cleaning_is_that_of_the_kept_weights():
    weights = jnp.asarray([0.5, -0.2, 0.01, 0.3])
    jacobian = jax.jacobian(
        lambda w: kbr.rules.clip_and_normalize(w, kbr.Clipping(True, 0.1, False))
    )(weights)
    close(jacobian, np.diag([1.0, 0.0, 0.0, 1.0]))


# Gradients.


def parameters():
    # of NumPy's types: a Python number is of weak type, and compiles again once a difference is
    # added
    return {
        "bandwidth_x": np.asarray(H_X),
        "bandwidth_y": np.asarray(H_Y),
        "regularizer": np.asarray(LAMBDA),
        "posterior_regularizer": np.asarray(DELTA),
        "prior_weights": ALPHA,
    }


def rule_scalars(p, landmarks):
    """One number for every rule, as a function of all parameters.

    The weights against fixed coefficients.
    """
    kx, ky = kbr.Gaussian(p["bandwidth_x"]), kbr.Gaussian(p["bandwidth_y"])
    x, y, q, c = jnp.asarray(X), jnp.asarray(Y), jnp.asarray(QUERIES), jnp.asarray(COEFFICIENTS)
    options = {"regularizer": p["regularizer"], "landmarks_x": landmarks, "landmarks_y": landmarks}
    model = kbr.fit_conditional(kx, ky, x, y, **options)
    pairs = kbr.fit_conditional(
        kx,
        kbr.TensorProduct((ky, ky)),
        x,
        (y, jnp.sin(2 * y)),
        regularizer=p["regularizer"],
        landmarks_x=landmarks,
    )
    prior = kbr.Embedding(kx, jnp.asarray(PRIOR_X), p["prior_weights"])

    def bayes(estimator, **cleaning):
        if estimator == "importance":
            cleaning["clip"] = True
        posterior = kbr.bayes_rule(
            model,
            prior,
            q,
            regularizer=p["posterior_regularizer"],
            estimator=estimator,
            clipping=clipping(**cleaning),
        )
        return jnp.sum(posterior.weights @ c[: posterior.weights.shape[-1]])

    return {
        "condition": jnp.sum(kbr.condition(model, q).weights @ c),
        "condition_centred_affine": jnp.sum(kbr.condition_centered(model, q).weights @ c),
        "condition_centred_printed": jnp.sum(
            kbr.condition_centered(model, q, estimator="song2009").weights @ c
        ),
        "conditional_expectation": jnp.sum(kbr.conditional_expectation(model, q, lambda y: y**3)),
        "conditional_cross_covariance": jnp.sum(
            kbr.embedding.squared_hs_norm(kbr.rules.conditional_cross_covariance(pairs, q))
        ),
        "sum_rule_a": kbr.embedding.squared_norm(kbr.sum_rule(model, prior)),
        "chain_rule_dependence": kbr.embedding.squared_hs_norm(
            kbr.embedding.cross_covariance(kbr.chain_rule(model, prior))
        ),
        "chain_rule_a": jnp.sum(kbr.chain_rule(model, prior, estimator="prior").weights @ c),
        "chain_rule_b": kbr.chain_rule(model, prior).weights @ c,
        "bayes_rule_a": bayes("prior"),
        "bayes_rule_b": bayes("pairs"),
        "bayes_rule_importance": bayes("importance"),
        "bayes_rule_a_normalized": bayes("prior", normalize=True),
        "bayes_rule_b_cleaned": bayes("pairs", clip=True, truncation=0.1, normalize=True),
    }


RULES = sorted(jax.eval_shape(functools.partial(rule_scalars, landmarks=None), parameters()))
PARAMETERS = list(parameters())


@functools.cache
def compiled(landmarks):
    """The Jacobian of the scalars and they themselves, in one program for all tests."""
    chosen = None
    if landmarks is not None:  # chosen outside the loss, so that the loss is smooth
        chosen = kbr.greedy_landmarks(KX, jnp.asarray(X), rank=landmarks)

    def vector(p):
        scalars = rule_scalars(p, chosen)
        return (jnp.stack([scalars[rule] for rule in RULES]),) * 2

    return jax.jit(jax.jacrev(vector, has_aux=True))


@functools.cache
def differences(landmarks, name):
    """Derivative of every scalar along a direction of one parameter, by differences of the fourth
    order.
    """
    base, h = parameters(), 1e-4
    direction = (
        np.random.default_rng(1).normal(size=base[name].shape)
        if base[name].ndim
        else np.asarray(1.0)
    )

    def at(t):
        return np.asarray(compiled(landmarks)({**base, name: base[name] + t * direction})[1])

    return direction, (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("landmarks", [None, 6])
def test_gradients(landmarks, rule):
    jacobian, _ = compiled(landmarks)(parameters())
    index, depends = RULES.index(rule), []
    for name in PARAMETERS:
        direction, expected = differences(landmarks, name)
        actual = np.sum(np.asarray(jacobian[name][index]) * direction)
        close(actual, expected[index], rtol=1e-6, atol=1e-9)
        depends.append(abs(expected[index]) > 1e-6)
    assert depends[0], "each rule depends on the first bandwidth"
    if rule.startswith("bayes"):
        assert all(depends)


@functools.partial(jax.jit, static_argnums=1)
@jax.value_and_grad
def degenerate_loss(p, landmarks):
    """A number that every solve of the rules enters, also as a function of the points."""
    kx, ky = kbr.Gaussian(p["h"]), kbr.Matern32(p["h"])
    options = {"landmarks_x": landmarks, "landmarks_y": landmarks}
    model = kbr.fit_conditional(kx, ky, p["x"], p["y"], regularizer=p["regularizer"], **options)
    prior = kbr.Embedding(kx, p["x"], jnp.full(len(p["x"]), 1 / len(p["x"])))
    posteriors = [
        kbr.bayes_rule(
            model, prior, p["y"][0], regularizer=p["regularizer"], **as_printed(estimator)
        )
        for estimator in ESTIMATORS
    ]
    return sum(kbr.embedding.squared_norm(q) for q in posteriors) + jnp.sum(
        kbr.condition_centered(model, p["x"]).weights ** 2
    )


@pytest.mark.parametrize("landmarks", [None, 3])
@pytest.mark.parametrize(
    "x, y",
    [
        (np.repeat(X[:4], 2, axis=0), np.repeat(Y[:4], 2, axis=0)),
        (np.zeros((8, 2)), np.zeros((8, 2))),
        (X[:8], Y[:8] * 0),
        (X[:1], Y[:1]),
    ],
    ids=["duplicates", "all equal", "constant y", "one point"],
)
def test_gradients_are_finite_on_degenerate_samples(x, y, landmarks):
    p = {
        "h": jnp.asarray(0.7),
        "regularizer": jnp.asarray(1e-4),
        "x": jnp.asarray(x),
        "y": jnp.asarray(y),
    }
    for leaf in jax.tree.leaves(degenerate_loss(p, landmarks)):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize("landmarks", [None, 5])
def test_rank_deficient_grams(landmarks):
    """Linear kernels in two dimensions.

    Rank 2 of N, and a small ridge. Values by NumPy on the 2 x 2 side.
    """
    x, y, lam = jnp.asarray(X), jnp.asarray(Y), 1e-8

    def weights(regularizer):
        kernel = kbr.Linear()
        model = kbr.fit_conditional(
            kernel, kernel, x, y, regularizer=regularizer, landmarks_x=landmarks
        )
        return kbr.condition(model, jnp.asarray(QUERIES)).weights

    expected = QUERIES @ np.linalg.inv(X.T @ X + N * lam * np.eye(2)) @ X.T
    close(weights(jnp.asarray(lam)), expected, rtol=1e-6, atol=1e-8)
    gradient = jax.grad(lambda r: jnp.sum(weights(r) ** 2))(jnp.asarray(lam))
    inverse = np.linalg.inv(X.T @ X + N * lam * np.eye(2))
    derivative = -N * QUERIES @ inverse @ inverse @ X.T
    close(gradient, 2 * np.sum(expected * derivative), rtol=1e-5)


# Batches, compilation, invariance.


def rules_of_a_query(model, prior):
    return {
        "condition": lambda q: kbr.condition(model, q).weights,
        "affine": lambda q: kbr.condition_centered(model, q).weights,
        "printed": lambda q: kbr.condition_centered(model, q, estimator="song2009").weights,
        "expectation": lambda q: kbr.conditional_expectation(model, q, lambda y: y[0] * y),
        **{
            f"bayes {estimator}": lambda q, estimator=estimator: (
                kbr.bayes_rule(model, prior, q, regularizer=DELTA, **as_printed(estimator)).weights
            )
            for estimator in ESTIMATORS
        },
    }


@pytest.mark.parametrize("name", list(rules_of_a_query(None, None)))
@pytest.mark.parametrize("landmarks", [None, 5])
def test_batches_equal_vmap_and_jit_equals_eager(landmarks, name):
    model, queries = fit(landmarks), jnp.asarray(QUERIES)
    rule = rules_of_a_query(model, prior_of())[name]
    together = rule(queries)
    close(together, jax.jit(jax.vmap(rule))(queries), rtol=1e-10)

    @eqx.filter_jit
    def jitted(model, prior, q):
        return rules_of_a_query(model, prior)[name](q)

    close(together, jitted(model, prior_of(), queries), rtol=1e-10)


BATCH_OF_PRIORS = np.stack([ALPHA, ALPHA[::-1], np.full(M, 1 / M)])


@pytest.mark.parametrize("landmarks", [None, 5])
@pytest.mark.parametrize(
    "rule",
    [
        lambda model, prior: kbr.sum_rule(model, prior).weights,
        lambda model, prior: kbr.chain_rule(model, prior, estimator="prior").weights,
        lambda model, prior: kbr.chain_rule(model, prior).weights,
    ],
    ids=["sum", "chain, prior", "chain, pairs"],
)
def test_batches_of_priors_equal_vmap(rule, landmarks):
    model, batch = fit(landmarks), jnp.asarray(BATCH_OF_PRIORS)
    together = rule(model, prior_of(BATCH_OF_PRIORS))

    def alone(w):
        return rule(model, kbr.Embedding(KX, jnp.asarray(PRIOR_X), w))

    close(together, jax.jit(jax.vmap(alone))(batch), rtol=1e-10)
    close(together, eqx.filter_jit(rule)(model, prior_of(BATCH_OF_PRIORS)), rtol=1e-10)
    nested = rule(model, prior_of(np.stack([BATCH_OF_PRIORS, 2 * BATCH_OF_PRIORS])))
    close(nested[0], together, rtol=1e-10)


def test_bayes_rule_under_vmap_over_priors():
    model, query = fit(), jnp.asarray(QUERIES[0])

    def posterior(weights):
        prior = kbr.Embedding(KX, jnp.asarray(PRIOR_X), weights)
        return kbr.bayes_rule(model, prior, query, regularizer=DELTA, clipping=PRINTED).weights

    each = [posterior(jnp.asarray(w)) for w in BATCH_OF_PRIORS]
    close(jax.vmap(posterior)(jnp.asarray(BATCH_OF_PRIORS)), jnp.stack(each), rtol=1e-10)


@pytest.mark.parametrize("landmarks", [None, kbr.Landmarks(jnp.asarray(QUERIES))])
def test_the_order_of_the_sample_does_not_matter(landmarks):
    order, prior_order = (
        np.random.default_rng(2).permutation(N),
        np.random.default_rng(3).permutation(M),
    )
    model, permuted = fit(landmarks), fit(landmarks, X[order], Y[order])
    prior = prior_of()
    other = kbr.embed(KX, jnp.asarray(PRIOR_X[prior_order]), jnp.asarray(ALPHA[prior_order]))
    for name, rule in rules_of_a_query(model, prior).items():
        first = rule(jnp.asarray(QUERIES))
        second = rules_of_a_query(permuted, other)[name](jnp.asarray(QUERIES))
        if name != "expectation":
            first = first[:, prior_order if name == "bayes prior" else order]
        close(second, first)
    close(kbr.sum_rule(permuted, other).weights, kbr.sum_rule(model, prior).weights[order])
    chained = kbr.chain_rule(model, prior, estimator="prior").weights[prior_order][:, order]
    close(kbr.chain_rule(permuted, other, estimator="prior").weights, chained)


# Closed forms: linear-Gaussian models.

SLOPE, NOISE = 1.7, 0.4
AFFINE, QUADRATIC = kbr.Polynomial(1), kbr.Polynomial(2)


def gaussian_sample():
    """Pairs (x, y = SLOPE x + e) with E[y | x] and E[y^2 | x] exact in the sample.

    Every x with noise + and -.
    """
    x = np.repeat(np.linspace(-2, 2.5, 9), 2)[:, None]
    return x, SLOPE * x + NOISE * np.tile([1.0, -1.0], 9)[:, None]


def gaussian_prior(kernel):
    """A prior on other points, and its mean and variance."""
    points, weights = np.array([[-1.0], [0.2], [0.9], [1.6]]), np.array([0.2, 0.1, 0.4, 0.3])
    mean = weights @ points[:, 0]
    return (
        kbr.embed(kernel, jnp.asarray(points), jnp.asarray(weights)),
        mean,
        weights @ (points[:, 0] - mean) ** 2,
    )


@pytest.mark.parametrize("landmarks", [None, 3])
def test_linear_kernels_do_ridge_regression(landmarks):
    model = kbr.fit_conditional(
        kbr.Linear(),
        kbr.Linear(),
        jnp.asarray(X),
        jnp.asarray(Y),
        regularizer=LAMBDA,
        landmarks_x=landmarks,
    )
    slope = np.linalg.solve(X.T @ X / N + LAMBDA * np.eye(2), X.T @ Y / N)
    close(kbr.conditional_expectation(model, jnp.asarray(QUERIES), lambda y: y), QUERIES @ slope)
    prior = kbr.embed(kbr.Linear(), jnp.asarray(PRIOR_X), jnp.asarray(ALPHA))
    close(kbr.expectation(kbr.sum_rule(model, prior), lambda y: y), ALPHA @ PRIOR_X @ slope)


@pytest.mark.parametrize("landmarks", [None, 3])
def test_the_affine_form_is_regression_with_an_intercept(landmarks):
    x, y = X + 3.0, Y - 2.0
    model = kbr.fit_conditional(
        kbr.Linear(),
        kbr.Linear(),
        jnp.asarray(x),
        jnp.asarray(y),
        regularizer=LAMBDA,
        landmarks_x=landmarks,
    )
    cx, cy = x - x.mean(0), y - y.mean(0)
    slope = np.linalg.solve(cx.T @ cx / N + LAMBDA * np.eye(2), cx.T @ cy / N)
    expected = y.mean(0) + (QUERIES - x.mean(0)) @ slope
    embedding = kbr.condition_centered(model, jnp.asarray(QUERIES))
    close(kbr.expectation(embedding, lambda y: y), expected)


@pytest.mark.parametrize("landmarks", [None, 3])
def test_the_rules_carry_moments_exactly(landmarks):
    """With quadratics in x the prior weights reproduce the second moments of the joint
    distribution.
    """
    x, y = gaussian_sample()
    model = kbr.fit_conditional(
        QUADRATIC, AFFINE, jnp.asarray(x), jnp.asarray(y), regularizer=1e-9, landmarks_x=landmarks
    )
    prior, mean, variance = gaussian_prior(QUADRATIC)
    total = SLOPE**2 * variance + NOISE**2
    predicted = kbr.sum_rule(model, prior)
    close(predicted.mass, 1, 1e-7)
    close(kbr.mean(predicted), [SLOPE * mean], 1e-7)
    close(kbr.expectation(predicted, lambda y: y[0] ** 2), total + (SLOPE * mean) ** 2, 1e-7)
    for estimator in ("prior", "pairs"):
        joint = kbr.chain_rule(model, prior, estimator=estimator)
        product = kbr.embedding.joint_expectation(joint, lambda x: x[0], lambda y: y[0])
        close(product, SLOPE * (variance + mean**2), 1e-7)


@pytest.mark.parametrize("estimator", ["prior", "pairs"])
@pytest.mark.parametrize("landmarks", [None, 3])
def test_bayes_rule_is_the_kalman_update(landmarks, estimator):
    """Affine features of y and vanishing regularizers.

    The linear-Gaussian posterior mean, for any prior.
    """
    x, y = gaussian_sample()
    model = kbr.fit_conditional(
        QUADRATIC,
        AFFINE,
        jnp.asarray(x),
        jnp.asarray(y),
        regularizer=1e-9,
        landmarks_x=landmarks,
        landmarks_y=None if landmarks is None else 2,
    )
    prior, mean, variance = gaussian_prior(QUADRATIC)
    gain = SLOPE * variance / (SLOPE**2 * variance + NOISE**2)
    observed = np.array([[-1.0], [0.3], [2.0]])
    posterior = kbr.bayes_rule(
        model, prior, jnp.asarray(observed), regularizer=1e-11, **as_printed(estimator)
    )
    close(posterior.mass, np.ones(3), 1e-5)
    estimate = kbr.expectation(posterior, lambda x: x[0])
    close(estimate, mean + gain * (observed[:, 0] - SLOPE * mean), 1e-5)


def test_bayes_rule_with_the_training_marginal_is_the_conditional_mean():
    x, y = gaussian_sample()
    model = kbr.fit_conditional(QUADRATIC, AFFINE, jnp.asarray(x), jnp.asarray(y), regularizer=1e-9)
    moments = np.cov(np.hstack([x, y]).T, bias=True)
    observed = np.array([[-1.0], [0.3]])
    expected = x.mean() + moments[0, 1] / moments[1, 1] * (observed[:, 0] - y.mean())
    for estimator in ESTIMATORS:
        posterior = kbr.bayes_rule(
            model,
            kbr.embed(QUADRATIC, jnp.asarray(x)),
            jnp.asarray(observed),
            regularizer=1e-10,
            **as_printed(estimator),
        )
        close(kbr.expectation(posterior, lambda x: x[0]), expected, 1e-4)


# Closed forms: tables.


def random_table(seed, rows=3, columns=4):
    """Positive counts of 40 pairs, the sample that has them, and a prior over the rows."""
    rng = np.random.default_rng(seed)
    counts = 1 + rng.multinomial(
        40 - rows * columns, rng.dirichlet(np.ones(rows * columns))
    ).reshape(rows, columns)
    x, y = np.nonzero(counts)
    repeats = counts[x, y]
    return counts, np.repeat(x, repeats), np.repeat(y, repeats), rng.dirichlet(np.ones(rows) * 3)


def indicators(points, classes):
    return (np.asarray(points)[:, None] == np.arange(classes)).astype(float)


@pytest.mark.parametrize("landmarks", [None, 4])
@pytest.mark.parametrize("seed", range(3))
def test_tables(seed, landmarks):
    counts, x, y, pi = random_table(seed)
    likelihood = counts / counts.sum(1, keepdims=True)
    joint = pi[:, None] * likelihood
    delta = kbr.Delta()
    options = {"regularizer": 1e-9, "landmarks_x": landmarks, "landmarks_y": landmarks}
    model = kbr.fit_conditional(delta, delta, jnp.asarray(x), jnp.asarray(y), **options)
    prior = kbr.embed(delta, jnp.arange(3), jnp.asarray(pi))
    ix, iy = indicators(x, 3), indicators(y, 4)
    close(kbr.condition(model, jnp.arange(3)).weights @ iy, likelihood, atol=1e-8)
    close(kbr.condition_centered(model, jnp.arange(3)).weights @ iy, likelihood, atol=1e-8)
    close(kbr.sum_rule(model, prior).weights @ iy, joint.sum(0), atol=1e-8)
    close(ix.T @ (np.asarray(kbr.chain_rule(model, prior).weights)[:, None] * iy), joint, atol=1e-8)
    close(kbr.chain_rule(model, prior, estimator="prior").weights @ iy, joint, atol=1e-8)
    posterior = (joint / joint.sum(0)).T
    for estimator in ESTIMATORS:
        result = kbr.bayes_rule(
            model, prior, jnp.arange(4), regularizer=1e-9, **as_printed(estimator)
        )
        close(np.asarray(result.weights) @ indicators(result.points, 3), posterior, atol=2e-7)


def test_a_class_that_was_never_seen_gets_no_weight():
    _, x, y, pi = random_table(0)
    delta = kbr.Delta()
    model = kbr.fit_conditional(delta, delta, jnp.asarray(x), jnp.asarray(y), regularizer=1e-6)
    close(kbr.condition(model, jnp.asarray(9)).weights, np.zeros(len(x)), 0, 0)
    prior = kbr.embed(delta, jnp.arange(3), jnp.asarray(pi))
    for estimator in ESTIMATORS:
        result = kbr.bayes_rule(
            model, prior, jnp.asarray(9), regularizer=1e-6, **as_printed(estimator)
        )
        close(result.weights, np.zeros(len(result.weights)), 0, 0)


def test_as_the_posterior_regularizer_vanishes_the_prior_drops_out():
    model = fit()
    gram = gaussian(Y, Y, H_Y)
    limit = np.linalg.solve(gram, gaussian(Y, QUERIES, H_Y)).T
    queries = jnp.asarray(QUERIES)
    posterior = kbr.bayes_rule(model, prior_of(), queries, regularizer=1e-22, clipping=PRINTED)
    close(posterior.weights, limit, 1e-4, 1e-6)


def test_where_a_prior_lies_does_not_depend_on_its_mass():
    x = jnp.linspace(-4, 4, 60)
    kernel = kbr.Gaussian(1.0)
    model = kbr.fit_conditional(kernel, kernel, x, x, regularizer=1e-4)
    for mass in (1.0, 1e-4):
        prior = kbr.embed(kernel, jnp.full(1, 30.0), jnp.full(1, mass))
        with pytest.raises(ValueError, match="lies on the training x"):
            kbr.bayes_rule(model, prior, 0.0, regularizer=1e-3)
    with pytest.warns(UserWarning, match=r"Of the `prior` 3\d % lies on the training x"):
        kbr.bayes_rule(model, kbr.embed(kernel, jnp.linspace(4, 8, 50)), 0.0, regularizer=1e-3)


@pytest.mark.parametrize("ridge", [1e-4, 0.1, 20.0])
def test_where_a_prior_lies_does_not_depend_on_the_ridge(ridge):
    """A large one, as some learned filters have, shrinks the weights of every prior."""
    x = jnp.linspace(-2, 2, 200)
    kernel = kbr.Gaussian(0.3)
    model = kbr.fit_conditional(kernel, kernel, x, x, regularizer=ridge)
    kbr.bayes_rule(model, kbr.embed(kernel, jnp.full(1, 1.0)), 0.0, regularizer=1e-3)
    with pytest.warns(UserWarning, match=r"Of the `prior` \d+ % lies on the training x"):
        kbr.bayes_rule(model, kbr.embed(kernel, jnp.linspace(1.5, 4, 50)), 0.0, regularizer=1e-3)
    with pytest.raises(ValueError, match="lies on the training x"):
        kbr.bayes_rule(model, kbr.embed(kernel, jnp.full(1, 7.0)), 0.0, regularizer=1e-3)


def test_a_linear_kernel_knows_no_mass():
    x = jnp.linspace(-1, 1, 60)
    model = kbr.fit_conditional(kbr.Linear(), kbr.Gaussian(0.5), x, x, regularizer=1e-4)
    same = kbr.fit_conditional(jnp.multiply, kbr.Gaussian(0.5), x, x, regularizer=1e-4)
    prior = kbr.embed(kbr.Linear(), jnp.full(1, 0.5))
    plain = kbr.Clipping(False, 0.0, False)
    posteriors = [
        kbr.bayes_rule(one, prior, 0.5, regularizer=1e-4, clipping=plain) for one in (model, same)
    ]
    assert bool(jnp.all(jnp.isfinite(posteriors[0].weights)))
    close(posteriors[0].weights, posteriors[1].weights)


def test_rounding_that_clipping_leaves_is_nothing():
    weights = jnp.asarray([[-0.6, -0.4, 1e-18], [-0.6, -0.4, 0.1]])
    found = kbr.rules.clip_and_normalize(weights, kbr.Clipping())
    np.testing.assert_allclose(found, [[1 / 3, 1 / 3, 1 / 3], [0, 0, 1]])
