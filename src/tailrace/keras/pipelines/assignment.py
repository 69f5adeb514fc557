"""The methods of a model that assign layer calls to stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.keras.handles import attached
from tailrace.keras.pipelines.assignment_classes import (
    NestedModelStageAssignment,
    assigned,
    plain_stages,
)
from tailrace.keras.pipelines.graph import Call, Flow, Stages, Tensor, flow_of, has_flow, run_flow
from tailrace.keras.pipelines.stages import stages_of
from tailrace.keras.settings.options import Settings
from tailrace.pipeline.balance_cuts import balanced_cut


class Assigning:
    """The stage of each layer call; input layers have none."""

    model: Any
    settings: Settings

    def forget_programs(self) -> None:
        """Drop the device programs; they are built again when needed."""
        raise NotImplementedError

    def get_pipeline_stage_assignment(self) -> list[Any]:
        """An entry for each layer call, in post-order; its stage is None if none was assigned."""
        settings = self.settings
        if settings.assignment is not None:
            return list(settings.assignment)
        return assigned(self.model, stages_of(self.model))

    def set_pipeline_stage_assignment(
        self, pipeline_stage_assignment: Stages | str, stages: int | None = None
    ) -> None:
        """Assign layer calls to stages.

        Args:
            pipeline_stage_assignment: one entry for each layer call: a number, or an entry of
                `get_pipeline_stage_assignment` with its stage set; for a model inside, a list of
                such. Or "auto", with `stages`: minimizes the cost of the slowest stage.
            stages: for "auto", the number of stages.

        Raises:
            OptionError: it does not name a stage for each layer call.
        """
        settings = self.settings
        if isinstance(pipeline_stage_assignment, str):
            if pipeline_stage_assignment != "auto" or stages is None:
                raise OptionError(
                    f"set_pipeline_stage_assignment takes a list, or 'auto' with stages=. Received: "
                    f"{pipeline_stage_assignment!r}, stages={stages!r}."
                )
            plain = balanced(self.model, stages)
            settings.assignment = None
        else:
            plain = plain_stages(self.model, pipeline_stage_assignment)
            objects = [one for one in pipeline_stage_assignment if not isinstance(one, int | list)]
            whole = len(objects) == len(plain)
            settings.assignment = (
                list(pipeline_stage_assignment) if whole else assigned(self.model, plain)
            )
        settings.options.pipeline_stage_assignment = plain
        self.forget_programs()

    def reset_pipeline_stage_assignment(self) -> None:
        """Run the model without stages."""
        settings = self.settings
        settings.assignment, settings.options.pipeline_stage_assignment = None, None
        settings.ignores_notes = True
        self.forget_programs()

    def print_pipeline_stage_assignment_summary(
        self, line_length: int | None = None, print_fn: Callable[[str], Any] | None = None
    ) -> None:
        """Print a table of layer calls and their stages.

        Args:
            line_length: its width; None: 60 for a Sequential model, 89 for others.
            print_fn: called with each line; None prints.
        """
        show = print if print_fn is None else print_fn
        for line in summary(self.model, line_length):
            show(line)


# -- stages by cost -----------------------------------------------------------------------------


def balanced(model: keras.Model, stages: int) -> list[Any]:
    """An assignment of a Sequential or Functional model to stages of similar cost."""
    if not has_flow(model) or not model.built:
        raise ProgramError(
            f"Stages are found by the cost of layers, for Sequential and Functional models that are "
            f"built. {model.name!r} is not. Call it on a batch first, or assign stages yourself."
        )
    flow = flow_of(model)
    layers = [call for call in flow.calls if call.is_layer]
    costs = _costs(model, flow, layers)
    # Stages are runs of layers in the order of the graph, in which each comes after its inputs.
    cut = balanced_cut(costs, stages)
    numbers = iter(np.searchsorted(cut, range(len(layers)), side="right").tolist())

    def fill(part: Flow) -> list[Any]:
        return [fill(one) if hasattr(one, "tree") else next(numbers) for one in part.tree]

    return fill(flow)


def _costs(model: keras.Model, flow: Flow, layers: list[Call]) -> list[float]:
    """The approximate number of multiplications of each layer call, per example."""
    shapes: dict[Tensor, tuple[int, ...]] = {}

    def note(call: Call | None, values: dict[Tensor, Any]) -> dict[Tensor, Any]:
        del call
        shapes.update({tensor: np.shape(value) for tensor, value in values.items()})
        return values

    def run(inputs: Tree) -> Any:
        out = run_flow(model, flow, flow.calls, inputs, False, note)
        last = [leaf.tensor for leaf in keras.tree.flatten(flow.outputs)]
        note(None, dict(zip(last, keras.tree.flatten(out), strict=True)))
        return out

    examples = [
        # Unknown lengths are 1: only how costs compare between layers matters.
        jax.ShapeDtypeStruct(tuple(d or 1 for d in one.shape), one.dtype)
        for one in model.inputs
    ]
    with keras.StatelessScope():
        jax.eval_shape(run, examples)
    found = []
    for call in layers:
        shape = shapes.get(call.output(), (1,))
        weights = sum(math.prod(v.shape) for v in call.operation.trainable_variables)
        # A weight is used once for each position of the output (pixels, tokens), not for each
        # feature; layers without weights still move their outputs.
        found.append(float(weights * math.prod(shape[1:-1]) + math.prod(shape)))
    return found


# -- the printed summary ------------------------------------------------------------------------


def summary(model: keras.Model, line_length: int | None) -> list[str]:
    """The lines of the table."""
    chain = isinstance(model, keras.Sequential)
    width = line_length or (60 if chain else 89)
    places = [int(width * share) for share in ((0.5, 1.0) if chain else (0.4, 0.8, 1.0))]
    heads = ["Layer (type)", "Pipeline Stage"]
    if not chain:
        heads = ["Layer (type) (node index)", "Input Layers", "Pipeline Stage"]
    lines = [f'Model: "{model.name}"', "_" * width, _row(heads, places), "=" * width]
    lines += _rows(attached(model).get_pipeline_stage_assignment(), places, width, chain)
    lines[-1] = "=" * width
    return lines


def _rows(assignments: list[Any], places: list[int], width: int, chain: bool) -> list[str]:
    lines: list[str] = []
    for one in assignments:
        if isinstance(one, NestedModelStageAssignment):
            lines += [f'Nested Model: "{one.nested_model.name}"', "-" * width]
            lines += _rows(one.pipeline_stage_assignments, places, width, chain)
            continue
        called = f"{one.layer.name} ({type(one.layer).__name__})"
        if chain:
            lines.append(_row([called, str(one.pipeline_stage)], places))
        else:
            inputs = [layer.name for layer in one.inbound_layers] or [""]
            cells = [f"{called} ({one.node_index})", inputs[0], str(one.pipeline_stage)]
            lines.append(_row(cells, places))
            lines += [_row(["", name, ""], places) for name in inputs[1:]]
        lines.append("_" * width)
    return lines


def _row(cells: list[str], places: list[int]) -> str:
    line = ""
    for cell, place in zip(cells, places, strict=True):
        line = f"{line}{cell}"[: place - 1].ljust(place)
    return line
