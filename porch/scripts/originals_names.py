"""Write docs/guides/originals_names.md: every public name of the originals, and what became of it.

    python scripts/originals_names.py [--check]

The names are in src/tailrace/compat/originals/lists; each is looked up before it is written. `--check`
writes nothing, and fails if the page is not what would be written.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator

from tailrace.compat.originals.lookup import look_up
from tailrace.compat.originals.missing import RefusedImport, RefusedName
from tailrace.compat.originals.names import VERDICTS, Name, all_names

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "originals_names.md"

TITLES = {"ipu": "TensorFlow for IPUs", "poptorch": "PopTorch"}

HEAD = """# Every name of the originals

*works*: as in the original. *differs*: works, with the difference said. *noted*: accepted, without
effect, said once in the log. *refused*: an error whose text is the sentence here. The error for a name
that neither had names the nearest ones. The guide about [moving](moving.md) says more about the names
that programs use most.

This page is made by `python scripts/originals_names.py`, from the lists in
`src/tailrace/compat/originals/lists`, and each name is looked up when it is made.
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for top, title in TITLES.items():
        entries = [e for e in all_names().values() if e.full.split(".")[0] == top]
        counts = Counter(entry.verdict for entry in entries)
        summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
        parts.append(f"## {title}\n\n{len(entries)} names: {summary}.\n")
        for holder, group in itertools.groupby(entries, key=lambda e: e.holder):
            parts.append(f"### `{holder}`\n\n" + "\n".join(rows(list(group))) + "\n")
    return "\n".join(parts)


def rows(entries: list[Name]) -> Iterator[str]:
    """A row for names that follow each other and share verdict and sentence."""
    yield "| name | | |"
    yield "|---|---|---|"
    for (verdict, sentence), group in itertools.groupby(
        entries, key=lambda e: (checked(e), e.sentence)
    ):
        names = ", ".join(f"`{entry.name}`" for entry in group)
        yield f"| {names} | {verdict} | {sentence} |"


def checked(entry: Name) -> str:
    """The verdict on a name, once it has been looked up."""
    try:
        look_up(entry)
    except (RefusedName, RefusedImport):
        if entry.verdict != "refused":
            raise
    return entry.verdict


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            raise SystemExit(f"{PAGE.name} is old: run python scripts/originals_names.py.")
    else:
        PAGE.write_text(text)
