"""Iterators with a position: `get_state` and `set_state`.

`tr.batches`, Grain's iterators and loaders with `state_dict` resume in constant time. All other
sources are read from their start, and the elements used before are skipped.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import DataError

Element = TypeVar("Element")

_ADDRESS = re.compile(rb"<[\w.<> ]+ object at 0x[0-9a-f]+>")
"""What Python shows of an object whose class has no `__repr__`."""


class Mapped(Iterator[Element], Generic[Element]):
    """`map(function, source)`, except that `map` calls `iter(source)` again: some begin anew then."""

    def __init__(self, function: Callable[[Any], Element], source: Iterator[Any]) -> None:
        self._function, self._source = function, source

    def __next__(self) -> Element:
        return self._function(next(self._source))


class ResumableMap(Iterator[Element], Generic[Element]):
    """`map(function, source)`, with the position of the source.

    Args:
        function: applied to each element.
        source: the iterator.
        get_state: returns the state of the source.
        set_state: makes the source continue from a state.
        apart: whether the state is not the iterator's, which is given up before another is made.
    """

    def __init__(
        self,
        function: Callable[[Any], Element],
        source: Iterator[Any],
        get_state: Callable[[], Any],
        set_state: Callable[[Any], Iterator[Any] | None],
        apart: bool = False,
    ) -> None:
        self._function, self._source = function, source
        self.get_state, self._set_state, self._apart = get_state, set_state, apart

    def __next__(self) -> Element:
        return self._function(next(self._source))

    def set_state(self, state: Tree) -> None:
        """Continue from a state; some sources then have another iterator."""
        if self._apart:
            # A generator's `finally` runs now, not after the state was loaded.
            self._source = iter(())
        self._source = self._set_state(state) or self._source


def resumable(function: Callable[[Any], Element], iterable: Any) -> Iterator[Element]:
    """`map(function, iterable)`; with a position if the iterable, or its iterator, has one."""
    # Loaders of PyTorch keep the position in the iterable, Grain in the iterator.
    loads = callable(getattr(iterable, "state_dict", None))
    if loads and callable(getattr(iterable, "load_state_dict", None)):

        def load(state: Tree) -> Iterator[Any]:
            iterable.load_state_dict(state)
            return iter(iterable)

        return ResumableMap(function, iter(iterable), iterable.state_dict, load, apart=True)
    source = iter(iterable)
    if can_go_back(source):
        return ResumableMap(function, source, source.get_state, source.set_state)  # type: ignore[attr-defined]
    return Mapped(function, source)


def can_go_back(source: object) -> bool:
    """Whether an iterator has a state that can be kept and set."""
    return all(callable(getattr(source, name, None)) for name in ("get_state", "set_state"))


def own_copy(state: Any) -> Any:
    """A state that stays as it is, even if the iterator changes the one that it returned.

    >>> state = {"row": [1]}
    >>> kept = own_copy(state)
    >>> state["row"].append(2)
    >>> kept
    {'row': [1]}
    """
    # Only what JSON has: a state of another kind is refused where it is kept, not where it is read.
    if isinstance(state, dict):
        return {key: own_copy(value) for key, value in state.items()}
    return [own_copy(value) for value in state] if isinstance(state, list | tuple) else state


def encode_state(state: Tree) -> dict[str, Any]:
    """A state as a value for JSON."""
    if found := _ADDRESS.search(state if isinstance(state, bytes) else repr(state).encode()):
        note_once(
            f"The state of a dataset's iterator has an address in memory: {found[0].decode()}. It is "
            f"another one in the next process, and a Grain DataLoader then refuses to resume. Give the "
            f"class of the data source a __repr__ that is always the same."
        )
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode("ascii")}
    try:
        # Through JSON and back: what a checkpoint will hold, and a copy that the iterator cannot
        # change.
        return {"json": json.loads(json.dumps(state))}
    except (TypeError, ValueError):
        raise DataError(
            f"The state of a dataset's iterator is kept in a checkpoint as JSON or bytes. Received: "
            f"a {type(state).__name__} that is neither."
        ) from None


def decode_state(encoded: dict[str, Any]) -> Any:
    """The inverse of `encode_state`."""
    return base64.b64decode(encoded["bytes"]) if "bytes" in encoded else encoded["json"]
