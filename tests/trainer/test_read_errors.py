"""Errors of reading are not damage: only what is proved damaged is set aside, and nothing is lost."""

import errno
import json
import shutil
import threading

import numpy as np
import optax
import pytest

import tailrace as tr
from killed_fits import Kill, Killed
from oracles import assert_bits_equal
from tailrace.errors import CheckpointError
from tailrace.feeds import waiting
from tailrace.runs.storage.lock import is_locked
from tailrace.trainer.checkpoints import device_copies, file_list, orbax_files
from waits import LIMIT_S, Clock, wait_until

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1)
STEPS, EVERY = 12, 4


def loss_fn(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()


def fit(directory, steps=STEPS, callbacks=(), **options):
    options = {"steps_per_execution": 2, **options}
    trainer = tr.Trainer(loss_fn, optax.sgd(0.1), {"w": np.zeros(3, np.float32)}, **options)
    data = tr.batches((X, Y), 4, shuffle=True, seed=5)
    kept = tr.Checkpoint(directory, every=EVERY, keep=9)
    trainer.fit(data, steps=steps, checkpoint=kept, callbacks=callbacks, progress=False)
    return trainer


def names(directory):
    return sorted(path.name for path in (directory / "fit-0").iterdir())


def contents(directory):
    return {path: path.read_bytes() for path in directory.glob("fit-*/**/*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A fit of 12 steps, and the checkpoints of the same killed at step 10: of steps 0, 4 and 8."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.raises(Killed):
        fit(folder / "kept", callbacks=[Kill(4)])
    return fit(folder / "other"), folder / "kept"


@pytest.fixture
def killed(whole, tmp_path):
    return shutil.copytree(whole[1], tmp_path / "kept")


def flip(path):
    """Change a byte of the largest file of arrays."""
    files = [file for file in path.rglob("*") if file.parent.name == "d"]
    file = max(files, key=lambda one: one.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# -- errors that say nothing of the files -----------------------------------------------------------


ERRORS = [
    MemoryError("Unable to allocate 30 GiB"),
    *(OSError(n, "of the disk") for n in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE)),
    TypeError("load() got an unexpected keyword"),
    AttributeError("no such attribute"),
    ValueError("DATA_LOSS: Error reading"),
]


@pytest.mark.parametrize(("number", "error"), [*enumerate(ERRORS)])
def test_what_says_nothing_of_the_files_touches_nothing(whole, killed, monkeypatch, number, error):
    """The fit ends with a sentence, and the next start continues where it was."""

    def fails(*_, **__):
        raise error

    before, where = contents(killed), ("load", "metadata")[number % 2]
    with monkeypatch.context() as patch:
        patch.setattr(orbax_files.import_orbax(), where, fails)
        text = rf"step-8' cannot be read: {type(error).__name__}: .*nothing was changed: try again"
        with pytest.raises(CheckpointError, match=text):
            fit(killed)
    assert contents(killed) == before
    trainer = fit(killed)
    assert trainer.executions == 2  # of six: four were left
    assert_bits_equal(trainer.state, whole[0].state)
    assert_bits_equal(trainer.history.loss, whole[0].history.loss)


def test_wrong_bytes_that_come_once_are_no_damage(whole, killed, monkeypatch):
    left, own = [1], file_list.file_checksum
    monkeypatch.setattr(
        file_list, "file_checksum", lambda *args: own(*args) + (left.pop() if left else 0)
    )
    assert_bits_equal(fit(killed).state, whole[0].state)
    assert not left
    assert names(killed) == ["step-0", "step-12", "step-12-end", "step-4", "step-8"]


def test_a_short_read_is_no_damage(whole, killed, monkeypatch):
    """A file that ends before its size was not read; one that is shorter is damaged."""
    own = file_list.open_regular

    class Open:
        def __init__(self, *args):
            self.file = own(*args)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read(self, size):
            return b""

    with monkeypatch.context() as patch:
        patch.setattr(file_list, "open_regular", Open)
        with pytest.raises(CheckpointError, match=r"0 of [\d,]+ bytes could be read"):
            fit(killed)
    assert_bits_equal(fit(killed).state, whole[0].state)


def test_memory_that_is_short_while_it_is_written(whole, tmp_path, monkeypatch, caplog):
    left, own = [1], device_copies.DeviceCopy.on_host

    def short(self):
        if tmp_path.joinpath("kept", "fit-0", "step-0").exists() and left:
            left.pop()
            raise MemoryError("Unable to allocate 30 GiB")
        return own(self)

    monkeypatch.setattr(device_copies.DeviceCopy, "on_host", short)
    assert_bits_equal(fit(tmp_path / "kept").state, whole[0].state)
    assert "MemoryError: Unable to allocate 30 GiB. Free memory" in caplog.text
    assert "Training goes on; the next checkpoint is tried again" in caplog.text


# -- damage that is proved ---------------------------------------------------------------------------


def test_what_was_set_aside_stays_and_is_mentioned(whole, killed, caplog):
    """A second incident deletes nothing, and each start says what it goes on from."""
    flip(killed / "fit-0" / "step-8")
    with pytest.raises(Killed):
        fit(killed, callbacks=[Kill(0)])
    first = contents(killed / "fit-0" / "step-8.damaged")
    caplog.clear()
    with pytest.raises(Killed):
        fit(killed, callbacks=[Kill(2)])
    assert "goes on from 'step-4' of" in caplog.text
    assert "set aside as damaged (fit-0/step-8.damaged): `tailrace fsck`" in caplog.text
    assert names(killed) == ["step-0", "step-4", "step-8", "step-8.damaged"]
    flip(killed / "fit-0" / "step-8")
    assert_bits_equal(fit(killed).state, whole[0].state)
    assert {"step-8.damaged", "step-8.damaged-2"} < {*names(killed)}
    assert contents(killed / "fit-0" / "step-8.damaged") == first


def test_a_fit_does_not_start_from_0_beside_what_was_set_aside(killed):
    for path in list((killed / "fit-0").iterdir()):
        path.rename(path.with_name(f"{path.name}.damaged"))
    text = (
        r"no checkpoint of this fit any more, only .*fit-0/step-0.damaged, .*step-8.damaged\. See "
    )
    with pytest.raises(CheckpointError, match=text):
        fit(killed)
    assert len(names(killed)) == 3


@pytest.mark.parametrize("small", [file_list.SMALL, 0], ids=["small files", "large files"])
def test_each_file_has_a_checksum(tmp_path, monkeypatch, small):
    """Of large files too, which are compared once something is wrong."""
    monkeypatch.setattr(file_list, "SMALL", small)
    orbax_files.write(tmp_path / "saved", {"a": np.arange(99, dtype=np.float32)}, {"step": 1})
    files = sorted(file for file in (tmp_path / "saved").rglob("*") if file.stat().st_size)
    for file in (file for file in files if file.is_file()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(orbax_files.DamagedCheckpoint, match="is not what was written|descript"):
            orbax_files.check(tmp_path / "saved")
        file.unlink()
        with pytest.raises(orbax_files.DamagedCheckpoint, match="is missing"):
            orbax_files.check(tmp_path / "saved")
        file.write_bytes(content)
    assert orbax_files.check(tmp_path / "saved") == "step 1, 1 arrays, 396 bytes"


def as_of_an_earlier_version(path):
    """Without the checksums of large files, and without the entry that says that there is a list."""
    said = json.loads((path / "files.json").read_text())
    said = {"files": said["files"], "checksum": said["checksum"]}
    (path / "files.json").write_text(json.dumps(said))
    own = json.loads((path / file_list.OWN).read_text())
    del own["custom_metadata"]["listed"]
    (path / file_list.OWN).write_text(json.dumps(own))


def test_checkpoints_of_earlier_versions(whole, killed, monkeypatch, caplog):
    """They are read; their damage is proved by what they have, or raised."""
    for path in (killed / "fit-0").iterdir():
        as_of_an_earlier_version(path)
    flip(killed / "fit-0" / "step-8")
    copied = shutil.copytree(killed, killed.with_name("copied"))
    assert_bits_equal(fit(killed).state, whole[0].state)
    assert "step-8.damaged" in names(killed)
    (copied / "fit-0" / "step-8" / "files.json").unlink()  # older still: Orbax alone finds it
    (manifest,) = (copied / "fit-0" / "step-8").glob("*/manifest.ocdbt")
    manifest.write_bytes(manifest.read_bytes()[:8])
    before = contents(copied)
    with pytest.raises(CheckpointError, match=r"step-8' cannot be read: .*nothing was changed"):
        fit(copied)
    assert contents(copied) == before


def test_the_end_of_a_fit_is_replaced_by_a_whole_one(tmp_path, monkeypatch):
    """Or stays: it is not removed before the new one is there."""
    fit(tmp_path)
    end, arrays = tmp_path / "fit-0" / "step-12-end", {"a": np.ones(3, np.float32)}
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(orbax_files, "force_tree", lambda path: 1 / 0)
        with pytest.raises(CheckpointError, match="cannot be written: ZeroDivisionError"):
            orbax_files.write(end, arrays, {"step": 12}, replace=True)
    assert contents(tmp_path) == before
    orbax_files.write(end, arrays, {"step": 12}, replace=True)
    assert_bits_equal(orbax_files.read(end)[0], arrays)
    assert len(names(tmp_path)) == 5


# -- the thread that writes --------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_directory_is_locked_while_its_writer_lives(tmp_path, monkeypatch, caplog, interrupted):
    """However long it takes; a signal that ends the wait does not free the directory."""
    clock, begun, free = Clock(), threading.Event(), threading.Event()
    own = orbax_files.force_tree

    def slow(path):
        if path.name.startswith("step-4"):
            begun.set()
            assert free.wait(LIMIT_S), "nobody lets it go on"
        own(path)

    class Fails(tr.Callback):
        """Ends the fit while the checkpoint of step 4 is written."""

        def on_execution_end(self, trainer, execution):
            if trainer.step == 6:
                assert begun.wait(LIMIT_S)
                raise Killed

    monkeypatch.setattr(orbax_files, "force_tree", slow)
    monkeypatch.setattr(waiting, "time", clock)
    ended = []

    def run():
        try:
            fit(tmp_path, callbacks=[Fails()])
        except BaseException as error:
            ended.append(type(error))

    wait_for = waiting.Patience.wait_for

    def signalled(self, *args):
        if begun.is_set():
            raise KeyboardInterrupt
        return wait_for(self, *args)

    if interrupted:
        monkeypatch.setattr(waiting.Patience, "wait_for", signalled)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(LIMIT_S)
        if interrupted:
            thread.join(LIMIT_S)
            assert ended == [KeyboardInterrupt]
        else:
            while "Still waiting for the checkpoint of step 4" not in caplog.text:
                clock.now += 3600
                threading.Event().wait(0.01)
            assert thread.is_alive()
        with pytest.raises(CheckpointError, match="is in use"):
            fit(tmp_path)
    finally:
        free.set()
        thread.join(LIMIT_S)
    monkeypatch.undo()
    wait_until(lambda: (tmp_path / "fit-0" / "step-4").exists(), "the writer goes on")
    if interrupted:
        wait_until(lambda: not is_locked(tmp_path), "the directory stays locked")
    assert fit(tmp_path).step == STEPS
