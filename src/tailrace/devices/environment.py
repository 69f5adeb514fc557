"""Environment variables; read when `tailrace` is imported, without JAX.

TAILRACE_DEVICES   the number of virtual CPU devices
TAILRACE_CACHE     a directory for compiled programs, shared with later processes
"""

import contextlib
import os
import sys

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
        _keep_programs(directory)


def _keep_programs(directory: str) -> None:
    """Let JAX's compilation cache keep programs that take a second to compile, in a directory."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", directory)
    if (jax := sys.modules.get("jax")) is not None and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", directory)
