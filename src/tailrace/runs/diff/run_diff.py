"""`tr.diff`: where two runs, or two functions, first differ, and by how much."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.checks import check_number
from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.records.history import History
from tailrace.records.record import Record
from tailrace.records.records import HasRecords
from tailrace.runs.diff.difference import (
    UPDATING,
    Difference,
    common_rows,
    completed,
    first_row,
    rank_of,
)
from tailrace.runs.diff.functions import Called, Named, diff_functions
from tailrace.runs.diff.renaming import Names, renamed
from tailrace.runs.reader import Run, open_run

Comparable = str | os.PathLike[str] | HasRecords | Callable[..., object]
"""A run, by its path or opened, or a trainer or model after a fit; or a function of arrays."""


def diff(
    first: Comparable,
    second: Comparable,
    batch: Tree = None,
    *,
    devices: tuple[Named, Named] | None = None,
    dtypes: tuple[DTypeLike, DTypeLike] | None = None,
    names: Names | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference:
    """Find where two runs, or two functions, first differ.

    Args:
        first: a run (`tr.open_run`, its path, or a trainer or model after a fit), or a function of
            arrays.
        second: likewise; to compare devices or dtypes, the same function again.
        batch: for functions: their argument; a tuple means several arguments.
        devices: for functions: the device of each: one of `jax.devices()`, its index, or a platform
            such as "cpu" or "cpu:1". Without it, both run on the first device.
        dtypes: for functions: the dtype to cast the floats of the batch to, for each; None for no
            cast. The inputs are then not compared.
        names: how tensors of the second are called in the first: a dict of names, or of what
            follows the kind in them (`{"fc1": "dense", "fc1.weight": "dense/kernel"}`), or a
            function of a name.
        rtol: differences up to this fraction of the largest value of a tensor are ignored.
        atol: differences up to this are ignored too.

    Two runs are compared where both have records: by step, microbatch and replica. Two functions are
    run once each; tensors with the same name and shape in both are compared whole, whatever their
    dtypes. A NaN equals a NaN.

    Returns:
        A `Difference`, which prints as a sentence and is false if nothing differs.

    Raises:
        OptionError: the two sides are of different kinds, or an argument does not belong to theirs.
        RunError: a run directory cannot be read.

    >>> import jax, jax.numpy as jnp, tailrace as tr
    >>> def f(x):
    ...     with jax.named_scope("layer"):
    ...         return jnp.tanh(x) * 2
    >>> def g(x):
    ...     with jax.named_scope("layer"):
    ...         return jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32) * 2
    >>> tr.diff(f, g, jnp.linspace(0, 1, 5), rtol=1e-5).tensor
    'activation/layer:tanh'
    >>> bool(tr.diff(f, f, jnp.linspace(0, 1, 5), devices=("cpu", jax.devices()[0])))
    False
    """
    rtol = check_number("rtol", rtol, error=OptionError)
    atol = check_number("atol", atol, error=OptionError)
    placed = {"a batch": batch, "devices": devices, "dtypes": dtypes}
    # Before functions: a model after a fit has records, and may be callable too.
    if _is_run(first) and _is_run(second):
        for what, value in placed.items():
            if value is not None:
                raise OptionError(f"tr.diff takes {what} for two functions, not for two runs.")
        return _diff_runs(_opened(first), _opened(second), names, rtol, atol)
    if callable(first) and callable(second):
        if batch is None:
            raise OptionError("tr.diff of two functions needs a batch: tr.diff(f, g, batch).")
        on, cast = _pair("devices", devices), _pair("dtypes", dtypes)
        ours, theirs = Called(first, batch, on[0], cast[0]), Called(second, batch, on[1], cast[1])
        return diff_functions(ours, theirs, names, rtol, atol)
    raise OptionError(
        f"tr.diff compares two runs or two functions. Received: {type(first).__name__} and "
        f"{type(second).__name__}."
    )


def _pair(name: str, value: object) -> tuple[Any, Any]:
    if value is None:
        return (None, None)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OptionError(
            f"{name} are two, one for each function: {name}=(first, second). Received: {value!r}."
        )
    return (value[0], value[1])


def _is_run(value: object) -> bool:
    return isinstance(value, str | os.PathLike | Run) or hasattr(value, "records")


def _opened(value: object) -> Any:
    return open_run(Path(value)) if isinstance(value, str | os.PathLike) else value


def _diff_runs(
    first: HasRecords, second: HasRecords, names: Names | None, rtol: float, atol: float
) -> Difference:
    ours = _series(first)
    theirs = renamed(_series(second), names)
    found: Difference | None = None
    least: tuple[Any, ...] = ()
    common = [key for key in ours if key in theirs]
    seen = 0
    for number, key in enumerate(common):
        one, other = ours[key](), theirs[key]()
        left, right = common_rows(one, other)
        seen += len(left)
        parted = first_row(one, other, left, right, rtol, atol)
        if parted is None:
            continue
        # By time first, then by the order of a step: what differs first is nearest to the cause. What
        # is computed once from all microbatches (microbatch -1) comes after them.
        kind = rank_of(key[0])
        rank = (parted.step, kind >= UPDATING, parted.microbatch, kind, number)
        if found is None or rank < least:
            found, least = parted, rank
    if not seen:
        raise OptionError(
            "The two runs have nothing in common to compare: no tensor, or no step, is in both."
        )
    return completed(found, common, ours, theirs)


def _series(run: HasRecords) -> dict[tuple[str, str], Callable[[], Record]]:
    """Records and metrics of a run, read one at a time."""
    records, history = run.records, getattr(run, "history", None)
    if not isinstance(history, History):  # front ends have other kinds of history
        history = History()

    def metric(name: str) -> Record:
        # Values of validations have steps of their own, without microbatches and replicas.
        own = name not in history.step_names
        values = history[name].reshape(-1, 1, 1) if own else history.each(name)
        tags = np.meshgrid(history.steps_of(name), *map(np.arange, values.shape[1:]), indexing="ij")
        steps, microbatches, replicas = (tag.reshape(-1) for tag in tags)
        flat = values.reshape(-1)
        return Record(
            f"history/{name}", "metric", flat, steps, microbatches, replicas, 0 * steps - 1
        )

    found: dict[tuple[str, str], Callable[[], Record]] = {}
    for key in records:
        # Read one at a time when they are compared: all records of two runs may not fit into
        # memory.
        found[key] = lambda key=key: records[key]
    for name in history:
        found[f"history/{name}", "metric"] = lambda name=name: metric(name)
    return found
