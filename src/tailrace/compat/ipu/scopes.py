"""`ipu_scope`: which of the logical devices what is made inside runs on."""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import Any

from tailrace.compat.ipu.errors import IPUValueError

_ordinal: contextvars.ContextVar[int] = contextvars.ContextVar("ipu_device", default=0)
_DEVICE = re.compile(r"/?(?:device:)?IPU:(\d+)", re.IGNORECASE)


def ordinal_of(device: Any) -> int:
    """The number of a logical device, from `"/device:IPU:0"` or the number itself."""
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise IPUValueError(
            f'A device is named "/device:IPU:0", with the number of the logical device. '
            f"Received: {device!r}."
        )
    return int(match[1])


def current_ordinal() -> int:
    """The logical device of the scope around; 0 outside of all."""
    return _ordinal.get()


@contextlib.contextmanager
def ipu_scope(device: Any = "/device:IPU:0") -> Iterator[None]:
    """Programs compiled inside run on this logical device.

    >>> with ipu_scope("/device:IPU:0"):
    ...     current_ordinal()
    0
    """
    token = _ordinal.set(ordinal_of(device))
    try:
        yield
    finally:
        _ordinal.reset(token)


@contextlib.contextmanager
def ipu_shard(index: Any) -> Iterator[None]:
    """Accepted: operations are placed on devices by a pipeline's stages, not one by one."""
    from tailrace.messages import note_once

    note_once(
        f"ipu_shard({index}) places single operations on one chip; here the compiler places them. "
        f"To spread a model over devices, use a pipeline."
    )
    yield
