r"""Features of frames from a small network, as observations of the kernel Bayes filter.

    python -m benchmarks.camera.learned [rotation | unturned | lookalike | recovery]

One convolution predicts features that have the camera's rotation as their cause.

- `camera_rotation`: the embedding of the rotation, in coordinates of two Gaussian kernels and with
  the nine entries. This is the loss of a conditional mean embedding. A frame turned by a quarter is
  the exact frame of a camera that is rolled by a quarter, so training draws such turns. The cell
  `unturned` does without.
- `camera_lookalike`: the mean frame at a rotation, by kernel ridge regression of frames on
  rotations, in its first principal components. One frame does not tell the rotation there, and a
  network that must say it invents a side. The filter also sees the frame itself in these
  components.

There a filter also starts half a turn wrong at 20 places, as in `recovery`, with a test of its
belief (`fit_cusum_restart`) by what `learning.fit_image_map` finds in the frames.

Each of three networks leaves out every third stretch of 100 training frames, whose loss stops it. A
training frame has the features of the network that did not see it; a test frame has the mean over
networks. Filters are chosen on three folds of the training half.
"""

import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import kbr_jax as kbr
from kbr_jax.features import fit_features

from .. import experiment
from . import video as camera
from .learned_peers import NETWORKS, STRETCH, held_loss, particles, projected, recurrent
from .methods import RANK, frame_kernel, kernel_bayes, run_filter
from .recovery import BANDWIDTH, HALF_TURN, STARTS, recover, sightings, track
from .selection import folds, prior_around, product

SEEDS, STEPS, BATCH = (0, 1, 2), 1200, 64
WITHIN = 40  # frames for the way back from a wrong start without a test
QUARTER = np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 1]], np.float32)
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(2e-3, STEPS))
)
GRIDS = {
    "camera_rotation": product(
        h=[1.2, 2.0], c=[0.7], epsilon=[1e-2], delta=[1e-6], truncation=[0.2]
    ),
    "camera_lookalike": product(
        h=[0.4], c=[0.6], epsilon=[1e-2], delta=[1e-6], truncation=[0.02, 0.05]
    ),
}


class Convolution(eqx.Module):
    """Two layers on patches of 4 x 4 pixels, two pixels apart, and two dense layers."""

    weights: list[jax.Array]
    biases: list[jax.Array]

    def __init__(self, outputs: int, key: jax.Array):
        """Random weights."""
        sizes = [(48, 32), (16 * 32, 64), (25 * 64, 128), (128, outputs)]
        keys = jax.random.split(key, len(sizes))
        self.weights = [
            jax.random.normal(k, s) * (1.5 / s[0]) ** 0.5 for k, s in zip(keys, sizes, strict=True)
        ]
        self.biases = [jnp.zeros(s[1]) for s in sizes]

    def __call__(self, frames: jax.Array) -> jax.Array:
        """Features `[b, outputs]` of frames `[b, 1200]`."""
        x = frames.reshape(-1, 20, 20, 3)
        for layer in range(2):
            x = jax.nn.gelu(patches(x) @ self.weights[layer] + self.biases[layer])
        x = jax.nn.gelu(x.reshape(len(x), -1) @ self.weights[2] + self.biases[2])
        return x @ self.weights[3] + self.biases[3]


def patches(images: jax.Array) -> jax.Array:
    """Patches of 4 x 4 pixels as rows, a margin of one pixel added."""
    x = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    last = x.shape[1] - 3
    return jnp.concatenate(
        [x[:, i : i + last : 2, j : j + last : 2] for i in range(4) for j in range(4)], axis=-1
    )


def quarter_turns(frames: jax.Array, turns: jax.Array) -> jax.Array:
    """Each frame turned counterclockwise by its number of quarters."""
    images = frames.reshape(-1, 20, 20, 3)
    turned = jnp.stack([jnp.rot90(images, k, axes=(1, 2)) for k in range(4)])
    return turned[turns, jnp.arange(len(images))].reshape(frames.shape)


def loss(data: dict[str, Any], network: Convolution, key: jax.Array) -> jax.Array:
    """Squared error on a minibatch, with fresh noise and, where there are targets for it, turns."""
    rows, turning, noise = jax.random.split(key, 3)
    batch = kbr.tuning.minibatch((data["frames"], data["targets"]), BATCH, key=rows)
    frames, targets = batch
    turns = jax.random.randint(turning, (BATCH,), 0, targets.shape[1])
    if targets.shape[1] > 1:
        frames = quarter_turns(frames, turns)
    frames = frames + data["noise"] * jax.random.normal(noise, frames.shape)
    return jnp.mean(jnp.sum((network(frames) - targets[jnp.arange(BATCH), turns]) ** 2, axis=1))


