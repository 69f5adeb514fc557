"""The forward pass of a model, stage by stage.

Sequential and Functional models run from their graphs, in the order of stages. The `call` of a
subclassed model is followed: when it calls a layer of the next stage, that stage begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tailrace.base.array_like import ShapeLike, TensorLike
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.keras.pipelines.graph import Call, Flow, Stages, Tensor, flow_of, run_flow
from tailrace.keras.pipelines.masks import masked_boundary
from tailrace.keras.pipelines.stage_scope import MADE, current_stage, following, in_scope


def by_call(flow: Flow, stages: Stages) -> dict[int, int]:
    """The stage of each call, by its identity; operations follow their inputs."""
    found: dict[int, int] = {}

    def walk(part: Flow, given: Stages) -> None:
        for one, stage in zip(part.tree, given, strict=True):
            if isinstance(one, Flow):
                walk(one, stage if isinstance(stage, list) else [stage] * len(one.tree))
            else:
                found[id(one)] = stage

    walk(flow, stages)
    # Operations between layers (`x + y`) have no entry in an assignment: they run where the last of
    # their inputs is computed, so that nothing crosses a boundary twice.
    made: dict[Any, int] = {}
    for call in flow.calls:
        if id(call) not in found:
            found[id(call)] = max((made.get(t[:2], 0) for t in call.inputs), default=0)
        made[call.output()[:2]] = found[id(call)]
    return found


def check_order(flow: Flow, stages: dict[int, int]) -> None:
    """Check that no call uses the output of a later stage."""
    made: dict[Any, int] = {}
    for call in flow.calls:
        stage = stages[id(call)]
        if any(made.get(t[:2], 0) > stage for t in call.inputs):
            raise OptionError(
                f"Layer {call.path} in pipeline stage {stage} has a dependency from a pipeline stage "
                f"which has not yet been executed. Assign it to a later stage."
            )
        made[call.output()[:2]] = stage


class StagedFlow:
    """The forward pass of a Sequential or Functional model, stage by stage."""

    def __init__(self, model: keras.Model, stages: Stages) -> None:
        self._model, self._flow = model, flow_of(model)
        self._stages = by_call(self._flow, stages)
        check_order(self._flow, self._stages)
        # By stage first: the graph's own order may go back and forth between stages.
        numbered = list(enumerate(self._flow.calls))
        self._order = [c for _, c in sorted(numbered, key=lambda p: (self._stages[id(p[1])], p[0]))]

    def __call__(
        self, inputs: Tree, training: bool | None = None, mask: TensorLike = None, **_: Any
    ) -> Any:
        """What the model returns."""
        here = 0

        def between(call: Call, values: dict[Tensor, Any]) -> dict[Tensor, Any]:
            nonlocal here
            while here < self._stages[id(call)]:
                here += 1
                # Every value that is still needed crosses, also those that only a later stage uses.
                values = dict(zip(values, masked_boundary([*values.values()]), strict=True))
            return values

        return run_flow(self._model, self._flow, self._order, inputs, training, between, mask)


# -- subclassed models --------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Opened:
    """The layer calls of one model: layers, and models inside, opened as well.

    Attributes:
        model: the model.
        calls: the layer calls and opened models, in order.
        stages: their stages; a list for each model inside.
    """

    model: Any
    calls: list[Any] = dataclasses.field(default_factory=list)
    stages: list[Any] = dataclasses.field(default_factory=list)


class Following:
    """A subclassed model while its `call` is followed, layer call by layer call.

    Args:
        model: the model.
        stages: the stage of each layer call, as in `Opened`; a number for all of a model inside. None:
            as named where layers are called or created.
        cuts: whether to begin stages; otherwise calls are only recorded.
    """

    def __init__(self, model: keras.Model, stages: Sequence[Any] | None, cuts: bool = True) -> None:
        self.found = Opened(model)
        self.depth = 0
        self._here, self._cuts = 0, cuts
        self._around = [self.found]
        self._given: list[Iterator[Any]] | None = None if stages is None else [iter(stages)]

    @contextlib.contextmanager
    def inside(self, model: keras.Model) -> Iterator[None]:
        """Follow the call of a model inside."""
        opened, outer = Opened(model), self._around[-1]
        outer.calls.append(opened)
        outer.stages.append(opened.stages)
        self._around.append(opened)
        if self._given is not None:
            given = next(self._given[-1], None)
            # One number for a model inside is the stage of all its layers.
            self._given.append(iter(given) if isinstance(given, list) else itertools.repeat(given))
        try:
            yield
        finally:
            self._around.pop()
            if self._given is not None:
                self._given.pop()

    def enter(self, layer: keras.layers.Layer, args: Tree, kwargs: Tree) -> tuple[Any, Any]:
        """Called for each layer call: begins its stage, if it is a new one."""
        stage = self._stage_of(layer)
        self._around[-1].calls.append(layer)
        self._around[-1].stages.append(stage)
        if not self._cuts:
            return args, kwargs
        if stage is None:
            raise OptionError(
                f"All layers of a pipelined model must have an associated pipeline stage. However, "
                f"{layer.name} has not been assigned to one."
            )
        if stage < self._here:
            raise OptionError(
                f"Layer {layer.name} in pipeline stage {stage} has a dependency from a pipeline "
                f"stage which has not yet been executed: it is called after stage {self._here} has "
                f"begun. Call layers in the order of their stages."
            )
        while self._here < stage:
            self._here += 1
            # Only what this call takes is marked: other values that cross are found by their use.
            flat = keras.tree.flatten((args, kwargs))
            arrays = [n for n, one in enumerate(flat) if hasattr(one, "shape")]
            marked = masked_boundary([flat[n] for n in arrays])
            for n, value in zip(arrays, marked, strict=True):
                flat[n] = value
            args, kwargs = keras.tree.pack_sequence_as((args, kwargs), flat)
        return args, kwargs

    def _stage_of(self, layer: keras.layers.Layer) -> int | None:
        if self._given is not None:
            return next(self._given[-1], None)
        # The nearest name counts: where the layer is called, where it was made, then the same of the
        # models around it, from the inside out.
        named = [current_stage(), layer.__dict__.get(MADE)]
        named += [opened.model.__dict__.get(MADE) for opened in reversed(self._around[1:])]
        return next((stage for stage in named if stage is not None), None)


@contextlib.contextmanager
def followed(found: Following) -> Iterator[None]:
    """A context in which the layer calls of a model are followed."""
    token = following.set(found)
    try:
        yield
    finally:
        following.reset(token)


def noted_in_call(model: keras.Model) -> list[Any] | None:
    """The stages given in a subclassed model's `call`; None if there are none."""
    found = called_layers(model)
    pairs = list(_pairs(found))
    if all(stage is None for _, stage in pairs):
        return None
    for layer, stage in pairs:
        if stage is None:
            raise OptionError(
                f"All layers of a pipelined model must have an associated pipeline stage. However, "
                f"{layer.name} has not been assigned to one."
            )
    return found.stages


