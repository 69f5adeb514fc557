"""A training that is killed again and again, at random moments, and started again unchanged.

    python -m benchmarks.kills [--kills N] [--seed S]

Runs tests/trainer/killed_script.py with a checkpoint directory and kills it (SIGKILL) at a random
moment between the opening of that directory and the end; then starts it again, until it ends by
itself. Its digest (state and history) must be that of an undisturbed run without checkpoints, and the
audit of its run directory must be clean after each kill and at its end: every element consumed once, in
order. A training that has ended is followed by a new one, until there were N kills. "While writing"
counts the kills that left a half-written checkpoint behind.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tailrace as tr
from tailrace.runs.audit import audit

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "trainer" / "killed_script.py"
LIMIT_S = 300
ELEMENTS = 90
"""What the script's fit consumes: three epochs of 30 batches."""
SLOW = ("--slow", "0.02")  # a pause after each execution: more moments between checkpoints


def start(directory: Path | str) -> subprocess.Popen[str]:
    """The script with a directory for checkpoints and one beside it for its run; "-": none."""
    run = () if directory == "-" else ("--run", str(run_of(Path(directory))))
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), *SLOW, *run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
    )


def run_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-run")


def elements_of(directory: Path) -> int | None:
    """How many elements the run has consumed, each once and in order; None if that is not so."""
    if not (run_of(directory) / "run.json").exists():
        return 0  # killed before it was made
    found = audit(tr.open_run(run_of(directory)))
    if not found.is_clean:
        print(found, flush=True)
    return found.elements if found.is_clean else None


def digest_of(process: subprocess.Popen[str]) -> str | None:
    """What a process says at its end; None if it was killed before."""
    out, error = process.communicate(timeout=LIMIT_S)
    lines = out.strip().splitlines()
    if lines and lines[-1].startswith("digest"):
        return lines[-1]
    if process.returncode != -9:
        raise RuntimeError(f"the script failed: {error[-2000:]}")
    return None


def wait_for(process: subprocess.Popen[str], directory: Path) -> None:
    """Until the process has opened its checkpoint directory, or has ended."""
    while process.poll() is None and not (directory / "lock").exists():
        time.sleep(0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, began = random.Random(given.seed), time.monotonic()
    expected = digest_of(start("-"))
    kills = writing = ended = equal = audits = clean = 0
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "undisturbed"
        process = start(first)
        wait_for(process, first)
        opened = time.monotonic()
        assert digest_of(process) == expected
        span = time.monotonic() - opened
        while kills < given.kills:
            directory = Path(folder) / f"training-{ended}"
            found = None
            while found is None:
                (directory / "lock").unlink(missing_ok=True)  # of the one before
                process = start(directory)
                wait_for(process, directory)
                if kills < given.kills:
                    try:
                        process.wait(rng.uniform(0, span))
                    except subprocess.TimeoutExpired:
                        process.kill()
                found = digest_of(process)
                if found is None:
                    kills += 1
                    writing += any(directory.glob("fit-*/*.unfinished*"))
                audits += 1
                clean += elements_of(directory) is not None
            ended += 1
            equal += found == expected
            clean -= elements_of(directory) != ELEMENTS  # some are missing
            print(f"{kills} kills, {equal} of {ended} equal, {clean} of {audits} clean", flush=True)
    columns = ("kills", "while writing", "trainings ended", "equal", "audits", "clean", "seconds")
    figures = (kills, writing, ended, equal, audits, clean, round(time.monotonic() - began))
    print(f"| {' | '.join(columns)} |\n|{'---:|' * len(columns)}")
    print(f"| {' | '.join(map(str, figures))} |")
    return 0 if equal == ended and clean == audits else 1


if __name__ == "__main__":
    sys.exit(main())
