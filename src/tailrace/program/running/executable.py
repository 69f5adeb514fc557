"""A program of the devices, compiled, and its dispatch."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from tailrace.base.spans.span import Execution, span
from tailrace.devices import devices
from tailrace.feeds.feed import Feed, Staged
from tailrace.jaxprs.internals import Var, compiler_options, kernels_of_any_size, separate_kernels
from tailrace.program.compiling.build import as_texts
from tailrace.program.compiling.compilations import Compilation, compiling
from tailrace.program.compiling.compiled_programs import compiled_program
from tailrace.program.running.device_program import DeviceProgram
from tailrace.program.running.element_intake import ElementIntake, put_back
from tailrace.program.running.loop_state import Buffer, LoopState, Numbers
from tailrace.program.running.result_packing import FirstRows
from tailrace.taps.counted_loop import looks_between
from tailrace.taps.frame import Emission


class Executable:
    """A program of the devices, compiled once and dispatched any number of times.

    Args:
        program: the program to compile.
    """

    def __init__(self, program: DeviceProgram) -> None:
        self._program, piece = program, program.piece
        self.segment, self.placement, self.length = piece.segment, piece.placement, piece.length
        self.counted, self.elements = piece.counted, piece.elements
        self._numbers = piece.placement.put(program.free_numbers)
        # A guard detects a bad step after later ones have run; the state before it is then recomputed,
        # from a state that must not have been donated.
        stops = any(want.guard and not want.skips for want in piece.all_wanted)
        # Otherwise the carry is donated: a step then needs memory for one state, not for two.
        self._donated: tuple[int, ...] = () if stops else (0,)
        self._intake = ElementIntake(
            self.segment, self.placement, self.elements, counted=self.counted
        )
        self._compiled: Any = None
        self.compile_s = 0.0
        self.reason: tuple[str, str] = ("a program", "the first of its form")
        """Its purpose and the cause of its compilation, for messages."""
        self.waited_for = True
        """Whether training waits for its compilation."""
        self.compilation: Compilation | None = None
        self.taken: dict[Feed, Staged] = {}
        """The elements of the last dispatch, while `keep_elements` is set."""
        self.keep_elements = False
        self.separate = False
        """Whether a profiler can tell its kernels apart; see `separate_kernels`."""

    # -- compiling ------------------------------------------------------------------------------

    @property
    def compiled(self) -> Any:
        """The XLA executable; None before `compile`."""
        return self._compiled

    @property
    def peak_bytes(self) -> int:
        """What a compiled program holds at once on a device, as XLA counts it."""
        memory = self._compiled.memory_analysis()
        return int(
            # Donated arguments are counted among the outputs as well: `alias_size` is what both share.
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )

    @property
    def carries(self) -> Sequence[Var | Buffer]:
        """The loop's carry, in the order of the compiled program's arguments."""
        return self._program.carried

    def compile(self, state: LoopState, staged: dict[Feed, Any]) -> jax.stages.Compiled:
        """The XLA executable; compiled on the first call."""
        if self._compiled is None:
            with (
                compiling(*self.reason, self.waited_for) as done,
                span("compilation", steps=self.length),
            ):
                # The numbers do not matter: they are arguments, and only their shapes are used.
                arguments = self._arguments(state, staged, Numbers(0, 0))
                with self.placement.within():
                    lowered = self._program.jitted(self._donated).lower(*arguments)
                platform = devices.platform()
                options = compiler_options(self.segment.equations, platform)
                # A pipeline has a loop for each job, and small ones would be common. A plain loop must
                # have the bits of the `lax.scan` that a user writes, which XLA compiles as it likes.
                if self._program.plan is not None:
                    options = {**(options or {}), **kernels_of_any_size(platform)}
                if self.separate:
                    options = {**(options or {}), **separate_kernels(platform)}
                build = self._program.piece.build
                chosen = build.chosen(self.segment.suited_options)
                options = {**(options or {}), **as_texts({**chosen, **dict(build.options)})} or None
                # Only compilation is cached, not lowering: the key of the cache is the lowered
                # text.
                found = compiled_program(lowered, self.placement.device_ids, options, platform)
                self._compiled, shared = found
                self.compilation = done(shared)
            self.compile_s = self.compilation.seconds
        return self._compiled

    def _arguments(
        self, state: LoopState, staged: dict[Feed, Any], numbers: Numbers
    ) -> tuple[Any, ...]:
        return (
            [state.values[key] for key in self._program.carried],
            [state.values[var] for var in self.segment.reads],
            [tuple(staged[queue]) for queue, count in self.elements.items() if count],
            state.numbers(numbers),
            self._numbers,
        )

    # -- running --------------------------------------------------------------------------------

    def run(
        self,
        state: LoopState,
        numbers: Numbers,
        following: int | None = None,
        given: Staged | None = None,
    ) -> tuple[dict[Hashable, Emission], Any]:
        """Dispatch once: read from `state` and the feeds, write the results to `state`.

        Args:
            state: values of variables, on the devices; results are added.
            numbers: the seed and the counters.
            following: the number of iterations of the next dispatch (0 for none), to prefetch its
                elements; None if unknown.
            given: the elements, if the caller has them; otherwise they are taken from the feeds.

        Returns:
            The emissions, still on the devices, and an array that is ready when the dispatch has
            finished.
        """
        passes = numbers.count if self.counted else self.length
        execution = Execution()
        # Elements first: compilation needs their shapes, and processes agree on them before any of
        # them dispatches.
        taken = self._intake.take(passes, following, given)
        try:
            blocks = {queue: staged.device for queue, staged in taken.items()}
            compiled = self.compile(state, blocks)
            arguments = self._arguments(state, blocks, numbers)
            execution.dispatch(compiled)
            # The ticket is ready when the execution has finished, and is never donated.
            with span("dispatch", steps=passes):
                results, emitted, ticket = compiled(*arguments)
            first_step = numbers.first_step + numbers.offset
            execution.dispatched(ticket, first_step, passes or 0, compiled, self._program.plan)
        except BaseException:
            put_back(taken)
            raise
        for queue in taken:
            queue.started(ticket)
        self.taken = taken if self.keep_elements else {}
        # The old arrays were donated: from here on only the results may be used.
        state.values.update(zip(self._program.writes, results, strict=True))
        if self.segment.is_loop:
            state.foreseen = (numbers.after(passes or 0), ticket)
        if not self.placement.in_one_process:
            emitted = jax.tree.map(self.placement.readable, emitted)
        emissions = self._program.emissions(emitted)
        if self.counted:
            emissions = self._cut(emissions, numbers)
        self._intake.return_unread(emissions, taken)
        return emissions, ticket

    @property
    def repeats(self) -> bool:
        """Whether `run_next` may follow a dispatch: one iteration, nothing cut or kept."""
        plain = self.placement.in_one_process and self.length == 1
        return plain and not (self.counted or self.keep_elements or self.separate)

    def run_next(
        self, state: LoopState, elements: tuple[Any, ...]
    ) -> tuple[dict[Hashable, Emission], Any]:
        """Dispatch one more iteration, directly after one that was given its elements.

        It changes `state` as `run` does, but reuses what that dispatch looked up. `run` takes several
        times as much host time, which matters if an iteration takes tens of microseconds. Open traces
        do not record it.
        """
        assert state.foreseen is not None
        values, (numbers, array) = state.values, state.foreseen
        results, emitted, ticket = self._compiled(
            [values[key] for key in self._program.carried],
            [values[var] for var in self.segment.reads],
            [elements],
            array,
            self._numbers,
        )
        values.update(zip(self._program.writes, results, strict=True))
        state.foreseen = (numbers.after(1), ticket)
        return self._program.emissions(emitted), ticket

    def _cut(
        self, emissions: dict[Hashable, Emission], numbers: Numbers
    ) -> dict[Hashable, Emission]:
        """The emissions, without the rows that were not computed."""
        first, axis = numbers.first_step + numbers.offset, int(self.placement.replicas > 1)
        full = numbers.count == self.length
        found = {}
        for key, emission in emissions.items():
            period = self._program.rows.get(key)
            if period is not None and not (full and period == 1):
                made = len(looks_between(first, numbers.count, period))
                if not made and period > 1:
                    continue  # no observed step in this dispatch
                # Lazily: cutting on the device now would be another dispatch.
                emission = jax.tree.map(lambda x, n=made: FirstRows(x, n, axis), emission)
            found[key] = emission
        return found
