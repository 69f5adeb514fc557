"""Errors of the PyTorch front end; all of them are `tr.TailraceError`."""

from __future__ import annotations

from tailrace.errors import ProgramError


class UsageError(ProgramError, AssertionError):
    """A model is used in a way that it does not allow.

    Also an AssertionError, because ported programs expect one.
    """


class CallError(ProgramError, TypeError):
    """A call does not fit the compiled model."""


class WrappedError(ProgramError, RuntimeError):
    """A module is wrapped for training already."""
