"""A Sequential or Functional model as a list of layer calls that can be run in another order.

Keras describes the graph of a model in `get_config()`: each layer with each of its calls, and for each
call the tensors it takes. That is all that is needed to run the calls one by one. Models inside a
model are opened: their layers can belong to several stages.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.keras.keras_seams import check_graphs
from tailrace.keras.pipelines.masks import with_mask

Tensor = tuple[str, int, int]
"""A tensor: the path of the layer that makes it, which of its calls, which of its outputs."""

Stages = list[Any]
"""The stage of each layer call: a number, or a list of such for a model inside."""


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer, or of an operation such as `+`.

    Attributes:
        operation: the layer.
        path: its name, after those of the models around it.
        node_index: which of its calls.
        inputs: the tensors that it takes.
        arguments: makes its arguments from the values of tensors.
        around: the models around it, from the outside in.
    """

    operation: Any
    path: str
    node_index: int
    inputs: tuple[Tensor, ...]
    arguments: Callable[[dict[Tensor, Any]], tuple[Any, Any]]
    around: tuple[Any, ...] = ()

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer; operations are not assigned to stages."""
        return isinstance(self.operation, keras.layers.Layer)

    def output(self, number: int = 0) -> Tensor:
        """One of the tensors that it makes."""
        return (self.path, self.node_index, number)


@dataclasses.dataclass(eq=False)
class Flow:
    """The calls of a model, each after those whose outputs it takes.

    Attributes:
        inputs: the tensors that the model is called with.
        outputs: the structure of what it returns.
        calls: the calls of layers and operations, models inside opened.
        tree: the same as a tree: a list for each model inside.
    """

    inputs: list[Tensor]
    outputs: Any
    calls: list[Call]
    tree: list[Any]


class _Leaf:
    """A tensor as one leaf of a structure."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def has_flow(model: keras.Model) -> bool:
    """Whether a model is made of layers that Keras knows the order of."""
    if isinstance(model, keras.Sequential):
        return True
    return hasattr(model, "operations") and hasattr(model, "inputs")


def flow_of(model: keras.Model, path: str = "", around: tuple[Any, ...] = ()) -> Flow:
    """The calls of a Sequential or Functional model."""
    if isinstance(model, keras.Sequential):
        return _chain(model, path, around)
    return _graph(model, path, around)


def _chain(model: keras.Model, path: str, around: tuple[Any, ...]) -> Flow:
    first: Tensor = (f"{path}(input)", 0, 0)
    tensor = first
    calls: list[Call] = []
    tree: list[Any] = []
    for layer in model.layers:
        name = f"{path}{layer.name}"
        if has_flow(layer):
            inner = flow_of(layer, f"{name}/", (*around, layer))
            calls.append(_alias(inner.inputs[0], tensor))
            calls.extend(inner.calls)
            tree.append(inner)
            tensor = keras.tree.flatten(inner.outputs)[0].tensor
            continue
        call = Call(layer, name, 0, (tensor,), _one_argument(tensor), around)
        calls.append(call)
        tree.append(call)
        tensor = call.output()
    return Flow([first], _Leaf(tensor), calls, tree)


def _one_argument(tensor: Tensor) -> Callable[[dict[Tensor, Any]], tuple[Any, Any]]:
    return lambda values: ((values[tensor],), {})


def _alias(inside: Tensor, outside: Tensor) -> Call:
    """A tensor of a model inside is one of the model around it."""
    return Call(_same, inside[0], inside[1], (outside,), _one_argument(outside))


def _same(value: object) -> Any:
    return value


