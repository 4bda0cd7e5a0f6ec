"""Conditional embeddings and posteriors that choose their own parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import closeness

import kbr_jax as kbr
from kbr_jax.learning import _conditional, _folds, _forecast, _posterior, _report, _search
from kbr_jax.tuning import condition_adjusted, leave_out_residuals

close = closeness(1e-9, 1e-9)


def pairs(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)) * np.array([1.0, 1.0, 100.0])
    y = np.sin(2 * x[:, :1]) + 0.2 * rng.normal(size=(n, 1))
    return jnp.asarray(x), jnp.asarray(y)


@pytest.fixture(scope="module")
def fast():
    with pytest.MonkeyPatch.context() as patch:
        for module in (_conditional, _posterior):
            for name, value in (("TRIALS", 8), ("REFINEMENTS", 4), ("STEPS", 10)):
                patch.setattr(module, name, value)
        yield


def test_single_precision_in_a_session_of_double_precision(fast):
    x = jax.random.normal(jax.random.key(0), (60, 1), jnp.float32)
    model, _ = kbr.learn_conditional(x, x**2, progress=False)
    assert model.features_x.dtype == jnp.float32
    posterior, _ = kbr.learn_posterior(x[:, 0], x[:, 0] ** 2, progress=False)
    assert kbr.mean(posterior(x[0, 0])).dtype == jnp.float32


def test_points_of_a_prior_without_weight_change_nothing():
    """The first version took the width of its kernel from them."""
    rng = np.random.default_rng(0)
    x, near = (
        jnp.asarray(rng.normal(size=(60, 1))),
        jnp.asarray(0.5 + 0.3 * rng.normal(size=(50, 1))),
    )
    weights = jnp.concatenate([jnp.full(50, 0.02), jnp.zeros(50)])
    wide = kbr.Embedding(kbr.Gaussian(0.3), jnp.concatenate([near, near + 3]), weights)
    alone = kbr.embed(kbr.Gaussian(0.3), near)
    np.testing.assert_allclose(_posterior._shares(wide, x), _posterior._shares(alone, x), atol=1e-3)


def test_a_gradient_that_is_not_finite_ends_the_descent_where_it_began():
    start = {"width": jnp.asarray(2.0)}

    def loss(values):
        return jnp.sqrt(values["width"] - 2.0)

    found = _search.descend(loss, start, optax.adam(0.1), 3)
    assert found == start


@pytest.mark.parametrize("zero", [0.0, 1e4])
def test_linear_regression_is_judged_as_a_forecast(fast, zero):
    """Its mean with left-out residuals. The first version kept the spread of the marginal."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2))
    y = zero + x @ [1.0, -1.0] + 0.5 * rng.normal(size=100)
    report = kbr.learn_conditional(x, y, progress=False)[1]
    basis = np.linalg.qr(np.c_[x, np.ones(100)])[0]
    residuals = (y - basis @ (basis.T @ y)) / (1 - (basis**2).sum(1)) / y.std()
    apart = np.abs(residuals[:, None] - residuals)
    off = ~np.eye(100, dtype=bool)
    # Of each forecast the 99 others are the atoms.
    inner = np.array([apart[np.ix_(row, row)].mean() for row in off])
    expected = (apart.sum(1) / 99 - inner / 2).mean()
    np.testing.assert_allclose(report.errors["linear regression"][0], expected, rtol=1e-2)
    assert any("linear regression" in note for note in report.notes)


def test_learned_conditional(fast):
    x, y = pairs(200)
    model, report = kbr.learn_conditional(x, y, progress=False)
    new_x, new_y = pairs(300, 1)
    error = jnp.sqrt(jnp.mean((kbr.mean(kbr.condition(model, new_x)) - new_y) ** 2))
    assert float(error) < 0.35  # the noise is .2, the signal .7
    own, other = report.errors["conditional embedding"][0], report.errors["nearest neighbors"][0]
    assert own < 0.8 * other < report.errors["marginal of y"][0]
    # The coordinates without signal get the widest bandwidths.
    widths = np.asarray(report.chosen["bandwidth_x"])
    assert widths[0] < 0.5 * widths[1:].min()
    # What the report says of intervals is true of new pairs.
    residuals = leave_out_residuals(model)
    adjusted = jax.vmap(lambda point: condition_adjusted(model, residuals, point))(new_x)
    for nominal, share in report.coverage.items():
        low, high = jax.vmap(lambda one, u=nominal: kbr.credible_interval(one, u))(adjusted)
        assert abs(share - jnp.mean((low <= new_y) & (new_y <= high))) < 0.1
        assert abs(share - nominal) < 0.2
    assert "energy scores" in str(report)


