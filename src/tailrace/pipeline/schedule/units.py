"""The parts of a schedule: units of work, and the ticks they run in."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from tailrace.errors import PlanError

Kind = Literal["F", "B"]


class Unit(NamedTuple):
    """One forward ("F") or backward ("B") of one microbatch at one stage, on one device.

    A unit equals the plain tuple of its four values. Members of a concurrent stage that share a
    device are one unit: the stage's work on that device.
    """

    device: int
    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}@{self.device}"


Tick = tuple[Unit, ...]


def read_ticks(ticks: Iterable[Iterable[Any]]) -> tuple[Tick, ...]:
    """Ticks from nested sequences (as JSON or a hand-written schedule gives them)."""
    try:
        listed = [list(tick) for tick in ticks]
    except TypeError as error:
        raise PlanError(
            "Ticks are a sequence of ticks, and a tick is a sequence of units "
            f'(device, "F" or "B", stage, microbatch); received {ticks!r}.'
        ) from error
    if not listed:
        raise PlanError("A plan has at least one tick; received none.")
    return tuple(
        tuple(_read_unit(unit, number) for unit in tick) for number, tick in enumerate(listed)
    )


def _read_unit(value: Any, tick: int) -> Unit:
    try:
        device, kind, stage, microbatch = value
    except (TypeError, ValueError):
        kind = None
        device = stage = microbatch = 0
    numbers = (device, stage, microbatch)
    # Exactly int: True and 1.0 equal 1, and would be written back as something else.
    if kind not in ("F", "B") or any(type(number) is not int for number in numbers):
        raise PlanError(
            'A unit of a tick is (device, "F" or "B", stage, microbatch) with whole numbers; '
            f"received {value!r} in tick {tick}."
        )
    return Unit(device, kind, stage, microbatch)
