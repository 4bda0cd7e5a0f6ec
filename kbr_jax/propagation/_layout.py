"""Static tables of belief propagation: where each message stands, what it is made of, and in which
order.

Messages stand in rows ("slots"). A *direction* is an edge type seen from one of its ends: number 2
t from first to second node, 2 t + 1 back. Directions whose matrices can be stacked form a group;
its slots are a block `[directions, width]`, so that the output of one batched matrix product *is* a
block of the array of messages.
"""

import functools

import equinox as eqx
import numpy as np

from ._graph import PairwiseGraph


class Layout(eqx.Module):
    """Groups of directions between hidden nodes (`messages`), and from observed to hidden ones
    (`evidence`).
    """

    graph: PairwiseGraph = eqx.field(static=True)
    messages: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    evidence: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __hash__(self) -> int:
        return hash((self.graph, self.messages, self.evidence))

    def __eq__(self, other: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(other, Layout):
            return False
        return (self.graph, self.messages, self.evidence) == (
            other.graph,
            other.messages,
            other.evidence,
        )

    @functools.cached_property
    def message_slots(self) -> "Slots":
        """Slots of the messages between hidden nodes."""
        return Slots(self.messages, directed_edges(self.graph)[0])

    @functools.cached_property
    def evidence_slots(self) -> "Slots":
        """Slots of the messages from observed nodes."""
        return Slots(self.evidence, directed_edges(self.graph)[1])

    @functools.cached_property
    def incoming(self) -> np.ndarray:
        """For each message t -> s the slots of the other messages to t.

        Filled up with the row of ones.
        """
        slots = self.message_slots
        lists: list[list[int]] = [[] for _ in range(slots.count)]
        for source, target, slot in slots.entries:
            lists[slot] = [
                other for other, sender in slots.into.get(source, ()) if sender != target
            ]
        return padded_table(lists, slots.count)

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """The level of each slot.

        A message can be sent once all it is made of are; -1 for slots without a message.
        """
        levels = np.full(self.message_slots.count + 1, -1)
        for _, target, slot in _leaves_first(self):
            made_of = self.incoming[slot]
            levels[slot] = 1 + max(levels[made_of].max(initial=-1), -1)
            del target
        return levels[:-1]


class Slots:
    """Rows of messages.

    `blocks` holds for each group the slots `[directions, width]`; slots without an edge have source
    -1.
    """

    def __init__(self, groups: tuple[tuple[int, ...], ...], directed: dict[int, list]):
        self.blocks: list[np.ndarray] = []
        self.entries: list[tuple[int, int, int]] = []
        start = 0
        for group in groups:
            width = max(len(directed[direction]) for direction in group)
            block = start + np.arange(len(group) * width).reshape(len(group), width)
            for row, direction in zip(block.tolist(), group, strict=True):
                self.entries += [
                    (a, b, slot) for (a, b), slot in zip(directed[direction], row, strict=False)
                ]
            self.blocks.append(block)
            start += block.size
        self.count = start
        self.sources, self.targets = np.full(start, -1), np.full(start, -1)
        self.into: dict[int, list[tuple[int, int]]] = {}
        for source, target, slot in self.entries:
            self.sources[slot], self.targets[slot] = source, target
            self.into.setdefault(target, []).append((slot, source))

    def arrivals(self, nodes: np.ndarray) -> np.ndarray:
        """The slots of all messages to each node, filled up with the row of ones."""
        return padded_table(
            [[slot for slot, _ in self.into.get(int(node), ())] for node in nodes], self.count
        )


def padded_table(lists: list[list[int]], filling: int) -> np.ndarray:
    """Lists of unequal length as one table."""
    table = np.full((len(lists), max(map(len, lists), default=0)), filling)
    for row, entries in zip(table, lists, strict=True):
        row[: len(entries)] = entries
    return table


@functools.lru_cache(maxsize=32)
def directed_edges(graph: PairwiseGraph) -> tuple[dict[int, list], dict[int, list]]:
    """Directed edges (source, target) by direction.

    Between hidden nodes, and from observed to hidden ones.
    """
    hidden, watched = {}, {}
    for (a, b), template in zip(graph.edges.tolist(), graph.edge_types.tolist(), strict=True):
        for source, target, direction in ((a, b, 2 * template), (b, a, 2 * template + 1)):
            if not graph.observed[target]:
                kind = watched if graph.observed[source] else hidden
                kind.setdefault(direction, []).append((source, target))
    return hidden, watched


def ends(graph: PairwiseGraph, direction: int) -> tuple[int, int]:
    """Types of source and target of a direction."""
    first, second = graph.ends[direction // 2].tolist()
    return (second, first) if direction % 2 else (first, second)


def _leaves_first(layout: Layout) -> list[tuple[int, int, int]]:
    """All messages in an order in which each comes after those it is made of.

    A `ValueError` if there is a cycle.
    """
    slots = layout.message_slots
    waiting = {slot: int((layout.incoming[slot] < slots.count).sum()) for *_, slot in slots.entries}
    outgoing: dict[int, list[tuple[int, int]]] = {}
    for source, target, slot in slots.entries:
        outgoing.setdefault(source, []).append((slot, target))
    ready = [(source, target, slot) for source, target, slot in slots.entries if waiting[slot] == 0]
    order = []
    while ready:
        source, target, slot = ready.pop()
        order.append((source, target, slot))
        for following, beyond in outgoing.get(target, ()):
            if beyond != source:
                waiting[following] -= 1
                if waiting[following] == 0:
                    ready.append((target, beyond, following))
    if len(order) < len(slots.entries):
        raise ValueError(
            "The hidden nodes of the graph form a cycle, and two passes are exact on trees only: "
            "use `schedule='loopy'`."
        )
    return order
