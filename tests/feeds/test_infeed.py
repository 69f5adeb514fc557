"""The infeed: elements staged ahead, in order, once each, in bounded memory."""

import threading
from collections import deque

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.errors import DataExhausted, FeedError, OptionError, ProducerError, ProgramError
from tailrace.feeds.reader import Reader
from threads import infeed_threads

WAIT_S = 300  # only ever waited for when something is broken


def numbers(count):
    return [np.int32(i) for i in range(count)]


def device():
    return jax.devices()[0]


def over(replicas):
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",))
    return NamedSharding(mesh, PartitionSpec(None, "replica"))


class Ticket:
    """An execution that ends when the test says so."""

    def __init__(self):
        self.awaited, self.over = threading.Event(), threading.Event()

    def block_until_ready(self):
        self.awaited.set()
        assert self.over.wait(WAIT_S)
        return self


def ended():
    ticket = Ticket()
    ticket.over.set()
    return ticket


def take(queue, count, then=None, ticket=None):
    staged = queue.take(count, device(), then=then)
    queue.started(ended() if ticket is None else ticket)
    return np.asarray(staged.device[0]).tolist()


# -- nothing lost, nothing twice ----------------------------------------------------------------


class Interleaving(RuleBasedStateMachine):
    """Any programs, in any order, with any guesses: always the next elements of a plain list."""

    @initialize(prefetch=st.integers(0, 3), length=st.integers(1, 60), replicas=st.integers(1, 2))
    def start(self, prefetch, length, replicas):
        self.queue = tr.InfeedQueue(iter(numbers(length)), prefetch)
        self.queue.bind_replicas(replicas)
        self.replicas, self.length, self.next = replicas, length, 0
        self.sharding = device() if replicas == 1 else over(replicas)

    @rule(count=st.integers(0, 7), then=st.one_of(st.none(), st.integers(0, 7)), data=st.data())
    def execute(self, count, then, data):
        wanted = count * self.replicas
        if self.next + wanted > self.length:
            with pytest.raises(DataExhausted, match=f"Asked for {wanted}"):
                self.queue.take(count, self.sharding, then=then)
            return
        staged = self.queue.take(count, self.sharding, then=then)
        expected = list(range(self.next, self.next + wanted))
        assert np.asarray(staged.device[0]).reshape(-1).tolist() == expected
        self.next += wanted
        outcome = data.draw(st.sampled_from(["runs", "fails", "reads a part"]))
        if outcome == "fails":  # before it started
            self.queue.put_back(staged, used=0)
            self.next -= wanted
            return
        self.queue.started(ended())
        if outcome == "reads a part":
            used = data.draw(st.integers(0, count)) * self.replicas
            self.queue.put_back(staged, used)
            self.next -= wanted - used

    @rule(at_most=st.integers(0, 80))
    def look_ahead(self, at_most):
        assert self.queue.remaining(at_most) == min(at_most, self.length - self.next)

    @rule()
    def rest(self):
        self.queue.rest()

    @rule()
    def look_at_the_form(self):
        assert self.queue.spec().leaves[0].dtype == np.int32

    @invariant()
    def position_is_known(self):
        if hasattr(self, "queue"):
            assert self.queue.position == self.next

    def teardown(self):
        if hasattr(self, "queue"):
            self.queue.close()


Interleaving.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestInterleaving = pytest.mark.cpu(Interleaving.TestCase)  # with two replicas


def test_programs_of_different_lengths_share_a_queue():
    infeed, outfeed = tr.InfeedQueue(iter(numbers(40)), prefetch=2), tr.OutfeedQueue()

    def reading(n):
        def body(x):
            outfeed.enqueue(x)

        return tr.compile(lambda: tr.repeat(n, body, infeed=infeed))

    three, five = reading(3), reading(5)
    for program in (three, three, five, three, five, five, three):
        program()
    assert outfeed.dequeue().tolist() == list(range(27))
    assert infeed.position == 27


def test_an_execution_that_lacks_elements_consumes_nothing():
    infeed, other = tr.InfeedQueue(iter(numbers(5))), tr.InfeedQueue(iter(numbers(50)))
    add = lambda v, x: v + x  # noqa: E731

    def both(n):
        return tr.compile(
            lambda v: tr.repeat(n, add, tr.repeat(n, add, v, infeed=other), infeed=infeed)
        )

    with pytest.raises(DataExhausted, match=r"Asked for 8, found 5 \(after 0 delivered before\)"):
        both(8)(0)
    assert (infeed.position, other.position) == (0, 0)
    assert both(4)(0) == 2 * 6


