"""Running a loop over pipelined steps: a `LoopRunner` whose layout is over stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.base.trees import Tree
from tailrace.devices.devices import resolve_replicas
from tailrace.errors import PipelineError
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.running.pipeline_executable import PipelinePlacement
from tailrace.pipeline.running.stage_layout import Planned, StageLayout
from tailrace.pipeline.schedule.plan import Plan
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.placement import Placement
from tailrace.program.running.segments import TracedLoop


class PipelineRunner(LoopRunner):
    """A loop over pipelined steps, run in dispatches of any length.

    It adds the plan and the assembly; everything else specific to pipelines is in the layout.

    Args:
        function: as for `LoopRunner`; its body holds the loop over microbatches.
        carried: as there.
        read: as there.
        pipeline: the options of its execution.
        placement: the replicas; the devices of stages are known once the function was traced.
        each: as there.
        training: whether there are backwards.
        hosted: the leaves of `carried` that are in host memory between updates.
        stash_on_host: whether forwards keep residuals for backwards in host memory.

    Attributes:
        stages: the layout.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        carried: Tree,
        read: Tree,
        pipeline: Planned,
        placement: Placement,
        each: Sequence[bool] | None = None,
        training: bool = True,
        hosted: frozenset[int] = frozenset(),
        stash_on_host: bool = False,
    ) -> None:
        # The layout needs the traced function (its jobs decide the plan), so it is made by the runner.
        def over_stages(program: TracedLoop) -> StageLayout:
            return StageLayout(
                program,
                carried,
                pipeline,
                placement.replicas,
                each or (),
                training=training,
                hosted=hosted,
                stash_on_host=stash_on_host,
            )

        super().__init__(function, carried, read, placement, each, layout=over_stages)
        assert isinstance(self.layout, StageLayout)
        self.stages = self.layout

    @property
    def plan(self) -> Plan:
        """Which device runs which unit in which tick."""
        return self.stages.plan

    @property
    def assembly(self) -> Assembly:
        """Which device does what, and where values are."""
        return self.stages.assembly


def place_pipeline(pipeline: Pipeline, replicas: int | None) -> PipelinePlacement:
    """The devices of a pipeline, as far as they are known before tracing."""
    if pipeline.sizes or pipeline.device_mapping is not None:
        sizes = pipeline.sizes or tuple(
            len(each) if isinstance(each, tuple | list) else 1
            for each in pipeline.device_mapping or ()
        )
        # Of the plan, not of the stages: several stages may share a device.
        stages = len(pipeline.plan(sizes).devices)
        return PipelinePlacement(resolve_replicas(replicas, stages), stages)
    # "As many replicas as fit" needs the number of devices of one, which only the trace shows.
    if replicas is None:
        raise PipelineError(
            "How many copies of a pipeline fit on the devices is known only when its stages are. "
            "Give replicas=, or tr.Pipeline(device_mapping=...)."
        )
    return PipelinePlacement(resolve_replicas(replicas), 0)
