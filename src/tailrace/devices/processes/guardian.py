"""A process that terminates others when their launcher is gone, however it ended.

Run as a script, without imports that take time: it reads lines from its standard input, `+PID` for a
process group to guard and `-PID` for one that has ended. When its input is closed without a last line
`done`, it terminates the remaining groups.
"""

import contextlib
import os
import signal
import sys
import time

GRACE_S = 2.0
"""How long they may take to exit after SIGTERM."""


def guard() -> None:
    """Read until the end, then act."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles interrupts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    groups: set[int] = set()
    # The end of the input is the signal: the system closes the pipe however the launcher ended, by
    # SIGKILL too.
    for line in sys.stdin:
        if line.strip() == "done":
            return
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for number, wait in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        time.sleep(wait)


if __name__ == "__main__":
    guard()
