"""Waiting in tests: for a condition, with a limit that only a broken program reaches."""

import time

from verdicts import Hang

LIMIT_S = 300.0
"""Any machine is fast enough for this, however much else it does."""


def wait_until(condition, what):
    """Return when `condition()` is true; fail with `what` if it does not become so."""
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise Hang(what)
        time.sleep(0.01)


class Clock:
    """A clock that stops until a test advances it; in place of a module's `time`.

    Its `sleep` sleeps, so that a loop that looks at the clock leaves the processor to others.
    """

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def perf_counter(self):
        return self.now

    def perf_counter_ns(self):
        return round(self.now * 1e9)

    def sleep(self, seconds):
        time.sleep(seconds)