def test_learned_conditional_scores_are_those_of_refits(fast):
    x, y = pairs(20)
    model, report = kbr.learn_conditional(x, y, regularizer=1e-2, progress=False)
    measure = kbr.kernels.Energy(jnp.mean(y, axis=0), kbr.kernels.coordinate_scale(y))
    total = 0.0
    for i in range(20):
        rest = np.delete(np.arange(20), i)
        part = kbr.fit_conditional(
            model.kernel_x, model.kernel_y, x[rest], y[rest], regularizer=1e-2
        )
        total += float(kbr.regression_loss(part, x[i][None], y[i][None], kernel=measure)) / 20
    close(report.errors["conditional embedding"][0], total, 1e-7)
    close(model.regularizer, 1e-2)


def test_learned_conditional_of_labels(fast):
    x, y = pairs(100)
    labels = (y[:, 0] > 0).astype(int)
    model, report = kbr.learn_conditional(x, labels, progress=False)
    assert isinstance(model.kernel_y, kbr.Delta)
    own, marginal = report.errors["conditional embedding"][0], report.errors["marginal of y"][0]
    assert own < 0.6 * marginal and report.coverage == {}
    assert "Brier" in str(report)
    backward, _ = kbr.learn_conditional(labels, y, progress=False)
    means = kbr.mean(kbr.condition(backward, jnp.asarray([0, 1])))
    assert float(means[0, 0]) < 0 < float(means[1, 0])


