"""Histograms of several tensors, one row each, to see which of them leaves the range of a format."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tailrace.base.messages import shown
from tailrace.records.exponents import BIAS
from tailrace.records.records import HasRecords, Records
from tailrace.runs.export.figures import Picture, draw_formats, exponent_ticks, new_figure
from tailrace.runs.export.pictures import ExponentHistogram, histograms_of
from tailrace.taps.catalogue import Select
from tailrace.taps.reductions import INF_BIN, NAN_BIN, ZERO_BIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.36
"""The height of a row in inches."""
MOST_LETTERS = 60
"""The most letters of a name; its beginning, which names of a model share, is cut off."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExponentRidges(Picture):
    """Values of tensors by binary exponent, one row per tensor; shows itself in a notebook.

    Attributes:
        rows: the histogram of each tensor.
        title: the title of the picture.
    """

    rows: tuple[ExponentHistogram, ...]
    title: str = "Gradient histograms"

    def figure(self) -> Figure:
        """The picture, as a matplotlib figure."""
        names = [_short(row.names[0]) for row in self.rows]
        height = 2.2 + ROW * len(self.rows)
        figure = new_figure(9, height)
        left = 0.03 + 0.0078 * max(map(len, names))
        # Inches as fractions of the height: margins stay the same, however many rows there are.
        strip_at, rows_at = 1.08 / height, 0.92 / height
        bottom = 1 - strip_at - (0.36 / height) - ROW * len(self.rows) / height
        box = (left, bottom, 0.86 - left, ROW * len(self.rows) / height)
        axes = figure.add_axes(box)
        strip = figure.add_axes((left, box[1] + box[3], 0.86 - left, rows_at))
        low, high = self._range()
        draw_formats(strip, axes, low - 5, max(high + 4, 20))
        # One scale for all rows, so that their heights can be compared.
        top = np.log10(1 + max(int(row.counts.max()) for row in self.rows))
        for number, row in enumerate(self.rows):
            self._draw(axes, number, row.counts, (low, high), top)
        axes.set_ylim(len(self.rows) - 0.08, -0.08)
        axes.set_yticks(np.arange(len(self.rows)) + 0.82, [shown(n) for n in names], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(low - 5, max(high + 4, 20))
        exponent_ticks(axes, low - 5, max(high + 4, 20), low - 2.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        steps = np.concatenate([row.steps for row in self.rows])
        when = f"steps {steps.min()} to {steps.max()}; logarithmic counts"
        figure.text(left, 1 - 0.26 / height, f"{self.title}, {when}", fontsize=11, va="center")
        return figure

    def _range(self) -> tuple[int, int]:
        there = np.flatnonzero(sum(row.counts[1:INF_BIN] for row in self.rows)) + 1
        return (int(there[0]) - BIAS, int(there[-1]) - BIAS) if len(there) else (-1, 0)

    @staticmethod
    def _draw(
        axes: Axes, number: int, counts: np.ndarray, ends: tuple[int, int], top: float
    ) -> None:
        low, high = ends
        exponents = np.arange(low, high + 1)
        # `1 +`: empty bins are 0 high, not minus infinity. 0.86 leaves a gap to the row above.
        tall = 0.86 * np.log10(1 + counts[exponents + BIAS]) / max(top, 1e-9)
        base = number + 0.92
        edges = np.append(exponents, high + 1)
        axes.stairs(base - tall, edges, baseline=base, fill=True, color="#5b86ad", lw=0)
        zero = 0.86 * np.log10(1 + counts[ZERO_BIN]) / max(top, 1e-9)
        if counts[ZERO_BIN]:
            axes.bar(low - 3, -zero, width=1, bottom=base, align="edge", color="#1d2b3a")
        axes.axhline(base, color="#c9d1d9", lw=0.6, zorder=0)
        said = [f"{100 * counts[ZERO_BIN] / max(counts.sum(), 1):.3g} % zero"]
        special = ((INF_BIN, "Inf"), (NAN_BIN, "NaN"))
        said += [f"{counts[at]:,} {name}" for at, name in special if counts[at]]
        colour = "#b3261e" if len(said) > 1 else "#57606a"
        place = {"xycoords": ("axes fraction", "data"), "fontsize": 7.5, "va": "bottom"}
        axes.annotate(", ".join(said), (1.01, base), color=colour, annotation_clip=False, **place)

    def __repr__(self) -> str:
        return "\n".join(
            [self.title, *(f"  {shown(row.names[0])}: {row.sentences[0]}" for row in self.rows)]
        )


def _short(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else f"…{name[1 - MOST_LETTERS :]}"


def ridges(
    source: HasRecords | Records, select: Select = "grad/*", steps: slice = slice(None)
) -> ExponentRidges:
    """The histogram of each selected tensor, in one picture; see `pictures.histogram`."""
    rows = histograms_of(source, select, steps)
    kinds = {row.names[0].split("/")[0] for row in rows}
    title = "Gradient histograms" if kinds == {"grad"} else f"Histograms of {shown(str(select))}"
    return ExponentRidges(tuple(rows), title)
