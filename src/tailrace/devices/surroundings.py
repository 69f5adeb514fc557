"""The environment that determines a program's bits: versions, flags, the kind of device."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax

from tailrace.devices import devices

SURROUNDINGS = "surroundings"
"""The entry of a checkpoint's note, and of a run, that keeps them."""


_CONFIGURED = ("jax_enable_x64", "jax_default_matmul_precision")
"""JAX's settings that change what programs compute."""


def surroundings() -> dict[str, str]:
    """The values that must be equal for equal bits, ready for JSON.

    >>> sorted(surroundings())  # doctest: +NORMALIZE_WHITESPACE
    ['XLA_FLAGS', 'device', 'driver', 'jax', 'jax_default_matmul_precision', 'jax_enable_x64',
     'jaxlib', 'platform']
    """
    device = devices.available()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": device.platform,
        "device": device.device_kind,
        # A driver brings its own libraries of kernels, and another kernel may round differently.
        "driver": str(getattr(device.client, "platform_version", "")),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **{name: str(getattr(jax.config, name)) for name in _CONFIGURED},
    }


def changed_since(then: Mapping[str, Any] | None) -> list[str]:
    """The differences since then, in words.

    >>> changed_since(surroundings()), changed_since(None)
    ([], [])
    >>> changed_since({"jax": "0.1"})[0].startswith("jax: 0.1 then, ")
    True
    """
    now = surroundings()
    return [
        f"{name}: {str(value) or 'none'} then, {now[name] or 'none'} now"
        for name, value in (then or {}).items()
        # What an older version did not record is no difference.
        if name in now and str(value) != now[name]
    ]
