r"""Beliefs, $B(x_s) \propto p^*(x_s) \prod_{t \in \Gamma_s} m_{ts}(x_s)$.

Read off messages at a sample or on a grid.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import as_points, as_positive, check_alike, is_concrete, like, size
from .._numerics import HIGHEST, matmul, nan_unless_finite
from .._typing import Array, ArrayLike, Float, Points, PRNGKeyArray, with_numbers
from ..embedding import Embedding
from ..kernels import AbstractKernel, KernelLike, as_kernel
from ._evidence import evidence_rows, known_values
from ._inference import Messages, sources
from ._model import PropagationModel
from ._transfer import map_alike, product, rescaled, rows_or_ones


class Beliefs(eqx.Module):
    r"""Estimated marginals of hidden nodes given the evidence, on common points; made by `beliefs`.

    - `points`: `[p, ...]`. `nodes`: the nodes in the order of the rows, by label where the graph
      has labels. `beliefs["A"]` is the belief of one node.
    - `probabilities`: `[nodes, p]`, rows of sum 1: expectations are weighted sums over the points.
    - `density`: `[nodes, p]`, on a grid: probabilities over the width of the cells. None for
      beliefs on a training sample.
    """

    points: Points
    probabilities: Float[Array, "nodes p"]
    density: Float[Array, "nodes p"] | None
    nodes: tuple[Any, ...] = eqx.field(static=True)

    __repr__ = with_numbers

    def __getitem__(self, node: Any) -> "Beliefs":
        """The belief of one node, by its label or number."""
        if node not in self.nodes:
            raise KeyError(f"{node!r} is not among the nodes read, {list(self.nodes)}.")
        row = slice(self.nodes.index(node), self.nodes.index(node) + 1)
        density = None if self.density is None else self.density[row]
        return Beliefs(self.points, self.probabilities[row], density, (node,))

    def _known(self) -> Points:
        """The points, for reading them off: NaN where some probability is."""
        nan = jnp.isnan(self.probabilities)
        if is_concrete(nan) and bool(jnp.any(nan)):
            nodes = [n for n, row in zip(self.nodes, np.asarray(nan), strict=True) if row.any()]
            raise ValueError(f"The beliefs of the nodes {nodes[:5]} are NaN: look at the evidence.")
        return jax.tree.map(
            lambda leaf: (
                jnp.where(
                    jnp.any(nan), nan_unless_finite(self.probabilities).astype(leaf.dtype), leaf
                )
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf
            ),
            self.points,
        )

    def embed(self, kernel: KernelLike) -> Embedding:
        """The beliefs as one batch of embeddings, for every rule of the library."""
        return Embedding(as_kernel(kernel), self.points, self.probabilities)

    def mean(self) -> Points:
        r"""Means `[nodes, *point]` of real points, $\sum_i b_i x_i$.

        The estimate of least squared error. **Raises:** `ValueError` for labels.
        """

        def average(leaf):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"Labels ({leaf.dtype}) have no mean: read them by `mode`.")
            return jnp.tensordot(
                self.probabilities,
                leaf.astype(self.probabilities.dtype),
                axes=1,
                precision=HIGHEST,
            )

        return jax.tree.map(average, self.points)

    def median(self) -> Float[Array, " nodes"]:
        """Medians `[nodes]` of points of one real coordinate: the estimate of least absolute error.

        The distribution function is drawn through its values at the points by straight lines. For
        integer points the median is the first point at which it reaches one half.
        """
        values = jnp.asarray(self._known()).reshape(size(self.points), -1)
        if values.shape[1] != 1:
            raise ValueError(
                f"A median needs points of one coordinate; these have {values.shape[1]}. Use "
                f"`mean` or `mode`."
            )
        order = jnp.argsort(values[:, 0])
        values, masses = values[order, 0], self.probabilities[:, order]
        heights = jnp.cumsum(masses, axis=1)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            middle = values[jnp.argmax(heights >= 0.5 - 1e-6, axis=1)].astype(masses.dtype)
            return jnp.where(jnp.isnan(heights[:, -1]), jnp.nan, middle)
        half = jnp.asarray(0.5, masses.dtype)
        return jax.vmap(lambda h, m: jnp.interp(half, h - m / 2, values.astype(m.dtype)))(
            heights, masses
        )

    def mode(self) -> Points:
        """The point of highest density `[nodes, *point]`; needs beliefs on a grid."""
        if self.density is None:
            raise ValueError(
                "On a training sample there is no density to compare; read the beliefs on a grid "
                "of `points`."
            )
        best = jnp.argmax(self.density, axis=1)
        return jax.tree.map(lambda leaf: leaf[best], self._known())

    def sample(self, num_samples: int, *, key: PRNGKeyArray) -> Points:
        """Independent draws from each belief `[nodes, num_samples, *point]`, among the points."""
        heights = jnp.log(self.probabilities)[:, None, :]
        drawn = jax.random.categorical(key, heights, axis=-1, shape=(len(self.nodes), num_samples))
        return jax.tree.map(lambda leaf: leaf[drawn], self._known())


def beliefs(
    model: PropagationModel,
    messages: Messages,
    points: Points = None,
    *,
    node_types: Sequence[int] | None = None,
    marginal: Any = None,
    cell_sizes: ArrayLike | None = None,
) -> Beliefs:
    r"""Beliefs $B(x_s) \propto p^*(x_s) \prod_t m_{ts}(x_s)$ of hidden nodes (S13 section 5.1.2),
    normalized over the points.

    **Arguments:**

    - `model`, `messages`: from `fit_belief_propagation` and `belief_propagation`.
    - `points`: `[p, ...]`, a grid, or any points. Messages are evaluated there by the regression
      that defines them, which sends every message once more. By default the support of the nodes:
      their training sample, draws of $p^*$, whose weights are then the products of the messages
      alone. (Not with `pivots`: they are not a sample.)
    - `node_types`: read nodes of these types only; all hidden nodes by default. They must have one
      kind of points.
    - `marginal`: $p^*$ on a grid: values `[p]`, or `[node_types, p]` for each node type that is
      read in increasing order; a kernel for a kernel density from the training sample; by default
      that with the nodes' own kernel (for `Delta` the relative frequencies). Pass ones for points
      that are draws of $p^*$ themselves.
    - `cell_sizes`: sizes of the grid's cells `[p]`; 1 by default, which makes `density` the
      probabilities.

    $p^*$ enters here and nowhere else. Cost: on the support the products alone; on points one
    update of each message, and the fit of its regression once more.

    **Returns:** `Beliefs` of the nodes in increasing order.

    **Raises:** `ValueError` for points that are not of the nodes' domain, types without hidden
    nodes, nodes of several supports read without `points`, or values of another shape.
    """
    graph = model.graph
    hidden = graph.hidden_node_types.tolist()
    wanted = hidden if node_types is None else sorted(set(node_types))
    if not wanted or not set(wanted) <= set(hidden):
        raise ValueError(
            f"`node_types` must be among the types of the hidden nodes, {hidden}; got {wanted}."
        )
    nodes = graph.hidden[np.isin(graph.node_types[graph.hidden], wanted)]
    place = np.searchsorted(graph.hidden, nodes)
    if points is None:
        return _on_support(model, messages, wanted, nodes, place)
    points = like(as_points(points, "points"), model.samples[wanted[0]])
    for kind in wanted:
        check_alike(
            points, "points", model.samples[kind], f"training sample of nodes of type {kind}"
        )
        model.kernels[kind].check(points, "points")
    prior = _marginal(model, wanted, points, marginal)[
        np.searchsorted(wanted, graph.node_types[nodes])
    ]
    known = (messages.values, messages.local, messages.floor, messages.evidence)
    values = _read(model, known, points, tuple(wanted))[place] * prior
    total = (
        jnp.ones(size(points), values.dtype)
        if cell_sizes is None
        else as_positive(cell_sizes, "cell_sizes").astype(values.dtype)
    )
    if total.shape != (size(points),):
        raise ValueError(
            f"`cell_sizes` has shape {total.shape}; give one for each of {size(points)} points."
        )
    probabilities = _normalized(values * total)
    return Beliefs(points, probabilities, probabilities / total, graph.names(nodes))


def _normalized(values: Float[Array, "nodes p"]) -> Float[Array, "nodes p"]:
    sums = jnp.sum(values, axis=1, keepdims=True)
    # Evidence that contradicts itself leaves nothing: then nothing is known.
    return jnp.where(
        sums <= 0, 1 / values.shape[1], values / jnp.where(sums <= 0, 1, sums)
    )  # NaN stays NaN


def _on_support(
    model: PropagationModel,
    messages: Messages,
    node_types: list,
    nodes: np.ndarray,
    place: np.ndarray,
) -> Beliefs:
    if not model.weighted:
        raise ValueError(
            "With `pivots` messages are not kept at a sample; give `points` to read beliefs at."
        )
    if len({model.shared[kind] for kind in node_types}) > 1:
        raise ValueError(
            "Nodes of several types have several supports; read one of the `node_types` at a time, "
            "or "
            "give `points`."
        )
    points = model.supports[node_types[0]]
    table = model.layout.message_slots.arrivals(nodes)
    values = product(
        messages.local[place], lambda index: rows_or_ones(messages.values, index), table
    )
    return Beliefs(
        points,
        _normalized(jnp.maximum(values[:, : size(points)], 0)),
        None,
        model.graph.names(nodes),
    )


@eqx.filter_jit
def _read(
    model: PropagationModel, known: tuple, points: Points, node_types: tuple[int, ...]
) -> Float[Array, "N p"]:
    """Products of all messages and evidence at common points, for every hidden node.

    Meaningful for the given types.
    """
    messages, local, floor, evidence = known
    graph, slots = model.graph, model.layout.message_slots
    rows, row_of, start = [], np.full(slots.count + 1, -1), 0
    for group, block in enumerate(slots.blocks):
        targets = slots.targets[block].max(axis=1)
        wanted = np.flatnonzero(np.isin(graph.node_types[targets], node_types))
        if not len(wanted):
            continue
        products = sources(model, group, None, block, messages, local)[wanted]
        sent = model.messages[group].pick(wanted).read(products, points)
        rows.append(rescaled(sent, floor).reshape(-1, size(points)))
        row_of[block[wanted].reshape(-1)] = start + np.arange(rows[-1].shape[0])
        start += rows[-1].shape[0]
    rows = jnp.concatenate([*rows, jnp.ones((1, size(points)), model.dtype)])
    row_of[slots.count] = start
    table = row_of[slots.arrivals(graph.hidden)]
    supports = dict.fromkeys(node_types, points)
    total = known_values(model, evidence, supports, size(points), rows.dtype)
    watched = evidence_rows(
        model,
        evidence,
        floor,
        lambda transfer, coordinates: transfer.read(coordinates, points),
        size(points),
        node_types,
    )
    total = product(
        total, lambda index: watched[index], model.layout.evidence_slots.arrivals(graph.hidden)
    )
    return product(total, lambda index: rows[index], table)


def _marginal(
    model: PropagationModel, node_types: list, points: Points, marginal: Any
) -> Float[Array, "kinds p"]:
    if marginal is not None and not isinstance(marginal, AbstractKernel) and not callable(marginal):
        values = jnp.asarray(marginal)
        if values.shape not in ((size(points),), (len(node_types), size(points))):
            raise ValueError(
                f"`marginal` has shape {values.shape}; give values ({size(points)},) at the "
                f"points, or "
                f"({len(node_types)}, {size(points)}) for each node type that is read."
            )
        if is_concrete(values) and not np.all(np.asarray(values) >= 0):
            raise ValueError("`marginal` must not be negative: it is a density at the points.")
        return jnp.broadcast_to(values.astype(model.dtype), (len(node_types), size(points)))
    kernels = [
        model.kernels[kind] if marginal is None else as_kernel(marginal) for kind in node_types
    ]
    return jnp.stack(
        map_alike(
            functools.partial(_densities, points),
            [(k, model.samples[i]) for k, i in zip(kernels, node_types, strict=True)],
        )
    )


@eqx.filter_jit
def _densities(points: Points, items: tuple[AbstractKernel, Points]) -> Float[Array, "G p"]:
    """Kernel densities of stacked samples at common points, up to a factor for each."""

    def one(item: tuple[AbstractKernel, Points]) -> Float[Array, " p"]:
        kernel, sample = item
        gram: Callable[..., Array] = kernel.gram
        values = gram(points, sample)
        return jnp.maximum(
            matmul(values, jnp.full(size(sample), 1 / size(sample), values.dtype)), 0
        )

    return lax.map(one, items)