def test_a_dispatch_that_fails_puts_back(monkeypatch):
    infeed = tr.InfeedQueue(iter(numbers(8)))
    program = tr.compile(lambda v: tr.repeat(4, lambda v, x: v + x, v, infeed=infeed))
    from tailrace.program.running.executable import Executable

    plain = Executable.compile

    def broken(self, *args):
        raise MemoryError("no room")

    monkeypatch.setattr(Executable, "compile", broken)
    with pytest.raises(MemoryError):
        program(0)
    assert infeed.position == 0
    monkeypatch.setattr(Executable, "compile", plain)
    assert [int(program(0)), int(program(0))] == [6, 22]


def test_a_move_to_the_device_that_fails_puts_back(monkeypatch):
    infeed = tr.InfeedQueue(iter(numbers(8)))
    plain = Reader.to_device
    failures = [MemoryError("no room")]

    def fails_once(self, *args):
        if failures:
            raise failures.pop()
        return plain(self, *args)

    monkeypatch.setattr(Reader, "to_device", fails_once)
    with pytest.raises(MemoryError, match="no room"):
        take(infeed, 3)
    assert take(infeed, 3) == [0, 1, 2]


# -- ahead of time, in bounded memory -----------------------------------------------------------


class Counted:
    """An iterator that knows how many elements were read."""

    def __init__(self, count):
        self.read, self.count = 0, count

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == self.count:
            raise StopIteration
        self.read += 1
        return np.int32(self.read - 1)


def staging_of(queue):
    """What the thread that reads ahead does: races between it and a take are provoked there."""
    return queue._staging


def settle(queue):
    """Wait until the thread has nothing to do, or waits for an execution."""
    for _, future in list(staging_of(queue).staged):
        future.exception(WAIT_S)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_prefetch_is_the_number_of_blocks_read_ahead(prefetch):
    source = Counted(100)
    with tr.InfeedQueue(source, prefetch) as queue:
        for number in range(4):
            assert take(queue, 5) == list(range(5 * number, 5 * number + 5))
            settle(queue)
            assert source.read == 5 * (number + 1 + prefetch)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_at_most_one_more_block_than_prefetch_is_alive(prefetch):
    """As long as executions run, no block is read that would be one too many."""
    source, tickets = Counted(100), []
    with tr.InfeedQueue(source, prefetch) as queue:
        for _ in range(prefetch + 1):
            tickets.append(Ticket())
            take(queue, 5, ticket=tickets[-1])
        # All that may be alive are in executions now: the thread waits for the first to end.
        assert tickets[0].awaited.wait(WAIT_S)
        assert source.read == 5 * (prefetch + 1)
        tickets[0].over.set()
        if prefetch > 1:
            assert tickets[1].awaited.wait(WAIT_S)
            assert source.read == 5 * (prefetch + 2)
        for ticket in tickets:
            ticket.over.set()


class Between(deque):
    """Calls functions between a change of its content and what the caller does next."""

    def __init__(self, content=(), *, appended=lambda: None, popped=lambda: None):
        super().__init__(content)
        self.appended, self.popped = appended, popped

    def append(self, one):
        super().append(one)
        self.appended()

    def popleft(self):
        found = super().popleft()
        self.popped()
        return found


def test_a_block_that_is_being_taken_is_counted():
    """The thread counts blocks while a staged one becomes a taken one: no other is read for it."""
    source, tickets, go_on = Counted(100), [Ticket() for _ in range(3)], threading.Event()

    def let_the_thread_count():
        go_on.set()
        tickets[0].awaited.wait(0.2)  # not now: it would not find the block

    with tr.InfeedQueue(source, prefetch=2) as queue:
        take(queue, 5, ticket=tickets[0])
        settle(queue)
        staging = staging_of(queue)
        staging.worker().submit(go_on.wait, WAIT_S)  # before the block that the next take stages
        take(queue, 5, ticket=tickets[1])
        staging.staged = Between(staging.staged, popped=let_the_thread_count)
        take(queue, 5, ticket=tickets[2])
        assert tickets[0].awaited.wait(WAIT_S)
        read = source.read
        for ticket in tickets:
            ticket.over.set()
    assert read == 15


def test_a_block_that_is_being_started_is_counted_once():
    """The thread counts blocks while a taken one becomes a running one: it waits for none."""
    ticket, read = Ticket(), threading.Event()
    reached, reading = threading.Event(), threading.Event()

    def elements():
        for number in range(100):
            if number == 9:  # the last one of the second block
                reached.set()
                assert reading.wait(WAIT_S)
            if number == 14:  # of the third, for which there is room
                read.set()
            yield np.int32(number)

    def let_the_thread_count():
        reading.set()
        staging_of(queue).staged[0][1].exception(WAIT_S)  # the second block is there
        ticket.awaited.wait(0.2)  # not now: it would find the first one twice

    with tr.InfeedQueue(elements(), prefetch=2) as queue:
        staging_of(queue).running = Between(appended=let_the_thread_count)
        queue.take(5, device())
        assert reached.wait(WAIT_S)
        queue.started(ticket)
        waited = ticket.awaited.is_set()
        ticket.over.set()
        assert read.wait(WAIT_S)
    assert not waited


