"""Rules and filters on moments: equal to the sample on the same landmarks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import closeness

import kbr_jax as kbr
from kbr_jax.rules._active import active

KX, KY = kbr.Gaussian(0.6), kbr.Gaussian(0.9)
N, P, Q = 60, 12, 10


def sequence(length, seed=0):
    """A noisy walk on a circle and its noisy observations."""
    rng = np.random.default_rng(seed)
    angle = np.cumsum(0.3 + 0.2 * rng.normal(size=length))
    states = np.stack([np.cos(angle), np.sin(angle)], 1)
    return jnp.asarray(states), jnp.asarray(states[:, :1] + 0.2 * rng.normal(size=(length, 1)))


STATES, OBSERVATIONS = sequence(N + 1)
X, Y, NEXT = STATES[:-1], OBSERVATIONS[:-1], STATES[1:]
NEW = sequence(15, seed=1)[1]
LX, LY = kbr.greedy_landmarks(KX, X, rank=P), kbr.greedy_landmarks(KY, Y, rank=Q)
PRIOR = kbr.embed(KX, X[:7], jnp.linspace(0.3, -0.1, 7))


def every_point_a_cell():
    return kbr.soft_partition(KX, kbr.Landmarks(X), temperature=1e-9)


close = closeness(1e-8, 1e-8)


def moment_model(cells=None):
    return kbr.moments.fit_conditional(
        kbr.moments.collect_moments(
            kbr.moments.moment_maps(KX, KY, LX, LY, cells=cells), X, Y, block_size=17
        ),
        regularizer=1e-3,
    )


def weights_model():
    return kbr.fit_conditional(KX, KY, X, Y, regularizer=1e-3, landmarks_x=LX, landmarks_y=LY)


def in_span(embedding, kernel, landmarks):
    """Values at the landmarks: what an embedding is within their span."""
    return kbr.evaluate(
        kbr.Embedding(kernel, embedding.points, embedding.weights), landmarks.points
    )


def joint_in_span(joint):
    """A joint embedding at all pairs of landmarks."""
    gx = kbr.gram(joint.kernel_x, LX.points if joint.x.shape[1] == 2 else LY.points, joint.x)
    gy = kbr.gram(joint.kernel_y, LY.points, joint.y)
    weights = jnp.diag(joint.weights) if joint.paired else joint.weights
    return gx @ weights @ gy.T


def test_sums_are_sums():
    cells = kbr.soft_partition(KX, LX)
    moments = kbr.moments.collect_moments(
        kbr.moments.moment_maps(KX, KY, LX, LY, cells=cells, shift=True), X, Y, NEXT
    )
    phi, following, psi = (
        moments.maps.x.coordinates(X),
        moments.maps.x.coordinates(NEXT),
        moments.maps.y.coordinates(Y),
    )
    psi1 = np.concatenate([psi, np.ones((N, 1))], 1)
    a = cells.assign(X)
    close(jnp.sum(a, 1), 1)
    close(moments.count, N)
    close(moments.covariance, phi.T @ phi)
    close(moments.mass, a.sum(0))
    close(moments.pairs, phi.T @ psi)
    c = np.linspace(-1, 1, P)
    close(moments.operator(jnp.asarray(c)), np.einsum("k,ik,ia,ib->ab", c, a, psi, psi))
    close(moments.embedding, np.einsum("ik,iq,ip->kqp", a, psi1, phi))
    close(moments.transition, np.einsum("ik,iq,ip->kqp", a, psi1, following))
    close(
        moments.readout,
        np.einsum("ik,iq,ip->kqp", a, psi1, np.concatenate([X - LX.points[0], np.ones((N, 1))], 1)),
    )


def test_a_function_that_is_not_finite_at_a_landmark():
    x = jnp.asarray(np.random.default_rng(0).uniform(0.1, 3, size=50))
    landmarks = kbr.Landmarks(jnp.linspace(0, 3, 10))
    maps = kbr.moments.moment_maps(KX, KX, landmarks, landmarks, function=jnp.log)
    assert jnp.isfinite(kbr.moments.collect_moments(maps, x, x).readout).all()


@pytest.mark.parametrize("cells", [None, "every point"])
def test_rules_equal_the_weights_form(cells):
    model, reference = moment_model(cells and every_point_a_cell()), weights_model()
    close(
        kbr.evaluate(kbr.sum_rule(model, PRIOR), LY.points),
        kbr.evaluate(kbr.sum_rule(reference, PRIOR), LY.points),
    )
    for estimator in ("prior", "pairs"):
        close(
            joint_in_span(kbr.chain_rule(model, PRIOR, estimator=estimator)),
            joint_in_span(kbr.chain_rule(reference, PRIOR, estimator=estimator)),
        )
        clipping = kbr.Clipping(truncation=0.05) if cells else NORMALIZED
        options = dict(regularizer=1e-4, estimator=estimator, clipping=clipping)
        ours, theirs = (
            kbr.bayes_rule(model, PRIOR, NEW, **options),
            kbr.bayes_rule(reference, PRIOR, NEW, **options),
        )
        close(in_span(ours, KX, LX), in_span(theirs, KX, LX))
    for x in (X[3], X[:4]):
        close(
            kbr.evaluate(kbr.condition(model, x), LY.points),
            kbr.evaluate(kbr.condition(reference, x), LY.points),
        )


def test_importance_weights_need_cells():
    model, reference = moment_model(every_point_a_cell()), weights_model()
    clipping = kbr.Clipping(truncation=0.0)
    options = dict(regularizer=1e-4, estimator="importance", clipping=clipping)
    ours, theirs = (kbr.bayes_rule(m, PRIOR, NEW[0], **options) for m in (model, reference))
    close(in_span(ours, KX, LX), in_span(theirs, KX, LX))
    with pytest.raises(ValueError, match="soft_partition"):
        kbr.bayes_rule(moment_model(), PRIOR, NEW[0], **options)
    with pytest.raises(ValueError, match="soft_partition"):
        kbr.bayes_rule(moment_model(), PRIOR, NEW[0], regularizer=1e-4)
    with pytest.raises(ValueError, match="cannot clip"):
        moment_filter(clipping=kbr.Clipping())


NORMALIZED = kbr.Clipping(False, 0.0)


def moment_filter(
    cells=None,
    sequence=(STATES, OBSERVATIONS),
    kernel=KX,
    landmarks=(LX, LY),
    shift=True,
    ridge=1e-3,
    mask=None,
    **options,
):
    """The filter on moments, made of an emission and (without `shift`) a transition model."""
    s, o, s_next = sequence[0][:-1], sequence[1][: len(sequence[0]) - 1], sequence[0][1:]
    maps = kbr.moments.moment_maps(kernel, KY, *landmarks, cells=cells, shift=True)
    emission = kbr.moments.collect_moments(maps, s, o, s_next, mask=mask)
    transition = None
    if not shift:
        maps = kbr.moments.moment_maps(kernel, kernel, landmarks[0], landmarks[0])
        transition = kbr.moments.collect_moments(maps, s, s_next, mask=mask)
        transition = kbr.moments.fit_conditional(transition, regularizer=ridge)
    clipping = NORMALIZED if cells is None else kbr.Clipping()
    return kbr.KernelBayesFilter(
        kbr.moments.fit_conditional(emission, regularizer=1e-3),
        transition,
        shift=shift,
        **{"regularizer": 1e-3, "clipping": clipping, **options},
    )


def sample_filter(shift=True, ridge=1e-3, landmarks=(LX, LY), **options):
    emission = kbr.fit_conditional(
        KX, KY, X, Y, regularizer=1e-3, landmarks_x=landmarks[0], landmarks_y=landmarks[1]
    )
    transition = kbr.fit_conditional(
        KX, KX, X, NEXT, regularizer=ridge, landmarks_x=landmarks[0], landmarks_y=landmarks[0]
    )
    return kbr.KernelBayesFilter(emission, transition, regularizer=1e-3, shift=shift, **options)


def weights_of(filt, run):
    return kbr.moments.moment_weights(filt.emission, run.weights, X, Y)


@pytest.mark.parametrize("start", ["prior", "marginal"])
@pytest.mark.parametrize(
    ("kind", "shift"), [("plain", True), ("plain", False), ("cells", True), ("importance", False)]
)
def test_filter_equals_the_sample_form(kind, shift, start):
    if kind == "plain":
        ours = moment_filter(shift=shift)
        theirs = sample_filter(shift=shift, clipping=NORMALIZED)
    else:
        estimator = "importance" if kind == "importance" else "pairs"
        options = {"shift": shift, "ridge": 1e-2, "estimator": estimator}
        ours, theirs = moment_filter(every_point_a_cell(), **options), sample_filter(**options)
    observed = jnp.arange(15) % 5 != 3
    # Without a prior both forms start from the same uniform weights.
    prior = kbr.embed(KX, X) if start == "prior" else None
    steps = kbr.run_filter(ours, NEW, observed=observed, prior=prior)
    expected = kbr.run_filter(theirs, NEW, observed=observed, prior=prior)
    close(weights_of(ours, steps), expected.weights)
    close(steps.predictive_value, expected.predictive_value)
    close(kbr.state_mean(ours, steps), kbr.state_mean(theirs, expected))
    belief = kbr.belief(ours, steps)
    if kind == "plain":
        close(in_span(belief, KX, LX), in_span(kbr.belief(theirs, expected), KX, LX))
    else:
        order = jnp.argmin(jnp.abs(belief.points[:, None] - X[None]).sum(-1), axis=0)
        close(belief.weights[:, order], expected.weights)


def test_random_fourier_features():
    draws = [
        kbr.random_fourier(k, d, rank=20, key=jax.random.key(0)) for k, d in ((KX, 2), (KY, 1))
    ]
    ours = moment_filter(landmarks=draws)
    theirs = sample_filter(clipping=NORMALIZED, landmarks=draws)
    steps, expected = (kbr.run_filter(filt, NEW, prior=PRIOR) for filt in (ours, theirs))
    close(kbr.state_mean(ours, steps), kbr.state_mean(theirs, expected))
    with pytest.raises(ValueError, match="use landmarks for this variable"):
        kbr.belief(ours, steps)


def test_max_active_is_exact_while_truncation_leaves_fewer():
    cells, prior = kbr.soft_partition(KX, LX), kbr.embed(KX, X[:2])
    steps, same = (
        kbr.run_filter(moment_filter(cells, max_active=k), NEW, prior=prior) for k in (None, 10)
    )
    assert 1 < int(jnp.sum(steps.predicted > 0, axis=1).max()) <= 10
    close(same.predicted, steps.predicted)


def test_max_active_takes_cells_of_a_flat_prior_that_stand_for_all():
    cells = every_point_a_cell()
    clipping = kbr.Clipping(truncation=0.0, normalize=False)
    few, full = (moment_filter(cells, max_active=k, clipping=clipping) for k in (20, None))
    code = kbr.gram(KY, NEW[:1], LY.points) @ jnp.linalg.inv(kbr.gram(KY, LY.points, LY.points))
    likelihood = kbr.gram(KY, Y, LY.points) @ code[0]
    state = kbr.init_filter(few)
    masses = few.emission.mass(few.prior(state))
    index, shares = active(masses, jnp.maximum(likelihood, 0), 20)
    chosen = jnp.zeros(N).at[index].set(1 / shares)
    other = eqx.tree_at(lambda s: s.weights, state, chosen / N)
    one, two = (kbr.filter_step(filt, s, NEW[0]) for filt, s in ((few, state), (full, other)))
    close(one[1].weights.update, two[1].weights.update)
    close(one[0].weights, two[0].weights)


def test_where_clipping_leaves_nothing_all_points_weigh_the_same():
    negative, options = (
        kbr.embed(KX, X[:1], jnp.asarray([-1.0])),
        {
            "regularizer": 1e-3,
            "clipping": kbr.Clipping(True, 0.0, False),
        },
    )
    for estimator in ("pairs", "importance"):
        ours = kbr.bayes_rule(
            moment_model(every_point_a_cell()), negative, NEW[:3], estimator=estimator, **options
        )
        expected = kbr.bayes_rule(
            weights_model(), negative, NEW[:3], estimator=estimator, **options
        )
        close(in_span(ours, KX, LX), in_span(expected, KX, LX))


def test_a_filter_of_padding_alone_is_finite():
    for cells in (None, kbr.soft_partition(KX, LX)):
        filt = moment_filter(cells, mask=jnp.zeros(N, bool))
        assert np.all(np.isfinite(kbr.init_filter(filt).weights))
        assert np.all(np.isfinite(kbr.run_filter(filt, NEW).predicted))


def test_an_observation_that_the_belief_excludes_counts_as_missing():
    kernel, labels = kbr.Delta(), jnp.repeat(jnp.arange(3), 20)  # seen as they are, and stay
    landmarks = kbr.greedy_landmarks(kernel, labels, rank=3)
    cells = kbr.soft_partition(kernel, landmarks, temperature=1e-9)
    maps = kbr.moments.moment_maps(
        kernel, kernel, landmarks, landmarks, cells=cells, function=lambda x: x.astype(float) + 10
    )
    model = kbr.moments.fit_conditional(
        kbr.moments.collect_moments(maps, labels, labels), regularizer=1e-5
    )
    filt = kbr.KernelBayesFilter(model, model, regularizer=1e-4, estimator="importance")
    run = kbr.run_filter(filt, jnp.asarray([0, 0, 1, 0]))
    assert run.predictive_value[2] == 0
    np.testing.assert_allclose(model.total(run.weights), 1, atol=1e-2)
    np.testing.assert_allclose(kbr.state_mean(filt, run).reshape(-1), 10, atol=1e-3)


def test_a_belief_without_mass_has_no_mean():
    model = moment_model()
    belief = model.unchanged(jnp.zeros(model.moments.readout.shape[0]))
    assert np.all(np.isnan(model.mean_x(belief)))


def test_prediction_is_a_step_without_observation():
    for filt in (moment_filter(), moment_filter(kbr.soft_partition(KX, LX))):
        steps = kbr.run_filter(filt, NEW, observed=jnp.arange(15) < 13)
        run = kbr.run_filter(filt, NEW[:13])
        close(kbr.predict(filt, run, 2).weights.prior[-1], steps.weights.prior[-1])
        close(kbr.state_mean(filt, kbr.predict(filt, steps)).shape, (15, 2))


def test_divided_samples_give_the_same_moments():
    maps = kbr.moments.moment_maps(KX, KY, LX, LY, cells=kbr.soft_partition(KX, LX), shift=True)
    whole = kbr.moments.collect_moments(maps, X, Y, NEXT)
    halves = kbr.moments.merge_moments(
        *(
            kbr.moments.collect_moments(maps, X[s], Y[s], NEXT[s])
            for s in (slice(25), slice(25, None))
        )
    )
    chunks = kbr.moments.collect_moments(
        maps, ((X[i : i + 25], Y[i : i + 25], NEXT[i : i + 25]) for i in range(0, N, 25))
    )
    padded = [jnp.concatenate([a, 7 * jnp.ones_like(a[:9])]) for a in (X, Y, NEXT)]
    masked = kbr.moments.collect_moments(maps, *padded, mask=jnp.arange(N + 9) < N)
    blocks = [kbr.moments.collect_moments(maps, X, Y, NEXT, block_size=b) for b in (1, 7, 1000)]
    for other in (halves, chunks, masked, *blocks):
        jax.tree.map(close, whole, other)


def test_online_learning_equals_learning_at_once():
    moments = moment_filter(sequence=(STATES[:41], OBSERVATIONS[:41])).emission.moments
    new = kbr.moments.collect_moments(moments.maps, X[40:], Y[40:], NEXT[40:])
    merged = kbr.moments.merge_moments(moments, new)
    emission = kbr.moments.fit_conditional(merged, regularizer=1e-3)
    learned = kbr.KernelBayesFilter(
        emission, None, regularizer=1e-3, shift=True, clipping=NORMALIZED
    )
    whole = moment_filter()
    close(kbr.run_filter(learned, NEW).predicted, kbr.run_filter(whole, NEW).predicted)


def test_moments_of_other_maps_are_not_merged():
    moments = moment_filter().emission.moments
    other = moment_filter(kernel=kbr.Gaussian(0.61)).emission.moments
    with pytest.raises(ValueError, match="same `MomentMaps`"):
        kbr.moments.merge_moments(moments, other)


def test_pairs_that_the_sums_cannot_hold_are_not_lost_without_a_word():
    kernel, x = kbr.Gaussian(1.0), np.linspace(0, 1, 8, dtype=np.float32)
    landmarks = kbr.uniform_landmarks(x, rank=3, key=jax.random.key(0))
    maps = kbr.moments.moment_maps(kernel, kernel, landmarks, landmarks)
    moments = kbr.moments.collect_moments(maps, x, x)
    assert moments.count.dtype == jnp.float32
    many = eqx.tree_at(lambda m: m.count, moments, jnp.float32(2**24))
    one = kbr.moments.collect_moments(maps, x[:1], x[:1])
    with pytest.warns(UserWarning, match="16777216 and 1 pairs"):
        kbr.moments.merge_moments(many, one)
    assert kbr.moments.merge_moments(many, moments).count == 2**24 + 8


def test_models_of_other_landmarks_exchange_no_coordinates():
    other = kbr.greedy_landmarks(KX, X[::-1], rank=P)
    maps = kbr.moments.moment_maps(KX, KX, other, LX)
    transition = kbr.moments.collect_moments(maps, X, NEXT)
    transition = kbr.moments.fit_conditional(transition, regularizer=1e-3)
    with pytest.raises(ValueError, match="landmarks"):
        kbr.KernelBayesFilter(
            moment_filter().emission, transition, regularizer=1e-3, clipping=NORMALIZED
        )


def test_models_of_moments_are_compared_inside_a_program():
    """What is known there is known: tuning a ridge of moments, and learning online."""
    maps = [kbr.moments.moment_maps(KX, kernel, LX, of) for kernel, of in ((KY, LY), (KX, LX))]
    seen, moved = (
        kbr.moments.collect_moments(*m) for m in zip(maps, (X, X), (Y, NEXT), strict=True)
    )

    def loss(ridge):
        both = kbr.moments.merge_moments(seen, seen)
        emission, transition = (
            kbr.moments.fit_conditional(m, regularizer=ridge) for m in (both, moved)
        )
        filt = kbr.KernelBayesFilter(emission, transition, regularizer=1e-2, clipping=NORMALIZED)
        return jnp.sum(kbr.state_mean(filt, kbr.run_filter(filt, NEW[:3])))

    close(jax.jit(jax.grad(loss))(1e-2), jax.grad(loss)(1e-2))


def test_batches_and_gradients():
    batch = jnp.stack([NEW, NEW[::-1]])

    def means(filt, o):
        return kbr.state_mean(filt, kbr.run_filter(filt, o))

    def loss(bandwidth, temperature):
        kernel = kbr.Gaussian(bandwidth)
        cells = kbr.soft_partition(kernel, LX, temperature=temperature)
        filt = moment_filter(cells, kernel=kernel)
        return jnp.sum(jax.vmap(lambda o: means(filt, o))(batch)[:, 3:] ** 2)

    filt = moment_filter(kbr.soft_partition(KX, LX))
    alone = jax.jit(lambda o: means(filt, o))
    close(jax.jit(jax.vmap(alone))(batch), np.stack([alone(o) for o in batch]))
    at = (np.asarray(0.6), np.asarray(0.05))
    value = jax.jit(jax.value_and_grad(loss, (0, 1)))
    _, gradients = value(*at)
    for i, step in enumerate(1e-5 * np.eye(2)):
        up, down = (
            value(*(a + sign * s for a, s in zip(at, step, strict=True)))[0] for sign in (1, -1)
        )
        np.testing.assert_allclose(gradients[i], (up - down) / 2e-5, rtol=1e-4)


def test_fitting_does_not_compile_again():
    maps = kbr.moments.moment_maps(KX, KY, LX, LY)
    traces = []

    @eqx.filter_jit
    def fit(x, y, mask):
        traces.append(None)
        return kbr.moments.fit_conditional(
            kbr.moments.collect_moments(maps, x, y, mask=mask), regularizer=1e-3
        ).factor.upper

    for count in (40, 50, 60):
        mask = jnp.arange(N) < count
        expected = kbr.moments.fit_conditional(
            kbr.moments.collect_moments(maps, X[:count], Y[:count]), regularizer=1e-3
        ).factor.upper
        close(fit(X, Y, mask), expected)
    assert len(traces) == 1


def test_what_is_asked_for_must_have_been_collected():
    maps = kbr.moments.moment_maps(KX, KY, LX, LY)
    moments = kbr.moments.collect_moments(maps, X, Y)
    with pytest.raises(ValueError, match="transition"):
        emission = kbr.moments.fit_conditional(moments, regularizer=1e-3)
        kbr.KernelBayesFilter(emission, None, regularizer=1e-3, shift=True, clipping=NORMALIZED)
    with pytest.raises(ValueError, match="transition"):
        kbr.KernelBayesFilter(emission, None, regularizer=1e-3, clipping=NORMALIZED)
    with pytest.raises(ValueError, match="successors"):
        kbr.moments.collect_moments(kbr.moments.moment_maps(KX, KY, LX, LY, shift=True), X, Y)
    with pytest.raises(ValueError, match="boolean"):
        kbr.moments.collect_moments(maps, X, Y, mask=jnp.ones(N))
    with pytest.raises(ValueError, match="same `MomentMaps`"):
        shifted = kbr.moments.moment_maps(KX, KY, LX, LY, shift=True)
        kbr.moments.merge_moments(moments, kbr.moments.collect_moments(shifted, X, Y, NEXT))
    with pytest.raises(ValueError, match="chunk"):
        kbr.moments.collect_moments(maps, [])
    with pytest.raises(ValueError, match="landmarks_x"):
        kbr.moments.collect_moments(maps, Y, Y)


@pytest.mark.parametrize("labels", ["x", "y"])
def test_labels_beside_points_in_single_precision(labels):
    rng = np.random.default_rng(0)
    real, label = jnp.asarray(rng.normal(size=(30, 2)), jnp.float32), jnp.arange(30) % 3
    order = 1 if labels == "x" else -1
    x, y = (label, real)[::order]
    kernel_x, kernel_y = (kbr.Delta(), kbr.Gaussian(1.0))[::order]
    landmarks = (kbr.greedy_landmarks(k, p, rank=3) for k, p in ((kernel_x, x), (kernel_y, y)))
    maps = kbr.moments.moment_maps(kernel_x, kernel_y, *landmarks)
    model = kbr.moments.fit_conditional(kbr.moments.collect_moments(maps, x, y), regularizer=1e-2)
    query = jax.tree.map(lambda part: part[:2], x)
    assert kbr.condition(model, query).weights.dtype == jnp.float32
    prior = kbr.embed(kernel_x, x)
    assert kbr.sum_rule(model, prior).weights.dtype == jnp.float32
    for estimator in ("pairs", "prior"):
        joint = kbr.rules.chain_rule(model, prior, estimator=estimator)
        assert joint.weights.dtype == jnp.float32
    by_iteration = kbr.fit_conditional(
        kernel_x, kernel_y, x, y, regularizer=1e-2, solver=kbr.ConjugateGradient(rank=5)
    )
    exact = kbr.fit_conditional(kernel_x, kernel_y, x, y, regularizer=1e-2)
    found, expected = (kbr.condition(m, query).weights for m in (by_iteration, exact))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_weights_of_other_points_are_refused():
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 20, 2)))
    maps = kbr.moments.moment_maps(
        kbr.Gaussian(1.0), kbr.Gaussian(1.0), kbr.Landmarks(x[:5]), kbr.Landmarks(y[:5])
    )
    model = kbr.moments.fit_conditional(kbr.moments.collect_moments(maps, x, y), regularizer=0.1)
    belief = model.unchanged(model.marginal())
    close(
        kbr.moments.moment_weights(model, belief, x.tolist(), y),
        kbr.moments.moment_weights(model, belief, x, y),
    )
    for first, second in ((x[:, :1], y), (x[:5], y[:1]), (x, y[:, :1])):
        with pytest.raises(ValueError):
            kbr.moments.moment_weights(model, belief, first, second)
