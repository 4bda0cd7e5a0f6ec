"""The descent.

What it finds, what it never returns, and that stopping it in between changes nothing.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

import kbr_jax as kbr

QUIET = {"progress": False}


def quadratic(p):
    return jnp.sum((jnp.log(p["h"]) - 1) ** 2) + (p["a"] + 2) ** 2


INITIAL = {"h": np.array([0.5, 2.0]), "a": 0.0, "count": 3, "name": "fixed"}


def tuned(loss=quadratic, initial=INITIAL, steps=60, rate=0.1, **options):
    options = {"positive": lambda p: p["h"], **QUIET, **options}
    return kbr.tune(loss, initial, optax.adam(rate), steps=steps, **options)


def test_it_finds_the_minimum():
    result = tuned(steps=200)
    np.testing.assert_allclose(result.parameters["h"], np.e, rtol=1e-3)
    np.testing.assert_allclose(result.parameters["a"], -2, rtol=1e-3)
    assert result.parameters["count"] == 3 and result.parameters["name"] == "fixed"
    assert result.best is result.parameters
    history = result.history
    assert (
        history.loss.shape == (200,) and history.validation is None and bool(history.accepted.all())
    )
    np.testing.assert_allclose(
        history.loss[0], float(quadratic(jax.tree.map(jnp.asarray, {"h": INITIAL["h"], "a": 0.0})))
    )
    np.testing.assert_allclose(result.value, history.loss.min())
    assert int(result.step) == int(history.loss.argmin())


def test_positive_parameters_move_by_their_logarithm():
    """One step of plain gradient descent.

    H is multiplied by exp(-rate h dloss/dh), everything else moves by -rate dloss.
    """
    result = kbr.tune(
        quadratic, INITIAL, optax.sgd(0.1), steps=2, positive=lambda p: p["h"], record=True, **QUIET
    )
    gradient = 2 * (np.log(INITIAL["h"]) - 1)  # in log h
    np.testing.assert_allclose(
        result.history.parameters["h"][1], INITIAL["h"] * np.exp(-0.1 * gradient)
    )
    np.testing.assert_allclose(result.history.parameters["a"], [0, -0.4])


def test_any_tree_of_parameters():
    """A kernel itself, with all of it positive."""
    x = jnp.linspace(0, 1, 5)[:, None]
    target = kbr.Gaussian(0.3).gram(x, x)
    result = kbr.tune(
        lambda kernel: jnp.sum((kernel.gram(x, x) - target) ** 2),
        kbr.Gaussian(1.0),
        optax.adam(optax.cosine_decay_schedule(0.2, 80)),
        steps=80,
        positive=lambda kernel: kernel,
        **QUIET,
    )
    assert isinstance(result.parameters, kbr.Gaussian)
    np.testing.assert_allclose(result.parameters.bandwidth, 0.3, rtol=1e-2)


def test_the_validation_chooses_and_patience_stops():
    result = tuned(
        validation=lambda p: (p["a"] + 0.5) ** 2, validate_every=5, patience=3, steps=300
    )
    history = result.history
    scored = np.isfinite(np.asarray(history.validation))
    assert int(result.step) % 5 == 0 and not scored[1:5].any() and scored[::5].all()
    np.testing.assert_allclose(result.value, np.nanmin(history.validation))
    np.testing.assert_allclose(result.parameters["a"], -0.5, atol=0.3)
    assert history.loss.shape[0] < 60


def test_points_that_are_not_finite_are_rejected_and_the_descent_goes_on():
    """The loss falls towards a cliff behind which it is NaN; a fixed step leads over it."""

    def cliff(p):
        return jnp.where(p > 1, jnp.nan, jnp.where(p > 1, 1.0, -p))

    result = kbr.tune(cliff, jnp.asarray(0.0), optax.sgd(0.3), steps=40, record=True, **QUIET)
    history = result.history
    assert not bool(history.accepted.all())
    assert bool(jnp.all(history.accepted == (history.parameters <= 1)))
    assert 0.99 < float(result.parameters) <= 1


def test_a_gradient_that_is_not_finite_is_rejected_too():
    result = kbr.tune(
        lambda p: jnp.sqrt(jnp.abs(p - 1)), jnp.asarray(2.0), optax.sgd(2.0), steps=5, **QUIET
    )
    assert bool(jnp.isfinite(result.value)) and float(result.parameters) != 1


def test_many_starts_are_single_runs_side_by_side():
    starts = {
        **INITIAL,
        "h": np.array([[0.5, 2.0], [3.0, 1.0], [1.0, 1.0]]),
        "a": np.array([0.0, 1.0, -1.0]),
    }
    together = tuned(initial=starts, starts=True, steps=30, validation=quadratic, validate_every=4)
    for number in range(3):
        alone = tuned(
            initial={**INITIAL, "h": starts["h"][number], "a": starts["a"][number]},
            steps=30,
            validation=quadratic,
            validate_every=4,
        )
        np.testing.assert_allclose(
            together.parameters["h"][number], alone.parameters["h"], rtol=1e-12
        )
        np.testing.assert_allclose(together.history.loss[number], alone.history.loss, rtol=1e-12)
    best = int(jnp.argmin(together.value))
    np.testing.assert_array_equal(together.best["h"], together.parameters["h"][best])
    assert together.best["count"] == 3


def test_a_start_that_is_not_finite_leaves_the_others_alone():
    starts = {**INITIAL, "h": np.array([[0.5, 2.0], [1.0, 1.0]]), "a": np.array([0.0, np.nan])}
    result = tuned(initial=starts, starts=True, steps=20)
    assert bool(jnp.isfinite(result.value[0])) and not bool(jnp.isfinite(result.value[1]))
    assert bool(jnp.all(jnp.isfinite(result.best["h"])))


def noisy(p, key):
    data = kbr.minibatch(key, jnp.arange(10.0), 4)
    return jnp.mean((p["a"] - data) ** 2) + jnp.sum(p["h"])


def test_minibatches_differ_from_step_to_step_and_repeat_with_the_key():
    first, again = (tuned(noisy, key=jax.random.key(1)).history.loss for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.unique(np.diff(first)).size > 50
    batch = kbr.minibatch(jax.random.key(0), {"x": jnp.arange(6.0), "y": jnp.arange(6)}, 5)
    assert np.unique(batch["x"]).size == 5 and np.array_equal(batch["x"], batch["y"])


@pytest.mark.parametrize("starts", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, starts):
    initial = INITIAL
    if starts:
        initial = {**INITIAL, "h": np.array([[0.5, 2.0], [3.0, 1.0]]), "a": np.array([0.0, 1.0])}
    options = {"initial": initial, "starts": starts, "key": jax.random.key(0), "record": True}
    whole = tuned(noisy, steps=47, **options)
    path = tmp_path / "run"
    tuned(noisy, steps=23, checkpoint=path, **options)
    resumed = tuned(noisy, steps=47, checkpoint=path, checkpoint_every=10, **options)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    finished = tuned(noisy, steps=47, checkpoint=path, **options)
    np.testing.assert_array_equal(finished.history.loss, whole.history.loss)
    with pytest.raises(ValueError, match="another run"):
        tuned(noisy, steps=47, checkpoint=path, **{**options, "key": jax.random.key(1)})
    with pytest.raises(ValueError, match="another run"):
        tuned(noisy, steps=47, checkpoint=path, **{**options, "record": False})


class Parameters(eqx.Module):
    h: Any
    a: Any


@pytest.mark.parametrize("starts", [False, True])
def test_line_searches_and_their_resumption(tmp_path, starts):
    """L-BFGS, which evaluates the loss itself, on a tree of the user's own class."""
    initial = Parameters(np.array([0.5, 2.0]), np.array(3.0))
    if starts:
        initial = jax.tree.map(lambda leaf: np.stack([leaf, leaf + 1]), initial)

    def loss(p):
        return quadratic({"h": p.h, "a": p.a}) + jnp.sum(jnp.log(p.h) ** 4) + p.a**4

    def run(steps, **options):
        options = {"positive": lambda p: p.h, "starts": starts, **options, **QUIET}
        return kbr.tune(loss, initial, optimizer, steps=steps, **options)

    optimizer, path = optax.lbfgs(), tmp_path / "run"
    whole = run(14)
    run(7, checkpoint=path)
    resumed = run(14, checkpoint=path)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    root = scipy.optimize.brentq(lambda t: 2 * (t - 1) + 4 * t**3, 0, 1)
    np.testing.assert_allclose(np.log(whole.parameters.h), root, rtol=1e-5)
    np.testing.assert_allclose(
        whole.parameters.a,
        scipy.optimize.brentq(lambda t: 2 * (t + 2) + 4 * t**3, -2, 0),
        rtol=1e-5,
    )
    with pytest.raises(ValueError, match="another run"):
        kbr.tune(loss, initial, optax.adam(0.1), steps=14, starts=starts, checkpoint=path, **QUIET)


