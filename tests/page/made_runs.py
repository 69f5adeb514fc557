"""Run directories with numbers chosen by hand, written as a trainer writes them, without training."""

import json
from pathlib import Path

import numpy as np
import zarr

from tailrace.runs.info import write_info
from tailrace.runs.storage.held import HeldDirectory
from tailrace.runs.tables.columns import Columns
from tailrace.runs.tables.tables import COORDINATES, EXECUTION, TIMES, HistoryTable
from tailrace.taps.reductions import NUM_BINS, STATS

EPOCH = 1.7e9
"""When made runs began, in seconds since 1970."""


NAMES = [
    *(f"activation/layer{n}" for n in range(4)),
    *(f"grad/layer{n}/{part}" for n in range(4) for part in ("w", "b")),
]


def healthy_stats(steps, names=NAMES):
    """Statistics that nothing is wrong with."""
    shape = (steps, len(names))
    std = np.full(shape, 0.01)
    zero = np.broadcast_to([0.5 if n.startswith("activation") else 0.0 for n in names], shape)
    return {"std": std, "min": -3 * std, "max": 3 * std, "zero": zero}


class MadeRun:
    """A run directory that grows on demand.

    Args:
        directory: where to.
        tensors: names of tensors with statistics in every step.
        histograms: names of tensors with histograms in every step.
        plan: of a pipeline, or None.
        stages: the stage of a tensor, by name.
        microbatches: rows of a step.
        shapes: of tensors, by name; (8,) for others.
        info: what else run.json says.
    """

    def __init__(
        self,
        directory,
        tensors=(),
        histograms=(),
        *,
        plan=None,
        stages=None,
        microbatches=1,
        shapes=None,
        info=None,
    ):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.tensors, self.histograms = list(tensors), list(histograms)
        self.stages, self.microbatches, self.steps = stages or {}, microbatches, 0
        self.executions = 0
        self.root = zarr.open_group(self.directory, mode="a", zarr_format=3)
        self._history = HistoryTable(self.root.create_group("history"))
        self._records = self.root.create_group("records")
        self.tables = []
        if self.tensors:
            self.tables.append(self.table("stats", self.tensors))
        if self.histograms:
            self.tables.append(self.table("histogram", self.histograms))
        self._ends = Columns(self.root.create_group("executions"), "execution")
        for name, dtype in EXECUTION.items():
            self._ends.add_column(name, np.dtype(dtype), (), ())
        names = list(dict.fromkeys([*self.tensors, *self.histograms]))
        shapes = shapes or {}
        catalogue = [
            {
                "name": name,
                "kind": name.split("/")[0],
                "shape": list(shapes.get(name, (8,))),
                "dtype": "float32",
                "stage": self.stages.get(name, -1),
                "source": "model.py:7",
            }
            for name in names
        ]
        self.commit(writing=True)
        held = HeldDirectory(self.directory)
        held.hold()
        write_info(
            held,
            {
                "run": "made",
                "devices": [{"platform": "cpu", "kind": "cpu", "id": 0}],
                "options": {"steps_per_execution": 10, "microbatches": microbatches, "seed": 0},
                "taps": [{"select": "*", "mode": "all", "reduce": "stats"}],
                "catalogue": catalogue,
                "plan": plan.to_json(ticks=False) if plan is not None else None,
                **(info or {}),
            },
        )
        held.release()

    def table(self, kind, names):
        group = self._records.create_group(str(len(self.tables)))
        group.attrs.put({"kind": kind, "names": names, "tree": 0, "coordinates": COORDINATES})
        columns = Columns(group, "record")
        for tag in ("step", "microbatch", "replica"):
            columns.add_column(tag, np.dtype(np.int64), (), ())
        columns.add_fixed("tensor", np.array(names, dtype=object), ["tensor"])
        stages = np.array([self.stages.get(name, -1) for name in names], np.int64)
        columns.add_fixed("stage", stages, ["tensor"])
        if kind == "stats":
            for field in STATS.names:
                columns.add_column(field, STATS[field], (), ["tensor"], tensors=len(names))
        else:
            dims = ["tensor", "bin"]
            columns.add_column("values", np.dtype(np.int32), (NUM_BINS,), dims, tensors=len(names))
        return columns

    def grow(
        self,
        metrics,
        *,
        stats=None,
        histograms=None,
        seconds=None,
        writing=True,
        fit=None,
        times=None,
    ):
        """Add steps.

        Args:
            metrics: values by name, one a step; "loss" must be there.
            stats: [steps (x microbatches), tensors] by field; fields that are not there are 0.
            histograms: [steps, tensors, 258].
            seconds: how long the steps took, as one execution; a hundredth of a second each if None.
            writing: whether there may be more.
            fit: the first step of the fit that they belong to.
            times: the seconds of each activity, as `DeviceTimes` counts them.
        """
        steps = len(metrics["loss"])
        rows = np.arange(self.steps, self.steps + steps)
        shaped = {
            name: np.broadcast_to(
                np.asarray(v, np.float32)[:, None, None], (steps, self.microbatches, 1)
            )
            for name, v in metrics.items()
        }
        self._history.append(self.steps, shaped, None)
        tags = {
            "step": np.repeat(rows, self.microbatches),
            "microbatch": np.tile(np.arange(self.microbatches), steps),
            "replica": np.full(steps * self.microbatches, -1),
        }
        tables = iter(self.tables)
        if self.tensors:
            count = steps * self.microbatches
            given = stats or {}
            fields = {
                f: np.broadcast_to(np.asarray(given.get(f, 0)), (count, len(self.tensors)))
                for f in STATS.names
            }
            next(tables).append(count, {**tags, **fields})
        if self.histograms:
            next(tables).append(steps * self.microbatches, {**tags, "values": histograms})
        self.executions += 1
        self.clock = getattr(self, "clock", EPOCH) + (0.01 * steps if seconds is None else seconds)
        row = {"first_step": [self.steps], "steps": [steps], "ended": [self.clock]}
        if fit is not None:
            row["fit"] = [fit]
            if "fit" not in self._ends:
                self._ends.add_column("fit", np.dtype("int64"), (), ())
        more = {} if times is None else {TIMES: np.array([times], np.float64)}
        if more and TIMES not in self._ends:
            self._ends.add_column(TIMES, np.dtype("float64"), (len(times),), ["activity"])
        rows = {k: np.array(v, EXECUTION.get(k, "int64")) for k, v in row.items()}
        self._ends.append(1, {**rows, **more})
        self.steps += steps
        self.commit(writing=writing)

    def commit(self, writing):
        """Write what waits, then that it counts."""
        all_columns = [self._history.columns, *self.tables, self._ends]
        history, *records, executions = [columns.write() for columns in all_columns]
        counts = {"history": history, "records": records, "executions": executions}
        self.root.attrs.put({"format": 1, "writing": writing, "committed": counts})
        for columns in all_columns:
            columns.counted()


def falling(steps, start=2.0, noise=0.05, seed=0):
    """A loss that falls."""
    rng = np.random.default_rng(seed)
    return start * np.exp(-np.arange(steps) / (steps / 4)) + noise * rng.random(steps) + 0.1


def bell(centre, steps, tensors, total=10_000, spread=3.0):
    """Histograms around an exponent."""
    bins = np.arange(NUM_BINS)
    shape = np.exp(-0.5 * ((bins - 127 - centre) / spread) ** 2)
    shape[255:] = 0
    counts = np.round(total * shape / shape.sum()).astype(np.int32)
    return np.broadcast_to(counts, (steps, tensors, NUM_BINS))


def add_report(directory, step=7, text="Not finite in step 7: 'grad/w'. The operation 'log'"):
    """Let the guard have stopped the run."""
    (Path(directory) / "nonfinite.json").write_text(
        json.dumps([{"step": step, "text": text, "culprit": None}])
    )
