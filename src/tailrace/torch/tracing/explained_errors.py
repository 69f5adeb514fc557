"""Errors of a forward pass while it is traced, in a sentence that says where and what to do instead.

Most come from JAX, which finds that Python asks for a value, or from torchax, which has no lowering.
Their texts speak of tracers and dispatch; what helps is the user's module, the function called, and a
replacement that keeps shapes.
"""

from __future__ import annotations

import traceback
from types import FrameType

import jax
import torch

from tailrace.errors import ProgramError, TailraceError
from tailrace.jaxprs import internals
from tailrace.torch.tracing.watch import Watch, WatchingMode

_ONCE = "The forward pass is traced once and then runs on the device"

_CHOICE = "Keep all elements: torch.where(mask, x, other)."
_COUNTED = "For a known number of classes, torch.nn.functional.one_hot(x, classes).sum(0) counts."
_READ = (
    "Compute with the tensor itself. To see the value, return it and read it after the call, or use "
    "tt.print_tensor."
)
_PADDED = (
    "Compute on the padded batch: the last state of each sequence is "
    "out.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, out.size(2))), and a mask by length "
    "leaves padding out of the loss."
)

INSTEAD = {
    **dict.fromkeys(("argwhere", "masked_select", "nonzero", "where"), _CHOICE),
    **dict.fromkeys(("bincount", "histc", "unique", "unique_consecutive"), _COUNTED),
    **dict.fromkeys(
        ("__array__", "__float__", "__format__", "__int__", "item", "numpy", "tolist"), _READ
    ),
    "one_hot": "Give it the number of classes: one_hot(x, num_classes).",
    "repeat_interleave": "Give it the number of results: output_size=...",
    "_pack_padded_sequence": _PADDED,
}
"""Functions that need values, by name, and what to write instead."""


def explained(error: Exception, watch: Watch, root: torch.nn.Module) -> Exception:
    """An error of the forward pass, with the module it comes from."""
    if isinstance(error, TailraceError):
        return error
    name = type(root).__name__
    where = f"module {watch.module!r} of {name}" if watch.module else f"forward of {name}"
    if any(frame.f_globals.get("__name__") in _TRANSFORMS for frame in _frames(error)):
        return ProgramError(
            f"A transformation of torch.func (such as grad or vmap) in {where} cannot be traced: it "
            f"wraps tensors in a class of PyTorch's own. Write what it does with batched operations, "
            f"or as a formula. ({_shown(error)})"
        )
    # First what depends on values: such errors are of JAX's kinds, and may come through a lowering
    # that also raises one of the kinds below.
    text = _of_values(error, where) or _of_operations(error, where)
    return ProgramError(text or f"{type(error).__name__} in {where}: {str(error).strip()}")


def _of_values(error: Exception, where: str) -> str | None:
    """The message where Python, or a shape, depends on the value of a tensor."""
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return (
            f"{_ONCE}, so no shape may depend on the values of a tensor. A mask as an index, x[mask], "
            f"does that in {where}. Keep all elements: torch.where(mask, x, other), or x * mask; for a "
            f"mean over the mask, (x * mask).sum() / mask.sum()."
        )
    kinds = jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError
    branches = isinstance(error, kinds)
    first = str(error).strip().partition("\n")[0]
    called, function = _function_called(error), _looks_at_values(error)
    # A module of PyTorch's that reads a value for a choice of its own: advice on reading values would
    # be for the wrong person.
    theirs = function is not None and INSTEAD.get(called) is _READ
    if called in INSTEAD and (branches or "__format__" in first) and not theirs:
        return (
            f"{_ONCE}, so Python cannot look at the value of a tensor, and no shape may depend on one. "
            f"{called} does that in {where}. {INSTEAD[called]} ({first})"
        )
    if (branches or "_is_all_true" in first) and function is not None:
        return (
            f"{_ONCE}, so Python cannot look at the value of a tensor. {function} of PyTorch does, "
            f"called in {where}. Do without it, or give it other arguments: checks and choices by "
            f"values can often be switched off. ({first})"
        )
    if branches:
        return (
            f"{_ONCE}, so Python cannot branch on the value of a tensor, and no shape may depend on "
            f"one. It does in {where}. Use torch.where, or decide by shapes and arguments. ({first})"
        )
    return None


def _of_operations(error: Exception, where: str) -> str | None:
    """The message where an operation has no form on the device."""
    text = str(error).strip()
    if "torchax Tensors can only do math" in text:
        text = f"{_refused_operation(error)} has no lowering"
    if "no lowering" in text or isinstance(error, NotImplementedError):
        # By the name in torchax's text, which ends with the operation.
        advice = next((advice for name, advice in INSTEAD.items() if f"::{name} " in text), "")
        return (
            f"An operation in {where} cannot run on the device: {text}. "
            f"{advice or 'Replace it by others, or move it out of the model.'} "
            f"docs/guides/pytorch.md lists what works."
        )
    if isinstance(error, OverflowError):
        # "Python integer -1 out of bounds for uint8": a narrow dtype, not the missing 64 bits.
        if "32" not in text and "int" in text.rpartition(" ")[2]:
            return (
                f"A whole number in {where} does not fit the dtype of the tensor that it is combined "
                f"with. Use one that does, or a tensor of a wider dtype. ({text})"
            )
        return (
            f"Whole numbers have 32 bits on the device, and one in {where} has more: it cannot run on "
            f"the device. Use a number between {-(2**31)} and {2**31 - 1}. ({text})"
        )
    if "privateuseone" in text:
        return (
            f"{where.capitalize()} uses a part of PyTorch that needs its own devices, such as "
            f"torch.utils.checkpoint. Call the function plainly; recompute=True of a pipeline saves "
            f"memory instead. ({_shown(error)})"
        )
    return None


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"


def _function_called(error: Exception) -> str:
    """The name of PyTorch's function that the user's code called last."""
    # The mode has seen it, and its frame is still in the traceback.
    code = WatchingMode.__torch_function__.__code__
    found = [frame.f_locals["func"] for frame in _frames(error) if frame.f_code is code]
    return getattr(found[-1], "__name__", "") if found else ""


def _refused_operation(error: Exception) -> str:
    """The operation that reached torchax's tensors without a mode that lowers it."""
    found = [frame.f_locals.get("func") for frame in _frames(error)]
    return next((str(func) for func in reversed(found) if func is not None), "an operation")


def _looks_at_values(error: Exception) -> str | None:
    """The function of PyTorch's own that branched on a value; None where the user's code did."""
    innermost = None
    for frame in _frames(error):
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("tailrace."):
            continue  # in between, where an operation is lowered
        if not internals.is_library(frame.f_code.co_filename):
            innermost = None
        elif name.startswith("torch.") and not name.startswith(_MACHINERY):
            innermost = f"{name}.{frame.f_code.co_qualname}"
    return innermost


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


_TRANSFORMS = frozenset(f"torch._functorch.{n}" for n in ("apis", "eager_transforms", "vmap"))

_MACHINERY = ("torch._", "torch.overrides", "torch.utils", "torch.nn.modules.module")
"""Frames that appear in every traceback and identify nothing."""
