"""What older versions of Keras had: modules under other names, and arguments that are gone.

Arguments are taken where their meaning is plain, and noted once each. Keras itself is hooked, because
its classes are what programs derive from and compare with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.compat.arguments import GradientsAndVariables, OptimizerLike
from tailrace.compat.tensorflow.keras.backend_names import backend
from tailrace.compat.tensorflow.keras.layer_calls import rewrite_calls
from tailrace.compat.tensorflow.namespaces import Namespace
from tailrace.keras.keras_internals import hook


def _module(path: str, *names: Any, **others: Any) -> Namespace:
    """A module that was, with Keras' things in it by their names."""
    return Namespace(f"keras.{path}", {thing.__name__: thing for thing in names} | others)


_optimizers = keras.optimizers
# Classes that moved: programs derive from them by these paths.
_engine = {
    "base_layer": _module("engine.base_layer", keras.layers.Layer),
    "functional": _module("engine.functional", Functional=keras.Model),
    "input_layer": _module("engine.input_layer", keras.layers.InputLayer, Input=keras.Input),
    "sequential": _module("engine.sequential", keras.Sequential),
    "training": _module("engine.training", keras.Model),
}
_by_file = {
    "adadelta": _optimizers.Adadelta,
    "adagrad": _optimizers.Adagrad,
    "adam": _optimizers.Adam,
    "adamax": _optimizers.Adamax,
    "ftrl": _optimizers.Ftrl,
    "gradient_descent": _optimizers.SGD,
    "nadam": _optimizers.Nadam,
    "rmsprop": _optimizers.RMSprop,
}
_files = {name: _module(f"optimizer_v2.{name}", kind) for name, kind in _by_file.items()}
_base = _module(
    "optimizer_v2.optimizer_v2", OptimizerV2=_optimizers.Optimizer, Optimizer=_optimizers.Optimizer
)

_REDUCTIONS = Namespace(
    "keras.losses.Reduction",
    {"AUTO": "sum_over_batch_size", "NONE": "none", "SUM": "sum"}
    | {"SUM_OVER_BATCH_SIZE": "sum_over_batch_size"},
)
"""Keras 3 has texts instead."""

MODULES: dict[str, Any] = {
    "backend": backend(),
    "engine": Namespace("keras.engine", _engine),
    "optimizer_v2": Namespace("keras.optimizer_v2", {**_files, "optimizer_v2": _base}),
    "optimizers_v2": Namespace("keras.optimizers_v2", {**_files, "optimizer_v2": _base}),
}


@functools.cache
def accept() -> None:
    """Let Keras take the arguments it has dropped; once."""
    # Once for the process (`functools.cache`): hooks would otherwise be stacked.
    hook(keras.layers.InputLayer, "__init__", _input)
    hook(keras.optimizers.Optimizer, "__init__", _optimizer)
    hook(keras.optimizers.Optimizer, "apply_gradients", _apply)
    hook(keras.layers.Embedding, "__init__", _embedding)
    hook(keras.layers.Layer, "add_weight", _weight)
    rewrite_calls()
    keras.Model.compiled_loss = property(_compiled_loss)  # type: ignore[attr-defined]
    keras.metrics.Metric.reset_states = _reset_states  # type: ignore[attr-defined]
    keras.optimizers.Optimizer.lr = property(_rate, _set_rate)  # type: ignore[attr-defined]
    keras.losses.Reduction = _REDUCTIONS  # type: ignore[attr-defined]


def _input(plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
    if "input_shape" in kwargs:
        kwargs["shape"] = kwargs.pop("input_shape")
        _note("InputLayer(input_shape=...)", "shape=...")
    shape = args[0] if args else kwargs.get("shape")
    # Programs write `shape=(4)`, which Python reads as 4.
    if isinstance(shape, int):
        _note(f"shape=({shape})", f"shape=({shape},)")
        if args:
            args = ((shape,), *args[1:])
        else:
            kwargs["shape"] = (shape,)
    plain(layer, *args, **kwargs)


def _optimizer(
    plain: Callable[..., Any], optimizer: OptimizerLike, *args: Any, **kwargs: Any
) -> None:
    if "lr" in kwargs:
        _note("lr=", "learning_rate=")
        kwargs["learning_rate"] = kwargs.pop("lr")
        # A rate before it is a subclass's default, which `lr` replaces.
        args = args[1:]
    if "decay" in kwargs:
        decay = kwargs.pop("decay")
        # 0, Keras' default once, means none.
        if decay:
            _note(
                "decay=", "a schedule: keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)"
            )
            rate = args[0] if args else kwargs.get("learning_rate")
            falling = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)
            args, kwargs = args[1:], {**kwargs, "learning_rate": falling}
    plain(optimizer, *args, **kwargs)


def _apply(
    plain: Callable[..., Any],
    optimizer: OptimizerLike,
    grads_and_vars: GradientsAndVariables,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if args or kwargs:
        _note("apply_gradients(grads_and_vars, name, ...)", "apply_gradients(grads_and_vars)")
    return plain(optimizer, grads_and_vars)


def _embedding(
    plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any
) -> None:
    if kwargs.pop("input_length", None) is not None:
        _note("Embedding(input_length=...)", "nothing: the length is that of the input")
    plain(layer, *args, **kwargs)


def _weight(plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """TensorFlow's Keras has the name first, Keras 3 the shape."""
    if args and isinstance(args[0], str):
        _note("add_weight(name, shape)", "add_weight(shape, name=name)")
        name, *rest = args
        kwargs = {**dict(zip(("shape", "dtype", "initializer"), rest, strict=False)), **kwargs}
        args, kwargs = (), {**kwargs, "name": name}
    return plain(layer, *args, **kwargs)


def _compiled_loss(model: keras.Model) -> Any:
    """What `compile` was given as loss, with what layers add."""

    def loss(
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike = None,
        regularization_losses: object = None,
    ) -> Any:
        del regularization_losses  # compute_loss adds them
        return model.compute_loss(y=y_true, y_pred=y_pred, sample_weight=sample_weight)

    return loss


def _reset_states(metric: keras.metrics.Metric) -> None:
    _note("metric.reset_states()", "metric.reset_state()")
    metric.reset_state()


def _rate(optimizer: OptimizerLike) -> Any:
    return optimizer.learning_rate


def _set_rate(optimizer: OptimizerLike, value: TensorLike) -> None:
    optimizer.learning_rate = value


def _note(older: str, newer: str) -> None:
    note_once(f"{older} is an argument of older versions of Keras. Keras 3 has {newer}.")