def test_the_optimizer_sees_the_tree():
    """Labels and masks by name.

    H descends, a stays where it is, and what is not tuned needs no label.
    """
    parts = {"moved": optax.sgd(0.1), "still": optax.set_to_zero()}
    named = {"h": "moved", "a": "still"}
    for labels in (
        named | {"count": None, "name": None},
        named | {"count": "still", "name": "still"},
    ):
        optimizer = optax.multi_transform(parts, labels)
        result = kbr.tune(
            quadratic, INITIAL, optimizer, steps=2, positive=lambda p: p["h"], record=True, **QUIET
        )
        gradient = 2 * (np.log(INITIAL["h"]) - 1)
        np.testing.assert_allclose(
            result.history.parameters["h"][1], INITIAL["h"] * np.exp(-0.1 * gradient)
        )
        np.testing.assert_array_equal(result.history.parameters["a"], [0, 0])


def test_parameters_of_several_dtypes():
    def loss(p):
        return jnp.sum((jnp.log(p["h"].astype(float)) - 1) ** 2) + (p["a"] + 2) ** 2

    result = tuned(loss, {"h": INITIAL["h"].astype(np.float32), "a": 0.0}, steps=30)
    assert (
        result.parameters["h"].dtype == np.float32
        and result.parameters["a"].dtype == result.value.dtype == float
    )
    np.testing.assert_allclose(result.history.loss, tuned(steps=30).history.loss, rtol=1e-5)


