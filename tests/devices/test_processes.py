"""Several processes train as one does: the same losses, parameters and results, each said once."""

import errno
import io
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import launched
import tailrace as tr
from launched import arrays, leaves
from oracles import (
    assert_close,
    mlp,
    mlp_apply,
    mlp_loss,
    plain_accumulated_training,
    regression,
)
from tailrace.devices.processes import launch as module
from tailrace.devices.processes.launch import Watched, launch
from waits import LIMIT_S, wait_until

HERE = Path(__file__).parent
SCRIPT = HERE / "train_together.py"


def together(*args, **options):
    """The script of this folder, in several processes."""
    return launched.together(SCRIPT, *args, **options)


def alone(optimizer, replicas, microbatches=1, **options):
    """The same in this process, on virtual devices."""
    trainer = tr.Trainer(
        mlp_loss, optimizer, mlp(), replicas=replicas, accumulation=microbatches, **options
    )
    trainer.fit(regression(64), steps=4)
    return trainer


def test_two_processes_equal_the_plain_loop(tmp_path):
    run, taps = tmp_path / "run", ["grad/out", "reduced/out"]
    code, said, text = together(2, 2, accumulation=2, observe=taps, run_dir=str(run))
    assert code == 0, text
    assert [one["process"] for one in said] == [0, 1]
    params, losses, _ = plain_accumulated_training(
        mlp_loss, optax.sgd(0.1), mlp(), regression(64)[:32], microbatches=2, replicas=4
    )
    one_process = alone(optax.sgd(0.1), 4, 2, observe=taps)
    evaluated = one_process.evaluate(regression(64)[:10])
    predicted = one_process.predict(regression(64)[:6], lambda p, x, y: mlp_apply(p, x))
    for one in said:
        assert_close(arrays(one["params"]), leaves(params))
        assert_close(np.asarray(one["each"], np.float32), losses)
        assert_close(
            jax.tree.map(np.float32, one["evaluated"]), jax.tree.map(np.float32, evaluated)
        )
        assert_close(np.asarray(one["predicted"], np.float32), np.asarray(predicted))
        for name in taps:
            record = one_process.records[name]
            replicas, means = one["records"].get(name, (None, None))
            if one["process"] == 0:  # its records are in the run directory
                replicas, means = tr.open_run(run).records[name].replicas.tolist(), None
            assert replicas == record.replicas.tolist()
            if means is not None:
                assert_close(np.float32(means), np.float32(record.values["mean"]))
    # Written once: one run, with the records of all replicas.
    stored = tr.open_run(run)
    assert_close(np.float32(stored.history["loss"]), np.float32(said[0]["losses"]))
    found = tr.diff(stored, one_process, rtol=1e-4, atol=1e-6)
    assert not found, found
    assert found.compared == 4  # two tensors, loss and metric of each microbatch and replica
    assert sorted(set(stored.records["grad/out"].replicas)) == [0, 1, 2, 3]
    assert stored.is_ended
    assert "Traceback" not in text


def test_four_processes_with_shared_state():
    code, said, text = together(4, 1, optimizer="adam", shard_optimizer_state=True)
    assert code == 0, text
    with jax.numpy_dtype_promotion("standard"):
        one_process = alone(optax.adam(0.05), 4)
    assert len(said) == 4
    assert text.count("6 of 7 leaves") <= 1  # said once, if at all
    for one in said:
        assert_close(arrays(one["params"]), leaves(one_process.params))
        assert_close(arrays(one["state"]), leaves(one_process.state.optimizer_state))
        assert_close(np.float32(one["losses"]), one_process.history.loss)


@pytest.mark.exhaustive
def test_epochs_over_datasets_of_unknown_length():
    code, said, text = together(2, 1, replicas=2, data="generator")
    assert code == 0, text
    one_process = tr.Trainer(mlp_loss, optax.sgd(0.1), mlp(), replicas=2)
    one_process.fit(regression(64), epochs=2)
    assert_close(np.float32(said[1]["losses"]), one_process.history.loss)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("other shape", "differ in the shapes and dtypes of the dataset's elements: process 0 has"),
        ("other loss", "differ in the operations of the program"),
        pytest.param(
            "short",
            "Of process 1: .*fit takes steps x microbatches x replicas",
            marks=pytest.mark.exhaustive,
        ),
        ("fails", "Process 1 failed before this execution: ProducerError: .*the disk is gone"),
    ],
)
def test_differences_are_found_before_the_first_collective(data, expected):
    code, said, text = together(2, 1, replicas=2, data=data)
    assert code != 0
    assert not said
    assert re.search(expected, text), text


def test_a_process_that_dies_is_named_and_ends_the_others():
    code, said, text = together(2, 1, replicas=2, data="dies")
    assert code == 7
    assert not said
    assert "process 1 of 2 ended with code 7. The others (0) were ended." in text
    assert "  | going down" in text


def test_a_process_that_leaves_early_is_named():
    code, said, text = together(2, 1, replicas=2, data="leaves")
    assert code != 0
    assert not said
    assert "Process 1 has ended, and the others still have something to run with it" in text


