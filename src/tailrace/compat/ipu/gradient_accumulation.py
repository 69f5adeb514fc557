"""The accumulation of the gradients of several mini-batches, with the original's names."""

from __future__ import annotations

import enum

from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.originals.missing import missing_from
from tailrace.program.step.accumulation import Reduction


class GradientAccumulationReductionMethod(enum.Enum):
    """SUM adds the gradients; MEAN adds each divided by their number; RUNNING_MEAN keeps the mean."""

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @property
    def reduction(self) -> Reduction:
        """The engine's word for it."""
        return Reduction(self.name.lower())

    @classmethod
    def parse_reduction_method(cls, value: object) -> GradientAccumulationReductionMethod:
        """The member itself, or the one that a string names in either case.

        Raises:
            IPUValueError: there is no such method.

        >>> GradientAccumulationReductionMethod.parse_reduction_method("mean").name
        'MEAN'
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise IPUValueError(
            f"Cannot parse {value} as one of GradientAccumulationReductionMethod. Valid values are: "
            f"{', '.join(cls.__members__)}."
        )


__getattr__, __dir__ = missing_from(__name__)
