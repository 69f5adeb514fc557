"""`tr.diff`: where two runs, or two functions, part for the first time, and by how much."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tailrace.errors import OptionError
from tailrace.notes import shown
from tailrace.observe.records import Record
from tailrace.program.observed import observe
from tailrace.runs.reader import Run, open_run
from tailrace.tensors.taps import Tap

ORDER = (
    *("input", "param", "buffer", "optimizer", "activation", "loss", "output", "aux", "cotangent"),
    *("grad", "accumulated", "reduced", "update", "updated", "history"),
)
"""In which order a step makes its tensors, by kind: the first that differs is nearest the cause."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """What `tr.diff` found; true if the two part anywhere.

    Attributes:
        tensor: the first tensor that differs, "history/<name>" for a metric; empty if none does.
        kind: what was kept of it.
        field: which statistic, or which leaf of a tree, differs most there; empty without fields.
        step: the first step in which they differ; -1 for functions.
        microbatch: the microbatch there; -1 where a step has one value.
        replica: the replica there; -1 where all have the same.
        largest: the largest difference of two values there.
        relative: that, divided by the largest value of either.
        values: the two values that differ most.
        compared: how many tensors were compared.
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
    values: tuple[float, float] = (0.0, 0.0)
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
            f"They part {'in ' + ', '.join(where) + ' ' if where else ''}at {what}: "
            f"{self.values[0]:.9g} and {self.values[1]:.9g}, the largest difference "
            f"{self.largest:.3g}, relative {self.relative:.3g}.{rest}"
        )


def diff(
    first: Any, second: Any, batch: Any = None, *, rtol: float = 0.0, atol: float = 0.0
) -> Difference:
    """Where two runs, or two functions, part for the first time.

    Args:
        first: a run (`tr.open_run`, its path, or a trainer after a fit), or a function of arrays.
        second: likewise.
        batch: for functions: what they are called with; a tuple is taken as several arguments.
        rtol: differences up to this part of the largest value of a tensor do not count.
        atol: differences up to this do not count either.

    Two runs are compared where both have records: by step, microbatch and replica. Two functions
    are run once each; tensors that have one name and one shape in both are compared whole,
    whatever their dtypes. A NaN equals a NaN.

    Returns:
        A `Difference`: it prints as a sentence, and is false where nothing differs.

    >>> import jax, jax.numpy as jnp, tailrace as tr
    >>> def f(x):
    ...     with jax.named_scope("layer"):
    ...         return jnp.tanh(x) * 2
    >>> def g(x):
    ...     with jax.named_scope("layer"):
    ...         return jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32) * 2
    >>> tr.diff(f, g, jnp.linspace(0, 1, 5), rtol=1e-5).tensor
    'activation/layer:tanh'
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise OptionError(f"{name} is a number of at least 0. Received: {name}={value!r}.")
    if _is_run(first) and _is_run(second):
        if batch is not None:
            raise OptionError("tr.diff takes a batch for two functions, not for two runs.")
        return _diff_runs(_opened(first), _opened(second), rtol, atol)
    if callable(first) and callable(second):
        if batch is None:
            raise OptionError("tr.diff of two functions needs a batch: tr.diff(f, g, batch).")
        return _diff_functions(first, second, batch, rtol, atol)
    raise OptionError(
        f"tr.diff compares two runs or two functions. Received: {type(first).__name__} and "
        f"{type(second).__name__}."
    )


def _is_run(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | Run) or hasattr(value, "records")


def _opened(value: Any) -> Any:
    return open_run(Path(value)) if isinstance(value, str | os.PathLike) else value


def _diff_runs(first: Any, second: Any, rtol: float, atol: float) -> Difference:
    ours, theirs = _series(first), _series(second)
    found: Difference | None = None
    least: tuple[Any, ...] = ()
    common = [key for key in ours if key in theirs]
    seen = 0
    for number, key in enumerate(common):
        one, other = ours[key](), theirs[key]()
        left, right = _common_rows(one, other)
        seen += len(left)
        parted = _first_row(one, other, left, right, rtol, atol)
        if parted is None:
            continue
        rank = (parted.step, parted.microbatch, _rank(key[0]), number)
        if found is None or rank < least:
            found, least = parted, rank
    if not seen:
        raise OptionError(
            "The two runs have nothing in common to compare: no tensor, or no step, is in both."
        )
    return _completed(found, common, ours, theirs)


def _series(run: Any) -> dict[tuple[str, str], Callable[[], Record]]:
    """Records and metrics of a run, read one at a time."""
    records, history = run.records, run.history

    def metric(name: str) -> Record:
        values = history.each(name)
        tags = np.meshgrid(history.steps, *map(np.arange, values.shape[1:]), indexing="ij")
        steps, microbatches, replicas = (tag.reshape(-1) for tag in tags)
        flat = values.reshape(-1)
        return Record(
            f"history/{name}", "metric", flat, steps, microbatches, replicas, 0 * steps - 1
        )

    found: dict[tuple[str, str], Callable[[], Record]] = {}
    for key in records:
        found[key] = lambda key=key: records[key]
    for name in history:
        found[f"history/{name}", "metric"] = lambda name=name: metric(name)
    return found


def _common_rows(one: Record, other: Record) -> tuple[np.ndarray, np.ndarray]:
    """The rows of either that belong to the same step, microbatch and replica; the last of each."""

    def rows(record: Record) -> dict[tuple[int, ...], int]:
        tags = zip(
            record.steps.tolist(),
            record.microbatches.tolist(),
            record.replicas.tolist(),
            strict=True,
        )
        return {tag: row for row, tag in enumerate(tags)}

    mine, theirs = rows(one), rows(other)
    tags = sorted(mine.keys() & theirs.keys())
    return np.array([mine[t] for t in tags], int), np.array([theirs[t] for t in tags], int)


def _first_row(
    one: Record, other: Record, left: np.ndarray, right: np.ndarray, rtol: float, atol: float
) -> Difference | None:
    """The first row in which two records of one tensor differ."""
    if not len(left):
        return None
    worst: dict[int, tuple[float, str, float, tuple[float, float]]] = {}
    for field, mine, theirs in _fields(one.values, other.values):
        if mine.shape[1:] != theirs.shape[1:]:
            text = f"shapes {list(mine.shape[1:])} and {list(theirs.shape[1:])}"
            worst = {0: (float("nan"), text, float("nan"), (float("nan"), float("nan")))}
            break
        a, b = (_flat(mine[left]), _flat(theirs[right]))
        off, size = _apart(a, b)
        rows = np.flatnonzero((off > atol + rtol * size[:, None]).any(axis=1))
        if len(rows):
            row = int(rows[0])
            at = int(np.argmax(off[row]))
            largest = float(off[row, at])
            relative = largest / float(size[row]) if size[row] else float("inf")
            if row not in worst or relative > worst[row][2]:
                worst[row] = (largest, field, relative, (float(a[row, at]), float(b[row, at])))
    if not worst:
        return None
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


def _fields(one: Any, other: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """What there is to compare in the values of two records: statistics, or leaves of a tree."""
    if isinstance(one, np.ndarray) and one.dtype.names:
        for name in one.dtype.names:
            yield name, one[name], other[name]
        return
    paths = jax.tree_util.tree_flatten_with_path(one)[0]
    for (path, mine), theirs in zip(paths, jax.tree.leaves(other), strict=False):
        yield jax.tree_util.keystr(path), mine, theirs


def _flat(values: np.ndarray) -> np.ndarray:
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    flat = values.reshape(len(values), -1).astype(wide)
    return np.abs(flat) if values.dtype.kind == "c" else flat


def _apart(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far values are apart, and the largest finite value of each row."""
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    off = np.where(equal, 0.0, np.where(np.isfinite(off), off, np.inf))
    finite = [np.where(np.isfinite(v), np.abs(v), 0).max(axis=1, initial=0.0) for v in (a, b)]
    return off, np.maximum(*finite)


