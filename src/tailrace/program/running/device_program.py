"""The function that an executable compiles: a segment, rewritten for the devices that run it.

There are two kinds. `SegmentProgram` runs the equations of a segment on each replica; a pipeline's
(`pipeline.running.pipeline_executable`) divides them between the devices of a replica. An `Executable`
compiles and dispatches either: it knows the arguments and results, not what is between them.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.control import as_scan
from tailrace.jaxprs.free_numbers import FreeNumbers
from tailrace.jaxprs.internals import JaxprEqn, Var
from tailrace.jaxprs.walk import Position
from tailrace.program.compiling.build import DEFAULT, Build
from tailrace.program.running.loop_state import Buffer, LoopState, Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.running.result_packing import Packing
from tailrace.program.running.segments import Segment
from tailrace.program.running.sent_marks import SentMarks
from tailrace.taps.frame import Ambient, Block, Emission, Frame, Scalar, Trip
from tailrace.taps.rewrite import Rewriter
from tailrace.taps.wanted import Wanted, condense

STEPS = ("steps",)
"""The key of the number of steps that ran, which programs emit if it is known only at run time."""

CLOSING = ("closing",)
"""The key of what a program computes from its results; see `Piece.closing`."""

Closing = Callable[[LoopState, Sequence[Any]], Tree]
"""Takes the state that a program leaves, and its elements; in the program."""


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A segment as it is compiled; of a loop, `length` iterations.

    Attributes:
        segment: the part of a program.
        placement: where it runs.
        length: the number of iterations, if the segment is a loop.
        counted: whether each dispatch chooses how many of those iterations it runs.
        wanted: additional values to emit, by position.
        period: periodic values are emitted every `period` iterations.
        muted: outfeeds that receive nothing.
        packed: whether to pack small emissions into few arrays, which only `np.asarray` can read.
        closing: computed from the results at the end, and emitted; None for nothing.
        build: how it is rewritten and compiled.
    """

    segment: Segment
    placement: Placement
    length: int | None = None
    counted: bool = False
    wanted: dict[Position, list[Wanted]] = dataclasses.field(default_factory=dict)
    period: int = 1
    muted: frozenset[OutfeedQueue] = frozenset()
    packed: bool = False
    closing: Closing | None = None
    build: Build = DEFAULT

    @functools.cached_property
    def elements(self) -> dict[Feed, int]:
        """The number of elements that a dispatch reads from each feed."""
        times = 1 if self.length is None else self.length
        return {queue: count * times for queue, count in self.segment.elements.items()}

    @property
    def all_wanted(self) -> list[Wanted]:
        """The additional values, without their positions."""
        return [want for found in self.wanted.values() for want in found]


