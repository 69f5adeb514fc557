"""A training that is killed again and again, at random moments, and started again unchanged.

    python -m benchmarks.kills [--kills N] [--seed S]

Runs tests/trainer/killed_script.py with a checkpoint directory and kills it (SIGKILL) at a random
moment between the opening of that directory and the end; then starts it again, until it ends by
itself. Its digest (state and history) must be that of an undisturbed run without checkpoints. A
training that has ended is followed by a new one, until there were N kills. "While writing" counts the
kills that left a half-written checkpoint behind.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "trainer" / "killed_script.py"
LIMIT_S = 300
SLOW = ("--slow", "0.02")  # a pause after each execution: more moments between checkpoints


def start(directory: Path | str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), *SLOW],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
    )


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
    kills = writing = starts = ended = equal = 0
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
                starts += 1
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
            ended += 1
            equal += found == expected
    print("| kills | while writing | restarts | trainings ended | equal | seconds |")
    print("|---:|---:|---:|---:|---:|---:|")
    seconds = time.monotonic() - began
    print(f"| {kills} | {writing} | {starts - ended} | {ended} | {equal} | {seconds:.0f} |")
    return 0 if equal == ended else 1


if __name__ == "__main__":
    sys.exit(main())
