"""Histograms by binary exponent, on the host: counting, describing, and a small picture of one."""

from __future__ import annotations

import numpy as np

from tailrace.base.trees import Tree
from tailrace.records.float_formats import FORMATS, format_shares
from tailrace.taps.reductions import BIAS, INF_BIN, NAN_BIN, NUM_BINS, ZERO_BIN


def count_exponents(values: Tree) -> np.ndarray:
    """The histogram of an array, with the bins of a tap with `reduce="histogram"`.

    >>> counts = count_exponents([1.0, 1.5, 0.0, float("nan")])
    >>> int(counts[127]), int(counts[257]), int(counts[256])
    (2, 1, 1)
    """
    found = np.ravel(values)
    if np.iscomplexobj(found):
        found = np.abs(found)
    if found.dtype.kind in "iu" and found.dtype.itemsize == 8:  # float64 would round them up
        size = np.abs(found).astype(np.uint64)
        found = np.where(size >> 53, size & ~np.uint64(0x7FF), size)
    bits = np.ascontiguousarray(found.astype(np.float64)).view(np.int64) & np.iinfo(np.int64).max
    infinity = 0x7FF << 52
    # As `histogram` does on the device: exponents that float32 has not are counted at its ends.
    index = np.clip((bits >> 52) - 1023 + BIAS, 0, INF_BIN - 1)
    index = np.where(bits == infinity, INF_BIN, np.where(bits > infinity, NAN_BIN, index))
    return np.bincount(np.where(bits == 0, ZERO_BIN, index), minlength=NUM_BINS)


def format_sentences(counts: np.ndarray) -> list[str]:
    """The effect of each narrow format on the values, one sentence each.

    >>> counts = np.zeros(258, int)
    >>> counts[127], counts[127 - 30] = 3, 1
    >>> print(format_sentences(counts)[0])
    float16: 25.00 % would become zero, 0.00 % lose digits, 0.00 % exceed its largest value.
    """
    lines = []
    for name, shares in format_shares(counts).items():
        lost, part, beyond, most = (
            100 * float(shares[field])
            for field in ("underflow", "subnormal", "overflow", "overflow_most")
        )
        # Compared as it is printed: a bound that rounds to the same number would only confuse.
        upper = f" ({most:.2f} % at most)" if f"{most:.2f}" != f"{beyond:.2f}" else ""
        lines.append(
            f"{name}: {lost:.2f} % would become zero, {part:.2f} % lose digits, {beyond:.2f} % "
            f"exceed its largest value{upper}."
        )
    return lines


def small_svg(counts: np.ndarray, width: int = 480, height: int = 120) -> str:
    """Bars by exponent with the range of float16 shaded, for a notebook; needs no package.

    >>> small_svg(count_exponents([1.0, 2.0]))[:4]
    '<svg'
    """
    finite = np.asarray(counts)[:INF_BIN]
    there = np.flatnonzero(finite)
    if not len(there):
        return '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"></svg>'
    # A picture for a notebook needs no axis: one format as a reference shows the scale.
    half = FORMATS[0]
    # One bin of margin on each side, so that the outermost bars are seen to end.
    low, high = there[0] - BIAS - 1, there[-1] - BIAS + 2
    each = width / (high - low)
    least, most = max(low, half.least_exponent), min(high, 16)
    parts = [
        f'<rect x="{(least - low) * each:.1f}" y="0" width="{max(0, most - least) * each:.1f}" '
        f'height="{height}" fill="#eef3f8"/>'
    ]
    for index in there:
        tall = height * finite[index] / finite.max()
        parts.append(
            f'<rect x="{(index - BIAS - low) * each:.1f}" y="{height - tall:.1f}" '
            f'width="{each * 0.9:.1f}" height="{tall:.1f}" fill="#5b6b7b"/>'
        )
    labels = (
        f'<text x="0" y="{height + 14}">2^{low + 1}</text>'
        f'<text x="{width}" y="{height + 14}" text-anchor="end">2^{high - 1}; '
        f"shaded: normal float16</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}{labels}</svg>'
    )
