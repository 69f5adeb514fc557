"""The assignment of layer calls to stages: the user's objects, checked, and as numbers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tailrace.errors import OptionError, ProgramError
from tailrace.keras.pipelines.graph import Call, Flow, Stages, flow_of, has_flow
from tailrace.keras.pipelines.stage_scope import CALLS, MADE
from tailrace.keras.pipelines.staged_forward import Opened, by_call, called_layers, check_order


@dataclasses.dataclass(eq=False)
class LayerStageAssignment:
    """The stage of one call of a layer.

    Attributes:
        layer: the layer.
        node_index: the index of the call.
        pipeline_stage: the stage; None if it has none.
        inbound_layers: the layers whose outputs it takes.

    >>> import tailrace.keras as tk
    >>> tk.LayerStageAssignment("dense", pipeline_stage=1).pipeline_stage
    1
    """

    layer: Any
    node_index: int = 0
    pipeline_stage: int | None = None
    inbound_layers: Sequence[Any] = ()


@dataclasses.dataclass(eq=False)
class NestedModelStageAssignment:
    """The stages of the layers of a model inside a model.

    Attributes:
        nested_model: the model inside.
        pipeline_stage_assignments: one for each of its layer calls.

    >>> import tailrace.keras as tk
    >>> inner = [tk.LayerStageAssignment("dense", pipeline_stage=0)]
    >>> len(tk.NestedModelStageAssignment("encoder", inner).pipeline_stage_assignments)
    1
    """

    nested_model: Any
    pipeline_stage_assignments: list[Any]


def assigned(model: keras.Model, stages: Stages | None) -> list[Any]:
    """Assignments for all layer calls of a model, with these stages, or None."""
    if not has_flow(model):
        return _assigned_calls(called_layers(model), stages, collections.Counter())
    return _assigned(flow_of(model), stages)


def _assigned_calls(
    opened: Opened, stages: Stages | int | None, calls: collections.Counter[int]
) -> list[Any]:
    """Those of a subclassed model, whose calls are counted by layer."""
    found: list[Any] = []
    given = stages if isinstance(stages, list) else [stages] * len(opened.calls)
    for one, stage in zip(opened.calls, given, strict=True):
        if isinstance(one, Opened):
            inner = _assigned_calls(one, stage, calls)
            found.append(NestedModelStageAssignment(one.model, inner))
        else:
            found.append(LayerStageAssignment(one, calls[id(one)], stage))
            calls[id(one)] += 1
    return found


def _assigned(flow: Flow, stages: Stages | None) -> list[Any]:
    layers = {(c.path, c.node_index): c.operation for c in flow.calls if c.is_layer}
    found: list[Any] = []
    given = [None] * len(flow.tree) if stages is None else stages
    for one, stage in zip(flow.tree, given, strict=True):
        if isinstance(one, Flow):
            inner = [stage] * len(one.tree) if not isinstance(stage, list) else stage
            model = one.calls[-1].around[-1] if one.calls and one.calls[-1].around else None
            found.append(NestedModelStageAssignment(model, _assigned(one, inner)))
        else:
            inbound = [layers[t[:2]] for t in one.inputs if t[:2] in layers]
            found.append(LayerStageAssignment(one.operation, one.node_index, stage, inbound))
    return found


def plain_stages(model: keras.Model, given: object) -> list[Any]:
    """The caller's assignment, checked, as nested lists of numbers."""
    if not isinstance(given, list):
        raise OptionError(
            f"pipeline_stage_assignment needs to be a list: one entry for each layer call. "
            f"Received: {type(given).__name__}."
        )
    stages = _matched(assigned(model, None), given, model.name)
    flat = [stage for stage, _ in _flat(stages)]
    if isinstance(model, keras.Sequential):
        _check_chain(flat, assigned(model, stages))
    return stages


