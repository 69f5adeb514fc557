"""The grid of a pipeline, and the records behind one of its cells."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tailrace.page.followed import FollowedRun
from tailrace.runs.tables.stored import StoredTable, describing
from tailrace.taps.reductions import STATS

FORWARD = ("input", "buffer", "param", "activation", "loss", "output", "aux")
BACKWARD = ("cotangent", "grad")
"""Kinds of tensors that the two passes of a stage make or read."""

MOST_TICKS = 400
"""Columns of a grid beyond that are not shown."""
TAIL_ROWS = 4096
"""How far back a microbatch of the last recorded step is looked for."""


def grid(followed: FollowedRun) -> dict[str, Any] | None:
    """The plan of a run as a grid: a row a device, a column a tick; None without a pipeline."""
    plan = followed.readable().plan
    if plan is None:
        return None
    ticks = []
    for number, tick in enumerate(plan.iter_ticks()):
        if number == MOST_TICKS:
            break
        ticks.append([[u.device, u.kind, u.stage, u.microbatch] for u in tick])
    return {
        "devices": list(plan.devices),
        "stages": [plan.stage_name(stage) for stage in range(plan.stages)],
        "schedule": str(plan.schedule),
        "microbatches": plan.microbatches,
        "bubble": plan.bubble,
        "num_ticks": plan.num_ticks,
        "ticks": ticks,
    }


def cell_records(
    followed: FollowedRun, kind: str, stage: int, microbatch: int
) -> list[dict[str, Any]]:
    """What was recorded in a stage's forward ("F") or backward ("B") of a microbatch, lately."""
    kinds = FORWARD if kind == "F" else BACKWARD
    found: list[dict[str, Any]] = []
    for table in followed.readable().tables:
        if table.kind not in ("stats", "norm"):
            continue
        with describing(table.directory, table.path):
            stages = np.asarray(table.group["stage"][:])
            wanted = [
                (number, name)
                for number, name in enumerate(table.names)
                if stages[number] == stage and name.split("/")[0] in kinds
            ]
            if wanted:
                found += _values(table, wanted, microbatch)
    return found


def _values(
    table: StoredTable, wanted: list[tuple[int, str]], microbatch: int
) -> list[dict[str, Any]]:
    tail = dataclasses.replace(table, start=max(0, table.stop - TAIL_ROWS))
    of = tail.column("microbatch")
    rows = np.flatnonzero((of == microbatch) | (of == -1))
    if not len(rows):
        return []
    row = int(rows[-1])
    step = int(tail.column("step")[row])
    one = dataclasses.replace(tail, start=tail.start + row, stop=tail.start + row + 1)
    columns = STATS.names if table.kind == "stats" else ("values",)
    values = {c: one.column(c)[0].astype(np.float64) for c in columns or ()}
    return [
        {
            "name": name,
            "step": step,
            **{
                "norm" if column == "values" else column: float(np.mean(array[number]))
                for column, array in values.items()
            },
        }
        for number, name in wanted
    ]
