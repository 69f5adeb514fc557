"""`tensorflow.python.ipu` on TensorFlow itself: one device, and Keras' own training.

Replicas are accumulated batches: each takes a batch of its own, and an update has the mean of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from typing import Any

import keras as _keras
import numpy as np
import tensorflow as _tf

from benchmarks.originals.plain.anything import Anything
from benchmarks.originals.reports import report


class _System:
    """What decides how many replicas there are: devices, and stages of a pipeline."""

    devices = stages = 1

    def replicas(self, pipelined: bool) -> int:
        """The devices divided by the stages; one if a pipeline does not say its stages here."""
        return 1 if pipelined and self.stages == 1 else max(1, self.devices // self.stages)


system = _System()


class IPUConfig(Anything):
    """The devices of the configuration; everything else has no effect."""

    auto_select_ipus: Any = 1

    def configure_ipu_system(self) -> None:
        """Take the devices; the model that follows says its stages."""
        asked = self.auto_select_ipus
        system.devices = asked[0] if isinstance(asked, list | tuple) else asked
        system.stages = 1


class _Config(Anything):
    IPUConfig = IPUConfig


class _Keras(Anything):
    def PipelineStage(self, number: int) -> Any:
        """Count the stages."""
        system.stages = max(system.stages, number + 1)
        return contextlib.nullcontext()


class IPUStrategy:
    """A scope that changes nothing; functions run as they are written."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.num_replicas_in_sync = 1

    def scope(self) -> Any:
        """Nothing."""
        return contextlib.nullcontext()

    def run(self, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; operation by operation, because queues are lists."""
        _tf.config.run_functions_eagerly(True)
        try:
            out = fn(*args, **(kwargs or {}))
        finally:
            _tf.config.run_functions_eagerly(False)
        report("returned", out)
        return out


class IPUOutfeedQueue:
    """A list."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._elements: list[Any] = []

    def enqueue(self, element: Any) -> None:
        """Append, when the program runs."""
        leaves = _tf.nest.flatten(element)

        def append(*values: Any) -> None:
            self._elements.append(_tf.nest.pack_sequence_as(element, [v.numpy() for v in values]))

        _tf.py_function(append, leaves, [])

    def dequeue(self, *_: Any) -> Any:
        """All elements so far, stacked."""
        found, self._elements = self._elements, []
        if not found:
            return {}
        stacked = _tf.nest.map_structure(lambda *values: np.stack(values), *found)
        report("dequeued", stacked)
        return stacked


PopDistStrategy = IPUStrategy
ipu_strategy = types.SimpleNamespace(IPUStrategy=IPUStrategy)
ipu_outfeed_queue = types.SimpleNamespace(IPUOutfeedQueue=IPUOutfeedQueue)
config, keras = _Config(), _Keras()
ipu_scope = ops = pipelining_ops = utils = Anything()


def _accumulate(model: Any, gradient_accumulation_steps_per_replica: int = 1, **_: Any) -> None:
    """Keras' optimizers accumulate gradients themselves."""
    model.__dict__["_accumulated"] = gradient_accumulation_steps_per_replica
    model.__dict__["_pipelined"] = True
    _apply_to(model, getattr(model, "optimizer", None))


def _assign(model: Any, assignment: Any) -> None:
    """The stages of the layers, by number."""
    numbers = [one for one in assignment if isinstance(one, int)]
    system.stages = max([system.stages, *(number + 1 for number in numbers)])
    _apply_to(model, getattr(model, "optimizer", None))


def _apply_to(model: Any, optimizer: Any) -> None:
    count = model.__dict__.get("_accumulated", 1)
    whole = count * system.replicas(model.__dict__.get("_pipelined", False))
    if optimizer is not None and whole > 1 and not optimizer.built:
        # Keras takes the mean of the gradients, the original the sum unless it is asked otherwise,
        # and over replicas the mean.
        optimizer.gradient_accumulation_steps = whole
        clipped = optimizer._clip_gradients
        optimizer._clip_gradients = lambda grads: clipped([count * grad for grad in grads])


def install() -> None:
    """Let TensorFlow and Keras 3 take what programs of older versions say."""
    _tf.keras = _keras
    _keras.ipu = keras
    without(_tf, "function", "experimental_compile")
    without(_keras.layers.Embedding, "__init__", "input_length")
    _whole_shapes()
    _methods(_keras.Model)


def without(owner: Any, name: str, dropped: str) -> None:
    """Drop an argument that is gone."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(dropped, None)
        return plain(*args, **kwargs)

    called.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]  # Keras reads it
    setattr(owner, name, called)


def _whole_shapes() -> None:
    """Take `shape=(80)` for `shape=(80,)`."""
    plain = _keras.layers.InputLayer.__init__

    def made(layer: Any, shape: Any = None, *args: Any, **kwargs: Any) -> None:
        plain(layer, (shape,) if isinstance(shape, int) else shape, *args, **kwargs)

    _keras.layers.InputLayer.__init__ = made


def _methods(model: Any) -> None:
    """The methods of the original's models; its optimizers in `compile`."""
    model.set_pipelining_options = model.set_gradient_accumulation_options = _accumulate
    model.set_pipeline_stage_assignment = _assign
    for name in (
        "set_asynchronous_callbacks",
        "set_infeed_queue_options",
    ):
        setattr(model, name, lambda *_, **__: None)
    model.get_pipeline_stage_assignment = lambda *_: []
    compiled = model.compile

    def compile(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        wrapped = getattr(optimizer, "_wrapped_optimizer", optimizer)
        compiled(self, wrapped, *args, **{**kwargs, "jit_compile": False})  # XLA has no queues
        _apply_to(self, self.optimizer)

    model.compile = compile
