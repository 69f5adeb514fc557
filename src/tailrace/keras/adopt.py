"""Models get Tailrace's trainer: a class in front of their own, with everything else as it was."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tailrace.errors import OptionError, ProgramError
from tailrace.keras.model import TailraceModel
from tailrace.keras.settings.options import Options, Settings

_CLASSES: dict[type, type] = {}
_SAVED_AS = ("tailrace", "Adopted")
_OURS = ("make_train_function", "make_test_function", "make_predict_function")


def adopt(model: Any, replicas: int = 1) -> Any:
    """Give a Keras model Tailrace's trainer; returns the same model.

    Everything about it stays: layers, weights, name, what it was compiled with. `fit`, `evaluate`
    and `predict` then run `steps_per_execution` batches in one program on the device.

    Args:
        model: a Sequential, Functional or subclassed model, built or not.
        replicas: how many copies of it train side by side, each on batches of its own.

    Example:
        >>> import keras, numpy as np, tailrace.keras as tk
        >>> model = tk.adopt(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
        >>> model.compile("sgd", "mse", steps_per_execution=4)
        >>> x = np.ones((32, 3), "float32")
        >>> history = model.fit(x, x[:, :1], batch_size=4, verbose=0)
        >>> sorted(history.history)
        ['loss']
    """
    if not isinstance(model, keras.Model):
        raise OptionError(
            f"tk.adopt takes a Keras model: Sequential, Functional or a subclass of keras.Model. "
            f"Received: {type(model).__name__}."
        )
    if isinstance(model, TailraceModel):
        model.tailrace.replicas = replicas
        model.forget_programs()
        return model
    take_over(model, replicas)
    return model


def take_over(model: Any, replicas: int) -> None:
    """Put Tailrace's class in front of that of a model."""
    plain = type(model)
    for name in _OURS:
        if getattr(plain, name) is not getattr(keras.Model, name):
            raise ProgramError(
                f"The function `{name}` for the model {plain.__name__!r} has been overridden. It is "
                f"what Tailrace replaces, so it would be skipped in silence. Remove it, or use the "
                f"model outside the scope of a tk.Strategy."
            )
    model.__dict__["_tailrace_settings"] = Settings(model, replicas)
    model.__class__ = _class_for(plain)
    if getattr(model, "compiled", False):
        model.forget_programs()


def _class_for(plain: type) -> type:
    if plain not in _CLASSES:
        made = type(
            plain.__name__,
            (Adopted, plain),
            {"__module__": plain.__module__, "__doc__": plain.__doc__, "_plain": plain},
        )
        # All of them are saved under one name: which class it was is part of the configuration.
        keras.saving.register_keras_serializable(*_SAVED_AS)(made)
        _register()
        _CLASSES[plain] = made
    return _CLASSES[plain]


class Adopted(TailraceModel):
    """How a model with Tailrace's trainer is saved and loaded."""

    _plain: type = keras.Model

    def get_config(self) -> dict[str, Any]:
        """The model's own configuration, and what it is set to."""
        config = super().get_config()  # type: ignore[misc]
        plain = type(self)._plain
        config["tailrace"] = {
            "class": plain.__name__,
            "module": plain.__module__,
            "registered": keras.saving.get_registered_name(plain),
            "replicas": self.tailrace.replicas,
            "options": self.tailrace.options.saved(),
        }
        return config

    def compile_from_config(self, config: Any) -> None:
        """Compile as a saved model was compiled."""
        if type(self)._plain.compile is not keras.Model.compile:
            super().compile_from_config(config)  # type: ignore[misc]
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:  # type: ignore[attr-defined]
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make the model again, with its options."""
        config = dict(config)
        kept = config.pop("tailrace", None)
        plain = cls._plain if kept is None else _found(kept)
        try:
            model = plain.from_config(config, custom_objects=custom_objects)
        except TypeError:
            model = plain.from_config(config)
        replicas = 1 if kept is None else kept["replicas"]
        model = adopt(model, replicas)
        if kept is not None:
            model.tailrace.options = Options.restored(kept["options"])
        return model


def _found(kept: dict[str, Any]) -> Any:
    """The class that a saved model had."""
    if kept["class"] == "Sequential":
        return keras.Sequential
    if kept["class"] in ("Functional", "Model"):
        return functional_class()
    found = keras.saving.get_registered_object(kept["registered"])
    if found is None:
        raise ProgramError(
            f"The saved model is a {kept['class']} of {kept['module']}, which is not known here. "
            f"Import it, register it with @keras.saving.register_keras_serializable(), or give "
            f"custom_objects."
        )
    return getattr(found, "_plain", found)


@functools.cache
def functional_class() -> type:
    """The class of Functional models, which Keras does not name in public."""
    inputs = keras.Input((1,), name="of_a_functional_model")
    made = type(keras.Model(inputs, inputs, name="a_functional_model"))
    return getattr(made, "_plain", made)


def _register() -> None:
    keras.saving.register_keras_serializable(*_SAVED_AS)(Adopted)


_register()
