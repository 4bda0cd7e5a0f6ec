"""Ways to estimate depth from features: kernel belief propagation, discrete belief propagation on
bins, nodes one by one.

All learn from the same pairs for each row's edge types; each returns the depth of every node of a
scene, row by row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kbr_jax as kbr

from .worlds import World


@dataclasses.dataclass(frozen=True)
class Training:
    """Pairs for the edge types of `grid_graph`.

    Horizontal and vertical neighbors, depth and features, float32.
    """

    rows: int
    columns: int
    across: np.ndarray
    down: np.ndarray
    depth: np.ndarray
    features: np.ndarray

    @classmethod
    def draw(cls, scenes: list[World], count: int, seed: int) -> "Training":
        """`count` pairs for each edge type, without replacement from all scenes."""
        rng = np.random.default_rng(seed)
        depth = np.stack([w.depth for w in scenes]).astype(np.float32)
        features = np.stack([w.features for w in scenes]).astype(np.float32)
        _, rows, columns = depth.shape

        def some(pairs):
            pairs = pairs.reshape(-1, pairs.shape[-1])
            return pairs[rng.choice(len(pairs), min(count, len(pairs)), replace=False)]

        across = np.stack([depth[:, :, :-1], depth[:, :, 1:]], -1)
        down = np.stack([depth[:, :-1], depth[:, 1:]], -1)
        both = np.concatenate([depth[..., None], features], -1)
        own = np.stack([some(both[:, i]) for i in range(rows)])
        return cls(
            rows,
            columns,
            np.stack([some(across[:, i]) for i in range(rows)]),
            np.stack([some(down[:, i]) for i in range(rows - 1)]),
            own[..., 0],
            own[..., 1:],
        )

    def pairs(self) -> list[tuple]:
        """For `fit_belief_propagation`."""
        edges = [(jnp.asarray(p[:, 0]), jnp.asarray(p[:, 1])) for p in (*self.across, *self.down)]
        return edges + self.leaves()

    def leaves(self) -> list[tuple]:
        """Depth and features of each row."""
        return [
            (jnp.asarray(d), jnp.asarray(f)) for d, f in zip(self.depth, self.features, strict=True)
        ]

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest depth seen."""
        parts = [self.across, self.down, self.depth]
        return min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)

    def grid(self, count: int = 100) -> jax.Array:
        """Depths at which beliefs are read."""
        return jnp.linspace(*self.range, count, dtype=jnp.float32)


def values(scene: World) -> jax.Array:
    """Features of a scene's nodes, row by row."""
    return jnp.asarray(scene.features.reshape(-1, scene.features.shape[-1]).astype(np.float32))


def absolute_error(estimate: Any, scene: World) -> float:
    return float(np.mean(np.abs(np.asarray(estimate).reshape(-1) - scene.depth.reshape(-1))))


def fit_kernel(
    data: Training, p: dict, *, pivots: int | None = None, exact: bool = False
) -> kbr.propagation.PropagationModel:
    """Kernel belief propagation.

    Bandwidths `h` of depth and `c` of features; regularizers `epsilon` of edges and `kappa` of
    likelihoods; `rank`.
    """
    graph = kbr.propagation.grid_graph(data.rows, data.columns)
    ridges = np.full(graph.num_edge_types, p["epsilon"], np.float32)
    ridges[-data.rows :] = p["kappa"]
    rank = None if exact else p["rank"]
    kernels = _kernels(data, p)
    return kbr.propagation.fit_belief_propagation(
        graph, kernels, pairs=data.pairs(), regularizer=ridges, landmarks=rank, pivots=pivots
    )


def _kernels(data: Training, p: dict) -> list:
    return [kbr.Gaussian(jnp.float32(p["h"]))] * data.rows + [
        kbr.Gaussian(jnp.float32(p["c"]))
    ] * data.rows


def fit_alone(data: Training, p: dict) -> kbr.propagation.PropagationModel:
    """The same model without edges between hidden nodes.

    Each node's own feature and the marginal of its row.
    """
    nodes = np.arange(data.rows * data.columns)
    graph = kbr.propagation.pairwise_graph(
        np.stack([nodes, nodes + len(nodes)], 1),
        observed_nodes=nodes + len(nodes),
        edge_types=nodes // data.columns,
    )
    options = {
        "pairs": data.leaves(),
        "regularizer": jnp.float32(p["kappa"]),
        "landmarks": p["rank"],
    }
    return kbr.propagation.fit_belief_propagation(graph, _kernels(data, p), **options)


def estimate(
    model: kbr.propagation.PropagationModel,
    grid: jax.Array,
    features: jax.Array,
    sweeps: int,
    floor: float,
) -> jax.Array:
    """Posterior medians by kernel belief propagation."""
    messages = kbr.propagation.belief_propagation(
        model, features, num_sweeps=sweeps, floor=floor, schedule="loopy"
    )
    return kbr.propagation.beliefs(model, messages, grid).median()


@jax.jit
def regress(
    depth: jax.Array, train: jax.Array, c: jax.Array, kappa: jax.Array, features: jax.Array
) -> jax.Array:
    """Kernel ridge regression of depth on features, one for each row.

    `features` `[rows, columns, d]`.
    """

    def row(x, y, queries):
        offset = jnp.mean(y)
        model = kbr.fit_conditional(
            kbr.Gaussian(c), kbr.Linear(), x, (y - offset)[:, None], regularizer=kappa
        )
        return kbr.conditional_expectation(model, queries, lambda point: point[0]) + offset

    return jax.vmap(row)(train, depth, features)


