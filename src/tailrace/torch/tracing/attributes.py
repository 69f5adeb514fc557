"""Attributes of modules that forward sets to tensors of the program, and numbers that it changes.

Such a tensor has a value only while the program runs: after the trace it is a name for nothing. What a
module had before is put back, so that the next trace begins like the first and the host finds no such
tensor. An attribute that forward first uses and then sets is state that would be lost. A number, such
as a count of calls, changes while forward is traced and not while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tailrace.base.messages import note_once
from tailrace.errors import ProgramError
from tailrace.torch.calls.containers import flatten

_NUMBERS = (bool, int, float)

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
"""Parameters, buffers, modules and hooks, which have rules of their own."""


@contextlib.contextmanager
def attributes_put_back(
    root: torch.nn.Module, made: Callable[[object], bool], used: Callable[[object], bool]
) -> Iterator[None]:
    """A context around a trace, after which attributes that it set to tensors are as before.

    Args:
        root: the module.
        made: whether a value is a tensor of the trace.
        used: whether it is one from outside that the trace has used.

    Raises:
        ProgramError: forward has used the value of one that it then set.
    """
    before = [(path, inner, _held(inner)) for path, inner in root.named_modules()]
    changed: list[tuple[str, Any]] = []
    counted: list[tuple[str, Any, Any]] = []
    try:
        yield
    finally:
        for path, inner, held in before:
            # Lists and dicts are looked into: `self.features.append(x)` keeps a tensor as well.
            for name in _set_in(vars(inner), made, _OF_EVERY_MODULE):
                # PyTorch's own modules keep what they compute with (`nn.LSTM._flat_weights`).
                if not type(inner).__module__.startswith("torch."):
                    changed.append((f"{path}.{name}".strip("."), held.get(name, (None,))[0]))
                _put_back(vars(inner), name, held)
            for name, (number, _) in held.items():
                now = vars(inner).get(name)
                if type(number) in _NUMBERS and type(now) in _NUMBERS and now != number:
                    counted.append((f"{path}.{name}".strip("."), number, now))
                    vars(inner)[name] = number
            for name in _set_in(vars(inner)["_buffers"], made):  # None before, or not there
                changed.append((f"{path}.{name}".strip("."), None))
                inner._buffers[name] = None
    for name, number, now in counted:
        note_once(
            f"forward of {type(root).__name__} changes the attribute {name!r} from {number!r} to "
            f"{now!r}. It is traced once, and every call runs with {number!r}; the attribute stays so. "
            f"What changes from call to call is an argument of the call, or a buffer that is updated "
            f"in place: register_buffer, then add_ or copy_.",
            key=f"number changed in forward {type(root).__name__} {name}",
        )
    # After everything is put back: an error must not leave tensors of the program in the module.
    for name, value in changed:
        if any(used(leaf) for _, leaf in flatten(value)):
            raise ProgramError(
                f"Attribute {name} is used and then reassigned within the model. The new tensor would "
                f"be lost after the call. Make it a buffer, and update it in place: "
                f"self.register_buffer(...), then {name}.copy_(...)."
            )
        note_once(
            f"forward of {type(root).__name__} sets the attribute {name!r} to a tensor that has a "
            f"value only inside of the program: after a call it is as before. To see the tensor, "
            f"return it or anchor it. What is to last from call to call belongs in a buffer that is "
            f"updated in place: register_buffer, then copy_.",
            key=f"attribute set in forward {type(root).__name__} {name}",
        )


def _held(module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """The attributes of a module, each with what is inside if it is a list or a dict."""
    own = {name: v for name, v in vars(module).items() if name not in _OF_EVERY_MODULE}
    return {name: (v, v.copy() if type(v) in (list, dict) else None) for name, v in own.items()}


def _set_in(
    attributes: dict[str, Any],
    made: Callable[[object], bool],
    besides: frozenset[str] = frozenset(),
) -> list[str]:
    own = [(name, v) for name, v in attributes.items() if name not in besides]
    return [name for name, v in own if any(made(leaf) for _, leaf in flatten(v))]


def _put_back(attributes: dict[str, Any], name: str, held: dict[str, tuple[Any, Any]]) -> None:
    if name not in held:
        del attributes[name]
        return
    value, inside = held[name]
    if inside is not None:  # others may hold the same list
        value.clear()
        value.extend(inside) if isinstance(value, list) else value.update(inside)
    attributes[name] = value
