"""Dynamics of distributions.

Exact cases, explicit operators, refits, closed forms, finite differences.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import check_gradient, closeness

import kbr_jax as kbr

CASES = json.loads((pathlib.Path(__file__).parent / "reference_cases.json").read_text())[
    "distributions"
]
SMALL = CASES["2_small_sets"]
G = kbr.Gaussian(1.0)
DENSITY = float((2 * np.pi) ** -0.5) * G
RNG = np.random.default_rng(0)
SIZES = (3, 5, 1, 4, 2, 5)
SETS = [RNG.normal(size=(n, 2)) + 0.3 * t for t, n in enumerate(SIZES)]
GAMMAS = np.array([0.5, 2.0, 0.0, 1.0, 3.0])
TIMES = np.array([0.0, 1.0, 1.5, 3.0, 3.4, 5.0])
LABELS = [RNG.integers(0, 2, n) for n in SIZES]


close = closeness(0.0, 1e-10, "atol")


def sequence(sets=SETS, **options):
    return kbr.dynamics.sample_sequence([jnp.asarray(points) for points in sets], **options)


def fit(sets=None, kernel=G, regularizer=0.1, **options):
    return kbr.dynamics.fit_dynamics(
        kernel, sequence() if sets is None else sets, regularizer=regularizer, **options
    )


def brute_gram(kernel, a, b):
    return np.array(
        [[np.mean(kbr.gram(kernel, jnp.asarray(x), jnp.asarray(y))) for y in b] for x in a]
    )


# ---- reference cases


@pytest.mark.parametrize("lam", [0.5, 0.1, 0.001])
def test_small_sets(lam):
    model = fit(sequence(SMALL["sets"]), regularizer=lam)
    close(model.gram, SMALL["G"], 1e-15)
    found = kbr.dynamics.forecast_coefficients(model, 3)
    close(found[:, 0], 0)
    for steps, name in enumerate(("", " steps=2", " steps=3")):
        close(found[steps, 1:], SMALL[f"beta lam={lam}{name}"], 1e-12)
    prediction = kbr.dynamics.extrapolate(model, estimator="ridge")
    weights = np.asarray(prediction.weights).reshape(4, 3)
    close(weights[weights != 0], SMALL[f"weights eq8 lam={lam}"], 1e-12)
    close(kbr.dynamics.leave_one_out_errors(model), SMALL[f"LOO squared errors lam={lam}"], 1e-12)
    frobenius = np.sqrt(
        np.trace(
            model.coefficients @ model.gram[1:, 1:] @ model.coefficients @ model.gram[:-1, :-1]
        )
    )
    close(frobenius, SMALL[f"|A|_F lam={lam}"], 1e-12)
    truth = kbr.embed(G, jnp.asarray([3.0]))
    close(kbr.mmd(prediction, truth), SMALL[f"dist to delta_3 lam={lam}"], 1e-12)


def test_step_weights_and_forward_errors_of_small_sets():
    model = fit(sequence(SMALL["sets"]))
    weighted = kbr.dynamics.refit_dynamics(model, step_weights=jnp.asarray(SMALL["gamma"]))
    found = kbr.dynamics.forecast_coefficients(weighted, 2)[:, 1:]
    close(found[0], SMALL["beta lam=0.1 gamma"], 1e-12)
    close(found[1], SMALL["beta lam=0.1 gamma steps=2"], 1e-12)
    dropped = kbr.dynamics.refit_dynamics(model, step_weights=jnp.asarray([0.0, 1.0, 1.0]))
    close(
        kbr.dynamics.forecast_coefficients(dropped)[0, 1:],
        SMALL["beta lam=0.1 gamma=[0,1,1]"],
        1e-12,
    )
    shorter = kbr.dynamics.forecast_coefficients(fit(sequence(SMALL["sets"][1:])))[0, 1:]
    close(shorter, SMALL["sets 2.. dropped: beta lam=0.1 of sets[1:]"], 1e-12)
    close(
        kbr.dynamics.rolling_origin_errors(model),
        CASES["10_closed_forms"]["forward_errors_case2_lam01_first2"],
        1e-12,
    )


def test_two_sets():
    case = CASES["3_T2"]
    model = fit(sequence([[0.0], [0.0, 1.0]]), regularizer=case["lam"])
    close(kbr.dynamics.forecast_coefficients(model)[0, 1:], case["beta"], 1e-15)
    close(kbr.dynamics.forecast_coefficients(model)[0, 1:], [case["closed"]], 1e-15)


def gaussians(means, variances, shares=None):
    return kbr.experimental.gaussian_mixture(
        jnp.asarray(means)[..., None], jnp.asarray(variances), shares
    )


def mixture_distance(kernel, p, q):
    return kbr.experimental.mmd_mixtures(kernel, p, q)


def of_mixtures(mixtures, regularizer):
    gram = kbr.experimental.mixture_gram(DENSITY, mixtures)
    return kbr.dynamics.fit_dynamics(DENSITY, None, gram=gram, regularizer=regularizer)


def ahead(mixtures, model):
    coefficients = kbr.dynamics.forecast_coefficients(model)[0]
    return kbr.experimental.combine_mixtures(mixtures, coefficients)


def test_infinite_samples_of_a_mixture():
    case = CASES["4_mixture_inf"]
    shares = jnp.asarray([[a, 1 - a] for a in case["alphas"]])
    sets = gaussians([[3.0, -3.0]] * 6, jnp.ones((6, 2)), shares)
    truth = gaussians([3.0, -3.0], [1.0, 1.0], jnp.asarray([0.8, 0.2]))
    model = of_mixtures(sets, 0.0)
    found = kbr.dynamics.forecast_coefficients(model, 2)
    close(found[0, 1:], case["beta_lam0_exact"], 1e-9)
    close(found[1, 1:], case["beta_lam0_steps2"], 1e-8)
    close(
        mixture_distance(DENSITY, ahead(sets, model), truth),
        0,
        1e-6,
    )
    last = gaussians([3.0, -3.0], [1.0, 1.0], shares[-1])
    close(mixture_distance(DENSITY, last, truth), case["dist_last"], 1e-12)
    for lam in (0.1, 0.01, 0.001):
        model = kbr.dynamics.refit_dynamics(model, regularizer=lam)
        close(kbr.dynamics.forecast_coefficients(model)[0, 1:], case[f"lam={lam}"]["beta"], 1e-11)
        close(
            mixture_distance(DENSITY, ahead(sets, model), truth),
            case[f"lam={lam}"]["dist"],
            1e-10,
        )


def test_infinite_samples_of_a_translation():
    case = CASES["5_translation_inf"]
    sets = gaussians((10.0 - np.arange(1, 10))[:, None], jnp.ones((9, 1)))
    truth = gaussians([0.0], [1.0])
    model = of_mixtures(sets, 0.1)
    for lam in (0.1, 0.01, 0.001, 1e-5):
        model = kbr.dynamics.refit_dynamics(model, regularizer=lam)
        close(kbr.dynamics.forecast_coefficients(model)[0, 1:], case[f"lam={lam}"]["beta"], 1e-9)
        close(
            mixture_distance(DENSITY, ahead(sets, model), truth),
            case[f"lam={lam}"]["dist"],
            1e-9,
        )
    model = kbr.dynamics.refit_dynamics(model, regularizer=0.0)
    close(
        mixture_distance(DENSITY, ahead(sets, model), truth),
        case["lam=0 dist"],
        1e-6,
    )


def test_embedded_gaussians():
    case = CASES["10_closed_forms"]
    standard = gaussians([0.0], [1.0])
    close(
        mixture_distance(DENSITY, standard, gaussians([1.0], [1.0])),
        case["dist_N01_N11_pdf"],
        1e-12,
    )
    close(
        mixture_distance(DENSITY, standard, gaussians([0.0], [4.0])),
        case["dist_N01_N04_pdf"],
        1e-12,
    )
    inner = kbr.experimental.inner_mixtures(
        kbr.Gaussian(1.3), gaussians([1.0], [4.0]), gaussians([-0.5], [0.25])
    )
    close(inner, case["inner_N_1_4__N_m05_025_h13_unit"], 1e-12)
    sample = kbr.embed(DENSITY, jnp.asarray(case["KL_N01_vs_sample"]["sample"])[:, None])
    grid = jnp.linspace(-12, 12, 3001)[:, None]
    close(
        kbr.experimental.smoothed_kl(standard, sample, grid),
        case["KL_N01_vs_sample"]["value"],
        1e-9,
    )


# ---- embedded mixtures in several dimensions


def test_embedded_mixtures_are_limits_of_samples():
    kernel = 0.7 * kbr.Gaussian(jnp.asarray([0.8, 1.5]))
    covariance = jnp.asarray([[[1.0, 0.4], [0.4, 0.5]], [[0.3, 0.0], [0.0, 0.2]]])
    mixture = kbr.experimental.gaussian_mixture(
        jnp.asarray([[0.0, 1.0], [1.0, -1.0]]), covariance, jnp.asarray([0.7, -0.2])
    )
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(weights, weights).reshape(-1) / (2 * np.pi)
    points = [
        m + grid @ np.linalg.cholesky(c).T for m, c in zip(mixture.means, covariance, strict=True)
    ]
    sample = kbr.embed(
        kernel,
        jnp.asarray(np.concatenate(points)),
        jnp.concatenate([0.7 * weights, -0.2 * weights]),
    )
    where = jnp.asarray(RNG.normal(size=(4, 2)))
    close(
        kbr.experimental.evaluate_mixture(kernel, mixture, where), kbr.evaluate(sample, where), 1e-9
    )
    close(
        kbr.experimental.inner_mixtures(kernel, mixture, mixture),
        kbr.embedding.squared_norm(sample),
        1e-9,
    )
    close(kbr.experimental.mmd_mixture(sample, mixture), 0, 1e-5)
    few = kbr.embed(kernel, where)
    expected = np.sqrt(
        kbr.embedding.squared_norm(few)
        - 2 * kbr.inner(few, sample)
        + kbr.embedding.squared_norm(sample)
    )
    close(kbr.experimental.mmd_mixture(few, mixture), expected, 1e-9)


# ---- sample sets


def test_sample_sets_pad_and_weigh():
    sets = sequence()
    assert sets.points.shape == (6, 5, 2)
    close(sets.sizes, SIZES)
    for t, n in enumerate(SIZES):
        close(sets.weights[t], [1 / n] * n + [0] * (5 - n))
    mask = jnp.asarray(np.arange(5) < np.asarray(SIZES)[:, None])
    stacked = kbr.dynamics.sample_sequence(sets.points, mask=mask)
    close(stacked.weights, sets.weights)


def test_sets_without_points():
    points, mask = jnp.asarray(RNG.normal(size=(5, 4, 2))), np.ones((5, 4), bool)
    mask[2] = False
    with pytest.raises(ValueError, match=r"`mask` leaves no point of the sets \[2\]"):
        kbr.dynamics.sample_sequence(points, mask=mask)

    @jax.jit
    def predict(points, mask):
        sets = kbr.dynamics.sample_sequence(points, mask=mask)
        model = kbr.dynamics.fit_dynamics(G, sets)
        return jnp.sum(jnp.sin(kbr.dynamics.forecast_coefficients(model))), (
            model.gram,
            kbr.dynamics.sampling_noise(G, sets),
        )

    (value, (gram, noise)), gradient = jax.value_and_grad(predict, has_aux=True)(
        points, jnp.asarray(mask)
    )
    assert np.isfinite(value) and np.all(np.isfinite(gradient))
    close(gram[2], np.zeros(5), 0)
    kept = np.arange(5) != 2
    close(
        np.asarray(noise)[kept],
        kbr.dynamics.sampling_noise(G, kbr.dynamics.sample_sequence(points[kept])),
        1e-14,
    )
    close(noise[2], 0, 0)


@pytest.mark.parametrize("block", [None, 1, 4, 100])
def test_set_gram(block):
    sets, others = sequence(), sequence(SETS[1:4])
    close(kbr.dynamics.embedding_gram(G, sets, block_size=block), brute_gram(G, SETS, SETS), 1e-14)
    close(
        kbr.dynamics.embedding_gram(G, sets, others, block_size=block),
        brute_gram(G, SETS, SETS[1:4]),
        1e-14,
    )


def test_set_gram_of_labeled_points_is_the_joint_kernel():
    case = CASES["9_predsvm"]
    pairs = [(jnp.asarray(x), jnp.asarray(y).astype(int)) for x, y in case["sets"]]
    joint = kbr.TensorProduct((G, kbr.Delta()))
    close(
        kbr.dynamics.embedding_gram(joint, kbr.dynamics.sample_sequence(pairs)),
        case["joint Gram (h=1, unit)"],
        1e-14,
    )


def test_mix_sets_and_the_baselines():
    sets = sequence()
    last = kbr.dynamics.combine(G, sets, jnp.zeros(6).at[-1].set(1.0))
    where = jnp.asarray(SETS[0])
    close(kbr.evaluate(last, where), kbr.evaluate(kbr.embed(G, jnp.asarray(SETS[-1])), where))
    together = kbr.dynamics.combine(G, sets, sets.sizes / jnp.sum(sets.sizes))
    close(
        kbr.evaluate(together, where),
        kbr.evaluate(kbr.embed(G, jnp.asarray(np.concatenate(SETS))), where),
    )


def test_sampling_noise_is_unbiased():
    points = RNG.normal(size=(4000, 5, 1))
    noise = kbr.dynamics.sampling_noise(DENSITY, kbr.dynamics.sample_sequence(jnp.asarray(points)))
    expected = CASES["10_closed_forms"]["expected_sq_norm_error_n"]["n10"] * 2
    assert abs(np.mean(noise) - expected) < 4 * np.std(noise) / np.sqrt(4000)
    alone = kbr.dynamics.sampling_noise(G, sequence([[[0.0]], [[1.0], [2.0]]]))
    close(alone, [0, 1 - (1 + np.exp(-0.5)) / 2])
    model = kbr.dynamics.fit_dynamics(G, sequence())
    sets = sequence()
    many = np.asarray(sets.sizes) > 1  # one point does not tell its noise
    noise = np.asarray(kbr.dynamics.sampling_noise(G, sets))[many]
    close(model.regularizer, np.mean(noise), 1e-15)


# ---- against explicit operators and refits


def explicit_prediction(form, lam, gammas, times, steps, length):
    """The ridge regression with matrices, in the finite feature space of a polynomial kernel."""
    means = np.stack([np.mean([feature(z) for z in points], axis=0) for points in SETS])
    inputs, outputs = means[:-1], means[1:]
    if form == "change":
        intervals = np.diff(times)[:, None]
        inputs, outputs = intervals * inputs, np.diff(means, axis=0)
    g = np.diag(gammas)
    operator = (
        outputs.T @ g @ inputs @ np.linalg.inv(inputs.T @ g @ inputs + lam * np.eye(means.shape[1]))
    )
    mu = means[-1]
    for _ in range(steps):
        mu = operator @ mu if form == "next" else mu + length * (operator @ mu)
    return mu


def feature(z):
    """(x y + 1)^2 in two dimensions."""
    a, b = z
    r = np.sqrt(2)
    return np.array([a * a, b * b, r * a * b, r * a, r * b, 1.0])


@pytest.mark.parametrize(
    "form, times, length", [("next", None, None), ("change", None, None), ("change", TIMES, 0.7)]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_operator(form, times, length, steps):
    kernel = kbr.Polynomial(2, 1.0, 1.0)
    model = fit(kernel=kernel, step_weights=GAMMAS, form=form, times=times)
    coefficients = kbr.dynamics.forecast_coefficients(model, steps, length=length)[-1]
    prediction = kbr.dynamics.combine(kernel, model.sets, coefficients)
    found = np.asarray(
        kbr.expectation(prediction, lambda z: jnp.stack([z[0] ** 2, z[1] ** 2, z[0], z[1]]))
    )
    expected = explicit_prediction(
        form, 0.1, GAMMAS, np.arange(6) if times is None else times, steps, length or 1.0
    )
    close(found, expected[[0, 1, 3, 4]] / np.array([1, 1, np.sqrt(2), np.sqrt(2)]), 1e-9)


@pytest.mark.parametrize("form, times", [("next", None), ("change", TIMES)])
def test_leave_one_out_is_refitting(form, times):
    model = fit(step_weights=GAMMAS, form=form, times=times)
    intervals = np.ones(5) if times is None else np.diff(times)
    residuals = []
    for t in range(5):
        without = kbr.dynamics.refit_dynamics(
            model, step_weights=jnp.asarray(np.where(np.arange(5) == t, 0, GAMMAS))
        )
        length = None if times is None else intervals[t]
        residuals.append(
            np.asarray(
                kbr.dynamics.forecast_coefficients(without, length=length, start=jnp.eye(6)[t])
            )[0]
            - np.eye(6)[t + 1]
        )
    residuals = np.stack(residuals)
    for kernel in (None, kbr.Gaussian(0.6)):
        gram = brute_gram(kernel or G, SETS, SETS)
        close(
            kbr.dynamics.leave_one_out_errors(model, kernel=kernel),
            np.diag(residuals @ gram @ residuals.T),
            1e-10,
        )


def numpy_forecast(gram, form, lam, gammas, intervals, lengths, start=None):
    """Coefficients after steps of the given lengths from the last set (or another), from a Gram
    matrix alone.
    """
    root = np.sqrt(gammas) * intervals
    inner = root[:, None] * gram[:-1, :-1] * root + lam * np.eye(len(root))
    c = np.eye(len(gram))[-1 if start is None else start]
    for length in lengths:
        rates = root * np.linalg.solve(inner, root * (gram[:-1] @ c)) / intervals
        ahead, behind = np.append(0, rates), np.append(rates, 0)
        c = ahead if form == "next" else c + length * (ahead - behind)
    return c


@pytest.mark.parametrize(
    "form, times, steps", [("next", None, 1), ("next", None, 2), ("change", TIMES, 2)]
)
def test_forward_errors_are_refits(form, times, steps):
    model = fit(step_weights=GAMMAS, form=form, times=times)
    gram, intervals = brute_gram(G, SETS, SETS), np.ones(5) if times is None else np.diff(times)
    expected = []
    for last in range(2, 7 - steps):
        past = slice(last - 1)
        part = gram[:last, :last]
        c = numpy_forecast(
            part, form, 0.1, GAMMAS[past], intervals[past], intervals[last - 1 : last - 1 + steps]
        )
        residual = np.append(c, np.zeros(6 - last)) - np.eye(6)[last + steps - 1]
        expected.append(residual @ gram @ residual)
    close(kbr.dynamics.rolling_origin_errors(model, steps=steps), expected)


FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_extrapolation_is_stacked_unless_told_otherwise(steps):
    model = fit()
    found = kbr.dynamics.extrapolate(model, steps)
    stacked = kbr.dynamics.stacked_forecast(model, steps)
    close(found.weights, kbr.dynamics.combine(G, model.sets, stacked.coefficients).weights)
    close(jnp.sum(stacked.shares) + stacked.line, 1)
    if steps > 1:
        close(found.mass, 1)


def test_a_slow_move_keeps_its_mass():
    """Five steps ahead the ridge forecast has lost all of it (frictions, 8)."""
    draw = np.random.default_rng(5)
    sets = kbr.dynamics.sample_sequence(
        [jnp.asarray(draw.normal([0.4 * t, -0.1 * t], 0.5, (60, 2))) for t in range(10)]
    )
    model = kbr.dynamics.fit_dynamics(kbr.Gaussian(1.0), sets)
    found = kbr.dynamics.extrapolate(model, 5)
    close(found.mass, 1)
    ridge, truth = kbr.dynamics.extrapolate(model, 5, estimator="ridge"), np.array([5.6, -1.4])
    distances = [np.linalg.norm(kbr.mean(e) - truth) for e in (found, ridge)]
    assert abs(ridge.mass) < 0.5 and distances[0] < distances[1]


@pytest.mark.parametrize("form", ["next", "change"])
def test_the_operator_on_another_embedding(form):
    model = fit(form=form)
    other = kbr.embed(G, jnp.asarray(SETS[2]))
    found = kbr.dynamics.apply_dynamics(model, other)
    start = np.eye(6)[2]
    expected = kbr.dynamics.forecast_coefficients(model, start=jnp.asarray(start))[0]
    close(found, expected - (start if form == "change" else 0))
    batch = kbr.embed(G, other.points, jnp.stack([other.weights, 2 * other.weights]))
    close(kbr.dynamics.apply_dynamics(model, batch), jnp.stack([found, 2 * found]))


def test_stacked_forecast():
    model, factors = fit(), FACTORS
    gram, noise = np.asarray(model.gram), kbr.dynamics.sampling_noise(G, model.sets)
    noise = np.mean(np.asarray(noise)[np.asarray(model.sets.sizes) > 1])
    predictions, errors = [], []
    for form, restored in (("next", False), ("next", True), ("change", False)):
        for factor in factors:

            def one(gram, form=form, restored=restored, factor=factor, start=None, skip=None):
                c = numpy_forecast(
                    gram,
                    form,
                    factor * noise,
                    np.arange(len(gram) - 1) != skip,
                    np.ones(len(gram) - 1),
                    [1.0],
                    start,
                )
                return c / c.sum() if restored else c

            predictions.append(one(gram))
            left = [one(gram, start=t, skip=t) - np.eye(6)[t + 1] for t in range(1, 5)]
            ahead = [np.append(one(gram[:t, :t]), np.zeros(6 - t)) - np.eye(6)[t] for t in (4, 5)]
            errors.append((np.stack(left), np.stack(ahead)))

    def line(time, known):
        """Coefficients of the value at a time of the least-squares line through the embeddings of
        known sets.
        """
        c = np.zeros(6)
        c[known] = np.array([1, time]) @ np.linalg.pinv(
            np.stack([np.ones(len(known)), known], axis=1)
        )
        return c

    everything = np.arange(6)
    predictions.append(line(6, everything))
    left = [line(t, everything[everything != t]) - np.eye(6)[t] for t in range(2, 6)]
    ahead = [line(t, everything[:t]) - np.eye(6)[t] for t in (4, 5)]
    errors.append((np.stack(left), np.stack(ahead)))
    quadratic = noise * np.eye(19) + sum(
        np.array([[np.mean(np.sum(a @ gram * b, axis=1)) for b in part] for a in part])
        for part in zip(*errors, strict=True)
    )
    found = kbr.dynamics.stacked_forecast(model)
    shares = np.append(found.shares, found.line)
    close(found.coefficients, shares @ predictions)
    # The conditions of optimality on the simplex.
    gradient = quadratic @ shares
    assert np.all(shares >= 0)
    close(shares.sum(), 1)
    assert np.all(gradient >= gradient @ shares - 1e-6 * noise)


@pytest.mark.parametrize("ridge", [1e-4, 1e-5, 3e-6, 1e-6])
def test_forecasts_in_single_precision(ridge):
    """Of moving normal distributions, to the next. With W as it is .078 at 3e-6."""
    times = 0.1 * np.arange(21)
    gram = np.exp(-(np.subtract.outer(times, times) ** 2) / 3)
    model = kbr.dynamics.fit_dynamics(
        G, None, gram=jnp.asarray(gram[:20, :20], jnp.float32), regularizer=ridge
    )
    found = np.append(np.asarray(kbr.dynamics.forecast_coefficients(model)[0], float), -1)
    known = gram[:19, :19] + ridge * np.eye(19)
    exact = np.concatenate([[0], np.linalg.solve(known, gram[:19, 19]), [-1]])
    assert found @ gram @ found < 10 * (exact @ gram @ exact)


def test_leave_one_out_in_single_precision():
    """Of normal sets of 400 points that move by .03. Cut eigenvalues gave .76 for .0011."""
    times = 0.03 * np.arange(60)
    gram = np.exp(-(np.subtract.outer(times, times) ** 2) / 6) / 3**0.5
    gram += np.eye(60) * (1 - 1 / 3**0.5) / 400
    means = []
    for dtype in (jnp.float32, jnp.float64):
        model = kbr.dynamics.fit_dynamics(
            G, None, gram=jnp.asarray(gram, dtype), regularizer=(1 - 1 / 3**0.5) / 400
        )
        means.append(float(jnp.mean(kbr.dynamics.leave_one_out_errors(model))))
    close(means[0], means[1], 1e-3)


def test_leave_one_out_without_a_ridge_in_a_program():
    def total(gram):
        model = kbr.dynamics.fit_dynamics(G, None, gram=gram, regularizer=0.0)
        return jnp.sum(kbr.dynamics.leave_one_out_errors(model))

    gram = kbr.gram(G, jnp.arange(5.0)[:, None])
    close(jax.jit(total)(gram), total(gram))
    assert jnp.all(jnp.isfinite(jax.grad(total)(gram)))


def test_stacked_forecast_of_single_precision_data():
    sets = kbr.dynamics.sample_sequence([jnp.asarray(points, jnp.float32) for points in SETS])
    found = kbr.dynamics.stacked_forecast(fit(sets))
    assert found.coefficients.dtype == jnp.float32
    close(
        found.coefficients,
        kbr.dynamics.stacked_forecast(fit()).coefficients,
        1e-3,
    )


def test_next_counts_equal_steps_as_one_and_refuses_others():
    model = fit(times=10 * np.arange(6.0), form="change")
    close(
        kbr.dynamics.forecast_coefficients(kbr.dynamics.refit_dynamics(model, form="next"), 2),
        kbr.dynamics.forecast_coefficients(fit(), 2),
        1e-13,
    )
    with pytest.raises(ValueError, match=r'"next" assumes equal steps; .* from 0\.4 to 1\.6 long'):
        kbr.dynamics.refit_dynamics(fit(times=TIMES, form="change"), form="next")


@pytest.mark.parametrize("times", [np.arange(6.0), TIMES], ids=["equal", "unequal"])
def test_defaults_do_not_depend_on_the_unit_of_time(times):
    models = [
        kbr.dynamics.fit_dynamics(G, sequence(), times=unit * times, form="change")
        for unit in (1.0, 60.0)
    ]
    close(
        kbr.dynamics.forecast_coefficients(models[0], 2),
        kbr.dynamics.forecast_coefficients(models[1], 2),
    )
    stacked = [kbr.dynamics.stacked_forecast(model) for model in models]
    close(stacked[0].coefficients, stacked[1].coefficients)
    if times is not TIMES:
        close(
            stacked[1].coefficients,
            kbr.dynamics.stacked_forecast(fit()).coefficients,
        )


def test_linear_drift_with_unequal_times_is_extrapolated_exactly():
    shares = 0.1 + 0.1 * TIMES
    sets = gaussians(
        [[3.0, -3.0]] * 6, jnp.ones((6, 2)), jnp.asarray(np.stack([shares, 1 - shares], 1))
    )
    model = kbr.dynamics.fit_dynamics(
        DENSITY,
        None,
        gram=kbr.experimental.mixture_gram(DENSITY, sets),
        regularizer=0.0,
        times=TIMES,
        form="change",
    )
    coefficients = kbr.dynamics.forecast_coefficients(model, 2, length=0.5)[-1]
    prediction = kbr.experimental.combine_mixtures(sets, coefficients)
    truth = gaussians([3.0, -3.0], [1.0, 1.0], jnp.asarray([0.7, 0.3]))
    close(mixture_distance(DENSITY, prediction, truth), 0, 1e-6)


def test_a_large_regularizer_predicts_nothing_or_the_last_set():
    close(kbr.dynamics.forecast_coefficients(fit(regularizer=1e12))[0], np.zeros(6))
    close(
        kbr.dynamics.forecast_coefficients(fit(regularizer=1e12, form="change"))[0], np.eye(6)[-1]
    )


def test_recency_weights():
    found = kbr.dynamics.recency_weights(4, 0.5)
    close(found, np.array([0.25, 0.5, 1.0]) / (1.75 / 3))


# ---- transformations


@jax.jit
def errors_of(parameters):
    model = kbr.dynamics.fit_dynamics(
        kbr.Gaussian(parameters["bandwidth"]),
        sequence(),
        regularizer=parameters["regularizer"],
        step_weights=parameters["weights"],
    )
    probe = kbr.evaluate(
        kbr.dynamics.extrapolate(model, 2, estimator="ridge"), jnp.asarray(SETS[0][0])
    )
    return (
        jnp.mean(kbr.dynamics.rolling_origin_errors(model))
        + jnp.mean(kbr.dynamics.leave_one_out_errors(model, kernel=G))
        + probe
    )


def test_gradients_by_finite_differences():
    parameters = {
        "bandwidth": jnp.asarray(0.9),
        "regularizer": jnp.asarray(0.05),
        "weights": jnp.asarray(GAMMAS + 0.3),
    }
    check_gradient(errors_of, parameters, steps=1e-5, rtol=1e-6, atol=1e-9)


def test_gradients_are_finite_for_equal_sets_and_single_points():
    def loss(points, lam):
        model = kbr.dynamics.fit_dynamics(
            kbr.Gaussian(1.0),
            kbr.dynamics.sample_sequence(points),
            regularizer=lam,
            step_weights=jnp.zeros(2),
        )
        return (
            jnp.sum(kbr.dynamics.forecast_coefficients(model))
            + jnp.sum(kbr.dynamics.leave_one_out_errors(model))
            + jnp.sum(kbr.dynamics.rolling_origin_errors(model))
        )

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.ones((3, 1, 2)), jnp.asarray(0.0))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


def test_many_sequences_at_once():
    points = jnp.asarray(RNG.normal(size=(3, 4, 5, 2)))

    def predict(points):
        return kbr.dynamics.forecast_coefficients(
            kbr.dynamics.fit_dynamics(G, kbr.dynamics.sample_sequence(points), regularizer=0.1)
        )

    together = jax.jit(jax.vmap(predict))(points)
    for one, expected in zip(points, together, strict=True):
        close(predict(one), expected, 1e-12)


def test_sets_of_one_point_need_a_regularizer():
    sets = kbr.dynamics.sample_sequence(jnp.arange(6.0).reshape(6, 1, 1))
    with pytest.raises(ValueError, match="give a `regularizer`"):
        kbr.dynamics.fit_dynamics(kbr.Gaussian(1.0), sets)


def test_noise_of_weights_of_mixed_sign():
    rng = np.random.default_rng(0)
    points = jnp.asarray(rng.normal(size=(3, 2, 1)))
    weights = jnp.asarray([[2.0, -1.0], [0.5, 0.5], [1.5, -0.5]])
    sets = kbr.dynamics.sample_sequence(points, weights)
    expected = []
    for x, w in zip(np.asarray(points)[..., 0], np.asarray(weights), strict=True):
        gram = np.exp(-((x[:, None] - x) ** 2) / 2)
        v = np.sum(w**2)
        expected.append((np.sum(w) - w @ gram @ w) * v / (1 - v))
    np.testing.assert_allclose(kbr.dynamics.sampling_noise(kbr.Gaussian(1.0), sets), expected)
    assert min(expected) > 0


def test_leaving_out_needs_a_ridge_or_full_rank():
    points = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4, 2)))
    sets = kbr.dynamics.sample_sequence(points)
    model = kbr.dynamics.fit_dynamics(kbr.Linear(), sets, regularizer=0.0)
    with pytest.raises(ValueError, match="positive `regularizer`"):
        kbr.dynamics.leave_one_out_errors(model)
    full = kbr.dynamics.fit_dynamics(kbr.Gaussian(1.0), sets, regularizer=0.0)
    near = kbr.dynamics.fit_dynamics(kbr.Gaussian(1.0), sets, regularizer=1e-10)
    found, expected = map(kbr.dynamics.leave_one_out_errors, (full, near))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_whole_numbers_as_coefficients_and_gram():
    sets = kbr.dynamics.sample_sequence(jnp.asarray(np.arange(12.0).reshape(3, 4, 1)))
    assert kbr.dynamics.combine(kbr.Gaussian(1.0), sets, np.asarray([0, 0, 1])).weights.shape == (
        12,
    )
    model = kbr.dynamics.fit_dynamics(
        kbr.Gaussian(1.0), None, gram=np.eye(3, dtype=int) + 1, regularizer=0.1
    )
    assert np.isfinite(model.coefficients).all()


def test_padding_of_sets_decides_no_default_kernel():
    rng = np.random.default_rng(30)
    samples = [rng.normal(size=n) for n in (40, 3, 3, 3)]
    everything = kbr.kernels.default_kernel(jnp.asarray(np.concatenate(samples)))
    for turn in range(3):
        moved = [samples[0], *(np.roll(one, turn) for one in samples[1:])]
        found = kbr.dynamics.fit_dynamics(
            None, kbr.dynamics.sample_sequence([jnp.asarray(one) for one in moved])
        )
        np.testing.assert_allclose(found.kernel.bandwidth, everything.bandwidth, rtol=1e-6)
    stacked, mask = rng.normal(size=(5, 8, 2)), np.ones((5, 8), bool)
    mask[:, 6:] = False
    stacked[:, 6:] = np.nan  # what stands in padding is not looked at
    found = kbr.dynamics.fit_dynamics(
        None, kbr.dynamics.sample_sequence(jnp.asarray(stacked), mask=jnp.asarray(mask))
    )
    expected = kbr.kernels.default_kernel(jnp.asarray(stacked[:, :6].reshape(-1, 2)))
    np.testing.assert_allclose(found.kernel.bandwidth, expected.bandwidth, rtol=1e-6)


def test_sets_of_one_true_point_do_not_tell_noise():
    rng, kernel = np.random.default_rng(31), kbr.Gaussian(0.7)
    points = jnp.asarray(rng.normal(size=(6, 10, 2)))
    alone = kbr.dynamics.sample_sequence(points, mask=jnp.zeros((6, 10), bool).at[:, 0].set(True))
    with pytest.raises(ValueError, match="give a `regularizer`"):
        kbr.dynamics.fit_dynamics(kernel, alone)
    model = kbr.dynamics.fit_dynamics(kernel, alone, regularizer=0.1)
    with pytest.raises(ValueError, match="estimator='ridge'"):
        kbr.dynamics.extrapolate(model)
    some = kbr.dynamics.sample_sequence([*points[:3, :1], *points[3:]])
    whole = kbr.dynamics.fit_dynamics(
        kernel, kbr.dynamics.sample_sequence(list(points[3:]))
    ).regularizer
    np.testing.assert_allclose(
        kbr.dynamics.fit_dynamics(kernel, some).regularizer, whole, rtol=1e-9
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_sets_without_step_weight_say_nothing(steps):
    """An outlier between steps of weight 0 changes no forecast."""
    rng = np.random.default_rng(0)
    sets = [jnp.asarray(rng.normal(size=30) + 0.3 * t) for t in range(9)]
    weights = jnp.asarray([1.0, 1, 1, 0, 0, 1, 1, 1])
    found = []
    for middle in (sets[4], sets[4] + 50):
        sequence = kbr.dynamics.sample_sequence([*sets[:4], middle, *sets[5:]])
        model = kbr.dynamics.fit_dynamics(G, sequence, step_weights=weights)
        forecast = kbr.dynamics.extrapolate(model, steps)
        found.append(kbr.evaluate(forecast, jnp.linspace(0, 5, 9)))
    np.testing.assert_allclose(*found, atol=0.02)


def test_an_empty_set_of_a_traced_mask_whose_padding_is_nan():
    a = np.random.default_rng(0).normal(size=(5, 4))
    mask = np.ones((5, 4), bool)
    a[3], mask[3] = np.nan, False

    @jax.jit
    def gram(a, mask):
        sets = kbr.dynamics.sample_sequence(a, mask=mask)
        return kbr.dynamics.embedding_gram(kbr.Gaussian(1.0), sets)

    found = gram(a, mask)
    assert np.all(np.isfinite(found)) and np.all(found[3] == 0)


def test_every_set_lies_in_the_domain_of_the_kernel():
    sets = kbr.dynamics.sample_sequence(np.array([[[1.0, 2.0]], [[-1.0, 2.0]]]))
    with pytest.raises(ValueError, match="negative"):
        kbr.dynamics.embedding_gram(kbr.kernels.HistogramIntersection(), sets)


def test_mixtures_at_whole_numbers():
    mixture = kbr.experimental.gaussian_mixture(
        jnp.asarray([[0.0, 0.0], [1.0, 1.0]]), jnp.asarray([0.3, 0.4]), jnp.asarray([0.3, 0.7])
    )
    kernel, grid = 0.5 * kbr.Gaussian(0.7), jnp.asarray([[0, 1], [2, 2], [0, 0]])
    sample = kbr.embed(kbr.Gaussian(1.7), jnp.asarray([[0.5, 0.2], [1.0, -1.0]]))
    for read in (
        lambda points: kbr.experimental.evaluate_mixture(kernel, mixture, points),
        lambda points: kbr.experimental.smoothed_kl(mixture, sample, points),
    ):
        np.testing.assert_allclose(read(grid), read(grid.astype(float)))
