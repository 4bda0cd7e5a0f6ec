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


INITIAL = {"h": np.array([0.5, 2.0]), "a": 0.0, "count": np.int32(3), "name": "fixed"}


def tuned(loss=quadratic, initial=INITIAL, num_steps=60, rate=0.1, **options):
    options = {"positive": lambda p: p["h"], **QUIET, **options}
    return kbr.tune(loss, initial, optax.adam(rate), num_steps=num_steps, **options)


def test_it_finds_the_minimum():
    result = tuned(num_steps=200)
    np.testing.assert_allclose(result.parameters["h"], np.e, rtol=1e-3)
    np.testing.assert_allclose(result.parameters["a"], -2, rtol=1e-3)
    assert result.parameters["count"] == 3 and result.parameters["name"] == "fixed"
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
        quadratic,
        INITIAL,
        optax.sgd(0.1),
        num_steps=2,
        positive=lambda p: p["h"],
        **QUIET,
    )
    gradient = 2 * (np.log(INITIAL["h"]) - 1)  # in log h
    assert int(result.step) == 1
    np.testing.assert_allclose(result.parameters["h"], INITIAL["h"] * np.exp(-0.1 * gradient))
    np.testing.assert_allclose(result.parameters["a"], -0.4)


def test_any_tree_of_parameters():
    """A kernel itself, with all of it positive."""
    x = jnp.linspace(0, 1, 5)[:, None]
    target = kbr.Gaussian(0.3).gram(x, x)
    result = kbr.tune(
        lambda kernel: jnp.sum((kernel.gram(x, x) - target) ** 2),
        kbr.Gaussian(1.0),
        optax.adam(optax.cosine_decay_schedule(0.2, 80)),
        num_steps=80,
        positive=lambda kernel: kernel,
        **QUIET,
    )
    assert isinstance(result.parameters, kbr.Gaussian)
    np.testing.assert_allclose(result.parameters.bandwidth, 0.3, rtol=1e-2)


def test_the_validation_chooses():
    result = tuned(validation=lambda p: (p["a"] + 0.5) ** 2, validate_every=5, num_steps=50)
    history = result.history
    scored = np.isfinite(np.asarray(history.validation))
    assert int(result.step) % 5 == 0 and not scored[1:5].any() and scored[::5].all()
    np.testing.assert_allclose(result.value, np.nanmin(history.validation))
    np.testing.assert_allclose(result.parameters["a"], -0.5, atol=0.3)


def test_points_that_are_not_finite_are_rejected_and_the_descent_goes_on():
    """The loss falls towards a cliff behind which it is NaN; a fixed step leads over it."""

    def cliff(p):
        return jnp.where(p > 1, jnp.nan, jnp.where(p > 1, 1.0, -p))

    result = kbr.tune(cliff, jnp.asarray(0.0), optax.sgd(0.3), num_steps=40, **QUIET)
    history = result.history
    assert not bool(history.accepted.all())
    # The loss is -p: NaN where the point was rejected, else at least -1.
    assert bool(jnp.all(history.accepted == (history.loss >= -1)))
    assert 0.99 < float(result.parameters) <= 1


def test_a_gradient_that_is_not_finite_is_rejected_too():
    result = kbr.tune(
        lambda p: jnp.sqrt(jnp.abs(p - 1)), jnp.asarray(2.0), optax.sgd(2.0), num_steps=5, **QUIET
    )
    assert bool(jnp.isfinite(result.value)) and float(result.parameters) != 1


def noisy(p, key):
    data = kbr.tuning.minibatch(jnp.arange(10.0), 4, key=key)
    return jnp.mean((p["a"] - data) ** 2) + jnp.sum(p["h"])


