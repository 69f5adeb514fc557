"""`tailrace show RUN`: the description and numbers of a run, its loss curve, and findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.base.messages import shown
from tailrace.errors import TailraceError
from tailrace.page.findings.finding import Severity
from tailrace.page.findings.findings import findings
from tailrace.page.followed import FollowedRun
from tailrace.page.summary import TIME, Rows, numbers, time_rows, what_ran
from tailrace.page.terminal.chart import chart
from tailrace.runs.profiles import read_profile

if TYPE_CHECKING:
    from rich.console import RenderableType

COLOURS = {Severity.BAD: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


def pictured(followed: FollowedRun, width: int, brief: bool = False) -> RenderableType:
    """A run as a rich renderable.

    Args:
        followed: the run.
        width: the width of the terminal, in characters.
        brief: without options, taps and versions.
    """
    from rich.console import Group
    from rich.text import Text

    try:
        with followed.reading():
            history = followed.readable().history
            parts: list[RenderableType] = [
                Text(shown(followed.name), style="bold"),
                _table(numbers(followed), width),
            ]
            if len(history):
                lead = history.leading
                parts.append(Text(f"\n{shown(lead)}", style="bold"))
                parts.append(Text("\n".join(chart(history.steps, history[lead], min(width, 100)))))
            parts += [Text("\nfindings", style="bold"), _findings(followed)]
            if not brief and (rows := time_rows(followed)):
                parts += [Text(f"\n{TIME.lower()}", style="bold"), _table(rows, width)]
            if not brief and (profile := read_profile(followed.directory)) is not None:
                # Not wrapped: a narrow terminal breaks its lines, and a file gets them whole.
                table = Text(str(profile), no_wrap=True, overflow="ignore")
                parts += [Text("\ntime by scope", style="bold"), table]
            if not brief:
                for title, rows in what_ran(followed).items():
                    parts += [Text(f"\n{title.lower()}", style="bold"), _table(rows, width)]
    # A run that is being written may be unreadable for a moment: `watch` draws it again.
    except TailraceError as error:
        return Text(str(error), style="red")
    return Group(*parts)


def _table(rows: Rows, width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", max_width=max(12, width // 3), overflow="fold")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def _findings(followed: FollowedRun) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    found = findings(followed)
    if not found:
        return Text("none in what was recorded")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for one in found:
        table.add_row(Text(one.topic, style=COLOURS[one.severity]), Text(one.text))
    return table


def show(directory: str) -> None:
    """Print a run."""
    from rich.console import Console

    followed = FollowedRun(directory)
    followed.readable()
    console = Console()
    console.print(pictured(followed, console.width), crop=False)
