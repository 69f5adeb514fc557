"""How a loop is laid out on devices: which they are, and which arrays hold its carry.

A `LoopRunner` dispatches a loop; everything specific to pipelines is in its layout. Without a
pipeline, `ReplicaLayout` keeps an array for each carried variable, on every replica. A pipeline's
`StageLayout` (`pipeline.running.stage_layout`) keeps buffers that the values of each stage's device
share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.program.running.device_program import DeviceProgram, Piece
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.running.segments import TracedLoop
from tailrace.taps.catalogue import Entry


class LoopLayout(ABC):
    """The places of the values of a loop.

    Args:
        program: the traced loop.
        placement: the devices.
    """

    def __init__(self, program: TracedLoop, placement: Placement) -> None:
        # The placement comes from the layout: a pipeline knows its devices only once the loop is
        # traced.
        self._program, self.placement = program, placement

    @abstractmethod
    def take(self, state: LoopState) -> None:
        """Copy the initial carry, in `state` by variable, to the arrays that dispatches overwrite.

        Afterwards `state` has no reference to arrays of the caller that a dispatch would donate.
        """

    @abstractmethod
    def carried(self, state: LoopState) -> Tree:
        """The loop's current carry, as a tree like the one it was given."""

    @abstractmethod
    def carried_by(self, state: LoopState, replica: int) -> list[Any]:
        """The leaves of the carry of one replica, on the host; then the loop's inputs, if any."""

    @property
    @abstractmethod
    def on_devices(self) -> bool:
        """Whether no part of the carry is in host memory."""

    @abstractmethod
    def held(self, state: LoopState) -> list[Any]:
        """The arrays that hold the carry, as `digests` takes them."""

    @abstractmethod
    def digests(
        self, held: Sequence[Any], names: Sequence[str], sizes: Sequence[int | None]
    ) -> jax.Array:
        """The digest of each leaf of the carry, [leaves, 2]; in a program.

        Args:
            held: the result of `held`.
            names: the names of the leaves.
            sizes: for a leaf that is sharded over replicas, its number of values without padding; None
                for any other.
        """

    @abstractmethod
    def replace(self, state: LoopState, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the carry, by their index in the tree; values are copied."""

    @abstractmethod
    def device_program(self, piece: Piece) -> DeviceProgram:
        """The program of a piece of the loop."""

    @abstractmethod
    def leaves_in(self, key: Any) -> list[int]:
        """The leaves of the carry, by their index in the tree, that an array of the state holds.

        Args:
            key: the key of the array in `LoopState`.
        """

    @abstractmethod
    def stage_of(self, entry: Entry) -> int:
        """The stage of a pipeline that a tensor belongs to; -1 without a pipeline."""

    @abstractmethod
    def by_element(self, value: Tree) -> Tree:
        """Emissions of one loop, rearranged to [replica,] element."""
