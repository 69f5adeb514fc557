"""The rules of `shard=`: which axes of a mesh divide which dims of a parameter."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from tailrace.base.messages import listed
from tailrace.errors import OptionError

FSDP = "fsdp"
"""The rule, and the name of the mesh axis, of parameters sharded wherever they are large."""

LEAST = 1 << 12
"""The fewest values of a leaf that `"fsdp"` shards: to gather fewer takes as long as to gather one."""

Shard = Mapping[str, PartitionSpec] | Callable[[str, tuple[int, ...]], Any] | str | None
"""The value of `shard=`."""


def rule_of(
    shard: Shard, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[str, tuple[int, ...]], Any] | None:
    """`shard=` as a function of name and shape; None if there are no rules."""
    if shard is None or (callable(shard) and not isinstance(shard, str)):
        return shard
    if isinstance(shard, str):
        if shard != FSDP:
            raise OptionError(
                f"shard= is a dict from names to PartitionSpecs, a function of name and shape, or "
                f"'fsdp'. Received: shard={shard!r}."
            )
        if FSDP not in mesh.axis_names:
            raise OptionError(
                f"shard='fsdp' divides parameters over the mesh axis named 'fsdp'. Received: "
                f"{mesh_text(mesh)}. Name an axis so: jax.make_mesh({tuple(mesh.shape.values())}, "
                f"{('fsdp', *mesh.axis_names[1:])})."
            )
        return lambda _, shape: _largest(shape, mesh.shape[FSDP])
    if not isinstance(shard, Mapping) or not all(isinstance(name, str) for name in shard):
        raise OptionError(
            f"shard= is a dict from names to PartitionSpecs, a function of name and shape, or 'fsdp'. "
            f"Received: shard={shard!r}."
        )
    for glob in shard:
        if not any(_fits(name, glob) for name in shapes):
            raise OptionError(
                f"A rule of shard= is for at least one parameter. Received: {glob!r}, which is none "
                f"of {listed([*shapes], 8)}. Correct the name, or leave the rule out."
            )
    return lambda name, _: next((spec for glob, spec in shard.items() if _fits(name, glob)), None)


def _fits(name: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(name, glob)


def _largest(shape: tuple[int, ...], size: int) -> PartitionSpec:
    """The largest dim that `size` divides over the axis "fsdp"; of a small leaf, none."""
    fitting = [dim for dim, length in enumerate(shape) if length % size == 0]
    if not fitting or math.prod(shape) < LEAST:
        return PartitionSpec()
    largest = max(fitting, key=lambda dim: shape[dim])
    return PartitionSpec(*[None] * largest, FSDP)


def checked_spec(spec: Any, name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec | None:
    """A spec that fits an array and the mesh; None for no rule."""
    if spec is None:
        return None
    said = f"shard= gives {name!r}, of shape {list(shape)}, the sharding {spec}"
    if not isinstance(spec, PartitionSpec):
        raise OptionError(
            f"Shardings are jax.sharding.PartitionSpecs, or None. Received: {name!r}: {spec!r}."
        )
    if len(spec) > len(shape):
        raise OptionError(
            f"A PartitionSpec has at most as many entries as the array has dims. Received: {said}. "
            f"Leave out {len(spec) - len(shape)} of them, or give None for this parameter."
        )
    used: list[str] = []
    for dim, axes in enumerate(axes_by_dim(spec)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise OptionError(
                    f"A PartitionSpec names axes of the mesh, {mesh_text(mesh)}. Received: {said}. "
                    f"Write one of {listed([*map(repr, mesh.axis_names)], 8)} for {axis!r}, or make "
                    f"a mesh with that axis."
                )
            if axis in used:
                raise OptionError(
                    f"A mesh axis divides one dim of an array. Received: {said}, with {axis!r} twice."
                )
            used.append(axis)
        size = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % size:
            raise OptionError(
                f"A dim is divided into equal parts. Received: {said}: dim {dim}, of size "
                f"{shape[dim]}, over {axes_text(mesh, axes)}. Give a spec with None for dim {dim}, "
                f"or another size of that dim."
            )
    return spec


def axes_by_dim(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The axes of each dim; dims at the end that are not divided are left out."""
    found = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    while found and not found[-1]:
        found.pop()
    return found


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of an array, or of a number."""
    return tuple(getattr(leaf, "shape", ()))


def axes_text(mesh: Mesh, axes: Sequence[str]) -> str:
    """Axes with their sizes: 'data' (2) and 'model' (4)."""
    return " x ".join(f"{axis!r} ({mesh.shape[axis]})" for axis in axes) or "()"


def mesh_text(mesh: Mesh) -> str:
    """A mesh with its axes and their sizes, for messages."""
    return f"a mesh of {axes_text(mesh, mesh.axis_names)}"
