"""`IPUStrategy`: models made in its scope train on the devices that are configured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.base.trees import Tree
from tailrace.compat.arguments import OptimizerLike
from tailrace.compat.ipu import config
from tailrace.compat.ipu.errors import IPURuntimeError, IPUTypeError, IPUValueError
from tailrace.compat.ipu.graph.update import Optimizer
from tailrace.compat.ipu.ipu_infeed_queue import IPUOwnedIterator
from tailrace.compat.ipu.ops.cross_replica_ops import cross_replica_mean, cross_replica_sum
from tailrace.compat.ipu.scopes import ipu_scope, ordinal_of
from tailrace.compat.ipu.strategy.batch_rules import check_enough, per_replica
from tailrace.compat.ipu.strategy.calls import Calls, is_array
from tailrace.compat.ipu.strategy.dataset_iteration import datasets_are_infeeds
from tailrace.compat.ipu.strategy.in_keras import InKeras, keras_optimizer_in
from tailrace.compat.ipu.strategy.older_steps import adapt
from tailrace.compat.nests import leaves
from tailrace.compat.originals.missing import missing_from
from tailrace.keras.adopt import take_over
from tailrace.keras.data.batch_counts import Counts
from tailrace.keras.keras_internals import hook
from tailrace.keras.scopes import Scopes
from tailrace.keras.settings.options import Settings
from tailrace.keras.strategy import Strategy

if TYPE_CHECKING:
    import keras


class IPUStrategyV1(Strategy):
    """Models made in its scope train on the devices that are configured; also named `IPUStrategy`.

    The number of replicas follows from the devices and the stages of a model. Optimizers receive the
    mean of the gradients over replicas. Functions given to `run` compute with `keras.ops`, `jax.numpy`
    or the operations of `tailrace.compat.tensorflow`.

    Args:
        ipu_device: the logical device, `"/device:IPU:0"`.
        cpu_device: where the original made initial values; without effect.
        enable_dataset_iterators: whether `iter(dataset)` of a `tf.data.Dataset`, written in the
            scope, gives an infeed for `run`.
        enable_keras_extensions: whether models made in the scope are trained by the engine.

    Raises:
        IPUValueError: `ipu_device` does not name a logical device.

    >>> import numpy as np
    >>> from tailrace.compat import ipu
    >>> strategy = ipu.ipu_strategy.IPUStrategy()
    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> def step(x):
    ...     outfeed.enqueue(x)
    ...     return x * 2
    >>> float(strategy.run(step, args=[np.float32(3)]))
    6.0
    >>> outfeed.dequeue().tolist()
    [3.0]
    """

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        cpu_device: str = "/device:CPU:0",
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        super().__init__()
        self._device, self._cpu = ipu_device, cpu_device
        self._ordinal = ordinal_of(ipu_device)
        self._iterators, self._extensions = enable_dataset_iterators, enable_keras_extensions
        self._calls = Calls(around=_averaging_gradients)

    @contextlib.contextmanager
    def scope(self) -> Iterator[IPUStrategyV1]:
        """Models made inside train on the engine; datasets iterated inside are infeeds."""
        iterators = (
            datasets_are_infeeds(IPUOwnedIterator) if self._iterators else contextlib.nullcontext()
        )
        with ipu_scope(self._device), iterators, super().scope():
            yield self

    def adopt(self, model: keras.Model) -> None:
        """Give a model the engine's trainer, on as many replicas as the devices allow.

        Args:
            model: a Keras model.

        Raises:
            IPUValueError: the strategy is for another logical device than the first.
        """
        if not self._extensions:
            return
        # The trainer takes the devices of the process, which are those of the first logical device.
        if self._ordinal:
            raise IPUValueError(
                f"Keras models train on the first logical device. This strategy is for "
                f"{self._device!r}: configure the devices for one, or use strategy.run."
            )
        settings = take_over(model, self.replicas, _Settings)
        settings.options.offload_optimizer_state = None  # where it pays, as in the original

    @property
    def program_count(self) -> int:
        """How many programs `run` has made; arrays of one form share a program."""
        return len(self._calls)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        """Run a device function in one program.

        Args:
            fn: the function; of a `tf.function`, the function inside. It may call `next(iterator)`,
                `enqueue`, loops, models and optimizers of Keras. TensorFlow's operations are not
                available in it: use `keras.ops`.
            args: its arguments: arrays (TensorFlow's and PyTorch's too), and other objects
                (iterators, queues, models).
            kwargs: the same by name.
            options: without effect.

        Raises:
            IPUValueError: `fn` is not a function.
            IPUTypeError: an argument is float64.
        """
        del options
        if not callable(fn):
            raise IPUValueError(f"strategy.run takes a function. Received: {type(fn).__name__}.")
        fn, kwargs = _own_function(fn), kwargs or {}
        # As the original does, where JAX would make it float32 without a word.
        for value in (*args, *kwargs.values()):
            if is_array(value) and np.dtype(value.dtype) == np.float64:
                raise IPUTypeError("Unsupported data type for input: float64. Cast it to float32.")
        with ipu_scope(self._device):
            out = self._calls(fn, args, kwargs)
        # `run` returns a single value by itself; a compiled program returns a list, as a session did.
        return out[0] if isinstance(out, list) and len(out) == 1 else out

    def experimental_run_v2(self, *_: Any, **__: Any) -> Any:
        """Refused, as in the original: use `run`.

        Raises:
            IPURuntimeError: always.
        """
        raise IPURuntimeError("experimental_run_v2 is not available: use strategy.run.")

    def all_reduce(self, reduce_op: object, value: object) -> Any:
        """The sum or the mean of a value over replicas, inside a device function.

        Args:
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
            value: the value.

        Raises:
            IPUValueError: the operation is neither SUM nor MEAN.
        """
        # By name: TensorFlow, whose class this may be, is not imported.
        name = str(getattr(reduce_op, "name", reduce_op)).upper()
        if name not in ("SUM", "MEAN"):
            raise IPUValueError(f"Unsupported reduce op: {reduce_op!r}. Use SUM or MEAN.")
        return cross_replica_sum(value) if name == "SUM" else cross_replica_mean(value)


IPUStrategy = IPUStrategyV1
"""The name that programs use."""


class _Settings(Settings):
    """Settings of a model by the original's rules.

    Its replicas are the devices divided by those that one copy takes; epochs are of known length, and
    made of whole executions; a step at a time is refused.
    """

    _asking = False

    @property
    def replicas(self) -> int:  # type: ignore[override]
        """How many copies train side by side."""
        count, shards = len(config.group()), self._shards()
        if count % shards:
            raise IPUValueError(
                f"Current device has {count} IPUs attached, however the current model requires a "
                f"multiple of {shards} IPUs."
            )
        return count // shards

    @replicas.setter
    def replicas(self, value: int) -> None:
        del value  # a saved model brings the number it had; here the devices say

    def counts(
        self, steps: int | None, size: int | None, execution: int, epochs: int = 1
    ) -> Counts:
        """How many batches an epoch and an execution take, or why they cannot."""
        found = per_replica(steps, size, execution, self.replicas)
        if steps is not None:
            # With as many steps as batches, each epoch reads the dataset from its beginning.
            check_enough(steps * epochs, size, restarts=steps == size)
        return found

    def saved(self) -> dict[str, Any]:
        """What is saved with the model; of replicas, one: the devices say when it is loaded."""
        return {"replicas": 1, "options": self.options.saved()}

    def own_optimizer(self, optimizer: OptimizerLike) -> Any:
        """An optimizer of programs around one of Keras as one of Keras; others are refused.

        So is one with a method that would never be called.
        """
        kind = type(optimizer)
        if isinstance(optimizer, Optimizer):
            inside = keras_optimizer_in(optimizer)
            if inside is not None:
                return InKeras(optimizer, inside)
            raise IPUValueError(
                f"ipu.optimizers are for programs of ipu_compiler.compile and strategy.run. Received "
                f"for a Keras model: {kind.__name__}. Use ipu.keras.optimizers; to scale the loss, "
                f"keras.optimizers.LossScaleOptimizer."
            )
        # Keras 3 has no `minimize`: an optimizer that has it defines it, and `fit` would not call it.
        if hasattr(kind, "minimize"):
            raise IPUValueError(
                f"The optimizer must not override OptimizerV2.minimize: an execution computes the "
                f"gradients itself and gives them to apply_gradients. Received: {kind.__name__}. "
                f"Override apply_gradients, apply or update_step."
            )
        return optimizer

    def check_compiled(self, run_eagerly: bool, jit_compile: bool) -> None:
        """Refuse to run what was asked to be run step by step; take steps of another Keras."""
        adapt(self.model)
        if run_eagerly:
            raise IPUValueError(
                "Keras models cannot run eagerly when using an IPUStrategy: an execution is one "
                "program on the device. Received: run_eagerly=True. Leave it out, or use a model "
                "outside the scope."
            )
        if not jit_compile:
            raise IPUValueError(
                "An execution is one compiled program. Received: jit_compile=False. Leave it out, or "
                "use a model outside the scope."
            )

    def check_keras_loop(self, reason: str) -> None:
        """Refuse it: Keras' own loop does not train on the device."""
        raise IPUValueError(
            f"The model {self.model.name!r} has {reason}: Keras' own loop would run it, not a program "
            f"on the device. Leave it out, or use the model outside the scope."
        )

    def _shards(self) -> int:
        if self._asking:  # finding the stages describes the model, which asks for the replicas
            return 1
        self._asking = True
        try:
            stages = self.stages
        finally:
            self._asking = False
        if stages is None:
            return 1
        used = self.options.pipelining_device_mapping
        return config.shards_of(max(leaves(stages) if used is None else used, default=0))


