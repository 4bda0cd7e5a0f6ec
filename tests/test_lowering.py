"""Every public function lowers for GPUs and TPUs: its value, its gradient and a batch of it.

Nothing is compiled or run. `EAGER` names what is not a program, and why.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import kbr_jax as kbr

RNG = np.random.default_rng(0)
N = 8
MESH = jax.make_mesh((1,), ("cases",))
X, Y, Z = (RNG.normal(size=(N, 2)) for _ in range(3))
H = 0.7
KEY = jax.random.key(0)
RIDGE = {"regularizer": 1e-2}
BAYES = {"regularizer": 1e-2, "posterior_regularizer": 1e-3}
PLAIN = kbr.Clipping(clip=False, truncation=0.0)


def conditional(g, x, y, **options):
    return kbr.fit_conditional(g, g, x, y, **RIDGE, **options)


def forecasts(g, x, y):
    return T.leave_out_forecasts(conditional(g, x, y))


def filters(g, x, y, **options):
    return kbr.fit_filter(g, g, x, y, **BAYES, **options)


def readout(g, x, y):
    """Updates through both of its solves: two coordinates of two numbers, or one."""
    h = kbr.Embedding(g, x, y.T)
    numbers = jnp.ones(3, x.dtype), jnp.zeros(2, x.dtype), jnp.ones((2, 2), x.dtype)
    both = kbr.filtering.ReadoutFilter(filters(g, x, y), lambda o: o, h, *numbers, y[0])
    one = kbr.filtering.ReadoutFilter(
        both, lambda o: o[:1], kbr.Embedding(g, x, y.T[:1]), *numbers[:2], numbers[2][:1], y[0]
    )
    return kbr.state_mean(one, kbr.run_filter(one, y)), kbr.state_mean(
        both, kbr.run_filter(both, y)
    )


def landmarks(x, r=4):
    return kbr.Landmarks(x[:r], jnp.ones(r, bool))


def moments(g, x, y, cells=True, **options):
    cells = kbr.soft_partition(g, landmarks(x)) if cells else None
    maps = kbr.moments.moment_maps(g, g, landmarks(x), landmarks(y), cells=cells, **options)
    return kbr.moments.collect_moments(maps, x, y)


def moment_filter(g, x, y, **options):
    cells = kbr.soft_partition(g, landmarks(x))
    maps = kbr.moments.moment_maps(g, g, landmarks(x), landmarks(y), cells=cells, shift=True)
    model = kbr.moments.fit_conditional(
        kbr.moments.collect_moments(maps, x, y, jnp.roll(x, -1, 0)), **RIDGE
    )
    return kbr.KernelBayesFilter(model, None, shift=True, regularizer=1e-3, **options)


def detector(g, x):
    return kbr.hypotheses.fit_change_detector(g, x, window=2, average_run_length=9, key=KEY)


def joint(g, x, y):
    return kbr.embedding.embed_joint(g, g, x, y)


def sets(x):
    return kbr.dynamics.sample_sequence(x.reshape(4, 2, 2))


def dynamics(g, x, **options):
    return kbr.dynamics.fit_dynamics(g, sets(x), regularizer=0.1, **options)


def instrument(g, x, y):
    return kbr.causal.fit_instrument(x, y, x[:, 0], kernels=(g, g))


def bridges(g, x, y):
    arguments = (x, y, x[:, 0], y[:, 0])
    kernels = (g, g, g)
    return (
        kbr.causal.fit_outcome_bridge(*arguments, kernels=kernels),
        kbr.causal.fit_treatment_bridge(*arguments, kernels=kernels),
    )


def robust(g, x, y):
    return kbr.causal.doubly_robust(*bridges(g, x, y))


def svm(g, x):
    labels = jnp.asarray([0, 1] * (N // 2))
    weights = jnp.ones(N, x.dtype) / N
    return kbr.dynamics.fit_predicted_svm(
        x, labels, weights, penalty=1.0, kernel=g, classes=jnp.arange(2)
    )


GRAPH = kbr.propagation.pairwise_graph([[0, 1], [1, 2]], observed_nodes=[2])


def propagated(g, x, y):
    model = kbr.propagation.fit_belief_propagation(
        GRAPH, g, pairs=[(x, y), (x, y)], regularizer=0.1
    )
    return model, kbr.propagation.belief_propagation(model, y[:1])


def mixtures(x):
    covariances = jnp.broadcast_to(jnp.eye(2, dtype=x.dtype), (4, 2, 2, 2))
    return kbr.experimental.gaussian_mixture(x.reshape(4, 2, 2), covariances)


def take(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


def herding(rule):
    return lambda g, x, y: kbr.herd(kbr.embed(g, x), y, num_points=3, rule=rule).embedding.weights


def decoded(function, **options):
    return lambda g, x, y: function(kbr.embed(kbr.Gaussian(H), x), **options)


P = kbr.embed
T = kbr.tuning
E = kbr.embedding
#: Name of the public function, and where it has several forms, which: a program of a kernel and
#: two samples.
PROGRAMS = {
    "gram": lambda g, x, y: kbr.gram(g, x, y),
    "kernels.diagonal": lambda g, x, y: kbr.kernels.diagonal(g, x),
    "kernels.gram_matvec": lambda g, x, y: kbr.kernels.gram_matvec(g, x, y, y, block_size=4),
    "devices.over_devices": lambda g, x, y: kbr.devices.over_devices(
        lambda kernel, x: kernel.gram(x, x[:2]), MESH, g, x
    ),
    "kernels.coordinate_scale": lambda g, x, y: kbr.kernels.coordinate_scale(x),
    "kernels.default_kernel": lambda g, x, y: kbr.kernels.default_kernel(x)(x[0], y[0]),
    "median_heuristic": lambda g, x, y: kbr.median_heuristic(x),
    "embed": lambda g, x, y: P(g, x).weights,
    "evaluate": lambda g, x, y: kbr.evaluate(P(g, x), y),
    "expectation": lambda g, x, y: kbr.expectation(P(g, x), lambda s: s**2),
    "mean": lambda g, x, y: kbr.mean(P(g, x)),
    "std": lambda g, x, y: kbr.std(P(g, x)),
    "variance": lambda g, x, y: kbr.variance(P(g, x)),
    "quantile": lambda g, x, y: kbr.quantile(P(g, x), 0.5, lambda s: s[0]),
    "credible_interval": lambda g, x, y: kbr.credible_interval(P(g, x), 0.9, lambda s: s[0]),
    "cdf": lambda g, x, y: kbr.cdf(P(g, x), 0.5, lambda s: s[0]),
    "density": lambda g, x, y: kbr.density(P(g, x), x[:2]),
    "embedding.probabilities": lambda g, x, y: kbr.embedding.probabilities(P(g, x)),
    "embedding.modes": lambda g, x, y: kbr.embedding.modes(P(g, x), 2),
    "embedding.energy_score": lambda g, x, y: kbr.embedding.energy_score(P(g, x), x[0]),
    "embedding.log_score": lambda g, x, y: kbr.embedding.log_score(P(g, x), x[0]),
    "sample": lambda g, x, y: kbr.sample(P(g, x), 3, key=KEY),
    "inner": lambda g, x, y: kbr.inner(P(g, x), P(g, y)),
    "mmd": lambda g, x, y: kbr.mmd(P(g, x), P(g, y)),
    "embedding.norm": lambda g, x, y: kbr.embedding.norm(P(g, x)),
    "normalize": lambda g, x, y: kbr.normalize(P(g, x))[1],
    "witness": lambda g, x, y: kbr.witness(P(g, x), P(g, y), x),
    "hsic": lambda g, x, y: kbr.hsic(g, g, x, y),
    "decode": lambda g, x, y: kbr.decode(P(g, x), y),
    "decode_rotation": lambda g, x, y: kbr.decode_rotation(
        P(kbr.Gaussian(H), E.nearest_rotation(x.reshape(4, 2, 2)))
    ),
    "marginal": lambda g, x, y: kbr.marginal(P(kbr.TensorProduct((g, g)), (x, y)), 0).weights,
    "embedding.credible_level": lambda g, x, y: E.credible_level(P(g, x), y[0]),
    "embedding.decode_fixed_point": decoded(E.decode_fixed_point, num_steps=2),
    "embedding.decode_gradient": decoded(E.decode_gradient, num_steps=2),
    "embedding.decode_permutation": lambda g, x, y: E.decode_permutation(P(g, x.reshape(4, 2, 2))),
    "embedding.decoding_objective": lambda g, x, y: E.decoding_objective(P(g, x), y),
    "embedding.nearest_rotation": lambda g, x, y: E.nearest_rotation(x.reshape(4, 2, 2)),
    "embedding.embed_joint": lambda g, x, y: joint(g, x, y).weights,
    "embedding.joint_expectation": lambda g, x, y: E.joint_expectation(
        joint(g, x, y), lambda s: s[0], lambda s: s[1]
    ),
    "embedding.cross_covariance": lambda g, x, y: E.cross_covariance(joint(g, x, y)),
    "embedding.covariance": lambda g, x, y: E.covariance(
        E.cross_covariance(joint(g, x, y)), lambda s: s[0], lambda s: s[1]
    ),
    "embedding.squared_hs_norm": lambda g, x, y: E.squared_hs_norm(
        E.cross_covariance(joint(g, x, y))
    ),
    "embedding.marginals": lambda g, x, y: E.marginals(joint(g, x, y))[0].weights,
    "embedding.mixture": lambda g, x, y: E.mixture([P(g, x), P(g, y)], jnp.ones(2, x.dtype)),
    "embedding.squared_mmd": lambda g, x, y: E.squared_mmd(P(g, x), P(g, y), unbiased=True),
    "embedding.squared_norm": lambda g, x, y: E.squared_norm(P(g, x)),
    "uniform_landmarks": lambda g, x, y: kbr.uniform_landmarks(x, rank=3, key=KEY).points,
    "kmeanspp_landmarks": lambda g, x, y: kbr.kmeanspp_landmarks(g, x, rank=3, key=KEY).points,
    "greedy_landmarks": lambda g, x, y: kbr.greedy_landmarks(g, x, rank=3).points,
    "greedy_landmarks, blocks": lambda g, x, y: (
        kbr.greedy_landmarks(g, x, rank=4, block_size=2).points
    ),
    "rpcholesky_landmarks": lambda g, x, y: kbr.rpcholesky_landmarks(g, x, rank=3, key=KEY).points,
    "features.incomplete_cholesky": lambda g, x, y: (
        kbr.features.incomplete_cholesky(g, x, rank=3).factor
    ),
    "random_fourier": lambda g, x, y: (
        conditional(
            g, x, y, landmarks_x=kbr.random_fourier(g, x, rank=4, key=KEY)
        ).features_x.matrix
    ),
    "soft_partition": lambda g, x, y: kbr.soft_partition(g, landmarks(x)).assign(x),
    "fit_conditional": lambda g, x, y: conditional(g, x, y),
    "fit_conditional, landmarks": lambda g, x, y: conditional(g, x, y, landmarks_x=landmarks(x)),
    "condition": lambda g, x, y: kbr.condition(conditional(g, x, y), y).weights,
    "condition, conjugate gradients": lambda g, x, y: (
        kbr.condition(
            conditional(g, x, y, solver=kbr.ConjugateGradient(rank=3, throw=False)), y
        ).weights
    ),
    "condition_centered": lambda g, x, y: kbr.condition_centered(conditional(g, x, y), y).weights,
    "conditional_expectation": lambda g, x, y: kbr.conditional_expectation(
        conditional(g, x, y), x, lambda s: s
    ),
    "rules.conditional_cross_covariance": lambda g, x, y: kbr.rules.conditional_cross_covariance(
        kbr.fit_conditional(g, kbr.TensorProduct((g, g)), x, (x, y), **RIDGE), x[0]
    ),
    "rules.clip_and_normalize": lambda g, x, y: kbr.rules.clip_and_normalize(
        x[:, 0], kbr.Clipping()
    ),
    "sum_rule": lambda g, x, y: kbr.sum_rule(conditional(g, x, y), P(g, y)).weights,
    "chain_rule": lambda g, x, y: kbr.chain_rule(conditional(g, x, y), P(g, y)).weights,
    "bayes_rule": lambda g, x, y: (
        kbr.bayes_rule(conditional(g, x, y), P(g, y), y, regularizer=1e-3).weights
    ),
    "bayes_rule, importance, landmarks": lambda g, x, y: (
        kbr.bayes_rule(
            conditional(g, x, y, landmarks_x=landmarks(x), landmarks_y=landmarks(y)),
            P(g, y),
            y,
            regularizer=1e-3,
            estimator="importance",
        ).weights
    ),
    "fit_filter": lambda g, x, y: filters(g, x, y).emission.factor,
    "run_filter": lambda g, x, y: kbr.run_filter(filters(g, x, y), y).weights,
    "state_mean, readout": readout,
    "run_filter, landmarks": lambda g, x, y: (
        kbr.run_filter(
            filters(g, x, y, landmarks_states=landmarks(x), landmarks_observations=landmarks(y)), y
        ).weights
    ),
    "run_filter, active": lambda g, x, y: kbr.run_filter(filters(g, x, y, max_active=4), y).weights,
    "run_filter, moments": lambda g, x, y: kbr.run_filter(moment_filter(g, x, y), y).weights,
    "run_filter, moments, importance": lambda g, x, y: (
        kbr.run_filter(moment_filter(g, x, y, estimator="importance"), y).weights
    ),
    "init_filter": lambda g, x, y: kbr.init_filter(filters(g, x, y), P(g, y)),
    "filter_step": lambda g, x, y: (
        kbr.filter_step((f := filters(g, x, y)), kbr.init_filter(f), y[0])[1].weights
    ),
    "init_from_observation": lambda g, x, y: (
        kbr.init_from_observation(filters(g, x, y), y[0], **RIDGE)[1].weights
    ),
    "predict": lambda g, x, y: (
        kbr.predict((f := filters(g, x, y)), take(kbr.run_filter(f, y), -1), 2).weights
    ),
    "belief": lambda g, x, y: kbr.belief((f := filters(g, x, y)), kbr.run_filter(f, y)).weights,
    "state_mean": lambda g, x, y: kbr.state_mean((f := filters(g, x, y)), kbr.run_filter(f, y)),
    "smooth": lambda g, x, y: (
        kbr.smooth((f := filters(g, x, y)), kbr.run_filter(f, y), regularizer=1e-3).weights
    ),
    "fit_conditional_embedding_filter": lambda g, x, y: (
        kbr.run_filter(kbr.fit_conditional_embedding_filter(g, g, x, y, **RIDGE), y).weights
    ),
    "known_likelihood": lambda g, x, y: (
        kbr.run_filter(
            kbr.KernelBayesFilter(
                kbr.known_likelihood(g, x, lambda s, o: -jnp.sum((s - o) ** 2), **RIDGE),
                conditional(g, x, y),
            ),
            y,
        ).weights
    ),
    "filtering.fit_cusum_restart": lambda g, x, y: (
        kbr.run_filter(
            kbr.filtering.fit_cusum_restart(
                filters(g, x, y),
                (x[:-1], y[:-1]),
                lambda o: o,
                kbr.mean,
                kernel=g,
                **RIDGE,
                observation_regularizer=1e-2,
                block_size=2,
            ),
            y,
        ).weights
    ),
    "filtering.transitions": lambda g, x, y: kbr.filtering.transitions(x, y),
    "filtering.fit_discriminant": lambda g, x, y: kbr.filtering.fit_discriminant(
        g, x, y, jnp.roll(x, 1, 0), **RIDGE, block_size=2
    ),
    "delay_embedding": lambda g, x, y: kbr.delay_embedding(x, 3),
    "filter_loss": lambda g, x, y: kbr.filter_loss(filters(g, x, y), x, y),
    "regression_loss": lambda g, x, y: kbr.regression_loss(conditional(g, x, y), y, x),
    "leave_out_loss": lambda g, x, y: kbr.leave_out_loss(conditional(g, x, y), num_left_out=2),
    "cross_validate": lambda g, x, y: kbr.cross_validate(
        lambda train, test: kbr.regression_loss(conditional(g, *train), *test), (x, y), 2
    ),
    "grid_search": lambda g, x, y: (
        kbr.grid_search(
            lambda h: kbr.leave_out_loss(conditional(kbr.Gaussian(h), x, y)), jnp.asarray([0.5, 1])
        ).values
    ),
    "tuning.leave_out_residuals": lambda g, x, y: T.leave_out_residuals(conditional(g, x, y), y),
    "tuning.condition_adjusted": lambda g, x, y: (
        T.condition_adjusted((m := conditional(g, x, y)), T.leave_out_residuals(m), x[0]).points
    ),
    "tuning.marginal_loss": lambda g, x, y: T.marginal_loss(
        conditional(g, x, y), x, y, regularizer=1e-3
    ),
    "tuning.mmd_power": lambda g, x, y: T.mmd_power(g, x, y),
    "tuning.minibatch": lambda g, x, y: T.minibatch((x, y), 3, key=KEY),
    "tuning.coverage": lambda g, x, y: T.coverage(jax.nn.sigmoid(x[:, 0])),
    "tuning.leave_out_forecasts": lambda g, x, y: forecasts(g, x, y).weights,
    "tuning.leave_out_forecasts, landmarks": lambda g, x, y: (
        T.leave_out_forecasts(conditional(g, x, y, landmarks_x=landmarks(x)), jnp.arange(2)).weights
    ),
    "tuning.fit_bandwidth": lambda g, x, y: T.fit_bandwidth(forecasts(g, x, y), y),
    "tuning.conformal_margin": lambda g, x, y: T.conformal_margin(forecasts(g, x, y), y, 0.5),
    "tuning.adaptive_margins": lambda g, x, y: T.adaptive_margins(forecasts(g, x, y), y, 0.5),
    "tuning.spectral_loss": lambda g, x, y: T.spectral_loss(x, x, penalty=0.1),
    "tuning.calibrate": lambda g, x, y: T.calibrate(kbr.condition(conditional(g, x, y), x), y),
    **{
        f"herd, {rule}": herding(rule)
        for rule in ("greedy", "chen2010", "line-search", "min-norm-point", "sbq")
    },
    "herding.herd_continuous": lambda g, x, y: (
        kbr.herding.herd_continuous(
            P(g, x), num_points=2, num_starts=2, num_steps=2
        ).embedding.weights
    ),
    "hypotheses.two_sample_test": lambda g, x, y: kbr.hypotheses.two_sample_test(
        g, x, y, key=KEY, num_permutations=9
    ),
    "hypotheses.block_two_sample_test": lambda g, x, y: kbr.hypotheses.block_two_sample_test(
        g, x, y
    ),
    "hypotheses.independence_test": lambda g, x, y: kbr.hypotheses.independence_test(
        g, g, x, y, key=KEY, num_permutations=9
    ),
    "hypotheses.goodness_of_fit_test": lambda g, x, y: kbr.hypotheses.goodness_of_fit_test(
        lambda point: -jnp.sum(point**2) / 2, x, key=KEY, kernel=g, num_draws=9
    ),
    "hypotheses.kernel_stein_discrepancy": lambda g, x, y: kbr.hypotheses.kernel_stein_discrepancy(
        lambda point: -jnp.sum(point**2) / 2, x, g
    ),
    "hypotheses.stein_thinning": lambda g, x, y: kbr.hypotheses.stein_thinning(
        lambda point: -jnp.sum(point**2) / 2, x, 3, g
    ),
    "hypotheses.treatment_effect_test": lambda g, x, y: kbr.hypotheses.treatment_effect_test(
        g,
        jnp.tile(x, (2, 1)),
        jnp.arange(2 * N) % 2,
        jnp.tile(y, (2, 1)),
        key=KEY,
        kernel_x=g,
        num_folds=2,
    ),
    "hypotheses.change_points": lambda g, x, y: kbr.hypotheses.change_points(g, x, max_changes=2),
    "hypotheses.fit_change_detector": lambda g, x, y: detector(g, x),
    "hypotheses.init_detector": lambda g, x, y: kbr.hypotheses.init_detector(detector(g, x)),
    "hypotheses.detector_step": lambda g, x, y: kbr.hypotheses.detector_step(
        (d := detector(g, x)), kbr.hypotheses.init_detector(d), y[0]
    ),
    "hypotheses.detect_changes": lambda g, x, y: kbr.hypotheses.detect_changes(detector(g, x), y),
    "hypotheses.conditional_independence_test": lambda g, x, y: (
        kbr.hypotheses.conditional_independence_test(g, g, g, x, y, x + y, key=KEY, num_draws=9)
    ),
    "moments.moment_maps": lambda g, x, y: (
        kbr.moments.moment_maps(g, g, landmarks(x), landmarks(y)).x.matrix
    ),
    "moments.collect_moments": lambda g, x, y: moments(g, x, y).likelihood,
    "moments.merge_moments": lambda g, x, y: (
        kbr.moments.merge_moments((m := moments(g, x, y)), m).likelihood
    ),
    "moments.fit_conditional": lambda g, x, y: (
        kbr.bayes_rule(
            kbr.moments.fit_conditional(moments(g, x, y, cells=False), **RIDGE),
            P(g, y),
            y,
            regularizer=1e-3,
            clipping=PLAIN,
        ).weights
    ),
    "moments.moment_weights": lambda g, x, y: kbr.moments.moment_weights(
        (f := moment_filter(g, x, y)).emission, kbr.run_filter(f, y).weights, x, y
    ),
    "moments.ravel_point": lambda g, x, y: kbr.moments.ravel_point((x[0], y[0])),
    "likelihood_free.simulate": lambda g, x, y: kbr.likelihood_free.simulate(
        lambda key, s: s + x[0] * jax.random.normal(key, (2,), x.dtype),
        lambda key: jax.random.normal(key, (2,), x.dtype),
        5,
        key=KEY,
    ),
    "propagation.fit_belief_propagation": lambda g, x, y: propagated(g, x, y)[0],
    "propagation.belief_propagation": lambda g, x, y: propagated(g, x, y)[1],
    "propagation.beliefs": lambda g, x, y: (
        kbr.propagation.beliefs(*propagated(g, x, y), x).probabilities
    ),
    "dynamics.sample_sequence": lambda g, x, y: sets(x).points,
    "dynamics.embedding_gram": lambda g, x, y: kbr.dynamics.embedding_gram(g, sets(x)),
    "dynamics.sampling_noise": lambda g, x, y: kbr.dynamics.sampling_noise(g, sets(x)),
    "dynamics.recency_weights": lambda g, x, y: kbr.dynamics.recency_weights(4, 0.9),
    "dynamics.fit_dynamics": lambda g, x, y: dynamics(g, x).gram,
    "dynamics.refit_dynamics": lambda g, x, y: (
        kbr.dynamics.refit_dynamics(dynamics(g, x), regularizer=0.2).gram
    ),
    "dynamics.apply_dynamics": lambda g, x, y: kbr.dynamics.apply_dynamics(dynamics(g, x), P(g, y)),
    "dynamics.combine": lambda g, x, y: kbr.dynamics.combine(g, sets(x), y[:4, 0]).weights,
    "dynamics.extrapolate": lambda g, x, y: (
        kbr.dynamics.extrapolate(dynamics(g, x), estimator="ridge").weights
    ),
    "dynamics.forecast_coefficients": lambda g, x, y: kbr.dynamics.forecast_coefficients(
        dynamics(g, x), 2
    ),
    "dynamics.leave_one_out_errors": lambda g, x, y: kbr.dynamics.leave_one_out_errors(
        dynamics(g, x)
    ),
    "dynamics.rolling_origin_errors": lambda g, x, y: kbr.dynamics.rolling_origin_errors(
        dynamics(g, x)
    ),
    "dynamics.stacked_forecast": lambda g, x, y: kbr.dynamics.stacked_forecast(dynamics(g, x)),
    "dynamics.fit_predicted_svm": lambda g, x, y: svm(g, x).coefficients,
    "dynamics.classify": lambda g, x, y: kbr.dynamics.classify(svm(g, x), y),
    "dynamics.decision_values": lambda g, x, y: kbr.dynamics.decision_values(svm(g, x), y),
    "causal.intervene": lambda g, x, y: (
        kbr.causal.intervene(
            kbr.fit_conditional(kbr.kernels.TensorProduct((g, g)), g, (x, y), y, **RIDGE), x[:2]
        ).weights
    ),
    "causal.fit_instrument": lambda g, x, y: instrument(g, x, y).fit,
    "causal.structural": lambda g, x, y: kbr.causal.structural(instrument(g, x, y), y),
    "causal.fit_outcome_bridge": lambda g, x, y: bridges(g, x, y)[0].fit,
    "causal.fit_moment_bridge": lambda g, x, y: (
        kbr.causal.fit_moment_bridge(x, y, x[:, 0], y[:, 0], kernels=(g, g, g)).fit
    ),
    "causal.fit_treatment_bridge": lambda g, x, y: bridges(g, x, y)[1].coefficients,
    "causal.doubly_robust": lambda g, x, y: robust(g, x, y).weights(x[:2], None),
    "causal.confidence_band": lambda g, x, y: kbr.causal.confidence_band(
        robust(g, x, y), x[:2], key=KEY, num_draws=4
    ),
    "dynamics.flip_labels": lambda g, x, y: kbr.dynamics.flip_labels(
        jnp.asarray([1.0, -1] * 4, x.dtype), x[:, 0]
    ),
}

#: What is not a program.
ON_THE_HOST = "it takes or returns what a program cannot hold: files, words, iterators, choices"
EAGER = {
    "load": ON_THE_HOST,
    "save": ON_THE_HOST,
    "diagnose": ON_THE_HOST,
    "hypotheses.causal_learn_test": ON_THE_HOST,
    "hypotheses.pgmpy_test": ON_THE_HOST,
    "learn_conditional": "a search on the host, of compiled programs",
    "learn_filter": "a search on the host, of compiled programs",
    "learning.fit_image_map": "a loop on the host over a compiled step, for progress",
    "learning.learn_features": "a loop on the host over a compiled step, for progress",
    "learning.learn_forecast": "a search on the host, of compiled programs",
    "learning.learn_instrument": "a search on the host, of compiled programs",
    "learn_posterior": "a search on the host, of compiled programs",
    "tune": "a loop on the host over a compiled step, for progress and checkpoints",
    "tuning.tune_starts": "a loop on the host over a compiled step, for progress",
    "features.streaming_landmarks": ON_THE_HOST,
    "filtering.stretches": ON_THE_HOST,
    "propagation.grid_graph": "the structure of a program, not a value in it",
    "propagation.pairwise_graph": "the structure of a program, not a value in it",
}

#: Indices, draws and decisions have no gradient; a search by pivots stops at them.
NO_GRADIENT = {
    "decode",
    "dynamics.classify",
    "embedding.decode_permutation",
    "hypotheses.change_points",
    "hypotheses.stein_thinning",
}


def numbers(tree):
    leaves = [a for a in jax.tree.leaves(tree) if hasattr(a, "dtype")]
    return [a for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)]


def whole(program, gradient, batch):
    """The value with its gradient in bandwidth and both samples, and a batch of that."""

    def value(h, x, y):
        return numbers(program(kbr.Gaussian(h), x, y))

    def total(h, x, y):
        found = value(h, x, y)
        return sum(jnp.sum(a) for a in found), found

    def both(h, x, y):
        return jax.grad(total, (0, 1, 2), has_aux=True)(h, x, y) if gradient else value(h, x, y)

    def everything(h, x, y):
        return both(h, x, y), jax.vmap(both)(*map(pair, (h, x, y)))

    return everything if batch else both


def pair(a):
    return jnp.stack([a, a])


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_lowers_everywhere_without_the_host(name):
    dtype = jnp.zeros(()).dtype
    double = dtype == jnp.float64
    arguments = [jax.ShapeDtypeStruct(s, dtype) for s in ((), X.shape, Y.shape)]
    # A batch of other numbers is the same batch.
    program = jax.jit(whole(PROGRAMS[name], name not in NO_GRADIENT, batch=not double))
    platforms = ("cuda",) if double else ("cuda", "rocm", "tpu")
    lowered = export.export(program, platforms=platforms)(*arguments)
    text = str(lowered.mlir_module())
    assert "callback" not in text
    # In float32 the default of a GPU keeps three digits of a product, that of a TPU two.
    products = re.findall(r"stablehlo\.(?:dot_general|convolution) .*", text)
    assert all("HIGHEST, HIGHEST" in product for product in products)
    if not double:
        assert "f64" not in text


def public_functions():
    modules = inspect.getmembers(kbr, inspect.ismodule)
    spaces = [n for n, m in modules if m.__name__ == f"kbr_jax.{n}" and not n.startswith("_")]
    found = {n for n in kbr.__all__ if inspect.isfunction(getattr(kbr, n))}
    for space in spaces:
        module = getattr(kbr, space)
        if space in ("plotting", "experimental"):  # needs matplotlib; may change
            continue
        for name in module.__all__:
            item = getattr(module, name)
            if (
                callable(item)
                and not inspect.isclass(item)
                and item is not getattr(kbr, name, None)
            ):
                found.add(f"{space}.{name}")
    return found


def test_no_public_function_is_missing():
    covered = {name.split(",")[0] for name in PROGRAMS} | set(EAGER)
    assert public_functions() == covered
