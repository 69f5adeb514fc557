"""Keras' own tests, without a strategy and in the scope of one; prints what differs.

    python -m benchmarks.keras_suite                 # all rooms, about half an hour on two cores
    python -m benchmarks.keras_suite trainers        # files whose path contains a word

The tests come from the source distribution of the Keras that is installed, unpacked into a temporary
directory: nothing of Keras is kept here. Each file runs in a process of its own, on the JAX backend.
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


def outcomes(root: pathlib.Path, file: pathlib.Path, *, scoped: bool) -> dict[str, str]:
    """What becomes of each test of a file: passed, failed or skipped."""
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
        command += [f"--junitxml={report}", "--rootdir", str(root), str(file)]
        ran = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists():
            raise SystemExit(f"pytest did not run {file.name}:\n{ran.stdout}\n{ran.stderr}")
        return {
            f"{file.stem}::{case.get('name')}": _outcome(case)
            for case in ElementTree.parse(report).iter("testcase")
        }


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def main() -> None:
    """Run the suite and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run files whose path contains one of these")
    parser.add_argument("--sources", help="keep the unpacked distribution in this directory")
    parser.add_argument(
        "--scoped-only", action="store_true", help="skip the run without a strategy"
    )
    given = parser.parse_args()
    directory = pathlib.Path(given.sources or tempfile.mkdtemp(prefix="keras_suite_"))
    directory.mkdir(parents=True, exist_ok=True)
    root = unpacked(directory)
    print("| file | without a strategy | in a scope |")
    print("|---|--:|--:|")
    plain_total, scoped_total, lost = 0, 0, []
    for room in ROOMS:
        for file in sorted((root / "keras" / "src" / room).rglob("*_test.py")):
            if given.words and not any(word in str(file) for word in given.words):
                continue
            scoped = outcomes(root, file, scoped=True)
            plain = scoped if given.scoped_only else outcomes(root, file, scoped=False)
            counts = [sum(one == "passed" for one in found.values()) for found in (plain, scoped)]
            plain_total, scoped_total = plain_total + counts[0], scoped_total + counts[1]
            wanted = scoped if given.scoped_only else plain
            expected = ("passed", "failed") if given.scoped_only else ("passed",)
            lost += [
                name
                for name, outcome in wanted.items()
                if outcome in expected and scoped.get(name) != "passed"
            ]
            print(f"| {room}/{file.stem} | {counts[0]} | {counts[1]} |", flush=True)
    print(f"| all | {plain_total} | {scoped_total} |")
    for name in lost:
        print(f"only without a strategy: {name}")


if __name__ == "__main__":
    main()
