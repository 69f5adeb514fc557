"""Spikes: steps whose loss is far above those before them, by the scores of `tr.on_spike`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from tailrace.base.messages import listed
from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.followed import FollowedRun
from tailrace.page.summary import number
from tailrace.records.history import losses_of
from tailrace.records.scores import SPIKE_LEAST, SPIKE_SCORE, SPIKE_WINDOW, moving_scores

MOST_STEPS = 100_000
"""The most steps to examine when a run is opened, which takes about a second."""
MOST_LISTED = 5


def spike_findings(followed: FollowedRun) -> Iterator[Finding]:
    """A finding that names the steps of spikes."""
    run = followed.readable()
    steps, loss = run.history.steps, losses_of(run.history)
    if not len(loss):  # a step of the user's own need not have one
        return
    good = np.isfinite(loss)  # NaN and Inf have a finding of their own
    steps, loss = steps[good], loss[good].astype(np.float64)
    fits = run.executions.get("fit", np.zeros(0, np.int64))
    search = followed.kept("spikes", SpikeSearch)
    search.look(loss, np.flatnonzero(np.isin(steps, fits)))
    if not search.rows:
        return
    first, when = int(steps[search.rows[0]]), [int(steps[row]) for row in search.rows]
    where = f"{len(when):,} times, in steps {listed([*map(str, when)], MOST_LISTED)}"
    if len(when) == 1:
        where = f"once, in step {first}"
    yield Finding(
        Severity.WARNING,
        "loss spikes",
        f"The loss spikes {where}: {number(loss[search.rows[0]])} in step {first}, "
        f"{number(search.scores[0], 3)} deviations above the median of the steps before it. "
        f"trainer.explain_step({first}, dataset, checkpoint=...) shows which rows caused it.",
        step=first,
    )


class SpikeSearch:
    """The spikes of a loss that gets longer; each value is examined once.

    Attributes:
        rows: the index of each spike: of its first step, if several follow each other.
        scores: their scores.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.scores: list[float] = []
        self._seen = self._last = -1

    def look(self, loss: np.ndarray, starts: np.ndarray) -> None:
        """Examine the values since the last call.

        Args:
            loss: all values so far, finite.
            starts: the indices at which fits begin; a fit is only compared with itself.
        """
        # Cut where fits begin: the first loss of a fit is often far above the last of the one before.
        begin = max(self._seen, len(loss) - MOST_STEPS, 0)
        cuts = [begin, *starts[(starts > begin) & (starts < len(loss))].tolist(), len(loss)]
        for first, stop in pairwise(cuts):
            fit = int(starts[starts <= first].max(initial=0))
            before = loss[max(fit, first - SPIKE_WINDOW) : first]
            scores = moving_scores(loss[first:stop], before, SPIKE_WINDOW, SPIKE_LEAST)
            for place in np.flatnonzero(scores > SPIKE_SCORE):
                row = first + int(place)
                if _is_far(loss[max(fit, row - SPIKE_WINDOW) : row + 1]):
                    self._add(row, float(scores[place]))
        self._seen = len(loss)

    def _add(self, row: int, score: float) -> None:
        if row != self._last + 1 or not self.rows:  # neighbours are one spike
            self.rows.append(row)
            self.scores.append(score)
        self._last = row


def _is_far(values: np.ndarray) -> bool:
    """Whether the last value is far above the others on a logarithmic scale too.

    The losses of small batches spread over powers of ten, so that the largest of them are not spikes.
    """
    with np.errstate(divide="ignore"):
        logs = np.log(np.abs(values))
    others = logs[:-1][np.isfinite(logs[:-1])]
    (score,) = moving_scores(logs[-1:], others, SPIKE_WINDOW, SPIKE_LEAST)
    return bool(score > SPIKE_SCORE)
