"""The carry of a loop that is sharded over a mesh: an array for each carried variable.

The program is that of one device, on whole arrays; XLA's partitioner divides it. Here each array has
its sharding, with which it enters the loop and leaves it.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.trees import Tree
from tailrace.jaxprs.internals import value_of
from tailrace.program.running.device_program import Piece, SegmentProgram
from tailrace.program.running.loop_layout import LoopLayout
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.running.segments import TracedLoop
from tailrace.taps.bit_digests import whole_digests
from tailrace.taps.catalogue import Entry


class ShardedLayout(LoopLayout):
    """The carry by variable, each value one array over all devices of a mesh.

    Args:
        program: the traced loop.
        placement: the mesh.
        forms: the carry as shapes with shardings; a leaf without one is replicated.
    """

    def __init__(self, program: TracedLoop, placement: Placement, forms: Tree) -> None:
        super().__init__(program, placement)
        shardings = [getattr(form, "sharding", None) for form in jax.tree.leaves(forms)]
        self._shardings = [sharding or placement.everywhere for sharding in shardings]
        self._by_variable = dict(zip(self._results, self._shardings, strict=True))

    def take(self, state: LoopState) -> None:
        """Copy each initial value to where its variable is held."""
        known, loop = state.values, self._program.loop
        for result, start in loop.start:
            known[result] = self._owned(value_of(known, start), self._by_variable[result])
        # The caller's arrays are not kept: the loop donates its state.
        for var in self._program.traced.jaxpr.invars[: self._program.num_carried]:
            if var not in loop.reads:
                del known[var]

    def carried(self, state: LoopState) -> Tree:
        """The loop's current carry, as a tree like the one it was given."""
        return jax.tree.unflatten(self._program.traced.out_structure, self.held(state))

    def carried_by(self, state: LoopState, replica: int) -> list[Any]:
        """The leaves of the carry on the host; there is one replica."""
        return [np.asarray(array) for array in self.held(state)]

    @property
    def on_devices(self) -> bool:
        """Whether no leaf of the carry is in host memory: always."""
        return True

    def held(self, state: LoopState) -> list[Any]:
        """The array of each leaf of the carry."""
        return [value_of(state.values, var) for var in self._results]

    def digests(
        self, held: Sequence[Any], names: Sequence[str], sizes: Sequence[int | None]
    ) -> jax.Array:
        """The digest of each leaf of the carry, [leaves, 2]; in a program."""
        return whole_digests(held, names)

    def replace(self, state: LoopState, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the carry, by their index in the tree."""
        for number, value in leaves.items():
            state.values[self._results[number]] = self._owned(value, self._shardings[number])

    def device_program(self, piece: Piece) -> SegmentProgram:
        """The program of a piece of the loop, on whole arrays."""
        held = [self._by_variable[var] for var, _ in piece.segment.start]
        return SegmentProgram(piece, held=held)

    def leaves_in(self, key: Any) -> list[int]:
        """The leaf that the variable `key` is, if it is one."""
        return [number for number, var in enumerate(self._results) if var is key]

    def stage_of(self, entry: Entry) -> int:
        """The stage that the tensor was named in: -1, as there are none."""
        return entry.stage

    def by_element(self, value: Tree) -> Tree:
        """The value unchanged: an iteration sends out one value per element."""
        return value

    @property
    def _results(self) -> Sequence[Any]:
        """The variable of each leaf of the carry."""
        return self._program.traced.jaxpr.outvars

    def _owned(self, value: Any, sharding: Any) -> jax.Array:
        """A copy that the loop may overwrite; each device gets its part alone."""
        return jnp.copy(jax.device_put(value, sharding))
