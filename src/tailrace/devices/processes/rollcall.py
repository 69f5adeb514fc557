"""The roll call: all processes report before JAX joins them.

JAX ends a process with a stack trace if another one does not arrive, and no option of
`jax.distributed.initialize` makes it say which. Here process 0 first listens at
the coordinator's address, every process reports to it, and if one does not arrive in time, all others
learn which one.

Anyone who can reach the port can connect. So reports without the token, if there is one, are ignored;
their content is checked; and connections are served concurrently, so that a silent one delays no other.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

from tailrace.errors import DistributedError

TOKEN = "TAILRACE_TOKEN"
"""The environment variable with the secret that all processes of a program share."""

LISTENING = "TAILRACE_LISTENING"
"""The environment variable of process 0 with the number of a socket that listens at the coordinator's
address already: `tailrace launch` opens it, so that no other program can take the port meanwhile."""

_RETRY_S = 0.1
SILENT_S = 5.0
"""Seconds after which a silent connection is closed."""
_MOST_BYTES = 4096
"""The most bytes of a report."""
_MOST_CONNECTIONS = 512
"""The most connections kept in addition to those of processes that have reported."""


def call_roll(address: str, count: int, number: int, timeout_s: float, token: str = "") -> None:
    """Return when all processes have reported; raise an error that names the missing ones.

    Args:
        address: `host:port` of process 0.
        count: the number of processes.
        number: the index of this process.
        timeout_s: how long to wait for the others.
        token: the shared secret; if empty, every report is believed.
    """
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + timeout_s
    if number == 0:
        with _handed_over(int(port)) or listening_at(host, int(port)) as server:
            Roll(server, count, token).call(give_up, timeout_s)
    else:
        report = {"process": number, "count": count, "token": token}
        _report(host, int(port), report, give_up, timeout_s)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Roll:
    """Process 0's list: the processes that have reported, and connections that have not."""

    def __init__(self, server: socket.socket, count: int, token: str) -> None:
        self._server, self._count, self._token = server, count, token
        self._here: dict[int, socket.socket] = {}
        self._silent: dict[socket.socket, tuple[bytearray, float]] = {}
        self._selector = selectors.DefaultSelector()

    def call(self, give_up: float, timeout_s: float) -> None:
        """Wait for all, then release them; or send everyone the error, and raise it."""
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
            # The other side closes first: the port is then free.
            for connection in self._here.values():
                connection.settimeout(2.0)
                with contextlib.suppress(OSError):
                    connection.recv(1)
        finally:
            for connection in (*self._here.values(), *self._silent):
                connection.close()
            self._selector.close()

    def _listen(self, give_up: float) -> str | None:
        """Run until all have reported or time is up; returns an error if a report is wrong."""
        while len(self._here) < self._count - 1:
            left = give_up - time.monotonic()
            if left <= 0:
                return None
            # At most half a second, so that silent connections are noticed in time.
            for key, _ in self._selector.select(min(left, 0.5)):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    problem = self._receive(key.fileobj)  # pyright: ignore[reportArgumentType]
                    if problem is not None:
                        return problem
            for connection, (_, since) in list(self._silent.items()):
                if time.monotonic() - since > SILENT_S:
                    self.drop(connection)
        return None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            # Strangers find a port on a network; silent connections must not use up all handles.
            if len(self._silent) >= _MOST_CONNECTIONS:
                self.drop(next(iter(self._silent)))
            connection.setblocking(False)
            self._silent[connection] = (bytearray(), time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> str | None:
        """Read from a connection; returns an error if a process contradicts this one."""
        try:
            part = connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        received = self._silent.get(connection)
        if received is None or not part:  # one that had reported has left: it may come again
            self.drop(connection)
            return None
        received[0].extend(part)
        # A report may arrive in parts; one without end is read up to the limit and then refused.
        if not received[0].endswith(b"\n") and len(received[0]) < _MOST_BYTES:
            return None
        report = _parsed(received[0])
        if report is None or not self._is_believed(report):
            self.drop(connection)
            return None
        # Sent to that process and to all others: the roll call cannot succeed any more.
        problem = contradiction(report, self._here, self._count)
        if problem is not None:
            _tell([connection], {"error": problem})
            self.drop(connection)
            return problem
        del self._silent[connection]
        self._here[report["process"]] = connection
        return None

    def _is_believed(self, report: dict[str, Any]) -> bool:
        number, count, token = report.get("process"), report.get("count"), report.get("token", "")
        # By type: True is an int to isinstance, and would be process 1.
        if type(number) is not int or type(count) is not int or not isinstance(token, str):
            return False
        # In constant time: how long a comparison takes would otherwise reveal the token.
        return hmac.compare_digest(token.encode(), self._token.encode())

    def drop(self, connection: socket.socket) -> None:
        """Close a connection; a process that reported through it is no longer here."""
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
                f"Process 0, the coordinator, did not arrive within {timeout_s:g} seconds: nothing "
                f"listens at {host}:{port}, or it does not know this process (is {TOKEN} the same "
                f"everywhere?). Start it, check that the address can be reached from here, or raise "
                f"timeout_s."
            )
        try:
            with socket.create_connection((host, port), timeout=min(left, 5.0)) as connection:
                connection.sendall(json.dumps(report).encode() + b"\n")
                # A little longer than process 0, which reports who is missing when time is up.
                answer = _read(connection, left + 5.0)
        except OSError:  # process 0 is not there yet, or has dropped this connection
            answer = None
        # Not of process 0: where nobody listens yet, a connection may meet itself and read its report.
        if answer is not None and not answer.keys() & {"go", "error"}:
            answer = None
        if answer is None:
            time.sleep(_RETRY_S)
    if "error" in answer:
        raise DistributedError(str(answer["error"]))


