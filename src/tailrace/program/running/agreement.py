"""The exchange between processes before each dispatch, so that none enters a collective alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tailrace.devices.processes import distributed
from tailrace.errors import DataExhausted, DistributedError, WaitStopped
from tailrace.jaxprs.internals import Var
from tailrace.jaxprs.operations import name_of
from tailrace.jaxprs.walk import walk
from tailrace.program.running.segments import Segment

Taken = TypeVar("Taken")

_MEANINGS = {
    "passes": "how many steps an execution has",
    "replicas": "how many replicas there are",
    "elements": "the shapes and dtypes of the dataset's elements",
    "carried": "the shapes and dtypes of the parameters and the state",
    "program": "the operations of the program",
}
"""The compared properties, in the order in which differences are reported."""


_ENDS = {DataExhausted: "ended", WaitStopped: "stopped"}
"""The names of errors that end the executions of all processes without being failures."""


class Agreement:
    """The next execution of a process, in a form that other processes can compare with theirs.

    Args:
        segment: the part of the program.
        replicas: the number of replicas over all processes.
    """

    def __init__(self, segment: Segment, replicas: int) -> None:
        def listed(variables: Iterable[Var]) -> str:
            return ", ".join(str(var.aval) for var in variables)

        elements = [
            ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in queue.spec().leaves)
            for queue in segment.elements
        ]
        text = hashlib.sha256()
        for place in walk(segment.equations):
            # Operations and shapes, not the text of the program: that has addresses of objects,
            # which differ.
            made = [str(var.aval) for var in place.equation.outvars]
            text.update(f"{name_of(place.equation)} {made}\n".encode())
        self.said = {
            "replicas": replicas,
            "elements": "; ".join(elements),
            "carried": _short(listed((*segment.reads, *segment.writes))),
            "program": text.hexdigest()[:16],
        }

    def take_together(
        self,
        passes: int | None,
        take: Callable[[], Taken],
        put_back: Callable[[Taken], None],
    ) -> Taken:
        """The result of `take()`, once all processes have taken theirs and agree on the program.

        `passes` is the number of iterations this process is about to run. If another process cannot,
        the elements are put back and an error names the process and the reason.
        """
        try:
            taken = take()
        except Exception as error:  # not an interrupt, which must not wait for the others
            kind = next((name for one, name in _ENDS.items() if isinstance(error, one)), "failed")
            # The others are at the same meeting, with their elements: they learn why, and put them
            # back.
            distributed.meet({kind: f"{type(error).__name__}: {error}"})
            raise
        try:
            self._compare(distributed.meet({"passes": passes, **self.said}))
        except BaseException:
            put_back(taken)
            raise
        return taken

    def _compare(self, answers: list[dict[str, Any]]) -> None:
        for process, said in enumerate(answers):
            if "failed" in said:
                raise DistributedError(
                    f"Process {process} failed before this execution: {said['failed']}"
                )
        for process, said in enumerate(answers):
            for error, kind in _ENDS.items():
                if kind in said:
                    raise error(f"Of process {process}: {said[kind]}")
        for what, meaning in _MEANINGS.items():
            for process, said in enumerate(answers):
                first, other = answers[0].get(what), said.get(what)
                if first != other:
                    raise DistributedError(
                        f"All processes run the same program together, but they differ in {meaning}: "
                        f"process 0 has {first!r}, process {process} has {other!r}. Run the same "
                        f"script with the same options, on data of the same form, in each."
                    )


def agreed_seconds(seconds: float) -> float:
    """The longest time that any process measured, so that all derive the same decisions from it."""
    return max(said["seconds"] for said in distributed.meet({"seconds": seconds}))


def agreed_least(count: int | None) -> int | None:
    """The smallest number of any process; None means no limit."""
    answers = [said["count"] for said in distributed.meet({"count": count})]
    known = [number for number in answers if number is not None]
    return min(known) if known else None


def _short(text: str) -> str:
    if len(text) <= 300:
        return text
    return f"{text[:280]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
