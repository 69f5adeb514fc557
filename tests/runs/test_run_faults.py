"""What happens to a run directory while it is written: removed, replaced, linked, locked, full."""

import errno
import os
import shutil
import stat
import subprocess
import threading
import time

import numpy as np
import pytest
from made_parts import ONES, chosen, execution
from test_run_crash import check_whole

import tailrace as tr
from tailrace.runs import write_queue
from tailrace.runs.storage import durable
from tailrace.runs.writer import RunWriter
from waits import LIMIT_S

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
NOBODY = 65534


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 0.0)


def written(directory, executions=3, meanwhile=lambda number: None):
    """Write executions of three steps; `meanwhile` is called between them."""
    sink = RunWriter(directory)
    with sink.fitting({"catalogue": []}):
        for number in range(executions):
            sink.execution(execution(number * 3, 3, ONES[:2]))
            sink.flush()
            meanwhile(number)
    return sink


def content(directory):
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# -- removed, replaced ----------------------------------------------------------------------------


def test_a_directory_that_is_removed_is_not_made_again(tmp_path):
    def remove(number):
        if number == 1:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(tr.errors.RunError, match=r"'.*run' was removed while it was written"):
        written(tmp_path / "run", 9, remove)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_replaced_is_not_written(tmp_path):
    written(tmp_path / "other")
    before = content(tmp_path / "other")

    def replace(number):
        if number == 1:
            (tmp_path / "run").rename(tmp_path / "moved")
            (tmp_path / "other").rename(tmp_path / "run")

    with pytest.raises(tr.errors.RunError, match=r"was replaced by another one.*nothing more"):
        written(tmp_path / "run", 9, replace)
    assert content(tmp_path / "run") == before
    assert check_whole(tr.open_run(tmp_path / "moved")) == 6  # what was written before


def test_a_second_fit_does_not_write_into_another_directory(tmp_path):
    sink = written(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(tr.errors.RunError, match="was replaced"), sink.fitting({}):
        pass
    shutil.rmtree(tmp_path / "run")
    with (
        pytest.raises(tr.errors.RunError, match=r"cannot be written|was removed"),
        sink.fitting({}),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_lock_that_is_removed_ends_the_writing(tmp_path):
    def unlock(number):
        if number == 1:
            (tmp_path / "lock").unlink()

    with pytest.raises(tr.errors.RunError, match="'lock' in .* was removed or replaced"):
        written(tmp_path, 9, unlock)


def test_a_directory_that_becomes_read_only(tmp_path):
    folders = []

    def protect(number):
        if number == 1:
            folders.extend([tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())])
            for folder in folders:
                folder.chmod(0o500)
            if AS_ROOT:  # who may write everywhere
                os.seteuid(NOBODY)

    try:
        with pytest.raises(tr.errors.RunError, match="Permission denied.*The 6 steps before"):
            written(tmp_path, 9, protect)
    finally:
        if AS_ROOT:
            os.seteuid(0)
        for folder in folders:
            folder.chmod(0o700)
    assert check_whole(tr.open_run(tmp_path)) == 6


@pytest.mark.parametrize("given", ["", b"", 5, None, ["x"], b"bytes", "a\0b"])
def test_what_is_no_directory(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tr.errors.OptionError, match="run_dir is "):
        RunWriter(given)
    assert not list(tmp_path.iterdir())


# -- planted --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lock", "zarr.json.partial", "history", "records", "run.json.partial"]
)
def test_links_are_not_followed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    folder = name in ("history", "records")
    (run / name).symlink_to(victim if folder else victim / "file")
    try:
        written(run)
    except tr.errors.RunError as error:
        said = str(error)
    else:
        said = ""
    if name.endswith("partial"):
        assert check_whole(tr.open_run(run)) == 9  # such a file is replaced, not followed
    else:
        assert "without following links" in said
        assert repr(name) in said
    assert content(victim) == {(victim / "file").relative_to(victim): b"precious"}


