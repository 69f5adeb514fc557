"""The end of `tailrace launch`: signals that leave time to save, processes that die and start again."""

import os
import signal

import pytest

import launched
from launched import HERE
from tailrace.devices.processes import launch as launch_module
from tailrace.devices.processes import watched as watched_module
from tailrace.devices.processes.launch import launch
from tailrace.errors import OptionError
from waits import LIMIT_S, Clock

KEEPING = HERE / "devices" / "keep_together.py"
DYING = HERE / "devices" / "die_together.py"

HEADER = f"""
import os, pathlib, signal, sys, time
here, number = pathlib.Path(sys.argv[1]), int(os.environ["TAILRACE_PROCESS"])
parent, give_up = os.getppid(), time.monotonic() + {LIMIT_S}
def until(name):
    while not (here / name).exists():
        assert time.monotonic() < give_up and os.getppid() == parent, name
        time.sleep(0.01)
with (here / f"starts-{{number}}").open("a") as file: file.write("x")
start = len((here / f"starts-{{number}}").read_text())
"""

ASKED = """
asked = []
for kind in (signal.SIGINT, signal.SIGTERM): signal.signal(kind, lambda *got: asked.append(got[0]))
(here / f"ready-{number}").touch()
if number == 0:
    until("ready-1")
    for name in sys.argv[2].split(): os.kill(os.getppid(), getattr(signal, name))
while not asked: time.sleep(0.01)
(here / f"asked-{number}").touch()
"""
"""Process 0 signals the launcher once both processes are there; both go on when they are asked."""


@pytest.fixture
def run(tmp_path):
    """Run lines of Python in two processes, in `tmp_path`."""

    def run(lines, *arguments, processes=2, **options):
        script = tmp_path / "script.py"
        script.write_text(HEADER + lines)
        return launch([str(script), str(tmp_path), *arguments], processes, **options)

    return run


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """The launcher's clock: a second passes with each look once both processes are asked to end."""

    class Looks(Clock):
        until = 1e9
        seen = staticmethod(lambda passed: None)

        def sleep(self, seconds):
            super().sleep(0.01)
            if all((tmp_path / f"asked-{number}").exists() for number in range(2)):
                self.now = min(self.now + 1, 1000 + self.until)
                self.seen(self.now - 1000)

    made = Looks()
    monkeypatch.setattr(launch_module, "time", made)
    monkeypatch.setattr(watched_module, "time", made)
    return made


@pytest.fixture
def heard_hangup():
    """Who runs the tests may ignore SIGHUP, as `nohup` does, and a launcher then ignores it too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("sent", "received", "code"),
    [
        ("SIGTERM", signal.SIGTERM, 143),
        ("SIGINT", signal.SIGINT, 130),
        ("SIGHUP", signal.SIGTERM, 129),
        # Both at once are one request: a scheduler may signal the process and its group.
        ("SIGINT SIGTERM", None, None),
    ],
)
@pytest.mark.usefixtures("heard_hangup")
def test_a_signal_gives_the_time_of_a_save(run, clock, tmp_path, capfd, sent, received, code):
    clock.until = 100

    def saved(passed):
        if passed == 100:
            (tmp_path / "go").touch()

    clock.seen = saved
    found = run(ASKED + "until('go')\nprint('saved', *set(asked))\nsys.exit(5 * number)\n", sent)
    out, error = capfd.readouterr()
    assert found == code or (code is None and found in (130, 143))
    expected = {signal.SIGINT, signal.SIGTERM} if received is None else {received}
    assert {int(line.split()[-1]) for line in out.splitlines()} <= expected
    assert out.count("saved") == 2
    assert "processes may take 120 s to save and end (--grace)" in error
    assert "process 0 ended with code 0; process 1 ended with code 5." in error


def test_the_limit_holds(run, clock, capfd):
    """Process 1 ignores all that can be ignored, and has started something that does so too."""
    lines = (
        "if number == 1 and os.fork() == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ASKED
    )
    code = run(lines + "while number: time.sleep(0.01)\n", "SIGTERM", grace_s=7)
    assert code == 143
    assert clock.now - 1000 < 60
    assert "process 0 ended with code 0; process 1 did not end, and was killed." in (
        capfd.readouterr().err
    )


def test_a_second_signal_hurries(run, clock, capfd):
    hurried = []

    def again(passed):
        if passed >= 3 and not hurried:
            hurried.append(passed)
            os.kill(os.getpid(), signal.SIGTERM)

    clock.seen = again
    # Process 0 leaves when it is asked again, process 1 does not.
    lines = ASKED + "while number or len(asked) < 2: time.sleep(0.01)\n"
    clock.until = 100
    assert run(lines, "SIGTERM", grace_s=1e6) == 143
    assert "process 1 did not end, and was killed." in capfd.readouterr().err


DIES = """
if number == {0} and start <= {1}:
    print("going down", flush=True)
    {2}
