"""Damaged checkpoints: found and named, or the one before is used; never a state that was not saved."""

import json
import os
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import CheckpointError
from tailrace.trainer.checkpoints import long_arrays, orbax_files
from waits import LIMIT_S

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = X.sum(axis=1)


def loss_fn(params, x, y):
    return ((x @ params["w"] - y) ** 2).mean()


def trainer_of(**options):
    options = {"steps_per_execution": 4, "fingerprint": True, **options}
    return tr.Trainer(
        loss_fn, optax.sgd(0.1, momentum=0.9), {"w": np.zeros(3, np.float32)}, **options
    )


def data():
    return tr.batches((X, Y), 4, shuffle=True, seed=5)


def fit(trainer, directory, steps=12):
    trainer.fit(data(), steps=steps, checkpoint=tr.Checkpoint(directory, every=4), progress=False)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A fit of 12 steps, its checkpoints and its run directory."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, fit(trainer_of(run_dir=folder / "run"), folder / "kept")


@pytest.fixture
def killed(whole, tmp_path):
    """The same, killed before its last checkpoint: of steps 0, 4 and 8."""
    for name in ("kept", "run"):
        shutil.copytree(whole[0] / name, tmp_path / name)
    for name in ("step-12", "step-12-end"):
        shutil.rmtree(tmp_path / "kept" / "fit-0" / name)
    return tmp_path


def flip(path, chance=None):
    """Flip a bit of the largest file, or of the file itself."""
    chance = chance or random.Random(0)
    if path.is_dir():
        path = max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def test_any_damage_of_any_file_is_found(whole, tmp_path):
    """Or it changes nothing: some files say how the arrays were spread over devices."""
    path = tmp_path / "step-12"
    shutil.copytree(whole[0] / "kept" / "fit-0" / "step-12", path)
    arrays, note = orbax_files.read(path)
    chance, said = random.Random(1), []
    for file in sorted(f for f in path.rglob("*") if f.is_file()):
        content = file.read_bytes()
        for damage in ("flip", "cut", "gone"):
            if damage == "gone":
                file.unlink()
            elif content:
                os.truncate(file, len(content) // 2) if damage == "cut" else flip(file, chance)
            try:
                again = orbax_files.read(path)
            except orbax_files.DamagedCheckpoint as error:
                said.append(str(error))
            else:
                assert_bits_equal(again[0], arrays)
                assert again[1] == note
            file.write_bytes(content)
    assert len(said) > 5
    assert all(str(path) in text for text in said)


def test_the_checkpoint_before_it_is_used(whole, killed, caplog):
    flip(killed / "kept" / "fit-0" / "step-8")
    trainer = fit(trainer_of(run_dir=killed / "run"), killed / "kept")
    assert_bits_equal(trainer.state, whole[1].state)
    assert_bits_equal(trainer.history.loss, whole[1].history.loss)
    assert "renamed to 'step-8.damaged', and the fit goes on from 'step-4'" in caplog.text
    assert (killed / "kept" / "fit-0" / "step-8.damaged").is_dir()
    runs = [tr.open_run(folder / "run") for folder in (killed, whole[0])]
    assert_bits_equal(runs[0].history.loss, runs[1].history.loss)
    assert runs[0].executions["chain"].tolist() == runs[1].executions["chain"].tolist()


def test_none_is_whole(killed):
    for path in (killed / "kept" / "fit-0").iterdir():
        flip(path)
    with pytest.raises(CheckpointError, match=r"step-0' .*There is no other one of this fit"):
        fit(trainer_of(), killed / "kept")


def test_the_end_of_a_fit_that_others_follow(whole, tmp_path):
    kept = shutil.copytree(whole[0] / "kept", tmp_path / "kept")
    trainer = fit(trainer_of(), kept)
    fit(trainer, kept, 4)
    flip(kept / "fit-0" / "step-12-end")
    with pytest.raises(CheckpointError, match=r"later fits continued from \(fit-1\). Put a copy"):
        fit(trainer_of(), kept)
    assert (kept / "fit-0" / "step-12-end").is_dir()


def test_a_later_format_is_not_taken_for_damage(killed):
    path = killed / "kept" / "fit-0" / "step-8"
    file = path / "_CHECKPOINT_METADATA"
    said = json.loads(file.read_text())
    said["custom_metadata"]["format"] = orbax_files.FORMAT + 1
    file.write_text(json.dumps(said))
    with pytest.raises(
        CheckpointError, match="has format 3; this version .* reads formats up to 2"
    ):
        fit(trainer_of(), killed / "kept")
    assert path.is_dir()


def test_restore_names_the_one_before(whole, tmp_path):
    kept = shutil.copytree(whole[0] / "kept", tmp_path / "kept")
    flip(kept / "fit-0" / "step-12-end")
    text = r"step-12-end' .* The one before it: trainer.restore\('.*step-12'\)"
    with pytest.raises(CheckpointError, match=text):
        trainer_of().restore(kept)


def test_a_replay_starts_from_the_one_before(whole, tmp_path):
    kept = shutil.copytree(whole[0] / "kept", tmp_path / "kept")
    flip(kept / "fit-0" / "step-8")
    found = trainer_of().replay(9, data(), observe="grad/*", checkpoint=kept)
    assert (found.started_at, found.proved) == (4, True)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    """What is left of it would take the room that the next one needs."""

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(orbax_files, "force_tree", full)
    with pytest.raises(
        CheckpointError, match="cannot be written: OSError: .*No space left.* Make room"
    ):
        trainer_of().save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(
        CheckpointError, match=r"The file 'lock' of a checkpoint directory is a file"
    ):
        fit(trainer_of(), tmp_path)


def test_a_path_that_no_file_can_have(tmp_path):
    long = tmp_path / ("x" * 5000)
    for call in (trainer_of().save, trainer_of().restore, tr.open_run):
        with pytest.raises((CheckpointError, tr.errors.RunError), match="xxx"):
            call(long)
    with pytest.raises(CheckpointError, match="xxx' does not exist. Give the directory"):
        trainer_of().replay(1, data(), checkpoint=long)
    with pytest.raises(CheckpointError, match="File name too long"):
        fit(trainer_of(), long)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_or_read(tmp_path):
    for mode in (0o500, 0o000):
        tmp_path.chmod(mode)
        with pytest.raises(CheckpointError, match="cannot be"):
            fit(trainer_of(), tmp_path / "kept")
        with pytest.raises(CheckpointError, match="cannot be"):
            trainer_of().save(tmp_path / "saved")
        with pytest.raises(CheckpointError):
            trainer_of().restore(tmp_path / "saved")
        with pytest.raises(tr.errors.RunError):
            tr.open_run(tmp_path)
    tmp_path.chmod(0o700)


# -- a long history, in files of its own --------------------------------------------------------------


@pytest.fixture
def long(monkeypatch, tmp_path):
    """A fit killed after 8 of 12 steps, whose history counts as long; and the one before step 8."""
    monkeypatch.setattr(long_arrays, "LONG", 1)
    fit(trainer_of(), tmp_path / "kept", 8)
    shutil.rmtree(tmp_path / "kept" / "fit-0" / "step-8-end")
    return tmp_path / "kept" / "fit-0" / "step-8"


def test_a_long_history_is_resumed_bit_equal(long, whole):
    assert (long / "history-0.bin").stat().st_size == 8 * 4
    resumed = trainer_of()
    history = resumed.fit(data(), steps=12, checkpoint=long.parents[1], progress=False)
    assert_bits_equal(history.loss, whole[1].history.loss)
    assert_bits_equal(resumed.params, whole[1].params)
    assert_bits_equal(history.fingerprints["chain"], whole[1].history.fingerprints["chain"])


def test_a_short_history_is_in_the_form_of_earlier_versions(whole):
    file = whole[0] / "kept" / "fit-0" / "step-8" / "_CHECKPOINT_METADATA"
    assert json.loads(file.read_text())["custom_metadata"]["format"] == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "a link", "not listed"])
