"""Real processes, killed and interrupted at any moment, and started again."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "killed_script.py"
WAIT_S = 600


def start(directory, *options):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def digest_of(directory, *options):
    out, error = start(directory, *options).communicate(timeout=WAIT_S)
    last = out.strip().splitlines()[-1] if out.strip() else ""
    assert last.startswith("digest"), error[-2000:]
    return last


def until(process, text):
    """Read what a process prints until a line begins with `text`."""
    for line in process.stdout:
        if line.startswith(text):
            return line
    raise AssertionError(process.stderr.read()[-2000:])


@pytest.fixture(scope="module")
def expected():
    return digest_of("-")


def test_killed_at_random_moments(tmp_path, expected):
    rng = random.Random(4)
    for _ in range(3):
        process = start(tmp_path / "kept", "--slow", "0.02")
        until(process, ("step", "digest"))  # a kill that came late finds a fit that has ended
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.communicate(timeout=WAIT_S)
    assert digest_of(tmp_path / "kept") == expected
    assert digest_of(tmp_path / "kept") == expected, "and again, at once"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_leaves(tmp_path, expected, number, code):
    sent = tmp_path / "sent"
    process = start(tmp_path / "kept", "--waits", str(sent))  # from step 9 on
    until(process, "step 9")
    process.send_signal(number)
    sent.touch()
    out, error = process.communicate(timeout=WAIT_S)
    assert process.returncode in (code, 130 if number == signal.SIGINT else code), error[-2000:]
    assert "digest" not in out
    kept = sorted(path.name for path in (tmp_path / "kept" / "fit-0").iterdir())
    last = [line for line in out.splitlines() if line.startswith("step")] or ["step 9"]
    assert f"step-{last[-1].split()[1]}" in kept, "the execution that ran is saved"
    assert digest_of(tmp_path / "kept") == expected


def test_two_signals_leave_at_once(tmp_path):
    process = start(tmp_path / "kept", "--slow", "1e9")
    until(process, "step")
    error = None
    while error is None:  # a signal that comes before the one before is noticed does not count
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, error = process.communicate(timeout=0.5)
    assert "KeyboardInterrupt" in error


def test_a_signal_while_the_dataset_blocks(tmp_path):
    """What was trained is saved; nobody waits for the dataset."""
    process = start(tmp_path / "kept", "--blocks", "12")
    seen = {until(process, ("blocked", "step 9")).strip() for _ in range(2)}  # in either order
    assert seen == {"blocked", "step 9"}
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=WAIT_S)
    assert process.returncode == 143, error[-2000:]
    kept = [path.name for path in (tmp_path / "kept" / "fit-0").iterdir()]
    assert "step-9" in kept or "step-12" in kept
