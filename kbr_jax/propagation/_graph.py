"""The structure of a pairwise model.

Nodes, edges, which edges share an edge type, and which nodes are observed.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import numpy as np

from .._checks import as_count


class PairwiseGraph(eqx.Module):
    r"""An undirected graph with edge types; made by `pairwise_graph` or `grid_graph`. Static: it
    holds no arrays of JAX.

    - `edges` `[E, 2]`: node indices; `edge_types` `[E]`: the edge type of each edge, in
      `0 .. num_edge_types - 1`. All edges of an edge type share one sample of pairs (first node,
      second node).
    - `node_types` `[N]`: the type of each node, in `0 .. num_node_types - 1`. Nodes of one type
      share kernel, sample and marginal.
    - `observed` `[N]`: whether the value of a node will be given.
    - `labels`: names of the nodes where the graph came from networkx, else None.
    """

    # Tuples, which compare, hash and are stored as they are; arrays of them are made once.
    edge_list: tuple[tuple[int, int], ...] = eqx.field(static=True)
    edge_type_list: tuple[int, ...] = eqx.field(static=True)
    node_type_list: tuple[int, ...] = eqx.field(static=True)
    observed_list: tuple[bool, ...] = eqx.field(static=True)
    labels: tuple[Any, ...] | None = eqx.field(static=True)

    @property
    def _key(self) -> tuple:
        return (
            self.edge_list,
            self.edge_type_list,
            self.node_type_list,
            self.observed_list,
            self.labels,
        )

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self is other or (isinstance(other, PairwiseGraph) and self._key == other._key)

    @functools.cached_property
    def edges(self) -> np.ndarray:
        """The two nodes of each edge, `[E, 2]`."""
        return np.asarray(self.edge_list, int).reshape(-1, 2)

    @functools.cached_property
    def edge_types(self) -> np.ndarray:
        """The edge type of each edge, `[E]`."""
        return np.asarray(self.edge_type_list, int)

    @functools.cached_property
    def node_types(self) -> np.ndarray:
        """The type of each node, `[N]`."""
        return np.asarray(self.node_type_list, int)

    @functools.cached_property
    def observed(self) -> np.ndarray:
        """Whether each node is observed, `[N]`."""
        return np.asarray(self.observed_list, bool)

    def __repr__(self) -> str:
        return (
            f"PairwiseGraph({self.num_nodes} nodes of {self.num_node_types} types, "
            f"{int(self.observed.sum())} observed; "
            f"{len(self.edges)} edges of {self.num_edge_types} edge types)"
        )

    @property
    def num_nodes(self) -> int:
        """Number N of nodes."""
        return len(self.node_types)

    @property
    def num_node_types(self) -> int:
        """Number of node types."""
        return int(self.node_types.max()) + 1

    @property
    def num_edge_types(self) -> int:
        """Number of edge types."""
        return int(self.edge_types.max()) + 1 if len(self.edge_types) else 0

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Types of the first and of the second node of each edge type's edges,
        `[num_edge_types, 2]`.
        """
        ends = np.zeros((self.num_edge_types, 2), int)
        ends[self.edge_types] = self.node_types[self.edges]
        return ends

    @functools.cached_property
    def hidden(self) -> np.ndarray:
        """Indices of the nodes that are not observed."""
        return np.flatnonzero(~self.observed)

    @functools.cached_property
    def hidden_node_types(self) -> np.ndarray:
        """Kinds that some hidden node has."""
        return np.unique(self.node_types[self.hidden])

    def index(self, node: Any) -> int:
        """Number of a node: of its label in a networkx graph, else the number itself."""
        names = range(self.num_nodes) if self.labels is None else self.labels
        if node not in names:
            raise ValueError(f"{node!r} is not a node of the graph.")
        return names.index(node)

    def names(self, nodes: np.ndarray) -> tuple[Any, ...]:
        """Labels of nodes where the graph has labels, else their numbers."""
        return tuple(nodes.tolist() if self.labels is None else (self.labels[i] for i in nodes))


