"""Inference over several devices: batches go through the blocks of a module as through a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.devices.devices import available
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import Tag, mark, path_name
from tailrace.pipeline.running.forward_only import ForwardPipeline, ForwardRunner, stages_in
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState
from tailrace.program.running.placement import Placement
from tailrace.taps.catalogue import Entry
from tailrace.taps.frame import Emission
from tailrace.taps.reductions import StatsKey
from tailrace.taps.tap import Chosen, Mode, in_every_step
from tailrace.torch.calls.options import Execution, ModelOptions
from tailrace.torch.programs.infer import InferenceProgram
from tailrace.torch.tracing.forward import Forward


def can_be_staged(forward: Forward, options: ModelOptions) -> bool:
    """Whether there are several devices, and a stage for each."""
    if not forward.spread:
        return False
    wanted, found = len(set(forward.devices)) * options.replicas, len(available())
    if wanted > found:
        note_once(
            f"The blocks of this model are on {len(set(forward.devices))} devices, which with "
            f"replicas={options.replicas} takes {wanted}, and there are {found}. Inference runs on "
            f"one device for each replica, with the same results.",
            key=f"inference on {wanted} of {found} devices",
        )
        return False
    return True


class StagedInferenceProgram(InferenceProgram):
    """Forward passes whose stages are on separate devices.

    An iteration of the engine's loop has several microbatches. For everyone else a batch is an
    iteration.
    """

    runner: ForwardRunner

    @property
    def buffers(self) -> Any:
        """The buffers, from the devices that have them."""
        held = self.runner.changed(self.loop_state)
        # As PyTorch's data parallelism has it: buffers of the first replica are kept.
        return held if self.options.replicas == 1 else jax.tree.map(lambda leaf: leaf[0], held)

    def _make_runner(self, params: Tree, buffers: Tree) -> LoopRunner:
        options, devices = self.options, sorted(set(self.forward.devices))
        schedule = options.schedule
        if options.execution is not Execution.PIPELINED:
            schedule = PipelineSchedule.SEQUENTIAL
        pipeline = ForwardPipeline(
            self._compute,
            schedule=PipelineSchedule.GROUPED if schedule == "auto" else schedule,
            device_mapping=[devices.index(device) for device in self.forward.devices],
        )
        forms = (params, buffers, self.feed.spec().tree(), ())
        return ForwardRunner(
            stages_in(self._compute, forms, options.replicas),
            self._compute,
            params,
            buffers,
            self.feed,
            OutfeedQueue(),
            options.device_iterations,
            pipeline,
            Placement(options.replicas),
        )

    def _compute(self, params: Tree, buffers: Tree, element: Tree, _: object) -> Any:
        self.found.clear()
        given = (self._named("param", params), self._named("buffer", buffers))
        after = self._forward_pass(*given, self._named("input", element))
        # The pipeline wants a loss and gets a number.
        return jnp.int32(0), after  # outputs leave through taps

    def _named(self, kind: str, tree: Tree) -> Any:
        """The tree with marks on observed leaves only: a mark ties a leaf to the first stage."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        values = []
        for path, leaf in leaves:
            entry = Entry(f"{kind}/{path_name(path)}", kind, leaf.shape, leaf.dtype)
            if self._is_wanted(entry):
                leaf = mark(leaf, Tag("value", entry.name))
            self.found.append(entry)
            values.append(leaf)
        return jax.tree.unflatten(structure, values)

    def _begin(self, params: Tree, buffers: Tree) -> LoopState:
        return self.runner.begin((params, buffers), ())

    @property
    def passes(self) -> int:
        """How many passes the loop of one call makes."""
        return self.options.device_iterations // self.runner.per_pass

    def _looking(self) -> list[Any]:
        # A period counts batches, and the loop counts iterations: all are kept, and selected later.
        seen = [in_every_step(tap) for tap in self.taps]
        self._given = {id(one): tap for one, tap in zip(seen, self.taps, strict=True)}
        return seen

    def _chosen(self) -> list[Chosen]:
        return [
            dataclasses.replace(one, tap=self._given[id(one.tap)], loops=1, microbatches=1)
            for one in self.sight.chosen
        ]

    def _by_batch(self, emitted: dict[Hashable, Emission]) -> dict[Hashable, Emission]:
        # What the loop sums up, or keeps of the last pass, has no dim for passes.
        collected = {one.key for one in self.sight.chosen if one.tap.mode in (Mode.SUM, Mode.FINAL)}

        def flat(key: object, emission: Emission) -> Emission:
            first = key.parts()[0][0] if isinstance(key, StatsKey) else key
            if first in collected:
                return emission
            return Emission(*map(self.runner.by_element, emission))

        return {key: flat(key, emission) for key, emission in emitted.items()}
