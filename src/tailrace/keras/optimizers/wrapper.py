"""The base of optimizers that wrap optimizers.

A wrapper is itself a Keras optimizer. Its hyperparameters are those of the wrapped optimizer. It may
wrap a `LossScaleOptimizer` or, as under the policy mixed_float16, be inside one: inside, it sees the
gradients of the loss; outside, those of the scaled loss.

`fit` on Tailrace's trainer calls the wrappers for the gradients of each batch. Other callers (plain
Keras, an overridden `train_step`, a loop in `strategy.run`) have one batch per step: the wrappers then
call each other.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.keras.optimizers.application import applied, overrides
from tailrace.keras.programs.variables import scaling

_asked: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "tailrace_wrappers_asked", default=frozenset()
)


@contextlib.contextmanager
def asked(wrappers: Sequence[Any]) -> Iterator[None]:
    """A context in which these wrappers have already seen the gradients of each batch."""
    token = _asked.set(_asked.get() | {id(wrapper) for wrapper in wrappers})
    try:
        yield
    finally:
        _asked.reset(token)


class Wrapper(keras.optimizers.Optimizer):
    """An optimizer that transforms gradients and delegates the update to another.

    Args:
        inner_optimizer: any Keras optimizer.
        name: the name of the wrapper.
    """

    sees_each = False
    """Whether `each` is called for each microbatch."""

    observes = False
    """Whether it can be given what `each` would see afterwards, by `deliver`: in a pipeline."""

    def __init__(
        self, inner_optimizer: keras.optimizers.Optimizer, name: str | None = None
    ) -> None:
        inner_optimizer = keras.optimizers.get(inner_optimizer)
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise OptionError(
                f"{type(self).__name__} wraps a Keras optimizer. "
                f"Received: {type(inner_optimizer).__name__}."
            )
        # Keras needs a rate here and makes a variable of it; every property below leads to the
        # wrapped optimizer instead.
        super().__init__(learning_rate=0.0, name=name or type(self).__name__)
        self.inner_optimizer = inner_optimizer

    @property
    def title(self) -> str:
        """What messages call it."""
        return type(self).__name__

    # -- hooks for subclasses -------------------------------------------------------------------

    def each(self, grads: list[Any], values: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of one microbatch, before they are accumulated."""
        return grads

    def before_apply(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of a step, before they are applied."""
        return grads

    def check_alone(self) -> None:
        """Refuse features that only `fit` on Tailrace's trainer supports; called by other loops."""

    def _ask(self, grads: list[Any], values: Tree, variables: list[Any]) -> tuple[list[Any], Any]:
        """The gradients of one batch after this wrapper and those directly inside; and the wrappers."""
        # All wrappers up to the next loss scaler at once, the innermost first: each would otherwise
        # be asked by the one around it, which had changed the gradients before.
        group = directly_inside(self)
        if id(self) in _asked.get():
            return grads, group
        for wrapper in reversed(group):  # the innermost sees them first
            wrapper.check_alone()
            if wrapper.sees_each:
                grads = wrapper.each(grads, list(values()), variables)
        return grads, group

    # -- the interface of an optimizer ----------------------------------------------------------

    @property
    def variables(self) -> list[Any]:
        """The variables of the wrapped optimizer."""
        return self.inner_optimizer.variables

    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Build the wrapped optimizer."""
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        object.__setattr__(self, "_wrapped_variables", list(variables))  # not its own: not tracked
        self.built = True

    def stateless_apply(
        self, optimizer_variables: Tree, grads: Tree, trainable_variables: Tree
    ) -> tuple[list[Any], list[Any]]:
        """One update, by the wrapped optimizer."""
        variables = self._wrapped_variables
        grads, group = self._ask(list(grads), lambda: trainable_variables, variables)
        with asked(group):
            grads = self.before_apply(grads, variables)
            return applied(
                self.inner_optimizer, optimizer_variables, grads, trainable_variables, variables
            )

    def apply(self, grads: Tree, trainable_variables: Tree = None) -> None:
        """One update of the variables themselves, outside of a program."""
        variables: Any = None if trainable_variables is None else list(trainable_variables)
        if not self.built:
            self.build(variables)
        if variables is None:
            variables = self._wrapped_variables
        grads, group = self._ask(list(grads), lambda: [v.value for v in variables], variables)
        with asked(group):
            grads = self.before_apply(grads, variables)
            # A user's `apply_gradients` is meant to be called; Keras' own only calls `apply`.
            if overrides(self.inner_optimizer, "apply_gradients", keras.optimizers.Optimizer):
                self.inner_optimizer.apply_gradients(zip(grads, variables, strict=True))
            else:
                self.inner_optimizer.apply(grads, variables)

    @property
    def learning_rate(self) -> Any:
        """That of the optimizer inside."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: object) -> None:
        # Keras' `__init__` sets it before there is a wrapped optimizer.
        if "inner_optimizer" in self.__dict__:
            self.inner_optimizer.learning_rate = value

    @property
    def loss_scale_factor(self) -> Any:
        """That of the optimizer inside."""
        inside = self.__dict__.get("inner_optimizer")
        return None if inside is None else inside.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: object) -> None:
        # A LossScaleOptimizer takes this over from the optimizer that it wraps.
        if "inner_optimizer" in self.__dict__:
            if scaling(self.inner_optimizer) is not None:
                raise OptionError(scaled_twice(self))
            self.inner_optimizer.loss_scale_factor = value

    @property
    def iterations(self) -> Any:
        """The number of updates so far."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss: TensorLike) -> Any:
        """The loss, scaled by the wrapped optimizer."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Finalize the wrapped optimizer's variables at the end of training."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """The configuration of the wrapper and of the wrapped optimizer."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Create a wrapper from its configuration."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)


def directly_inside(wrapper: Wrapper) -> list[Wrapper]:
    """A wrapper and the wrappers directly inside it, outermost first."""
    found: list[Wrapper] = []
    optimizer: Any = wrapper
    while isinstance(optimizer, Wrapper):
        found.append(optimizer)
        optimizer = optimizer.inner_optimizer
    return found


def scaled_twice(optimizer: keras.optimizers.Optimizer) -> str:
    """The message for an optimizer between two loss scalers."""
    return (
        f"The loss is scaled once. Received: a LossScaleOptimizer around {type(optimizer).__name__}, "
        f"which has another inside: under the policy mixed_float16, Keras' compile puts one around any "
        f"optimizer that is not one itself. Wrap the bare optimizer, without a LossScaleOptimizer "
        f"inside, or compile with auto_scale_loss=False."
    )