def _diff_functions(f: Any, g: Any, batch: Any, rtol: float, atol: float) -> Difference:
    args = batch if isinstance(batch, tuple) else (batch,)
    ours, theirs = ({e.name: e for e in observe(h, []).tensors(*args)} for h in (f, g))
    common = [n for n, e in ours.items() if n in theirs and theirs[n].shape == e.shape]
    if not common:
        raise OptionError(
            "The two functions have no tensor in common: none has one name and one shape in both."
        )
    wanted = set(common)
    taps = [Tap(lambda entry: entry.name in wanted, reduce="tensor")]
    (_, mine), (_, other) = (observe(h, taps)(*args) for h in (f, g))
    keys = [(name, "tensor") for name in common if name in mine and name in other]
    keys.sort(key=lambda key: _rank(key[0]))
    for key in keys:
        one, two = mine[key], other[key]
        parted = _first_row(one, two, *_common_rows(one, two), rtol, atol)
        if parted is not None:
            parted = dataclasses.replace(parted, step=-1, microbatch=-1, replica=-1)
            return _completed(parted, keys, ours, theirs)
    return _completed(None, keys, ours, theirs)


def _completed(
    found: Difference | None, common: list[Any], ours: Mapping[Any, Any], theirs: Mapping[Any, Any]
) -> Difference:
    def only(these: Mapping[Any, Any], those: Mapping[Any, Any]) -> tuple[str, ...]:
        names = (key if isinstance(key, str) else key[0] for key in these if key not in those)
        return tuple(dict.fromkeys(names))

    return dataclasses.replace(
        found or Difference(),
        compared=len(common),
        only_first=only(ours, theirs),
        only_second=only(theirs, ours),
    )


def _rank(name: str) -> int:
    kind = name.split("/")[0]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)