def pairwise_graph(
    edges: Any,
    *,
    num_nodes: int | None = None,
    observed_nodes: Iterable[Any] = (),
    edge_types: Sequence[int] | np.ndarray | None = None,
    node_types: Sequence[int] | np.ndarray | None = None,
) -> PairwiseGraph:
    r"""The structure of a pairwise Markov random field (S13 section 5.1.1) from its edges.

    **Arguments:**

    - `edges`: integers `[E, 2]`, or a networkx graph (any object with `nodes` and `edges`), whose
      nodes are numbered in its own order. An edge attribute `edge_type`, if every edge has it,
      gives `edge_types`.
    - `num_nodes`: number N of nodes; by default one more than the largest index in `edges`.
    - `observed_nodes`: the nodes whose values will be given (labels for a networkx graph).
    - `edge_types`: `[E]`, the edge type of each edge, in `0 .. T - 1`; by default every edge is its
      own. The two ends of an edge type play different parts: first and second node as `edges` lists
      them.
    - `node_types`: `[N]`; by default nodes that play the same part in one edge type are of one
      type, numbered by first node.

    The graph may have cycles and several components.

    **Raises:** `ValueError` for an edge to a node that does not exist, from a node to itself or
    given twice, edge types or node types that do not fit, or no hidden node.
    """
    labels, observed_nodes = None, list(observed_nodes)
    if hasattr(edges, "nodes") and hasattr(edges, "edges"):
        edges, edge_types, labels = _from_networkx(edges, edge_types)
        num_nodes, place = len(labels), {label: index for index, label in enumerate(labels)}
        missing = [label for label in observed_nodes if label not in place]
        if missing:
            raise ValueError(
                f"`observed_nodes` holds {missing[0]!r}, which is not a node of the graph."
            )
        observed_nodes = [place[label] for label in observed_nodes]
    edges = _integers(edges, "edges") if np.size(edges) else np.zeros((0, 2), int)
    if edges.ndim != 2 or edges.shape[1] != 2:
        raise ValueError(f"`edges` has shape {edges.shape}; give pairs of nodes `[E, 2]`.")
    least = int(edges.max(initial=-1)) + 1
    count = least if num_nodes is None else as_count(num_nodes, "num_nodes")
    _check_edges(edges, count)
    edge_types = (
        np.arange(len(edges)) if edge_types is None else _integers(edge_types, "edge_types")
    )
    if edge_types.shape != (len(edges),):
        raise ValueError(
            f"`edge_types` has shape {edge_types.shape}; give one for each of {len(edges)} edges."
        )
    if sorted(set(edge_types.tolist())) != list(range(len(set(edge_types.tolist())))):
        raise ValueError("`edge_types` must be the numbers 0 .. T - 1, each used by some edge.")
    if node_types is None:
        node_types = _common_node_types(edges, edge_types, count)
    node_types = _integers(node_types, "node_types")
    _check_node_types(node_types, edges, edge_types, count)
    mask = np.zeros(count, bool)
    watched = _integers(
        observed_nodes if isinstance(observed_nodes, np.ndarray) else list(observed_nodes),
        "observed_nodes",
    )
    if np.size(watched) and not (0 <= np.min(watched) and np.max(watched) < count):
        raise ValueError(
            f"`observed_nodes` must hold nodes 0 .. {count - 1}, got "
            f"{np.asarray(watched).tolist()}."
        )
    mask[np.asarray(watched, int)] = True
    if mask.all():
        raise ValueError(
            "Every node is observed: there is nothing to infer. Leave at least one node hidden."
        )
    return PairwiseGraph(
        tuple(map(tuple, edges.tolist())),
        tuple(edge_types.tolist()),
        tuple(node_types.tolist()),
        tuple(mask.tolist()),
        None if labels is None else tuple(labels),
    )


