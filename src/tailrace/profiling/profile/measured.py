"""A profile from measurements: operations that ran, joined with the text of their program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tailrace.errors import ProgramError
from tailrace.pipeline.schedule.plan import Plan
from tailrace.profiling.profile.pipeline_times import pipeline_times
from tailrace.profiling.profile.profile import Profile, Row, ordered
from tailrace.profiling.profile.roofline import Roofline, roofline
from tailrace.profiling.programs.device_operations import DeviceProfiler, Operation
from tailrace.profiling.programs.hlo_costs import bytes_moved, flops
from tailrace.profiling.programs.hlo_text import Instruction
from tailrace.profiling.programs.liveness import alive_at_peak
from tailrace.profiling.programs.named_operations import (
    CONTAINERS,
    NamedProgram,
    programs_of,
    resolved,
)
from tailrace.profiling.programs.tick_times import measured

if TYPE_CHECKING:
    from tailrace.devices.devices import Device

_NARROW = {"bf16": "bfloat16", "f16": "float16"}
"""XLA's names of the dtypes with a roofline of their own; all others are compared with float32."""


def profile_of(
    profiler: DeviceProfiler,
    *,
    steps: int,
    executions: int,
    wall_s: float,
    device: Device,
    owner: Callable[[Instruction], str],
    plan: Plan | None = None,
) -> Profile:
    """The profile of the operations that a profiler recorded.

    Args:
        profiler: a stopped profiler.
        steps: the number of steps it covered.
        executions: the number of executions.
        wall_s: their duration.
        device: one of the devices.
        owner: returns the owner of an argument of the program, for the memory.
        plan: the plan of the pipeline, if there is one.
    """
    operations = profiler.operations
    programs = programs_of(operations, profiler.programs)
    mine = [one for one in resolved(operations, programs) if one.program in programs]
    if not mine:
        raise ProgramError(
            f"A profile needs the events of JAX's profiler, and it saw no operation of the program. "
            f"{profiler.problem or 'This platform may not report operations.'}"
        )
    limits = roofline(device, _dtype_of(next(iter(programs.values()))))
    sums, unnamed = _sums_by_scope(mine, programs)
    total = sum(each.seconds for each in sums.values()) + unnamed
    rows = [each.row(phase, scope, limits) for (phase, scope), each in sums.items()]
    if unnamed:
        # A row of its own, so that the rows add up to all the time that was recorded.
        rows.append(Row("", "(no place)", unnamed, 0.0, 0.0, None, 0, {}))
    # The training loop is the largest program; small ones may run before it.
    main_number, main = max(programs.items(), key=lambda item: len(item[1].module.instructions))
    ticks = None
    if plan is not None:
        ran = [one for one in mine if one.program == main_number]
        ticks = measured(plan, ran, main, steps)
    return Profile(
        rows=ordered(rows),
        steps=steps,
        executions=executions,
        wall_s=wall_s,
        named=1.0 - unnamed / total if total else 1.0,
        device=f"{device.device_kind} ({device.platform})",
        peak_flops=limits.flops,
        peak_bytes=limits.bytes,
        memory=alive_at_peak(main, owner),
        pipeline=None if ticks is None else pipeline_times(ticks, steps // executions, wall_s),
    )


def _sums_by_scope(
    operations: Sequence[Operation], programs: Mapping[int, NamedProgram]
) -> tuple[dict[tuple[str, str], _Sum], float]:
    """The sums of each (phase, scope), and the seconds of operations without a known place."""
    sums: dict[tuple[str, str], _Sum] = {}
    unnamed = 0.0
    # One program at a time: the names of instructions are unique only within a program.
    for number, program in programs.items():
        ran = [one for one in operations if one.program == number]
        for name, (seconds, runs) in _own_times(ran, program).items():
            instruction, place = program.module.instructions.get(name), program.place(name)
            if instruction is None or place is None:
                unnamed += seconds
                continue
            found = sums.setdefault((str(place.phase), place.scope), _Sum())
            found.add(instruction, program, place.operation, seconds, runs)
    return sums, unnamed


class _Sum:
    """The sums of one row."""

    def __init__(self) -> None:
        self.seconds = self.flops = self.bytes = 0.0
        self.runs = 0
        self.operations: dict[str, float] = {}

    def add(
        self,
        instruction: Instruction,
        program: NamedProgram,
        operation: str,
        seconds: float,
        runs: int,
    ) -> None:
        self.seconds += seconds
        self.runs += runs
        self.flops += runs * flops(instruction, program.module)
        self.bytes += runs * bytes_moved(instruction, program.module)
        self.operations[operation] = self.operations.get(operation, 0.0) + seconds

    def row(self, phase: str, scope: str, limits: Roofline) -> Row:
        least = limits.least_seconds(self.flops, self.bytes)
        # Above 1 only by errors of estimated costs and of the measured roofline.
        share = min(1.0, least / self.seconds) if self.seconds > 0 and least > 0 else None
        by_cost = sorted(self.operations.items(), key=lambda item: -item[1])
        return Row(
            phase, scope, self.seconds, self.flops, self.bytes, share, self.runs, dict(by_cost)
        )


def _own_times(
    operations: Sequence[Operation], program: NamedProgram
) -> dict[str, tuple[float, int]]:
    """Self time and runs of each instruction: without the time of recorded inner instructions."""
    whole: dict[str, float] = {}
    runs: dict[str, int] = {}
    for one in operations:
        whole[one.name] = whole.get(one.name, 0.0) + (one.end - one.start) * 1e-9
        runs[one.name] = runs.get(one.name, 0) + 1
    module = program.module

    def inside(instruction: Instruction) -> float:
        """The total time of the instructions of called computations."""
        took = 0.0
        for called in instruction.calls:
            for one in module.computations.get(called, ()):
                # A recorded instruction already includes those that it calls.
                took += whole[one.name] if one.name in whole else inside(one)
        return took

    found = {}
    for name, seconds in whole.items():
        instruction = module.instructions.get(name)  # None for a library's kernel
        if instruction is not None and instruction.opcode in CONTAINERS and inside(instruction):
            continue  # between its operations it waits for a thread, which is not work
        found[name] = (seconds, runs[name])
    return found


def _dtype_of(program: NamedProgram) -> str:
    """The dtype of most matrix products of the program, weighted by the size of their results."""
    found: dict[str, int] = {}
    for one in program.module.instructions.values():
        if one.opcode in ("dot", "convolution", "custom-call") and one.shapes:
            for operand in one.operands[:1]:
                given = program.module.instructions.get(operand)
                if given is not None and given.shapes:
                    # The operand's dtype: a product of bfloat16 values may have a float32 result.
                    dtype = given.shapes[0].dtype
                    found[dtype] = found.get(dtype, 0) + one.shapes[0].size
    most = max(found, key=lambda dtype: found[dtype], default="f32")
    return _NARROW.get(most, "float32")
