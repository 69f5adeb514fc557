"""The names of the systems that programs are moved from: `compat.ipu` and `compat.poptorch`.

Those programs choose their devices when they run, again and again, so that there must be some to
choose from: importing this asks for 8 virtual CPU devices, if JAX has not started yet. They count
only where there is no accelerator; on a GPU or TPU its devices are the ones chosen from.
"""

from tailrace.devices import devices as _devices

DEVICES = 8
"""How many virtual CPU devices there are to choose from."""

_devices.offer_cpu_devices(DEVICES)