@pytest.mark.exhaustive
def test_every_process_has_a_replica():
    code, said, text = together(2, 1, replicas=1)
    assert code != 0
    assert not said
    assert "Use a multiple of 2" in text


@pytest.mark.parametrize(
    ("script", "processes", "expected"),
    [
        ("nowhere.py", 2, "There is no script 'nowhere.py' here"),
        (str(SCRIPT), 0, "-n counts the processes, at least 1. Received: 0"),
    ],
)
def test_bad_launches(script, processes, expected):
    with pytest.raises(tr.errors.OptionError, match=expected):
        launch([script], processes)


def test_a_script_that_ends_well(tmp_path, capfd):
    script = tmp_path / "hello.py"
    script.write_text(
        "import os, sys; print('I am', os.environ['TAILRACE_PROCESS'], *sys.argv[1:])"
    )
    assert launch([str(script), "a", "-b"], 2) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["I am 0 a -b", "[1] I am 1 a -b"]


def test_a_signal_is_reported_by_its_name(tmp_path, capfd):
    script = tmp_path / "killed.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert launch([str(script)], 1) == 137
    assert "process 0 of 1 was ended by SIGKILL" in capfd.readouterr().err


def test_the_output_of_ended_processes_is_awaited_too(tmp_path, monkeypatch):
    """Or what they said would be lost with the launcher."""
    script, begun = tmp_path / "ends.py", tmp_path / "begun"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['TAILRACE_PROCESS'] == '1': print('last words', flush=True)\n"
        "while os.environ['TAILRACE_PROCESS'] == '1' or not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    awaited, finish = threading.Event(), Watched.finish_reading

    class Slow(io.StringIO):
        """Takes the line of process 1 while the others are ended, until somebody waits for it."""

        def write(self, text):
            if "last words" in text:
                begun.touch()
                awaited.wait(LIMIT_S)
            return super().write(text)

    def noted(self, *args):
        if self.number == 1:
            awaited.set()
        finish(self, *args)

    slow = Slow()
    monkeypatch.setattr(Watched, "finish_reading", noted)
    monkeypatch.setattr(sys, "stdout", slow)
    try:
        assert launch([str(script), str(begun)], 2) == 3
        assert slow.getvalue() == "[1] last words\n"
    finally:
        awaited.set()  # or its thread would stay


def test_the_process_that_died_first_is_named(tmp_path, capfd, monkeypatch):
    """Both have died when the launcher looks for the second time."""
    script = tmp_path / "die.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        f"here, number = pathlib.Path({str(tmp_path)!r}), os.environ['TAILRACE_PROCESS']\n"
        "while not (here / number).exists(): time.sleep(0.01)\n"
        "print('process', number, 'goes', flush=True)\n"
        "sys.exit(3 + int(number == '0'))\n"
    )

    def until_both_have_died(_):
        # Not before the launcher has looked once, and one after the other: the time of an end is
        # that at which a thread has noted it.
        waiters = {thread.name: thread for thread in threading.enumerate()}
        for number in ("1", "0"):
            (tmp_path / number).touch()
            waiters[f"tailrace-waiter-{number}"].join(LIMIT_S)

    monkeypatch.setattr(
        module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=until_both_have_died)
    )
    assert launch([str(script)], 2) == 3
    text = capfd.readouterr().err
    assert "process 1 of 2 ended with code 3. Then process 0 ended with code 4." in text
    assert "  | process 1 goes" in text


def test_process_0_has_the_port_before_it_starts(tmp_path, capfd, monkeypatch):
    """Nobody else can bind it, also before the roll call; after it, the launcher does not hold it."""
    script, tried = tmp_path / "bind.py", tmp_path / "tried"
    script.write_text(
        "import os, pathlib, socket\n"
        "from tailrace.devices.processes.rollcall import call_roll\n"
        "address = os.environ['TAILRACE_COORDINATOR']\n"
        "number = int(os.environ['TAILRACE_PROCESS'])\n"
        "host, port = address.split(':')\n"
        "if number == 0:\n"
        "    try: socket.create_server((host, int(port)))\n"
        "    except OSError as error: print('taken:', error.errno)\n"
        "call_roll(address, 2, number, 300.0, os.environ['TAILRACE_TOKEN'])\n"
        "if number == 0:\n"
        "    try: socket.create_server((host, int(port))).close()  # free again, for JAX\n"
        f"    finally: pathlib.Path({str(tried)!r}).touch()\n"
        "print('met', 'TAILRACE_LISTENING' in os.environ)\n"
    )
    start = Watched.__init__

    def slowly(self, number, *args):
        start(self, number, *args)
        if number == 1:
            wait_until(tried.exists, "process 0 does not get so far")

    monkeypatch.setattr(Watched, "__init__", slowly)
    assert launch([str(script)], 2) == 0
    out = sorted(capfd.readouterr().out.splitlines())
    assert out == ["[1] met False", "met False", f"taken: {errno.EADDRINUSE}"]