def cross_fitted(frames, tests, targets, deviation: float) -> tuple[Any, Any]:
    """Features of the training frames, each from the network that did not see it, and of tests."""
    center, scale = float(frames.mean()), float(frames.std())
    frames, tests = (jnp.asarray((part - center) / scale) for part in (frames, tests))
    part_of = np.arange(len(frames)) // STRETCH % NETWORKS
    training, test = np.zeros((len(frames), targets.shape[2]), np.float32), []
    for k in tqdm(range(NETWORKS), unit="network"):
        rest, held = (
            {"frames": frames[rows], "targets": jnp.asarray(targets[rows])}
            for rows in (part_of != k, part_of == k)
        )
        found = kbr.tune(
            jax.tree_util.Partial(loss, {**rest, "noise": jnp.float32(deviation / scale)}),
            Convolution(targets.shape[2], jax.random.key(k)),
            OPTIMIZER,
            num_steps=STEPS,
            validation=jax.tree_util.Partial(held_loss, held),
            validate_every=STEPS // 10 - 1,
            key=jax.random.key(k),
            progress=False,
        )
        network = eqx.filter_jit(found.parameters)
        training[part_of == k] = network(held["frames"])
        test.append(np.asarray(network(tests)))
    return training, np.mean(test, axis=0)


def rotation_targets(rotations: np.ndarray, turns: int) -> np.ndarray:
    """Nine entries and embedding of each rotation, rolled by 0 to `turns - 1` quarters."""
    rolls = np.stack([np.linalg.matrix_power(QUARTER, k) for k in range(turns)])
    rolled = jnp.asarray(np.einsum("tij,kjl->tkil", rotations, rolls).reshape(-1, 3, 3))
    parts = [rolled.reshape(-1, 9)]
    for width in (0.3, 1.0):
        features = fit_features(kbr.Gaussian(width), jnp.asarray(rotations), 100)
        parts.append(features.at(rolled).matrix)
    return np.concatenate(parts, axis=1).reshape(len(rotations), turns, -1)


