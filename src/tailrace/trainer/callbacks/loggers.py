"""Callbacks that forward values during training: to a file, to TensorBoard, to any function."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.base.paths import check_path, file_in_the_way
from tailrace.errors import MissingDependency, OptionError, RunError
from tailrace.trainer.callbacks.callback import Callback, Execution

if TYPE_CHECKING:
    from tailrace.records.history import History
    from tailrace.trainer.trainer import Trainer


class Metrics(Callback):
    """Passes every value to a function as it arrives: `fn(values, step=step)`.

    That is the signature of `wandb.log` and `mlflow.log_metrics`.

    Args:
        fn: called once for each step with loss and metrics, and after each validation with its
            values (`val_<name>`); `step` counts from 0.

    Raises:
        OptionError: `fn` is not a function.

    Example:
        >>> import numpy as np, optax, tailrace as tr
        >>> loss_fn = lambda w, x: ((x - w) ** 2).mean()
        >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.5), np.float32(0))
        >>> seen = []
        >>> log = tr.callbacks.Metrics(lambda values, step: seen.append((step, values["loss"])))
        >>> data = [np.ones(8, np.float32)] * 2
        >>> history = trainer.fit(data, callbacks=[log], progress=False)
        >>> seen
        [(0, 1.0), (1, 0.0)]
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        if not callable(fn):
            raise OptionError(
                f"Metrics hands values to a function, fn(values, step=step). Received: {fn!r}."
            )
        self._fn = fn

    def on_step_end(self, trainer: Trainer, step: int, values: dict[str, float]) -> None:
        """Loss and metrics of a step."""
        self._fn(values, step=step)

    def on_validation_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """Values of a validation; they belong to the last step before it."""
        self._fn(logs, step=max(0, trainer.step - 1))


