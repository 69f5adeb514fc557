"""A step of training that a session runs: a program of its own, with what the session feeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.compat.ipu.strategy.calls import Calls
from tailrace.compat.tensorflow.v1.deferred import Deferred, Feed


class TrainingOperation(Deferred):
    """What `minimize` of a loss that is computed from placeholders returns.

    Args:
        loss: the loss.
        minimize: called with its value, in a program.
    """

    def __init__(self, loss: Deferred, minimize: Callable[[Any], Any]) -> None:
        super().__init__(self._run, "minimize")
        self._loss, self._minimize = loss, minimize
        self._calls = Calls(one_device=True)
        self._step = self._in_program  # one object: programs are found by it

    def _run(self, feed: Feed) -> None:
        self._calls(self._step, [list(feed.fed.values())], {"keys": tuple(feed.fed)})

    def _in_program(self, values: list[Any], keys: tuple[int, ...]) -> Any:
        feed = Feed(zip(keys, values, strict=True))
        loss = self._loss.value(feed)
        self._minimize(loss)
        return loss
