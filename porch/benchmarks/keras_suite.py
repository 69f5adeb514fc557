"""Keras' own tests, without a strategy and in the scope of one; prints what differs.

    python -m benchmarks.keras_suite                 # all rooms, about half an hour on two cores
    python -m benchmarks.keras_suite trainers        # files whose path contains a word

The tests come from the source distribution of the Keras that is installed, unpacked into a temporary
directory: nothing of Keras is kept here. Each room runs in a process of its own, on the JAX backend.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree

ROOMS = ("trainers", "callbacks", "models", "optimizers")
"""The directories of `keras/src` whose tests are run."""

SCOPE = """
import pytest
import tailrace.keras as tk


@pytest.fixture(autouse=True)
def _in_the_scope_of_a_strategy():
    with tk.Strategy().scope():
        yield
"""
"""A plugin of pytest: each test runs in the scope of a strategy."""


def unpacked(directory: pathlib.Path) -> pathlib.Path:
    """The source distribution of the installed Keras, in `directory`."""
    version = importlib.metadata.version("keras")
    found = directory / f"keras-{version}"
    if not found.exists():
        source = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "-q", *source, f"keras=={version}"]
        subprocess.run(command, cwd=directory, check=True)
        with tarfile.open(next(directory.glob(f"keras-{version}*.tar.gz"))) as archive:
            archive.extractall(directory, filter="data")
    return found


def outcomes(root: pathlib.Path, files: list[str], *, scoped: bool) -> dict[str, dict[str, str]]:
    """For each file, what becomes of its tests: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as scratch:
        pathlib.Path(scratch, "tailrace_scope.py").write_text(SCOPE)
        report = pathlib.Path(scratch, "report.xml")
        here = str(pathlib.Path(__file__).resolve().parent.parent / "src")
        paths = [str(root), scratch, here, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
        }
        plugin = ["-p", "tailrace_scope"] if scoped else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
        command += ["--continue-on-collection-errors", f"--junitxml={report}"]
        command += ["--rootdir", str(root), *files]
        ran = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists():
            raise SystemExit(f"pytest did not run:\n{ran.stdout}\n{ran.stderr}")
        found: dict[str, dict[str, str]] = {pathlib.Path(file).stem: {} for file in files}
        for case in ElementTree.parse(report).iter("testcase"):
            places = f"{case.get('classname')}.{case.get('name')}".split(".")
            file = next((place for place in places if place in found), places[0])
            found.setdefault(file, {})[".".join(places[-2:])] = _outcome(case)
        return found


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def main() -> None:
    """Run the suite and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="run files whose path contains one of these")
    parser.add_argument("--sources", help="keep the unpacked distribution in this directory")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keras_suite_") as temporary:
        directory = pathlib.Path(given.sources or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        compare(unpacked(directory), given.words)


def compare(root: pathlib.Path, words: list[str]) -> None:
    """Run each room without a strategy and in a scope, and print what passes."""
    print("| file | without a strategy | in a scope |")
    print("|---|--:|--:|")
    totals, lost = [0, 0], []
    for room in ROOMS:
        files = [str(file) for file in sorted((root / "keras" / "src" / room).rglob("*_test.py"))]
        files = [file for file in files if not words or any(word in file for word in words)]
        if not files:
            continue
        plain, scoped = (outcomes(root, files, scoped=scope) for scope in (False, True))
        for file, tests in plain.items():
            passed = [_passed(found.get(file, {})) for found in (plain, scoped)]
            totals = [total + len(names) for total, names in zip(totals, passed, strict=True)]
            lost += [f"{file}: {name}" for name in sorted(passed[0] - passed[1])]
            if tests:
                print(f"| {room}/{file} | {len(passed[0])} | {len(passed[1])} |", flush=True)
    print(f"| all | {totals[0]} | {totals[1]} |")
    for name in lost:
        print(f"passes without a strategy only: {name}")


def _passed(found: dict[str, str]) -> set[str]:
    return {name for name, outcome in found.items() if outcome == "passed"}


if __name__ == "__main__":
    main()
