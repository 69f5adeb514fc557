"""Evaluation and prediction of a model that is cut into stages: forward pipelines over their devices.

A block of batches goes through the stages in passes of some microbatches each. Variables that change
(metrics, and what a step of the user's changes) go on from batch to batch where they are used; the
others stay on the devices of the stages that read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tailrace.data.trees import Tree
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
"""`compute(read, changed, element, ())` returns what is sent out, and the next `changed`."""

_ROUNDS = 8
"""The most rounds of microbatches per pass: what they send out is kept until its end."""


class ForwardPipeline:
    """A pipeline whose forward passes take any number of microbatches, not only whole rounds.

    Args:
        function: what is cut into stages.
        options: as for `tr.Pipeline`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._pipeline = Pipeline(function, **options)

    def round_of(self, sizes: tuple[int, ...]) -> int:
        """The microbatches of one round, for stages of these sizes."""
        return microbatches_of(self._pipeline, sizes, rounds=1)

    def plan(self, sizes: tuple[int, ...], training: bool = True, count: int | None = None) -> Plan:
        """The plan; where the last round is not full, what is missing does not run."""
        if training or count is None:
            return self._pipeline.plan(sizes, training, count)
        round_of = self.round_of(sizes)
        whole = self._pipeline.plan(sizes, False, -(-count // round_of) * round_of)
        if whole.microbatches == count:
            return whole
        # A schedule repeats by rounds, so it plans whole ones: a shorter pass is the next longer
        # one without the units of microbatches that do not exist. Ticks at the end may become
        # empty.
        ticks = [[u for u in tick if u.microbatch < count] for tick in whole.iter_ticks()]
        while not ticks[-1]:
            ticks.pop()
        cut = dataclasses.replace(whole, microbatches=count, own_ticks=read_ticks(ticks))
        return cut.check()


class ForwardRunner(PipelineRunner):
    """Runs such a pipeline.

    Args:
        sizes: of its stages.
        compute: what is made of each batch.
        read: forms of what it only reads.
        changed: forms of what it may change; each replica has its own.
        infeed: where batches come from.
        out: where goes what is sent out.
        count: how many batches of a replica one dispatch takes.
        pipeline: how it is to run.
        placement: the replicas.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        compute: Compute,
        read: Tree,
        changed: Any,
        infeed: Feed,
        out: OutfeedQueue,
        count: int,
        pipeline: ForwardPipeline,
        placement: Placement,
    ) -> None:
        self.per_pass = per_pass(count, pipeline.round_of(sizes))
        self._read_only = len(jax.tree.leaves(read))

        def program(state: Tree, _: Any) -> Any:
            return forward_pass(compute, state, infeed, out, self.per_pass, (), advances=True)

        each = [False] * self._read_only + [True] * len(jax.tree.leaves(changed))
        super().__init__(program, (read, changed), (), pipeline, placement, each, training=False)

    def changed(self, state: LoopState) -> Any:
        """What the passes have changed, without what they only read."""
        changed = self.stages.leaves(state, self._read_only)
        return self.traced.out_structure.children()[1].unflatten(changed)


def stages_in(compute: Compute, args: tuple[Any, Any, Any, Any], replicas: int) -> tuple[int, ...]:
    """The sizes of the stages that a step goes through, found by tracing it."""
    with tracing(ProgramTrace(replicas=replicas)) as trace, inside_loop(trace):
        return stages_of(compute, args)


def per_pass(count: int, round_of: int) -> int:
    """How many of `count` batches go through the stages in one pass.

    A divisor, so that all passes are alike; the whole where there is none that fills and empties
    the pipeline seldom enough.

    >>> per_pass(100, 2), per_pass(7, 2), per_pass(97, 2), per_pass(1, 2)
    (10, 7, 97, 1)
    """
    most: Sequence[int] = range(min(count, _ROUNDS * round_of), 2 * round_of - 1, -1)
    return next((piece for piece in most if count % piece == 0), count)