def grid_graph(rows: int, columns: int, *, leaves: bool = True) -> PairwiseGraph:
    r"""A grid with edge types by row, as for depth from an image (S13 section 5.1.3).

    Hidden node $(i, j)$ is number `i * columns + j`. Edge types, in this order: `rows` of
    horizontal edges (left, right), none where `columns` is 1; `rows - 1` of vertical edges (upper,
    lower); and with `leaves`, `rows` of likelihoods (hidden, observed), with the observed node
    `rows * columns + i * columns + j` at the hidden one. Node types are the rows: of hidden nodes,
    then of observed ones.
    """
    rows, columns = as_count(rows, "rows"), as_count(columns, "columns")
    nodes = np.arange(rows * columns).reshape(rows, columns)
    parts = [(nodes[i, :-1], nodes[i, 1:]) for i in range(rows) if columns > 1]
    parts += [(nodes[i], nodes[i + 1]) for i in range(rows - 1)]
    if leaves:
        parts += [(nodes[i], rows * columns + nodes[i]) for i in range(rows)]
    edges = (
        np.concatenate([np.stack(part, 1) for part in parts]) if parts else np.zeros((0, 2), int)
    )
    edge_types = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    node_types = np.repeat(np.arange(2 * rows if leaves else rows), columns)
    observed = np.arange(rows * columns, 2 * rows * columns) if leaves else ()
    return pairwise_graph(
        edges,
        num_nodes=len(node_types),
        observed_nodes=observed,
        edge_types=edge_types,
        node_types=node_types,
    )


def _integers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        advice = "; of a mask give `np.flatnonzero(mask)`" if array.dtype == bool else ""
        raise ValueError(f"`{name}` must be integers, got {array.dtype}{advice}.")
    return array.astype(int)


def _from_networkx(graph: Any, edge_types: Any) -> tuple[np.ndarray, Any, list]:
    labels = list(graph.nodes)
    place = {label: index for index, label in enumerate(labels)}
    listed = list(graph.edges(data=True))
    given = [data.get("edge_type") for *_, data in listed]
    if edge_types is None and listed and all(template is not None for template in given):
        edge_types = given
    return np.asarray([[place[a], place[b]] for a, b, _ in listed], int), edge_types, labels


def _check_edges(edges: np.ndarray, count: int) -> None:
    if count < 1:
        raise ValueError(
            "The graph has no nodes; give `edges`, or `num_nodes` for nodes without any."
        )
    wrong = np.flatnonzero(((edges < 0) | (edges >= count)).any(1))
    if len(wrong):
        raise ValueError(
            f"edges[{wrong[0]}] = {edges[wrong[0]].tolist()} leads to a node that does not exist; "
            f"the {count} nodes are "
            f"0 .. {count - 1}. Raise `num_nodes` to add nodes."
        )
    loops = np.flatnonzero(edges[:, 0] == edges[:, 1])
    if len(loops):
        raise ValueError(
            f"edges[{loops[0]}] joins node {edges[loops[0], 0]} to itself; leave it out."
        )
    _, first, times = np.unique(np.sort(edges, 1), axis=0, return_index=True, return_counts=True)
    if np.any(times > 1):
        pair = edges[first[times > 1][0]].tolist()
        raise ValueError(
            f"The edge {pair} is given more than once (in either direction); give every edge once."
        )


def _common_node_types(edges: np.ndarray, edge_types: np.ndarray, count: int) -> np.ndarray:
    """Node types by union-find: nodes at the same end of one edge type are of one type."""
    parent = list(range(count))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    first: dict[tuple[int, int], int] = {}
    for edge, template in zip(edges.tolist(), edge_types.tolist(), strict=True):
        for end in (0, 1):
            a, b = sorted((root(first.setdefault((template, end), edge[end])), root(edge[end])))
            parent[b] = a
    return np.unique([root(node) for node in range(count)], return_inverse=True)[1]


def _check_node_types(
    node_types: np.ndarray, edges: np.ndarray, edge_types: np.ndarray, count: int
) -> None:
    if node_types.shape != (count,):
        raise ValueError(
            f"`node_types` has shape {node_types.shape}; give one for each of {count} nodes."
        )
    if node_types.min() < 0 or len(np.unique(node_types)) != node_types.max() + 1:
        raise ValueError("`node_types` must be the numbers 0 .. K - 1, each used by some node.")
    for end, name in ((0, "first"), (1, "second")):
        pairs = np.unique(np.stack([edge_types, node_types[edges[:, end]]], 1), axis=0)
        twice = np.flatnonzero(np.diff(pairs[:, 0]) == 0)
        if len(twice):
            raise ValueError(
                f"Edge type {pairs[twice[0], 0]} has {name} nodes of several types; all edges of a "
                f"edge type share one "
                "sample, so their ends must be of one type."
            )
