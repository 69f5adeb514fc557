"""Everything that is relied on of Equinox beyond its documented interface, with a probe each."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from tailrace.base.seams import Package, Seam
from tailrace.base.trees import Tree
from tailrace.jaxprs.marks import path_name
from tailrace.trainer.modules.scopes import module_scope

PACKAGE = Package("Equinox", "equinox", eqx.__version__, newest="0.13.8")

PATH = "tailrace_path"
"""The field of a module that holds its path, while a function is traced."""


@functools.cache
def check() -> None:
    """Raise a `VersionError` with one sentence if Equinox is not as we know it."""
    PACKAGE.check(SEAMS)


# -- names of activations -----------------------------------------------------------------------


def scoped(model: Tree, path: Sequence[Any] = ()) -> Any:
    """The same tree, whose modules open a scope with their path when they are called.

    Modules are values: those of the result have derived classes, and nothing of Equinox, and no
    class of the user, is changed.
    """
    parts, structure = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda part: part is not model and isinstance(part, eqx.Module)
    )
    inside = [
        scoped(part, (*path, *keys)) if isinstance(part, eqx.Module) else part
        for keys, part in parts
    ]
    made = jax.tree.unflatten(structure, inside)
    kind = type(made)
    if not isinstance(made, eqx.Module) or (call := _own_call(kind)) is None:
        return made
    # Without `__init__`: a user's may compute, or take arguments that are gone.
    copy = object.__new__(scoped_class(kind, call))
    for name, value in vars(made).items():
        object.__setattr__(copy, name, value)
    object.__setattr__(copy, PATH, path_name(path))
    return copy


def _own_call(kind: type) -> Callable[..., Any] | None:
    """How modules of a class are called, without the scope that Equinox opens for its own layers.

    None for what is not called, and for Equinox' wrappers of functions, which are modules as well.
    """
    owner = next((one for one in kind.__mro__ if "__call__" in vars(one)), None)
    if owner is None or PATH in vars(kind).get("__annotations__", ()):
        return None
    call = vars(owner)["__call__"]
    if owner.__module__.startswith("equinox.nn."):
        return getattr(call, "__wrapped__", call)
    return None if owner.__module__.startswith("equinox.") else call


@functools.lru_cache(maxsize=4096)
def scoped_class(kind: type[eqx.Module], plain: Callable[..., Any]) -> type:
    """A subclass that differs in opening a scope, and in the field that names it."""

    @functools.wraps(plain)
    def call(self: eqx.Module, *args: Any, **kwargs: Any) -> Any:
        with module_scope(getattr(self, PATH)):
            return plain(self, *args, **kwargs)

    body = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__annotations__": {PATH: str},
        PATH: eqx.field(static=True, default="", kw_only=True),
    }
    # Equinox would warn about the user's class, and did so when that was made.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metaclass: Any = type(kind)
        return metaclass(kind.__name__, (kind,), body)


# -- state --------------------------------------------------------------------------------------


def state_as_dict(state: eqx.nn.State, model: Tree) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The values of a state by the paths of their indices in the model, and their markers."""
    values, markers = state.tree_flatten()
    found = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_index)[0]
    names = {part.marker: path_name(path) for path, part in found if is_index(part)}
    named = {names.get(m, str(m)): value for m, value in zip(markers, values, strict=True)}
    return named, tuple(markers)


def state_from_dict(values: dict[str, Any], names: Sequence[str], markers: tuple[Any, ...]) -> Any:
    """The state that has these values, in the order of `names`."""
    return eqx.nn.State.tree_unflatten(markers, [values[name] for name in names])


def is_index(part: object) -> bool:
    """Whether a part of a model says where in the state its values are."""
    return isinstance(part, eqx.nn.StateIndex)


# -- probes: without random numbers, which take half a second to compile -------------------------


class _Part(eqx.Module):
    weight: Any
    index: eqx.nn.StateIndex

    def __init__(self) -> None:
        self.weight = np.zeros(2, np.float32)
        self.index = eqx.nn.StateIndex(np.zeros((), np.float32))

    def __call__(self) -> Any:
        return self.weight


class _Whole(eqx.Module):
    parts: list[_Part]

    def __init__(self) -> None:
        self.parts = [_Part(), _Part()]


def _classes() -> bool:
    model = _Whole()
    part = jax.tree.map(lambda leaf: leaf, scoped(model)).parts[1]
    kept = part.weight is model.parts[1].weight
    return kept and isinstance(part, _Part) and getattr(part, PATH) == "parts/1"


def _own_scopes() -> bool:
    layers = (eqx.nn.Linear, eqx.nn.LayerNorm, eqx.nn.MultiheadAttention, eqx.nn.Sequential)
    return all(hasattr(vars(layer)["__call__"], "__wrapped__") for layer in layers)


def _states() -> bool:
    model, state = eqx.nn.make_with_state(_Whole)()
    values, markers = state_as_dict(state, model)
    again = state_from_dict(
        {name: number for number, name in enumerate(values)}, list(values), markers
    )
    return (
        list(values) == ["parts/0/index", "parts/1/index"] and again.get(model.parts[1].index) == 1
    )


SEAMS = (
    Seam("the classes of modules", "names of activations", _classes),
    Seam("the scopes of its layers", "names of activations", _own_scopes),
    Seam("the tree of a State", "BatchNorm", _states),
)
