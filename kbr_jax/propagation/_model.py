r"""Kernel belief propagation, fitted.

What each edge's sample says about its two ends (S13 section 5.1).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._checks import (
    as_count,
    as_points,
    as_positive,
    check_alike,
    check_finite,
    check_same_size,
    in_precision,
    precision_of,
    size,
)
from .._typing import Array, ArrayLike, Float, Points, with_scalars
from ..features import AbstractFeatures, FeatureChoice, Landmarks, greedy_landmarks
from ..kernels import AbstractKernel, Delta, as_kernel, default_kernel
from ._graph import PairwiseGraph
from ._layout import Layout, directed_edges, ends
from ._transfer import Power, Regression, Transfer, alike, fit_transfer, map_alike, stack


class PropagationModel(eqx.Module):
    r"""A fitted pairwise model; made by `fit_belief_propagation`.

    - `layout`: the graph and where each message stands (static). `kernels`: one for each type of
      node.
    - `supports`: for each node type the points at which messages to its nodes are kept, None for
      types without hidden nodes.
    - `samples`: for each node type its training points, draws of the marginal p*.
    - `messages`, `evidence`: the linear maps of the updates; `observations`: features of the
      observed samples.
    - `offsets`: where a direction's own sample begins in the support of its source.
    - `shared`: for each node type the first type with the same support (static).
    - `weighted`: whether supports are samples (True) or pivots.

    It caches what its kernels imply: fit anew (inside the loss) rather than replace a kernel in it.
    """

    layout: Layout = eqx.field(static=True)
    kernels: tuple[AbstractKernel, ...]
    supports: tuple[Points, ...]
    samples: tuple[Points, ...]
    messages: tuple[Transfer, ...]
    evidence: tuple[Transfer, ...]
    observations: tuple[AbstractFeatures, ...]
    offsets: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    shared: tuple[int | None, ...] = eqx.field(static=True)
    weighted: bool = eqx.field(static=True)

    __repr__ = with_scalars

    @property
    def graph(self) -> PairwiseGraph:
        """The graph."""
        return self.layout.graph

    @property
    def width(self) -> int:
        """Numbers that a message is kept as: the size of the largest support."""
        return max(size(support) for support in self.supports if support is not None)

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the messages."""
        kind = int(self.graph.hidden_node_types[0])
        return jax.eval_shape(self.kernels[kind].diagonal, self.supports[kind]).dtype


