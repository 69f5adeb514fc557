"""An outfeed that collects named tensors and sends those whose name passes a filter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tailrace.errors import FeedError, OptionError
from tailrace.feeds.outfeed import OutfeedMode, OutfeedQueue
from tailrace.jaxprs import internals
from tailrace.jaxprs.marks import ProgramTrace, current_trace


class MaybeOutfeedQueue:
    """Collects named values in a program and sends the selected ones out together.

    Args:
        mode: as in `tr.OutfeedQueue`.
        filters: a name is selected if it contains any of these strings (case-sensitive). None selects
            all, and so does the single string "none"; an empty list selects nothing.

    In a program, call `maybe_outfeed(name, value)` for each value and `maybe_enqueue()` once after
    the last. Values are collected per trace: a second program, or a second trace, starts with none.
    Both calls belong in the same function: values collected inside `jax.grad`, `jax.jit`, `lax.scan`
    and the like must be enqueued inside too, because they do not exist outside.

    Raises:
        OptionError: `mode` or `filters` has an invalid value.
        FeedError: values are enqueued in another function than they were collected in; when the
            program is traced.

    >>> import jax.numpy as jnp, tailrace as tr
    >>> queue = tr.MaybeOutfeedQueue(filters=["Dense_1"])
    >>> def body(x):
    ...     x = queue.maybe_outfeed("Dense_1/out", x + 1)
    ...     x = queue.maybe_outfeed("Dense_2/out", x * 2)
    ...     queue.maybe_enqueue()
    ...     return x
    >>> _ = tr.compile(lambda x: tr.repeat(3, body, x))(jnp.float32(0))
    >>> queue.dequeue()
    {'Dense_1/out': array([1., 3., 7.], dtype=float32)}
    """

    def __init__(
        self, mode: OutfeedMode | str = OutfeedMode.ALL, filters: Sequence[str] | None = None
    ) -> None:
        self.queue = OutfeedQueue(mode)
        self.filters = process_filters(filters)
        # JAX sorts the keys of a plain dict, but the order of collection is part of the contract.
        self._collected: OrderedDict[str, Any] = OrderedDict()
        self._trace: ProgramTrace | None = None
        self._level: Any = None
        self._enqueued = False

    @property
    def enqueued(self) -> bool:
        """Whether a program that sends something to this queue has been traced."""
        return self._enqueued

    def selects(self, key: str) -> bool:
        """Whether a name passes the filters."""
        return self.filters is None or any(part in key for part in self.filters)

    # -- in a program ---------------------------------------------------------------------------

    def maybe_outfeed(self, key: str, value: object) -> Any:
        """Collect `value` (a tree) under `key` if the filters select it; returns `value`."""
        trace = current_trace("MaybeOutfeedQueue.maybe_outfeed")
        if not self.selects(key):
            return value
        level = internals.trace_level()
        if trace is not self._trace:
            self._forget()
        # Checked here, where the two places are known: a tracer of another function would fail
        # later, in `enqueue`, with a JAX message about leaked tracers.
        if self._collected and level != self._level:
            raise self._elsewhere(f"maybe_outfeed({key!r}, ...)")
        self._trace, self._level = trace, level
        self._collected[key] = value
        return value

    def maybe_enqueue(self) -> dict[str, Any] | None:
        """Send the collected values, if any; returns them, marked, or None."""
        trace = current_trace("MaybeOutfeedQueue.maybe_enqueue")
        if trace is not self._trace or not self._collected:
            return None
        if internals.trace_level() != self._level:
            raise self._elsewhere("maybe_enqueue()")
        values = self._collected.copy()
        self._forget()
        # Forgotten before: if `enqueue` refuses the values, the next trace must not send them again.
        sent = self.queue.enqueue(values)
        self._enqueued = True
        return dict(sent)

    # -- on the host ----------------------------------------------------------------------------

    def maybe_dequeue(self) -> dict[str, Any] | None:
        """The queued values, by name; None if no program sends anything."""
        return self.dequeue() if self._enqueued else None

    def dequeue(self) -> dict[str, Any]:
        """The queued values, by name, in the order of collection."""
        return dict(self.queue.dequeue())

    def __repr__(self) -> str:
        return f"MaybeOutfeedQueue(mode={str(self.queue.mode)!r}, filters={self.filters!r})"

    # -- inside ---------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._collected.clear()
        self._trace = self._level = None

    def _elsewhere(self, call: str) -> FeedError:
        names = ", ".join(map(repr, self._collected))
        self._forget()
        return FeedError(
            f"Values for a MaybeOutfeedQueue are collected and enqueued in one function. Received: "
            f"{call}, while {names} was collected in another one (inside or outside of jax.grad, "
            f"jax.jit, lax.scan or their like), which this one cannot look into. Call "
            f"maybe_enqueue() at the end of the function that collects, or return the value from "
            f"it and collect it here."
        )


def process_filters(filters: Sequence[str] | None) -> list[str] | None:
    """Filters as a list; None, or the one string "none" in any case, for no filter at all.

    >>> process_filters(["None"]), process_filters([]), process_filters(["Dense_1", "none"])
    (None, [], ['Dense_1', 'none'])
    """
    if filters is None:
        return None
    listed = isinstance(filters, Sequence) and not isinstance(filters, str | bytes)
    if not listed or not all(isinstance(part, str) for part in filters):
        raise OptionError(
            f"filters is a list of strings, or None. Received: filters={filters!r}. Write "
            f"filters=['Dense_1']."
        )
    found = list(filters)
    return None if len(found) == 1 and found[0].lower() == "none" else found