def test_without_prefetch_nothing_is_read_before_the_execution_ends():
    source, first = Counted(100), Ticket()
    with tr.InfeedQueue(source, prefetch=0) as queue:
        take(queue, 5, ticket=first)
        assert source.read == 5
        second = threading.Thread(target=take, args=(queue, 5))
        second.start()
        assert first.awaited.wait(WAIT_S)
        assert source.read == 5
        first.over.set()
        second.join(WAIT_S)
        assert source.read == 10


def test_what_is_known_to_come_next_is_staged_and_no_more():
    source = Counted(100)
    with tr.InfeedQueue(source, prefetch=1) as queue:
        take(queue, 5, then=2)
        settle(queue)
        assert source.read == 7
        take(queue, 2, then=0)
        settle(queue)
        assert source.read == 7


def test_an_execution_that_fails_does_not_stop_the_thread():
    class Failing:
        def block_until_ready(self):
            raise RuntimeError("the device is gone")

    with tr.InfeedQueue(numbers(30)) as queue:
        for number in range(5):
            assert take(queue, 2, ticket=Failing()) == [2 * number, 2 * number + 1]


# -- failures -----------------------------------------------------------------------------------


def test_a_producers_exception_reaches_the_caller_with_its_traceback():
    def failing():
        yield from numbers(6)
        raise OSError("disk on fire")

    infeed = tr.InfeedQueue(failing())
    program = tr.compile(lambda v: tr.repeat(4, lambda v, x: v + x, v, infeed=infeed))
    assert program(0) == 6
    for _ in range(2):
        with pytest.raises(ProducerError, match="raised OSError after 6 elements: disk") as info:
            program(0)
        assert isinstance(info.value.__cause__, OSError)
        frames = info.value.__cause__.__traceback__
        while frames.tb_next is not None:
            frames = frames.tb_next
        assert frames.tb_frame.f_code.co_name == "failing"
    two = tr.compile(lambda v: tr.repeat(2, lambda v, x: v + x, v, infeed=infeed))
    assert two(0) == 4 + 5


def test_a_body_that_does_not_trace_consumes_nothing():
    infeed = tr.InfeedQueue(iter(numbers(4)))
    with pytest.raises(ProgramError, match="does not fit"):
        tr.compile(lambda v: tr.repeat(2, lambda v: v, v, infeed=infeed))(0)
    assert tr.compile(lambda v: tr.repeat(4, lambda v, x: v + x, v, infeed=infeed))(0) == 6


@pytest.mark.parametrize("prefetch", [-1, True, 1.5, "1"])
def test_a_bad_prefetch(prefetch):
    with pytest.raises(OptionError, match=f"at least 0. Received: prefetch={prefetch!r}"):
        tr.InfeedQueue([1.0], prefetch)


def test_resident_needs_batches():
    with pytest.raises(OptionError, match=r"a dataset made by tr.batches. Received: list"):
        tr.InfeedQueue([1.0], resident=True)


# -- life ---------------------------------------------------------------------------------------


def test_a_with_block_ends_the_thread_also_after_an_exception():
    queue = tr.InfeedQueue(numbers(9))

    def use_and_fail():
        with queue:
            take(queue, 2)
            assert infeed_threads()
            raise KeyError

    with pytest.raises(KeyError):
        use_and_fail()
    assert not infeed_threads()
    queue.close()
    for use in (queue.spec, lambda: take(queue, 2), lambda: queue.remaining(1)):
        with pytest.raises(FeedError, match="is closed and feeds no program. Make a new one"):
            use()


def test_a_queue_that_rests_goes_on_later():
    with tr.InfeedQueue(iter(numbers(9))) as queue:
        assert take(queue, 2) == [0, 1]
        queue.rest()
        assert not infeed_threads()
        assert take(queue, 3) == [2, 3, 4]


def test_restart_and_another_dataset():
    with tr.InfeedQueue(numbers(5)) as queue:
        assert take(queue, 2) == [0, 1]
        queue.restart()
        assert queue.position == 0
        assert take(queue, 3) == [0, 1, 2]
        queue.restart([np.int32(7)] * 3)
        assert take(queue, 3) == [7, 7, 7]


def test_epochs_of_shuffled_batches_differ():
    data = tr.batches(np.arange(20, dtype=np.int32), 5, shuffle=True)
    with tr.InfeedQueue(data) as queue:
        first = take(queue, 4)
        queue.restart(epoch=1)
        second = take(queue, 4)
        queue.restart(epoch=0)
        assert take(queue, 4) == first
    assert first != second
    assert sorted(np.ravel(first)) == sorted(np.ravel(second)) == list(range(20))


