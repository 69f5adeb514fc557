"""How much work a call is, counted: the same on every machine, however busy."""

import sys


def calls_of(function):
    """The calls of Python and C functions in one call of `function`, in this thread."""
    count = 0

    def note(frame, event, about):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
