"""A plain PyTorch loop, killed at any moment and started again, ends with the same bits."""

import pathlib
import random
import signal
import subprocess
import sys

import numpy as np
import pytest

import tailrace as tr

SCRIPT = str(pathlib.Path(__file__).with_name("resumed_script.py"))
CALLS = 60


def script(*arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def started(process):
    """Where the script goes on, once it says so."""
    line = process.stdout.readline().split()
    assert line[:1] == ["start"], process.communicate()[1]
    return int(line[1]), int(line[2])


def finished(*arguments):
    """Run the script to its end; where it went on, and what it has then."""
    process = script(*arguments)
    start = started(process)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    with np.load(arguments[1]) as file:
        return start, dict(file)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_killed_and_started_again(kills, tmp_path):
    _, plain = finished("", tmp_path / "plain.npz")
    moments = random.Random(kills)
    directory, run = tmp_path / "checkpoints", tmp_path / "run"
    begun = []
    for _ in range(kills):
        process = script(directory, tmp_path / "out.npz", run)
        begun.append(started(process))
        left = CALLS - begun[-1][1] // 2
        # Few calls, so that it does not end; zero is a moment, too.
        for _ in range(moments.randrange(min(left, 2 * CALLS // kills + 3))):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    start, resumed = finished(directory, tmp_path / "out.npz", run)
    assert start[1] > 0, begun
    resumed.pop("loss"), plain.pop("loss")
    assert resumed.keys() == plain.keys()
    for name, value in plain.items():
        assert value.tobytes() == resumed[name].tobytes(), name
    found = tr.open_run(run)
    assert found.state == "ended"
    assert list(found.history.steps) == list(range(2 * CALLS))
    # Started once more, it trains the steps since its newest checkpoint again.
    start, again = finished(directory, tmp_path / "out.npz", run)
    assert start[0] == 3
    assert 2 * CALLS - 4 <= start[1] < 2 * CALLS
    again.pop("loss")
    assert all(again[name].tobytes() == value.tobytes() for name, value in plain.items())
