"""Checkpoints of several processes: the first one reads and writes, and all get the result.

Every process holds a part of the state, or all of it, and takes part in gathering it. Only one writes,
so a checkpoint is complete or absent, whichever process dies. An error in one process is raised in all
of them: none is left waiting for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tailrace.devices.processes import distributed
from tailrace.errors import CheckpointError, TailraceError

Result = TypeVar("Result")


def first_does(act: Callable[[], Result]) -> Result:
    """The first process's result of `act`, in all processes; it must be JSON.

    >>> first_does(lambda: 3)
    3
    """
    if distributed.process_count() == 1:
        return act()
    own: dict[str, Any] = {}
    failure: Exception | None = None
    if distributed.writes():
        try:
            # In the first process only. An exception must still reach the meeting, or the others
            # would wait forever.
            own = {"found": act()}
        except Exception as error:
            failure, own = error, {"failed": _said(error)}
    first = distributed.meet(own)[0]
    if failure is not None:
        raise failure
    if "failed" in first:
        raise CheckpointError(first["failed"])
    return first["found"]


def each_does(act: Callable[[], Result]) -> Result:
    """The local result of `act`, once it has succeeded in all processes."""
    if distributed.process_count() == 1:
        return act()
    try:
        found = act()
    except Exception as error:
        # The others are on their way to the meeting below, and would wait there forever.
        distributed.meet({"failed": _said(error)})
        raise
    for process, answer in enumerate(distributed.meet({})):
        if "failed" in answer:
            raise CheckpointError(f"Of process {process}: {answer['failed']}")
    return found


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"


def gathered(value: object) -> list[Any]:
    """The values of all processes, in order; they must be JSON."""
    return [answer["value"] for answer in distributed.meet({"value": value})]


def own_position(positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """This process's position in its dataset, from the saved positions of all processes.

    With another number of processes, each has another share of the elements, with the same total. That
    is known of a dataset that all read (`tr.distributed.share`), not of one for each process.
    """
    count = distributed.process_count()
    if len(positions) == count:
        return positions[distributed.process_index()]
    # Such a state is of one reader; for another division of the data it says nothing.
    if any("source" in position for position in positions):
        raise CheckpointError(
            f"Datasets with a state of their own resume in as many processes as before: "
            f"{len(positions)} there, {count} here. Use that many, or datasets without one."
        )
    if len(positions) > 1 and any("recipe" in position for position in positions):
        raise CheckpointError(
            f"Each of {len(positions)} processes read a tr.batches of its own, and now there are "
            f"{count}: which rows are left cannot be known. Use {len(positions)} processes; a dataset "
            f"that all read, tr.distributed.share(dataset, replicas), continues in any number."
        )
    # All have the same number of steps, so each has consumed the same share of the total.
    elements = sum(position["elements"] for position in positions) // count
    # All of them read it all, so it began alike in all of them.
    begun = {n: positions[0][n] for n in ("first", "began", "now", "ended") if n in positions[0]}
    shared = {} if count == 1 else {"share_of": count}
    return {"elements": elements, **begun, **shared}