def test_a_damaged_long_history_is_found(long, damage):
    file = long / "history-0.bin"
    if damage == "flipped":
        flip(file)
    elif damage == "not listed":  # by size only, as for files of more than a megabyte
        (long / "files.json").unlink()
        file.write_bytes(file.read_bytes() + b"more")
    else:
        content = file.read_bytes()
        file.unlink()
        if damage == "cut":
            file.write_bytes(content[:-1])
        elif damage == "a link":
            (long / "elsewhere").write_bytes(content)
            file.symlink_to(long / "elsewhere")
    with pytest.raises(orbax_files.DamagedCheckpoint, match="history-0.bin"):
        orbax_files.read(long)


def test_who_plants_a_checkpoint_gets_a_sentence_and_no_tracebacks(whole, tmp_path):
    """Without the list of files Orbax finds the damage, in several arrays at the same time.

    In a process of its own: Orbax' threads may complain of their closed event loop at any time after.
    """
    path = tmp_path / "step-12"
    shutil.copytree(whole[0] / "kept" / "fit-0" / "step-12", path)
    (path / "files.json").unlink()
    (manifest,) = path.glob("*/manifest.ocdbt")
    content = manifest.read_bytes()
    manifest.write_bytes(content[:8])
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, str(path)], capture_output=True, text=True, timeout=LIMIT_S
    )
    # Whichever of Orbax' reads fails first.
    assert re.search(r"CheckpointError: .*step-12' (is damaged: |cannot be read: )", done.stdout), (
        done
    )
    logged = done.stderr.split("never retrieved")
    assert not [text for text in logged[1:] if str(path) in text], done.stderr
    assert "the user's own" in done.stderr
    manifest.write_bytes(content)
    arrays, _ = orbax_files.read(path)
    assert "state/params/w" in arrays


PLANTED = """
import asyncio, gc, sys
from pathlib import Path
from tailrace.errors import CheckpointError
from tailrace.trainer.checkpoints import orbax_files
try:
    orbax_files.read(Path(sys.argv[1]))
except CheckpointError as error:
    print(f"CheckpointError: {error}")
loop = asyncio.new_event_loop()
for text in (f"cannot open {sys.argv[1]}/state", "the user's own"):  # of tasks that nobody awaits
    asyncio.Future(loop=loop).set_exception(ValueError(text))
loop.close()
gc.collect()
"""
