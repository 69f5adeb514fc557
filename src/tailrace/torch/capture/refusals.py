"""Why a module cannot be captured, in a sentence: the line, what it does, and what to write instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from tailrace.errors import ProgramError
from tailrace.jaxprs.internals import is_library
from tailrace.torch.capture.places import line_of

_READ = (
    "Compute with the tensor itself. To see the value, return it and read it after the call; a number "
    "that is known before the call is an argument of it"
)
_CHOICE = "Choose with torch.where(condition, a, b), or decide by shapes and arguments"
_SHAPES = (
    "Keep all elements: torch.where(mask, x, other), and for a mean over a mask "
    "(x * mask).sum() / mask.sum()"
)
_RULES: tuple[tuple[str, str, str], ...] = (
    ("data-dependent branching", "branches on the value of a tensor", _CHOICE),
    (
        "data-dependent assertion",
        "asserts something about the value of a tensor",
        "Check it outside",
    ),
    ("item()", "reads the value of a tensor", _READ),
    ("tolist", "reads the value of a tensor", _READ),
    ("_local_scalar_dense", "reads the value of a tensor", _READ),
    ("numpy()", "reads the value of a tensor", _READ),
    (
        "dynamic shape operator",
        "has a result whose shape depends on the values of a tensor",
        _SHAPES,
    ),
    ("data dependent operator", "reads the value of a tensor", _READ),
    ("data-dependent", "needs the value of a tensor", _READ),
    (
        "backward()",
        "asks for gradients within forward",
        "Compute the loss only, which is differentiated for you",
    ),
    (
        "autograd.grad",
        "asks for gradients within forward",
        "Compute the loss only, which is differentiated for you; torch.func.grad computes a gradient "
        "that the loss needs",
    ),
    (
        "hook",
        "registers a hook of the backward pass",
        "Remove it; to change a gradient, write a torch.autograd.Function with a backward of its own",
    ),
    (
        "random.random",
        "draws from Python's random numbers, which would be the same in every step",
        "Draw from PyTorch's: torch.rand(())",
    ),
    ("print", "prints", "Return the tensor and print it after the call, or use tt.print_tensor"),
)
"""Part of Dynamo's text, what the line does, and what to write."""


def refused(error: BaseException, module: torch.nn.Module) -> Exception:
    """The error of a capture as a sentence."""
    name = type(module).__name__
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, ProgramError):
        return inner
    text = str(error)
    where, line = _place(getattr(error, "real_stack", None) or _frames(error))
    at = f"{where}{f' ({line})' if line else ''}" if where else f"forward of {name}"
    explanation, hint = _part(text, "Explanation"), _part(text, "Hint")
    if own := _raised(text):
        return ProgramError(f"{own} ({at})")
    for known, does, write in _RULES:
        if known in text.lower().partition("from user code")[0]:
            return ProgramError(
                f"{name} cannot become one program: {at} {does}, which is not known before the program "
                f"runs. {write}."
                if "value" in does
                else f"{name} cannot become one program: {at} {does}. {write}."
            )
    if own := _own_function(getattr(error, "real_stack", None) or ()):
        return ProgramError(
            f"{name} cannot become one program: {at} calls {own}, which a captured module has no form "
            f"for yet. Remove it."
        )
    first = _sentence(explanation or text.strip().partition("\n")[0] or type(error).__name__)
    advice = (
        f" {_sentence(hint)}"
        if hint
        else " Write it with operations of torch, or do it outside of forward."
    )
    return ProgramError(
        f"{name} cannot become one program: {at} does what PyTorch's front end for compilers does not "
        f"follow: {_ended(first)}{_ended(advice)}"
    )


def refuse_values(graph: GraphModule, module: torch.nn.Module) -> None:
    """Refuse a graph in which a number or a shape depends on values.

    Also what PyTorch refuses only where it computes: numbers that do not fit a dtype, products of
    several dtypes.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
            shaped = isinstance(value, torch.Tensor)
            does = "has a result whose shape depends on the values" if shaped else "reads the value"
            write = _SHAPES if shaped else _READ
            raise ProgramError(
                f"{type(module).__name__} cannot become one program: {line_of(node)} {does} of a "
                f"tensor, which is not known before the program runs. {write}."
            )
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            _refuse_overflow(node, value.dtype)
        if node.target in _PRODUCTS:
            _refuse_mixed(node)


_FILLS = {
    torch.ops.aten.fill.Scalar: 1,
    torch.ops.aten.full.default: 1,
    torch.ops.aten.full_like.default: 1,
    torch.ops.aten.masked_fill.Scalar: 2,
    torch.ops.aten.constant_pad_nd.default: 2,
}
"""Operations that put a number into a tensor, and which argument it is."""


def _refuse_overflow(node: Node, dtype: torch.dtype) -> None:
    place = _FILLS.get(node.target)  # type: ignore[arg-type]
    if place is None or len(node.args) <= place or dtype.is_complex:
        return
    number = node.args[place]
    if isinstance(number, int | float) and not isinstance(number, bool):
        try:  # graphs of shapes know nothing of it
            torch.zeros((), dtype=dtype).fill_(number)
        except RuntimeError as error:
            raise ProgramError(f"{error} ({line_of(node)})") from None


_PRODUCTS = frozenset(
    (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
    )
)


def _refuse_mixed(node: Node) -> None:
    values = [one.meta.get("val") for one in node.all_input_nodes]
    dtypes = dict.fromkeys(value.dtype for value in values if isinstance(value, torch.Tensor))
    if len(dtypes) > 1:
        raise ProgramError(
            f"A product takes tensors of one dtype ({line_of(node)}). Received: "
            f"{', '.join(map(str, dtypes))}. Convert them, or use torch.autocast."
        )


def _raised(text: str) -> str:
    """The error that forward itself raises, as it would without us."""
    found = re.search(r"raised exception (\w+)\((.*)\)", text)
    found = found or re.search(r"got (\w+)\((['\"].*['\"])\)", text)
    return (
        f"{found.group(1)} in forward: {found.group(2).strip(chr(34) + chr(39))}" if found else ""
    )


def _own_function(stack: Sequence[traceback.FrameSummary]) -> str:
    """What of our own is called that needs a trace."""
    files = {frame.filename.replace("\\", "/").rpartition("/")[2] for frame in stack}
    if "blocks.py" in files:
        return "tt.Block or tt.BeginBlock"
    return "tt.print_tensor" if "printing.py" in files else ""


def _sentence(text: str) -> str:
    """The first sentence: Dynamo's texts go on about itself."""
    return re.split(r"\. |(?<=`) This ", text)[0].removesuffix(".")


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _frames(error: BaseException) -> Sequence[traceback.FrameSummary]:
    return traceback.extract_tb(error.__traceback__)


def _place(stack: Sequence[traceback.FrameSummary]) -> tuple[str, str]:
    """The innermost line of the user's program, and its text."""
    own = [one for one in stack if not is_library(one.filename) and "tailrace" not in one.filename]
    frame = (
        own[-1]
        if own
        else (stack[-1] if isinstance(stack, traceback.StackSummary) and stack else None)
    )
    if frame is None:
        return "", ""
    return f"{frame.filename}:{frame.lineno}", (frame.line or "").strip()


def _part(text: str, name: str) -> str:
    found = re.search(rf"^\s*{name}: (.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""
