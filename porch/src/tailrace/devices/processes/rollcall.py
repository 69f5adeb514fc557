"""The roll call: all processes say they are there, before JAX joins them.

JAX ends a process with a stack trace if another one does not come. Here process 0 listens at the
coordinator's own address first, everybody reports to it, and if somebody does not come in time, all
others learn who.

Whoever can reach the port can connect. So nobody is believed without the token, where there is one;
what is said is checked; and connections are served side by side, so that one that says nothing keeps
nobody waiting.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import selectors
import socket
import time
from typing import Any

from tailrace.errors import DistributedError

TOKEN = "TAILRACE_TOKEN"
"""The environment variable with the word that all processes of a program know, and others do not."""

_RETRY_S = 0.1
_SILENT_S = 5.0
"""A connection that has said nothing for so long is closed."""
_MOST_BYTES = 4096
"""A report is short."""
_MOST_CONNECTIONS = 512
"""Connections that are kept besides those of processes that have reported."""


def call_roll(address: str, count: int, number: int, timeout_s: float, token: str = "") -> None:
    """Return when all processes have reported; raise an error that names the missing ones.

    Args:
        address: `host:port` of process 0.
        count: how many processes there are.
        number: which of them this is.
        timeout_s: how long to wait for the others.
        token: what all of them know; empty: whoever can reach the port is believed.
    """
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + timeout_s
    if number == 0:
        with _server(host, int(port)) as server:
            _Roll(server, count, token).call(give_up, timeout_s)
    else:
        report = {"process": number, "count": count, "token": token}
        _report(host, int(port), report, give_up, timeout_s)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Roll:
    """Process 0: who has reported, and who is connected and has not."""

    def __init__(self, server: socket.socket, count: int, token: str) -> None:
        self._server, self._count, self._token = server, count, token
        self._here: dict[int, socket.socket] = {}
        self._silent: dict[socket.socket, tuple[bytearray, float]] = {}
        self._selector = selectors.DefaultSelector()

    def call(self, give_up: float, timeout_s: float) -> None:
        """Wait for all, then let them go on; or tell everybody what is wrong, and raise it."""
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        try:
            problem = self._listen(give_up)
            missing = [number for number in range(1, self._count) if number not in self._here]
            if problem is None and missing:
                problem = _missing(missing, self._count, timeout_s)
            _tell(self._here.values(), {"go": True} if problem is None else {"error": problem})
            if problem is not None:
                raise DistributedError(problem)
            for connection in self._here.values():  # they close first, so that the port is free
                connection.settimeout(2.0)
                with contextlib.suppress(OSError):
                    connection.recv(1)
        finally:
            for connection in (*self._here.values(), *self._silent):
                connection.close()
            self._selector.close()

    def _listen(self, give_up: float) -> str | None:
        """Until all are here or time is up; what is wrong, if one of them says something wrong."""
        while len(self._here) < self._count - 1:
            left = give_up - time.monotonic()
            if left <= 0:
                return None
            for key, _ in self._selector.select(min(left, 0.5)):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    problem = self._hear(key.fileobj)  # pyright: ignore[reportArgumentType]
                    if problem is not None:
                        return problem
            for connection, (_, since) in list(self._silent.items()):
                if time.monotonic() - since > _SILENT_S:
                    self._drop(connection)
        return None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            if len(self._silent) >= _MOST_CONNECTIONS:
                self._drop(next(iter(self._silent)))
            connection.setblocking(False)
            self._silent[connection] = (bytearray(), time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> str | None:
        """Read from a connection; what is wrong, if a process contradicts this one."""
        try:
            part = connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        heard = self._silent.get(connection)
        if heard is None or not part:  # one that had reported has left: it may come again
            self._drop(connection)
            return None
        heard[0].extend(part)
        if not heard[0].endswith(b"\n") and len(heard[0]) < _MOST_BYTES:
            return None
        said = _parsed(heard[0])
        if said is None or not self._is_believed(said):
            self._drop(connection)
            return None
        problem = _contradiction(said, self._here, self._count)
        if problem is not None:
            _tell([connection], {"error": problem})
            self._drop(connection)
            return problem
        del self._silent[connection]
        self._here[said["process"]] = connection
        return None

    def _is_believed(self, said: dict[str, Any]) -> bool:
        number, count, token = said.get("process"), said.get("count"), said.get("token", "")
        if type(number) is not int or type(count) is not int or not isinstance(token, str):
            return False
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._silent.pop(connection, None)
        self._here = {n: one for n, one in self._here.items() if one is not connection}
        connection.close()


def _report(host: str, port: int, report: dict[str, Any], give_up: float, timeout_s: float) -> None:
    answer: dict[str, Any] | None = None
    while answer is None:
        left = give_up - time.monotonic()
        if left <= 0:
            raise DistributedError(
                f"Process 0, the coordinator, did not arrive within {timeout_s:g} seconds: nobody "
                f"listens at {host}:{port}, or it does not know this process (is {TOKEN} the same "
                f"everywhere?). Start it, check that the address can be reached from here, or raise "
                f"timeout_s."
            )
        try:
            with socket.create_connection((host, port), timeout=min(left, 5.0)) as connection:
                connection.sendall(json.dumps(report).encode() + b"\n")
                # A little longer than the others: process 0 says who is missing when time is up.
                answer = _read(connection, left + 5.0)
        except OSError:
            answer = None
        if answer is None:
            time.sleep(_RETRY_S)
    if "error" in answer:
        raise DistributedError(str(answer["error"]))


def _server(host: str, port: int) -> socket.socket:
    """A socket at the address itself; at all addresses of this machine if it has another name here."""
    try:
        return socket.create_server((host.strip("[]"), port), backlog=128)
    except OSError as error:
        # Names that cannot be resolved have negative numbers.
        unknown = error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0
        if unknown and not is_loopback(host):
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), backlog=128)
        raise DistributedError(
            f"Process 0 listens at the coordinator's port, but port {port} of {host} cannot be had "
            f"({error.strerror}). Choose another one, or end the program that has it."
        ) from error


def _contradiction(said: dict[str, Any], here: dict[int, Any], count: int) -> str | None:
    number = said["process"]
    if said["count"] != count:
        return (
            f"All processes must agree how many they are. Process 0 says {count}, process {number} "
            f"says {said['count']}. Start them all with the same num_processes."
        )
    if number in here or not 1 <= number < count:
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
            connection.settimeout(2.0)
            connection.sendall(json.dumps(what).encode() + b"\n")


def _read(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """One line of JSON, or None if the other side has left or says something else."""
    give_up = time.monotonic() + timeout_s
    text = b""
    while not text.endswith(b"\n") and (left := give_up - time.monotonic()) > 0:
        connection.settimeout(left)
        part = connection.recv(_MOST_BYTES)
        if not part or len(text) > 1 << 16:
            return None
        text += part
    return _parsed(text)


def _parsed(text: bytes | bytearray) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
