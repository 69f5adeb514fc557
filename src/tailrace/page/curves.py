"""Curves of a run: loss, metrics and speed, reduced to the resolution of a screen."""

from __future__ import annotations

import dataclasses

import numpy as np

from tailrace.page.followed import FollowedRun

MOST_POINTS = 800
"""The most points; further steps share a point: their mean, with minimum and maximum."""

SPEED = "steps/s"


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """Values by step.

    Attributes:
        steps: the first step of each point.
        mean: the mean of the finite values; NaN if there are none.
        low: their minimum.
        high: their maximum.
        nonfinite: the number of NaN and Inf values.
        first_nonfinite: the first step with one; -1 for none.
        last: the last value, finite or not; None for no values.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    nonfinite: int = 0
    first_nonfinite: int = -1
    last: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether each point is a single value."""
        return np.array_equal(self.low, self.high, equal_nan=True)


def curve(
    steps: np.ndarray,
    values: np.ndarray,
    most: int = MOST_POINTS,
    first: int | None = None,
    last: int | None = None,
) -> Curve:
    """Values sorted by step, reduced to at most `most` points.

    Args:
        steps: the step of each value.
        values: the values.
        most: the most points.
        first: leave out earlier steps.
        last: leave out later steps.

    >>> made = curve(np.arange(4), np.array([1.0, 3.0, np.nan, 5.0]), most=2)
    >>> made.steps, made.mean, made.low, made.high, made.first_nonfinite
    (array([0, 2]), array([2., 5.]), array([1., 5.]), array([3., 5.]), 2)
    """
    start = 0 if first is None else int(np.searchsorted(steps, first))
    stop = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
    steps, values = steps[start:stop], values[start:stop].astype(np.float64)
    if not len(steps):
        empty = np.zeros(0)
        return Curve(steps, empty, empty, empty)
    good = np.isfinite(values)
    bad = np.flatnonzero(~good)
    # By step, not by index: records of a periodic tap, or of a run that was resumed, have gaps.
    span = int(steps[-1]) - int(steps[0]) + 1
    where = (steps - steps[0]) * min(most, span) // span
    # Only points that have steps get a start: `reduceat` cannot sum an empty range.
    starts = np.flatnonzero(np.diff(where, prepend=-1))
    count = np.add.reduceat(good.astype(np.int64), starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.add.reduceat(np.where(good, values, 0.0), starts) / count
        low = np.minimum.reduceat(np.where(good, values, np.inf), starts)
        high = np.maximum.reduceat(np.where(good, values, -np.inf), starts)
    none = count == 0
    return Curve(
        steps[starts],
        np.where(none, np.nan, mean),
        np.where(none, np.nan, low),
        np.where(none, np.nan, high),
        len(bad),
        int(steps[bad[0]]) if len(bad) else -1,
        float(values[-1]),
    )


def history_curves(
    followed: FollowedRun, first: int | None = None, last: int | None = None
) -> dict[str, Curve]:
    """Loss and metrics of a run by name, and its speed."""
    history = followed.readable().history
    order = ["loss", *history.step_names, *history.names]
    # Each validation value next to the training value: loss, val_loss, accuracy, val_accuracy.
    order = dict.fromkeys(name for one in order for name in (one, f"val_{one}"))
    found = {
        name: curve(history.steps_of(name), history[name], first=first, last=last)
        for name in order
        if name in history.names
    }
    steps, speed = speeds(followed)
    if len(steps):
        found[SPEED] = curve(steps, speed, first=first, last=last)
    return found


def speeds(followed: FollowedRun) -> tuple[np.ndarray, np.ndarray]:
    """Steps per second of each execution except the first of a fit, whose start is unknown."""
    rows = followed.readable().executions
    seconds, steps = _spans(rows), rows["steps"][1:]
    # Executions collected together have equal times, and a clock may be set back.
    good = seconds > 1e-6
    return rows["first_step"][1:][good], steps[good] / seconds[good]


def trained(followed: FollowedRun) -> tuple[int, float]:
    """The steps after the first execution of each fit, and the seconds that they took."""
    rows = followed.readable().executions
    seconds = _spans(rows)
    counted = np.isfinite(seconds)
    return int(rows["steps"][1:][counted].sum()), float(seconds[counted].sum())


def _spans(rows: dict[str, np.ndarray]) -> np.ndarray:
    """Seconds from the end of each execution to that of the next; NaN from one fit to another.

    What happens between two fits, or between a crash and the resumed fit, is not training.
    """
    return np.where(begins_fit(rows)[1:], np.nan, np.diff(rows["ended"]))


def begins_fit(rows: dict[str, np.ndarray]) -> np.ndarray:
    """Whether each execution is the first of a fit, or of a resumed one."""
    first = np.zeros(len(rows["ended"]), bool)
    first[:1] = True
    if "fit" in rows:
        first[1:] |= np.diff(rows["fit"]) != 0
    if "resumed" in rows:
        first |= rows["resumed"] == 1
    return first
