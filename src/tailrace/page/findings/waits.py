"""A device that waits for data, the host, callbacks, checkpoints, validation or the compiler."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.summary import duration
from tailrace.page.time_spent import TimeSpent

SHARE, SECONDS = 0.15, 1.0
"""A wait is a finding from this share of the time, if it is at least that long."""
LONG = 60.0
"""The seconds of the start from which it is a finding, if it has that share too."""

ADVICE = {
    "data": "tr.dataset_benchmark measures the dataset alone.",
    "compilation": "Elements of another shape need another program: see the list of compilations.",
    "validation": "Validate less often, or on fewer elements.",
    "callbacks": "The timeline (trace=) shows which of them; one that needs only some values can do "
    "nothing in most calls.",
    "checkpoints": "Save less often: tr.Checkpoint(every=...).",
    "host": "Longer executions (steps_per_execution, device_iterations) need the host less often.",
}

_NAMES = {"host": "the rest of the host", "compilation": "the compiler"}


def wait_findings(spent: TimeSpent | None) -> Iterator[Finding]:
    """Findings about what the device waited for.

    Args:
        spent: the seconds by activity; None if unknown.
    """
    if spent is None:
        return
    for name, advice in ADVICE.items():
        seconds = spent.later.get(name, 0.0)
        if seconds >= SECONDS and spent.share(name) >= SHARE:
            what, share = _NAMES.get(name, name), f"{100 * spent.share(name):.0f} %"
            yield Finding(
                Severity.WARNING,
                f"waits for {name}",
                f"The device waited for {what} {share} of the time ({duration(seconds)} of "
                f"{duration(spent.seconds)}): without that the run would be about "
                f"{spent.speedup(name):.1f} times as fast. {advice}",
            )
    start = sum(spent.start.values())
    if start >= LONG and start >= SHARE * (start + spent.seconds):
        yield Finding(
            Severity.NOTE,
            "start",
            f"The start took {duration(start)}, of which the compiler "
            f"{duration(spent.start['compilation'])}. JAX's cache (jax_compilation_cache_dir) keeps "
            f"compiled programs for the next process.",
        )
