"""`tf.train.ExponentialMovingAverage`: variables that follow others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import DTypeLike, ShapeLike, TensorLike
from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.deferred import Operation, deferred_call, describing
from tailrace.compat.ipu.graph.named_variables import get_variable, trainable_variables
from tailrace.compat.ipu.graph.state import value_of


class ExponentialMovingAverage:
    """Running means of variables.

    Args:
        decay: how much of a mean stays in an update.
        num_updates: a number of steps; in the first ones less stays.
        zero_debias: refused if True.
        name: the end of the means' names.

    Raises:
        IPUValueError: `zero_debias` is True.
    """

    def __init__(
        self,
        decay: TensorLike,
        num_updates: TensorLike = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        if zero_debias:
            raise IPUValueError("ExponentialMovingAverage is available without zero_debias=True.")
        self._decay, self._updates, self.name = decay, num_updates, name

    def apply(self, var_list: Sequence[VariableLike] | None = None) -> Any:
        """Move the means: an operation for a session; in a program it is done at once."""
        found = list(trainable_variables() if var_list is None else var_list)
        # Made now and not in the session: the initializer of the graph must find the means.
        pairs = [(self.average(variable), variable) for variable in found]
        if describing():
            return deferred_call(self._move, (pairs, self._updates), {})
        return self._move(pairs, self._updates)

    def average(self, var: VariableLike) -> Any:
        """The mean of a variable; it begins with its value."""
        # Not the array: the mean begins with what the variable has when it is initialized.
        return get_variable(self.average_name(var), initializer=_Value(var), trainable=False)

    def average_name(self, var: VariableLike) -> str:
        """What the mean is called."""
        return f"{var.name}/{self.name}"

    def _move(self, pairs: Sequence[tuple[Any, Any]], updates: TensorLike) -> Operation:
        decay: Any = self._decay
        if updates is not None:
            count = jnp.asarray(
                value_of(updates) if hasattr(updates, "assign") else updates, "float32"
            )
            # TensorFlow's rule, by which means follow quickly in the first steps.
            decay = jnp.minimum(decay, (1 + count) / (10 + count))
        for mean, variable in pairs:
            mean.assign_sub((1 - decay) * (value_of(mean) - value_of(variable)))
        return Operation(self.name)


class _Value:
    """The value that a variable has when it is asked for."""

    def __init__(self, variable: VariableLike) -> None:
        self._variable = variable

    def __call__(self, shape: ShapeLike, dtype: DTypeLike) -> Any:
        del shape, dtype
        return value_of(self._variable)
