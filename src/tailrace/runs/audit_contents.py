"""The contents of consumed elements, beside those of the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tailrace.feeds.reader import Reader
from tailrace.taps.bit_digests import host_row_digest

AT_ONCE = 64
"""The number of elements of a dataset to read at a time."""


def changed_contents(
    epoch: int, consumed: Mapping[int, tuple[int, int]], dataset: object
) -> Iterator[str]:
    """A sentence for each stretch of elements with other contents.

    Args:
        epoch: the pass over the dataset.
        consumed: the digest and the step of each consumed element, by its index in the pass.
        dataset: the data that should have been read.
    """
    expected = _digests(dataset, epoch, max(consumed) + 1)
    places = {digest: number for number, digest in reversed([*enumerate(expected)])}
    stretches: list[tuple[int | None, list[int]]] = []
    for number, (digest, _) in consumed.items():
        if number < len(expected) and expected[number] == digest:
            continue
        # Where the content is instead tells a shifted dataset from a changed one.
        shift = places[digest] - number if digest in places else None
        # One that is shifted or changed from here on is one finding, not thousands.
        if stretches and stretches[-1][0] == shift and stretches[-1][1][-1] == number - 1:
            stretches[-1][1].append(number)
        else:
            stretches.append((shift, [number]))
    for shift, numbers in stretches:
        first, last = numbers[0], numbers[-1]
        steps = _span("step", consumed[first][1], consumed[last][1])
        one = first == last
        other = f"the dataset has no such element{'' if one else 's'}"
        if shift is not None:
            there = _span("element", first + shift, last + shift)
            other = f"{'it is that' if one else 'they are those'} of {there}"
        has = "has another content" if one else "have other contents"
        yield (
            f"epoch {epoch}, {steps}: {_span('element', first, last)} {has} than in the dataset; "
            f"{other}"
        )


def _span(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def _digests(dataset: object, epoch: int, count: int) -> list[int]:
    """The digests of the first elements of a pass over a dataset."""
    reader = Reader(dataset, epoch)
    paths = reader.spec().paths
    found: list[int] = []
    count = reader.available(count)
    while len(found) < count:
        block = reader.elements_of(reader.read(min(AT_ONCE, count - len(found))))
        # As the device sums them: the digest of an element is that of its leaves, modulo 2**64.
        for leaves in zip(*block, strict=True):
            parts = zip(leaves, paths, strict=True)
            found.append(
                sum(host_row_digest(leaf, f"element{path}") for leaf, path in parts) % 2**64
            )
    return found
