"""Pictures show the numbers that the library computes."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.collections import LineCollection, PathCollection, QuadMesh

import kbr_jax as kbr
from kbr_jax import plotting

LINE = jnp.linspace(-2.0, 2.0, 31)
WEIGHTS = jnp.array([0.5, -0.25, 0.75])
KERNEL = kbr.Gaussian(0.5)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def on_line():
    return kbr.embed(KERNEL, jnp.array([-1.0, 0.2, 1.0])[:, None], WEIGHTS)


@pytest.fixture
def on_plane():
    return kbr.embed(KERNEL, jnp.array([[-1.0, 0.0], [0.2, -0.5], [1.0, 0.4]]), WEIGHTS)


def beliefs(points=None):
    points = jnp.array([-1.0, 0.2, 1.0])[:, None] if points is None else points
    return kbr.Embedding(KERNEL, points, jnp.stack([WEIGHTS, -WEIGHTS, WEIGHTS[::-1], WEIGHTS]))


def history(loss, accepted, validation=None, value=0.5, step=1):
    record = kbr.tuning.History(
        jnp.asarray(loss),
        None if validation is None else jnp.asarray(validation),
        jnp.asarray(accepted),
    )
    return kbr.tuning.TuneResult(
        {"h": jnp.asarray(1.0)}, jnp.asarray(value), jnp.asarray(step), record
    )


def named(axis, label):
    return next(line for line in axis.lines if line.get_label() == label)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_curve_is_evaluate_and_stems_are_the_weights(on_line, shape):
    points = on_line.points.reshape(3, *shape)
    embedding = kbr.Embedding(KERNEL, points, WEIGHTS)
    axis = plotting.plot_embedding(embedding, LINE, label="mu")
    values = kbr.evaluate(embedding, LINE.reshape(-1, *shape))
    np.testing.assert_array_equal(named(axis, "mu").get_xdata(), LINE)
    np.testing.assert_allclose(named(axis, "mu").get_ydata(), values)
    parts = [c for c in axis.collections if isinstance(c, LineCollection)]
    ends = {
        float(segment[1, 0]): float(segment[1, 1])
        for part in parts
        for segment in part.get_segments()
    }
    scale = 0.25 * float(jnp.max(jnp.abs(values))) / 0.75
    assert ends == pytest.approx(
        dict(zip(np.asarray(points).ravel().tolist(), (WEIGHTS * scale).tolist(), strict=True))
    )


def test_given_axis_is_used_and_weights_can_be_left_out(on_line):
    _, axis = pyplot.subplots()
    assert plotting.plot_embedding(on_line, LINE[:, None], axis=axis, weights=False) is axis
    assert not axis.collections and len(pyplot.get_fignums()) == 1


def test_contours_in_the_plane(on_plane, monkeypatch):
    x, y = np.linspace(-2, 2, 9), np.linspace(-1, 1, 7)
    drawn = []
    _, axis = pyplot.subplots()
    original = axis.contourf
    monkeypatch.setattr(axis, "contourf", lambda *a, **k: (drawn.append(a), original(*a, **k))[1])
    plotting.plot_embedding(on_plane, (x, y), axis=axis)
    values = np.array([[kbr.evaluate(on_plane, jnp.array([a, b])) for a in x] for b in y])
    top = np.max(values)
    np.testing.assert_allclose(drawn[0][2], np.clip(values, -top, top), rtol=1e-12)
    np.testing.assert_allclose(drawn[0][3], np.arange(1, 9) / 8 * top)
    places = np.concatenate(
        [c.get_offsets() for c in axis.collections if isinstance(c, PathCollection)]
    )
    np.testing.assert_allclose(places, np.asarray(on_plane.points)[[0, 2, 1]])


def test_witness_is_the_difference(on_line, on_plane):
    other = kbr.embed(KERNEL, jnp.array([0.0, 0.5])[:, None])
    axis = plotting.plot_witness(on_line, other, LINE)
    np.testing.assert_allclose(
        named(axis, "witness p - q").get_ydata(), kbr.witness(on_line, other, LINE[:, None])
    )
    np.testing.assert_allclose(named(axis, "q").get_ydata(), kbr.evaluate(other, LINE[:, None]))
    plane = plotting.plot_witness(on_plane, kbr.embed(KERNEL, on_plane.points), (LINE, LINE))
    assert plane.collections


def test_equal_embeddings_have_a_flat_picture(on_line, on_plane):
    axis = plotting.plot_witness(on_line, on_line, LINE)
    assert not np.any(named(axis, "witness p - q").get_ydata())
    plotting.plot_witness(on_plane, on_plane, (LINE, LINE)).figure.canvas.draw()


def test_beliefs_are_the_columns_of_the_map():
    given = beliefs()
    axis = plotting.plot_beliefs(given, LINE, truth=jnp.arange(4.0) / 4, estimate=jnp.zeros((4, 1)))
    (mesh,) = [c for c in axis.collections if isinstance(c, QuadMesh)]
    np.testing.assert_allclose(np.asarray(mesh.get_array()), kbr.evaluate(given, LINE[:, None]).T)
    assert mesh.get_clim() == (0, pytest.approx(float(jnp.max(kbr.evaluate(given, LINE[:, None])))))
    np.testing.assert_array_equal(named(axis, "truth").get_ydata(), np.arange(4) / 4)
    axis.figure.canvas.draw()


def test_angles_stand_at_positions_and_lines_do_not_jump():
    angles = np.linspace(-180, 180, 25)
    circle = jnp.stack([jnp.cos(jnp.radians(angles)), jnp.sin(jnp.radians(angles))], axis=-1)
    given = beliefs(circle[:3])
    axis = plotting.plot_beliefs(
        given, circle, positions=angles, period=360.0, truth=np.array([170.0, -170, -160, -150])
    )
    np.testing.assert_array_equal(named(axis, "truth").get_ydata(), [170, np.nan, -170, -160, -150])
    assert axis.get_ylim() == (-180, 180)


def test_learning_curve_marks_the_best_and_the_rejected():
    loss, accepted = [3.0, 0.2, np.nan, 2.0, np.inf], [True, True, False, True, False]
    axis = plotting.plot_history(history(loss, accepted, [4.0, np.nan, 1.5, 0.5, np.nan], step=3))
    np.testing.assert_array_equal(named(axis, "loss").get_ydata(), [3, 0.2, np.nan, 2, np.nan])
    np.testing.assert_array_equal(
        named(axis, "validation").get_xdata(), [0, 3]
    )  # what was rejected does not count
    np.testing.assert_array_equal(named(axis, "rejected").get_xdata(), [2, 4])
    assert named(axis, "best, step 3").get_xydata().tolist() == [[3, 0.5]]
    assert axis.get_yscale() == "log"


def test_intervals_over_time():
    given = kbr.embed(KERNEL, jnp.arange(5.0), jnp.eye(5)[:3] * 0.5 + 0.1)
    axis = plotting.plot_intervals(given, levels=(0.4, 0.8), truth=jnp.asarray([0.0, 1.0, jnp.nan]))
    np.testing.assert_allclose(named(axis, "median").get_ydata(), kbr.quantile(given, 0.5))
    bands = [c.get_label() for c in axis.collections]
    assert bands == ["80%", "40%"]
    low, high = kbr.credible_interval(given, 0.8)
    box = axis.collections[0].get_paths()[0].get_extents()
    assert box.y0 == low.min() and box.y1 == high.max()
    axis.figure.canvas.draw()
    with pytest.raises(ValueError, match="one number for each point"):
        plotting.plot_intervals(kbr.embed(KERNEL, jnp.zeros((5, 2)), given.weights))
    with pytest.raises(ValueError, match=r"not \[T, n\]"):
        plotting.plot_intervals(kbr.embed(KERNEL, jnp.zeros(5)))


def test_history_of_a_real_descent():
    import optax

    tuned = kbr.tune(
        lambda p: (p - 2.0) ** 2, jnp.asarray(5.0), optax.sgd(0.3), num_steps=5, progress=False
    )
    axis = plotting.plot_history(tuned)
    np.testing.assert_allclose(named(axis, "loss").get_ydata(), tuned.history.loss)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plotting.plot_embedding(beliefs(), LINE),
        lambda: plotting.plot_embedding(kbr.embed(KERNEL, jnp.zeros((2, 3))), LINE),
        lambda: plotting.plot_embedding(kbr.embed(KERNEL, jnp.zeros((2, 2))), LINE),
        lambda: plotting.plot_embedding(kbr.embed(KERNEL, jnp.zeros((2, 2))), (LINE, LINE[:1])),
        lambda: plotting.plot_witness(kbr.embed(KERNEL, jnp.zeros((2, 1))), beliefs(), LINE),
        lambda: plotting.plot_beliefs(kbr.embed(KERNEL, jnp.zeros((2, 1))), LINE),
        lambda: plotting.plot_beliefs(beliefs(jnp.zeros((3, 2))), jnp.zeros((5, 2))),
        lambda: plotting.plot_beliefs(beliefs(), LINE, truth=jnp.zeros(5)),
        lambda: plotting.plot_beliefs(beliefs(), LINE, positions=jnp.zeros(5)),
    ],
)
def test_what_cannot_be_drawn_is_a_value_error(draw):
    with pytest.raises(ValueError):
        draw()


def test_without_matplotlib_the_extra_is_named(on_line, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"kbr_jax\[plot\]"):
        plotting.plot_embedding(on_line, LINE)


def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys, kbr_jax; assert 'kbr_jax.plotting' not in sys.modules\n"
        "from kbr_jax import plotting; assert 'matplotlib' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).parent.parent
    )


def test_what_is_nan_or_alone_is_drawn_all_the_same():
    beliefs = kbr.embed(
        KERNEL, jnp.array([-1.0, 0.0, 1.0]), jnp.stack([WEIGHTS, WEIGHTS * jnp.nan])
    )
    axis = plotting.plot_beliefs(beliefs, LINE)
    (shades,) = (c for c in axis.get_children() if isinstance(c, QuadMesh))
    assert shades.get_clim()[1] == pytest.approx(float(kbr.evaluate(beliefs, LINE)[0].max()))
    single = kbr.embed(KERNEL, beliefs.points, WEIGHTS[None])
    axis = plotting.plot_beliefs(single, LINE, truth=jnp.zeros(1))
    (shades,) = (c for c in axis.get_children() if isinstance(c, QuadMesh))
    width = np.ptp(shades.get_coordinates()[..., 0])
    assert width > 0.5 and axis.lines[0].get_marker() == "o"
    with pytest.raises(ValueError, match="NaN"):
        plotting.plot_embedding(kbr.embed(KERNEL, beliefs.points, WEIGHTS * jnp.nan), LINE)


def test_accepted_steps_between_rejected_ones_are_seen():
    accepted = jnp.asarray([True, False, True, False])
    history = kbr.tuning.History(jnp.arange(4.0), None, accepted)
    result = kbr.tuning.TuneResult(0.0, jnp.asarray(0.0), jnp.asarray(0), history)
    assert plotting.plot_history(result).lines[0].get_marker() == "."


def test_the_picture_of_a_test():
    x, y = jnp.arange(30.0) / 10, jnp.arange(30.0) / 10 + 0.5
    result = kbr.hypotheses.two_sample_test(None, x, y, key=jax.random.key(0), num_permutations=200)
    axis = plotting.plot_test(result)
    counts = [bar.get_height() for bar in axis.patches]
    beyond = np.sum(np.asarray(result.null) >= float(result.statistic))
    assert sum(counts) == 200 + beyond
    np.testing.assert_allclose(axis.lines[0].get_xdata(), float(result.statistic))
    assert f"p = {float(result.p_value):.3g}" in axis.get_legend().get_texts()[-1].get_text()
    assert axis.get_title(loc="left") == result.hypothesis
    # Draws equal up to rounding count in the p-value and in the picture.
    rng = np.random.default_rng(1)
    few = rng.integers(0, 3, 8), rng.integers(0, 3, 9)
    tied = kbr.hypotheses.two_sample_test(None, *few, key=jax.random.key(0), num_permutations=200)
    counts = [bar.get_height() for bar in plotting.plot_test(tied).patches]
    assert sum(counts) == 199 + round(201 * float(tied.p_value))
    with pytest.raises(ValueError, match="known distribution"):
        plotting.plot_test(kbr.hypotheses.block_two_sample_test(kbr.Gaussian(1.0), x, y))


@pytest.mark.parametrize("missing", [[], [0, 2]])
def test_intervals_of_a_step_alone_are_seen(missing):
    count = 3 if missing else 1
    weights = jnp.ones((count, 50)).at[jnp.asarray(missing, int)].set(jnp.nan)
    beliefs = kbr.embed(kbr.Gaussian(1.0), jnp.linspace(0, 1, 50))
    axis = plotting.plot_intervals(kbr.embedding.Embedding(beliefs.kernel, beliefs.points, weights))
    bars = [c for c in axis.collections if isinstance(c, LineCollection) and len(c.get_segments())]
    assert len(bars) == 2
    low, high = axis.get_xlim()
    assert low < high
    pyplot.close(axis.figure)


def test_times_and_levels_as_people_give_them():
    dates = np.arange("2026-01-01", "2026-01-05", dtype="datetime64[D]")
    axis = plotting.plot_intervals(beliefs(), times=dates, levels=0.975)
    assert "97.5%" in [text.get_text() for text in axis.get_legend().get_texts()]
    with pytest.raises(ValueError, match="ascending"):
        plotting.plot_intervals(beliefs(), times=np.asarray([0.0, 2.0, 1.0, 3.0]))
