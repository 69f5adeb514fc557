"""Pictures of a run: the histogram of exponents, and the heat map of tensors over steps."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.errors import MissingDependency, OptionError, RunError, SelectionError
from tailrace.messages import shown
from tailrace.records.exponents import BIAS, count_exponents, format_sentences
from tailrace.records.float_formats import FORMATS
from tailrace.records.records import Record, Records
from tailrace.runs.tables.selection import chosen_keys
from tailrace.taps.reductions import INF_BIN, NAN_BIN, NUM_BINS, ZERO_BIN

COLOURS = ("#1b6ca8", "#c0562b", "#3d8f5a", "#8b5fa8")
"""One for each format."""
MOST_COLUMNS = 400
"""Steps beyond that share a column of a heat map."""
MOST_LABELS = 160
"""Rows of a heat map beyond that share the room of one, and only some have their names beside them."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Values of some tensors, counted by binary exponent; shows itself in a notebook.

    Attributes:
        counts: [258], as a tap with `reduce="histogram"` records them.
        names: the tensors whose values these are.
        steps: the steps they come from.
        title: what the picture is called.
    """

    counts: np.ndarray
    names: tuple[str, ...]
    steps: np.ndarray
    title: str = "Gradient histogram"

    @property
    def sentences(self) -> list[str]:
        """How many there are, and what each narrow format would do to them."""
        counts = self.counts
        first, last = int(self.steps.min()), int(self.steps.max())
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        special = ", ".join(
            f"{int(counts[index]):,} {what}"
            for index, what in ((ZERO_BIN, "zero"), (INF_BIN, "infinite"), (NAN_BIN, "NaN"))
        )
        head = f"{int(counts.sum()):,} values of {len(self.names)} tensors, {when}: {special}."
        return [head, *format_sentences(counts)]

    def figure(self) -> Any:
        """The picture, as a matplotlib figure."""
        figure = _figure(9, 5.6)
        axes = figure.add_axes((0.09, 0.34, 0.88, 0.59))
        counts, finite = self.counts, self.counts[:INF_BIN]
        there = np.flatnonzero(finite)
        low, high = (there[0] - BIAS, there[-1] - BIAS) if len(there) else (-1, 0)
        exponents = np.arange(low, high + 1)
        axes.bar(exponents, finite[exponents + BIAS], width=1, align="edge", color="#a9b4bf")
        axes.bar(low - 3, counts[ZERO_BIN], width=1, align="edge", color="#1d2b3a")
        top = max(int(finite.max(initial=0)), int(counts[ZERO_BIN]), 1)
        edge_low, edge_high = low - 5, max(high + 4, 20)
        for number, form in enumerate(FORMATS):
            colour, y = COLOURS[number], top * (1.37 - 0.095 * number)
            ends = [np.log2(v) for v in (form.smallest, form.smallest_normal, form.largest)]
            left, normal, right = np.clip(ends, edge_low, edge_high)
            axes.plot([left, normal], [y, y], color=colour, lw=1.2, ls=(0, (2, 2)))
            axes.plot([normal, right], [y, y], color=colour, lw=2.4)
            for at, end, style in zip((left, normal, right), ends, (":", "--", "-"), strict=True):
                if at == end:
                    axes.axvline(at, ymax=y / (top * 1.46), color=colour, lw=0.8, ls=style)
            middle = (max(normal, low) + right) / 2
            axes.annotate(  # above its line, which would hide what hangs below the letters
                form.name,
                (middle, y),
                (0, 2.5),
                textcoords="offset points",
                color=colour,
                fontsize=8,
                va="bottom",
                ha="center",
            )
        axes.set_xlim(edge_low, edge_high)
        axes.set_ylim(0, top * 1.46)
        ticks = np.arange(-150, 140, 10 if edge_high - edge_low > 40 else 5)
        zero = low - 2.5  # the labels of its neighbours would stand in its own
        ticks = ticks[(ticks > zero + 0.06 * (edge_high - edge_low)) & (ticks < edge_high)]
        axes.set_xticks([zero, *ticks], ["zero", *map(str, ticks)])
        axes.set_xlabel(
            "log2 |value|; lines: smallest (dotted), smallest normal (dashed), largest (solid)",
            fontsize=9,
        )
        axes.set_ylabel("values")
        axes.set_title(self.title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        figure.text(0.09, 0.222, "\n".join(self.sentences), fontsize=8.5, va="top", linespacing=1.6)
        return figure

    def save(self, path: Any) -> None:
        """Write the picture; the ending says how (.png, .svg, .pdf)."""
        _save(self.figure(), path)

    def _repr_svg_(self) -> str:
        return svg_text(self.figure())

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


def histogram(source: Any, select: Any = "grad/*", steps: slice = slice(None)) -> ExponentHistogram:
    """The histogram of all chosen tensors together.

    Args:
        source: a run, a trainer, or records.
        select: which records: those with `reduce="histogram"`, or whole tensors.
        steps: from which steps: `slice(100, 200)`, `slice(-1, None)` for the last recorded one.
    """
    records: Records = source if isinstance(source, Records) else source.records
    counts, names, seen = np.zeros(NUM_BINS, np.int64), [], []
    taken: set[str] = set()
    keys = chosen_keys(records, select, ("histogram", "tensor"))
    for key in sorted(keys, key=lambda key: key[1] != "histogram"):
        if key[0] in taken:
            continue
        taken.add(key[0])
        record = records[key]
        rows = np.isin(record.steps, _steps_in(record.steps, steps))
        if not rows.any():
            continue
        values = record.values[rows]
        is_counted = record.kind == "histogram"
        counts += values.reshape(-1, NUM_BINS).sum(0) if is_counted else count_exponents(values)
        names.append(key[0])
        seen.append(record.steps[rows])
    if not names:
        raise SelectionError(f"No records of {select!r} are in the steps that were asked for.")
    kinds = {name.split("/")[0] for name in names}
    title = "Gradient histogram" if kinds == {"grad"} else f"Histogram of {shown(str(select))}"
    return ExponentHistogram(counts, tuple(names), np.concatenate(seen), title)


def _steps_in(steps: np.ndarray, chosen: slice) -> np.ndarray:
    there = np.unique(steps)
    if chosen.start is not None and chosen.start < 0:
        return there[chosen]
    first = 0 if chosen.start is None else chosen.start
    return there[(there >= first) & (there < (np.inf if chosen.stop is None else chosen.stop))]


@dataclasses.dataclass(frozen=True, eq=False)
class Heatmap:
    """Tensors over steps: one row a tensor, one column a step; shows itself in a notebook.

    Attributes:
        names: the tensors.
        steps: the first step of each column.
        values: [tensors, columns]; NaN where nothing was recorded.
        what: what the values are.
    """

    names: tuple[str, ...]
    steps: np.ndarray
    values: np.ndarray
    what: str

    def figure(self) -> Any:
        """The picture, as a matplotlib figure."""
        rows = len(self.names)
        figure = _figure(9, 1.6 + 0.22 * min(rows, MOST_LABELS))
        axes = figure.add_subplot()
        with np.errstate(divide="ignore", invalid="ignore"):
            logged = np.log10(np.where(self.values > 0, self.values, np.nan))
        signed = bool((self.values < 0).any())
        shown_values = self.values if signed else logged
        masked = np.ma.masked_invalid(shown_values)
        axes.set_facecolor("#d9d9d9")  # where nothing was recorded
        drawn: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
        image = axes.imshow(masked, **drawn, cmap="viridis")
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
        places = np.unique(np.linspace(0, len(self.steps) - 1, 8).astype(int))
        axes.set_xticks(places, [str(self.steps[p]) for p in places], fontsize=8)
        axes.set_xlabel(f"step ({'; '.join(said)})" if said else "step")
        label = self.what if signed else f"log10 of the {self.what}"
        figure.colorbar(image, ax=axes, label=label)
        figure.set_layout_engine("tight")
        return figure

    def save(self, path: Any) -> None:
        """Write the picture; the ending says how (.png, .svg, .pdf)."""
        _save(self.figure(), path)

    def _repr_svg_(self) -> str:
        return svg_text(self.figure())


def heatmap(source: Any, select: Any = "grad/*", field: str = "std") -> Heatmap:
    """One number a tensor and step, of all chosen tensors.

    Args:
        source: a run, a trainer, or records.
        select: which records: norms, statistics or histograms.
        field: which statistic, where statistics were recorded.
    """
    records: Records = source if isinstance(source, Records) else source.records
    keys = chosen_keys(records, select, ("norm", "stats", "histogram"))
    kind = min((key[1] for key in keys), key=("norm", "stats", "histogram").index)
    keys = [key for key in keys if key[1] == kind]
    series = [(key[0], *_one_number(records[key], field)) for key in keys]
    steps = np.unique(np.concatenate([steps for _, steps, _ in series]))
    columns = np.array_split(steps, min(MOST_COLUMNS, len(steps))) if len(steps) else []
    starts = np.array([column[0] for column in columns], int)
    values = np.full((len(series), len(columns)), np.nan)
    for row, (_, at, numbers) in enumerate(series):
        where = np.searchsorted(starts, at, side="right") - 1
        for column in np.unique(where):
            values[row, column] = numbers[where == column].mean()
    what = {"norm": "norm", "stats": field, "histogram": "mean magnitude, by exponent"}[kind]
    return Heatmap(tuple(name for name, _, _ in series), starts, values, what)


def _one_number(record: Record, field: str) -> tuple[np.ndarray, np.ndarray]:
    values = record.values
    if record.kind == "stats":
        if field not in values.dtype.names:
            known = ", ".join(repr(name) for name in values.dtype.names)
            raise OptionError(f"field is one of {known}. Received: field={field!r}.")
        values = values[field]
    elif record.kind == "histogram":
        finite = values[..., :INF_BIN].astype(float)
        middle = np.arange(INF_BIN) - BIAS + 0.5
        total = np.maximum(finite.sum(-1), 1)
        values = np.where(finite.sum(-1) > 0, 2.0 ** ((finite * middle).sum(-1) / total), np.nan)
    flat = values.reshape(len(record), -1).astype(np.float64)
    return record.steps, flat.mean(axis=1)  # layers of a scanned stack: their mean


# -- matplotlib ---------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency.for_feature("A picture", "matplotlib", "pictures") from error
    return Figure(figsize=(width, height), dpi=110)  # no window, no state of pyplot's


def svg_text(figure: Any) -> str:
    """A figure as SVG, the same text each time."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "tailrace", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _save(figure: Any, path: Any) -> None:
    path = Path(path)
    endings = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in endings:
        raise OptionError(
            f"The ending of a picture says how it is written: one of {', '.join(endings)}. "
            f"Received: {str(path)!r}."
        )
    try:
        if path.suffix.lower() == ".svg":
            path.write_text(svg_text(figure), encoding="utf-8")
        else:
            figure.savefig(path)
    except OSError as error:
        raise RunError(f"The picture {str(path)!r} cannot be written: {error.strerror}.") from error
