"""Outside `jit`, a first call compiles few programs, and a second one of the same shapes none."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kbr_jax as kbr
from kbr_jax import tuning

RNG = np.random.default_rng(0)
X, Y = jnp.asarray(RNG.normal(size=(25, 2))), jnp.asarray(RNG.normal(size=(25, 1)))
MORE = jnp.asarray(RNG.normal(size=(60, 2)))
KERNEL = kbr.Gaussian(1.0)
RIDGE = {"regularizer": 1e-3}
KEY = jax.random.key(0)


def model(landmarks=None):
    return kbr.fit_conditional(
        KERNEL, KERNEL, X, Y, **RIDGE, landmarks_x=landmarks, landmarks_y=landmarks
    )


def held_out():
    return tuning.leave_out_forecasts(model())


def dynamics():
    return kbr.dynamics.fit_dynamics(KERNEL, kbr.dynamics.sample_sequence(X.reshape(5, 5, 2)))


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
        tuning.adaptive_margins(held_out(), Y),
    ),
    "dynamics": lambda: kbr.dynamics.extrapolate(dynamics(), 2, estimator="ridge"),
    "learned conditional": lambda: kbr.learning.learn_conditional(X, Y, progress=False)[0],
    "learned features": lambda: (
        kbr.learning.learn_features(
            eqx.nn.MLP(2, 2, 4, 1, key=KEY),
            MORE,
            MORE,
            num_steps=10,
            num_pairs=8,
            key=KEY,
            progress=False,
        )[1].value
    ),
    "moments on a mesh": lambda: kbr.moments.collect_moments(
        kbr.moments.moment_maps(KERNEL, KERNEL, kbr.Landmarks(X[:4]), kbr.Landmarks(Y[:4])),
        X,
        Y,
        mesh=jax.make_mesh((1,), ("rows",)),
    ),
    "rotations": lambda: kbr.embedding.nearest_rotation(X[:4].reshape(2, 2, 2)),
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
    jax.jit(lambda x: x + 1)(0.0)
    assert compilations  # the listener hears
    jax.block_until_ready(jax.tree.leaves(CALLS[name]()))
    compilations.clear()
    jax.block_until_ready(jax.tree.leaves(CALLS[name]()))
    assert not compilations


GPU = jax.default_backend() == "gpu"
#: The most programs of a first call. One for each operation would be 60 to 120 of them. On a GPU
#: the distance of two embeddings has one more.
FIRST = {
    "embed": (7, lambda x: kbr.embed(None, x)),
    "quantile": (8, lambda x: kbr.quantile(kbr.embed(KERNEL, x), np.array([0.1, 0.9]))),
    "mmd": (8 + GPU, lambda x: kbr.mmd(kbr.embed(KERNEL, x), kbr.embed(KERNEL, x[:9]))),
    "two samples": (16, lambda x: kbr.hypotheses.two_sample_test(None, x, x[:15] + 1, key=KEY)),
    "leaving out": (
        18,
        lambda x: tuning.leave_out_loss(kbr.fit_conditional(KERNEL, KERNEL, x, x, **RIDGE)),
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_first_call_compiles_few_programs(name, compilations):
    most, call = FIRST[name]
    x = RNG.normal(size=(23 + len(name), 3))  # of no other test
    compilations.clear()
    jax.block_until_ready(jax.tree.leaves(call(x)))
    assert len(compilations) <= most
