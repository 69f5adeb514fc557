"""The table of validations: one row each, with the number of steps before it and its values."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tailrace.records.sinks import Validated
from tailrace.runs.storage.attributes import sealed, unsealed
from tailrace.runs.storage.files import ZarrGroup
from tailrace.runs.tables.columns import Columns
from tailrace.runs.tables.stored import describing, read_rows

GROUP = "validations"
"""The folder of the table; a run without validations has none."""


class ValidationTable:
    """Validations on disk: created for the first one, then appended to."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._numbers = {name: i for i, name in enumerate(unsealed(columns.group.attrs)["names"])}

    @classmethod
    def create(cls, root: ZarrGroup) -> ValidationTable:
        """An empty table; replaces one whose rows no longer count."""
        group = root.create_group(GROUP, overwrite=True)
        group.attrs.put(sealed({"names": []}))
        columns = Columns(group, "validation")
        columns.add_column("step", np.dtype(np.int64), (), ())
        return cls(columns)

    @classmethod
    def reopened(cls, root: ZarrGroup, count: int) -> ValidationTable | None:
        """The table of a run, of which the first rows count; None if there are none."""
        if not count:
            return None
        return cls(Columns.reopened(root[GROUP], "validation", count))

    def append(self, validated: Validated) -> None:
        """Buffer the values of one validation; those that it lacks are NaN."""
        columns, rows = self.columns, {"step": np.array([validated.step])}
        for name, value in validated.values.items():
            # Numbered columns: a name may have letters that no file name has.
            if name not in self._numbers:
                number = self._numbers[name] = len(self._numbers)
                about = {"long_name": f"val_{name}"}
                columns.add_column(
                    f"metric{number}", np.dtype(np.float64), (), (), attributes=about
                )
                columns.group.attrs.put(sealed({"names": list(self._numbers)}))
            rows[f"metric{self._numbers[name]}"] = np.array([value], np.float64)
        columns.append(1, rows)


def read_validations(directory: Path, root: ZarrGroup) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The number of steps before each validation, and the values by name.

    Empty for a run without validations, or one that was written before they were kept.
    """
    # A `ValueError` in here is reported as damage to this table.
    with describing(directory, GROUP):
        count = int(root.attrs["committed"].get(GROUP, 0))
        if count < 0:
            raise ValueError("a number of rows is negative")
        if not count:
            return np.zeros(0, np.int64), {}
        group = root[GROUP]

        def read(name: str) -> np.ndarray:
            values = read_rows(directory, GROUP, group, name, 0, count)
            if values.ndim != 1:
                raise ValueError(f"{name} is not one value per validation")
            return values

        names = [str(name) for name in unsealed(group.attrs)["names"]]
        return read("step"), {name: read(f"metric{i}") for i, name in enumerate(names)}
