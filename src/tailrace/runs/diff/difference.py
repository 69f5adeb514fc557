"""The difference between two tensors, and its description."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tailrace.base.messages import shown
from tailrace.base.trees import Tree
from tailrace.records.record import Record

ORDER = (
    *("input", "param", "state", "buffer", "activation", "loss", "output", "aux", "cotangent"),
    *("grad", "accumulated", "reduced", "optimizer", "update", "updated", "history"),
)
"""The order in which a step computes its tensors, by kind: the first to differ is nearest the cause."""

UPDATING = ORDER.index("accumulated")
"""The rank of the first kind that a step computes once, after all microbatches."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The result of `tr.diff`; true if the two differ anywhere.

    Attributes:
        tensor: the first tensor that differs, "history/<name>" for a metric; empty if none does.
        kind: what the tap kept of it.
        field: the statistic, or the leaf of a tree, that differs most there; empty without fields.
        step: the first step in which they differ; -1 for functions.
        microbatch: the microbatch there; -1 if a step has one value.
        replica: the replica there; -1 if all have the same.
        largest: the largest difference of two values there.
        relative: that, divided by the largest value of either.
        values: the two values that differ most; complex if the tensor is.
        compared: the number of tensors compared.
        only_first: tensors that only the first one has.
        only_second: tensors that only the second one has.
    """

    tensor: str = ""
    kind: str = ""
    field: str = ""
    step: int = -1
    microbatch: int = -1
    replica: int = -1
    largest: float = 0.0
    relative: float = 0.0
    values: tuple[complex, complex] = (0.0, 0.0)
    compared: int = 0
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __str__(self) -> str:
        rest = ""
        for which, names in (("first", self.only_first), ("second", self.only_second)):
            if names:
                listed = ", ".join([*map(shown, names[:3]), *["..."] * (len(names) > 3)])
                rest += f" Only the {which} has {len(names)} more ({listed})."
        if not self:
            return f"No difference in {self.compared} tensors.{rest}"
        where = [f"step {self.step}"] if self.step >= 0 else []
        where += [f"microbatch {self.microbatch}"] if self.microbatch >= 0 else []
        where += [f"replica {self.replica}"] if self.replica >= 0 else []
        what = f"{shown(self.tensor)} ({self.kind}{', ' + self.field if self.field else ''})"
        return (
            f"They first differ {'in ' + ', '.join(where) + ' ' if where else ''}at {what}: "
            f"{self.values[0]:.9g} and {self.values[1]:.9g}, the largest difference "
            f"{self.largest:.3g}, relative {self.relative:.3g}.{rest}"
        )


def common_rows(one: Record, other: Record) -> tuple[np.ndarray, np.ndarray]:
    """The rows of both that have the same step, microbatch and replica; the last of each."""

    def rows(record: Record) -> dict[tuple[int, ...], int]:
        tags = zip(
            record.steps.tolist(),
            record.microbatches.tolist(),
            record.replicas.tolist(),
            strict=True,
        )
        # Later rows replace earlier ones: a trainer that went back has computed some steps twice.
        return {tag: row for row, tag in enumerate(tags)}

    mine, theirs = rows(one), rows(other)
    tags = sorted(mine.keys() & theirs.keys())
    return np.array([mine[t] for t in tags], int), np.array([theirs[t] for t in tags], int)


def first_row(
    one: Record, other: Record, left: np.ndarray, right: np.ndarray, rtol: float, atol: float
) -> Difference | None:
    """The first of these rows in which two records of one tensor differ."""
    if not len(left):
        return None
    worst: dict[int, tuple[float, str, float, tuple[complex, complex]]] = {}
    for field, mine, theirs in _fields(one.values, other.values):
        if mine.shape[1:] != theirs.shape[1:]:
            text = f"shapes {list(mine.shape[1:])} and {list(theirs.shape[1:])}"
            # Other shapes differ in every row, so in the first.
            worst = {0: (float("nan"), text, float("nan"), (float("nan"), float("nan")))}
            break
        # In float64, so that bfloat16 and float32 are compared as the numbers they are.
        a, b = (_flat(mine[left]), _flat(theirs[right]))
        off, size = _apart(a, b)
        rows = np.flatnonzero((off > atol + rtol * size[:, None]).any(axis=1))
        if len(rows):
            row = int(rows[0])
            at = int(np.argmax(off[row]))
            largest = float(off[row, at])
            # Relative to the row's largest value: relative to each element, noise around zero would
            # be infinite.
            relative = largest / float(size[row]) if size[row] else float("inf")
            if row not in worst or relative > worst[row][2]:
                worst[row] = (largest, field, relative, (a[row, at].item(), b[row, at].item()))
    if not worst:
        return None
    # The first row, not the worst: differences grow from step to step, and the first is nearest to
    # the cause.
    row = min(worst)
    largest, field, relative, values = worst[row]
    at = left[row]
    step, microbatch, replica = one.steps[at], one.microbatches[at], one.replicas[at]
    return Difference(
        *(one.name, one.kind, field, int(step), int(microbatch), int(replica)),
        largest=largest,
        relative=relative,
        values=values,
    )


def _fields(one: Tree, other: Tree) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The comparable parts of two records' values: statistics, or leaves of a tree."""
    if isinstance(one, np.ndarray) and one.dtype.names:
        for name in one.dtype.names:
            yield name, one[name], other[name]
        return
    paths = jax.tree_util.tree_flatten_with_path(one)[0]
    # Not strict: trees of two programs may differ, and what both have is compared.
    for (path, mine), theirs in zip(paths, jax.tree.leaves(other), strict=False):
        yield jax.tree_util.keystr(path), mine, theirs


def _flat(values: np.ndarray) -> np.ndarray:
    # Complex values stay complex: 1 and -1j have one magnitude, and are not equal.
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    return values.reshape(len(values), -1).astype(wide)


def _apart(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distance between values, and the largest finite value of each row."""
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b)
    # Two NaN are equal here: a run that became NaN does not differ from itself. NaN and a number,
    # or infinities of both signs, are infinitely far apart.
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    off = np.where(equal, 0.0, np.where(np.isfinite(off), off, np.inf))
    finite = [np.where(np.isfinite(v), np.abs(v), 0).max(axis=1, initial=0.0) for v in (a, b)]
    return off, np.maximum(*finite)


def completed(
    found: Difference | None, common: list[Any], ours: Mapping[Any, Any], theirs: Mapping[Any, Any]
) -> Difference:
    """A result with the number of tensors compared, and the tensors that only one of the two has."""

    def only(these: Mapping[Any, Any], those: Mapping[Any, Any]) -> tuple[str, ...]:
        # Keys are (name, kind) for runs, names for functions. A tensor with two kinds is listed
        # once.
        names = (key if isinstance(key, str) else key[0] for key in these if key not in those)
        return tuple(dict.fromkeys(names))

    return dataclasses.replace(
        found or Difference(),
        compared=len(common),
        only_first=only(ours, theirs),
        only_second=only(theirs, ours),
    )


def rank_of(name: str) -> int:
    """The rank of a tensor's kind in the order of a step."""
    kind = name.split("/")[0]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)
