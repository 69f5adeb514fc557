"""The catalogue: every tensor of a step by name, with shape, dtype and source line."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias, overload

import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.messages import shown
from tailrace.errors import OptionError, SelectionError
from tailrace.jaxprs.walk import Position

Select: TypeAlias = (
    "str | re.Pattern[str] | Callable[[Entry], bool] | Sequence[Select] | AbstractSet[Select]"
)
"""A selection of tensors: a glob, a compiled regex, a predicate on entries, or a list of these."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a step.

    Attributes:
        name: its name, such as "grad/dense/kernel" or "activation/dense:add".
        kind: the first part of the name.
        shape: the shape of one value: of one microbatch on one replica. A tensor in a scanned stack of
            layers has a leading layer dim.
        dtype: its dtype.
        stage: its pipeline stage; -1 without a pipeline.
        source: `file:line` of the user's code it comes from; empty if there is none.
        position: the position of its equation in the program.
        output: the index of the result of that equation.
        use: for a parameter, its gradient and its update: its number in the order in which the step
            uses parameters; -1 for other tensors.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: DTypeLike
    stage: int = -1
    source: str = ""
    position: Position = dataclasses.field(default=(), repr=False)
    output: int = dataclasses.field(default=0, repr=False)
    use: int = dataclasses.field(default=-1, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


LISTED = " All names: "
"""The start of the last sentence of the error for a selection that matches nothing."""

MOST_SHOWN = 30
"""The number of tensors that a catalogue shows when it is printed."""


class Catalogue(Sequence[Entry]):
    """The tensors of a step; prints as a table.

    Of a long catalogue, `print` shows the first tensors and how many there are of each kind. Iteration,
    `names`, `to_rows`, `to_json` and `to_text` have all of them.

    >>> import numpy as np
    >>> from tailrace.taps.catalogue import Catalogue, Entry
    >>> c = Catalogue([Entry("grad/w", "grad", (3, 2), np.dtype("float32"), source="model.py:7")])
    >>> print(c)
    name    shape  dtype    source
    grad/w  [3,2]  float32  model.py:7
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = list(entries)
        self._by_name = {entry.name: entry for entry in self._entries}

    def select(self, select: Select) -> Catalogue:
        """The entries that match a selection; an error with the nearest names if none do."""
        chosen = [entry for entry in self._entries if matches(select, entry)]
        if not chosen:
            # A selection of our own knows which option asked for it, and what to write instead.
            if isinstance(said := getattr(select, "unmatched", None), str):
                raise OptionError(said)
            raise SelectionError(self._unmatched(select))
        if isinstance(select, list | tuple | set):
            # Each part must match by itself: a misspelt name in a list would otherwise never be
            # noticed.
            for part in select:
                self.select(part)
        return Catalogue(chosen)

    def filter(self, select: Select) -> Catalogue:
        """Like `select`, but an empty result is allowed."""
        return Catalogue(entry for entry in self._entries if matches(select, entry))

    @property
    def names(self) -> list[str]:
        """All names, in the order of the program."""
        return [entry.name for entry in self._entries]

    def model_order(self) -> dict[str, int]:
        """The place of each name when tensors go from the input of the model to its output.

        Parameters, gradients and updates are listed as trees sort them; here they are in the order in
        which the step uses the parameters.
        """
        kinds: dict[str, int] = {}
        # A kind stays where its first tensor is; within it, the order of use replaces that of the tree.
        for place, entry in enumerate(self._entries):
            kinds.setdefault(entry.kind, place)
        keys = [
            (kinds[e.kind] if e.use >= 0 else place, e.use) for place, e in enumerate(self._entries)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return {self._entries[index].name: place for place, index in enumerate(order)}

    def use_order(self) -> list[str]:
        """The names of tensors that belong to parameters, in the order in which the step uses those."""
        used = [entry for entry in self._entries if entry.use >= 0]
        return [entry.name for entry in sorted(used, key=lambda entry: entry.use)]

    def to_rows(self) -> list[dict[str, Any]]:
        """The catalogue as plain data, one dictionary per tensor."""
        return [
            {
                "name": e.name,
                "kind": e.kind,
                "shape": list(e.shape),
                "dtype": str(e.dtype),
                "stage": e.stage,
                "source": e.source,
            }
            for e in self._entries
        ]

    def to_json(self) -> str:
        """The catalogue as JSON: a list of objects."""
        return json.dumps(self.to_rows(), indent=1)

    @overload
    def __getitem__(self, key: int | str) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> Catalogue: ...
    def __getitem__(self, key: int | str | slice) -> Entry | Catalogue:
        if isinstance(key, str):
            if key not in self._by_name:
                raise SelectionError(self._unmatched(key))
            return self._by_name[key]
        return Catalogue(self._entries[key]) if isinstance(key, slice) else self._entries[key]

    def __contains__(self, key: object) -> bool:
        return key in self._by_name if isinstance(key, str) else key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def to_text(self) -> str:
        """The catalogue as a table of all tensors; `print` shows the first of a long one."""
        staged = any(entry.stage >= 0 for entry in self._entries)
        rows = [self._row(entry, staged) for entry in self._entries]
        head = ("name", "shape", "dtype", *(["stage"] if staged else []), "source")
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        )

    def __repr__(self) -> str:
        more = len(self) - MOST_SHOWN
        if more <= 0:
            return self.to_text()
        kinds: dict[str, int] = {}
        for entry in self._entries:
            kinds[entry.kind] = kinds.get(entry.kind, 0) + 1
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        rest = f"… and {more:,} more; to_text() has all. Of each kind: {counts}"
        return f"{Catalogue(self._entries[:MOST_SHOWN]).to_text()}\n{rest}"

    def _repr_html_(self) -> str:
        import html

        cells = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in self._row(e, True))
            + "</tr>"
            for e in self._entries
        )
        head = "".join(f"<th>{h}</th>" for h in ("name", "shape", "dtype", "stage", "source"))
        table = f"<table><tr>{head}</tr>{cells}</table>"
        if len(self) <= MOST_SHOWN:
            return table
        return f"<details><summary>{len(self):,} tensors</summary>{table}</details>"

    @staticmethod
    def _row(entry: Entry, staged: bool) -> tuple[str, ...]:
        shape = "[" + ",".join(map(str, entry.shape)) + "]"
        stage = [str(entry.stage)] if staged else []
        return (shown(entry.name), shape, str(entry.dtype), *stage, shown(entry.source))

    def _unmatched(self, select: Select) -> str:
        text = select if isinstance(select, str) else getattr(select, "pattern", None)
        # A low cutoff: names are long paths, and a glob shares few characters with any of them.
        near = difflib.get_close_matches(text or "", self.names, n=5, cutoff=0.3)
        if not near:
            near = self.names[:5]
        names = ", ".join(map(repr, near)) if near else "(no tensors at all)"
        return (
            f"A selection must match at least one tensor. Received: {_described(select)}. The "
            f"nearest names are: {names}.{LISTED}names of the catalogue."
        )


@contextlib.contextmanager
def names_listed_by(where: str) -> Generator[None]:
    """Add to the error for a selection that matches nothing where all names are listed."""
    try:
        yield
    except SelectionError as error:
        # Replaced, not appended: the sentence before names the catalogue, which this caller's user
        # does not have at hand.
        text, _, _ = str(error).partition(LISTED)
        raise SelectionError(f"{text}{LISTED}{where}.") from None


def check_selection(select: Select) -> None:
    """Refuse an invalid selection when it is given, not when it is first used."""
    if isinstance(select, list | tuple | set):
        for part in select:
            check_selection(part)
    elif not isinstance(select, str | re.Pattern) and not callable(select):
        raise SelectionError(
            f"A selection is a glob, re.compile(...), a function of an entry, or a list of these. "
            f"Received: {select!r}."
        )


def matches(select: Select, entry: Entry) -> bool:
    """Whether a selection includes a tensor."""
    if isinstance(select, str):
        # A name without an index selects all values that leave the scope, and one without a stage
        # the gradients of all stages.
        plain = not any(c in select for c in "*?")
        if plain:
            whole = re.sub(r"@\d+$", "", entry.name)
            return select in (entry.name, whole, re.sub(r"\[\d+\]$", "", whole))
        # Not `fnmatch`, which ignores case on Windows. A "[" is part of names (`dense[0]`), not a
        # set of characters.
        return fnmatch.fnmatchcase(entry.name, select.replace("[", "[[]"))
    if isinstance(select, re.Pattern):
        return select.search(entry.name) is not None
    if isinstance(select, list | tuple | set):
        return any(matches(part, entry) for part in select)
    # `select` is public, so what arrives here need not have been checked.
    check_selection(select)
    assert callable(select)
    return bool(select(entry))


def _described(select: Select) -> str:
    if isinstance(select, re.Pattern):
        return f"re.compile({select.pattern!r})"
    if callable(select):
        return f"the function {getattr(select, '__name__', select)!r}"
    return repr(select)
