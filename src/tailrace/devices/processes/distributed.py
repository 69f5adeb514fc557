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
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tailrace.data.adapters import as_dataset
from tailrace.data.counts import check_number
from tailrace.data.dataset import Dataset
from tailrace.devices.environment import COORDINATOR, PROCESS, PROCESSES
from tailrace.devices.processes.heartbeat import Heartbeat
from tailrace.devices.processes.rollcall import TOKEN, call_roll, is_loopback
from tailrace.errors import DeviceError, DistributedError
from tailrace.jaxprs import internals
from tailrace.messages import logger

"""The environment variables by which `tailrace launch` introduces processes to each other."""

TIMEOUT_S = 300.0
"""The default time that processes wait for each other, in seconds."""

_LOOK_S = 1.0
"""How often a waiting process checks whether the other one has left, in seconds."""

_AFTER_S = 30
"""How much later than Tailrace JAX gives up a silent process: JAX exits without a clear message."""

_LEFT = "tailrace/left"

_timeout_s = TIMEOUT_S


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
        timeout_s: how long to wait for the others, here and before each execution.
        heartbeat_s: if a process is silent for this long (or for `timeout_s`, if that is shorter), the
            others name it and exit, even while they wait for it on the device.
        kwargs: passed to `jax.distributed.initialize`.

    Returns:
        The number of processes.

    >>> initialize()
    1
    """
    global _timeout_s
    if jax.distributed.is_initialized():
        return jax.process_count()
    given = (coordinator_address, num_processes, process_id)
    if all(value is None for value in given):
        found = _from_environment()
        if found is None:
            if not _in_a_cluster() and not kwargs:
                return 1
        else:
            coordinator_address, num_processes, process_id = found
    elif any(value is None for value in given):
        raise DistributedError(
            f"A process needs to know the coordinator, how many processes there are, and which one "
            f"it is. Received: coordinator_address={coordinator_address!r}, "
            f"num_processes={num_processes!r}, process_id={process_id!r}. Give all three, or none "
            f"under tailrace launch, Slurm, Kubernetes or Open MPI."
        )
    _timeout_s = check_number("timeout_s", timeout_s, positive=True, error=DistributedError)
    check_number("heartbeat_s", heartbeat_s, at_least=1, error=DistributedError)
    _check(coordinator_address, num_processes, process_id)
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
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=max(1, int(timeout_s)),
            heartbeat_timeout_seconds=int(heartbeat_s) + _AFTER_S,
            **kwargs,
        )
    except RuntimeError as error:
        if "before" in str(error):
            raise DeviceError(
                "tr.distributed.initialize() must be called before anything uses JAX: its devices "
                "are chosen when it starts, and it has started. Call it first, before "
                "tr.configure and before any array is made."
            ) from error
        raise DistributedError(f"The processes could not be joined: {error}") from error
    _leave_at_once_when_failed()
    _watch_each_other(min(heartbeat_s, _timeout_s))
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

    def __init__(self, dataset: Any, replicas: int, processes: int, process: int) -> None:
        self._source = as_dataset(dataset)
        self._replicas, self._count = replicas, replicas // processes
        self._first = process * self._count
        self.name = f"share of process {process} of {self._source.name}"
        self.endless, self.restartable = self._source.endless, self._source.restartable
        if self._source.length is not None:
            whole, rest = divmod(self._source.length, replicas)
            self.length = whole * self._count + min(max(rest - self._first, 0), self._count)

    def iterate(self, epoch: int = 0) -> Iterator[Any]:
        """Its elements; the others are read and skipped."""
        for number, element in enumerate(self._source.iterate(epoch)):
            if self._first <= number % self._replicas < self._first + self._count:
                yield element


def share(dataset: Any, replicas: int) -> Any:
    """The elements of `dataset` that this process feeds to its local replicas.

    Each process feeds its replicas from its dataset. If all processes can read the whole dataset, this
    makes n processes train on exactly the elements that one would: element (t*M + m)*R + r goes to
    replica r, wherever that is. With one process it is the dataset itself.

    Args:
        dataset: a dataset that yields the same elements in every process.
        replicas: the number of replicas over all processes.

    >>> share([1, 2, 3, 4], replicas=2)
    [1, 2, 3, 4]
    """
    count = jax.process_count()
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise DistributedError(
            f"replicas counts the replicas over all processes. Received: replicas={replicas!r}."
        )
    if count == 1:
        return dataset
    if replicas % count:
        raise DistributedError(
            f"Replicas are spread evenly over processes. Received: replicas={replicas} for {count} "
            f"processes. Use a multiple of {count}."
        )
    return Share(dataset, replicas, count, jax.process_index())


# -- agreement ----------------------------------------------------------------------------------

_meetings = 0


def meet(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange values between all processes: returns everyone's, in the order of process indices.

    All processes must make the same number of calls; values of one round are compared in that round. A
    process that does not take part in time is named in the error that the others raise.
    """
    global _meetings
    count = jax.process_count()
    if count == 1:
        return [dict(value)]
    client = internals.coordination_client()
    here, number = jax.process_index(), _meetings
    _meetings += 1
    client.key_value_set(f"tailrace/{number}/{here}", json.dumps(dict(value)))
    if number >= 2:  # all processes have read those: the round in between needed every one
        client.key_value_delete(f"tailrace/{number - 2}/{here}")
    give_up = time.monotonic() + _timeout_s
    answers: list[dict[str, Any]] = []
    missing: list[int] = []
    for process in range(count):
        # Once one process is missing, the others are only checked, without waiting.
        text = _answer(client, f"tailrace/{number}/{process}", process, 0 if missing else give_up)
        if text is None:
            missing.append(process)
        else:
            answers.append(json.loads(text))
    if missing:
        raise DistributedError(
            f"Processes run each execution together, and {_named(missing)} of {count} did not arrive "
            f"within {_timeout_s:g} seconds. It is stuck, or runs fewer executions than process "
            f"{here}: call fit, evaluate and predict in every process. If it is only slow, raise "
            f"timeout_s in tr.distributed.initialize."
        )
    return answers


