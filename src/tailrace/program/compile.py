"""`tr.compile`: turns a function into a device program, with its feeds attached."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.checks import check_seed
from tailrace.base.trees import Tree
from tailrace.devices.devices import resolve_replicas
from tailrace.devices.placed import CLOSED_OVER, check_placed
from tailrace.errors import ProgramError
from tailrace.feeds import dispatch_table
from tailrace.jaxprs.array_trees import types_of
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.internals import value_of
from tailrace.jaxprs.walk import LOOP, walk
from tailrace.program.compiling.build import DEFAULT, Build, Option
from tailrace.program.running.agreement import agreed_seconds
from tailrace.program.running.device_program import STEPS, Piece, SegmentProgram
from tailrace.program.running.dispatch_lengths import piece_within
from tailrace.program.running.executable import Executable
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.running.segments import Segment, cut
from tailrace.program.tracing.replica_drift import check_in_step
from tailrace.program.tracing.tap_selection import look
from tailrace.program.tracing.trace import Traced, top_loops, trace_program
from tailrace.records.records import Records, take_records
from tailrace.taps.catalogue import names_listed_by
from tailrace.taps.frame import Emission
from tailrace.taps.naming import Namer
from tailrace.taps.tap import MOST_BYTES, AnyTap, Observe, check_bytes, parse_taps, refuse_guards


def compile(
    function: Callable[..., Any],
    *,
    replicas: int | None = 1,
    seed: int = 0,
    observe: Observe = (),
    observe_bytes: int = MOST_BYTES,
    rewrites: Mapping[str, bool] | None = None,
    compiler_options: Mapping[str, Option] | None = None,
) -> Program:
    """Compile `function` to a device program.

    The program is compiled on the first call, for the shapes of its arguments. A call is one dispatch,
    except that a top-level loop runs in several dispatches if its elements would take too much memory
    at once, or if it contains a live outfeed. The arguments of a call are never overwritten.

    Args:
        function: called with arrays (trees of them); may use `tr.repeat`, `tr.while_loop`, feeds,
            `tr.key()` and all of JAX. It returns a tree of arrays.
        replicas: the number of copies of the program that run in parallel, each on different elements.
            None: one per device.
        seed: the seed of the keys of `tr.key()`.
        observe: taps (`tr.Tap`), or selections to compute statistics of; `program.records` has the
            records of the latest call. An iteration of an outermost loop counts as a step.
        observe_bytes: the most bytes that the records of one loop may take (1 GiB if not given); more
            is refused before it runs.
        rewrites: rewrites to switch off, such as `{"boundaries": False}`.
        compiler_options: options of XLA's compiler for this program, by their names in `XLA_FLAGS`.

    Raises:
        OptionError: an argument has an invalid value.
        ProgramError: the function cannot be a program; when it is first called.

    Example:
        >>> import tailrace as tr
        >>> infeed, outfeed = tr.InfeedQueue([1.0, 2.0, 3.0, 4.0]), tr.OutfeedQueue()
        >>> def body(total, x):
        ...     outfeed.enqueue({"total": total + x})
        ...     return total + x
        >>> program = tr.compile(lambda total: tr.repeat(4, body, total, infeed=infeed))
        >>> print(program(0.0), outfeed.dequeue()["total"])
        10.0 [ 1.  3.  6. 10.]
    """
    taps = parse_taps(observe)
    refuse_guards(taps, "a hand-written program")
    return Program(
        function,
        replicas=resolve_replicas(replicas),
        seed=check_seed(seed),
        taps=taps,
        observe_bytes=observe_bytes,
        build=Build.of(rewrites, compiler_options),
    )


class Program:
    """A compiled function; made by `tr.compile`, called like the function.

    Attributes:
        executions: the number of dispatches so far.
        steps: the number of iterations of outermost loops so far; a call without loops is one step.

    Raises:
        ProgramError: a call passes something that is not an array.
        DataError: a dataset breaks a rule, raises, or ends too early; during a call.

    Example:
        >>> import tailrace as tr
        >>> program = tr.compile(lambda x: tr.repeat(3, lambda x: 2 * x, x))
        >>> print(program(1.0), program.executions, program.steps)
        8.0 1 3
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        replicas: int,
        seed: int,
        taps: Sequence[AnyTap] = (),
        observe_bytes: int = MOST_BYTES,
        build: Build = DEFAULT,
    ) -> None:
        if not callable(function):
            raise ProgramError(
                f"tr.compile takes a function of arrays. Received: {type(function).__name__}."
            )
        self._function, self._seed, self.taps = function, seed, list(taps)
        self._observe_bytes, self._build = observe_bytes, build
        self.records = Records()
        self.placement = Placement(replicas)
        self.executions = 0
        self.steps = 0
        self._versions: dict[Hashable, _Version] = {}

    def __call__(self, *args: Tree) -> Any:
        """Run the program; returns the function's result."""
        version = self._version(args)
        traced = version.traced
        # Made for each call: a program has no state of its own but its counter of steps.
        state = LoopState(dict(zip(traced.jaxpr.constvars, version.consts, strict=True)))
        check_placed("Arguments of a program", args, self.placement.devices)
        leaves = self.placement.put(jax.tree.leaves(args))
        state.values.update(zip(traced.jaxpr.invars, leaves, strict=True))
        self.records.clear()
        for queue, out in traced.outfeeds.items():
            queue.check_fits(out.structure, out.shapes)
        # After all are checked: a reader in another thread waits from `begin` on for an `end`.
        for queue in traced.outfeeds:
            queue.begin()
        try:
            for segment in version.segments:
                if segment.is_loop:
                    self._run_in_pieces(version, segment, state)
                else:
                    self._run_once(version, segment, state)
            # Without a loop, the whole call is a step, so that the next call gets other keys.
            self.steps += not version.has_loops
        finally:
            if any(queue.live for queue in traced.outfeeds):
                jax.effects_barrier()  # callbacks may still have elements to deliver
            for queue in traced.outfeeds:
                queue.end()
        return jax.tree.unflatten(
            traced.out_structure,
            [jnp.asarray(value_of(state.values, var)) for var in traced.jaxpr.outvars],
        )

    # -- running --------------------------------------------------------------------------------

    def _run_once(self, version: _Version, segment: Segment, state: LoopState) -> None:
        executable = version.executable(segment)
        emitted, _ = executable.run(state, Numbers(self._seed, self.steps))
        self.executions += 1
        passes = emitted.pop(STEPS, None)
        self._deliver(version, emitted, self.steps, 1, 1)
        self.steps += version.steps_of(segment) if passes is None else int(jnp.max(passes.value))

    def _run_in_pieces(self, version: _Version, segment: Segment, state: LoopState) -> None:
        # A copy: the first piece overwrites its operands, which the caller or a later segment may use.
        for result, start in segment.start:
            state.values[result] = self.placement.own(value_of(state.values, start))
        live = any(queue.live for queue in version.traced.outfeeds)
        done, length = 0, segment.length
        if not live and version.piece(segment) == length:  # separate for its taps, not for its size
            self._need_elements(segment)
        most = version.piece(segment)
        piece = version.live_pieces.get(segment.first, 1) if live else most
        measuring = live and segment.first not in version.live_pieces
        first, every = self.steps, version.sight.period
        # If all pieces have one length and end where taps look, the length can be static, which is
        # faster; otherwise one executable with a dynamic length serves all of them.
        alike = not (live or length % piece or first % every or piece % every)
        executable = version.executable(segment, piece if alike else most, every, not alike)
        while done < length:
            now = min(piece, length - done)
            following = None if live else min(piece, length - done - now)
            fresh = executable.compiled is None
            started = time.perf_counter()
            numbers = Numbers(self._seed, first, done, now)
            emitted, ticket = executable.run(state, numbers, following)
            self.executions += 1
            self._deliver(version, emitted, first + done, now, every)
            done += now
            # The first run of an executable is slow whatever it computes: measure the next one.
            if measuring and not fresh and now == piece:
                jax.block_until_ready(ticket)
                elapsed = agreed_seconds(max(time.perf_counter() - started, 1e-6))
                wanted = min(most, max(1, int(now * dispatch_table.LIVE_S / elapsed)))
                # Doubling at least: short pieces overestimate the time of an iteration by their own
                # cost, and settling on the first measurement would keep them short.
                if wanted > 2 * piece:
                    piece = wanted
                else:
                    measuring, version.live_pieces[segment.first] = False, piece
        self.steps += length

    def _need_elements(self, segment: Segment) -> None:
        """Check that all elements of a loop exist before its first piece consumes any."""
        for queue, count in segment.elements.items():
            queue.bind_replicas(self.placement.replicas)
            queue.need(count * segment.length * self.placement.local_replicas)

    def _deliver(
        self,
        version: _Version,
        emitted: dict[Hashable, Emission],
        first_step: int,
        steps: int,
        period: int,
    ) -> None:
        replicas = self.placement.replicas
        for record in take_records(
            emitted,
            version.sight.chosen,
            first_step=first_step,
            steps=steps,
            replicas=replicas,
            period=period,
        ):
            self.records.add(record)
        version.traced.deliver(emitted)

    # -- versions for different arguments -------------------------------------------------------

    def _version(self, args: tuple[Any, ...]) -> _Version:
        key = types_of("A program takes", args)
        if key not in self._versions:
            traced = trace_program(self._function, args, self.placement.replicas)
            if self.placement.replicas > 1:
                check_in_step(traced)
            version = _Version(traced, self.placement, self.taps, self._build)
            version.check_records(self._observe_bytes)
            self._versions[key] = version
        return self._versions[key]


