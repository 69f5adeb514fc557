"""Joins consecutive executions, so that rows are made of many at a time.

Making rows of an execution's results takes about as long for a hundred steps as for a thousand: the
cost is per tensor. So executions are queued unprocessed, and consecutive ones with the same tensors are
joined before rows are made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tailrace.records.parts import Part, merge_statistics
from tailrace.records.sinks import Finished

MOST_BYTES = 1 << 25
"""The approximate limit of a join, so that intermediate values need little memory."""

LARGE = 1 << 16
"""The bytes from which partial statistics are merged before they are joined: copying takes longer."""


def join_executions(executions: Iterable[Finished]) -> Iterator[Finished]:
    """The same steps and values, in fewer and longer executions."""
    together: list[Finished] = []
    size = 0
    for done in executions:
        if together and (size > MOST_BYTES or not _follows(together[-1], done)):
            yield _joined(together)
            together, size = [], 0
        together.append(done)
        size += done.nbytes
    if together:
        yield _joined(together)


def _follows(before: Finished, done: Finished) -> bool:
    """Whether `done` continues where `before` ended, with the same tensors in the same shapes."""
    return (
        before.first_step + before.steps == done.first_step
        and _forms(before) == _forms(done)
        and len(before.parts) == len(done.parts)
        and all(map(_continues, before.parts, done.parts))
        # After a stop, parts contain steps that do not count.
        and all(part.steps == before.steps for part in before.parts)
    )


def _forms(done: Finished) -> list[Any]:
    arrays = [*done.scalars.items(), ("", done.weights), ("elements", done.elements)]
    return [(name, a is None or (a.dtype, a.shape[1:])) for name, a in arrays]


def _continues(before: Part, part: Part) -> bool:
    return (
        before.one is part.one
        and before.size == part.size
        and before.replicas == part.replicas
        and before.period == part.period
        and before.steps % max(1, before.period) == 0  # period 0: nothing periodic was observed
        and (before.valid is None) == (part.valid is None)
        and (part.collected or part.one.loops > 0)
    )


def _joined(together: Sequence[Finished]) -> Finished:
    if len(together) == 1:
        return together[0]
    first = together[0]
    return Finished(
        first.first_step,
        sum(done.steps for done in together),
        [_joined_part(parts) for parts in zip(*(done.parts for done in together), strict=True)],
        {name: np.concatenate([done.scalars[name] for done in together]) for name in first.scalars},
        None if first.weights is None else np.concatenate([d.weights for d in together]),  # pyright: ignore
        together[-1].ended,
        elements=None if first.elements is None else np.concatenate([d.elements for d in together]),  # pyright: ignore
    )


def _joined_part(parts: Sequence[Part]) -> Part:
    parts = [_without_copies(part) for part in parts]
    first = parts[0]
    # Merging makes one row of many partial ones: for large parts that is cheaper than copying them into
    # one array first; small ones are merged together, in fewer calls.
    if first.size >= 0 and max(part.value.nbytes for part in parts) > LARGE:
        values = [merge_statistics(part.value, part.size) for part in parts]
        parts = [replace(part, value=v, size=-1) for part, v in zip(parts, values, strict=True)]
        first = parts[0]
    axis = 1 if first.replicas > 1 else 0
    # A collected part has one value for its whole execution, without a dim of steps.
    join = np.stack if first.collected else np.concatenate

    def joined(*values: Any) -> np.ndarray:
        return join([np.asarray(value) for value in values], axis=axis)

    return replace(
        first,
        value=jax.tree.map(joined, *(part.value for part in parts)),
        valid=None if first.valid is None else joined(*(part.valid for part in parts)),
        steps=sum(part.steps for part in parts),
        ends=tuple(p.first_step + p.steps - 1 for p in parts) if first.collected else (),
    )


def _without_copies(part: Part) -> Part:
    """One replica only, if all are equal: records keep just one."""
    if part.replicas == 1 or part.one.differs:
        return part
    valid = None if part.valid is None else part.valid[:1]
    return replace(part, value=jax.tree.map(lambda v: v[:1], part.value), valid=valid)
