"""Gradients changed by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.base.array_like import TensorLike
from tailrace.compat.arguments import OptimizerLike, VariableLike
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.state import value_of
from tailrace.compat.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tailrace.compat.originals.missing import missing_from


class MapGradientOptimizer(IpuOptimizer):
    """Maps each gradient when it is computed: of every mini-batch, before accumulation.

    Args:
        wrapped_optimizer: the optimizer inside.
        gradient_mapping_function: called as `fn(gradient, value of the variable)`.
        name: what it is called.

    Raises:
        IPUValueError: the mapping is not callable.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(2.0, name="w")
    >>> def clip(gradient, value):
    ...     return gradient.clip(-1, 1)
    >>> optimizer = ipu.optimizers.MapGradientOptimizer(optax.sgd(0.25), clip)
    >>> ipu.ipu_compiler.compile(lambda: optimizer.minimize(w * w))()
    >>> w.numpy().item()
    1.75
    """

    def __init__(
        self,
        wrapped_optimizer: OptimizerLike,
        gradient_mapping_function: Callable[[Any, Any], Any],
        name: str = "MapGradientOptimizer",
    ) -> None:
        super().__init__(wrapped_optimizer, name)
        if not callable(gradient_mapping_function):
            raise IPUValueError(
                f"gradient_mapping_function must be a callable of gradient and variable. Received: "
                f"{gradient_mapping_function!r}."
            )
        self.gradient_mapping_function = gradient_mapping_function

    def compute_gradients(
        self, loss: TensorLike, var_list: Sequence[VariableLike] | None = None, **kwargs: Any
    ) -> Any:
        """The inner optimizer's gradients, mapped.

        Args:
            loss: the loss.
            var_list: the variables; None: all trainable ones touched so far.
            **kwargs: for the optimizer inside.
        """
        # Here and not in `apply_gradients`: around an accumulating optimizer it sees each mini-batch.
        return [
            (grad if grad is None else self.gradient_mapping_function(grad, value_of(var)), var)
            for grad, var in super().compute_gradients(loss, var_list, **kwargs)
        ]


__getattr__, __dir__ = missing_from(__name__)