_averaging = Scopes("ipu_averaging_gradients")


def _averaging_gradients() -> contextlib.AbstractContextManager[None]:
    """Keras' optimizers get the mean of each gradient over replicas while a function is traced."""
    _hook_optimizers()
    return _averaging.opened(True)


@functools.cache
def _hook_optimizers() -> None:
    """Let Keras' optimizers ask whether gradients are averaged; once."""
    import keras  # not at the top: `tailrace.keras` has set its backend by now

    def apply(
        plain: Callable[..., Any],
        optimizer: OptimizerLike,
        grads: Tree,
        trainable_variables: Tree = None,
    ) -> Any:
        if _averaging.innermost():
            # In a hand-written loop nothing else averages them; `fit` has its own step, in which
            # the engine does.
            grads = [None if grad is None else cross_replica_mean(grad) for grad in grads]
        return plain(optimizer, grads, trainable_variables)

    hook(keras.optimizers.Optimizer, "apply", apply)


def _own_function(fn: Callable[..., Any]) -> Any:
    """The function inside of a `tf.function`: what compiles it is the strategy."""
    inner = getattr(fn, "python_function", None)
    is_foreign = type(fn).__module__.split(".")[0] == "tensorflow"
    return inner if callable(inner) and is_foreign else fn


__getattr__, __dir__ = missing_from(__name__)
