"""`IPUOutfeedQueue`: what a program sends out, waiting on the host."""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    IPURuntimeError,
    IPUValueError,
)
from tailrace.compat.ipu.graph.operations import Operation, Undelivered, delivered
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.ipu.ipu_infeed_queue import check_dtype, check_ordinal
from tailrace.compat.nests import leaves, map_leaves, rebuild
from tailrace.compat.originals.missing import missing_from
from tailrace.errors import FeedError
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import current_trace, is_tracing


class IPUOutfeedMode(enum.Enum):
    """Which elements a queue keeps.

    ALL: every element until it is dequeued. LAST: the last one of each execution.

    >>> from tailrace.compat import ipu
    >>> ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST.value
    'get_last'
    """

    ALL = "all"
    LAST = "get_last"


_numbers = itertools.count()
_NEVER = object()


class Enqueued(Operation):
    """What `enqueue` returns: an operation, and the values sent, for code that goes on with them.

    Args:
        values: the values.

    >>> from tailrace.compat import ipu
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> program = ipu.ipu_compiler.compile(lambda x: outfeed.enqueue([x, x + 1])[1], [1.0])
    >>> program()[0].item()
    2.0
    """

    def __init__(self, values: Tree) -> None:
        super().__init__("outfeed enqueue")
        self.values = values

    def __getitem__(self, key: int | str | slice) -> Any:
        return self.values[key]


class IPUOutfeedQueue:
    """A queue that takes values out of a running program.

    Results arrive while the program runs if another thread asks for them before it starts.

    Args:
        outfeed_mode: ALL (the default) keeps every element, LAST only the last one of an execution.
        device_ordinal: which logical device; checked, without effect.
        buffer_depth: how many elements the original's device could send ahead, 1 to 255; checked,
            without effect.
        optimise_latency: how elements travelled in the original; without effect.

    Raises:
        IPUValueError: an argument has a value it may not have.

    >>> from tailrace.compat import ipu
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> def body(x):
    ...     outfeed.enqueue(x)
    ...     return x * 2
    >>> program = ipu.ipu_compiler.compile(lambda x: ipu.loops.repeat(3, body, x), [1.0])
    >>> program()[0].item()
    8.0
    >>> outfeed.dequeue().tolist()
    [1.0, 2.0, 4.0]
    """

    def __init__(
        self,
        outfeed_mode: IPUOutfeedMode | None = None,
        device_ordinal: int | None = None,
        buffer_depth: int = 3,
        optimise_latency: bool = False,
    ) -> None:
        outfeed_mode = IPUOutfeedMode.ALL if outfeed_mode is None else outfeed_mode
        if not isinstance(outfeed_mode, IPUOutfeedMode):
            raise IPUValueError(
                f"Expected outfeed_mode value to be of ipu_outfeed_queue.IPUOutfeedMode type. "
                f"Received: {outfeed_mode!r}."
            )
        if buffer_depth <= 0:
            raise IPUValueError(
                f"Outfeed buffer depth cannot be less than 1. Received: {buffer_depth}."
            )
        if buffer_depth >= 256:
            raise IPUValueError(
                f"Need prefetch_depth < 256. Received: buffer_depth={buffer_depth}."
            )
        self.outfeed_mode = outfeed_mode
        self.device_ordinal = check_ordinal(device_ordinal)
        self.buffer_depth, self.optimise_latency = buffer_depth, bool(optimise_latency)
        self.id = next(_numbers)
        self._enqueued = False
        self._queue = OutfeedQueue("all" if outfeed_mode is IPUOutfeedMode.ALL else "last")
        # Not None, which is the form of a single value.
        self._form: Any = _NEVER
        self._traces: set[int] = set()
        self._thread: int | None = None

    # -- in a program ---------------------------------------------------------------------------

    def enqueue(self, tensors: TensorLike) -> Enqueued:
        """Send a value, or a nest of lists, tuples and dicts of them, each time this is reached.

        Args:
            tensors: what to send.

        Returns:
            An operation; indexing it gives the values that were sent.

        Raises:
            IPUValueError: there is nothing to send, or the program sends to this queue
                in two places.
            InvalidArgumentError: a tensor has a dimension of size 0.
            FailedPreconditionError: a tensor has a dtype that feeds do not take.
        """
        if not is_tracing() and any(isinstance(x, Tracer) for x in jax.tree.leaves(tensors)):
            return Enqueued(tensors)  # Keras asks a layer for the shape of its outputs
        scope, trace = current(), current_trace("IPUOutfeedQueue.enqueue")
        # By trace, not by queue: a program is traced more than once, and each trace may enqueue once.
        if id(trace) in self._traces:
            raise IPUValueError("An outfeed can only be enqueued once.")
        # The entry lives as long as the trace: an id may be used again by a later one.
        trace.feeds.append(_Entered(self._traces, id(trace)))
        # The form is kept, not the tensors: those belong to this trace.
        form, found = map_leaves(lambda _: None, tensors), leaves(tensors)
        if not found:
            raise IPUValueError(f"There is nothing to enqueue in {tensors!r}.")
        found = [as_array(leaf) for leaf in found]
        for index, leaf in enumerate(found):
            check_dtype(leaf.dtype, index)
            if 0 in leaf.shape:
                raise InvalidArgumentError(
                    f"Detected an input tensor to an outfeed queue with a dimension of size 0: "
                    f"shape {leaf.shape} on index {index}."
                )
        self._enqueued = True
        # The first look only shows which variables there are; its values are never sent.
        if scope is None or not scope.looking:
            self._form, self._thread = form, threading.get_ident()
            found = list(self._queue.enqueue(tuple(found)))
        return Enqueued(rebuild(form, iter(found)))

    @property
    def enqueued(self) -> bool:
        """Whether something was enqueued; while a program is traced, in this trace of it."""
        if is_tracing():
            return id(current_trace("enqueued")) in self._traces
        return self._enqueued

    # -- on the host ----------------------------------------------------------------------------

    def dequeue(self, wait_for_completion: bool = False) -> Any:
        """Everything that waits (ALL), or the last element (LAST), in the form it was enqueued in.

        Args:
            wait_for_completion: without effect: a call of a program returns when its results are on
                their way, and this waits for them.

        Raises:
            FailedPreconditionError: the mode is LAST, and nothing was sent yet.
        """
        del wait_for_completion
        self._watched()
        if self._form is _NEVER:
            return Undelivered(self)
        try:
            found = self._queue.dequeue()
        except FeedError as error:
            if self.outfeed_mode is IPUOutfeedMode.LAST:
                raise FailedPreconditionError(
                    f"Trying to get the last value from an outfeed queue before it was executed. "
                    f"{error}"
                ) from error
            return []
        return rebuild(self._form, map(delivered, found))

    def __len__(self) -> int:
        """How many elements wait."""
        return len(self._queue)

    def __bool__(self) -> bool:
        return True  # an empty queue is still a queue

    def __iter__(self) -> IPUOutfeedQueueIterator:
        """The elements one by one, until the queue is empty.

        Raises:
            IPURuntimeError: the mode is LAST.
        """
        if self.outfeed_mode is not IPUOutfeedMode.ALL:
            raise IPURuntimeError(
                "IPUOutfeedQueue can only be iterated over if the outfeed_mode is "
                "IPUOutfeedMode.ALL."
            )
        return IPUOutfeedQueueIterator(self)

    @property
    def deleter(self) -> Operation:
        """Forget what waits, and the form of the elements."""
        # A new queue: a program that still runs sends to the old one.
        self._queue = OutfeedQueue(self._queue.mode, self._queue.live)
        self._form, self._enqueued = _NEVER, False
        return Operation("outfeed deleter")

    def _watched(self) -> None:
        """A caller in another thread expects results while the program runs."""
        # Before anything was enqueued, any thread but the main one is taken for another.
        other = threading.get_ident() != self._thread
        before = self._thread is None and threading.current_thread() is not threading.main_thread()
        if self.outfeed_mode is IPUOutfeedMode.ALL and other and (before or self._thread):
            self._queue.live = True

    # -- what programs use ----------------------------------------------------------------------

    @property
    def queue(self) -> OutfeedQueue:
        """The engine's queue."""
        return self._queue

    def deliver(self, tensors: TensorLike) -> None:
        """Enqueue elements from the host (called by pipelines).

        Args:
            tensors: a nest of arrays whose first dimension counts the elements.
        """
        found = leaves(tensors)
        self._form = map_leaves(lambda _: None, tensors)
        self._enqueued = True
        # One dim of loops, which counts the elements, and none of replicas.
        self._queue.deliver(jax.tree.structure(tuple(found)), found, None, 1, 1)


