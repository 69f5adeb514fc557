"""The measurements of a training step: the numbers behind a `Profile`."""

from __future__ import annotations

import dataclasses
from abc import ABC

from tailrace.profiling.profile.pipeline_times import PipelineTimes


@dataclasses.dataclass(frozen=True)
class Row:
    """The cost of one scope in one phase, over all profiled steps.

    Attributes:
        phase: forward, backward, optimizer, accumulation, replicas, stages, feeds, taps, loop.
        scope: the path of the model's scope, as in the catalogue; "" outside of all.
        seconds: the self time of its operations, over all threads and devices.
        flops: floating-point operations.
        bytes: bytes read and written.
        roofline: the fraction of the device's roofline that it reaches; None if unknown.
        runs: the number of operations that ran.
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


# A class of its own: texts and pictures take one, and `Profile`, which shows both, imports them.
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
