"""Two functions, tensor by tensor: on one device or two, in one dtype or two."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import DTypeLike
from tailrace.base.trees import Tree
from tailrace.devices import devices
from tailrace.devices.devices import Device
from tailrace.errors import OptionError
from tailrace.program.observe import observe
from tailrace.records.records import Records
from tailrace.runs.diff.difference import Difference, common_rows, completed, first_row, rank_of
from tailrace.runs.diff.renaming import Names, renamed
from tailrace.taps.tap import Tap

Named = Device | int | str | None
"""A device, its index or its platform; None for the first one."""


@dataclasses.dataclass
class Called:
    """A function with its arguments and device.

    Attributes:
        function: a function of arrays.
        batch: its arguments, if it is a tuple; otherwise its only argument.
        device: a device, its index or its platform; None for the first one.
        dtype: the dtype to cast the floats of the batch to; None for no cast.
    """

    function: Callable[..., Any]
    batch: Tree
    device: Named = None
    dtype: DTypeLike = None

    @functools.cached_property
    def args(self) -> tuple[Any, ...]:
        """The arguments, cast."""
        args = self.batch if isinstance(self.batch, tuple) else (self.batch,)
        if self.dtype is None:
            return args
        try:
            wanted = jnp.dtype(self.dtype)
        except TypeError:
            # Refused below, with the same message as a dtype that exists and is no float.
            wanted = jnp.dtype("bool")
        if not jnp.issubdtype(wanted, jnp.floating):
            raise OptionError(f"dtypes are floats, or None. Received: {self.dtype!r}.")

        def cast(leaf: jax.Array) -> jax.Array:
            return leaf.astype(wanted) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return jax.tree.map(lambda leaf: cast(jnp.asarray(leaf)), args)

    def tensors(self) -> dict[str, Any]:
        """The entries of its catalogue by name, in the order of computation."""
        return {entry.name: entry for entry in observe(self.function, []).tensors(*self.args)}

    def run(self, wanted: set[str]) -> Records:
        """Run it; returns the whole values of these tensors."""
        taps = [Tap(lambda entry: entry.name in wanted, reduce="tensor")]
        on = None if self.device is None else device_of(self.device)
        return observe(self.function, taps, device=on)(*self.args)[1]


def diff_functions(
    first: Called, second: Called, names: Names | None, rtol: float, atol: float
) -> Difference:
    """The first tensor in which two functions differ."""
    ours, theirs = first.tensors(), renamed(second.tensors(), names)
    # Same name and another shape: not the same tensor, such as a layer of another width.
    common = [n for n, e in ours.items() if n in theirs and theirs[n].shape == e.shape]
    if not common:
        raise OptionError(
            "The two functions have no tensor in common: none has one name and one shape in both. "
            "Where they are called differently, names= says how."
        )
    # Only what both have is kept: all whole tensors of a model may not fit into memory.
    mine = first.run(set(common))
    found = second.run({theirs[name].name for name in common})
    other = {name: found[theirs[name].name] for name in common if theirs[name].name in found}
    # Stable: within a kind, tensors stay in the order in which they are computed.
    keys = sorted((name for name in common if name in mine and name in other), key=rank_of)
    if first.dtype is not None or second.dtype is not None:  # inputs differ by the cast
        keys = [name for name in keys if not name.startswith("input/")]
    for name in keys:
        one, two = mine[name], other[name]
        parted = first_row(one, two, *common_rows(one, two), rtol, atol)
        if parted is not None:
            parted = dataclasses.replace(parted, step=-1, microbatch=-1, replica=-1)
            return completed(parted, keys, ours, theirs)
    return completed(None, keys, ours, theirs)


def device_of(named: Device | int | str) -> Device:
    """A device, from itself, its index, or its platform and index there.

    >>> device_of("cpu:0") == device_of("cpu") == jax.devices("cpu")[0]
    True
    """
    if isinstance(named, jax.Device):
        return named
    found, number = devices.available(), named
    if isinstance(named, str):
        platform, _, place = named.partition(":")
        number = int(place) if place.isdigit() else 0 if not place else -1
        try:
            found = jax.devices(platform)
        except RuntimeError:
            found = []
    # A bool is an int, and no device is number True.
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(found):
        return found[number]
    there = ", ".join(f"'{d.platform}:{n}'" for n, d in enumerate(devices.available()))
    raise OptionError(
        f"A device is one of jax.devices(), its number, or a platform such as 'cpu' or 'cpu:1'. "
        f"Received: {named!r}. There are: {there}."
    )
