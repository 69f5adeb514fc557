"""The values that one execution sent to an outfeed: in transfer from the device, then on the host."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from tailrace.base.trees import TreeDef


class SentBlock:
    """Values of one execution: [loops..., *T] on the device, or [count, *T] once on the host.

    Args:
        structure: the tree of an element.
        leaves: its leaves, stacked over the loops around the `enqueue`; the dim of several replicas
            comes first.
        valid: which of the elements were computed; None if all were.
        loops: the number of loops.
        replicas: the number of replicas.
    """

    def __init__(
        self,
        structure: TreeDef,
        leaves: list[Any],
        valid: jax.Array | None,
        loops: int,
        replicas: int,
    ) -> None:
        self.structure = structure
        self._leaves, self._valid, self._loops, self._replicas = leaves, valid, loops, replicas
        self._settled: list[np.ndarray] | None = None
        # Started now, so that they arrive while the next execution runs.
        for leaf in leaves:
            if hasattr(leaf, "copy_to_host_async"):
                leaf.copy_to_host_async()

    def element_shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each leaf of an element; those of replicas are one element."""
        lead = self._loops + (self._replicas > 1)
        replica = (self._replicas,) if self._replicas > 1 else ()
        return [((*replica, *leaf.shape[lead:]), leaf.dtype) for leaf in self._leaves]

    def surely_has_elements(self) -> bool:
        """Whether it certainly has an element, as far as is known without waiting for the device."""
        looped = self._leaves[0].shape[(self._replicas > 1) :][: self._loops]
        return self._valid is None and 0 not in looped

    def count(self) -> int:
        """The number of elements; waits for the device if it depends on flags."""
        return len(self.to_host()[0])

    @property
    def nbytes(self) -> int:
        """The bytes it occupies."""
        held = self._leaves if self._settled is None else self._settled
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in held)

    def settle(self) -> None:
        """Release the device's memory."""
        self.to_host()

    def to_host(self) -> list[np.ndarray]:
        """The leaves as [count, *T]; waits for the execution the first time."""
        if self._settled is None:
            self._settled = [self._flatten(np.asarray(leaf)) for leaf in self._leaves]
            if self._valid is not None:
                made = self._flatten(np.asarray(self._valid))
                # All replicas take a branch or none does; otherwise elements would have no order.
                made = made.reshape(len(made), -1).all(axis=1)
                self._settled = [leaf[made] for leaf in self._settled]
            # Drops the arrays on the device, whose memory the next executions need.
            self._leaves, self._valid = [], None
        return self._settled

    def elements(self) -> Iterator[Any]:
        """The elements, one by one."""
        for row in zip(*self.to_host(), strict=True):
            yield jax.tree.unflatten(self.structure, row)

    def _flatten(self, array: np.ndarray) -> np.ndarray:
        replica = ()
        if self._replicas > 1:
            # Loop dims become one, the order of sending; the values of all replicas are one element
            # of it.
            array = np.moveaxis(array, 0, self._loops)
            replica = (self._replicas,)
        return _alone(array.reshape(-1, *replica, *array.shape[self._loops + len(replica) :]))


def _alone(array: np.ndarray) -> np.ndarray:
    """A copy if the array would keep a much larger one alive: results of one run share a buffer."""
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return array.copy() if 2 * array.nbytes < whole.nbytes else array
