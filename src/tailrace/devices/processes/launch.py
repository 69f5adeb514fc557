"""`tailrace launch`: runs a script in several processes of this machine, and monitors them.

Each process learns of the others through its environment, which `tr.distributed.initialize()` reads.
When one fails, the others would wait for it: they are ended, its last lines are shown, and all start
again if `--restarts` allows it. A signal to the launcher is passed on, and the processes get the time
that a save needs. If the launcher is killed, a guardian does the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from tailrace.base.checks import check_count, check_number
from tailrace.devices.environment import COORDINATOR, PROCESS, PROCESSES
from tailrace.devices.processes.rollcall import LISTENING, TOKEN
from tailrace.devices.processes.watched import AT_ONCE_S, Watched, end
from tailrace.errors import OptionError

GRACE_S = 120.0
"""How long processes may take to save after a signal, before they are killed."""

READ_S = 10.0
"""How long the output of ended processes is awaited: their children may keep the pipes open."""

MOST_PROCESSES = 1024
"""More on one machine are a slip of the keyboard."""

SAME_S = 0.2
"""Signals that come closer together than this are one: schedulers signal a process and its group."""

_POLL_S = 0.05


class Signals:
    """The signals that ask the launcher to end.

    Attributes:
        first: the first one; None before.
        hurried: whether a later one has asked to end at once.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.hurried = False
        self._at = 0.0

    def take(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. Nothing else happens in a handler: it runs between any two bytecodes."""
        if self.first is None:
            self.first, self._at = number, time.monotonic()
        elif time.monotonic() - self._at > SAME_S:
            self.hurried = True


class Start:
    """One start of all processes.

    Args:
        command: what each of them runs.
        environment: their common environment.
        tell: informs the guardian.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], tell: Callable[[str], None]
    ) -> None:
        self.watched: list[Watched] = []
        self._command, self._tell = command, tell
        # No other process on this machine can join, and none of a start before.
        self._environment = {**environment, TOKEN: secrets.token_hex(16)}
        self._running: set[Watched] = set()

    def begin(self, processes: int) -> None:
        """Start the processes."""
        # Open until process 0 has it, and no longer: a port that is only looked up may be taken
        # meanwhile, and after the roll call, which needs all processes, JAX binds it again.
        with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
            self._environment[COORDINATOR] = f"127.0.0.1:{server.getsockname()[1]}"
            first = {LISTENING: str(server.fileno())}
            for number in range(processes):
                own = {PROCESS: str(number), **(first if number == 0 else {})}
                files = [server.fileno()] if number == 0 else []
                one = Watched(number, self._command, {**self._environment, **own}, files)
                self.watched.append(one)
                self._running.add(one)
                self._tell(f"+{one.process.pid}")
                server.close()

    def watch(self, signals: Signals) -> list[Watched]:
        """Wait for a signal, for all to succeed, or for some to fail: those, the first one first."""
        while signals.first is None:
            codes = [one.code for one in self.watched]
            self.note_ended()
            # Not zero and not None. The first failure is the cause; others may fail because of it.
            if failed := [one for one, code in zip(self.watched, codes, strict=True) if code]:
                return sorted(failed, key=Watched.ended_at)
            if all(code == 0 for code in codes):
                break
            time.sleep(_POLL_S)
        return []

    def note_ended(self) -> None:
        """Tell the guardian which processes have ended: the system may reuse their pids from now on."""
        for one in [one for one in self._running if one.code is not None]:
            self._running.discard(one)
            self._tell(f"-{one.process.pid}")

    def end(
        self,
        number: int,
        within_s: float,
        signals: Signals | None = None,
        failed: Sequence[Watched] = (),
    ) -> None:
        """End all processes that still run, and what their scripts, and those of `failed`, started."""

        def pause() -> None:
            self.note_ended()
            time.sleep(_POLL_S)

        # Not the groups of those that ended long ago: their numbers may be those of others now.
        concerned = [one for one in self.watched if one in self._running or one in failed]
        end(concerned, number, within_s, lambda: signals is not None and signals.hurried, pause)
        self.note_ended()

    def finish(self) -> None:
        """Wait until all output of processes that have ended has been passed on."""
        # Of all, also of those that were ended: they may have said why another one failed, and the
        # threads that pass it on end with the interpreter.
        give_up = time.monotonic() + READ_S
        for one in self.watched:
            one.finish_reading(give_up)
            one.close()


def launch(
    script: Sequence[str],
    processes: int,
    devices: int | None = None,
    *,
    grace_s: float = GRACE_S,
    restarts: int = 0,
) -> int:
    """Run a script in `processes` processes; returns the exit code of the first that fails, or 0.

    Args:
        script: the script and its arguments.
        processes: the number of processes.
        devices: the number of virtual CPU devices of each, if there is no accelerator.
        grace_s: how long the processes may take to end after a signal to the launcher, in seconds.
        restarts: how often all processes are started again after one has failed.
    """
    environment = _checked(script, processes, devices, grace_s, restarts)
    command = [sys.executable, *script]
    causes: list[str] = []
    with _guardian(grace_s) as tell, _taking_signals() as signals:
        while True:
            start = Start(command, environment, tell)
            try:
                start.begin(processes)
                failed = start.watch(signals)
                if signals.first is not None:
                    return _end_by_signal(start, signals, grace_s)
                if not failed:
                    start.finish()
                    return 0
                causes.append(_end_others(start, failed, grace_s, signals))
                # A signal that came meanwhile: who ended it does not want it to start again.
                if signals.first is not None:
                    return 128 + signals.first
                if len(causes) > restarts:
                    _say(_gave_up(causes) if restarts else "")
                    return _shell_code(failed[0])
                _say(f"All start again, from the newest checkpoint ({len(causes)} of {restarts}).")
            except BaseException:
                start.end(signal.SIGTERM, AT_ONCE_S)
                start.finish()
                raise


