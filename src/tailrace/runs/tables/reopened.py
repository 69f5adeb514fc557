"""Tables of a run that another process wrote, opened again to be appended to.

A fit that is taken up from a checkpoint continues its run. Rows of steps behind the checkpoint come
again, so they no longer count: tables are cut back to the checkpoint's step first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tailrace.runs.tables.columns import Columns
from tailrace.runs.tables.tables import ExecutionTable, HistoryTable, RecordTable


@dataclasses.dataclass(frozen=True)
class ReopenedTables:
    """What a run holds up to some step.

    Attributes:
        history: loss and metrics.
        executions: when executions ended.
        records: the tables of records, in order.
        starts: for each of them, how many of its rows belong to fits before the one taken up.
    """

    history: HistoryTable
    executions: ExecutionTable
    records: list[RecordTable]
    starts: list[int]

    @property
    def counts(self) -> dict[str, Any]:
        """How many rows of each count."""
        return {
            "history": self.history.columns.committed,
            "records": [table.columns.committed for table in self.records],
            "executions": self.executions.columns.committed,
        }


def reopen(root: Any, first_step: int, step: int) -> ReopenedTables:
    """The tables of a run, cut back to the rows of steps before `step`.

    Args:
        root: the Zarr group of the run, open for writing.
        first_step: of the fit that is taken up.
        step: of the checkpoint.
    """
    counts = root.attrs["committed"]
    history = HistoryTable.reopened(
        _columns(root["history"], "step", "step", counts["history"], step)
    )
    executions = ExecutionTable.reopened(
        _columns(root["executions"], "execution", "first_step", counts["executions"], step)
    )
    records, starts = [], []
    for number, count in enumerate(counts["records"]):
        columns = _columns(root["records"][str(number)], "record", "step", count, step)
        records.append(RecordTable.reopened(columns))
        starts.append(
            min(columns.committed, _rows_before(columns.group, "step", count, first_step))
        )
    return ReopenedTables(history, executions, records, starts)


def _columns(group: Any, rows: str, by: str, count: int, step: int) -> Columns:
    return Columns.reopened(group, rows, _rows_before(group, by, count, step))


def _rows_before(group: Any, by: str, count: int, step: int) -> int:
    """How many of the rows that count belong to steps before `step`; rows are in the order of steps."""
    if by not in group or not count:
        return 0
    return int(np.searchsorted(np.asarray(group[by][:count]), step))