def test_coverage_is_that_of_adjusted_atoms_of_refits():
    """Where many weights sum to less than 1/2, too; any number of pairs is seen."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.lognormal(size=33) * 2)
    y = x + jnp.asarray(rng.normal(size=33)) / 3
    model, report = kbr.learn_conditional(
        x, y, kernel_x=kbr.Gaussian(0.3), regularizer=1e-2, progress=False
    )
    own, _ = report.errors["conditional embedding"]
    np.testing.assert_allclose(own, kbr.leave_out_loss(model), rtol=1e-6)
    held = []
    residuals = leave_out_residuals(model, y)
    for i in range(33):
        rest = np.delete(np.arange(33), i)
        part = kbr.fit_conditional(
            model.kernel_x, model.kernel_y, x[rest], y[rest], regularizer=33 / 32 * 1e-2
        )
        found = condition_adjusted(part, residuals[rest], x[i])
        low, high = kbr.credible_interval(found, 0.8)
        held.append(bool(low <= y[i] <= high))
    assert abs(np.mean(held) - report.coverage[0.8]) < 0.04


def test_real_parts_of_a_tuple_have_bandwidths(fast):
    x, y = pairs(60)
    labels = jnp.arange(60) % 2
    table = (x[:, 0], labels, x)
    y = jnp.sin(4 * x[:, 0]) * (2 * labels - 1).astype(x.dtype)
    model, report = kbr.learn_conditional(table, y, progress=False)
    assert sorted(report.chosen) == ["bandwidth_x, part 0", "bandwidth_x, part 2", "regularizer"]
    first, middle, last = model.kernel_x.kernels
    assert isinstance(middle, kbr.Delta)
    assert first.bandwidth.shape == () and last.bandwidth.shape == x.shape[1:]
    plain = kbr.fit_conditional(None, None, table, y, regularizer=report.chosen["regularizer"])
    assert kbr.leave_out_loss(model) < 0.9 * kbr.leave_out_loss(plain)


def test_adjusted_atoms_by_hand():
    x, y = pairs(15)
    kernel = kbr.Gaussian(jnp.array([0.5, 1.0, 100.0]))
    model = kbr.fit_conditional(kernel, None, x, y, regularizer=1e-2)
    residuals = leave_out_residuals(model, y)
    found = condition_adjusted(model, residuals, x[0] + 0.1)
    weights = np.asarray(kbr.condition(model, x[0] + 0.1).weights)
    mass = weights.sum()
    near = np.clip(2 * mass, 0, 1)
    close(found.points[:15], weights @ np.asarray(y) / mass + np.asarray(residuals))
    close(found.points[15:], y)
    close(found.weights, np.append(near * weights / mass, np.full(15, (1 - near) / 15)))
    for step in (0.5, 2.0, 4.0):  # on the way out, where weights may cancel
        between = condition_adjusted(model, residuals, x[0] + step)
        close(jnp.sum(between.weights), 1.0)
        assert float(jnp.max(jnp.abs(between.points))) < 4 * float(jnp.max(jnp.abs(y)))
    far = condition_adjusted(model, residuals, x[0] + 1e4)
    close(kbr.quantile(far, 0.3), kbr.quantile(kbr.embed(None, y), 0.3))
    with pytest.raises(ValueError, match="`residuals` has shape"):
        condition_adjusted(model, residuals[:3], x[0])
    with pytest.raises(ValueError, match="must be one point"):
        condition_adjusted(model, residuals, x)


def test_adjusted_intervals_hold_what_they_say():
    """Within a wide kernel the mean moves, and intervals of `condition` are too wide by that."""
    rng = np.random.default_rng(0)

    def simulated(n):
        theta = rng.uniform(0, 3, (n, 1))
        noise = (0.1 + 0.3 * np.abs(theta - 1.5)) * rng.normal(size=(n, 1))
        return jnp.asarray(theta), jnp.asarray(theta + noise)

    theta, seen = simulated(500)
    model = kbr.fit_conditional(kbr.Gaussian(1.2), None, seen, theta, regularizer=1e-3)
    residuals = leave_out_residuals(model, theta)
    truth, queries = simulated(1000)

    def share(low, high):
        return float(jnp.mean((low <= truth) & (truth <= high)))

    plain = kbr.credible_interval(kbr.condition(model, queries), 0.8)
    adjusted = jax.vmap(
        lambda o: kbr.credible_interval(condition_adjusted(model, residuals, o), 0.8)
    )
    low, high = jax.jit(adjusted)(queries)
    assert share(*plain) > 0.85
    assert 0.75 < share(low, high) < 0.85
    assert float(jnp.mean(high - low)) < 0.8 * float(jnp.mean(plain[1] - plain[0]))
    # Where nothing was simulated the interval is the prior's, not a point of width 0.
    low, high = kbr.credible_interval(
        condition_adjusted(model, residuals, jnp.asarray([30.0])), 0.8
    )
    assert float(low[0]) < 0.5 and float(high[0]) > 2.5


def test_bandwidths_do_not_learn_noise():
    """With a bandwidth for each of many columns leave-one-out fell far below the marginal."""
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(550, 30))), jnp.asarray(rng.normal(size=550))
    model, report = kbr.learn_conditional(x[:50], y[:50], progress=False)
    found, marginal = (
        report.errors[name][0] for name in ("conditional embedding", "marginal of y")
    )
    assert found > 0.9 * marginal
    forecasts = kbr.condition(model, x[50:])
    new = kbr.mean(forecasts) * forecasts.mass
    assert float(jnp.mean((y[50:] - new) ** 2)) < 1.25 * float(jnp.var(y[50:]))
    assert "pairs of your own" in str(report)


def test_steps_down_one_loss_that_help_the_other():
    def loss(aim, values):
        return (jnp.log(values["width"]) - aim) ** 2

    def steps(*aims):
        one, other = (jax.tree_util.Partial(loss, jnp.asarray(aim)) for aim in aims)
        start = {"width": jnp.asarray(1.0)}
        return _search.steps_that_help(
            [(one, other), (other, one)], start, _conditional.OPTIMIZER, 40
        )

    assert steps(1.0, -1.0) == 0
    assert 2 <= steps(0.3, 0.5) <= 8
    assert steps(8.0, 9.0) == 39
    assert steps(jnp.nan, 1.0) == 0


def posterior_pairs(n=150):
    rng = np.random.default_rng(3)
    x = rng.uniform(-4, 4, size=(n, 1))
    return jnp.asarray(x), jnp.asarray(x**2 / 4 + 0.3 * rng.normal(size=(n, 1)))


@pytest.mark.parametrize("learn", [kbr.learn_conditional, kbr.learn_posterior])
def test_a_constant_sample_is_named(learn, fast):
    x = jnp.asarray(np.random.default_rng(0).normal(size=60))
    with pytest.warns(UserWarning, match="All points of `y` are equal") as found:
        learn(x, jnp.full(60, 3.0), progress=False)
    assert len(found) == 1


def test_learned_posterior(fast):
    """Two values of x explain y = 1, and the prior says which."""
    x, y = posterior_pairs()
    prior = 1.5 + 0.7 * jax.random.normal(jax.random.key(0), (100, 1))
    posterior, report = kbr.learn_posterior(x, y, prior=prior, progress=False)
    grid = np.linspace(-4, 6, 4001)
    density = np.exp(-((grid - 1.5) ** 2) / 0.98 - (1 - grid**2 / 4) ** 2 / 0.18)
    exact = grid @ density / density.sum()
    found = kbr.mean(posterior(jnp.asarray([1.0])))
    assert abs(float(found[0]) - exact) < 0.25
    assert report.errors["posterior"][0] < 0.7 * report.errors["prior"][0]
    batch = posterior(jnp.asarray([[1.0], [0.5]]))
    close(kbr.mean(batch)[0], found, 1e-7)
    expected = kbr.bayes_rule(
        posterior.model,
        posterior.prior,
        jnp.asarray([1.0]),
        regularizer=posterior.regularizer,
        estimator=posterior.estimator,
    )
    close(posterior(jnp.asarray([1.0])).weights, expected.weights / posterior.mass)


@pytest.mark.parametrize("given", [True, False])
def test_learned_posteriors_have_a_mass_near_one(given, tmp_path):
    """With a large regularizer all masses were so small that intervals were NaN."""
    x, y = posterior_pairs()
    prior = 1.5 + 0.7 * jax.random.normal(jax.random.key(0), (100, 1)) if given else None
    fixed = {"bandwidth_x": 0.3, "bandwidth_y": 0.3, "regularizer": 1e-3}
    posterior, _ = kbr.learn_posterior(
        x, y, prior=prior, progress=False, posterior_regularizer=300.0, **fixed
    )
    new = jnp.linspace(0.3, 1.5, 20)[:, None]
    assert np.all(np.isfinite(kbr.credible_interval(posterior(new), 0.8)))
    assert 0.5 < float(jnp.median(posterior(new).mass)) < 2
    assert float(posterior(jnp.asarray([50.0])).mass) < 1e-3
    kbr.save(tmp_path / "posterior", posterior)
    restored = kbr.load(tmp_path / "posterior")
    np.testing.assert_array_equal(restored(new).weights, posterior(new).weights)


def test_learned_posterior_of_labels(fast):
    x, y = posterior_pairs()
    labels = (x[:, 0] > 1).astype(int)
    posterior, report = kbr.learn_posterior(labels, y, progress=False, regularizer=1e-3)
    assert report.coverage == {} and "bandwidth_x" not in report.chosen
    close(posterior.model.regularizer, 1e-3)


def test_a_prior_elsewhere_is_refused():
    """The first version answered with the posterior of a flat prior."""
    x, y = posterior_pairs()
    model = kbr.fit_conditional(kbr.Gaussian(0.5), kbr.Gaussian(0.3), x, y, regularizer=1e-4)
    prior = kbr.embed(kbr.Gaussian(0.5), 30 + x[:20])
    for estimator in ("pairs", "prior", "importance"):
        with pytest.raises(ValueError, match=r"Of the `prior` .* lies on the training x"):
            kbr.bayes_rule(model, prior, y[0], regularizer=1e-3, estimator=estimator)
    filt = kbr.fit_filter(None, None, x, y, regularizer=1e-3, posterior_regularizer=1e-4)
    with pytest.raises(ValueError, match=r"Of the `prior`"):
        kbr.run_filter(filt, y[:3], prior=prior)
    with pytest.raises(ValueError, match=r"Of the `prior`"):
        kbr.learn_posterior(x, y, prior=30 + x[:20], progress=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: kbr.learn_conditional(x[:5], y[:5]), "at least 10 pairs"),
        (lambda x, y: kbr.learn_conditional(x, y[:50]), "`y`"),
        (lambda x, y: kbr.learn_conditional(x, y, regularizer=-1.0), "must be positive"),
        (lambda x, y: kbr.learn_posterior(x[:20], y[:20]), "at least 50 pairs"),
        (lambda x, y: kbr.learn_posterior(x, y, bandwidth=1.0), "`bandwidth` is not a parameter"),
        (lambda x, y: kbr.learn_posterior(x, y, prior=x[:, 0]), "`prior`"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(*posterior_pairs())


def test_no_chosen_regularizer_is_below_the_rounding():
    values = {"posterior_regularizer": jnp.float32(1e-9), "bandwidth_x": jnp.float32(1e-9)}
    found = _search.resolvable(values)
    assert found["posterior_regularizer"] > jnp.finfo("float32").eps
    assert found["bandwidth_x"] == values["bandwidth_x"]


def test_forecasts_do_not_depend_on_the_origin_of_y():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(-3, 3, size=150))
    y = jnp.sin(x) + 0.1 * jnp.asarray(rng.normal(size=150))

    def ends(offset):
        model = kbr.fit_conditional(kbr.Gaussian(0.5), None, x, y + offset, regularizer=1e-2)
        residuals = leave_out_residuals(model)
        adjusted = condition_adjusted(model, residuals, jnp.asarray(1.5))

        def fit(values):
            return kbr.fit_conditional(kbr.Gaussian(0.5), None, x, values, regularizer=1e-2)

        forecast = _forecast.located_forecast(fit, y + offset)
        levels = jnp.asarray([0.05, 0.5, 0.95])
        read = [kbr.quantile(b, levels) - offset for b in (adjusted, forecast(jnp.asarray(1.5)))]
        return np.stack(read)

    np.testing.assert_allclose(ends(300.0), ends(0.0), atol=1e-6)


def test_shares_of_a_prior_narrower_than_the_training_points():
    """With the kernel of the training points the weighted pairs had twice the prior's spread."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(-3, 3, size=300))
    prior = kbr.embed(kbr.Gaussian(1.0), jnp.asarray(0.8 + 0.4 * rng.normal(size=150)))
    shares = _posterior._shares(prior, x)
    mean = float(shares @ x)
    np.testing.assert_allclose(mean, 0.8, atol=0.1)
    np.testing.assert_allclose(np.sqrt(shares @ (x - mean) ** 2), 0.4, atol=0.08)


