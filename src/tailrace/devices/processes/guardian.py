"""A process that terminates others when their launcher is gone, however it ended.

Run as a script, without imports that take time: it reads lines from its standard input, `+PID` for a
process group to guard and `-PID` for one that has ended. When its input is closed without a last line
`done`, it terminates the remaining groups, and kills what is left of them after the
seconds of its argument.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

_POLL_S = 0.1


def guard(grace_s: float) -> None:
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
    # The leaders alone, as the launcher does: a loader that dies would fail a save.
    for group in groups:
        _send(os.kill, group, signal.SIGTERM)
    give_up = time.monotonic() + grace_s
    while groups:
        late = time.monotonic() >= give_up
        for group in sorted(groups):
            # With its leader gone, what its script has started goes too, now: the system may reuse
            # the number later.
            if late or not _send(os.kill, group, 0):
                _send(os.killpg, group, signal.SIGKILL)
                groups.discard(group)
        time.sleep(_POLL_S)


def _send(send: Callable[[int, int], None], to: int, number: int) -> bool:
    """Whether it could be sent: whether there is such a process or group."""
    try:
        send(to, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    guard(float(sys.argv[1]))
