"""The carry of a loop that each replica runs on one device: an array for each carried variable."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.trees import Tree
from tailrace.jaxprs.internals import Var, value_of
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.running.device_program import Piece, SegmentProgram
from tailrace.program.running.loop_layout import LoopLayout
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.running.segments import TracedLoop
from tailrace.taps.bit_digests import digest_many
from tailrace.taps.catalogue import Entry


class ReplicaLayout(LoopLayout):
    """The carry by variable: replicated, one value per replica, sharded, or in host memory.

    Args:
        program: the traced loop.
        placement: the devices.
        each: for each leaf of the carry, whether it differs per replica.
        keeping: how the leaves from index `kept_from` on are held, if not in the default way.
        kept_from: the index of the first leaf that `keeping` is about.
    """

    def __init__(
        self,
        program: TracedLoop,
        placement: Placement,
        each: Sequence[bool] | None,
        keeping: StateKeeping | None,
        kept_from: int,
    ) -> None:
        super().__init__(program, placement)
        own = set(program.loop.writes) if placement.replicas > 1 else set[Var]()
        self._each = self._chosen(each or ()) & own
        hosted = flags_from(
            (), keeping.hosted if keeping and keeping.moves_memory else (), kept_from
        )
        shared = flags_from((), keeping.shared if keeping else (), kept_from)
        # Sharded and offloaded leaves are placed differently from the rest, as `StateKeeping` decides.
        self._spread = self._chosen(shared) - self._each
        self._hosted = self._chosen(hosted)

    def take(self, state: LoopState) -> None:
        """Copy each initial value to where its variable is held."""
        known, loop = state.values, self._program.loop
        for result, start in loop.start:
            value = value_of(known, start)
            if result in self._hosted:  # already in place, and not shared with the caller
                known[result] = value
                continue
            if result in self._spread:
                known[result] = self.placement.own_each(value)
                continue
            if result not in self._each:
                known[result] = self.placement.own(value)
                continue
            form: Any = result.aval
            if jnp.ndim(value) == len(form.shape):  # one initial value for all replicas
                value = jnp.broadcast_to(value, (self.placement.replicas, *jnp.shape(value)))
            known[result] = self.placement.own_each(value)
        # Drop the references to the caller's arrays: the loop donates its state, which must be
        # unshared.
        for var in self._program.traced.jaxpr.invars[: self._program.num_carried]:
            if var not in loop.reads:
                del known[var]

    def carried(self, state: LoopState) -> Tree:
        """The loop's current carry, as a tree like the one it was given."""
        return jax.tree.unflatten(self._program.traced.out_structure, self.held(state))

    def carried_by(self, state: LoopState, replica: int) -> list[Any]:
        """The leaves of the carry of one replica, on the host."""
        leaves: list[Any] = []
        for var, array in zip(self._results, self.held(state), strict=True):
            value = np.asarray(self.placement.readable(array))
            form: Any = var.aval
            if var in self._each:
                value = value[replica] if value.ndim > len(form.shape) else value
            elif var in self._spread:
                value = value.reshape(self.placement.replicas, -1)[replica]
            leaves.append(value)
        return leaves

    @property
    def on_devices(self) -> bool:
        """Whether no leaf of the carry is in host memory."""
        return not self._hosted

    def held(self, state: LoopState) -> list[Any]:
        """The array of each leaf of the carry."""
        return [value_of(state.values, var) for var in self._results]

    def digests(
        self, held: Sequence[Any], names: Sequence[str], sizes: Sequence[int | None]
    ) -> jax.Array:
        """The digest of each leaf of the carry, [leaves, 2]; in a program."""
        values = [
            jax.device_put(value, jax.memory.Space.Device) if var in self._hosted else value
            for var, value in zip(self._results, held, strict=True)
        ]
        return digest_many(values, names, sizes)

    def replace(self, state: LoopState, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the carry, by their index in the tree."""
        for number, value in leaves.items():
            var = self._results[number]
            if var in self._hosted or var in self._spread:  # already in place
                state.values[var] = value
                continue
            own = self.placement.own_each if var in self._each else self.placement.own
            # Copied: the next dispatch donates it, and the caller keeps its array.
            state.values[var] = own(value)

    def device_program(self, piece: Piece) -> SegmentProgram:
        """The program of a piece of the loop: the same on each replica."""
        return SegmentProgram(piece, self._each, self._spread)

    def leaves_in(self, key: Any) -> list[int]:
        """The leaf that the variable `key` is, if it is one."""
        return [i for i, var in enumerate(self._program.traced.jaxpr.outvars) if var is key]

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

    def _chosen(self, flags: Sequence[bool]) -> frozenset[Any]:
        """The variables of the leaves whose flag is true."""
        pairs = zip(self._results, flags, strict=False)
        return frozenset(var for var, flag in pairs if flag)


def flags_from(first: Sequence[bool] | None, then: Sequence[bool], start: int) -> list[bool]:
    """Flags of all leaves: those given, and others from index `start` on."""
    flags = [*(first or ()), *[False] * (start + len(then) - len(first or ()))]
    return [
        flag or (start <= number < start + len(then) and then[number - start])
        for number, flag in enumerate(flags)
    ]