def fit_discrete(data: Training, p: dict) -> dict[str, jax.Array]:
    """Tables on `bins` bins: counts of pairs, blurred by a Gaussian of width `blur` (in depth),
    plus `alpha` in all.

    Matrices `[rows, b, b]` of p(source | target) towards each side; marginals; and the training
    bins of each row, from which the likelihood of a feature is taken, p(bin | x) / p(bin). Features
    are discrete too, `cells` cells of k-means (0.5 is added to each count); or, with a bandwidth
    `c` instead, the likelihood is a kernel average.
    """
    bins = p["bins"]
    low, high = data.range
    edges = np.linspace(low, high, bins + 1)
    centers = (edges[1:] + edges[:-1]) / 2
    distances = centers[:, None] - centers[None]
    blur = np.exp(-(distances**2) / (2 * p["blur"] ** 2)) if p["blur"] > 0 else np.eye(bins)
    blur /= blur.sum(0)

    def place(x):
        return np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)

    def joint(pairs):
        counts = np.zeros((bins, bins))
        np.add.at(counts, (place(pairs[:, 0]), place(pairs[:, 1])), 1 / len(pairs))
        return blur @ counts @ blur.T + p["alpha"] / bins**2

    def one_hot(x):
        return np.eye(bins)[place(x)] @ blur.T + p["alpha"] / bins

    across, down = (np.stack([joint(pairs) for pairs in part]) for part in (data.across, data.down))
    own = np.stack([one_hot(d) for d in data.depth])
    tables = {
        "centers": centers,
        "right": across / across.sum(1, keepdims=True),  # [left, right]: given the right one
        "left": np.swapaxes(across / across.sum(2, keepdims=True), 1, 2),
        "below": down / down.sum(1, keepdims=True),
        "above": np.swapaxes(down / down.sum(2, keepdims=True), 1, 2),
        "own": own,
        "marginals": own.mean(1),
        "train": data.features,
    }
    tables = {name: jnp.asarray(table, jnp.float32) for name, table in tables.items()}
    if "c" in p:
        return {**tables, "c": jnp.float32(p["c"])}
    pooled = jnp.asarray(data.features.reshape(-1, data.features.shape[-1]))
    cells = kbr.kmeanspp_landmarks(
        None, pooled, rank=p["cells"], key=jax.random.key(0), num_iterations=20
    )
    return {**tables, "cells": cells.points}


def _scaled(values: jax.Array, floor: float) -> jax.Array:
    return jnp.maximum(values / jnp.max(values, axis=-1, keepdims=True), floor)


def discrete_sweep(
    tables: dict[str, jax.Array], local: jax.Array, heard: tuple, floor: float
) -> tuple:
    """One flooding sweep.

    `heard` are the messages from left, right, above and below, `[rows, columns, b]` each.
    """
    left, right, above, below = heard
    to_right, to_left = (
        (local * above * below * left)[:, :-1],
        (local * above * below * right)[:, 1:],
    )
    downwards, upwards = (local * left * right * above)[:-1], (local * left * right * below)[1:]
    return (
        left.at[:, 1:].set(_scaled(jnp.matmul(to_right, tables["right"]), floor)),
        right.at[:, :-1].set(_scaled(jnp.matmul(to_left, tables["left"]), floor)),
        above.at[1:].set(_scaled(jnp.matmul(downwards, tables["below"]), floor)),
        below.at[:-1].set(_scaled(jnp.matmul(upwards, tables["above"]), floor)),
    )


def discrete_local(tables: dict[str, jax.Array], features: jax.Array, floor: float) -> jax.Array:
    """Likelihoods on bins `[rows, columns, b]` of features `[rows, columns, d]`."""

    def row(inputs):
        train, own, marginal, queries = inputs
        if "c" in tables:
            near = kbr.gram(kbr.Gaussian(tables["c"]), queries, train)
            return jnp.matmul(near, own) / marginal
        counts = (
            jax.nn.one_hot(_nearest(tables["cells"], train), len(tables["cells"]), axis=0) @ own
            + 0.5 * marginal
        )
        return counts[_nearest(tables["cells"], queries)] / marginal

    rows = (tables["train"], tables["own"], tables["marginals"], features)
    return _scaled(jax.lax.map(row, rows) + 1e-30, floor)


def _nearest(cells: jax.Array, features: jax.Array) -> jax.Array:
    return jnp.argmin(jnp.sum((features[:, None] - cells[None]) ** 2, -1), axis=1)


@functools.partial(jax.jit, static_argnames="sweeps")
def discrete_messages(
    tables: dict[str, jax.Array], local: jax.Array, sweeps: int, floor: float
) -> tuple:
    heard = (jnp.ones_like(local),) * 4
    return jax.lax.fori_loop(0, sweeps, lambda _, m: discrete_sweep(tables, local, m, floor), heard)


@functools.partial(jax.jit, static_argnames="sweeps")
def discrete_estimate(
    tables: dict[str, jax.Array], features: jax.Array, sweeps: int, floor: float
) -> jax.Array:
    """Posterior medians on bins for features `[rows, columns, d]`."""
    local = discrete_local(tables, features, floor)
    belief = tables["marginals"][:, None] * local
    for message in discrete_messages(tables, local, sweeps, floor):
        belief = belief * message
    belief = (belief / jnp.sum(belief, -1, keepdims=True)).reshape(-1, local.shape[-1])
    return kbr.propagation.Beliefs(
        tables["centers"], belief, None, tuple(range(len(belief)))
    ).median()
