"""Layers, an optimizer and a callback that show values inside a model during training.

model ── Outfeed, MaybeOutfeed ──▶ queue ──▶ OutfeedCallback, once an epoch
optimizer ── OutfeedOptimizer ──▶ queue ──▶ OutfeedCallback
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from tailrace.base.array_like import ShapeLike
from tailrace.base.checks import member_named, member_of
from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.feeds.outfeed import OutfeedMode, OutfeedQueue
from tailrace.jaxprs.marks import current_trace
from tailrace.keras.optimizers.wrappers import (
    MapGradientOptimizer,
    Wrapper,
    wrappers_by_scale,
    wrappers_of,
)
from tailrace.keras.programs.variables import names_of
from tailrace.records import filtered_outfeed as native
from tailrace.records.table import print_summary

_silent: contextvars.ContextVar[bool] = contextvars.ContextVar("tailrace_silent", default=False)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A context in which layers send nothing: evaluation must not mix with training's values."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def _sends() -> bool:
    """Whether a program is being traced, so that values can be sent."""
    if _silent.get():
        return False
    # Layers are also called outside of programs: to build them, and by plain Keras.
    try:
        current_trace("an outfeed layer")
    except ProgramError:
        return False
    return True


class MaybeOutfeedQueue(native.MaybeOutfeedQueue):
    """An outfeed that collects named tensors and sends those whose name passes a filter.

    Args:
        outfeed_mode: "all" (the default) or "last"; see `tr.OutfeedQueue`.
        filters: a name is selected if it contains any of these strings. None selects all, and so does
            the single string "none"; an empty list selects nothing.

    Raises:
        OptionError: `outfeed_mode` or `filters` has an invalid value.

    >>> import tailrace.keras as tk
    >>> tk.MaybeOutfeedQueue(filters=["Dense_1"]).selects("Dense_1/out")
    True
    """

    def __init__(
        self, outfeed_mode: enum.Enum | str | None = None, filters: Sequence[str] | None = None
    ) -> None:
        mode = OutfeedMode.ALL if outfeed_mode is None else outfeed_mode
        # By name: in IPU programs it is a member of another enum, whose values differ.
        super().__init__(mode.name if isinstance(mode, enum.Enum) else mode, filters)

    def deliver(self, found: OrderedDict[str, Any], replicas: int) -> None:
        """Queue values that were observed instead of sent, `[k, (R,) *T]` each."""
        leaves, structure = jax.tree.flatten(found)
        # A queue has replicas first; observed values have them after the step.
        if replicas > 1:
            leaves = [np.moveaxis(leaf, 1, 0) for leaf in leaves]
        self.queue.deliver(structure, leaves, None, 1, replicas)
        self._enqueued = True


@keras.saving.register_keras_serializable("tailrace")
class Outfeed(keras.layers.Layer):
    """Sends its inputs to an outfeed, under the layer's name, and returns them.

    Args:
        outfeed_queue: a `tr.OutfeedQueue` for this layer only.
        **kwargs: as for any layer.

    >>> import tailrace.keras as tk
    >>> import tailrace as tr
    >>> import numpy as np
    >>> layer = tk.Outfeed(tr.OutfeedQueue(), name="hidden")
    >>> layer(np.ones(2)).tolist()  # outside of a program nothing is sent
    [1.0, 1.0]
    """

    def __init__(self, outfeed_queue: OutfeedQueue | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.outfeed_queue = outfeed_queue
        self.supports_masking = True

    def call(self, inputs: Tree) -> Any:
        """The inputs."""
        if self.outfeed_queue is None or not _sends():
            return inputs
        # Use the returned value from here on: a mark whose result is unused vanishes where
        # the step is differentiated.
        return self.outfeed_queue.enqueue({self.name: inputs})[self.name]

    def compute_output_shape(self, input_shape: ShapeLike) -> Any:
        """The shape of the inputs."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """The configuration without the queue, which is not saved: a loaded layer sends nothing."""
        return super().get_config()


@keras.saving.register_keras_serializable("tailrace")
class MaybeOutfeed(keras.layers.Layer):
    """Adds its inputs to a `MaybeOutfeedQueue`, under the layer's name, and returns them.

    Args:
        maybe_outfeed_queue: the queue, for all such layers of a model.
        final_outfeed: whether this is the last of them, which sends the selected values.
        **kwargs: as for any layer.

    >>> import tailrace.keras as tk
    >>> import numpy as np
    >>> layer = tk.MaybeOutfeed(tk.MaybeOutfeedQueue(), name="hidden")
    >>> layer(np.ones(2)).tolist()  # outside of a program nothing is sent
    [1.0, 1.0]
    """

    def __init__(
        self,
        maybe_outfeed_queue: native.MaybeOutfeedQueue | None = None,
        final_outfeed: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.maybe_outfeed_queue, self.final_outfeed = maybe_outfeed_queue, final_outfeed
        self.supports_masking = True

    def call(self, inputs: Tree) -> Any:
        """The inputs."""
        queue = self.maybe_outfeed_queue
        if queue is None or not _sends():
            return inputs
        queue.maybe_outfeed(self.name, inputs)
        if self.final_outfeed:
            sent = queue.maybe_enqueue()
            # As in `Outfeed.call`: use the sent value from here on.
            if sent is not None and self.name in sent:
                return sent[self.name]
        return inputs

    def compute_output_shape(self, input_shape: ShapeLike) -> Any:
        """The shape of the inputs."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """The configuration without the queue, which is not saved: a loaded layer sends nothing."""
        return {**super().get_config(), "final_outfeed": self.final_outfeed}


_NO_MODEL = object()
"""In place of the model, whose names are not asked for where there is no queue."""


class OutfeedOptimizerMode(enum.StrEnum):
    """Which gradients an `OutfeedOptimizer` sends.

    `AFTER_COMPUTE`: those of each batch. `BEFORE_APPLY`: those that are applied, after accumulation.
    Strings are accepted; an unknown one is an `OptionError`.

    >>> import tailrace.keras as tk
    >>> tk.OutfeedOptimizerMode("before_apply")
    <OutfeedOptimizerMode.BEFORE_APPLY: 'before_apply'>
    """

    AFTER_COMPUTE = "after_compute"
    BEFORE_APPLY = "before_apply"

    @classmethod
    def _missing_(cls, value: object) -> OutfeedOptimizerMode:
        return member_named(cls, value, "outfeed_optimizer_mode")


@keras.saving.register_keras_serializable("tailrace")
class OutfeedOptimizer(Wrapper):
    """Sends gradients to an outfeed, and delegates the update to another optimizer.

    The queue is not saved: a loaded one sends nothing.

    Args:
        wrapped_optimizer: any Keras optimizer.
        outfeed_queue: a `MaybeOutfeedQueue`; its filter selects among names such as
            `Dense_128/kernel:0_grad`.
        outfeed_optimizer_mode: see `OutfeedOptimizerMode`.
        name: the name of the wrapper.
        model: the trained model, which has the names of the variables.

    Raises:
        OptionError: there is no model, or no such mode.

    >>> import tailrace.keras as tk, keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> queue = tk.MaybeOutfeedQueue(filters=["kernel"])
    >>> tk.OutfeedOptimizer(keras.optimizers.SGD(0.5), queue, model=model).mode
    <OutfeedOptimizerMode.BEFORE_APPLY: 'before_apply'>
    """

    def __init__(
        self,
        wrapped_optimizer: keras.optimizers.Optimizer,
        outfeed_queue: MaybeOutfeedQueue | None,
        outfeed_optimizer_mode: OutfeedOptimizerMode | str = OutfeedOptimizerMode.BEFORE_APPLY,
        name: str = "OutfeedOptimizer",
        model: keras.Model | None = None,
    ) -> None:
        if model is None:
            raise OptionError(
                "The model must be specified if a Keras optimizer is being wrapped: it has the names "
                "of the variables. Give model=."
            )
        super().__init__(wrapped_optimizer, name)
        self.mode = member_of(OutfeedOptimizerMode, outfeed_optimizer_mode)
        self.sees_each = self.mode is OutfeedOptimizerMode.AFTER_COMPUTE
        self._queue = outfeed_queue
        # Not a plain attribute: Keras would treat the model as a part of the optimizer.
        object.__setattr__(self, "_names", lambda: _names_in(model))

    def each(self, grads: list[Any], values: list[Any], variables: list[Any]) -> list[Any]:
        """Send the gradients of one batch."""
        return self._sent(grads, variables)

    def before_apply(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Send the gradients that are applied."""
        after_compute = self.mode is OutfeedOptimizerMode.AFTER_COMPUTE
        return grads if after_compute else self._sent(grads, variables)

    def _sent(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        if self._queue is None or not _sends():
            return grads
        names = self._names()
        keys = [f"{names.get(id(v), v.path)}:0_grad" for v in variables]
        # In the order of computation: the last layer first.
        for key, grad in reversed(list(zip(keys, grads, strict=True))):
            if grad is not None:
                self._queue.maybe_outfeed(key, grad)
        sent = self._queue.maybe_enqueue() or {}
        return [sent.get(key, grad) for key, grad in zip(keys, grads, strict=True)]

    def get_config(self) -> dict[str, Any]:
        """The configuration without the queue and the model, which are not saved."""
        return {**super().get_config(), "outfeed_optimizer_mode": str(self.mode)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Create it from its configuration, without a queue."""
        without: Any = {"outfeed_queue": None, "model": _NO_MODEL}
        return super().from_config({**config, **without}, custom_objects)

    # -- in a pipeline, where several devices compute the gradients of a batch ---------------------

    observes = True

    def wanted(self) -> dict[str, str]:
        """The gradients to observe instead of send: their names, and their keys."""
        if self._queue is None:
            return {}
        keys = {f"grad/{name}": f"{name}:0_grad" for name in reversed(self._names().values())}
        return {name: key for name, key in keys.items() if self._queue.selects(key)}

    def deliver(self, found: dict[str, Any], replicas: int) -> None:
        """Queue observed values as if they had been sent."""
        if found and self._queue is not None:
            self._queue.deliver(OrderedDict(found), replicas)


def _names_in(model: keras.Model) -> dict[int, str]:
    variables = model.trainable_variables
    names = names_of(variables, model.name)
    return {id(v): name for v, name in zip(variables, names, strict=True)}


def scale_is_elsewhere(wrapper: Wrapper) -> str:
    """The message for a wrapper inside a loss scaler, which in a pipeline cannot see each batch."""
    return (
        f"In a pipeline the scale of the loss is known where the loss is computed, not in the stages "
        f"that make the gradients of one batch. Received: {type(wrapper).__name__} inside a "
        f"LossScaleOptimizer (under the policy mixed_float16, Keras' compile puts one around). Put it "
        f"around a LossScaleOptimizer, with auto_scale_loss=False: it then sees gradients of the "
        f"scaled loss. Or change or send the gradients of a step."
    )


def check_wrappers(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse wrappers that a pipeline cannot call for the gradients of each batch.

    Several devices compute them: a gradient is changed on its device, and observed there before, if it
    is to be sent.
    """
    for wrapper in wrappers_by_scale(optimizer)[1]:
        if wrapper.sees_each:
            raise OptionError(scale_is_elsewhere(wrapper))
    sending = None
    for wrapper in wrappers_of(optimizer):  # outermost first; the innermost sees them first
        if not wrapper.sees_each:
            continue
        if wrapper.observes:
            sending = wrapper
        elif not isinstance(wrapper, MapGradientOptimizer):
            raise OptionError(
                f"In a pipeline the gradients of one batch are made by several devices, so "
                f"{wrapper.title} cannot change them all at once. Change one at a time with "
                f"a MapGradientOptimizer, or those of a step: override `apply_gradients`."
            )
        elif sending is not None:
            raise OptionError(
                "In a pipeline an OutfeedOptimizer sends the gradients of each batch as they are "
                "made, before a MapGradientOptimizer inside it changes them. Put it inside the "
                "MapGradientOptimizer, or send those of a step (BEFORE_APPLY)."
            )


class OutfeedCallback(keras.callbacks.Callback):
    """Prints statistics of a queue's values at the end of each epoch.

    Args:
        outfeed_queue: a `MaybeOutfeedQueue`, or a `tr.OutfeedQueue` of an `Outfeed` layer.
        name: a heading.

    >>> import tailrace.keras as tk
    >>> tk.OutfeedCallback(tk.MaybeOutfeedQueue(), name="Activations").on_epoch_end(0)
    <BLANKLINE>
    Activations
    No data enqueued
    """

    def __init__(
        self, outfeed_queue: native.MaybeOutfeedQueue | OutfeedQueue, name: str = "OutfeedCallback"
    ) -> None:
        super().__init__()
        self._queue, self.name = outfeed_queue, name

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Print and empty the queue."""
        print_summary(self.name, self._dequeued(), epoch)

    def _dequeued(self) -> Any:
        if isinstance(self._queue, native.MaybeOutfeedQueue):
            return self._queue.maybe_dequeue()
        if not getattr(self._queue, "enqueued", True) or not len(self._queue):
            return None
        found = self._queue.dequeue()
        return found if isinstance(found, dict) else dict(enumerate(jax.tree.leaves(found)))