class DeviceProgram(ABC):
    """A function of `(carried, read, elements, numbers, free)` that runs a piece.

    It returns the next `carried`, the emissions, and the numbers of a dispatch that continues from
    there. `read` has the values of `piece.segment.reads`, `elements` the block of each feed that is
    read, `free` the numbers in which otherwise equal programs may differ.

    Args:
        piece: the piece to run.
        carried: the keys in `LoopState` of the values it overwrites, in the order of the argument.
        writes: the keys of its results.
        plan: the plan of its pipeline, if it has one.

    Attributes:
        rows: for emissions with a row per observed iteration, their period, by key; known once the
            function was traced.
    """

    def __init__(
        self,
        piece: Piece,
        carried: Sequence[Var | Buffer],
        writes: Sequence[Var | Buffer],
        plan: Any = None,
    ) -> None:
        self.piece, self.carried, self.writes, self.plan = piece, carried, writes, plan
        segment, placement = piece.segment, piece.placement
        one_device = placement.mesh is None and placement.sharding is None
        # Free numbers only in one process: several would have to agree on their values too.
        self._rewriter = Rewriter(
            piece.wanted,
            on_mark=SentMarks(segment.is_loop, placement.replicas, one_device, piece.muted),
            replica_axis=devices.REPLICA if placement.replicas > 1 else None,
            replicas=placement.replicas,
            period=piece.period,
            free=segment.free_numbers if placement.in_one_process else FreeNumbers(),
            bounds=segment.boundaries if "boundaries" in piece.build.rewrites else {},
            fast_convolutions="convolutions" in piece.build.rewrites,
        )
        # Only on one device: over a mesh, packed arrays would need a common sharding.
        self._packing = Packing() if piece.packed and one_device else None
        self._keys: list[Hashable] = []
        self.rows: dict[Hashable, int] = {}

    @property
    def free_numbers(self) -> list[Any]:
        """The values of the argument `free`, on the host."""
        return [jnp.asarray(number) for number in self._rewriter.free.values]

    def emissions(self, emitted: Tree) -> dict[Hashable, Emission]:
        """The emissions by key, from what a call of the function returned for them."""
        closing: dict[Hashable, Emission] = {}
        if self.piece.closing is not None:
            *emitted, closed = emitted
            closing[CLOSING] = Emission(closed)
        if self._packing is not None:
            emitted = self._packing.unpack(emitted)
        return dict(zip(self._keys, emitted, strict=True)) | closing

    @abstractmethod
    def jitted(self, donated: tuple[int, ...]) -> Any:
        """The function for `jax.jit`, over all devices; `donated` are the indices of arguments."""

    def _closed(
        self, function: Callable[..., Any], specs: Sequence[PartitionSpec | NamedSharding] = ()
    ) -> Callable[..., Any]:
        """The function over all devices, which also computes what `piece.closing` says.

        Args:
            function: without that.
            specs: how its results are divided between the devices of a mesh.
        """
        mesh: Any = self.piece.placement.mesh
        closing, keys = self.piece.closing, [*self.piece.segment.reads, *self.writes]
        if closing is None:
            return function

        # By these names a profile knows its arguments in the compiled program.
        def call(carried: Tree, read: Tree, elements: Tree, numbers: Tree, free: Tree) -> Any:
            results, emitted, ticket = function(carried, read, elements, numbers, free)
            # XLA must not compute a result a second time, or with more digits, for this: it is about
            # the bits that are in memory afterwards.
            results = list(lax.optimization_barrier(tuple(results)))
            if specs:
                # They stay where they are: XLA would divide otherwise what it reads here.
                shardings = [
                    spec if isinstance(spec, NamedSharding) else NamedSharding(mesh, spec)
                    for spec in specs
                ]
                results = lax.with_sharding_constraint(results, shardings)
            left = LoopState(dict(zip(keys, [*read, *results], strict=True)))
            return results, [*emitted, closing(left, elements)], ticket

        return call

    def _begin(
        self, numbers: jax.Array, replica: Scalar, blocks: dict[Any, Block] | None = None
    ) -> tuple[Frame, Any]:
        """Inside the function: the environment of the piece, and the counter of each iteration."""
        piece = self.piece
        seed, first_step, offset, count = Numbers.read(numbers)
        # The key from the seed alone: step, microbatch, replica and call are folded in where it is
        # used, so that it does not depend on how a training is cut into executions.
        sharded = piece.placement.sharding is not None
        ambient = Ambient(jax.random.key(seed), first_step, replica, sharded)
        trip = Trip(count, first_step + offset) if piece.counted else None
        frame = Frame(ambient, blocks or {}, trip=trip)
        if piece.length is None:
            return frame, None
        # Counted from the offset: neither keys nor periodic taps depend on how the loop is cut.
        return frame, offset + jnp.arange(piece.length, dtype=jnp.int32)

    def _emitted(self, frame: Frame) -> Tree:
        """The emissions of the piece, as the function returns them."""
        condense(frame, at_end=True)
        # Keys are Python objects, so they stay here; the function returns their values in this order.
        self._keys, self.rows = list(frame.emitted), frame.rows
        emitted = [frame.emitted[key] for key in self._keys]
        return emitted if self._packing is None else self._packing.pack(emitted)

    def _what_follows(self, numbers: jax.Array) -> jax.Array:
        """The numbers of a dispatch that continues from here."""
        steps = numbers[3] if self.piece.counted else self.piece.length or 0
        return Numbers.advanced(numbers, steps)


