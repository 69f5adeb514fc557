"""The grid of a pipeline, and the records of one of its cells."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tailrace.page.followed import FollowedRun
from tailrace.runs.tables.stored import StoredTable, describing
from tailrace.taps.reductions import STATS

FORWARD = ("input", "buffer", "param", "state", "activation", "loss", "output", "aux")
BACKWARD = ("cotangent", "grad")
"""Kinds of tensors that the forward and the backward of a stage compute or read."""

MOST_TICKS = 400
"""The most columns of a grid."""
TAIL_ROWS = 4096
"""How far back to search for a microbatch of the last recorded step."""


def grid(followed: FollowedRun) -> dict[str, Any] | None:
    """The plan of a run as a grid, with a row per device and a column per tick; None without one."""
    plan = followed.readable().plan
    if plan is None:
        return None
    ticks = []
    # Not `plan.ticks`, which expands the whole plan.
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
    """The latest records of a stage's forward ("F") or backward ("B") of a microbatch."""
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
    # -1 is one value for the whole step; each of its cells shows it.
    rows = np.flatnonzero((of == microbatch) | (of == -1))
    if not len(rows):
        return []
    row = int(rows[-1])
    step = int(tail.column("step")[row])
    one = dataclasses.replace(tail, start=tail.start + row, stop=tail.start + row + 1)
    columns = STATS.names if table.kind == "stats" else ("values",)
    values = {c: one.column(c)[0].astype(np.float64) for c in columns or ()}
    # Layers of a scan share a name, and a cell shows their mean.
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
