"""The number of steps of a fit, from its dataset and the requested duration."""

from __future__ import annotations

from tailrace.devices.processes import distributed
from tailrace.errors import DataExhausted
from tailrace.messages import note_once
from tailrace.trainer.engine import Engine


def total_steps(
    engine: Engine, length: int | None, steps: int | None, epochs: int | None
) -> int | None:
    """The number of steps; None if it is known only by reading the dataset."""
    if not length:  # unknown; or empty, which reading the first element reports
        return steps
    per_epoch = length // engine.elements_per_step
    if steps is not None:
        # Before the first step: the same error could come after hours.
        if steps > per_epoch:
            raise DataExhausted(too_short(engine, steps, length, 0))
        return steps
    if not per_epoch:
        raise DataExhausted(less_than_a_step(engine, length))
    note_left_out(length, engine.elements_per_step)
    return per_epoch * (1 if epochs is None else epochs)


def agreed_total_steps(
    engine: Engine, length: int | None, steps: int | None, epochs: int | None
) -> int | None:
    """The same for all processes: the shortest dataset decides."""
    if engine.placement.in_one_process:
        return total_steps(engine, length, steps, epochs)
    try:
        total = total_steps(engine, length, steps, epochs)
    except DataExhausted as error:
        # The others wait in the meeting below: without an answer they would wait forever.
        distributed.meet({"failed": str(error)})
        raise
    answers = distributed.meet({"total": total})
    for process, said in enumerate(answers):
        if "failed" in said:
            raise DataExhausted(f"Of process {process}: {said['failed']}")
    # Unknown in one process is unknown in all, or they would disagree about the last execution.
    known = [said["total"] for said in answers if said["total"] is not None]
    return min(known) if len(known) == len(answers) else None


def too_short(engine: Engine, steps: int, length: int | str, done: int) -> str:
    """The message for a dataset that ends before `steps` are done."""
    count, replicas = engine.accumulation.microbatches, engine.placement.local_replicas
    return (
        f"fit takes steps x microbatches x replicas elements, {steps} x {count} x {replicas} = "
        f"{steps * count * replicas}, and never restarts a dataset for steps=. This one has "
        f"{length}; {done} steps were done. Ask for fewer steps, repeat the dataset, or use "
        f"fit(epochs=...)."
    )


def less_than_a_step(engine: Engine, length: int) -> str:
    """The message for an epoch whose elements do not make one step."""
    count, replicas = engine.accumulation.microbatches, engine.placement.local_replicas
    return (
        f"A step takes microbatches x replicas elements of the dataset, {count} x {replicas} = "
        f"{count * replicas}, and an epoch has at least one step. This dataset has {length}. Lower "
        f"accumulation or replicas, cut smaller batches, or give more data."
    )


def ended_early(engine: Engine, steps: int, length: int, done: int) -> str:
    """The message for a dataset that ends before the end of an epoch that its length announced."""
    return (
        f"An epoch goes through the whole dataset, whose length announced {steps} steps of "
        f"{engine.elements_per_step} elements. It ended after {length} elements; {done} steps of the "
        f"epoch were done. Let its len() be the number of elements that it has, or use "
        f"fit(steps=...)."
    )


def note_left_out(elements: int, per_step: int) -> None:
    """Log once that elements at the end do not fill a step."""
    if left := elements % per_step:
        note_once(
            f"The last {left} elements of the dataset do not fill a step of {per_step} and are "
            f"left out.",
            key="incomplete step",
        )
