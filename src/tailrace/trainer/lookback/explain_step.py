"""`trainer.explain_step`: which rows of the data, and which layer, made a step what it was."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from tailrace.data.adapters import rows_read
from tailrace.data.no_data import NO_DATA
from tailrace.errors import DataError
from tailrace.records.record import Record
from tailrace.records.scores import robust_scores
from tailrace.taps.catalogue import Entry
from tailrace.taps.tap import Tap
from tailrace.trainer.checkpoints.checkpoint import Checkpoint
from tailrace.trainer.engine import Engine
from tailrace.trainer.lookback.comparison import Comparison
from tailrace.trainer.lookback.examples import EXAMPLE, example_gradients
from tailrace.trainer.lookback.recorded import Recorded, known_of
from tailrace.trainer.lookback.start import nearest

_PLACE, _MEASURED = EXAMPLE.descr[:2], EXAMPLE.descr[2:]
ROW = np.dtype([*_PLACE, ("row", np.int64), *_MEASURED, ("score", np.float64)])
"""The fields of one example of a step; `row` is -1 if the dataset does not number its rows."""

GROWN = 2.0
"""A tensor has grown if its norm is this many times that of the steps before."""

ALIKE = 0.1
"""Rows whose losses, gradients or inputs differ by less than this fraction are alike.

