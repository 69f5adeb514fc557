"""Processes monitor each other: if one falls silent, the others name it and exit.

A process that is stopped, or whose machine is gone, keeps all others waiting inside a collective,
where no Python runs. So each of them regularly reports from a thread that it is alive, and checks the
others' reports.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from tailrace.devices.processes.meeting import Client

THREAD = "tailrace-heartbeat"
_PREFIX = "tailrace/alive/"
_MOST_PAUSE_S = 10.0
"""The longest time between two reports."""
_LAST_S = 2.0
"""How much longer the coordinator stays: without it, the others would exit without a message."""


class Heartbeat:
    """The signs of life of one process, and its view of the others.

    Args:
        client: a client of JAX's coordination service.
        here: the index of this process.
        count: the number of processes.
        limit_s: how long a process may be silent.
        has_left: whether a process has exited normally; it is not waited for.
        end: called with a message when a process is given up.
    """

    def __init__(
        self,
        client: Client,
        here: int,
        count: int,
        limit_s: float,
        has_left: Callable[[int], bool],
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._client, self._here, self._count, self._limit_s = client, here, count, limit_s
        self._has_left, self._end = has_left, end or self._leave
        # Several reports within the limit: one that is lost or late must not end a program.
        self._pause = min(_MOST_PAUSE_S, limit_s / 8)
        now = time.monotonic()
        self._last_signs = {number: ("", now) for number in range(count) if number != here}
        self._answered = now
        self._ended = threading.Event()

    def start(self) -> None:
        """Start two threads: one exchanges reports and may block; the other one watches the first."""
        for work in (self._talk, self._look):
            threading.Thread(target=work, name=THREAD, daemon=True).start()

    def stop(self) -> None:
        """Stop both threads."""
        self._ended.set()

    def _talk(self) -> None:
        number = 0
        while not self._ended.wait(self._pause):
            number += 1
            with contextlib.suppress(RuntimeError):  # no answer: `_look` notices
                self.beat(number)

    def beat(self, number: int) -> None:
        """Report that this process is alive, and read the others' reports."""
        # A count, not a time: clocks of machines differ, and only a change of the value matters.
        self._client.key_value_set(f"{_PREFIX}{self._here}", str(number), allow_overwrite=True)
        signs = dict(self._client.key_value_dir_get(_PREFIX))
        now = time.monotonic()
        for other, (before, _) in self._last_signs.items():
            text = signs.get(f"{_PREFIX}{other}", "")
            if text != before or self._has_left(other):
                self._last_signs[other] = (text, now)
        self._answered = now

    def _look(self) -> None:
        woken = time.monotonic()
        while not self._ended.wait(self._pause / 2):
            now = time.monotonic()
            # This process was itself stopped, or starved: all others look silent. Otherwise a laptop
            # that slept, or a debugger, would end all processes on waking.
            if now - woken > self._limit_s / 2:
                self._last_signs = {
                    other: (text, now) for other, (text, _) in self._last_signs.items()
                }
                self._answered = now
            woken = now
            sentence = self.silent(now)
            if sentence:
                self._ended.set()
                self._end(sentence)

    def silent(self, now: float) -> str | None:
        """A message if a process has been silent for too long."""
        if now - self._answered > self._limit_s:
            return (
                f"tailrace: process 0 of {self._count}, the coordinator, has not answered for "
                f"{self._limit_s:g} seconds: it is stopped, dead or cut off. Process {self._here} ends."
            )
        # Up to the last answer, not up to now: without answers of the coordinator all others look
        # silent, and one whose latest report was due would be named in its place.
        heard = self._answered
        late = [other for other, (_, at) in self._last_signs.items() if heard - at > self._limit_s]
        if not late:
            return None
        named = ", ".join(map(str, sorted(late)))
        which = f"process {named} has been" if len(late) == 1 else f"processes {named} have been"
        return (
            f"tailrace: {which} silent for {self._limit_s:g} seconds, of {self._count} that run "
            f"together: stopped, dead or cut off. Process {self._here} ends: it would wait for ever. "
            f"If they are only slow, raise heartbeat_s and timeout_s in tr.distributed.initialize."
        )

    def _leave(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)
        if self._here == 0:
            time.sleep(_LAST_S)
        # The main thread is blocked inside a collective: nothing else would end it.
        os._exit(1)
