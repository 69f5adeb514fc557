"""Compiled programs of this process, found again by what they compute.

Two trainers of the same model, or two calls of `evaluate` with a lambda written twice, lower to the
same program, letter for letter. Compiling takes seconds to minutes and comparing milliseconds, so
each program is compiled once. What is not in the text of a program is part of the key: the devices,
the compiler's options, and the trees of arguments and results.

Between processes JAX's own compilation cache does the same: `TAILRACE_CACHE=dir`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

from tailrace.program.running.kernel_choices import compiled

MOST = 32
"""Programs kept, the latest used ones; beyond, only their owners keep them alive."""

_kept: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


def compiled_program(
    lowered: Any, devices: tuple[int, ...], options: dict[str, str] | None, platform: str
) -> tuple[Any, bool]:
    """The executable of a lowered program, and whether it existed already."""
    text = lowered.as_text()
    if "callback" in text:  # it calls Python of its own, which the text does not show
        return compiled(lowered, options, platform), False
    trees = f"{lowered.in_tree}{lowered.out_tree}"
    said = f"{text}{trees}{devices}{sorted((options or {}).items())}"
    key = hashlib.sha256(said.encode()).hexdigest()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key], True
    program = compiled(lowered, options, platform)
    with _lock:
        _kept[key] = program
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    return program, False


def forget_programs() -> None:
    """Let go of all programs that nothing else uses."""
    with _lock:
        _kept.clear()