def test_rivals_do_not_depend_on_the_origin_of_the_states():
    rng = np.random.default_rng(0)
    states = np.zeros((120, 1))
    for t in range(1, 120):
        states[t] = 0.9 * states[t - 1] + 0.3 * rng.normal(size=1)
    seen = jnp.asarray(np.hstack([states, states**2]) + 0.1 * rng.normal(size=(120, 2)))

    def errors(offset):
        folds = _folds.make_folds(jnp.asarray(states + offset), seen, None)
        return [float(jnp.mean(found)) for found in _report.regressions(folds, None).values()]

    np.testing.assert_allclose(errors(1000.0), errors(0.0), rtol=1e-4)


def test_distances_far_from_the_origin():
    x = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    close(_folds.distances(x + 1e4, x + 1e4), _folds.distances(x, x), 3e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: kbr.learn_posterior(x, y, kernel_x=kbr.Gaussian(0.7), bandwidth_x=5.0),
        lambda x, y: kbr.learn_posterior((x[:, 0] > 0).astype(int), y, bandwidth_x=5.0),
        lambda x, y: kbr.learn_filter(x, y, kernel_states=kbr.Gaussian(0.7), bandwidth_states=5.0),
    ],
)
def test_a_bandwidth_beside_a_kernel(call):
    with pytest.raises(
        ValueError, match=r"`bandwidth_x` is that of|or `bandwidth_states`, not both"
    ):
        call(*posterior_pairs())


