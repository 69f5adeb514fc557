"""`tailrace watch RUN`: `show`, repeated while the run grows."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tailrace.page.followed import FollowedRun
from tailrace.page.terminal.show import pictured

if TYPE_CHECKING:
    from rich.console import Console

POLL_S = 0.5

INTERRUPTED = (
    "The run was interrupted: the process that wrote it has ended, and its fit has not. What was "
    "written until then is there; a fit that had checkpoint= resumes when its script is started again."
)


def watch(directory: str, console: Console | None = None, poll_s: float = POLL_S) -> None:
    """Show a run until it ends or its writer is gone, or until Ctrl-C.

    Args:
        directory: the run; it may not have begun yet, if the directory exists.
        console: the console; None for the terminal.
        poll_s: the time between checks, in seconds.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console() if console is None else console
    followed = FollowedRun(directory)
    # By os.path: pathlib raises what the system says of a name that is too long.
    if not os.path.isdir(followed.directory):
        followed.readable()  # raises: a missing directory is a typing error, not a run to come
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        seen = -1
        while True:
            if followed.version != seen:
                seen = followed.version
                # Asked before the picture is made: a writer that dies in between is found by the
                # next look, so the last picture is always one of a run that is over.
                is_over = _is_over(followed)
                live.update(pictured(followed, console.width, brief=True), refresh=True)
                if is_over:
                    break
            time.sleep(poll_s)
            followed.look()
    if followed.run is not None and not followed.run.is_ended:
        console.print(INTERRUPTED, highlight=False)


def _is_over(followed: FollowedRun) -> bool:
    run = followed.run
    return run is not None and not followed.problem and (run.is_ended or run.is_interrupted is True)
