"""Where a program runs, and how values get there and back."""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tailrace.devices import devices
from tailrace.devices.devices import Device
from tailrace.devices.shardings import ModelSharding, without_mesh
from tailrace.errors import ProgramError, ReplicaError


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a program runs: one device, the replicas of a mesh, or the mesh of a sharded model.

    Attributes:
        replicas: the number of replicas.
        mesh: the mesh of the replicas; None for one device, or a sharded model.
        chosen: the one device, if it is not the first.
        sharding: how the model is sharded, if it is; there is one replica then.
    """

    replicas: int = 1
    mesh: Mesh | None = dataclasses.field(init=False)
    chosen: Any = dataclasses.field(default=None, kw_only=True)
    sharding: ModelSharding | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        mesh = devices.mesh(self.replicas) if self.replicas > 1 else None
        object.__setattr__(self, "mesh", mesh)
        if mesh is None and len({d.process_index for d in devices.available()}) > 1:
            raise ReplicaError(
                f"Each process computes at least one replica. Received: replicas=1 for "
                f"{jax.process_count()} processes. Use replicas=None for one on each device, or "
                f"replicas={jax.process_count()}."
            )

    @property
    def in_one_process(self) -> bool:
        """Whether this process has all the devices."""
        return self.mesh is None or self.mesh.is_multi_process is False

    @property
    def local_replicas(self) -> int:
        """The number of replicas that this process runs and feeds."""
        if self.mesh is None:  # one device; or a pipeline whose stages are not known yet
            return max(1, self.replicas // jax.process_count())
        return devices.local_replicas(self.mesh)

    @property
    def device(self) -> Device:
        """A device of this process, to query capabilities."""
        if self.sharding is not None or self.chosen is not None:
            return self.devices[0]
        return jax.local_devices()[0] if self.mesh is None else self.mesh.local_devices[0]

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The ids of all devices, in order."""
        return tuple(device.id for device in self.devices)

    @property
    def devices(self) -> list[Device]:
        """All devices, in order."""
        mesh = self.mesh if self.sharding is None else self.sharding.mesh
        return [self.everywhere] if mesh is None else list(mesh.devices.flat)

    @property
    def everywhere(self) -> Any:
        """The sharding of replicated values."""
        return self._spread()

    @property
    def shared_out(self) -> Any:
        """The sharding of elements: dim 1 is sharded over the replicas, or over the batch axes."""
        return (
            self._spread(None, devices.REPLICA) if self.sharding is None else self.sharding.batches
        )

    def within(self) -> contextlib.AbstractContextManager[None]:
        """A context to trace and lower in: the mesh of a sharded model is then JAX's."""
        return _without_a_mesh() if self.sharding is None else self.sharding.within()

    def outside(self) -> contextlib.AbstractContextManager[Any]:
        """A context for work on its arrays: without a mesh of JAX that is not the model's."""
        return without_mesh() if self.sharding is None else self.sharding.outside()

    def _spread(self, *axes: str | None) -> Any:
        """A sharding over the mesh; without a mesh, the single device."""
        if self.sharding is not None:
            return self.sharding.replicated
        if self.mesh is None:
            return devices.available()[0] if self.chosen is None else self.chosen
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def put(self, values: Sequence[Any]) -> list[Any]:
        """Transfer values to the devices; those already there are not copied."""
        return [self._place(value, self.everywhere) for value in values]

    def own(self, value: object) -> jax.Array:
        """A copy of a value on the devices that a loop may overwrite."""
        # Copied even if placing it made a copy: on a CPU `device_put` may alias the caller's memory,
        # which a donated buffer would overwrite.
        return jnp.copy(self._place(value, self.everywhere))

    def own_each(self, value: object) -> jax.Array:
        """The same for a value that differs per replica: dim 0 is the replica dim."""
        return jnp.copy(self._place(value, self._spread(devices.REPLICA)))

    def _place(self, value: object, sharding: jax.sharding.Sharding) -> jax.Array:
        """A value on the devices; with several processes, each has the value and places its part.

        Arrays of a sharded model keep their shardings.
        """
        if self.sharding is not None and self.sharding.holds(value):
            return self.sharding.own(value)
        if self.in_one_process:
            return jax.device_put(value, sharding)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            # A value that no process can read whole is moved by a program that all of them run.
            return jax.jit(lambda x: x, out_shardings=sharding)(value)
        array = np.asarray(value)
        # Every process has the whole value and places the parts of its own devices: nothing is sent.
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def readable(self, value: jax.Array) -> jax.Array:
        """A value on the devices that this process can read alone; all processes must call this.

        A replicated value is read from a local device; any other is gathered.
        """
        if self.in_one_process or value.is_fully_addressable:
            return value
        if not value.is_fully_replicated:
            value = jax.jit(lambda x: x, out_shardings=self.everywhere)(value)
        return value.addressable_data(0)

    def to_host_memory(self, value: jax.Array) -> jax.Array:
        """A value on the devices, moved to the memory of their host."""
        return jax.device_put(value, value.sharding.with_memory_kind("pinned_host"))


@contextlib.contextmanager
def _without_a_mesh() -> Generator[None]:
    """A context that explains what JAX says where a function has a mesh of its own."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if not ("incompatible devices" in text or "should match the aval mesh" in text):
            raise
        raise ProgramError(
            f"A function divides its values over a mesh (with_sharding_constraint, shard_map) if the "
            f"trainer has that mesh: tr.Trainer(..., mesh=mesh), without replicas=. Received one that "
            f"has another, or none. JAX says: {text}"
        ) from error
