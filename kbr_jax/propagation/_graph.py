"""The structure of a pairwise model.

Nodes, edges, which edges share a template, and which nodes are observed.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import numpy as np

from .._checks import as_count


class PairwiseGraph(eqx.Module):
    r"""An undirected graph with templates; made by `pairwise_graph` or `grid_graph`. Static: it
    holds
    no arrays of JAX.

    - `edges` `[E, 2]`: node indices; `templates` `[E]`: the template of each edge, in `0 ..
      num_templates - 1`. All edges of a template share one sample of pairs (first node, second
      node).
    - `kinds` `[N]`: the kind of each node, in `0 .. num_kinds - 1`. Nodes of a kind share kernel,
      sample and marginal.
    - `observed` `[N]`: whether the value of a node will be given.
    - `labels`: names of the nodes where the graph came from networkx, else None.
    """

    # Tuples, which compare, hash and are stored as they are; arrays of them are made once.
    edge_list: tuple[tuple[int, int], ...] = eqx.field(static=True)
    template_list: tuple[int, ...] = eqx.field(static=True)
    kind_list: tuple[int, ...] = eqx.field(static=True)
    observed_list: tuple[bool, ...] = eqx.field(static=True)
    labels: tuple[Any, ...] | None = eqx.field(static=True)

    @property
    def _key(self) -> tuple:
        return self.edge_list, self.template_list, self.kind_list, self.observed_list, self.labels

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
    def templates(self) -> np.ndarray:
        """The template of each edge, `[E]`."""
        return np.asarray(self.template_list, int)

    @functools.cached_property
    def kinds(self) -> np.ndarray:
        """The kind of each node, `[N]`."""
        return np.asarray(self.kind_list, int)

    @functools.cached_property
    def observed(self) -> np.ndarray:
        """Whether each node is observed, `[N]`."""
        return np.asarray(self.observed_list, bool)

    def __repr__(self) -> str:
        return (
            f"PairwiseGraph({self.num_nodes} nodes of {self.num_kinds} kinds, "
            f"{int(self.observed.sum())} observed; "
            f"{len(self.edges)} edges of {self.num_templates} templates)"
        )

    @property
    def num_nodes(self) -> int:
        """Number N of nodes."""
        return len(self.kinds)

    @property
    def num_kinds(self) -> int:
        """Number of kinds of nodes."""
        return int(self.kinds.max()) + 1

    @property
    def num_templates(self) -> int:
        """Number of templates."""
        return int(self.templates.max()) + 1 if len(self.templates) else 0

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Kinds of the first and of the second node of each template's edges, `[num_templates, 2]`."""
        ends = np.zeros((self.num_templates, 2), int)
        ends[self.templates] = self.kinds[self.edges]
        return ends

    @functools.cached_property
    def hidden(self) -> np.ndarray:
        """Indices of the nodes that are not observed."""
        return np.flatnonzero(~self.observed)

    @functools.cached_property
    def hidden_kinds(self) -> np.ndarray:
        """Kinds that some hidden node has."""
        return np.unique(self.kinds[self.hidden])

    def index(self, label: Any) -> int:
        """Index of a node of a networkx graph."""
        if self.labels is None:
            raise ValueError("The nodes of this graph have no labels: they are their indices.")
        if label not in self.labels:
            raise ValueError(f"{label!r} is not a node of the graph.")
        return self.labels.index(label)


