"""The passes over a dataset that a resumed fit made before: begun as they were, and read if need be.

What a pass gives may depend on the ones before: a loader draws its order from a generator, and counts
after its last element. Random numbers and counters are in the checkpoint, and are put back. Code of
others may keep more than that, so its passes are read again, to their ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tailrace.data.adapters import as_dataset
from tailrace.data.positions.loader_state import changed, loader_state, put_loader_state
from tailrace.feeds.infeed import InfeedQueue
from tailrace.trainer.fitting.fit_progress import Progress


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes of a fit up to its checkpoint.

    Args:
        dataset: the dataset.
        progress: the progress of the fit.
        position: its position in the dataset.
    """

    dataset: Any
    progress: Progress
    position: Mapping[str, Any]

    @property
    def known(self) -> bool:
        """Whether the checkpoint says how they began: not for `tr.batches`, nor of earlier versions."""
        return "first" in self.position

    @property
    def between(self) -> bool:
        """Whether the next pass has not begun."""
        return bool(self.progress.epochs) and self.progress.steps == self.progress.epoch_start

    @property
    def again(self) -> int:
        """The passes to read again."""
        stored = as_dataset(self.dataset).pure or "source" in self.position
        return 0 if stored or not self.known else self.progress.epochs

    @property
    def is_there(self) -> bool:
        """Whether `set_out` is all there is to do: a whole pass that need not be read again."""
        return self.known and self.between and not self.again and "source" not in self.position

    def set_out(self) -> None:
        """Put random numbers and counters where they were; the dataset is opened after that."""
        if not self.known:
            return
        first, began = self.position["first"], self.position["began"]
        if self.again:
            self._put(first)
        elif self.is_there:
            self._put({**first, **began, **self.position["now"]})
        else:
            self._put({**first, **began})

    def bring(self, feed: InfeedQueue) -> None:
        """Bring a feed of the dataset, which was opened after `set_out`, to the position."""
        if not self.known:
            self._bring_as_before(feed)
            return
        position, progress = self.position, self.progress
        everything = {**position["first"], **position["began"], **position["now"]}
        feed.go_on_from(position)
        if self.again:
            feed.pass_by(self.dataset, self.again, progress.first_epoch)
            self._put(everything if self.between else {**position["first"], **position["began"]})
        if self.is_there or (self.between and self.again):
            return
        before = loader_state(as_dataset(self.dataset).origin)
        feed.set_state(position)
        if self.between or position["ended"]:
            feed.drain()
            self._put(everything)
        else:
            # What reading draws from has drawn again what it drew. Of the rest, callbacks may have
            # drawn; and they may have counted.
            drawn = changed(loader_state(as_dataset(self.dataset).origin), before)
            self._put({n: v for n, v in position["now"].items() if n not in drawn})
        if self.between:
            feed.restart(self.dataset, progress.epoch)

    def _put(self, state: Mapping[str, Any]) -> None:
        put_loader_state(as_dataset(self.dataset).origin, state)

    def _bring_as_before(self, feed: InfeedQueue) -> None:
        """`tr.batches` needs a position. Earlier versions began each pass, and read one element."""
        begun = self.progress.epochs - self.between
        again = begun + bool(self.progress.first_epoch)
        source = as_dataset(self.dataset)
        if source.fast is None and source.restartable and "source" not in self.position:
            feed.begin_passes(self.dataset, again - 1)
        if again and source.restartable:
            feed.restart(self.dataset, self.progress.first_epoch + begun)
        feed.set_state(self.position)