def _pairs(opened: Opened) -> Iterator[tuple[Any, int | None]]:
    """Every layer call, with its stage."""
    for one, stage in zip(opened.calls, opened.stages, strict=True):
        if isinstance(one, Opened):
            yield from _pairs(one)
        else:
            yield one, stage


def called_layers(model: keras.Model) -> Opened:
    """The layers that a subclassed model calls, in order."""
    if not model.built:
        raise ProgramError(
            f"Cannot get pipeline stage assignments for model {model.name!r} which has not been "
            f"built yet, and cannot set them: its layer calls are not known. Call it on a batch, or "
            f"model.build(input_shape)."
        )
    shape = (model.get_build_config() or {}).get("input_shape")
    if shape is None:
        raise ProgramError(
            f"The layer calls of {model.name!r} are found by following its `call` on the shape of its "
            f"inputs, which it does not know. Call it on a batch first."
        )
    # A Sequential model inside that has not run yet calls its layers to build itself, and then again.
    if not _is_built(model):
        _follow(model, shape)
    return _follow(model, shape)


def _follow(model: keras.Model, shape: ShapeLike) -> Opened:
    calls = Following(model, None, cuts=False)
    # On symbols, and statelessly: nothing is computed, and no variable changes.
    with followed(calls), keras.StatelessScope(), in_scope():
        model.compute_output_spec(_symbols(shape))
    return calls.found


def _is_built(layer: keras.layers.Layer) -> bool:
    return layer.built and all(_is_built(one) for one in getattr(layer, "layers", ()))


def _symbols(shape: ShapeLike) -> Any:
    if isinstance(shape, dict):
        return {name: _symbols(part) for name, part in shape.items()}
    if shape and isinstance(shape[0], list | tuple | dict):
        return [_symbols(part) for part in shape]
    return keras.KerasTensor(tuple(shape))


class StagedCall:
    """The forward pass of a subclassed model, stage by stage."""

    def __init__(self, model: keras.Model, stages: Sequence[Any] | None) -> None:
        # Taken now: while a model runs in stages, `model.call` leads here.
        self._model, self._call, self._stages = model, model.call, stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        with followed(Following(self._model, self._stages)):
            return self._call(*args, **kwargs)