def pairwise_graph(
    edges: Any,
    *,
    num_nodes: int | None = None,
    observed: Iterable[Any] = (),
    templates: Sequence[int] | np.ndarray | None = None,
    kinds: Sequence[int] | np.ndarray | None = None,
) -> PairwiseGraph:
    r"""The structure of a pairwise Markov random field (S13 section 5.1.1) from its edges.

    **Arguments:**

    - `edges`: integers `[E, 2]`, or a networkx graph (any object with `nodes` and `edges`), whose
      nodes are numbered in its own order. An edge attribute `template`, if every edge has it, gives
      `templates`.
    - `num_nodes`: number N of nodes; by default one more than the largest index in `edges`.
    - `observed`: the nodes whose values will be given (labels for a networkx graph).
    - `templates`: `[E]`, the template of each edge, in `0 .. T - 1`; by default every edge is its
      own. The two ends of a template play different parts: first and second node as `edges` lists
      them.
    - `kinds`: `[N]`; by default nodes that play the same part in one template are of one kind,
      numbered by first node.

    The graph may have cycles and several components.

    **Raises:** `ValueError` for an edge to a node that does not exist, from a node to itself or
    given twice, templates or kinds that do not fit, or no hidden node.
    """
    labels = None
    if hasattr(edges, "nodes") and hasattr(edges, "edges"):
        edges, templates, labels = _from_networkx(edges, templates)
        num_nodes, place = len(labels), {label: index for index, label in enumerate(labels)}
        missing = [label for label in observed if label not in place]
        if missing:
            raise ValueError(f"`observed` holds {missing[0]!r}, which is not a node of the graph.")
        observed = [place[label] for label in observed]
    edges = _integers(edges, "edges").reshape(-1, 2) if np.size(edges) else np.zeros((0, 2), int)
    count = (
        int(edges.max(initial=-1)) + 1 if num_nodes is None else as_count(num_nodes, "num_nodes")
    )
    _check_edges(edges, count)
    templates = np.arange(len(edges)) if templates is None else _integers(templates, "templates")
    if templates.shape != (len(edges),):
        raise ValueError(
            f"`templates` has shape {templates.shape}; give one for each of {len(edges)} edges."
        )
    if sorted(set(templates.tolist())) != list(range(len(set(templates.tolist())))):
        raise ValueError("`templates` must be the numbers 0 .. T - 1, each used by some edge.")
    if kinds is None:
        kinds = _common_kinds(edges, templates, count)
    kinds = _integers(kinds, "kinds")
    _check_kinds(kinds, edges, templates, count)
    mask = np.zeros(count, bool)
    watched = _integers(
        observed if isinstance(observed, np.ndarray) else list(observed), "observed"
    )
    if np.size(watched) and not (0 <= np.min(watched) and np.max(watched) < count):
        raise ValueError(
            f"`observed` must hold nodes 0 .. {count - 1}, got {np.asarray(watched).tolist()}."
        )
    mask[np.asarray(watched, int)] = True
    if mask.all():
        raise ValueError(
            "Every node is observed: there is nothing to infer. Leave at least one node hidden."
        )
    return PairwiseGraph(
        tuple(map(tuple, edges.tolist())),
        tuple(templates.tolist()),
        tuple(kinds.tolist()),
        tuple(mask.tolist()),
        None if labels is None else tuple(labels),
    )


def grid_graph(rows: int, columns: int, *, leaves: bool = True) -> PairwiseGraph:
    r"""A grid with templates by row, as for depth from an image (S13 section 5.1.3).

    Hidden node $(i, j)$ is number `i * columns + j`. Templates, in this order: `rows` of horizontal
    edges (left, right), none where `columns` is 1; `rows - 1` of vertical edges (upper, lower); and
    with `leaves`, `rows` of likelihoods (hidden, observed), with the observed node `rows * columns
    + i * columns + j` at the hidden one. Kinds are the rows: of hidden nodes, then of observed
    ones.
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
    templates = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    kinds = np.repeat(np.arange(2 * rows if leaves else rows), columns)
    observed = np.arange(rows * columns, 2 * rows * columns) if leaves else ()
    return pairwise_graph(
        edges, num_nodes=len(kinds), observed=observed, templates=templates, kinds=kinds
    )


def _integers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        advice = "; of a mask give `np.flatnonzero(mask)`" if array.dtype == bool else ""
        raise ValueError(f"`{name}` must be integers, got {array.dtype}{advice}.")
    return array.astype(int)


def _from_networkx(graph: Any, templates: Any) -> tuple[np.ndarray, Any, list]:
    labels = list(graph.nodes)
    place = {label: index for index, label in enumerate(labels)}
    listed = list(graph.edges(data=True))
    given = [data.get("template") for *_, data in listed]
    if templates is None and listed and all(template is not None for template in given):
        templates = given
    return np.asarray([[place[a], place[b]] for a, b, _ in listed], int), templates, labels


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


def _common_kinds(edges: np.ndarray, templates: np.ndarray, count: int) -> np.ndarray:
    """Kinds by union-find: nodes at the same end of one template are of one kind."""
    parent = list(range(count))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    first: dict[tuple[int, int], int] = {}
    for edge, template in zip(edges.tolist(), templates.tolist(), strict=True):
        for end in (0, 1):
            a, b = sorted((root(first.setdefault((template, end), edge[end])), root(edge[end])))
            parent[b] = a
    return np.unique([root(node) for node in range(count)], return_inverse=True)[1]


def _check_kinds(kinds: np.ndarray, edges: np.ndarray, templates: np.ndarray, count: int) -> None:
    if kinds.shape != (count,):
        raise ValueError(f"`kinds` has shape {kinds.shape}; give one for each of {count} nodes.")
    if kinds.min() < 0 or len(np.unique(kinds)) != kinds.max() + 1:
        raise ValueError("`kinds` must be the numbers 0 .. K - 1, each used by some node.")
    for end, name in ((0, "first"), (1, "second")):
        pairs = np.unique(np.stack([templates, kinds[edges[:, end]]], 1), axis=0)
        twice = np.flatnonzero(np.diff(pairs[:, 0]) == 0)
        if len(twice):
            raise ValueError(
                f"Template {pairs[twice[0], 0]} has {name} nodes of several kinds; all edges of a "
                f"template share one "
                "sample, so their ends must be of one kind."
            )
