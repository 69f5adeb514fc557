"""All findings about a run, the worst first."""

from __future__ import annotations

from tailrace.page.curves import speeds
from tailrace.page.findings.course import course_findings
from tailrace.page.findings.finding import Finding, Severity
from tailrace.page.findings.gradients import gradient_findings
from tailrace.page.findings.nonfinite import nonfinite_findings
from tailrace.page.findings.ratios import ratio_findings
from tailrace.page.findings.spikes import spike_findings
from tailrace.page.findings.units import unit_findings
from tailrace.page.findings.waits import wait_findings
from tailrace.page.followed import FollowedRun
from tailrace.page.layers import layer_map
from tailrace.page.time_spent import time_spent

ORDER = list(Severity)


def findings(followed: FollowedRun) -> list[Finding]:
    """All findings about a run, from what it recorded.

    Args:
        followed: the run.

    Raises:
        RunError: the run cannot be read.
    """
    run = followed.readable()
    maps = {measure: layer_map(followed, measure) for measure in ("rms", "zero", "nonfinite")}
    shapes = {entry.name: entry.shape for entry in followed.catalogue}
    found = [
        *nonfinite_findings(run.nonfinite_reports, maps["nonfinite"], run.history),
        *gradient_findings(maps["rms"]),
        *unit_findings(maps["zero"], shapes),
        *ratio_findings(maps["rms"]),
        *course_findings(run.history, speeds(followed)[1]),
        *spike_findings(followed),
        *wait_findings(time_spent(followed)),
    ]
    # Unreadable parts are findings too: a missing curve must not look like a healthy run. Once each,
    # although every measure has read the same tables.
    problems = list(dict.fromkeys(text for one in maps.values() for text in one.problems))
    if followed.problem:
        problems.insert(0, followed.problem)
    found += [Finding(Severity.WARNING, "records", text) for text in problems]
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))
