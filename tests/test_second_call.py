"""Outside `jit`, a second call of the same shapes compiles nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr
from kbr_jax import tuning

RNG = np.random.default_rng(0)
X, Y = jnp.asarray(RNG.normal(size=(25, 2))), jnp.asarray(RNG.normal(size=(25, 1)))
KERNEL = kbr.Gaussian(1.0)
RIDGE = {"regularizer": 1e-3}


def model(landmarks=None):
    return kbr.fit_conditional(
        KERNEL, KERNEL, X, Y, **RIDGE, landmarks_x=landmarks, landmarks_y=landmarks
    )


def held_out():
    return tuning.leave_out_forecasts(model())


CALLS = {
    "condition": lambda: kbr.condition(model(), X[:3]),
    "sum": lambda: kbr.sum_rule(model(), kbr.embed(KERNEL, X[:5])),
    "bayes": lambda: kbr.bayes_rule(model(), kbr.embed(KERNEL, X[:5]), Y[0], **RIDGE),
    "bayes, landmarks": lambda: kbr.bayes_rule(model(8), kbr.embed(KERNEL, X[:5]), Y[0], **RIDGE),
    "filter": lambda: kbr.run_filter(
        kbr.fit_filter(KERNEL, KERNEL, X, Y, **RIDGE, posterior_regularizer=1e-3), Y
    ),
    "leaving out": lambda: tuning.leave_out_loss(model()),
    "reading": lambda: (
        kbr.density(held_out(), Y[:3]),
        kbr.embedding.modes(held_out(), 2),
        kbr.embedding.log_score(held_out(), Y),
        kbr.cdf(held_out(), 0.5),
        kbr.quantile(held_out(), 0.5),
        tuning.fit_bandwidth(held_out(), Y),
        tuning.conformal_margin(held_out(), Y),
        tuning.calibrate(held_out(), Y),
    ),
}


@pytest.fixture
def compilations():
    found = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_compiles_nothing(name, compilations):
    jax.block_until_ready(jax.tree.leaves(CALLS[name]()))
    assert compilations  # the listener hears
    compilations.clear()
    jax.block_until_ready(jax.tree.leaves(CALLS[name]()))
    assert not compilations
