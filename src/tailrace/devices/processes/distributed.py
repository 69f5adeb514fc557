"""Several processes as one program: joining them, and agreement before each execution.

    process 0 ─┐                        every process runs the same script, feeds its local replicas,
    process 1 ─┼─ roll call ─▶ jax ─▶   and sees the same history and records; process 0 writes
    process 2 ─┘

A collective waits for all processes. One that is missing, or that runs another program, would make the
others wait forever, without a message. So there is a roll call before JAX joins them, and they compare
what they are about to run before each dispatch.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from tailrace.base.checks import check_number
from tailrace.base.messages import logger
from tailrace.data.adapters import as_dataset
from tailrace.data.dataset import Dataset
from tailrace.devices.environment import COORDINATOR as COORDINATOR
from tailrace.devices.environment import PROCESS as PROCESS
from tailrace.devices.environment import PROCESSES as PROCESSES
from tailrace.devices.processes.heartbeat import Heartbeat
from tailrace.devices.processes.introduction import (
    check_address,
    check_complete,
    from_environment,
    in_a_cluster,
)
from tailrace.devices.processes.meeting import LEFT, ROUNDS, TIMEOUT_S, Client, has_left
from tailrace.devices.processes.meeting import meet as meet
from tailrace.devices.processes.rollcall import TOKEN, call_roll, is_loopback
from tailrace.errors import DeviceError, DistributedError
from tailrace.jaxprs import internals

_AFTER_S = 30
"""How much later than Tailrace JAX gives up a silent process: JAX exits without a clear message."""

_LAST_S = 5.0
"""How long the coordinator waits for the others after Ctrl-C."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    heartbeat_s: int = 100,
    **kwargs: Any,
) -> int:
    """Join the processes of one program; call it before anything else uses JAX.

    Without arguments, the processes of `tailrace launch`, Slurm, Kubernetes and Open MPI are found
    through their environment. Without any of these, the program runs as a single process: the same
    script serves both.

    Args:
        coordinator_address: `host:port` of process 0, reachable from all.
        num_processes: the number of processes.
        process_id: the index of this process, from 0.
        timeout_s: how long to wait for the others, here and before each execution; 300 s if not given.
        heartbeat_s: if a process is silent for this long (or for `timeout_s`, if that is shorter), the
            others name it and exit, even while they wait for it on the device.
        kwargs: passed to `jax.distributed.initialize`.

    Returns:
        The number of processes.

    Raises:
        DistributedError: an argument is missing or wrong, or a process did not come in time.
        DeviceError: JAX was used before.

    >>> import tailrace as tr
    >>> tr.distributed.initialize()
    1
    """
    if jax.distributed.is_initialized():
        return jax.process_count()
    given = (coordinator_address, num_processes, process_id)
    if all(value is None for value in given):
        found = from_environment()
        if found is not None:
            coordinator_address, num_processes, process_id = found
        elif not in_a_cluster() and not kwargs:
            return 1
    else:
        check_complete(*given)
    ROUNDS.timeout_s = check_number("timeout_s", timeout_s, positive=True, error=DistributedError)
    check_number("heartbeat_s", heartbeat_s, at_least=1, error=DistributedError)
    check_address(coordinator_address, num_processes, process_id)
    if num_processes == 1:
        return 1
    if coordinator_address is not None:
        assert num_processes is not None
        assert process_id is not None
        token = os.environ.get(TOKEN, "")
        call_roll(coordinator_address, num_processes, process_id, timeout_s, token)
        if is_loopback(coordinator_address.rpartition(":")[0]):
            # Otherwise JAX listens on all addresses of the machine, without authentication.
            kwargs.setdefault("coordinator_bind_address", coordinator_address)
    _join(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        initialization_timeout=max(1, int(timeout_s)),
        heartbeat_timeout_seconds=int(heartbeat_s) + _AFTER_S,
        **kwargs,
    )
    _end_by_sigterm()
    _leave_at_once_when_failed()
    _watch_each_other(min(heartbeat_s, ROUNDS.timeout_s))
    if jax.process_index():  # messages of all processes would be equal: process 0 logs them
        logger.addFilter(lambda record: record.levelno > logging.WARNING)
    return jax.process_count()


def process_index() -> int:
    """The index of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """The number of processes that run this program."""
    return jax.process_count()


def writes() -> bool:
    """Whether this process writes files and shows progress: only the first one does.

    >>> writes()
    True
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