class SegmentProgram(DeviceProgram):
    """Each replica runs the equations of the segment on a separate device.

    Args:
        piece: the piece to run.
        each: carried values that differ per replica: outside the program, dim 0 is the replica dim.
        spread: carried values that are sharded over replicas: outside, shards are concatenated along
            dim 0.
        held: of a sharded model, the sharding of each carried value.
    """

    def __init__(
        self,
        piece: Piece,
        each: frozenset[Var] = frozenset(),
        spread: frozenset[Var] = frozenset(),
        held: Sequence[NamedSharding] = (),
    ) -> None:
        # A loop donates its carry from piece to piece, and nothing else.
        start = piece.segment.start if piece.segment.is_loop else ()
        super().__init__(piece, [var for var, _ in start], piece.segment.writes)
        self._each, self._spread, self._held = each, spread, held
        self._several = piece.placement.replicas > 1

    def jitted(self, donated: tuple[int, ...]) -> Any:
        """The function, mapped over the replicas if there are several."""
        placement, function = self.piece.placement, self._function
        if placement.sharding is not None:
            return self._partitioned(donated, placement.sharding.replicated)
        written: list[PartitionSpec] = []
        if self._several:
            each, same = PartitionSpec(devices.REPLICA), PartitionSpec()
            elements = PartitionSpec(None, devices.REPLICA)  # dim 0 is that of the iterations
            sent = each if placement.in_one_process else same

            def spec(var: Hashable) -> PartitionSpec:
                return each if var in self._each or var in self._spread else same

            written = [spec(var) for var in self.writes]
            # Also a value that the loop leaves as it is may be held in shards.
            read = [spec(var) for var in self.piece.segment.reads]
            function = jax.shard_map(
                function,
                mesh=placement.mesh,
                in_specs=([spec(var) for var in self.carried], read, elements, same, same),
                out_specs=(written, sent, same),
                check_vma=False,  # `check_in_step` has proved which values are equal, by our own rules
            )
        return jax.jit(self._closed(function, written), donate_argnums=donated)

    def _partitioned(self, donated: tuple[int, ...], replicated: NamedSharding) -> Any:
        """The function of whole arrays, which XLA divides over the mesh of a sharded model."""
        # Arguments say where they are. The carry leaves as it came, or the next dispatch could not
        # take it; the numbers of the next dispatch too.
        held = list(self._held) or None
        return jax.jit(
            self._closed(self._function, self._held),
            in_shardings=(held, None, None, replicated, None),
            out_shardings=(held, None, replicated),
            donate_argnums=donated,
        )

    def _function(
        self,
        carried: Tree,
        read: Tree,
        elements: Tree,
        numbers: jax.Array,
        free: Sequence[jax.Array],
    ) -> Any:
        self._rewriter.arguments = free
        piece, segment = self.piece, self.piece.segment
        replica = jax.lax.axis_index(devices.REPLICA) if self._several else jnp.int32(0)
        blocks = self._blocks(elements)
        frame, counters = self._begin(numbers, replica, blocks)
        if self._several:
            pairs = zip(self.carried, carried, strict=True)
            carried = [value[0] if var in self._each else value for var, value in pairs]
        known: dict[Any, Any] = dict(
            zip([*self.carried, *segment.reads], [*carried, *read], strict=True)
        )
        equations = list(segment.equations)
        if segment.is_loop:
            # The loop, cut to this piece.
            equations[0] = self._shortened(equations[0])
            known[equations[0].invars[-1]] = counters
        self._rewriter.run_equations(equations, known, frame, first=segment.first)
        for queue, block in blocks.items():
            if not isinstance(block.position, int):  # known only at run time
                frame.emit(("read", queue), block.position)
        # After a while loop the host cannot know how many steps ran; a counted loop got the number
        # from the host.
        if not isinstance(frame.steps_before, int) and not piece.counted:
            frame.emit(STEPS, frame.steps_before)
        emitted = self._emitted(frame)
        if self._several and piece.placement.in_one_process:
            emitted = jax.tree.map(lambda leaf: leaf[None], emitted)
        elif self._several:  # each process gets all results: it is one program
            emitted = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, devices.REPLICA), emitted)
        results = [
            known[var][None] if self._several and var in self._each else known[var]
            for var in self.writes
        ]
        return results, emitted, self._what_follows(numbers)

    def _blocks(self, elements: Tree) -> dict[Any, Block]:
        """The elements of this replica, by feed."""
        # A queue that the loop reads zero times still needs a block: its dequeues are traced.
        blocks = {queue: Block(_no_elements(queue)) for queue in self.piece.elements}
        read_from = (queue for queue, count in self.piece.elements.items() if count)
        for queue, leaves in zip(read_from, elements, strict=True):
            own = tuple(leaf.squeeze(1) for leaf in leaves) if self._several else leaves
            blocks[queue] = Block(own)
        return blocks

    def _shortened(self, loop: JaxprEqn) -> JaxprEqn:
        """The loop, cut to the length of this piece, starting where the last piece ended."""
        assert self.piece.length is not None
        return as_scan(loop).piece(self.piece.length, self.carried)


def _no_elements(queue: Feed) -> tuple[Any, ...]:
    return tuple(jnp.zeros((0, *leaf.shape), leaf.dtype) for leaf in queue.spec().leaves)
