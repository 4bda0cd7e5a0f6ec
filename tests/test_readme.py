"""The examples of the README and of the guide run as printed."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = pathlib.Path(__file__).parent.parent
BLOCKS, GUIDE = (
    re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    for name in ("README.md", "docs/guide.md")
)


def test_first_example_finds_the_mode_that_the_prior_allows(capsys):
    names: dict = {}
    exec(BLOCKS[0], names)
    assert capsys.readouterr().out
    kbr, posterior = names["kbr"], names["posterior"]
    at = kbr.evaluate(posterior, jnp.asarray([[-1.0], [0.0], [1.0]]))
    assert float(at[2]) > 0.8 and float(jnp.max(jnp.abs(at[:2]))) < 0.1
    np.testing.assert_allclose(kbr.mean(posterior), [1.0], atol=0.1)


def test_filter_example():
    import kbr_jax as kbr

    keys = jax.random.split(jax.random.key(0), 4)
    names = {
        "jax": jax,
        "kbr": kbr,
        "states": jax.random.normal(keys[0], (151, 2)),
        "observations": jax.random.normal(keys[1], (150, 2)),
        "new_observations": jax.random.normal(keys[2], (5, 2)),
        "many_sequences": jax.random.normal(keys[3], (3, 5, 2)),
    }
    exec(BLOCKS[1], names)
    assert names["estimates"].shape == (5, 2) and names["batch"].shape == (3, 5, 2)
    assert bool(jnp.all(jnp.isfinite(names["batch"])))
    assert names["smoothed"].weights.shape[0] == 5


def test_inputs_example():
    import kbr_jax as kbr

    keys = jax.random.split(jax.random.key(0), 6)
    names = {"jax": jax, "kbr": kbr} | {
        name: jax.random.normal(key, shape)
        for name, key, shape in zip(
            ("states", "successors", "inputs", "observations", "new_observations", "new_inputs"),
            keys,
            ((60, 2), (60, 2), (60, 1), (60, 3), (5, 3), (5, 1)),
            strict=True,
        )
    }
    names |= {f"kernel_{part}": kbr.Gaussian(1.0) for part in "sou"}
    exec(GUIDE[0], names)
    assert kbr.mean(names["seen_next"]).shape == (5, 3)
    assert bool(jnp.all(jnp.isfinite(names["smoothed"].weights)))


def test_trajectories_example():
    import kbr_jax as kbr

    key = jax.random.key(0)
    names = {"kbr": kbr, "ridges": {"regularizer": 1e-2, "posterior_regularizer": 1e-2}}
    names |= {f"kernel_{part}": kbr.Gaussian(1.0) for part in "so"}
    for name, d in (("list_of_states", 2), ("list_of_observations", 1), ("new_lists", 1)):
        names[name] = [jax.random.normal(key, (n, d)) for n in (9, 7)]
    names["held_out_states"], names["held_out_observations"] = (
        names["list_of_states"],
        names["list_of_observations"],
    )
    exec(GUIDE[1], names)
    assert [m.shape for m in names["means"]] == [(9, 2), (7, 2)] and float(names["loss"]) > 0


def test_learning_example(tmp_path, monkeypatch):
    import kbr_jax as kbr

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    angle = np.cumsum(0.3 + 0.2 * rng.normal(size=121))
    states = jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], 1))
    seen = states + 0.3 * jnp.asarray(rng.normal(size=states.shape))
    names = {
        "kbr": kbr,
        "optax": optax,
        "states": states[:81],
        "observations": seen[:80],
        "validation_states": states[81:],
        "validation_observations": seen[81:],
    }
    exec(BLOCKS[2], names)
    tuned = names["tuned"]
    assert float(tuned.value) < 0.9 * float(tuned.history.loss[0])
    assert kbr.load("parameters.kbr") == jax.tree.map(float, tuned.parameters)


def test_conditional_example(monkeypatch):
    import kbr_jax as kbr
    from kbr_jax.learning import _conditional

    for name, value in (("TRIALS", 6), ("REFINEMENTS", 2), ("STEPS", 4)):
        monkeypatch.setattr(_conditional, name, value)
    x = jnp.linspace(-2, 2, 60)[:, None]
    names = {"kbr": kbr, "x": x, "y": jnp.sin(x), "x_new": jnp.asarray([1.0])}
    exec(GUIDE[2], names)
    assert float(names["low"][0]) <= float(names["high"][0])
    np.testing.assert_allclose(kbr.mean(names["forecast"]), jnp.sin(1.0), atol=0.1)


def test_belief_propagation_example():
    import kbr_jax as kbr

    rng = np.random.default_rng(0)
    rows, columns = 2, 3
    depth = rng.uniform(size=(8, 40))
    near = [(d[:20], d[:20] + 0.05 * rng.normal(size=20)) for d in depth[:3]]
    leaves = [
        (d, np.stack([np.cos(9 * d), d], 1) + 0.1 * rng.normal(size=(40, 2))) for d in depth[3:5]
    ]
    pairs = [tuple(map(jnp.asarray, pair)) for pair in (*near, *leaves)]

    @jax.jit  # one program instead of many small ones
    def run(pairs, seen, depths):
        names = {
            "kbr": kbr,
            "rows": rows,
            "columns": columns,
            "pairs": pairs,
            "seen": seen,
            "depths": depths,
        }
        exec(GUIDE[3], names)
        return names["depth"]

    depth = run(pairs, jnp.asarray(rng.normal(size=(6, 2))), jnp.linspace(0, 1, 30))
    assert depth.shape == (6,) and bool(jnp.all((depth >= 0) & (depth <= 1)))


def test_dynamics_example():
    import kbr_jax as kbr

    rng = np.random.default_rng(0)
    samples = [
        jnp.asarray(rng.normal(size=(n, 2)) + 0.5 * t) for t, n in enumerate((12, 9, 12, 10))
    ]
    labeled = [(x, (x[:, 0] > 0.5 * t).astype(int)) for t, x in enumerate(samples)]
    names = {"kbr": kbr, "list_of_samples": samples, "labeled": labeled}
    exec(GUIDE[4], names)
    assert names["points"].shape == (200, 2)
    assert bool(
        jnp.all(
            kbr.dynamics.classify(names["svm"], jnp.asarray([[-2.0, 1.5], [6.0, 1.5]]))
            == jnp.asarray([0, 1])
        )
    )


def test_likelihood_free_example(capsys):
    import kbr_jax as kbr

    names = {"jax": jax, "jnp": jnp, "kbr": kbr}
    exec(GUIDE[5], names)
    assert capsys.readouterr().out and names["samples"].shape == (50, 2)
    assert abs(float(kbr.mean(names["posterior"])[0]) - 0.95) < 0.3
