"""Exact cases worked out against explicit finite-dimensional operators, to their tolerances."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr
from benchmarks.camera.video import kalman_means

CASES = json.loads((pathlib.Path(__file__).parent / "reference_cases.json").read_text())
RULES, POSTERIOR = CASES["rules_and_filters"], CASES["posterior"]


close = closeness(0.0, 0.0, "atol")


def table_sample(counts):
    """Pairs (x, y) with the given counts, row x, column y."""
    counts = np.asarray(counts)
    x, y = np.nonzero(counts)
    return jnp.asarray(np.repeat(x, counts[x, y])), jnp.asarray(np.repeat(y, counts[x, y]))


def indicator(label):
    return lambda point: (point == label).astype(float)


def by_class(weights, labels, classes):
    return np.asarray([np.asarray(weights)[np.asarray(labels) == c].sum() for c in range(classes)])


def fit_table(counts, lam):
    """P(x | y): in the library's letters the conditioning variable comes first."""
    x, y = table_sample(counts)
    return kbr.fit_conditional(kbr.Delta(), kbr.Delta(), y, x, regularizer=lam)


@pytest.mark.parametrize("landmarks", [None, 2])
def test_discrete_sum_rule(landmarks):
    case = RULES["T1_discrete_sum_rule"]
    inputs = case["inputs"]
    x, y = table_sample(inputs["counts"])
    model = kbr.fit_conditional(
        kbr.Delta(), kbr.Delta(), y, x, regularizer=inputs["lam"], landmarks_x=landmarks
    )
    prior = kbr.embed(kbr.Delta(), jnp.arange(2), jnp.asarray(inputs["pi"]))
    tolerance = case["tol"] * (1 if landmarks is None else 10)
    close(by_class(kbr.sum_rule(model, prior).weights, x, 3), case["expected"]["q"], tolerance)
    # Form (b) of the sum rule holds the same weights, those of the chain rule on the pairs.
    close(by_class(kbr.chain_rule(model, prior).weights, x, 3), case["expected"]["q"], tolerance)


def as_printed(estimator):
    """The rule of the paper: prior weights as they are, clipped only where they must be."""
    return {
        "estimator": estimator,
        "clipping": kbr.Clipping(estimator == "importance", 0.0, False),
    }


@pytest.mark.parametrize("estimator", ["prior", "pairs"])
def test_discrete_chain_rule(estimator):
    case = RULES["T2_discrete_chain_rule"]
    model = fit_table(case["inputs"]["counts"], case["inputs"]["lam"])
    prior = kbr.embed(kbr.Delta(), jnp.arange(2), jnp.asarray(case["inputs"]["pi"]))
    joint = kbr.chain_rule(model, prior, estimator=estimator)
    table = [
        [kbr.embedding.joint_expectation(joint, indicator(j), indicator(i)) for j in range(2)]
        for i in range(3)
    ]
    close(table, case["expected"]["Q"], case["tol"])


@pytest.mark.parametrize("estimator", ["prior", "pairs", "importance"])
def test_discrete_bayes_rule(estimator):
    case = RULES["T3_discrete_bayes_rule"]
    model = fit_table(case["inputs"]["counts"], case["inputs"]["lam"])
    prior = kbr.embed(kbr.Delta(), jnp.arange(2), jnp.asarray(case["inputs"]["pi"]))
    posterior = kbr.bayes_rule(
        model, prior, jnp.arange(3), regularizer=case["inputs"]["dtil"], **as_printed(estimator)
    )
    table = [by_class(w, posterior.points, 2) for w in posterior.weights]
    close(table, case["expected"]["posterior"], case["tol"])


def test_conditional_embedding_with_delta_kernel():
    case = RULES["T5_cme_delta"]
    x, y = table_sample(case["inputs"]["counts"])
    model = kbr.fit_conditional(kbr.Delta(), kbr.Delta(), x, y, regularizer=case["inputs"]["lam"])
    embedding = kbr.condition(model, jnp.asarray(case["inputs"]["x"]))
    expected = np.where(np.asarray(x) == 0, case["expected"]["value_on_class"], 0.0)
    close(embedding.weights, expected, case["tol"])
    close(embedding.mass, case["expected"]["total"], case["tol"] * 10)


