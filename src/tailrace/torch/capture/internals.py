"""Everything of Dynamo's and AOTAutograd's insides that capture relies on, with a probe for each.

Dynamo is documented for others through `torch.compile(backend=)`. What is not: its exceptions and
settings, how a graph says what autograd knows, and the export of a graph to core ATen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._dynamo as dynamo
from torch._dynamo import exc
from torch._dynamo.source import RandomValueSource
from torch._functorch.aot_autograd import aot_export_module
from torch.fx import GraphModule, Node

from tailrace.base.seams import Package, Seam
from tailrace.torch.lowerings.composites import decompositions

Unsupported: Any = exc.Unsupported
"""A graph break: Python that Dynamo cannot follow."""

ObservedError: Any = exc.ObservedException
"""An exception of the user's own code, raised while Dynamo follows it."""

BackendFailed: Any = exc.BackendCompilerFailed
"""Wraps what a backend raises; the cause is its `inner_exception`."""

DynamoError: Any = exc.TorchDynamoException

custom_function: Any = torch.ops.higher_order.autograd_function_apply
"""Stands in a graph for `torch.autograd.Function.apply`, with both of its bodies."""

set_grad_enabled: Any = torch._C._set_grad_enabled
"""Stands in a graph where `torch.no_grad()` begins and ends."""

_LOGGING = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")


def _quiet_functions() -> set[Any]:
    """Functions that only say something; transformers hang some of their own on Logger."""
    names = (*_LOGGING, "warning_once", "info_once", "warning_advice")
    found = {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}
    return {*found, warnings.warn}


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Dynamo's settings for a capture; a user's own are as they were afterwards."""
    config: Any = dynamo.config
    quiet = {*config.ignore_logging_functions, *_quiet_functions()}
    patched = config.patch(
        ignore_logging_functions=quiet,
        suppress_errors=False,
        allow_rnn=True,
        # Values and shapes that depend on values have no form in a program of fixed shapes.
        capture_scalar_outputs=False,
        capture_dynamic_output_shape_ops=False,
    )
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    with contextlib.ExitStack() as stack:
        # What Dynamo does not follow, and what fails, is said by the error.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logger.setLevel, level)
        # Dynamo switches these checks off for the whole process when it is used first.
        distribution: Any = torch.distributions.Distribution
        stack.callback(distribution.set_default_validate_args, distribution._validate_args)
        logger.setLevel(logging.CRITICAL)
        stack.enter_context(patched)
        # A recurrent layer of oneDNN is one opaque operation.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


def disabled() -> bool:
    """Whether the user has switched Dynamo off for the whole process."""
    return bool(dynamo.config.disable)  # type: ignore[attr-defined]


def own_code(function: types.FunctionType) -> types.FunctionType:
    """The function with a code object of its own.

    Dynamo keeps what it compiles, and counts it against its limits, by code object: that of a capture
    is its own, and goes with it.
    """
    code = function.__code__.replace()
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def value_of(node: Node) -> Any:
    """What a node of Dynamo's graph computes: tensors with shape, dtype and `requires_grad`."""
    return node.meta.get("example_value")


def is_drawn(node: Node) -> bool:
    """Whether an input of Dynamo's graph is a number of Python's generator, drawn before each call."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return isinstance(source, RandomValueSource)


def to_aten(graph: GraphModule, examples: Sequence[Any]) -> tuple[GraphModule, dict[str, str]]:
    """A graph as functional core ATen; and the inputs it writes to, by the output with the new value.

    Outputs are the new values of such inputs, then those of the graph.
    """
    # Of an inference: what autograd knows is written into the graph, and JAX differentiates.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, signature = aot_export_module(
            graph,
            [one.detach() if isinstance(one, torch.Tensor) else one for one in examples],
            trace_joint=False,
            decompositions=decompositions(),
        )
    aten: Any = found
    for node in list(aten.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            aten.graph.erase_node(
                node
            )  # of autocast, about shapes and dtypes that are known by now
    writes: Any = signature.user_inputs_to_mutate
    return aten, dict(writes)


def _small() -> tuple[list[Any], Any, Any]:
    """A small capture: Dynamo's nodes, the export, and what came back through Dynamo."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        examples = [value_of(n) for n in graph.graph.find_nodes(op="placeholder")]
        seen.append(to_aten(graph, examples))
        return lambda *given: [torch.zeros(2)]

    def run(x: Any) -> Any:
        with torch.no_grad():
            y = x.sin()
        return {"out": y + x.detach()}

    with settings():
        compiled = torch.compile(own_code(run), backend=backend, fullgraph=True, dynamic=False)
        out = compiled(torch.ones(2, requires_grad=True))
    return seen[0].graph.nodes, seen[1], out


def _flags() -> bool:
    nodes = {getattr(n.target, "__name__", n.target): n for n in _small()[0]}
    sine = nodes["sin"]
    return (
        "_set_grad_enabled" in nodes
        and not value_of(sine).requires_grad
        and value_of(sine.args[0]).requires_grad
    )


def _exported() -> bool:
    targets = [node.target for node in _small()[1][0].graph.nodes]
    return torch.ops.aten.sin.default in targets


SEAMS = (
    Seam("Dynamo's graph of a function", "capturing modules", _flags, late=True),
    Seam("the export of a graph to core ATen", "capturing modules", _exported, late=True),
    Seam(
        "the objects that Dynamo rebuilds",
        "outputs of captured modules",
        lambda: _small()[2]["out"].tolist() == [0, 0],
        late=True,
    ),
)


def probed() -> tuple[tuple[Package, tuple[Seam, ...]], ...]:
    """What is relied on, for `tailrace doctor`."""
    return ((Package("PyTorch", "torch", torch.__version__, "2.13.0"), SEAMS),)


@functools.cache
def check() -> None:
    """Raise a `VersionError` if something has changed."""
    for package, seams in probed():
        package.check(seams)
