"""`tailrace report RUN`: a report as one HTML file that needs no network."""

from __future__ import annotations

import os
from html import escape
from importlib.resources import files
from pathlib import Path

from tailrace._version import __version__
from tailrace.base.messages import shown
from tailrace.base.paths import check_path, in_words
from tailrace.errors import RunError
from tailrace.page.followed import FollowedRun
from tailrace.page.report.sections import sections

REPORT = "report.html"

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy of the report: nothing outside of the file."""


def report_html(followed: FollowedRun) -> str:
    """The report of a run as HTML."""
    styles = [files("tailrace.page.static").joinpath(name) for name in ("look.css", "report.css")]
    style = "\n".join(sheet.read_text(encoding="utf-8") for sheet in styles)
    title = escape(shown(followed.name))
    body = "".join(
        f"<section><h2>{escape(heading)}</h2>{html}</section>"
        for heading, html in sections(followed)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{style}</style></head><body><main><h1>{title}</h1>{body}"
        f"<footer>Written by tailrace {__version__}.</footer></main></body></html>\n"
    )


def write_report(
    directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a run; returns its path.

    Args:
        directory: the run.
        output: the file; None for `report.html` in the run.

    Raises:
        RunError: the run cannot be read, or the file cannot be written.
    """
    followed = FollowedRun(directory)
    followed.readable()
    if output is not None:
        check_path("output", output, what="file", error=RunError)
    path = followed.directory / REPORT if output is None else Path(output)
    with followed.reading():
        text = report_html(followed)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"The report {str(path)!r} cannot be written: {in_words(error)}") from error
    return path
