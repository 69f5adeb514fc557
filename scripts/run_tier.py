"""Runs a tier of the tests as CI does: what fails is run once more, alone and in order.

    python scripts/run_tier.py -n 2 -m "not long"      # arguments of pytest

It passes if all tests pass, the first time or the second. Those that needed the second are printed
under "flaky": add them to tests/flaky.toml. Unequal bits, hangs, crashes and the tests of
tests/final.txt are never flaky (tests/verdicts.py); a run with one of those fails at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST = 20
"""More failures than this have a common cause, which is no race."""

HANG_S = 900
"""A test that takes longer is ended, with the stacks of its threads: its process crashes."""

PYTEST = [sys.executable, "-m", "pytest", "-o", f"faulthandler_timeout={HANG_S}"]
PYTEST += ["-o", "faulthandler_exit_on_timeout=true"]


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments; the exit status of CI."""
    status, failures = _run(arguments, Path("failures.json"))
    if status != 1 or not failures:  # all passed, or the run itself went wrong
        return status
    if final := [row for row in failures if row["final"]]:
        print("\nnever flaky:")
        for row in final:
            print(f"  {row['id']}: {row['final']}")
        return 1
    if len(failures) > MOST:
        print(f"\n{len(failures)} tests failed: too many to be run again one by one.")
        return 1
    return _run_again(failures)


def _run(arguments: list[str], write_to: Path) -> tuple[int, list[dict[str, str]]]:
    write_to.unlink(missing_ok=True)
    environment = {**os.environ, "TAILRACE_TEST_FAILURES": str(write_to.absolute())}
    status = subprocess.run([*PYTEST, *arguments], env=environment).returncode
    rows = json.loads(write_to.read_text()) if write_to.exists() else []
    return status, rows


def _run_again(failures: list[dict[str, str]]) -> int:
    """Each in a process of its own, so that none depends on another."""
    alone = ["-q", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
    for row in failures:
        print(f"\nonce more, alone: {row['id']}", flush=True)
        status, _ = _run([*alone, row["id"]], Path("failures-again.json"))
        if status != 0:
            print(f"\nfailed again, alone: {row['id']}")
            return 1
    print("\nflaky: (add them to tests/flaky.toml, with date and cause)")
    for row in failures:
        print(f"  {row['id']}: {row['error']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
