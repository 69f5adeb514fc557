"""Opening runs: what is there, and sentences for what is not."""

import json
import os
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from small_runs import make_trainer

import tailrace as tr


def test_lazy_and_whole(finished):
    run = tr.open_run(str(finished))
    assert repr(run) == "Run(20 steps, 4 records, ended)"
    assert "Record('grad/first', stats, 20 values, on disk)" in repr(run.records)
    assert run.records["grad/first", "histogram"].values.sum(axis=1).tolist() == [30] * 4
    assert "grad/first" in run.records
    assert ("grad/first", "stats") in run.records
    assert "grad/none" not in run.records
    assert "20 steps" in run._repr_html_()


def test_the_errors_of_records_are_those_in_memory(finished):
    records = tr.open_run(finished).records
    with pytest.raises(
        tr.errors.SelectionError, match="has records of several taps: 'stats', 'his"
    ):
        records["grad/first"]
    with pytest.raises(tr.errors.SelectionError, match="There are no records of 'grad/frst'"):
        records["grad/frst"]


def test_a_run_without_taps_and_without_steps(tmp_path):
    from tailrace.runs.writer import RunWriter

    with RunWriter(tmp_path).fitting({"catalogue": []}):
        run = tr.open_run(tmp_path)
        assert repr(run) == "Run(0 steps, 0 records, growing)"
    assert len(run.history) == len(run.records) == len(run.catalogue) == 0
    assert run.refresh().is_ended


def test_a_run_that_ended_since_it_was_opened_is_not_interrupted(tmp_path):
    from tailrace.runs.writer import RunWriter

    with RunWriter(tmp_path).fitting({"catalogue": []}):
        run = tr.open_run(tmp_path)
    assert not run.is_ended
    assert run.is_interrupted is False
    assert run.state == "growing"
    assert run.refresh().state == "ended"


def test_what_cannot_be_found_out(tmp_path, finished):
    """A lock that is no file, or none: neither growing nor interrupted."""
    described = finished / "zarr.json"
    described.write_text(described.read_text().replace('"writing": false', '"writing": true'))
    assert tr.open_run(finished).state == "interrupted"
    (finished / "lock").unlink()
    assert tr.open_run(finished).state == "growing, or interrupted"
    os.mkfifo(finished / "lock")
    assert tr.open_run(finished).state == "growing, or interrupted"


def test_a_reader_that_looks_at_the_lock_keeps_no_writer_out(tmp_path, monkeypatch):
    import fcntl

    from tailrace.runs.storage import lock
    from tailrace.runs.writer import RunWriter

    (tmp_path / "lock").touch()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
    with RunWriter(tmp_path).fitting({"catalogue": []}):
        assert lock.is_locked(tmp_path) is True
    assert lock.is_locked(tmp_path) is False
    os.close(looking)


def test_a_slow_reader_keeps_no_writer_out_and_a_writer_is_refused_at_once(tmp_path, monkeypatch):
    import fcntl

    from tailrace.runs.storage import lock
    from tailrace.runs.writer import RunWriter

    (tmp_path / "lock").touch()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    pauses = []

    def paused(seconds):
        pauses.append(seconds)
        if len(pauses) == 50:  # it had no core for a second
            fcntl.flock(looking, fcntl.LOCK_UN)

    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=paused)
    monkeypatch.setattr(lock, "time", clock)
    with RunWriter(tmp_path).fitting({"catalogue": []}):
        assert len(pauses) == 50
        with pytest.raises(tr.errors.RunError, match=f"is being written .process {os.getpid()}"):
            RunWriter(tmp_path).fitting({}).__enter__()
        assert len(pauses) == 50
    os.close(looking)


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(tmp_path):
    """As a worker of a loader, which lives longer than a fit, and has every open file too."""
    from tailrace.runs.storage.lock import is_locked
    from tailrace.runs.writer import RunWriter

    with RunWriter(tmp_path).fitting({"catalogue": []}):
        handles = [int(one) for one in os.listdir("/proc/self/fd")]
        held = [one for one in handles if _target(one) == str(tmp_path / "lock")]
        assert held
        code = "import sys; sys.stdin.read()"
        forked = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=held
        )
    with forked:
        assert is_locked(tmp_path) is False
        assert forked.poll() is None
        forked.stdin.close()


