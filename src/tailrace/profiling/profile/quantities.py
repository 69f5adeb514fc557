"""Times and counts as text, in a unit that suits their size."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """Seconds in a unit that suits their size.

    >>> time_text(0.00213), time_text(2.5e-6)
    ('2.13 ms', '2.5 us')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def count_text(number: float) -> str:
    """A number with a prefix.

    >>> count_text(2.1e9), count_text(12)
    ('2.1 G', '12 ')
    """
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "
