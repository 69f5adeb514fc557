"""A segment compiled for the devices, and its dispatch."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tailrace.data.trees import Tree
from tailrace.devices import devices
from tailrace.feeds.feed import Feed, Staged
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.free_numbers import FreeNumbers
from tailrace.jaxprs.internals import JaxprEqn, compiler_options, separate_kernels
from tailrace.jaxprs.walk import Position
from tailrace.program.running.compilations import Compilation, compiling
from tailrace.program.running.compiled_programs import compiled_program
from tailrace.program.running.element_intake import ElementIntake, put_back
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.running.result_packing import FirstRows, Packing
from tailrace.program.running.segments import Segment
from tailrace.program.running.sent_marks import SentMarks
from tailrace.spans.span import Execution, span
from tailrace.taps.counted_loop import looks_between
from tailrace.taps.frame import Ambient, Block, Emission, Frame, Trip
from tailrace.taps.rewrite import Rewriter
from tailrace.taps.wanted import Wanted, condense

STEPS = ("steps",)
"""The key of the number of steps that ran, which programs emit if it is known only at run time."""


class Executable:
    """One compiled segment; for a loop, a piece of `length` iterations.

    Args:
        segment: the part of a program.
        placement: where it runs.
        length: the number of iterations, if the segment is a loop.
        counted: whether each dispatch chooses how many of those iterations it runs.
        wanted: additional values to emit, by position.
        period: periodic values are emitted every `period` iterations; 0 for never.
        each: carried values that differ per replica: outside the program, dim 0 is the replica dim.
        spread: carried values that are sharded over replicas: outside, shards are concatenated along
            dim 0.
        muted: outfeeds that receive nothing.
        packed: whether to pack small emissions into few arrays, which only `np.asarray` can read.
    """

    def __init__(
        self,
        segment: Segment,
        placement: Placement,
        *,
        length: int | None = None,
        counted: bool = False,
        wanted: dict[Position, list[Wanted]] | None = None,
        period: int = 1,
        each: frozenset[Any] = frozenset(),
        spread: frozenset[Any] = frozenset(),
        muted: frozenset[Any] = frozenset(),
        packed: bool = False,
    ) -> None:
        self.segment, self.placement, self.length = segment, placement, length
        self.counted = counted
        self.elements = {
            queue: count * (1 if length is None else length)
            for queue, count in segment.elements.items()
        }
        # Free numbers only in one process: several would have to agree on their values too.
        self._rewriter = Rewriter(
            wanted or {},
            on_mark=SentMarks(segment.is_loop, placement.replicas, placement.mesh is None, muted),
            replica_axis=devices.REPLICA if placement.replicas > 1 else None,
            replicas=placement.replicas,
            period=max(period, 1),
            free=segment.free_numbers if placement.in_one_process else FreeNumbers(),
        )
        self._numbers = placement.put([jnp.asarray(n) for n in self._rewriter.free.values])
        self._observing = period > 0
        # A guard detects a bad step after later ones have run; the state before it is then recomputed,
        # from a state that must not have been donated.
        wants = [want for found in (wanted or {}).values() for want in found]
        stops = any(want.guard and not want.skips for want in wants)
        self._donated: tuple[int, ...] = () if stops else (0,)
        self._each, self._spread = each, spread
        self._keys: list[Hashable] = []
        self._rows: dict[Hashable, int] = {}
        # Only on one device: over a mesh, packed arrays would need a common sharding.
        self._packing = Packing() if packed and placement.mesh is None else None
        self._intake = ElementIntake(segment, placement, self.elements, counted=counted)
        self._compiled: Any = None
        # A loop donates its carry from piece to piece, and nothing else.
        self._carried: list[Any] = [var for var, _ in segment.start] if segment.is_loop else []
        self._writes: list[Any] = list(segment.writes)
        self.compile_s = 0.0
        self.reason: tuple[str, str] = ("a program", "the first of its form")
        """Its purpose and the cause of its compilation, for messages."""
        self.compilation: Compilation | None = None
        self.taken: dict[Feed, Staged] = {}
        """The elements of the last dispatch, while `keep_elements` is set."""
        self.keep_elements = False
        self.separate = False
        """Whether a profiler can tell its kernels apart; see `separate_kernels`."""
        self.plan: Any = None
        """The plan of the pipeline it runs, if it does."""

    # -- compiling ------------------------------------------------------------------------------

    @property
    def compiled(self) -> Any:
        """The XLA executable; None before `compile`."""
        return self._compiled

    @property
    def carries(self) -> list[Any]:
        """The loop's carry, in the order of the compiled program's arguments."""
        return self._carried

    def compile(self, state: LoopState, staged: dict[Feed, Any]) -> Any:
        """The XLA executable; compiled on the first call."""
        if self._compiled is None:
            with compiling(*self.reason) as done, span("compilation", steps=self.length):
                # The numbers do not matter: they are arguments, and only their shapes are used.
                lowered = self._jitted().lower(*self._arguments(state, staged, Numbers(0, 0)))
                platform = devices.platform()
                options = compiler_options(self.segment.equations, platform)
                if self.separate:
                    options = {**(options or {}), **separate_kernels(platform)}
                # Lowering is not cached, only compiling: the text that programs are found by is its
                # result.
                found = compiled_program(lowered, self.placement.device_ids, options, platform)
                self._compiled, shared = found
                self.compilation = done(shared)
            self.compile_s = self.compilation.seconds
        return self._compiled

    def _arguments(
        self, state: LoopState, staged: dict[Feed, Any], numbers: Numbers
    ) -> tuple[Any, ...]:
        return (
            [state.values[var] for var in self._carried],
            [state.values[var] for var in self.segment.reads],
            [tuple(staged[queue]) for queue, count in self.elements.items() if count],
            state.numbers(numbers),
            self._numbers,
        )

    def _jitted(self) -> Any:
        function = self._function
        if self.placement.replicas > 1:
            each, same = PartitionSpec(devices.REPLICA), PartitionSpec()
            elements = PartitionSpec(None, devices.REPLICA)  # dim 0 is that of the iterations
            sent = each if self.placement.in_one_process else same

            def spec(var: Any) -> PartitionSpec:
                return each if var in self._each or var in self._spread else same

            function = jax.shard_map(
                function,
                mesh=self.placement.mesh,
                in_specs=([spec(var) for var in self._carried], same, elements, same, same),
                out_specs=([spec(var) for var in self.segment.writes], sent, same),
                check_vma=False,  # `check_in_step` has proved which values are equal, by our own rules
            )
        # The carry is donated: a step then needs memory for one state, not for two.
        return jax.jit(function, donate_argnums=self._donated)

    def _function(self, carried: Tree, read: Tree, elements: Tree, numbers: Any, free: Any) -> Any:
        self._rewriter.arguments = free
        seed, first_step, offset, count = Numbers.read(numbers)
        several = self.placement.replicas > 1
        replica = jax.lax.axis_index(devices.REPLICA) if several else jnp.int32(0)
        # A queue that the loop reads zero times still needs a block: its dequeues are traced.
        blocks = {queue: Block(_no_elements(queue)) for queue in self.elements}
        read_from = (queue for queue, count in self.elements.items() if count)
        for queue, leaves in zip(read_from, elements, strict=True):
            blocks[queue] = Block(tuple(leaf.squeeze(1) for leaf in leaves) if several else leaves)
        # The key from the seed alone: step, microbatch, replica and call are folded in where it is
        # used, so that it does not depend on how a training is cut into executions.
        ambient = Ambient(jax.random.key(seed), first_step, replica)
        trip = Trip(count, first_step + offset) if self.counted else None
        frame = Frame(ambient, blocks, observing=self._observing, trip=trip)
        if several:
            pairs = zip(self._carried, carried, strict=True)
            carried = [value[0] if var in self._each else value for var, value in pairs]
        known: dict[Any, Any] = dict(
            zip([*self._carried, *self.segment.reads], [*carried, *read], strict=True)
        )
        equations = list(self.segment.equations)
        if self.segment.is_loop:
            # The loop over a piece instead of the whole, with its counter starting at the offset, so
            # that keys and periodic taps do not depend on how the loop is cut.
            equations[0] = self._piece(equations[0])
            known[equations[0].invars[-1]] = offset + jnp.arange(self.length, dtype=jnp.int32)
        self._rewriter.run_equations(equations, known, frame, first=self.segment.first)
        for queue, block in blocks.items():
            if not isinstance(block.position, int):  # known only at run time
                frame.emit(("read", queue), block.position)
        # After a while loop the host cannot know how many steps ran; a counted loop got the number
        # from the host.
        if not isinstance(frame.steps_before, int) and not self.counted:
            frame.emit(STEPS, frame.steps_before)
        condense(frame, at_end=True)
        # Keys are Python objects, so they stay here; the program returns their values in this order.
        self._keys, self._rows = list(frame.emitted), frame.rows
        emitted = [frame.emitted[key] for key in self._keys]
        if several and self.placement.in_one_process:
            emitted = jax.tree.map(lambda leaf: leaf[None], emitted)
        elif several:  # each process gets all results: it is one program
            emitted = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, devices.REPLICA), emitted)
        elif self._packing is not None:
            emitted = self._packing.pack(emitted)
        writes = self.segment.writes
        results = [known[v][None] if several and v in self._each else known[v] for v in writes]
        return results, emitted, self._what_follows(numbers)

    def _what_follows(self, numbers: Any) -> Any:
        """The numbers of a dispatch that continues from here."""
        return Numbers.advanced(numbers, numbers[3] if self.counted else self.length or 0)

    def _piece(self, loop: JaxprEqn) -> JaxprEqn:
        """The loop, cut to the length of this piece, starting where the last piece ended."""
        assert self.length is not None
        return as_scan(loop).piece(self.length, self._carried)

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
            execution.dispatched(ticket, first_step, passes or 0, compiled, self.plan)
        except BaseException:
            put_back(taken)
            raise
        for queue in taken:
            queue.started(ticket)
        self.taken = taken if self.keep_elements else {}
        # The old arrays were donated: from here on only the results may be used.
        state.values.update(zip(self._writes, results, strict=True))
        if self.segment.is_loop:
            state.foreseen = (numbers.after(passes or 0), ticket)
        if not self.placement.in_one_process:
            emitted = jax.tree.map(self.placement.readable, emitted)
        if self._packing is not None:
            emitted = self._packing.unpack(emitted)
        emissions = dict(zip(self._keys, emitted, strict=True))
        if self.counted:
            emissions = self._cut(emissions, numbers)
        self._intake.return_unread(emissions, taken)
        return emissions, ticket

    @property
    def repeats(self) -> bool:
        """Whether `run_next` may follow a dispatch: one iteration, nothing cut, packed or kept."""
        plain = self.placement.in_one_process and self._packing is None and self.length == 1
        return plain and not (self.counted or self.keep_elements or self.separate)

    def run_next(
        self, state: LoopState, elements: tuple[Any, ...]
    ) -> tuple[dict[Hashable, Emission], Any]:
        """Dispatch one more iteration, directly after one that was given its elements.

        It does to `state` what `run` does, without looking up what that dispatch has settled: `run`
        costs the host several times as much, which counts if an iteration takes tens of microseconds.
        Open traces do not see it.
        """
        assert state.foreseen is not None
        values, (numbers, array) = state.values, state.foreseen
        results, emitted, ticket = self._compiled(
            [values[var] for var in self._carried],
            [values[var] for var in self.segment.reads],
            [elements],
            array,
            self._numbers,
        )
        values.update(zip(self._writes, results, strict=True))
        state.foreseen = (numbers.after(1), ticket)
        return dict(zip(self._keys, emitted, strict=True)), ticket

    def _cut(
        self, emissions: dict[Hashable, Emission], numbers: Numbers
    ) -> dict[Hashable, Emission]:
        """The emissions, without the rows that were not computed."""
        first, axis = numbers.first_step + numbers.offset, int(self.placement.replicas > 1)
        found = {}
        for key, emission in emissions.items():
            period = self._rows.get(key)
            if period is not None:
                made = len(looks_between(first, numbers.count, period))
                if not made and period > 1:
                    continue  # no observed step in this dispatch
                # Lazily: cutting on the device now would be another dispatch.
                emission = jax.tree.map(lambda x, n=made: FirstRows(x, n, axis), emission)
            found[key] = emission
        return found


def _no_elements(queue: Feed) -> tuple[Any, ...]:
    return tuple(jnp.zeros((0, *leaf.shape), leaf.dtype) for leaf in queue.spec().leaves)
