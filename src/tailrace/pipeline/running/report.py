"""The costs of a pipeline: memory and time of each stage, the bubble, and advice."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.jaxprs.internals import nbytes, variables
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.lowering.stage import Who
from tailrace.pipeline.schedule.plan import Plan, plan
from tailrace.taps.frame import Ambient, Counter, Frame
from tailrace.taps.rewrite import Rewriter


@dataclasses.dataclass(frozen=True)
class StageCost:
    """The costs of one stage (or one member of a group). Sizes are bytes, times seconds.

    Attributes:
        name: the name of the stage.
        device: its device.
        parameters: the parameters that it uses.
        stash: the residuals of its forwards, in all slots.
        slots: the number of slots, one microbatch each.
        sends: the bytes sent to its neighbours per microbatch.
        forward: the time of one forward, if measured.
        backward: the time of one backward, if measured.
    """

    name: str
    device: int
    parameters: int
    stash: int
    slots: int
    sends: int
    forward: float | None = None
    backward: float | None = None


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """The costs of a pipeline; prints as a table.

    Attributes:
        stages: the costs of each stage.
        held: bytes of parameters and optimizer state on each device.
        padding: unused bytes on each device, because buffers have the same shapes on all.
        buffers: bytes of all buffers of one device: state, accumulators, stash, messages.
        bubble: the idle share of device time, as planned for equal stages.
        expected_bubble: the same for the measured times.
        expected: seconds of a step, by the simulator, from the measured times.
        measured: seconds of a step in the latest fit.
        measured_bubble: the share of device time that was not spent in stages.
        advice: how to reduce the costs.
    """

    stages: tuple[StageCost, ...]
    held: tuple[int, ...]
    padding: tuple[int, ...]
    buffers: int
    bubble: float
    expected_bubble: float | None = None
    expected: float | None = None
    measured: float | None = None
    measured_bubble: float | None = None
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = ("stage", "device", "parameters", "stash", "slots", "sends", "forward", "backward")
        rows = [
            (
                one.name,
                str(one.device),
                _size(one.parameters),
                _size(one.stash),
                str(one.slots),
                _size(one.sends),
                _ms(one.forward),
                _ms(one.backward),
            )
            for one in self.stages
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in [head, *rows]
        ]
        for device, (held, padding) in enumerate(zip(self.held, self.padding, strict=True)):
            lines.append(
                f"device {device}: holds {_size(held)}, {_size(padding)} of padding in "
                f"{_size(self.buffers)} of buffers"
            )
        lines.append(f"bubble: {self.bubble:.1%} planned for equal stages")
        if self.expected is not None:
            lines[-1] += f", {self.expected_bubble:.1%} with these times"
            lines.append(f"step: {_ms(self.expected)} expected")
        if self.measured is not None:
            lines[-1] += f", {_ms(self.measured)} measured in the latest fit"
            if self.measured_bubble is not None:
                lines[-1] += f" (bubble {self.measured_bubble:.1%})"
        return "\n".join([line.rstrip() for line in lines] + [f"- {one}" for one in self.advice])

    __repr__ = __str__


def report(
    assembly: Assembly, *, timed: bool = True, measured: float | None = None, repeats: int = 5
) -> PipelineReport:
    """What a pipeline costs.

    Args:
        assembly: the layout of the pipeline.
        timed: whether to run the stages and measure their times.
        measured: seconds of a step, if known.
        repeats: the number of runs of each; the fastest counts.
    """
    a = assembly
    times = {who: unit_seconds(a, who, repeats) for who in a.jobs.jobs} if timed else {}
    stages = tuple(_stage(a, who, times) for who in a.jobs.jobs if who[0] == "F")
    layouts = [a.held_layout, a.carry_layout, a.stash_layout]
    devices = range(a.num_devices)
    # All devices have buffers of the same shapes: what one of them does not use is padding.
    common = sum(layout.nbytes for layout in layouts)
    # Sent and received bytes; on one device these are the same.
    messages = min(a.num_devices, 2) * sum(channel.layout.nbytes for channel in a.channels)
    found = PipelineReport(
        stages,
        tuple(a.held_layout.used(d) for d in devices),
        tuple(common - sum(layout.used(d) for layout in layouts) for d in devices),
        common + messages,
        a.plan.bubble,
        measured=measured,
    )
    if not timed:
        return found
    forward, backward = _by_stage(a, times, "F"), _by_stage(a, times, "B")
    simulated = a.plan.simulate(forward, backward if a.plan.training else None)
    bubble = None
    if measured:
        # Units measured alone include a dispatch each, which units inside a step do not: not below
        # zero.
        busy = sum(times.values()) * a.plan.microbatches
        bubble = max(0.0, 1 - busy / (measured * a.num_devices))
    return dataclasses.replace(
        found,
        expected=simulated.total,
        expected_bubble=simulated.bubble,
        measured_bubble=bubble,
        advice=tuple(_advice(a, forward, backward, found)),
    )


def unit_seconds(assembly: Assembly, who: Who, repeats: int = 5) -> float:
    """The time of one forward or backward, alone, on one device."""
    programs = assembly.jobs.programs(who)
    if not programs:
        return 0.0

    def run(key: jax.Array, inputs: Tree) -> list[list[Any]]:
        ambient = Ambient(key, jnp.int32(0), jnp.int32(0))
        counters = (Counter(1, jnp.int32(0)), Counter(1, jnp.int32(0)))
        frame = Frame(ambient, counters=counters)
        return [
            Rewriter().run(program.jaxpr, program.consts, given, frame)
            for program, given in zip(programs, inputs, strict=True)
        ]

    inputs = [[_example(var.aval) for var in program.jaxpr.invars] for program in programs]
    call = jax.jit(run)
    key = jax.random.key(0)
    jax.block_until_ready(call(key, inputs))
    # The fastest of several: disturbances only add time.
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call(key, inputs))
        best = min(best, time.perf_counter() - started)
    return best


def _example(aval: Any) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), aval.shape)
    # Values that stay finite through logarithms and divisions, and indices that every table has:
    # NaN and denormal numbers take other times.
    return jnp.full(aval.shape, 0.5 if jnp.issubdtype(aval.dtype, jnp.inexact) else 0, aval.dtype)


def _stage(a: Assembly, who: Who, times: dict[Who, float]) -> StageCost:
    _, stage, member = who
    device = a.device(who)
    jobs = [job for each, job in a.jobs.jobs.items() if each[1:] == who[1:]]
    given = (var for job in jobs for var in variables(a.jobs.constants(job.equations)))
    roots = set(map(a.before.root, given))
    numbers = {var: i for i, var in enumerate(a.carry_in)}
    slots = a.held_layout.slots[device]
    held = [numbers[var] for var in roots if var in numbers and numbers[var] in slots]
    stash = sum(
        slot.form.nbytes
        for (whose, _), slot in a.stash_layout.slots[device].items()  # type: ignore[misc]
        if whose == who[1:]
    )
    sent = {var for job in jobs for variables in job.sends.values() for var in variables}
    name = a.plan.stage_name(stage)
    return StageCost(
        name if len(a.plan.placement[stage]) == 1 else f"{name}.{member}",
        device,
        sum(slots[n].form.nbytes for n in held),
        stash,
        a.plan.slots(stage) if a.plan.training else 0,
        sum(nbytes(var.aval) for var in sent),
        times.get(who),
        times.get(("B", stage, member)),
    )


def _by_stage(a: Assembly, times: dict[Who, float], kind: str) -> list[Any]:
    found: list[Any] = []
    for stage, members in enumerate(a.plan.placement):
        each = [times.get((kind, stage, m), 0.0) for m in range(len(members))]
        found.append(each[0] if len(each) == 1 else each)
    return found


def _advice(
    a: Assembly, forward: Sequence[Any], backward: Sequence[Any], found: PipelineReport
) -> list[str]:
    p = a.plan
    if not p.training:
        return []
    total = [_longest(f) + _longest(b) for f, b in zip(forward, backward, strict=True)]
    even = sum(total) / len(total)
    advice = []
    if even and max(total) > 1.25 * even:
        slow = max(range(len(total)), key=total.__getitem__)
        advice.append(
            f"Stage {slow} takes {max(total) / even:.2f} times the mean of all stages: cut the model "
            f"elsewhere (tr.balance proposes where)."
        )
    now = p.simulate(forward, backward).total / p.microbatches
    # Twice the count fits every schedule that the count fits: a multiple of its round stays one.
    more = _with_count(p, 2 * p.microbatches).simulate(forward, backward).total
    gain = 1 - more / (2 * p.microbatches) / now
    if gain > 0.03:
        advice.append(
            f"With {2 * p.microbatches} microbatches a step, each takes {gain:.0%} less time: ramp-up "
            f"and ramp-down weigh less."
        )
    stash = sum(stage.stash for stage in found.stages)
    weights = sum(stage.parameters for stage in found.stages)
    if stash > weights:
        advice.append(
            f"The stash ({_size(stash)}) is larger than the parameters ({_size(weights)}): "
            f"recompute=True keeps the inputs of stages only; schedule='interleaved' needs half."
        )
    return advice


def _with_count(p: Plan, count: int) -> Plan:
    return plan(
        [len(s) for s in p.placement], count, p.schedule, list(p.device_mapping), p.training
    )


def _longest(value: Any) -> float:
    return max(value) if isinstance(value, list) else value


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
