"""Checkpoints of several processes: exact after a dead process and a signal to one of them."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import launched
import tailrace as tr
from oracles import assert_close, mlp, mlp_loss
from tailrace.devices.processes.distributed import Share
from tailrace.errors import CheckpointError, DataError
from tailrace.feeds.reader import Reader
from tailrace.trainer.checkpoints import together as together_module
from tailrace.trainer.checkpoints.together import own_position

pytest.importorskip("orbax.checkpoint")

SCRIPT = Path(__file__).parent / "keep_together.py"


def together(processes, devices, **options):
    return launched.together(SCRIPT, processes, devices, **options)


def steps_in(directory):
    return sorted(path.name for path in Path(directory).glob("fit-0/*"))


def test_ended_and_started_again(tmp_path):
    """A signal to one process saves and ends all; a dead one costs what came after the last save."""
    code, expected, text = together(2, 2)
    assert code == 0, text
    kept, run = str(tmp_path / "kept"), str(tmp_path / "run")
    code, said, text = together(2, 2, directory=kept, run_dir=run, end=["signal", 1, 3])
    assert code == 143, text
    assert not said
    assert "step-3" in steps_in(kept), "the signal has saved"
    code, said, text = together(2, 2, directory=kept, run_dir=run, end=["dies", 1, 8])
    assert code != 0
    assert not said
    # Step 5 is saved before step 7 begins to be. The process that writes may have been ended while it
    # saved step 7: what it would leave is here in any case, of a step that is not saved again.
    assert "step-5" in steps_in(kept)
    (Path(kept) / "fit-0" / "step-6.unfinished.orbax-checkpoint-tmp").mkdir()
    other = str(shutil.copytree(kept, tmp_path / "other"))
    code, said, text = together(2, 2, directory=kept, run_dir=run)
    assert code == 0, text
    for one, plain in zip(said, expected, strict=True):
        assert 0 < one["executions"] < 7, "it did not start over"
        assert one["losses"] == plain["losses"]
        assert one["state"] == plain["state"]
    assert tr.open_run(run).history.steps.tolist() == list(range(10))
    assert all(re.fullmatch(r"step-\d+(-end)?", name) for name in steps_in(kept))

    # In another number of processes: the data goes on where it was, and sums have another order.
    code, alone, text = together(1, 4, directory=other)
    assert code == 0, text
    assert 0 < alone[0]["executions"] < 7
    assert all(re.fullmatch(r"step-\d+(-end)?", name) for name in steps_in(other))
    assert_close(np.float32(alone[0]["losses"]), np.float32(expected[0]["losses"]))
    restored = tr.Trainer(mlp_loss, optax.sgd(0.05, momentum=0.9), mlp(), replicas=4)
    restored.restore(kept)
    assert restored.step == 10
    found = jax.tree.leaves((restored.params, restored.state.optimizer_state))
    for leaf, plain in zip(found, expected[0]["state"], strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(plain, leaf.dtype))


def test_positions_in_another_number_of_processes(monkeypatch):
    there = [{"elements": 6}, {"elements": 6}, {"elements": 6}]
    assert own_position(there) == {"elements": 18}
    assert own_position([{"elements": 5, "source": {"json": 3}}])["source"] == {"json": 3}
    monkeypatch.setattr(together_module.distributed, "process_count", lambda: 2)
    assert own_position(there) == {"elements": 9, "share_of": 2}
    stateful = [{"elements": 6, "source": {"json": 1}}]
    with pytest.raises(CheckpointError, match="as many processes as before: 1 there, 2 here"):
        own_position(stateful)
    # One process that read tr.batches is continued by several that share it.
    recipe = iter(tr.batches(np.zeros((64, 3), np.float32), 4)).recipe()
    alone = own_position([{"elements": 12, "recipe": recipe}])
    assert alone == {"elements": 6, "share_of": 2}
    shared = Reader(Share(tr.batches(np.arange(64.0, dtype=np.float32), 4), 4, 2, 1))
    shared.go_to(alone)
    assert shared.read(1)[0].tolist() == [[56.0, 57.0, 58.0, 59.0]]  # elements 14 and 15 of 16
    with pytest.raises(DataError, match=r"Use tr.distributed.share\(dataset, replicas\)"):
        Reader(tr.batches(np.zeros((64, 3), np.float32), 4)).go_to(alone)
    with pytest.raises(CheckpointError, match="Each of 3 processes read a tr.batches of its own"):
        own_position([{"elements": 4, "recipe": recipe}] * 3)


def test_what_fails_in_the_first_process_fails_in_all(monkeypatch):
    """The first one says what came of it; the others raise the same."""
    heard = {"failed": "The checkpoint cannot be written: no room"}
    monkeypatch.setattr(together_module.distributed, "process_count", lambda: 2)
    monkeypatch.setattr(together_module.distributed, "writes", lambda: False)
    monkeypatch.setattr(together_module.distributed, "meet", lambda said: [heard, said])
    with pytest.raises(CheckpointError, match="no room"):
        together_module.first_does(lambda: pytest.fail("only the first process acts"))
    with pytest.raises(CheckpointError, match="Of process 0: The checkpoint cannot be written"):
        together_module.each_does(lambda: 3)
    heard = {"found": 4}
    assert together_module.first_does(lambda: None) == 4
