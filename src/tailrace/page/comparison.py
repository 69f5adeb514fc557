"""`tailrace compare A B`: two runs, or two profiles, side by side, largest difference first."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tailrace.base.messages import shown
from tailrace.page.curves import trained
from tailrace.page.followed import FollowedRun
from tailrace.page.summary import number, what_ran
from tailrace.profiling.profile.profile import Profile
from tailrace.profiling.profile.quantities import time_text
from tailrace.runs.profiles import read_profile


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of a comparison.

    Attributes:
        what: its name.
        first: the value of the first, as text.
        second: the value of the second.
        difference: their difference, as text.
        size: the size of the difference, by which rows are sorted.
    """

    what: str
    first: str
    second: str
    difference: str
    size: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side; prints as tables.

    Attributes:
        names: the names of the two.
        tables: rows by heading, largest difference first.
    """

    names: tuple[str, str]
    tables: dict[str, list[Line]]

    def __str__(self) -> str:
        parts = [self._table(title, lines) for title, lines in self.tables.items() if lines]
        return "\n\n".join(parts) if parts else "There is nothing to compare in these two."

    def _table(self, title: str, lines: list[Line]) -> str:
        first, second = self.names
        head = Line(title, shown(first), shown(second), "difference", 0.0)
        rows = [(one.what, one.first, one.second, one.difference) for one in [head, *lines]]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  "
            + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        )


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Compare two run directories, or two files of `Profile.save`.

    Raises:
        RunError: one of them is neither.
    """
    one, two = _Side(first), _Side(second)
    tables: dict[str, list[Line]] = {}
    if one.profile is not None and two.profile is not None:
        tables["time a step"] = list(_times(one.profile, two.profile))
        tables["memory at its peak"] = list(_sizes(one.profile, two.profile))
    if one.run is not None and two.run is not None:
        tables["numbers"] = list(_numbers(one.run, two.run))
        tables["what ran"] = list(_settings(one.run, two.run))
    ordered = {title: sorted(found, key=lambda line: -line.size) for title, found in tables.items()}
    return Comparison((one.name, two.name), ordered)


class _Side:
    """One of the two: a run, a profile, or both."""

    def __init__(self, given: str | os.PathLike[str]) -> None:
        path = Path(given)
        self.name = path.name or str(path)
        self.run: FollowedRun | None = None
        if os.path.isfile(path):  # pathlib raises for a name that is too long
            self.profile: Profile | None = Profile.load(path)
            return
        self.run = FollowedRun(given)
        self.run.readable()  # raises if it is not a run
        self.profile = read_profile(path)


def _times(one: Profile, two: Profile) -> Iterator[Line]:
    # Per step: the two profiles may cover different numbers of steps.
    sides = [
        {row.name: row.seconds / max(profile.steps, 1) for row in profile.rows}
        for profile in (one, two)
    ]
    whole_one, whole_two = (profile.wall_s / max(profile.steps, 1) for profile in (one, two))
    # Always first: the rows below are parts of it.
    yield _line("the whole step", whole_one, whole_two, time_text, size=float("inf"))
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        yield _line(shown(name), sides[0].get(name), sides[1].get(name), time_text)


def _sizes(one: Profile, two: Profile) -> Iterator[Line]:
    for name in dict.fromkeys([*one.memory, *two.memory]):
        yield _line(shown(name), one.memory.get(name), two.memory.get(name), _bytes)


def _numbers(one: FollowedRun, two: FollowedRun) -> Iterator[Line]:
    sides = [_measured(one), _measured(two)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = sides[0].get(name), sides[1].get(name)
        line = _line(shown(name), a, b, number)
        # Values have different units, so their ratio decides the order.
        scale = max(abs(a or 0.0), abs(b or 0.0)) or 1.0
        yield dataclasses.replace(line, size=line.size / scale)


def _measured(followed: FollowedRun) -> dict[str, float]:
    with followed.reading():
        run = followed.readable()
        found: dict[str, float] = {"steps": float(len(run.history))}
        steps, seconds = trained(followed)
        if seconds > 0:
            found["steps/s"] = steps / seconds
        return found | {name: float(value) for name, value in run.history.last().items()}


def _settings(one: FollowedRun, two: FollowedRun) -> Iterator[Line]:
    """The settings that differ."""
    sides = []
    for followed in (one, two):
        with followed.reading():
            headings = what_ran(followed)
        sides.append(
            {
                (title, label): text
                for title, rows in headings.items()
                for label, text in rows
                # These differ between any two runs and say nothing about them.
                if label not in ("directory", "began")
            }
        )
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = sides[0].get(key, "-"), sides[1].get(key, "-")
        if a != b:
            yield Line(f"{key[0].lower()}: {key[1]}", a, b, "differs", 0.0)


def _line(
    what: str,
    a: float | None,
    b: float | None,
    text: Callable[[float], str],
    size: float | None = None,
) -> Line:
    far = abs((b or 0.0) - (a or 0.0))
    if a is None or b is None:
        difference = "only here" if b is None else "new"
    elif a:
        difference = f"{(b - a) / abs(a):+.1%}"
    else:  # a percentage of zero means nothing
        difference = "" if not b else "new"
    shown_a, shown_b = ("-" if value is None else text(value) for value in (a, b))
    return Line(what, shown_a, shown_b, difference, far if size is None else size)


def _bytes(size: float) -> str:
    return f"{size:,.0f} B"
