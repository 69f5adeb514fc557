"""The values of a tensor that a call returns: all, the last, a sum, or every n-th microbatch.

With DI device iterations, M microbatches each, R replicas, and s = (d0, ...) the shape of the tensor in
one microbatch on one replica, K copies are returned: DI*M*R for ALL, DI*M*R/N for EVERY_N, R for FINAL
and SUM. They are concatenated along dim 0, ordered by iteration, microbatch, replica; one copy has
shape s.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.base.array_like import ShapeLike
from tailrace.errors import OptionError
from tailrace.records.parts import Part
from tailrace.taps.catalogue import Select
from tailrace.taps.tap import Every, Tap, every
from tailrace.torch.errors import UsageError


class OutputMode(enum.StrEnum):
    """Which values of a tensor a call returns. Strings are accepted; others are an `OptionError`.

    DEFAULT means ALL for inference and FINAL for training. EVERY_N returns microbatches N-1, 2N-1,
    ... of a call, N being the return period.

    >>> import tailrace.torch as tt
    >>> tt.OutputMode("final")
    <OutputMode.FINAL: 'final'>
    """

    ALL = "all"
    FINAL = "final"
    SUM = "sum"
    EVERY_N = "every_n"
    DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class Returned:
    """A mode with its period.

    >>> Returned.of("every_n", 5)
    Returned(mode=<OutputMode.EVERY_N: 'every_n'>, period=5)
    """

    mode: OutputMode
    period: int = 1

    @classmethod
    def of(cls, mode: Returned | Every | str, period: int | None = None) -> Returned:
        """Parse a mode, its name, or `tr.every(n)`."""
        if isinstance(mode, Returned):
            return mode
        if isinstance(mode, Every):
            return cls(OutputMode.EVERY_N, mode.n)
        try:
            parsed = OutputMode(mode)
        except ValueError:
            raise OptionError(
                f"An output mode is one of {', '.join(repr(str(m)) for m in OutputMode)}, or "
                f"tr.every(n). Received: {mode!r}."
            ) from None
        if parsed is not OutputMode.EVERY_N:
            return cls(parsed)
        if isinstance(period, bool) or not isinstance(period, int) or period < 1:
            raise UsageError(
                f"EveryN anchor must have output_return_period set to valid positive integer. "
                f"Received: output_return_period={period!r}."
            )
        return cls(parsed, period)

    def resolved(self, default: Returned) -> Returned:
        """This mode, or `default` if it is DEFAULT."""
        return default if self.mode is OutputMode.DEFAULT else self

    def check(self, iterations: int, pipelined: bool = False) -> None:
        """Refuse a period that does not fit the device iterations."""
        if self.mode is not OutputMode.EVERY_N:
            return
        received = f"Received: a period of {self.period} and {iterations} device iterations."
        if self.period > iterations:
            raise OptionError(
                f"Return period must be <= to the number of batches per step. {received}"
            )
        if iterations % self.period:
            raise OptionError(
                f"Return period must be a factor of the number of batches per step. {received}"
            )

    def tap(
        self,
        select: Select,
        kind: str,
        microbatches: int,
        pick: Callable[[Any], Any] | None = None,
    ) -> Tap:
        """The tap that keeps the values of this mode; `kind` identifies its records.

        `pick` is a function of the tensor that returns the part to keep.
        """

        def whole(value: object) -> Any:
            return value if pick is None else pick(value)

        # The name of a tap's reduction is the kind of its records: several taps on one tensor stay
        # apart.
        whole.__name__ = kind
        mode: Any = str(self.mode)
        if self.mode is OutputMode.EVERY_N:
            # The device keeps or drops whole steps. A period counts microbatches: if a step has one,
            # it is a period of steps; otherwise all are kept, and the host selects.
            mode = every(self.period) if microbatches == 1 and self.period > 1 else "all"
        return Tap(select, mode=mode, reduce=whole)

    def arrange(
        self, part: Part, iterations: int, microbatches: int, replicas: int, shape: ShapeLike = None
    ) -> np.ndarray:
        """The array that a call returns, from the emission of the tap.

        `shape` is the shape of one value, if it differs from that of the tensor.
        """
        # What leaves the device is [replicas, steps, microbatches, *shape]: the first axis only of
        # several replicas, the third only of values inside of the accumulation loop.
        value = np.asarray(part.value)
        collected = self.mode in (OutputMode.FINAL, OutputMode.SUM)
        loops = 0 if collected else part.one.loops
        shape = part.one.entry.shape if shape is None else shape
        if replicas == microbatches == 1 and collected:
            return value  # by far the most common case
        if replicas > 1:
            value = np.moveaxis(value, 0, loops) if part.one.differs else value[0]
        if collected:
            if self.mode is OutputMode.SUM and part.one.loops == 1 and microbatches > 1:
                value = value * value.dtype.type(microbatches)  # one value represents them all
            lead = (replicas,)
        else:
            rows = value.shape[0]
            if loops == 1:
                value = value[:, None]
            lead = (rows, microbatches, replicas)
        if replicas == 1 or not part.one.differs:
            value = np.expand_dims(value, len(lead) - 1)
        value = np.broadcast_to(value, (*lead, *shape))
        if not collected:
            value = value.reshape(int(np.prod(lead[:2])), replicas, *shape)
            # The device may have dropped some already, so the period is counted in what is there.
            stride = self.period * len(value) // (iterations * microbatches)
            value = value[stride - 1 :: stride]
        copies = int(np.prod(value.shape[: value.ndim - len(shape)], dtype=np.int64))
        if copies == 1:
            return value.reshape(shape)
        return value.reshape(copies * shape[0], *shape[1:]) if shape else value.reshape(copies)
