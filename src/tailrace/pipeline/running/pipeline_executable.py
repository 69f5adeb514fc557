"""A loop over pipelined steps, compiled for a mesh of replicas and stages."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tailrace.data.trees import Tree
from tailrace.devices import devices
from tailrace.devices.devices import REPLICA, STAGE
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.internals import value_of
from tailrace.jaxprs.walk import Position
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.running.emit_step import Machine
from tailrace.pipeline.running.value_lookup import from_device
from tailrace.program.running.executable import Executable, Placement
from tailrace.program.running.loop_state import Buffer, Numbers
from tailrace.program.running.segments import Segment
from tailrace.taps.frame import Ambient, Block, Emissions, Frame, Trip
from tailrace.taps.loop_passes import Passes, skipping
from tailrace.taps.wanted import FiniteKey, RawKey, Wanted, condense, fine


class PipelinePlacement(Placement):
    """The devices of a pipeline: replicas times stages.

    Args:
        replicas: how many copies of the pipeline.
        stages: how many devices each has; 0 while that is unknown.
    """

    mesh: Any

    def __init__(self, replicas: int, stages: int) -> None:
        mesh = devices.mesh(replicas, stages) if stages else None
        for name, value in (("replicas", replicas), ("stages", stages), ("mesh", mesh)):
            object.__setattr__(self, name, value)


class PipelineExecutable(Executable):
    """A piece of a loop over pipelined steps.

    What the loop carries is not known by variable but in buffers: `Buffer("held", i)` for buffer i
    of what devices hold for themselves, `Buffer("all", i)` for value i that all carry alike.
    """

    def __init__(
        self,
        segment: Segment,
        placement: PipelinePlacement,
        assembly: Assembly,
        *,
        length: int,
        counted: bool,
        wanted: dict[Position, list[Wanted]],
        period: int,
        muted: frozenset[Any] = frozenset(),
    ) -> None:
        super().__init__(
            segment,
            placement,
            length=length,
            counted=counted,
            wanted=wanted,
            period=period,
            muted=muted,
        )
        self.assembly, self.plan = assembly, assembly.plan
        self._carried = [
            *(Buffer("held", i) for i in range(len(assembly.held_layout.buffers))),
            *(Buffer("all", i) for i in assembly.everywhere),
        ]
        self._writes = list(self._carried)
        guards = [want for wants in wanted.values() for want in wants if want.guard]
        self._skips = bool(guards) and all(want.skips for want in guards)
        self._collected = {
            RawKey((want,)): want.collect
            for wants in wanted.values()
            for want in wants
            if want.collect != "stack"
        }

    def _jitted(self) -> Any:
        a = self.assembly
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
            mesh=self.placement.mesh,
            in_specs=(carried, same, PartitionSpec(None, REPLICA), same, same),
            out_specs=(carried, PartitionSpec(REPLICA), same),
            check_vma=False,
        )
        one = self.placement.replicas == 1

        def call(*args: Any) -> Any:
            results, emitted, ticket = function(*args)
            if one:  # as without replicas: no dim for them
                emitted = jax.tree.map(lambda leaf: leaf[0], emitted)
            return results, emitted, ticket

        return jax.jit(call, donate_argnums=self._donated)

    def _function(self, carried: Tree, read: Tree, elements: Tree, numbers: Any, free: Any) -> Any:
        a, self._rewriter.arguments = self.assembly, free
        seed, first_step, offset, passes = Numbers.read(numbers)
        ambient = Ambient(jax.random.key(seed), first_step, lax.axis_index(REPLICA))
        trip = Trip(passes, first_step + offset) if self.counted else None
        frame = Frame(ambient, observing=self._observing, trip=trip)
        count = len(a.held_layout.buffers)
        held = [
            value.reshape(form.shape)
            for value, form in zip(carried[:count], a.held_layout.buffers, strict=True)
        ]
        alike = [
            value[0] if number in a.each else value
            for number, value in zip(a.everywhere, carried[count:], strict=True)
        ]
        known = dict(zip(self.segment.reads, read, strict=True))
        loop = self.segment.equations[0]
        body = as_scan(loop).body
        outside = zip(a.body.invars[: a.num_consts], loop.invars, strict=False)
        consts = {var: value_of(known, given) for var, given in outside}
        consts.update(zip(body.jaxpr.constvars, body.consts, strict=True))
        position = (self.segment.first, 0)
        machine = Machine(a, self._rewriter, position)
        length: Any = self.length
        queues = [queue for queue, n in self.elements.items() if n]
        per_step = {queue: self.segment.elements[queue] for queue in queues}
        blocks = Emissions(
            (
                queue,
                tuple(
                    leaf.squeeze(1).reshape(length, per_step[queue], *leaf.shape[2:])
                    for leaf in leaves
                ),
            )
            for queue, leaves in zip(queues, elements, strict=True)
        )

        def one_pass(carry: Tree, x: Any, observing: bool) -> Any:
            counter, slices = x
            inside = frame.inner({q: Block(s) for q, s in slices.items()}, observing=observing)
            here = {**consts, a.body.invars[-1]: counter}
            held, alike, stash = carry
            after = machine.step(held, alike, here, inside, stash)
            condense(inside)
            return after, ([], inside.emitted)

        # Filled with zeros once in an execution; where a step may be skipped, at every step.
        # Nothing reads what a step before left there: slots are written before they are read.
        start = (held, alike, None if self._skips else a.stash_layout.zeros())
        if self._skips:
            one_pass = skipping(one_pass, functools.partial(_is_good, machine))
        over = Passes(one_pass, False, 1, length, trip=trip)
        if self._collected:
            over = over.collecting(self._collected)
        counters = offset + jnp.arange(length, dtype=jnp.int32)
        period = self._rewriter.period
        ran = over.run(start, (counters, blocks), period, self._observing)
        held, alike, _ = ran.carry
        frame.take(ran.each, ran.looks, ran.once, period)
        for key, emission in ran.emitted.items():
            # One device made it. The outputs of the program are alike on all of them.
            source = machine.emitting.sources.get(key)
            if source is not None:
                emission = jax.tree.map(functools.partial(from_device, source), emission)
            frame.emit(key, *emission)
        condense(frame, at_end=True)
        self._keys, self._rows = list(frame.emitted), frame.rows
        emitted = [jax.tree.map(lambda leaf: leaf[None], frame.emitted[key]) for key in self._keys]
        held = [
            value[None, None] if own else value[None]
            for value, own in zip(held, a.held_layout.each, strict=True)
        ]
        alike = [
            value[None] if number in a.each else value
            for number, value in zip(a.everywhere, alike, strict=True)
        ]
        return [*held, *alike], emitted, self._what_follows(numbers)


def _is_good(machine: Machine, emitted: Any) -> Any:
    """Whether no flag that a step emitted is down, on the device that made it, in any replica."""
    good = jnp.array(True)
    for key, emission in emitted.items():
        if isinstance(key, FiniteKey):
            source = machine.emitting.sources.get(key)
            elsewhere = source is not None and lax.axis_index(STAGE) != source
            good = good & (fine(emission).all() | elsewhere)
    return lax.pmin(good.astype(jnp.int32), (REPLICA, STAGE)) > 0