class CSVLogger(Callback):
    """Writes a row for each step to a file, while training runs.

    Columns are the step, loss and metrics, and values of validations in the row of the last step
    before them. A resumed fit continues the file, and so does the next fit of the same trainer with
    this object; any other replaces it.

    Args:
        path: the path of the file; its directory is created if necessary.

    Raises:
        OptionError: there can be no file at that path.
        RunError: the file cannot be written; during a fit.

    Example:
        >>> import pathlib, tempfile, numpy as np, optax, tailrace as tr
        >>> path = pathlib.Path(tempfile.mkdtemp(), "log.csv")
        >>> loss_fn = lambda w, x: ((x - w) ** 2).mean()
        >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.5), np.float32(0))
        >>> log = tr.callbacks.CSVLogger(path)
        >>> data = [np.ones(8, np.float32)] * 2
        >>> history = trainer.fit(data, callbacks=[log], progress=False)
        >>> path.read_text().splitlines()
        ['step,loss', '0,1.0', '1,0.0']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = check_path("path", path, what="file")
        _check_folder("CSVLogger", self._path.parent)
        if os.path.isdir(self._path):
            raise OptionError(f"CSVLogger writes a file, and path={str(path)!r} is a directory.")
        self._names: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._written, self._end = 0, 0  # the number of rows, and the step after the last of them
        self._resumed = False

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Do not create the file yet: until the first row the fit may still be resumed."""
        self._write()
        again = self._end - trainer.step  # rows that come again, after the state was set back
        # The file is continued if its rows reach this step: the same training continues. Any other fit
        # starts a new file.
        if trainer.step and 0 <= again < self._written and self._path.exists():
            self._cut(again)
        else:
            self._resumed = self._written > 0  # rows of this object, which were undone
            self._names, self._written = ["step"], 0
        self._end = trainer.step

    def on_execution_end(self, trainer: Trainer, execution: Execution) -> None:
        """The rows of an execution; the last waits for values of a validation."""
        # A longer fit goes on from the best state of the shorter one, which trained further.
        again = self._end - execution.first_step
        waiting = len(self._rows)
        self._rows = self._rows[: waiting - min(max(0, again), waiting)]
        self._cut(max(0, again - waiting))
        self._write()
        for number in range(execution.steps):
            values = {name: float(v[number]) for name, v in execution.values.items()}
            self._rows.append({"step": execution.first_step + number, **values})
        self._end = execution.first_step + execution.steps

    def on_validation_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """Values of a validation go into the row of the step before it."""
        if self._rows:
            self._rows[-1].update(logs)
        self._write()

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Write what is left; what was undone goes, even if no row has come after it."""
        self._write()
        if self._resumed and self._path.exists():
            with _writing("CSVLogger", self._path):
                self._rewrite(self._before())
            self._resumed = False

    def get_state(self) -> dict[str, Any]:
        """For a checkpoint: the columns, the number of rows, and the one that waits."""
        self._write(waiting=1)  # a validation may follow, and its values belong to that row
        counts = {"rows": self._written, "end": self._end}
        return {"names": list(self._names), **counts, "waiting": list(self._rows)}

    def set_state(self, state: dict[str, Any]) -> None:
        """From a checkpoint: the next row cuts off later ones, since they come again."""
        self._names, self._written, self._resumed = list(state["names"]), int(state["rows"]), True
        self._rows, self._end = [dict(row) for row in state["waiting"]], int(state.get("end", 0))

    def _cut(self, again: int) -> None:
        """The last rows of the file will come again: the next row cuts them off."""
        self._written, self._resumed = self._written - again, self._resumed or again > 0

    def _write(self, waiting: int = 0) -> None:
        count = max(0, len(self._rows) - waiting)
        rows, self._rows = self._rows[:count], self._rows[count:]
        if not rows:
            return
        new = [name for row in rows for name in row if name not in self._names]
        # Mostly rows are appended. The file is written again for a new column, and after a resume,
        # to cut off rows that will come again.
        before = self._before() if self._resumed or not self._written or new else None
        self._names += dict.fromkeys(new)
        with _writing("CSVLogger", self._path):
            if before is not None:
                self._rewrite(before)
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._names).writerows(rows)
        self._written, self._resumed = self._written + len(rows), False

    def _before(self) -> list[dict[str, Any]]:
        """The rows of this fit in the file.

        They are counted, not measured: for a column that came later, all of them were written again.
        """
        if not self._written:
            return []
        if not self._path.exists():
            raise RunError(
                f"CSVLogger continues {str(self._path)!r}, which is gone. Put it back, or start "
                f"with a new checkpoint directory."
            )
        with self._path.open(newline="") as file:
            rows = list(itertools.islice(csv.DictReader(file), self._written))
        return [{name: row.get(name) for name in self._names} for row in rows]

    def _rewrite(self, before: list[dict[str, Any]]) -> None:
        """Write the file again, with all columns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Through a second file: a process that is killed while it widens the table must not lose it.
        partial = self._path.with_name(self._path.name + ".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(before)
        partial.replace(self._path)


# Seconds. tensorboardX writes on a thread of its own, and its flush() does not wait for what is still
# in the queue of that thread: only this period brings every value to the file while training runs.
_FLUSH_PERIOD = 1


class TensorBoard(Callback):
    """Writes event files for TensorBoard while training runs.

    A value is in the file about a second after its execution, and all of them when the fit ends.

    Args:
        directory: the log directory. Needs the extra `tensorboard`.

    Raises:
        OptionError: there can be no directory at that path.
        MissingDependency: tensorboardX is not installed; when a fit begins.
        RunError: the files cannot be written; during a fit.

    Example:
        >>> import pathlib, tempfile, numpy as np, optax, tailrace as tr
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> loss_fn = lambda w, x: ((x - w) ** 2).mean()
        >>> trainer = tr.Trainer(loss_fn, optax.sgd(0.5), np.float32(0))
        >>> log = tr.callbacks.TensorBoard(folder)
        >>> data = [np.ones(8, np.float32)] * 2
        >>> history = trainer.fit(data, callbacks=[log], progress=False)
        >>> len(list(folder.glob("*tfevents*")))
        1
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = check_path("directory", directory)
        _check_folder("TensorBoard", self._directory)
        self._writer: Any = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Open the file."""
        # Steps that were undone come again (those that a killed process wrote beyond its checkpoint,
        # or after which the state was restored), and must be shown once.
        self._writer = self._opened(purge_step=trainer.step)

    def _opened(self, purge_step: int | None = None) -> Any:
        """A new file, which sorts behind those that are there."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                "tr.callbacks.TensorBoard needs tensorboardX: pip install 'tailrace[tensorboard]'."
            ) from error
        there = len(list(self._directory.glob("events.out.tfevents.*")))
        with _writing("TensorBoard", self._directory):
            return SummaryWriter(
                str(self._directory),
                purge_step=purge_step,
                flush_secs=_FLUSH_PERIOD,
                # The rest of the name is the second: another fit in it would replace the file.
                filename_suffix=f".{there:06d}",
            )

    def _add(self, values: dict[str, float], step: int) -> None:
        if self._writer is None:
            self._writer = self._opened()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_step_end(self, trainer: Trainer, step: int, values: dict[str, float]) -> None:
        """Loss and metrics of a step."""
        self._add(values, step)

    def on_validation_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """Values of a validation."""
        # At the last step before it, as in a history.
        self._add(logs, max(0, trainer.step - 1))

    def get_state(self) -> dict[str, Any]:
        """Nothing; but what a checkpoint covers must be in a file, because it does not come again."""
        # Only closing waits for the thread that writes. The next value opens another file.
        self._close()
        return {}

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _check_folder(who: str, folder: Path) -> None:
    """Refuse a folder that is, or goes through, a file: before the steps whose values it is for."""
    there = file_in_the_way(folder)
    if there is not None:
        raise OptionError(
            f"{who} writes into a directory, and {str(there)!r} is a file. Received: {str(folder)!r}. "
            f"Give another path."
        )


@contextmanager
def _writing(who: str, path: Path) -> Iterator[None]:
    """Turn an error of the file system into a sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{who} cannot write {str(path)!r}: {error.strerror or error}. Make room or give another "
            f"path; with fit(checkpoint=...) the same script then resumes."
        ) from error