if number != {0}: until("through")
else: (here / "through").touch()
"""


@pytest.mark.parametrize(
    ("how", "code", "named"),
    [
        ("sys.exit(7)", 7, "process 1 of 2 ended with code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 of 2 was ended by SIGKILL"),
        ("raise ValueError", 1, "process 1 of 2 ended with code 1"),
    ],
)
def test_restarts(run, tmp_path, capfd, how, code, named):
    assert run(DIES.format(1, 2, how), restarts=2) == 0
    error = capfd.readouterr().err
    assert error.count(named) == 2
    assert error.count("  | going down") == 2
    assert "All start again, from the newest checkpoint (2 of 2)." in error
    assert "failed" not in error
    for path in (*tmp_path.glob("starts-*"), tmp_path / "through"):
        path.unlink()
    assert run(DIES.format(1, 2, how), restarts=1) == code
    error = capfd.readouterr().err
    assert f"It failed 2 times, and --restarts allows no more. The first time {named}." in error


def test_a_process_that_has_ended_well_is_started_again_with_the_others(run, capfd):
    lines = "if number == 0: (here / f'ended-{start}').touch(); sys.exit()\n"
    again = lines + "until(f'ended-{start}')\n" + DIES.format(1, 1, "sys.exit(2)")
    assert run(again, restarts=1) == 0
    assert capfd.readouterr().err.count("ended with code 2") == 1


def test_who_ended_it_does_not_want_it_to_start_again(run, tmp_path, capfd):
    lines = "os.kill(os.getppid(), signal.SIGTERM); os._exit(9)\n"
    assert run(lines, processes=1, restarts=5) == 143
    assert (tmp_path / "starts-0").read_text() == "x"
    assert "start again" not in capfd.readouterr().err


def test_what_a_script_has_started_ends_before_the_next_start(run, tmp_path):
    """A loader that outlives its process would keep the lock of the checkpoints."""
    lines = """
import fcntl
lock = open(here / "lock", "w")
if start == 1:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fork(): os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1e6)
signal.alarm(60)
fcntl.flock(lock, fcntl.LOCK_EX)
"""
    assert run(lines, processes=1, restarts=1) == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"restarts": -1}, r"--restarts must be a whole number >= 0. Received: --restarts=-1"),
        ({"grace_s": -1.0}, r"--grace is a number of at least 0. Received: --grace=-1"),
        ({"grace_s": float("nan")}, r"--grace is a number of at least 0. Received: --grace=nan"),
        ({"processes": 10**9}, r"at most 1024. Received: 1000000000"),
    ],
)
def test_options_out_of_range(run, options, expected):
    with pytest.raises(OptionError, match=expected):
        run("", **options)


# -- fits ------------------------------------------------------------------------------------------


def die(folder, processes, kills):
    """Train with so many kills, and without any; what both say, and the launcher's words."""
    steps = 5 * kills + 5
    code, plain, text = launched.together(
        DYING, processes, 4 // processes, kills=0, folder=str(folder), steps=steps
    )
    assert code == 0, text
    for path in folder.glob("start-*"):
        path.unlink()
    options = {"kills": kills, "folder": str(folder), "directory": str(folder / "kept")}
    code, said, text = launched.together(
        DYING, processes, 4 // processes, 3600, restarts=kills, steps=steps, **options
    )
    assert code == 0, text
    return plain, said, text


@pytest.mark.parametrize(
    ("processes", "kills"), [(2, 3), pytest.param(4, 50, marks=pytest.mark.exhaustive)]
)
def test_killed_and_started_again(tmp_path, processes, kills):
    plain, said, text = die(tmp_path, processes, kills)
    assert text.count("All start again") == kills
    assert text.count("was ended by SIGKILL.") == kills
    assert len(said) == processes
    for one, expected in zip(said, plain, strict=True):
        assert one["losses"] == expected["losses"]
        assert one["state"] == expected["state"]


def test_a_fit_says_what_it_has_saved(tmp_path):
    kept = tmp_path / "kept"
    code, said, text = launched.together(
        KEEPING, 2, 2, directory=str(kept), steps=1000, end=["launcher", 1, 3], every=10**6
    )
    assert code == 143, text
    assert not said
    (saved,) = {path.name for path in kept.glob("fit-0/*")} - {"step-0"}
    step = saved.removeprefix("step-")
    for number in range(2):
        assert f"process {number} saved step {step} and ended with code 143" in text
