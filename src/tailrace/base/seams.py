"""Seams: undocumented behaviour of other packages that we rely on, each with a probe.

A release of such a package may change any of it without notice. A probe is a small use of the seam; if
it fails, the user gets one sentence that says what has changed and which versions fit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

from tailrace._version import __version__
from tailrace.errors import VersionError


@dataclasses.dataclass(frozen=True)
class Seam:
    """One behaviour that we rely on.

    Attributes:
        name: its name, as the subject of "... has changed" or "... have changed".
        used_for: the features that depend on it.
        probe: a small use of it that returns true if it holds; it may also raise.
        late: whether to probe it only when it is used (and by `tailrace doctor`), because it is slow.
    """

    name: str
    used_for: str
    probe: Callable[[], object]
    late: bool = False

    def holds(self) -> bool:
        """Whether the seam holds.

        >>> Seam("addition", "sums", lambda: 1 + 1 == 2).holds()
        True
        """
        try:
            return bool(self.probe())
        except Exception:  # a changed interface may raise anything
            return False


@dataclasses.dataclass(frozen=True)
class Package:
    """A package with seams: its installed version, and the newest one tested."""

    title: str
    name: str
    version: str
    newest: str

    def unknown(self, what: str) -> VersionError:
        """The error for a seam that has changed.

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
        """Raise an error for the first seam that does not hold."""
        for seam in seams:
            if not seam.holds():
                raise self.unknown(seam.name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