def test_centred_2009_form_two_classes():
    case = RULES["T6_cme_centred_two_class"]
    x, y = table_sample(case["inputs"]["counts"])
    model = kbr.fit_conditional(kbr.Delta(), kbr.Delta(), y, x, regularizer=case["inputs"]["lam"])
    weights = kbr.condition_centered(model, jnp.asarray(0), estimator="song2009").weights
    expected = np.where(np.asarray(y) == 0, case["expected"]["w_in"], case["expected"]["w_out"])
    close(weights, expected, case["tol"])
    close(by_class(weights, y, 2), case["expected"]["class_sums"], case["tol"])


def test_centred_2009_form_three_classes_and_the_affine_form():
    case = RULES["T6b_cme_centred_three_class"]
    x, y = table_sample(case["inputs"]["counts"])
    model = kbr.fit_conditional(kbr.Delta(), kbr.Delta(), x, y, regularizer=case["inputs"]["lam"])
    expected = np.asarray(case["expected"]["w_per_class"])[np.asarray(x)]
    close(
        kbr.condition_centered(model, jnp.asarray(0), estimator="song2009").weights,
        expected,
        case["tol"],
    )

    affine = RULES["T6c_centred_with_mean"]["expected"]
    expected = np.where(np.asarray(x) == 0, affine["w_in"], affine["w_out"])
    close(
        kbr.condition_centered(model, jnp.asarray(0)).weights,
        expected,
        RULES["T6c_centred_with_mean"]["tol"],
    )


def test_gaussian_gram_and_median():
    case = RULES["T7_gaussian_gram"]
    x = jnp.asarray(case["inputs"]["X"])
    close(kbr.gram(kbr.Gaussian(case["inputs"]["s"]), x), case["expected"]["K"], case["tol"])
    close(kbr.median_heuristic(x), case["expected"]["median"], case["tol"])
    first = POSTERIOR["1_sum_rule"]
    close(kbr.median_heuristic(jnp.asarray(first["X"])), first["median_bw_X"], 1e-15)


def test_conditional_embedding_with_gaussian_kernel():
    case = RULES["T8_cme_gaussian"]
    x, kernel = jnp.asarray(case["inputs"]["X"]), kbr.Gaussian(1.0)
    model = kbr.fit_conditional(kernel, kernel, x, x, regularizer=case["inputs"]["lam"])
    query = jnp.asarray(case["inputs"]["x"])
    close(kbr.condition(model, query).weights, case["expected"]["w"], case["tol"])
    close(
        kbr.condition_centered(model, query, estimator="song2009").weights,
        case["expected"]["w_centred"],
        case["tol"],
    )
    close(
        kbr.condition_centered(model, query).weights,
        case["expected"]["w_centred_with_mean"],
        case["tol"],
    )


@pytest.mark.parametrize("landmarks", [None, 3])
def test_rules_with_gaussian_kernels(landmarks):
    case = RULES["T9_kbr_gaussian"]
    inputs, expected = case["inputs"], case["expected"]
    kernel = kbr.Gaussian(1.0)
    x, y = jnp.asarray(inputs["X"]), jnp.asarray(inputs["Y"])
    model = kbr.fit_conditional(
        kernel,
        kernel,
        y,
        x,
        regularizer=inputs["lam"],
        landmarks_x=landmarks,
        landmarks_y=landmarks,
    )
    prior = kbr.embed(kernel, jnp.asarray(inputs["Yt"]), jnp.asarray(inputs["alpha"]))
    close(kbr.sum_rule(model, prior).weights, expected["sum"], case["tol"])
    close(
        kbr.chain_rule(model, prior, estimator="prior").weights.T, expected["chain_a"], case["tol"]
    )
    query = jnp.asarray(inputs["x"])
    for estimator, name in (("prior", "bayes_a"), ("pairs", "bayes_b")):
        options = {"regularizer": inputs["dtil"], **as_printed(estimator)}
        posterior = kbr.bayes_rule(model, prior, query, **options)
        close(posterior.weights, expected[name], case["tol"])
    weights = model.features_y.importance_posterior(
        jnp.asarray(expected["sum"]),
        model.features_y.coordinates(query[None]),
        jnp.asarray(inputs["dtil"]),
    )[0]
    close(weights, expected["iw"], case["tol"])
    decomposition = kbr.features.incomplete_cholesky(kernel, x, rank=3)
    np.testing.assert_array_equal(decomposition.pivots, expected["pivots"])


def test_decoding_of_three_weighted_points():
    case = RULES["T15_preimage"]
    embedding = kbr.embed(
        kbr.Gaussian(case["inputs"]["s"]),
        jnp.asarray(case["inputs"]["Z"]),
        jnp.asarray(case["inputs"]["w"]),
    )
    for decoded in (
        kbr.embedding.decode_fixed_point(embedding, num_steps=200),
        kbr.embedding.decode_gradient(embedding, num_steps=2000, learning_rate=0.05),
    ):
        close(decoded, case["expected"]["z"], case["tol"])
        close(
            kbr.embedding.decoding_objective(embedding, decoded),
            case["expected"]["objective"],
            case["tol"],
        )


def test_conditional_cross_covariance():
    case = RULES["T16_cond_cross_cov"]
    y, z = jnp.asarray(case["inputs"]["Y"]), jnp.asarray(case["inputs"]["Z"])
    kernel, weights = kbr.Gaussian(case["inputs"]["s"]), jnp.asarray(case["inputs"]["b"])
    joint = kbr.embedding.embed_joint(kernel, kernel, y, z, weights)
    close(
        kbr.embedding.squared_hs_norm(kbr.embedding.cross_covariance(joint)),
        case["expected"]["hs2"],
        case["tol"],
    )
    joint = kbr.embedding.embed_joint(kernel, kernel, y, jnp.ones(3), weights)
    close(
        kbr.embedding.squared_hs_norm(kbr.embedding.cross_covariance(joint)),
        case["expected"]["hs2_constant"],
        case["tol"],
    )


def test_sum_rule_with_a_weighted_prior():
    case = POSTERIOR["1_sum_rule"]
    kernel, x = kbr.Gaussian(case["sigma"]), jnp.asarray(case["X"])
    model = kbr.fit_conditional(kernel, kernel, x, x, regularizer=case["eps"])
    prior = kbr.embed(kernel, jnp.asarray(case["U"]), jnp.asarray(case["gamma"]))
    close(kbr.evaluate(prior, x), case["m"], 1e-12)
    close(kbr.sum_rule(model, prior).weights, case["w"], 1e-10)


def three_points():
    case = POSTERIOR["3_delta_to_zero_ignores_prior"]
    y = jnp.asarray(case["Y"])
    model = kbr.fit_conditional(
        kbr.Gaussian(1.0), kbr.Gaussian(case["sigma"]), y, y, regularizer=0.1
    )
    return case, model.features_y, model.features_y.coordinates(jnp.asarray([[case["y"]]]))


def test_bayes_rule_loses_its_prior_as_delta_vanishes():
    case, features, code = three_points()
    for name, expected in case["weights"].items():
        prior, delta = name.split(" delta=")
        beta = features.posterior(jnp.asarray(case[prior]), code, jnp.asarray(float(delta)))[0][0]
        close(beta, expected, 1e-9)
    close(case["weights"]["w1 delta=1e-14"], case["limit_Ginv_k"], 1e-9)


def test_delta_scales_with_the_square_of_the_weights():
    case, features, code = three_points()
    expected = POSTERIOR["4_scale_equivalence"]["weights"]
    w = jnp.asarray(case["w1"])
    close(features.posterior(3 * w, code, jnp.asarray(0.09))[0][0], expected, 1e-12)
    close(features.posterior(w, code, jnp.asarray(0.01))[0][0], expected, 1e-12)


