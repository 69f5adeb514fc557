"""A module's forward pass as a graph of core ATen, with where its inputs come from and go to."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tailrace.errors import ProgramError, TailraceError
from tailrace.torch.capture import internals
from tailrace.torch.capture.autograd import keep_autograd
from tailrace.torch.capture.numbers import Changes, Numbers
from tailrace.torch.capture.outputs import tensors_in
from tailrace.torch.capture.places import name_modules
from tailrace.torch.capture.rebinding import Rebinding
from tailrace.torch.capture.refusals import refuse_values, refused
from tailrace.torch.capture.sources import Source, sources_of
from tailrace.torch.capture.stand_ins import stand_in
from tailrace.torch.tracing.attributes import attributes_put_back


@dataclasses.dataclass(eq=False)
class CapturedGraph:
    """A module's forward pass as a functional graph.

    Attributes:
        graph: core ATen and operations of our own; None where forward computes nothing.
        sources: where its inputs come from.
        written: for each input that forward changes in place, by its place, which result has its
            value afterwards.
        rebound: the buffers that forward replaces, likewise by name.
        output: what forward returns, with stand-ins for tensors.
        extra: what the function of the loss returns, likewise.
        places: where a tensor in `output` comes from: its result in the graph, or its source, by id.
        differentiable: which results have a gradient.
        lost_mark: whether forward marks a loss and does nothing with it.
        held: what the graph needs as long as it is used.
    """

    graph: GraphModule | None
    sources: list[Source]
    written: dict[int, int]
    rebound: dict[str, int]
    output: Any
    extra: Any
    places: dict[int, int | Source]
    differentiable: frozenset[int]
    lost_mark: bool
    held: list[Any]

    def place(self, tensor: torch.Tensor) -> int | Source:
        """Where a tensor of the output comes from."""
        return self.places[id(tensor)]

    @property
    def results(self) -> list[Any]:
        """The nodes of the results."""
        if self.graph is None:
            return []
        output = next(iter(self.graph.graph.find_nodes(op="output")))
        return list(output.args[0])


class _Backend:
    """What Dynamo calls with the graph that it has captured, and then with the graph's inputs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.graph: GraphModule | None = None
        self.differentiable: list[bool] = []
        self.writes: dict[str, str] = {}
        self.inputs: Sequence[Any] = ()
        self.outputs: list[Any] = []
        self.made: dict[int, int] = {}
        self.held: list[Any] = []
        self.error: BaseException | None = None
        self.again = self.lost_mark = False

    def __call__(self, graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        try:
            return self._take(graph)
        except BaseException as error:
            self.error = error  # Dynamo wraps it
            raise

    def _take(self, graph: GraphModule) -> Callable[..., Any]:
        if self.graph is not None:
            # Called again with the same arguments, after what forward has changed.
            self.again = True
            raise ProgramError("forward has changed what it depends on")
        self._refuse_drawn(graph)
        results = next(iter(graph.graph.find_nodes(op="output"))).args[0]
        examples = [internals.value_of(node) for node in graph.graph.find_nodes(op="placeholder")]
        values = [internals.value_of(n) if isinstance(n, Node) else n for n in results]
        self.differentiable = [_has_gradient(value) for value in values]
        marks = graph.graph.find_nodes(op="call_function", target=torch.ops.tailrace.marked_loss)
        self.lost_mark = any(not mark.users for mark in marks)
        name_modules(graph, self.module)
        self.held = keep_autograd(graph)
        self.graph, self.writes = internals.to_aten(graph, examples)
        refuse_values(self.graph, self.module)

        def run(*inputs: Any) -> list[Any]:
            # Called once. Dynamo builds what forward returns around these.
            self.inputs, self.outputs = inputs, [stand_in(value) for value in values]
            self.made |= {id(tensor): number for number, tensor in enumerate(self.outputs)}
            return self.outputs

        return run

    def _refuse_drawn(self, graph: GraphModule) -> None:
        if any(internals.is_drawn(node) for node in graph.graph.find_nodes(op="placeholder")):
            raise ProgramError(
                f"Forward of {type(self.module).__name__} draws from Python's random numbers, which "
                f"would be the same in every step. Draw from PyTorch's: torch.rand(())."
            )


def capture(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Any] | None = None,
) -> CapturedGraph:
    """Capture `module(*args, **kwargs)`; nothing is computed.

    Args:
        module: the module, in the mode to capture it in.
        args: its arguments, with tensors of a microbatch.
        kwargs: those by name.
        loss: a function of the output, captured along with it.

    Raises:
        ProgramError: forward cannot be captured; says which line, and what to write.
    """
    internals.check()

    def call(*args: Any, **kwargs: Any) -> Any:
        output = module(*args, **kwargs)
        return output, None if loss is None else loss(output)

    assert isinstance(call, types.FunctionType)
    backend = _Backend(module)
    before, numbers = Rebinding(module), Numbers(module)
    rebound: dict[str, int] = {}

    def used(leaf: object) -> bool:
        return any(leaf is one for one in backend.inputs)

    with ExitStack() as stack:
        stack.enter_context(internals.settings())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(attributes_put_back(module, lambda v: id(v) in backend.made, used))
        compiled = torch.compile(
            internals.own_code(call), backend=backend, fullgraph=True, dynamic=False
        )
        try:
            output, extra = compiled(*args, **kwargs)
        except TailraceError:
            raise
        except Exception as error:
            if isinstance(backend.error, TailraceError):
                raise backend.error from None
            raise refused(backend.error or error, module) from error
        finally:
            rebound = before.undo(backend.made)
            changed = numbers.changed()
    if changed:
        _refuse_state(module, changed, backend, lambda: compiled(*args, **kwargs))
    if backend.graph is None and internals.disabled():
        raise ProgramError(
            f"{type(module).__name__} is captured by PyTorch's front end for compilers, which is "
            f"switched off in this process. Remove TORCH_COMPILE_DISABLE from the environment."
        )
    sources = sources_of(module, (args, kwargs), backend.inputs)
    # Results of the graph are the new values of what it writes to, then those that Dynamo wants.
    count = len(backend.writes)
    tensors = [tensor for _, tensor in tensors_in((output, extra))]
    places: dict[int, int | Source] = {}
    for tensor, source in zip(tensors, sources_of(module, (args, kwargs), tensors), strict=True):
        places[id(tensor)] = source
    for tensor, source in zip(backend.inputs, sources, strict=True):
        places[id(tensor)] = source
    places |= {key: number + count for key, number in backend.made.items()}
    return CapturedGraph(
        backend.graph,
        sources,
        _written(backend, sources),
        {name: number + count for name, number in rebound.items()},
        output,
        extra,
        places,
        frozenset(n + count for n, flag in enumerate(backend.differentiable) if flag),
        backend.lost_mark,
        [*backend.held, *backend.inputs, *backend.outputs],
    )


