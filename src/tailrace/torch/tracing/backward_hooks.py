"""Hooks of PyTorch's backward pass, which has no part in a compiled model: they are refused by name.

Gradients are computed on the device by a program, so nothing of the host's can run in between. Forward
hooks are another matter: they run while the forward pass is traced, and work.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from tailrace.base.array_like import TensorLike
from tailrace.errors import ProgramError
from tailrace.torch.tracing.watch import Watch

_INSTEAD = (
    "Gradients are computed on the device, and no hook of the backward pass runs there. Remove the "
    "hook; to see a gradient, anchor it (model.anchor_tensor(name, 'grad/...')) or select it with "
    "observe=; to change one, write a torch.autograd.Function with a backward of its own."
)


def refuse_backward_hooks(module: torch.nn.Module) -> None:
    """Refuse a module that is to be trained and has hooks on its backward pass."""
    for where, method in _hooks(module):
        raise ProgramError(f"{where} has a hook of {method}, which would never run. {_INSTEAD}")


def hooks_of(module: torch.nn.Module) -> Callable[[], list[Any]]:
    """A function that says which hooks a module has now, those on its parameters included.

    They count when the forward pass is traced: others than then need another trace.
    """
    held = [
        hooks
        for inner in module.modules()
        for hooks in (
            inner._forward_hooks,
            inner._forward_pre_hooks,
            inner._backward_hooks,
            inner._backward_pre_hooks,
        )
    ]
    parameters = list(module.parameters())

    def now() -> list[Any]:
        # Ids of hooks, which PyTorch never uses twice. For every call: most dicts are empty.
        found: list[Any] = [*itertools.chain.from_iterable(held)]
        return found + [id(p) for p in parameters if p._backward_hooks]

    return now


def refusals(trains: bool) -> dict[Any, Callable[..., Any]]:
    """Functions of PyTorch's backward pass that have no place in forward, and what is done instead."""

    def hook(watch: Watch, tensor: TensorLike, *_: Any, name: str = "register_hook") -> Any:
        if not trains:  # no backward pass, and so nothing for the hook to see
            return RemovableHandle(OrderedDict())
        raise ProgramError(
            f"{_place(watch)} calls {name} on a tensor, and the hook would never run. {_INSTEAD}"
        )

    def later(watch: Watch, tensor: TensorLike, *_: Any) -> Any:
        return hook(watch, tensor, name="register_post_accumulate_grad_hook")

    def retained(watch: Watch, tensor: TensorLike) -> Any:
        raise ProgramError(
            f"{_place(watch)} calls retain_grad on a tensor, and its gradient would never be there. "
            f"To see it, anchor it (model.anchor_tensor(name, 'cotangent/...')) or select it with "
            f"observe=."
        )

    def differentiates(watch: Watch, *_: Any, **__: Any) -> Any:
        raise ProgramError(
            f"{_place(watch)} asks PyTorch for gradients (torch.autograd.grad or backward()) within "
            f"forward. The forward pass is traced, and PyTorch records nothing of it. Compute the "
            f"loss only, which is differentiated for you; a gradient that the loss itself needs has "
            f"to be written as a formula."
        )

    return {
        torch.Tensor.register_hook: hook,
        torch.Tensor.register_post_accumulate_grad_hook: later,
        torch.Tensor.retain_grad: retained,
        torch.Tensor.backward: differentiates,
        torch.autograd.backward: differentiates,
        torch.autograd.grad: differentiates,
    }


def _hooks(root: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """(where, how it was registered) of the hooks that there are."""
    for path, module in root.named_modules():
        where = f"Module {path!r} ({type(module).__name__})" if path else type(module).__name__
        # Private, and the only way to see hooks; `torch_internals` has the probe.
        if module._backward_pre_hooks:
            yield where, "register_full_backward_pre_hook"
        if module._backward_hooks:
            # Named as it was registered: PyTorch keeps both kinds in one dict.
            full = getattr(module, "_is_full_backward_hook", None)
            yield where, "register_full_backward_hook" if full else "register_backward_hook"
    for name, parameter in root.named_parameters():
        if parameter._backward_hooks:
            yield f"Parameter {name!r}", "register_hook"
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"Parameter {name!r}", "register_post_accumulate_grad_hook"
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        yield "Every module", "register_module_full_backward_hook"


def _place(watch: Watch) -> str:
    return f"Module {watch.module!r}" if watch.module else "forward"
