"""What arrays a program is given: on its own devices and in its dtypes, or refused.

Arrays are copied to the devices of a trainer or program. Those that were sharded, or put on another
device, would lose that without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.trees import Tree
from tailrace.data.dtypes import narrowed
from tailrace.devices import devices
from tailrace.devices.devices import Device
from tailrace.devices.shardings import ModelSharding
from tailrace.errors import DataError, ProgramError
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import path_name

CLOSED_OVER = "Arrays that a function closes over"

_REMEDY = (
    "For a model on another device, give tr.Trainer device=; for one that is sharded, mesh=; for "
    "copies that train in parallel, replicas=; for parts one after the other, tr.Pipeline; "
    "tr.configure and TAILRACE_DEVICES choose the devices"
)


def check_placed(
    what: str, tree: Tree, here: Sequence[Device], sharding: ModelSharding | None = None
) -> None:
    """Refuse arrays that are sharded, or committed to another device than those of a program.

    Args:
        what: what the tree is called: "params".
        tree: arrays, of any library.
        here: the devices of the program.
        sharding: of a sharded model, whose arrays may be on its mesh.
    """
    _check_default(here)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, jax.Array):
            _check_fits(leaf, path, what)
        elif sharding is not None and sharding.holds(leaf):
            continue
        elif problem := _problem(leaf, here):
            raise ProgramError(
                f"{what} are arrays on the devices of the program, {_names(here)}, not sharded by JAX "
                f"or put elsewhere. Received: {path_name(path) or what!r} {problem}. Give it as a "
                f"NumPy array or on the first of these devices (jax.device_put). {_REMEDY}."
            )


def _check_fits(leaf: object, path: tuple[Any, ...], what: str) -> None:
    """Refuse 64-bit values that the dtype on the device cannot hold."""
    if isinstance(leaf, int | np.ndarray | np.generic) and not isinstance(leaf, bool):
        try:
            values = np.asarray(leaf)
            if values.dtype.itemsize > 4 and values.dtype.kind in "iufc":
                narrowed(values, jax.dtypes.canonicalize_dtype(values.dtype))
        except DataError as error:
            name = path_name(path) or what
            raise ProgramError(f"{error} This is {name!r} of {what}.") from None


def _problem(leaf: jax.Array, here: Sequence[Device]) -> str:
    """Where an array is that may not be there; empty if it may."""
    if isinstance(leaf, Tracer):
        return ""
    sharding: Any = leaf.sharding
    found = sharding.device_set
    if len(found) > 1:
        mesh = getattr(sharding, "mesh", None)
        # Of another trainer: the same values on each, or state that it has read as a whole.
        ours = mesh is not None and tuple(mesh.axis_names) == (devices.REPLICA, devices.STAGE)
        if ours or (mesh is None and sharding.is_fully_replicated):
            return ""
        spec = getattr(sharding, "spec", sharding)
        return f"with the sharding {spec} over {len(found)} devices"
    # What is not committed follows the computation, for JAX too.
    committed = getattr(leaf, "committed", True)
    return "" if not committed or found <= {*here} else f"on {_names(list(found))}"


def _check_default(here: Sequence[Device]) -> None:
    """Refuse a default device of JAX that the program would not use."""
    config: Any = jax.config
    default = config.jax_default_device
    if default is None or default in here:
        return
    platform = here[0].platform
    if default == platform or (platform == "gpu" and default in ("cuda", "rocm")):
        return
    raise ProgramError(
        f"A program runs on {_names(here)}; jax.default_device is not asked. Received: "
        f"jax.default_device={default}. Leave that context, and choose the devices with tr.configure "
        f"or TAILRACE_DEVICES."
    )


def _names(found: Sequence[Device]) -> str:
    return ", ".join(str(device) for device in list(found)[:4]) + (
        ", ..." if len(found) > 4 else ""
    )
