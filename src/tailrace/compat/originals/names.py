"""The lists of the originals' public names, `lists/*.txt`.

    [ipu.utils]                           a module, or a class, and the names it had
    IPUConfig                             works
    reset_ipu_seed | noted | why          works, or is accepted, with a difference
    export_inputs_to_file | refused | why is not here

A module that is refused refuses all of its names, with its own sentence.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

LISTS = pathlib.Path(__file__).parent / "lists"

VERDICTS = ("works", "differs", "noted", "refused")


@dataclasses.dataclass(frozen=True)
class Name:
    """A public name of an original.

    Attributes:
        holder: the module or class that had it, `ipu.utils`.
        name: the name itself.
        verdict: one of `VERDICTS`.
        sentence: what to know about it, or to use instead.
    """

    holder: str
    name: str
    verdict: str = "works"
    sentence: str = ""

    @property
    def full(self) -> str:
        """The name with its holder."""
        return f"{self.holder}.{self.name}" if self.holder else self.name


@functools.cache
def all_names() -> dict[str, Name]:
    """Every name, by its full name, in the order of the lists.

    >>> all_names()["ipu.utils.create_ipu_config"].verdict
    'refused'
    """
    found: dict[str, Name] = {}
    for path in sorted(LISTS.glob("*.txt")):
        around = Name("", "")
        for line in path.read_text().splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            text, *rest = (part.strip() for part in line.split("|", 2))
            if text.startswith("["):
                holder, _, name = text.strip("[]").rpartition(".")
                around = found.get(f"{holder}.{name}", Name(holder, name))
                continue
            # A refused module has one sentence; repeating it for each of its names would let them
            # differ.
            if around.verdict == "refused":
                rest = [around.verdict, around.sentence]
            entry = Name(around.full, text, *rest)
            found[entry.full] = entry
    return found


def names_in(holder: str) -> list[str]:
    """The names that a module or class had."""
    return [entry.name for entry in all_names().values() if entry.holder == holder]
