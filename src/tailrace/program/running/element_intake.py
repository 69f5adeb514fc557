"""The elements of a dispatch: taken from feeds before it, and returned if it did not use them."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from tailrace.feeds.feed import Feed, Staged
from tailrace.program.running.agreement import Agreement
from tailrace.program.running.placement import Placement
from tailrace.program.running.segments import Segment
from tailrace.taps.frame import Emission


class ElementIntake:
    """Takes the elements that a segment reads.

    Args:
        segment: the part of a program.
        placement: where it runs.
        elements: the number of elements that its executable has room for, by feed.
        counted: whether a dispatch may use fewer: its block then has rows to spare.
    """

    def __init__(
        self,
        segment: Segment,
        placement: Placement,
        elements: Mapping[Feed, int],
        *,
        counted: bool,
    ) -> None:
        self._segment, self._placement = segment, placement
        self._elements, self._counted = elements, counted
        self._agreement: Agreement | None = None

    def take(
        self, passes: int | None, following: int | None, given: Staged | None
    ) -> dict[Feed, Staged]:
        """The elements of a dispatch, in all processes or in none.

        Args:
            passes: the number of iterations; None if the segment is not a loop.
            following: the number of iterations of the next dispatch; None if unknown.
            given: the elements, if the caller has them.
        """

        def take() -> dict[Feed, Staged]:
            return self._taken(passes, following) if given is None else self._given(given)

        if self._placement.in_one_process:
            return take()
        # Not before the first dispatch: it reads the spec of the elements, and so the dataset.
        if self._agreement is None:
            self._agreement = Agreement(self._segment, self._placement.replicas)
        return self._agreement.take_together(passes, take, put_back)

    def return_unread(
        self, emissions: dict[Hashable, Emission], taken: Mapping[Feed, Staged]
    ) -> None:
        """Return what a loop of unknown length did not read; it emits how many it read."""
        for key in [k for k in emissions if isinstance(k, tuple) and k[0] == "read"]:
            read = emissions.pop(key).value
            queue = key[1]
            # This waits for the device, which only a while loop with an infeed needs.
            used = int(np.asarray(read).max()) * self._placement.local_replicas
            queue.put_back(taken[queue], used)

    def _given(self, block: Staged) -> dict[Feed, Staged]:
        """A block for the one feed that the segment reads."""
        (queue,) = (queue for queue, count in self._elements.items() if count)
        queue.bind_replicas(self._placement.replicas)
        return {queue: block}

    def _taken(self, passes: int | None, following: int | None) -> dict[Feed, Staged]:
        taken: dict[Feed, Staged] = {}
        try:
            for queue, each in self._segment.elements.items():
                if each and self._elements[queue]:
                    count = each if passes is None else each * passes
                    then = None if following is None else each * following
                    # Rows for the capacity of the executable: its shapes do not change with the count.
                    room = self._elements[queue] if self._counted else None
                    queue.bind_replicas(self._placement.replicas)
                    taken[queue] = queue.take(
                        count, self._placement.shared_out, then=then, room=room
                    )
        except BaseException:
            # One feed may have ended before the others: all continue from the same element.
            put_back(taken)
            raise
        return taken


def put_back(taken: Mapping[Feed, Staged]) -> None:
    """Return elements that no program used."""
    for queue, staged in taken.items():
        queue.put_back(staged, used=0)