def test_importance_weighted_rule():
    case, features, code = three_points()
    reference = POSTERIOR["5_iw_kbr"]
    delta = jnp.asarray(reference["delta"])
    uniform = features.importance_posterior(jnp.full(3, 1 / 3), code, delta)[0]
    close(uniform, reference["uniform"], 1e-12)
    clipped = kbr.rules.clip_and_normalize(jnp.asarray(case["w2"]), kbr.Clipping(True, 0.0, False))
    close(features.importance_posterior(clipped, code, delta)[0], reference["clipped_w2"], 1e-12)


def test_bayes_rule_equals_the_operator_form():
    case = POSTERIOR["6_s13_eq23_24"]
    x, y, prior_points = (jnp.asarray(case[name]) for name in ("phi_x", "phi_y", "phi_ytilde"))
    kernel = kbr.Linear()
    model = kbr.fit_conditional(kernel, kernel, y, x, regularizer=case["lam"] / 3)
    prior = kbr.embed(kernel, prior_points, jnp.asarray(case["alpha"]))
    query = jnp.asarray(case["phi_x_query"])
    for estimator, expected in (
        ("prior", case["mu_a_operator"]),
        ("pairs", case["mu_b_operator_eq24"]),
    ):
        options = {"regularizer": case["lam_tilde"], **as_printed(estimator)}
        posterior = kbr.bayes_rule(model, prior, query, **options)
        close(posterior.weights @ posterior.points, expected, 1e-12)


def test_incomplete_cholesky_and_what_is_solved_with_it():
    case = POSTERIOR["9_icd"]
    z, kernel = jnp.asarray(case["Z"]), kbr.Gaussian(case["sigma"])
    decomposition = kbr.features.incomplete_cholesky(kernel, z, rank=5, tolerance=2e-3)
    rank = len(case["pivots"])
    np.testing.assert_array_equal(decomposition.active, [True] * rank + [False])
    np.testing.assert_array_equal(decomposition.pivots[:rank], case["pivots"])
    close(decomposition.factor[:, :rank], case["L"], 1e-12)
    close(decomposition.factor[:, rank:], 0, 0)
    close(decomposition.residual, case["residual_diag"], 1e-12)

    landmarks = kbr.greedy_landmarks(kernel, z, rank=5, tolerance=2e-3)
    model = kbr.fit_conditional(
        kernel, kernel, z, z, regularizer=0.3 / 5, landmarks_x=landmarks, landmarks_y=landmarks
    )
    features = model.features_x
    close(features.matrix[:, :rank], case["L"], 1e-12)
    # The ridge solve of an arbitrary right-hand side: (b - F (F'F + n lambda)^{-1} F' b) / (n
    # lambda).
    rhs = jnp.asarray(case["rhs"])
    solved = (rhs - features.ridge_weights(model.factor, (features.matrix.T @ rhs)[None])[0]) / 0.3
    close(solved, case["ridge_0p3"], 1e-9)
    weights = features.posterior(
        jnp.asarray(case["kbr_w"]),
        features.coordinates(jnp.asarray([[case["y"]]])),
        jnp.asarray(case["kbr_delta"]),
    )[0][0]
    close(weights, case["kbr_weights"], 1e-9)


def test_histogram_and_gaussian_kernels_as_lampert_prints_them():
    case = CASES["distributions"]["1_kernels"]
    x, y = jnp.asarray(case["X"]), jnp.asarray(case["Y"])
    density = (2 * np.pi) ** -1.5
    for kernel, name in (
        (kbr.Gaussian(1.0), "gaussian_h1"),
        (density * kbr.Gaussian(1.0), "gaussian_pdf_h1"),
        (kbr.Gaussian(0.5), "gaussian_h05"),
        (kbr.kernels.HistogramIntersection(), "HI"),
        (kbr.kernels.ChiSquared(), "rbf_chi2"),
    ):
        close(kbr.gram(kernel, x, y), case[name], 1e-15)


