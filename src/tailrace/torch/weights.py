"""A module whose weights live on the device while it trains: they are copied back when they are read.

Reading a parameter or buffer of the module, by attribute, `parameters()` or `state_dict()`, first
brings the host's tensors up to date. To notice it, the module and those inside get classes of their
own for as long as they are wrapped, which behave like the originals in everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tailrace.torch.errors import WrappedError


def trainer_of(module: torch.nn.Module) -> Any:
    """The training model that a module is wrapped in; None if it is in none.

    The module keeps that model alive: its weights are there and nowhere else.
    """
    return vars(type(module)).get("_tailrace_owner")


def link(module: torch.nn.Module, owner: Any, refresh: Callable[[Any], None]) -> None:
    """Let reading the weights of `module` call `refresh(owner)` first."""
    if trainer_of(module) is not None:
        raise WrappedError(
            "Model has already been wrapped in 'training_model'. Call destroy() on the wrapped model "
            "to unwrap it before wrapping it again."
        )
    for inner in module.modules():
        inner.__class__ = _reading_class(type(inner), owner, refresh)


def unlink(module: torch.nn.Module) -> None:
    """Give a module and those inside their own classes back."""
    for inner in module.modules():
        original = vars(type(inner)).get("_tailrace_original")
        if original is not None:
            inner.__class__ = original


def _reading_class(original: type, owner: Any, refresh: Callable[[Any], None]) -> type:
    def before_reading() -> None:
        refresh(owner)

    if "_tailrace_original" in vars(original):
        original = vars(original)["_tailrace_original"]  # shared with another wrapped module

    def refreshed(name: str) -> property:
        def read(self: Any) -> Any:
            before_reading()
            return self.__dict__[name]

        def write(self: Any, value: Any) -> None:
            self.__dict__[name] = value

        return property(read, write)

    def getattribute(self: Any, name: str) -> Any:
        own = self.__dict__
        if name in own.get("_parameters", ()) or name in own.get("_buffers", ()):
            before_reading()
        return original.__getattr__(self, name)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        before_reading()
        made: Any = super(type(self), self).__reduce_ex__(protocol)
        if made[1] != (type(self),):
            return made  # the class has its own way
        return (object.__new__, (original,), *made[2:])  # copies are of the original class

    return type(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "_tailrace_original": original,
            "_tailrace_owner": owner,
            "_parameters": refreshed("_parameters"),
            "_buffers": refreshed("_buffers"),
            "__getattr__": getattribute,
            "__reduce_ex__": reduce,
        },
    )
