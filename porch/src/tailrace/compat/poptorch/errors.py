"""The errors of the original."""

from __future__ import annotations

from tailrace.errors import TailraceError as Error


class RecoverableError(Error):
    """What the original raises when the chip must be reset; nothing here does."""

    recovery_action = ""


class UnrecoverableError(Error):
    """What the original raises when the chip is broken; nothing here does."""
