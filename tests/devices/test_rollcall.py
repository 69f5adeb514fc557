"""Who does not arrive is named, before JAX has anything to wait for."""

import socket
import threading

import numpy as np
import pytest

import tailrace as tr
from launched import free_port
from tailrace.data.adapters import as_dataset
from tailrace.devices.processes import distributed, rollcall
from tailrace.devices.processes.introduction import in_a_cluster
from tailrace.devices.processes.meeting import ROUNDS
from tailrace.devices.processes.rollcall import call_roll
from tailrace.errors import DistributedError
from waits import LIMIT_S, Clock


def arrive(numbers, count, timeout_s=LIMIT_S, counts=None, meanwhile=None):
    """Call the roll from threads; the error of each, or None."""
    address = f"127.0.0.1:{free_port()}"
    found = {}

    def one(place, number):
        try:
            call_roll(address, (counts or {}).get(number, count), number, timeout_s)
            found[place] = None
        except DistributedError as error:
            found[place] = str(error)

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(numbers)]
    for thread in threads:
        thread.start()
    if meanwhile is not None:
        meanwhile()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return [found[place] for place in range(len(numbers))]


def test_all_arrive():
    assert arrive([2, 0, 1], 3) == [None, None, None]


def test_missing_ones_are_named_to_all(monkeypatch):
    clock, reported, contradiction = Clock(), threading.Event(), rollcall.contradiction
    monkeypatch.setattr(rollcall, "time", clock)
    monkeypatch.setattr(
        rollcall, "contradiction", lambda *about: reported.set() or contradiction(*about)
    )

    def time_is_up():
        assert reported.wait(LIMIT_S)  # process 2
        clock.now += LIMIT_S + 1

    # The limit is also that of sockets, in real time: long, so that no answer comes too late.
    said = arrive([0, 2], 4, timeout_s=LIMIT_S, meanwhile=time_is_up)
    assert len(set(said)) == 1
    text = f"All 4 processes start together, but processes 1, 3 did not arrive within {LIMIT_S:g}"
    assert text in said[0]


def test_a_missing_coordinator_is_named():
    (said,) = arrive([1], 2, timeout_s=0.3)
    assert "Process 0, the coordinator, did not arrive within 0.3 seconds: nothing listens" in said


def test_a_report_that_comes_back_is_no_answer():
    """As a connection reads that has met itself, because process 0 does not listen yet."""
    returned = threading.Event()

    def echo(server):
        with server, server.accept()[0] as connection:
            connection.sendall(connection.recv(4096))
        returned.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        echoing = threading.Thread(target=echo, args=(server,))
        second = threading.Thread(target=call_roll, args=(f"127.0.0.1:{port}", 2, 1, LIMIT_S))
        echoing.start()
        second.start()
        assert returned.wait(LIMIT_S)
    echoing.join(LIMIT_S)
    call_roll(f"127.0.0.1:{port}", 2, 0, LIMIT_S)  # it comes again
    second.join(LIMIT_S)
    assert not second.is_alive()


def test_processes_that_contradict_each_other():
    said = arrive([0, 1], 2, counts={1: 3})
    assert "Process 0 says 2, process 1 says 3" in said[0]
    assert said[0] == said[1]
    said = arrive([0, 1, 1], 3)
    assert all("two say that they are process 1 of 3" in one for one in said[:1])


def test_without_other_processes_nothing_happens(monkeypatch):
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert tr.distributed.initialize() == 1
    assert tr.distributed.initialize("127.0.0.1:1", 1, 0) == 1
    assert distributed.meet({"a": 1}) == [{"a": 1}]
    assert tr.distributed.writes()
    assert tr.distributed.process_count() == 1
    data = [1, 2, 3]
    assert tr.distributed.share(data, 1) is data


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("127.0.0.1:1", 2, None), "Give all three, or none"),
        (("127.0.0.1:1", 2, 2), "numbered from 0 to num_processes - 1. Received: process_id=2"),
        (("nowhere", 2, 1), "given as host:port"),
    ],
)
def test_bad_arguments(arguments, expected):
    with pytest.raises(DistributedError, match=expected):
        tr.distributed.initialize(*arguments)


def test_bad_environment(monkeypatch):
    monkeypatch.setenv(distributed.COORDINATOR, "127.0.0.1:1")
    monkeypatch.setenv(distributed.PROCESSES, "two")
    with pytest.raises(DistributedError, match="TAILRACE_PROCESSES='two'"):
        tr.distributed.initialize()


def test_clusters_are_detected(monkeypatch):
    assert not in_a_cluster()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert not in_a_cluster()
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert in_a_cluster()


class Board:
    """What processes have written, as the coordination service keeps it."""

    def __init__(self, written):
        self.written = dict(written)

    def key_value_set(self, key, value):
        self.written[key] = value

    def key_value_delete(self, key):
        self.written.pop(key, None)

    def key_value_try_get(self, key):
        if key not in self.written:
            raise RuntimeError("NOT_FOUND")
        return self.written[key]

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.written:
            raise RuntimeError("DEADLINE_EXCEEDED: timed out")
        return self.written[key]


@pytest.fixture
def meeting(monkeypatch):
    """This is process 0 of 3; the test says what the others have written."""

    def make(**written):
        board = Board({key.replace("_", "/"): value for key, value in written.items()})
        monkeypatch.setattr(distributed.internals, "coordination_client", lambda: board)
        return board

    monkeypatch.setattr(distributed.jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.jax, "process_index", lambda: 0)
    monkeypatch.setattr(ROUNDS, "number", 0)
    monkeypatch.setattr(ROUNDS, "timeout_s", 0.01)
    return make


def test_processes_hear_each_other(meeting):
    board = meeting(tailrace_0_1='{"a": 2}', tailrace_0_2='{"a": 3}')
    assert distributed.meet({"a": 1}) == [{"a": 1}, {"a": 2}, {"a": 3}]
    for number in (1, 2):
        for process in (1, 2):
            board.written[f"tailrace/{number}/{process}"] = "{}"
        distributed.meet({})
    assert "tailrace/0/0" not in board.written  # what everybody has read is cleared away


def test_a_process_that_does_not_arrive_later_is_named(meeting):
    meeting(tailrace_0_2="{}")
    with pytest.raises(
        DistributedError, match=r"process 1 of 3 did not arrive within 0.01 seconds"
    ):
        distributed.meet({})


def test_a_process_that_has_left_is_named(meeting):
    meeting(tailrace_0_1="{}", tailrace_left_2="1")
    with pytest.raises(DistributedError, match="Process 2 has ended, and the others still have"):
        distributed.meet({})


def test_shares_cover_the_dataset():
    elements = list(range(11))
    parts = [distributed.Share(elements, 4, 2, process) for process in range(2)]
    assert [list(part) for part in parts] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10]]
    assert [part.length for part in parts] == [6, 5]


def test_shares_of_shuffled_batches_follow_the_epochs():
    arrays = np.arange(32, dtype=np.float32)
    data = tr.batches(arrays, 2, shuffle=True, seed=3)
    whole = as_dataset(data)
    parts = [distributed.Share(data, 2, 2, process) for process in range(2)]
    for epoch in range(2):
        in_turn = zip(*(part.iterate(epoch) for part in parts), strict=True)
        together = [element for pair in in_turn for element in pair]
        np.testing.assert_array_equal(together, list(whole.iterate(epoch)))
    assert not parts[0].endless
    assert distributed.Share(tr.batches(arrays, 2, repeat=True), 2, 2, 0).endless