def test_minibatches_differ_from_step_to_step_and_repeat_with_the_key():
    first, again = (tuned(noisy, key=jax.random.key(1)).history.loss for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.unique(np.diff(first)).size > 50
    batch = kbr.tuning.minibatch(
        {"x": jnp.arange(6.0), "y": jnp.arange(6)}, 5, key=jax.random.key(0)
    )
    assert np.unique(batch["x"]).size == 5 and np.array_equal(batch["x"], batch["y"])


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    options = {"key": jax.random.key(0)}
    whole = tuned(noisy, num_steps=247, **options)
    path = tmp_path / "run"
    tuned(noisy, num_steps=23, checkpoint=path, **options)
    resumed = tuned(noisy, num_steps=247, checkpoint=path, **options)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    finished = tuned(noisy, num_steps=247, checkpoint=path, **options)
    np.testing.assert_array_equal(finished.history.loss, whole.history.loss)
    with pytest.raises(ValueError, match="another run"):
        tuned(noisy, num_steps=247, checkpoint=path, key=jax.random.key(1))


class Parameters(eqx.Module):
    h: Any
    a: Any


def test_line_searches_and_their_resumption(tmp_path):
    """L-BFGS, which evaluates the loss itself, on a tree of the user's own class."""
    initial = Parameters(np.array([0.5, 2.0]), np.array(3.0))

    def loss(p):
        return quadratic({"h": p.h, "a": p.a}) + jnp.sum(jnp.log(p.h) ** 4) + p.a**4

    def run(steps, **options):
        options = {"positive": lambda p: p.h, **options, **QUIET}
        return kbr.tune(loss, initial, optimizer, num_steps=steps, **options)

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
        kbr.tune(loss, initial, optax.adam(0.1), num_steps=14, checkpoint=path, **QUIET)


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
            quadratic,
            INITIAL,
            optimizer,
            num_steps=2,
            positive=lambda p: p["h"],
            **QUIET,
        )
        gradient = 2 * (np.log(INITIAL["h"]) - 1)
        np.testing.assert_allclose(result.parameters["h"], INITIAL["h"] * np.exp(-0.1 * gradient))
        assert result.parameters["a"] == 0


def test_parameters_of_several_dtypes():
    def loss(p):
        return jnp.sum((jnp.log(p["h"].astype(float)) - 1) ** 2) + (p["a"] + 2) ** 2

    result = tuned(loss, {"h": INITIAL["h"].astype(np.float32), "a": 0.0}, num_steps=30)
    assert (
        result.parameters["h"].dtype == np.float32
        and result.parameters["a"].dtype == result.value.dtype == float
    )
    np.testing.assert_allclose(result.history.loss, tuned(num_steps=30).history.loss, rtol=1e-5)


def test_one_program_for_all_steps():
    traces = []

    def loss(p):
        traces.append(1)
        return quadratic(p)

    tuned(loss, num_steps=35)
    assert len(traces) <= 2


def test_the_bar_says_what_matters(capfd):
    tuned(num_steps=20, progress=True)
    shown = capfd.readouterr().err
    assert "best=" in shown and "a=" in shown and "20/20" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": {"count": np.int32(3)}, "positive": None}, "nothing to tune"),
        ({"initial": {**INITIAL, "h": np.array([1.0, -1.0])}}, "positive"),
        ({"initial": {**INITIAL, "a": np.nan}}, "not finite at the initial"),
        ({"positive": lambda p: {"h": True, "a": False}}, "must return leaves or subtrees"),
        ({"num_steps": 0}, "num_steps"),
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
    result = kbr.tune(loss, initial, optax.adam(0.2), num_steps=30, positive=lambda p: p, **QUIET)
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
        result = kbr.tune(bound, jnp.zeros(2), optimizer, num_steps=100, **QUIET)
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

    initial = {"h": 0.7, "landmarks": kbr.Landmarks(jnp.asarray([[-0.2], [0.3]]))}
    result = kbr.tune(
        loss, initial, optax.adam(0.05), num_steps=60, positive=lambda p: p["h"], **QUIET
    )
    assert float(result.value) < 0.3 * float(result.history.loss[0])
    points = result.parameters["landmarks"].points
    assert float(jnp.ptp(points)) > 1 and result.parameters["landmarks"].active.dtype == bool


def test_what_cannot_move_is_named():
    """A forgotten parameter, a step function, a Python integer (frictions, 10)."""

    def loss(p):
        return (p["a"] - 1.0) ** 2 + jnp.floor(p["b"]["step"]) + 0 * p["n"]

    initial = {"a": 0.0, "b": {"step": 0.5, "unused": jnp.ones(2)}, "n": 3}
    with pytest.warns(UserWarning) as caught:
        kbr.tune(loss, initial, optax.sgd(0.1), num_steps=3, **QUIET)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 2
    assert "`initial['b']['step']`, `initial['b']['unused']`" in messages[0]
    assert "`initial['n']` is the integer 3" in messages[1]


def test_a_checkpoint_of_another_problem_is_refused(tmp_path):
    path = tmp_path / "run"

    def run(loss, rate=0.1, **options):
        return kbr.tune(
            loss, 0.0, optax.adam(rate), num_steps=20, checkpoint=path, progress=False, **options
        )

    run(lambda p: (p - 3) ** 2)
    for options in (
        {"loss": lambda p: (p + 5) ** 2},
        {"loss": lambda p: (p - 3) ** 2, "rate": 0.3},
        {"loss": lambda p: (p - 3) ** 2, "validation": lambda p: p**2},
    ):
        with pytest.raises(ValueError, match="another run"):
            run(**options)