def _checked(
    script: Sequence[str], processes: int, devices: int | None, grace_s: float, restarts: int
) -> dict[str, str]:
    """Check the arguments; the environment of all processes."""
    if processes < 1:
        raise OptionError(f"-n counts the processes, at least 1. Received: {processes}.")
    if processes > MOST_PROCESSES:
        raise OptionError(
            f"-n counts the processes on this machine, at most {MOST_PROCESSES}. Received: {processes}."
        )
    if devices is not None and devices < 1:
        raise OptionError(f"--devices counts the devices of a process. Received: {devices}.")
    check_number("--grace", grace_s, error=OptionError)
    check_count("--restarts", restarts, at_least=0, error=OptionError)
    if not os.path.exists(script[0]):
        raise OptionError(f"There is no script {script[0]!r} here. Give the path of a Python file.")
    if any("\0" in argument for argument in script):
        raise OptionError("Arguments of a program cannot contain the character NUL, and one does.")
    environment = dict(os.environ)
    environment[PROCESSES] = str(processes)
    environment["PYTHONUNBUFFERED"] = "1"  # through a pipe, lines would arrive late, or never
    if devices is not None:
        environment["TAILRACE_DEVICES"] = str(devices)
    return environment


def _end_by_signal(start: Start, signals: Signals, grace_s: float) -> int:
    """Pass a signal on, wait for the processes, and say what each did."""
    assert signals.first is not None
    name = signal.Signals(signals.first).name
    _say(
        f"{name}: the processes may take {grace_s:g} s to save and end (--grace); another signal ends "
        f"them at once."
    )
    # A terminal that is closed is no reason to lose the state: of SIGHUP nobody saves.
    number = signal.SIGINT if signals.first == signal.SIGINT else signal.SIGTERM
    start.end(number, grace_s, signals)
    start.finish()
    _say("; ".join(f"process {one.number} {one.how}" for one in start.watched) + ".")
    return 128 + signals.first


def _end_others(start: Start, failed: list[Watched], grace_s: float, signals: Signals) -> str:
    """End the others of processes that have failed, and report them; returns the cause."""
    others = [one for one in start.watched if one.code is None]
    # They cannot save together any more: nothing is left to wait for. Unless those that ended had been
    # asked to, and have saved with the others, which are about to end as well.
    saved = all(one.said for one in failed)
    start.end(signal.SIGTERM, grace_s if saved else AT_ONCE_S, signals, failed)
    start.finish()
    first, *later = failed
    cause = f"process {first.number} of {len(start.watched)} {first.how}."
    printed = [f"  | {line}" for line in list(first.last)] or ["  | (it printed nothing)"]
    rest = "".join(f" Then process {one.number} {one.how}." for one in later)
    if others:
        rest += f" The others ({', '.join(str(one.number) for one in others)}) were ended."
    _say("\n".join([cause + rest, *printed]))
    return "\n".join([cause, *printed])


def _gave_up(causes: Sequence[str]) -> str:
    # The first failure is the likeliest cause: a later start may have failed for what it has left.
    return (
        f"It failed {len(causes)} times, and --restarts allows no more. The first time {causes[0]}"
    )


def _shell_code(failed: Watched) -> int:
    code = failed.process.returncode
    return code if code > 0 else 128 - code  # of a signal, as a shell reports it


def _say(what: str) -> None:
    if what:
        print(f"tailrace launch: {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _guardian(grace_s: float) -> Iterator[Callable[[str], None]]:
    """A process that ends the others if this one is killed; yields a function to inform it."""
    path = os.path.join(os.path.dirname(__file__), "guardian.py")
    process = subprocess.Popen(
        # Starts at once: no site packages, no environment.
        [sys.executable, "-I", "-S", path, str(grace_s)],
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
            process.wait(AT_ONCE_S)


@contextlib.contextmanager
def _taking_signals() -> Iterator[Signals]:
    """Record Ctrl-C, SIGTERM and SIGHUP while it is open, in place of what they do."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield signals
        return
    kinds = [signal.SIGINT, signal.SIGTERM]
    # Under `nohup` the end of the terminal is ignored, and stays so.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        kinds.append(signal.SIGHUP)
    before = [signal.signal(kind, signals.take) for kind in kinds]
    try:
        yield signals
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


def add_parser(subparsers: Any) -> None:
    """`tailrace launch`: its options."""
    parser = subparsers.add_parser(
        "launch",
        help="run a script in several processes of this machine",
        description="Run a script that calls tr.distributed.initialize() in several processes of "
        "this machine. When one dies, it is named, its last lines are shown and the others ended; "
        "with --restarts all start again. On Ctrl-C and SIGTERM the processes save and end.",
    )
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many processes")
    parser.add_argument(
        "--devices", type=int, help="virtual CPU devices of each process, without an accelerator"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="SECONDS",
        help="how long the processes may take to save and end after a signal (default: %(default)g); "
        "a second signal ends them at once",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="if a process dies, end the others and start all again, up to N times; with "
        "fit(checkpoint=...) they go on from the newest checkpoint",
    )
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs="...", help="its arguments")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    return launch(
        [arguments.script, *arguments.arguments],
        arguments.processes,
        arguments.devices,
        grace_s=arguments.grace,
        restarts=arguments.restarts,
    )
