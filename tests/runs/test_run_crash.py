"""Whatever ends a writer, and however executions come: readers see whole ones, in order."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parts import ONES, chosen, execution
from small_runs import assert_same_records

import tailrace as tr
from tailrace.records.records import Records
from tailrace.runs import write_queue
from tailrace.runs.storage import durable
from tailrace.runs.writer import RunWriter
from waits import LIMIT_S


def check_whole(run):
    """What is there is a whole number of executions, and every value is where it belongs."""
    count = len(run.history)
    np.testing.assert_array_equal(run.history.loss, np.arange(count, dtype=np.float32))
    for pair in run.records:
        record = run.records[pair]
        steps = record.steps
        expected = steps.reshape(-1, *[1] * (record.values.ndim - 1)).astype(np.float32)
        inner = np.arange(np.prod(record.values.shape[1:]), dtype=np.float32) / 1000
        expected = expected + inner.reshape(record.values.shape[1:])
        np.testing.assert_array_equal(record.values, expected.astype(np.float32))
        assert steps.max() < count
        if pair[0] in ("grad/a", "update/d"):
            assert len(steps) == count
    return count


def test_an_error_at_any_write(tmp_path, monkeypatch):
    """Many of the files that are written are once the one that fails."""
    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(write_queue, "FULL", ())  # or it would simply be tried again
    calls, failing = itertools.count(1), 0

    def failing_once(plain):
        def call(*args):
            if next(calls) == failing:  # in one step: files are synced in several threads
                raise OSError(28, "No space left on device")
            return plain(*args)

        return call

    for name in ("sync_file", "sync_folder", "rename_file"):
        monkeypatch.setattr(durable, name, failing_once(getattr(durable, name)))
    seen = set()
    while True:
        failing += 29
        calls = itertools.count(1)
        directory = tmp_path / str(failing)
        sink = RunWriter(directory)
        text = ""
        try:
            with sink.fitting({"catalogue": []}):
                for number in range(4):
                    sink.execution(execution(number * 3, 3, ONES))
                    sink.stored()
        except tr.errors.RunError as error:
            text = str(error)
        if not text:
            assert next(calls) <= failing
            break
        assert "No space left on device" in text
        if (directory / "run.json").exists():
            seen.add(check_whole(tr.open_run(directory)))
    assert seen >= {0, 3, 6, 9}


CHILD = """
import sys
sys.path[:0] = {path!r}
import made_parts
from tailrace.runs import write_queue
from tailrace.runs.writer import RunWriter
write_queue.WRITE_EVERY_S = 0.0
write_queue.SHARE = 1.0
sink = RunWriter({directory!r})
with sink.fitting({{"catalogue": []}}):
    for number in range(10**6):
        sink.execution(made_parts.execution(number * 7, 7, made_parts.ONES))
        if number == 3:
            sink.stored()
            print("written", flush=True)
"""


def test_killed_in_the_middle(tmp_path):
    directory = tmp_path / "run"
    path = [str(Path(tr.__file__).parents[1]), str(Path(__file__).parent)]
    code = CHILD.format(path=path, directory=str(directory))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        run = tr.open_run(directory)
        counts = [check_whole(run.refresh())]  # readable while it is written
        give_up = time.monotonic() + LIMIT_S
        while len(set(counts)) < 3:
            assert time.monotonic() < give_up, "it does not grow"
            counts.append(check_whole(run.refresh()))
        with pytest.raises(tr.errors.RunError, match=f"is being written .process {process.pid}"):
            _write_into(directory)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    count = check_whole(tr.open_run(directory))
    assert not tr.open_run(directory).is_ended
    assert count >= counts[-1] >= counts[0] >= 28
    assert counts == sorted(counts)
    assert not count % 7
    with pytest.raises(tr.errors.RunError, match="holds one already"):
        _write_into(directory)  # the lock died with its process; the run is still no one else's


def _write_into(directory):
    with RunWriter(directory).fitting({}):
        pass


KINDS = [
    chosen("grad/a", microbatches=2, differs=True),
    chosen("grad/b", microbatches=2, differs=True, shape=(3,)),
    chosen("update/a"),
    chosen("update/b", mode="final"),
    chosen("loss", mode="sum", microbatches=2),
    chosen("input/x", mode=tr.every(2), microbatches=2, differs=True),
]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sets(st.sampled_from(range(len(KINDS)))),
            st.sampled_from(["go on", "look", "end the fit"]),
        ),
        max_size=6,
    )
)
def test_any_interleaving_reads_back_equal(pieces):
    with tempfile.TemporaryDirectory() as folder:
        sink, everything, latest = RunWriter(Path(folder, "run")), Records(), Records()
        waiting, step = list(pieces), 0
        while waiting or not step:
            latest.clear()
            with sink.fitting({"catalogue": []}):
                while waiting:
                    steps, numbers, then = waiting.pop(0)
                    done = execution(step, steps, [KINDS[n] for n in sorted(numbers)], replicas=2)
                    step += steps
                    sink.execution(done)
                    for part in done.parts:
                        for records in (everything, latest):
                            records.add(part)
                    if then == "look":
                        assert_same_records(filled(latest), Records(sink.stored))
                    if then == "end the fit":
                        break
                else:
                    step = step or 1
            assert_same_records(filled(latest), Records(sink.stored))
        assert_same_records(filled(everything), tr.open_run(Path(folder, "run")).records)


def filled(records):
    """Without tensors that have no values: a file has no rows of them."""
    kept = Records()
    for pair in records:
        if len(records[pair]):
            kept.add(records[pair])
    return kept