def test_a_link_that_is_planted_later_is_not_followed(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()

    def plant(number):
        if number == 1:
            (run / "history").rename(run / "was")
            (run / "history").symlink_to(victim)

    with pytest.raises(tr.errors.RunError, match="without following links, and 'history'"):
        written(run, 9, plant)
    assert not list(victim.iterdir())


def test_names_of_other_files_are_not_written_through(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    (run / "lock").hardlink_to(victim)
    with pytest.raises(tr.errors.RunError, match="'lock' of a run directory is a file of its own"):
        written(run)
    (run / "lock").unlink()
    (run / "zarr.json.partial").hardlink_to(victim)
    written(run)
    assert victim.read_text() == "precious"


def test_a_pipe_as_lock(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(tr.errors.RunError, match="is a file of its own"):
        written(tmp_path)


# -- full -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


LARGE = chosen("update/large", shape=(300, 300))  # 360 kB a step that do not get much smaller


def noise(first_step, steps=1):
    done = execution(first_step, steps, [LARGE])
    values = np.random.default_rng(first_step).normal(size=(steps, 300, 300)).astype(np.float32)
    object.__setattr__(done.parts[0], "value", values)
    return done


def test_a_full_disk_that_has_room_again(small_disk, monkeypatch, caplog):
    """Nothing is lost: the training goes on, what is not written waits."""
    monkeypatch.setattr(write_queue, "RETRY_S", 0.05)
    (small_disk / "ballast").write_bytes(bytes(1_300_000))
    run = small_disk / "run"
    sink = RunWriter(run)

    def make_room():
        while "is full" not in caplog.text:
            time.sleep(0.01)
        (small_disk / "ballast").unlink()

    thread = threading.Thread(target=make_room, daemon=True)
    with sink.fitting({"catalogue": []}):
        sink.execution(noise(0))
        sink.flush()
        thread.start()
        sink.execution(noise(1))
        sink.flush()
    thread.join(LIMIT_S)
    assert "is full. What is not written waits in memory" in caplog.text
    read = tr.open_run(run)
    assert read.history.steps.tolist() == [0, 1]
    assert read.records["update/large"].steps.tolist() == [0, 1]


def test_a_disk_that_stays_full(small_disk, monkeypatch):
    monkeypatch.setattr(write_queue, "RETRY_S", 0.05)
    monkeypatch.setattr(write_queue, "FULL_S", 0.3)
    run = small_disk / "run"
    sink = RunWriter(run)

    def fill():
        with sink.fitting({"catalogue": []}):
            for step in range(40):
                sink.execution(noise(step))
                sink.flush()

    with pytest.raises(
        tr.errors.RunError, match="No space left on device.* steps before are there"
    ):
        fill()
    read = tr.open_run(run)
    kept = len(read.history)
    assert 0 < kept < 40
    assert len(read.records["update/large"]) == kept


def test_steps_that_were_not_written_are_a_gap_that_is_seen(tmp_path, monkeypatch):
    """A later fit goes on behind what counted: the numbers of the steps are those on the disk."""
    monkeypatch.setattr(write_queue, "FULL_S", 0.0)
    monkeypatch.setattr(write_queue, "RETRY_S", 0.01)
    plain, room = durable.write_file, [True]

    def write(*args):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(*args)

    monkeypatch.setattr(durable, "write_file", write)
    sink = RunWriter(tmp_path)
    ones = ONES[:2]

    def fail():
        with sink.fitting({"catalogue": []}):
            sink.execution(execution(0, 3, ones))
            sink.flush()
            room[0] = False
            for number in range(1, 5):
                sink.execution(execution(number * 3, 3, ones))
                sink.flush()

    with pytest.raises(tr.errors.RunError, match="No space left"):
        fail()
    room[0] = True
    with sink.fitting({}):
        sink.execution(execution(15, 3, ones))
    run = tr.open_run(tmp_path)
    assert run.history.steps.tolist() == [0, 1, 2, 15, 16, 17]
    assert run.history.loss.tolist() == [0, 1, 2, 15, 16, 17]
    assert run.records["grad/a"].steps.tolist() == [0, 1, 2, 15, 16, 17]


def test_the_pause_between_writes_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "SHARE", 1e-12)
    monkeypatch.setattr(write_queue, "PAUSE_S", 0.05)
    sink = RunWriter(tmp_path)
    with sink.fitting({"catalogue": []}):
        give_up = time.monotonic() + LIMIT_S
        for number in range(10_000):
            sink.execution(execution(number, 1, ONES[:1]))
            time.sleep(0.01)
            if sink.writes > 3 or time.monotonic() > give_up:
                break
        assert sink.writes > 3


def test_modes_of_files_are_those_of_the_user(tmp_path):
    written(tmp_path / "run")
    mask = os.umask(0)
    os.umask(mask)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