def test_one_program_for_all_steps():
    traces = []

    def loss(p):
        traces.append(1)
        return quadratic(p)

    tuned(loss, steps=35)
    assert len(traces) <= 2


def test_the_bar_says_what_matters(capfd):
    tuned(steps=20, progress=True)
    shown = capfd.readouterr().err
    assert "best=" in shown and "a=" in shown and "20/20" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": {"count": 3}, "positive": None}, "nothing to tune"),
        ({"initial": {**INITIAL, "h": np.array([1.0, -1.0])}}, "positive"),
        ({"initial": {**INITIAL, "a": np.nan}}, "not finite at the initial"),
        ({"positive": lambda p: {"h": True, "a": False}}, "must return leaves or subtrees"),
        ({"steps": 0}, "steps"),
        ({"patience": 0}, "patience"),
        ({"validate_every": 0}, "validate_every"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        tuned(**options)


def test_a_filter_learns_from_its_validation_loss():
    """Bandwidths and both regularizers, from a bad start, on two halves of a noisy circle."""
    rng = np.random.default_rng(0)
    angle = np.cumsum(0.3 + 0.2 * rng.normal(size=81))
    states = np.stack([np.cos(angle), np.sin(angle)], 1)
    seen = states + 0.3 * rng.normal(size=states.shape)
    states, seen = jnp.asarray(states), jnp.asarray(seen)

    def loss(p):
        filt = kbr.fit_filter(
            kbr.Gaussian(p["h"]),
            kbr.Gaussian(p["c"]),
            states[:41],
            seen[:40],
            regularizer=p["epsilon"],
            posterior_regularizer=p["delta"],
        )
        return kbr.filter_loss(filt, states[41:], seen[41:])

    initial = {"h": 3.0, "c": 3.0, "epsilon": 0.1, "delta": 0.1}
    result = kbr.tune(loss, initial, optax.adam(0.2), steps=30, positive=lambda p: p, **QUIET)
    assert float(result.value) < 0.25 * float(result.history.loss[0])
    assert all(
        float(leaf) > 0
        for leaf in jax.tree.leaves(eqx.filter(result.parameters, eqx.is_inexact_array))
    )


def test_data_sets_share_one_program():
    traces, optimizer = [], optax.adam(0.1)

    def loss(data, p):
        traces.append(1)
        return jnp.sum((p - data) ** 2)

    for value in (1.0, 2.0):
        bound = jax.tree_util.Partial(loss, jnp.full(2, value))
        result = kbr.tune(bound, jnp.zeros(2), optimizer, steps=100, **QUIET)
        np.testing.assert_allclose(result.parameters, value, atol=0.2)
    assert len(traces) <= 2


def test_positions_of_landmarks_are_learned():
    """Two landmarks that start close together move towards the two bumps of the function."""
    x = jnp.linspace(-2, 2, 20)[:, None]
    y = jnp.exp(-2 * (x - 1.2) ** 2) - jnp.exp(-2 * (x + 1.2) ** 2)

    def loss(p):
        model = kbr.fit_conditional(
            kbr.Gaussian(p["h"]), kbr.Linear(), x, y, regularizer=1e-3, landmarks_x=p["landmarks"]
        )
        return kbr.leave_out_loss(model, kernel=kbr.Linear())

    initial = {"h": 0.7, "landmarks": kbr.given_landmarks(jnp.asarray([[-0.2], [0.3]]))}
    result = kbr.tune(loss, initial, optax.adam(0.05), steps=60, positive=lambda p: p["h"], **QUIET)
    assert float(result.value) < 0.3 * float(result.history.loss[0])
    points = result.parameters["landmarks"].points
    assert float(jnp.ptp(points)) > 1 and result.parameters["landmarks"].active.dtype == bool


def test_a_run_that_stopped_early_is_saved_and_stays_stopped(tmp_path):
    options = {
        "steps": 300,
        "patience": 3,
        "validation": lambda p: (p["a"] + 0.5) ** 2,
        "checkpoint": tmp_path / "run",
    }
    first, again = tuned(**options), tuned(**options)
    assert first.history.loss.shape[0] < 100
    np.testing.assert_array_equal(first.history.loss, again.history.loss)
    np.testing.assert_array_equal(first.parameters["a"], again.parameters["a"])
    assert (tmp_path / "run").exists()
