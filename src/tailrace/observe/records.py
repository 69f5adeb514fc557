"""Records: what taps deliver, each value tagged with its step, microbatch and replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.errors import SelectionError
from tailrace.tensors.frame import Emission
from tailrace.tensors.reductions import StatsKey, merge_statistics
from tailrace.tensors.taps import Chosen, Mode

PER_MICROBATCH = ("input", "buffer", "activation", "cotangent", "loss", "output", "aux", "grad")
"""Kinds of tensors that each microbatch has its own of, also where a step has only one."""


@dataclasses.dataclass(frozen=True)
class Record:
    """All values of one tensor, ordered by step, microbatch, replica.

    Attributes:
        name: the tensor.
        kind: what was kept of it: "tensor", "stats", "histogram", "norm" or a function's name.
        values: one leading dim: the records.
        steps: the step of each.
        microbatches: the microbatch of each; -1 where there is one value for the whole step.
        replicas: the replica of each; -1 where the value is equal on all of them.
        stages: the pipeline stage of each; -1 without a pipeline.
    """

    name: str
    kind: str
    values: Any
    steps: np.ndarray
    microbatches: np.ndarray
    replicas: np.ndarray
    stages: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        shape = jax.tree.map(np.shape, self.values)
        return f"Record({self.name!r}, {self.kind}, {len(self)} values of {shape})"


class Records(Mapping[Any, Record]):
    """The records of a fit, by name: `records["grad/w"]`, or `records["grad/w", "histogram"]`."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], list[Record]] = {}

    def add(self, record: Record) -> None:
        """Append the records of one execution."""
        self._parts.setdefault((record.name, record.kind), []).append(record)

    def clear(self) -> None:
        """Forget everything."""
        self._parts.clear()

    @property
    def names(self) -> list[str]:
        """The tensors there are records of."""
        return list(dict.fromkeys(name for name, _ in self._parts))

    def __getitem__(self, key: str | tuple[str, str]) -> Record:
        if isinstance(key, tuple):
            found = [key] if key in self._parts else []
        else:
            found = [pair for pair in self._parts if pair[0] == key]
        if len(found) == 1:
            return self._joined(found[0])
        if found:
            kinds = ", ".join(repr(kind) for _, kind in found)
            raise SelectionError(
                f"{key!r} has records of several taps: {kinds}. Say which: "
                f"records[{key!r}, {found[0][1]!r}]."
            )
        import difflib

        name = key[0] if isinstance(key, tuple) else key
        near = difflib.get_close_matches(name, self.names, n=5, cutoff=0.3) or self.names[:5]
        raise SelectionError(
            f"There are no records of {key!r}. The nearest are: {near}. Only what observe= "
            f"selects is recorded, and with mode=tr.every(n) first in step n-1."
        )

    def __contains__(self, key: object) -> bool:
        return key in self._parts or key in self.names

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        rows = [f"  {self._joined(pair)!r}" for pair in self._parts]
        return "\n".join([f"Records({len(rows)} tensors)", *rows])

    def _joined(self, pair: tuple[str, str]) -> Record:
        parts = self._parts[pair]
        if len(parts) > 1:
            fields = {
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("steps", "microbatches", "replicas", "stages")
            }
            values = jax.tree.map(lambda *v: np.concatenate(v), *(part.values for part in parts))
            parts[:] = [Record(*pair, values, **fields)]
        return parts[0]


def take_records(
    emitted: Mapping[Hashable, Emission],
    chosen: Sequence[Chosen],
    *,
    first_step: int,
    steps: int,
    replicas: int,
    period: int = 1,
) -> list[Record]:
    """Make records of what one execution emitted.

    Args:
        emitted: by key; statistics are packed.
        chosen: what was asked for.
        first_step: the number of the first step of the execution.
        steps: how many it had.
        replicas: how many replicas ran.
        period: periodic values are there for the last of every `period` steps.
    """
    arrays: dict[Hashable, tuple[Any, Any, int]] = {}
    for key, emission in emitted.items():
        if isinstance(key, StatsKey):
            packed = np.asarray(emission.value)
            for name, size, rows in key.parts():
                arrays[name] = (packed[..., rows, :], emission.valid, size)
        elif isinstance(key, tuple):
            arrays[key] = (jax.tree.map(np.asarray, emission.value), emission.valid, -1)
    found = []
    for one in chosen:
        if one.key in arrays:
            value, valid, size = arrays[one.key]
            found.append(_record(one, value, valid, size, first_step, steps, replicas, period))
    return [record for record in found if record is not None]


def _record(
    one: Chosen,
    value: Any,
    valid: Any,
    size: int,
    first_step: int,
    steps: int,
    replicas: int,
    period: int,
) -> Record | None:
    collected = one.tap.mode in (Mode.SUM, Mode.FINAL)
    several = replicas > 1
    # Dims in front: [replica,] step [, microbatch]; then the layers of scans, then the value.
    loops = 0 if collected else one.loops
    if several and not one.differs:
        value = jax.tree.map(lambda v: v[0], value)
        valid = valid[0] if valid is not None else None
        several = False
    if several:
        value = jax.tree.map(lambda v: np.moveaxis(v, 0, loops), value)
        valid = np.moveaxis(np.asarray(valid), 0, loops) if valid is not None else None
    shape = np.shape(jax.tree.leaves(value)[0])
    counts = list(shape[:loops])
    made = counts[0] if loops else 1
    if collected:
        at = np.array([first_step + steps - 1])
    elif one.tap.period > 1 and period > 1:
        at = first_step + period * (1 + np.arange(made)) - 1
    else:
        at = first_step + np.arange(made)
    micro = int(np.prod(counts[1:])) if loops > 1 else 1
    each = replicas if several else 1
    tags = np.stack(
        np.meshgrid(at, np.arange(micro), np.arange(each), indexing="ij"), axis=-1
    ).reshape(-1, 3)
    flat = jax.tree.map(lambda v: v.reshape(len(tags), *v.shape[loops + several :]), value)
    if size >= 0:
        flat = merge_statistics(flat, size)
    keep = np.ones(len(tags), bool)
    if valid is not None:
        keep &= np.asarray(valid).reshape(len(tags), -1).all(axis=1)
    if one.tap.period > 1:
        keep &= (tags[:, 0] + 1) % one.tap.period == 0
    if not keep.any():
        return None
    if one.tap.mode is Mode.FINAL:
        tags[:, 1] = one.microbatches - 1
    microbatch = one.tap.mode is not Mode.SUM and (loops > 1 or one.entry.kind in PER_MICROBATCH)
    absent = np.full(int(keep.sum()), -1)
    return Record(
        one.entry.name,
        one.tap.kind,
        jax.tree.map(lambda v: v[keep], flat),
        tags[keep, 0],
        tags[keep, 1] if microbatch else absent,
        tags[keep, 2] if several else absent,
        np.full(len(absent), one.entry.stage),
    )
