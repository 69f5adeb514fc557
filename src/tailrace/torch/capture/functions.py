"""`torch.autograd.Function`: both of its bodies as one operation, with the gradient of its own."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx import GraphModule, Node

from tailrace.errors import ProgramError
from tailrace.torch.capture import internals
from tailrace.torch.capture.marked import OPERATION
from tailrace.torch.lowerings.evaluate import evaluate
from tailrace.torch.lowerings.random_numbers import is_random, next_key
from tailrace.torch.lowerings.table import lowering

_numbers = itertools.count()
_pairs: weakref.WeakValueDictionary[int, BodyPair] = weakref.WeakValueDictionary()


@dataclasses.dataclass(eq=False)
class BodyPair:
    """The two bodies of a custom function, as core ATen.

    Attributes:
        forward: inputs to outputs, and what backward takes.
        backward: gradients of the outputs, and what forward has left, to gradients of the inputs.
        outputs: how many outputs there are.
        examples: what Dynamo knows of the outputs.
    """

    forward: GraphModule
    backward: GraphModule
    outputs: int
    examples: list[torch.Tensor]


@torch.library.custom_op("tailrace::custom_function", mutates_args=())
def _custom_function(inputs: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    raise NotImplementedError("runs in captured programs only")


@_custom_function.register_fake
def _(inputs: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    examples = _pairs[number].examples
    return [
        torch.empty_strided(tuple(one.shape), one.stride(), dtype=one.dtype, device=one.device)
        for one in examples
    ]


def as_operation(
    graph: GraphModule, node: Node, prepare: Callable[[GraphModule], list[Any]]
) -> list[Any]:
    """Replace a custom function in Dynamo's graph; returns what has to live as long as the graph."""
    first, second, *inputs = cast(tuple[Any, ...], node.args)
    if node.kwargs.get("dirty_idx"):
        raise ProgramError(
            "A torch.autograd.Function that changes its inputs in place (ctx.mark_dirty) has no form "
            "on the device. Return a new tensor instead."
        )
    forward, backward = (getattr(graph, str(body.target)) for body in (first, second))
    examples = internals.value_of(node)
    examples = [examples] if isinstance(examples, torch.Tensor) else list(examples)
    held = [*prepare(forward), *prepare(backward)]
    pair = BodyPair(_functional(forward), _functional(backward), len(examples), examples)
    if any(is_random(one.target) for one in pair.backward.graph.nodes):
        raise ProgramError(
            "A torch.autograd.Function whose backward draws random numbers has no form on the device. "
            "Draw them in forward, and save them: ctx.save_for_backward."
        )
    number = next(_numbers)
    _pairs[number] = pair
    tensors = [one for one in inputs if isinstance(one, Node)]
    if len(tensors) != len(inputs):
        raise ProgramError("A torch.autograd.Function takes tensors and constants.")
    node.target, node.args, node.kwargs = _operation, (tensors, number), {}
    return [pair, *held]


def _operation(inputs: Any, number: int) -> Any:
    return tuple(torch.ops.tailrace.custom_function(inputs, number))


def _functional(body: GraphModule) -> GraphModule:
    examples = [internals.value_of(n) for n in body.graph.find_nodes(op="placeholder")]
    _flatten_results(body)
    aten, writes = internals.to_aten(body, examples)
    if writes:
        raise ProgramError(
            "A torch.autograd.Function that changes tensors in place which it was given has no form on "
            "the device. Return new tensors instead."
        )
    return aten


def _flatten_results(body: GraphModule) -> None:
    (output,) = body.graph.find_nodes(op="output")
    output.args = (tuple(_flat(output.args[0])),)
    body.recompile()


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _flat(part)]
    return [value]


@lowering(torch.ops.tailrace.custom_function.default)
def _lowered(inputs: Sequence[Any], number: int) -> tuple[Any, ...]:
    pair = _pairs[number]
    # A key of its own, handed in: what is drawn inside of a function that JAX transforms stays there.
    random = any(is_random(node.target) for node in pair.forward.graph.nodes)
    no_key: Any = None
    key = next_key() if random else no_key

    @jax.custom_vjp
    def apply(key: Any, *inputs: Any) -> tuple[Any, ...]:
        return forward(key, *inputs)[0]

    def forward(key: Any, *inputs: Any) -> tuple[tuple[Any, ...], Any]:
        results = evaluate(pair.forward, inputs, key)
        return tuple(results[: pair.outputs]), (inputs, results[pair.outputs :])

    def backward(kept: Any, gradients: Any) -> tuple[Any, ...]:
        inputs, saved = kept
        given = [_given(g, like) for g, like in zip(gradients, pair.examples, strict=True)]
        found = evaluate(pair.backward, [*given, *saved], no_key)
        if len(found) != len(inputs):
            raise ProgramError(
                f"backward of a torch.autograd.Function returns one gradient for each tensor that "
                f"forward takes. Received: {len(found)}, and it takes {len(inputs)}."
            )
        pairs = enumerate(zip(inputs, found, strict=True))
        return (None, *(_cotangent(value, gradient, n) for n, (value, gradient) in pairs))

    apply.defvjp(forward, backward)
    return apply(key, *inputs)


def _given(gradient: Any, like: torch.Tensor) -> Any:
    """The gradient of an output as PyTorch has it; zeros for one of whole numbers."""
    if gradient.dtype == jax.dtypes.float0:
        return jnp.zeros(tuple(like.shape), jnp.float32)
    return jnp.conj(gradient)


def _cotangent(value: Any, gradient: Any, number: int) -> Any:
    """What JAX takes for a gradient of PyTorch's: of the form of the input."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return np.zeros(value.shape, jax.dtypes.float0)
    if gradient is None:
        return jnp.zeros_like(value)
    shape = (1,) * (gradient.ndim - value.ndim) + value.shape
    pairs = zip(shape, gradient.shape, strict=False)
    if len(shape) != gradient.ndim or any(own not in (1, size) for own, size in pairs):
        raise ProgramError(
            f"A gradient has the shape of its argument. backward of a torch.autograd.Function returns "
            f"one of {list(gradient.shape)} for argument {number}, which is {list(value.shape)}."
        )
    # As PyTorch does: a gradient of a broadcast result is summed to the shape of the argument.
    axes = tuple(n for n, size in enumerate(gradient.shape) if shape[n] != size)
    found = jnp.conj(gradient.sum(axes, keepdims=True).reshape(value.shape))
    return (found if jnp.iscomplexobj(value) else found.real).astype(value.dtype)


@lowering(OPERATION)
def _marked(x: Any) -> Any:
    return x
