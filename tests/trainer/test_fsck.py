"""`tailrace fsck`: what a directory holds, what of it is proved whole, and the exit code."""

import errno
import re
import shutil

import numpy as np
import optax
import pytest

import tailrace as tr
from tailrace.cli.command_line import main
from tailrace.trainer.checkpoints import orbax_files

X = np.ones((8, 4, 3), np.float32)


def trainer_of(**options):
    def loss_fn(w, x):
        return ((x @ w - 1) ** 2).mean()

    return tr.Trainer(loss_fn, optax.sgd(0.01), np.zeros(3, np.float32), **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    trainer = trainer_of(run_dir=folder / "run", observe="grad/*", steps_per_execution=4)
    trainer.fit(list(X), checkpoint=tr.Checkpoint(folder / "kept", every=4), progress=False)
    trainer.save(folder / "saved")
    return folder


@pytest.fixture
def kept(written, tmp_path):
    return shutil.copytree(written / "kept", tmp_path / "kept")


def said(capsys, path):
    code = main(["fsck", str(path)])
    return code, capsys.readouterr().out.splitlines()


def files_of(path):
    return {one: one.read_bytes() for one in path.rglob("*") if one.is_file()}


def test_what_is_whole(written, capsys):
    before = files_of(written)
    code, lines = said(capsys, written / "kept")
    assert code == 0
    assert lines[0] == "whole    fit-0/step-0: step 0, 2 arrays, 12 bytes"
    assert [line.split()[1].rstrip(":") for line in lines[:-1]] == [
        *("fit-0/step-0", "fit-0/step-4", "fit-0/step-8", "fit-0/step-8-end")
    ]
    assert lines[-1] == "4 whole, 0 damaged, 0 unknown"
    for path, text in (
        ("saved", "whole    saved: step 8"),
        ("kept/fit-0/step-4", "whole    step-4: step 4"),
        ("run", "whole    run: a run of 8 steps"),
    ):
        code, lines = said(capsys, written / path)
        assert (code, lines[-1]) == (0, "1 whole, 0 damaged, 0 unknown")
        assert lines[0].startswith(text)
    assert files_of(written) == before


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (cut, r"damaged  fit-0/step-4: .*has \d+ bytes of \d+"),
        (lambda path: path.unlink(), "damaged  fit-0/step-4: .* is missing"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "damaged .*what was written"),
        (
            lambda path: path.with_name("more").touch(),
            "unknown  fit-0/step-4: 'state/more' was not written with it; the rest is whole",
        ),
    ],
)
def test_what_is_not(kept, capsys, change, text):
    change(kept / "fit-0" / "step-4" / "state" / "_METADATA")
    code, lines = said(capsys, kept)
    assert code == 1
    (line,) = [line for line in lines if "fit-0/step-4:" in line]
    assert re.match(text, line)
    assert lines[-1].startswith("3 whole, ")


def test_what_cannot_be_read_is_unknown(kept, capsys, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(orbax_files.import_orbax(), "load", fails)
    code, lines = said(capsys, kept)
    assert (code, lines[-1]) == (1, "0 whole, 0 damaged, 4 unknown")
    assert "Nothing proves that it is damaged" in lines[0]


def test_what_was_set_aside_and_is_whole_is_said_to_be(kept, capsys):
    path = kept / "fit-0" / "step-4"
    path.rename(path.with_name("step-4.damaged"))
    code, lines = said(capsys, kept)
    assert code == 0
    assert "fit-0/step-4.damaged: set aside, and whole: renamed to 'step-4', it is used" in lines[3]


@pytest.mark.parametrize(
    "name", ["history/metric0/c.0.0.0", "records/0/mean/c.0.0", "executions/steps/c.0"]
)
def test_a_run_with_a_piece_that_was_changed(written, tmp_path, capsys, name):
    run = shutil.copytree(written / "run", tmp_path / "run")
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    code, lines = said(capsys, run)
    assert (code, lines[-1]) == (1, "0 whole, 1 damaged, 0 unknown")


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_what_is_none_of_these(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert main(["fsck", str(tmp_path / name)]) == 2
    assert "fsck looks at what fit(checkpoint=...), trainer.save" in capsys.readouterr().err