def test_adopting_another_queue():
    with tr.InfeedQueue(numbers(5)) as queue, tr.InfeedQueue(iter(numbers(9))) as other:
        take(queue, 2)
        take(other, 4)
        queue.adopt(other)
        assert queue.position == 4
        assert take(queue, 3) == [4, 5, 6]


def test_padding_repeats_the_last_element():
    with tr.InfeedQueue(numbers(5)) as queue:
        take(queue, 2)
        queue.pad(3, 6)
        assert take(queue, 6) == [2, 3, 4, 4, 4, 4]


def test_its_text_is_short():
    assert repr(tr.InfeedQueue(numbers(1000))) == "InfeedQueue(list, prefetch=1)"


# -- what arrives on the device -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_dtypes_stay_what_they_are_until_the_program(dtype, replicas):
    data = [np.arange(i, i + 4).astype(dtype) for i in range(12)]
    infeed, outfeed = tr.InfeedQueue(data), tr.OutfeedQueue()

    def body(x):
        assert x.dtype == dtype
        outfeed.enqueue(x)

    tr.compile(lambda: tr.repeat(4, body, infeed=infeed), replicas=replicas)()
    found = outfeed.dequeue()
    assert found.dtype == dtype
    assert_bits_equal(found.reshape(-1, 4), np.stack(data[: 4 * replicas]))


def test_64_bits_are_noted_once(caplog):
    for _ in range(2):
        infeed = tr.InfeedQueue([np.arange(3)] * 2)
        found = tr.compile(lambda: tr.repeat(2, lambda v, x: v + x, jnp.zeros(3, int), infeed))()  # noqa: B023
        assert found.dtype == np.int32
    assert [r.getMessage()[:35] for r in caplog.records] == ["int64 data is narrowed to int32 on "]


def test_memory_that_the_dataset_reuses_is_copied():
    def one_buffer():
        buffer = np.zeros(16, np.float32)
        for i in range(6):
            buffer[:] = i
            yield buffer

    with tr.InfeedQueue(one_buffer()) as queue:
        staged = queue.take(6, device())
        assert np.asarray(staged.device[0])[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resident_dataset_gives_the_same_blocks(replicas, shuffle):
    # Keys out of order, 64 bits to narrow, bytes to keep.
    arrays = {
        "z": np.arange(23).astype(np.uint8),
        "a": np.random.default_rng(0).normal(size=(23, 2)),
    }
    data = tr.batches(arrays, 2, shuffle=shuffle, seed=3, repeat=True)
    sharding = device() if replicas == 1 else over(replicas)
    with tr.InfeedQueue(data, resident=True) as resident, tr.InfeedQueue(data) as plain:
        assert resident.spec() == plain.spec()
        for count, then in ((3, None), (0, None), (5, 2), (2, None), (1, 0), (4, None)):
            blocks = []
            for queue in (resident, plain):
                queue.bind_replicas(replicas)
                staged = queue.take(count, sharding, then=then)
                queue.started(ended())
                blocks.append(staged.device)
                on_host = [(count * replicas, 2)] if queue is resident else None
                assert on_host in (None, [leaf.shape for leaf in staged.host])  # indices alone
            assert blocks[0][0].sharding.is_equivalent_to(blocks[1][0].sharding, blocks[1][0].ndim)
            assert_bits_equal(blocks[0], blocks[1])


def test_a_resident_dataset_puts_back_and_ends():
    data = tr.batches(np.arange(10, dtype=np.float32), 2)
    with tr.InfeedQueue(data, resident=True) as queue:
        staged = queue.take(3, device())
        queue.put_back(staged, used=1)
        assert take(queue, 2) == [[2, 3], [4, 5]]
        with pytest.raises(DataExhausted, match="Asked for 3, found 2"):
            take(queue, 3)
        assert take(queue, 2) == [[6, 7], [8, 9]]


def test_a_resident_dataset_has_batches_of_one_size():
    data = tr.batches(np.arange(10.0), 4, drop_remainder=False)
    with pytest.raises(tr.TailraceError, match=r"batches of one size. Use drop_remainder=True"):
        tr.InfeedQueue(data, resident=True).spec()


def test_a_program_ends_while_its_producer_waits_for_the_result():
    go_on = threading.Event()

    def elements():
        yield from numbers(4)
        assert go_on.wait(WAIT_S)
        yield from numbers(4)

    infeed = tr.InfeedQueue(elements())
    program = tr.compile(lambda t: tr.repeat(4, lambda t, x: t + x, t, infeed=infeed))
    assert int(program(jnp.int32(0))) == 6  # although the next four are being staged
    assert not go_on.is_set()
    go_on.set()
    assert int(program(jnp.int32(0))) == 6
