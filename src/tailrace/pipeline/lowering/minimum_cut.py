"""The lightest set of nodes that separates one side of a graph from the other.

A minimum cut is found from a maximum flow, which SciPy computes. It knows capacities of edges only, so
each node is split into a way in and a way out, and the edge between them has the node's weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np

Node = TypeVar("Node", bound=Hashable)

UNLIMITED = 2**31 - 1
"""SciPy's capacities are of 32 bits. The sum of all nodes is kept below: only nodes are cut."""


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
    if not weights:  # a backward that reads parameters and inputs alone
        return set()
    # Imported here: it takes 0.2 s, and only pipelines need it.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    number = {node: index for index, node in enumerate(weights)}
    start, end = 2 * len(number), 2 * len(number) + 1
    # From 1 GiB on, weights are counted in larger units, rounded up. A power of two: sizes of arrays
    # are multiples of large ones, so that few are rounded at all.
    unit = 1 << max(0, sum(weights.values()).bit_length() - 30)
    # By pair of ends, since SciPy adds up the capacities of equal edges, beyond 32 bits.
    capacity = {(2 * n, 2 * n + 1): -(-weights[node] // unit) for node, n in number.items()}
    for before, after in edges:
        capacity[2 * number[before] + 1, 2 * number[after]] = UNLIMITED
    for node in sources:
        capacity[start, 2 * number[node]] = UNLIMITED
    for node in targets:
        capacity[2 * number[node] + 1, end] = UNLIMITED
    values, ends = np.fromiter(capacity.values(), np.int32), np.array([*capacity]).T
    network = coo_array((values, ends), shape=(end + 1, end + 1)).tocsr()
    room = network - maximum_flow(network, start, end).flow
    room.eliminate_zeros()
    # Nearest to the targets: then the least is left to recompute after the cut. A node is in the
    # cut if its output side reaches the end and its input side does not: the edge in between is
    # saturated.
    reached = breadth_first_order(room.T.tocsr(), end, return_predecessors=False)
    near = set(reached.tolist())
    return {node for node, n in number.items() if 2 * n + 1 in near and 2 * n not in near}
