"""Messages to log once: a decision made for the user, an option without effect.

Notes go through the standard logger `tailrace`; `logging.getLogger("tailrace").setLevel(...)`
silences them. Errors are never notes.
"""

import logging
from collections.abc import Sequence

logger = logging.getLogger("tailrace")

_said: set[str] = set()


def note_once(text: str, *, key: str | None = None) -> None:
    """Log `text` as a warning, the first time that `key` (the text itself if not given) is seen."""
    key = text if key is None else key
    if key not in _said:
        _said.add(key)
        logger.warning(text)


def forget_notes() -> None:
    """Log every message again from now on (used between tests)."""
    _said.clear()


def shown(text: str) -> str:
    """A name from a file or a user, safe to print: unprintable characters are escaped.

    >>> print(shown("grad/w"), shown("evil\\x1b[2J\\nname"))
    grad/w evil\\x1b[2J\\nname
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count and its noun.

    >>> counted(1, "step"), counted(4, "step"), counted(2, "pass", "passes")
    ('1 step', '4 steps', '2 passes')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def listed(texts: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """The first few of some texts, and how many more there are.

    >>> listed(["w", "b"]), listed(["w", "b", "c", "d"], 2)
    ('w, b', 'w, b and 2 more')
    >>> listed(["w: 1", "b: 2", "c: 3"], 2, "; ")
    'w: 1; b: 2 and 1 more'
    """
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def there_are(count: int) -> str:
    """How many there are, as the end of a sentence.

    >>> there_are(1), there_are(4)
    ('there is 1', 'there are 4')
    """
    return f"there {'is' if count == 1 else 'are'} {count}"


def size_text(count: float) -> str:
    """A number of bytes as readable text.

    >>> size_text(512), size_text(1_500_000)
    ('512 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError
