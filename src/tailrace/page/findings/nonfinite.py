"""NaN and Inf: the guard's reports, and where the first of them was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tailrace.base.messages import counted, shown
from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.findings.layer_order import made_first
from tailrace.page.layers import LayerMap
from tailrace.records.history import History, losses_of

MOST_REPORTS = 5


def nonfinite_findings(
    reports: list[dict[str, Any]], bad: LayerMap, history: History
) -> Iterator[Finding]:
    """Findings about values that are not finite.

    Args:
        reports: the reports of `tr.stop_on_nonfinite`.
        bad: counts of NaN and Inf.
        history: loss and metrics.
    """
    for report in reports[-MOST_REPORTS:]:
        yield Finding(Severity.BAD, "not finite", shown(report["text"]), step=report["step"])
    yield from _tensors(bad)
    loss = losses_of(history)
    lost = np.flatnonzero(~np.isfinite(loss))
    if len(lost):
        first = history.first_step + int(lost[0])
        skipped = int((history["skipped"] > 0).sum()) if "skipped" in history.names else 0
        advice = (
            "observe=[tr.stop_on_nonfinite()] stops a run at the first and names the operation."
            if not skipped
            else f"{counted(skipped, 'step was', 'steps were')} skipped and changed nothing; "
            f"trainer.explain_step names the rows."
        )
        yield Finding(
            Severity.BAD,
            "not finite",
            f"The loss is {loss[lost[0]]:g} in step {first}, and not finite in {len(lost):,} of "
            f"{len(loss):,} steps. {advice}",
            step=first,
        )


def _tensors(bad: LayerMap) -> Iterator[Finding]:
    with np.errstate(invalid="ignore"):
        there = bad.values > 0
    if not there.any():
        return
    # Within a step a NaN spreads to most tensors: the one that is computed first shows the cause.
    column = int(np.argmax(there.any(axis=0)))
    rows = np.flatnonzero(there[:, column])
    row = int(rows[made_first([bad.names[index] for index in rows])])
    step = int(bad.steps[column])
    when = f"step {step}" if bad.width == 1 else f"steps {step} to {step + bad.width - 1}"
    count = int(there.any(axis=1).sum())
    yield Finding(
        Severity.BAD,
        "not finite",
        f"The first NaN or Inf that was recorded is in {bad.names[row]!r} ({when}); of the tensors "
        f"in these steps a step makes this one first. {count} of {len(bad.names)} recorded tensors "
        f"have some.",
        bad.names[row],
        step,
    )
