"""A run as TensorBoard event files, through tensorboardX.

TensorBoard has one value per step: the mean over the step's microbatches and replicas (the minimum of
minima, the maximum of maxima, the sum of counts). Histograms are those of the run, bin for bin, over
log2 |value|: TensorBoard draws linear bins, in which all magnitudes would be one bar.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tailrace.base.checks import check_count
from tailrace.base.paths import check_path, in_words
from tailrace.errors import MissingDependency, OptionError, RunError
from tailrace.records.exponents import BIAS
from tailrace.records.history import History
from tailrace.records.record import Record
from tailrace.records.records import Records
from tailrace.runs.tables.selection import chosen_keys
from tailrace.taps.catalogue import Select
from tailrace.taps.reductions import INF_BIN, NAN_BIN, NUM_BINS, ZERO_BIN

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

MERGES: dict[str, Any] = {"min": np.min, "max": np.max, "nan": np.sum, "inf": np.sum}
"""How the values of one step are combined; the mean by default."""


def write_events(
    records: Records,
    history: History,
    logdir: str | os.PathLike[str],
    select: Select = "*",
    every: int = 1,
) -> int:
    """Write the history and the selected records of a run; see `Run.to_tensorboard`."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise MissingDependency.for_feature(
            "to_tensorboard", "tensorboardX", "tensorboard"
        ) from error
    every = check_count("every", every, at_least=1, error=OptionError)
    keys = chosen_keys(records, select) if len(records) else []
    try:
        check_path("logdir", logdir, error=RunError)
        writer = SummaryWriter(str(Path(logdir)))
    except OSError as error:
        raise RunError(f"Events cannot be written to {str(logdir)!r}: {in_words(error)}") from error
    except RecursionError as error:  # Python makes folders one in another by recursion
        raise RunError(
            f"Events cannot be written below {len(Path(logdir).parts)} folders."
        ) from error
    count = 0
    with writer:
        for name in history:
            values, steps = history[name], history.steps_of(name)
            each = every if name in history.step_names else 1  # validations are rare
            # The last of each n, so that the newest step is among them.
            for row in range(each - 1, len(steps), each):
                writer.add_scalar(f"history/{name}", float(values[row]), int(steps[row]))
                count += 1
        # A tag has one kind of value in TensorBoard; a tensor with two kinds gets two tags.
        several = {name for name, _ in keys if sum(name == other for other, _ in keys) > 1}
        for key in keys:
            tag = f"{key[0]}/{key[1]}" if key[0] in several else key[0]
            count += _write_record(writer, tag, records[key], every)
    return count


def _write_record(writer: SummaryWriter, tag: str, record: Record, every: int) -> int:
    # Every n-th recorded step: a periodic tap has few, of which n may divide none.
    steps = np.unique(record.steps)[every - 1 :: every]
    if record.kind == "histogram" and np.shape(record.values)[-1:] == (NUM_BINS,):
        for step in steps:
            rows = record.values[record.steps == step]
            _write_histogram(writer, tag, rows.reshape(-1, NUM_BINS).sum(axis=0), int(step))
        return len(steps)
    count = 0
    for field, values in _scalars(record):
        merge: Callable[..., Any] = MERGES.get(field, np.mean)
        name = f"{tag}/{field}" if field else tag
        for step, value in _by_step(record.steps, values, merge):
            if (step + 1) % every == 0 or step in steps:
                writer.add_scalar(name, value, step)
                count += 1
    return count


def _scalars(record: Record) -> list[tuple[str, np.ndarray]]:
    """The parts of a record with one number per row: statistics, norms, scalars of functions."""
    values = record.values
    if isinstance(values, np.ndarray) and values.dtype.names:
        return [(name, values[name]) for name in values.dtype.names if values.ndim == 1]
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(values)[0]:
        # One number per row: TensorBoard has no place for layers of a stack, or for complex
        # numbers.
        if leaf.ndim == 1 and leaf.dtype.kind != "c":
            field = "/".join(str(getattr(part, "key", getattr(part, "idx", ""))) for part in path)
            found.append((field, leaf))
    return found


def _by_step(
    steps: np.ndarray, values: np.ndarray, merge: Callable[..., Any]
) -> list[tuple[int, float]]:
    wide = values.astype(np.float64)
    if len(np.unique(steps)) == len(steps):
        return list(zip(steps.tolist(), wide.tolist(), strict=True))
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    pieces = zip(steps[starts].tolist(), np.split(wide, starts[1:]), strict=True)
    # A trainer that went back has computed some steps twice: the last ones count, as in `tr.diff`.
    return [(step, float(merge(piece))) for step, piece in sorted(dict(pieces).items())]


def _write_histogram(writer: SummaryWriter, tag: str, counts: np.ndarray, step: int) -> None:
    finite = counts[:INF_BIN].astype(np.float64)
    there = np.flatnonzero(finite)
    total = float(counts.sum())
    for name, amount in (
        ("zero_share", counts[ZERO_BIN] / max(total, 1)),
        ("nan", counts[NAN_BIN]),
        ("inf", counts[INF_BIN]),
    ):
        writer.add_scalar(f"{tag}/{name}", float(amount), step)
    if not len(there):
        return
    exponents = np.arange(there[0], there[-1] + 1)
    kept, edges = finite[exponents], exponents - BIAS + 1.0
    # Only counts by exponent are known: sums take each value for the middle of its bin.
    middles = edges - 0.5
    writer.add_histogram_raw(
        f"{tag}/log2_magnitude",
        min=float(edges[0] - 1),
        max=float(edges[-1]),
        num=int(kept.sum()),
        sum=float((kept * middles).sum()),
        sum_squares=float((kept * middles**2).sum()),
        # TensorBoard's first bucket begins at minus infinity, so an empty one comes before ours.
        bucket_limits=[float(edges[0] - 1), *edges.tolist()],
        bucket_counts=[0.0, *kept.tolist()],
        global_step=step,
    )
