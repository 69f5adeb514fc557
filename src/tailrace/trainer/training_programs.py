"""The training programs of an engine: one per structure and shape of elements.

A program is traced when the first dataset with such elements comes, and kept: a fit that alternates
between two shapes compiles each once. Its feed is kept with it, because the traced loop refers to that
feed; a later dataset with equal elements is put behind the same feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.errors import DataTimeout, ProgramError
from tailrace.feeds.elements import ElementSpec
from tailrace.feeds.feed import Feed
from tailrace.feeds.infeed import InfeedQueue
from tailrace.pipeline.lowering.pipeline_step import PipelineStep
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.schedule.plan import Plan
from tailrace.program.compiling.build import Build
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.placement import Placement
from tailrace.program.step.train_state import TrainState
from tailrace.program.step.training_step import Step
from tailrace.program.tracing.tap_selection import Sight, look
from tailrace.program.tracing.trace import trace_program
from tailrace.taps.activation_listing import listing_activations
from tailrace.taps.catalogue import Catalogue, names_listed_by
from tailrace.taps.tap import AnyTap, Tap
from tailrace.trainer.sentinel import WATCHED, Sentinel
from tailrace.trainer.state_digests import StateDigests


class TrainingPrograms:
    """Finds the program for a dataset, or traces it.

    Args:
        step: the step that all of them run.
        form: the shapes of the state.
        each: for each leaf of the state, whether it differs per replica.
        placement: the devices, as far as they are known before tracing.
        taps: the taps, whose tensors are looked for in each program.
        digests: computes fingerprints, if they were requested.
        sentinel: compares executions, if one does.
        build: how the programs are rewritten and compiled.

    Attributes:
        placement: the devices.
        each: for each leaf of the state, whether it differs per replica.
        form: the shapes of the state, as the latest program has them.
    """

    def __init__(
        self,
        step: Step,
        form: TrainState,
        each: list[bool],
        placement: Placement,
        taps: Sequence[AnyTap],
        digests: StateDigests | None,
        sentinel: Sentinel | None,
        build: Build,
    ) -> None:
        self.placement, self.each, self._build = placement, each, build
        self._step, self.form = step, form
        self._taps, self._digests, self._sentinel = taps, digests, sentinel
        self._runners: dict[ElementSpec, LoopRunner] = {}
        self._sights: dict[ElementSpec, Sight] = {}
        # By feed too: it is asked for in every dispatch, and a spec takes 10 us to hash.
        self._sight_of: dict[Feed, Sight] = {}
        self._left: tuple[Any, InfeedQueue] | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest pipeline; None without one."""
        for runner in reversed(self._runners.values()):
            if isinstance(runner, PipelineRunner):
                return runner.plan
        return None

    @property
    def executions(self) -> int:
        """The number of dispatches so far."""
        return sum(runner.executions for runner in self._runners.values())

    def sight(self, runner: LoopRunner) -> Sight:
        """The tensors that taps select in a program."""
        return self._sight_of[runner.infeeds[0]]

    def build_with(self, build: Build) -> None:
        """Rewrite and compile programs in this way; those that were compiled otherwise, again."""
        self._build = build
        for runner in self._runners.values():
            runner.rebuild(build)

    def find(
        self, dataset: object, timeout_s: float | None = None, epoch: int = 0
    ) -> tuple[LoopRunner, Feed]:
        """The program for elements of the dataset's shape, and its feed set to that dataset.

        Args:
            dataset: the dataset, or a feed.
            timeout_s: the longest wait for an element of a dataset.
            epoch: the epoch that begins, which orders shuffled `tr.batches`.
        """
        made = not isinstance(dataset, Feed)
        fresh = InfeedQueue(dataset, timeout_s=timeout_s) if made else dataset
        # A feed belongs to one number of replicas: they share out its elements in turn.
        fresh.bind_replicas(self.placement.replicas)
        if made and epoch:
            assert isinstance(fresh, InfeedQueue)
            fresh.restart(dataset, epoch)
        if self._left is not None and self._left[0] is dataset and isinstance(fresh, InfeedQueue):
            self._left[1].patience = fresh.patience
            fresh.adopt(self._left[1])  # a one-shot iterator: prefetched elements come first
        try:
            spec = fresh.spec()
        except DataTimeout:
            self.let_go(dataset, fresh)  # its first element may come yet
            raise
        if self.placement.sharding is not None:
            # The shapes that functions get: the numbers of a key are no rows.
            self.placement.sharding.check_batch(spec.shapes, spec.paths)
        if spec not in self._runners:
            self._runners[spec] = self._traced(spec, fresh)
            return self._runners[spec], fresh
        runner = self._runners[spec]
        feed = runner.infeeds[0]
        if isinstance(fresh, InfeedQueue) and feed is not fresh:
            # The traced loop refers to the feed object it was traced with, so the new dataset moves
            # behind that one.
            feed.adopt(fresh)
        return runner, feed

    def let_go(self, dataset: object, feed: Feed) -> None:
        """Release a dataset. Prefetched elements of a one-shot iterator are kept."""
        self._left = None
        # What was prefetched from a generator is gone from it. The next fit on the same object must
        # see it first; a dataset that can be iterated again starts over and needs nothing.
        if not isinstance(feed, InfeedQueue) or feed is dataset:
            feed.rest()
        elif feed.continues:
            feed.rest()
            self._left = (dataset, feed)
        else:
            feed.leave()

    def tensors(self, example: Tree) -> Catalogue:
        """Every tensor of the step by name, for elements like `example`, or the latest if None."""
        if example is None and not self._sights:
            raise ProgramError(
                "The step has tensors once the form of its batches is known. Give an element of "
                "the dataset: trainer.tensors(example), or call it after a fit."
            )
        # With marks on all of them, so that exactly those are listed that a tap would find.
        everything = (Tap("*"),)
        step = self._step.tapped(everything)
        spec = next(reversed(self._sights)) if example is None else None
        infeed = InfeedQueue([example]) if spec is None else self._runners[spec].infeeds[0]

        def train(state: TrainState, _: object) -> TrainState:
            return step.loop(state, infeed)

        form = step.settled(self.form, infeed, self.placement.replicas)
        with listing_activations() as listed, self.placement.within():
            traced = trace_program(train, (form, ()), self.placement.replicas)
        found = step.listed(traced, listed)
        # Only the program of a pipeline knows the stage of a tensor. Without one, looking at an
        # example traces the tapped step alone: elements that are not trained on need no program.
        if not isinstance(self._step, PipelineStep):
            return look(traced, everything, found).catalogue
        runner = self._runners[spec] if spec is not None else self.find([example])[0]
        return look(traced, everything, found, runner.stage_of).catalogue

    def _traced(self, spec: ElementSpec, feed: Feed) -> LoopRunner:
        first = len(jax.tree.leaves(self.form.params))
        self.form = self._step.settled(self.form, feed, self.placement.replicas)
        with listing_activations() as listed:
            runner = self._step.runner(self.form, feed, self.placement, self.each, first)
        runner.build = self._build
        runner.purpose = "training, another form of elements" if self._runners else "training"
        self.placement = runner.placement  # a pipeline's is known once its stages are
        found = self._step.listed(runner.traced, listed) if self._taps else listed
        with names_listed_by("trainer.tensors(example)"):
            self._sights[spec] = look(runner.traced, self._taps, found, runner.stage_of)
        self._sight_of[runner.infeeds[0]] = self._sights[spec]
        # Tracing and compiling are apart: the runner compiles at its first dispatch, with what taps
        # selected by then.
        runner.wanted = self._sights[spec].wanted
        if self._digests is not None:
            self._digests.join(runner)
        if WATCHED in self._step.taps and self._sentinel is not None:
            self._sentinel.watch(runner, look(runner.traced, [WATCHED], found, runner.stage_of))
        return runner
