"""The thread behind an infeed: in order, with exceptions, and never in the way of an exit."""

import subprocess
import sys
import threading

import pytest

from tailrace.feeds.background import Worker


def test_calls_run_in_order_and_exceptions_come_back():
    worker, done = Worker("tailrace-test"), []
    futures = [worker.submit(done.append, number) for number in range(5)]
    broken = worker.submit(lambda: 1 / 0)
    after = worker.submit(len, done)
    assert after.result(timeout=300) == 5
    assert done == list(range(5))
    assert all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        broken.result(timeout=300)
    worker.stop()
    assert "tailrace-test" not in [thread.name for thread in threading.enumerate()]


def test_a_dataset_that_blocks_does_not_keep_the_process_alive():
    program = """
import threading, tailrace as tr
def stuck():
    yield 1.0
    threading.Event().wait()
infeed = tr.InfeedQueue(stuck())
print(tr.compile(lambda x: tr.repeat(1, lambda x, y: x + y, x, infeed=infeed))(1.0))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "2.0"), done.stderr
