"""A module of another library as plain trees of arrays, and its functions as functions of those.

The engine knows parameters, a model state and a loss function of both. A binding makes them of a module
and the functions that take it: inside a traced function the module is put together from the arrays at
hand, the user's function is called with it, and what it changed is taken out again.

    loss_fn(module, *batch)     becomes     loss_fn(params, model_state, element)

There is one class for each library. `Plain` is that of parameters which are a tree of arrays already.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.errors import ProgramError
from tailrace.feeds.elements import call_with_element


class Binding(abc.ABC):
    """A model in the form that the engine trains.

    Attributes:
        params: a tree of float arrays, by the names that the model has for them.
        model_state: a tree of what the model changes itself; None if there is nothing.
        returns_state: whether functions of the user return the new state, or it is in the module.
        scopes: whether modules open scopes with their paths when they are called.
    """

    params: Any
    model_state: Any = None
    returns_state: bool = False
    scopes: bool = True

    @abc.abstractmethod
    def opened(self, params: Any, state: Any) -> tuple[Any, ...]:
        """What a function of the user gets first, inside a traced function."""

    @abc.abstractmethod
    def stored(self, opened: tuple[Any, ...], returned: Any, before: Any) -> Any:
        """The state after a call: out of the module, or of what the function returned."""

    @abc.abstractmethod
    def model(self, params: Any, state: Any) -> Any:
        """The module with these values, for the user."""

    def shown_state(self, state: Any) -> Any:
        """The model state as the user knows it."""
        return state

    def loss(self, fn: Any) -> Any:
        """A loss function of the user as one of the engine."""
        return Loss(self, fn)

    def function(self, fn: Any) -> Any:
        """A function for `evaluate` or `predict` as one of the engine."""
        return Function(self, fn)


class Plain(Binding):
    """Parameters that are a tree of arrays: nothing is changed."""

    def __init__(self, params: Any, model_state: Any) -> None:
        self.params, self.model_state = params, model_state

    def opened(self, params: Any, state: Any) -> tuple[Any, ...]:
        """Parameters, and the state if there is one."""
        return (params,) if self.model_state is None else (params, state)

    def stored(self, opened: tuple[Any, ...], returned: Any, before: Any) -> Any:
        """What the function returned."""
        return returned

    def model(self, params: Any, state: Any) -> Any:
        """There is none."""
        raise ProgramError(
            "trainer.model is the module that was given in the place of params: an nnx.Module, an "
            "Equinox module, or Linen variables. Received: a tree of arrays. Use trainer.params."
        )

    def loss(self, fn: Any) -> Any:
        """The function itself."""
        return fn

    def function(self, fn: Any) -> Any:
        """The function itself."""
        return fn


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the user, called with the module. Equal for the same module and function."""

    binding: Binding
    fn: Callable[..., Any]
    takes_whole_element = True

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", "the function")

    def __call__(self, params: Any, *rest: Any) -> Any:
        """What the user's function returns."""
        return self._called(params, rest)[0]

    def _called(self, params: Any, rest: Sequence[Any]) -> tuple[Any, Any, Any]:
        """What it returns, the module afterwards, and the state before."""
        state, rest = (None, rest) if self.binding.model_state is None else (rest[0], rest[1:])
        *inputs, element = rest
        opened = self.binding.opened(params, state)
        try:
            out = call_with_element(self.fn, (*opened, *inputs), element)
        except ValueError as error:
            if not self.binding.scopes or "type mismatch" not in str(error):
                raise
            # The function maps over the module and another tree of the same classes. That needs the
            # classes themselves; activations then have the names that the library gives them.
            self.binding.scopes = False
            return self._called(params, (*(() if state is None else (state,)), *rest))
        return out, opened, state


class Loss(Function):
    """A loss function of the user; with a model state it returns `(loss, (new_state, aux))`."""

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", "the loss function")

    def __call__(self, params: Any, *rest: Any) -> Any:
        """What the engine wants of a loss function."""
        out, opened, before = self._called(params, rest)
        binding = self.binding
        if binding.model_state is None:
            return out
        if not binding.returns_state:
            loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
            return loss, (binding.stored(opened, None, before), aux)
        if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], tuple)):
            return out  # the engine says what is wrong with it
        loss, (returned, aux) = out
        return loss, (binding.stored(opened, returned, before), aux)
