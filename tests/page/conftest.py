"""Runs and servers for the tests of what shows them."""

import contextlib
import http.client
import json
import threading
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
from made_runs import MadeRun, bell, falling

NAMES = [
    *(f"activation/layer{n}" for n in range(4)),
    *(f"grad/layer{n}/{part}" for n in range(4) for part in ("w", "b")),
]


def healthy_stats(steps, names=NAMES):
    """Statistics that nothing is wrong with."""
    shape = (steps, len(names))
    std = np.full(shape, 0.01)
    zero = np.broadcast_to([0.5 if n.startswith("activation") else 0.0 for n in names], shape)
    return {"std": std, "min": -3 * std, "max": 3 * std, "zero": zero}


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


class Served:
    """A page that is being served."""

    def __init__(self, address):
        self.address = address
        parts = urlsplit(address)
        self.port, self.token = parts.port, parts.query.removeprefix("token=")

    def get(self, path, host="127.0.0.1", method="GET"):
        """Status, headers and body of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def ask(self, question, **query):
        """What the server answers to the page."""
        status, _, body = self.get(f"/{self.token}/api/{question}?{urlencode(query)}")
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def served():
    """Serves runs as long as a test runs."""
    from tailrace.page.server.serve import serve

    stack = contextlib.ExitStack()

    def start(*directories):
        ready, stop, told = threading.Event(), threading.Event(), []

        def announce(text):
            told.append(text.split()[2])
            ready.set()

        thread = threading.Thread(
            target=serve, args=(directories,), kwargs={"announce": announce, "stop": stop}
        )
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(stop.set)
        assert ready.wait(30)
        return Served(told[0])

    yield start
    stack.close()
