"""The number of steps of a fit, from its dataset and the requested duration."""

from __future__ import annotations

from tailrace.base.messages import note_once
from tailrace.data.dataset import Dataset
from tailrace.devices.processes import distributed
from tailrace.errors import DataExhausted
from tailrace.trainer.engine import Engine


def total_steps(
    engine: Engine, source: Dataset, steps: int | None, epochs: int | None
) -> int | None:
    """The number of steps, or what a length announces; None if only reading the dataset tells."""
    length = source.length
    if not length:  # unknown; or empty, which reading the first element reports
        return steps
    per_epoch = length // engine.elements_per_step
    if not source.exact:
        if steps is not None and steps > per_epoch:
            note_once(
                f"fit(steps={steps}) takes {steps * engine.elements_per_step} elements, and len() of "
                f"{source.name} announces {length}. It is read until it ends.",
                key=f"announced {source.name} {length}",
            )
        return steps if steps is not None else per_epoch * (1 if epochs is None else epochs) or None
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
    engine: Engine, source: Dataset, steps: int | None, epochs: int | None
) -> int | None:
    """The same for all processes: the shortest dataset decides."""
    if engine.placement.in_one_process:
        return total_steps(engine, source, steps, epochs)
    try:
        total = total_steps(engine, source, steps, epochs)
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


def less_than_a_step(engine: Engine, length: int, when_empty: str = "") -> str:
    """The message for an epoch whose elements do not make one step."""
    if not length and when_empty:
        return f"An epoch has at least one step, and this one found no element. {when_empty}"
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
