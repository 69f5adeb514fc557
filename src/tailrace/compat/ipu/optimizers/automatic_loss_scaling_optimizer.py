"""Automatic loss scaling: the loss is scaled so that float16 gradients neither vanish nor overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tailrace.base.array_like import DTypeLike, TensorLike
from tailrace.compat.arguments import GradientsAndVariables, OptimizerLike, VariableLike
from tailrace.compat.ipu.errors import IPUNotImplementedError, IPUValueError
from tailrace.compat.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tailrace.compat.ipu.graph.state import kept, prepared, run_if
from tailrace.compat.ipu.graph.variables import Variable
from tailrace.compat.ipu.optimizers.gradient_accumulation_optimizer import (
    GradientAccumulationOptimizerV2,
)
from tailrace.compat.ipu.optimizers.ipu_optimizer import IpuOptimizer
from tailrace.compat.originals.missing import missing_from
from tailrace.program.in_program import cross_replica_sum


class ALSOptimizer(IpuOptimizer):
    """Scales the loss, unscales the gradients, and adapts the scale to the size of the gradients.

    Statistics are those of all float16 gradients, over all replicas; the original captured some of
    them. Not inside a pipeline.

    Args:
        opt: the optimizer inside.
        initial_loss_scaling_factor: the initial scale, a power of two.
        update_frequency: the number of updates between adaptations of the scale.
        increase_factor: the factor by which it grows or shrinks, a power of two.
        max_loss_scaling_factor: it stays below this, a power of two.
        accumulate_statistics_over_update_period: whether every update counts, or only those in which
            the scale is adapted.
        ratio_threshold: the share of large gradients above which the scale shrinks.
        captured_grads_only: refused: gradients are not captured here.
        lpf_alpha: the weight of the previous statistics when new ones are added.
        histogram_bin_edge: the magnitude from which a gradient value counts as large.
        name: its name.

    Raises:
        IPUValueError: an argument has a value it may not have.
        IPUNotImplementedError: `captured_grads_only` is set.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(2.0, name="w", dtype="float16")
    >>> optimizer = ipu.optimizers.ALSOptimizer(optax.sgd(0.25), update_frequency=1)
    >>> ipu.ipu_compiler.compile(lambda: optimizer.minimize(w * w))()
    >>> w.numpy().item(), float(optimizer.loss_scaling_factor)
    (1.0, 2.0)
    """

    def __init__(
        self,
        opt: OptimizerLike,
        initial_loss_scaling_factor: float = 1,
        update_frequency: int = 8,
        increase_factor: float = 2,
        max_loss_scaling_factor: float = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 10e-6,
        captured_grads_only: bool = False,
        lpf_alpha: float = 0.0,
        histogram_bin_edge: float = 2**13,
        name: str = "ALSOptimizer",
    ) -> None:
        super().__init__(opt, name)
        if captured_grads_only:
            raise IPUNotImplementedError("captured_grads_only: gradients are not captured here.")
        for what, value in (
            ("initial_loss_scaling_factor", initial_loss_scaling_factor),
            ("increase_factor", increase_factor),
            ("max_loss_scaling_factor", max_loss_scaling_factor),
        ):
            # Scaling by a power of two changes only the exponent, so it rounds nothing.
            if value <= 0 or not math.log2(value).is_integer():
                raise IPUValueError(f"{what} must be a power of two. Received: {value}.")
        if update_frequency <= 0:
            raise IPUValueError(
                f"update_frequency must be nonzero and positive. Received: {update_frequency}."
            )
        if not 0 < ratio_threshold < 1:
            raise IPUValueError(
                f"ratio_threshold must be greater than 0 and less than 1. "
                f"Received: {ratio_threshold}."
            )
        if initial_loss_scaling_factor * increase_factor >= max_loss_scaling_factor:
            raise IPUValueError(
                f"initial_loss_scaling_factor, also times increase_factor, must be less than "
                f"max_loss_scaling_factor. Received: {initial_loss_scaling_factor}, "
                f"{increase_factor}, {max_loss_scaling_factor}."
            )
        self.initial_loss_scaling_factor = float(initial_loss_scaling_factor)
        self.update_frequency, self.increase_factor = update_frequency, float(increase_factor)
        self.max_loss_scaling_factor = float(max_loss_scaling_factor)
        self.accumulate_statistics_over_update_period = accumulate_statistics_over_update_period
        self.ratio_threshold, self.lpf_alpha = ratio_threshold, float(lpf_alpha)
        self.histogram_bin_edge = float(histogram_bin_edge)
        start = self.initial_loss_scaling_factor

        def make() -> tuple[Variable, ...]:
            return (
                Variable(start, False, f"{name}/loss_scaling_factor"),
                Variable(start, False, f"{name}/previous_loss_scaling_factor"),
                Variable(0, False, f"{name}/update_counter"),
                Variable([0.0, 0.0], False, f"{name}/histogram"),
            )

        # Variables cannot be made while a program is traced, and each trace makes this optimizer
        # again: all traces share these.
        made = prepared(kept(), "scaling", make)
        self._scale, self._before, self._counter, self._histogram = made

    # -- state ----------------------------------------------------------------------------------

    @property
    def loss_scaling_factor(self) -> Any:
        """The current scale."""
        return self._scale.value()

    @property
    def previous_loss_scaling_factor(self) -> Any:
        """The scale before its last change."""
        return self._before.value()

    @property
    def update_counter(self) -> Any:
        """The number of updates since the scale was last adapted."""
        return self._counter.value()

    @property
    def histogram(self) -> Any:
        """The numbers of small and of large gradient values."""
        return self._histogram.value()

    @property
    def normalized_histogram(self) -> Any:
        """The fractions of small and of large gradient values."""
        counts = self.histogram
        return counts / jnp.maximum(jnp.sum(counts), 1)

    @property
    def decrease_factor(self) -> float:
        """The factor by which the scale shrinks."""
        return 1 / self.increase_factor

    def reset(self) -> None:
        """Start over."""
        self._scale.assign(self.initial_loss_scaling_factor)
        self._before.assign(self.initial_loss_scaling_factor)
        self._counter.assign(0)
        self._histogram.assign([0.0, 0.0])

    # -- an update ------------------------------------------------------------------------------

    def compute_gradients(
        self, loss: TensorLike, var_list: Sequence[VariableLike] | None = None, **kwargs: Any
    ) -> Any:
        """The gradients of the scaled loss.

        Args:
            loss: the loss.
            var_list: the variables; None: all trainable ones touched so far.
            **kwargs: for the optimizer inside.
        """
        loss = jnp.asarray(loss)
        return super().compute_gradients(
            loss * self.loss_scaling_factor.astype(loss.dtype), var_list, **kwargs
        )

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Any:
        """Unscale and apply the gradients; then adapt the scale, if it is time.

        Args:
            grads_and_vars: pairs of a gradient, or None, and its variable.
            global_step: without effect; `minimize` counts.
            name: what the operation is called.
        """
        pairs = list(grads_and_vars)
        scale, number = self.loss_scaling_factor, self.update_counter
        halves = [grad for grad, _ in pairs if grad is not None and grad.dtype == jnp.float16]
        # As in the original, the scale is not adapted in the first update, unless it is in each.
        due = jnp.asarray(self.update_frequency == 1) | (
            (number > 0) & (number % self.update_frequency == 0)
        )
        # Before they are unscaled: what overflows is the scaled gradient.
        found = self._mixed(self._counted(halves))
        if not self.accumulate_statistics_over_update_period:
            found = jnp.where(due, found, self.histogram)
        self._histogram.assign(found)
        unscaled = [
            (None if grad is None else grad / scale.astype(grad.dtype), var) for grad, var in pairs
        ]
        done = super().apply_gradients(unscaled, global_step, name)
        self._counter.assign(number + 1)
        run_if(due, self._adapt)
        return done

    def _counted(self, grads: list[Any]) -> Any:
        """The numbers of small and of large values, over all replicas."""
        # Not `abs > edge`: NaN counts as large, so that a scale that overflows shrinks.
        large = sum(
            (jnp.sum(~(jnp.abs(g) <= self.histogram_bin_edge)) for g in grads), jnp.int32(0)
        )
        total = sum(g.size for g in grads)
        counts = jnp.stack([total - large, large]).astype(jnp.float32)
        return cross_replica_sum(counts)

    def _mixed(self, counts: TensorLike) -> Any:
        return self.lpf_alpha * self.histogram + (1 - self.lpf_alpha) * counts

    def _adapt(self) -> None:
        scale, counts = self.loss_scaling_factor, self.histogram
        ratio = counts[1] / jnp.maximum(jnp.sum(counts), 1)
        wanted = jnp.where(
            ratio > self.ratio_threshold, scale / self.increase_factor, scale * self.increase_factor
        )
        # Otherwise the old scale stays: it is never below 1, nor beyond its maximum.
        taken = jnp.isfinite(wanted) & (wanted < self.max_loss_scaling_factor) & (wanted >= 1)
        self._before.assign(jnp.where(taken, scale, self.previous_loss_scaling_factor))
        self._scale.assign(jnp.where(taken, wanted, scale))
        self._histogram.assign(jnp.zeros(2, jnp.float32))
        self._counter.assign(0)


class ALSGradientAccumulationOptimizer(GradientAccumulationOptimizerV2):
    """`GradientAccumulationOptimizerV2` around an `ALSOptimizer`.

    Args:
        als_optimizer: the optimizer that scales.
        num_mini_batches: how many gradients make an update.
        offload_weight_update_variables: noted; the state stays on the device.
        replicated_optimizer_state_sharding: noted, likewise.
        dtype: the dtype of accumulators: None, a dtype, or a function of the variable.
        reduction_method: SUM, MEAN or RUNNING_MEAN; or its name.
        name: its name.

    Raises:
        IPUValueError: `als_optimizer` is not an ALSOptimizer, or `num_mini_batches` is not positive.

    >>> import optax
    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(1.0, name="w", dtype="float16")
    >>> scaling = ipu.optimizers.ALSOptimizer(optax.sgd(0.25))
    >>> optimizer = ipu.optimizers.ALSGradientAccumulationOptimizer(scaling, num_mini_batches=2)
    >>> def training():
    ...     return ipu.loops.repeat(2, lambda: optimizer.minimize(w * w))
    >>> ipu.ipu_compiler.compile(training)()
    >>> w.numpy().item()  # 1 - 0.25 * (2 + 2)
    0.0
    """

    def __init__(
        self,
        als_optimizer: ALSOptimizer,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: DTypeLike = None,
        reduction_method: GradientAccumulationReductionMethod
        | str = GradientAccumulationReductionMethod.SUM,
        name: str = "ALSGradientAccumulationOptimizer",
    ) -> None:
        if not isinstance(als_optimizer, ALSOptimizer):
            raise IPUValueError(
                f"als_optimizer must be an ALSOptimizer. Received: {type(als_optimizer).__name__}."
            )
        super().__init__(
            als_optimizer,
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )


__getattr__, __dir__ = missing_from(__name__)
