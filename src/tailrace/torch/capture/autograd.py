"""What autograd knows of a forward pass, written into Dynamo's graph before it becomes core ATen.

AOTAutograd's graph of an inference drops it without a word: `detach` becomes an alias, a region under
`torch.no_grad()` computes like any other, a custom Function is differentiated through its forward.
Dynamo's graph, captured with gradients enabled, says of each tensor whether it has a gradient: what has
none although something that it is computed from has one goes through an operation that stops it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from tailrace.errors import ProgramError
from tailrace.torch.capture import internals
from tailrace.torch.capture.functions import as_operation
from tailrace.torch.capture.places import line_of
from tailrace.torch.lowerings.composites import ROUTES

_NESTING = "_increment_nesting", "_decrement_nesting"
"""How the functions around a transformation of `torch.func` end: it has gradients of its own inside."""


def keep_autograd(graph: GraphModule) -> list[Any]:
    """Write what autograd knows into Dynamo's graph, and put our own operations into it.

    Returns:
        what has to live as long as the graph.
    """
    held: list[Any] = []
    enabled, depth, aliases = True, 0, set[int]()
    if any(_name(node).endswith(_NESTING) for node in graph.graph.nodes):
        _let_transformations_record(graph)
    for node in list(graph.graph.nodes):
        name = _name(node)
        if node.op == "get_attr":
            # Of an operation such as a checkpoint; those of a custom function come with it.
            body = getattr(graph, str(node.target), None)
            users = [user.target for user in node.users]
            if isinstance(body, GraphModule) and internals.custom_function not in users:
                held += keep_autograd(body)
            continue
        if node.target is internals.set_grad_enabled:
            enabled = bool(node.args[0]) or node.next.op == "output"
            continue
        if name.endswith(_NESTING):
            depth += 1 if name.endswith(_NESTING[0]) else -1
            continue
        if name == "register_hook" or name == "register_post_accumulate_grad_hook":
            raise ProgramError(
                f"{line_of(node)} calls {name} on a tensor, and the hook would not run. Gradients are "
                f"computed on the device, and no hook of the backward pass runs there. Remove the "
                f"hook; to change a gradient, write a torch.autograd.Function with a backward of its "
                f"own."
            )
        if node.target is internals.custom_function:
            held.append(as_operation(graph, node, keep_autograd))
        if depth and (not enabled or name == "detach"):
            raise ProgramError(
                f"{line_of(node)} stops gradients within a transformation of torch.func, which has "
                f"gradients of its own: which of them stop would be lost. Stop them outside of it."
            )
        if not depth:
            _stop(graph, node, enabled, aliases)
            _route(node)  # our own operations have no gradient that PyTorch knows
    graph.graph.lint()
    graph.recompile()
    return held


def _let_transformations_record(graph: GraphModule) -> None:
    """Switch gradients on in a graph that is exported with gradients off.

    Without, a transformation of `torch.func` inside of it records nothing, and its gradients are zero.
    """
    first, last = next(iter(graph.graph.nodes)), next(iter(reversed(graph.graph.nodes)))
    for place, flag in ((first, True), (last, False)):
        with graph.graph.inserting_before(place):
            graph.graph.call_function(internals.set_grad_enabled, (flag,))


def _stop(graph: GraphModule, node: Node, enabled: bool, aliases: set[int]) -> None:
    """Let no gradient through a node that has none in PyTorch."""
    carrying = [one for one in node.all_input_nodes if _carries(one)]
    if _in_place(node):
        target = node.args[0] if node.args else None
        assert isinstance(target, Node)
        _check_write(node, target, enabled, aliases)
        if not _carries(target):
            for one in carrying:
                with graph.graph.inserting_before(node):
                    node.replace_input_with(one, _stopped(graph, one, node))
        return
    value = internals.value_of(node)
    if not isinstance(value, torch.Tensor) or not carrying or node.op == "output":
        return
    if value.requires_grad or not (value.is_floating_point() or value.is_complex()):
        return
    if any(_storage(value) == _storage(internals.value_of(one)) for one in carrying):
        aliases.add(_storage(value))
    with graph.graph.inserting_after(node):
        stop = _stopped(graph, node, node)
    node.replace_all_uses_with(stop, delete_user_cb=lambda user: user is not stop)


def _stopped(graph: GraphModule, value: Node, at: Node) -> Node:
    node = graph.graph.call_function(torch.ops.tailrace.stop_gradient, (value,))
    node.meta = {
        key: at.meta[key]
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack")
        if key in at.meta
    }
    # Its form, without a gradient: what follows looks at it.
    form = internals.value_of(value)
    node.meta["example_value"] = form.detach() if isinstance(form, torch.Tensor) else form
    return node


def _check_write(node: Node, target: Node, enabled: bool, aliases: set[int]) -> None:
    """Refuse a write that PyTorch's autograd does not see, to a tensor that has a gradient."""
    if _name(node) == "detach_":
        raise ProgramError(
            f"{line_of(node)} calls detach_() on a tensor that was computed, and other places hold the "
            f"same tensor. Write x = x.detach() instead."
        )
    hidden = _carries(target) and not enabled
    value = internals.value_of(target)
    if hidden or (isinstance(value, torch.Tensor) and _storage(value) in aliases):
        raise ProgramError(
            f"{line_of(node)} writes to a tensor that has a gradient in a way that PyTorch keeps no "
            f"record of: under torch.no_grad(), or through detach() or .data. Its gradient would be "
            f"that of other values. Compute a new tensor: y = x + (f(x) - x).detach()."
        )


def _carries(node: Node) -> bool:
    """Whether the value of a node has a gradient; of a tuple, whether one of its tensors may."""
    value = internals.value_of(node)
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, tuple | list):
        return any(_carries(one) for one in node.all_input_nodes)
    return False


_WRITES = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ipow", "imatmul", "ifloordiv"})


def _in_place(node: Node) -> bool:
    name = _name(node)
    if name in _WRITES:
        return bool(node.args) and isinstance(internals.value_of(_first(node)), torch.Tensor)
    if node.op not in ("call_function", "call_method"):
        return False
    written = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return written and isinstance(_first(node), Node)


def _first(node: Node) -> Any:
    return node.args[0] if node.args else None


def _route(node: Node) -> None:
    """Put an operation of our own where there is one for a function of PyTorch."""
    if _name(node) == "detach":  # a view: what is written to it is written to its base
        return
    function: Any = node.target
    if node.op == "call_method":
        function = getattr(torch.Tensor, str(node.target), None)
    if function in ROUTES:
        node.op, node.target = "call_function", ROUTES[function]


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else -1


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
