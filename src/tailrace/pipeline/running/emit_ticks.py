"""Emitting the ticks of a pipeline: the loop over microbatches, by the plan.

In a tick every device runs the backward and the forward that the plan assigns to it, if any; then all
messages to neighbours are exchanged at once. Devices wait for each other only there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.spans.scopes import STAGES, unit_scope
from tailrace.base.trees import Tree
from tailrace.devices.devices import STAGE
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.internals import form_of, value_of
from tailrace.jaxprs.own_equations import has_role
from tailrace.jaxprs.stretches import used_by
from tailrace.jaxprs.walk import Position, elements_read
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.lowering.jobs import Job
from tailrace.pipeline.running.in_place import Emitting, empty, once_if
from tailrace.pipeline.running.value_lookup import Values
from tailrace.taps.frame import Block, Emissions
from tailrace.taps.rewrite import Rewriter
from tailrace.taps.wanted import condense, is_collected


class Ticking:
    """Emits the loop over microbatches of one step.

    Args:
        assembly: the layout of the step.
        rewriter: for the equations of jobs.
        silent: for equations that another job runs too, which has their effects.
        position: the position of the loop's body in the program.
        emitting: records which device emits what.
    """

    def __init__(
        self,
        assembly: Assembly,
        rewriter: Rewriter,
        silent: Rewriter,
        position: Position,
        emitting: Emitting,
    ) -> None:
        self.assembly, self.rewriter, self.silent = assembly, rewriter, silent
        self.position, self.emitting = position, emitting
        self.jobs = assembly.jobs

    def run(
        self, values: Values, start: list[Any], stash: list[Any]
    ) -> tuple[list[Any], dict[int, Any], list[Any]]:
        """All ticks; returns the jobs' buffers, the values that no job carries, and the stash."""
        a, frame = self.assembly, values.frame
        count = a.plan.microbatches
        counts = elements_read(self.jobs.body.eqns)
        # All devices have all elements of the step. A job slices that of its microbatch: in one
        # tick, stages work on different microbatches.
        elements = {queue: frame.blocks[queue].take_many(count) for queue in counts}
        ahead, loose = self._ahead(values, elements)
        table = a.plan.timetable()
        active = self._in_order_of_a_tick()
        carry = self._empty_carry(start, stash)
        bodies = {}
        emitted: Emissions = Emissions()
        for job in active:
            bodies[job.who] = self._body(job, values, elements, ahead)
            # The loop over ticks carries the emissions of jobs, one row per microbatch, so their
            # shapes must be known before any job is traced.
            sketch, forms = self._sketch(job, values, elements, ahead)
            shapes = self.emitting.room(sketch, (forms,), a.device(job.who))
            emitted.update(empty(shapes, lambda key: () if is_collected(key) else (count,)))

        def tick(state: Tree, row: Tree) -> Any:
            carry, emitted = dict(state[0]), state[1]
            for job in active:
                kind, stage, _ = job.who
                microbatches, slots = (row[0], row[2]) if kind == "F" else (row[1], row[3])
                m, slot = microbatches[stage], slots[stage]
                mine = m >= 0  # -1: the stage waits in this tick
                if a.num_devices > 1:
                    mine = mine & (values.me == a.device(job.who))

                def once(
                    state: Tree, job: Job = job, m: jax.Array = m, slot: jax.Array = slot
                ) -> Any:
                    carry, emitted = state
                    carry, made = bodies[job.who](carry, m, slot)
                    return carry, _kept(emitted, made, m)

                # Profiles find a unit by this scope; see `profiling/programs/tick_times.py`.
                with jax.named_scope(unit_scope(*job.who)):
                    carry, emitted = once_if(mine, once, (carry, emitted))
            if a.num_devices > 1:
                # The only place where devices wait for each other. All take part in all ticks: a
                # device without a message sends its previous one again, which is not read.
                with jax.named_scope(STAGES):
                    carry["in"] = [
                        [lax.ppermute(buffer, STAGE, channel.pairs) for buffer in out]
                        for channel, out in zip(a.channels, carry["out"], strict=True)
                    ]
            return (carry, emitted), None

        # The plan is data to the program: a scan over rows is as large for a thousand ticks as for ten.
        rows = tuple(jnp.asarray(part) for part in table)
        (carry, emitted), _ = lax.scan(tick, (carry, emitted), rows)
        frame.emitted.update(emitted)
        return carry["carried"], loose, carry["stash"]

    def _in_order_of_a_tick(self) -> list[Job]:
        """The jobs that have work, in the order in which a device runs them within one tick."""
        active = [job for job in self.jobs.jobs.values() if not job.is_empty]
        # Backwards come first, so that a slot may be read and written in one tick; and the receiver
        # of a message runs before its sender, which may then overwrite it.
        return sorted(
            active, key=lambda job: (job.who[0], job.who[1] if job.who[0] == "B" else -job.who[1])
        )

    def _empty_carry(self, start: list[Any], stash: list[Any]) -> dict[str, Any]:
        """What outlives a tick: it is the carry of one scan, which XLA updates in place."""
        channels = self.assembly.channels
        carry = {
            "carried": start,
            "stash": stash,
            "out": [channel.layout.zeros() for channel in channels],
        }
        # Messages wait one tick: what is sent at the end of a tick is read in the next. On one device
        # there is nothing to send, and the receiver reads the sender's buffer.
        if self.assembly.num_devices > 1:
            carry["in"] = [channel.layout.zeros() for channel in channels]
        return carry

    def _sketch(self, job: Job, values: Values, elements: Tree, ahead: dict[Any, Any]) -> Any:
        """The emissions of a job, for their shapes only: a function of operands, and their forms.

        Only equations with emissions run, and the loop's counter. The forms of all operands are known,
        so nothing else is traced, neither forwards nor backwards.
        """
        body, view = self.jobs.body, values.on(self.assembly.device(job.who))
        used = used_by(body.eqns[i] for i in job.equations)
        done = {var for var in ahead if var in used}
        chosen = [
            (i, eqn)
            for i, eqn in ((i, body.eqns[i]) for i in job.equations)
            if has_role(eqn, "loop")
            or (i not in job.copies and self.rewriter.sends(eqn, (*self.position, i)))
        ]
        wanted = list(used_by(eqn for _, eqn in chosen))
        carried = [self.jobs.carry_in[number] for number in job.carries]
        received = [var for each in job.receives.values() for var in each]
        stored = {*job.takes, *carried, *received, *done}

        def run(given: Any) -> Any:
            frame = view.frame.inner(_blocks(elements, jnp.int32(0)))
            for index, eqn in chosen:
                known = dict(zip(wanted, given, strict=True))
                self.rewriter.run_equations([eqn], known, frame, self.position, index)
            condense(frame)
            return frame.emitted

        return lambda given: (run(given),), [form_of(var, weak=var not in stored) for var in wanted]

    def _body(self, job: Job, values: Values, elements: Tree, ahead: dict[Any, Any]) -> Any:
        """Run a job on the buffers, for a microbatch and a slot of the stash."""
        a, device = self.assembly, self.assembly.device(job.who)
        jobs, who = self.jobs, job.who
        body = jobs.body
        used = set(used_by(body.eqns[i] for i in job.equations))
        view = values.on(device)

        def run(carry: Tree, m: jax.Array, slot: jax.Array) -> Any:
            frame = view.frame.inner(_blocks(elements, m))
            known = self._given(view, used)
            known.update((var, x[m]) for var, x in ahead.items() if var in used)
            known[body.invars[-1]] = m  # the loop's counter: a job counts microbatches, not ticks
            carried, stash = list(carry["carried"]), list(carry["stash"])
            out = [list(buffers) for buffers in carry["out"]]
            # On one device a message is read from where it was written.
            arrived = carry["in"] if a.num_devices > 1 else carry["out"]
            for number in job.carries:
                var = jobs.carry_in[number]
                known[var] = a.carry_layout.read(device, carried, number)
            if job.takes:
                known.update(a.stash_layout.take(device, stash, who[1:], slot))
            for channel, buffers in zip(a.channels, arrived, strict=True):
                for number, (_, to) in enumerate(channel.edges):
                    if to == who:
                        for var in channel.variables[number]:
                            known[var] = channel.layout.read(number, buffers, var)
            for index in job.equations:
                rewriter = self.silent if index in job.copies else self.rewriter
                rewriter.run_equations([body.eqns[index]], known, frame, self.position, index)
            condense(frame)
            for number in job.carries:
                value = value_of(known, jobs.carry_out[number])
                a.carry_layout.write(device, carried, number, value)
            if job.puts:
                a.stash_layout.put(device, stash, who[1:], known, slot)
            for channel, buffers in zip(a.channels, out, strict=True):
                for number, (sender, _) in enumerate(channel.edges):
                    if sender == who:
                        for var in channel.variables[number]:
                            channel.layout.write(number, buffers, var, known[var])
            carry = {**carry, "carried": carried, "stash": stash, "out": out}
            return carry, frame.emitted

        return run

    def _given(self, view: Values, used: set[Any]) -> dict[Any, Any]:
        """Values from before the loop that are used inside, by the variables of its body."""
        program = as_scan(self.jobs.loop).body
        known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        known.update((v, view.fetch(given)) for v, given in self.jobs.outside.items() if v in used)
        return known

    def _ahead(self, values: Values, elements: Tree) -> tuple[dict[Any, Any], dict[int, Any]]:
        """Compute ahead, for all microbatches, the values that depend on no job."""
        jobs = self.jobs
        if not jobs.loose:
            return {}, {}
        body = jobs.body
        inputs = [jobs.carry_in[n] for n in jobs.loose]
        used = set(used_by(body.eqns[i] for i in jobs.ahead))
        given = self._given(values, used)
        chosen = jobs.from_ahead
        # By a scan, in the order of microbatches, as the plain step computes them: a running sum of
        # weights must be rounded the same way.
        start = [values.fetch(jobs.starts[n]) for n in jobs.loose]

        def one(carry: Tree, m: jax.Array) -> Any:
            known = {**given, **dict(zip(inputs, carry, strict=True)), body.invars[-1]: m}
            frame = values.frame.inner(_blocks(elements, m))
            for index in jobs.ahead:
                self.silent.run_equations([body.eqns[index]], known, frame, self.position, index)
            return [known[jobs.carry_out[n]] for n in jobs.loose], [known[var] for var in chosen]

        count = jnp.arange(self.assembly.plan.microbatches, dtype=jnp.int32)
        after, stacked = lax.scan(one, start, count)
        return dict(zip(chosen, stacked, strict=True)), dict(zip(jobs.loose, after, strict=True))


def _blocks(elements: Tree, m: jax.Array) -> dict[Any, Block]:
    """The element of one microbatch, as a block to take."""
    return {
        queue: Block(tuple(lax.dynamic_slice_in_dim(leaf, m, 1) for leaf in leaves))
        for queue, leaves in elements.items()
    }


def _kept(emitted: Emissions, made: Emissions, m: jax.Array) -> Emissions:
    """The emissions of all microbatches, with those of one more added."""

    def put(buffer: jax.Array, new: jax.Array) -> Any:
        return lax.dynamic_update_index_in_dim(buffer, new, m, 0)

    after = Emissions(emitted)
    for key, new in made.items():
        if not is_collected(key):
            after[key] = jax.tree.map(put, emitted[key], new)
        elif key[0].collect == "sum":
            after[key] = jax.tree.map(jnp.add, emitted[key], new)
        # Only the last value is kept: a stage takes microbatches in order, so it is the last one's.
        else:
            after[key] = new
    return after