def _graph(model: keras.Model, path: str, around: tuple[Any, ...]) -> Flow:
    check_graphs()
    config = _described(model)
    # By name: unique in a Functional model, and what the description refers to.
    operations = {operation.name: operation for operation in model.operations}
    nodes: dict[tuple[str, int], tuple[Any, Any, list[Tensor]]] = {}
    for described in config["layers"]:
        name = described["name"]
        for index, node in enumerate(described["inbound_nodes"]):
            taken: list[Tensor] = []
            _collect(node, taken)
            nodes[name, index] = (node["args"], node["kwargs"], taken)
    outputs = _structure(config["output_layers"], path)
    calls: list[Call] = []
    tree: list[Any] = []
    renamed: dict[Tensor, Tensor] = {}

    def resolve(tensor: Tensor) -> Tensor:
        outside = (f"{path}{tensor[0]}", tensor[1], tensor[2])
        return renamed.get(outside, outside)

    # Back from the outputs: layers may have been called in other models too, and those calls are
    # not ours.
    wanted = [leaf.tensor for leaf in keras.tree.flatten(outputs)]
    for name, index in _in_order([(t[0].removeprefix(path), t[1]) for t in wanted], nodes):
        args, kwargs, taken = nodes[name, index]
        operation = operations[name]
        inputs = tuple(resolve(tensor) for tensor in taken)
        if has_flow(operation) and isinstance(operation, keras.Model):
            # A model that is called twice has its layers' calls twice, under different paths.
            again = f"#{index}" if index else ""
            inner = flow_of(operation, f"{path}{name}{again}/", (*around, operation))
            # The layers inside take the model's own input tensors: each becomes the tensor that the
            # model is called with.
            calls.extend(map(_alias, inner.inputs, inputs))
            calls.extend(inner.calls)
            tree.append(inner)
            for number, leaf in enumerate(keras.tree.flatten(inner.outputs)):
                renamed[f"{path}{name}", index, number] = leaf.tensor
            continue
        call = Call(
            operation, f"{path}{name}", index, inputs, _arguments(args, kwargs, resolve), around
        )
        calls.append(call)
        if call.is_layer:
            tree.append(call)
    structure = keras.tree.map_structure(
        lambda leaf: _Leaf(renamed[leaf.tensor]) if leaf.tensor in renamed else leaf, outputs
    )
    given = [leaf.tensor for leaf in keras.tree.flatten(_structure(config["input_layers"], path))]
    return Flow(given, structure, calls, tree)


def _described(model: keras.Model) -> dict[str, Any]:
    """How the calls of a Functional model are connected, which is part of its description."""
    silent = [layer for layer in model.layers if not _describes_itself(layer)]
    for layer in silent:
        # A layer need not be described for this. Past Keras' `__setattr__`, which tracks attributes.
        layer.__dict__["get_config"] = dict
    try:
        return model.get_config()
    finally:
        for layer in silent:
            del layer.__dict__["get_config"]


def _describes_itself(layer: keras.layers.Layer) -> bool:
    try:
        layer.get_config()
    except NotImplementedError:
        return False
    return True


def _in_order(
    wanted: Sequence[tuple[str, int]], nodes: dict[tuple[str, int], Any]
) -> list[tuple[str, int]]:
    """The nodes that are needed, in post-order."""
    ordered: dict[tuple[str, int], None] = {}
    # Without recursion: deep models are deeper than Python's stack.
    waiting = [(key, False) for key in reversed(wanted)]
    while waiting:
        here, done = waiting.pop()
        if here in ordered or here not in nodes:
            continue
        if done:
            ordered[here] = None
            continue
        waiting.append((here, True))
        waiting.extend(((t[0], t[1]), False) for t in reversed(nodes[here][2]))
    return list(ordered)


def _structure(described: Tree, path: str) -> Any:
    """A structure of `[name, node, output]` triples, each as one leaf."""
    if isinstance(described, dict):
        return {name: _structure(part, path) for name, part in described.items()}
    if len(described) == 3 and isinstance(described[0], str) and isinstance(described[1], int):
        return _Leaf((f"{path}{described[0]}", described[1], described[2]))
    return [_structure(part, path) for part in described]


def _collect(node: Tree, into: list[Tensor]) -> None:
    if isinstance(node, dict):
        if node.get("class_name") == "__keras_tensor__":
            into.append(tuple(node["config"]["keras_history"]))
            return
        for part in node.values():
            _collect(part, into)
    elif isinstance(node, list | tuple):
        for part in node:
            _collect(part, into)


