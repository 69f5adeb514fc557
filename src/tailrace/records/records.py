"""Records: the results of taps, each value tagged with its step, microbatch and replica."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tailrace.errors import SelectionError
from tailrace.feeds.waiting import Runs
from tailrace.messages import note_once, shown
from tailrace.records.html_table import html_table
from tailrace.taps.frame import Emission
from tailrace.taps.reductions import NUM_BINS, StatsKey, merge_statistics
from tailrace.taps.tap import Chosen, Mode

PER_MICROBATCH = ("input", "buffer", "activation", "cotangent", "loss", "output", "aux", "grad")
"""Kinds of tensors that exist per microbatch, even if a step has only one."""

MOST_SHOWN = 20
"""The number of tensors that `repr` of records shows."""

MOST_LIVE = 10_000
"""The most live records that wait for a reader of the stream."""


@dataclasses.dataclass(frozen=True)
class Record:
    """All values of one tensor, ordered by step, microbatch, replica.

    Attributes:
        name: the tensor.
        kind: what was kept of it: "tensor", "stats", "histogram", "norm" or a function's name.
        values: the values; the leading dim is that of the records.
        steps: the step of each.
        microbatches: the microbatch of each; -1 if there is one value for the whole step.
        replicas: the replica of each; -1 if the value is equal on all of them.
        stages: the pipeline stage of each; -1 without a pipeline.
        ran: for a branch inside a scanned stack of layers, flags of the layers that took it,
            [records, layers]; the values of the others are zero. None otherwise: a branch that was not
            taken has no record.
    """

    name: str
    kind: str
    values: Any
    steps: np.ndarray
    microbatches: np.ndarray
    replicas: np.ndarray
    stages: np.ndarray
    ran: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        shape = jax.tree.map(np.shape, self.values)
        return f"Record({self.name!r}, {self.kind}, {len(self)} values of {shape})"

    def _repr_html_(self) -> str:
        import html

        text = html.escape(repr(self))
        if curve := _curve(self):
            return f"{text}<br>{curve}"
        if self.kind != "histogram" or np.shape(self.values)[-1:] != (NUM_BINS,):
            return text
        from tailrace.records.exponents import format_sentences, small_svg

        counts = self.values.reshape(-1, NUM_BINS).sum(axis=0)
        lines = "<br>".join(map(html.escape, format_sentences(counts)))
        return f"{text}<br>{small_svg(counts)}<br>{lines}"


def _curve(record: Record) -> str:
    """A record over the steps, as a small curve; empty if it is not one number per step."""
    values = record.values
    if record.kind == "stats":
        values = values["std"]
    elif record.kind not in ("norm", "tensor") or np.size(values) != len(record):
        return ""
    if not len(record):
        return ""
    from tailrace.records.curves import small_curve

    return small_curve(np.asarray(values, np.float64).reshape(len(record), -1).mean(axis=1))


class Source(Protocol):
    """A source of a record: emissions of an execution, or rows in a file."""

    def record(self) -> Record:
        """Read it."""
        ...


class Records(Mapping[Any, Record]):
    """The records of a fit, by name: `records["grad/w"]`, or `records["grad/w", "histogram"]`.

    Args:
        stored: returns the records if they are stored elsewhere; called at each read.

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
        self._live: deque[Part] = deque(maxlen=MOST_LIVE)
        self.runs = Runs()

    def add(self, record: Record | Part) -> None:
        """Append the records of one execution; they are converted when they are first read."""
        with self.runs.changed:
            if self._stored is None:
                self._parts.setdefault((record.name, record.kind), []).append(record)
            if isinstance(record, Part) and getattr(record.one.tap, "live", False):
                if len(self._live) == MOST_LIVE:
                    note_once(
                        f"Nobody reads trainer.records.stream(): {MOST_LIVE:,} live records wait, and "
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
        raise SelectionError(
            f"There are no records of {key!r}. The nearest are: {near}. Only what observe= "
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
            rows.append((name, kind, f"{len(record):,}", shape, _curve(record)))
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
            self._parts[pair] = list(parts)
        return parts[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The emissions of one execution for one tap, unprocessed: the training loop must not wait.

    Attributes:
        one: the tap and the tensor.
        value: [replica,] step [, microbatch], then layers of scans, then the value.
        valid: flags of the entries that were computed; None for all.
        size: the number of values of the tensor, if `value` is partial statistics; -1 otherwise.
        first_step: the index of the first step of the execution.
        steps: the number of its steps.
        replicas: the number of replicas.
        period: periodic values exist for the last of every `period` steps.
        ends: the last step of each execution, if several were joined and the tap has one value per
            execution; the value then has an axis of executions instead of steps.
    """

    one: Chosen
    value: Any
    valid: Any
    size: int
    first_step: int
    steps: int
    replicas: int
    period: int
    ends: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The tensor."""
        return self.one.entry.name

    @property
    def kind(self) -> str:
        """What the tap keeps of it."""
        return self.one.tap.kind

    @property
    def collected(self) -> bool:
        """Whether there is one value per execution."""
        return self.one.tap.mode in (Mode.SUM, Mode.FINAL)

    def record(self) -> Record:
        """The finished record: flat, tagged, statistics merged."""
        one, value, valid, replicas = self.one, self.value, self.valid, self.replicas
        several = replicas > 1
        loops = len(self.ends[:1]) if self.collected else one.loops
        # Equal on all replicas, as the program shows: one copy is recorded, without a replica.
        if several and not one.differs:
            value = jax.tree.map(lambda v: v[0], value)
            valid = valid[0] if valid is not None else None
            several = False
        if several:
            # Behind the steps: rows are then in the order in which values were computed.
            value = jax.tree.map(lambda v: np.moveaxis(v, 0, loops), value)
            valid = np.moveaxis(np.asarray(valid), 0, loops) if valid is not None else None
        tags = self._tags(np.shape(jax.tree.leaves(value)[0])[:loops], replicas if several else 1)
        count = len(tags[0])
        flat = jax.tree.map(lambda v: v.reshape(count, *v.shape[loops + several :]), value)
        keep, ran = None, None
        if valid is not None:
            made = np.asarray(valid)
            made = made.reshape(count, *made.shape[loops + several :])
            keep = made.reshape(count, -1).any(axis=1)
            ran = made if made.ndim > 1 else None
        # All periodic taps are observed at a common period; this one asked for some of those steps.
        if one.tap.period > 1:
            seen = (tags[0] + 1) % one.tap.period == 0
            keep = seen if keep is None else keep & seen
        if keep is not None:
            flat = jax.tree.map(lambda v: v[keep], flat)
            tags = tuple(tag[keep] for tag in tags)
            ran = None if ran is None else ran[keep]
        if self.size >= 0:
            flat = merge_statistics(flat, self.size)
        elif keep is None:  # a copy: the device's buffer is read-only and larger
            flat = jax.tree.map(np.array, flat)
        steps, microbatches, of_replica = tags
        own = one.tap.mode is not Mode.SUM and (loops > 1 or one.entry.kind in PER_MICROBATCH)
        return Record(
            self.name,
            self.kind,
            flat,
            steps,
            microbatches if own else _filled(len(steps), -1),
            of_replica if several else _filled(len(steps), -1),
            _filled(len(steps), one.entry.stage),
            ran,
        )

    def _tags(self, counts: tuple[int, ...], replicas: int) -> tuple[np.ndarray, ...]:
        """Step, microbatch and replica of each value, in order; shared by the tensors of a step."""
        made, start, stride = counts[0] if counts else 1, self.first_step, 1
        if not counts and self.collected:
            start += self.steps - 1
        elif self.one.tap.period > 1 and self.period > 1:
            start, stride = start + self.period - 1 - start % self.period, self.period
        first, count = 0, math.prod(counts[1:])
        if self.one.tap.mode is Mode.FINAL:
            first, count = self.one.microbatches - 1, 1
        at = self.ends or range(start, start + stride * made, stride)
        return _grid(at, first, count, replicas)


@functools.lru_cache(maxsize=8)
def _grid(
    at: range | tuple[int, ...], microbatch: int, microbatches: int, replicas: int
) -> tuple[np.ndarray, ...]:
    """Step, microbatch and replica of all values of the steps `at`; read-only."""
    steps = np.arange(at.start, at.stop, at.step) if isinstance(at, range) else np.array(at)
    micro = microbatch + np.arange(microbatches)
    grid = np.meshgrid(steps, micro, np.arange(replicas), indexing="ij")
    return tuple(_for_reading(axis.reshape(-1)) for axis in grid)


@functools.lru_cache(maxsize=8)
def _filled(count: int, value: int) -> np.ndarray:
    return _for_reading(np.full(count, value))


def _for_reading(shared: np.ndarray) -> np.ndarray:
    shared.flags.writeable = False
    return shared


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
            packed = np.asarray(emission.value)
            for name, size, rows in key.parts():
                arrays[name] = (packed[..., rows, :], emission.valid, size)
        elif isinstance(key, tuple):
            arrays[key] = (jax.tree.map(np.asarray, emission.value), emission.valid, -1)
    return [
        Part(one, *arrays[one.key], first_step, steps, replicas, period)
        for one in chosen
        if one.key in arrays
    ]
