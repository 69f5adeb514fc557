"""Runs one loop for any number of iterations: the engine of `fit`, `evaluate` and `predict`.

A runner owns its loop's carry and overwrites it from dispatch to dispatch. Its infeed can be given one
dataset after another, as long as their elements have the same spec.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextvars
import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.devices.placed import CLOSED_OVER, check_placed
from tailrace.feeds import dispatch_table
from tailrace.feeds.feed import Feed, Staged
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.feeds.transfer import sharding_for
from tailrace.jaxprs.walk import Position
from tailrace.program.compiling.build import Build
from tailrace.program.memory.optimizer_state import StateKeeping
from tailrace.program.running.device_program import Closing, Piece, SegmentProgram
from tailrace.program.running.executable import Executable
from tailrace.program.running.fixed_loops import FixedLoops, Kind, check_room
from tailrace.program.running.loop_layout import LoopLayout
from tailrace.program.running.loop_state import LoopState, Numbers, Origin
from tailrace.program.running.placement import Placement
from tailrace.program.running.replica_layout import ReplicaLayout, flags_from
from tailrace.program.running.segments import Segment, TracedLoop
from tailrace.program.running.sharded_layout import ShardedLayout
from tailrace.taps.catalogue import Entry
from tailrace.taps.frame import Emission
from tailrace.taps.wanted import Wanted


class LoopRunner:
    """A program that is one loop, run in dispatches of any length.

    Args:
        function: `function(carried, read)` returns the next `carried`, through one `tr.repeat` (of any
            length: each dispatch has a length).
        carried: a tree of arrays, or shapes, that the loop carries.
        read: a tree of arrays, or shapes, that it only reads.
        placement: where it runs.
        each: for each leaf of `carried`, whether it differs per replica; such a leaf has a leading
            replica dim in the result of `carried`.
        keeping: how the leaves of `carried` from index `kept_from` on are held, if not in the default
            way.
        kept_from: the index of the first leaf that `keeping` is about.
        layout: makes the layout from the traced loop, if it is not one device per replica.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        carried: Tree,
        read: Tree,
        placement: Placement,
        each: Sequence[bool] | None = None,
        keeping: StateKeeping | None = None,
        kept_from: int = 0,
        *,
        layout: Callable[[TracedLoop], LoopLayout] | None = None,
    ) -> None:
        # A shard differs between replicas like a value of each: both are exempt from the check for
        # drift.
        shared = flags_from(each, keeping.shared if keeping else (), kept_from)
        with placement.within():
            program = TracedLoop.trace(function, carried, read, placement.replicas, shared or each)
        if layout is not None:
            self.layout: LoopLayout = layout(program)
        elif placement.sharding is not None:
            self.layout = ShardedLayout(program, placement, carried)
        else:
            self.layout = ReplicaLayout(program, placement, each, keeping, kept_from)
        self.placement = self.layout.placement
        self.traced = program.traced
        self.wanted: dict[Position, list[Wanted]] = {}
        self.muted: frozenset[OutfeedQueue] = frozenset()
        """Outfeeds that receive nothing while they are in this set."""
        self.packed = False
        """Whether to pack small emissions into few arrays; set before the first dispatch."""
        self.capacity: int | None = None
        """The most iterations per dispatch. One executable then serves all lengths up to it; without
        it, each length has an executable."""
        self.closing: Closing | None = None
        """What each dispatch also computes from the state it leaves; set before the first one."""
        self.build = Build()
        """How it is rewritten and compiled; set before the first dispatch."""
        self.purpose = "a program"
        """Its purpose, for messages."""
        self.executions = 0
        self.iterations = 0
        self.compile_s = 0.0
        self.keep_elements = False
        self.separate = False
        """Whether a profiler can tell the kernels of a dispatch apart; the program is another one."""
        self.origin: Origin | None = None
        """The origin of the latest dispatch, while `keep_elements` is set."""
        self._program, self._loop = program, program.loop
        here, mesh = self.placement.devices, self.placement.sharding
        check_placed(CLOSED_OVER, self.traced.consts, here, mesh)
        self._consts = self.placement.put(self.traced.consts)
        self._executables: dict[Hashable, Executable] = {}
        self.fixed = FixedLoops()
        self._latest: Executable | None = None

    @property
    def taken(self) -> Mapping[Feed, Staged]:
        """The elements of the latest dispatch, while `keep_elements` is set."""
        return {} if self.origin is None else self.origin.elements

    @property
    def infeeds(self) -> tuple[Any, ...]:
        """The queues that the loop reads."""
        return self.traced.infeeds

    @property
    def elements_per_pass(self) -> int:
        """The number of elements per iteration, over all replicas of this process."""
        return sum(self._loop.elements.values()) * self.placement.local_replicas

    @property
    def executables(self) -> Mapping[Hashable, Executable]:
        """The executables of the loop so far, by purpose."""
        return self._executables

    @property
    def compiled_lengths(self) -> list[int | None]:
        """The lengths that the loop was compiled for; a counted one serves all up to it."""
        compiled = [one for one in self._executables.values() if one.compiled is not None]
        return [one.length for one in compiled if one.segment is self._loop]

    def stage_of(self, entry: Entry) -> int:
        """The stage of a pipeline that a tensor belongs to; -1 without a pipeline."""
        return self.layout.stage_of(entry)

    def by_element(self, value: Tree) -> Tree:
        """Emissions of one loop, rearranged to [replica,] element."""
        return self.layout.by_element(value)

    @property
    def bytes_per_pass(self) -> int:
        """The bytes of the elements of one iteration."""
        counts = self._loop.elements.items()
        return sum(q.spec().nbytes * n for q, n in counts) * self.placement.local_replicas

    @property
    def built(self) -> dict[str, Any]:
        """How its loop is built, with the options that were chosen for it; ready for JSON."""
        return self.build.recorded(self.build.chosen(self._loop.suited_options))

    @property
    def rewritten(self) -> dict[str, int]:
        """How often its loop is rewritten, by the name of the rewrite; those that are applied."""
        counts = {"boundaries": sum(map(len, self._loop.boundaries.values()))}
        return {name: count for name, count in counts.items() if name in self.build.rewrites}

    # -- the state ------------------------------------------------------------------------------

    def begin(self, carried: Tree, read: Tree) -> LoopState:
        """The state for dispatches, from `carried` (which is copied) and `read`."""
        jaxpr = self.traced.jaxpr
        state = LoopState(dict(zip(jaxpr.constvars, self._consts, strict=True)))
        inputs = jaxpr.invars[: self._program.num_carried]
        state.values.update(zip(inputs, jax.tree.leaves(carried), strict=True))
        self.read(state, read)
        # Whatever the function computes before its loop runs once, here, not in every dispatch.
        for segment in self._program.before:
            self._executable(segment, None).run(state, Numbers(0, 0))
        self.layout.take(state)
        return state

    def read(self, state: LoopState, read: Tree) -> None:
        """Replace the values that the loop only reads."""
        leaves = self.placement.put(jax.tree.leaves(read))
        inputs = self.traced.jaxpr.invars[self._program.num_carried :]
        state.values.update(zip(inputs, leaves, strict=True))

    def carried(self, state: LoopState) -> Tree:
        """The loop's current carry, as a tree like the one it was given."""
        return self.layout.carried(state)

    def replace(self, state: LoopState, leaves: Mapping[int, Any]) -> None:
        """Replace leaves of the carry, by their index in the tree; values are copied."""
        self.layout.replace(state, leaves)

    # -- dispatches -----------------------------------------------------------------------------

    def dispatch(
        self,
        state: LoopState,
        length: int,
        numbers: Numbers,
        following: int | None = None,
        period: int = 1,
        block: Staged | None = None,
    ) -> tuple[dict[Hashable, Emission], Any]:
        """Run `length` iterations; returns their emissions and an array that is ready afterwards.

        Args:
            state: the loop's state.
            length: the number of iterations.
            numbers: the seed and the counters.
            following: the number of iterations of the next dispatch, to prefetch its elements.
            period: periodic taps observe every `period` iterations.
            block: the elements, if the caller has them; with room for `capacity` iterations, if that is
                set.
        """
        executable = self._executable(self._loop, length, period)
        # The executable of fixed length is faster, but needs a block of exactly that length, and to
        # start and end with a period.
        kind = Kind(length, period, self.muted)
        exact = block is None or block.room == length * sum(self._loop.elements.values())
        whole = not (numbers.first_step % period or length % period)
        fixable = exact and whole and not self.separate
        if fixable:
            executable = self.fixed.get(kind, executable)
        # An executable of fixed length ignores the count; a constant 0 keeps foreseen numbers valid.
        count = length if executable.counted else 0
        numbers = Numbers(numbers.seed, numbers.first_step, numbers.offset, count)
        executable.keep_elements = self.keep_elements
        # A shallow copy keeps the arrays alive, so they must not be donated; see `Executable`.
        before = dict(state.values) if self.keep_elements else None
        fresh = executable.compile_s == 0
        emitted, ticket = executable.run(state, numbers, following, block)
        if fixable:
            self.fixed.ran(kind)
        self._latest = executable
        self.executions += 1
        self.iterations += length
        self.origin = None
        if before is not None:
            self.origin = Origin(before, executable.taken, numbers, period)
        self.compile_s += executable.compile_s if fresh else 0
        return emitted, ticket

    @property
    def repeats(self) -> bool:
        """Whether `dispatch_next` may follow the latest dispatch."""
        return self._latest is not None and self._latest.repeats

    def dispatch_next(
        self, state: LoopState, elements: tuple[Any, ...]
    ) -> tuple[dict[Hashable, Emission], Any]:
        """Run one more iteration, as the latest dispatch did, on the next elements."""
        assert self._latest is not None
        self.executions += 1
        self.iterations += 1
        return self._latest.run_next(state, elements)

    def rewind(
        self, state: LoopState, origin: Origin, length: int
    ) -> tuple[dict[Hashable, Emission], Any] | None:
        """Return to the start of a dispatch, and run its first `length` iterations again.

        Returns what `dispatch` does, of these iterations alone; None without any.
        """
        # The arrays of the origin are intact: an executable with a guard does not donate.
        state.values, state.foreseen = dict(origin.values), None
        if not length:
            return None
        ((feed, block),) = origin.elements.items()
        each = self._loop.elements[feed]
        # With the room that the executable has: one of fixed length has none to spare.
        block = block.cut(length * each)
        if self._counted(length):
            block = block.padded((self.capacity or length) * each)
        return self.dispatch(state, length, origin.numbers, 0, origin.period, block)

    def fix(
        self, state: LoopState, period: int, seconds: float, remaining: int | None = None
    ) -> None:
        """Compile the loop for the most common length in a thread, if that pays.

        From then on, dispatches of that length use it. The results are the same, bit for bit on devices
        where a second run of one program has the same bits.

        Args:
            state: the loop's state.
            period: the period of taps.
            seconds: the duration of an iteration.
            remaining: the number of iterations to come in this fit or epoch; None if it is unknown.
        """
        if not self._may_fix or seconds >= dispatch_table.FIXED_BELOW_S:
            return
        # Of a training in many short fits, as much is expected as there was.
        expected_s = seconds * max(self.iterations, remaining or 0)
        kind = self.fixed.worth(expected_s, self.compile_s, remaining == 0)
        now = (period, self.muted)
        if kind is None or (kind.period, kind.muted) != now or not self._counted(kind.length):
            return
        # Shapes instead of arrays: dispatches donate the arrays while the thread compiles.
        forms = LoopState({var: _form_of(value) for var, value in state.values.items()})
        other = self._executable(self._loop, kind.length, period)
        executable = self._new_executable(self._loop, kind.length, False, period)
        executable.reason = (
            self.purpose,
            f"a loop of exactly {kind.length} steps, which is faster",
        )
        executable.waited_for = False
        blocks = self._block_forms(executable)
        # Listeners of compilations and open spans belong to the caller's context; JAX's own settings of
        # a thread do not come along.
        context, wide = contextvars.copy_context(), _is_wide()

        def compile_it() -> None:
            with jax.enable_x64(wide):
                context.run(executable.compile, forms, blocks)
            check_room(executable, other, self.placement.devices)

        self.fixed.compile(kind, executable, compile_it)

    @property
    def _may_fix(self) -> bool:
        """Whether loops of fixed length are faster, and can be used.

        Several processes would have to agree on when the thread is done; one that still waits would run
        another program than the others.
        """
        return devices.platform() != "cpu" and self.placement.in_one_process

    def aligned(self, step: int, length: int, period: int) -> int:
        """The length of the next dispatch, so that the one after it can use a loop of fixed length.

        That loop starts at the beginning of a period. Whether it is ready does not matter: what is kept
        of each execution must not depend on the time that a compilation takes.
        """
        past = step % period
        whole = past == 0 or length % period != 0 or not self._may_fix
        return length if whole else min(length, period - past)

    def rebuild(self, build: Build) -> None:
        """Rewrite and compile the loop in this way from now on."""
        if build != self.build:
            self.build, self._executables, self.fixed = build, {}, FixedLoops()
            self._latest = None

    def observing(self, wanted: dict[Position, list[Wanted]]) -> LoopRunner:
        """The same loop on the same state, with other emissions."""
        # The trace, the segments and the placement are shared; only executables depend on `wanted`.
        other = copy.copy(self)
        other.wanted, other._executables, other.fixed = wanted, {}, FixedLoops()
        other._latest = None
        return other

    def compiled(self, state: LoopState, length: int, period: int = 1) -> Executable:
        """The executable for dispatches of `length` iterations, compiled but not run."""
        executable = self._executable(self._loop, length, period)
        executable.compile(state, self._block_forms(executable))
        return executable

    @property
    def compiled_carries(self) -> Sequence[Any]:
        """For each `carried[i]` of the compiled loop, its variable or buffer of a pipeline."""
        return next(e.carries for e in self._executables.values() if e.segment is self._loop)

    def _block_forms(self, executable: Executable) -> dict[Any, Any]:
        """The shapes of the elements that a dispatch of an executable reads."""
        blocks: dict[Any, Any] = {}
        replicas = self.placement.replicas
        for queue, count in executable.elements.items():
            lead = (count,) if self.placement.mesh is None else (count, replicas)
            blocks[queue] = tuple(
                jax.ShapeDtypeStruct(
                    (*lead, *leaf.shape),
                    leaf.dtype,
                    sharding=sharding_for(self.placement.shared_out, (*lead, *leaf.shape)),
                )
                for leaf in queue.spec().leaves
            )
        return blocks

    def _executable(self, segment: Segment, length: int | None, period: int = 1) -> Executable:
        # All lengths up to the capacity map to one key, and so to one compilation.
        counted = self._counted(length)
        length = self.capacity if counted else length
        key = (segment.first, length, counted, period, self.separate, self.muted)
        if key not in self._executables:
            executable = self._new_executable(segment, length, counted, period)
            executable.reason = (self.purpose, self._cause(segment, length, period))
            executable.separate = self.separate
            self._executables[key] = executable
        return self._executables[key]

    def _cause(self, segment: Segment, length: int | None, period: int) -> str:
        """The cause of a segment's compilation, for messages."""
        if not segment.is_loop:
            return "what comes before the loop"
        before = [one for one in self._executables.values() if one.segment is segment]
        if not before:
            shown = ", ".join(queue.spec().text for queue in self.infeeds)
            return f"the first program for elements of {shown}"
        if length not in [one.length for one in before]:
            return f"executions of up to {length} steps"
        if period > 1:
            return f"taps look every {period} steps"
        return "it returns other values than before"

    def _counted(self, length: int | None) -> bool:
        """Whether a dispatch uses the executable whose length is data."""
        return length is not None and self.capacity is not None and length <= self.capacity

    def _new_executable(
        self, segment: Segment, length: int | None, counted: bool, period: int
    ) -> Executable:
        piece = Piece(
            segment,
            self.placement,
            length,
            counted,
            self.wanted,
            period,
            self.muted,
            self.packed,
            build=self.build,
        )
        if segment is self._loop:
            piece = dataclasses.replace(piece, closing=self.closing)
            return Executable(self.layout.device_program(piece))
        return Executable(SegmentProgram(piece))


def _is_wide() -> bool:
    """Whether JAX computes in 64 bits here; the setting may be of this thread alone."""
    return jax.dtypes.canonicalize_dtype("float64") == "float64"


def _form_of(value: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape of an array to compile for; dispatches may overwrite the array meanwhile."""
    weak = bool(getattr(value.aval, "weak_type", False))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding, weak_type=weak)
