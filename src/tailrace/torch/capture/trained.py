"""What is trained: what the module returns as its loss.

`.loss` or `["loss"]` of the output; otherwise the only scalar with a gradient, or of several the one
that depends on all others. No loss is searched inside: which of several values is meant only the user
knows, and says by `loss=`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tailrace.errors import ProgramError
from tailrace.torch.capture.captured import CapturedGraph
from tailrace.torch.capture.marked import OPERATION
from tailrace.torch.capture.outputs import tensors_in

_HOW = (
    "Say which one by loss= of tt.training_model: a name (loss='total'), an index (loss=1), or a "
    "function of the output (loss=lambda out: out[0] + out[1])."
)


def trained(captured: CapturedGraph, loss: Any, module: str) -> int:
    """Which result of the graph is the loss.

    Raises:
        ProgramError: no value can be trained, or several could be meant.
    """
    output = captured.output
    named = [(path or "0", tensor) for path, tensor in tensors_in(output)]
    returned = f"Returned: {_shown(named, captured)}."
    if loss is not None:
        found = captured.extra if callable(loss) else _part(output, loss)
        what = "the function given as loss=" if callable(loss) else f"loss={loss!r}"
        if not isinstance(found, torch.Tensor):
            raise ProgramError(
                f"The loss of {module} is a tensor with one element, and {what} gives "
                f"{'nothing' if found is None else type(found).__name__}. {returned}"
            )
        return _checked(found, what, captured, module, returned)
    marks = _final_marks(captured)
    if marks or captured.lost_mark:
        returned_marks = [n for n, node in enumerate(captured.results) if node in marks]
        if len(marks) != 1 or captured.lost_mark or not returned_marks:
            raise ProgramError(
                f"{module} marks several values by tt.identity_loss, of which none is computed "
                f"from the others. One is trained: mark what is computed from all of them. {returned}"
                if len(marks) > 1
                else f"What is trained is what {module} returns, and the value that it marks by "
                f"tt.identity_loss is not returned. Return it. {returned}"
            )
        return returned_marks[0]
    for what, found in ((".loss", getattr(output, "loss", None)), ("['loss']", _item(output))):
        if isinstance(found, torch.Tensor):
            return _checked(found, what, captured, module, returned)
    # By result: the same value may be returned under two names.
    scalars = {
        place: path
        for path, tensor in named
        if tensor.numel() == 1 and isinstance(place := captured.place(tensor), int)
        if place in captured.differentiable
    }
    if not scalars:
        raise ProgramError(
            f"Training needs a loss: {module} returns no scalar that has a gradient. {returned} "
            f"Compute the loss in forward and return it, or give a function of the output: "
            f"loss=lambda out: out.mean()."
        )
    if len(scalars) == 1:
        return next(iter(scalars))
    whole = [one for one in scalars if _behind(captured, one).issuperset(scalars)]
    if not whole:
        raise ProgramError(
            f"{module} returns several scalars that have a gradient, of which none depends on all "
            f"others: {', '.join(map(repr, scalars.values()))}. {returned} {_HOW}"
        )
    return whole[-1]


def _checked(
    tensor: torch.Tensor, what: str, captured: CapturedGraph, module: str, returned: str
) -> int:
    place = captured.place(tensor)
    if tensor.numel() != 1:
        raise ProgramError(
            f"The loss of {module} is a tensor with one element, and {what} has shape "
            f"{list(tensor.shape)}. Reduce it: .mean() or .sum() in forward, or in a function of the "
            f"output, loss=lambda out: .... {returned}"
        )
    if not isinstance(place, int) or place not in captured.differentiable:
        raise ProgramError(
            f"The loss of {module}, {what}, has no gradient: it is computed from no parameter that is "
            f"trained, or under torch.no_grad() or detach(). {returned} {_HOW}"
        )
    return place


def _part(output: Any, name: str | int) -> Any:
    if isinstance(name, int):
        if isinstance(output, torch.Tensor) and name == 0:
            return output
        if isinstance(output, tuple | list) and -len(output) <= name < len(output):
            return output[name]
        found = [tensor for _, tensor in tensors_in(output)]
        return found[name] if -len(found) <= name < len(found) else None
    value = output
    for part in name.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, tuple | list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = getattr(value, part, None)
    return value


def _item(output: Any) -> Any:
    return output.get("loss") if isinstance(output, dict) else None


def _shown(named: list[tuple[str, torch.Tensor]], captured: CapturedGraph) -> str:
    texts = []
    for path, tensor in named[:12]:
        place = captured.place(tensor)
        flag = "" if place in captured.differentiable else ", no gradient"
        texts.append(f"{path!r} {list(tensor.shape)}{flag}")
    more = f" and {len(named) - 12} more" if len(named) > 12 else ""
    return (", ".join(texts) or "no tensor") + more


def _final_marks(captured: CapturedGraph) -> set[Node]:
    """The values marked by `tt.identity_loss` from which no other one is computed."""
    graph = captured.graph
    found = graph.graph.find_nodes(op="call_function", target=OPERATION) if graph else ()
    inner = {one for mark in found for one in _sources(mark) if one is not mark}
    return set(found) - inner


def _behind(captured: CapturedGraph, result: int) -> set[int]:
    """Which results a result is computed from; itself too."""
    results = captured.results
    seen = _sources(results[result])
    return {number for number, node in enumerate(results) if node in seen}


def _sources(node: Node) -> set[Node]:
    """All nodes that a node is computed from; itself too."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return seen
