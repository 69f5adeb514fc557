"""The program of a loop over pipelined steps: one for all devices of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tailrace.base.spans.scopes import STASH
from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.devices.devices import REPLICA, STAGE
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.internals import value_of
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.running.emit_step import Machine
from tailrace.pipeline.running.value_lookup import from_device
from tailrace.program.running.device_program import DeviceProgram, Piece
from tailrace.program.running.loop_state import Buffer
from tailrace.program.running.placement import Placement
from tailrace.taps.counted_loop import OnePass
from tailrace.taps.frame import Block, Emissions, Emitted
from tailrace.taps.loop_passes import Passes, skipping
from tailrace.taps.wanted import FiniteKey, condense, fine, looks_of


class PipelinePlacement(Placement):
    """The devices of a pipeline: replicas times stages.

    Args:
        replicas: the number of copies of the pipeline.
        stages: the number of devices of each; 0 while that is unknown.
    """

    mesh: Any

    def __init__(self, replicas: int, stages: int) -> None:
        mesh = devices.mesh(replicas, stages) if stages else None
        # The base is a frozen dataclass that makes its mesh from replicas alone.
        for name, value in (("replicas", replicas), ("stages", stages), ("mesh", mesh)):
            object.__setattr__(self, name, value)


class PipelineProgram(DeviceProgram):
    """A piece of a loop over pipelined steps, for all devices of a mesh of replicas and stages.

    The keys of the carry are buffers, not variables: `Buffer("held", i)` for buffer i, which differs
    per device, `Buffer("all", i)` for value i, which is equal on all devices.

    Args:
        piece: the piece of the loop.
        assembly: which device does what, and where values are.
    """

    def __init__(self, piece: Piece, assembly: Assembly) -> None:
        buffers = [
            *(Buffer("held", i) for i in range(len(assembly.held_layout.buffers))),
            *(Buffer("all", i) for i in assembly.everywhere),
        ]
        super().__init__(piece, buffers, buffers, assembly.plan)
        self._assembly = assembly
        guards = [want for want in piece.all_wanted if want.guard]
        self._skips = bool(guards) and all(want.skips for want in guards)

    def jitted(self, donated: tuple[int, ...]) -> Any:
        """The function, mapped over replicas and stages."""
        a, placement = self._assembly, self.piece.placement
        each = [
            PartitionSpec(REPLICA, STAGE) if own else PartitionSpec(STAGE)
            for own in a.held_layout.each
        ]
        alike = [
            PartitionSpec(REPLICA) if number in a.each else PartitionSpec()
            for number in a.everywhere
        ]
        carried, same = [*each, *alike], PartitionSpec()
        function = jax.shard_map(
            self._function,
            mesh=placement.mesh,
            in_specs=(carried, same, PartitionSpec(None, REPLICA), same, same),
            out_specs=(carried, PartitionSpec(REPLICA), same),
            # `Spread` decides what is equal on all stages, `check_in_step` what is equal on all
            # replicas.
            check_vma=False,
        )
        one = placement.replicas == 1

        # By these names a profile knows its arguments in the compiled program.
        def call(carried: Tree, read: Tree, elements: Tree, numbers: Tree, free: Tree) -> Any:
            results, emitted, ticket = function(carried, read, elements, numbers, free)
            if one:  # no replica dim, as without replicas
                emitted = jax.tree.map(lambda leaf: leaf[0], emitted)
            return results, emitted, ticket

        return jax.jit(self._closed(call, carried), donate_argnums=donated)

    def _function(
        self,
        carried: Tree,
        read: Tree,
        elements: Tree,
        numbers: jax.Array,
        free: Sequence[jax.Array],
    ) -> Any:
        self._rewriter.arguments = free
        a, piece = self._assembly, self.piece
        assert piece.length is not None  # it is a loop
        frame, counters = self._begin(numbers, lax.axis_index(REPLICA))
        machine = Machine(a, self._rewriter, (piece.segment.first, 0))
        consts = self._constants(read)

        def one_pass(carry: Tree, x: Tree, observing: bool) -> Any:
            counter, slices = x
            inside = frame.inner({q: Block(s) for q, s in slices.items()}, observing=observing)
            here = {**consts, a.body.invars[-1]: counter}
            held, alike, stash = carry
            after = machine.step(held, alike, here, inside, stash)
            condense(inside)
            return after, ([], inside.emitted)

        # Filled with zeros once per execution, or in every step if steps may be skipped. Old
        # content does not matter: slots are written before they are read.
        with jax.named_scope(STASH):
            stash = None if self._skips else a.stash_layout.zeros()
        start = (*self._entered(carried), stash)
        body: OnePass = one_pass
        # A skipped step takes its carry back, by a select that would copy the stash. So the stash
        # is not carried then.
        if self._skips:
            body = skipping(one_pass, functools.partial(_is_good, machine))
        collects = any(want.collect != "stack" for want in piece.all_wanted)
        over = Passes(body, False, 1, piece.length, collects, trip=frame.trip)
        looks = looks_of(piece.all_wanted, piece.period)
        ran = over.run(start, (counters, self._blocks(elements)), looks)
        held, alike, _ = ran.carry
        frame.take(ran.each, ran.looks, ran.once, looks.period)
        for key, emission in ran.emitted.items():
            # One device computed it. The outputs of the program are equal on all devices.
            source = machine.emitting.sources.get(key)
            if source is not None:
                emission = jax.tree.map(functools.partial(from_device, source), emission)
            frame.emit(key, *emission)
        emitted = jax.tree.map(lambda leaf: leaf[None], self._emitted(frame))
        return self._left(held, alike), emitted, self._what_follows(numbers)

    # `shard_map` gives each device its block of an array, with the dims of the mesh as dims of 1.
    # The code of one device does not see them: they are removed on the way in and added on the way out.

    def _entered(self, carried: Tree) -> tuple[list[Any], list[Any]]:
        """The carry as one device sees it: its buffers, and the values that are equal on all."""
        a = self._assembly
        count = len(a.held_layout.buffers)
        held = [
            value.reshape(form.shape)
            for value, form in zip(carried[:count], a.held_layout.buffers, strict=True)
        ]
        alike = [
            value[0] if number in a.each else value
            for number, value in zip(a.everywhere, carried[count:], strict=True)
        ]
        return held, alike

    def _left(self, held: Sequence[Any], alike: Sequence[Any]) -> list[Any]:
        """The carry as it leaves a device: the reverse of `_entered`."""
        a = self._assembly
        own = [
            value[None, None] if each else value[None]
            for value, each in zip(held, a.held_layout.each, strict=True)
        ]
        same = [
            value[None] if number in a.each else value
            for number, value in zip(a.everywhere, alike, strict=True)
        ]
        return [*own, *same]

    def _constants(self, read: Tree) -> dict[Any, Any]:
        """The values that the body of the loop reads and does not change, by its variables."""
        a, segment = self._assembly, self.piece.segment
        known = dict(zip(segment.reads, read, strict=True))
        loop = segment.equations[0]
        body = as_scan(loop).body
        outside = zip(a.body.invars[: a.num_consts], loop.invars, strict=False)
        consts = {var: value_of(known, given) for var, given in outside}
        consts.update(zip(body.jaxpr.constvars, body.consts, strict=True))
        return consts

    def _blocks(self, elements: Tree) -> Emissions[Any, Any]:
        """The elements of each iteration, by feed: [iteration, element of the step, ...]."""
        length: Any = self.piece.length
        queues = [queue for queue, count in self.piece.elements.items() if count]
        found: Emissions[Any, Any] = Emissions()
        for queue, leaves in zip(queues, elements, strict=True):
            per_step = self.piece.segment.elements[queue]
            found[queue] = tuple(
                leaf.squeeze(1).reshape(length, per_step, *leaf.shape[2:]) for leaf in leaves
            )
        return found


def _is_good(machine: Machine, emitted: Emitted) -> Any:
    """Whether all flags that a step emitted are true, on the device of each, on all replicas."""
    good = jnp.array(True)
    for key, emission in emitted.items():
        if isinstance(key, FiniteKey):
            source = machine.emitting.sources.get(key)
            elsewhere = source is not None and lax.axis_index(STAGE) != source
            good = good & (fine(emission).all() | elsewhere)
    # One decision for all devices: stages exchange values, and replicas must stay equal.
    return lax.pmin(good.astype(jnp.int32), (REPLICA, STAGE)) > 0
