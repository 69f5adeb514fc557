"""The course of a run: a loss that does not fall, or a speed that does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.summary import number
from tailrace.records.history import History, losses_of

FEWEST = 50
"""The fewest steps, or executions, for a finding."""
RISE, SLOWDOWN = 0.25, 0.7
"""A loss has risen if it ends above its minimum by more than this fraction of its fall. A speed has
dropped if it is below this fraction of its median."""
PARTS = 20
"""The loss is averaged over this many parts, since single steps are too noisy to compare."""


def course_findings(history: History, speed: np.ndarray) -> Iterator[Finding]:
    """Findings about loss and speed."""
    loss = losses_of(history)
    loss = loss[np.isfinite(loss)]
    if len(loss) >= FEWEST:
        yield from _loss(history, loss)
    if len(speed) >= FEWEST:
        # The last quarter, since the speed of one execution says little.
        usual, late = float(np.median(speed)), float(np.median(speed[-len(speed) // 4 :]))
        if late < SLOWDOWN * usual:
            yield Finding(
                Severity.WARNING,
                "speed",
                f"The run became slower: {number(late)} steps/s lately, {number(usual)} before.",
            )


def _loss(history: History, loss: np.ndarray) -> Iterator[Finding]:
    parts = np.array([part.mean() for part in np.array_split(loss.astype(np.float64), PARTS)])
    begin, end, lowest = parts[0], parts[-1], int(parts.argmin())
    near = history.first_step + lowest * len(history) // PARTS
    if lowest == 0:  # no part of the run is better than its start
        yield Finding(
            Severity.WARNING,
            "loss",
            f"The loss does not fall: {number(begin)} in the first twentieth of the run, "
            f"{number(end)} in the last.",
        )
    elif end - parts[lowest] > RISE * (begin - parts[lowest]):
        yield Finding(
            Severity.WARNING,
            "loss",
            f"The loss was lowest near step {near} ({number(parts[lowest])}) and has risen to "
            f"{number(end)} since.",
            step=near,
        )
