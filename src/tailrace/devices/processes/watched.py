"""One process under `tailrace launch`: its output, its end, and what it says of itself."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from tailrace.devices.processes.launched import CHANNEL, name_of_channel
from tailrace.errors import DistributedError

LINES = 20
"""The number of last lines to show of a failed process."""

AT_ONCE_S = 2.0
"""How long processes may take to exit where nothing is left for them to save."""

_MOST_BYTES = 4096
"""The most bytes of what a process says of itself."""


class Watched:
    """One process: its output is passed on, each line prefixed with the process's index."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int] = (),
    ) -> None:
        self.number = number
        self._ended_at = math.inf
        self._said, self._channel = "", -1
        self._killed = False
        self.last: deque[str] = deque(maxlen=LINES)
        theirs = -1
        try:
            self._channel, theirs = os.pipe()
            self.process = subprocess.Popen(
                command,
                env={**environment, CHANNEL: name_of_channel(theirs)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                # A process group of its own: a signal to the launcher's group must not reach it
                # twice, and what its script has started can be ended with it.
                start_new_session=True,
                pass_fds=[*files, theirs],
            )
        except OSError as error:
            self.close()
            raise DistributedError(
                f"Process {number} cannot be started: {error.strerror}. Start fewer (-n), or raise "
                f"the limit of processes and open files."
            ) from error
        finally:
            if theirs >= 0:
                os.close(theirs)
        os.set_blocking(self._channel, False)
        self._waiter = threading.Thread(
            target=self._note_end, name=f"tailrace-waiter-{number}", daemon=True
        )
        self._waiter.start()
        assert self.process.stdout is not None
        self._reader = threading.Thread(
            target=self._pass_on, args=(self.process.stdout,), daemon=True
        )
        self._reader.start()

    def _note_end(self) -> None:
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return
        # Not reaped here: until `poll` reports it, the system keeps its pid for it.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._ended_at = time.monotonic()

    def ended_at(self) -> float:
        """When it ended; the same for all where the system does not tell."""
        self._waiter.join(timeout=AT_ONCE_S)
        return self._ended_at

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def said(self) -> str:
        """What it has said of itself (`launched.tell_launcher`): the latest line; or nothing."""
        if self._channel >= 0:
            with contextlib.suppress(OSError):  # nothing there
                text = os.read(self._channel, _MOST_BYTES).decode(errors="replace")
                lines = [line for line in text.splitlines() if line.isprintable()]
                self._said = lines[-1] if lines else self._said
        return self._said

    @property
    def how(self) -> str:
        """How it has ended."""
        code = self.process.returncode
        ended = f"ended with code {code}"
        with contextlib.suppress(ValueError):
            ended = f"was ended by {signal.Signals(-code).name}"
        if self._killed:
            ended = "did not end, and was killed"
        return f"{self.said} and {ended}" if self.said else ended

    def _pass_on(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self.last.append(line.rstrip("\n"))
                # Process 0 has no prefix: its lines are those that a single process would print.
                sys.stdout.write(line if self.number == 0 else f"[{self.number}] {line}")
                sys.stdout.flush()

    def finish_reading(self, give_up: float) -> None:
        """Wait until its last output has been passed on, up to a time of the monotonic clock."""
        self._reader.join(timeout=max(0.0, give_up - time.monotonic()))

    def close(self) -> None:
        """Read what it said last, and close the channel."""
        if self._channel >= 0:
            self._said = self.said
            os.close(self._channel)
            self._channel = -1

    def ask(self, number: int) -> None:
        """Send a signal to it alone: helpers of its script, such as loaders, are its own to end."""
        if self.code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it and all that its script has started, if any of it is left."""
        self._killed = self._killed or self.code is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(AT_ONCE_S)  # with a limit: it may hang in the kernel


def end(
    watched: Sequence[Watched],
    number: int,
    within_s: float,
    hurried: Callable[[], bool] = lambda: False,
    pause: Callable[[], None] = lambda: time.sleep(0.02),
) -> None:
    """Ask processes with a signal to end, together; after `within_s` seconds they are killed.

    Args:
        watched: the processes.
        number: the signal.
        within_s: how long they may take.
        hurried: whether they are to end at once after all.
        pause: what to do between two looks.
    """
    for one in watched:
        one.ask(number)
    give_up = time.monotonic() + within_s
    hurrying = False
    while any(one.code is None for one in watched) and time.monotonic() < give_up:
        if not hurrying and hurried():
            hurrying, give_up = True, min(give_up, time.monotonic() + AT_ONCE_S)
            for one in watched:
                one.ask(number)
        pause()
    for one in watched:
        one.kill()
