"""How a model is sharded over a mesh: which mesh, and which part of each array a device holds.

Programs run on the mesh with automatic axes: XLA's partitioner divides the computation. A mesh with
explicit axes has the same devices; arrays are given back with the mesh that they came with.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tailrace.base.messages import listed
from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.devices.shard_rules import (
    FSDP,
    Shard,
    axes_by_dim,
    axes_text,
    checked_spec,
    mesh_text,
    rule_of,
    shape_of,
)
from tailrace.errors import OptionError, ProgramError, ReplicaError
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import path_name

BATCH_AXES = ("data", devices.REPLICA, FSDP)
"""The mesh axes over which batches are split, unless others are given."""


@dataclasses.dataclass(frozen=True)
class BatchSharding:
    """The sharding of blocks of elements: dim 0 is that of the steps, dim 1 that of the batch.

    Attributes:
        mesh: the mesh.
        axes: the mesh axes over which batches are split.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def parts(self) -> int:
        """The number of parts of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def of(self, shape: Sequence[int]) -> NamedSharding:
        """The sharding of one array of a block; of one that does not divide, replicated."""
        # A smaller last batch of an evaluation: training refuses elements that do not divide.
        split = len(shape) > 1 and self.axes and shape[1] % self.parts == 0
        spec = PartitionSpec(None, self.axes) if split else PartitionSpec()
        return NamedSharding(self.mesh, spec)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSharding:
    """A mesh, and how parameters and batches are divided over it.

    Attributes:
        mesh: the mesh, with automatic axes.
        given: the mesh as it was given; its axes may be explicit.
        batch_axes: the mesh axes over which batches are split.
        shard: the rules of parameters that have no sharding of their own.
    """

    mesh: Mesh
    given: Mesh
    batch_axes: tuple[str, ...]
    shard: Shard = None

    @property
    def batches(self) -> BatchSharding:
        """The sharding of blocks of elements."""
        return BatchSharding(self.mesh, self.batch_axes)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of values that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @contextlib.contextmanager
    def within(self) -> Generator[None]:
        """A context in which the mesh is JAX's: names of its axes mean this mesh."""
        try:
            with jax.set_mesh(self.mesh):
                yield
        except ValueError as error:
            text = str(error)
            if not ("of type Auto or Manual" in text or "should match the aval mesh" in text):
                raise
            raise ProgramError(
                f"In a sharded program the axes of the mesh are automatic: the partitioner decides "
                f"what is where. Received a function for explicit axes; JAX says: {text} In place of "
                f"jax.reshard and out_sharding=, use jax.lax.with_sharding_constraint or "
                f"jax.shard_map; arrays that it closes over are made on a mesh with "
                f"axis_types=(jax.sharding.AxisType.Auto, ...)."
            ) from error

    def outside(self) -> contextlib.AbstractContextManager[Any]:
        """A context for work on arrays of this mesh: without another mesh that is JAX's."""
        mesh = _current()
        mine = mesh is None or automatic(mesh) == self.mesh
        return contextlib.nullcontext() if mine else without_mesh()

    def holds(self, value: object) -> bool:
        """Whether a value is an array over this mesh, by whatever kind of axes."""
        mesh = _mesh_of(value)
        return mesh is not None and automatic(mesh) == self.mesh

    def own(self, value: Any) -> Any:
        """An array over this mesh, as programs take it; any other value as it is. Nothing is copied."""
        if not self.holds(value) or value.sharding.mesh == self.mesh:
            return value
        return jax.device_put(value, NamedSharding(self.mesh, _spec_of(value)))

    def shown(self, value: jax.Array) -> jax.Array:
        """An array with the mesh as it was given; nothing is copied."""
        if self.given == self.mesh or not self.holds(value):
            return value
        return jax.device_put(value, NamedSharding(self.given, _spec_of(value)))

    def of_model(self, params: Tree, model_state: Tree) -> tuple[Any, Any]:
        """The shardings of a model's leaves; refuses what does not fit."""
        state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._own(path, leaf, "model_state"), model_state
        )
        return self.of_params(params), state

    def of_params(self, params: Tree) -> Any:
        """The sharding of each parameter; refuses what does not fit."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        shapes = {path_name(path) or "params": shape_of(leaf) for path, leaf in leaves}
        rule = rule_of(self.shard, self.mesh, shapes)
        found: list[NamedSharding] = []
        for path, leaf in leaves:
            name, spec = path_name(path) or "params", None
            if rule is not None:
                spec = checked_spec(rule(name, shape_of(leaf)), name, shape_of(leaf), self.mesh)
            found.append(self._own(path, leaf, "params", spec))
        return jax.tree.unflatten(structure, found)

    def of_state(self, forms: Tree, params: Tree) -> Any:
        """The sharding of each leaf of an optimizer's state: that of its parameter.

        A leaf belongs to the parameter whose path ends its own, if it has that parameter's shape;
        others (counters, factors of rows and columns) are replicated.
        """
        known = {
            tuple(map(_key_of, path)): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        }

        def of(path: tuple[Any, ...], form: Any) -> NamedSharding:
            keys = tuple(map(_key_of, path))
            for start in range(len(keys) + 1):
                leaf = known.get(keys[start:])
                if leaf is not None and leaf.shape == form.shape:
                    return leaf.sharding
            return self.replicated

        return jax.tree_util.tree_map_with_path(of, forms)

    def check_batch(self, shapes: Sequence[Sequence[int]], paths: Sequence[str]) -> None:
        """Refuse elements whose leading dim cannot be divided over the batch axes."""
        parts = self.batches.parts
        for shape, path in zip(shapes, paths, strict=False):  # without data there is a path alone
            if len(shape) and shape[0] % parts:
                raise OptionError(
                    f"An element of the dataset is the whole microbatch, and is split over the mesh "
                    f"axes {axes_text(self.mesh, self.batch_axes)}: its leading dim is a multiple of "
                    f"{parts}. Received: element{path} of shape {list(shape)}. Give batches of "
                    f"{-(-shape[0] // parts) * parts}, or batch_axes=() to replicate them."
                )

    def _own(
        self, path: tuple[Any, ...], leaf: Any, what: str, spec: PartitionSpec | None = None
    ) -> NamedSharding:
        """The sharding of a leaf: that of the array, or else by the rules."""
        name = path_name(path) or what
        mesh = _mesh_of(leaf)
        if mesh is None:
            return NamedSharding(self.mesh, PartitionSpec() if spec is None else spec)
        if automatic(mesh) != self.mesh:
            raise OptionError(
                f"A model is sharded over one mesh, here {mesh_text(self.given)}. Received: {name!r} "
                f"of {what} over {mesh_text(mesh)}. Put it on that mesh with jax.device_put, or give "
                f"it as a NumPy array and shard=."
            )
        kind: Any = leaf.sharding.memory_kind
        if kind not in (None, "device", self.mesh.devices.flat[0].default_memory().kind):
            raise OptionError(
                f"A sharded model is in the memory of its devices. Received: {name!r} of {what} in "
                f"{kind!r}. Move it with jax.device_put(x, x.sharding.with_memory_kind('device'))."
            )
        own = _spec_of(leaf)
        if spec is not None and any(own) and axes_by_dim(own) != axes_by_dim(spec):
            raise OptionError(
                f"Arrays keep the sharding that they are given with. Received: {name!r} with {own}, "
                f"and {spec} by shard=. Leave one of them out."
            )
        return NamedSharding(self.mesh, own if spec is None else spec)


def sharding_of(
    params: Tree,
    model_state: Tree,
    *,
    mesh: Mesh | None = None,
    shard: Shard = None,
    batch_axes: str | Sequence[str] | None = None,
) -> ModelSharding | None:
    """How a model is sharded; None for one that is not.

    Args:
        params: the parameters, which may be on a mesh.
        model_state: the model state, likewise.
        mesh: the mesh; None for that of the arrays, or of `jax.set_mesh`.
        shard: the rules of parameters without a sharding of their own.
        batch_axes: the mesh axes over which batches are split; None for those with the usual names.

    Raises:
        OptionError: there is no mesh, or something does not fit it.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise OptionError(
            f"mesh is a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',)). Received: {mesh!r}."
        )
    asked = shard is not None or batch_axes is not None
    found = mesh or _mesh_in((params, model_state), asked) or _ambient(asked)
    if found is None:
        if asked:
            name = "shard" if shard is not None else "batch_axes"
            raise OptionError(
                f"{name}= says how arrays are divided over a mesh, and there is none. Give "
                f"mesh=jax.make_mesh((8,), ('data',)), with your numbers and names."
            )
        return None
    if found.is_multi_process:
        raise ReplicaError(
            f"A sharded model is on the devices of one process. Received: {mesh_text(found)} over "
            f"{jax.process_count()} processes. Use replicas= there."
        )
    return ModelSharding(automatic(found), found, _batch_axes(found, batch_axes), shard)


