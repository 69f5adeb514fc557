"""How many steps a fit has, from its dataset and from what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.devices.processes import distributed
from tailrace.errors import DataExhausted
from tailrace.training.fit import note_left_out

if TYPE_CHECKING:
    from tailrace.training.trainer import Trainer


def total_steps(
    trainer: Trainer, length: int | None, steps: int | None, epochs: int | None
) -> int | None:
    """The number of steps; None if only reading the dataset shows it."""
    if not length:  # unknown; or none at all, which reading the first element reports
        return steps
    per_epoch = length // trainer.elements_per_step
    if steps is not None:
        if steps > per_epoch:
            raise DataExhausted(trainer.too_short(steps, length, 0))
        return steps
    if not per_epoch:
        raise DataExhausted(trainer.too_short(1, length, 0))
    note_left_out(length, trainer.elements_per_step)
    return per_epoch * (1 if epochs is None else epochs)


def agreed_total_steps(
    trainer: Trainer, length: int | None, steps: int | None, epochs: int | None
) -> int | None:
    """The same for all processes: the shortest dataset decides."""
    if trainer.placement.in_one_process:
        return total_steps(trainer, length, steps, epochs)
    try:
        total = total_steps(trainer, length, steps, epochs)
    except DataExhausted as error:
        distributed.meet({"failed": str(error)})
        raise
    heard = distributed.meet({"total": total})
    for process, said in enumerate(heard):
        if "failed" in said:
            raise DataExhausted(f"Of process {process}: {said['failed']}")
    known = [said["total"] for said in heard if said["total"] is not None]
    return min(known) if len(known) == len(heard) else None
