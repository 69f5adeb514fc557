"""The lightest set of nodes that separates one side of a graph from the other.

Dinic's algorithm, on nodes that have weights instead of edges: each is split into a way in and a way
out, and the edge between them has its weight. The graphs of a pipeline are shallow (values that are
computed from each other between two matrix products), so few rounds are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def minimum_cut(
    weights: Mapping[Node, int],
    edges: Iterable[tuple[Node, Node]],
    sources: Iterable[Node],
    targets: Iterable[Node],
) -> set[Node]:
    """The lightest set of nodes that is on every path from a source to a target, ends included.

    Of several such sets, the one that is nearest to the targets.

    >>> minimum_cut({"a": 3, "b": 1, "c": 2}, [("a", "b"), ("b", "c")], ["a"], ["c"])
    {'b'}
    """
    number = {node: index for index, node in enumerate(weights)}
    network = _Network(2 * len(number) + 2)
    start, end = 2 * len(number), 2 * len(number) + 1
    # Only nodes are cut, never edges: the capacity of an edge exceeds the sum of all nodes.
    unlimited = sum(weights.values()) + 1
    for node, index in number.items():
        network.connect(2 * index, 2 * index + 1, weights[node])
    for before, after in edges:
        network.connect(2 * number[before] + 1, 2 * number[after], unlimited)
    for node in sources:
        network.connect(start, 2 * number[node], unlimited)
    for node in targets:
        network.connect(2 * number[node] + 1, end, unlimited)
    network.fill(start, end)
    # Nearest to the targets: then the least is left to recompute after the cut. A node is in the
    # cut if its output side reaches the end and its input side does not: the edge in between is
    # saturated.
    near = network.reaching(end)
    return {
        node for node, index in number.items() if 2 * index + 1 in near and 2 * index not in near
    }


class _Network:
    """A network that flow is sent through; the edge with number n ^ 1 goes back along edge n."""

    def __init__(self, count: int) -> None:
        self.ends: list[int] = []
        self.room: list[int] = []
        self.leaving: list[list[int]] = [[] for _ in range(count)]

    def connect(self, start: int, end: int, room: int) -> None:
        for here, there, amount in ((start, end, room), (end, start, 0)):
            self.leaving[here].append(len(self.ends))
            self.ends.append(there)
            self.room.append(amount)

    def fill(self, start: int, end: int) -> None:
        """Send as much flow as possible."""
        while (levels := self._levels(start))[end] >= 0:
            self._send(start, end, levels, [0] * len(self.leaving))

    def reaching(self, end: int) -> set[int]:
        """The nodes from which more could still be sent to `end`."""
        found, waiting = {end}, deque([end])
        while waiting:
            for edge in self.leaving[waiting.popleft()]:
                if self.room[edge ^ 1] and self.ends[edge] not in found:
                    found.add(self.ends[edge])
                    waiting.append(self.ends[edge])
        return found

    def _levels(self, start: int) -> list[int]:
        """The distance of each node from `start` along edges with capacity; -1 if unreachable."""
        levels = [-1] * len(self.leaving)
        levels[start] = 0
        waiting = deque([start])
        while waiting:
            here = waiting.popleft()
            for edge in self.leaving[here]:
                if self.room[edge] and levels[self.ends[edge]] < 0:
                    levels[self.ends[edge]] = levels[here] + 1
                    waiting.append(self.ends[edge])
        return levels

    def _send(self, start: int, end: int, levels: list[int], tried: list[int]) -> None:
        """Saturate all shortest paths; `tried` counts the dead ends among the edges of each node."""
        path: list[int] = []
        here = start
        while True:
            if here == end:
                amount = min(self.room[edge] for edge in path)
                for edge in path:
                    self.room[edge] -= amount
                    self.room[edge ^ 1] += amount
                # Continue from the first saturated edge; the path before it can be reused.
                full = next(place for place, edge in enumerate(path) if not self.room[edge])
                here = self.ends[path[full] ^ 1]
                del path[full:]
            elif tried[here] < len(self.leaving[here]):
                edge = self.leaving[here][tried[here]]
                there = self.ends[edge]
                if self.room[edge] and levels[there] == levels[here] + 1:
                    path.append(edge)
                    here = there
                else:
                    tried[here] += 1
            elif path:  # a dead end: step back, and do not try this edge again in this round
                here = self.ends[path.pop() ^ 1]
                tried[here] += 1
            else:
                return
