"""A step that one device, or each replica, runs as a whole: how it becomes a runner, and evaluates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.base.trees import Tree
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.program.loops import repeat_with, whole
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.program.step.training_step import Compute, Step


class WholeStep(Step):
    """A step that is not cut into stages."""

    def runner(
        self,
        form: Any,
        infeed: Feed,
        placement: Placement,
        each: Sequence[bool],
        kept_from: int,
    ) -> LoopRunner:
        """A runner of steps on elements of `infeed`; `form` has the shapes of the state."""

        def train(state: Any, _: object) -> Any:
            return self.loop(state, infeed)

        return LoopRunner(train, form, (), placement, each, self.keeping, kept_from)

    def evaluating(
        self, compute: Compute, out: OutfeedQueue, infeed: Feed, read: Tree, placement: Placement
    ) -> LoopRunner:
        """A runner that sends out `compute(params, model_state, batch, ())` for each element."""
        return evaluating_whole(compute, out, infeed, read, placement)

    def begin_evaluating(self, runner: LoopRunner, read: Tree) -> LoopState:
        """The state for dispatches of such a runner."""
        return runner.begin((), read)


def evaluating_whole(
    compute: Compute, out: OutfeedQueue, infeed: Feed, read: Tree, placement: Placement
) -> LoopRunner:
    """A runner that sends out `compute(*read, batch, ())` for each element, on one device.

    It carries nothing: its state is `runner.begin((), read)`.
    """

    def program(_: object, read: Tree) -> Any:
        params, model_state = read

        def one(carry: Tree, batch: Tree) -> Any:
            out.enqueue(compute(params, model_state, batch, ()))
            return carry

        return repeat_with(whole, 1, one, (), infeed)

    return LoopRunner(program, (), read, placement)
