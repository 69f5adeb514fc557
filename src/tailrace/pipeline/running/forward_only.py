"""Evaluation and prediction of a model that is cut into stages: forward pipelines over their devices.

A block of batches goes through the stages in passes of several microbatches each. Variables that
change (metrics, and those that the user's step changes) are carried from batch to batch on the device
that uses them; the others stay on the devices of the stages that read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import ProgramTrace, inside_loop, tracing
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.forward_step import forward_pass, microbatches_of, stages_of
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.schedule.plan import Plan
from tailrace.pipeline.schedule.units import read_ticks
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement

Compute = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""`compute(read, changed, element, ())` returns the values to send out, and the next `changed`."""

_ROUNDS = 8
"""The most rounds of microbatches per pass: their outputs are kept until its end."""


class ForwardPipeline:
    """A pipeline whose forward passes take any number of microbatches, not only whole rounds.

    Args:
        function: the function to cut into stages.
        options: as for `tr.Pipeline`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._pipeline = Pipeline(function, **options)

    def round_of(self, sizes: tuple[int, ...]) -> int:
        """The microbatches of one round, for stages of these sizes."""
        return microbatches_of(self._pipeline, sizes, rounds=1)

    def plan(self, sizes: tuple[int, ...], training: bool = True, count: int | None = None) -> Plan:
        """The plan; if the last round is not full, the missing microbatches do not run."""
        if training or count is None:
            return self._pipeline.plan(sizes, training, count)
        round_of = self.round_of(sizes)
        whole = self._pipeline.plan(sizes, False, -(-count // round_of) * round_of)
        if whole.microbatches == count:
            return whole
        # A schedule plans whole rounds. A shorter pass is the next longer plan without the units of
        # microbatches that do not exist; ticks at its end may be empty.
        ticks = [[u for u in tick if u.microbatch < count] for tick in whole.iter_ticks()]
        while not ticks[-1]:
            ticks.pop()
        cut = dataclasses.replace(whole, microbatches=count, own_ticks=read_ticks(ticks))
        return cut.check()


class ForwardRunner(PipelineRunner):
    """Runs such a pipeline.

    Args:
        sizes: the sizes of its stages.
        compute: the function of each batch.
        read: the forms of the values it only reads.
        changed: the forms of the values it may change; they differ per replica.
        infeed: the source of batches.
        out: receives the results.
        count: the number of batches per replica and dispatch.
        pipeline: the options of its execution.
        placement: the replicas.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        compute: Compute,
        read: Tree,
        changed: Tree,
        infeed: Feed,
        out: OutfeedQueue,
        count: int,
        pipeline: ForwardPipeline,
        placement: Placement,
    ) -> None:
        self.per_pass = per_pass(count, pipeline.round_of(sizes))
        self._read_only = len(jax.tree.leaves(read))

        def program(state: Tree, _: object) -> Any:
            return forward_pass(compute, state, infeed, out, self.per_pass, (), advances=True)

        # Each replica sees other batches, so what batches change (metrics) differs between replicas.
        each = [False] * self._read_only + [True] * len(jax.tree.leaves(changed))
        super().__init__(program, (read, changed), (), pipeline, placement, each, training=False)

    def changed(self, state: LoopState) -> Any:
        """The values that the passes have changed, without those they only read."""
        changed = self.stages.leaves(state, self._read_only)
        return self.traced.out_structure.children()[1].unflatten(changed)


def stages_in(compute: Compute, args: tuple[Any, Any, Any, Any], replicas: int) -> tuple[int, ...]:
    """The sizes of the stages that a step goes through, found by tracing it."""
    with tracing(ProgramTrace(replicas=replicas)) as trace, inside_loop(trace):
        return stages_of(compute, args)


def per_pass(count: int, round_of: int) -> int:
    """The number of batches per pass, of `count` batches.

    A divisor, so that all passes are alike; `count` itself if no divisor keeps ramp-up and ramp-down
    rare enough.

    >>> per_pass(100, 2), per_pass(7, 2), per_pass(97, 2), per_pass(1, 2)
    (10, 7, 97, 1)
    """
    most: Sequence[int] = range(min(count, _ROUNDS * round_of), 2 * round_of - 1, -1)
    # At least two rounds: a pass of one round would be all ramp-up and ramp-down.
    return next((piece for piece in most if count % piece == 0), count)
