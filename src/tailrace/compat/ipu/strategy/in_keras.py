"""Optimizers of programs in `fit`: one that is written around an optimizer of Keras.

In the original such an optimizer computes gradients itself, by `compute_gradients`, and changes
variables by `apply_gradients`. Here `fit` has computed them; `compute_gradients` is asked what it makes
of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import GradientsAndVariables, OptimizerLike
from tailrace.compat.ipu.errors import IPURuntimeError
from tailrace.compat.ipu.graph.discovery import discover
from tailrace.compat.ipu.graph.update import Computed, Optimizer, computed
from tailrace.compat.ipu.strategy.calls import Calls
from tailrace.errors import OptionError, ProgramError
from tailrace.keras.optimizers.wrappers import Wrapper
from tailrace.keras.programs.variables import names_of

_names: contextvars.ContextVar[dict[int, str] | None] = contextvars.ContextVar(
    "ipu_variable_names", default=None
)


def keras_optimizer_in(optimizer: OptimizerLike, seen: frozenset[int] = frozenset()) -> Any:
    """The optimizer of Keras that an optimizer which a program wrote holds, or one in it; or None.

    The originals' wrappers are for programs only: Keras has its equivalent of each.
    """
    if type(optimizer).__module__.startswith("tailrace."):
        return None
    for value in vars(optimizer).values():
        if isinstance(value, keras.optimizers.Optimizer):
            return value
        # `seen`: optimizers may refer to each other.
        if isinstance(value, Optimizer) and id(value) not in seen:
            found = keras_optimizer_in(value, seen | {id(optimizer)})
            if found is not None:
                return found
    return None


class InKeras(Wrapper):
    """An optimizer of programs as one that `fit` asks.

    Args:
        optimizer: what the program wrote.
        inner_optimizer: the optimizer of Keras inside of it.
    """

    def __init__(self, optimizer: OptimizerLike, inner_optimizer: OptimizerLike) -> None:
        _hook_keras()
        super().__init__(inner_optimizer, type(optimizer).__name__)
        # Not plain attributes: Keras would treat a model in it as a part of the optimizer.
        object.__setattr__(self, "_written", optimizer)
        object.__setattr__(self, "_decided", None)
        object.__setattr__(self, "_calls", Calls(one_device=True))
        object.__setattr__(self, "_send", functools.partial(type(self)._sent, self))

    @property
    def title(self) -> str:
        """The class that the program wrote."""
        return type(self._written).__name__

    @property
    def sees_each(self) -> bool:  # type: ignore[override]
        """Whether `compute_gradients` does anything with the gradients of a batch."""
        if type(self._written).compute_gradients is Optimizer.compute_gradients:
            return False
        if self._decided is None and hasattr(self, "_wrapped_variables"):
            object.__setattr__(self, "_decided", not self._passes_on())
        return bool(self._decided)

    def _passes_on(self) -> bool:
        """Try it: whether it returns what it is given, and sends nothing."""
        variables = self._wrapped_variables
        grads = [jnp.zeros(v.shape, v.dtype) for v in variables]
        try:
            # Keras asks `sees_each` before anything is traced, and a wrapper that sees every batch
            # costs a pass over the gradients: so it is found out whether it is needed.
            found = self.each(grads, [], variables)
        except ProgramError:  # it sends something, for which there must be a program
            return False
        return all(one is other for one, other in zip(grads, found, strict=True))

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Whether `compute_gradients` sends gradients and leaves them as they are."""
        if not hasattr(self, "_wrapped_variables") or not self.sees_each:
            return False
        variables = self._wrapped_variables
        grads = [jnp.zeros(v.shape, v.dtype) for v in variables]
        found: list[bool] = []

        def look(*given: Any) -> None:
            after = self.each(list(given), [], variables)
            found.append(all(one is other for one, other in zip(given, after, strict=True)))

        # As a trace: sending needs a program, and nothing may be sent yet.
        discover(look, grads)
        return found[-1]

    def wanted(self) -> dict[str, str]:
        """The gradients that `compute_gradients` is given, in a pipeline."""
        names = self._variable_names()
        return {f"grad/{name}": name for name in names}

    def deliver(self, found: dict[str, Any], replicas: int) -> None:
        """Give `compute_gradients` the observed gradients, batch by batch, in a program."""
        if replicas > 1:
            raise OptionError(
                f"{type(self._written).__name__}.compute_gradients sends gradients of each batch in a "
                f"pipeline with {replicas} replicas. Use one replica, or send those of a step "
                f"(BEFORE_APPLY)."
            )
        arrays = [found[name] for name in self._variable_names()]
        for grads in zip(*arrays, strict=True):
            self._calls(self._send, [list(grads)], {})

    def _sent(self, grads: list[Any]) -> None:
        self.each(grads, [], self._wrapped_variables)

    def _variable_names(self) -> list[str]:
        variables = self._wrapped_variables
        return names_of(variables, variables[0].path.split("/")[0])

    def each(self, grads: list[Any], values: list[Any], variables: list[Any]) -> list[Any]:
        """What `compute_gradients` makes of the gradients of one batch."""
        del values
        with _given(grads, variables):
            pairs = self._written.compute_gradients(jnp.zeros(()), var_list=list(variables))
        found = {id(variable): grad for grad, variable in pairs}
        return [found.get(id(variable)) for variable in variables]

    def apply_gradients(self, grads_and_vars: GradientsAndVariables, **_: Any) -> None:
        """What the program wrote, which leaves the rest to the optimizer inside."""
        pairs = list(grads_and_vars)
        # What the program wrote may call `get_gradients` there too, and ask for TensorFlow's names.
        with _given([grad for grad, _ in pairs], [variable for _, variable in pairs]):
            self._written.apply_gradients(pairs)


@contextlib.contextmanager
def _given(grads: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
    """Inside, these are the gradients, and variables have the names that TensorFlow gives them."""
    outermost = variables[0].path.split("/")[0] if variables else ""
    named = names_of(list(variables), outermost)
    names = {id(v): f"{name}:0" for v, name in zip(variables, named, strict=True)}
    tokens = computed.set(Computed(grads, variables)), _names.set(names)
    try:
        yield
    finally:
        _names.reset(tokens[1])
        computed.reset(tokens[0])


@functools.cache
def _hook_keras() -> None:
    """Give Keras' optimizers `get_gradients`, and variables TensorFlow's names where asked; once."""

    def get_gradients(optimizer: OptimizerLike, loss: TensorLike, params: Tree) -> list[Any]:
        """The gradients of the loss, which `fit` has computed."""
        del loss
        given = computed.get()
        if given is None:
            raise IPURuntimeError(
                f"{type(optimizer).__name__}.get_gradients is available while `fit` applies gradients. "
                f"Elsewhere, use tf.GradientTape."
            )
        return [given.of(variable) for variable in params]

    keras.optimizers.Optimizer.get_gradients = get_gradients  # type: ignore[attr-defined]
    # Hooked where `name` is defined, a base class, so that variables of all subclasses are reached.
    owner: Any = next(kind for kind in keras.Variable.__mro__ if "name" in vars(kind))
    plain = vars(owner)["name"].fget
    owner.name = property(
        lambda variable: (_names.get() or {}).get(id(variable)) or plain(variable)
    )
