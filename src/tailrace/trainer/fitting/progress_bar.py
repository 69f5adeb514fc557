"""The progress bar of a fit: shown only in a terminal."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

import numpy as np


class ProgressView(ABC):
    """What shows the progress of a fit while it is open."""

    @abstractmethod
    def __enter__(self) -> ProgressView:
        """Begin to show it."""

    @abstractmethod
    def advance(self, steps: int, losses: np.ndarray, name: str = "loss") -> None:
        """More steps are done, with these losses, one row per step; the last loss is shown.

        A step without a loss has another metric in its place, with its `name`.
        """

    @abstractmethod
    def compiling(self, text: str) -> None:
        """A program is being compiled; an empty text: no more."""

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show it for the last time."""


class ProgressBar(ProgressView):
    """A line in the terminal: steps, steps a second, loss, effective batch size, what is compiled.

    Args:
        total: the total number of steps; None if unknown.
        batch: the effective batch size; None if elements have no leading dim.
        shown: whether to show it; None if standard error is a terminal.
        done: the number of steps done before, in an earlier process.
    """

    def __init__(
        self,
        total: int | None,
        batch: int | None = None,
        shown: bool | None = None,
        done: int = 0,
    ) -> None:
        self._total, self._batch = total, batch
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Any = None
        self._task: Any = None
        self._done = done

    def __enter__(self) -> ProgressBar:
        if self._shown:
            # Imported here: without a terminal nothing of it is needed.
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[rate]}"),
                progress.TextColumn("{task.fields[loss]}"),
                progress.TextColumn("{task.fields[batch]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            batch = f"effective batch {self._batch:,}" if self._batch else ""
            self._task = self._bar.add_task(
                "training", total=self._total, completed=self._done, rate="", loss="", batch=batch
            )
            self._bar.start()
        return self

    def advance(self, steps: int, losses: np.ndarray, name: str = "loss") -> None:
        """More steps are done, with these losses, one row per step; the last loss is shown.

        A step without a loss has another metric in its place, with its `name`.
        """
        if self._bar is not None:
            # rich's estimate from the last 30 s. A mean since the start would count compiling in.
            speed = self._bar.tasks[self._task].speed
            rate = f"{speed:,.0f} steps/s" if speed else ""
            self._bar.update(
                self._task, advance=steps, rate=rate, loss=f"{name} {losses[-1].mean():.4f}"
            )

    def compiling(self, text: str) -> None:
        """Show that a program is being compiled; an empty text ends it."""
        if self._bar is not None:
            described = f"compiling ({text})" if text else "training"
            self._bar.update(self._task, description=described)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