def frame_targets(rotations, frames, components: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """The mean frame at each rotation, less the mean of all, in components; and the components."""
    centered = frames - frames.mean(0)
    model = kbr.fit_conditional(
        kbr.Gaussian(0.6), kbr.Linear(), rotations, centered, regularizer=1e-5
    )
    means = np.asarray(kbr.conditional_expectation(model, rotations, lambda frame: frame))
    basis = np.linalg.svd(means, full_matrices=False)[2][:components].T
    return (means @ basis)[:, None], basis


def features_of(name: str, data: camera.Camera, deviation: float, turns: int):
    """Features of training and test frames."""
    rotations, frames = data.part(0, camera.SPLIT)
    tests = data.part(camera.SPLIT, len(data.frames))[1]
    if name == "camera_rotation":
        return cross_fitted(frames, tests, rotation_targets(rotations, turns), deviation)
    targets, basis = frame_targets(rotations, frames)
    found = cross_fitted(frames, tests, targets, deviation)
    center = frames.mean(0)
    return tuple(
        np.concatenate([(part - center) @ basis, features], axis=1)
        for part, features in zip((frames, tests), found, strict=True)
    )


def choose(name: str, rotations, features) -> tuple[dict[str, Any], float]:
    """The filter of least mean error on three folds, each started near the truth."""
    scores = []
    for candidate in tqdm(GRIDS[name], unit="candidate"):
        errors = []
        for rows, held in folds():
            filt = kernel_bayes(rotations[rows], features[rows], **candidate)
            track = run_filter(
                filt, features[held], prior_around(rotations[held][0], rotations[rows])
            )
            errors.append(camera.frobenius(track.estimates, rotations[held]).mean())
        scores.append((float(np.nan_to_num(np.mean(errors), nan=2.83)), candidate))
    best = min(scores, key=lambda score: score[0])
    return best[1], best[0]


def wrong_starts(filt, features, truth, rotations) -> dict[str, Any]:
    """How often the filter is within distance 1 of the truth in time, started half a turn wrong."""
    back = []
    for start in STARTS:
        part = slice(start, min(start + WITHIN, len(truth)))
        prior = prior_around(HALF_TURN @ truth[start], rotations)
        right = camera.frobenius(run_filter(filt, features[part], prior).estimates, truth[part]) < 1
        back.append(bool(right[-1]))
    return {"starts": len(back), f"right at frame {WITHIN}": sum(back), "each": back}


def tested_filter(
    rotations: np.ndarray, features: np.ndarray, frames: np.ndarray, parameters: dict[str, Any]
) -> kbr.filtering.CusumRestartFilter:
    """The same filter with a test of its belief. Observations are rows of features and frame."""
    count, kernel = features.shape[1], kbr.Gaussian(BANDWIDTH)
    rows = jnp.asarray(np.concatenate([features, frames], axis=1))
    base = kbr.fit_filter(
        kbr.Gaussian(parameters["h"]),
        kbr.Warped(frame_kernel(features, parameters["c"]), lambda row: row[:count]),
        rotations,
        rows,
        regularizer=parameters["epsilon"],
        posterior_regularizer=parameters["delta"],
        landmarks_states=RANK,
        landmarks_observations=RANK,
        clipping=kbr.Clipping(True, parameters["truncation"], True),
        max_active=800,
    )
    images = frames.reshape(-1, 20, 20, 3)
    found = kbr.learning.fit_image_map(kernel, rotations, images, features, key=jax.random.key(0))
    return kbr.filtering.fit_cusum_restart(
        base,
        (jnp.asarray(rotations[:-1]), rows[:-1]),
        lambda row: found(row[count:].reshape(20, 20, 3)),
        kbr.decode_rotation,
        kernel=kernel,
    )


def tested(parameters, data: camera.Camera, training, tests) -> dict[str, Any]:
    """With a test of the belief: starts that are back in time, and the error while it tracks."""
    rotations, frames = data.part(0, camera.SPLIT)
    filt = tested_filter(rotations, training, frames, parameters)
    rows = np.concatenate([np.concatenate([training, tests]), data.frames], axis=1)
    whole = camera.Camera(rows, data.rotations)
    clear, half = sightings()[camera.SPLIT :], whole.part(camera.SPLIT, 2 * camera.SPLIT)
    seen = whole.rotations[: camera.SPLIT]
    runs = [recover(filt, seen, half, start, clear) for start in tqdm(STARTS, unit="start")]
    back = [run["in time"] for run in runs]
    return {**track(filt, whole), "starts": len(back), "back in time": sum(back), "each": back}


def cell(name: str, variance: float, seed: int, turns: int, chosen: dict | None, peers: bool):
    """Everything at one seed of the noise."""
    data = camera.load(name, variance, seed)
    rotations, (truth, _) = data.rotations[: camera.SPLIT], data.part(camera.SPLIT, 3600)
    begin = time.perf_counter()
    training, tests = features_of(name, data, variance**0.5, turns)
    found: dict[str, Any] = {"seconds of training": time.perf_counter() - begin}
    if chosen is None:
        chosen, found["validation"] = choose(name, rotations, training)
    found["parameters"] = chosen
    filt = kernel_bayes(rotations, training, **chosen)
    track = run_filter(filt, tests)
    found["kernel Bayes filter"] = camera.summary(track.estimates, truth)
    found["milliseconds"] = track.milliseconds
    if name == "camera_lookalike":
        found["wrong starts"] = wrong_starts(filt, tests, truth, rotations)
        found["with a test"] = tested(chosen, data, training, tests)
    if peers:
        entries = tests[:, :9]
        if name == "camera_lookalike":
            frames, test_frames = np.split(data.frames, 2)
            targets = rotations.reshape(-1, 1, 9)
            entries = cross_fitted(frames, test_frames, targets, variance**0.5)[1]
        found["regression head"] = camera.summary(projected(entries), truth)
        estimates = recurrent(rotations, training, tests)
        found["GRU on the features"] = camera.summary(estimates, truth)
        width = slice(0, 9) if name == "camera_rotation" else slice(None)
        estimates = particles(rotations, training[:, width], tests[:, width], chosen["h"])
        found["particle filter"] = camera.summary(estimates, truth)
    return found


def main(*wanted: str) -> None:
    results = experiment.previous("camera_learned")
    parts = {
        "rotation": [("camera_rotation", 1e-3, 0, 4)],
        "lookalike": [("camera_lookalike", 1e-2, seed, 1) for seed in SEEDS],
        "recovery": [("camera_lookalike", 1e-3, 0, 1)],
        "unturned": [("camera_rotation", 1e-3, 0, 1)],
    }
    for part in wanted or parts:
        results[part], chosen = {}, None
        for name, variance, seed, turns in parts[part]:
            peers = part != "recovery" and seed == 0
            found = cell(name, variance, seed, turns, chosen, peers)
            results[part][str(seed)], chosen = found, found["parameters"]
            experiment.save("camera_learned", results)
            print(part, variance, seed, found, flush=True)


if __name__ == "__main__":
    experiment.start(main, double=False)
