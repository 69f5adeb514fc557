"""Into which pieces a long loop is cut.

A piece is one dispatch. Long pieces cost memory (all their elements are on the device at once) and
keep results waiting; short ones cost a dispatch each, and every length is compiled once. So there are
as few lengths as possible: a divisor of the whole where there is a good one.
"""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.devices import devices

MOST_BYTES = {"cpu": 24 << 20}
MOST_BYTES_ELSEWHERE = 128 << 20
"""Elements of one dispatch, in bytes, if nothing else says how long it is to be.

On a CPU, below 32 MiB the C library hands freed memory out again; above, every block is mapped anew and
its pages are cleared by the kernel, which costs a tenth of the time of a small step. On an accelerator
a dispatch costs the host about a millisecond while the device waits (H200), and moving this much 14.
"""

LONGEST = 4096
"""Passes of one dispatch, however short they are and however little they read.

What an executable has room for is fixed when it is compiled. At 20 microseconds a step this is 80 ms,
beside which a dispatch of 0.1 ms does not count.
"""

FIXED_BELOW_S = 1.5e-3
"""Passes that take less on an accelerator run in a loop of fixed length, once that is compiled.

A loop whose length is data costs 15 microseconds a pass more there (measured on an H200): one percent
of this. On a CPU it costs nothing.
"""

LIVE_S = 0.05
"""How long a dispatch of a loop with a live outfeed should take, in seconds."""


def most_bytes() -> int:
    """The elements of one dispatch, in bytes, on the platform in use."""
    return MOST_BYTES.get(devices.platform(), MOST_BYTES_ELSEWHERE)


def piece_within(length: int, bytes_per_pass: int, limit: int | None = None) -> int:
    """The length of the pieces of a loop, such that the elements of one take at most so many bytes.

    >>> piece_within(200, 100_000, 25 << 20), piece_within(10_000, 100_000, 25 << 20)
    (200, 250)
    """
    most = max(1, (most_bytes() if limit is None else limit) // max(1, bytes_per_pass))
    return good_piece(length, most)


def good_piece(length: int, most: int, multiple_of: int = 1) -> int:
    """A length of at most `most` that divides `length` if there is one not much shorter.

    With `multiple_of`, a multiple of that number, unless the whole is shorter.

    >>> good_piece(10_000, 671), good_piece(997, 100), good_piece(100, 30, multiple_of=10)
    (625, 100, 20)
    """
    most = max(multiple_of, most - most % multiple_of)
    if length <= most:
        return max(1, length)
    for piece in range(most, max(most // 2, 1) - 1, -multiple_of):
        if length % piece == 0:
            return piece
    return most


def pieces(length: int, piece: int) -> Iterator[int]:
    """The lengths of the pieces, in order; the last one may be shorter.

    >>> list(pieces(10, 4))
    [4, 4, 2]
    """
    for start in range(0, length, piece):
        yield min(piece, length - start)


def next_piece(piece: int, remaining: int | None, step: int, period: int) -> tuple[int, int]:
    """The length of the next piece, and the period in which it is observed.

    Pieces are cut where periodic taps look, so that looking needs no branch: up to the next step
    that is observed, then whole periods, then what is left, in which nothing is (period 0).

    >>> next_piece(100, 25, step=0, period=10), next_piece(100, 5, step=20, period=10)
    ((20, 10), (5, 0))
    >>> next_piece(100, 50, step=25, period=10)
    (5, 5)
    """
    length = piece if remaining is None else min(piece, remaining)
    if period == 1:
        return length, 1
    ahead = period - step % period
    if ahead < period:
        if remaining is None or ahead <= remaining:
            return ahead, ahead
        return remaining, 0
    whole = length - length % period or period
    if remaining is not None and remaining < whole:
        whole = remaining - remaining % period
    return (whole, period) if whole else (length, 0)
