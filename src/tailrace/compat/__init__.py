"""Compatibility with the systems that programs are ported from: `compat.ipu` and `compat.poptorch`.

In: programs written for those systems, with only their imports changed. Out: the same results,
computed by Tailrace. `tensorflow`, `popdist` and `ipu_tensorflow_addons` have the other packages that
such programs import; `originals` lists every name and what became of it.

Such programs choose their devices at run time, repeatedly: importing this package requests 8 virtual
CPU devices, if JAX has not started yet. They are used only if there is no accelerator.

Rule: no other package imports this one.
"""

from tailrace.devices import devices as _devices

DEVICES = 8
"""How many virtual CPU devices there are to choose from."""

_devices.offer_cpu_devices(DEVICES)
