"""Peers of the filter on learned features: a recurrent network and a particle filter."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import kbr_jax as kbr
from kbr_jax.features import fit_features

from . import video as camera
from .methods import RANK

NETWORKS, STRETCH, PARTICLES = 3, 100, 4000
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


def held_loss(data: dict[str, Any], network: Any) -> jax.Array:
    """Squared error of a network on all rows, unturned."""
    return jnp.mean(jnp.sum((network(data["frames"]) - data["targets"][:, 0]) ** 2, axis=1))


def projected(entries: Any) -> np.ndarray:
    return np.asarray(kbr.embedding.nearest_rotation(jnp.asarray(entries).reshape(-1, 3, 3)))


class Recurrent(eqx.Module):
    """A GRU on features, and the nine entries from its state and the features."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, inputs: int, key: jax.Array):
        """Random weights."""
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(inputs, 64, key=first)
        self.head = eqx.nn.Linear(64 + inputs, 9, key=second)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Nine entries `[T, 9]` from features `[T, inputs]`."""

        def step(state, row):
            state = self.cell(row, state)
            return state, self.head(jnp.concatenate([state, row]))

        return jax.lax.scan(step, jnp.zeros(64), features)[1]


def sequence_loss(data: dict[str, Any], network: Recurrent, key: jax.Array) -> jax.Array:
    """Squared error on 16 stretches of 100 frames, after 10 frames."""
    starts = jax.random.randint(key, (16,), 0, len(data["frames"]) - STRETCH)
    index = starts[:, None] + jnp.arange(STRETCH)
    errors = jax.vmap(network)(data["frames"][index]) - data["targets"][index, 0]
    return jnp.mean(jnp.sum(errors[:, 10:] ** 2, axis=-1))


def recurrent(rotations, features, tests) -> np.ndarray:
    """A GRU on the cross-fitted features; the last quarter of training chooses when to stop."""
    center, scale = features.mean(0), features.std(0) + 1e-3
    x, last = jnp.asarray((features - center) / scale), 3 * len(features) // 4
    y = jnp.asarray(rotations.reshape(-1, 1, 9))
    found = kbr.tune(
        jax.tree_util.Partial(sequence_loss, {"frames": x[:last], "targets": y[:last]}),
        Recurrent(x.shape[1], jax.random.key(0)),
        OPTIMIZER,
        num_steps=1000,
        validation=jax.tree_util.Partial(held_loss, {"frames": x[last:], "targets": y[last:]}),
        validate_every=100,
        key=jax.random.key(0),
        progress=False,
    )
    return projected(eqx.filter_jit(found.parameters)(jnp.asarray((tests - center) / scale)))


def observation_model(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of ridge regression, and the covariance of residuals on left-out stretches.

    The penalty is that of the smallest residuals.
    """
    part_of = np.arange(len(x)) // STRETCH % NETWORKS

    def ridge(rows, penalty):
        moment = x[rows].T @ x[rows] + penalty * rows.sum() * np.eye(x.shape[1])
        return np.linalg.solve(moment, x[rows].T @ y[rows])

    def residuals(penalty):
        parts = [(part_of == k, part_of != k) for k in range(NETWORKS)]
        return np.concatenate([y[held] - x[held] @ ridge(rest, penalty) for held, rest in parts])

    penalty = min((1e-4, 1e-5, 1e-6, 1e-7), key=lambda value: np.sum(residuals(value) ** 2))
    covariance = np.cov(residuals(penalty).T)
    shrunk = covariance + 1e-2 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    return ridge(part_of >= 0, penalty), shrunk


def particles(rotations, features, tests, h: float) -> np.ndarray:
    """A bootstrap particle filter.

    Gaussian likelihood of features, their mean a kernel ridge regression on the rotation, with its
    residuals on the left-out stretches; steps are drawn from the training increments. The exponent
    of the likelihood is that of least error on the last third of the training half.
    """
    last = 2 * len(features) // 3

    def error(exponent):
        estimates = of_particles(
            rotations[:last], features[:last], features[last:], h, exponent, rotations[last]
        )
        return camera.frobenius(estimates, rotations[last:]).mean()

    return of_particles(rotations, features, tests, h, min((1.0, 0.3, 0.1), key=error))


def of_particles(rotations, features, tests, h, exponent, first=None, seed: int = 0) -> np.ndarray:
    """Estimates of the particle filter, from the training states, or from a first rotation."""
    draw = np.random.default_rng(seed)
    points = fit_features(kbr.Gaussian(h), jnp.asarray(rotations), RANK)

    @jax.jit
    def of(x):
        return points.at(x).matrix

    design, center = np.asarray(of(jnp.asarray(rotations)), float), features.mean(0)
    mean, covariance = observation_model(design, (features - center).astype(float))
    root = np.linalg.inv(np.linalg.cholesky(covariance)).T
    mean, seen = mean @ root, (tests - center) @ root
    steps = np.einsum("tji,tjk->tik", rotations[:-1], rotations[1:])
    start = rotations if first is None else first[None]
    cloud, estimates = start[draw.integers(len(start), size=PARTICLES)], []
    for row in tqdm(seen, unit="frame"):
        distances = np.sum((np.asarray(of(jnp.asarray(cloud))) @ mean - row) ** 2, axis=1)
        weights = np.exp(-exponent * (distances - distances.min()) / 2)
        weights /= weights.sum()
        estimates.append(np.einsum("p,pij->ij", weights, cloud))
        picked = draw.choice(PARTICLES, PARTICLES, p=weights)
        cloud = cloud[picked] @ steps[draw.integers(len(steps), size=PARTICLES)]
    return projected(np.asarray(estimates, np.float32))