class _Version:
    """A program for arguments of given shapes: its segments and their executables."""

    def __init__(
        self, traced: Traced, placement: Placement, taps: Sequence[AnyTap], build: Build
    ) -> None:
        self.traced, self._placement, self._build = traced, placement, build
        named = Namer(enter_custom=True).entries(traced.jaxpr) if taps else ()
        with names_listed_by("program.records.names, after a call with observe='*'"):
            self.sight = look(traced, taps, named)
        check_placed(CLOSED_OVER, traced.consts, placement.devices)
        self.consts = placement.put(traced.consts)
        loops = top_loops(traced)
        self.has_loops = any(
            surrounding.kind == LOOP
            for place in walk(traced.jaxpr.eqns)
            for surrounding in place.inside
        )
        whole = cut(traced.jaxpr, loops)
        alone = [s.first for s in whole if s.is_loop and self._wants_pieces(s)]
        self.segments = cut(traced.jaxpr, alone)
        self._executables: dict[Hashable, Executable] = {}
        self.live_pieces: dict[int, int] = {}

    def executable(
        self, segment: Segment, length: int | None = None, period: int = 1, counted: bool = False
    ) -> Executable:
        """The executable of a segment; a loop has one of fixed length and one of dynamic length."""
        key = (segment.first, length, period, counted)
        if key not in self._executables:
            wanted, build = self.sight.wanted, self._build
            piece = Piece(segment, self._placement, length, counted, wanted, period, build=build)
            self._executables[key] = Executable(SegmentProgram(piece))
        return self._executables[key]

    def check_records(self, most: int) -> None:
        """Refuse taps that would return more than `most` bytes per loop."""
        chosen = self.sight.chosen
        if chosen:
            count, replicas = max(one.microbatches for one in chosen), self._placement.replicas
            length = max((s.length for s in self.segments if s.is_loop), default=1)
            check_bytes([one for one in chosen if one.loops], length, count, replicas, most)
            check_bytes([one for one in chosen if not one.loops], 1, 1, replicas, most)

    def piece(self, segment: Segment) -> int:
        """The number of iterations per dispatch of a loop, limited by the memory of its elements."""
        bytes_per_pass = sum(
            queue.spec().nbytes * count for queue, count in segment.elements.items()
        )
        return piece_within(segment.length, bytes_per_pass * self._placement.local_replicas)

    def steps_of(self, segment: Segment) -> int:
        """The number of iterations of a segment's top-level loops."""
        last = segment.first + len(segment.equations)
        loops = [i for i in top_loops(self.traced) if segment.first <= i < last]
        return sum(as_scan(self.traced.jaxpr.eqns[i]).length for i in loops)

    def _wants_pieces(self, segment: Segment) -> bool:
        live = any(out.queue.live and out.at_top for out in self.traced.outfeeds.values())
        # Records carry the steps of one loop, so with taps each loop is dispatched alone.
        observed = bool(self.sight.chosen)
        return segment.length > 0 and (live or observed or self.piece(segment) < segment.length)
