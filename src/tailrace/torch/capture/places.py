"""Where a node of a graph comes from: its module, by the path that PyTorch gives it, and its line."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node


def name_modules(graph: GraphModule, module: torch.nn.Module) -> None:
    """Say by its path which module a node was called in; those that have none are left out.

    Dynamo names a module by the attributes that it was reached through. A module in several places has
    one path, that of the first.
    """
    paths = {str(id(inner)): path for path, inner in module.named_modules()}
    for body in graph.modules():
        for node in body.graph.nodes if isinstance(body, GraphModule) else ():
            stack = node.meta.get("nn_module_stack") or {}
            # The key is the module's id, and `@` the number of its call.
            node.meta["nn_module_stack"] = {
                key: (paths[own], kind)
                for key, (_, kind) in stack.items()
                if (own := str(key).partition("@")[0]) in paths
            }


def line_of(node: Node) -> str:
    """The line of the user's program that a node comes from, as `file:line`."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    if not places:
        return "Forward"
    file, _, number = places[-1].removeprefix("File ").partition(", line ")
    return f"{file.strip(chr(34))}:{number.split(',')[0]}"
