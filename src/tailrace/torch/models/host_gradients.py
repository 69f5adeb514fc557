"""`.grad` of parameters that train on the device, where it stays None, and what reading it says.

Clipping is PyTorch's loop over `p.grad`, as is a scaler's `unscale_`: without gradients both do
nothing, and a training that should have been clipped is not. Those are refused; other readers get None
and a note.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tailrace.base.messages import note_once
from tailrace.torch.errors import UsageError
from tailrace.torch.models.shared_parameters import living_models

_plain: Any = torch.Tensor.grad

_RULE = (
    "A call of a training model computes the gradients and updates the weights on the device, and "
    ".grad of its parameters on the host stays None."
)
_INSTEAD = {
    "torch.nn.utils.clip_grad": (
        "torch.nn.utils.clip_grad_norm_ and its like would clip nothing. Clip the norm of all "
        "gradients with max_grad_norm= of the model, tt.training_model(..., max_grad_norm=1.0); to "
        "clip values, give the parameter a torch.autograd.Function whose "
        "backward does. Remove the call."
    ),
    "torch.amp.grad_scaler": (
        "A GradScaler would find nothing to unscale. Scale the loss with loss_scaling= of an optimizer "
        "of tt.optim. Remove the scaler."
    ),
}
"""What reads gradients to change them, by module, and what to write instead."""


_noted: set[int] = set()
"""The ids of parameters that models have trained; of others that took the place of those, too."""


def watch_gradients() -> None:
    """Have reading `.grad` of a parameter ask whether it trains on the device, while any model does."""
    # On PyTorch's class: parameters of a class of their own would no longer be copied by
    # `nn.Parameter(p)`, and fused optimizers compare the class.
    if "grad" not in vars(torch.nn.Parameter):
        torch.nn.Parameter.grad = property(  # type: ignore[assignment]
            _read, _plain.__set__, _plain.__delete__, _plain.__doc__
        )


def put_back_gradients() -> None:
    """Give PyTorch its class back once no training model is left."""
    if "grad" in vars(torch.nn.Parameter) and not living_models():
        del torch.nn.Parameter.grad
        _noted.clear()


def note_trained(parameters: Iterable[torch.Tensor]) -> None:
    """Take note that a model has trained these parameters."""
    _noted.update(map(id, parameters))


def _read(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    found = _plain.__get__(parameter)
    # First: whoever reads the gradients of another net pays for this line alone.
    if found is not None or id(parameter) not in _noted:
        return found
    reader = str(sys._getframe(1).f_globals.get("__name__"))
    instead = _INSTEAD.get(reader)
    if instead is not None:
        if any(_is_alone(model) for model in _trained_by(parameter)):
            raise UsageError(f"{_RULE} {instead}")
    # PyTorch's own code asks for many reasons: `zero_grad`, `step`, moving a module.
    elif not reader.startswith(("torch.", "tailrace.")) and any(_trained_by(parameter)):
        note_once(
            f"{_RULE} To see a gradient, anchor it: model.anchor_tensor(name, 'grad/...'), or select "
            f"it with observe=. To clip it, use max_grad_norm= of tt.training_model; to change "
            f"it, write a torch.autograd.Function with a backward of its own."
        )
    return None


def _trained_by(parameter: torch.nn.Parameter) -> Iterator[Any]:
    """The models that have trained a parameter."""
    for model in living_models():
        if model.version and any(parameter is one for one in model.trained_tensors):
            yield model


def _is_alone(model: Any) -> bool:
    """Whether no parameter of a model has a gradient of the host's own backward pass."""
    return all(_plain.__get__(one) is None for one in model.trained_tensors)