def automatic(mesh: Mesh) -> Mesh:
    """The same devices with automatic axes: what is where is the partitioner's decision."""
    return Mesh(mesh.devices, mesh.axis_names)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context without the mesh of `jax.set_mesh`, for work on arrays of one device."""
    if _current() is None:
        return contextlib.nullcontext()
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


# -- which mesh ---------------------------------------------------------------------------------


def _mesh_in(tree: Tree, asked: bool) -> Mesh | None:
    """The mesh of the first array that is on one; a mesh of one device counts if it is asked for."""
    for leaf in jax.tree.leaves(tree):
        mesh = _mesh_of(leaf)
        if mesh is not None and (asked or mesh.size > 1):
            return mesh
    return None


def _ambient(asked: bool) -> Mesh | None:
    """The mesh of `jax.set_mesh`."""
    mesh = _current()
    return mesh if mesh is not None and (asked or mesh.size > 1) else None


def _current() -> Mesh | None:
    """The mesh that is JAX's in this thread; None if there is none, or while JAX traces."""
    try:
        mesh: Any = jax.sharding.get_mesh()
    except ValueError:  # a trace has its own
        return None
    return None if mesh.empty else mesh


def _mesh_of(leaf: object) -> Mesh | None:
    """The mesh of an array; None if it has none, or one of ours."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return None
    sharding: Any = leaf.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    # Of another trainer's replicas: the same values on each device.
    ours = mesh is not None and tuple(mesh.axis_names) == (devices.REPLICA, devices.STAGE)
    return mesh if isinstance(mesh, Mesh) and not ours else None


def _batch_axes(mesh: Mesh, given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        found = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)
        if not found:
            raise OptionError(
                f"Batches are split over the mesh axes named {listed([*BATCH_AXES], 8)}, unless "
                f"batch_axes= names others. Received: {mesh_text(mesh)}. Give batch_axes="
                f"{mesh.axis_names[0]!r}, or batch_axes=() for the whole batch on every device."
            )
        return found
    axes = (given,) if isinstance(given, str) else tuple(given)
    wrong = [axis for axis in axes if axis not in mesh.axis_names]
    if wrong or len(set(axes)) < len(axes):
        raise OptionError(
            f"batch_axes are different axes of the mesh, {mesh_text(mesh)}. Received: batch_axes="
            f"{given!r}."
        )
    return axes


def _spec_of(leaf: jax.Array) -> PartitionSpec:
    sharding: Any = leaf.sharding
    return sharding.spec


def _key_of(key: Any) -> Any:
    """A key of a path, whatever kind of container it is of."""
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    return key
