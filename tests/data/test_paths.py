"""Sentences about files that cannot be written or read: each says what to change."""

import errno
import os

import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.base.paths import in_words, remedy
from tailrace.errors import CheckpointError, ProgramError, RunError
from tailrace.profiling.profile.profile import Profile
from tailrace.trainer.checkpoints import orbax_files

REASONS = {
    errno.EACCES: "Give this user the right to write in that folder",
    errno.EPERM: "Give this user the right to write in that folder",
    errno.EROFS: "Its file system is read-only: give a path on another one",
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Make room there",
    errno.ENOENT: "Make the folder first",
    errno.ENOTDIR: "A part of the path is a file",
    errno.EISDIR: "It is a folder: give the path of a file",
    errno.ENAMETOOLONG: "Give a shorter name",
    errno.EIO: "Look at the disk, or give another path",
}


@pytest.mark.parametrize("number", REASONS)
def test_what_to_change(number):
    text = in_words(OSError(number, os.strerror(number)))
    assert text.startswith(f"{os.strerror(number)}. {REASONS[number]}")
    assert text.endswith(".")


def test_what_to_change_to_read():
    assert remedy(PermissionError(errno.EACCES, ""), reading=True).startswith(
        "Give this user the r"
    )
    assert remedy(FileNotFoundError(errno.ENOENT, ""), reading=True) == (
        "Give the path of one that exists."
    )
    assert remedy(RuntimeError("of Orbax")) == ""


def test_a_checkpoint_that_this_user_may_not_write(tmp_path):
    text = (
        r"'.*kept' cannot be written: PermissionError: .*denied\. Give this user the right to write"
    )
    with (
        pytest.raises(CheckpointError, match=text),
        orbax_files.sentence(tmp_path / "kept", "cannot be written"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_profiles(tmp_path):
    with pytest.raises(RunError, match="The profile .*none' cannot be read: No such.* that exists"):
        Profile.load(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(RunError, match="writes. Received: '.*bytes', which is no text"):
        Profile.load(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.ones(3, ">f4"), r"byte order of other machines \(dtype >f4\). Convert it: x.astype\(x"),
        (np.array(["a"]), "an array of dtype <U1. Give arrays of numbers"),
        (np.array([None]), "an array of dtype object. Give arrays of numbers"),
        ("a", "'w', a str. Give the arrays only"),
    ],
)
def test_parameters_that_jax_has_no_arrays_of(array, text):
    with pytest.raises(ProgramError, match=text):
        tr.Trainer(lambda p, x: p["w"].sum(), optax.sgd(0.1), {"w": array})
