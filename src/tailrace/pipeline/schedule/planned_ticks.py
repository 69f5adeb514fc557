"""The ticks of a pipeline's execution: its shape, and which device runs what when.

Everything that reads a plan (costs, stash, drawings, checks) takes `PlannedTicks`. Users have a
`Plan`, which has all of those as methods.
"""

from abc import ABC
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from tailrace.pipeline.schedule.device_mapping import (
    DeviceMapping,
    Names,
    Placement,
    placement_of,
    read_flag,
    read_mapping,
    read_microbatches,
    read_names,
    read_stages,
    require_one_stage_a_device,
)
from tailrace.pipeline.schedule.schedules import (
    Phases,
    PipelineSchedule,
    require_count,
    schedule_offsets,
    virtual_placement,
)
from tailrace.pipeline.schedule.units import Tick, Unit, read_ticks


@dataclass(frozen=True, repr=False)
class PlannedTicks(ABC):
    """Which device runs what in which tick. `Plan` describes the fields."""

    microbatches: int
    schedule: PipelineSchedule
    device_mapping: DeviceMapping
    training: bool = True
    names: Names = ()
    own_ticks: tuple[Tick, ...] | None = None

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {
            "microbatches": read_microbatches(self.microbatches),
            "schedule": PipelineSchedule.parse(self.schedule),
            # Again, although `plan(...)` has done it: a `Plan` may be made directly, or from a file.
            "device_mapping": read_mapping(
                self.device_mapping, read_stages(len(self.device_mapping))[0]
            ),
            "training": read_flag(self.training, "training"),
            "names": read_names(self.names, len(self.device_mapping)),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if self.training and self.schedule is PipelineSchedule.INTERLEAVED:
            require_one_stage_a_device(self.placement)
        # Ticks from elsewhere need not be whole rounds; check() verifies them.
        if self.own_ticks is None:
            require_count(
                self.microbatches, self.overlap, self.schedule, self.stages, self.training
            )

    # The shape of the pipeline.

    @property
    def stages(self) -> int:
        """The number of stages; a group of concurrent stages counts as one."""
        return len(self.device_mapping)

    @cached_property
    def placement(self) -> Placement:
        """For each stage, the device of each of its members."""
        return placement_of(self.device_mapping)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The devices in use, in order."""
        return tuple(sorted({device for stage in self.placement for device in stage}))

    @property
    def virtual_stages(self) -> int:
        """The number of units of a microbatch: twice the number of stages in training."""
        return self.stages * 2 if self.training else self.stages

    # Time.

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The ticks, within a round, in which a microbatch may start."""
        return schedule_offsets(self.schedule, virtual_placement(self.placement, self.training))

    @property
    def overlap(self) -> int:
        """The number of microbatches in flight at once; `microbatches` is a multiple of it."""
        return len(self.offsets)

    def start(self, microbatch: int) -> int:
        """The tick in which a microbatch enters the first stage."""
        turn, row = divmod(microbatch, self.overlap)
        return self.virtual_stages * turn + self.offsets[row]

    @property
    def num_ticks(self) -> int:
        """The number of ticks of one execution."""
        if self.own_ticks is not None:
            return len(self.own_ticks)
        return self.start(self.microbatches - 1) + self.virtual_stages

    @property
    def phases(self) -> Phases:
        """The ticks of ramp-up, steady state and ramp-down.

        Ramp-up is the time of one microbatch; ramp-down begins when the next one would start.
        """
        total = self.num_ticks
        up = min(self.virtual_stages, total)
        # The last round starts its last microbatch `offsets[-1]` ticks after its first: from there
        # on nothing more enters.
        down = max(total - self.offsets[-1], up)
        return Phases(range(up), range(up, down), range(down, total))

    @cached_property
    def ticks(self) -> tuple[Tick, ...]:
        """Every tick, in order; each a tuple of (device, "F" or "B", stage, microbatch).

        All of them are created at the first access. For thousands of devices use `tick(t)` or
        `iter_ticks()`, which create one at a time.
        """
        return tuple(self.iter_ticks())

    def iter_ticks(self) -> Iterator[Tick]:
        """The ticks, created one at a time."""
        return map(self.tick, range(self.num_ticks))

    def tick(self, t: int) -> Tick:
        """The units of tick `t`, in the order in which a device runs them.

        Grouped runs later virtual stages first, so each device does its backward before its
        forward; the others go by the microbatch's place in its round.

        >>> from tailrace.pipeline.schedule.plan import plan
        >>> [str(unit) for unit in plan(stages=2, microbatches=4).tick(3)]
        ['B0.0@0', 'B1.1@1', 'F1.2@1', 'F0.3@0']
        """
        if not 0 <= t < self.num_ticks:
            raise IndexError(f"This plan has ticks 0 to {self.num_ticks - 1}; asked for {t}.")
        if self.own_ticks is not None:
            return self.own_ticks[t]
        return tuple(
            Unit(device, kind, stage, microbatch)
            for virtual, microbatch in self._running(t)
            for kind, stage in [self._unit_of(virtual)]
            for device in dict.fromkeys(self.placement[stage])
        )

    def _running(self, t: int) -> list[tuple[int, int]]:
        """The (virtual stage, microbatch) pairs of a tick, in order."""
        length, overlap = self.virtual_stages, self.overlap
        if self.schedule is PipelineSchedule.GROUPED:
            # Grouped starts microbatch m in tick m, so those in flight are a range. The rule below
            # gives the same; it tests every rotation.
            first = max(0, t - length + 1)
            return [(t - m, m) for m in range(first, min(t + 1, self.microbatches))]
        running: list[tuple[int, int]] = []
        for row, offset in enumerate(self.offsets):
            turn, virtual = divmod(t - offset, length)
            if 0 <= turn < self.microbatches // overlap:
                running.append((virtual, turn * overlap + row))
        return running

    def _unit_of(self, virtual: int) -> tuple[Any, int]:
        if virtual < self.stages:
            return "F", virtual
        return "B", 2 * self.stages - 1 - virtual

    def with_ticks(self, ticks: Iterable[Iterable[Any]]) -> Self:
        """The same pipeline with other ticks, for instance a schedule written by hand.

        Nothing is assumed about them: call `check()` to verify them.
        """
        return replace(self, own_ticks=read_ticks(ticks))

    def stage_name(self, stage: int) -> str:
        """The name of a stage in drawings and tables."""
        name = self.names[stage] if self.names else f"stage {stage}"
        return name if isinstance(name, str) else "+".join(name)
