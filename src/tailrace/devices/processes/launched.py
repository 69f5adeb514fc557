"""What a process says to the `tailrace launch` that has started it."""

from __future__ import annotations

import contextlib
import os

CHANNEL = "TAILRACE_CHANNEL"
"""The environment variable with a pipe to the launcher, set in each of its processes: its number there,
and the number by which the system knows it."""


def name_of_channel(handle: int) -> str:
    """The value of `CHANNEL` for a pipe."""
    return f"{handle}:{os.fstat(handle).st_ino}"


def is_launched() -> bool:
    """Whether this process runs under `tailrace launch`, which then decides how long it may take."""
    return _channel() is not None


def tell_launcher(what: str) -> None:
    """Say what this process has done, in a few words; without a launcher, nothing happens."""
    channel = _channel()
    if channel is not None:
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(channel, f"{what}\n".encode())


def _channel() -> int | None:
    handle, colon, _ = os.environ.get(CHANNEL, "").partition(":")
    if not (colon and handle.isascii() and handle.isdigit()):
        return None
    # A program that the script has started inherits the variable, and not the pipe: there the number
    # may be that of any file.
    with contextlib.suppress(OSError, OverflowError):
        if name_of_channel(int(handle)) == os.environ[CHANNEL]:
            return int(handle)
    return None
