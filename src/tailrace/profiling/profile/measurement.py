"""What was measured of a training step: the numbers behind a `Profile`."""

from __future__ import annotations

import dataclasses
from abc import ABC

from tailrace.profiling.profile.pipeline_times import PipelineTimes


@dataclasses.dataclass(frozen=True)
class Row:
    """What one scope costs in one phase, over all steps that were watched.

    Attributes:
        phase: forward, backward, optimizer, accumulation, replicas, stages, feeds, taps, loop.
        scope: the path of the model's scope, as in the catalogue; "" outside of all.
        seconds: of its operations themselves, over all threads and devices.
        flops: floating-point operations.
        bytes: read and written.
        roofline: the share of the device's best that it reaches; None where it is not known.
        runs: how many operations ran.
        operations: seconds by operation, most expensive first.
    """

    phase: str
    scope: str
    seconds: float
    flops: float
    bytes: float
    roofline: float | None
    runs: int
    operations: dict[str, float]

    @property
    def name(self) -> str:
        """Phase and scope in one."""
        return f"{self.phase} {self.scope}".strip()


@dataclasses.dataclass(frozen=True)
class Measurement(ABC):
    """A training step by scope, as numbers. `Profile` describes its fields."""

    rows: tuple[Row, ...]
    steps: int
    executions: int
    wall_s: float
    named: float
    device: str
    peak_flops: float
    peak_bytes: float
    memory: dict[str, int]
    pipeline: PipelineTimes | None = None

    @property
    def seconds(self) -> float:
        """The operations' own time, over all rows."""
        return sum(row.seconds for row in self.rows)

    def phase(self, name: str) -> float:
        """The seconds of one phase."""
        return sum(row.seconds for row in self.rows if row.phase == name)
