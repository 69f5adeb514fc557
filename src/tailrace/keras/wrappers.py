"""Optimizers around optimizers: accumulation, replicas, mapped gradients.

A wrapper is a Keras optimizer itself. Hyperparameters, read or set, are those of the optimizer
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tailrace.errors import OptionError
from tailrace.program.accumulation import Accumulation, Reduction
from tailrace.program.inside import cross_replica_mean


def overrides(thing: Any, name: str, base: type) -> bool:
    """Whether the class of `thing` has a version of its own of a method of `base`."""
    return getattr(type(thing), name, None) is not getattr(base, name)


class Wrapper(keras.optimizers.Optimizer):
    """An optimizer that does something with gradients and leaves the rest to another.

    Args:
        inner_optimizer: any Keras optimizer.
        name: the name of the wrapper.
    """

    sees_each = False
    """Whether `each` is called for each microbatch."""

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        inner_optimizer = keras.optimizers.get(inner_optimizer)
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise OptionError(
                f"{type(self).__name__} wraps a Keras optimizer. "
                f"Received: {type(inner_optimizer).__name__}."
            )
        super().__init__(learning_rate=0.0, name=name or type(self).__name__)
        self.inner_optimizer = inner_optimizer
        self.loss_scale_factor = inner_optimizer.loss_scale_factor

    # -- what wrappers do -----------------------------------------------------------------------

    def each(self, grads: list[Any], values: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of one microbatch, before they are accumulated."""
        return grads

    def before_apply(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of a step, before they are applied."""
        return grads

    # -- an optimizer, all the same -------------------------------------------------------------

    @property
    def variables(self) -> list[Any]:
        """Those of the optimizer inside."""
        return self.inner_optimizer.variables

    def build(self, variables: Any) -> None:
        """Build the optimizer inside."""
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        object.__setattr__(self, "_wrapped_variables", list(variables))  # not its own: not tracked
        self.built = True

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """One update, by the optimizer inside."""
        from tailrace.keras.optimizing import applied

        grads = self.before_apply(list(grads), self._wrapped_variables)
        return applied(
            self.inner_optimizer,
            optimizer_variables,
            grads,
            trainable_variables,
            self._wrapped_variables,
        )

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """One update of the variables themselves, outside of a program."""
        if not self.built:
            self.build(trainable_variables)
        grads = self.before_apply(list(grads), list(trainable_variables or self._wrapped_variables))
        self.inner_optimizer.apply(grads, trainable_variables)

    @property
    def learning_rate(self) -> Any:
        """That of the optimizer inside."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if "inner_optimizer" in self.__dict__:
            self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """How many updates there were."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss: Any) -> Any:
        """As the optimizer inside scales it."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        """What the optimizer inside does at the end of training."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """The wrapper and, inside, the optimizer."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make it again."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)


@keras.saving.register_keras_serializable("tailrace")
class CrossReplicaOptimizer(Wrapper):
    """Gives the optimizer the mean of the gradients over replicas.

    `fit` does so by itself; this is for `strategy.run`.

    Args:
        opt: any Keras optimizer.
        name: the name of the wrapper.
    """

    def __init__(self, opt: Any, name: str | None = None) -> None:
        super().__init__(opt, name)

    def before_apply(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Their mean over replicas."""
        return [g if g is None else cross_replica_mean(g) for g in grads]


@keras.saving.register_keras_serializable("tailrace")
class GradientAccumulationOptimizer(Wrapper):
    """Accumulates the gradients of several batches and applies them once.

    Args:
        opt: any Keras optimizer.
        num_mini_batches: how many batches of a replica make a step; with 1 you get `opt` itself.
        dtype: of the accumulators: None, a dtype, or a function of the variable.
        reduction_method: "sum", "mean" or "running_mean".
        name: the name of the wrapper.
    """

    def __new__(
        cls, opt: Any = None, num_mini_batches: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Nothing is accumulated over one batch: the optimizer itself."""
        if isinstance(num_mini_batches, int) and num_mini_batches == 1:
            return opt
        return super().__new__(cls)

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        dtype: Any = None,
        reduction_method: Any = "sum",
        name: str | None = None,
    ) -> None:
        if isinstance(num_mini_batches, bool) or num_mini_batches < 1:
            raise OptionError(
                f"num_mini_batches must be a positive number. "
                f"Received: num_mini_batches={num_mini_batches!r}."
            )
        super().__init__(opt, name)
        reduction = Reduction.parse(getattr(reduction_method, "value", reduction_method))
        self.accumulation = Accumulation(num_mini_batches, dtype=dtype, reduction=reduction)

    def get_config(self) -> dict[str, Any]:
        """The wrapper, how it accumulates, and the optimizer."""
        dtype = self.accumulation.dtype
        return {
            **super().get_config(),
            "num_mini_batches": self.accumulation.microbatches,
            "dtype": None if dtype is None or callable(dtype) else str(dtype),
            "reduction_method": str(self.accumulation.reduction),
        }


class MapGradientOptimizer(Wrapper):
    """Applies a function to the gradients of each batch, before they are accumulated.

    Args:
        wrapped_optimizer: any Keras optimizer.
        gradient_mapping_function: `fn(gradient, value_of_the_variable)` returns the new gradient.
        name: the name of the wrapper.
    """

    sees_each = True

    def __init__(
        self,
        wrapped_optimizer: Any,
        gradient_mapping_function: Callable[[Any, Any], Any],
        name: str | None = None,
    ) -> None:
        if not callable(gradient_mapping_function):
            raise OptionError(
                f"gradient_mapping_function is a function of a gradient and a variable's value. "
                f"Received: {gradient_mapping_function!r}."
            )
        super().__init__(wrapped_optimizer, name)
        self._map = gradient_mapping_function

    def each(self, grads: list[Any], values: list[Any], variables: list[Any]) -> list[Any]:
        """The function, applied to each pair."""
        return [self.mapped(g, v) for g, v in zip(grads, values, strict=True)]

    def mapped(self, gradient: Any, value: Any) -> Any:
        """The function, applied to one pair."""
        return self._map(gradient, value)


def accumulation_of(optimizer: Any) -> Accumulation | None:
    """What a `GradientAccumulationOptimizer` asks for, which must be the outermost."""
    if isinstance(optimizer, GradientAccumulationOptimizer):
        return optimizer.accumulation
    inside: Sequence[Any] = ()
    while isinstance(optimizer, Wrapper):
        optimizer = optimizer.inner_optimizer
        inside = (*inside, optimizer)
    if any(isinstance(one, GradientAccumulationOptimizer) for one in inside):
        raise OptionError(
            "A GradientAccumulationOptimizer must be the outermost optimizer: others inside it see "
            "what was accumulated. Wrap it the other way round."
        )
    return None


def wrappers_of(optimizer: Any) -> list[Wrapper]:
    """The wrappers around an optimizer, from the outside in."""
    found = []
    while isinstance(optimizer, Wrapper):
        found.append(optimizer)
        optimizer = optimizer.inner_optimizer
    return found
