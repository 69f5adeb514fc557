"""Which line of a program an error comes from, also where the line was rewritten."""

from __future__ import annotations

import traceback

from tailrace.jaxprs.internals import is_library

WRITTEN: dict[tuple[str, int], tuple[str, int]] = {}
"""Lines of rewritten functions, and the user's lines that they were made from."""


def user_line(error: BaseException) -> str:
    """Where the user's code was when an error was raised: `, at file:line`; empty if nowhere."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno or 0) for frame in frames]
    lines = [place for place in places if not _is_foreign(place[0])]
    if not lines:
        return ""
    # The innermost line of the user: the one to change.
    name, number = _written(*lines[-1])
    return f", at {name}:{number}"


def _written(path: str, number: int) -> tuple[str, int]:
    """The user's line that a line was made from; lines that rewriting adds belong to the one before."""
    before = [line for name, line in WRITTEN if name == path and line <= number]
    return WRITTEN[path, max(before)] if before else (path, number)


def _is_foreign(path: str) -> bool:
    return is_library(path) or "site-packages" in path
