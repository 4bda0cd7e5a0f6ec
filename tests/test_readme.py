"""The examples of the README run as printed."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCKS = re.findall(r"```python\n(.*?)```", (pathlib.Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)


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
    assert names["estimates"].shape == (5, 2) and names["batch"].shape == (3, 5, 150)
    assert bool(jnp.all(jnp.isfinite(names["batch"])))


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
