"""Compiled programs of this process, looked up by their lowered text.

Two trainers of the same model, or two calls of `evaluate` with the same lambda written twice, lower to
the same text. Compiling takes seconds to minutes and comparing milliseconds, so each program is
compiled once. Whatever is not in the text is part of the key: the devices, the compiler options, and
the trees of arguments and results.

Between processes, JAX's compilation cache does the same: `TAILRACE_CACHE=dir`.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

import jax

from tailrace.program.compiling.kernel_choices import compiled

MOST = 32
"""The number of recently used programs to keep; older ones live as long as their owners."""

_kept: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


def compiled_program(
    lowered: jax.stages.Lowered,
    devices: tuple[int, ...],
    options: dict[str, Any] | None,
    platform: str,
) -> tuple[Any, bool]:
    """The executable of a lowered program, and whether it was reused."""
    text = lowered.as_text()
    if "callback" in text:  # it calls back into Python, which the text does not show
        return compiled(lowered, options, platform), False
    trees = f"{lowered.in_tree}{lowered.out_tree}"
    said = f"{text}{trees}{devices}{sorted((options or {}).items())}"
    key = hashlib.sha256(said.encode()).hexdigest()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key], True
    # Outside the lock: two threads may compile the same program at once, which costs less than making
    # all others wait.
    program = compiled(lowered, options, platform)
    with _lock:
        _kept[key] = program
        # The oldest first: a sweep of many models would otherwise keep all of them alive.
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    return program, False


def forget_programs() -> None:
    """Release all programs that nothing else uses."""
    with _lock:
        _kept.clear()
