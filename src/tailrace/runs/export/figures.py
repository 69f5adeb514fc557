"""What pictures share: figures without a window, saving them, and the limits of number formats."""

from __future__ import annotations

import abc
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tailrace.base.paths import in_words
from tailrace.errors import MissingDependency, OptionError, RunError
from tailrace.records.float_formats import FORMATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#c0562b", "#3d8f5a", "#8b5fa8")
"""One for each format."""
STYLES = (":", "--", "-")
"""The line styles of a format's smallest value, smallest normal value, and largest value."""


class Picture(abc.ABC):
    """Something with a matplotlib figure; shows itself in a notebook."""

    @abc.abstractmethod
    def figure(self) -> Figure:
        """The picture, as a matplotlib figure."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture; the suffix selects the format (.png, .svg, .pdf)."""
        save_figure(self.figure(), path)

    def _repr_svg_(self) -> str:
        return svg_text(self.figure())


def new_figure(width: float, height: float) -> Figure:
    """A matplotlib figure, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency.for_feature("A picture", "matplotlib", "pictures") from error
    return Figure(figsize=(width, height), dpi=110)  # not pyplot: no window, no global state


def draw_formats(strip: Axes, axes: Axes, low: float, high: float) -> None:
    """Draw the ranges of formats as lines in `strip`, and their limits in `axes`."""
    strip.set_xlim(low, high)
    # Downwards, so that the first format is on top.
    strip.set_ylim(len(FORMATS) - 0.4, -0.9)
    strip.axis("off")
    for row, form in enumerate(FORMATS):
        colour = COLOURS[row]
        ends = [np.log2(v) for v in (form.smallest, form.smallest_normal, form.largest)]
        left, normal, right = np.clip(ends, low, high)
        strip.plot([left, normal], [row, row], color=colour, lw=1.2, ls=(0, (2, 2)))
        strip.plot([normal, right], [row, row], color=colour, lw=2.4)
        middle = (max(normal, low) + right) / 2
        text = {"color": colour, "fontsize": 8, "va": "bottom", "ha": "center"}
        strip.annotate(form.name, (middle, row), (0, 1.5), textcoords="offset points", **text)
        for end, style in zip(ends, STYLES, strict=True):
            if low < end < high:
                axes.axvline(end, color=colour, lw=0.8, ls=style, zorder=0)


def exponent_ticks(axes: Axes, low: float, high: float, zero: float) -> None:
    """Ticks at round exponents, and one for the column of zeros."""
    ticks = np.arange(-150, 140, 10 if high - low > 40 else 5)
    # Without those that would touch the label of the zeros.
    ticks = ticks[(ticks > zero + 0.06 * (high - low)) & (ticks < high)]
    axes.set_xticks([zero, *ticks], ["zero", *map(str, ticks)], fontsize=8)
    axes.set_xlabel(
        "log2 |value|; lines: smallest (dotted), smallest normal (dashed), largest (solid)",
        fontsize=9,
    )


def svg_text(figure: Figure) -> str:
    """A figure as SVG; deterministic."""
    from matplotlib import rc_context

    text = io.StringIO()
    # matplotlib's ids and dates would make every file different; text stays text, to be searchable.
    with rc_context({"svg.hashsalt": "tailrace", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure; the suffix selects the format."""
    path = Path(path)
    endings = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in endings:
        raise OptionError(
            f"The suffix of a picture selects its format: one of {', '.join(endings)}. "
            f"Received: {str(path)!r}."
        )
    try:
        if path.suffix.lower() == ".svg":
            path.write_text(svg_text(figure), encoding="utf-8")
        else:
            figure.savefig(path)
    except OSError as error:
        raise RunError(f"The picture {str(path)!r} cannot be written: {in_words(error)}") from error
