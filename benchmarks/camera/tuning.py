r"""Learning the camera filter's parameters by gradient on the training half, against those that the
grid selected.

    python -m benchmarks.camera.tuning [camera_lookalike | camera_rotation]

Rule (b), clipped and truncated, noise variance 1e-3. The descent starts at the parameters of
`camera_selection`; each step holds out one stretch of 100 training frames, drawn by key, and fits
to the rest. Landmarks are chosen once, so that the loss does not jump. The best of the parameters
is chosen on all stretches. Both sets of parameters then filter the test half, at three noise seeds.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kbr_jax as kbr

from .. import experiment
from . import selection as camera_selection
from . import video as camera
from .methods import RANK, kernel_bayes, run_filter

SETS, VARIANCE, HELD, STEPS, SEEDS = (
    ("camera_lookalike", "camera_rotation"),
    1e-3,
    100,
    24,
    (0, 1, 2),
)
CLIPPED, PRIOR_WIDTH = "kernel Bayes filter (b), clipped, truncated", 0.3
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(0.1, STEPS))


def stretches() -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training transitions and of the held-out frames, for each stretch."""
    parts = np.arange(camera.SPLIT).reshape(-1, HELD)
    rest = []
    for part in parts:
        inside = np.isin(np.arange(camera.SPLIT), part)
        rest.append(np.flatnonzero(~inside[:-1] & ~inside[1:])[-(camera.SPLIT - HELD - 2) :])
    return np.stack(rest), parts


def of_stretch(data: dict[str, Any], p: dict[str, Any], number):
    """Squared Frobenius error on one stretch, started near the truth, as by a filter that is under
    way.
    """
    rotations, frames = data["rotations"], data["frames"]
    index, part = data["rest"][number], data["parts"][number]
    states, truth = rotations[index], rotations[part]
    kernel = kbr.Gaussian(p["h"])
    filt = kbr.fit_filter(
        kernel,
        kbr.Gaussian(p["c"]),
        states,
        frames[index],
        successors=rotations[index + 1],
        regularizer=p["epsilon"],
        posterior_regularizer=p["delta"],
        landmarks_states=data["landmarks"][0],
        landmarks_observations=data["landmarks"][1],
        clipping=kbr.Clipping(truncation=data["truncation"]),
        max_active=800,
    )
    near = jnp.exp(-jnp.sum((states - truth[0]) ** 2, axis=(1, 2)) / (2 * PRIOR_WIDTH**2))
    prior = kbr.embed(kernel, states, near / jnp.sum(near))
    steps = kbr.run_filter(
        filt, frames[part], prior=prior, output_fn=lambda step: kbr.state_mean(filt, step)
    )
    return jnp.mean(jnp.sum((steps - truth) ** 2, axis=(1, 2)))


def on_one(data, p, key):
    return of_stretch(data, p, jax.random.randint(key, (), 0, data["parts"].shape[0]))


def on_all(data, p):
    return jnp.mean(
        jax.lax.map(lambda number: of_stretch(data, p, number), jnp.arange(data["parts"].shape[0]))
    )


def learn(name: str, start: dict[str, Any]) -> tuple[kbr.tuning.TuneResult, float]:
    """The tuned parameters (c in the units of frames), and the median distance of frames."""
    rotations, frames = map(jnp.asarray, camera.load(name, VARIANCE).part(0, camera.SPLIT))
    unit = float(kbr.median_heuristic(frames[::3]))
    initial = {key: jnp.float32(start[key]) for key in ("h", "epsilon", "delta")} | {
        "c": jnp.float32(start["c"] * unit)
    }
    landmarks = (
        kbr.greedy_landmarks(kbr.Gaussian(initial["h"]), rotations, rank=RANK),
        kbr.greedy_landmarks(kbr.Gaussian(initial["c"]), frames, rank=RANK),
    )
    rest, parts = map(jnp.asarray, stretches())
    data = {
        "rotations": rotations,
        "frames": frames,
        "rest": rest,
        "parts": parts,
        "landmarks": landmarks,
    }
    data["truncation"] = jnp.float32(
        start.get("truncation", 0.02)
    )  # as selected: it has no useful gradient
    tuned = kbr.tune(
        jax.tree_util.Partial(on_one, data),
        initial,
        OPTIMIZER,
        num_steps=STEPS,
        positive=lambda p: p,
        validation=jax.tree_util.Partial(on_all, data),
        validate_every=STEPS // 4,
        key=jax.random.key(0),
    )
    return tuned, unit


def test_error(name: str, parameters: dict[str, Any], seed: int) -> float:
    data = camera.load(name, VARIANCE, seed)
    filt = kernel_bayes(*data.part(0, camera.SPLIT), **parameters)
    truth, frames = data.part(camera.SPLIT, len(data.frames))
    return float(camera.frobenius(run_filter(filt, frames).estimates, truth).mean())


def main(*names: str) -> None:
    results = experiment.previous("camera_tuning")
    for name in names or SETS:
        selected = camera_selection.selected(name, VARIANCE)[CLIPPED]
        start = time.perf_counter()
        tuned, unit = learn(name, selected)
        seconds = time.perf_counter() - start
        learned = {key: float(value) for key, value in tuned.parameters.items()}
        learned["c"] /= unit
        validation = np.asarray(tuned.history.validation)
        results[name] = {
            "seconds": seconds,
            "selected": selected,
            "learned": learned,
            "validation, squared error, at the start and at its best": [
                float(validation[0]),
                float(np.nanmin(validation)),
            ],
            "test error, selected": [test_error(name, selected, seed) for seed in SEEDS],
            "test error, learned": [
                test_error(name, {**selected, **learned}, seed) for seed in SEEDS
            ],
        }
        print(name, results[name], flush=True)
        experiment.save("camera_tuning", results)


if __name__ == "__main__":
    experiment.start(main, double=False)
