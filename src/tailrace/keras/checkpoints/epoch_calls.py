"""The calls that Keras makes to a PyDataset between epochs, kept to be made again.

A PyDataset often shuffles in `on_epoch_end`, in place: its order depends on how often it was called,
and on the random numbers that there were then. So both are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tailrace.data.positions.random_sources import (
    drawn_from,
    generators_in,
    random_state,
    set_random_state,
)
from tailrace.feeds.skipping import skip
from tailrace.keras.data.wrapped_dataset import WrappedDataset

_BEGIN, _END = "begin", "end"


class EpochCalls(WrappedDataset):
    """A dataset whose calls are kept, and made again where a fit is resumed.

    Args:
        inner: the dataset inside.
        before: the calls of the first run, if it is resumed.

    Attributes:
        calls: the calls so far, for JSON: each with the states, before it, of the generators that it
            drew from.
    """

    def __init__(self, inner: keras.utils.PyDataset, before: Sequence[list[Any]] = ()) -> None:
        super().__init__(inner)
        self.calls: list[list[Any]] = []
        self._before = before

    def on_epoch_begin(self) -> None:
        """Called by Keras before each epoch, and before the batch that it builds a model from."""
        if self._is_first(_END):  # no model was built then, and that one batch does not count
            self._inner.on_epoch_begin()
        else:
            self._call(_BEGIN)

    def on_epoch_end(self) -> None:
        """Called by Keras after each epoch, and before the first."""
        if self._is_first(_BEGIN):  # a model was built then, and is now
            self._call(_BEGIN)
        self._call(_END)

    def begin(self) -> None:
        """Make the calls of earlier epochs, once Keras has made those before the first."""
        # Keras itself begins the epoch in which the fit continues.
        under_way = bool(self._before) and self._before[-1][0] == _BEGIN
        missing = max(0, len(self._before) - under_way - len(self.calls))
        skip(missing, lambda _: self._call(self._before[len(self.calls)][0]), "epochs of the data")

    def _is_first(self, name: str) -> bool:
        """Whether no call was made yet, and the first one of the first run was this one."""
        return not self.calls and bool(self._before) and self._before[0][0] == name

    def _call(self, name: str) -> None:
        own, number = generators_in(self._inner), len(self.calls)
        if number < len(self._before):
            set_random_state(self._before[number][1], own)
        before = random_state(own)
        (self._inner.on_epoch_begin if name == _BEGIN else self._inner.on_epoch_end)()
        self.calls.append([name, drawn_from(before, random_state(own))])
