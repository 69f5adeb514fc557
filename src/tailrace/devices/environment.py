"""Environment variables; read when `tailrace` is imported, without JAX.

TAILRACE_DEVICES   the number of virtual CPU devices
TAILRACE_CACHE     a directory for compiled programs, shared with later processes; who can write there
                   can run code in them
"""

import contextlib
import os
import stat
import sys

from tailrace.base.messages import note_once
from tailrace.errors import DeviceError

VARIABLE, CACHE = "TAILRACE_DEVICES", "TAILRACE_CACHE"
COORDINATOR, PROCESSES, PROCESS = "TAILRACE_COORDINATOR", "TAILRACE_PROCESSES", "TAILRACE_PROCESS"
"""Set by `tailrace launch` in each process, and read by `tr.distributed.initialize`."""

TOO_LATE = (
    "TAILRACE_DEVICES is set, but JAX had started before Tailrace was imported. Import tailrace first, "
    "before anything that uses JAX."
)
"""Advice if the variable requests enough devices but they do not exist."""


def asked_devices() -> int | None:
    """The number of devices that `TAILRACE_DEVICES` requests, or None."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise DeviceError(
            f"TAILRACE_DEVICES must be a positive number of devices. "
            f"Received: TAILRACE_DEVICES={text!r}."
        )
    return int(text)


def apply_environment() -> None:
    """Pass the values of `TAILRACE_DEVICES` and `TAILRACE_CACHE` to JAX.

    This does not import JAX, which reads its environment variables when it is imported.
    """
    devices = asked_devices()
    if devices is not None:
        # Both: the variable for a JAX that is imported later and for child processes, the option
        # for one that is imported already.
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        if (jax := sys.modules.get("jax")) is not None:
            # If JAX has started already, too few devices raise an error when they are used.
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", devices)
    if directory := os.environ.get(CACHE):
        if problem := cache_problem(directory):
            note_once(problem)
        else:
            _keep_programs(directory)


def cache_problem(directory: str) -> str:
    """Why compiled programs are not kept in a directory, as a sentence; empty if they are.

    >>> cache_problem("no such directory, so it will be this user's")
    ''
    """
    try:
        found = os.stat(directory)
    except FileNotFoundError:
        return ""  # made by JAX when it is needed, for this user
    except (OSError, ValueError) as error:
        return f"{CACHE}={directory!r:.200} cannot be used, and nothing is kept there: {error}."
    if not stat.S_ISDIR(found.st_mode):
        return f"{CACHE} is a directory. Received: {directory!r}, which is a file: nothing is kept."
    # A compiled program is code that later processes run.
    foreign = hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0)
    if not foreign and not found.st_mode & stat.S_IWOTH:
        return ""
    why = "belongs to another user" if foreign else "can be written by every user"
    return (
        f"{CACHE}={directory!r} {why} of this machine, who could place a program there for this "
        f"one to run: it is not used. Use a directory of your own (chmod o-w)."
    )


def _keep_programs(directory: str) -> None:
    """Let JAX's compilation cache keep programs that take a second to compile, in a directory."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", directory)
    if (jax := sys.modules.get("jax")) is not None and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", directory)
