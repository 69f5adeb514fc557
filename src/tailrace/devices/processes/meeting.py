"""Meetings: values that all processes exchange, round by round, before they run something together.

Values travel through JAX's coordination service, not through a collective: a collective waits forever
for a process that is missing, or that runs another program.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax

from tailrace.errors import DistributedError
from tailrace.jaxprs import internals

TIMEOUT_S = 300.0
"""The default time that processes wait for each other, in seconds."""

_LOOK_S = 1.0
"""How often a waiting process checks whether the other one has left, in seconds."""

LEFT = "tailrace/left"
"""The keys under which processes announce their exit."""


class Client(Protocol):
    """What is used of the client of JAX's coordination service, which has no public type."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set a key; an error if it exists, unless it may be overwritten."""
        ...

    def key_value_try_get(self, key: str) -> str:
        """The value of a key; an error if it does not exist."""
        ...

    def key_value_dir_get(self, key: str) -> Iterable[tuple[str, str]]:
        """The keys with a prefix, with their values."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """The value of a key, once it exists; an error if it does not in time."""
        ...


@dataclasses.dataclass
class Rounds:
    """The meetings of this process.

    Attributes:
        number: the number of rounds so far; keys of a round have it, so that no value is taken for one
            of another round.
        timeout_s: how long to wait for the others.
    """

    number: int = 0
    timeout_s: float = TIMEOUT_S


ROUNDS = Rounds()


def meet(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange values between all processes: returns everyone's, in the order of process indices.

    All processes must make the same number of calls; values of one round are compared in that round. A
    process that does not take part in time is named in the error that the others raise.

    Raises:
        DistributedError: a process did not arrive in time, or has ended.
    """
    count = jax.process_count()
    if count == 1:
        return [dict(value)]
    client = internals.coordination_client()
    here, number = jax.process_index(), ROUNDS.number
    ROUNDS.number += 1
    # Each process counts its rounds itself. They agree, because all run the same program; where they do
    # not, the timeout says so.
    client.key_value_set(f"tailrace/{number}/{here}", json.dumps(dict(value)))
    if number >= 2:  # all processes have read those: the round in between needed every one
        # Otherwise the coordinator's memory would grow with the number of executions.
        client.key_value_delete(f"tailrace/{number - 2}/{here}")
    give_up = time.monotonic() + ROUNDS.timeout_s
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
            f"within {ROUNDS.timeout_s:g} seconds. It is stuck, or runs fewer executions than process "
            f"{here}: call fit, evaluate and predict in every process. If it is only slow, raise "
            f"timeout_s in tr.distributed.initialize."
        )
    return answers


def _answer(client: Client, key: str, process: int, give_up: float) -> str | None:
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
        if has_left(client, process):
            raise DistributedError(
                f"Process {process} has ended, and the others still have something to run with it. "
                f"Its own output says why; call fit, evaluate and predict equally often in all."
            )
        if left <= _LOOK_S:
            return None


def has_left(client: Client, process: int) -> bool:
    """Whether a process has announced its exit."""
    try:
        return bool(client.key_value_try_get(f"{LEFT}/{process}"))
    except RuntimeError:  # the key does not exist
        return False


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


def _named(processes: list[int]) -> str:
    listed = ", ".join(map(str, processes))
    return f"process {listed}" if len(processes) == 1 else f"processes {listed}"
