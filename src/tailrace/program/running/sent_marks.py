"""Marks that act in a running program: values for outfeeds, prints, and moves between memories."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import io_callback

from tailrace.base.trees import TreeDef
from tailrace.errors import FeedError
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import FORWARD, TANGENT, Tag
from tailrace.taps.frame import Frame, Scalar


class SentMarks:
    """Handles the marks of one executable.

    Args:
        in_pieces: whether the program is a loop that is dispatched in pieces: a live outfeed then gets
            its values at the end of each piece.
        replicas: the number of replicas.
        alone: whether it runs on a single device.
        muted: outfeeds that receive nothing.
    """

    def __init__(
        self,
        in_pieces: bool,
        replicas: int,
        alone: bool = True,
        muted: frozenset[OutfeedQueue] = frozenset(),
    ) -> None:
        self.in_pieces, self.replicas, self.alone, self.muted = in_pieces, replicas, alone, muted

    def __call__(self, tag: Tag, inputs: list[Any], frame: Frame) -> list[Any]:
        """The values with which the program continues after a mark."""
        if tag.role == "outfeed" and tag.direction == FORWARD:
            queue = tag.payload.queue
            if queue in self.muted:
                return inputs
            if queue.live and not self.in_pieces:
                self._send_now(queue, tag.payload.structure, inputs)
            else:
                frame.emit(queue, list(inputs))
        # A tangent is not printed: transposed, it becomes the gradient, which is printed then.
        elif tag.role == "print" and tag.direction != TANGENT:
            self._print(tag, inputs[0], frame)
        elif tag.role == "memory":
            return [tag.payload(value) for value in inputs]
        return inputs

    def _print(self, tag: Tag, value: object, frame: Frame) -> None:
        title = tag.name if tag.direction == FORWARD else f"{tag.name}_gradient"
        show, several = tag.payload, self.replicas > 1

        def arrive(value: object, replica: Scalar) -> None:
            show(value, f"{title} (replica {int(replica)})" if several else title)

        # Ordered effects need a single device; with several, prints arrive in any order, with the
        # replica.
        io_callback(arrive, None, value, frame.ambient.replica, ordered=self.alone)

    def _send_now(self, queue: OutfeedQueue, structure: TreeDef, inputs: list[Any]) -> None:
        if self.replicas > 1:
            raise FeedError(
                "With several replicas a live outfeed must be enqueued directly in a tr.repeat at "
                "the top of the program: there the loop is cut into short dispatches. Here it is "
                "deeper inside. Move it there, or use live=False."
            )

        def arrive(*values: jax.Array) -> None:
            # Each call is a block of one element: the queue expects a loop dim.
            queue.deliver(structure, [value[None] for value in values], None, 1, 1)

        io_callback(arrive, None, *inputs, ordered=True)
