"""Emitting one step of a pipeline: one program for all devices, in which each does its part.

    before ──▶ tick tick tick ... ──▶ after

Before and after the loop over microbatches every device runs its share of the equations, phase by
phase (see `update_partition.py`); what happens in a tick is in `emit_ticks.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jax import lax

from tailrace.base.trees import Tree
from tailrace.devices.devices import STAGE
from tailrace.jaxprs.internals import variables
from tailrace.jaxprs.own_equations import reduction_in
from tailrace.jaxprs.replica_reductions import reduced
from tailrace.jaxprs.walk import Position
from tailrace.pipeline.lowering.buffers import Form, Layout
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.lowering.update_partition import Phase, Spread
from tailrace.pipeline.running.emit_ticks import Ticking
from tailrace.pipeline.running.in_place import Emitting, empty, once_if
from tailrace.pipeline.running.value_lookup import Values
from tailrace.taps.frame import Emissions, Frame
from tailrace.taps.rewrite import Rewriter
from tailrace.taps.wanted import condense

Results = Mapping[int, Sequence[tuple[Any, Any]]]


class Machine:
    """Emits steps of a pipeline.

    Args:
        assembly: the layout of the step.
        rewriter: resolves marks and sends out observed values.
        position: of the body of the loop over steps, in the program.
    """

    def __init__(self, assembly: Assembly, rewriter: Rewriter, position: Position) -> None:
        self.assembly, self.rewriter, self.position = assembly, rewriter, position
        self.silent = dataclasses.replace(rewriter, wanted={}, on_mark=None, period=1)
        # Not a field of the dataclass, so `replace` has reset it.
        self.silent.arguments = rewriter.arguments
        self.emitting = Emitting()

    def step(
        self,
        held: list[Any],
        everywhere: list[Any],
        known: dict[Any, Any],
        frame: Frame,
        stash: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any], list[Any] | None]:
        """One step; returns its carry.

        Args:
            held: the buffers of values that differ per device.
            everywhere: the carried values that are equal on all devices.
            known: values of the loop's constants and its counter.
            frame: the environment; emissions are added to it.
            stash: the buffers of the stash, with any content; None for new ones.
        """
        a, jobs = self.assembly, self.assembly.jobs
        known = {
            **known,
            **{a.carry_in[i]: v for i, v in zip(a.everywhere, everywhere, strict=True)},
        }
        values = Values(lax.axis_index(STAGE), known, a.constants, frame, dict(a.before.same))
        numbers = {var: i for i, var in enumerate(a.carry_in) if var in a.held}
        values.add_store(a.held_layout, held, numbers)
        # Before: the initial values of the loop are written to the buffers that jobs carry.
        starts = self._results(a.carry_layout, jobs.starts)
        start = self._run(
            values, a.before, a.before_indices, a.carry_layout, a.carry_layout.zeros(), starts
        )
        position = (*self.position, jobs.index, 0)
        # The ticks. Values that no job owns were computed ahead, on all devices.
        ticking = Ticking(a, self.rewriter, self.silent, position, self.emitting)
        empty_stash = a.stash_layout.zeros() if stash is None else stash
        buffers, loose, used = ticking.run(values, start, empty_stash)
        outs = jobs.loop.outvars[: jobs.carried]
        values.known.update((outs[number], value) for number, value in loose.items())
        # From here on a carried variable is in the buffers that the ticks have left: a later store
        # hides an earlier one.
        owned = {outs[n]: n for n in range(jobs.carried) if jobs.owner(n) is not None}
        values.add_store(a.carry_layout, buffers, owned)
        # After: the update, from these buffers to those that devices hold.
        # Only now: before the loop, a result of the loop is not yet an alias of anything.
        values.same = dict(a.after.same)
        results = self._results(a.held_layout, a.carry_out)
        results = {  # without values that do not change
            device: [(n, v) for n, v in each if a.after.root(v) is not a.carry_in[n]]
            for device, each in results.items()
        }
        held = self._run(values, a.after, a.after_indices, a.held_layout, held, results)
        alike = [values.fetch(a.carry_out[i]) for i in a.everywhere]
        return held, alike, None if stash is None else used

    def _results(self, layout: Layout, variables: Sequence[Any]) -> Results:
        return {
            device: [(number, variables[number]) for number in slots]
            for device, slots in enumerate(layout.slots)
        }

    def _run(
        self,
        values: Values,
        spread: Spread,
        indices: Sequence[int],
        layout: Layout,
        buffers: list[Any],
        results: Results,
    ) -> list[Any]:
        """Run a stretch, phase by phase; the `results` of each device are written to `buffers`."""
        for number, phase in enumerate(spread.phases):
            for var in phase.sent:
                at = spread.at[var]
                assert at is not None
                values.send(var, min(at))  # any of the devices that have it: they agree
            self._reduce(values, spread, phase)
            for index in phase.everywhere:
                self._equation(values, spread, indices, index, self.rewriter)
            # Values of a device for a later phase must leave its block. They are written to buffers
            # again, because all devices run one program and have different values.
            is_last = number == len(spread.phases) - 1
            kept = _kept(spread, number)
            scratch = Layout([{v: Form.of(v.aval) for v in kept.get(d, ())} for d in self._devices])
            state: Any = (buffers, scratch.zeros())
            for device in self._devices:
                due = results.get(device, ()) if is_last else ()
                equations = phase.local.get(device, [])
                if not equations and not due:
                    continue

                def block(
                    buffers: list[Any],
                    stores: list[Any],
                    device: int = device,
                    equations: Sequence[int] = equations,
                    due: Sequence[tuple[Hashable, Any]] = due,
                    kept: dict[int, list[Any]] = kept,
                    scratch: Layout = scratch,
                ) -> Any:
                    # Values that the block overwrites are read in place: read from outside, they
                    # would be copied first.
                    inside = values.on(device).reading(layout, buffers)
                    buffers, stores = list(buffers), list(stores)
                    for index in equations:
                        # Several devices may run an equation, but what it sends out is sent once.
                        first = device == spread.where(index)[0]
                        rewriter = self.rewriter if first else self.silent
                        self._equation(inside, spread, indices, index, rewriter)
                    condense(inside.frame)
                    for var in kept.get(device, ()):
                        scratch.write(device, stores, var, inside.fetch(var))
                    # All are read before any is written: results may be operands of each other.
                    made = [(key, inside.fetch(var)) for key, var in due]
                    for key, value in made:
                        layout.write(device, buffers, key, value)
                    return buffers, stores, inside.frame.emitted

                state = self._on(values, device, block, state)
            buffers, stores = state
            values.add_store(scratch, stores, {v: v for each in kept.values() for v in each})
        return buffers

    def _equation(
        self,
        values: Values,
        spread: Spread,
        indices: Sequence[int],
        index: int,
        rewriter: Rewriter,
    ) -> None:
        eqn = spread.equations[index]
        made = values.operands(eqn)
        rewriter.run_equations([eqn], made, values.frame, self.position, indices[index])
        values.keep(eqn, made)

    def _on(self, values: Values, device: int, block: Callable[..., Any], state: Tree) -> Any:
        """Run a block on one device; its emissions become those of the step."""
        # A loop of at most one iteration carries the emissions, so their shapes are needed first.
        emitted = empty(self.emitting.room(block, state, device))

        def run(carry: Tree) -> Any:
            buffers, stores, made = block(*carry[0])
            return (buffers, stores), Emissions((key, made[key]) for key in carry[1])

        state, emitted = once_if(self._is(values, device), run, (state, emitted))
        values.frame.emitted.update(emitted)
        return state

    def _reduce(self, values: Values, spread: Spread, phase: Phase) -> None:
        """Average (or sum) the values of each device over replicas, in few exchanges."""
        # A buffer is reduced as a whole, so values to be averaged and values to be summed have
        # separate ones.
        for reduction in ("mean", "sum"):
            chosen = [i for i in phase.reduced if reduction_in(spread.equations[i]) == reduction]
            if not chosen:
                continue
            # Each device fills buffers of a common layout, and whole buffers are reduced: one
            # exchange per buffer, not one per gradient.
            outs = {i: spread.equations[i].outvars[0] for i in chosen}
            layout = Layout(
                [
                    {v: Form.of(v.aval) for i, v in outs.items() if device in spread.where(i)}
                    for device in self._devices
                ]
            )
            buffers = layout.zeros()
            for device, slots in enumerate(layout.slots):

                def block(
                    buffers: Tree,
                    device: int = device,
                    slots: Any = slots,
                    outs: dict[int, Any] = outs,
                    layout: Layout = layout,
                ) -> Any:
                    buffers, inside = list(buffers), values.on(device)
                    for i, out in outs.items():
                        if out in slots:
                            value = inside.fetch(spread.equations[i].invars[0])
                            layout.write(device, buffers, out, value.astype(out.aval.dtype))
                    return buffers

                if slots:
                    buffers = once_if(self._is(values, device), block, buffers)
            # Outside of the blocks: all devices must take part in an exchange, or it never ends.
            axis = self.rewriter.replica_axis
            buffers = [reduced(buffer, axis, reduction == "mean") for buffer in buffers]
            values.add_store(layout, buffers, {v: v for v in outs.values()})

    @property
    def _devices(self) -> range:
        return range(self.assembly.num_devices)

    def _is(self, values: Values, device: int) -> Any:
        """Whether this is the device; hidden from XLA if values come from the host."""
        if self.assembly.num_devices > 1:
            return values.me == device
        # Otherwise XLA would start to copy them before the first microbatch.
        return values.frame.step() >= 0 if any(self.assembly.held_layout.hosted) else True


def _kept(spread: Spread, phase: int) -> dict[int, list[Any]]:
    """For each device, the variables that it computes in a phase and that are used after it."""
    # Also what an equation that all devices run takes: it was sent, so it is in `sent`.
    later: set[Any] = set()
    for following in spread.phases[phase + 1 :]:
        later.update(following.sent)
        for index in [*following.reduced, *(i for each in following.local.values() for i in each)]:
            later.update(map(spread.root, variables(spread.equations[index].invars)))
    if phase < len(spread.phases) - 1:
        later.update(spread.needed)
    made: dict[int, list[Any]] = {}
    for device, equations in spread.phases[phase].local.items():
        outputs = [v for index in equations for v in spread.equations[index].outvars]
        made[device] = [v for v in outputs if v not in spread.same and v in later]
    return made