def fit_belief_propagation(
    graph: PairwiseGraph,
    kernels: Any,
    *,
    regularizer: ArrayLike,
    pairs: Sequence[Any] | None = None,
    points: Sequence[Points] | dict[Any, Points] | ArrayLike | None = None,
    landmarks: FeatureChoice = None,
    landmarks_observed: FeatureChoice = None,
    pivots: int | Landmarks | None = None,
    order: int | None = None,
) -> PropagationModel:
    r"""Learn the messages of kernel belief propagation from samples (S13 eq 27 to 30, algorithm
    VI).

    The model is the pairwise field with node potentials $p^*(x_s)$ and edge potentials
    $p^*(x_s, x_t) / (p^*(x_s) p^*(x_t))$, $p^*$ being the distribution of the samples, without
    evidence. Its messages are conditional expectations,

    $$ m_{ts}(x_s) = E[\textstyle\prod_{u \in \Gamma_t \setminus s} m_{ut}(X_t) \mid x_s], \qquad
       \hat m_{ts}(x_s) = k(x_s, x_s^{1..n}) (K_s + n \lambda I)^{-1} \textstyle\bigodot_{u} \hat
          m_{ut}(x_t^{1..n}), $$

    and an observed node u sends
    $\hat p(x_u \mid x_t) \propto k(x_t, x_t^{1..n}) (K_t + n \lambda I)^{-1} k_u(x_u^{1..n}, x_u)$.
    Each edge type has its own pairs $(x_s^i, x_t^i)$; a message is kept as its values at the
    support of the node that it goes to, never as coefficients, which lose digits for small lambda.
    Three forms:

    - exact (default): values at all the samples of the edge types that the node sends on; 2 m^2
      flops a message and sample.
    - features (`landmarks`): the same values by r features, 2 m r twice.
    - constant time (`pivots`): values at l pivots of the product kernel $k^q$, 2 l^2, whatever m
      is. A product of messages lies in the RKHS of $k^q$ and is interpolated from the pivots to the
      sample, once, in the fitted matrices. Goes with either of the others.

    **Arguments:**

    - `graph`: from `pairwise_graph` or `grid_graph`.
    - `kernels`: one kernel for all nodes, a sequence with one for each node type, or a dict with a
      kernel for a node of each type. None in place of a kernel is the default of each type's
      sample.
    - `regularizer`: lambda > 0, one number or one for each edge type `[T]`. The matrix inverted is
      `K + n regularizer I`; S13 prints `K + lambda I`, so lambda_S13 = n regularizer.
    - `pairs`: for each edge type the pairs `(first, second)`, samples `[m, ...]` for the two ends
      of its edges. Where the same array stands in several edge types, messages are kept at it once.
    - `points`: instead of `pairs`, for each node a sample, all drawn jointly, in order or as a dict
      by node (the setting of S13 eq 30); for graphs where every edge is its own edge type.
    - `landmarks`: None for exact Gram matrices of hidden nodes; a rank, `Landmarks` or
      `RandomFourier` for features.
    - `landmarks_observed`: the same for the kernels of observed nodes.
    - `pivots`: the number l of greedy pivots of each type of hidden node, or `Landmarks` for all of
      them.
    - `order`: q, static; by default the largest number of messages that any node multiplies.

    **Returns:** a `PropagationModel`. Cost for each direction of an edge type, with q points of
    support, O(m^3 + m^2 q) exact and O(m r^2 + q r^2) with features; samples of equal shapes are
    fitted by one compiled loop.

    **Raises:** `ValueError` for an edge type, or a hidden node, without a sample; empty, unpaired
    or non-finite samples; samples that are not of their kernel's domain, or of one node type but
    different kinds of points; or a regularizer that is not positive.
    """
    given = _as_kernels(_in_order(graph, kernels, by_type=True), graph.num_node_types)
    points = _in_order(graph, points)
    pairs, samples = _as_pairs(graph, given, pairs, points)
    # Nothing reads the kernel of a type without a sample.
    kernels = tuple(
        (Delta() if sample is None else default_kernel(sample)) if kernel is None else kernel
        for kernel, sample in zip(given, samples, strict=True)
    )
    ridges = _as_ridges(graph, kernels, samples, regularizer)
    hidden, watched = directed_edges(graph)
    segments = {
        kind: _segments(graph, pairs, samples, kind, hidden)
        for kind in graph.hidden_node_types.tolist()
    }
    order = None if pivots is None else _as_order(graph, order)
    chosen = {} if order is None else _choose_pivots(graph, kernels, samples, pivots, order)
    supports = {kind: _joined([part for part, _ in parts]) for kind, parts in segments.items()}
    supports |= {kind: landmarks_.points for kind, landmarks_ in chosen.items()}

    def regression(direction: int, observed: bool) -> Regression:
        source, target = ends(graph, direction)
        given, conditioned = _sides(pairs, direction)
        item = Regression(kernels[target], conditioned, ridges[direction // 2], supports[target])
        if observed:
            return dataclasses.replace(item, watched=(kernels[source], given))
        if order is None:
            return item
        return dataclasses.replace(
            item, pivots=(Power(kernels[source], order), chosen[source], given)
        )

    layout, transfers, features = _fit_groups(
        graph, regression, hidden, watched, (landmarks, landmarks_observed)
    )
    offsets = tuple(
        tuple(
            0 if pivots is not None else _offset(segments, graph, pairs, direction)
            for direction in group
        )
        for group in layout.messages
    )
    own = tuple(supports.get(kind) for kind in range(graph.num_node_types))
    sent, seen = transfers
    first, weighted = _first_of(own), pivots is None
    return PropagationModel(
        layout, kernels, own, samples, sent, seen, features, offsets, first, weighted
    )


def _first_of(supports: tuple) -> tuple[int | None, ...]:
    """For each node type the first type with the very same support, None without one."""
    first: dict[int, int] = {}
    for kind, support in enumerate(supports):
        first.setdefault(id(support), kind)
    return tuple(None if one is None else first[id(one)] for one in supports)


def _fit_groups(graph: PairwiseGraph, regression: Any, hidden: dict, watched: dict, choices: tuple):
    """The layout, the transfers of messages and evidence, and the observed features."""
    layouts, transfers, features = [], [], ()
    for directed, names in ((hidden, "messages"), (watched, "evidence")):
        directions = sorted(directed)
        items = [regression(direction, names == "evidence") for direction in directions]
        # Directions of about as many edges together: a group is padded to its largest.
        marks = [(len(directed[d]) - 1).bit_length() for d in directions]
        groups = alike(items, marks)
        fitted = [fit_transfer(stack([items[i] for i in group]), *choices) for group in groups]
        layouts.append(tuple(tuple(directions[i] for i in group) for group in groups))
        transfers.append(tuple(transfer for transfer, _ in fitted))
        features = tuple(source for _, source in fitted)
    return Layout(graph, layouts[0], layouts[1]), transfers, features


def _in_order(graph: PairwiseGraph, given: Any, by_type: bool = False) -> Any:
    """What a dict gives for nodes, in order of the nodes or of types."""
    if not isinstance(given, dict):
        return given
    rows: list[Any] = [None] * (graph.num_node_types if by_type else graph.num_nodes)
    for node, one in given.items():
        index = graph.index(node)
        rows[int(graph.node_types[index]) if by_type else index] = one
    return rows


def _as_kernels(kernels: Any, count: int) -> tuple[AbstractKernel | None, ...]:
    if isinstance(kernels, (list, tuple)):
        if len(kernels) != count:
            raise ValueError(
                f"`kernels` holds {len(kernels)}; give one kernel, or one for each of {count} "
                f"node types."
            )
    else:
        kernels = [kernels] * count
    return tuple(None if kernel is None else as_kernel(kernel) for kernel in kernels)


def _as_ridges(
    graph: PairwiseGraph, kernels: tuple, samples: tuple, regularizer: ArrayLike
) -> Float[Array, " T"]:
    ridges = as_positive(regularizer, "regularizer")
    if ridges.ndim > 1 or (ridges.ndim and ridges.shape[0] != graph.num_edge_types):
        raise ValueError(
            f"`regularizer` has shape {ridges.shape}; give one number, or one for each of "
            f"{graph.num_edge_types} edge types."
        )
    kind = graph.hidden_node_types[0]
    dtype = jax.eval_shape(kernels[kind].diagonal, samples[kind]).dtype
    return jnp.broadcast_to(ridges.astype(dtype), (graph.num_edge_types,))


def _as_order(graph: PairwiseGraph, order: int | None) -> int:
    """By default as many messages as the hidden node of most neighbors multiplies.

    All but the one that it sends back.
    """
    if order is not None:
        return as_count(order, "order")
    degrees = np.bincount(graph.edges.reshape(-1), minlength=graph.num_nodes)
    return max(1, int(degrees[graph.hidden].max()) - 1)


def _as_pairs(graph: PairwiseGraph, kernels: tuple, pairs: Any, points: Any) -> tuple[list, tuple]:
    """Checked pairs for each edge type, and for each node type its pooled sample."""
    if (pairs is None) == (points is None):
        raise ValueError("Give either `pairs` for each edge type, or `points` for each node.")
    # Rows of an array are made anew each time they are asked for.
    points = None if points is None else list(points)
    checked: dict[int, tuple[Points, Points]] = {}
    arrays = [a for a in jax.tree.leaves((points, pairs)) if isinstance(a, np.ndarray | jax.Array)]
    precision = precision_of(*arrays)  # one for all nodes: messages go between them
    precision = None if precision is None else jax.dtypes.canonicalize_dtype(precision)

    def check(sample: Points, name: str, kind: int) -> Points:
        # The same array stays the same array: messages are kept once at what several edge types
        # share.
        if id(sample) not in checked:
            # The sample too, else its id may become another's.
            found = check_finite(as_points(sample, name), name)
            if precision is not None:
                found = in_precision(found, precision)
            checked[id(sample)] = sample, found
        found = checked[id(sample)][1]
        if kernels[kind] is not None:
            kernels[kind].check(found, name)
        return found

    owned: dict[int, list] = {kind: [] for kind in range(graph.num_node_types)}
    if points is not None:
        pairs = _pairs_of_nodes(graph, points, check, owned)
    elif len(pairs) != graph.num_edge_types:
        raise ValueError(
            f"`pairs` holds {len(pairs)} samples; give one pair for each of {graph.num_edge_types} "
            f"edge types."
        )
    result = []
    for template, pair in enumerate(pairs):
        if pair is None or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(
                f"pairs[{template}] must be a pair of samples (first, second), got "
                f"{type(pair).__name__}."
            )
        names = [f"pairs[{template}][{end}]" for end in (0, 1)]
        node_types = graph.ends[template].tolist()
        first, second = (
            check(part, name, kind)
            for part, name, kind in zip(pair, names, node_types, strict=True)
        )
        check_same_size(first, names[0], second, names[1])
        for part, name, kind in zip((first, second), names, node_types, strict=True):
            owned[kind] += [] if any(part is other for other in owned[kind]) else [part]
            check_alike(part, name, owned[kind][0], f"other sample of nodes of type {kind}")
        result.append((first, second))
    for kind in graph.hidden_node_types.tolist():
        if not owned[kind]:
            node = int(np.flatnonzero(graph.node_types == kind)[0])
            raise ValueError(
                f"Node {node} has no sample: it is on no edge, nor is any other node of its type. "
                f"Give `points`, or `node_types` to the "
                "graph so that it shares the sample of other nodes."
            )
    return result, tuple(_joined(parts) if parts else None for parts in owned.values())


def _pairs_of_nodes(
    graph: PairwiseGraph, points: Sequence[Points], check: Any, owned: dict
) -> list:
    if graph.num_edge_types != len(graph.edges) or graph.num_node_types != graph.num_nodes:
        raise ValueError(
            "`points` for each node need a graph without shared edge types; give `pairs` for each "
            "edge type."
        )
    if len(points) != graph.num_nodes:
        raise ValueError(
            f"`points` holds {len(points)} samples; give one for each of {graph.num_nodes} nodes."
        )
    for node, sample in enumerate(points):
        if sample is None:
            name = node if graph.labels is None else graph.labels[node]
            raise ValueError(f"Node {name!r} has no sample: points[{node}] is None.")
        kind = int(graph.node_types[node])
        owned[kind].append(check(sample, f"points[{node}]", kind))
        check_same_size(
            owned[kind][0], f"points[{node}]", owned[int(graph.node_types[0])][0], "points[0]"
        )
    order = np.argsort(graph.edge_types)
    return [tuple(points[node] for node in edge) for edge in graph.edges[order].tolist()]


def _joined(parts: list[Points]) -> Points:
    return (
        parts[0]
        if len(parts) == 1
        else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    )


def _sides(pairs: list, direction: int) -> tuple[Points, Points]:
    first, second = pairs[direction // 2]
    return (second, first) if direction % 2 else (first, second)


def _segments(
    graph: PairwiseGraph, pairs: list, samples: tuple, kind: int, hidden: dict
) -> list[tuple[Points, int]]:
    """The samples on which nodes of one type multiply messages, and their offsets."""
    parts: list[tuple[Points, int]] = []
    for direction in sorted(hidden):
        part = _sides(pairs, direction)[0]
        if ends(graph, direction)[0] == kind and not any(part is other for other, _ in parts):
            parts.append((part, sum(size(other) for other, _ in parts)))
    return parts or [(samples[kind], 0)]


def _offset(segments: dict, graph: PairwiseGraph, pairs: list, direction: int) -> int:
    part = _sides(pairs, direction)[0]
    return next(start for other, start in segments[ends(graph, direction)[0]] if other is part)


def _choose_pivots(
    graph: PairwiseGraph, kernels: tuple, samples: tuple, pivots: Any, order: int
) -> dict[int, Landmarks]:
    node_types = graph.hidden_node_types.tolist()
    if isinstance(pivots, Landmarks):
        for kind in node_types:
            check_alike(pivots.points, "pivots", samples[kind], f"sample of nodes of type {kind}")
        return dict.fromkeys(node_types, pivots)
    count = as_count(pivots, "pivots")
    items = [(Power(kernels[kind], order), samples[kind]) for kind in node_types]
    return dict(zip(node_types, map_alike(functools.partial(_greedy, count), items), strict=True))


@eqx.filter_jit
def _greedy(count: int, items: tuple[Power, Points]) -> Landmarks:
    return jax.lax.map(lambda item: greedy_landmarks(*item, rank=count), items)
