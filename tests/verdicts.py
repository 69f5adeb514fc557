"""Which failures are faults, whatever a second try says: unequal bits, hangs, crashes, lost data.

A test that fails and passes when it is run again depends on the machine; CI prints it as flaky. A
program that gives other bits once, or hangs once, is broken. Such a failure is final: it is known by
its exception, by the assertion it comes from, by the file it is in (`final.txt`), or by the end of its
process. `scripts/run_tier.py` reads what is written here.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WRITE_TO = "TAILRACE_TEST_FAILURES"
"""The variable that names the file to which a run writes its failures, as JSON."""

_EXACT = {"assert_bits_equal": "unequal bits", "assert_array_equal": "unequal values"}
"""Assertions of equal bits, and what their failure is called."""


class Hang(AssertionError):
    """Something did not happen within a limit that only a broken program reaches."""


def final_files() -> set[str]:
    """Files of tests whose every failure is a fault."""
    lines = (HERE / "final.txt").read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def why_final(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> str | None:
    """Why this failure must not be tried again; None if it may be."""
    if isinstance(error.value, Hang):
        return "a hang"
    for frame, _ in traceback.walk_tb(error.tb):
        if reason := _EXACT.get(frame.f_code.co_name):
            return reason
    if item.path.name in final_files():
        return f"{item.path.name} is in tests/final.txt"
    return None


class Failures:
    """A plugin that notes each failure of a run; under xdist, the workers tell the controller."""

    KEY = "final"

    def __init__(self, write_to: Path) -> None:
        self.write_to = write_to
        self.found: dict[str, dict[str, str | None]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """In the process of the test: attach the reason to its report, which travels."""
        report = yield
        if report.failed and call.excinfo is not None:
            report.user_properties.append((self.KEY, why_final(item, call.excinfo)))
        return report

    def pytest_runtest_logreport(self, report):
        """In the process that reports."""
        if not report.failed:
            return
        final = dict(report.user_properties).get(self.KEY)
        if report.when not in ("setup", "call", "teardown"):
            final = "its process ended"  # xdist's report of a worker that crashed
        lines = str(report.longrepr).strip().splitlines()
        errors = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:]
        self.found[report.nodeid] = {
            "final": final,
            "error": errors[0] if errors else "",
        }

    def pytest_sessionfinish(self, session):
        """Only where reports arrive: in the controller, or the only process."""
        if not hasattr(session.config, "workerinput"):
            rows = [{"id": name, **found} for name, found in self.found.items()]
            self.write_to.write_text(json.dumps(rows, indent=1))


def note_failures(config: pytest.Config) -> None:
    """Write the failures of this run, if `scripts/run_tier.py` asks for them."""
    if path := os.environ.get(WRITE_TO):
        config.pluginmanager.register(Failures(Path(path)), "tailrace-failures")
