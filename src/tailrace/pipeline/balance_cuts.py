"""Where to cut a chain of layers so that the slowest stage is as fast as possible."""

import itertools
from collections.abc import Sequence

import numpy as np

from tailrace.errors import PlanError


def balanced_cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first layer of each stage after the first, such that the slowest stage is fastest.

    Args:
        costs: the cost of each layer, in order.
        stages: the number of stages; each gets at least one layer.

    >>> balanced_cut([1, 1, 1, 3, 1, 1], stages=3)
    (3, 4)
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise PlanError(
            f"Each stage needs at least one layer: {layers} layers cannot make {stages} stages. "
            f"Ask for 1 to {layers} stages."
        )
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
    # Bisection for the smallest limit such that stages, filled greedily up to it, take all layers:
    # until no float is left between a limit that fails and one that works.
    low, high = 0.0, float(ends[-1])
    while low < (middle := (low + high) / 2) < high:
        if _fill(ends, stages, middle) is None:
            low = middle
        else:
            high = middle
    cut = _fill(ends, stages, high)
    assert cut is not None  # the first limit allows all layers in one stage
    return cut


def _fill(ends: np.ndarray, stages: int, limit: float) -> tuple[int, ...] | None:
    """Fill stages up to a limit, leaving a layer for each later stage; None if that is impossible."""
    layers = len(ends) - 1
    cut, first = [], 0
    for left in range(stages - 1, -1, -1):
        last = int(np.searchsorted(ends, ends[first] + limit, side="right")) - 1
        # A layer must be left for each later stage, however much still fits under the limit.
        last = min(last, layers - left)
        if last <= first:
            return None
        cut.append(last)
        first = last
    return tuple(cut[:-1]) if first == layers else None


def stage_sums(values: Sequence[float], cut: Sequence[int]) -> list[float]:
    """The sum over the layers of each stage.

    >>> stage_sums([1, 2, 3, 4], cut=(1, 3))
    [1.0, 5.0, 4.0]
    """
    edges = [0, *cut, len(values)]
    if any(left >= right for left, right in itertools.pairwise(edges)):
        raise PlanError(
            f"A cut names the first layer of each stage after the first, in rising order, between "
            f"1 and {len(values) - 1}; received {list(cut)!r}."
        )
    return [float(sum(values[a:b])) for a, b in itertools.pairwise(edges)]
