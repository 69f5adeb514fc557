"""Losses that a call returns, on which `backward()` by habit is answered with a sentence.

Outputs are PyTorch's own tensors, except for scalars: those are of a class that differs in `backward`
alone. Scalars computed from them are of it as well (`loss.mean()`, `loss / 4`), everything else is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, cast

import torch

from tailrace.torch.errors import UsageError


class ReturnedScalar(torch.Tensor):
    """A scalar of each microbatch, as a call returns it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            # With a gradient it is part of a graph of the user's own, where PyTorch's backward is
            # right.
            known = type(found) is not torch.Tensor or found.requires_grad
            return found if known or found.ndim else as_returned(found)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's own where PyTorch has recorded something; refused otherwise."""
        if self.requires_grad:
            return super().backward(*args, **kwargs)
        raise UsageError(
            "backward() cannot be called explicitly on outputs of a model: a call of a training model "
            "computes the gradients and updates the weights on the device, and PyTorch records "
            "nothing of it. Remove backward(), optimizer.step() and optimizer.zero_grad(). A loss "
            "that is computed after the call belongs in forward; gradients are clipped by "
            "tt.training_model(..., max_grad_norm=1.0). An inference model does not train: use "
            "tt.training_model."
        )

    # What asks for the class itself gets PyTorch's.

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return _plain(self).__repr__(**kwargs)

    def __format__(self, spec: str) -> str:
        return _plain(self).__format__(spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def as_returned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of floating-point numbers, as one that says why it has no backward pass."""
    return tensor.as_subclass(ReturnedScalar) if tensor.is_floating_point() else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return cast(torch.Tensor, tensor.as_subclass(torch.Tensor))