def _refuse_state(
    module: torch.nn.Module, changed: Changes, backend: _Backend, call: Callable[[], Any]
) -> None:
    """Refuse a forward pass that depends on a number which it has changed."""
    with internals.settings(), torch.enable_grad(), changed.made_again(), suppress(Exception):
        call()  # Dynamo looks whether what it has captured still holds
    if backend.again:
        names = ", ".join(map(repr, changed.names))
        raise ProgramError(
            f"Forward of {type(module).__name__} changes the attribute {names} and computes with it: a "
            f"program runs every step with the same number. Make it a buffer that is updated in place "
            f"(register_buffer, then add_), or an argument of the call."
        )


def _written(backend: _Backend, sources: Sequence[Source]) -> dict[int, int]:
    """Which results are the new values of inputs."""
    if backend.graph is None:
        return {}
    inputs = [node.name for node in backend.graph.graph.find_nodes(op="placeholder")]
    found = {}
    for number, name in enumerate(backend.writes.values()):
        place = inputs.index(name)
        source = sources[place]
        if source.kind == "parameter":
            raise ProgramError(
                f"Parameter {source.name} is changed in place within the model. The optimizer updates "
                f"the parameter as it was before, so the change would be lost after the call. Compute "
                f"with the changed value instead ({source.name}.clamp(...)), or make it a buffer."
            )
        if source.kind == "constant":
            raise ProgramError(
                f"Forward writes values of the program into a tensor of the host, of shape "
                f"{list(source.tensor.shape)}, where they would be lost. State that lasts from call to "
                f"call belongs in a buffer: self.register_buffer(...). A tensor to be filled is made "
                f"in forward: torch.zeros(..., device=x.device), or a clone()."
            )
        found[place] = number
    return found


def _has_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
