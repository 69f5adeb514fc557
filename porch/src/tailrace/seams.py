"""Seams: what we rely on of another package beyond its documented interface, each with a probe.

A release of that package may change any of it without a word. A probe is a small use of the seam; where
it fails, the reader gets one sentence that says what has changed and which versions go together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

from tailrace._version import __version__
from tailrace.errors import VersionError


@dataclasses.dataclass(frozen=True)
class Seam:
    """One thing relied on.

    Attributes:
        name: what it is, as the subject of "... has changed" or "... have changed".
        used_for: what would not work without it.
        probe: a small use of it, true if it is as we know it; it may raise as well.
        late: probed only where it is used (and by `tailrace doctor`), because it is slow to reach.
    """

    name: str
    used_for: str
    probe: Callable[[], object]
    late: bool = False

    def holds(self) -> bool:
        """Whether the seam is as we know it.

        >>> Seam("addition", "sums", lambda: 1 + 1 == 2).holds()
        True
        """
        try:
            return bool(self.probe())
        except Exception:  # whatever a changed interface raises
            return False


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that we know from its inside: its version here, and the newest one tried."""

    title: str
    name: str
    version: str
    newest: str

    def unknown(self, what: str) -> VersionError:
        """The one sentence for a seam that has changed.

        >>> found = Package("JAX", "jax", "0.14.1", "0.12.0.1").unknown("scan's parameters")
        >>> str(found).partition(": ")[2]
        "scan's parameters have changed; use jax<0.14 or a newer Tailrace."
        """
        head = re.split(r" (?:of|to|that|and) ", what)[0]
        plural = head.endswith("s") and not head.endswith("ss")
        verb = "have" if plural else "has"
        return VersionError(
            f"Tailrace {__version__} does not know {self.title} {self.version}: {what} {verb} "
            f"changed; use {self.name}{self._older()} or a newer Tailrace."
        )

    def _older(self) -> str:
        here, tried = (_numbers(text)[:2] for text in (self.version, self.newest))
        return f"<{'.'.join(map(str, here))}" if here > tried else f"=={self.newest}"

    def check(self, seams: Iterable[Seam]) -> None:
        """Raise the sentence for the first seam that does not hold."""
        for seam in seams:
            if not seam.holds():
                raise self.unknown(seam.name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
