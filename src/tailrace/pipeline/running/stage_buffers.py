"""The carry of a pipelined loop in the buffers of its devices: writing, replacing parts, reading.

Stages have different values, yet one program runs on all devices, so values of different shapes share
buffers of equal shape: `Assembly.held_layout` says which device has which value where. A value that
all devices have is a separate array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tailrace.devices.devices import REPLICA, STAGE
from tailrace.pipeline.lowering.buffers import Slot, wrapped
from tailrace.pipeline.lowering.device_layout import Assembly
from tailrace.pipeline.running.buffer_writes import Patches, cut_out, patched
from tailrace.pipeline.running.pipeline_executable import PipelinePlacement
from tailrace.program.memory.host_memory import HOST_MEMORY
from tailrace.program.running.loop_state import Buffer, LoopState


class StageBuffers:
    """Values of a loop's carry, by their number in it, in the buffers of a `LoopState`.

    Args:
        assembly: which device holds what.
        placement: the devices.
    """

    def __init__(self, assembly: Assembly, placement: PipelinePlacement) -> None:
        self._assembly, self._placement = assembly, placement

    def arrays(self, state: LoopState) -> list[Any]:
        """The buffers of the devices, then the values that are equal on all."""
        a = self._assembly
        return [
            *(state.values[Buffer("held", i)] for i in range(len(a.held_layout.buffers))),
            *(state.values[Buffer("all", number)] for number in a.everywhere),
        ]

    def fill(self, state: LoopState, leaves: Sequence[Any]) -> None:
        """Make all buffers, from the values of the whole carry."""
        given = dict(enumerate(leaves))
        self._fill_everywhere(state, given)
        for index in range(len(self._assembly.held_layout.buffers)):
            self._fill_held(state, given, index)

    def replace(self, state: LoopState, given: Mapping[int, Any]) -> None:
        """Replace some values."""
        layout = self._assembly.held_layout
        self._fill_everywhere(state, given)
        for index, (each, hosted) in enumerate(zip(layout.each, layout.hosted, strict=True)):
            patches = self._patches(index, given)
            if patches and hosted:
                # No operation runs in host memory, so the buffer cannot be changed where it is.
                held = self.values(state, range(len(self._assembly.carry_in)))
                self._fill_held(state, {**held, **given}, index)
            elif patches:
                state.values[Buffer("held", index)] = patched(
                    state.values[Buffer("held", index)], patches, each
                )

    def values(self, state: LoopState, numbers: Iterable[int]) -> dict[int, Any]:
        """Values of the carry, copied to the first device."""
        a, first = self._assembly, self._placement.device
        found: dict[int, Any] = {}
        together: dict[tuple[int, int], dict[int, Slot]] = {}
        for number in dict.fromkeys(numbers):
            if number in a.everywhere:
                value = self._placement.readable(state.values[Buffer("all", number)])
                found[number] = jax.device_put(value, first)
                continue
            # A value that several stages use is on several devices, and equal there.
            device = min(d for d, slots in enumerate(a.held_layout.slots) if number in slots)
            slot = a.held_layout.slots[device][number]
            together.setdefault((slot.buffer, device), {})[number] = slot
        # By buffer and device: one slicing program and one copy for all values that come from there.
        for (buffer, device), slots in together.items():
            forms = [slot.form for slot in slots.values()]
            rows = self._rows(state.values[Buffer("held", buffer)], device, forms[0].each)
            places = tuple((slot.offset, slot.form.stored.shape) for slot in slots.values())
            # Sliced on the device: a buffer has all values of a stage, and often few are requested.
            parts = jax.device_put([cut_out(row, places) for row in rows], first)
            for number, form, *values in zip(slots, forms, *parts, strict=True):
                value = jnp.stack(values) if form.each else values[0]
                found[number] = wrapped(value, form)
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _fill_everywhere(self, state: LoopState, given: Mapping[int, Any]) -> None:
        a, placement = self._assembly, self._placement
        for number in a.everywhere:
            if number not in given:
                continue
            value = given[number]
            if number in a.each:
                value = _for_each(value, self._form(number), placement.replicas)
                state.values[Buffer("all", number)] = placement.own_each(value)
            else:
                state.values[Buffer("all", number)] = placement.own(value)

    def _fill_held(self, state: LoopState, given: Mapping[int, Any], index: int) -> None:
        """Make one buffer, with the values of all devices."""
        a, placement, layout = self._assembly, self._placement, self._assembly.held_layout
        form, each = layout.buffers[index], layout.each[index]
        lead = (placement.replicas, a.num_devices) if each else (a.num_devices,)
        # Built on the host: no device has memory for the buffers of all.
        block = np.zeros((*lead, math.prod(form.shape)), form.dtype)
        for (replica, device), parts in self._patches(index, given).items():
            for place, flat in parts.items():
                where = (replica, device) if each else (device,)
                block[(*where, slice(place, place + len(flat)))] = np.asarray(flat)
        spec = PartitionSpec(REPLICA, STAGE) if each else PartitionSpec(STAGE)
        sharding = NamedSharding(placement.mesh, spec)
        if layout.hosted[index]:
            sharding = sharding.with_memory_kind(HOST_MEMORY)
        block = block.reshape(*lead, *form.shape)
        state.values[Buffer("held", index)] = _owned(jax.device_put(block, sharding))

    def _patches(self, index: int, given: Mapping[int, Any]) -> Patches:
        """The places of some leaves in a buffer."""
        layout, replicas = self._assembly.held_layout, self._placement.replicas
        each = layout.each[index]
        found: dict[tuple[int, int], dict[int, Any]] = {}
        for device, slots in enumerate(layout.slots):
            for number, slot in slots.items():
                if slot.buffer != index or number not in given:
                    continue
                value = given[number]
                if slot.form.is_key:
                    value = jax.random.key_data(value)
                if each:
                    value = _for_each(value, self._form(number), replicas)
                rows = np.asarray(value).reshape(replicas if each else 1, -1)
                for replica, row in enumerate(rows):
                    found.setdefault((replica, device), {})[slot.offset] = row
        return found

    def _rows(self, buffer: jax.Array, device: int, each: bool) -> list[Any]:
        """A buffer on one device of each replica, flat; of one replica if all are equal."""
        if buffer.sharding.memory_kind == HOST_MEMORY:  # where no operation can run
            buffer = jax.device_put(buffer, buffer.sharding.with_memory_kind("device"))
        if not self._placement.in_one_process:  # the device may be another process's
            whole = self._placement.readable(buffer)
            return [row[device].reshape(-1) for row in (whole if each else [whole])]
        parts = {}
        for shard in buffer.addressable_shards:
            starts = [index.start or 0 for index in shard.index]
            replica, stage = starts[:2] if each else (0, starts[0])
            if stage == device:
                parts[replica] = shard.data
        return [parts[key].reshape(-1) for key in sorted(parts)]

    def _form(self, number: int) -> Any:
        return self._assembly.carry_in[number].aval


def _owned(value: jax.Array) -> jax.Array:
    """An unshared copy, which a loop may overwrite."""
    if value.sharding.memory_kind == HOST_MEMORY:
        return value  # it was copied there
    # `device_put` may share the memory of the NumPy block; a dispatch donates the buffer.
    return jnp.copy(value)


def _for_each(value: jax.Array, form: Any, replicas: int) -> jax.Array:
    """A value per replica: the same for all if there is only one."""
    if jnp.ndim(value) == len(form.shape):
        return jnp.broadcast_to(value, (replicas, *jnp.shape(value)))
    return value
