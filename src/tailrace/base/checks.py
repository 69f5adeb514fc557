"""Checks of arguments: numbers with a lower limit, flags, and choices among names."""

import difflib
import enum
import math
import numbers
from typing import Any, TypeGuard, TypeVar, cast

from tailrace.errors import DataError, OptionError, TailraceError

Choice = TypeVar("Choice", bound=enum.StrEnum)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number, Python's or numpy's, and no truth value.

    >>> import numpy as np
    >>> is_whole(np.int64(3)), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    # NumPy's are registered there; NumPy itself is not loaded for the help of a command.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(
    name: str,
    value: object,
    *,
    at_least: int | None = None,
    error: type[TailraceError] = DataError,
    more: str = "",
) -> int:
    """A whole number, Python's or numpy's, within the limit; or an error that names it.

    Args:
        name: the name of the argument.
        value: its value.
        at_least: the smallest allowed value; None for no limit.
        error: the error class to raise.
        more: another allowed value, or what to change; it ends the sentence of the rule.

    >>> import numpy as np
    >>> check_count("epochs", np.int64(2), at_least=1)
    2
    """
    if is_whole(value) and (at_least is None or value >= at_least):
        # A plain int: NumPy's would overflow in products, and JSON does not take it.
        return int(value)
    limit = "" if at_least is None else f" >= {at_least}"
    raise error(f"{name} must be a whole number{limit}{more}. Received: {name}={value!r}.")


def check_seed(seed: object) -> int:
    """The seed of random keys: a whole number, Python's or numpy's.

    >>> import numpy as np
    >>> check_seed(np.uint32(7))
    7
    """
    return check_count("seed", seed, error=OptionError)


def check_flag(name: str, value: object, *, error: type[TailraceError] = DataError) -> bool:
    """True or False, Python's or numpy's, or as 1 and 0; or an error that names it.

    >>> import numpy as np
    >>> check_flag("shuffle", np.bool_(False))
    False
    """
    # 0 and 1 are flags too; any other number is more likely a misplaced count.
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    import numpy as np

    if isinstance(value, np.bool_):
        return bool(value)
    raise error(f"{name} is True or False. Received: {name}={value!r:.80}.")


def check_number(
    name: str,
    value: object,
    *,
    at_least: float | None = 0.0,
    positive: bool = False,
    error: type[TailraceError] = DataError,
) -> float:
    """A finite number, Python's or numpy's, within the limit; or an error that names it.

    Args:
        name: the name of the argument.
        value: its value.
        at_least: the smallest allowed value; None for no limit.
        positive: whether the value must be larger than that.
        error: the error class to raise.

    >>> import numpy as np
    >>> check_number("timeout_s", np.float32(2))
    2.0
    """
    least = float("-inf") if at_least is None else at_least
    plain = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number: Any = value if plain else None
    if plain and (number > least if positive else number >= least):
        # Python's integers have no limit: one of 400 digits is finite, but no float.
        try:
            if math.isfinite(float(number)):
                return float(number)
        except OverflowError:
            pass
    limit = f" greater than {least:g}" if positive else f" of at least {least:g}"
    limit = " that is finite" if at_least is None else limit
    raise error(f"{name} is a number{limit}. Received: {name}={value!r:.80}.")


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
