"""The operations that ran on the devices, from JAX's profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

GRAPH = "command_buffer"
"""How the names of CUDA graphs begin. The profiler reports the kernels of a graph under their own
names: that of an instruction with underscores for dots, or a library's name."""

CLOCK, CLOCKS = "tailrace clock", 5
"""Events on the profiler's clock, to convert its times to those of `time.perf_counter_ns`: what their
names begin with, and how many there are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One run of an operation. Times are nanoseconds of `time.perf_counter_ns`.

    Attributes:
        device: the id of the device.
        line: the thread or stream it ran in.
        name: the name of its instruction in the text of the compiled program; for a kernel in a
            graph, the kernel's name.
        module: the name of the program.
        program: the platform's id of the program.
        run: the platform's id of this run of the program; 0 if it has none.
        start: its start.
        end: its end.
        in_graph: whether it was launched as part of a graph.
    """

    device: int
    line: str
    name: str
    module: str
    program: int
    run: int
    start: int
    end: int
    in_graph: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run of a program on one device. Times are nanoseconds of `time.perf_counter_ns`.

    Attributes:
        device: the id of the device.
        module: the name of the program.
        start: the start of its first operation.
        end: the end of its last operation.
    """

    device: int
    module: str
    start: int
    end: int


def program_runs(operations: Iterable[Operation]) -> list[ProgramRun]:
    """The program runs that operations belong to, in order."""
    found: dict[tuple[int, int, int], ProgramRun] = {}
    for one in operations:
        key = (one.device, one.program, one.run)
        now = found.get(key) or ProgramRun(one.device, one.module, one.start, one.end)
        start, end = min(now.start, one.start), max(now.end, one.end)
        found[key] = ProgramRun(one.device, one.module, start, end)
    return sorted(found.values(), key=lambda run: (run.start, run.device))


class DeviceProfiler:
    """Records operations on the devices during some executions.

    It is called around each dispatch; see `tailrace.base.spans.recorder`.

    Args:
        executions: the number of executions; None for all.

    Attributes:
        seconds: the time spent on starting, stopping and reading.
        problem: why there are no operations, if there are none.
        programs: the programs that were dispatched while it recorded.
    """

    def __init__(self, executions: int | None) -> None:
        self._left = executions
        self._directory: str | None = None
        self._marked = (CLOCK, 0)
        self.operations: list[Operation] = []
        self.programs: list[jax.stages.Compiled] = []
        self.seconds = 0.0
        self.problem = ""

    def before(self, program: jax.stages.Compiled) -> None:
        """Called before a program is dispatched; starts recording."""
        if self._left == 0:
            return
        self.start()
        if self._directory is not None and all(program is not one for one in self.programs):
            self.programs.append(program)

    def after(self, ticket: jax.Array) -> None:
        """Called after the dispatch; the last one is awaited, and recording stops."""
        if self._directory is None or self._left is None:
            return
        self._left -= 1
        if self._left == 0:
            with contextlib.suppress(Exception):  # the caller that collects it gets the exception
                ticket.block_until_ready()
            self.stop()

    def stop(self) -> None:
        """Stop recording and read the operations."""
        if self._directory is None:
            return
        import jax

        started = time.perf_counter()
        directory, self._directory, self._left = self._directory, None, 0
        try:
            jax.profiler.stop_trace()
            self.operations = _read(Path(directory), self._marked)
        except Exception as error:  # training continues without a profile
            self.problem = f"JAX's profiler failed: {type(error).__name__}: {error}"
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self.seconds += time.perf_counter() - started

    def start(self) -> None:
        """Start recording, unless it already does."""
        if self._directory is not None or self.problem:
            return
        import jax

        started = time.perf_counter()
        directory = tempfile.mkdtemp(prefix="tailrace-profile-")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # our spans cover what Python does
        options.host_tracer_level = 2  # operations on CPU devices are on this level
        try:
            jax.profiler.start_trace(directory, profiler_options=options)
        except Exception as error:  # another profile of this process is running
            shutil.rmtree(directory, ignore_errors=True)
            self.problem = f"JAX's profiler did not start: {error}"
            return
        self._directory = directory
        self._marked = _same_moment()
        self.seconds += time.perf_counter() - started


def _same_moment() -> tuple[str, int]:
    """One moment on both clocks: the name of an event of the profiler, and its time on ours.

    Their difference is added to all times that are read.
    """
    import jax

    found: list[tuple[int, str, int]] = []
    for number in range(CLOCKS):
        name, before = f"{CLOCK} {number}", time.perf_counter_ns()
        with jax.profiler.TraceAnnotation(name):
            pass
        found.append((time.perf_counter_ns() - before, name, before))
    # The quickest: in any other, the thread may have waited for a core between the two clocks.
    return min(found)[1:]


def _read(directory: Path, marked: tuple[str, int]) -> list[Operation]:
    """The operations of all profiles in a directory, in the order of their start."""
    import jax

    found: list[Operation] = []
    for path in sorted(directory.rglob("*.xplane.pb")):
        with warnings.catch_warnings():
            # Newer Pythons warn that the types of the reader have no __module__.
            warnings.simplefilter("ignore", DeprecationWarning)
            planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
            on_devices = [plane for plane in planes if plane.name.startswith("/device:")]
            host = [plane for plane in planes if plane.name.startswith("/host:CPU")]
            offset = marked[1] - _mark(host, marked[0])
            # CPU devices have no planes: their operations run in threads of the host.
            for plane in on_devices or host:
                found += _of_plane(plane, offset)
    return sorted(found, key=lambda one: (one.start, -one.end))


def _mark(planes: list[Any], name: str) -> int:
    """The time of an event on the profiler's clock."""
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == name:
                    return int(event.start_ns)
    return 0


def _of_plane(plane: Any, offset: int) -> list[Operation]:
    # "/device:GPU:1": the plane of one device. Events of CPU devices have an ordinal instead.
    number = plane.name.rpartition(":")[2].split()[0]
    own = int(number) if number.isdigit() else 0
    found: list[tuple[Operation, int]] = []
    ends: dict[int, int] = {}
    for line in plane.lines:
        for event in line.events:
            name = event.name
            if name.startswith("ThreadpoolListener"):
                continue  # XLA's thread pool about itself
            stats = dict(event.stats)
            start = int(event.start_ns) + offset
            end = start + int(event.duration_ns)
            # The profiler links an event to a later one by `_p` (producer) and `_c` (consumer).
            if name.startswith("end: "):
                ends[int(stats.get("_c", -1))] = end
            elif "hlo_op" in stats:
                in_graph = str(stats["hlo_op"]).startswith(GRAPH)
                operation = Operation(
                    int(stats.get("device_ordinal", own)),
                    line.name,
                    name if in_graph else str(stats["hlo_op"]),
                    str(stats.get("hlo_module", "")),
                    int(stats.get("program_id", 0)),
                    int(stats.get("run_id", 0)),
                    start,
                    end,
                    in_graph,
                )
                found.append((operation, int(stats.get("_p", -2))))
    # On a CPU an operation may return before it has finished; the linked event has its end.
    return [
        dataclasses.replace(one, end=max(one.end, ends.get(number, one.end)))
        for one, number in found
    ]
