"""`popart`: the numbers by which PopTorch programs set its options. The rest is refused by name.

PopART built graphs of operators for the chip, and ran operators that were compiled for it. The options
that `options._Popart.set` takes are noted and have no effect.
"""

from __future__ import annotations

import enum
from typing import Any

from tailrace.compat.originals.missing import RefusedName


# Programs write such a member, or its number, into `_Popart.set`: hence numbers.
class SubgraphCopyingStrategy(enum.IntEnum):
    """When inputs of a part of the program were copied."""

    OnEnterAndExit, JustInTime = range(2)


class AccumulateOuterFragmentSchedule(enum.IntEnum):
    """In which order weights were updated."""

    Scheduler, Serial, OverlapCycleOptimized, OverlapMemoryOptimized = range(4)


class RecomputationType(enum.IntEnum):
    """Which values were computed again for gradients."""

    NoRecompute, Standard, NormOnly, Pipeline, RecomputeAll = range(5)


class VirtualGraphMode(enum.IntEnum):
    """How operators were placed on chips."""

    Off, Manual, Auto, ExecutionPhases = range(4)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise RefusedName(
        f"popart.{name} is not available: PopART built graphs of the chip's own operators, and ran "
        f"operators that were compiled for it. Write the model in PyTorch, and an operator with "
        f"torch.autograd.Function or jax.numpy."
    )
