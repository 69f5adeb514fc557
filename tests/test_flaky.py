"""Failures that CI may forgive once, those that it never forgives, and the list of both."""

import datetime
import json
import os
import subprocess
import sys
import tomllib

import pytest

from quick import function_of
from test_quick import FILES, HERE, functions
from verdicts import final_files

RUN_TIER = HERE.parent / "scripts" / "run_tier.py"
SEEN = tomllib.loads((HERE / "flaky.toml").read_text())["seen"]


def test_every_entry_names_a_test_a_date_and_a_cause():
    known = set().union(*(functions(path) for path in FILES))
    for entry in SEEN:
        assert entry["test"] in known, f"not there any more: remove it from flaky.toml: {entry}"
        assert isinstance(entry["date"], datetime.date)
        assert len(entry["cause"]) > 20


def test_what_was_seen_twice_is_mended_or_a_stress_test(request):
    stress = {function_of(x) for x in request.session.items if x.get_closest_marker("stress")}
    still_open = [entry["test"] for entry in SEEN if "mended" not in entry]
    twice = {name for name in still_open if still_open.count(name) > 1}
    assert not twice - stress, "mend these, or mark them `stress`"


def test_every_final_file_exists():
    assert not final_files() - {path.name for path in FILES}, "shorten final.txt"


@pytest.fixture
def tier(tmp_path):
    """Runs a small suite of its own as CI runs a tier, with our rules."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "from verdicts import note_failures as pytest_configure\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(**files):
        for name, body in files.items():
            (tmp_path / f"{name}.py").write_text(body)
        command = [sys.executable, str(RUN_TIER), "-q", "-n", "1", "-p", "no:cacheprovider"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


FAILS_ONCE = """
from pathlib import Path

def test_it():
    been_here = Path(__file__).with_suffix(".seen")
    again = been_here.exists()
    been_here.touch()
    {check}
"""


def test_a_test_that_passes_when_run_again_is_printed_as_flaky(tier):
    done = tier(test_a=FAILS_ONCE.format(check="assert again, 'too early'"))
    assert done.returncode == 0, done.stdout + done.stderr
    flaky = done.stdout.partition("flaky:")[2]
    assert "test_a.py::test_it" in flaky
    assert "too early" in flaky


def test_one_that_fails_again_fails(tier, tmp_path):
    ok = FAILS_ONCE.format(check="assert again")
    done = tier(test_a=ok, test_b="def test_it():\n    assert 1 == 2\n")
    assert done.returncode == 1
    assert "failed again, alone: test_b.py::test_it" in done.stdout
    rows = json.loads((tmp_path / "failures.json").read_text())
    assert [(row["id"], row["final"]) for row in rows] == [
        ("test_a.py::test_it", None),
        ("test_b.py::test_it", None),
    ]


NEVER_FLAKY = {
    "test_bits": (
        "from oracles import assert_bits_equal; assert_bits_equal(again + 0.0, 1.0)",
        "unequal bits",
    ),
    "test_values": (
        "import numpy as np; np.testing.assert_array_equal([again], [True])",
        "unequal values",
    ),
    "test_hang": (
        "from verdicts import Hang\n    if not again: raise Hang('x did not end')",
        "a hang",
    ),
    "test_crash": ("import os\n    again or os.abort()", "its process ended"),
    "test_kills": ("assert again", "test_kills.py is in tests/final.txt"),
}


def test_what_is_never_flaky_is_not_tried_again(tier):
    done = tier(**{name: FAILS_ONCE.format(check=row[0]) for name, row in NEVER_FLAKY.items()})
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout.partition("never flaky:")[2]
    for name, (_, reason) in NEVER_FLAKY.items():
        assert f"{name}.py::test_it: {reason}" in said


def test_errors_of_the_run_itself_are_not_tried_again(tier):
    done = tier(test_a="import not_there\n")
    assert done.returncode != 0
    assert "flaky:" not in done.stdout


def test_repetitions_of_stress_tests(tmp_path):
    """`make test-stress` runs each case as often as it is told."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
        "from quick import repeat as pytest_generate_tests\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a.py").write_text("def test_it():\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "TAILRACE_TEST_REPEAT": "7"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "7 passed" in done.stdout, done.stdout
