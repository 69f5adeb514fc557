"""The command line: what it prints, where, and with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace.cli
from tailrace._version import __version__
from tailrace.cli.command_line import COMMANDS, main
from tailrace.errors import TailraceError

MODULE = """
import numpy as np
from tailrace.data.batches import batches

recipe = batches({"x": np.zeros((20, 3))}, 2, repeat=True)
short = [np.zeros(2)] * 3
finite = batches(np.zeros(56), 1)
number = 5

class holder:
    inner = recipe

def make():
    return recipe

def generate():
    while True:
        yield np.zeros(4)

def broken():
    raise OSError("no\\nfile")

def breaks_later():
    yield np.zeros(1)
    raise OSError("gone")
"""


@pytest.fixture(autouse=True)
def _folder_with_a_module(tmp_path, monkeypatch):
    (tmp_path / "my_test_data.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("raise ValueError('bad module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_test_data", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


SMALL = ["--epochs", "2", "--elements", "10"]


@pytest.mark.parametrize("name", ["recipe", "make", "generate", "holder.inner"])
def test_a_benchmark_prints_json_alone(name, capsys):
    assert main(["benchmark-data", f"my_test_data:{name}", "--json", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert [e["elements_processed"] for e in json.loads(out)["epochs"]] == [10, 10]
    assert err == ""


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("short", [], [1, 1, 1]),
        ("short", ["--epochs", "1"], [3]),
        ("short", ["--elements", "2"], [2]),
        ("finite", [], [11] * 5),
    ],
)
def test_a_short_dataset_is_measured_as_far_as_it_goes(name, options, expected, capsys):
    assert main(["benchmark-data", f"my_test_data:{name}", "--json", *options]) == 0
    figures = json.loads(capsys.readouterr().out)["epochs"]
    assert [e["elements_processed"] for e in figures] == expected


def test_table_and_verdict(capsys):
    assert main(["benchmark-data", "my_test_data:make", "--step-time", "1e7", *SMALL]) == 0
    out, _ = capsys.readouterr()
    assert "batches of 2 from 20 examples" in out
    assert "elements/s" in out
    assert "the device is the bottleneck, by" in out


def test_with_json_the_verdict_goes_to_stderr(capsys):
    arguments = ["my_test_data:make", "--step-time", "1e7", "--json", *SMALL]
    assert main(["benchmark-data", *arguments]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "the device is the bottleneck" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["my_test_data"], "named as MODULE:ATTRIBUTE, for example mypackage.data:training_set"),
        (["my_test_data:nothing"], "was imported, but it has no attribute 'nothing'"),
        (["no_such_file.py:make"], "names the file 'no_such_file.py', which does not exist"),
        (["no_such_module:x"], "importing 'no_such_module' raised ModuleNotFoundError"),
        (["my_broken_module:x"], "importing 'my_broken_module' raised ValueError: bad module"),
        (["my_test_data:number"], "This is not a dataset. Received: a int: 5"),
        (["my_test_data:broken"], "my_test_data:broken was called and raised OSError: no file"),
        (["my_test_data:breaks_later"], "raised OSError after 1 elements: gone"),
        (["my_test_data:short", "--elements", "9"], "asked for 9 elements"),
        (["my_test_data:short", "--epochs", "4"], "asked for 4 elements"),
        (["my_test_data:recipe", "--epochs", "0"], "epochs must be a whole number >= 1"),
        (
            ["my_test_data:recipe", "--step-time", "0"],
            "--step-time must be greater than 0 micro",
        ),
    ],
)
def test_errors_are_one_line_and_code_2(arguments, text, capsys):
    assert main(["benchmark-data", *arguments]) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert err.startswith("tailrace benchmark-data: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in out + err


def test_a_new_command_is_one_function(monkeypatch, capsys):
    def add(subparsers):
        parser = subparsers.add_parser("fail")
        parser.set_defaults(run=run)

    def run(arguments):
        raise TailraceError("it failed")

    monkeypatch.setattr("tailrace.cli.command_line.COMMANDS", [*COMMANDS, add])
    assert main(["fail"]) == 2
    assert capsys.readouterr().err == "tailrace fail: it failed\n"


def test_an_interrupt_exits_with_130(monkeypatch):
    def add(subparsers):
        subparsers.add_parser("wait").set_defaults(run=run)

    def run(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tailrace.cli.command_line.COMMANDS", [add])
    assert main(["wait"]) == 130


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--version"], 0, f"tailrace {__version__}"),
        (["--help"], 0, "benchmark-data"),
        ([], 2, "COMMAND"),
        (["benchmark-data", "a:b", "--epochs", "many"], 2, "invalid int value: 'many'"),
        (["audit", "run", "--fit", "0", "a:b", "c:d"], 2, "unrecognized arguments: a:b c:d"),
        (["audit", "run", "a:b", "--fit", "0", "c:d"], 2, "unrecognized arguments: c:d"),
        (
            ["plan", "--stages", "2", "--microbatches", "4", "more"],
            2,
            "unrecognized arguments: more",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_argparse(arguments, code, text, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == code
    assert text in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "none.py:make", "--fit", "0"],
        ["run", "--fit", "0", "none.py:make"],
        ["run", "--fit", "0", "--", "none.py:make"],
        ["--fit", "0", "run", "none.py:make"],
    ],
)
def test_an_argument_that_may_be_missing_is_found_anywhere(arguments, capsys):
    assert main(["audit", *arguments]) == 2
    assert "names the file 'none.py', which does not exist" in capsys.readouterr().err


def test_as_a_process():
    source = str(Path(tailrace.cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "benchmark-data", "my_test_data:short", *SMALL],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tailrace benchmark-data: The benchmark asked for 20 elements")


@pytest.mark.skipif(os.name != "posix", reason="of POSIX")
def test_a_reader_that_goes_ends_it_without_a_traceback():
    """As with `tailrace plan ... | head -1`."""
    command = [sys.executable, "-m", "tailrace", "plan", "--stages", "2", "--microbatches", "4"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


PATHS = (
    *(
        "nul\0l",
        "",
        "nowhere",
        "file",
        "empty",
        "half",
        "loop",
        "/dev/null",
        "\udcff",
    ),
    *("x" * 5000, "/".join("y" * 3000), "é😀", "-", "http://x", "a\nb", "%00", "half/run.json"),
)
NUMBERS = ("-1", "9" * 5000, "1e400", "nan", "x", "", "\0", "²", "1.5", f"-{10**30}")
TARGETS = ("mod", "mod:", ":", "a\0b:c", "nomod:x", "..:x", "\udcff:x", "nowhere.py:x", "x" * 999)
RUN_COMMANDS = ("show", "report", "audit", "histogram", "heatmap")
ODD_CASES = [
    *([command, path] for command in RUN_COMMANDS for path in PATHS),
    *([command, path, path] for command in ("compare", "diff", "bisect") for path in PATHS),
    *(["watch", path] for path in PATHS if path not in ("", "empty", "half")),  # may become runs
    *(["view", path] for path in PATHS if path not in ("", "empty", "half")),
    *(["tensorboard", path, "events"] for path in PATHS),
    *(["replay", path, "--step", "0", "mod:f"] for path in PATHS),
    *(["plan", "--stages", "2", "--microbatches", "4", "--svg", path] for path in PATHS[:8]),
    *(["plan", "--stages", number, "--microbatches", "4"] for number in NUMBERS),
    *(["plan", "--stages", "2", "--microbatches", number] for number in NUMBERS),
    *(["plan", "--stages", "1", "--microbatches", "4", "--forward", one] for one in NUMBERS[:8]),
    *([command, target] for command in ("benchmark-data", "tensors") for target in TARGETS),
    *(["view", "empty", "--port", number] for number in NUMBERS),
    *(["launch", "-n", number, "file"] for number in NUMBERS),
    *(["launch", "-n", "1", "--grace", number, "no.py"] for number in NUMBERS),
    *(["launch", "-n", "1", "--restarts", number, "no.py"] for number in NUMBERS),
    *(["launch", "-n", "1", path] for path in ("", "no.py", "\0", "x" * 5000, "loop")),
    ["launch", "-n", "1", "file", "nul\0l"],
    *([path] for path in PATHS),
]


def test_odd_arguments_end_in_a_sentence(tmp_path, monkeypatch, capsys):
    """Every command, with paths of all kinds and numbers of any length."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text("{")
    (tmp_path / "loop").symlink_to("loop")
    for case in ODD_CASES:
        try:
            code = main(case)
        except SystemExit as error:  # argparse's own
            code = error.code
        said = capsys.readouterr().err
        if case[0] == "plan" and code == 0:  # its picture can be written there
            continue
        assert code == 2, (case, said[:500])
        assert "Traceback" not in said
        last = said.strip().splitlines()[-1]
        assert last.startswith("tailrace"), (case, said[:500])


@pytest.mark.parametrize(
    ("mode", "kept"), [(0o700, True), (0o755, True), (0o777, False), (0o1777, False), (None, False)]
)
def test_programs_are_kept_where_no_other_user_can_place_any(tmp_path, mode, kept):
    """Also `tailrace doctor` says it; a directory that does not exist yet is made for this user."""
    directory = tmp_path / "kept"
    if mode is None:
        directory.write_text("")
    else:
        directory.mkdir()
        directory.chmod(mode)
    code = "import tailrace, os; print(os.environ.get('JAX_COMPILATION_CACHE_DIR'))"
    clean = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "TAILRACE_CACHE": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == (str(directory) if kept else "None")
    assert ("TAILRACE_CACHE" in done.stderr) is not kept
    if mode == 0o777:
        assert "can be written by every user of this machine" in done.stderr