def test_features_of_few_steps_are_trained():
    x = jax.random.normal(jax.random.key(0), (100, 2))
    start = eqx.nn.MLP(2, 4, 8, 1, jnp.tanh, jnp.tanh, key=jax.random.key(1))
    found, course = kbr.learning.learn_features(
        start, x, x[:, 0] ** 2, num_steps=2, num_pairs=40, key=jax.random.key(2), progress=False
    )
    assert np.isfinite(course.history.validation).sum() >= 2
    assert course.step > 0 or jax.tree.all(jax.tree.map(np.array_equal, found, start))


def test_rivals_of_a_posterior_read_y_in_units_and_a_prior_of_integers(fast):
    rng = np.random.default_rng(0)
    x = rng.normal(size=100)
    y = np.stack([x + 0.1 * rng.normal(size=100), 100 * rng.normal(size=100)], axis=1)
    fixed = {"bandwidth_x": 0.3, "regularizer": 1e-3, "posterior_regularizer": 1e-4}
    _, report = kbr.learn_posterior(
        x, y, prior=np.array([-1, 0, 1]), progress=False, bandwidth_y=0.3, **fixed
    )
    assert report.errors["nearest neighbors"][0] < 0.5 * report.errors["prior"][0]


@pytest.mark.parametrize("prior", [0.0508, 0.0])
def test_a_prior_narrower_than_the_spacing(prior, fast):
    rng = np.random.default_rng(0)
    x = np.linspace(-3, 3, 60)
    y = x + 0.3 * rng.normal(size=60)
    fixed = {"bandwidth_x": 0.3, "bandwidth_y": 0.3, "regularizer": 1e-3}
    points = x[30] + prior + 0.001 * rng.normal(size=50)
    _, report = kbr.learn_posterior(
        x, y, prior=points, posterior_regularizer=1e-4, progress=False, **fixed
    )
    assert np.all(np.isfinite(list(report.errors.values())))


