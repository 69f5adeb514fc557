"""A table for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], escape: bool = True) -> str:
    """Rows of text as an HTML table; what is HTML already is not escaped.

    >>> html_table(["name"], [["a<b"]])
    '<table><tr><th>name</th></tr><tr><td>a&lt;b</td></tr></table>'
    """

    def row(cells: Sequence[str], tag: str) -> str:
        inside = "".join(f"<{tag}>{html.escape(c) if escape else c}</{tag}>" for c in cells)
        return f"<tr>{inside}</tr>"

    return f"<table>{row(head, 'th') if head else ''}{''.join(row(r, 'td') for r in rows)}</table>"