class ScopedIPUOutfeedQueue(IPUOutfeedQueue):
    """An `IPUOutfeedQueue` that ends with its object, as every queue does here.

    Args:
        outfeed_mode: ALL or LAST; None: ALL.
        device_ordinal: which logical device; checked, without effect.

    Raises:
        IPUValueError: an argument has a value it may not have.

    >>> from tailrace.compat import ipu
    >>> queues = ipu.ipu_outfeed_queue
    >>> queues.ScopedIPUOutfeedQueue(queues.IPUOutfeedMode.LAST).outfeed_mode.name
    'LAST'
    """

    def __init__(
        self, outfeed_mode: IPUOutfeedMode | None = None, device_ordinal: int | None = None
    ) -> None:
        super().__init__(outfeed_mode, device_ordinal)


class IPUOutfeedQueueIterator:
    """The elements of a queue one by one; it ends when the queue is empty for the moment.

    Args:
        outfeed_queue: a queue in mode ALL.

    >>> from tailrace.compat import ipu
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> _ = ipu.ipu_compiler.compile(lambda x: outfeed.enqueue(x), [7.0])()
    >>> [float(element) for element in outfeed]
    [7.0]
    """

    def __init__(self, outfeed_queue: IPUOutfeedQueue) -> None:
        self._outfeed_queue = outfeed_queue
        self._waiting: Iterator[Any] = iter(())

    def __iter__(self) -> IPUOutfeedQueueIterator:
        return self

    def __next__(self) -> Any:
        for element in self._waiting:
            return element
        block: Any = self._outfeed_queue.dequeue()
        found = leaves(block)
        if not found or not len(found[0]):
            raise StopIteration
        # With the ellipsis a row of numbers is an array of no dimensions, not a number.
        rows = ([leaf[i, ...] for leaf in found] for i in range(len(found[0])))
        self._waiting = (rebuild(block, iter(row)) for row in rows)
        return next(self._waiting)


class _Entered:
    """Remembers, for as long as a trace lives, that a queue was enqueued in it."""

    def __init__(self, traces: set[int], trace: int) -> None:
        self._traces, self._trace = traces, trace
        traces.add(trace)

    def __del__(self) -> None:
        self._traces.discard(self._trace)


__getattr__, __dir__ = missing_from(__name__)
