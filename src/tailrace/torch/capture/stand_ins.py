"""Tensors that Dynamo builds a module's output around, in place of those that the program computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tailrace.errors import ProgramError

_FORMS = frozenset(
    ("__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "as_subclass")
)
"""What may be asked of a tensor without a value."""


class StandIn(torch.Tensor):
    """A tensor with a shape and a dtype, and no value: whoever reads it is refused."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _FORMS:
            raise ProgramError(
                f"A module cannot become one program where Python reads what it computes, as in a "
                f"text: {name} does. Return the tensor, and read it after the call."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return self.__format__("")

    def __format__(self, _: str) -> str:
        raise ProgramError(
            "A module cannot become one program where Python reads what it computes, as in a "
            "text: a format does. Return the tensor, and read it after the call."
        )


def stand_in(value: Any) -> Any:
    """A tensor of that form, which costs no memory; what is no tensor is itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros((), dtype=value.dtype).expand(tuple(value.shape)).as_subclass(StandIn)
