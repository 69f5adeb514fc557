"""The progress of a fit in a notebook: one output that is redrawn during training."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any, Protocol

import numpy as np

from tailrace.trainer.fitting.progress_bar import ProgressBar, ProgressView

EVERY_S = 0.5
"""The shortest time between redraws, in seconds."""


class Handle(Protocol):
    """An output of a notebook that can be redrawn."""

    def update(self, shown: object, /) -> None:
        """Draw it again."""
        ...


class Display(Protocol):
    """`IPython.display.display`, as it is called here."""

    def __call__(self, shown: object, /, *, display_id: bool) -> Handle | None:
        """Show an object; the handle redraws it."""
        ...


class NotebookView(ProgressView):
    """Steps, speed, loss and its curve as HTML, redrawn in place.

    Args:
        display: shows an object and returns a handle with `update`; `IPython.display.display`.
        total: the total number of steps; None if unknown.
        batch: the effective batch size; None if elements have no leading dim.
        done: the number of steps done before.
    """

    def __init__(
        self, display: Display, total: int | None, batch: int | None, done: int = 0
    ) -> None:
        self._total, self._batch, self._done = total, batch, done
        self._display = display
        self._handle: Handle | None = None
        self._losses: list[float] = []
        self._name = "loss"
        self._began = self._drawn = 0.0
        self._before = done

    def __enter__(self) -> NotebookView:
        self._began = time.monotonic()
        self._handle = self._display(self, display_id=True)
        return self

    def advance(self, steps: int, losses: np.ndarray, name: str = "loss") -> None:
        """More steps are done, with these losses, one row per step; the last loss is shown."""
        self._name = name
        self._done += steps
        self._losses.append(float(losses[-1].mean()))
        # Each update goes to the browser: executions of milliseconds would keep it busy.
        if time.monotonic() - self._drawn >= EVERY_S:
            self._draw()

    def compiling(self, text: str) -> None:
        """Not shown here: the output is redrawn when steps are done."""

    def __exit__(self, *_: Any) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        from tailrace.records.curves import small_curve

        passed = max(time.monotonic() - self._began, 1e-9)
        speed = (self._done - self._before) / passed
        of = f" of {self._total:,}" if self._total is not None else ""
        parts = [f"{self._done:,}{of} steps", f"{speed:,.0f} steps/s"]
        if self._losses:
            parts.append(f"{self._name} {self._losses[-1]:.4g}")
        if self._batch:
            parts.append(f"effective batch {self._batch:,}")
        share = self._done / self._total if self._total else 0.0
        bar = f'<progress value="{min(share, 1.0):.4f}" max="1"></progress> ' if self._total else ""
        curve = f"<div>{small_curve(np.array(self._losses))}</div>" if self._losses else ""
        return f"<div>{bar}{escape(', '.join(parts))}</div>{curve}"


def progress_view(
    total: int | None, batch: int | None, shown: bool | None, done: int = 0
) -> ProgressView:
    """The progress view of a fit: an output in a notebook, otherwise a line."""
    display = _notebook_display() if shown is not False else None
    if display is not None:
        return NotebookView(display, total, batch, done)
    return ProgressBar(total, batch, shown, done)


def _notebook_display() -> Display | None:
    """`IPython.display.display` in a notebook's kernel; None elsewhere."""
    # Not imported: a notebook has imported it already.
    shell = sys.modules.get("IPython")
    if shell is None or getattr(shell.get_ipython(), "kernel", None) is None:
        return None
    from IPython.display import display

    return display
