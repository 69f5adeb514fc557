"""A run of any length takes the same memory: nothing is kept of an execution once it is written."""

import gc
import tracemalloc

import numpy as np
from made_parts import chosen, execution

from tailrace.records.history import History
from tailrace.runs import write_queue
from tailrace.runs.writer import RunWriter

EXECUTIONS, STEPS = 2_000, 5


def measured(number):
    gc.collect()
    return number, tracemalloc.get_traced_memory()[0], len(gc.get_objects())


def test_a_writer_keeps_nothing_of_what_it_has_written(tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 3600.0)
    ones = [chosen("grad/a"), chosen("update/b", shape=(3,)), chosen("grad/c", mode="final")]
    sink = RunWriter(tmp_path / "run")
    seen = []
    with sink.fitting({"catalogue": []}):
        tracemalloc.start()
        for number in range(EXECUTIONS):
            sink.execution(execution(number * STEPS, STEPS, ones))
            if number % 50 == 49:
                sink.flush()
            if number % (EXECUTIONS // 10) == EXECUTIONS // 10 - 1:
                seen.append(measured(number))
        tracemalloc.stop()
    half = len(seen) // 2  # until then, what was there before is replaced by what is counted
    _, first_bytes, first_objects = seen[half]
    _, last_bytes, last_objects = seen[-1]
    steps = (len(seen) - 1 - half) * EXECUTIONS // len(seen) * STEPS
    # A step has 20 bytes of values, and more of numbers.
    assert last_objects - first_objects < steps / 50, seen
    assert last_bytes - first_bytes < 4 * steps, seen


def test_a_history_takes_no_more_than_its_values():
    """Values come as parts of larger buffers, which are not kept."""
    history = History()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(2_000):
        buffer = np.zeros((10_000, 1, 1), np.float32)  # results of taps lie in it too
        history.add({"loss": buffer[:5]})
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(history) == 10_000
    assert held < 3 * 10_000 * 4, held