def _arguments(
    args: Tree, kwargs: Tree, resolve: Callable[[Tensor], Tensor]
) -> Callable[[dict[Tensor, Any]], tuple[Any, Any]]:
    def fill(node: Tree, values: dict[Tensor, Any]) -> Any:
        if isinstance(node, dict):
            if node.get("class_name") == "__keras_tensor__":
                return values[resolve(tuple(node["config"]["keras_history"]))]
            if node.get("class_name") == "__tuple__":
                return tuple(fill(part, values) for part in node["items"])
            if "class_name" in node:
                return keras.saving.deserialize_keras_object(node)
            return {name: fill(part, values) for name, part in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(fill(part, values) for part in node)
        return node

    return lambda values: (fill(args, values), fill(kwargs, values))


# -- running ------------------------------------------------------------------------------------


def run_flow(
    model: keras.Model,
    flow: Flow,
    order: Sequence[Call],
    inputs: Tree,
    training: bool | None,
    between: Callable[[Call, dict[Tensor, Any]], dict[Tensor, Any]],
    mask: TensorLike = None,
) -> Any:
    """What the model returns, its calls made in this order.

    Args:
        model: the model.
        flow: its calls.
        order: the same calls, each after those whose outputs it takes.
        inputs: what the model is called with.
        training: as in a call of the model.
        between: given a call that comes next and the values still needed; returns the values.
        mask: as in a call of the model: masks of the inputs, or None.
    """
    values: dict[Tensor, Any] = dict(zip(flow.inputs, _standard(model, inputs), strict=True))
    if mask is not None:
        masks: list[Any] = list(keras.tree.flatten(mask))  # type: ignore[arg-type]
        values = {t: with_mask(v, m) for (t, v), m in zip(values.items(), masks, strict=True)}
    wanted = {leaf.tensor for leaf in keras.tree.flatten(flow.outputs)}
    # What is not used any more must not cross a boundary: it would be sent, and stashed for the
    # backward pass.
    last_use = {tensor: n for n, call in enumerate(order) for tensor in call.inputs}
    for number, call in enumerate(order):
        needed = {t: v for t, v in values.items() if t in wanted or last_use.get(t, -1) >= number}
        values = between(call, needed)
        args, kwargs = call.arguments(values)
        if training is not None and takes_training(call.operation):
            # Keras passes it on implicitly while a model is called; here its layers are called one
            # by one.
            kwargs = {**kwargs, "training": training}
        with _scopes(call.around):
            made = call.operation(*args, **kwargs)
        for output, value in enumerate(keras.tree.flatten(made)):
            values[call.output(output)] = value
    found = keras.tree.map_structure(lambda leaf: values[leaf.tensor], flow.outputs)
    return found[0] if isinstance(found, list) and len(found) == 1 else found


class _scopes:
    """The names of the models around a layer, as they would be opened by calling them."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._open = [keras.name_scope(model.name) for model in models]

    def __enter__(self) -> None:
        for scope in self._open:
            scope.__enter__()

    def __exit__(self, *error: Any) -> None:
        for scope in reversed(self._open):
            scope.__exit__(*error)


def takes_training(operation: object) -> bool:
    """Whether a layer wants to know if it is training."""
    # The alias of a tensor is a plain function, without a `call`.
    call = getattr(operation, "call", None)
    return call is not None and "training" in inspect.signature(call).parameters


def _standard(model: keras.Model, inputs: Tree) -> Iterator[Any]:
    """Inputs as the graph takes them: flat, in its dtypes and ranks."""
    flat: list[Any] = list(keras.tree.flatten(inputs))  # type: ignore[arg-type]
    known = getattr(model, "inputs", None) or [None] * len(flat)
    value: Any
    for value, wanted in zip(flat, known, strict=True):
        if wanted is None:
            yield value
            continue
        value: Any = keras.ops.convert_to_tensor(value, dtype=wanted.dtype)
        # As a Functional model does when it is called: a last dim of 1 is added or removed.
        if len(value.shape) == len(wanted.shape) + 1 and value.shape[-1] == 1:
            value = keras.ops.squeeze(value, axis=-1)
        elif len(value.shape) == len(wanted.shape) - 1 and wanted.shape[-1] == 1:
            value = keras.ops.expand_dims(value, axis=-1)
        yield value
