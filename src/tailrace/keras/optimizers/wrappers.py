"""Optimizers that wrap optimizers: accumulation, replicas, mapped gradients; and chains of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import keras

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.base.messages import note_once
from tailrace.errors import OptionError
from tailrace.keras.optimizers.wrapper import Wrapper as Wrapper
from tailrace.keras.programs.variables import scaling
from tailrace.program.in_program import cross_replica_mean
from tailrace.program.step.accumulation import Accumulation, Reduction


@keras.saving.register_keras_serializable("tailrace")
class CrossReplicaOptimizer(Wrapper):
    """Gives the optimizer the mean of the gradients over replicas.

    `fit` does so by itself; this is for `strategy.run`.

    Args:
        opt: any Keras optimizer.
        name: the name of the wrapper.

    >>> import tailrace.keras as tk, keras
    >>> tk.CrossReplicaOptimizer(keras.optimizers.SGD(0.5)).learning_rate.numpy().item()
    0.5
    """

    def __init__(self, opt: keras.optimizers.Optimizer, name: str | None = None) -> None:
        super().__init__(opt, name)

    def before_apply(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Their mean over replicas."""
        return [g if g is None else cross_replica_mean(g) for g in grads]


@keras.saving.register_keras_serializable("tailrace")
class GradientAccumulationOptimizer(Wrapper):
    """Accumulates the gradients of several batches and applies them once.

    Args:
        opt: any Keras optimizer.
        num_mini_batches: the batches of a replica per step; 1 returns `opt` itself.
        dtype: the dtype of the accumulators: None, a dtype, or a function of the variable.
        reduction_method: "sum", "mean" or "running_mean".
        name: the name of the wrapper.

    Raises:
        OptionError: `num_mini_batches` is not a positive integer.

    >>> import tailrace.keras as tk, keras
    >>> sgd = keras.optimizers.SGD(0.5)
    >>> [tk.GradientAccumulationOptimizer(sgd, count) is sgd for count in (1, 4)]
    [True, False]
    """

    def __new__(
        cls,
        opt: keras.optimizers.Optimizer | None = None,
        num_mini_batches: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the optimizer itself if there is nothing to accumulate."""
        # In `__new__`, because the original returns the optimizer itself: programs compare classes.
        if isinstance(num_mini_batches, int) and num_mini_batches == 1:
            return opt
        return super().__new__(cls)

    def __init__(
        self,
        opt: keras.optimizers.Optimizer,
        num_mini_batches: int,
        dtype: DTypeLike = None,
        reduction_method: enum.Enum | str = "sum",
        name: str | None = None,
    ) -> None:
        if isinstance(num_mini_batches, bool) or num_mini_batches < 1:
            raise OptionError(
                f"num_mini_batches must be a positive number. "
                f"Received: num_mini_batches={num_mini_batches!r}."
            )
        super().__init__(opt, name)
        reduction = Reduction.parse(reduction_method)
        self.accumulation = Accumulation(num_mini_batches, dtype=dtype, reduction=reduction)

    def check_alone(self) -> None:
        """Refuse: outside of `fit` there is only one batch."""
        count = self.accumulation.microbatches
        raise OptionError(
            f"A GradientAccumulationOptimizer accumulates in `fit` of a model with Tailrace's trainer "
            f"(tk.adopt(model), or made in the scope of a tk.Strategy), which knows its batches. Here "
            f"it is called with the gradients of one batch, by plain Keras, an overridden `train_step` "
            f"or a loop in strategy.run. Let the optimizer inside count them: "
            f"{type(self.inner_optimizer).__name__}(..., gradient_accumulation_steps={count}), which "
            f"takes their mean."
        )

    def get_config(self) -> dict[str, Any]:
        """The wrapper, how it accumulates, and the optimizer."""
        dtype = self.accumulation.dtype
        if dtype is not None and not _has_name(dtype):
            note_once(
                "A GradientAccumulationOptimizer was saved without the function that chooses dtypes "
                "of accumulators: a loaded one has those of the variables."
            )
        # Names, not objects: Keras writes the configuration as JSON.
        return {
            **super().get_config(),
            "num_mini_batches": self.accumulation.microbatches,
            "dtype": str(jnp.dtype(dtype)) if dtype is not None and _has_name(dtype) else None,
            "reduction_method": str(self.accumulation.reduction),
        }


@keras.saving.register_keras_serializable("tailrace")
class MapGradientOptimizer(Wrapper):
    """Applies a function to the gradients of each batch, before they are accumulated.

    Inside a `LossScaleOptimizer` it sees the gradients of the loss; a step whose gradients are not
    finite, before the function or after it, is skipped. The name of the function is saved.

    Args:
        wrapped_optimizer: any Keras optimizer.
        gradient_mapping_function: `fn(gradient, value_of_the_variable)` returns the new gradient.
        name: the name of the wrapper.

    Raises:
        OptionError: `gradient_mapping_function` is not a function.

    >>> import tailrace.keras as tk, keras
    >>> decay = tk.MapGradientOptimizer(keras.optimizers.SGD(0.5), lambda g, v: g + 0.01 * v)
    >>> decay.learning_rate.numpy().item()
    0.5
    """

    sees_each = True

    def __init__(
        self,
        wrapped_optimizer: keras.optimizers.Optimizer,
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
        pairs = zip(grads, values, strict=True)
        return [g if g is None else self.mapped(g, v) for g, v in pairs]

    def mapped(self, gradient: TensorLike, value: object) -> Any:
        """The function, applied to one pair."""
        return self._map(gradient, value)

    def get_config(self) -> dict[str, Any]:
        """The wrapper, the name of its function, and the optimizer."""
        function = _registered_name(self._map)
        if keras.saving.get_registered_object(function) is not self._map:
            note_once(
                f"A MapGradientOptimizer is saved with the name of its function, {function!r}, which "
                f"is not registered: loading will not find it by itself. Decorate the function with "
                f"@keras.saving.register_keras_serializable()."
            )
        return {**super().get_config(), "gradient_mapping_function": function}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Create it from its configuration; the function is looked up by name."""
        config = dict(config)
        function = config["gradient_mapping_function"]
        found = keras.saving.get_registered_object(function, custom_objects)
        if found is None or isinstance(found, type):  # a callable object goes by its class
            raise OptionError(
                f"A MapGradientOptimizer is saved with the name of its function. Received: "
                f"{function!r}, which is not known here. Register the function with "
                f"@keras.saving.register_keras_serializable() before saving and loading, or give "
                f"custom_objects={{{function!r}: the function}}; or load with compile=False and "
                f"compile again."
            )
        return super().from_config({**config, "gradient_mapping_function": found}, custom_objects)


# -- chains of them -------------------------------------------------------------------------------


def chain_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """An optimizer and those inside it, through wrappers and loss scalers, outermost first."""
    found = [optimizer]
    # Keras' own scaler is no wrapper of ours, but others may be inside and outside of it.
    while isinstance(optimizer, Wrapper | keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
        found.append(optimizer)
    return found


def wrappers_of(optimizer: keras.optimizers.Optimizer) -> list[Wrapper]:
    """The wrappers around an optimizer, outermost first."""
    return [one for one in chain_of(optimizer) if isinstance(one, Wrapper)]


def wrappers_by_scale(optimizer: keras.optimizers.Optimizer) -> tuple[list[Wrapper], list[Wrapper]]:
    """The wrappers outside of a loss scaler, and those inside; without a scaler, all are outside."""
    # Those inside see gradients after they were divided by the scale, those outside before.
    inside = wrappers_of(scaling(optimizer))
    return [one for one in wrappers_of(optimizer) if all(one is not w for w in inside)], inside


def accumulation_of(optimizer: keras.optimizers.Optimizer | None) -> Accumulation | None:
    """The accumulation of a `GradientAccumulationOptimizer`, which must be the outermost wrapper."""
    for number, wrapper in enumerate(wrappers_of(optimizer)):
        if not isinstance(wrapper, GradientAccumulationOptimizer):
            continue
        if number:
            raise OptionError(
                "A GradientAccumulationOptimizer must be the outermost optimizer: others inside it see "
                "what was accumulated. Wrap it the other way round."
            )
        return wrapper.accumulation
    return None


def _has_name(dtype: DTypeLike) -> bool:
    """Whether this is a dtype, and not a function that returns one."""
    try:
        jnp.dtype(dtype)
    except TypeError:
        return False
    return True


def _registered_name(function: Callable[..., Any]) -> str:
    """The registered name of a function, or of the class of a callable object."""
    try:
        return keras.saving.get_registered_name(function)
    except (AttributeError, TypeError):
        return type(function).__name__
