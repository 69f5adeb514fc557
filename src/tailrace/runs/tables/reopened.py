"""Tables of a run that another process wrote, opened again to be appended to.

A fit that resumes from a checkpoint continues its run. Rows after the checkpoint will come again, so
tables are truncated to the rows that existed then. Steps do not identify those rows: a trainer may
have gone back to an earlier step and computed it twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tailrace.errors import RunError
from tailrace.runs.storage.attributes import unsealed
from tailrace.runs.storage.files import ZarrGroup
from tailrace.runs.tables.columns import Columns
from tailrace.runs.tables.tables import ExecutionTable, HistoryTable, RecordTable
from tailrace.runs.tables.validations import ValidationTable


@dataclasses.dataclass(frozen=True)
class ReopenedTables:
    """The tables of a run up to some step.

    Attributes:
        history: loss and metrics.
        executions: when executions ended.
        validations: the values of validations; None without any.
        records: the tables of records, in order.
        starts: for each of them, the number of rows of fits before the resumed one.
    """

    history: HistoryTable
    executions: ExecutionTable
    validations: ValidationTable | None
    records: list[RecordTable]
    starts: list[int]

    @property
    def counts(self) -> dict[str, Any]:
        """The number of committed rows of each."""
        return {
            "history": self.history.columns.committed,
            "records": [table.columns.committed for table in self.records],
            "executions": self.executions.columns.committed,
            "validations": 0 if self.validations is None else self.validations.columns.committed,
        }


def reopen(root: ZarrGroup, end: Mapping[str, Any]) -> ReopenedTables:
    """The tables of a run, truncated to their rows at the time of a checkpoint.

    Args:
        root: the Zarr group of the run, open for writing.
        end: the number of rows of each table: `history`, `executions`, `validations` (none before
            they were kept), `records`; and `starts`.
    """
    there = unsealed(root.attrs["committed"])
    # All counts are checked before any table is cut: a run that does not match stays as it was.
    kept = [*zip(end["records"], end["starts"], strict=True)]
    _check(end["history"], there["history"])
    _check(end["executions"], there["executions"])
    validations = int(end.get("validations", 0))
    _check(validations, there.get("validations", 0))
    # Tables after those of the checkpoint are left where they are; their numbers are used again,
    # and overwrite them.
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
        HistoryTable.reopened(history),
        ExecutionTable.reopened(executions),
        ValidationTable.reopened(root, validations),
        records,
        starts,
    )


def rows_before(root: ZarrGroup, step: int) -> dict[str, Any]:
    """The rows of the tables up to the last one of a step before `step`, as `reopen` takes it.

    The last one, because a trainer that went back has computed some steps twice.
    """
    there = unsealed(root.attrs["committed"])
    records = [
        _up_to(root["records"][str(number)], "step", count, step)
        for number, count in enumerate(there["records"])
    ]
    validations = there.get("validations", 0)
    if validations:  # by the number of steps before it, so one at `step` itself stays
        validations = _up_to(root["validations"], "step", validations, step + 1)
    return {
        "validations": validations,
        "history": _up_to(root["history"], "step", there["history"], step),
        "executions": _up_to(root["executions"], "first_step", there["executions"], step),
        "records": records,
        "starts": records,
    }


def fewer(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The smaller of two numbers of rows, for each table; the second if the first has none.

    >>> fewer({"history": 8, "records": [8], "starts": [8]}, {"history": 5, "records": [5, 2]})
    {'history': 5, 'records': [5], 'starts': [5]}
    """
    if not one:
        return dict(other)

    def least(name: str, count: Any) -> Any:
        if name not in ("records", "starts"):
            return min(count, other.get(name, count))
        # Tables that came after the first position do not count; one that is gone is reported later.
        rows = [*other["records"], *count[len(other["records"]) :]]
        return [min(pair) for pair in zip(count, rows, strict=False)]

    return {name: least(name, count) for name, count in one.items()}


def _up_to(group: ZarrGroup, by: str, count: int, step: int) -> int:
    if by not in group or not count:
        return 0
    before = np.flatnonzero(np.asarray(group[by][:count]) < step)
    return int(before[-1]) + 1 if len(before) else 0


def _check(wanted: int, there: int) -> None:
    """Check that the checkpoint is not ahead of the run: rows are durable before it is written."""
    if wanted > there:
        raise RunError(
            f"A run continues where its checkpoint was taken, after {wanted} rows, and the run "
            f"directory holds {there}: it is another one. Give run_dir the directory of that fit, or a "
            f"new one and checkpoint= too."
        )
