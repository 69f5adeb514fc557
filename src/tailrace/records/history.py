"""The result of a fit: one value per step of the loss and of each scalar metric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tailrace.base.messages import shown
from tailrace.errors import SelectionError
from tailrace.records.columns import Column, ValueFile
from tailrace.records.fingerprints import FingerprintLog

LOSS = "loss"

LOGGED = ("learning_rate", "grad_norm", "examples_per_second", "tokens_per_second", "mfu")
"""Columns of `log=`, which no step computes unless it calls its own so."""

SKIPPED = "skipped"
"""The column that says which steps a guard has skipped."""


def leading(names: Iterable[str]) -> str:
    """The one metric to show of several: the loss, or else the first by name.

    It is shown while training runs, and has the shape that all metrics of a step have.

    >>> leading(["accuracy", "loss"]), leading(["generator", "critic", "skipped"])
    ('loss', 'critic')
    """
    found = sorted(names)
    own = [name for name in found if name.split("/")[0] not in (*LOGGED, SKIPPED)]
    return LOSS if LOSS in found or not found else (own or found)[0]


class History:
    """The losses and metrics of one `fit`.

    Attributes:
        first_step: the index of its first step.
        microbatches: the number of microbatches per step.
        replicas: the number of replicas.

    `history.loss` and `history["accuracy"]` have one value per step: the mean over its microbatches
    and replicas. `history.each("loss")` has them all: [steps, microbatches, replicas]. Values of
    validations, `history["val_loss"]`, have one value per entry of `history.validated`. Arrays of
    `aux` have one array per step, `history["per_class"]` is [steps, ...]; `array_names` has their
    names.

    Example:
        >>> import numpy as np
        >>> import tailrace as tr
        >>> history = tr.History()
        >>> history.add({"loss": np.float32([[[3.0]], [[2.0]]])})
        >>> history.loss.tolist(), history.last()
        ([3.0, 2.0], {'loss': 2.0})
    """

    def __init__(self, first_step: int = 0, microbatches: int = 1, replicas: int = 1) -> None:
        self.first_step, self.microbatches, self.replicas = first_step, microbatches, replicas
        self._columns: dict[str, Column] = {}
        self._arrays: dict[str, Column] = {}
        self._weights: Column | None = None
        self._steps: np.ndarray | None = None
        self._validations: dict[str, list[float]] = {}
        self._validated: list[int] = []
        self._fingerprints = FingerprintLog()
        self._file: ValueFile | None = None

    def keep_in(self, file: ValueFile) -> None:
        """Keep values of steps that are added from now on in a file; when read, they are the same."""
        self._file = file

    def __getstate__(self) -> dict[str, Any]:
        # The file belongs to this process; a copy has its values in memory.
        return {**self.__dict__, "_file": None}

    @property
    def fingerprints(self) -> dict[str, np.ndarray]:
        """With `tr.Trainer(fingerprint=True)`, one row per execution, by name.

        `first_step` and `steps`, then 8 bytes each: `parameters`, `optimizer`, `model_state`,
        `gradients`, `loss`, `elements`, and the `chain` of all of them so far.
        """
        return self._fingerprints.arrays()

    def add_fingerprint(self, first_step: int, steps: int, groups: Mapping[str, int]) -> int:
        """Append the fingerprints of an execution; returns the chain after it."""
        return self._fingerprints.add(first_step, steps, groups)

    def add_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Append the results of a validation after `step` steps; names get the prefix `val_`."""
        columns = {name: np.array([value]) for name, value in values.items()}
        self.add_validations(np.array([step]), columns)

    def add_validations(self, steps: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Append the results of several validations, each after that many steps."""
        before = len(self._validated)
        self._validated += steps.tolist()
        added = {f"val_{name}": column.tolist() for name, column in values.items()}
        # A metric may appear late, or be missing once: NaN keeps one entry per validation.
        for name in dict.fromkeys([*self._validations, *added]):
            column = self._validations.setdefault(name, [np.nan] * before)
            column += added.get(name, [np.nan] * len(steps))

    def last_validation(self) -> dict[str, float]:
        """The values of the latest validation, by name; empty before the first."""
        return {name: values[-1] for name, values in self._validations.items()}

    @property
    def validated(self) -> np.ndarray:
        """The number of steps before each validation; `history["val_loss"]` has its value."""
        return np.array(self._validated, np.int64)

    def add(
        self,
        values: dict[str, np.ndarray],
        weights: np.ndarray | None = None,
        steps: np.ndarray | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Append the values of one execution, each [steps, microbatches, replicas].

        Args:
            values: by name.
            weights: their weights in a mean.
            steps: the indices of the steps, if they are not consecutive.
            arrays: arrays by name, each [steps, microbatches, replicas, ...].
        """
        before = len(self)
        self._add_arrays(arrays or {}, before, len(one_of(values)))
        for name, value in values.items():
            self._column(name, before, value).append(value, self._file)
        for name in self._columns.keys() - values.keys():
            self._columns[name].append(_missing(one_of(values)), self._file)
        if weights is not None or self._weights is not None:
            # Without weights all counted alike.
            one = np.ones_like(one_of(values), np.float64) if weights is None else weights
            if self._weights is None:
                self._weights = Column()
                if before:
                    self._weights.append(np.ones((before, *one.shape[1:])), self._file)
            self._weights.append(one, self._file)
        # Only a history read from a run directory has gaps; there all steps come at once.
        self._steps = steps if steps is not None else self._steps

    def _add_arrays(self, arrays: Mapping[str, np.ndarray], before: int, steps: int) -> None:
        for name, value in arrays.items():
            column = self._arrays.get(name)
            # A resumed script may return another shape: a column has one.
            if column is None or column.form != value.shape[1:]:
                column = self._arrays[name] = Column()
                if before:
                    column.append(_missing(value[:1], before), self._file)
            column.append(value, self._file)
        for name in self._arrays.keys() - arrays.keys():
            column = self._arrays[name]
            column.append(np.full((steps, *column.form), np.nan, np.float32), self._file)

    def _column(self, name: str, before: int, value: np.ndarray) -> Column:
        """The column of a value; of one that earlier steps did not have, NaN for these."""
        if name not in self._columns:
            self._columns[name] = Column()
            if before:
                self._columns[name].append(_missing(value[:1], before), self._file)
        return self._columns[name]

    def each(self, name: str) -> np.ndarray:
        """The values of every microbatch and replica: [steps, microbatches, replicas, ...].

        Raises:
            SelectionError: there is no value of that name.
        """
        if name in self._arrays and name not in self._columns:
            return self._arrays[name].values()
        if name not in self._columns:
            if name in self._validations:
                raise SelectionError(f"{name!r} has one value per validation: history[{name!r}].")
            # A fit of no steps has a history too: it has a loss, if only an empty one.
            if name == "loss" and not self._columns:
                return np.zeros((0, self.microbatches, self.replicas), np.float32)
            raise SelectionError(
                f"No metric is called {name!r}. There are: "
                f"{', '.join(map(shown, [*self.names, *self._arrays]))}."
            )
        return self._columns[name].values()

    @property
    def weights(self) -> np.ndarray | None:
        """The weights of microbatches and replicas in means, as `each`; None for equal ones."""
        return None if self._weights is None else self._weights.values()

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._validations:
            return np.array(self._validations[name])
        return step_means(self.each(name), self.weights)

    @property
    def loss(self) -> np.ndarray:
        """The loss of each step."""
        return self["loss"]

    @property
    def leading(self) -> str:
        """The name of the loss, or of the metric in its place if a step has none."""
        return leading(self._columns)

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return [*self._columns, *self._validations]

    @property
    def step_names(self) -> list[str]:
        """The names of the metrics that have a value per step."""
        return list(self._columns)

    @property
    def array_names(self) -> list[str]:
        """The names of the metrics that have an array per step; `names` has the others."""
        return list(self._arrays)

    @property
    def steps(self) -> np.ndarray:
        """The index of each step."""
        if self._steps is not None:
            return self._steps
        return np.arange(self.first_step, self.first_step + len(self))

    def steps_of(self, name: str) -> np.ndarray:
        """The step of each value of `history[name]`; for a validation, the one before it."""
        return self.validated - 1 if name in self._validations else self.steps

    def last(self) -> dict[str, float]:
        """The values of the last step."""
        # A validation may come before the first step; the columns of steps are then empty.
        names = self.names if len(self) else self._validations
        return {name: float(self[name][-1]) for name in names}

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The history as arrays by name, for a file."""
        arrays = {f"each/{name}": self.each(name) for name in self._columns}
        arrays |= {f"arrays/{name}": column.values() for name, column in self._arrays.items()}
        if self._weights is not None:
            arrays["weights"] = self._weights.values()
        validations = {name: np.array(v) for name, v in self._validations.items()}
        marks = {f"fingerprints/{name}": a for name, a in self.fingerprints.items()}
        # Without fingerprints nothing is stored of them, not even empty columns.
        marks = marks if len(self._fingerprints) else {}
        return {**arrays, **validations, **marks, "validated": self.validated}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], first_step: int, microbatches: int, replicas: int
    ) -> History:
        """A history from the result of `to_arrays`.

        Microbatches and replicas may differ, as long as a step has the same number of elements: element
        m * replicas + r of a step is that of microbatch m and replica r in both.
        """
        history = cls(first_step, microbatches, replicas)
        marks: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            kind, _, rest = name.partition("/")
            if kind == "fingerprints":
                marks[rest] = array
            elif kind == "each":
                # A flat reshape is right, because elements of a step are numbered microbatch by
                # microbatch.
                shaped = array.reshape(len(array), microbatches, replicas)
                history._columns.setdefault(rest, Column()).append(shaped)
            elif kind == "arrays":
                shaped = array.reshape(len(array), microbatches, replicas, *array.shape[3:])
                history._arrays.setdefault(rest, Column()).append(shaped)
            elif name == "weights":
                history._weights = Column()
                history._weights.append(array.reshape(len(array), microbatches, replicas))
            elif name == "validated":
                history._validated = [int(step) for step in array]
            else:
                # Everything else is a validation: their names have the prefix already.
                history._validations[name] = [float(value) for value in array]
        history._fingerprints = FingerprintLog.of(marks) if marks else FingerprintLog()
        return history

    def __len__(self) -> int:
        # Not by `each`, which reads all values.
        return len(self._columns[self.leading]) if self._columns else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __repr__(self) -> str:
        last = ", ".join(f"{shown(name)}={value:.4g}" for name, value in self.last().items())
        return f"History({len(self)} steps{', last: ' + last if last else ''})"

    def _repr_html_(self) -> str:
        import html

        from tailrace.records.curves import small_curve

        rows = "".join(
            f"<tr><td>{html.escape(shown(name))}</td><td>{values[0]:.5g}</td>"
            f"<td>{values[-1]:.5g}</td><td>{small_curve(values)}</td></tr>"
            for name, values in ((name, self[name]) for name in self.names if len(self))
        )
        head = "<tr><th></th><th>first step</th><th>last step</th><th></th></tr>"
        return f"<b>{len(self)} steps</b><table>{head}{rows}</table>"


def losses_of(history: History) -> np.ndarray:
    """The loss of each step; empty if the step is the user's own and has none."""
    return history.loss if history.leading == LOSS else np.zeros(0, np.float32)


def one_of(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The values of the leading metric."""
    return values[leading(values)]


def _missing(like: np.ndarray, steps: int | None = None) -> np.ndarray:
    """NaN for steps that did not have a value: a resumed script may log others."""
    shape = like.shape if steps is None else (steps, *like.shape[1:])
    return np.full(shape, np.nan, like.dtype if like.dtype.kind == "f" else np.float32)


def step_means(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """One value per step: the mean over its microbatches and replicas.

    The only place that computes it, so that a step that is run again has the value of the history, bit
    for bit.

    Args:
        values: [steps, microbatches, replicas, ...].
        weights: their weights, [steps, microbatches, replicas]; None for equal ones.

    >>> step_means(np.float32([[[1.0], [2.0]], [[3.0], [5.0]]])).tolist()
    [1.5, 4.0]
    """
    if values.shape[1:] == (1, 1):
        return values[:, 0, 0]
    # Averaged wide, returned narrow: a sum over many microbatches in float16 would lose digits.
    # In one layout: NumPy adds in the order of memory, and an emission of replicas has another one.
    wide = values.astype(np.float64, order="C")
    if weights is not None:
        weights = np.ascontiguousarray(weights).reshape(
            weights.shape + (1,) * (wide.ndim - weights.ndim)
        )
        # Of weights that are all 0 there is no mean: the fit reports them.
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = (wide * weights).sum(axis=(1, 2)) / weights.sum(axis=(1, 2))
    else:
        mean = wide.mean(axis=(1, 2))
    return mean.astype(values.dtype if values.dtype.kind == "f" else np.float32)


def split_emission(
    value: object, microbatches: int, replicas: int, leading: int | None = None
) -> np.ndarray:
    """An emitted value as [steps, microbatches, replicas, ...].

    Args:
        value: the emission.
        microbatches: the number of microbatches per step.
        replicas: the number of replicas.
        leading: the number of dims before those of one value; None for a scalar, which has no others.
    """
    array = np.asarray(value)
    leading = array.ndim if leading is None else leading
    if replicas > 1:
        # The device emits replicas first; a step numbers its elements by microbatch, then by replica.
        array = np.moveaxis(array, 0, leading - 1)
    return array.reshape(-1, microbatches, replicas, *array.shape[leading:])