def test_few_pairs_of_features_need_no_number():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(60, 2)))
    net = eqx.nn.MLP(2, 4, 4, 1, jnp.tanh, jnp.tanh, key=jax.random.key(1))
    found, _ = kbr.learning.learn_features(
        net, x, x[:, 0], num_steps=2, key=jax.random.key(2), progress=False
    )
    assert np.all(np.isfinite(found(x[0])))


def test_levels_of_a_report_are_those_of_its_intervals():
    """Of weights of any sign."""
    rng = np.random.default_rng(4)
    weights = jnp.asarray(rng.normal(size=(60, 20)) + 0.3)
    units = np.array([1e15, 1.0])
    values, truth = (jnp.asarray(rng.normal(size=(n, 2)) * units) for n in (20, 60))
    levels = _conditional.central_levels(weights, values, truth)
    found = kbr.Embedding(kbr.Gaussian(1.0), values, weights)
    for level in (0.5, 0.8, 0.95):
        low, high = kbr.credible_interval(found, level)
        np.testing.assert_array_equal(levels <= level, (low <= truth) & (truth <= high))


def test_errors_of_a_report_are_those_of_a_weighted_mean():
    """Shares that vary are no error of a score that does not."""
    rng = np.random.default_rng(4)
    shares = rng.exponential(size=50)
    shares = shares / shares.sum()
    scores = {"model": np.full(50, 0.3), "rival": rng.normal(size=50)}
    summary, _ = _report.compared(scores, shares)
    assert summary["model"][0] == pytest.approx(0.3) and summary["model"][1] < 1e-12
    assert np.isnan(_report.compared(scores, np.eye(50)[0])[0]["rival"][1])
    plain, _ = _report.compared(scores)
    assert _report.compared(scores, np.full(50, 0.02))[0] == plain
    assert plain["rival"][1] == pytest.approx(scores["rival"].std(ddof=1) / 50**0.5)
