"""Where a trainer's model is: the options `mesh=`, `shard=`, `batch_axes=` and `device=`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from tailrace.base.trees import Tree
from tailrace.devices.devices import Device, available
from tailrace.devices.shard_rules import Shard
from tailrace.devices.shardings import ModelSharding, sharding_of, without_mesh
from tailrace.errors import OptionError
from tailrace.pipeline.pipeline import Pipeline


@dataclasses.dataclass(frozen=True, eq=False)
class ModelPlace:
    """Where a model is, beside the usual: over a mesh, or on a chosen device.

    Attributes:
        sharding: how it is sharded over a mesh; None for one that is not.
        device: the device of a model that is not sharded; None for the first.
    """

    sharding: ModelSharding | None = None
    device: Device | None = None

    @classmethod
    def of(
        cls,
        loss_fn: object,
        params: Tree,
        model_state: Tree,
        *,
        mesh: Mesh | None,
        shard: Shard,
        batch_axes: str | Sequence[str] | None,
        device: Device | None,
        options: Mapping[str, Any],
    ) -> ModelPlace:
        """The place that the options of a trainer mean.

        Args:
            loss_fn: the loss function, or a pipeline.
            params: the parameters, which may be on a mesh.
            model_state: the model state, likewise.
            mesh: as for `tr.Trainer`, like the next three.
            shard: the rules of parameters.
            batch_axes: the mesh axes over which batches are split.
            device: the device of a model that is not sharded.
            options: other options of the trainer by name; see `BESIDE_A_MESH`.
        """
        if isinstance(loss_fn, Pipeline):
            _check_pipeline(mesh, shard, batch_axes, device)
            return cls()
        given = {"mesh": mesh, "shard": shard, "batch_axes": batch_axes}
        if device is not None:
            _check_device(device, given, options["replicas"])
            return cls(None, device)
        sharding = sharding_of(params, model_state, mesh=mesh, shard=shard, batch_axes=batch_axes)
        if sharding is not None:
            _check_beside(options)
        return cls(sharding)

    def within(self) -> contextlib.AbstractContextManager[None]:
        """A context for work on the model: its mesh is then JAX's, and without one none is."""
        return without_mesh() if self.sharding is None else self.sharding.within()

    def own(self, tree: Tree) -> Any:
        """The same arrays, as programs on the mesh take them; nothing is copied."""
        return tree if self.sharding is None else jax.tree.map(self.sharding.own, tree)


BESIDE_A_MESH: dict[str, tuple[Any, str]] = {
    "replicas": (
        1,
        "With a mesh, an element of the dataset is the whole microbatch, and batch_axes= splits it: "
        "leave replicas= out, and multiply the batch size by it",
    ),
    "replica_state": (
        "mean",
        "The loss sees the whole batch, so there is one model state: leave replica_state= out",
    ),
    "shard_optimizer_state": (
        False,
        "Optimizer state has the sharding of its parameters: leave it out, and give shard='fsdp' to "
        "divide both",
    ),
    "offload_optimizer_state": (
        False,
        "The state of a sharded model stays on the devices, each with its part: leave it out, and "
        "give shard='fsdp' to make the parts smaller",
    ),
    "offload_activations": (
        False,
        "Activations of a sharded model stay on the devices: leave it out, and use jax.checkpoint in "
        "the loss",
    ),
}
"""Options that a mesh excludes: their default, and what to write in their place."""


def _check_beside(options: Mapping[str, Any]) -> None:
    for name, (default, instead) in BESIDE_A_MESH.items():
        value = options[name]
        if value is not default and value != default:
            raise OptionError(
                f"A model that is sharded over a mesh has no {name}=. Received: {name}={value!r}. "
                f"{instead}."
            )


def _check_pipeline(
    mesh: Mesh | None, shard: Shard, batch_axes: Any, device: Device | None
) -> None:
    given = {"mesh": mesh, "shard": shard, "batch_axes": batch_axes, "device": device}
    for name, value in given.items():
        if value is not None:
            raise OptionError(
                f"The devices of a pipeline are those of its stages: tr.Pipeline(device_mapping=) "
                f"and replicas=. Received: {name}={value!r} as well. Leave it out; a mesh inside of "
                f"stages is not supported."
            )


def _check_device(device: Device, given: Mapping[str, Any], replicas: object) -> None:
    known = available()
    if not isinstance(device, jax.Device) or device not in known:
        raise OptionError(
            f"device is one of the devices of this process, such as jax.devices()[0]. Received: "
            f"device={device!r}. They are: {', '.join(map(str, known[:8]))}."
        )
    for name, value in given.items():
        if value is not None:
            raise OptionError(
                f"device= is that of a model that is not sharded. Received: {name}= as well. Leave "
                f"one of them out; jax.make_mesh(..., devices=[...]) chooses the devices of a mesh."
            )
    if replicas != 1:
        raise OptionError(
            f"device= is that of one copy of the model. Received: replicas={replicas!r} as well. "
            f"Leave device= out; tr.configure chooses the devices of replicas."
        )
