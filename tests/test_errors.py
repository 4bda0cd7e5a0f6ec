"""Bad input meets a ValueError that names the argument, says what came and what was expected."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(6, 2)))
Y = jnp.asarray(RNG.normal(size=(6, 3)))
LABELS = jnp.arange(6)
NAN = X.at[2, 1].set(jnp.nan)
EMPTY = jnp.zeros((0, 2))
G = kbr.Gaussian(1.0)
RIDGE = {"regularizer": 0.1}
BAYES = {"regularizer": 0.1, "posterior_regularizer": 0.1}
MODEL = kbr.fit_conditional(G, G, X, Y, **RIDGE)
PRIOR = kbr.embed(G, X)
BATCH = kbr.embed(G, X, jnp.ones((2, 6)) / 6)
FILTER = kbr.fit_filter(G, G, X, Y, **BAYES)
SIMPLE = kbr.fit_conditional_embedding_filter(G, G, X, Y, **RIDGE)
LANDMARKS = kbr.Landmarks(X[:3])
PAIRS = kbr.TensorProduct((G, kbr.Delta()))
PAIR = kbr.TensorProduct((G, G))
RUN = kbr.run_filter(FILTER, Y[:3])
STEP = kbr.filter_step(FILTER, kbr.init_filter(FILTER), Y[0])[1]


def fit(x=X, y=Y, kernel_x=G, kernel_y=G, **options):
    return kbr.fit_conditional(kernel_x, kernel_y, x, y, **{**RIDGE, **options})


def fit_filter(states=X, observations=Y, kernel_states=G, kernel_observations=G, **options):
    return kbr.fit_filter(
        kernel_states, kernel_observations, states, observations, **{**BAYES, **options}
    )


def fit_controlled(controls=X[:-1], landmarks=None, regularizer=0.1, kernel=None, **options):
    kernel = kernel or kbr.TensorProduct((G, G))
    emission = kbr.fit_conditional(G, G, X[:-1], Y[:-1], **RIDGE)
    transition = kbr.fit_conditional(
        kernel, G, (X[:-1], controls), X[1:], regularizer=regularizer, landmarks_x=landmarks
    )
    return kbr.KernelBayesFilter(emission, transition, **{**RIDGE, **options})


def smooth(filt=FILTER, run=RUN, **options):
    return kbr.smooth(filt, run, **{**RIDGE, **options})


def fit_simple(states=X, observations=Y, kernel_states=G, kernel_observations=G, **options):
    return kbr.fit_conditional_embedding_filter(
        kernel_states, kernel_observations, states, observations, **{**RIDGE, **options}
    )


def fit_moment_filter(states=X, observations=Y, transition=None, **options):
    maps = kbr.moments.moment_maps(G, G, LANDMARKS, kbr.Landmarks(Y[:3]), shift=True)
    moments = kbr.moments.collect_moments(maps, states[:-1], observations[:-1], states[1:])
    emission = kbr.moments.fit_conditional(moments, **RIDGE)
    clipping = kbr.Clipping(False, 0.0)
    return kbr.KernelBayesFilter(
        emission, transition, **{**RIDGE, "shift": True, "clipping": clipping, **options}
    )


def fit_dynamics(sets, regularizer=0.1, **options):
    return kbr.dynamics.fit_dynamics(
        G, kbr.dynamics.sample_sequence(sets), regularizer=regularizer, **options
    )


def fit_svm(x=X, labels=LABELS % 2, penalty=1.0, **options):
    return kbr.dynamics.fit_predicted_svm(x, labels, jnp.ones(6) / 6, penalty=penalty, **options)


KEY = jax.random.key(0)


def two_samples(x=X, y=X, kernel=G, **options):
    return kbr.hypotheses.two_sample_test(kernel, x, y, key=KEY, **options)


def triples(x, z=None):
    z = x if z is None else z
    return kbr.hypotheses.conditional_independence_test(G, G, G, x, x, z, key=KEY)


TWO_SETS = kbr.dynamics.sample_sequence([X, X + 1])
MIXTURE = kbr.experimental.gaussian_mixture(jnp.zeros((1, 2)), jnp.ones(1))


def simulate(count=3, **options):
    return kbr.likelihood_free.simulate(
        lambda key, t: t, jax.random.normal, count, key=KEY, **options
    )


#: What is called, and what its message must say, in order: the argument, what came, what was
#: expected.
CASES = {
    "labels beyond int32": (
        lambda: kbr.embed(None, np.array([1, 2**32 + 1])),
        "`points` holds integers beyond int32",
    ),
    "a label beyond int32": (
        lambda: kbr.condition(kbr.fit_conditional(None, G, LABELS, X, **RIDGE), np.int64(2**32)),
        "`x` holds integers beyond int32",
    ),
    "a Gram matrix of nan": (
        lambda: kbr.Precomputed(np.full((3, 3), np.nan)),
        "`matrix` must be a Gram matrix: finite",
    ),
    "nan below the diagonal": (
        lambda: kbr.Precomputed(np.array([[1.0, 0.5], [np.nan, 1.0]])),
        "`matrix` must be a Gram matrix: finite",
    ),
    "the mean of points": (lambda: kbr.mean(X), "`embedding` must be an Embedding, got"),
    "a quantile of points": (
        lambda: kbr.quantile(X, 0.5),
        "`embedding` must be an Embedding, got",
    ),
    "a sequence as lists": (
        lambda: kbr.fit_filter(G, G, np.ones((6, 2)).tolist(), Y, **BAYES),
        "`states` is a list of numbers or lists",
    ),
    "one point of a series": (
        lambda: kbr.hypotheses.change_points(None, X[:1]),
        "`x` has 1 points",
    ),
    "trajectories as a tuple": (
        lambda: kbr.learn_filter((np.ones((60, 1)),) * 2, (np.ones((60, 1)),) * 2),
        r"Several trajectories are a list, `list\(states\)`",
    ),
    "a rank as landmarks of moments": (
        lambda: kbr.moments.moment_maps(G, G, 4, LANDMARKS),
        "`landmarks_x` must be Landmarks",
    ),
    "moments of x alone": (
        lambda: kbr.moments.collect_moments(
            kbr.moments.moment_maps(G, G, LANDMARKS, kbr.Landmarks(Y[:3])), X
        ),
        "`x` without `y`",
    ),
    "normalized weights of sum 0": (
        lambda: kbr.smooth(
            (filt := fit_simple(estimator="song2009")), kbr.run_filter(filt, Y[:3]), **RIDGE
        ),
        "`normalize=True` divides",
    ),
    "integers as successors": (
        lambda: kbr.fit_filter(
            G, G, X, Y, successors=jnp.round(X).astype(int), **RIDGE, posterior_regularizer=0.1
        ),
        "`successors` has dtype int32",
    ),
    "integers as successors, 2009": (
        lambda: kbr.fit_conditional_embedding_filter(
            G, G, X, Y, successors=jnp.round(X).astype(int), **RIDGE
        ),
        "`successors` has dtype int32",
    ),
    "integers as landmarks": (
        lambda: fit(landmarks_x=kbr.Landmarks(jnp.round(X).astype(int))),
        "`landmarks` has dtype int32",
    ),
    "integers as alternatives": (
        lambda: kbr.filtering.fit_discriminant(
            G, X, X, jnp.round(X).astype(int), **RIDGE, block_size=2
        ),
        "`alternatives` has dtype int32",
    ),
    "moments of integers": (
        lambda: kbr.moments.collect_moments(
            kbr.moments.moment_maps(G, G, LANDMARKS, kbr.Landmarks(Y[:3])),
            jnp.round(X).astype(int),
            Y,
        ),
        "`x` has dtype int32",
    ),
    "a simulator of integers": (
        lambda: kbr.KernelBayesFilter(
            kbr.known_likelihood(G, X, lambda o, s: jnp.sum((o - s) ** 2), **RIDGE),
            kbr.SimulatedTransition(lambda key, s: jnp.round(s).astype(int), key=KEY),
        ),
        "`the simulated states` has dtype int32",
    ),
    "words as labels": (
        lambda: fit_svm(labels=["a", "b"] * 3),
        "`labels` holds ndarray, which is no array of numbers",
    ),
    "labels in two columns": (
        lambda: fit_svm(labels=jnp.stack([LABELS % 2] * 2, axis=1)),
        r"`labels` must be one number for each point, \[6\]",
    ),
    "weights of several sets": (
        lambda: kbr.dynamics.fit_predicted_svm(X, LABELS % 2, jnp.ones((2, 6)), penalty=1.0),
        r"`weights` must be one number for each point, \[6\]",
    ),
    "one belief": (
        lambda: kbr.tuning.calibrate(kbr.embed(G, X), X[0]),
        r"`beliefs` must be a batch with weights \[b, n\]",
    ),
    "one forecast": (
        lambda: kbr.tuning.conformal_margin(kbr.embed(G, X), X),
        r"`forecasts` must be a batch with weights \[b, n\]",
    ),
    # Points in place of embeddings.
    "prior points": (
        lambda: kbr.bayes_rule(fit(), X, X[0], regularizer=0.1),
        r"`prior` must be an Embedding, got ArrayImpl: embed a sample by `kbr.embed",
    ),
    "mmd of points": (lambda: kbr.mmd(X, X), "`p` must be an Embedding"),
    # Kernels.
    "bandwidth zero": (lambda: kbr.Gaussian(0.0), "`bandwidth` must be positive, got 0"),
    "bandwidth negative": (lambda: kbr.Laplace(-1.0), "`bandwidth` must be positive, got -1"),
    "bandwidth nan": (lambda: kbr.Matern32(float("nan")), "`bandwidth` must be positive, got nan"),
    "bandwidth of a vector": (
        lambda: kbr.Gaussian(jnp.asarray([1.0, 0.0])),
        r"`bandwidth` must be positive, got \[1",
    ),
    "alpha": (lambda: kbr.RationalQuadratic(1.0, 0.0), "`alpha` must be positive, got 0"),
    "factor": (lambda: -2.0 * G, "`factor` must be positive, got -2"),
    "offset": (lambda: kbr.Polynomial(2, 1.0, 0.0), "`offset` must be positive, got 0"),
    "degree": (lambda: kbr.Polynomial(0), "`degree` must be an integer >= 1, got 0"),
    "degree type": (lambda: kbr.Polynomial(1.5), "`degree` must be an integer >= 1, got 1.5"),
    "kernels": (lambda: kbr.TensorProduct(()), r"`kernels` must be a non-empty tuple.*got \(\)"),
    "kernel": (lambda: kbr.gram("gauss", X), "kernel must be .* callable .* got 'gauss'"),
    "matrix": (
        lambda: kbr.Precomputed(jnp.ones((2, 3))),
        r"`matrix` must be a square .* got shape \(2, 3\)",
    ),
    # Gram matrices.
    "gram of a scalar": (lambda: kbr.gram(G, jnp.asarray(1.0)), "`x` is a scalar; .* leading axis"),
    "gram of nothing": (lambda: kbr.gram(G, ()), "`x` holds no arrays; pass an array"),
    "gram of empty": (lambda: kbr.gram(G, EMPTY), "`x` is an empty sample; at least one"),
    "gram of empty y": (lambda: kbr.gram(G, X, EMPTY), "`y` is an empty sample; at least one"),
    "gram of other features": (
        lambda: kbr.gram(G, X, Y),
        r"`y` has shape \[\(3,\)\], one of `x` \[\(2,\)\]",
    ),
    "a tuple of points": (
        lambda: kbr.embed(G, ([0.1], [0.2])),
        "Tuples are the parts .* `jnp.asarray",
    ),
    "rows of two lengths": (lambda: kbr.embed(G, [[0.1], [0.2, 0.3]]), "different lengths"),
    "gram of another rank": (
        lambda: kbr.gram(G, X, X[0]),
        r"`y` has shape \[\(\)\], one of `x` \[\(2,\)\]",
    ),
    "gram of labels": (
        lambda: kbr.gram(G, LABELS),
        "Gaussian .* real coordinates, but `x` has dtype int.*astype",
    ),
    "gram of floats": (
        lambda: kbr.gram(kbr.Delta(), X),
        "Delta .* integer .* but `x` has dtype float",
    ),
    "bandwidth of other size": (
        lambda: kbr.gram(kbr.Gaussian(jnp.ones(2)), Y),
        r"bandwidth of .* has shape \(2,\), but a point of `x` has shape \(3,\)",
    ),
    "a column of kernel values": (
        lambda: kbr.embed(lambda a, b: jnp.exp(-((a - b) ** 2)), X),
        r"must return one number for two single points, got shape \(\d+,\)",
    ),
    "negative histogram": (
        lambda: kbr.gram(kbr.kernels.ChiSquared(), X - 10),
        "ChiSquared is a kernel on histograms, but `x` has negative coordinates",
    ),
    "histogram of labels": (
        lambda: kbr.gram(kbr.kernels.HistogramIntersection(), LABELS),
        "HistogramIntersection .* `x` has dtype int",
    ),
    "precomputed of pairs": (
        lambda: kbr.gram(kbr.Precomputed(jnp.eye(6)), jnp.zeros((6, 2), int)),
        r"Precomputed takes indices, integers `x` of shape \[n\]; got int32\[6, 2\]",
    ),
    "pairs of uneven parts": (
        lambda: kbr.gram(PAIRS, (X, LABELS[:5])),
        r"`x` have different numbers .* \[5, 6\]",
    ),
    "one array for a pair": (
        lambda: kbr.gram(PAIRS, X),
        "TensorProduct of 2 kernels .* `x` is not such a tuple",
    ),
    "three parts for a pair": (
        lambda: kbr.gram(PAIRS, (X, LABELS, X)),
        "TensorProduct of 2 kernels .* `x` is not such a tuple",
    ),
    "swapped parts": (lambda: kbr.gram(PAIRS, (LABELS, X)), r"Gaussian .* `x\[0\]` has dtype int"),
    "a pair for one kernel": (
        lambda: kbr.gram(G, (X, X)),
        "Gaussian .* single arrays, .* `x` is a tuple of 2 parts",
    ),
    "diagonal": (lambda: kbr.kernels.diagonal(G, EMPTY), "`x` is an empty sample"),
    "median of one": (lambda: kbr.median_heuristic(X[:1]), "at least 2 points, got 1"),
    "median of a point": (
        lambda: kbr.median_heuristic(X, max_points=1),
        "`max_points` must be at least 2",
    ),
    "median of labels": (lambda: kbr.median_heuristic(LABELS), "`x` has dtype int"),
    "median without a key": (
        lambda: kbr.median_heuristic(X, max_points=3),
        "`x` has 6 > max_points = 3 .* `key`",
    ),
    "median of nan": (
        lambda: kbr.median_heuristic(NAN),
        "`x` contains NaN or infinity; remove or impute",
    ),
    # Landmarks.
    "rank zero": (
        lambda: kbr.greedy_landmarks(G, X, rank=0),
        "`rank` must be an integer >= 1, got 0",
    ),
    "rank real": (
        lambda: kbr.features.incomplete_cholesky(G, X, rank=2.5),
        "`rank` must be an integer >= 1, got 2.5",
    ),
    "rank too large": (
        lambda: kbr.uniform_landmarks(X, rank=7, key=jax.random.key(0)),
        "`rank` must be an integer between 1 and 6 \\(the points of `x`\\), got 7",
    ),
    "random rank": (
        lambda: kbr.rpcholesky_landmarks(G, X, rank=-1, key=jax.random.key(0)),
        "`rank` must be an integer >= 1, got -1",
    ),
    "landmarks of nan": (lambda: kbr.Landmarks(NAN), "`points` contains NaN"),
    "landmarks of another kind": (
        lambda: fit(landmarks_x=kbr.Landmarks(Y)),
        r"`landmarks` has shape \[\(3,\)\], one of `points` \[\(2,\)\]",
    ),
    "landmarks of another type": (
        lambda: fit(landmarks_x="5"),
        "Landmarks must be None .* rank.* got str",
    ),
    "landmark rank zero": (lambda: fit(landmarks_y=0), "a rank of at least 1, .* got 0"),
    # Embeddings.
    "embed nan": (lambda: kbr.embed(G, NAN), "`points` contains NaN"),
    "embed empty": (lambda: kbr.embed(G, EMPTY), "`points` is an empty sample"),
    "embed labels": (lambda: kbr.embed(G, LABELS), "`points` has dtype int"),
    "weights length": (
        lambda: kbr.embed(G, X, jnp.ones(5)),
        r"`weights` has shape \(5,\); .* 6 points",
    ),
    "weights scalar": (
        lambda: kbr.embed(G, X, jnp.asarray(1.0)),
        r"`weights` has shape \(\); .* 6 points",
    ),
    "weights integers": (
        lambda: kbr.embed(G, X, jnp.ones(6, int)),
        "`weights` must be floating-point, not int",
    ),
    "evaluate": (
        lambda: kbr.evaluate(PRIOR, Y),
        r"`points` has shape \[\(3,\)\], one of `embedding.points` \[\(2,\)",
    ),
    "inner": (
        lambda: kbr.inner(PRIOR, kbr.embed(G, Y)),
        r"`q.points` has shape \[\(3,\)\], one of `p.points`",
    ),
    "mmd": (lambda: kbr.mmd(PRIOR, kbr.embed(G, Y)), r"`q.points` has shape \[\(3,\)\]"),
    "unbiased mmd": (
        lambda: kbr.embedding.squared_mmd(PRIOR, kbr.embed(G, X[:1]), unbiased=True),
        "at least 2 points",
    ),
    "mix nothing": (lambda: kbr.embedding.mixture([], jnp.ones(0)), "`embeddings` is empty"),
    "mix shares": (
        lambda: kbr.embedding.mixture([PRIOR], jnp.ones(2)),
        r"`shares` has shape \(2,\); .* 1 points",
    ),
    "mix batches": (
        lambda: kbr.embedding.mixture([PRIOR, BATCH], jnp.ones(2)),
        r"`embeddings\[1\]` is a batch of shape \(2, 6\)",
    ),
    "joint sizes": (
        lambda: kbr.embedding.embed_joint(G, G, X, Y[:5]),
        "`x` has 6 points and `y` 5",
    ),
    "hsic sizes": (lambda: kbr.hsic(G, G, X, Y[:5]), "`x` has 6 points and `y` 5"),
    "unbiased hsic": (
        lambda: kbr.hsic(G, G, X[:3], Y[:3], unbiased=True),
        "at least 4 pairs, got 3",
    ),
    "covariance of a full joint": (
        lambda: kbr.embedding.cross_covariance(kbr.chain_rule(MODEL, PRIOR, estimator="prior")),
        "`cross_covariance` needs a joint embedding of pairs",
    ),
    "decode candidates": (lambda: kbr.decode(PRIOR, Y), r"`candidates` has shape \[\(3,\)\]"),
    "fixed point kernel": (
        lambda: kbr.embedding.decode_fixed_point(kbr.embed(kbr.Linear(), X)),
        "Gaussian kernels, not Linear; use `decode_gradient`",
    ),
    "fixed point batch": (
        lambda: kbr.embedding.decode_fixed_point(BATCH),
        r"`embedding` is a batch of shape \(2, 6\)",
    ),
    "gradient batch": (
        lambda: kbr.embedding.decode_gradient(BATCH),
        r"`embedding` is a batch of shape \(2, 6\)",
    ),
    "gradient starts": (
        lambda: kbr.embedding.decode_gradient(PRIOR, Y),
        r"`starts` has shape \[\(3,\)\]",
    ),
    # Rules.
    "fit unpaired": (lambda: fit(y=Y[:4]), "`x` has 6 points and `y` 4; pairs need"),
    "fit empty": (lambda: fit(EMPTY, EMPTY), "`x` is an empty sample"),
    "fit nan x": (lambda: fit(NAN), "`x` contains NaN or infinity"),
    "fit nan y": (lambda: fit(y=Y.at[0, 0].set(jnp.inf)), "`y` contains NaN or infinity"),
    "fit labels": (lambda: fit(y=LABELS), "`y` has dtype int"),
    "fit floats": (lambda: fit(kernel_x=kbr.Delta()), "`x` has dtype float"),
    "regularizer zero": (lambda: fit(regularizer=0.0), "`regularizer` must be positive, got 0"),
    "regularizer negative": (lambda: fit(regularizer=-1), "`regularizer` must be positive, got -1"),
    "regularizer array": (
        lambda: fit(regularizer=jnp.ones(2)),
        r"`regularizer` must be one number, got shape \(2,\)",
    ),
    "condition features": (
        lambda: kbr.condition(MODEL, Y),
        r"`x` has shape \[\(3,\)\], one of `training x` \[\(2,\)",
    ),
    "condition rank": (
        lambda: kbr.condition(MODEL, jnp.ones((1, 1, 2))),
        r"`x` has shape \[\(1, 2\)\]",
    ),
    "condition dtype": (
        lambda: kbr.condition(
            kbr.fit_conditional(None, None, jnp.arange(5), jnp.arange(5.0), regularizer=0.1),
            jnp.ones(3),
        ),
        "`x` has dtype float",
    ),
    "condition structure": (
        lambda: kbr.condition(MODEL, (X, X)),
        "`x` has the structure .* and `training x`",
    ),
    "centered moments": (
        lambda: kbr.condition_centered(fit_moment_filter().emission, X),
        "needs the training pairs, .* with landmarks",
    ),
    "centered estimator": (
        lambda: kbr.condition_centered(MODEL, X, estimator="b"),
        "`estimator` must be one of 'affine', 'song2009', got 'b'",
    ),
    "cross covariance": (
        lambda: kbr.rules.conditional_cross_covariance(MODEL, X),
        r"needs a model of pairs \(y, z\).*TensorProduct",
    ),
    "sum prior": (
        lambda: kbr.sum_rule(MODEL, kbr.embed(G, Y)),
        r"`prior.points` has shape \[\(3,\)\]",
    ),
    "sum prior labels": (
        lambda: kbr.sum_rule(MODEL, kbr.embed(kbr.Delta(), jnp.zeros((4, 2), int))),
        "`prior.points` has dtype int",
    ),
    "chain estimator": (
        lambda: kbr.chain_rule(MODEL, PRIOR, estimator="importance"),
        "`estimator` must be one of 'pairs', 'prior', got 'importance'",
    ),
    "chain prior": (
        lambda: kbr.chain_rule(MODEL, kbr.embed(G, Y), estimator="prior"),
        r"`prior.points` has shape",
    ),
    "bayes estimator": (
        lambda: kbr.bayes_rule(MODEL, PRIOR, Y[0], estimator="c", **RIDGE),
        "`estimator` must be one of .* got 'c'",
    ),
    "bayes prior": (
        lambda: kbr.bayes_rule(MODEL, kbr.embed(G, Y), Y[0], **RIDGE),
        "`prior.points` has shape",
    ),
    "bayes batch": (
        lambda: kbr.bayes_rule(MODEL, BATCH, Y[0], **RIDGE),
        r"`prior` is a batch of shape \(2, 6\).*vmap",
    ),
    "bayes y": (
        lambda: kbr.bayes_rule(MODEL, PRIOR, X, **RIDGE),
        r"`y` has shape \[\(2,\)\], one of `training y`",
    ),
    "bayes regularizer": (
        lambda: kbr.bayes_rule(MODEL, PRIOR, Y[0], regularizer=0.0),
        "`regularizer` must be positive, got 0",
    ),
    "unclipped importance weights": (
        lambda: kbr.bayes_rule(
            MODEL,
            PRIOR,
            Y[0],
            estimator="importance",
            clipping=kbr.Clipping(False, 0.0),
            **RIDGE,
        ),
        "give a `clipping` that clips",
    ),
    "truncation without clip": (
        lambda: kbr.Clipping(clip=False),
        "`truncation` = 0.02.* set `clip=True`, or `truncation=0`",
    ),
    "truncation range": (
        lambda: kbr.Clipping(truncation=1.0),
        r"`truncation` must be one number in \[0, 1\), got 1",
    ),
    "truncation negative": (
        lambda: kbr.Clipping(truncation=-0.1),
        r"`truncation` must be one number in \[0, 1\)",
    ),
    # The kernel Bayes filter.
    "filter lengths": (
        lambda: fit_filter(observations=Y[:4]),
        "`states` has 6 points and `observations` 4; .* T or T",
    ),
    "filter more observations": (
        lambda: fit_filter(X[:5]),
        "`states` has 5 points and `observations` 6; .* T or T",
    ),
    "filter one state": (
        lambda: fit_filter(X[:1], Y[:1]),
        "`states` has 1 points .* at least two states",
    ),
    "filter empty": (lambda: fit_filter(EMPTY), "`states` is an empty sample"),
    "filter nan": (lambda: fit_filter(NAN), "`states` contains NaN"),
    "filter nan observations": (
        lambda: fit_filter(observations=Y.at[1, 1].set(jnp.nan)),
        "`observations` contains NaN .* use a mask",
    ),
    "filter labels": (lambda: fit_filter(LABELS), "`states` has dtype int"),
    "filter floats": (
        lambda: fit_filter(kernel_observations=kbr.Delta()),
        "`observations` has dtype float",
    ),
    "successors length": (
        lambda: fit_filter(successors=X[:5]),
        "`successors` has 5 points and `states` 6",
    ),
    "successors observations": (
        lambda: fit_filter(observations=Y[:5], successors=X),
        "`observations` has 5 points and `states` 6",
    ),
    "successors kind": (
        lambda: fit_filter(successors=Y),
        r"`successors` has shape \[\(3,\)\], one of `states`",
    ),
    "successors nan": (lambda: fit_filter(successors=NAN), "`successors` contains NaN"),
    "filter regularizer": (
        lambda: fit_filter(regularizer=0),
        "`regularizer` must be positive, got 0",
    ),
    "filter delta": (
        lambda: fit_filter(posterior_regularizer=-0.1),
        "`posterior_regularizer` must be positive, got -0.1",
    ),
    "filter estimator": (
        lambda: fit_filter(estimator="c"),
        "`estimator` must be one of 'pairs', 'prior', 'importance', got 'c'",
    ),
    "shift of successors": (
        lambda: fit_filter(estimator="prior", shift=True),
        "'prior' keeps its belief on the successors .* without `shift`",
    ),
    "shift of a known transition": (
        lambda: kbr.KernelBayesFilter(
            MODEL, kbr.GaussianTransition(lambda s: s, 0.1), **RIDGE, shift=True
        ),
        "moves any state: leave `shift` out",
    ),
    "filter without a transition": (
        lambda: kbr.KernelBayesFilter(MODEL, None, **RIDGE),
        "Give a `transition`, or `shift=True`",
    ),
    "filter without a regularizer": (
        lambda: kbr.KernelBayesFilter(MODEL, fit(y=X)),
        "needs the `regularizer` of Bayes' rule",
    ),
    "most active of signed weights": (
        lambda: fit_filter(max_active=3, clipping=kbr.Clipping(False, 0.0)),
        "`max_active` chooses among non-negative weights",
    ),
    "no active weights": (lambda: fit_filter(max_active=0), "`max_active` must be an integer >= 1"),
    "trajectories in one list": (
        lambda: fit_filter([X, X], Y),
        "`observations` must be a list of at least one trajectory",
    ),
    "trajectories in an array": (
        lambda: fit_filter(jnp.ones((4, 6, 2)), jnp.ones((4, 6, 3))),
        r"`states` has shape \[4, 6, 2\].* several trajectories. Pass lists",
    ),
    "state and prior": (
        lambda: kbr.run_filter(FILTER, Y, state=kbr.init_filter(FILTER), prior=PRIOR),
        "Give a `state` to go on from, or a `prior`",
    ),
    # Inputs.
    "controls length": (
        lambda: fit_controlled(controls=X[:4]),
        "parts of `x` have different numbers of points",
    ),
    "controls without a product kernel": (
        lambda: fit_controlled(kernel=kbr.DirectSum((G, G))),
        "`transition` is a model of another state .* TensorProduct",
    ),
    "controls nan": (lambda: fit_controlled(controls=NAN[:-1]), "`x` contains NaN"),
    "controls labels": (
        lambda: fit_controlled(controls=LABELS[:-1]),
        r"`x\[1\]` has dtype int",
    ),
    "controls regularizer": (
        lambda: fit_controlled(regularizer=0),
        "`regularizer` must be positive, got 0",
    ),
    "controls frequencies": (
        lambda: fit_controlled(landmarks=kbr.random_fourier(PAIR, (X, X), rank=4, key=KEY)),
        "exact Gram matrices or landmarks, not random Fourier features",
    ),
    "no controls": (
        lambda: kbr.run_filter(fit_controlled(), Y),
        "transition of this filter needs `controls`",
    ),
    "no control": (
        lambda: kbr.filter_step(f := fit_controlled(), kbr.init_filter(f), Y[0]),
        "transition of this filter needs `controls`",
    ),
    "too few controls": (
        lambda: kbr.run_filter(fit_controlled(), Y, controls=X[:5]),
        "`controls` has 5 points; 6 steps need one each",
    ),
    "controls kind": (
        lambda: kbr.run_filter(fit_controlled(), Y, controls=Y),
        r"`controls` has shape \[\(3,\)\], one of `training controls` \[\(2,\)\]",
    ),
    "controls of predict": (
        lambda: kbr.predict(fit_controlled(), STEP),
        "transition of this filter needs `controls`",
    ),
    "controls of a plain filter": (
        lambda: kbr.run_filter(FILTER, Y, controls=X),
        "takes no `controls`: fit .* TensorProduct",
    ),
    "controls of a plain smoother": (
        lambda: smooth(controls=X[:3]),
        "takes no `controls`",
    ),
    "smoother without controls": (
        lambda: smooth(fit_controlled()),
        "transition of this filter needs `controls`",
    ),
    # The smoother.
    "smoother filter": (
        lambda: smooth(fit_moment_filter(), kbr.run_filter(fit_moment_filter(), Y)),
        "A shift moves beliefs forwards only",
    ),
    "smoother run": (
        lambda: smooth(run=STEP),
        r"`run` has weights of shape \(5,\); .* \[T, m\].*vmap",
    ),
    "smoother estimator": (
        lambda: smooth(estimator="prior"),
        "`estimator` must be one of 'pairs', 'importance', got 'prior'",
    ),
    "smoother lag": (lambda: smooth(lag=0), "`lag` must be an integer >= 1, got 0"),
    "smoother regularizer": (
        lambda: smooth(regularizer=0.0),
        "`regularizer` must be positive, got 0",
    ),
    # Moments.
    "moments on the prior": (
        lambda: fit_moment_filter(estimator="prior", shift=False),
        "'prior' keeps its belief on the successors of a learned transition",
    ),
    "moment filter clip": (
        lambda: fit_moment_filter(clipping=kbr.Clipping()),
        "cannot clip.* pass `clipping=Clipping\\(clip=False.* `soft_partition`",
    ),
    "moment filter nan": (lambda: fit_moment_filter(NAN), "`x` contains NaN"),
    "moments and a mask of chunks": (
        lambda: kbr.moments.collect_moments(
            fit_moment_filter().emission.maps, [(X, Y, X)], mask=jnp.ones(6, bool)
        ),
        "Chunks take no `mask`",
    ),
    "soft cells": (
        lambda: kbr.soft_partition(G, LANDMARKS, temperature=0.0),
        "`temperature` must be positive, got 0",
    ),
    # The filter of 2009.
    "2009 lengths": (
        lambda: fit_simple(observations=Y[:4]),
        "`states` has 6 points and `observations` 4",
    ),
    "2009 one pair": (lambda: fit_simple(X[:2], Y[:1]), "at least two states and 2 observations"),
    "2009 estimator": (
        lambda: fit_simple(estimator="b"),
        "`estimator` must be one of 'affine', 'song2009', got 'b'",
    ),
    "2009 landmarks": (
        lambda: fit_simple(landmarks_states=3),
        "landmarks for both states and observations",
    ),
    "2009 regularizer": (
        lambda: fit_simple(regularizer=0.0),
        "`regularizer` must be positive, got 0",
    ),
    "2009 successors": (
        lambda: fit_simple(successors=X[:5]),
        "`successors` has 5 points and `states` 6",
    ),
    "2009 nan": (lambda: fit_simple(NAN), "`states` contains NaN"),
    "2009 labels": (lambda: fit_simple(LABELS), "`states` has dtype int"),
    # Dynamics, herding, embedded Gaussians.
    "no sets": (lambda: kbr.dynamics.sample_sequence([]), "`sets` is empty; at least one sample"),
    "one set": (lambda: fit_dynamics([X]), "dynamics need at least two sets"),
    "empty set": (lambda: fit_dynamics([X, EMPTY]), r"`sets\[1\]` is an empty sample"),
    "nan in a set": (lambda: fit_dynamics([X, NAN]), "`sets` contains NaN or infinity"),
    "sets of two dimensions": (
        lambda: fit_dynamics([X, Y]),
        r"`sets\[1\]` has shape \[\(3,\)\], one of `sets\[0\]` \[\(2,\)\]",
    ),
    "stacked sets": (
        lambda: kbr.dynamics.sample_sequence(jnp.ones(3)),
        r"need the shape \[T, n, ...\]",
    ),
    "mask of a list": (
        lambda: kbr.dynamics.sample_sequence([X], mask=jnp.ones((1, 6), bool)),
        "`mask` belongs to stacked samples",
    ),
    "mask of sets": (
        lambda: kbr.dynamics.sample_sequence(jnp.ones((2, 3)), mask=jnp.ones((2, 3))),
        r"`mask` must be a boolean mask of shape \(2, 3\)",
    ),
    "weights of sets": (
        lambda: kbr.dynamics.sample_sequence([X, X], jnp.ones(6)),
        r"`weights` has shape \(6,\); sets of shape \(2, 6\)",
    ),
    "batch of sequences": (
        lambda: kbr.dynamics.fit_dynamics(G, jax.tree.map(lambda leaf: leaf[None], TWO_SETS)),
        "`sets` must be one sequence",
    ),
    "negative lambda": (
        lambda: fit_dynamics([X, X], regularizer=-0.1),
        "`regularizer` must not be negative, got -0.1",
    ),
    "vector of lambdas": (
        lambda: fit_dynamics([X, X], regularizer=jnp.ones(2)),
        r"`regularizer` must be one number",
    ),
    "length of gamma": (
        lambda: fit_dynamics([X, X], step_weights=jnp.ones(2)),
        r"`step_weights` has shape \(2,\); 2 sets have 1 steps",
    ),
    "negative gamma": (
        lambda: fit_dynamics([X, X], step_weights=jnp.asarray([-1.0])),
        "`step_weights` must not be negative",
    ),
    "form": (
        lambda: fit_dynamics([X, X], form="last"),
        "`form` must be one of 'next', 'change', got 'last'",
    ),
    "length of times": (
        lambda: fit_dynamics([X, X], times=jnp.arange(3.0), form="change"),
        r"`times` has shape \(3,\); .* each of 2 sets",
    ),
    "times backwards": (
        lambda: fit_dynamics([X, X], times=jnp.asarray([1.0, 0.0]), form="change"),
        "`steps of times` must be positive",
    ),
    "times of next": (
        lambda: fit_dynamics([X, X], times=jnp.arange(2.0)),
        'need the form "change"',
    ),
    "length of next": (
        lambda: kbr.dynamics.forecast_coefficients(fit_dynamics([X, X]), length=0.5),
        'needs the form "change"',
    ),
    "steps": (
        lambda: kbr.dynamics.forecast_coefficients(fit_dynamics([X, X]), 0),
        "`steps` must be an integer >= 1, got 0",
    ),
    "start": (
        lambda: kbr.dynamics.forecast_coefficients(fit_dynamics([X, X]), start=jnp.ones(3)),
        r"`start` has shape \(3,\)",
    ),
    "nothing to predict": (
        lambda: kbr.dynamics.rolling_origin_errors(fit_dynamics([X, X])),
        "leave nothing to predict in 2 sets",
    ),
    "too few to average": (
        lambda: kbr.dynamics.stacked_forecast(fit_dynamics([X, X])),
        "at least 4 sampled sets .* got 2",
    ),
    "decay": (lambda: kbr.dynamics.recency_weights(3, 0.0), "`decay` must be positive"),
    "decay above 1": (lambda: kbr.dynamics.recency_weights(3, 1.5), "`decay` must be at most 1"),
    "coefficients of mixtures": (
        lambda: kbr.experimental.combine_mixtures(
            kbr.experimental.gaussian_mixture(np.zeros((3, 2, 1)), np.ones((3, 2))), [2.0]
        ),
        "`coefficients` has shape",
    ),
    "coefficients": (
        lambda: kbr.dynamics.combine(G, TWO_SETS, jnp.ones(3)),
        "`coefficients` has shape .* each of 2 points",
    ),
    "other sets": (
        lambda: kbr.dynamics.embedding_gram(G, TWO_SETS, kbr.dynamics.sample_sequence([Y])),
        "a set of `others`.* must agree",
    ),
    "variances": (
        lambda: kbr.experimental.gaussian_mixture(jnp.ones((2, 3)), jnp.ones(3)),
        r"`covariances` has shape \(3,\)",
    ),
    "means": (
        lambda: kbr.experimental.gaussian_mixture(jnp.ones(3), 1.0),
        r"`means` must be floating-point of shape \[..., c, d\]",
    ),
    "mixture kernel": (
        lambda: kbr.experimental.evaluate_mixture(kbr.Laplace(1.0), MIXTURE, X),
        "closed form under `Gaussian` kernels.* not Laplace",
    ),
    "mixture points": (
        lambda: kbr.experimental.evaluate_mixture(G, MIXTURE, Y),
        r"`points` must be \[n, 2\]",
    ),
    "mixtures": (
        lambda: kbr.experimental.inner_mixtures(
            G, MIXTURE, kbr.experimental.gaussian_mixture(jnp.ones((1, 3)), jnp.ones(1))
        ),
        "2 and 3 coordinates",
    ),
    "herding rule": (
        lambda: kbr.herd(PRIOR, num_points=2, rule="best"),
        "`rule` must be one of 'greedy', .*got 'best'",
    ),
    "herding batch": (
        lambda: kbr.herd(BATCH, num_points=2),
        r"`embedding` is a batch of shape \(2, 6\); use `jax.vmap`",
    ),
    "herding count": (
        lambda: kbr.herd(PRIOR, num_points=0),
        "`num_points` must be an integer >= 1, got 0",
    ),
    "free herding count": (
        lambda: kbr.herd(PRIOR, num_points=7, rule="sbq"),
        "`num_points` must be an integer between 1 and 6",
    ),
    "herding candidates": (
        lambda: kbr.herd(PRIOR, Y, num_points=2),
        "`candidates` has shape .* must agree",
    ),
    "herding on labels": (
        lambda: kbr.herding.herd_continuous(kbr.embed(kbr.Delta(), LABELS), num_points=2),
        "one real array",
    ),
    "flipped labels": (
        lambda: kbr.dynamics.flip_labels(LABELS, jnp.ones(6)),
        "`labels` must be -1 or 1",
    ),
    "one class": (lambda: fit_svm(labels=jnp.zeros(6, int)), "at least two `classes`"),
    "unpaired labels": (lambda: fit_svm(labels=jnp.arange(5)), "`labels` has 5 points and `x` 6"),
    "penalty": (lambda: fit_svm(penalty=0.0), "`penalty` must be positive, got 0"),
    "linear labels": (
        lambda: fit_svm(x=LABELS),
        "Linear features need points that are one real array",
    ),
    "points of a classifier": (
        lambda: kbr.dynamics.classify(fit_svm(), Y),
        "`x` has 3 features, the classifier 2",
    ),
    # Tests of hypotheses.
    "one point": (lambda: two_samples(X[:1]), "at least 2 points in each sample"),
    "two kinds of samples": (lambda: two_samples(X, Y), "`y` has shape|must agree"),
    "no kernels": (lambda: two_samples(kernel=[]), "`kernel` is an empty list"),
    "null": (
        lambda: two_samples(null="bootstrap"),
        '`null` must be "permutation" or "signs", got',
    ),
    "signs": (lambda: two_samples(X, X[:4], null="signs"), "`y` has 4 points and `x` 6"),
    "draws": (
        lambda: two_samples(num_permutations=0),
        "`num_permutations` must be an integer >= 1, got 0",
    ),
    "blocks": (
        lambda: kbr.hypotheses.block_two_sample_test(G, X, X, block_size=4),
        "leave at least two blocks of 6 points",
    ),
    "unpaired": (
        lambda: kbr.hypotheses.independence_test(G, G, X, X[:4], key=KEY),
        "6 points|4 points",
    ),
    "an arm that is a word": (
        lambda: kbr.hypotheses.treatment_effect_test(
            G, X, jnp.arange(6) % 2, X, arms=(0, "1"), key=KEY
        ),
        "`arms` holds '1', which is no label of int",
    ),
    "a dependence as long as the chain": (
        lambda: kbr.hypotheses.goodness_of_fit_test(
            lambda x: -jnp.sum(x**2), X, key=KEY, dependent=5
        ),
        "fewer than 4 blocks",
    ),
    "a length for shifts": (
        lambda: kbr.hypotheses.independence_test(G, G, X, X, key=KEY, dependent=5),
        "`dependent` must be True or False, got 5",
    ),
    "one pair": (
        lambda: kbr.hypotheses.independence_test(G, G, X[:1], X[:1], key=KEY),
        "at least 2 pairs",
    ),
    "three triples": (lambda: triples(X[:3]), "at least 4 triples"),
    "one landmark of a test": (
        lambda: kbr.hypotheses.conditional_independence_test(
            G, G, G, X, X, X, key=KEY, landmarks=1
        ),
        "`landmarks` must be at least 2",
    ),
    "unpaired triples": (lambda: triples(X, X[:5]), "`z`"),
    # Posteriors from simulations.
    "simulations": (lambda: simulate(0), "`num_samples` must be an integer >= 1, got 0"),
    "batch of simulations": (
        lambda: simulate(batch_size=0),
        "`batch_size` must be an integer >= 1, got 0",
    ),
    "probabilities": (
        lambda: kbr.quantile(PRIOR, 1.5),
        r"`probabilities` must be a number in \[0, 1\].*got 1.5",
    ),
    "quantiles of labels": (
        lambda: kbr.quantile(kbr.embed(kbr.Delta(), LABELS), 0.5),
        "Quantiles need real values",
    ),
    "level": (
        lambda: kbr.credible_interval(PRIOR, 95),
        "`level` must be one number between 0 and 1, got 95",
    ),
}

#: The same for both filters.
FILTERED = {
    "features": (
        lambda f: kbr.run_filter(f, X),
        r"`observations` has shape \[\(2,\)\], one of `training observations` \[\(3",
    ),
    "rank": (lambda f: kbr.run_filter(f, Y[0]), r"`observations` has shape \[\(\)\]"),
    "empty": (lambda f: kbr.run_filter(f, jnp.zeros((0, 3))), "`observations` is an empty sample"),
    "dtype": (lambda f: kbr.run_filter(f, jnp.ones((4, 3), int)), "`observations` has dtype int"),
    "structure": (
        lambda f: kbr.run_filter(f, (Y, Y)),
        "`observations` has the structure .* `training observations`",
    ),
    "mask length": (
        lambda f: kbr.run_filter(f, Y, observed=jnp.ones(5, bool)),
        r"`observed` must be .* \(6,\), got bool\[5\]",
    ),
    "mask dtype": (
        lambda f: kbr.run_filter(f, Y, observed=jnp.ones(6)),
        r"`observed` must be a boolean mask .* got float",
    ),
    "advance mask": (
        lambda f: kbr.run_filter(f, Y, state=kbr.init_filter(f), observed=jnp.ones((6, 1), bool)),
        r"`observed` must be .* \(6,\), got bool\[6, 1\]",
    ),
    "prior": (
        lambda f: kbr.run_filter(f, Y, prior=kbr.embed(G, Y)),
        r"`prior.points` has shape \[\(3,\)\], one of",
    ),
    "prior batch": (
        lambda f: kbr.init_filter(f, BATCH),
        r"`prior` is a batch of shape \(2, 6\); use `jax.vmap`",
    ),
    "step batch": (
        lambda f: kbr.filter_step(f, kbr.init_filter(f), Y),
        r"`observation` has shape \[\(6, 3\)\]",
    ),
    "step features": (
        lambda f: kbr.filter_step(f, kbr.init_filter(f), X[0]),
        r"`observation` has shape",
    ),
    "step dtype": (
        lambda f: kbr.filter_step(f, kbr.init_filter(f), jnp.ones(3, int)),
        "`observation` has dtype int",
    ),
    "step structure": (
        lambda f: kbr.filter_step(f, kbr.init_filter(f), (Y[0], Y[0])),
        "`observation` has the structure",
    ),
    "first observation": (
        lambda f: kbr.init_from_observation(f, X[0], regularizer=0.1),
        r"`observation`",
    ),
    "first observations": (
        lambda f: kbr.init_from_observation(f, Y, regularizer=0.1),
        r"`observation` has shape \[\(6, 3\)\]",
    ),
    "no steps": (lambda f: kbr.predict(f, STEP, 0), "`steps` must be an integer >= 1, got 0"),
    "half a step": (
        lambda f: kbr.predict(f, STEP, 1.5),
        "`steps` must be an integer >= 1, got 1.5",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_bad_input(name):
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


#: Inside of `jit` samples are not read, nor are arrays that JAX makes there.
UNREAD = {name for name in CASES if re.search(r"\bnan\b", name)} | {
    "bandwidth of a vector",
    "negative histogram",
    "negative gamma",
    "times backwards",
    "one class",
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNREAD])
def test_bad_input_inside_of_jit(name):
    """The first version looked at no number there."""
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


@pytest.mark.parametrize("filt", [FILTER, SIMPLE], ids=["kernel Bayes", "2009"])
@pytest.mark.parametrize("name", list(FILTERED))
def test_bad_input_of_a_filter(name, filt):
    call, message = FILTERED[name]
    with pytest.raises(ValueError, match=message):
        call(filt)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: kbr.rpcholesky_landmarks(G, X, rank=2), "key"),
        (lambda: kbr.uniform_landmarks(X, rank=2), "key"),
        (lambda: kbr.fit_conditional(G, G, X, Y), "regularizer"),
        (lambda: kbr.bayes_rule(MODEL, PRIOR, Y[0]), "regularizer"),
        (lambda: kbr.fit_filter(G, G, X, Y, regularizer=0.1), "posterior_regularizer"),
    ],
)
def test_what_has_no_default_is_asked_for(call, name):
    with pytest.raises(TypeError, match=name):
        call()


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x: kbr.fit_conditional(G, G, x, Y, **RIDGE).factor.upper, "x"),
        (lambda x: kbr.fit_conditional(G, G, Y, x, **RIDGE).features_y.matrix, "y"),
        (lambda x: kbr.embed(G, x).points, "points"),
        (lambda x: kbr.fit_filter(G, G, x, Y, **BAYES).emission.features_x.matrix, "states"),
        (
            lambda x: fit_simple(Y, x).observations.matrix,
            "observations",
        ),
    ],
)
def test_nan_in_a_compiled_program_reaches_every_result(call, name):
    jitted = eqx.filter_jit(call)
    for leaf in jax.tree.leaves(jitted(X)):
        assert np.all(np.isfinite(leaf))
    # Of a constant NaN in front of `exp` one run in two returned what was in memory.
    for _ in range(5):
        for leaf in jax.tree.leaves(jitted(NAN)):
            assert np.any(np.isnan(leaf)), name


def test_nan_that_a_program_closes_over_is_an_error():
    """It is known when the program is traced."""
    with pytest.raises(ValueError, match="`points` contains NaN"):
        jax.jit(lambda h: kbr.embed(kbr.Gaussian(h), NAN).weights)(1.0)


def test_traced_parameters_are_not_looked_at():
    """Positivity inside jit is the caller's.

    Nothing is raised, and nothing is read that cannot be.
    """
    weights = jax.jit(
        lambda h, r: kbr.condition(fit(kernel_x=kbr.Gaussian(h), regularizer=r), X[0]).weights
    )
    assert np.all(np.isfinite(weights(1.0, 0.1)))


def test_bridges_in_the_wrong_order():
    rng = np.random.default_rng(42)
    a, w, z, y = (jnp.asarray(rng.normal(size=20)) for _ in range(4))

    def combine(a, w, z, y):
        outcome = kbr.causal.fit_outcome_bridge(a, w, z, y)
        return kbr.causal.doubly_robust(kbr.causal.fit_treatment_bridge(a, w, z, y), outcome)

    with pytest.raises(ValueError, match="in this order"):
        jax.eval_shape(combine, a, w, z, y)
