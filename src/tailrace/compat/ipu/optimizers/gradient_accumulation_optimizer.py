"""One update for the gradients of several mini-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import DTypeLike
from tailrace.base.messages import note_once
from tailrace.compat.arguments import GradientsAndVariables, OptimizerLike, VariableLike
from tailrace.compat.ipu.errors import FailedPreconditionError, IPUValueError
from tailrace.compat.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import inside, kept, prepared, run_if
from tailrace.compat.ipu.graph.variables import Variable
from tailrace.compat.ipu.optimizers.cross_replica_optimizer import CrossReplicaOptimizer
from tailrace.compat.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tailrace.compat.originals.missing import missing_from
from tailrace.jaxprs.marks import Tag, mark
from tailrace.program.step.accumulation import Accumulation

_Method = GradientAccumulationReductionMethod


class GradientAccumulationOptimizerV2(IpuOptimizer):
    """Applies the inner optimizer once for every `num_mini_batches` passes of a loop.

    Args:
        opt: the optimizer; this one must be the outermost.
        num_mini_batches: how many gradients make an update. The loop around, `loops.repeat`, has a
            multiple of this number of iterations.
        offload_weight_update_variables: noted; the state stays on the device.
        replicated_optimizer_state_sharding: noted, likewise.
        dtype: the dtype of accumulators: None for that of the variable, a dtype, or a function of the
            variable. The inner optimizer gets gradients of that dtype.
        reduction_method: SUM, MEAN or RUNNING_MEAN; or its name.
        name: what it is called.

    Raises:
        IPUValueError: `num_mini_batches` is not positive.
        FailedPreconditionError: `num_mini_batches` is a value of the program; or, when the program is
            compiled, no loop of a fitting length is around it.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(1.0, name="w")
    >>> optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.25), 2)
    >>> def training():
    ...     return ipu.loops.repeat(2, lambda: optimizer.minimize(w * w))
    >>> ipu.ipu_compiler.compile(training)()
    >>> w.numpy().item()  # one update: 1 - 0.25 * (2 + 2)
    0.0
    """

    is_outermost = True

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: DTypeLike = None,
        reduction_method: _Method | str = _Method.SUM,
        name: str = "GradientAccumulationOptimizerV2",
    ) -> None:
        super().__init__(opt, name)
        if isinstance(num_mini_batches, jax.Array):
            raise FailedPreconditionError(
                "Can't have runtime num mini batches for resource update. Give an integer."
            )
        if num_mini_batches < 1:
            raise IPUValueError("num_mini_batches must be a positive number.")
        check_sharding(offload_weight_update_variables, replicated_optimizer_state_sharding)
        method = _Method.parse_reduction_method(reduction_method)
        self._count = num_mini_batches
        self._accumulation = Accumulation(num_mini_batches, dtype, method.reduction)
        self._made = kept()

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Operation:
        """Add to the accumulators; in every `num_mini_batches`-th pass, apply them.

        Args:
            grads_and_vars: pairs of a gradient, or None, and its variable.
            global_step: without effect; `minimize` counts.
            name: what the operation is called.

        Raises:
            FailedPreconditionError: no loop of a fitting length is around it.
        """
        self._check_loop()
        pairs = list(grads_and_vars)
        # Without a gradient there is no accumulator: the inner optimizer gets the None.
        given = [(grad, var) for grad, var in pairs if grad is not None]
        counter, accumulators, _ = self._accumulators([var for _, var in given])
        number = counter.value()
        # The engine's arithmetic, so that loops and pipelines accumulate alike.
        total = self._accumulation.add(
            [accumulator.value() for accumulator in accumulators],
            [grad for grad, _ in given],
            number,
        )
        for accumulator, value in zip(accumulators, total, strict=True):
            accumulator.assign(value)

        def apply() -> None:
            applied = list(zip(total, [var for _, var in given], strict=True))
            missing = [(None, var) for grad, var in pairs if grad is None]
            super(GradientAccumulationOptimizerV2, self).apply_gradients([*applied, *missing])
            for accumulator in accumulators:
                accumulator.assign(jnp.zeros_like(accumulator.value()))

        # With one mini-batch every pass updates: no branch is needed.
        if self._count == 1:
            apply()
        else:
            run_if(number == self._count - 1, apply)
        for accumulator in accumulators:
            # Each replica has its own between updates; when the loop ends, they are empty.
            accumulator.assign(mark(accumulator.value(), Tag("equal at the end")))
        # Back at 0 when the loop ends, whose length is a multiple of the count.
        counter.assign((number + 1) % self._count)
        return Operation(name or self.get_name())

    def _accumulators(self, variables: list[Any]) -> tuple[Variable, list[Variable], Any]:
        def make() -> Any:
            zeros = [
                jnp.zeros(var.shape, self._accumulation.dtype_of(_Described(var)))
                for var in variables
            ]
            made = [Variable(zero, trainable=False, name="accumulator") for zero in zeros]
            return Variable(jnp.int32(0), False, "mini-batches"), made, variables

        # `variables` is kept with them, so that their ids are not used again.
        return prepared(self._made, tuple(map(id, variables)), make)

    def _check_loop(self) -> None:
        length = inside(self.get_name()).loop
        what = (
            f"Detected a gradient accumulation operation with {self._count} number of mini batches"
        )
        if length is None:
            raise FailedPreconditionError(
                "Detected a gradient accumulation operation which is not inside a training loop. Put "
                "it in the body of loops.repeat."
            )
        if length < 0:
            raise FailedPreconditionError(
                f"{what} from an unexpected callsite: a loop whose length only the running program "
                f"knows. Use loops.repeat with an integer."
            )
        if length % self._count:
            raise FailedPreconditionError(
                f"{what} inside a loop with {length} iterations. Use a multiple of {self._count}."
            )


class GradientAccumulationOptimizer(GradientAccumulationOptimizerV2):
    """The older one: always the sum.

    In the original it was right for plain and momentum descent only (`verify_usage` checked that);
    here every inner optimizer runs once per update.

    Args:
        opt: the optimizer inside.
        num_mini_batches: how many gradients make an update.
        verify_usage: without effect.
        name: what it is called.

    Raises:
        IPUValueError: `num_mini_batches` is not positive.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(1.0, name="w")
    >>> optimizer = ipu.optimizers.GradientAccumulationOptimizer(optax.sgd(0.25), 2)
    >>> ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(2, lambda: optimizer.minimize(w * w)))()
    >>> w.numpy().item()
    0.0
    """

    # The original refuses to wrap the second version only.
    is_outermost = False

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "GradientAccumulationOptimizer",
    ) -> None:
        super().__init__(opt, num_mini_batches, name=name)
        self.verify_usage = verify_usage


class CrossReplicaGradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2):
    """`GradientAccumulationOptimizerV2`, with one mean over replicas for each update.

    Args:
        opt: the optimizer inside; this one must be the outermost.
        num_mini_batches: how many gradients make an update.
        offload_weight_update_variables: noted; the state stays on the device.
        replicated_optimizer_state_sharding: noted, likewise.
        dtype: the dtype of accumulators: None, a dtype, or a function of the variable.
        reduction_method: SUM, MEAN or RUNNING_MEAN; or its name.
        name: what it is called.

    Raises:
        IPUValueError: `num_mini_batches` is not positive.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(optax.sgd(0.25), 2)
    >>> optimizer.get_name()
    'CrossReplicaGradientAccumulationOptimizerV2'
    """

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: DTypeLike = None,
        reduction_method: _Method | str = _Method.SUM,
        name: str = "CrossReplicaGradientAccumulationOptimizerV2",
    ) -> None:
        super().__init__(
            CrossReplicaOptimizer(opt),
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )


class CrossReplicaGradientAccumulationOptimizer(GradientAccumulationOptimizer):
    """`GradientAccumulationOptimizer`, with one mean over replicas for each update.

    Args:
        opt: the optimizer inside.
        num_mini_batches: how many gradients make an update.
        verify_usage: without effect.
        name: what it is called.

    Raises:
        IPUValueError: `num_mini_batches` is not positive.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizer(optax.sgd(0.25), 2)
    >>> optimizer.get_name()
    'CrossReplicaGradientAccumulationOptimizer'
    """

    def __init__(
        self,
        opt: OptimizerLike,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "CrossReplicaGradientAccumulationOptimizer",
    ) -> None:
        super().__init__(CrossReplicaOptimizer(opt), num_mini_batches, verify_usage, name)


def check_sharding(offload: bool | None, sharding: bool, *, honoured: bool = False) -> None:
    """Check the two options about the location of an optimizer's state, and apply them."""
    if sharding and offload is False:
        raise IPUValueError(
            "To use replicated_optimizer_state_sharding, optimizer state must be offloaded by using "
            "offload_weight_update_variables."
        )
    if (offload or sharding) and not honoured:
        note_once(
            "offload_weight_update_variables and replicated_optimizer_state_sharding say where the "
            "optimizer's state is; it stays on the device here, and no result changes."
        )


class _Described:
    """A variable as a function that chooses a dtype sees it."""

    def __init__(self, variable: VariableLike) -> None:
        self.name, self.shape = getattr(variable, "name", ""), tuple(variable.shape)
        self.dtype = jnp.dtype(variable.dtype)


__getattr__, __dir__ = missing_from(__name__)
