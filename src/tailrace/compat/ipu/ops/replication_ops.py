"""Which replica this is."""

from __future__ import annotations

from typing import Any

from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import replica


def replication_index(name: str | None = None) -> Any:
    """The number of the replica that computes, from 0, as an int32 scalar.

    Args:
        name: without effect.

    Raises:
        ProgramError: it is called outside a program.

    >>> from tailrace.compat import ipu
    >>> ipu.ipu_compiler.compile(lambda: ipu.ops.replication_ops.replication_index())()[0].item()
    0
    """
    del name
    return replica()


__getattr__, __dir__ = missing_from(__name__)
