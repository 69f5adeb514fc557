"""Into which pieces a long loop is cut.

A piece is one dispatch. Long pieces cost memory (all their elements are on the device at once) and
keep results waiting; short ones cost a dispatch each, and every length is compiled once. So there are
as few lengths as possible: a divisor of the whole where there is a good one.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST_BYTES = 64 << 20
"""Elements of one dispatch, in bytes, if nothing else says how long it is to be."""

LIVE_S = 0.05
"""How long a dispatch of a loop with a live outfeed should take, in seconds."""


def piece_within(length: int, bytes_per_pass: int, most_bytes: int = MOST_BYTES) -> int:
    """The length of the pieces of a loop, such that the elements of one take at most so many bytes.

    >>> piece_within(500, 100_000), piece_within(10_000, 100_000)
    (500, 625)
    """
    most = max(1, most_bytes // max(1, bytes_per_pass))
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
