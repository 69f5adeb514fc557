"""Processes watch each other while they run: one that falls silent is named, and ends the others.

Inside a collective nobody listens: a process that is stopped, or whose machine is gone, keeps all
others waiting there, where no Python runs. So each of them says every so often, from a thread, that it
is alive, and looks at what the others say.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

THREAD = "tailrace-heartbeat"
_PREFIX = "tailrace/alive/"
_MOST_PAUSE_S = 10.0
_LAST_S = 2.0
"""How much longer the coordinator stays: without it, the others would end without a sentence."""


class Heartbeat:
    """The signs of life of one process, and its view of the others.

    Args:
        client: JAX's coordination service, as a client sees it.
        here: which process this is.
        count: how many there are.
        limit_s: who is silent for longer is given up.
        has_left: whether a process has ended in an orderly way; it is not waited for.
        end: what to do when one is given up, with the sentence.
    """

    def __init__(
        self,
        client: Any,
        here: int,
        count: int,
        limit_s: float,
        has_left: Callable[[int], bool],
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._client, self._here, self._count, self._limit_s = client, here, count, limit_s
        self._has_left, self._end = has_left, end or self._leave
        self._pause = min(_MOST_PAUSE_S, limit_s / 8)
        now = time.monotonic()
        self._heard = {number: ("", now) for number in range(count) if number != here}
        self._answered = now
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin, in two threads: one talks, and may be kept waiting; the other one looks at it."""
        for work in (self._talk, self._look):
            threading.Thread(target=work, name=THREAD, daemon=True).start()

    def stop(self) -> None:
        """End both threads."""
        self._ended.set()

    def _talk(self) -> None:
        number = 0
        while not self._ended.wait(self._pause):
            number += 1
            with contextlib.suppress(RuntimeError):  # it is not answered: `_look` sees that
                self.beat(number)

    def beat(self, number: int) -> None:
        """Say that this process is alive, and hear the others."""
        self._client.key_value_set(f"{_PREFIX}{self._here}", str(number), allow_overwrite=True)
        said = dict(self._client.key_value_dir_get(_PREFIX))
        now = time.monotonic()
        for other, (before, _) in self._heard.items():
            text = said.get(f"{_PREFIX}{other}", "")
            if text != before or self._has_left(other):
                self._heard[other] = (text, now)
        self._answered = now

    def _look(self) -> None:
        woken = time.monotonic()
        while not self._ended.wait(self._pause / 2):
            now = time.monotonic()
            if now - woken > self._limit_s / 2:  # this process itself was stopped, or starved
                self._heard = {other: (text, now) for other, (text, _) in self._heard.items()}
                self._answered = now
            woken = now
            sentence = self.silent(now)
            if sentence:
                self._ended.set()
                self._end(sentence)

    def silent(self, now: float) -> str | None:
        """What to say if somebody was not heard of for too long."""
        if now - self._answered > self._limit_s:
            return (
                f"tailrace: process 0 of {self._count}, the coordinator, has not answered for "
                f"{self._limit_s:g} seconds: it is stopped, dead or cut off. Process {self._here} ends."
            )
        late = [other for other, (_, at) in self._heard.items() if now - at > self._limit_s]
        if not late:
            return None
        named = ", ".join(map(str, sorted(late)))
        which = f"process {named} was" if len(late) == 1 else f"processes {named} were"
        return (
            f"tailrace: {which} not heard of for {self._limit_s:g} seconds, of {self._count} that run "
            f"together: stopped, dead or cut off. Process {self._here} ends: it would wait for ever. "
            f"If they are only slow, raise heartbeat_s and timeout_s in tr.distributed.initialize."
        )

    def _leave(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)
        if self._here == 0:
            time.sleep(_LAST_S)
        # The main thread waits inside a collective: nothing but this ends it.
        os._exit(1)
