"""Run the originals' programs with their imports changed: `python -m benchmarks.originals DIR`.

    python -m benchmarks.originals examples/tutorials                 # all programs, two hours
    python -m benchmarks.originals examples/tutorials tensorflow2 imdb  # those whose path has a word
    python -m benchmarks.originals examples/tutorials --limit 300     # seconds for each program

Each program runs twice, in copies of its folder and in processes of its own: with Tailrace, and with
the plain libraries (`plain`), whose loss or accuracy is the oracle. What it prints is kept in the
directory of `--logs`, if one is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from benchmarks.originals import reports
from benchmarks.originals.imports import PLAIN, TABLE, changed
from benchmarks.originals.programs import Program, programs

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        lines: how many lines of imports were changed in it.
        error: the last line of its error; None if it ran.
        seconds: how long it took.
        numbers: what it computed (`reports`).
    """

    lines: int
    error: str | None
    seconds: float
    numbers: dict[str, float]


def outcome(
    root: pathlib.Path,
    program: Program,
    limit: float,
    logs: pathlib.Path | None = None,
    plain: bool = False,
) -> Outcome:
    """Run a program in a copy of its folder.

    Args:
        root: the checkout.
        program: the program.
        limit: how many seconds it may take.
        logs: where what it prints is kept.
        plain: whether it is run with the plain libraries.
    """
    with tempfile.TemporaryDirectory() as scratch:
        home = pathlib.Path(scratch, "program")
        shutil.copytree(root / program.path.parent, home)
        lines = _change(home, home / program.path.name, plain)
        if program.before is not None:
            _run(home, [program.before], limit, program, plain)
        began = time.perf_counter()
        command = [program.path.name, *program.arguments]
        code, text = _run(home, command, limit, program, plain)
        seconds = time.perf_counter() - began
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        name = program.path.as_posix().replace("/", "__")
        (logs / name).with_suffix(".plain.txt" if plain else ".txt").write_text(text)
    error = None if code == 0 else _last_error(text, code)
    return Outcome(lines, error, seconds, reports.read(text))


def _change(home: pathlib.Path, program: pathlib.Path, plain: bool) -> int:
    """Change the imports of all files; how many lines of the program itself changed."""
    lines = 0
    for path in home.rglob("*.py"):
        after = changed(path.read_text(encoding="utf-8"), PLAIN if plain else TABLE)
        path.write_text(after.text, encoding="utf-8")
        lines = after.lines if path == program else lines
    return lines


def _run(
    home: pathlib.Path, command: list[str], limit: float, program: Program, plain: bool
) -> tuple[int, str]:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MPLBACKEND": "agg",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOME": str(home.parent),
        "ORIGINALS_FOLDER": program.folder,
        "ORIGINALS_IMAGES": program.images,
        "ORIGINALS_PLAIN": program.plain_backend if plain else "",
        **program.environment,
        "OMP_NUM_THREADS": "1",  # small models: threads of PyTorch wait for each other
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
    lines = [line for line in lines if not line.startswith(reports.MARK)]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "longer than" in line]
    return (errors or lines or [f"exit status {code}"])[-1]


def row(program: Program, found: Outcome, plain: Outcome | None) -> str:
    """A row of the table."""
    verdict = "runs" if found.error is None else f"refused: {found.error}"
    here, there = _compared(found, plain)
    if there and program.plain_backend == "jax":
        there += " (Keras on JAX)"
    name = program.path.as_posix()
    return f"| `{name}` | {found.lines} | {verdict} | {found.seconds:.0f} s | {here} | {there} |"


def _compared(found: Outcome, plain: Outcome | None) -> tuple[str, str]:
    numbers = reports.chosen(found.numbers)
    here = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    if plain is None or not numbers:
        return here, ""
    if plain.error is not None:
        return here, f"no plain program: {plain.error}"
    known = {name: plain.numbers[name] for name in numbers if name in plain.numbers}
    there = ", ".join(f"{value:.4g}" for value in known.values())
    same = known and all(reports.agree(name, numbers[name], known[name]) for name in known)
    return here, there if same else f"{there} differs"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("words", nargs="*", help="run programs whose path has one of these")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each program")
    parser.add_argument("--logs", type=pathlib.Path, help="keep what programs print, here")
    parser.add_argument("--no-plain", action="store_true", help="do not compare")
    options = parser.parse_args()
    chosen = programs(options.directory)
    if options.words:
        chosen = [one for one in chosen if any(word in str(one.path) for word in options.words)]
    print("| program | imports changed (lines) | | time | at the end | plain |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    ran = 0
    for program in chosen:
        found = outcome(options.directory, program, options.limit, options.logs)
        plain = None
        if found.error is None and not options.no_plain:
            plain = outcome(options.directory, program, options.limit, options.logs, plain=True)
        ran += found.error is None
        print(row(program, found, plain), flush=True)
    print(f"\n{ran} of {len(chosen)} programs run.")


if __name__ == "__main__":
    main()
