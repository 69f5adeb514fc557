"""A graph of ATen operations, evaluated in JAX.

Each operation runs under the scopes of its module. What depends on no input is computed at once, so
that what looks at values (which mask is causal?) may know it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx.node import map_arg

from tailrace.errors import ProgramError
from tailrace.torch.calls.arrays import array_of
from tailrace.torch.lowerings.random_numbers import drawing, is_random
from tailrace.torch.lowerings.refused import REFUSED
from tailrace.torch.lowerings.table import BY_NAME, LOWERINGS

_PLACES = frozenset(("device", "layout", "memory_format", "pin_memory"))
"""Arguments that say where a result is, and its format in memory."""

LARGEST_CONSTANT = 2**26
"""The bytes of a value above which it is computed in the program although it depends on no input: as a
constant it would be a part of the program's text."""


def evaluate(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], key: jax.Array
) -> list[Any]:
    """The outputs of a graph, flat, in order; None where the graph has None.

    Args:
        graph_module: a functional graph of ATen operations.
        inputs: a JAX value for each placeholder, in order; None for one that is not used.
        key: what random operations draw from.
    """
    with drawing(key), jax.numpy_dtype_promotion("standard"), _Scopes() as scopes:
        return _Evaluation(graph_module, scopes).run(inputs)


class _Evaluation:
    """One walk along a graph.

    Attributes:
        values: by node.
        known: the nodes that depend on no input.
    """

    def __init__(self, graph_module: torch.fx.GraphModule, scopes: _Scopes) -> None:
        self.graph_module, self.scopes = graph_module, scopes
        self.values: dict[torch.fx.Node, Any] = {}
        self.known: set[torch.fx.Node] = set()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        given = iter(inputs)
        for node in self.graph_module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(given)
            elif node.op == "get_attr":
                self.values[node] = self._constant(node)
                self.known.add(node)
            elif node.op == "output":
                return _flat(self._given(node.args[0]))
            else:
                self.values[node] = self._computed(node)
        return []

    def _given(self, argument: Any) -> Any:
        return map_arg(argument, lambda node: self.values[node])

    def _constant(self, node: torch.fx.Node) -> Any:
        found: Any = self.graph_module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        if isinstance(found, torch.Tensor):
            with jax.ensure_compile_time_eval():
                # A copy: the tensor may be written later.
                return jnp.array(array_of(found))
        return found

    def _computed(self, node: torch.fx.Node) -> Any:
        function = lowering_of(node)
        args = self._given(node.args)
        named = {name: self._given(v) for name, v in node.kwargs.items() if name not in _PLACES}
        self.scopes.enter(node)
        try:
            if not self._is_known(node):
                return function(*args, **named)
            self.known.add(node)
            with jax.ensure_compile_time_eval():
                return function(*args, **named)
        except ProgramError as error:
            raise ProgramError(f"{error}{place(node)}") from None

    def _is_known(self, node: torch.fx.Node) -> bool:
        depends = any(one not in self.known for one in node.all_input_nodes)
        return not depends and not is_random(node.target) and _size(node) <= LARGEST_CONSTANT


def lowering_of(node: torch.fx.Node) -> Any:
    """What computes a node.

    Raises:
        ProgramError: if nothing does; the message names the operation, the module and the user's line.
    """
    if node.op == "call_function":
        target: Any = node.target
        if target in LOWERINGS:
            return LOWERINGS[target]
        if isinstance(target, torch._ops.OpOverload) and target._schema.name in BY_NAME:
            return BY_NAME[target._schema.name]
        if target is operator.getitem or getattr(target, "__module__", "") == "_operator":
            return target
    why = REFUSED.get(target) if isinstance(target := node.target, torch._ops.OpOverload) else None
    reason = f": {why}" if why else ""
    raise ProgramError(
        f"{node.target} has no form that runs on the device{reason}{place(node)}. Compute it by other "
        f"operations, or outside of the module."
    )


def place(node: torch.fx.Node) -> str:
    """Where a node comes from, for the end of a sentence: its module, and the user's line."""
    path, line = module_path(node), source_line(node)
    places = [f"in module {path!r}"] * bool(path) + [f"by `{line}`"] * bool(line)
    return f" (called {', '.join(places)})" if places else ""


def module_path(node: torch.fx.Node) -> str:
    """The path of the module that a node was called in, as `named_modules()` gives it."""
    paths = [path for _, path in _modules(node) if path]
    return paths[-1] if paths else ""


def source_line(node: torch.fx.Node) -> str:
    """The line of the user's program that a node comes from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    return next((line for line in reversed(lines) if line.strip("^~ ")), "")


_ROOT = re.compile(r"^L\[['\"]\w+['\"]\]\.?")


def _modules(node: torch.fx.Node) -> list[tuple[Any, str]]:
    """(identity, path) of the modules around a node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(key, _path(entry[0])) for key, entry in stack.items()]


def _path(name: str) -> str:
    """`layers.0.attn` of `L['self'].layers.0.attn`, and of the other ways in which it is written."""
    name = f".{_ROOT.sub('', name)}"
    name = re.sub(r"\._modules\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", name)
    name = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", name)
    return re.sub(r"@\d+", "", name).lstrip(".")


class _Scopes:
    """The scopes of modules that are open. A scope is entered once for the operations of one call of a
    module: each entry is another one for those who name values."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, Any]] = []

    def __enter__(self) -> _Scopes:
        return self

    def __exit__(self, *given: Any) -> None:
        self._leave(0)

    def enter(self, node: torch.fx.Node) -> None:
        """Enter those of a node, and leave others."""
        wanted = [(key, path) for key, path in _modules(node) if path]
        keep = 0
        for (held, _), one in zip(self.open, wanted, strict=False):
            if held != one:
                break
            keep += 1
        self._leave(keep)
        for one in wanted[keep:]:
            scope = jax.named_scope(one[1])
            scope.__enter__()
            self.open.append((one, scope))

    def _leave(self, keep: int) -> None:
        while len(self.open) > keep:
            self.open.pop()[1].__exit__(None, None, None)


def _size(node: torch.fx.Node) -> int:
    """The bytes of a node's value, as far as the graph says."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, torch.Tensor))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _flat(part)]
    return [value]
