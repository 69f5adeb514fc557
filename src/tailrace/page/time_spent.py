"""Where the time of a run went: the device computed, or what it waited for."""

from __future__ import annotations

import dataclasses

import numpy as np

from tailrace.base.spans.device_times import ACTIVITIES
from tailrace.page.curves import begins_fit
from tailrace.page.followed import FollowedRun

DEVICE = "device"


@dataclasses.dataclass(frozen=True)
class TimeSpent:
    """The seconds of a run by activity.

    Attributes:
        start: up to the end of the first execution of each fit, which compiles.
        later: after that.
    """

    start: dict[str, float]
    later: dict[str, float]

    @property
    def seconds(self) -> float:
        """All seconds after the start."""
        return sum(self.later.values())

    def share(self, activity: str) -> float:
        """The share of an activity in the time after the start."""
        return self.later.get(activity, 0.0) / max(self.seconds, 1e-9)

    def speedup(self, activity: str) -> float:
        """How many times as fast the run would be without an activity, after the start.

        >>> TimeSpent({}, {"device": 1.0, "data": 3.0}).speedup("data")
        4.0
        """
        return 1 / max(1 - self.share(activity), 1e-9)

    @property
    def limit(self) -> str:
        """The activity that the run is bound by: the device, or what it waits for most."""
        if self.share(DEVICE) >= 0.5:
            return DEVICE
        return max((n for n in self.later if n != DEVICE), key=lambda n: self.later[n])


def time_spent(followed: FollowedRun) -> TimeSpent | None:
    """The seconds of a run by activity; None if they were not recorded."""
    rows = followed.readable().executions
    times = rows.get("times")
    if times is None:
        return None
    if times.ndim != 2 or times.shape[1] != len(ACTIVITIES) or (times < 0).any():
        raise ValueError("the times of its executions are not seconds of each activity")
    first = begins_fit(rows)
    # Rows that an older version wrote are not known.
    known = np.isfinite(times).all(axis=1)
    return TimeSpent(_sums(times[first & known]), _sums(times[~first & known]))


def _sums(times: np.ndarray) -> dict[str, float]:
    return dict(zip(ACTIVITIES, times.sum(axis=0).tolist(), strict=True))
