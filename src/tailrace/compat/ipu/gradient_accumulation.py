"""The accumulation of the gradients of several mini-batches, with the original's names."""

from __future__ import annotations

import enum

from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.originals.missing import missing_from
from tailrace.program.step.accumulation import Reduction


class GradientAccumulationReductionMethod(enum.Enum):
    """How the gradients of several mini-batches become one.

    SUM adds them. MEAN adds each divided by their number. RUNNING_MEAN keeps the mean of those so far,
    which never exceeds the largest of them.

    >>> from tailrace.compat import ipu
    >>> method = ipu.gradient_accumulation.GradientAccumulationReductionMethod
    >>> method.parse_reduction_method("mean")
    <GradientAccumulationReductionMethod.MEAN: 1>
    """

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

        Args:
            value: a member, or its name.

        Raises:
            IPUValueError: there is no such method.
        """
        if isinstance(value, cls):
            return value
        # The original takes names in either case.
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise IPUValueError(
            f"Cannot parse {value} as one of GradientAccumulationReductionMethod. Valid values are: "
            f"{', '.join(cls.__members__)}."
        )


__getattr__, __dir__ = missing_from(__name__)
