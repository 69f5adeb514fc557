"""A record: all values of one tensor, each tagged with its step, microbatch and replica."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np

from tailrace.records.curves import small_curve
from tailrace.taps.reductions import NUM_BINS


@dataclasses.dataclass(frozen=True)
class Record:
    """All values of one tensor, ordered by step, microbatch, replica.

    Attributes:
        name: the tensor.
        kind: what was kept of it: "tensor", "stats", "histogram", "norm" or a function's name.
        values: the values; the leading dim is that of the records.
        steps: the step of each.
        microbatches: the microbatch of each; -1 if there is one value for the whole step.
        replicas: the replica of each; -1 if the value is equal on all of them.
        stages: the pipeline stage of each; -1 without a pipeline.
        ran: for a branch inside a scanned stack of layers, flags of the layers that took it,
            [records, layers]; the values of the others are zero. None otherwise: a branch that was not
            taken has no record.
    """

    name: str
    kind: str
    values: Any
    steps: np.ndarray
    microbatches: np.ndarray
    replicas: np.ndarray
    stages: np.ndarray
    ran: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        shape = jax.tree.map(lambda leaf: np.shape(leaf)[1:], self.values)
        of_each = "" if shape == () else f" of {shape}"
        return f"Record({self.name!r}, {self.kind}, {len(self)} values{of_each})"

    def _repr_html_(self) -> str:
        import html

        text = html.escape(repr(self))
        if curve := curve_of(self):
            return f"{text}<br>{curve}"
        if self.kind != "histogram" or np.shape(self.values)[-1:] != (NUM_BINS,):
            return text
        from tailrace.records.exponents import format_sentences, small_svg

        counts = self.values.reshape(-1, NUM_BINS).sum(axis=0)
        lines = "<br>".join(map(html.escape, format_sentences(counts)))
        return f"{text}<br>{small_svg(counts)}<br>{lines}"


def curve_of(record: Record) -> str:
    """A record over the steps, as a small curve; empty if it is not one number per step."""
    values = record.values
    if record.kind == "stats":
        values = values["std"]
    elif record.kind not in ("norm", "tensor") or np.size(values) != len(record):
        return ""
    if not len(record):
        return ""

    # Layers of a scan have a value each: their mean is drawn.
    return small_curve(np.asarray(values, np.float64).reshape(len(record), -1).mean(axis=1))


class Source(Protocol):
    """A source of a record: emissions of an execution, or rows in a file."""

    def record(self) -> Record:
        """Read it."""
        ...
