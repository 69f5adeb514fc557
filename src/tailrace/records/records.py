"""Records: the results of the taps of a fit, by the name of the tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tailrace.base.messages import note_once, shown
from tailrace.errors import SelectionError
from tailrace.feeds.waiting import Runs
from tailrace.records.html_table import html_table
from tailrace.records.parts import Part
from tailrace.records.record import Record, Source, curve_of
from tailrace.taps.frame import Emission
from tailrace.taps.reductions import StatsKey
from tailrace.taps.tap import Chosen

MOST_SHOWN = 20
"""The number of tensors that `repr` of records shows."""

MOST_LIVE = 10_000
"""The most live records that wait for a reader of the stream."""


class HasRecords(Protocol):
    """A run, or a trainer or model after a fit: whatever has records."""

    @property
    def records(self) -> Records:
        """The records by name."""
        ...


class Records(Mapping[Any, Record]):
    """The records of a fit, by name: `records["grad/w"]`, or `records["grad/w", "histogram"]`.

    Args:
        stored: returns the records if they are stored elsewhere; called at each read.

    Raises:
        SelectionError: no tensor of that name was recorded, or several taps recorded it; when it is
            read.

    Example:
        >>> import jax.numpy as jnp, tailrace as tr
        >>> observed = tr.observe(lambda x: 2 * x, [tr.Tap("output/*", reduce="tensor")])
        >>> _, records = observed(jnp.float32(3))
        >>> records.names, records["output/0"].values.tolist()
        (['output/0'], [6.0])
    """

    def __init__(
        self, stored: Callable[[], dict[tuple[str, str], list[Source]]] | None = None
    ) -> None:
        self._stored = stored
        self._parts: dict[tuple[str, str], list[Record | Source]] = {}
        # Bounded, because the stream need not be read; the records themselves are kept in `_parts`.
        self._live: deque[Part] = deque(maxlen=MOST_LIVE)
        self.runs = Runs()

    def add(self, record: Record | Part) -> None:
        """Append the records of one execution; they are converted when they are first read."""
        with self.runs.changed:
            # With a run directory the records are on disk, and `_held` reads them from there.
            if self._stored is None:
                self._parts.setdefault((record.name, record.kind), []).append(record)
            if isinstance(record, Part) and getattr(record.one.tap, "live", False):
                if len(self._live) == MOST_LIVE:
                    note_once(
                        f"trainer.records.stream() is not read: {MOST_LIVE:,} live records wait, and "
                        f"the oldest are dropped from the stream. All of them are in trainer.records."
                    )
                self._live.append(record)
            self.runs.changed.notify_all()

    def stream(self, timeout_s: float = 60.0) -> Iterator[Record]:
        """Records of taps with `live=True` as they arrive, until the fit ends.

        Meant for another thread than the one that trains. Each is a `Record` with the values of one
        short execution; they arrive in order and are in the records as well.
        """

        def take() -> Part | None:
            with self.runs.changed:
                return self._live.popleft() if self._live else None

        for part in self.runs.stream(take, lambda: bool(self._live), timeout_s, "these records"):
            yield part.record()

    def clear(self) -> None:
        """Drop all records."""
        self._parts.clear()
        self._live.clear()

    @property
    def names(self) -> list[str]:
        """The names of the tensors that have records."""
        return list(dict.fromkeys(name for name, _ in self._held()))

    def __getitem__(self, key: str | tuple[str, str]) -> Record:
        held = self._held()
        if isinstance(key, tuple):
            found = [key] if key in held else []
        else:
            found = [pair for pair in held if pair[0] == key]
        if len(found) == 1:
            return self._joined(found[0], held[found[0]])
        if found:
            kinds = ", ".join(repr(kind) for _, kind in found)
            raise SelectionError(
                f"{key!r} has records of several taps: {kinds}. Say which: "
                f"records[{key!r}, {found[0][1]!r}]."
            )
        import difflib

        name = key[0] if isinstance(key, tuple) else key
        names = list(dict.fromkeys(name for name, _ in held))
        near = difflib.get_close_matches(name, names, n=5, cutoff=0.3) or names[:5]
        others = f"The nearest are: {near}" if near else "There are none at all"
        raise SelectionError(
            f"There are no records of {key!r}. {others}. Only what observe= "
            f"selects is recorded, and with mode=tr.every(n) first in step n-1."
        )

    def __contains__(self, key: object) -> bool:
        held = self._held()
        return key in held or any(key == name for name, _ in held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def __repr__(self) -> str:
        rows = [f"  {text}" for text in self._texts()]
        more = len(self) - len(rows)
        rest = [f"  … and {more:,} more: records.names"] if more else []
        return "\n".join([f"Records({len(self)} tensors)", *rows, *rest])

    def _repr_html_(self) -> str:
        import html

        held = list(self._held().items())[:MOST_SHOWN]
        rows = []
        for pair, parts in held:
            record = self._joined(pair, parts)
            shape = ", ".join(str(np.shape(v)[1:]) for v in jax.tree.leaves(record.values))
            name, kind = (html.escape(shown(text)) for text in pair)
            rows.append((name, kind, f"{len(record):,}", shape, curve_of(record)))
        table = html_table(("tensor", "kept", "records", "shape", ""), rows, escape=False)
        more = len(self) - len(rows)
        return f"<b>{len(self)} tensors</b>{table}" + (f"… and {more:,} more" if more else "")

    def _texts(self) -> Iterator[str]:
        for pair, parts in list(self._held().items())[:MOST_SHOWN]:
            # A record in a file describes itself: no need to read its values.
            alone = len(parts) == 1 and not isinstance(parts[0], Part)
            yield repr(parts[0] if alone else self._joined(pair, parts))

    def _held(self) -> Mapping[tuple[str, str], list[Any]]:
        return self._parts if self._stored is None else self._stored()

    def _joined(self, pair: tuple[str, str], held: Sequence[Record | Source]) -> Record:
        parts = [part if isinstance(part, Record) else part.record() for part in held]
        if len(parts) > 1:
            fields: dict[str, Any] = {
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("steps", "microbatches", "replicas", "stages")
            }
            values = jax.tree.map(lambda *v: np.concatenate(v), *(part.values for part in parts))
            ran = [part.ran for part in parts if part.ran is not None]
            fields["ran"] = np.concatenate(ran) if ran else None
            parts = [Record(*pair, values, **fields)]
        if self._stored is None:
            # Kept joined: the next read does not convert and concatenate them again.
            self._parts[pair] = list(parts)
        return parts[0]


def take_records(
    emitted: Mapping[Hashable, Emission],
    chosen: Sequence[Chosen],
    *,
    first_step: int,
    steps: int,
    replicas: int,
    period: int = 1,
) -> list[Part]:
    """Copy the emissions of one execution to the host: one part for each tap that has any."""
    arrays: dict[Hashable, tuple[Any, Any, int]] = {}
    for key, emission in emitted.items():
        if isinstance(key, StatsKey):
            # Once for the whole pack: each copy from a device has a fixed cost.
            packed = np.asarray(emission.value)
            # Tensors of a step are packed in one array; a part is a view of its rows.
            for name, size, rows in key.parts():
                arrays[name] = (packed[..., rows, :], emission.valid, size)
        elif isinstance(key, tuple):
            arrays[key] = (jax.tree.map(np.asarray, emission.value), emission.valid, -1)
    return [
        Part(one, *arrays[one.key], first_step, steps, replicas, period)
        for one in chosen
        if one.key in arrays
    ]
