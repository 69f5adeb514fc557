"""Every call that reaches the disk may fail, while saving and while resuming: nothing is lost.

A training that is started again after a fault ends with the same bits; it trains no step below the
newest checkpoint again, loses at most one checkpoint, and nothing good is set aside or removed.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

import faults
from fault_programs import PROGRAMS

pytest.importorskip("orbax.checkpoint")

NO_COMPILER = "the calls that fail are written in C, and there is no compiler (gcc)"
NEEDS = {"keras_fit": "keras", "torch_calls": "torch"}


def check(folder, least, *arguments, **options):
    said = faults.run(folder, *arguments, **options)
    if said is None:
        pytest.skip(NO_COMPILER)
    wrong = [one for one in said if one.get("wrong")]
    assert not wrong, wrong
    counts = [one for one in said if "faults" in one]
    assert sum(one["faults"] for one in counts) >= least
    assert any(one["raised"] for one in counts), "no fault was noticed"


SCRIPT = """
import json, sys
import faults
calls, said, folder = faults.Calls(), [], sys.argv[1]
for kind, number in (("EIO", 0), ("EIO", 1), ("short", 1), ("ended", 1), ("EMFILE for good", 1)):
    with calls.failing(kind, folder, number) as happened:
        try:
            file = open(f"{folder}/file", "rb", 0)
            found = file.read(4).decode()
            file.close()
        except OSError as error:
            found = error.errno
    said.append([found, happened["count"], happened["hit"].partition(" ")[0]])
print(json.dumps(said))
"""


def test_calls_fail_one_at_a_time(tmp_path):
    (tmp_path / "file").write_text("text")
    library = faults.build(tmp_path)
    if library is None:
        pytest.skip(NO_COMPILER)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    options = {"capture_output": True, "text": True, "timeout": faults.LIMIT_S}
    done = subprocess.run(command, env=faults.environment(library), check=True, **options)
    none, refused, short, ended, full = json.loads(done.stdout)
    assert (none[0], none[2]) == ("text", "")
    assert none[1] >= 2  # opened, and read
    assert refused == [5, 1, "open64"]
    assert short == ["te", 1, "read"]
    assert ended == ["", 1, "read"]
    assert full == [24, 1, "open64"]


def test_a_few_calls_of_a_fit(tmp_path):
    kinds = "EIO,EMFILE,ended,MemoryError"
    check(tmp_path, 6, "--programs", "plain", "--kinds", kinds, "--most", "1")


def test_calls_of_each_program(tmp_path):
    """In one process, which starts once."""
    known = [name for name in PROGRAMS if importlib.util.find_spec(NEEDS.get(name, "jax"))]
    kinds = "EIO,ended,MemoryError"
    check(tmp_path, 30, "--programs", ",".join(known), "--kinds", kinds, "--most", "1")


def test_calls_of_two_processes(tmp_path):
    """An error in one of them ends both."""
    (tmp_path / "root").mkdir()
    of = ("--together", "0", "--root", str(tmp_path / "root"))
    kinds = "EIO,MemoryError"
    check(tmp_path, 3, "--programs", "together", "--kinds", kinds, "--most", "1", *of, processes=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_call_of_each_program(tmp_path, program):
    pytest.importorskip(NEEDS.get(program, "jax"))
    check(tmp_path, 100, "--programs", program, timeout=36_000)
