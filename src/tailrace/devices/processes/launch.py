"""`tailrace launch`: runs a script in several processes of this machine, and monitors them.

Each process learns of the others through its environment, which `tr.distributed.initialize()` reads.
When one fails, the others would wait for it: they are terminated, and its last lines are shown. When
the launcher itself ends, so do they: it terminates them, or, if it is killed, a guardian does.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from tailrace.devices.environment import COORDINATOR, PROCESS, PROCESSES
from tailrace.devices.processes.rollcall import LISTENING, TOKEN
from tailrace.errors import OptionError

LINES = 20
"""The number of last lines to show of a failed process."""

GRACE_S = 2.0
"""How long processes may take to exit after SIGTERM before they are killed."""

READ_S = 10.0
"""How long the output of ended processes is awaited: their children may keep the pipes open."""

_POLL_S = 0.05


class Watched:
    """One process: its output is passed on, each line prefixed with the process's index."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int] = (),
    ) -> None:
        self.number = number
        self._ended_at = math.inf
        self.last: deque[str] = deque(maxlen=LINES)
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            # A process group of its own, so that a signal reaches the children of the script too.
            start_new_session=True,
            pass_fds=files,
        )
        self._waiter = threading.Thread(
            target=self._note_end, name=f"tailrace-waiter-{number}", daemon=True
        )
        self._waiter.start()
        assert self.process.stdout is not None
        self._reader = threading.Thread(
            target=self._pass_on, args=(self.process.stdout,), daemon=True
        )
        self._reader.start()

    def _note_end(self) -> None:
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return
        # Not reaped here: until `poll` reports it, the system keeps its pid for it.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._ended_at = time.monotonic()

    def ended_at(self) -> float:
        """When it ended; the same for all where the system does not tell."""
        self._waiter.join(timeout=GRACE_S)
        return self._ended_at

    @property
    def how(self) -> str:
        """How it has ended."""
        code = self.process.returncode
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def _pass_on(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self.last.append(line.rstrip("\n"))
                # Process 0 has no prefix: its lines are those that a single process would print.
                sys.stdout.write(line if self.number == 0 else f"[{self.number}] {line}")
                sys.stdout.flush()

    def finish_reading(self, give_up: float) -> None:
        """Wait until its last output has been passed on, up to a time of the monotonic clock."""
        self._reader.join(timeout=max(0.0, give_up - time.monotonic()))

    def signal(self, number: int) -> None:
        """Send a signal to it and to its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def launch(script: Sequence[str], processes: int, devices: int | None = None) -> int:
    """Run a script in `processes` processes; returns the exit code of the first that fails, or 0.

    Args:
        script: the script and its arguments.
        processes: the number of processes.
        devices: the number of virtual CPU devices of each, if there is no accelerator.
    """
    if processes < 1:
        raise OptionError(f"-n counts the processes, at least 1. Received: {processes}.")
    if devices is not None and devices < 1:
        raise OptionError(f"--devices counts the devices of a process. Received: {devices}.")
    if not os.path.exists(script[0]):
        raise OptionError(f"There is no script {script[0]!r} here. Give the path of a Python file.")
    environment = dict(os.environ)
    environment[TOKEN] = secrets.token_hex(16)  # no other process on this machine can join
    environment[PROCESSES] = str(processes)
    environment["PYTHONUNBUFFERED"] = "1"  # through a pipe, lines would arrive late, or never
    if devices is not None:
        environment["TAILRACE_DEVICES"] = str(devices)
    command = [sys.executable, *script]
    watched: list[Watched] = []
    with _guardian() as tell, _ended_by_sigterm():
        try:
            # Open until process 0 has it, and no longer: a port that is only looked up may be taken
            # meanwhile, and after the roll call, which needs all processes, JAX binds it again.
            with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
                environment[COORDINATOR] = f"127.0.0.1:{server.getsockname()[1]}"
                first = {LISTENING: str(server.fileno())}
                for number in range(processes):
                    own = {**environment, PROCESS: str(number), **(first if number == 0 else {})}
                    files = [server.fileno()] if number == 0 else []
                    watched.append(Watched(number, command, own, files))
                    tell(f"+{watched[-1].process.pid}")
                    server.close()
            failed = _watch(watched, tell)
        except BaseException:
            _end(watched)
            _finish_reading(watched)
            raise
        return _finish(watched, failed)


def _finish(watched: Sequence[Watched], failed: Sequence[Watched]) -> int:
    others = [one for one in watched if one.process.poll() is None]
    _end(others)
    _finish_reading(watched)
    if not failed:
        return 0
    print(_failure_message(failed, len(watched), others), file=sys.stderr, flush=True)
    code = failed[0].process.returncode
    return code if code > 0 else 128 - code  # of a signal, as a shell reports it


def _finish_reading(watched: Sequence[Watched]) -> None:
    """Wait until all output of processes that have ended has been passed on."""
    # Of all, also of those that were ended: they may have said why another one failed, and the
    # threads that pass it on end with the interpreter.
    give_up = time.monotonic() + READ_S
    for one in watched:
        one.finish_reading(give_up)


@contextlib.contextmanager
def _guardian() -> Iterator[Callable[[str], None]]:
    """A process that terminates the others if this one is killed; yields a function to inform it."""
    path = os.path.join(os.path.dirname(__file__), "guardian.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", path],  # starts at once: no site packages, no environment
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # a signal to this process group must not end the guardian
    )
    assert process.stdin is not None

    def tell(line: str) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            print(line, file=process.stdin, flush=True)

    try:
        yield tell
    finally:
        tell("done")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the launcher as Ctrl-C does, with its processes."""
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    kinds = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = [signal.signal(kind, leave) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _watch(watched: Sequence[Watched], tell: Callable[[str], None]) -> list[Watched]:
    """Wait until all have succeeded, or some have failed, which are returned, the first one first."""
    running = set(watched)
    while True:
        codes = [one.process.poll() for one in watched]
        for one, code in zip(watched, codes, strict=True):
            if code is not None and one in running:
                running.discard(one)
                tell(f"-{one.process.pid}")  # the system may reuse its pid from now on
        # Not zero and not None. The first failure is the cause; the others may fail because of it.
        if failed := [one for one, code in zip(watched, codes, strict=True) if code]:
            return sorted(failed, key=Watched.ended_at)
        if all(code == 0 for code in codes):
            return []
        time.sleep(_POLL_S)


def _end(watched: Sequence[Watched]) -> None:
    # All at once, then one by one: together they get GRACE_S, not each.
    for one in watched:
        one.signal(signal.SIGTERM)
    give_up = time.monotonic() + GRACE_S
    for one in watched:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, give_up - time.monotonic()))
        one.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(GRACE_S)  # with a limit: it may hang in the kernel


def _failure_message(failed: Sequence[Watched], processes: int, others: Sequence[Watched]) -> str:
    first, *later = failed
    lines = [f"  | {line}" for line in list(first.last)] or ["  | (it printed nothing)"]
    rest = "".join(f" Then process {one.number} {one.how}." for one in later)
    if others:
        rest += f" The others ({', '.join(str(one.number) for one in others)}) were ended."
    return "\n".join(
        [f"tailrace launch: process {first.number} of {processes} {first.how}.{rest}", *lines]
    )


def add_parser(subparsers: Any) -> None:
    """`tailrace launch`: its options."""
    parser = subparsers.add_parser(
        "launch",
        help="run a script in several processes of this machine",
        description="Run a script that calls tr.distributed.initialize() in several processes of "
        "this machine. When one dies, it is named, its last lines are shown and the others ended.",
    )
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many processes")
    parser.add_argument(
        "--devices", type=int, help="virtual CPU devices of each process, without an accelerator"
    )
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs="...", help="its arguments")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    return launch([arguments.script, *arguments.arguments], arguments.processes, arguments.devices)
