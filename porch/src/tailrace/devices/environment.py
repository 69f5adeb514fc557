"""What the environment asks for; read when `tailrace` is imported, without JAX.

TAILRACE_DEVICES   how many virtual CPU devices there are
TAILRACE_CACHE     a directory that keeps compiled programs for later processes
"""

import contextlib
import os
import sys

from tailrace.errors import DeviceError

VARIABLE, CACHE = "TAILRACE_DEVICES", "TAILRACE_CACHE"
COORDINATOR, PROCESSES, PROCESS = "TAILRACE_COORDINATOR", "TAILRACE_PROCESSES", "TAILRACE_PROCESS"
"""What `tailrace launch` sets in each process; `tr.distributed.initialize` reads it."""

TOO_LATE = (
    "TAILRACE_DEVICES is set, but JAX had started before Tailrace was imported. Import tailrace first, "
    "before anything that uses JAX."
)
"""What to do where the variable asks for enough devices, and they are not there."""


def asked_devices() -> int | None:
    """The number of devices that `TAILRACE_DEVICES` asks for, or None."""
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
    """Hand on to JAX what `TAILRACE_DEVICES` and `TAILRACE_CACHE` say.

    JAX is not imported for this: it reads its own variables when it is.
    """
    devices = asked_devices()
    if devices is not None:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        if (jax := sys.modules.get("jax")) is not None:
            # Where it has started, too few devices are refused when they are used.
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", devices)
    if directory := os.environ.get(CACHE):
        _keep_programs(directory)


def _keep_programs(directory: str) -> None:
    """Let JAX's compilation cache keep whatever takes a second to compile, in a directory."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", directory)
    if (jax := sys.modules.get("jax")) is not None and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", directory)
