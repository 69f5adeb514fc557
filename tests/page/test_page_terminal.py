"""`tailrace show` and `tailrace watch`."""

import io
import subprocess
import sys
import threading

import numpy as np
import pytest
from made_runs import NAMES, MadeRun, add_report, falling, healthy_stats
from rich.console import Console

from tailrace.cli.command_line import main
from tailrace.page.terminal.chart import chart
from tailrace.page.terminal.watch import watch
from tailrace.runs.reader import open_run
from waits import LIMIT_S, wait_until


def test_a_chart_rises_with_its_values():
    lines = chart(np.arange(100), np.linspace(0, 1, 100), width=40, height=5)
    rows = [line.partition("┤")[2] or line.partition("│")[2] for line in lines[:5]]
    inked = [[place for place, c in enumerate(row) if c != "\u2800"] for row in rows]
    assert all(inked)
    assert [max(row) for row in inked] == sorted((max(row) for row in inked), reverse=True)
    assert max(inked[0]) == max(map(len, rows)) - 1
    assert min(inked[-1]) == 0
    assert {len(line) for line in lines[:6]} == {40 - 1}


def test_a_chart_leaves_gaps_and_draws_a_constant():
    values = np.ones(60)
    values[20:40] = np.nan
    (row,) = [
        line
        for line in chart(np.arange(60), values, width=70)
        if "⠒" in line or "⠤" in line or "⠉" in line or "⣀" in line
    ]
    drawn = row.partition("│")[2] or row.partition("┤")[2]
    assert "\u2800" * 15 in drawn
    assert chart(np.arange(3), np.full(3, np.nan)) == ["(no finite values)"]


def test_show_prints_what_ran_the_curve_and_findings(made, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    add_report(made.directory, text="Not finite in step 7: [bold]'grad/w'[/bold] \x1b[2J")
    assert main(["show", str(made.directory)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in (
        "stopped",
        "200",
        "steps/s",
        "accuracy",
        "findings",
        "options",
        "versions",
        "1 x cpu",
    ):
        assert text in out
    assert "Not finite in step 7: [bold]'grad/w'[/bold] \\x1b[2J" in " ".join(out.split())
    assert "\x1b" not in out
    assert sum("┤" in line or "│" in line for line in out.splitlines()) >= 10


@pytest.mark.parametrize("command", ["show", "watch", "report"])
def test_a_run_that_is_not_there_is_one_sentence(tmp_path, command, capsys):
    assert main([command, str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"tailrace {command}: There is no run directory at ")
    assert len(err.splitlines()) == 1
    assert out == ""


@pytest.mark.parametrize("command", ["show", "report"])
def test_an_empty_directory_is_one_sentence(tmp_path, command, capsys):
    assert main([command, str(tmp_path)]) == 2
    assert "holds no run: it is empty" in capsys.readouterr().err


def test_watch_follows_a_run_to_its_end(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, height=60)
    thread = threading.Thread(target=watch, args=(directory, console, 0.02), daemon=True)
    thread.start()
    wait_until(lambda: "holds no run" in shown.getvalue(), "nothing is said of an empty directory")
    run = MadeRun(directory, NAMES)
    run.grow({"loss": falling(30)}, stats=healthy_stats(30))
    wait_until(lambda: "growing, or interrupted" in shown.getvalue(), "the run is not shown")
    assert thread.is_alive()
    run.grow({"loss": falling(1234)}, stats=healthy_stats(1234), writing=False)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    text = shown.getvalue()
    assert text.index("holds no run") < text.index("growing, or interrupted") < text.index("1,264")
    assert "ended" in text[text.index("1,264") - 200 :]


WRITER = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def written(tmp_path):
    """A run that a process is writing, and the process."""
    run = MadeRun(tmp_path / "run", NAMES)
    run.grow({"loss": falling(30)}, stats=healthy_stats(30))
    lock = run.directory / "lock"
    lock.touch()
    command = [sys.executable, "-c", WRITER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "held\n"
        yield run, writer
        writer.kill()


def test_watch_ends_when_the_writer_is_killed(written):
    run, writer = written
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, height=60)
    thread = threading.Thread(target=watch, args=(run.directory, console, 0.02), daemon=True)
    thread.start()
    wait_until(lambda: "growing" in shown.getvalue(), "the run is not shown")
    assert thread.is_alive()
    assert "interrupted" not in shown.getvalue()
    writer.kill()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    text = " ".join(shown.getvalue().split())
    sentence = "The run was interrupted: the process that wrote it has ended, and its fit has not."
    assert text.index("growing") < text.index("interrupted") < text.index(sentence)


def test_watch_never_ends_on_a_picture_of_before_the_kill(written):
    run, writer = written

    class Deadly(io.StringIO):
        """Ends the writer as soon as the run is shown as growing."""

        def write(self, text):
            if "growing" in text:
                writer.kill()
                writer.wait(LIMIT_S)
            return super().write(text)

    shown = Deadly()
    watch(run.directory, Console(file=shown, force_terminal=True, width=100, height=60), 0.02)
    pictures = shown.getvalue().partition("The run was interrupted")[0]
    assert pictures.index("growing") < pictures.index("interrupted")


def test_show_says_whether_a_process_writes(written, capsys):
    run, writer = written

    def shown():
        assert main(["show", str(run.directory)]) == 0
        return next(line.split()[1:] for line in capsys.readouterr().out.splitlines()
                    if line.startswith("state"))  # fmt: skip

    assert shown() == ["growing"]
    assert repr(open_run(run.directory)).endswith("growing)")
    writer.kill()
    writer.wait()
    assert shown() == ["interrupted"]
    assert open_run(run.directory).is_interrupted is True
    run.grow({"loss": falling(2)}, stats=healthy_stats(2), writing=False)
    assert shown() == ["ended"]
    assert open_run(run.directory).is_interrupted is False


def test_help_needs_no_jax():
    code = (
        "import sys\nfrom tailrace.cli.command_line import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'jax', 'numpy', 'rich', 'starlette', 'uvicorn', 'zarr'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("show", "watch", "report", "view"):
        assert f"\n    {command} " in done.stdout