def _handed_over(port: int) -> socket.socket | None:
    """The socket of `LISTENING`, if there is one and it is of this port."""
    number = os.environ.pop(LISTENING, "")  # once: afterwards the number may be another file's
    if not number.isdigit():
        return None
    try:
        server = socket.socket(fileno=int(number))
    except OSError:  # the script has closed it
        return None
    if server.getsockname()[1:2] != (port,):
        server.detach()  # not ours to close
        return None
    # A program that this process starts must not keep the port open.
    server.set_inheritable(False)
    return server


def listening_at(host: str, port: int) -> socket.socket:
    """A socket at the address; at all addresses of this machine if it is not a local one."""
    try:
        return socket.create_server((host.strip("[]"), port), backlog=128)
    except OSError as error:
        # An address that only others see, behind NAT or in a container: listen everywhere instead.
        # (Errors of name resolution have negative numbers.)
        unknown = error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0
        if unknown and not is_loopback(host):
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), backlog=128)
        raise DistributedError(
            f"Process 0 listens at the coordinator's port, but port {port} of {host} cannot be used "
            f"({error.strerror}). Choose another one, or end the program that has it."
        ) from error


def contradiction(report: dict[str, Any], here: dict[int, Any], count: int) -> str | None:
    """What is wrong with a report, beside those of others; None if nothing is."""
    number = report["process"]
    if report["count"] != count:
        return (
            f"All processes must agree how many they are. Process 0 says {count}, process {number} "
            f"says {report['count']}. Start them all with the same num_processes."
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
        f"seconds. Check {'its' if len(missing) == 1 else 'their'} output, or raise timeout_s "
        f"in tr.distributed.initialize."
    )


def _tell(connections: Iterable[socket.socket], what: dict[str, Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.settimeout(2.0)
            connection.sendall(json.dumps(what).encode() + b"\n")


def _read(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """One line of JSON, or None if the other side has left or sent something else."""
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
    except (ValueError, RecursionError):  # deeply nested brackets, from a stranger
        return None
    return found if isinstance(found, dict) else None
