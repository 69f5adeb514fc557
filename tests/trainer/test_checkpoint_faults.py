"""What happens to a checkpoint directory while it is written, and what strangers put into one."""

import json
import os
import shutil
import signal
import threading

import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal
from tailrace.errors import CheckpointError, DataTimeout
from tailrace.feeds import reader
from tailrace.trainer.checkpoints import orbax_files
from threads import infeed_threads
from waits import LIMIT_S, Clock

X = list(np.random.default_rng(0).normal(size=(12, 4, 3)).astype(np.float32))


def trainer_of(**options):
    def loss_fn(w, x):
        return ((x @ w - 1) ** 2).mean()

    return tr.Trainer(
        loss_fn, optax.sgd(0.01), np.zeros(3, np.float32), steps_per_execution=2, **options
    )


class Fault(tr.Callback):
    """Does something to the directory at some step."""

    def __init__(self, act):
        self.act = act

    def on_execution_end(self, trainer, execution):
        if trainer.step == 4:
            self.act()


# -- links, and directories that are no longer there ------------------------------------------------


def test_a_fit_that_is_a_link_is_not_written(tmp_path):
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    (outside / "own.unfinished").mkdir(parents=True)
    kept.mkdir()
    (kept / "fit-0").symlink_to(outside)
    with pytest.raises(CheckpointError, match="without following links, and 'fit-0'"):
        trainer_of().fit(X, steps=4, checkpoint=kept)
    assert [path.name for path in outside.iterdir()] == ["own.unfinished"]


def test_an_unfinished_checkpoint_that_is_a_link_is_removed(tmp_path):
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    (outside / "own").mkdir(parents=True)
    (kept / "fit-0").mkdir(parents=True)
    (kept / "fit-0" / "step-4-end.unfinished").symlink_to(outside)
    trainer_of().fit(X, steps=4, checkpoint=kept)
    assert [path.name for path in outside.iterdir()] == ["own"]
    assert orbax_files.is_checkpoint(kept / "fit-0" / "step-4-end")


def removed(kept):
    shutil.rmtree(kept)


def replaced(kept):
    kept.rename(kept.with_name("elsewhere"))
    kept.mkdir()


def unlocked(kept):
    (kept / "lock").unlink()


def linked(kept):
    shutil.rmtree(kept / "fit-0")
    (kept / "fit-0").symlink_to(kept.parent)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (removed, "checkpoint directory '.*kept' was removed while it was written"),
        (replaced, "checkpoint directory '.*kept' was replaced by another one"),
        (unlocked, "'lock' in '.*kept' was removed or replaced while the checkpoint directory"),
        (linked, "checkpoint directory is written without following links, and 'fit-0'"),
    ],
)
def test_another_directory_is_not_written(tmp_path, caplog, act, text):
    """Training goes on, as with a full disk; the fit does not end as if its end were saved."""
    kept, trainer = tmp_path / "kept", trainer_of()
    with pytest.raises(CheckpointError, match=text):
        trainer.fit(
            X,
            steps=12,
            checkpoint=tr.Checkpoint(kept, every=4),
            callbacks=[Fault(lambda: act(kept))],
        )
    assert trainer.step == 12
    assert "Training goes on" in caplog.text
    assert not kept.exists() or not list(kept.glob("fit-0/step-1*"))
    assert not list(tmp_path.glob("step-*"))


# -- files of strangers -----------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    where = tmp_path / "saved"
    orbax_files.write(where, {"a": np.arange(12, dtype=np.float32)}, {"step": 1})
    return where


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("listed", [True, False])
def test_pipes_and_devices_are_not_opened(saved, make, listed):
    files = [path for path in saved.rglob("*") if path.is_file()]
    if not listed:  # as of an earlier version: nothing says which files there should be
        (saved / "files.json").unlink()
        files.remove(saved / "files.json")
    for path in files:
        content = path.read_bytes()
        path.unlink()
        make(path)
        with pytest.raises(CheckpointError, match="is a link, a pipe or a device"):
            orbax_files.read(saved)
        path.unlink()
        path.write_bytes(content)
    assert orbax_files.read(saved)[1] == {"step": 1}


def test_a_large_description_is_not_read(saved, monkeypatch):
    monkeypatch.setenv("TAILRACE_READ_LIMIT", "1MiB")
    with (saved / "_CHECKPOINT_METADATA").open("ab") as file:
        file.truncate(2 << 20)
    with pytest.raises(CheckpointError, match=r"takes 2,097,152 bytes.*raise the limit"):
        orbax_files.read(saved)


