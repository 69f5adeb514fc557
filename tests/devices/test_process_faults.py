"""Strangers at the port, processes that fall silent, a launcher that is killed."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tailrace as tr
from launched import free_port
from tailrace.devices.processes import heartbeat, rollcall
from tailrace.devices.processes.heartbeat import Heartbeat
from tailrace.devices.processes.rollcall import call_roll
from tailrace.errors import DistributedError
from waits import LIMIT_S, Clock, wait_until

SCRIPT = Path(__file__).parent / "stop_together.py"

# -- the roll call --------------------------------------------------------------------------------

STRANGERS = [
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1, 2]\n",
    b'"process"\n',
    b"[" * 3000 + b"\n",
    b'{"process": "1", "count": 2}\n',
    b'{"process": [], "count": 2}\n',
    b'{"process": 1, "count": 7}\n',
    b'{"process": 1, "count": 2, "token": "guessed"}\n',
    b'{"process": 1, "count": 2, "token": 5}\n',
    b"\xff\xfe\n",
    b"x" * 100_000,
]


def connect(port):
    give_up = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        except OSError:
            assert time.monotonic() < give_up
            time.sleep(0.02)


def test_strangers_do_not_disturb_the_roll_call(monkeypatch):
    monkeypatch.setattr(
        rollcall, "SILENT_S", 1e6
    )  # who waited for a silent one would wait for ever
    port, said = free_port(), {}

    def one(number):
        try:
            call_roll(f"127.0.0.1:{port}", 2, number, LIMIT_S, "secret")
            said[number] = None
        except DistributedError as error:
            said[number] = str(error)

    first = threading.Thread(target=one, args=(0,))
    first.start()
    with contextlib.ExitStack() as stack:
        for message in STRANGERS:
            connection = stack.enter_context(connect(port))  # all of them stay
            with contextlib.suppress(OSError):
                connection.sendall(message)
        assert first.is_alive()
        second = threading.Thread(target=one, args=(1,))
        second.start()
        first.join(2 * LIMIT_S)
        second.join(2 * LIMIT_S)
    assert said == {0: None, 1: None}


def test_a_process_without_the_token_is_not_one_of_them():
    port, said = free_port(), {}

    def one(number, token):
        try:
            call_roll(f"127.0.0.1:{port}", 2, number, 1.0, token)
        except DistributedError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=one, args=pair) for pair in ((0, "secret"), (1, "other"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert "process 1 did not arrive" in said[0]
    assert "is TAILRACE_TOKEN the same everywhere?" in said[1]


def test_a_process_that_reported_and_left_may_come_again(monkeypatch):
    port, seen_leaving, drop = free_port(), threading.Event(), rollcall.Roll.drop

    def dropped(self, connection):
        drop(self, connection)
        seen_leaving.set()

    monkeypatch.setattr(rollcall.Roll, "drop", dropped)
    first = threading.Thread(target=call_roll, args=(f"127.0.0.1:{port}", 3, 0, LIMIT_S))
    first.start()
    with connect(port) as connection:
        connection.sendall(b'{"process": 1, "count": 3}\n')
    assert seen_leaving.wait(LIMIT_S)
    others = [
        threading.Thread(target=call_roll, args=(f"127.0.0.1:{port}", 3, number, LIMIT_S))
        for number in (1, 2)
    ]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive()


def test_loopback_listens_on_loopback_alone():
    with rollcall.listening_at("127.0.0.1", free_port()) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with rollcall.listening_at("localhost", free_port()) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with rollcall.listening_at("a-name-that-only-others-know.invalid", free_port()) as server:
        assert server.getsockname()[0] in ("0.0.0.0", "::")


# -- signs of life --------------------------------------------------------------------------------


class Board:
    def __init__(self):
        self.written = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        self.written[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.written.items() if key.startswith(prefix)]


def test_who_is_silent_is_named(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    board, left = Board(), set()
    beats = [Heartbeat(board, n, 3, 0.5, left.__contains__) for n in range(3)]
    now = clock.monotonic
    for round_ in range(2):
        for one in beats:
            one.beat(round_)
    assert all(one.silent(now()) is None for one in beats)
    beats[1].beat(2)  # it has heard of the last signs of the others
    clock.now += 0.6  # longer than the limit
    for one in beats[:2]:
        one.beat(3)  # of the others, process 2 has nothing new
    assert "process 2 has been silent for 0.5 seconds, of 3 that" in beats[1].silent(now())
    left.add(2)
    beats[1].beat(4)
    assert beats[1].silent(now()) is None  # it has ended: the others do not wait for it
    late = now() + 1  # with no answer until then
    assert "process 0 of 3, the coordinator, has not answered for 0.5" in beats[1].silent(late)


def test_a_silent_coordinator_is_named_and_not_who_was_heard_earlier(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    board = Board()
    beats = [Heartbeat(board, n, 3, 8.0, lambda number: False) for n in range(3)]
    for one in beats:
        one.beat(1)
    beats[1].beat(2)  # of all
    clock.now += 1
    beats[1].beat(3)  # answered, before the next reports of the others; then there are no answers
    clock.now += 7.5  # longer than the limit since those reports, shorter since the answer
    assert beats[1].silent(clock.now) is None
    clock.now += 1
    assert "process 0 of 3, the coordinator, has not answered for 8" in beats[1].silent(clock.now)


# -- under the launcher ---------------------------------------------------------------------------


def launched(stopped=None, heartbeat_s=60, processes=2):
    source = os.pathsep.join([str(Path(tr.__file__).parents[1])])
    options = json.dumps({"stopped": stopped, "heartbeat_s": heartbeat_s})
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tailrace", "launch", "-n", str(processes)),
            *("--devices", "1", str(SCRIPT), options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"},
    )


def ready(process, count=2):
    """The process ids of all, and where they listen, once all are there."""
    found = {}
    for line in process.stdout:
        if match := re.search(r"READY (\d+) (\d+) (.*)", line):
            found[int(match[1])] = (int(match[2]), json.loads(match[3]))
        if len(found) == count:
            return found
    raise AssertionError("it ended before")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes while it is read
        return False


def wait_until_gone(pids):
    wait_until(lambda: not any(map(is_alive, pids)), "processes are left")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_the_others(number):
    process = launched()
    try:
        found = ready(process)
        pids = [pid for pid, _ in found.values()]
        # 0100007F: 127.0.0.1 as the kernel writes it. Only process 0 listens at that port.
        assert found[0][1]
        assert all(address.endswith("0100007F") for address in found[0][1])
        process.send_signal(number)
        wait_until_gone(pids)
        assert process.wait(LIMIT_S) == (128 + number if number == signal.SIGTERM else -number)
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped_ends_the_others_with_a_sentence(stopped):
    # A busy machine may leave any of them without a core for some seconds.
    process = launched(stopped, heartbeat_s=15)
    try:
        found = ready(process)
        said = process.stdout.read()
        assert process.wait(LIMIT_S) == 1
    finally:
        process.kill()
        process.stdout.close()
    named = (
        "process 1 has been silent for 15" if stopped else "process 0 of 2, the coordinator, has"
    )
    assert named in said
    wait_until_gone([pid for pid, _ in found.values()])
