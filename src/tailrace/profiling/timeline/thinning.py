"""Fewer slices: short neighbours are merged into one slice that says how many there were."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 250_000
"""The most slices of a file: about 12 MB, which Perfetto opens at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A slice of one track. Times are nanoseconds.

    Attributes:
        name: its name.
        start: its start.
        end: its end.
        about: additional values.
    """

    name: str
    start: int
    end: int
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def nested(bars: Sequence[Bar]) -> list[tuple[int, Bar]]:
    """Slices in order, each with its depth; one that extends beyond its parent is cut there."""
    found: list[tuple[int, Bar]] = []
    around: list[int] = []
    # Of slices that start together the longest is the outermost.
    for bar in sorted(bars, key=lambda bar: (bar.start, -bar.end)):
        while around and around[-1] <= bar.start:
            around.pop()
        if around and bar.end > around[-1]:
            bar = dataclasses.replace(bar, end=around[-1])
        found.append((len(around), bar))
        if bar.end > bar.start:
            around.append(bar.end)
    return found


def thinned(tracks: Mapping[Any, Sequence[Bar]], most: int = MOST) -> dict[Any, list[Bar]]:
    """The slices of some tracks, at most `most` of them.

    >>> bars = [Bar("op", 10 * n, 10 * n + 5) for n in range(1000)]
    >>> (one,) = thinned({0: bars}, most=10)[0]
    >>> one.name, one.start, one.end
    ('1000 short ones', 0, 9995)
    """
    whole = {key: nested(bars) for key, bars in tracks.items()}
    count = sum(map(len, whole.values()))
    if count <= most:
        return {key: [bar for _, bar in bars] for key, bars in whole.items()}
    lengths = sorted(bar.end - bar.start for bars in whole.values() for _, bar in bars)
    # A limit that keeps the `most` longest. The merged slices come on top, so it may have to grow.
    limit = max(lengths[len(lengths) - most], 1)
    while True:
        fewer = {key: _merged(bars, limit) for key, bars in whole.items()}
        if sum(map(len, fewer.values())) <= most:
            return fewer
        limit *= 2


def _merged(bars: Sequence[tuple[int, Bar]], limit: int) -> list[Bar]:
    """Merge neighbours shorter than `limit` and no further apart; drop their children."""
    kept: list[Bar] = []
    short: list[Bar] = []
    depth_of_short = -1

    def close() -> None:
        if len(short) == 1:
            kept.append(short[0])
        elif short:
            busy = sum(bar.end - bar.start for bar in short)
            about = {"busy_us": busy / 1e3, "first": short[0].name}
            kept.append(Bar(f"{len(short)} short ones", short[0].start, short[-1].end, about))
        short.clear()

    for depth, bar in bars:
        if short and depth > depth_of_short and bar.end <= short[-1].end:
            continue  # inside a short one
        is_short = bar.end - bar.start < limit
        # A group covers no long slice and no long gap, and stays at one depth.
        if short and (not is_short or depth != depth_of_short or bar.start - short[-1].end > limit):
            close()
        if is_short:
            short.append(bar)
            depth_of_short = depth
        else:
            kept.append(bar)
    close()
    return kept
