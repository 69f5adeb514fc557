"""A module of another library as plain trees of arrays, and its functions as functions of those.

The engine knows parameters, a model state and a loss function of both. A binding derives them from a
module and the functions that take it: inside a traced function the module is rebuilt from arrays, the
user's function is called with it, and its changes are extracted again.

    loss_fn(module, *batch)     becomes     loss_fn(params, model_state, element)

There is one class per library. `Plain` is for parameters that are a tree of arrays already.
"""

from __future__ import annotations

import abc
import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.feeds.elements import call_with_element
from tailrace.jaxprs.marks import current_trace
from tailrace.program.in_program import training
from tailrace.program.step.update_rule import Optimizer

_MISMATCH = re.compile(r"[Mm]ismatch|pytree")
"""JAX's message for trees of different structures."""


class Binding(abc.ABC):
    """A model in the form that the engine trains.

    Attributes:
        params: a tree of float arrays, under the model's names.
        model_state: a tree of the state that the model updates itself; None if there is none.
        returns_state: whether the user's functions return the new state, or it is in the module.
        scopes: whether modules open scopes with their paths when they are called.
        has_modes: whether the module has an evaluation mode, in which dropout draws no keys.
    """

    params: Any
    model_state: Any = None
    returns_state: bool = False
    scopes: bool = True
    has_modes: bool = False

    @abc.abstractmethod
    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """The first arguments of a user's function, inside a traced function."""

    @abc.abstractmethod
    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """The state after a call: from the module, or from the function's result."""

    @abc.abstractmethod
    def model(self, params: Tree, state: Tree) -> Any:
        """The module with these values, for the user."""

    def shown_params(self, params: Tree) -> Any:
        """The parameters in the user's form."""
        return params

    def shown_state(self, state: Tree) -> Any:
        """The model state in the user's form."""
        return state

    def shown_whole(self, state: Any) -> Any:
        """The training state, as `trainer.state` has it."""
        return state

    def held_whole(self, state: Any) -> Any:
        """The training state, from what `trainer.state` is set to."""
        return state

    def check(self, opened: tuple[Any, ...], params: Tree) -> None:
        """Check the module after a call."""
        return None

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """A context for tracing a user's function."""
        return contextlib.nullcontext()

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer as one of the engine."""
        return optimizer

    def loss(self, fn: Callable[..., Any]) -> Any:
        """A loss function of the user as one of the engine."""
        return Loss(self, fn)

    def function(self, fn: Callable[..., Any]) -> Any:
        """A function for `evaluate` or `predict` as one of the engine."""
        return Function(self, fn)


class Plain(Binding):
    """Parameters that are a tree of arrays: nothing is changed."""

    def __init__(self, params: Tree, model_state: Tree) -> None:
        self.params, self.model_state = params, model_state

    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """Parameters, and the state if there is one."""
        return (params,) if self.model_state is None else (params, state)

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """What the function returned."""
        return returned

    def model(self, params: Tree, state: Tree) -> Any:
        """There is none."""
        raise no_module()

    def loss(self, fn: Callable[..., Any]) -> Any:
        """The function itself."""
        return fn

    def function(self, fn: Callable[..., Any]) -> Any:
        """The function itself."""
        return fn


def no_module() -> ProgramError:
    """The error about a module where there is none."""
    return ProgramError(
        "trainer.model is the module that was given in place of params: an nnx.Module, an "
        "Equinox module, or Linen variables. Received: a tree of arrays. Use trainer.params."
    )


class Function:
    """A function of the user, called with the module. Equal for the same module and function."""

    takes_whole_element = True

    def __init__(self, binding: Binding, fn: Callable[..., Any]) -> None:
        self.binding, self.fn = binding, fn
        self.__name__ = getattr(fn, "__name__", repr(fn))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        # A binding is itself its identity; `evaluate` finds the program of an equal function by this.
        return self.binding, self.fn

    def __call__(self, params: Tree, *rest: Any) -> Any:
        """What the user's function returns."""
        return self.called(params, *self.split(rest))[0]

    def split(self, rest: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """The state, and what comes after it."""
        return (None, rest) if self.binding.model_state is None else (rest[0], rest[1:])

    def called(
        self, params: Tree, state: Tree, values: Sequence[Any], whole_element: bool = True
    ) -> tuple[Any, tuple[Any, ...]]:
        """The result of the user's function, and the module afterwards.

        Args:
            params: the parameters.
            state: the model state.
            values: the other arguments of the function.
            whole_element: whether the last of them is an element, to be passed as arguments.
        """
        binding = self.binding
        trace = current_trace("A function of a module")
        drawn = trace.draws_keys
        opened = binding.opened(params, state)
        try:
            with binding.around():
                if whole_element:
                    *inputs, element = values
                    out = call_with_element(self.fn, (*opened, *inputs), element)
                else:
                    out = self.fn(*opened, *values)
            binding.check(opened, params)
            # In evaluation mode a module's streams are opened, but dropout draws nothing from them:
            # `evaluate` need not warn of keys.
            if binding.has_modes and not training():
                trace.draws_keys = drawn
            return out, opened
        except (TypeError, ValueError) as error:
            if not binding.scopes or not _MISMATCH.search(str(error)):
                raise
        # The function maps over this module and another, or over two parts of it, which needs their
        # own classes, without paths. Activations then have the names that the library gives them.
        # For all later calls too: tracing twice each time would double the time.
        binding.scopes = False
        return self.called(params, state, values, whole_element)


class Loss(Function):
    """A loss function of the user; with a model state it returns `(loss, (new_state, aux))`."""

    def __call__(self, params: Tree, *rest: Any) -> Any:
        """The result of the loss function in the engine's form."""
        binding = self.binding
        before, values = self.split(rest)
        out, opened = self.called(params, before, values)
        if binding.model_state is None:
            return out
        if not binding.returns_state:
            loss, aux = out if is_pair(out) else (out, None)
            return loss, (binding.stored(opened, None, before), aux)
        if not (is_pair(out) and is_pair(out[1])):
            return out  # the engine says what is wrong with it
        loss, (returned, aux) = out
        return loss, (binding.stored(opened, returned, before), aux)


def is_pair(value: object) -> bool:
    """Whether a function returned two things."""
    return isinstance(value, tuple) and len(value) == 2
