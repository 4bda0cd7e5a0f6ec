"""Lists of trajectories of unequal length, as training and as test data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close_trees as close

import kbr_jax as kbr

RNG = np.random.default_rng(11)
LENGTHS = (14, 9, 21)
KERNELS = kbr.Gaussian(0.8), kbr.Gaussian(1.1)
RIDGES = {"regularizer": 1e-2, "posterior_regularizer": 1e-2}


def trajectories(extra=0):
    """States, observations and inputs; with one state more than observations if asked."""
    rng = np.random.default_rng(3)
    states = [rng.normal(size=(n + extra, 2)) for n in LENGTHS]
    seen = [s[:n, :1] + 0.3 * rng.normal(size=(n, 1)) for s, n in zip(states, LENGTHS, strict=True)]
    inputs = [rng.normal(size=(n, 1)) for n in LENGTHS]
    return tuple([jnp.asarray(one) for one in part] for part in (states, seen, inputs))


def joined(states, seen):
    """The triples by hand."""
    last = [min(len(s) - 1, len(o)) for s, o in zip(states, seen, strict=True)]
    triples = [(s[:n], o[:n], s[1 : n + 1]) for s, o, n in zip(states, seen, last, strict=True)]
    return tuple(jnp.concatenate(part) for part in zip(*triples, strict=True))


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("landmarks", [None, 12])
def test_no_pair_goes_across_two_trajectories(extra, landmarks):
    states, seen, _ = trajectories(extra)
    options = RIDGES | {"landmarks_states": landmarks, "landmarks_observations": landmarks}
    found = kbr.fit_filter(*KERNELS, states, seen, **options)
    s, o, s_next = joined(states, seen)
    expected = kbr.fit_filter(*KERNELS, s, o, successors=s_next, **options)
    close(found, expected, 0)
    close(kbr.filtering.transitions(states, seen), (s, o, s_next), 0)
    close(kbr.filtering.transitions(states[0], seen[0]), joined(states[:1], seen[:1]), 0)


def test_the_filter_of_2009_takes_lists():
    states, seen, _ = trajectories()
    found = kbr.fit_conditional_embedding_filter(*KERNELS, states, seen, regularizer=1e-2)
    triples = [(s[:-1], o[1:], s[1:]) for s, o in zip(states, seen, strict=True)]
    s, o, s_next = (jnp.concatenate(part) for part in zip(*triples, strict=True))
    expected = kbr.fit_conditional_embedding_filter(
        *KERNELS, s, o, successors=s_next, regularizer=1e-2
    )
    close(found, expected, 0)


def filters():
    states, seen, inputs = trajectories()
    s, o, s_next = kbr.filtering.transitions(states, seen)
    first = jnp.concatenate([u[:-1] for u in inputs])
    kernel_s, kernel_o = KERNELS
    emission = kbr.fit_conditional(kernel_s, kernel_o, s, o, regularizer=1e-2)
    transition = kbr.fit_conditional(
        kbr.TensorProduct((kernel_s, kbr.Gaussian(1.0))),
        kernel_s,
        (s, first),
        s_next,
        regularizer=1e-2,
    )
    maps = kbr.moments.moment_maps(
        kernel_s, kernel_o, kbr.Landmarks(s[:10]), kbr.Landmarks(o[:8]), shift=True
    )
    moments = kbr.moments.collect_moments(maps, s, o, s_next)
    plain = kbr.Clipping(clip=False, truncation=0.0)
    return {
        "sample": kbr.fit_filter(*KERNELS, states, seen, **RIDGES),
        "2009": kbr.fit_conditional_embedding_filter(*KERNELS, states, seen, regularizer=1e-2),
        "inputs": kbr.KernelBayesFilter(emission, transition, regularizer=1e-2),
        "moments": kbr.KernelBayesFilter(
            kbr.moments.fit_conditional(moments, regularizer=1e-2),
            None,
            shift=True,
            regularizer=1e-2,
            clipping=plain,
        ),
    }


@pytest.mark.parametrize("name", ["sample", "inputs", "moments"])
def test_lists_are_filtered_side_by_side(name):
    filt, (_, seen, inputs) = filters()[name], trajectories()
    controls = inputs if name == "inputs" else None
    masks = [jnp.arange(n) % 4 != 1 for n in LENGTHS]
    runs = kbr.run_filter(filt, seen, controls=controls, observed=masks)
    means, beliefs = kbr.state_mean(filt, runs), kbr.belief(filt, runs)
    several = [None] * 3 if controls is None else controls
    for index, (o, u, mask) in enumerate(zip(seen, several, masks, strict=True)):
        alone = kbr.run_filter(filt, o, controls=u, observed=mask)
        close(runs[index], alone, 1e-9)
        close(means[index], kbr.state_mean(filt, alone), 1e-9)
        close(beliefs[index], kbr.belief(filt, alone), 1e-9)
        # The state is that of the trajectory's own end, not of its padding.
        again = {} if u is None else {"controls": u}
        close(
            kbr.run_filter(filt, o, state=runs[index].state, **again),
            kbr.run_filter(filt, o, state=alone.state, **again),
            1e-9,
        )
    kept = kbr.run_filter(
        filt,
        seen,
        controls=controls,
        observed=masks,
        output_fn=lambda out: kbr.state_mean(filt, out),
    )
    close(kept, means, 1e-9)


def test_smoothing_and_losses_of_lists():
    filt, (states, seen, inputs) = filters()["inputs"], trajectories()
    runs = kbr.run_filter(filt, seen, controls=inputs)
    smoothed = kbr.smooth(filt, runs, regularizer=0.1, controls=inputs)
    for run, u, one in zip(runs, inputs, smoothed, strict=True):
        close(one, kbr.smooth(filt, run, regularizer=0.1, controls=u), 1e-9)
    found = kbr.filter_loss(filt, states, seen, controls=inputs, burn_in=3)
    alone = [
        kbr.filter_loss(filt, s, o, controls=u, burn_in=3) * (len(s) - 3)
        for s, o, u in zip(states, seen, inputs, strict=True)
    ]
    close(found, sum(alone) / (sum(LENGTHS) - 9), 1e-10)
    kernel = kbr.Gaussian(1.0)
    in_rkhs = kbr.filter_loss(filt, states, seen, controls=inputs, kernel=kernel)
    expected = [
        kbr.filter_loss(filt, s, o, controls=u, kernel=kernel) * len(s)
        for s, o, u in zip(states, seen, inputs, strict=True)
    ]
    close(in_rkhs, sum(expected) / sum(LENGTHS), 1e-10)


def test_bandwidths_are_learned_from_lists():
    states, seen, _ = trajectories()

    def loss(h):
        filt = kbr.fit_filter(kbr.Gaussian(h), KERNELS[1], states[:2], seen[:2], **RIDGES)
        return kbr.filter_loss(filt, states[1:], seen[1:])

    gradient, step = jax.jit(jax.grad(loss))(0.8), 1e-5
    difference = (loss(0.8 + step) - loss(0.8 - step)) / (2 * step)
    np.testing.assert_allclose(gradient, difference, rtol=1e-5)


def test_delay_embeddings_of_lists():
    _, seen, _ = trajectories()
    found = kbr.delay_embedding(seen, 3)
    close(found, [kbr.delay_embedding(o, 3) for o in seen], 0)
    with pytest.raises(ValueError, match="join their columns"):
        kbr.delay_embedding((jnp.arange(5.0), jnp.arange(5.0)), 2)


STATES, SEEN, INPUTS = trajectories()
FILTER = kbr.fit_filter(*KERNELS, STATES, SEEN, **RIDGES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kbr.fit_filter(*KERNELS, STATES, SEEN[0], **RIDGES),
            "`observations` must be a list",
        ),
        (
            lambda: kbr.fit_filter(*KERNELS, STATES, SEEN[:2], **RIDGES),
            "holds 3 .* holds 2|3 traj.* 2",
        ),
        (lambda: kbr.fit_filter(*KERNELS, [], [], **RIDGES), "at least one trajectory"),
        (
            lambda: kbr.fit_filter(*KERNELS, STATES, [*SEEN[:2], SEEN[0]], **RIDGES),
            "Trajectory 2: `states` has 21 points",
        ),
        (
            lambda: kbr.fit_filter(*KERNELS, [STATES[0], STATES[1][:, :1]], SEEN[:2], **RIDGES),
            r"`states\[1\]` has shape",
        ),
        (
            lambda: kbr.fit_filter(*KERNELS, STATES, SEEN, successors=STATES[0], **RIDGES),
            "give no `successors` and no `mask`",
        ),
        (
            lambda: kbr.fit_filter(*KERNELS, jnp.ones((4, 9, 2)), jnp.ones((4, 9, 1)), **RIDGES),
            "holds several trajectories. Pass lists",
        ),
        (lambda: kbr.run_filter(FILTER, []), "`observations` must be a list of at least one"),
        (
            lambda: kbr.run_filter(FILTER, SEEN, observed=[jnp.ones(3, bool)] * 3),
            r"`observed\[0\]` must be a boolean mask of shape \(14,\)",
        ),
        (
            lambda: kbr.run_filter(FILTER, SEEN, controls=INPUTS[:2]),
            "`controls` holds 2 trajectories and `observations` 3",
        ),
        (
            lambda: kbr.run_filter(FILTER, SEEN[:2], controls=INPUTS[1:]),
            "as long as its `observations`",
        ),
        (lambda: kbr.filter_loss(FILTER, STATES[:2], SEEN), "2 trajectories and `observations` 3"),
        (lambda: kbr.filter_loss(FILTER, STATES, SEEN[0]), "`observations` must be a list"),
        (lambda: kbr.filter_loss(FILTER, STATES[0], SEEN), "`states` must be a list"),
        (
            lambda: kbr.run_filter(FILTER, SEEN, state=kbr.init_filter(FILTER)),
            "`state` of each run by a call of its own",
        ),
        (
            lambda: kbr.smooth(
                FILTER, kbr.run_filter(FILTER, SEEN), regularizer=0.1, controls=INPUTS[:1]
            ),
            "`controls` holds 1 trajectories and `run` 3",
        ),
    ],
)
def test_bad_lists(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Table:
    """What a data frame offers."""

    def __init__(self, rows):
        """Keep the rows."""
        self.rows = np.asarray(rows)

    def to_numpy(self):
        return self.rows


def test_lists_of_numbers_and_tables_are_samples():
    x, y = RNG.normal(size=(12, 2)), RNG.normal(size=12)
    model = kbr.fit_conditional(None, None, jnp.asarray(x), jnp.asarray(y), regularizer=0.1)
    expected = kbr.condition(model, jnp.asarray(x[:3])).weights
    for rows, values in ((x.tolist(), y.tolist()), (Table(x), Table(y)), (x, y)):
        again = kbr.fit_conditional(None, None, rows, values, regularizer=0.1)
        np.testing.assert_allclose(kbr.condition(again, rows).weights[:3], expected, rtol=1e-9)
        np.testing.assert_allclose(kbr.condition(again, x[0].tolist()).weights, expected[0])
    with pytest.raises(ValueError, match="rows of `points` have different lengths"):
        kbr.embed(None, [[1.0, 2.0], [3.0]])
    for words in (["a", "b"], np.array(["a", "b"]), np.array([1, 2.5], object)):
        with pytest.raises(ValueError, match="no array of numbers"):
            kbr.embed(None, words)


def test_columns_of_data_frames_are_numbers():
    import pandas as frames

    whole = frames.array([1, 2, 3], dtype="Int64")
    reals = [0.5, 1.5, 2.5]
    for columns, kind in (
        ({"a": reals, "b": whole}, "f"),
        ({"a": reals, "b": [True, False, True]}, "f"),
        ({"b": whole}, "i"),
        ({"a": [4, 5, 6], "b": whole}, "i"),
        ({"b": frames.array([True, False, True], dtype="boolean")}, "b"),
    ):
        points = kbr.embed(None, frames.DataFrame(columns)).points
        assert points.dtype.kind == kind
        np.testing.assert_array_equal(points[:, -1], list(columns["b"]))
    assert kbr.embed(None, frames.Series(whole)).points.dtype.kind == "i"
    large = {"a": frames.array([1, 2**63 + 5], dtype="UInt64"), "b": [1, 2]}
    assert kbr.embed(None, frames.DataFrame(large)).points[1, 0] == np.uint64(2**63 + 5)
    missing = frames.DataFrame({"a": reals, "b": frames.array([1, None, 3], dtype="Int64")})
    with pytest.raises(ValueError, match="contains NaN"):
        kbr.embed(None, missing)
    for column in (["x", "y", "z"], frames.Categorical(["x", "y", "z"])):
        with pytest.raises(ValueError, match="Column 'b' of `points` is"):
            kbr.embed(None, frames.DataFrame({"a": reals, "b": column}))


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda k, x: kbr.fit_conditional(k, k, x, x, regularizer=0.1), "landmarks"),
        (
            lambda k, x: kbr.hypotheses.two_sample_test(k, x, x, key=jax.random.key(0)),
            "`landmarks`",
        ),
        (
            lambda k, x: kbr.hypotheses.independence_test(k, k, x, x, key=jax.random.key(0)),
            "`landmarks`",
        ),
    ],
)
def test_too_many_points_are_refused_with_a_remedy(call, remedy):
    with pytest.raises(ValueError, match=rf"Gram matrix of .* takes .* GB, .*{remedy}"):
        call(kbr.Gaussian(0.5), jnp.asarray(RNG.normal(size=(500_000, 1))))


def test_distances_of_many_points_take_blocks():
    x = jnp.asarray(RNG.normal(size=(30_000, 1)))
    kernel = kbr.Gaussian(0.5)
    found = jax.jit(kbr.mmd).lower(kbr.embed(kernel, x), kbr.embed(kernel, x + 1))
    assert found.compile().memory_analysis().temp_size_in_bytes < 8 * 30_000**2 / 20


def test_stretches_are_what_lies_between_gaps():
    rng = np.random.default_rng(20)
    states, seen = rng.normal(size=(21, 2)), rng.normal(size=20)
    seen[[4, 5, 7]], states[12, 1] = np.nan, np.nan
    first, second = kbr.filtering.stretches(states, seen)
    spans = [(0, 4), (8, 12), (13, 20)]  # step 6 is alone
    assert len(first) == len(second) == len(spans)
    for (a, b), hidden, one in zip(spans, first, second, strict=True):
        np.testing.assert_array_equal(hidden, states[a:b])
        np.testing.assert_array_equal(one, seen[a:b])
    many = kbr.filtering.stretches([states, states[:3]], [seen, seen[:3]])
    assert [len(one) for one in many[1]] == [4, 4, 7, 3]
    filt = kbr.fit_filter(None, None, first, second, regularizer=1e-3, posterior_regularizer=1e-3)
    assert np.isfinite(kbr.run_filter(filt, second[0]).weights).all()
    with pytest.raises(ValueError, match="nothing to train on"):
        kbr.filtering.stretches(states, np.full(20, np.nan))
    with pytest.raises(ValueError, match=r"`states\[0\]` has 21 points"):
        kbr.filtering.stretches(states, seen[:10])
    with pytest.raises(ValueError, match=r"filtering\.stretches"):
        kbr.fit_filter(None, None, states, seen, regularizer=1e-3, posterior_regularizer=1e-3)
