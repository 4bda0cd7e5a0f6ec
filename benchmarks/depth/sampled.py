r"""Belief propagation by samples, for depth from features: particles (Ihler and McAllester 2009)
and mixtures of Gaussians.

Potentials are kernel density estimates from the same pairs as everywhere:
$p(x_s, x_t) / (p(x_s) p(x_t))$ on edges, and for a node's own feature y the density $p(x | y)$, a
mixture of normal densities at the training depths.

What is simpler than in the originals. Particles: drawn once from $p(x | y)$ of their node, not anew
from its belief. Mixtures of Gaussians (Sudderth et al. 2003): the product of incoming mixtures is
sampled by importance, from $p(x | y)$ weighted by the messages, instead of by Gibbs sampling of its
components; the bandwidth is one parameter, and not chosen for each message.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .methods import Training

PARTICLES, COMPONENTS = 100, 50


def fit_sampled(data: Training, p: dict) -> dict[str, jax.Array]:
    """The pairs, and parameters `h` (bandwidth of depth), `c` (of features), `alpha` (added to
    densities).
    """
    arrays = {
        "across": data.across,
        "down": data.down,
        "depth": data.depth,
        "features": data.features,
    }
    numbers = {name: jnp.float32(p[name]) for name in ("h", "c", "alpha")}
    return {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()} | numbers


def _near(x: jax.Array, y: jax.Array, h: jax.Array) -> jax.Array:
    """Normal densities `[..., m]` of points `[...]` at centers `[m]`."""
    return jnp.exp(-(((x[..., None] - y) / h) ** 2) / 2) / (h * jnp.sqrt(2 * jnp.pi))


def _choose(key: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """`count` indices of weights `[..., m]`, drawn in proportion to them, `[..., count]`."""
    mass = jnp.cumsum(weights, axis=-1)
    levels = jax.random.uniform(key, (*weights.shape[:-1], count), weights.dtype) * mass[..., -1:]
    flat = jax.vmap(jnp.searchsorted)(mass.reshape(-1, mass.shape[-1]), levels.reshape(-1, count))
    return jnp.minimum(flat.reshape(levels.shape), mass.shape[-1] - 1)


def _draw(
    tables: dict[str, jax.Array], features: jax.Array, key: jax.Array, count: int
) -> jax.Array:
    """Samples `[rows, columns, count]` of p(x | y) of every node."""

    def row(inputs):
        depth, train, queries, key = inputs
        distances = jnp.sum((queries[:, None] - train[None]) ** 2, -1) / (2 * tables["c"] ** 2)
        which, noise = jax.random.split(key)
        chosen = _choose(which, jnp.exp(jnp.min(distances, -1, keepdims=True) - distances), count)
        return depth[chosen] + tables["h"] * jax.random.normal(noise, chosen.shape, depth.dtype)

    keys = jax.random.split(key, features.shape[0])
    return lax.map(row, (tables["depth"], tables["features"], features, keys))


def _scaled(values: jax.Array, floor: Any) -> jax.Array:
    return jnp.maximum(values / jnp.maximum(jnp.max(values, axis=-1, keepdims=True), 1e-30), floor)


def _median(samples: jax.Array, weights: jax.Array) -> jax.Array:
    order = jnp.argsort(samples, axis=-1)
    samples, weights = (jnp.take_along_axis(a, order, axis=-1) for a in (samples, weights))
    mass = jnp.cumsum(weights, axis=-1)
    index = jnp.argmax(mass >= mass[..., -1:] / 2, axis=-1)
    return jnp.take_along_axis(samples, index[..., None], axis=-1)[..., 0].reshape(-1)


def _ratios(
    tables: dict[str, jax.Array], pairs: jax.Array, first: jax.Array, second: jax.Array
) -> jax.Array:
    """p(a, b) / (p(a) p(b)) at samples of both ends of each edge of a row, `[edges, P, P]`."""
    a, b = _near(first, pairs[:, 0], tables["h"]), _near(second, pairs[:, 1], tables["h"])
    joint = jnp.einsum("eim,ejm->eij", a, b) / len(pairs)
    alone = jnp.mean(a, -1)[:, :, None] * jnp.mean(b, -1)[:, None, :]
    return (joint + tables["alpha"]) / (alone + tables["alpha"])


@jax.jit
def particle_tables(tables: dict[str, jax.Array], features: jax.Array) -> tuple:
    """Particles `[rows, columns, P]`, and the potentials between those of neighbors."""
    x = _draw(tables, features, jax.random.key(0), PARTICLES)
    across = lax.map(
        lambda row: _ratios(tables, row[0], row[1][:-1], row[1][1:]), (tables["across"], x)
    )
    down = lax.map(lambda row: _ratios(tables, *row), (tables["down"], x[:-1], x[1:]))
    return x, across, down


@functools.partial(jax.jit, static_argnames="sweeps")
def particle_messages(tables: tuple, sweeps: int, floor: float) -> tuple:
    """Messages from left, right, above and below at every particle, after flooding sweeps."""
    x, across, down = tables

    def sweep(_, heard):
        left, right, above, below = heard
        sent = (
            jnp.einsum("rcij,rci->rcj", across, (left * above * below)[:, :-1]),
            jnp.einsum("rcij,rcj->rci", across, (right * above * below)[:, 1:]),
            jnp.einsum("rcij,rci->rcj", down, (left * right * above)[:-1]),
            jnp.einsum("rcij,rcj->rci", down, (left * right * below)[1:]),
        )
        new = [_scaled(message, floor) for message in sent]
        return (
            left.at[:, 1:].set(new[0]),
            right.at[:, :-1].set(new[1]),
            above.at[1:].set(new[2]),
            below.at[:-1].set(new[3]),
        )

    return lax.fori_loop(0, sweeps, sweep, (jnp.ones_like(x),) * 4)


def particle_estimate(
    tables: dict[str, jax.Array], features: jax.Array, sweeps: int, floor: float
) -> jax.Array:
    """Posterior medians by particle belief propagation."""
    particles = particle_tables(tables, features)
    left, right, above, below = particle_messages(particles, sweeps, floor)
    return _median(particles[0], left * right * above * below)


#: Neighbors: shift of rows and columns from the node that speaks to the one that hears, the pairs,
#: and its column in them.
_DIRECTIONS = (
    ("across", 0, (0, 1)),
    ("across", 1, (0, -1)),
    ("down", 0, (1, 0)),
    ("down", 1, (-1, 0)),
)


def _speak(tables: dict[str, jax.Array], direction: int, x: jax.Array, key: jax.Array) -> jax.Array:
    """Centers `[rows, columns, P]` of the mixtures that nodes send.

    Partners of training points near their samples.
    """
    name, side, shift = _DIRECTIONS[direction]
    pairs = tables[name]
    if (
        name == "down"
        # the pairs below a row are its own for the node above, the next row's for the node below
    ):
        edge = pairs[-1:] if side == 0 else pairs[:1]
        pairs = jnp.concatenate([pairs, edge] if side == 0 else [edge, pairs])

    def row(inputs):
        own, samples, key = inputs
        near = _near(samples, own[:, side], tables["h"]) + 1e-30
        return own[_choose(key, near, 1)[..., 0], 1 - side]

    sent = lax.map(row, (pairs, x, jax.random.split(key, x.shape[0])))
    return jnp.roll(sent, shift, axis=(0, 1))


def _hear(
    tables: dict[str, jax.Array], direction: int, centers: jax.Array, x: jax.Array, floor: Any
) -> jax.Array:
    """A message at the samples of the nodes that hear it, 1 where nobody speaks."""
    name, side, shift = _DIRECTIONS[direction]
    pairs = tables[name]
    if name == "down":
        edge = pairs[:1] if side == 0 else pairs[-1:]
        pairs = jnp.concatenate([edge, pairs] if side == 0 else [pairs, edge])

    def row(inputs):
        own, samples, centers = inputs
        mixture = jnp.mean(
            jnp.exp(-(((samples[:, :, None] - centers[:, None]) / tables["h"]) ** 2) / 2), -1
        )
        density = jnp.mean(_near(samples, own[:, 1 - side], tables["h"]), -1)
        scale = tables["h"] * jnp.sqrt(2 * jnp.pi)
        return (mixture / scale + tables["alpha"]) / (density + tables["alpha"])

    values = _scaled(lax.map(row, (pairs, x, centers)), floor)
    rows, columns = (jnp.arange(n) for n in x.shape[:2])
    silent = ((rows == 0) & (shift[0] == 1)) | ((rows == len(rows) - 1) & (shift[0] == -1))
    mute = ((columns == 0) & (shift[1] == 1)) | ((columns == len(columns) - 1) & (shift[1] == -1))
    return jnp.where((silent[:, None] | mute[None])[..., None], 1, values)


@functools.partial(jax.jit, static_argnames="sweeps")
def mixture_estimate(
    tables: dict[str, jax.Array], features: jax.Array, sweeps: int, floor: float
) -> jax.Array:
    """Posterior medians by belief propagation whose messages are mixtures of Gaussians with equal
    weights.
    """

    def speak_all(products, x, key):
        keys = jax.random.split(key, 8)
        sent = []
        for direction, product in enumerate(products):
            samples = jnp.take_along_axis(x, _choose(keys[direction], product, COMPONENTS), axis=-1)
            sent.append(_speak(tables, direction, samples, keys[4 + direction]))
        return tuple(sent)

    def heard(centers, x):
        return [_hear(tables, direction, centers[direction], x, floor) for direction in range(4)]

    def others(messages):
        # What is sent on in a direction comes from all sides but that which it goes to: 0 and 1, 2
        # and 3 are opposite.
        opposite = (1, 0, 3, 2)
        return [
            functools.reduce(
                jnp.multiply, (m for d, m in enumerate(messages) if d != opposite[direction])
            )
            for direction in range(4)
        ]

    def sweep(centers, key):
        draw, speak = jax.random.split(key)
        x = _draw(tables, features, draw, COMPONENTS)
        return speak_all(others(heard(centers, x)), x, speak), None

    keys = jax.random.split(jax.random.key(1), sweeps + 2)
    x = _draw(tables, features, keys[0], COMPONENTS)
    centers = speak_all([jnp.ones_like(x)] * 4, x, keys[1])
    centers, _ = lax.scan(sweep, centers, keys[2:-1])
    x = _draw(tables, features, keys[-1], COMPONENTS)
    return _median(x, functools.reduce(jnp.multiply, heard(centers, x)))