def _target(handle):
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:  # that of the list itself
        return None


def test_missing_and_empty(tmp_path):
    with pytest.raises(
        tr.errors.RunError, match="There is no run directory at .*nowhere': nothing is there. Give"
    ):
        tr.open_run(tmp_path / "nowhere")
    with pytest.raises(tr.errors.RunError, match="holds no run: it is empty. A run is written by"):
        tr.open_run(tmp_path)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(tr.errors.RunError, match="holds no run: it has no run.json"):
        tr.open_run(tmp_path)
    with pytest.raises(tr.errors.RunError, match="A run is a directory. '.*notes' is a file"):
        tr.open_run(tmp_path / "notes")


@pytest.mark.parametrize("text", ["", '{"format": 1, "cata', "[]", '{"format": "x"}'])
def test_a_damaged_description(finished, text):
    (finished / "run.json").write_text(text)
    with pytest.raises(tr.errors.RunError, match="The file run.json of '.*' is damaged"):
        tr.open_run(finished)


def test_a_newer_format(finished):
    info = json.loads((finished / "run.json").read_text())
    info["format"], info["versions"]["tailrace"] = 2, "9.9\x1b"
    (finished / "run.json").write_text(json.dumps(info))
    text = r"has format 2 \(written by tailrace 9.9\\x1b\), and .* up to 1. Update tailrace"
    with pytest.raises(tr.errors.RunError, match=text):
        tr.open_run(finished)


@pytest.mark.parametrize(
    "catalogue", [None, [{"name": "x"}], 5, [{"name": "x", "kind": "x", "shape": ["a"]}]]
)
def test_a_damaged_catalogue(finished, catalogue):
    info = json.loads((finished / "run.json").read_text())
    info["catalogue"] = catalogue
    (finished / "run.json").write_text(json.dumps(info))
    with pytest.raises(tr.errors.RunError, match="the catalogue in run.json cannot be read"):
        _ = tr.open_run(finished).catalogue


def test_a_damaged_root(finished):
    text = (finished / "zarr.json").read_text()
    (finished / "zarr.json").write_text(text[:40])
    with pytest.raises(tr.errors.RunError, match="is damaged: zarr.json cannot be read"):
        tr.open_run(finished)
    (finished / "zarr.json").write_text(text.replace("committed", "other"))
    with pytest.raises(tr.errors.RunError, match="is damaged: zarr.json cannot be read .KeyError"):
        tr.open_run(finished)
    (finished / "zarr.json").unlink()
    with pytest.raises(tr.errors.RunError, match="because it is missing.* copy the run again"):
        tr.open_run(finished)


def test_a_missing_and_a_truncated_chunk(finished):
    expected = tr.open_run(finished).records["grad/first", "stats"].values
    chunk = finished / "records/1/values/c.0.0.0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    records = tr.open_run(finished).records
    with pytest.raises(tr.errors.RunError, match="is damaged: records/1/values cannot be read"):
        records["grad/first", "histogram"]
    chunk.unlink()
    text = "is truncated: the chunk 0/0/0 of records/1/values is missing. Other arrays can"
    with pytest.raises(tr.errors.RunError, match=text):
        records["grad/first", "histogram"]
    np.testing.assert_array_equal(records["grad/first", "stats"].values, expected)


def test_fewer_rows_than_were_written(finished):
    import zarr

    array = zarr.open_group(finished)["history/metric0"]
    array.resize((5, 1, 1))
    with pytest.raises(tr.errors.RunError, match="truncated: history/metric0 has 5 rows, and 20"):
        _ = tr.open_run(finished).history


def test_a_missing_table(finished):
    (finished / "records/1/zarr.json").unlink()
    with pytest.raises(tr.errors.RunError, match="is damaged: records/1 cannot be read"):
        _ = tr.open_run(finished).records.names


def test_no_pickle_anywhere(finished):
    texts = [path.read_text() for path in finished.rglob("zarr.json")]
    assert texts
    assert not any("pickle" in text for text in texts)


def test_a_trainer_that_never_trained_writes_nothing(tmp_path):
    make_trainer(tmp_path / "run")
    assert not (tmp_path / "run").exists()
