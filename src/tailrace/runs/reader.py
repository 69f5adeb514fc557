"""`tr.open_run`: a run directory, read lazily, also while it is being written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.base.files import read_limit
from tailrace.base.messages import shown
from tailrace.errors import OptionError, RunError
from tailrace.records.history import History, one_of
from tailrace.records.records import Records
from tailrace.runs.compilations import read_compilations
from tailrace.runs.info import read_catalogue, read_info
from tailrace.runs.interventions import read_interventions
from tailrace.runs.nonfinite_reports import read_reports
from tailrace.runs.storage.attributes import unsealed
from tailrace.runs.storage.files import ZarrGroup
from tailrace.runs.storage.lock import is_locked
from tailrace.runs.tables.stored import (
    StoredTable,
    committed,
    describing,
    open_root,
    read_rows,
    stored_records,
    stored_tables,
)
from tailrace.runs.tables.tables import EXECUTION, OPTIONAL, TIMES
from tailrace.runs.tables.validations import read_validations
from tailrace.taps.catalogue import Catalogue, Select

if TYPE_CHECKING:
    from tailrace.pipeline import Plan
    from tailrace.runs.export.pictures import ExponentHistogram, Heatmap
    from tailrace.runs.export.ridges import ExponentRidges


def open_run(directory: str | os.PathLike[str], *, limit: int | str | None = None) -> Run:
    """Open a run directory that `tr.Trainer(..., run_dir=...)` wrote, or is writing.

    Only descriptions are read; arrays are read on demand. Untrusted runs are safe to open: nothing in
    them is executed, and memory is limited.

    Args:
        directory: the run directory.
        limit: the most memory of one array, in bytes or as "8GiB". None: the environment variable
            `TAILRACE_READ_LIMIT`, or 4 GiB.

    Raises:
        RunError: there is no run, it is damaged, or it has a newer format.

    Example:
        >>> import tempfile, numpy as np, optax, tailrace as tr
        >>> def loss_fn(w, x):
        ...     return ((x - w) ** 2).mean()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = tr.Trainer(
        ...         loss_fn, optax.sgd(0.1), np.float32(0), run_dir=folder, observe="grad/*"
        ...     )
        ...     history = trainer.fit(tr.batches(np.ones(64, np.float32), 8), progress=False)
        ...     run = tr.open_run(folder)
        ...     print(run, run.records.names, bool((run.history.loss == history.loss).all()))
        Run(8 steps, 1 records, ended) ['grad/params'] True
    """
    if not isinstance(directory, str | os.PathLike) or isinstance(os.fspath(directory), bytes):
        raise OptionError(
            f"tr.open_run takes the path of a run directory. Received: {directory!r}."
        )
    return Run(Path(directory), read_limit(limit))


class Run:
    """A run directory; made by `tr.open_run`.

    It shows the rows that were complete when it was opened; `refresh` updates it.

    Attributes:
        directory: its path.
        info: its description: versions, devices, options, taps.
    """

    def __init__(self, directory: Path, limit: int | None = None) -> None:
        self.directory = directory
        self._limit = read_limit(limit)
        self.info: dict[str, Any] = read_info(directory, self._limit)
        self._root: Any = None
        self._history: History | None = None
        self.refresh()

    def refresh(self) -> Run:
        """Update to what has been written since; returns the run itself."""
        self._root = open_root(self.directory, self._limit)
        # Read once: all properties then show the same rows, however the run grows.
        self._counts = committed(self.directory, self._root)
        self._history = None
        return self

    @property
    def is_ended(self) -> bool:
        """Whether the fit that wrote it has ended; false while it runs and after a crash."""
        return not self._root.attrs.get("writing", True)

    @property
    def is_interrupted(self) -> bool | None:
        """Whether its writer is gone without having ended it; None if that is unknown."""
        if self.is_ended:
            return False
        # A process that was killed wrote no end, but its lock is gone.
        locked = is_locked(self.directory)
        if locked is not False:
            return None if locked is None else False
        # Read again: the writer may have ended it since this run was opened.
        with contextlib.suppress(RunError):
            return bool(open_root(self.directory, self._limit).attrs.get("writing", True))
        return None

    @property
    def state(self) -> str:
        """Either "ended", "growing" or "interrupted"; "growing, or interrupted" if that is unknown."""
        if self.is_ended:
            return "ended"
        interrupted = self.is_interrupted
        if interrupted is None:
            return "growing, or interrupted"
        return "interrupted" if interrupted else "growing"

    @property
    def catalogue(self) -> Catalogue:
        """The tensors of the training step."""
        with describing(self.directory, "the catalogue in run.json"):
            return read_catalogue(self.info["catalogue"], self.info.get("use_order", ()))

    @property
    def plan(self) -> Plan | None:
        """The plan of the pipeline; None without a pipeline."""
        from tailrace.pipeline import Plan

        text = self.info.get("plan")
        with describing(self.directory, "the plan in run.json"):
            return None if text is None else Plan.from_json(text)

    @property
    def records(self) -> Records:
        """The records of all fits, as in `trainer.records`."""
        # Listed only when they are used: a run may have thousands of tensors.
        return Records(stored=lambda: stored_records(self.directory, self._root))

    @property
    def history(self) -> History:
        """Loss, metrics and values of validations of all fits, as `fit` returns them."""
        if self._history is None:
            with describing(self.directory, "history"):
                self._history = self._read_history()
        return self._history

    # Shapes are checked here, where an error names the run: later, NumPy's would be about
    # broadcasting.
    def _read_history(self) -> History:
        count = self._counts["history"]
        if not count:
            return History()
        group = self._root["history"]

        def read(name: str) -> np.ndarray:
            return read_rows(self.directory, "history", group, name, 0, count)

        names = [str(name) for name in unsealed(group.attrs)["names"]]
        arrays = {name: read(f"metric{number}") for number, name in enumerate(names)}
        if not arrays:
            raise RunError(f"The run '{shown(str(self.directory))}' is damaged: it has no loss.")
        one = one_of(arrays)
        if len({array.shape for array in arrays.values()}) > 1 or one.ndim != 3:
            raise ValueError("its arrays are not of one shape [step, microbatch, replica]")
        steps, weights = read("step"), read("weight") if self._has(group, "weight") else None
        if steps.ndim != 1 or (weights is not None and weights.shape != one.shape):
            raise ValueError("steps and weights do not fit the loss")
        history = History(int(steps[0]), *one.shape[1:])
        history.add(arrays, weights, steps)
        history.add_validations(*read_validations(self.directory, self._root))
        return history

    @property
    def tables(self) -> list[StoredTable]:
        """The tables of records on disk, for readers of many tensors at once."""
        return stored_tables(self.directory, self._root)

    @property
    def executions(self) -> dict[str, np.ndarray]:
        """`first_step`, `steps` and `ended` (seconds since 1970) of each execution.

        If known, also `fit` (its first step), `epoch`, `first_element`, `element_count` and `resumed`;
        `times`, the seconds since the execution before by what the device did: it computed, or waited
        for data, compilation, validation, callbacks, checkpoints or the host, [executions, 7];
        with `tr.Trainer(fingerprint=True)` a fingerprint for each group of tensors, and their `chain`.
        Empty arrays for a run that was written before executions were kept.
        """
        with describing(self.directory, "executions"):
            # Not in `_counts`: runs of older versions have no such table.
            count = int(self._root.attrs["committed"].get("executions", 0))
            if count < 0:
                raise ValueError("a number of rows is negative")
            if not count:
                return {name: np.zeros(0, dtype) for name, dtype in EXECUTION.items()}
            group = self._root["executions"]
            return {
                name: read_rows(self.directory, "executions", group, name, 0, count)
                for name in (*EXECUTION, *(n for n in (*OPTIONAL, TIMES) if self._has(group, n)))
            }

    @property
    def elements(self) -> np.ndarray | None:
        """The digest of each consumed element, [steps, microbatches, replicas]; None without any."""
        with describing(self.directory, "history"):
            count, group = self._counts["history"], self._root["history"]
            if not count or not self._has(group, "elements"):
                return None
            return read_rows(self.directory, "history", group, "elements", 0, count)

    def _has(self, group: ZarrGroup, name: str) -> bool:
        """Whether a table has an optional column; one without a readable description is damaged."""
        if name in group:
            return True
        # Only of a run that has ended: a column that is being created has a folder before the rest.
        if self.is_ended and (self.directory / group.path / name).exists():
            raise ValueError(f"the description of {name} is missing, or cannot be read")
        return False

    @property
    def interventions(self) -> list[dict[str, Any]]:
        """Where training went back, with `kind`, `step` and `reason` of each.

        The kind is "rewind", or "restore" for `trainer.restore` and a best state.
        """
        return read_interventions(self.directory)

    @property
    def nonfinite_reports(self) -> list[dict[str, Any]]:
        """The reports of `tr.stop_on_nonfinite` that stopped the run (`step`, `text`, `culprit`)."""
        return read_reports(self.directory)

    @property
    def compilations(self) -> list[dict[str, Any]]:
        """The compilations, with `purpose`, `cause`, `seconds`, `shared` and `ended` of each."""
        return read_compilations(self.directory)

    def histogram(self, select: Select = "grad/*", steps: slice = slice(None)) -> ExponentHistogram:
        """All values of the selected tensors, counted by binary exponent; shows itself in a notebook.

        Args:
            select: which records: those with `reduce="histogram"`, or whole tensors.
            steps: from which steps: `slice(100, 200)`, or `slice(-1, None)` for the last recorded.
        """
        from tailrace.runs.export.pictures import histogram

        return histogram(self, select, steps)

    def histograms(self, select: Select = "grad/*", steps: slice = slice(None)) -> ExponentRidges:
        """The same for each of the selected tensors, one row each.

        Args:
            select: which records: those with `reduce="histogram"`, or whole tensors.
            steps: from which steps: `slice(100, 200)`, or `slice(-1, None)` for the last recorded.
        """
        from tailrace.runs.export.ridges import ridges

        return ridges(self, select, steps)

    def heatmap(
        self,
        select: Select = "grad/*",
        field: str = "std",
        steps: slice = slice(None),
        scale: tuple[float, float] | None = None,
    ) -> Heatmap:
        """The selected tensors over steps, one number each; shows itself in a notebook.

        Args:
            select: the records: norms, statistics or histograms.
            field: the statistic, if statistics were recorded.
            steps: from which steps: `slice(100, 200)`, or `slice(-1, None)` for the last recorded.
            scale: the limits of the colour scale. None for powers of ten around the values.
                `scale=other.scale` gives two pictures the same colours.
        """
        from tailrace.runs.export.pictures import heatmap

        return heatmap(self, select, field, steps, scale)

    def to_tensorboard(
        self, logdir: str | os.PathLike[str], select: Select = "*", every: int = 1
    ) -> int:
        """Write TensorBoard event files: scalars, statistics, and histograms bin for bin.

        Args:
            logdir: the log directory of TensorBoard.
            select: the records to write.
            every: write only every n-th step.

        Returns:
            The number of values written.
        """
        from tailrace.runs.export.tensorboard import write_events

        return write_events(self.records, self.history, logdir, select, every)

    def __repr__(self) -> str:
        return f"Run({self._counts['history']} steps, {len(self.records)} records, {self.state})"

    def _repr_html_(self) -> str:
        import html

        # Escaped, because the file is untrusted; without what is too long for a table.
        rows = "".join(
            f"<tr><td>{html.escape(shown(str(name)))}</td><td>{html.escape(shown(str(v)))}</td></tr>"
            for name, v in self.info.items()
            if name not in ("catalogue", "use_order", "plan")
        )
        return f"<b>{html.escape(repr(self))}</b><table>{rows}</table>{self.history._repr_html_()}"
