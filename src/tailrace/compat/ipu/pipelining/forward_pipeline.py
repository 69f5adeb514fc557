"""An inference pipeline, each stage on its device.

What stages only read is what the engine's loop carries; stages that write variables run in plain loops
on one device instead (`stage_model.infer`), because their order would matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import tailrace as tr
from tailrace.base.trees import Tree
from tailrace.compat.ipu import config
from tailrace.compat.ipu.graph.discovery import discover, keras_scope
from tailrace.compat.ipu.graph.seeding import seeding
from tailrace.compat.ipu.graph.state import Found, Scope, scope_of, value_of
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.ipu.pipelining.pipeline_options import PipelineOptions
from tailrace.compat.ipu.pipelining.stage_model import (
    infeed_of,
    need_outfeed,
    sent_of,
    summed,
    through_stages,
)
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.pipeline.running.forward_step import forward_pass
from tailrace.pipeline.running.pipeline_executable import PipelinePlacement
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.program.running.loop_state import Numbers


class Inference:
    """An inference pipeline that is compiled once and run many times."""

    def __init__(self, options: PipelineOptions, ordinal: int) -> None:
        self.options = options
        replicas = config.replicas(options.shards, ordinal)
        queue = infeed_of(options, replicas)
        queue.bind_replicas(replicas)
        self._queue, self._replicas = queue, replicas
        self._inputs = [as_array(value) for value in options.inputs]
        self._form: Any = None
        self._found = discover(self._look, (self._inputs, queue.spec().tree()))
        self._variables = list(self._found.variables.values())
        self._out, self._steps, self._seed = OutfeedQueue(), 0, seeding().seed
        self._runner: PipelineRunner | None = None

    @property
    def found(self) -> Found:
        """The variables of the stages."""
        return self._found

    def run(self, inputs: Sequence[Any]) -> None:
        """The mini-batches of one call: `repeat_count` times those of a pipeline execution."""
        options = self.options
        if options.infeed_queue is not None:
            options.infeed_queue.queue()  # it may have been deleted since
        given = [as_array(value) for value in inputs]
        values = [jnp.asarray(value_of(variable)) for variable in self._variables]
        # On first use: the runner traces with the forms of these values.
        runner = self._runner_for((values, given))
        state = runner.begin((values, given), ())
        for queue in runner.traced.outfeeds:
            queue.begin()
        try:
            numbers = Numbers(self._seed, self._steps)
            emitted, _ = runner.dispatch(state, options.repeat_count, numbers, 0)
        finally:
            # No thread between calls, which may be far apart.
            self._queue.rest()
            for queue in runner.traced.outfeeds:
                queue.end()
        # Random numbers go on from call to call.
        self._steps += options.repeat_count
        runner.traced.deliver(emitted)
        if options.outfeed_queue is not None and self._form is not None:
            options.outfeed_queue.deliver(self._results())

    # -- inside -----------------------------------------------------------------------------------

    def _look(self, inputs: Tree, element: Tree) -> Any:
        out = through_stages(self.options, inputs, element)
        need_outfeed(self.options, out)
        sent = sent_of(self.options, out, None)
        # Its structure only, in the order of creation: its values belong to the trace.
        self._form = (
            {key: 0 for key in sent} if isinstance(sent, dict) else jax.tree.map(lambda _: 0, sent)
        )
        return out

    def _compute(self, variables: Sequence[Any], inputs: Tree, element: Tree, _: object) -> Any:
        scope = Scope(self._found, looking=False)
        scope.values.update(zip(map(id, self._variables), variables, strict=True))
        with keras_scope(), scope_of(scope):
            return tuple(jax.tree.leaves(through_stages(self.options, inputs, element)))

    def _runner_for(self, read: Tree) -> PipelineRunner:
        if self._runner is None:
            options = self.options
            pipeline = tr.Pipeline(
                self._look,
                accumulation=options.mini_batches,
                schedule=options.pipeline_schedule.schedule,
                device_mapping=options.device_mapping,
            )

            def program(read: Tree, _: object) -> Any:
                return forward_pass(
                    self._compute, read, self._queue, self._out, options.mini_batches, ()
                )

            placement = PipelinePlacement(self._replicas, 0)  # the runner finds the stages
            self._runner = PipelineRunner(program, read, (), pipeline, placement, training=False)
        return self._runner

    def _results(self) -> Any:
        """What goes to the queue of the user: each mini-batch, or sums over them."""
        options = self.options
        leaves = list(self._out.dequeue())
        if options.accumulate_outfeed:
            leaves = [summed(options, leaf) for leaf in leaves]
        found = jax.tree.unflatten(jax.tree.structure(self._form), leaves)
        if isinstance(self._form, dict):
            return {key: found[key] for key in self._form}
        # Sums come in a list, also a single one, as the original sends them.
        return [found] if options.accumulate_outfeed and not isinstance(found, list) else found
