"""Things worth saying once: a decision taken for the user, an option that has no effect here.

Notes go through the standard logger `tailrace`; `logging.getLogger("tailrace").setLevel(...)`
silences them. Errors are never notes.
"""

import logging

logger = logging.getLogger("tailrace")

_said: set[str] = set()


def note_once(text: str, *, key: str | None = None) -> None:
    """Log `text` as a warning, the first time that `key` (the text itself if not given) is seen."""
    key = text if key is None else key
    if key not in _said:
        _said.add(key)
        logger.warning(text)


def forget_notes() -> None:
    """Say everything again from now on (used between tests)."""
    _said.clear()


def shown(text: str) -> str:
    """A name that came from a file or from a user, safe to print: what does not print is escaped.

    >>> print(shown("grad/w"), shown("evil\\x1b[2J\\nname"))
    grad/w evil\\x1b[2J\\nname
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size_text(count: float) -> str:
    """Bytes for people.

    >>> size_text(512), size_text(1_500_000)
    ('512 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError
