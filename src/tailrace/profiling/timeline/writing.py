"""Writes a recording to a file: its tracks and their events."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import IO, Any

from tailrace.base.spans.recorder import Ran, Recorder
from tailrace.profiling.programs.device_operations import Operation, program_runs
from tailrace.profiling.programs.named_operations import (
    CONTAINERS,
    NamedProgram,
    programs_of,
    resolved,
)
from tailrace.profiling.programs.tick_times import TimedUnit, measured, planned
from tailrace.profiling.timeline.perfetto_file import PerfettoFile
from tailrace.profiling.timeline.thinning import Bar, thinned

_VALUES = 100_000
"""The most values of one counter; of more, every n-th is written."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a trace, in seconds.

    Attributes:
        spans: the number of recorded spans.
        recording_s: the time of recording them.
        profiler_s: the time of starting and stopping JAX's profiler, and reading its events.
        writing_s: the time of writing the file, after the block.
        left_out: spans and values beyond the limit of a recording.
    """

    spans: int
    recording_s: float
    profiler_s: float
    writing_s: float
    left_out: int

    def __str__(self) -> str:
        return (
            f"The trace itself took {self.recording_s * 1e3:.1f} ms for {self.spans} spans, "
            f"{self.profiler_s:.2f} s for the profiler and {self.writing_s:.2f} s to write."
        )


def write(stream: IO[bytes], recorder: Recorder, span_s: float) -> Cost:
    """Write a closed recording; returns its cost, which is in the file too."""
    started = time.perf_counter()
    profiler = recorder.profiler
    operations: list[Operation] = []
    programs: dict[int, NamedProgram] = {}
    if profiler is not None:
        operations = profiler.operations
        programs = programs_of(operations, profiler.programs)
        operations = resolved(operations, programs)
    file = PerfettoFile(stream, f"tailrace: {sys.argv[0] or 'python'}")
    groups: dict[str, int] = {}
    for key, bars in thinned(_tracks(recorder, operations, programs)).items():
        file.bars(_track(file, key, groups), bars)
    _counters(file, recorder)
    # The time of recording is an estimate: to measure each span would double its cost.
    cost = Cost(
        len(recorder.slices) + len(recorder.counts),
        span_s * (len(recorder.slices) + len(recorder.counts)),
        profiler.seconds if profiler is not None else 0.0,
        time.perf_counter() - started,
        recorder.left_out,
    )
    about = dataclasses.asdict(cost)
    if profiler is not None and profiler.problem:
        about["no_operations"] = profiler.problem
    file.note(file.track("tailrace"), recorder.ended, "cost of this trace", about)
    return cost


def _tracks(
    recorder: Recorder, operations: list[Operation], programs: Mapping[int, NamedProgram]
) -> dict[tuple[str, ...], list[Bar]]:
    """The bars of each track that has some, by (kind, *names), in the order in which they are shown."""
    tracks: dict[tuple[str, ...], list[Bar]] = {}
    for one in recorder.slices:
        # With the id of the thread: several threads may have the same name.
        name = recorder.threads[one.track]
        bars = tracks.setdefault(("thread", f"{name}", str(one.track)), [])
        bars.append(Bar(one.name, one.start, one.end, one.about))
    tracks[("track", "executions")] = [_execution(ran) for ran in recorder.ran]
    runs = _runs(operations, programs)
    for ran in recorder.ran:
        if ran.plan is not None and ran.steps:
            _add_ticks(tracks, ran, runs)
    for run in program_runs(operations):
        bars = tracks.setdefault(("programs", f"device {run.device}"), [])
        bars.append(Bar(run.module or "program", run.start, run.end))
    for one in operations:
        bar = _operation(one, programs)
        tracks.setdefault(("operations", f"device {one.device}", one.line), []).append(bar)
    return {key: bars for key, bars in tracks.items() if bars}


def _track(file: PerfettoFile, key: tuple[str, ...], groups: dict[str, int]) -> int:
    kind, *names = key
    if kind == "thread":
        return file.thread(names[0])
    if kind == "track":
        return file.track(names[0])
    if kind not in groups:
        groups[kind] = file.track(kind)
    return file.track(", ".join(names), groups[kind])


def _execution(ran: Ran) -> Bar:
    about: dict[str, Any] = {"first_step": ran.first_step, "steps": ran.steps or None}
    if ran.failed:
        about["failed"] = True
    return Bar(f"execution {ran.number}", ran.start, ran.end, about)


def _operation(one: Operation, programs: Mapping[int, NamedProgram]) -> Bar:
    """An operation, named by phase, scope and JAX's operation."""
    program = programs.get(one.program)
    place = program.place(one.name) if program is not None else None
    if program is None or place is None:
        return Bar(one.name, one.start, one.end)
    if program.module.instructions[one.name].opcode in CONTAINERS:
        shown = place.operation or one.name
    else:
        shown = f"{place.phase} {place.scope}:{place.operation}".replace(" :", ":")
    return Bar(shown, one.start, one.end, {"instruction": one.name})


def _runs(
    operations: list[Operation], programs: Mapping[int, NamedProgram]
) -> dict[int, tuple[NamedProgram, deque[list[Operation]]]]:
    """The operations of each run of each program, in order, by the compiled program's identity."""
    found: dict[tuple[int, int], list[Operation]] = {}
    for one in operations:
        if one.program in programs:
            found.setdefault((one.program, one.run), []).append(one)
    runs: dict[int, tuple[NamedProgram, deque[list[Operation]]]] = {}
    for (number, _), mine in sorted(found.items(), key=lambda item: item[1][0].start):
        program = programs[number]
        # By identity: the programs of all loops have the same name.
        runs.setdefault(id(program.compiled), (program, deque()))[1].append(mine)
    return runs


def _add_ticks(
    tracks: dict[tuple[str, ...], list[Bar]],
    ran: Ran,
    runs: Mapping[int, tuple[NamedProgram, deque[list[Operation]]]],
) -> None:
    """Add the units of a pipeline's execution: as planned, and as measured if it was recorded.

    The first executions are recorded, if any; so the n-th run of a program is its n-th execution.
    """
    program, waiting = runs.get(id(ran.program), (None, deque()))
    # As planned, all executions look alike: without recorded operations the first is enough.
    if not waiting and ran.number > 0:
        return
    _add_units(tracks, "ticks, as planned", planned(ran.plan, ran.start, ran.end, ran.steps))
    if program is not None and waiting:
        found = measured(ran.plan, waiting.popleft(), program, ran.steps)
        if found is not None:
            _add_units(tracks, "ticks, as measured", found.units)


def _add_units(
    tracks: dict[tuple[str, ...], list[Bar]], group: str, units: Iterable[TimedUnit]
) -> None:
    for one in units:
        unit = one.unit
        about = {"stage": unit.stage, "microbatch": unit.microbatch, "tick": one.tick}
        name = f"{unit.kind}{unit.stage}.{unit.microbatch}"
        bars = tracks.setdefault((group, f"device {unit.device}"), [])
        bars.append(Bar(name, one.start, one.end, {**about, "step": one.step}))


def _counters(file: PerfettoFile, recorder: Recorder) -> None:
    values: dict[str, list[tuple[int, float]]] = {}
    for count in recorder.counts:
        values.setdefault(count.name, []).append((count.time, count.value))
    speeds = [
        (ran.end, ran.steps / max((ran.end - ran.start) * 1e-9, 1e-9))
        for ran in recorder.ran
        if ran.steps
    ]
    if speeds:
        values.setdefault("steps/s", []).extend(speeds)
    for name, found in values.items():
        every = -(-len(found) // _VALUES)
        file.values(file.counter(name), found[::every])
