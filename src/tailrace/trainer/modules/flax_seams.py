"""Everything that is relied on of Flax beyond its documented interface, with a probe each."""

from __future__ import annotations

import functools
from typing import Any

import flax
import jax
import numpy as np
from flax import nnx

from tailrace.base.seams import Package, Seam
from tailrace.base.trees import Tree
from tailrace.trainer.modules.scopes import module_scope

PACKAGE = Package("Flax", "flax", flax.__version__, newest="0.12.12")

PATH = "tailrace_path"
"""The attribute of a module that holds its path, while a function is traced."""


@functools.cache
def check() -> None:
    """Raise a `VersionError` with one sentence if Flax is not as we know it."""
    PACKAGE.check(SEAMS)


def scoped(model: Tree) -> Any:
    """The same module, whose submodules open a scope with their path when they are called.

    The module must be our own, made for one trace: its submodules get another class. Nothing of Flax,
    and no class of the user, is changed.
    """
    for path, module in list(nnx.iter_modules(model)):
        called = any("__call__" in vars(kind) for kind in type(module).__mro__)
        if path and called:
            setattr(module, PATH, "/".join(map(str, path)))
            # Past Flax' `__setattr__`, which tracks attributes of modules.
            object.__setattr__(module, "__class__", _scoped_class(type(module)))
    return model


@functools.lru_cache(maxsize=4096)
def _scoped_class(kind: type[nnx.Module]) -> type:
    """A subclass that differs in opening a scope."""
    if getattr(kind, "_tailrace_scoped", False):
        return kind

    @functools.wraps(kind.__call__)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with module_scope(getattr(self, PATH)):
            return kind.__call__(self, *args, **kwargs)

    body = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_tailrace_scoped": True,
    }
    # A class says for itself, not for its subclasses, whether its modules are trees to JAX.
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), body, pytree=kind._pytree__is_pytree)


# -- probes: without random numbers, which take half a second to compile -------------------------


class _Part(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(np.zeros(2, np.float32))

    def __call__(self) -> Any:
        return self.weight[...]


class _Whole(nnx.Module):
    def __init__(self) -> None:
        self.part = _Part()


def _class_of_instances() -> bool:
    model = nnx.merge(*nnx.split(scoped(_Whole())))  # as Flax's own transformations do
    return (
        isinstance(model.part, _Part)
        and type(model.part) is not _Part
        and getattr(model.part, PATH) == "part"
    )


def _plain_values() -> bool:
    graph, params, rest = nnx.split(_Whole(), nnx.Param, ...)
    plain = jax.tree.map(lambda value: value + 1, nnx.to_pure_dict(params))
    merged = nnx.merge(graph, nnx.State(plain), rest)
    return np.array_equal(merged.part(), np.ones(2))


SEAMS = (
    Seam("the classes of modules", "names of activations", _class_of_instances),
    Seam("merge of plain values", "every step of an nnx.Module", _plain_values),
)
