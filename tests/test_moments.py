"""Rules and filters on moments: equal to the weights form on the same landmarks, however the sample is divided."""

import os
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr

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
    return kbr.soft_partition(KX, kbr.given_landmarks(X), temperature=1e-9)


def close(actual, expected, tolerance=1e-8):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def moment_model(cells=None):
    return kbr.fit_moments(
        kbr.collect_moments(kbr.moment_maps(KX, KY, LX, LY, cells=cells), X, Y, block=17),
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
    moments = kbr.collect_moments(
        kbr.moment_maps(KX, KY, LX, LY, cells=cells, shift=True), X, Y, NEXT
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
    close(moments.total, phi.sum(0))
    close(moments.covariance, phi.T @ phi)
    close(moments.cross, phi.T @ following)
    close(moments.mass, a.sum(0))
    close(moments.pairs, phi.T @ psi)
    c = np.linspace(-1, 1, P)
    close(moments.operator(jnp.asarray(c)), np.einsum("k,ik,ia,ib->ab", c, a, psi, psi))
    close(moments.embedding, np.einsum("ik,iq,ip->kqp", a, psi1, phi))
    close(moments.transition, np.einsum("ik,iq,ip->kqp", a, psi1, following))
    close(
        moments.readout,
        np.einsum("ik,iq,ip->kqp", a, psi1, np.concatenate([X, np.ones((N, 1))], 1)),
    )


@pytest.mark.parametrize("cells", [None, "every point"])
def test_rules_equal_the_weights_form(cells):
    model, reference = moment_model(cells and every_point_a_cell()), weights_model()
    close(
        kbr.evaluate(kbr.sum_rule(model, PRIOR), LY.points),
        kbr.evaluate(kbr.sum_rule(reference, PRIOR), LY.points),
    )
    joint, expected = kbr.sum_rule(model, PRIOR, form="b"), kbr.sum_rule(reference, PRIOR, form="b")
    close(joint_in_span(joint), joint_in_span(expected))
    for form in ("a", "b"):
        close(
            joint_in_span(kbr.chain_rule(model, PRIOR, form=form)),
            joint_in_span(kbr.chain_rule(reference, PRIOR, form=form)),
        )
        options = dict(regularizer=1e-4, form=form, normalize=True)
        if cells:
            options |= dict(clip=True, truncation=0.05)
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
    options = dict(regularizer=1e-4, form="importance", normalize=True)
    ours, theirs = (kbr.bayes_rule(m, PRIOR, NEW[0], **options) for m in (model, reference))
    close(in_span(ours, KX, LX), in_span(theirs, KX, LX))
    with pytest.raises(ValueError, match="soft_partition"):
        kbr.bayes_rule(moment_model(), PRIOR, NEW[0], **options)
    with pytest.raises(ValueError, match="soft_partition"):
        kbr.bayes_rule(moment_model(), PRIOR, NEW[0], regularizer=1e-4, clip=True)


OPTIONS = dict(
    regularizer=1e-3, posterior_regularizer=1e-3, landmarks_states=LX, landmarks_observations=LY
)


def moment_filter(cells=None, sequence=(STATES, OBSERVATIONS), **options):
    return kbr.MomentFilter.fit(KX, KY, *sequence, cells=cells, **OPTIONS | options)


def weights_filter(**options):
    return kbr.KernelBayesFilter.fit(KX, KY, STATES, OBSERVATIONS, **OPTIONS | options)


@pytest.mark.parametrize(
    ("kind", "transition"),
    [
        ("plain", "shift"),
        ("plain", "two-inverse"),
        ("cells", "shift"),
        ("importance", "two-inverse"),
    ],
)
def test_filter_equals_the_weights_form(kind, transition):
    if kind == "plain":
        ours = moment_filter(transition=transition)
        theirs = weights_filter(transition=transition, clip=False, truncation=0.0)
    else:
        form = "importance" if kind == "importance" else "b"
        ours = moment_filter(
            every_point_a_cell(), transition=transition, form=form, transition_regularizer=1e-2
        )
        theirs = weights_filter(transition=transition, form=form, transition_regularizer=1e-2)
    observed = jnp.arange(15) % 5 != 3
    prior = kbr.embed(KX, X)
    steps = kbr.filter(ours, NEW, observed=observed, prior=prior)
    expected = kbr.filter(theirs, NEW, observed=observed, prior=prior)
    close(ours.weights(steps, X, Y), expected.weights)
    close(steps.evidence, expected.evidence)
    close(ours.expectation(steps), kbr.mean(theirs.belief(expected.weights)))
    if kind == "plain":
        close(in_span(ours.belief(steps), KX, LX), in_span(theirs.belief(expected.weights), KX, LX))
    else:
        order = jnp.argmin(jnp.abs(ours.belief(steps).points[:, None] - X[None]).sum(-1), axis=0)
        close(ours.belief(steps).weights[:, order], expected.weights)


def test_random_fourier_features():
    draws = {
        f"landmarks_{name}": kbr.random_fourier(k, d, rank=20, key=jax.random.key(0))
        for name, k, d in (("states", KX, 2), ("observations", KY, 1))
    }
    ours, theirs = moment_filter(**draws), weights_filter(clip=False, truncation=0.0, **draws)
    steps, expected = kbr.filter(ours, NEW, prior=PRIOR), kbr.filter(theirs, NEW, prior=PRIOR)
    close(ours.expectation(steps), kbr.mean(theirs.belief(expected.weights)))
    with pytest.raises(ValueError, match="use landmarks for this variable"):
        ours.belief(steps)


def test_max_active_is_exact_while_truncation_leaves_fewer():
    cells, prior = kbr.soft_partition(KX, LX), kbr.embed(KX, X[:2])
    steps, same = (
        kbr.filter(moment_filter(cells, max_active=k), NEW, prior=prior) for k in (None, 10)
    )
    assert 1 < int(jnp.sum(steps.prior > 0, axis=1).max()) <= 10
    close(same.prior, steps.prior)


def test_max_active_takes_the_most_likely_cells_of_a_flat_prior():
    cells = every_point_a_cell()
    few, full = (
        moment_filter(cells, max_active=k, normalize=False, truncation=0.0) for k in (20, None)
    )
    code = full.coordinates_of(NEW[0])
    likelihood = full.observations.coordinates(Y) @ code
    chosen = jnp.zeros(N).at[jnp.argsort(-likelihood)[:20]].set(1)
    one, other = (
        filt.update(state, code, jnp.asarray(True))
        for filt, state in ((few, few.init()), (full, chosen / N))
    )
    close(one[1].likelihood, other[1].likelihood)
    close(one[0], other[0])


def test_where_clipping_leaves_nothing_all_points_weigh_the_same():
    far, options = kbr.embed(KX, jnp.full((1, 2), 100.0)), {"regularizer": 1e-3, "clip": True}
    for form in ("b", "importance"):
        ours = kbr.bayes_rule(
            moment_model(every_point_a_cell()), far, NEW[:3], form=form, **options
        )
        expected = kbr.bayes_rule(weights_model(), far, NEW[:3], form=form, **options)
        close(in_span(ours, KX, LX), in_span(expected, KX, LX))


def test_a_filter_of_padding_alone_is_finite():
    for cells in (None, kbr.soft_partition(KX, LX)):
        filt = moment_filter(cells, mask=jnp.zeros(N + 1, bool))
        assert np.all(np.isfinite(filt.init()))
        assert np.all(np.isfinite(kbr.filter(filt, NEW).prior))


def test_prediction_is_a_step_without_observation():
    for filt in (moment_filter(), moment_filter(kbr.soft_partition(KX, LX))):
        steps = kbr.filter(filt, NEW, observed=jnp.arange(15) < 13)
        close(filt.predict(kbr.filter(filt, NEW[:13]), 2).prior[-1], steps.prior[-1])
        close(filt.expectation(filt.predict(steps)).shape, (15, 2))


def test_divided_samples_give_the_same_moments():
    maps = kbr.moment_maps(KX, KY, LX, LY, cells=kbr.soft_partition(KX, LX), shift=True)
    whole = kbr.collect_moments(maps, X, Y, NEXT)
    halves = kbr.merge_moments(
        *(kbr.collect_moments(maps, X[s], Y[s], NEXT[s]) for s in (slice(25), slice(25, None)))
    )
    chunks = kbr.collect_chunks(
        maps, ((X[i : i + 25], Y[i : i + 25], NEXT[i : i + 25]) for i in range(0, N, 25))
    )
    padded = [jnp.concatenate([a, 7 * jnp.ones_like(a[:9])]) for a in (X, Y, NEXT)]
    masked = kbr.collect_moments(maps, *padded, mask=jnp.arange(N + 9) < N)
    blocks = [kbr.collect_moments(maps, X, Y, NEXT, block=b) for b in (1, 7, 1000)]
    for other in (halves, chunks, masked, *blocks):
        jax.tree.map(close, whole, other)


def test_online_learning_equals_learning_at_once():
    filt = moment_filter(sequence=(STATES[:41], OBSERVATIONS[:41]))
    new = kbr.collect_moments(filt.moments.maps, X[40:], Y[40:], NEXT[40:])
    learned = kbr.MomentFilter.from_moments(
        kbr.merge_moments(filt.moments, new), regularizer=1e-3, posterior_regularizer=1e-3
    )
    close(kbr.filter(learned, NEW).prior, kbr.filter(moment_filter(), NEW).prior)


def test_batches_and_gradients():
    batch = jnp.stack([NEW, NEW[::-1]])

    def loss(bandwidth, temperature):
        kernel = kbr.Gaussian(bandwidth)
        cells = kbr.soft_partition(kernel, LX, temperature=temperature)
        filt = kbr.MomentFilter.fit(kernel, KY, STATES, OBSERVATIONS, cells=cells, **OPTIONS)
        return jnp.sum(jax.vmap(lambda o: filt.expectation(kbr.filter(filt, o)))(batch)[:, 3:] ** 2)

    filt = moment_filter(kbr.soft_partition(KX, LX))
    alone = jax.jit(lambda o: filt.expectation(kbr.filter(filt, o)))
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
    maps = kbr.moment_maps(KX, KY, LX, LY)
    traces = []

    @eqx.filter_jit
    def fit(x, y, mask):
        traces.append(None)
        return kbr.fit_moments(
            kbr.collect_moments(maps, x, y, mask=mask), regularizer=1e-3
        ).factor.cholesky

    for count in (40, 50, 60):
        mask = jnp.arange(N) < count
        expected = kbr.fit_moments(
            kbr.collect_moments(maps, X[:count], Y[:count]), regularizer=1e-3
        ).factor.cholesky
        close(fit(X, Y, mask), expected)
    assert len(traces) == 1


DEVICES = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    jax.config.update("jax_enable_x64", True)
    process, processes, port = map(int, sys.argv[1:])
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    import kbr_jax as kbr
    rng = np.random.default_rng(0)
    x, y, following = (rng.normal(size=(48, 2)) for _ in range(3))
    new = rng.normal(size=(8, 5, 2))
    kernel, landmarks = kbr.Gaussian(1.0), kbr.given_landmarks(jnp.asarray(x[:6]))
    maps = kbr.moment_maps(kernel, kernel, landmarks, landmarks, shift=True)
    mesh = jax.make_mesh((jax.device_count(),), ("sample",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("sample"))

    def shard(a):
        local = len(a) // processes
        return jax.make_array_from_process_local_data(rows, a[process * local : (process + 1) * local])

    def run(moments, batch, divide=lambda function: function):
        filt = kbr.MomentFilter.from_moments(moments, regularizer=1e-3, posterior_regularizer=1e-3)
        function = jax.vmap(lambda filt, o: filt.expectation(kbr.filter(filt, o)), in_axes=(None, 0))
        return jax.jit(divide(function))(filt, batch)

    def on_mesh(function):
        specs = dict(in_specs=(P(), P("sample")), out_specs=P("sample"), check_vma=False)
        return jax.shard_map(function, mesh=mesh, **specs)

    together = kbr.collect_moments(maps, x, y, following)
    divided = kbr.collect_moments(maps, *map(shard, (x, y, following)), mesh=mesh)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(divided)):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    expected = run(together, jnp.asarray(new))
    found = run(divided, shard(new), on_mesh)
    assert len(found.sharding.device_set) == jax.device_count()
    for part in found.addressable_shards:
        np.testing.assert_allclose(part.data, expected[part.index], rtol=1e-9, atol=1e-9)
    print("devices", jax.device_count(), "processes", jax.process_count())
"""


def launch(process, processes, port, devices):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(DEVICES),
        str(process),
        str(processes),
        str(port),
    ]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_eight_devices_and_two_processes_give_the_result_of_one():
    runs = [[launch(0, 1, 0, 8)], [launch(p, 2, 29817, 4) for p in range(2)]]
    for run in runs:
        for process in run:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-3000:]
            assert f"devices 8 processes {len(run)}" in out


def test_what_is_asked_for_must_have_been_collected():
    maps = kbr.moment_maps(KX, KY, LX, LY)
    moments = kbr.collect_moments(maps, X, Y)
    with pytest.raises(ValueError, match="transition"):
        kbr.MomentFilter.from_moments(moments, regularizer=1e-3, posterior_regularizer=1e-3)
    with pytest.raises(ValueError, match="successors"):
        kbr.collect_moments(kbr.moment_maps(KX, KY, LX, LY, shift=True), X, Y)
    with pytest.raises(ValueError, match="boolean"):
        kbr.collect_moments(maps, X, Y, mask=jnp.ones(N))
    with pytest.raises(ValueError, match="same `MomentMaps`"):
        kbr.merge_moments(moments, kbr.collect_moments(maps, X, Y, NEXT))
    with pytest.raises(ValueError, match="empty"):
        kbr.collect_chunks(maps, [])
    with pytest.raises(ValueError, match="soft_partition"):
        moment_filter(clip=True)
    with pytest.raises(ValueError, match="landmarks_x"):
        kbr.collect_moments(maps, Y, Y)
