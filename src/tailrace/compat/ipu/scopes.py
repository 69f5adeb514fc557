"""`ipu_scope`: which of the logical devices what is made inside runs on."""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator, Sequence

from tailrace.base.array_like import DTypeLike
from tailrace.base.messages import note_once
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.state import current
from tailrace.compat.originals.missing import missing_from

_ordinal: contextvars.ContextVar[int] = contextvars.ContextVar("ipu_device", default=0)
# TensorFlow's forms of a device name: with or without the leading parts, in any case.
_DEVICE = re.compile(r"/?(?:device:)?IPU:(\d+)", re.IGNORECASE)


def ordinal_of(device: object) -> int:
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
def ipu_scope(device: str | int = "/device:IPU:0") -> Iterator[None]:
    """Programs compiled inside run on this logical device.

    Args:
        device: `"/device:IPU:0"`, or the number of the logical device.

    Raises:
        IPUValueError: it does not name a logical device.

    >>> from tailrace.compat import ipu
    >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
    ...     program = ipu.ipu_compiler.compile(lambda x: x + 1, [1.0])
    >>> program()[0].item()
    2.0
    """
    # Read when `compile` is called: a program keeps the device of the scope in which it was made.
    token = _ordinal.set(ordinal_of(device))
    try:
        yield
    finally:
        _ordinal.reset(token)


@contextlib.contextmanager
def ipu_shard(index: int | Sequence[int]) -> Iterator[None]:
    """Reserve the devices up to this one for each copy of the program.

    The original ran the operations inside on that chip. Here the number of replicas is the same, and a
    copy computes on the first of its devices; to use all of them, cut the model into the stages of a
    pipeline.

    Args:
        index: the number of a device within a copy of the program, or a list of numbers.

    Raises:
        IPUValueError: it is neither a number nor a list of numbers.

    >>> from tailrace.compat import ipu
    >>> def add(x):
    ...     with ipu.scopes.ipu_shard(0):
    ...         return x + 1
    >>> ipu.ipu_compiler.compile(add, [1.0])()[0].item()
    2.0
    """
    from tailrace.compat.ipu.config import shards_of

    numbers = [index] if isinstance(index, int) else list(index)
    if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
        raise IPUValueError(
            f"ipu_shard takes the number of a device, or a list. Received: {index!r}."
        )
    # Counted in the first look, before the number of replicas is fixed: the devices divided by these.
    scope = current()
    if scope is not None and scope.looking:
        scope.found.shards = max(scope.found.shards, shards_of(max(numbers)))
    note_once(
        "ipu_shard spread the operations of a program over several chips. Here a copy of the program "
        "reserves as many devices, so that the number of replicas is the same, and computes on the "
        "first of them. To use all of them, cut the model into the stages of a pipeline."
    )
    yield


@contextlib.contextmanager
def ipu_jit_scope(ipu_scope: str) -> Iterator[None]:
    """Without effect: one compiled function is one program.

    Args:
        ipu_scope: a name.

    >>> from tailrace.compat import ipu
    >>> with ipu.scopes.ipu_jit_scope("step"):
    ...     pass
    """
    note_once(f"ipu_jit_scope({ipu_scope!r}) has no effect: a compiled function is one program.")
    yield


@contextlib.contextmanager
def outside_compilation_scope(name: str = "outside") -> Iterator[None]:
    """Without effect: what is computed inside is computed on the device, with the same results.

    The original computed it on the host. For code that must run there, use `jax.pure_callback`.

    Args:
        name: a name.

    >>> from tailrace.compat import ipu
    >>> with ipu.scopes.outside_compilation_scope():
    ...     pass
    """
    note_once(
        f"outside_compilation_scope({name!r}) put operations on the host. They are part of the "
        f"program here; for code that must run on the host, use jax.pure_callback."
    )
    yield


@contextlib.contextmanager
def frontend_attribute(
    attribute_name: str, attribute_value: str, restore_to: str | None = None
) -> Iterator[None]:
    """Without effect: it gave operations an attribute for the original's compiler.

    Args:
        attribute_name: the attribute.
        attribute_value: its value inside.
        restore_to: its value afterwards.

    >>> from tailrace.compat import ipu
    >>> with ipu.scopes.frontend_attribute("name", "value"):
    ...     pass
    """
    del attribute_value, restore_to
    note_once(f"frontend_attribute({attribute_name!r}) is for the original's compiler.")
    yield


@contextlib.contextmanager
def stochastic_rounding(override: bool) -> Iterator[None]:
    """Without effect: results are rounded to the nearest.

    Args:
        override: whether the original rounded stochastically inside.

    >>> from tailrace.compat import ipu
    >>> with ipu.scopes.stochastic_rounding(True):
    ...     pass
    """
    note_once(
        f"stochastic_rounding({override}) is about the original chip and changes nothing here."
    )
    yield


@contextlib.contextmanager
def partials_type(override_type: DTypeLike) -> Iterator[None]:
    """Without effect: products are summed in float32.

    Args:
        override_type: the dtype in which the original summed products inside.

    >>> from tailrace.compat import ipu
    >>> with ipu.scopes.partials_type("float16"):
    ...     pass
    """
    note_once(
        f"partials_type({override_type}) is about the original chip and changes nothing here."
    )
    yield


__getattr__, __dir__ = missing_from(__name__)
