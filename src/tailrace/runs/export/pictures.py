"""Pictures of a run: the histogram of exponents, and the heat map of tensors over steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.base.messages import counted, shown
from tailrace.errors import OptionError, SelectionError
from tailrace.records.exponents import BIAS, count_exponents, format_sentences
from tailrace.records.record import Record
from tailrace.records.records import HasRecords, Records
from tailrace.runs.export.figures import Picture, draw_formats, exponent_ticks, new_figure
from tailrace.runs.tables.selection import chosen_keys
from tailrace.taps.catalogue import Catalogue, Select
from tailrace.taps.reductions import INF_BIN, NAN_BIN, NUM_BINS, ZERO_BIN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLUMNS = 400
"""The most columns of a heat map; further steps share a column."""
MOST_LABELS = 160
"""The most full-height rows of a heat map; with more, rows are narrower and only some have labels."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExponentHistogram(Picture):
    """Values of some tensors, counted by binary exponent; shows itself in a notebook.

    Attributes:
        counts: [258], as a tap with `reduce="histogram"` records them.
        names: the tensors.
        steps: the steps of the values.
        title: the title of the picture.
    """

    counts: np.ndarray
    names: tuple[str, ...]
    steps: np.ndarray
    title: str = "Gradient histogram"

    @property
    def sentences(self) -> list[str]:
        """The number of values, and the effect of each narrow format on them."""
        counts = self.counts
        first, last = int(self.steps.min()), int(self.steps.max())
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        special = ", ".join(
            f"{int(counts[index]):,} {what}"
            for index, what in ((ZERO_BIN, "zero"), (INF_BIN, "infinite"), (NAN_BIN, "NaN"))
        )
        tensors = counted(len(self.names), "tensor")
        head = f"{int(counts.sum()):,} values of {tensors}, {when}: {special}."
        return [head, *format_sentences(counts)]

    def figure(self) -> Figure:
        """The picture, as a matplotlib figure."""
        figure = new_figure(9, 5.8)
        axes = figure.add_axes((0.09, 0.34, 0.88, 0.42))
        strip = figure.add_axes((0.09, 0.77, 0.88, 0.15))
        counts, finite = self.counts, self.counts[1:INF_BIN]
        there = np.flatnonzero(finite) + 1
        low, high = (there[0] - BIAS, there[-1] - BIAS) if len(there) else (-1, 0)
        exponents = np.arange(low, high + 1)
        axes.bar(exponents, counts[exponents + BIAS], width=1, align="edge", color="#a9b4bf")
        axes.bar(low - 3, counts[ZERO_BIN], width=1, align="edge", color="#1d2b3a")
        edge_low, edge_high = low - 5, max(high + 4, 20)
        draw_formats(strip, axes, edge_low, edge_high)
        axes.set_xlim(edge_low, edge_high)
        axes.set_yscale("log")
        # From below 1, or a bin with one value would have no height on a logarithmic axis.
        axes.set_ylim(0.7, 2 * max(int(finite.max(initial=0)), int(counts[ZERO_BIN]), 5))
        exponent_ticks(axes, edge_low, edge_high, low - 2.5)
        axes.set_ylabel("values")
        strip.set_title(self.title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        figure.text(0.09, 0.222, "\n".join(self.sentences), fontsize=8.5, va="top", linespacing=1.6)
        return figure

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


def histogram(
    source: HasRecords | Records, select: Select = "grad/*", steps: slice = slice(None)
) -> ExponentHistogram:
    """The histogram of all selected tensors together.

    Args:
        source: a run, a trainer, or records.
        select: the records: those with `reduce="histogram"`, or whole tensors.
        steps: the steps: `slice(100, 200)`, `slice(-1, None)` for the last recorded one.
    """
    rows = histograms_of(source, select, steps)
    names = tuple(name for row in rows for name in row.names)
    counts = np.sum([row.counts for row in rows], axis=0)
    kinds = {name.split("/")[0] for name in names}
    title = "Gradient histogram" if kinds == {"grad"} else f"Histogram of {shown(str(select))}"
    return ExponentHistogram(counts, names, np.concatenate([row.steps for row in rows]), title)


def histograms_of(
    source: HasRecords | Records, select: Select = "grad/*", steps: slice = slice(None)
) -> list[ExponentHistogram]:
    """The histogram of each selected tensor; see `histogram`."""
    records: Records = source if isinstance(source, Records) else source.records
    found: dict[str, ExponentHistogram] = {}
    keys = chosen_keys(records, select, ("histogram", "tensor"), catalogue_of(source))
    # Histograms first: a tensor that has both is counted once.
    for key in sorted(keys, key=lambda key: key[1] != "histogram"):
        if key[0] in found:
            continue
        record = records[key]
        rows = np.isin(record.steps, _steps_in(record.steps, steps))
        if not rows.any():
            continue
        values = record.values[rows]
        if record.kind == "histogram":
            counts = values.reshape(-1, NUM_BINS).sum(0, dtype=np.int64)
        else:
            counts = count_exponents(values)
        name = key[0]
        found[name] = ExponentHistogram(counts, (name,), record.steps[rows], f"Histogram of {name}")
    if not found:
        raise SelectionError(f"No records of {select!r} are in the steps that were asked for.")
    return list(found.values())


def _steps_in(steps: np.ndarray, chosen: slice) -> np.ndarray:
    there = np.unique(steps)
    # A negative start counts recorded steps from the end; any other is the number of a step.
    if chosen.start is not None and chosen.start < 0:
        return there[chosen]
    first = 0 if chosen.start is None else chosen.start
    return there[(there >= first) & (there < (np.inf if chosen.stop is None else chosen.stop))]


@dataclasses.dataclass(frozen=True, eq=False)
class Heatmap(Picture):
    """Tensors over steps: one row per tensor, one column per step; shows itself in a notebook.

    Attributes:
        names: the tensors.
        steps: the first step of each column.
        values: [tensors, columns]; NaN where nothing was recorded.
        what: the meaning of the values.
        last: the last step.
        given: the limits of the colour scale, if not those that `scale` computes.
    """

    names: tuple[str, ...]
    steps: np.ndarray
    values: np.ndarray
    what: str
    last: int = -1
    given: tuple[float, float] | None = None

    @property
    def scale(self) -> tuple[float, float]:
        """The limits of the colour scale, powers of ten unless they were given.

        Pictures with the same scale can be compared: `heatmap(other, scale=this.scale)`.
        """
        if self.given is not None:
            return self.given
        finite = self.values[np.isfinite(self.values)]
        if (finite < 0).any():
            # Symmetric, so that zero is the white of the colour map.
            end = float(np.abs(finite).max())
            return -end, end
        finite = finite[finite > 0]
        if not len(finite):
            return 0.1, 1.0
        low, high = np.floor(np.log10(finite.min())), np.ceil(np.log10(finite.max()))
        # At least one decade: a logarithmic scale with equal ends is an error.
        return float(10.0**low), float(10.0 ** max(high, low + 1))

    @property
    def title(self) -> str:
        """The title of the picture."""
        kinds = list(dict.fromkeys(name.split("/")[0] for name in self.names))
        first, last = (int(self.steps[0]), self.last) if len(self.steps) else (0, 0)
        when = f"step {first}" if last <= first else f"steps {first} to {last}"
        return f"{self.what} of {', '.join(map(shown, kinds))}, {when}"

    def figure(self) -> Figure:
        """The picture, as a matplotlib figure."""
        rows = len(self.names)
        figure = new_figure(9, 1.6 + 0.22 * min(rows, MOST_LABELS))
        axes = figure.add_subplot()
        from matplotlib.colors import LogNorm, Normalize

        low, high = self.scale
        signed = low < 0
        masked = np.ma.masked_invalid(
            self.values if signed else np.where(self.values > 0, self.values, np.nan)
        )
        axes.set_facecolor("#d9d9d9")  # where nothing was recorded
        drawn: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
        norm = Normalize(low, high) if signed else LogNorm(low, high)
        image = axes.imshow(masked, **drawn, cmap="RdBu_r" if signed else "viridis", norm=norm)
        said = []
        if not signed and (self.values == 0).any():  # which has no logarithm
            zeros = np.where(self.values == 0, 0.0, np.nan)
            axes.imshow(np.ma.masked_invalid(zeros), **drawn, cmap="gray", vmin=0, vmax=1)
            said.append("black: zero")
        infinite = np.isinf(self.values)
        if infinite.any():
            axes.plot(*np.nonzero(infinite)[::-1], "x", color="#d62728", ms=4)
            said.append("red: infinite")
        if np.isnan(self.values).any():
            said.append("grey: nothing, or NaN")
        each = -(-rows // MOST_LABELS)
        axes.set_yticks(range(0, rows, each), [shown(n) for n in self.names[::each]], fontsize=8)
        ticks = _round_steps(self.steps)
        # Between columns too: with `tr.every(20)` these have the steps 19, 39, ...
        places = np.interp(ticks, self.steps, range(len(self.steps))) if ticks else []
        axes.set_xticks(places, [str(t) for t in ticks], fontsize=8)
        axes.set_xlabel(f"step ({'; '.join(said)})" if said else "step")
        figure.colorbar(image, ax=axes, label=self.what)
        axes.set_title(self.title, fontsize=11)
        figure.set_layout_engine("tight")
        return figure


def _round_steps(steps: np.ndarray) -> list[int]:
    """At most eight round numbers between the first and the last step.

    >>> _round_steps(np.arange(3, 1000))
    [200, 400, 600, 800]
    """
    if not len(steps):
        return []
    first, last = int(steps[0]), int(steps[-1])
    widths = [factor * 10**power for power in range(12) for factor in (1, 2, 5)]
    width = next(w for w in widths if (last - first) / w <= 6)
    found = list(range(-(-first // width) * width, last + 1, width))
    return found or [first]


def heatmap(
    source: HasRecords | Records,
    select: Select = "grad/*",
    field: str = "std",
    steps: slice = slice(None),
    scale: tuple[float, float] | None = None,
) -> Heatmap:
    """One number per tensor and step, for all selected tensors.

    Args:
        source: a run, a trainer, or records.
        select: the records: norms, statistics or histograms.
        field: the statistic, if statistics were recorded.
        steps: the steps, as for `histogram`.
        scale: the limits of the colour scale; None for powers of ten around the values.
    """
    records: Records = source if isinstance(source, Records) else source.records
    keys = chosen_keys(records, select, ("norm", "stats", "histogram"), catalogue_of(source))
    # One kind for the whole picture: a norm and a standard deviation have no common scale.
    kind = min((key[1] for key in keys), key=("norm", "stats", "histogram").index)
    keys = [key for key in keys if key[1] == kind]
    series = [(key[0], *_one_number(records[key], field)) for key in keys]
    there = _steps_in(np.concatenate([at for _, at, _ in series]), steps)
    if not len(there):
        raise SelectionError(f"No records of {select!r} are in the steps that were asked for.")
    # By recorded steps, not by their numbers: a tap that records every 1000th step has no empty
    # columns.
    columns = np.array_split(there, min(MOST_COLUMNS, len(there)))
    starts = np.array([column[0] for column in columns], int)
    values = np.full((len(series), len(columns)), np.nan)
    for row, (_, at, numbers) in enumerate(series):
        inside = np.isin(at, there)
        at, numbers = at[inside], numbers[inside]
        where = np.searchsorted(starts, at, side="right") - 1
        for column in np.unique(where):
            # Tensors may have been observed at other steps: each fills the columns that it has
            # values for.
            values[row, column] = numbers[where == column].mean()
    what = {"norm": "norm", "stats": field, "histogram": "mean magnitude, by exponent"}[kind]
    names = tuple(name for name, _, _ in series)
    return Heatmap(names, starts, values, what, int(there[-1]), scale)


def _one_number(record: Record, field: str) -> tuple[np.ndarray, np.ndarray]:
    values = record.values
    if record.kind == "stats":
        if field not in values.dtype.names:
            known = ", ".join(repr(name) for name in values.dtype.names)
            raise OptionError(f"field is one of {known}. Received: field={field!r}.")
        values = values[field]
    elif record.kind == "histogram":
        finite = values[..., :INF_BIN].astype(float)
        # A geometric mean, from the middles of the bins: an arithmetic one would show only the
        # largest values.
        middle = np.arange(INF_BIN) - BIAS + 0.5
        total = np.maximum(finite.sum(-1), 1)
        values = np.where(finite.sum(-1) > 0, 2.0 ** ((finite * middle).sum(-1) / total), np.nan)
    flat = values.reshape(len(record), -1).astype(np.float64)
    return record.steps, flat.mean(axis=1)  # layers of a scanned stack: their mean


def catalogue_of(source: object) -> Catalogue:
    """The tensors of a run, which say in which order the model has them; empty for records."""
    found = getattr(source, "catalogue", None)
    return found if isinstance(found, Catalogue) else Catalogue(())
