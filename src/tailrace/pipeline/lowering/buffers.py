"""Values of different devices in buffers of common shapes.

A program that runs on all devices has arrays of one shape on all of them, and stages have values of
many shapes. So each device's values are laid out in flat buffers that all devices have. Large values
get a buffer of their own (the largest of every device share one, then the next largest, and so on:
for stages that look alike nothing is padded and nothing is copied); small ones share a buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.jaxprs import internals
from tailrace.taps.frame import Scalar

_SMALL = 16_384
"""Values of at most this many bytes share a buffer: reading one copies it, which is cheap."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a value.

    Attributes:
        shape: of one of it.
        dtype: of one of it.
        depth: the number of values, selected by an index.
        each: whether it differs per replica.
        hosted: whether it is in host memory.
    """

    shape: tuple[int, ...]
    dtype: Any
    depth: int = 1
    each: bool = False
    hosted: bool = False

    @classmethod
    def of(cls, aval: Any, depth: int = 1, each: bool = False, hosted: bool = False) -> Form:
        """The form of a value like `aval`."""
        return cls(tuple(aval.shape), aval.dtype, depth, each, hosted)

    @property
    def is_key(self) -> bool:
        """Whether it is a random key, which is kept as its numbers."""
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    @property
    def as_bits(self) -> bool:
        """Whether it is kept as integers: XLA's CPU compiler does not write 16-bit floats in place.

        It would convert all slots to float32 and back for each one that is written.
        """
        if self.depth == 1 or self.is_key or not jnp.issubdtype(self.dtype, jnp.floating):
            return False
        return jnp.dtype(self.dtype).itemsize < 4

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """What is kept of one of it."""
        form = jax.ShapeDtypeStruct(self.shape, self.dtype)
        if self.as_bits:
            return jax.ShapeDtypeStruct(self.shape, f"uint{8 * jnp.dtype(self.dtype).itemsize}")
        return jax.eval_shape(jax.random.key_data, form) if self.is_key else form

    @property
    def size(self) -> int:
        """Numbers in one of it."""
        return math.prod(self.stored.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.size * self.depth * jnp.dtype(self.stored.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a value: its buffer and offset."""

    form: Form
    buffer: int
    offset: int


class Layout:
    """The places of each device's values.

    Args:
        values: for each device, the form of each value by key.
        together: one buffer for each dtype, as messages need it, however large the values are.
    """

    def __init__(
        self, values: Sequence[Mapping[Hashable, Form]], *, together: bool = False
    ) -> None:
        self.slots: list[dict[Any, Slot]] = [{} for _ in values]
        sizes: dict[tuple[Any, bool, bool, int], int] = {}
        for device, forms in enumerate(values):
            shared: dict[Any, int] = {}  # by kind: the used length of its common buffer
            alone: dict[Any, int] = {}  # by kind: the number of values with a separate buffer
            # Largest first: the n-th largest values of all devices then share a buffer, which
            # minimizes padding.
            ordered = sorted(forms.items(), key=lambda item: -item[1].nbytes)
            for key, form in ordered:
                # Values of one buffer have one dtype, one sharding and one memory.
                kind = (jnp.dtype(form.stored.dtype), form.each, form.hosted)
                total = form.size * form.depth
                if together or form.nbytes <= _SMALL:
                    place, offset = (*kind, 0), shared.get(kind, 0)
                    shared[kind] = offset + total
                else:
                    alone[kind] = alone.get(kind, 0) + 1
                    place, offset = (*kind, alone[kind]), 0
                sizes[place] = max(sizes.get(place, 0), offset + total)
                # The number of a buffer is the position of its kind among all kinds, in order of
                # appearance.
                self.slots[device][key] = Slot(form, list(sizes).index(place), offset)
        # If the shape is the same on all devices, the buffer has it too: XLA then adds to it in place.
        shapes: dict[int, set[tuple[int, ...]]] = {}
        for slot in (slot for slots in self.slots for slot in slots.values()):
            # With several slots the buffer is flat: a slot is then one contiguous range of it.
            own = slot.form.stored.shape if slot.form.depth == 1 else ()
            shapes.setdefault(slot.buffer, set()).add(tuple(own))
        self.buffers = []
        for number, (place, count) in enumerate(sizes.items()):
            found = shapes[number]
            # A shared buffer (number 0) stays flat: several values of one shape may be in it.
            shape = next(iter(found)) if len(found) == 1 and place[-1] else ()
            self.buffers.append(jax.ShapeDtypeStruct(shape or (count,), place[0]))
        self.each = [place[1] for place in sizes]
        self.hosted = [place[2] for place in sizes]

    def zeros(self) -> list[Any]:
        """Empty buffers."""
        made = [jnp.zeros(form.shape, form.dtype) for form in self.buffers]
        return [
            to_host(value) if hosted else value
            for value, hosted in zip(made, self.hosted, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of one device."""
        return sum(form.size * form.dtype.itemsize for form in self.buffers)

    def used(self, device: int) -> int:
        """The bytes in them that a device's values use."""
        return sum(slot.form.nbytes for slot in self.slots[device].values())

    def read(
        self, device: int, buffers: Sequence[Any], key: Hashable, index: Scalar | None = None
    ) -> jax.Array:
        """The value of a device under `key`."""
        slot = self.slots[device][key]
        form, flat = slot.form, buffers[slot.buffer]
        # A slot in host memory is cut out first, so that only it is copied to the device.
        if form.hosted and (index is None or flat.ndim > 1):
            flat = to_device(flat)
        if flat.ndim > 1:
            return wrapped(flat, form)
        if index is not None:
            flat = lax.dynamic_slice_in_dim(flat, slot.offset + index * form.size, form.size)
            flat = to_device(flat) if form.hosted else flat
        elif form.size != flat.shape[0]:
            flat = lax.slice_in_dim(flat, slot.offset, slot.offset + form.size)
        value = flat.reshape(form.stored.shape)
        return wrapped(value, form)

    def write(
        self,
        device: int,
        buffers: list[Any],
        key: Hashable,
        value: jax.Array,
        index: Scalar | None = None,
    ) -> None:
        """Put the value of a device under `key` into `buffers`."""
        slot = self.slots[device][key]
        form = slot.form
        old = buffers[slot.buffer]
        flat = jnp.asarray(unwrapped(value, form), form.stored.dtype)
        flat = flat if old.ndim > 1 else flat.reshape(-1)
        flat = to_host(flat) if form.hosted else flat
        if flat.shape == old.shape:  # the whole buffer: nothing of the old value remains
            buffers[slot.buffer] = flat
            return
        start = slot.offset if index is None else slot.offset + index * form.size
        buffers[slot.buffer] = lax.dynamic_update_slice_in_dim(old, flat, start, 0)


def to_host(value: object) -> Any:
    """A value of a program, moved to host memory."""
    return jax.device_put(value, jax.memory.Space.Host)


def to_device(value: object) -> Any:
    """A value of a program, moved to the device."""
    return jax.device_put(value, jax.memory.Space.Device)


def unwrapped(value: jax.Array, form: Form) -> jax.Array:
    """What is kept of a value."""
    if form.as_bits:
        return lax.bitcast_convert_type(jnp.asarray(value, form.dtype), form.stored.dtype)
    return jax.random.key_data(value) if form.is_key else value


def wrapped(value: jax.Array, form: Form) -> jax.Array:
    """What was kept of a value, as the value."""
    if form.as_bits:
        return lax.bitcast_convert_type(value, form.dtype)
    if not form.is_key:
        return value
    return jax.random.wrap_key_data(value, impl=internals.key_generator(form.dtype))
