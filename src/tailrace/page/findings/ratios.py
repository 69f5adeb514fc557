"""The ratio of update to weight sizes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.layers import LayerMap
from tailrace.page.summary import number

FAST, SLOW = 3e-2, 1e-6
"""An update above the first fraction of a weight's size is too large; below the second it is lost to
rounding. About a thousandth is usual."""


def ratios(rms: LayerMap) -> dict[str, float]:
    """The update to weight ratio in the last part of the run, by parameter, if both were recorded."""
    late = dict(zip(rms.names, rms.late(), strict=True))
    found = {}
    for name, update in late.items():
        if not name.startswith("update/"):
            continue
        parameter = name.removeprefix("update/")
        weight = late.get(f"param/{parameter}", late.get(f"updated/{parameter}", np.nan))
        if np.isfinite(update) and np.isfinite(weight) and weight > 0:
            found[parameter] = float(update / weight)
    return found


def ratio_findings(rms: LayerMap) -> Iterator[Finding]:
    """Findings about updates that are too large or too small."""
    found = ratios(rms)
    fast = {name: ratio for name, ratio in found.items() if ratio > FAST}
    # Exactly zero is a parameter without a gradient, which has a finding of its own.
    slow = {name: ratio for name, ratio in found.items() if 0 < ratio < SLOW}
    if fast:
        worst = max(fast, key=lambda name: fast[name])
        yield Finding(
            Severity.WARNING,
            "update to weight ratio",
            f"{len(fast)} of {len(found)} parameters move by more than {number(100 * FAST)} % of "
            f"their size in a step; most {worst!r}: {number(100 * fast[worst], 2)} %. About 0.1 % "
            f"is usual: the learning rate is probably too high.",
            f"update/{worst}",
        )
    if slow:
        least = min(slow, key=lambda name: slow[name])
        yield Finding(
            Severity.WARNING,
            "update to weight ratio",
            f"{len(slow)} of {len(found)} parameters hardly move; least {least!r}: "
            f"{number(slow[least], 2)} of its size in a step. In bfloat16 such an update is lost.",
            f"update/{least}",
        )
