"""Tables of a run that another process wrote, opened again to be appended to.

A fit that is taken up from a checkpoint continues its run. Rows behind the checkpoint come again, so
they no longer count: tables are cut back to the rows that there were. Steps do not tell which ones:
a trainer may go back to an earlier step, and makes it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tailrace.errors import RunError
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


def reopen(root: Any, end: Mapping[str, Any]) -> ReopenedTables:
    """The tables of a run, cut back to where they ended when a checkpoint was taken.

    Args:
        root: the Zarr group of the run, open for writing.
        end: how many rows each table had: `history`, `executions`, `records`; and `starts`.
    """
    there = root.attrs["committed"]
    kept = [*zip(end["records"], end["starts"], strict=True)]
    _check(end["history"], there["history"])
    _check(end["executions"], there["executions"])
    _check(len(kept), len(there["records"]))
    records, starts = [], []
    for number, (count, start) in enumerate(kept):
        _check(count, there["records"][number])
        columns = Columns.reopened(root["records"][str(number)], "record", count)
        records.append(RecordTable.reopened(columns))
        starts.append(start)
    history = Columns.reopened(root["history"], "step", end["history"])
    executions = Columns.reopened(root["executions"], "execution", end["executions"])
    return ReopenedTables(
        HistoryTable.reopened(history), ExecutionTable.reopened(executions), records, starts
    )


def _check(wanted: int, there: int) -> None:
    """A checkpoint is never ahead of the run: rows are on the disk before it is written."""
    if wanted > there:
        raise RunError(
            f"A run goes on where its checkpoint was taken, which is after {wanted} rows, and the run "
            f"directory holds {there}: it is another one. Give run_dir the directory of that fit, or a "
            f"new one and checkpoint= too."
        )
