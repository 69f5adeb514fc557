"""From JAX's name of an operation to phase and scope, as in the catalogue.

jit(_function)/while/body/closed_call/transpose(jvp(layer1))/dot_general
                                      backward      layer1   dot_general
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tailrace.base.spans import scopes


class Phase(StrEnum):
    """The part of a step that an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    ACCUMULATION = "accumulation"
    REPLICAS = "replicas"
    STAGES = "stages"
    FEEDS = "feeds"
    TAPS = "taps"
    LOOP = "loop"


OWN = {
    scopes.ACCUMULATION: Phase.ACCUMULATION,
    scopes.REPLICAS: Phase.REPLICAS,
    scopes.STAGES: Phase.STAGES,
    scopes.STASH: Phase.STAGES,
    scopes.FEEDS: Phase.FEEDS,
    scopes.TAPS: Phase.TAPS,
}

UNIT = re.compile(r"^tailrace\.unit\.([FB])(\d+)\.(\d+)$")
"""The scope around a forward or backward of a stage: its kind, stage and member."""

_WRAPPED = re.compile(r"^([\w\-]+)\((.*)\)$")
# Around the name of a function, which is not a scope.
_CALLS = {"jit", "pjit", "xla_call", "custom_jvp_call", "custom_vjp_call", "named_call"}
# Parts that JAX adds for loops, branches and calls.
_STRUCTURE = {
    *("while", "body", "cond", "scan", "shard_map", "closed_call", "core_call", "eval_jaxpr"),
    *(
        "checkpoint",
        "rematted_computation",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
    ),
}
_MOVES = {"dynamic_slice", "dynamic_update_slice", "dynamic_index_in_dim", "gather"}
_BRANCH = re.compile(r"^branch_\d+_fun$")


class Place(NamedTuple):
    """The phase and scope of an operation.

    Attributes:
        phase: the phase of the step.
        scope: the path of the model's scopes; "" outside of all.
        operation: JAX's name of the operation.
        unit: the unit of a pipeline: kind, stage and member; None outside.
    """

    phase: Phase
    scope: str
    operation: str
    unit: tuple[str, int, int] | None = None


def place_of(op_name: str) -> Place:
    """Phase, scope and operation of an operation's name.

    >>> place_of("jit(f)/while/body/transpose(jvp(layer1))/attention/dot_general")[:3]
    (<Phase.BACKWARD: 'backward'>, 'layer1/attention', 'dot_general')
    >>> place_of("jit(f)/while/body/optimizer/mul")[:3]
    (<Phase.OPTIMIZER: 'optimizer'>, '', 'mul')
    """
    *parts, operation = _split(op_name) or [""]
    transforms: set[str] = set()
    path: list[str] = []
    own: Phase | None = None
    unit = None
    for part in parts:
        for scope in _unwrapped(part, transforms):
            found = UNIT.match(scope)
            if found:
                unit = (found[1], int(found[2]), int(found[3]))
            elif scope in OWN:
                own = OWN[scope]
            else:
                _append(path, scope)
    differentiated = bool(transforms & {"jvp", "transpose"})
    # Our own scopes count first: they may be inside a scope of the model, or around one.
    if own is not None:
        return Place(own, "", operation, unit)
    # A scope of the model may be called "optimizer" too, but it is differentiated.
    if not differentiated and path and path[0] == scopes.OPTIMIZER:
        return Place(Phase.OPTIMIZER, "/".join(path[1:]), operation, unit)
    # Everything in a backward unit is backward, also a forward that it computes again.
    if "transpose" in transforms or (unit is not None and unit[0] == "B"):
        return Place(Phase.BACKWARD, "/".join(path), operation, unit)
    if differentiated or path or unit is not None:
        return Place(Phase.FORWARD, "/".join(path), operation, unit)
    # A scan slices its inputs and stacks its results with such operations.
    phase = Phase.FEEDS if operation in _MOVES else Phase.LOOP
    return Place(phase, "", operation, unit)


def _unwrapped(part: str, transforms: set[str]) -> Iterator[str]:
    """The scopes in one part of a name; adds the transforms around them to `transforms`."""
    found = _WRAPPED.match(part)
    if found is None:
        if part and part not in _STRUCTURE and not _BRANCH.match(part):
            yield part
    elif found[1] not in _CALLS:
        transforms.add(found[1])
        for inner in _split(found[2]):
            yield from _unwrapped(inner, transforms)


def _append(path: list[str], scope: str) -> None:
    if path and scope.startswith(f"{path[-1]}."):
        path[-1] = scope  # a dotted path repeats its parent's
    else:
        path.append(scope)


def _split(name: str) -> list[str]:
    """Split a name at slashes outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(name):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "/" and not depth:
            parts.append(name[start:place])
            start = place + 1
    return [*parts, name[start:]]
