"""`plan(...)`: a pipeline schedule as a value that can be read, checked, drawn and simulated.

A `Plan` says which device does what in which tick. It needs no device and no JAX; the executor
reads it. Ticks are made on demand, so a plan for thousands of devices is as cheap as one for two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from tailrace.errors import PlanError
from tailrace.pipeline.drawing import figure, grid
from tailrace.pipeline.schedule import notation, plan_check, simulator, stash
from tailrace.pipeline.schedule.device_mapping import read_mapping, read_stages
from tailrace.pipeline.schedule.planned_ticks import PlannedTicks
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.pipeline.schedule.timetable import Timetable, timetable
from tailrace.pipeline.schedule.units import read_ticks


def plan(
    stages: int | Sequence[Any],
    microbatches: int,
    schedule: PipelineSchedule | str = PipelineSchedule.GROUPED,
    device_mapping: Sequence[Any] | None = None,
    training: bool = True,
) -> "Plan":
    """Plan one execution of a pipeline: `microbatches` through `stages`, then one update.

    Args:
        stages: the number of stages, or a list with an entry for each: 1 or a name for a plain stage;
            a number above 1, or a list of names, for a group of concurrent stages. A group counts as
            one stage of the schedule.
        microbatches: the number of microbatches per update of the weights.
        schedule: "grouped", "interleaved" or "sequential".
        device_mapping: the device of each stage, a list of devices for a group. Stages may share
            a device and come in any order. Without it, devices are numbered in order.
        training: whether each microbatch also goes back through the stages.

    Returns:
        A frozen `Plan`.

    Raises:
        PlanError: the number of microbatches does not fit the schedule, or the mapping does not fit
            the stages.

    >>> import tailrace as tr
    >>> print(tr.plan(stages=2, microbatches=4))
    grouped, 2 stages, 4 microbatches, training: 7 ticks, bubble 20.0 %
    t     0     1     2     3     4     5     6
          ramp-up---------------- ramp-down--------
    dev0  F0    F1    F2    B0+F3 B1    B2    B3
    dev1  .     F0    B0+F1 B1+F2 B2+F3 B3    .
    stash 4 slots: 3, 1
    >>> tr.plan(stages=[1, 2, 1], microbatches=6).device_mapping
    (0, (1, 2), 3)
    """
    sizes, names = read_stages(stages)
    return Plan(
        microbatches=microbatches,
        schedule=PipelineSchedule.parse(schedule),
        device_mapping=read_mapping(device_mapping, sizes),
        training=training,
        names=names,
    )


@dataclass(frozen=True, repr=False)
class Plan(PlannedTicks):
    """One execution of a pipeline, as data; made by `plan(...)`.

    Attributes:
        microbatches: the number of microbatches per execution.
        schedule: the schedule.
        device_mapping: for each stage its device, or a tuple of devices for a concurrent group.
        training: whether there are backward units.
        names: a name for each stage, or empty.
        own_ticks: ticks that replace the schedule's own (see `with_ticks`), or None.
    """

    def timetable(self) -> Timetable:
        """The plan as arrays, (tick, stage) -> microbatch and stash slot, for an executor."""
        return timetable(self)

    def check(self) -> Self:
        """Prove that the ticks are correct, independently of the schedule; returns the plan.

        Raises:
            PlanError: a rule is broken; the text shows the place in the grid.
        """
        plan_check.check(self)
        return self

    # Memory.

    def stash_depth(self, stage: int) -> int:
        """The number of later forwards of a stage between a microbatch's forward and its backward.

        >>> import tailrace as tr
        >>> [tr.plan(4, 16).stash_depth(stage) for stage in range(4)]
        [6, 4, 2, 0]
        """
        return stash.depth(self, stage)

    def slots(self, stage: int) -> int:
        """The number of microbatches whose residuals a stage holds at once: `stash_depth + 1`."""
        return stash.slots(self, stage)

    def slot(self, stage: int, microbatch: int) -> int:
        """The stash slot of a microbatch at a stage."""
        return stash.slot(self, stage, microbatch)

    @property
    def stash_total(self) -> int:
        """Stash slots over all stages and devices; a concurrent group has a stash per device."""
        return stash.total(self)

    def stash_bytes(self, sizes: Sequence[Any]) -> stash.StashBytes:
        """Bytes of stash per stage and device, from each stage's bytes for one microbatch."""
        return stash.in_bytes(self, sizes)

    # Speed.

    @cached_property
    def bubble(self) -> float:
        """The idle share of device time, if every unit takes the same time.

        It describes the executor, which keeps devices in lockstep and skips a phase (all forwards, or
        all backwards, of a Grouped tick) in which none has work. For one stage a device it is
        (S-1)/(M+S-1), with Grouped for any ratio of forward to backward time; `simulate(...)` computes
        it for given times.
        """
        return simulator.bubble(self)

    @property
    def utilisation(self) -> float:
        """The busy share of device time, `1 - bubble`."""
        return 1.0 - self.bubble

    def simulate(
        self,
        forward: simulator.Times,
        backward: simulator.Times | None = None,
        transfer: float | Sequence[float] = 0.0,
        update: simulator.Times = 0.0,
        mode: simulator.SimulationMode | str = "gated",
    ) -> simulator.Simulation:
        """Predict the time of one execution from stage times; see `simulator.simulate`."""
        return simulator.simulate(self, forward, backward, transfer, update, mode)

    # Other plans.

    def serialised(self, microbatches: int | None = None) -> "Plan":
        """The same pipeline with the members of concurrent groups in sequence.

        >>> import tailrace as tr
        >>> tr.plan(stages=[1, 2, 1], microbatches=24).serialised().device_mapping
        (0, 1, 2, 3)
        """
        names = [name for each in self.names for name in ((each,) if type(each) is str else each)]
        return Plan(
            microbatches=self.microbatches if microbatches is None else microbatches,
            schedule=self.schedule,
            device_mapping=tuple(device for stage in self.placement for device in stage),
            training=self.training,
            names=tuple(names),
        )

    # Words and pictures.

    def draw(self, format: str = "text", **options: Any) -> grid.Drawing:
        """The plan as a grid for a terminal, or with `format="svg"` as a picture.

        Returns:
            A str that a prompt shows without quotes; `print(plan)` prints the grid. Options go to
            `grid.draw` or `figure.draw`.
        """
        if format == "text":
            return grid.draw(self, **options)
        if format == "svg":
            return figure.draw(self, **options)
        raise PlanError(f'A plan is drawn as "text" or as "svg"; received format={format!r}.')

    def svg(self, **options: Any) -> grid.Drawing:
        """The plan as a self-contained SVG; options go to `figure.draw`."""
        return figure.draw(self, **options)

    def __str__(self) -> str:
        return str(grid.draw(self))

    def __repr__(self) -> str:
        devices = [list(each) if isinstance(each, tuple) else each for each in self.device_mapping]
        stages = [list(each) if isinstance(each, tuple) else each for each in self.names]
        text = (
            f"plan(stages={stages or self.stages}, microbatches={self.microbatches}, "
            f"schedule={self.schedule.value!r}, device_mapping={devices}, "
            f"training={self.training})"
        )
        return text if self.own_ticks is None else f"{text}.with_ticks(<{self.num_ticks} ticks>)"

    def _repr_svg_(self) -> str:
        return str(figure.draw(self))

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{figure.draw(self)}</div>'

    # Round trips.

    def to_json(self, ticks: bool = True, indent: int | None = None) -> str:
        """The plan as JSON; `ticks=False` leaves out ticks that `from_json` can recreate."""
        return notation.to_json(self, ticks=ticks, indent=indent)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that `to_json` wrote. Ticks that differ from the schedule's are kept."""
        return _restore(notation.from_json(text))

    def to_text(self) -> str:
        """The plan as text: a few lines of facts, then a line for each tick."""
        return notation.to_text(self)

    @staticmethod
    def from_text(text: str) -> "Plan":
        """The plan that `to_text` wrote. Ticks that differ from the schedule's are kept."""
        return _restore(notation.from_text(text))


def _restore(fields: dict[str, Any]) -> Plan:
    """A plan from parsed fields; ticks equal to the schedule's own are not stored."""
    written = fields.pop("ticks")
    if written is None:
        return Plan(**fields)
    kept = Plan(**fields, own_ticks=read_ticks(written))
    try:
        made = replace(kept, own_ticks=None)
    # The schedule itself may refuse the count, and hand-written ticks need not keep its rule.
    except PlanError:
        return kept
    # Compared lazily, tick by tick: the first difference ends it, and no second plan is kept in memory.
    same = made.num_ticks == kept.num_ticks and all(
        ours == theirs for ours, theirs in zip(made.iter_ticks(), kept.iter_ticks(), strict=True)
    )
    return made if same else kept
