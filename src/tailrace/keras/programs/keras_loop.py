"""Models that Keras' own loop runs, because they need something that no device program can do."""

from __future__ import annotations

import keras

from tailrace.base.messages import listed
from tailrace.errors import OptionError
from tailrace.keras.keras_internals import layers_in
from tailrace.keras.optimizers.application import overrides


def why_keras_runs(model: keras.Model, mode: str, ours: type) -> str | None:
    """What keeps a model out of a device program; None if nothing does.

    Args:
        model: the model.
        mode: "train", "test" or "predict".
        ours: the class of our own functions.
    """
    name = f"{mode}_function"
    if model.run_eagerly:
        return "run_eagerly=True"
    if not model.jit_compile:
        layers = [repr(layer.name) for layer in layers_in(model) if not layer.supports_jit]
        if layers:
            return f"what cannot be compiled (supports_jit=False): {listed(layers)}"
        return "jit_compile=False"
    if overrides(model, f"make_{name}", keras.Model):
        return f"a `make_{name}` of its own"
    if getattr(model, name) is not None and not isinstance(getattr(model, name), ours):
        return f"a `{name}` of its own"
    return None


def refuse_in_keras_loop(reason: str, checkpoint: object, timeout_s: float | None) -> None:
    """Refuse the options of `fit` that Keras' own loop does not have."""
    received = f"Received: a model with {reason}, which Keras' own loop runs."
    if checkpoint is not None:
        rule = "checkpoint= keeps the state of a program on the device."
        instead = "Leave that out, or use keras.callbacks.BackupAndRestore."
        raise OptionError(f"{rule} {received} {instead}")
    if timeout_s is not None:
        rule = "timeout_s= limits the waits of a program on the device."
        raise OptionError(f"{rule} {received} Leave one of them out.")
