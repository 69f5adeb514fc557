"""Run the originals' programs with their imports changed: `python -m benchmarks.originals DIR`.

    python -m benchmarks.originals examples/tutorials                 # all programs, half an hour
    python -m benchmarks.originals examples/tutorials tensorflow2 imdb  # those whose path has a word
    python -m benchmarks.originals examples/tutorials --limit 300     # seconds for each program

Each program runs in a copy of its folder and in a process of its own. What it prints is kept in the
directory of `--logs`, if one is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.originals.imports import changed
from benchmarks.originals.one import MARK
from benchmarks.originals.programs import Program, programs

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        program: the program.
        lines: how many lines of imports were changed in it.
        error: the last line of its error; None if it ran.
        seconds: how long it took.
        reported: what its models reported last.
    """

    program: Program
    lines: int
    error: str | None
    seconds: float
    reported: dict[str, Any]


def outcome(
    root: pathlib.Path, program: Program, limit: float, logs: pathlib.Path | None
) -> Outcome:
    """Run a program in a copy of its folder."""
    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch, "program")
        shutil.copytree(root / program.path.parent, home)
        lines = 0
        for path in home.rglob("*.py"):
            after = changed(path.read_text(encoding="utf-8"))
            path.write_text(after.text, encoding="utf-8")
            if path == home / program.path.name:
                lines = after.lines
        if program.before is not None:
            _run(home, [program.before], limit, program.images)
        began = time.perf_counter()
        command = [program.path.name, *program.arguments]
        code, text = _run(home, command, limit, program.images)
        seconds = time.perf_counter() - began
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / program.path.as_posix().replace("/", "__")).with_suffix(".txt").write_text(text)
    reported = [line for line in text.splitlines() if line.startswith(MARK)]
    return Outcome(
        program,
        lines,
        None if code == 0 else _last_error(text, code),
        seconds,
        json.loads(reported[-1].removeprefix(MARK)) if reported else {},
    )


def _run(home: pathlib.Path, command: list[str], limit: float, images: str) -> tuple[int, str]:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MPLBACKEND": "agg",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOME": str(home.parent),
        "ORIGINALS_IMAGES": images,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.originals.one", *command],
            cwd=home,
            env=environment,
            timeout=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        return -1, (error.stdout or b"").decode(errors="replace") + f"\nlonger than {limit:.0f} s"
    return done.returncode, done.stdout.decode(errors="replace")


def _last_error(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(MARK)]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "longer than" in line]
    return (errors or lines or [f"exit status {code}"])[-1]


def row(found: Outcome) -> str:
    """A row of the table."""
    name = found.program.path.as_posix()
    fit = found.reported.get("fit", {})
    values = ", ".join(f"{key} {value}" for key, value in list(fit.items())[:2])
    verdict = "runs" if found.error is None else f"refused: {found.error}"
    return f"| `{name}` | {found.lines} | {verdict} | {found.seconds:.0f} s | {values} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("words", nargs="*", help="run programs whose path has one of these")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each program")
    parser.add_argument("--logs", type=pathlib.Path, help="keep what programs print, here")
    options = parser.parse_args()
    chosen = programs(options.directory)
    if options.words:
        chosen = [one for one in chosen if any(word in str(one.path) for word in options.words)]
    print("| program | imports changed (lines) | | time | at the end |", flush=True)
    print("|---|---|---|---|---|", flush=True)
    ran = 0
    for program in chosen:
        found = outcome(options.directory, program, options.limit, options.logs)
        ran += found.error is None
        print(row(found), flush=True)
    print(f"\n{ran} of {len(chosen)} programs run.")


if __name__ == "__main__":
    main()
