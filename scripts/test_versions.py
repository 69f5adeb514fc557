"""The core rooms on every Python and JAX that are supported and can be found here.

    python scripts/test_versions.py [--quick] [--rooms data,feeds] [--only 3.13]

Each pair has an environment of its own under .venvs/, made once. The table at the end is that of
docs/compatibility.md; what could not be tried is in it, with the reason. Needs no package.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ROOMS = [
    *("jaxprs", "data", "devices", "feeds", "taps", "records", "program"),
    *("pipeline", "trainer", "runs", "porch_keras"),
]
"""Folders of tests/."""

PAIRS = [
    ("3.11", "0.10.1"),
    ("3.12", "0.11.2"),
    ("3.12", "0.12.0.1"),
    ("3.13", "0.12.0.1"),
]
"""Python and JAX: the oldest and the newest that each supports."""

SHOWN = ("jax", "keras", "torch", "numpy")
COLUMNS = ("Python", "JAX", "Keras", "torch", "NumPy", "Tests", "Date")


@dataclass
class Outcome:
    """One row of the table."""

    python: str
    jax: str
    result: str
    passed: bool = False
    versions: dict[str, str] | None = None

    def row(self) -> str:
        """Markdown."""
        found = self.versions or {}
        cells = [self.python, found.get("jax", self.jax)]
        cells += [found.get(name, "-") for name in SHOWN[1:]]
        cells += [self.result, datetime.datetime.now(datetime.UTC).date().isoformat()]
        return f"| {' | '.join(cells)} |"


def main() -> int:
    options = parse(sys.argv[1:])
    outcomes = []
    for python, jax in PAIRS:
        if options.only in (None, python, jax):
            print(f"Python {python}, JAX {jax}", flush=True)
            outcomes.append(attempt(python, jax, options))
            print(f"  {outcomes[-1].result}", flush=True)
    print(table(outcomes))
    return int(not all(outcome.passed for outcome in outcomes))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the quick tier")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders of tests/")
    parser.add_argument("--only", help="one version of Python or of JAX")
    parser.add_argument("--jobs", default="2")
    options = parser.parse_args(arguments)
    options.rooms = options.rooms.split(",")
    absent = [room for room in options.rooms if not (ROOT / "tests" / room).exists()]
    if absent:
        parser.error(f"not in tests/: {', '.join(absent)}")
    return options


def attempt(python: str, jax: str, options: argparse.Namespace) -> Outcome:
    """Make the environment if it is not there, run the tests, and say how they ended."""
    found = run([str(ROOT / "scripts" / "find_python.sh"), python])
    if found.returncode:
        return Outcome(python, jax, f"not tried: no Python {python} here")
    place = ROOT / ".venvs" / f"python{python}-jax{jax}"
    problem = make(found.stdout.strip(), jax, place)
    if problem:
        return Outcome(python, jax, f"not tried: {problem}")
    tests = [f"tests/{room}" for room in options.rooms]
    tier = "quick" if options.quick else "not exhaustive and not long"
    own = str(place / "bin" / "python")
    command = [own, "-m", "pytest", "-q", "-n", options.jobs, "--dist", "worksteal", "-m", tier]
    log = place / "tests.log"
    print(f"  log: {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:  # as it goes: it takes long
        code = subprocess.run(
            [*command, *tests], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    result = summary(log.read_text())
    if code:
        result = f"**{result}** (log: {log.relative_to(ROOT)})"
    return Outcome(python, jax, result, code == 0, versions(own))


def make(python: str, jax: str, place: Path) -> str | None:
    """An environment with this JAX; the reason if there can be none."""
    done = place / ".made"
    if done.exists() and done.stat().st_mtime > (ROOT / "pyproject.toml").stat().st_mtime:
        return None
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q"]
    wanted = [f"jax=={jax}", "-e", ".[test,torch-cpu]"]  # no torch where there is no small build
    for command in ([python, "-m", "venv", str(place)], [*pip, *wanted]):
        ended = run(command)
        if ended.returncode:
            return (ended.stderr.strip().splitlines() or ["pip failed"])[-1][:120]
    done.touch()
    return None


def summary(output: str) -> str:
    """`812 passed, 3 skipped`: pytest's last line, without its time."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    if not lines:
        return "pytest did not end"
    return re.sub(r"^=*\s*|\s+in [\d.]+s.*$", "", lines[-1])


def versions(python: str) -> dict[str, str]:
    """What the environment has of the packages in the table."""
    code = (
        "import json, importlib.metadata as m, importlib.util as u;"
        f"print(json.dumps({{n: m.version(n) for n in {SHOWN!r} if u.find_spec(n)}}))"
    )
    return json.loads(run([python, "-c", code]).stdout or "{}")


def table(outcomes: list[Outcome]) -> str:
    """Markdown, as in docs/compatibility.md."""
    head = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    return "\n".join([*head, *(outcome.row() for outcome in outcomes)])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