If most are equal (one-hot rows, weights of 1), any other row would have a score without bound."""

BEFORE = 4
"""How many steps before are looked at, to say what has grown."""


def may_grow(entry: Entry) -> bool:
    """What leaves a scope of the model (not each operation inside it), and gradients."""
    layer = entry.kind == "activation" and ":" not in entry.name
    return layer or entry.kind == "reduced"


@dataclasses.dataclass(frozen=True)
class StepExplanation:
    """A past step, example by example.

    Attributes:
        step: its index.
        loss: its loss.
        rows: one entry for each example, the most conspicuous first: `element` (its index in the pass
            over the dataset), `position` in that element, `row` (its index in the arrays of
            `tr.batches`, else -1), `loss`, `gradient_norm`, `alignment` (the cosine of its gradient and
            that of the step), `input_norm` (of all numbers of the row: inputs, labels, weights),
            `score` (how far the loss or the gradient is above the median of the step, or inputs that
            are twice the median).
        growth: for each layer and gradient, its norm in this step divided by the median of the previous
            steps, in program order; empty without previous steps.
        proved: whether the step equals the original; see `tr.Trainer.replay`.
        differences: if not, what differs.
    """

    step: int
    loss: float
    rows: np.ndarray
    growth: dict[str, float]
    proved: bool | None
    differences: list[Any]

    @property
    def grew_first(self) -> str | None:
        """The first tensor, in program order, whose norm grew; None if none did."""
        return next((name for name, times in self.growth.items() if times >= GROWN), None)

    def __str__(self) -> str:
        first = self.rows[0]
        where = f"element {first['element']}, position {first['position']}"
        if first["row"] >= 0:
            where = f"row {first['row']} of the dataset ({where})"
        proved = {True: "proved", False: "NOT PROVED", None: "nothing recorded"}[self.proved]
        along = f"alignment {first['alignment']:+.2f}"
        if np.isnan(first["alignment"]):
            along = "alignment unknown (a gradient is not finite)"
        lines = [
            f"step {self.step}, loss {self.loss:.7g} ({proved})",
            f"most unusual: {where}: loss {first['loss']:.5g}, gradient norm "
            f"{first['gradient_norm']:.5g}, {along}, score "
            f"{first['score']:.1f}; the next one has {self.rows['score'][1:2].sum():.1f}",
        ]
        if self.grew_first is not None:
            times = self.growth[self.grew_first]
            lines.append(f"grew first: {self.grew_first!r}, {times:.1f} times the steps before")
        return "\n".join(lines)


def explain_step(
    engine: Engine,
    step: int,
    dataset: object,
    checkpoint: Checkpoint | str | os.PathLike[str],
    recorded: Recorded,
    fits: int | None = None,
) -> StepExplanation:
    """Run a past step again, example by example; see `tr.Trainer.explain_step`."""
    if dataset is NO_DATA:
        raise DataError(
            "A step is explained row by row, and a fit without data has no rows. Use trainer.replay."
        )
    start = nearest(checkpoint, step, fits, margin=BEFORE)
    recorded = known_of(start, step, recorded, engine)
    # Gradients whole, because each row is compared with their direction; of all other tensors the
    # norm, which shows what grew.
    taps = [Tap("reduced/*", reduce="tensor"), Tap(may_grow, reduce="norm")]
    rerun = start.rerun(engine, taps, dataset, recorded.has_fingerprints)
    comparison = Comparison(recorded)
    rerun.check(step)
    before = []
    with rerun.closing():
        comparison.take_all(rerun.advance(max(rerun.step, step - BEFORE)))
        while rerun.step < step:
            results = rerun.look()
            comparison.take(results, rerun.tapped)
            before.append(_norms(dict(results.records.items())))
        # Copied to the host before the step runs, which overwrites it.
        state = jax.tree.map(np.asarray, rerun.engine.read())
        results = rerun.look()
        comparison.take(results, rerun.tapped)
        records = dict(results.records.items())
        gradients = [record.values[0] for (_, kind), record in records.items() if kind == "tensor"]
        elements, spec = rerun.elements, rerun.spec
        found = example_gradients(rerun.engine, state, gradients, elements, spec)
    proved = comparison.proved(step, step + 1)
    rows = numbered(dataset, results.reading, found)
    loss = float(results.losses[0])
    growth = _growth(before, _norms(records))
    return StepExplanation(step, loss, rows, growth, proved, comparison.differences)


def _norms(records: dict[tuple[str, str], Record]) -> dict[str, float]:
    """The largest norm of each tensor in a step."""
    norms = {name: r.values for (name, kind), r in records.items() if kind == "norm" and len(r)}
    order = sorted(norms, key=lambda name: name.startswith("reduced/"))  # forward comes first
    return {name: float(np.max(norms[name])) for name in order}


def _growth(before: list[dict[str, float]], now: dict[str, float]) -> dict[str, float]:
    if not before:
        return {}
    # A tensor that was all zeros before has grown without bound, but no division by zero.
    tiny = float(np.finfo(np.float32).tiny)
    usual = {name: float(np.median([one.get(name, 0.0) for one in before])) for name in now}
    return {
        name: value / max(usual[name], tiny) if np.isfinite(value) else float("inf")
        for name, value in now.items()
    }


def numbered(
    dataset: object, reading: tuple[int, int, int] | None, found: np.ndarray
) -> np.ndarray:
    """Rows with their numbers in the dataset and their scores; those that stand out most first."""
    rows = np.zeros(len(found), ROW)
    for name in EXAMPLE.names or ():
        rows[name] = found[name]
    epoch, first, count = reading or (0, 0, 0)
    rows["element"] += first  # in the pass over the dataset, not in the step
    rows["row"] = -1
    numbers = rows_read(dataset, epoch, first, count)
    if numbers is not None:
        rows["row"] = numbers[found["element"], found["position"]]
    with np.errstate(divide="ignore", invalid="ignore"):
        # Logarithms: losses and norms spread over orders of magnitude, and a score is a distance.
        # A row without a loss or gradient (padding, a weight of 0, a margin that is kept) is the least
        # unusual one: its logarithm must be far below the others, not infinite.
        tiny = np.finfo(np.float32).tiny
        measured = [
            np.log(np.maximum(np.abs(rows[name]), tiny)) for name in ("loss", "gradient_norm")
        ]
        scores = [robust_scores(each, least=ALIKE) for each in measured]
        # Inputs that a saturated layer hides from the loss. They are often so close together that
        # their spread says nothing, and only those count that are plainly larger.
        inputs = rows["input_norm"]
        large = inputs > GROWN * np.median(inputs)
        scores.append(np.where(large, robust_scores(np.log(inputs), least=ALIKE), -np.inf))
    # The most conspicuous of the three; `fmax` passes over NaN.
    rows["score"] = np.fmax.reduce(scores)
    # It has no logarithm, and is what one looks for.
    bad = ~(np.isfinite(rows["loss"]) & np.isfinite(rows["gradient_norm"]))
    rows["score"][bad] = np.inf
    return rows[np.argsort(-rows["score"], kind="stable")]