def _answer(client: Any, key: str, process: int, give_up: float) -> str | None:
    """The value of a process under a key; None if it does not arrive in time."""
    while True:
        left = give_up - time.monotonic()
        try:
            wait_ms = max(1, int(min(left, _LOOK_S) * 1000))
            return client.blocking_key_value_get(key, wait_ms)
        except RuntimeError as error:
            if "DEADLINE" not in str(error):
                raise DistributedError(
                    f"Process {jax.process_index()} lost the others: {_first_line(error)}. The one "
                    f"that left says why in its own output."
                ) from error
        if _has_left(client, process):
            raise DistributedError(
                f"Process {process} has ended, and the others still have something to run with it. "
                f"Its own output says why; call fit, evaluate and predict equally often in all."
            )
        if left <= _LOOK_S:
            return None


def _has_left(client: Any, process: int) -> bool:
    try:
        return bool(client.key_value_try_get(f"{_LEFT}/{process}"))
    except RuntimeError:  # the key does not exist
        return False


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


def _named(processes: list[int]) -> str:
    listed = ", ".join(map(str, processes))
    return f"process {listed}" if len(processes) == 1 else f"processes {listed}"


# -- inside -------------------------------------------------------------------------------------


def _from_environment() -> tuple[str, int, int] | None:
    address = os.environ.get(COORDINATOR)
    if not address:
        return None
    count, number = os.environ.get(PROCESSES, ""), os.environ.get(PROCESS, "")
    if not (count.isdigit() and number.isdigit()):
        raise DistributedError(
            f"{COORDINATOR} is set, so {PROCESSES} and {PROCESS} must be numbers. Received: "
            f"{PROCESSES}={count!r}, {PROCESS}={number!r}."
        )
    return address, int(count), int(number)


def _in_a_cluster() -> bool:
    """Whether JAX detects the processes itself: Slurm, Open MPI, Kubernetes, a TPU pod."""
    environment = os.environ
    several = [environment.get(name, "") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    if any(text.isdigit() and int(text) > 1 for text in several):
        return True
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return True
    return (
        "JAX_COORDINATOR_ADDRESS" in environment or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    )


def _check(address: str | None, count: int | None, number: int | None) -> None:
    if count is None or number is None:
        return
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (count, number))
    if not whole or count < 1 or not 0 <= number < count:
        raise DistributedError(
            f"Processes are numbered from 0 to num_processes - 1. Received: process_id={number!r}, "
            f"num_processes={count!r}."
        )
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise DistributedError(
            f"The coordinator is given as host:port, for example 10.0.0.1:12321. Received: "
            f"coordinator_address={address!r}."
        )


def _watch_each_other(limit_s: float) -> None:
    client = internals.coordination_client()
    count = jax.process_count()
    if count > 1:
        left = lambda process: _has_left(client, process)  # noqa: E731
        heartbeat = Heartbeat(client, jax.process_index(), count, limit_s, left)
        heartbeat.start()
        atexit.register(heartbeat.stop)


def _leave_at_once_when_failed() -> None:
    """Make a process announce its exit, and not wait for the others if it has failed."""
    before, failed = sys.excepthook, []

    def note(kind: Any, error: Any, trace: Any) -> None:
        failed.append(error)
        before(kind, error, trace)

    def leave() -> None:
        with contextlib.suppress(Exception):
            internals.coordination_client().key_value_set(f"{_LEFT}/{jax.process_index()}", "1")
        if failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = note
    atexit.register(leave)