def test_the_limit_of_all_arrays(saved, monkeypatch):
    for limit, text in (("40", "take 48 bytes.*limit of 40"), ("lots", "is the most that.*'lots'")):
        monkeypatch.setenv("TAILRACE_CHECKPOINT_BYTES", limit)
        with pytest.raises(tr.TailraceError, match=text):
            orbax_files.read(saved)
    monkeypatch.setenv("TAILRACE_CHECKPOINT_BYTES", "1KiB")
    assert orbax_files.read(saved)[0]["a"].shape == (12,)
    # Without a limit of the user's it is the memory of the machine.
    monkeypatch.delenv("TAILRACE_CHECKPOINT_BYTES")
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4}.__getitem__)
    with pytest.raises(tr.TailraceError, match="take 48 bytes.*limit of 40"):
        orbax_files.read(saved)


def test_chunks_are_not_larger_than_their_array(saved):
    tensorstore = pytest.importorskip("tensorstore")
    where = {"driver": "ocdbt", "base": f"file://{saved / 'state'}"}
    store = tensorstore.KvStore.open(where).result()
    form = json.loads(store["a/zarr.json"])
    form["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 40]
    form["codecs"][0]["configuration"]["chunk_shape"] = [1 << 40]
    store["a/zarr.json"] = json.dumps(form).encode()
    (saved / "files.json").unlink()
    with pytest.raises(CheckpointError, match="its parts do not agree"):
        orbax_files.read(saved)


# -- data that blocks while it is skipped -----------------------------------------------------------


@pytest.fixture
def killed(tmp_path):
    """The checkpoints of a fit that was killed at step 8."""
    kept = tr.Checkpoint(tmp_path / "kept", every=4)
    with pytest.raises(Killed):
        trainer_of().fit(iter(X), steps=12, checkpoint=kept, callbacks=[Kill(3)])
    return kept


@pytest.fixture
def blocking(monkeypatch):
    """Elements of which the fourth does not come; no other takes any time."""
    free, clock = threading.Event(), Clock()
    monkeypatch.setattr(reader, "time", clock)

    def elements():
        for number, element in enumerate(X):
            if number == 3:
                clock.now += 3600
                elements.reached()
                assert free.wait(LIMIT_S), "something waits for the dataset"
            yield element

    elements.reached = lambda: None
    yield elements
    free.set()
    for thread in infeed_threads():  # the one that was left in the dataset
        thread.join(LIMIT_S)


def test_skipped_elements_have_the_limit(killed, blocking):
    with pytest.raises(DataTimeout, match=r"timeout_s=0\.5 seconds, and element 3 of the dataset"):
        trainer_of().fit(blocking(), steps=12, checkpoint=killed, timeout_s=0.5)


def test_a_signal_while_elements_are_skipped(killed, blocking):
    trainer, before = trainer_of(), signal.getsignal(signal.SIGTERM)
    blocking.reached = lambda: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        trainer.fit(blocking(), steps=12, checkpoint=killed)
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    expected = trainer_of()
    expected.fit(X, steps=12)
    trainer = trainer_of()
    trainer.fit(iter(X), steps=12, checkpoint=killed)
    assert_bits_equal(trainer.state, expected.state)
    assert_bits_equal(trainer.history.loss, expected.history.loss)


# -- fits without checkpoints in between ------------------------------------------------------------


def test_a_fit_without_checkpoints_does_not_cut_what_follows(tmp_path):
    """Rows of finished fits do not come again: the run keeps them."""

    def script(run_dir, finish=True):
        trainer, kept = trainer_of(run_dir=run_dir), tmp_path / "kept"
        trainer.fit(X, steps=4, checkpoint=kept)
        trainer.fit(X, steps=2)
        if finish:
            trainer.fit(X, steps=4, checkpoint=kept)
        return trainer

    run = tmp_path / "run"
    script(run, finish=False)
    script(run)  # killed before the last fit: the one in between is trained again
    assert tr.open_run(run).history.steps.tolist() == list(range(10))
    with pytest.raises(CheckpointError, match=r"no checkpoint=.*\(fit-1\).*every fit of a script"):
        script(run)
    assert tr.open_run(run).history.steps.tolist() == list(range(10))
    assert script(None).step == 10
