"""Optimizer state offloaded to host memory: whether the device supports it, and the transfers.

State that only the update uses need not be on the device while gradients are accumulated. The loop
carries it in pinned host memory; it is fetched when a step's gradients are ready, and sent back.

The form of the program decides whether any memory is saved. XLA starts a copy as early as it can, which
would be before the first microbatch, and removes optimization barriers before it schedules operations.
But it cannot hoist a copy out of a loop that changes the copied value: so each part of the update is
in a separate loop of one iteration, whose length is known only at run time.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.devices.devices import Device
from tailrace.errors import OptionError
from tailrace.jaxprs.marks import Tag, ambient, mark

HOST_MEMORY = "pinned_host"

LEAST_BYTES = 1 << 16
"""Smaller leaves stay on the device: a transfer costs more than the memory is worth."""

PARTS = 8
"""The number of parts in which the state is fetched, if the update can be cut that way."""

_POOL_GB = 64
"""The pinned memory that the CUDA client allocates without XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB."""


@dataclasses.dataclass(frozen=True)
class Moves:
    """Transfers of a value between device and host memory, inside a program."""

    to_host: Callable[[Any], Any]
    to_device: Callable[[Any], Any]

    def bring_in(self, value: object) -> Tree:
        """Transfer a value from host memory to the device."""
        return mark(value, Tag("memory", payload=self.to_device))

    def send_back(self, value: object) -> Tree:
        """Transfer a value from the device to host memory."""
        return mark(value, Tag("memory", payload=self.to_host))


def memory_moves() -> Moves:
    """Transfers between the memories of an accelerator and its host."""
    space = jax.memory.Space
    return Moves(
        lambda value: jax.device_put(value, space.Host),
        lambda value: jax.device_put(value, space.Device),
    )


NO_MOVES = Moves(lambda value: value, lambda value: value)
"""No-op transfers: the same program order, for tests on a CPU."""


def obstacle(device: Device, guarded: bool) -> str | None:
    """Why optimizer state cannot be offloaded from this device, or None if it can."""
    if device.platform == "cpu":
        return "the device is a CPU, whose memory is the host's already"
    try:
        kinds = {memory.kind for memory in device.addressable_memories()}
    except Exception as error:  # a plugin without memory kinds
        return f"the device does not list its memories ({error})"
    if HOST_MEMORY not in kinds:
        return f"a {device.device_kind} has no {HOST_MEMORY} memory"
    # Last, so that the message names a choice of the user only where the device could do it.
    if guarded:
        return (
            "tr.stop_on_nonfinite keeps the state from before each execution, which takes the memory "
            "that offloading would save"
        )
    return None


def check_activations(wanted: object) -> None:
    """Refuse values other than True and False."""
    if not isinstance(wanted, bool):
        raise OptionError(f"offload_activations is True or False. Received: {wanted!r}.")


_INSTEAD = (
    "Leave it out, shard the state over replicas (shard_optimizer_state=True), or use an "
    "optimizer with less state."
)
"""Advice for optimizers with too much state."""


def check_fits(
    needed: int,
    available: int | None,
    platform: str,
    option: str = "offload_optimizer_state",
    instead: str = _INSTEAD,
) -> None:
    """Refuse to offload more than the host has memory for."""
    if available is not None and needed > available:
        raise OptionError(
            f"{option}=True would keep {needed / 1e9:,.1f} GB in the host's memory, which has "
            f"{available / 1e9:,.1f} GB free. {instead}"
        )
    limit = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    pool = float(limit) if limit and limit.replace(".", "", 1).isdigit() else _POOL_GB
    if platform in ("gpu", "cuda", "rocm") and needed > pool * 1e9:
        raise OptionError(
            f"{option}=True would keep {needed / 1e9:,.1f} GB in pinned memory, of which the GPU "
            f"client allocates {pool:g} GB at most. Set "
            f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={-(-needed // 10**9) + 8} before JAX starts."
        )


def free_host_memory() -> int | None:
    """The free bytes of host memory, if the system reports them."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            # Available, not free: the cache of files is given up when memory is needed.
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def after_accumulation(body: Callable[[Any], Any], carried: Tree) -> Tree:
    """`body(carried)`, emitted so that none of it can start before all of `carried` is ready."""
    # Always one iteration, since a step's index is never negative; but XLA does not know that.
    passes = jnp.where(ambient("step", -1, 1) < 0, 2, 1)

    def one(state: Tree) -> Tree:
        done, carried = state
        return done + 1, body(carried)

    return lax.while_loop(lambda state: state[0] < passes, one, (jnp.int32(0), carried))[1]


def in_parts(needs: Sequence[int], sizes: Sequence[int], parts: int = PARTS) -> list[list[int]]:
    """Partition results into parts that share no leaf of the state.

    Args:
        needs: for each result, the leaves it is computed from, as a bit mask.
        sizes: the bytes of each leaf.
        parts: the approximate number of parts.

    Returns:
        Lists of results. Results in different lists have no leaf in common. Results that need no leaf
        are in none of them.

    >>> in_parts([0b001, 0b010, 0b001, 0b100, 0], [8, 8, 8], parts=2)
    [[0, 2, 1], [3]]
    """
    joined: list[tuple[int, list[int]]] = []
    for result, bits in enumerate(needs):
        if bits:
            members = [result]
            apart = []
            for others, results in joined:
                if others & bits:
                    # Groups that share a leaf become one: a leaf is fetched and sent back in one
                    # part only.
                    bits |= others
                    members = results + members
                else:
                    apart.append((others, results))
            joined = [*apart, (bits, members)]
    joined.sort(key=lambda group: min(group[1]))
    enough = sum(sizes) / parts
    found: list[list[int]] = []
    held = enough
    for bits, results in joined:
        if held >= enough:
            found.append([])
            held = 0
        found[-1] += results
        # In the order of results, up to an equal share of the bytes.
        held += sum(size for place, size in enumerate(sizes) if bits >> place & 1)
    return found
