"""An optimizer around another one, which may be optax's, Keras' or the program's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.base.array_like import TensorLike
from tailrace.compat.arguments import GradientsAndVariables, OptimizerLike, VariableLike
from tailrace.compat.ipu.errors import FailedPreconditionError
from tailrace.compat.ipu.graph.update import Optimizer, as_optimizer
from tailrace.compat.originals.missing import missing_from


class IpuOptimizer(Optimizer):
    """An optimizer around another one, to which it forwards everything; a base class for your own.

    Args:
        opt: the wrapped optimizer.
        name: what it is called.

    Raises:
        IPUTypeError: `opt` is not an optimizer.
        FailedPreconditionError: it wraps an optimizer that accumulates, which must be the
            outermost.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> class Doubled(ipu.optimizers.IpuOptimizer):
    ...     def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    ...         doubled = [(2 * grad, var) for grad, var in grads_and_vars]
    ...         return super().apply_gradients(doubled, global_step, name)
    >>> w = ipu.Variable(2.0, name="w")
    >>> optimizer = Doubled(optax.sgd(0.25))
    >>> ipu.ipu_compiler.compile(lambda: optimizer.minimize(w * w))()
    >>> w.numpy().item()
    0.0
    """

    def __init__(self, opt: OptimizerLike, name: str | None = None) -> None:
        super().__init__(name)
        self._opt = as_optimizer(opt)
        self.wrapped = opt
        if getattr(self._opt, "is_outermost", False):
            raise FailedPreconditionError(
                f"{self.get_name()} wraps a GradientAccumulationOptimizerV2: it must not be "
                f"wrapped by any other optimizer. Put the accumulation outermost."
            )

    @property
    def inner(self) -> Any:
        """The wrapped optimizer, under the original's name."""
        return self._opt

    def compute_gradients(
        self, loss: TensorLike, var_list: Sequence[VariableLike] | None = None, **kwargs: Any
    ) -> Any:
        """The gradients that the inner optimizer computes.

        Args:
            loss: the loss.
            var_list: the variables; None: all trainable ones touched so far.
            **kwargs: for the optimizer inside.
        """
        inner = getattr(self._opt, "compute_gradients", None)
        # A program's own optimizer may have apply_gradients alone.
        if inner is None:
            return super().compute_gradients(loss, var_list, **kwargs)
        return inner(loss, var_list=var_list, **kwargs)

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Any:
        """What the inner optimizer does with the gradients.

        Args:
            grads_and_vars: pairs of a gradient, or None, and its variable.
            global_step: without effect; `minimize` counts.
            name: without effect.
        """
        del global_step, name  # `minimize` counts, once
        return self._opt.apply_gradients(list(grads_and_vars))

    def variables(self) -> list[Any]:
        """The variables of the inner optimizer."""
        if isinstance(self._opt, Optimizer):
            return self._opt.variables()
        # A program's own optimizer, which need not have any.
        return list(getattr(self._opt, "variables", ()))

    def get_slot_names(self) -> list[str]:
        """Those of the inner optimizer."""
        return self._opt.get_slot_names()

    def get_slot(self, var: VariableLike, name: str) -> Any:
        """The variable of a kind that the inner optimizer keeps for `var`.

        Args:
            var: a variable.
            name: the kind.
        """
        return self._opt.get_slot(var, name)


__getattr__, __dir__ = missing_from(__name__)
