"""Runs and servers for the tests of what shows them."""

import contextlib
import threading

import numpy as np
import pytest
from made_runs import NAMES, MadeRun, bell, falling, healthy_stats
from served_page import Served


@pytest.fixture
def made(tmp_path):
    """A run of 200 steps with statistics and histograms."""
    run = MadeRun(tmp_path / "made", NAMES, NAMES[4:6])
    for part in np.array_split(falling(200), 4):
        steps = len(part)
        run.grow(
            {"loss": part, "accuracy": 1 - part / 3},
            stats=healthy_stats(steps),
            histograms=bell(-7, steps, 2),
        )
    return run


@pytest.fixture
def served():
    """Serves runs as long as a test runs."""
    from tailrace.page.server.serve import serve

    stack = contextlib.ExitStack()

    def start(*directories):
        ready, stop, addresses = threading.Event(), threading.Event(), []

        def announce(text):
            addresses.append(text.split()[2])
            ready.set()

        thread = threading.Thread(
            target=serve, args=(directories,), kwargs={"announce": announce, "stop": stop}
        )
        thread.start()
        stack.callback(thread.join, 120)
        stack.callback(stop.set)
        assert ready.wait(120)
        return Served(addresses[0])

    yield start
    stack.close()
