"""What the environment says about devices; read when `tailrace` is imported, without JAX."""

import os
import sys

from tailrace.errors import DeviceError

VARIABLE = "TAILRACE_DEVICES"


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
    """Ask JAX for as many virtual CPU devices as `TAILRACE_DEVICES` says.

    JAX is not imported for this: it reads its own variable when it is.
    """
    devices = asked_devices()
    if devices is None:
        return
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    if "jax" in sys.modules:
        from tailrace.devices.devices import ask_for_cpu_devices

        ask_for_cpu_devices(devices)
