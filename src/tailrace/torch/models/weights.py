"""A module whose weights are on the device while it trains: they are copied back when they are read.

Reading a parameter or buffer of the module, by attribute, `parameters()` or `state_dict()`, first
updates the host's tensors. To detect it, the module and its submodules get derived classes while they
are wrapped, which otherwise behave like the originals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, SupportsIndex

import torch
from torch.nn.utils import parametrize

from tailrace.torch.errors import WrappedError


class Owner(Protocol):
    """A training model, from the view of the module that it wraps."""

    module: torch.nn.Module
    lent: frozenset[str]

    def _refresh(self) -> None:
        """Update the tensors of the host."""
        ...

    def _note_restructuring(self) -> None:
        """Take note that a parameter or submodule is replaced."""
        ...


def owners_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """The training models that wrap a module, or a module around it.

    The module keeps those models alive: only they have its weights.
    """
    return vars(type(module)).get("_tailrace_owners", ())


def trainer_of(module: torch.nn.Module) -> Any:
    """The training model that wraps a module; None if there is none."""
    return next((owner for owner in owners_of(module) if owner.module is module), None)


def link(module: torch.nn.Module, owner: Owner) -> None:
    """Make reading the weights of `module` call `owner._refresh()` first.

    Replacing a parameter or submodule calls `owner._note_restructuring()`.
    """
    if trainer_of(module) is not None:
        raise WrappedError(
            "Model has already been wrapped in 'training_model'. Call destroy() on the wrapped model "
            "to unwrap it before wrapping it again."
        )
    for inner in module.modules():
        # A class rather than a proxy: the user's references, `isinstance` and `torch.save` keep
        # working.
        inner.__class__ = _owned_class(inner, (*owners_of(inner), owner))


def unlink(module: torch.nn.Module, owner: Owner) -> None:
    """Remove the owner; without another one, modules get their original classes back."""
    for inner in module.modules():
        left = tuple(one for one in owners_of(inner) if one is not owner)
        inner.__class__ = _owned_class(inner, left)


@contextlib.contextmanager
def of_original_classes(module: torch.nn.Module) -> Iterator[None]:
    """While this lasts, a module and those inside have their original classes.

    For what looks into classes (PyTorch's compiler), or makes more modules of them
    (`self.layers[:2]`).
    """
    derived = {inner: type(inner) for inner in module.modules()}
    try:
        for inner, kind in derived.items():
            inner.__class__ = vars(kind).get("_tailrace_original", kind)
        yield
    finally:
        for inner, kind in derived.items():
            inner.__class__ = kind


def _owned_class(module: torch.nn.Module, owners: tuple[Any, ...]) -> type:
    original = vars(type(module)).get("_tailrace_original", type(module))
    return _reading_class(original, owners) if owners else original


def _class_like(original: type) -> Any:
    """The class of a derived class.

    `parametrize` gives a module a class of its own with a property for the weight. To remove it, it
    deletes the property from the class of the module and goes back to the first base: both are meant
    for `original`.
    """
    kind = type(original)
    if parametrize.__name__ not in _makers_of(original):
        return kind

    class Parametrized(kind):
        @property
        def __bases__(cls) -> tuple[type, ...]:  # type: ignore[override]
            return original.__bases__

        def __delattr__(cls, name: str) -> None:
            delattr(original, name)

    return Parametrized


def _makers_of(original: type) -> set[str]:
    """The modules whose functions are properties of a class."""
    found = [one.fget for one in vars(original).values() if isinstance(one, property)]
    return {function.__module__ for function in found if function is not None}


def _reading_class(original: type, owners: tuple[Any, ...]) -> type:
    """A subclass of a module's class whose instances ask the owners of their weights first."""
    return _class_like(original)(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "_tailrace_original": original,
            "_tailrace_owners": owners,
            **_reading_members(original, owners),
            **_restructuring_members(original, owners),
        },
    )


def _reading_members(original: type, owners: tuple[Any, ...]) -> dict[str, Any]:
    """The members of a class by which weights are read."""

    # For every read of a weight: an owner whose weights have not changed since returns at once.
    def before_reading() -> None:
        for owner in owners:
            owner._refresh()

    def refreshed(name: str) -> property:
        def read(self: torch.nn.Module) -> Any:
            before_reading()
            return self.__dict__[name]

        def write(self: torch.nn.Module, value: object) -> None:
            self.__dict__[name] = value

        return property(read, write)

    def getattribute(self: torch.nn.Module, name: str) -> Any:
        # `__getattr__` is asked only for what normal lookup does not find, which includes all
        # parameters and buffers.
        own = self.__dict__
        if name in own.get("_parameters", ()) or name in own.get("_buffers", ()):
            before_reading()
        # Compatibility layers let users call methods of the model on the module that it wraps.
        for owner in owners:
            if name in owner.lent and self is owner.module:
                return getattr(owner, name)
        return original.__getattr__(self, name)  # type: ignore[attr-defined]

    def reduce(self: torch.nn.Module, protocol: SupportsIndex) -> Any:
        before_reading()
        made: Any = super(type(self), self).__reduce_ex__(protocol)
        if made[1] != (type(self),):
            return made  # the class has its own way
        return (object.__new__, (original,), *made[2:])  # copies are of the original class

    return {
        # Properties: `state_dict`, `named_parameters` and the like read these dicts, and not
        # through `__getattr__`.
        "_parameters": refreshed("_parameters"),
        "_buffers": refreshed("_buffers"),
        "__getattr__": getattribute,
        "__reduce_ex__": reduce,
    }


def _restructuring_members(original: type, owners: tuple[Any, ...]) -> dict[str, Any]:
    """The members of a class by which submodules and parameters are added, replaced or removed."""

    def before_restructuring() -> None:
        for owner in owners:
            owner._refresh()
            owner._note_restructuring()

    def set_attribute(self: torch.nn.Module, name: str, value: object) -> None:
        # Through `__dict__`: `self._modules` by attribute would be a read, and ask the device.
        here = self.__dict__["_modules"].get(name)
        if (here is not None or isinstance(value, torch.nn.Module)) and value is not here:
            before_restructuring()
        original.__setattr__(self, name, value)  # type: ignore[misc]

    def register_parameter(
        self: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        before_restructuring()
        original.register_parameter(self, name, param)  # type: ignore[attr-defined]

    def add_module(self: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        before_restructuring()
        original.add_module(self, name, module)  # type: ignore[attr-defined]

    def delete(self: torch.nn.Module, name: str) -> None:
        if name in self.__dict__["_modules"] or name in self.__dict__["_parameters"]:
            before_restructuring()
        original.__delattr__(self, name)  # type: ignore[misc]

    return {
        "__setattr__": set_attribute,
        "__delattr__": delete,
        "register_parameter": register_parameter,
        "add_module": add_module,
    }
