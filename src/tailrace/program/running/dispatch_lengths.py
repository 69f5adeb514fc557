"""The lengths of the pieces into which a long loop is cut.

A piece is one dispatch. Long pieces cost memory (all their elements are on the device at once) and
keep results waiting; short ones cost a dispatch each, and every length is compiled once. So there are
as few lengths as possible: a divisor of the loop's length if there is a good one. The constants are in
`feeds/dispatch_table.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.feeds import dispatch_table


def piece_within(length: int, bytes_per_pass: int, limit: int | None = None) -> int:
    """The length of a loop's pieces such that the elements of one take at most `limit` bytes.

    >>> piece_within(200, 100_000, 25 << 20), piece_within(10_000, 100_000, 25 << 20)
    (200, 250)
    """
    most = max(
        1, (dispatch_table.most_bytes() if limit is None else limit) // max(1, bytes_per_pass)
    )
    return good_piece(length, most)


def good_piece(length: int, most: int, multiple_of: int = 1) -> int:
    """A length of at most `most`: a divisor of `length`, if there is one that is not much shorter.

    With `multiple_of`, a multiple of that number, unless `length` is shorter.

    >>> good_piece(10_000, 671), good_piece(997, 100), good_piece(100, 30, multiple_of=10)
    (625, 100, 20)
    """
    most = max(multiple_of, most - most % multiple_of)
    if length <= most:
        return max(1, length)
    # A divisor leaves no shorter last piece, which would be one more compilation. Below half of the
    # limit, twice the dispatches cost more than that compilation.
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
