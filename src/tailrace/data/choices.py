"""Choices among names: enums whose members users write as strings."""

import difflib
import enum
from typing import TypeVar, cast

from tailrace.errors import OptionError, TailraceError

Choice = TypeVar("Choice", bound=enum.StrEnum)


def member_of(kind: type[Choice], value: object) -> Choice:
    """`kind(value)`, for a value of any type.

    Python compares a value that it cannot hash with each member; with an array, numpy would refuse to
    say whether it is equal.
    """
    return kind(value) if isinstance(value, str) else cast(Choice, kind._missing_(value))


def member_named(
    kind: type[Choice],
    value: object,
    what: str,
    *,
    also: str = "",
    error: type[TailraceError] = OptionError,
) -> Choice:
    """The member of an enum that a string names, in upper or lower case; or an error that lists them.

    For `_missing_` of enums that users name members of: Python's error would say that something "is not
    a valid" one, and not which are.

    Args:
        kind: the enum.
        value: what was given.
        what: the name of the argument, or what a member is: the start of the sentence of the rule.
        also: what else is allowed; it ends that sentence.
        error: the error class to raise.

    >>> class Split(enum.StrEnum):
    ...     TRAIN = "train"
    ...     TEST = "test"
    >>> member_named(Split, " Test", "split")
    <Split.TEST: 'test'>
    >>> member_named(Split, "all", "split")
    Traceback (most recent call last):
    tailrace.errors.OptionError: split is one of 'train', 'test'. Received: split='all'.
    """
    given = value.strip().lower() if isinstance(value, str) else ""
    names = [member.value for member in kind]
    if given in names:
        return kind(given)
    received = f"{what}={value!r}" if what.isidentifier() else repr(value)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(map(repr, names))
    raise error(f"{what} is one of {listed}{also}. Received: {received}.{hint}")
