"""Views that share their values with the tensor they are of, as in PyTorch.

torchax's tensors hold values, not memory: what `x.view(...)` returns knows nothing of `x`. So each
view is remembered with its base. Before the next function runs, what was written through a view goes
into its base, and what was written into a base is seen through its views.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.torch.torchax.results import plainly


def _functions(names: tuple[str, ...]) -> set[Any]:
    """Functions of these names, and methods: a mode sees which of the two was called."""
    places = (torch, torch.Tensor)
    return {getattr(place, name) for place in places for name in names if hasattr(place, name)}


_NAMES = (
    *("diagonal", "flatten", "moveaxis", "movedim", "narrow", "permute", "ravel", "reshape"),
    *("reshape_as", "select", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unflatten"),
    *("unfold", "unsqueeze", "view", "view_as"),
)

VIEWS = frozenset(
    {
        *_functions(_NAMES),
        *(getattr(getattr(torch.Tensor, name), "__get__") for name in ("T", "mT")),  # noqa: B009
    }
)
"""Functions that return a view, or a copy where there can be no view."""

_SPLITTING = (
    *("chunk", "dsplit", "hsplit", "split", "split_with_sizes", "tensor_split", "unbind", "vsplit"),
)

SPLITS = frozenset(_functions(_SPLITTING))
"""Functions that return several views of one tensor."""


@dataclasses.dataclass
class _View:
    """A view that the program may still hold.

    Attributes:
        tensor: the view.
        base: what it is a view of.
        again: what makes it from its base.
        shadow: a tensor without values that has PyTorch's strides.
        seen: the values of the view and of its base when they were last known to agree.
        detached: whether PyTorch's graph does not see what is written through it.
    """

    tensor: Any
    base: Any
    again: Callable[[Any], Any]
    shadow: torch.Tensor
    seen: tuple[Any, Any]
    detached: bool = False


class Aliases:
    """The views of one forward pass."""

    def __init__(self) -> None:
        self._views: list[_View] = []

    def note(self, func: Callable[..., Any], out: TensorLike, args: Tree, kwargs: Tree) -> None:
        """Remember the views that a function returned, if they are views and not copies."""
        if func in SPLITS and args:
            for number, part in enumerate(out):
                self._note(functools.partial(_part_of, func, number), part, args, kwargs)
        elif func in VIEWS and args:
            self._note(func, out, args, kwargs)

    def _note(self, func: Callable[..., Any], out: TensorLike, args: Tree, kwargs: Tree) -> None:
        if not hasattr(out, "_elem") or out is args[0]:
            return
        base, rest = args[0], args[1:]
        shadow = self._shadow(base)
        # PyTorch decides on tensors without values, so whatever its function raises means: no view
        # known.
        with plainly(), contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
            sizes = [_without_values(t) if hasattr(t, "jax") else t for t in rest]
            shadow = func(shadow, *sizes, **kwargs)
        # `reshape` and its like return a view or a copy, by the strides of the tensor: PyTorch
        # decides on a tensor without values.
        # A copy shares nothing, and is not remembered.
        if shadow.shape != out.shape or not shadow._is_view():
            return
        seen = (out._elem, _memory(base)._elem)
        again = functools.partial(_made, func, rest, kwargs)
        self._views.append(_View(out, base, again, shadow, seen))

    def detached(self, base: TensorLike) -> Any:
        """A tensor without its gradient, which shares its values."""
        self.settle()
        out = _without_gradient(base)
        seen = (out._elem, _memory(base)._elem)
        self._views.append(_View(out, base, _without_gradient, self._shadow(base), seen, True))
        return out

    def contiguous(self, tensor: TensorLike) -> bool:
        """Whether PyTorch would hold the entries of a tensor in order."""
        with plainly():
            return self._shadow(tensor).is_contiguous()

    def settle(self) -> None:
        """Synchronize views and bases, and drop those without references."""
        for view in reversed(self._views):  # views of views first
            # Arrays are immutable, so writing means another object: identity is enough, and costs
            # nothing.
            if view.tensor._elem is not view.seen[0]:
                _write(view, view.tensor._elem)
                view.seen = (view.tensor._elem, _memory(view.base)._elem)
        for view in self._views:
            if (now := _memory(view.base)._elem) is not view.seen[1]:
                # The function that made the view is run again on the new base; XLA drops what nobody
                # uses.
                values = view.again(view.base).jax()
                if values.shape == view.tensor._elem.shape:
                    view.tensor._elem = values
                view.seen = (view.tensor._elem, now)
        # Two: this list's, and that of the question.
        self._views = [view for view in self._views if sys.getrefcount(view.tensor) > 2]

    def _shadow(self, tensor: TensorLike) -> torch.Tensor:
        """A tensor without values, with the strides that PyTorch would give this one."""
        for view in self._views:
            if view.tensor is tensor:
                return view.shadow
        with plainly():
            return _without_values(tensor)


def _made(
    func: Callable[..., Any], rest: Sequence[Any], kwargs: Mapping[str, Any], base: TensorLike
) -> Any:
    return func(base, *rest, **kwargs)


def _without_gradient(base: TensorLike) -> Any:
    return base._env.j2t_iso(jax.lax.stop_gradient(base.jax()))


def _part_of(func: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)[number]


def _without_values(tensor: TensorLike) -> torch.Tensor:
    return torch.empty(tuple(tensor.shape), device="meta")


def _write(view: _View, values: Tree) -> None:
    """Put the values of a view to where they belong in its base."""
    old = view.base.jax()
    with jax.ensure_compile_time_eval():
        numbers = jnp.arange(old.size).reshape(old.shape)
        # The view of the numbers 0, 1, 2, ... says which entry of the base each of its entries is,
        # whatever function made it. Computed while tracing: shapes decide it.
        places = np.asarray(view.again(view.base._env.j2t_iso(numbers)).jax()).ravel()
    flat = values.astype(old.dtype).ravel()
    if flat.size != places.size:  # resized in place: no view any more
        return
    if flat.size == old.size:
        in_order = np.array_equal(places, np.arange(old.size))
        new = flat if in_order else flat[np.argsort(places)]
    else:
        new = old.ravel().at[places].set(flat)
    new = new.reshape(old.shape)
    # Written through `x.data` or `x.detach()`: PyTorch's graph goes on with the old value's history.
    if view.detached and jnp.issubdtype(old.dtype, jnp.inexact):
        new = _moved(old, new)
    if hasattr(view.base, "_elem"):
        view.base._elem = new
    else:
        view.base.update(new)


@jax.custom_jvp
def _moved(old: TensorLike, new: TensorLike) -> Any:
    """New values with the gradient of the old ones, which is all that PyTorch's graph knows of."""
    return new


@_moved.defjvp
def _moved_tangent(primals: Tree, tangents: Tree) -> Any:
    return primals[1], tangents[0]


def _memory(tensor: TensorLike) -> Any:
    """The tensor whose values a slice of torchax's is cut from."""
    while not hasattr(tensor, "_elem"):
        tensor = tensor.parent
    return tensor
