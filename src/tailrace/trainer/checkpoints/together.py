"""Checkpoints of several processes: the first one looks and writes, and all hear what came of it.

Every process holds a part of the state, or all of it, and takes part in gathering it. One writes, so a
checkpoint is there whole or not at all, whichever process dies. What fails in one process fails in all
of them: none is left waiting for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError, TailraceError

Result = TypeVar("Result")


def first_does(act: Callable[[], Result]) -> Result:
    """What `act` returns in the first process, in all of them; JSON must be able to hold it.

    >>> first_does(lambda: 3)
    3
    """
    if distributed.process_count() == 1:
        return act()
    own: dict[str, Any] = {}
    failure: TailraceError | None = None
    if distributed.writes():
        try:
            own = {"found": act()}
        except TailraceError as error:
            failure, own = error, {"failed": str(error)}
    first = distributed.meet(own)[0]
    if failure is not None:
        raise failure
    if "failed" in first:
        raise CheckpointError(first["failed"])
    return first["found"]


def each_does(act: Callable[[], Result]) -> Result:
    """What `act` returns here, once it has succeeded everywhere."""
    if distributed.process_count() == 1:
        return act()
    try:
        found = act()
    except TailraceError as error:
        distributed.meet({"failed": str(error)})
        raise
    for process, answer in enumerate(distributed.meet({})):
        if "failed" in answer:
            raise CheckpointError(f"Of process {process}: {answer['failed']}")
    return found


def gathered(value: Any) -> list[Any]:
    """What each process says, in order; JSON must be able to hold it."""
    return [answer["value"] for answer in distributed.meet({"value": value})]


def own_position(positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where this process goes on in its dataset, of where each process was.

    In another number of processes each has another share of the elements: as many in all.
    """
    count = distributed.process_count()
    if len(positions) == count:
        return positions[distributed.process_index()]
    if any("source" in position for position in positions):
        raise CheckpointError(
            f"Datasets with a state of their own go on in as many processes as before: "
            f"{len(positions)} there, {count} here. Use that many, or datasets without one."
        )
    return {"elements": sum(position["elements"] for position in positions) // count}