class Share(Dataset):
    """The elements of a dataset for the replicas of one process; see `share`."""

    def __init__(self, dataset: object, replicas: int, processes: int, process: int) -> None:
        self._source = as_dataset(dataset)
        self._replicas, self._count = replicas, replicas // processes
        self._first = process * self._count
        self.name = f"share of process {process} of {self._source.name}"
        self.endless, self.restartable = self._source.endless, self._source.restartable
        self.continues, self.pure = self._source.continues, self._source.pure
        self.exact, self.origin = self._source.exact, self._source.origin
        self.when_empty = self._source.when_empty
        if self._source.length is not None:
            whole, rest = divmod(self._source.length, replicas)
            self.length = whole * self._count + min(max(rest - self._first, 0), self._count)

    def iterate(self, epoch: int = 0) -> Iterator[Any]:
        """Its elements; the others are read and skipped."""
        for number, element in enumerate(self._source.iterate(epoch)):
            # By number, not by halves of the dataset: each step then has the same elements as in
            # one process.
            if self._first <= number % self._replicas < self._first + self._count:
                yield element


def share(dataset: object, replicas: int) -> Any:
    """The elements of `dataset` that this process feeds to its local replicas.

    Each process feeds its replicas from its dataset. If all processes can read the whole dataset, this
    makes n processes train on exactly the elements that one would: element (t*M + m)*R + r goes to
    replica r, wherever that is. With one process it is the dataset itself.

    Args:
        dataset: a dataset that yields the same elements in every process.
        replicas: the number of replicas over all processes.

    Raises:
        DistributedError: replicas cannot be divided between the processes.

    >>> import tailrace as tr
    >>> tr.distributed.share([1, 2, 3, 4], replicas=2)
    [1, 2, 3, 4]
    """
    count = jax.process_count()
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise DistributedError(
            f"replicas counts the replicas over all processes: a whole number of at least 1. "
            f"Received: replicas={replicas!r}."
        )
    if count == 1:
        return dataset
    if replicas % count:
        raise DistributedError(
            f"Replicas are spread evenly over processes. Received: replicas={replicas} for {count} "
            f"processes. Use a multiple of {count}."
        )
    return Share(dataset, replicas, count, jax.process_index())


# -- inside -------------------------------------------------------------------------------------


def _join(**options: Any) -> None:
    """Let JAX connect the processes; its errors in words."""
    # On CPUs, collectives between processes need an implementation to be chosen.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**options)
    except RuntimeError as error:
        if "before" in str(error):
            raise DeviceError(
                "tr.distributed.initialize() must be called before anything uses JAX: its devices "
                "are chosen when it starts, and it has started. Call it first, before "
                "tr.configure and before any array is made."
            ) from error
        raise DistributedError(f"The processes could not be joined: {error}") from error


def _end_by_sigterm() -> None:
    """Let SIGTERM end a process again: JAX's preemption service takes it, and nothing happens."""
    # Python does not know of that handler, and says that there is none. A script's own one is known.
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch_each_other(limit_s: float) -> None:
    client = internals.coordination_client()
    count = jax.process_count()
    if count > 1:
        left = lambda process: has_left(client, process)  # noqa: E731
        heartbeat = Heartbeat(client, jax.process_index(), count, limit_s, left)
        heartbeat.start()
        atexit.register(heartbeat.stop)


def _wait_for_others(client: Client) -> None:
    """Wait until all other processes have announced their exit, for a moment."""
    give_up = time.monotonic() + _LAST_S
    others = range(1, jax.process_count())
    with contextlib.suppress(Exception):
        while time.monotonic() < give_up and not all(has_left(client, one) for one in others):
            time.sleep(0.02)


def _leave_at_once_when_failed() -> None:
    """Make a process announce its exit, and not wait for the others if it has failed."""
    before, failed = sys.excepthook, list[BaseException]()

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.append(error)
        before(kind, error, trace)

    def leave() -> None:
        client = internals.coordination_client()
        with contextlib.suppress(Exception):
            client.key_value_set(f"{LEFT}/{jax.process_index()}", "1")
        if not failed:
            return
        interrupted = isinstance(failed[-1], KeyboardInterrupt)
        if interrupted and jax.process_index() == 0:
            # All are interrupted together, and without the coordinator the others would be aborted.
            _wait_for_others(client)
        # A normal exit would wait in JAX's own shutdown for the others, who wait in a collective
        # for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGINT if interrupted else 1)

    sys.excepthook = note
    atexit.register(leave)
