"""Boundaries as users compile: in processes with XLA's own flags, not with those of the suite."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace as tr

pytestmark = pytest.mark.cpu

HERE = Path(__file__).parent


def found(*arguments):
    """What `with_default_flags.py` prints."""
    paths = [Path(tr.__file__).parents[1], HERE.parent, HERE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "with_default_flags.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT ")[1])


# With norms over rows and pixels XLA may sum in another form, so a convnet's bits are not promised.
EQUAL = ["off, by hand", "on, off", "observed, on"]
BY_TABLE = ["off, by hand", "on, off, by the table"]
PROMISED = {"perceptron": EQUAL, "convnet": BY_TABLE, "transformer": EQUAL}


def check(name):
    result = found("bits", name)[name]
    assert result["places"] > 0
    assert {what: result[what] for what in PROMISED[name]} == dict.fromkeys(PROMISED[name], "equal")


def test_boundaries_change_no_bit_of_a_perceptron():
    check("perceptron")


@pytest.mark.parametrize("name", ["convnet", "transformer"])
def test_boundaries_change_no_result(name):
    check(name)


def test_the_compiled_program_grows_with_the_number_of_layers():
    """Without boundaries, the last eight layers add three times as many lines as four before."""
    four, eight, sixteen = found("lines", 4, 8, 16)
    assert sixteen - eight <= 2.2 * (eight - four)