def quadrature(mean, variance, points=201):
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    return jnp.asarray(mean + np.sqrt(variance) * nodes), jnp.asarray(weights / np.sqrt(2 * np.pi))


def test_embedded_gaussians_have_their_closed_forms():
    case = CASES["distributions"]["10_closed_forms"]
    kernel = float((2 * np.pi) ** -0.5) * kbr.Gaussian(1.0)

    def gaussian(mean, variance, k=kernel):
        return kbr.embed(k, *quadrature(mean, variance))

    close(kbr.mmd(gaussian(0, 1), gaussian(1, 1)), case["dist_N01_N11_pdf"], 1e-10)
    close(kbr.mmd(gaussian(0, 1), gaussian(0, 4)), case["dist_N01_N04_pdf"], 1e-10)
    k_zero = kernel(jnp.asarray(0.0), jnp.asarray(0.0))
    error = (k_zero - kbr.embedding.squared_norm(gaussian(0, 1))) / 10
    close(error, case["expected_sq_norm_error_n"]["n10"], 1e-10)
    wide = kbr.Gaussian(1.3)
    inner = kbr.inner(gaussian(1, 4, wide), gaussian(-0.5, 0.25, wide))
    close(inner, case["inner_N_1_4__N_m05_025_h13_unit"], 1e-10)


@pytest.mark.parametrize("landmarks", [None, 3])
@pytest.mark.parametrize("shift, expected", [(False, "full_equals_hmm"), (True, "eq35_short")])
def test_discrete_hidden_markov_model(shift, expected, landmarks):
    case = RULES["T12_discrete_hmm_filter"]
    inputs = {name: jnp.asarray(value) for name, value in case["inputs"].items()}
    filt = kbr.fit_filter(
        kbr.Delta(),
        kbr.Delta(),
        inputs["s"],
        inputs["o"],
        successors=inputs["s_next"],
        regularizer=case["inputs"]["lam"],
        posterior_regularizer=case["inputs"]["dtil"],
        shift=shift,
        clipping=kbr.Clipping(False, 0.0, False),
        landmarks_states=landmarks,
        landmarks_observations=landmarks,
    )
    run = kbr.run_filter(filt, inputs["obs"])
    table = np.stack([by_class(w, inputs["s"], 3) for w in run.weights])
    close(table / table.sum(1, keepdims=True), case["expected"][expected], case["tol"])


def test_equation_23_as_printed_is_not_bayes_rule():
    """The misprint of S13 eq 23, with (D K)^2 where (K D)^2 must stand, reproduced to show what it
    gives.
    """

    def printed(lam, w, k, column, delta):
        d = np.diag(w)
        return lam.T @ np.linalg.solve((d @ k) @ (d @ k) + delta * np.eye(len(w)), k @ d @ column)

    case = POSTERIOR["6_s13_eq23_24"]
    x, y, prior = (np.asarray(case[name]) for name in ("phi_x", "phi_y", "phi_ytilde"))
    lam = np.linalg.solve(y @ y.T + case["lam"] * np.eye(3), y @ prior.T) * np.asarray(
        case["alpha"]
    )
    beta = printed(lam, lam.sum(1), x @ x.T, x @ np.asarray(case["phi_x_query"]), case["lam_tilde"])
    close(beta @ prior, case["mu_a_printed_eq23_WRONG"], 1e-12)
    assert np.abs(beta @ prior - np.asarray(case["mu_a_operator"])).max() > 0.1


def test_scalar_kalman_filter_of_the_baselines():
    case = RULES["T17_kalman_scalar"]
    a, q, r, start = 0.9, 0.1, 0.2, 1.0
    observations = np.asarray([1.0, 0.5, -0.2])
    means = kalman_means(
        np.asarray([[a]]),
        np.asarray([[q]]),
        np.asarray([[1 / r]]),
        observations[:, None] / r,
        np.asarray([[a**2 * start + q]]),
    )
    close(means[:, 0], case["expected"]["m"], case["tol"])
