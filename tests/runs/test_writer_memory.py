"""A run of any length takes the same memory: nothing is kept of an execution once it is written."""

import asyncio
import gc
import itertools
import tracemalloc

import numpy as np
import zarr
from made_parts import chosen, execution

from tailrace.records import parts
from tailrace.records.history import History
from tailrace.runs import write_queue
from tailrace.runs.tables.columns import Columns
from tailrace.runs.writer import RunWriter

STEPS = 5
SETTLING, WRITES, EXECUTIONS = 30, 40, 50
"""Short writes before anything is measured; long ones that are; executions in a long one."""
ROUNDS = 4


def measured():
    gc.collect()
    return tracemalloc.get_traced_memory()[0], len(gc.get_objects())


def test_a_writer_keeps_nothing_of_what_it_has_written(tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 3600.0)
    ones = [chosen("grad/a"), chosen("update/b", shape=(3,)), chosen("grad/c", mode="final")]
    sink = RunWriter(tmp_path / "run")
    first_steps = itertools.count(step=STEPS)

    def write(executions):
        for _ in range(executions):
            sink.execution(execution(next(first_steps), STEPS, ones))
        sink.flush()

    with sink.fitting({"catalogue": []}):
        tracemalloc.start()
        # By writes, not by executions: what was allocated before tracing began is replaced by what is
        # counted, write by write.
        for _ in range(SETTLING):
            write(5)
        before, grown = measured(), []
        for _ in range(ROUNDS):
            for _ in range(WRITES // ROUNDS):
                write(EXECUTIONS)
            after = measured()
            grown.append(np.subtract(after, before))
            before = after
        tracemalloc.stop()
    steps = WRITES // ROUNDS * EXECUTIONS * STEPS
    # Of each round the least: another thread of the process, such as that of the test runner, may
    # allocate something once. A step has 20 bytes of values, and more of numbers.
    grown_bytes, grown_objects = np.min(grown, axis=0)
    assert grown_objects < steps / 100
    assert grown_bytes < 2 * steps
    assert parts._grid.cache_info().currsize == 0, "tags of long executions are megabytes"


def test_a_history_takes_no_more_than_its_values():
    """Values come as parts of larger buffers, which are not kept."""
    history = History()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(2_000):
        buffer = np.zeros((10_000, 1, 1), np.float32)  # results of taps are in it too
        history.add({"loss": buffer[:5]})
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(history) == 10_000
    assert held < 3 * 10_000 * 4, held


def test_no_pool_of_threads_compresses_chunks(monkeypatch):
    """Each of its threads would keep memory for the largest chunk that it has seen."""
    handed = []
    hand = asyncio.to_thread

    def counted(*args, **kwargs):
        handed.append(args)
        return hand(*args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    group = zarr.create_group(zarr.storage.MemoryStore())
    columns = Columns(group, "step")
    columns.add_column("loss", np.dtype(np.float32), (), ())
    for again in range(3):
        if again == 2:  # another process goes on, in the middle of a chunk
            columns = Columns.reopened(group, "step", columns.committed)
        columns.append(30_000, {"loss": np.full(30_000, again, np.float32)})
        columns.write()
        columns.counted()
    assert not handed
    np.testing.assert_array_equal(group["loss"][:], np.repeat(np.float32([0, 1, 2]), 30_000))
    assert handed  # by Zarr's own codec, which reads the same files
