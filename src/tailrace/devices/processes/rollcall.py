"""The roll call: all processes say they are there, before JAX joins them.

JAX ends a process with a stack trace if another one does not come. Here process 0 listens at the
coordinator's own address first, everybody reports to it, and if somebody does not come in time, all
others learn who.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from tailrace.errors import DistributedError

_RETRY_S = 0.1


def call_roll(address: str, count: int, number: int, timeout_s: float) -> None:
    """Return when all processes have reported; raise an error that names the missing ones."""
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + timeout_s
    if number == 0:
        _listen(host, int(port), count, give_up, timeout_s)
    else:
        _report(host, int(port), number, count, give_up, timeout_s)


def _listen(host: str, port: int, count: int, give_up: float, timeout_s: float) -> None:
    here: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server(port))
        while len(here) < count - 1 and (left := give_up - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            stack.enter_context(connection)
            said = _read(connection, 5.0)
            if not said or "process" not in said:  # somebody else's probe
                continue
            problem = _contradiction(said, here, count)
            if problem:
                _tell([*here.values(), connection], {"error": problem})
                raise DistributedError(problem)
            here[said["process"]] = connection
        missing = [process for process in range(1, count) if process not in here]
        if missing:
            problem = _missing(missing, count, timeout_s)
            _tell(here.values(), {"error": problem})
            raise DistributedError(problem)
        _tell(here.values(), {"go": True})
        for connection in here.values():  # they close first, so that the port is free at once
            connection.settimeout(2.0)
            with contextlib.suppress(OSError):
                connection.recv(1)


def _report(
    host: str, port: int, number: int, count: int, give_up: float, timeout_s: float
) -> None:
    answer: dict[str, Any] | None = None
    while answer is None:
        left = give_up - time.monotonic()
        if left <= 0:
            raise DistributedError(
                f"Process 0, the coordinator, did not arrive within {timeout_s:g} seconds: nobody "
                f"listens at {host}:{port}. Start it, check that the address can be reached from "
                f"here, or raise timeout_s."
            )
        try:
            with socket.create_connection((host, port), timeout=min(left, 5.0)) as connection:
                connection.sendall(json.dumps({"process": number, "count": count}).encode() + b"\n")
                # A little longer than the others: process 0 says who is missing when time is up.
                answer = _read(connection, left + 5.0)
        except OSError:
            answer = None
        if answer is None:
            time.sleep(_RETRY_S)
    if "error" in answer:
        raise DistributedError(answer["error"])


def _server(port: int) -> socket.socket:
    try:
        server = socket.create_server(("", port), backlog=128)
    except OSError as error:
        raise DistributedError(
            f"Process 0 listens at the coordinator's port, but port {port} cannot be had "
            f"({error.strerror}). Choose another one, or end the program that has it."
        ) from error
    return server


def _contradiction(said: dict[str, Any], here: dict[int, Any], count: int) -> str | None:
    number = said["process"]
    if said.get("count") != count:
        return (
            f"All processes must agree how many they are. Process 0 says {count}, process {number} "
            f"says {said.get('count')}. Start them all with the same num_processes."
        )
    if number in here:
        return (
            f"Each process has a number of its own, but two say that they are process {number} of "
            f"{count}. Give each its own process_id."
        )
    return None


def _missing(missing: list[int], count: int, timeout_s: float) -> str:
    listed = ", ".join(map(str, missing))
    which = f"process {listed}" if len(missing) == 1 else f"processes {listed}"
    return (
        f"All {count} processes start together, but {which} did not arrive within {timeout_s:g} "
        f"seconds. Look at what became of {'it' if len(missing) == 1 else 'them'}, or raise timeout_s "
        f"in tr.distributed.initialize."
    )


def _tell(connections: Any, what: dict[str, Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(what).encode() + b"\n")


def _read(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """One line of JSON, or None if the other side has left or says something else."""
    connection.settimeout(timeout_s)
    text = b""
    try:
        while not text.endswith(b"\n"):
            part = connection.recv(4096)
            if not part or len(text) > 1 << 16:
                return None
            text += part
        found = json.loads(text)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