def _matched(wanted: list[Any], given: list[Any], name: str) -> list[Any]:
    if len(given) != len(wanted):
        raise OptionError(
            f"The length of the provided pipeline_stage_assignment ({len(given)}) does not match "
            f"the number of layers in the graph ({len(wanted)}) of {name!r}."
        )
    found: list[Any] = []
    for index, (one, value) in enumerate(zip(wanted, given, strict=True)):
        nested = isinstance(one, NestedModelStageAssignment)
        inner = getattr(value, "pipeline_stage_assignments", value)
        if nested:
            entries = one.pipeline_stage_assignments
            # One number for a model inside is the stage of all its layers.
            each = inner if isinstance(inner, list) else [inner] * len(entries)
            found.append(_matched(entries, each, one.nested_model.name))
            continue
        stage = getattr(value, "pipeline_stage", value)
        # A plain number names no layer: then the order alone counts.
        layer = getattr(value, "layer", None)
        if layer is not None and layer is not one.layer:
            raise OptionError(
                f"The order of pipeline_stage_assignment does not match the post-order generated "
                f"from the graph. The provided assignment at index {index} is for layer "
                f"{layer.name!r}, where {one.layer.name!r} is expected. Change the entries that "
                f"get_pipeline_stage_assignment() returns, and give that list back."
            )
        called = one.layer.name
        if stage is None:
            raise OptionError(
                f"Layer {called} with node_index {one.node_index} has not been assigned a pipeline "
                f"stage."
            )
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise OptionError(
                f"All elements of pipeline_stage_assignment must be instances of "
                f"LayerStageAssignment, or stage numbers of at least 0. Received for "
                f"{called!r}: {value!r}."
            )
        found.append(stage)
    return found


def _flat(stages: Stages, path: tuple[int, ...] = ()) -> list[tuple[int, tuple[int, ...]]]:
    found: list[tuple[int, tuple[int, ...]]] = []
    for number, stage in enumerate(stages):
        if isinstance(stage, list):
            found.extend(_flat(stage, (*path, number)))
        else:
            found.append((stage, (*path, number)))
    return found


def _flat_objects(one: object) -> list[Any]:
    if isinstance(one, NestedModelStageAssignment):
        return [leaf for part in one.pipeline_stage_assignments for leaf in _flat_objects(part)]
    return [one]


def _check_chain(stages: list[int], assignments: list[Any]) -> None:
    layers = [leaf.layer.name for one in assignments for leaf in _flat_objects(one)]
    if stages and stages[0] != 0:
        raise OptionError(
            f"The first layer in a pipelined sequential model needs to be assigned to the 0th "
            f"pipeline stage. Received: {layers[0]!r} in stage {stages[0]}."
        )
    for name, before, stage in zip(layers[1:], stages, stages[1:], strict=False):
        if stage not in (before, before + 1):
            raise OptionError(
                f"A layer in a pipelined sequential model can only be assigned to the same pipeline "
                f"stage as the previous layer or to the next pipeline stage. Received: {name!r} in "
                f"stage {stage} after stage {before}."
            )


def check_no_gaps(stages: Stages) -> int:
    """The number of stages; checks that each has a layer."""
    used = {stage for stage, _ in _flat(stages)}
    highest = max(used)
    missing = [stage for stage in range(highest) if stage not in used]
    if missing:
        raise ProgramError(
            # In the words of the original, spelling included: programs match them.
            f"All stages in a pipeline must have at lease one layer assigned to them. The highest "
            f"stage with an assignment is stage {highest}, however the preceeding stages {missing} "
            f"had no assignments."
        )
    if highest == 0:
        raise ProgramError(
            "A pipeline has at least two computational stages. All layers are assigned to stage 0."
        )
    return highest + 1


def noted_stages(model: keras.Model) -> list[Any] | None:
    """The stages in which a Functional model's layers were created or called; None if none."""
    taken: dict[int, int] = {}

    def one(part: Flow | Call) -> Any:
        if isinstance(part, Flow):
            return [one(inner) for inner in part.tree]
        layer = part.operation
        calls = layer.__dict__.get(CALLS, ())
        number = taken.get(id(layer), 0)
        taken[id(layer)] = number + 1
        # By order: the n-th symbolic call of a layer is its n-th node in the graph.
        return calls[number] if number < len(calls) else layer.__dict__.get(MADE)

    flow = flow_of(model)
    stages = [one(part) for part in flow.tree]
    flat = _flat(stages)
    if all(stage is None for stage, _ in flat):
        return None
    for stage, path in flat:
        if stage is None:
            part: Any = flow
            for number in path:
                part = part.tree[number]
            raise OptionError(
                f"All layers of a pipelined model must have an associated pipeline stage. However, "
                f"{part.operation.name} has not been assigned to one."
            )
    # Here, while the model is made: the traceback leads to the lines that gave the stages.
    check_order(flow, by_call(flow, stages))
    return stages