def test_minibatches_do_not_choose_the_luckiest_one():
    def loss(p, key):
        return (p - 3) ** 2 + 10 * jax.random.normal(key)

    found = kbr.tune(
        loss, 0.0, optax.adam(0.1), num_steps=200, key=jax.random.key(0), progress=False
    )
    assert found.step == 199 and abs(found.parameters - 3) < 0.5


@pytest.mark.parametrize("many", [False, True])
def test_a_validation_that_is_never_finite(many):
    def run(validation):
        loss, options = (lambda p: (p - 2.0) ** 2), {"num_steps": 3, "progress": False}
        if many:
            return kbr.tuning.tune_starts(
                loss, [1.0, 0.0], optax.adam(0.1), validation=validation, **options
            )
        return kbr.tune(loss, 1.0, optax.adam(0.1), validation=validation, **options)

    with pytest.raises(ValueError, match="validation loss was not finite at any step"):
        run(lambda p: p * jnp.nan)
    run(lambda p: p)


def test_the_bandwidth_of_no_forecast_is_unknown():
    nothing = kbr.embed(kbr.Gaussian(1.0), jnp.arange(4.0), jnp.zeros((2, 4)))
    assert np.isnan(kbr.tuning.fit_bandwidth(nothing, jnp.arange(2.0)))


def test_a_checkpoint_is_of_one_rhythm_and_not_longer_than_the_run(tmp_path):
    path = tmp_path / "run"

    def run(steps, every):
        return kbr.tune(
            lambda p: (p - 2.0) ** 2,
            0.0,
            optax.adam(0.1),
            num_steps=steps,
            checkpoint=path,
            validation=lambda p: p**2,
            validate_every=every,
            progress=False,
        )

    run(20, 10)
    with pytest.raises(ValueError, match="is of another run"):
        run(30, 3)
    with pytest.raises(ValueError, match="has 20 steps, more than `num_steps` = 10"):
        run(10, 10)
    assert len(run(30, 10).history.loss) == 30


def test_rows_of_a_batch_are_of_one_length():
    with pytest.raises(ValueError, match="different numbers of points"):
        kbr.tuning.minibatch({"x": jnp.arange(9.0), "y": jnp.arange(3.0)}, 2, key=jax.random.key(0))


def test_a_checkpoint_of_a_small_loss_or_another_kind_of_key(tmp_path):
    def run(target, name, key=None):
        def loss(p, key=None):
            return 1e-10 * (p["h"] - target) ** 2

        return kbr.tuning.tune(
            loss,
            {"h": 1.0},
            optax.adam(0.1),
            num_steps=4,
            key=key,
            progress=False,
            checkpoint=tmp_path / name,
        )

    run(3.0, "loss")
    with pytest.raises(ValueError, match="is of another run"):
        run(-5.0, "loss")
    run(3.0, "key", jax.random.key(0))
    with pytest.raises(ValueError, match="is of another run"):
        run(3.0, "key", jax.random.PRNGKey(0))


def test_an_infinite_validation_is_not_the_best():
    def validation(p):
        return jnp.log(jnp.maximum(0.7 - p, 0))

    def loss(p):
        return (p - 2) ** 2

    found = kbr.tune(loss, 0.5, optax.adam(0.1), num_steps=5, validation=validation, **QUIET)
    assert np.isfinite(float(found.value)) and float(found.parameters) < 0.7
    results = kbr.tuning.tune_starts(
        loss, [0.5, -1.0], optax.adam(0.1), num_steps=5, validation=validation, **QUIET
    )
    assert all(np.isfinite(float(one.value)) for one in results)


def test_a_step_without_a_gradient_has_no_loss():
    found = kbr.tune(jnp.sqrt, 1.0, optax.sgd(2.0), num_steps=6, **QUIET)
    loss, accepted = np.asarray(found.history.loss), np.asarray(found.history.accepted)
    assert not np.any(np.isfinite(loss[~accepted])) and found.value == loss[accepted].min()


def test_starts_share_what_is_not_tuned():
    def loss(p):
        return jnp.sum(jnp.abs(p["c"])) * (p["h"] - 2) ** 2

    def starts(second):
        return [{"h": h, "c": jnp.asarray([c])} for h, c in ((1.0, 1j), (3.5, second))]

    def run(second):
        return kbr.tuning.tune_starts(loss, starts(second), optax.adam(0.1), num_steps=3, **QUIET)

    assert run(1j)[0].parameters["c"].shape == (1,)
    with pytest.raises(ValueError, match="differs from"):
        run(5j)


def test_words_among_the_parameters_are_named():
    with pytest.raises(ValueError, match="`initial` holds ndarray"):
        tuned(lambda p: (p["h"] - 2) ** 2, {"h": 1.0, "n": np.array(["a"])}, positive=None)
